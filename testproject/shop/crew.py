"""The shop's processes, as their parent sees them.

Each is a child ``manage.py shop_till``. Both sides speak JSON, one message per line.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from django.conf import settings
from django.db import connection

#: No step lasts longer than this, in seconds, on the slowest machine.
DEADLINE = 30.0


class Unexpected(Exception):
    """Something didn't happen as it should have."""


@dataclass(frozen=True, slots=True)
class Event:
    """What a process said, and when, by ``time.monotonic()``."""

    till: Till
    name: str
    data: dict[str, Any]
    at: float

    def __str__(self) -> str:
        return f"{self.name!r} from {self.till}"


class Till:
    """A process that sells; it does one job after another."""

    def __init__(self, events: queue.SimpleQueue[Event | Exception]) -> None:
        self._events = events
        self._child = subprocess.Popen(
            [
                *(sys.executable, str(settings.BASE_DIR / "manage.py"), "shop_till"),
                *("--database-name", str(connection.settings_dict["NAME"])),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C is for the parent, which ends its children itself.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __str__(self) -> str:
        return f"process {self.pid}"

    @property
    def pid(self) -> int:
        return self._child.pid

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            data = json.loads(line)
            name = data.pop("event")
            self._events.put(Event(self, name, data, time.monotonic()))
        self._events.put(Event(self, "gone", {}, time.monotonic()))

    def tell(self, word: str, **data: Any) -> None:
        """Send one message: the name of a job, or what a job waits for."""
        assert self._child.stdin is not None
        try:
            self._child.stdin.write(json.dumps({"word": word, **data}) + "\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            raise Unexpected(f"The {self} ended.") from None

    def pause(self) -> None:
        """Send SIGSTOP and wait until the process stands still."""
        os.kill(self.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Send SIGKILL and wait for the process's end."""
        self._child.kill()
        self._child.wait()
        self._reader.join()
        for pipe in (self._child.stdin, self._child.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()


class Crew:
    """Some processes and what they say; in a ``with`` block all are ended."""

    def __init__(self) -> None:
        self.tills: list[Till] = []
        self._events: queue.SimpleQueue[Event | Exception] = queue.SimpleQueue()

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill all processes."""
        while self.tills:
            self.dismiss(self.tills[-1])

    def hire(self) -> Till:
        """Start one more process."""
        till = Till(self._events)
        self.tills.append(till)
        return till

    def dismiss(self, till: Till) -> None:
        """Kill a process."""
        till.kill()
        self.tills.remove(till)

    def interrupt(self, error: Exception) -> None:
        """Raise an exception where somebody waits for an event, now or next.

        For signal handlers: raised by them, it would hit a database driver in the
        middle of a statement.
        """
        self._events.put(error)

    def next(self, within: float = DEADLINE) -> Event:
        """Return what one of the processes says next.

        Raises:
            Unexpected: All were silent for so long, or one failed.
        """
        try:
            event = self._listen(within)
        except queue.Empty:
            raise Unexpected(f"Nothing happened for {within:g} s.") from None
        if event.name == "failed":
            raise Unexpected(f"In {event.till}: {event.data['error']}")
        if event.name == "gone":
            raise Unexpected(f"The {event.till} ended.")
        return event

    def _listen(self, within: float) -> Event:
        until = time.monotonic() + within
        while True:
            event = self._events.get(timeout=max(0.0, until - time.monotonic()))
            if isinstance(event, Exception):
                raise event
            # Those that were dismissed may have had a last word.
            if event.till in self.tills:
                return event

    def expect(self, till: Till | None, name: str, within: float = DEADLINE) -> Event:
        """Return the next event, which must be this one, from this process or any."""
        event = self.next(within)
        if event.name != name or event.till is not (till or event.till):
            raise Unexpected(f"{event} came instead of {name!r} from {till or 'any'}.")
        return event

    def expect_silence(self, during: float) -> None:
        """Wait; nobody may say anything."""
        with suppress(queue.Empty):
            event = self._listen(during)
            raise Unexpected(f"{event} came too early.")
