"""The test's side of ``tests.faults.crew_worker``: children that faults befall."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.faults.history import WHATS, Event
from tests.faults.scale import LATE
from tests.support.processes import names_of_databases, resume, stop
from tests.support.timing import DEADLINE, starved

ROOT = Path(__file__).resolve().parent.parent.parent

Told = dict[str, Any]

#: A database error; a grant that was lost at its release, or left to lapse.
ERRORS = frozenset({"database", "unreleased", "lapsed"})


class Pause(NamedTuple):
    """A time for which a process was stopped, by ``time.monotonic()``."""

    #: When it was told to stop, and when it stood.
    told: float
    stood: float
    resumed: float
    #: How long it had been without a processor when it was told to go on.
    starved: float = 0.0


class Member:
    """One child: what it told, and what can be done to it."""

    def __init__(self, crew: Crew, who: int) -> None:
        self.crew = crew
        self.who = who
        self.pid = 0
        self.told: list[Told] = []
        self.done = False
        self.ended = False
        self.pauses: list[Pause] = []
        #: When it was told to stop, and when it stood.
        self._stopped: tuple[float, float] | None = None

    def saw(self, event: str) -> Told | None:
        """Return the last event of this name, or ``None``."""
        for told in reversed(self.told):
            if told["event"] == event:
                return told
        return None

    def expect(self, event: str, within: float = DEADLINE) -> Told:
        """Wait for an event of this name."""
        self.crew.until(
            lambda: self.saw(event) or self.saw("error") or self.ended, within, event
        )
        told = self.saw(event)
        assert told is not None, (event, self.told[-6:])
        return told

    def stop(self) -> None:
        """Suspend it and wait until it stands."""
        told = time.monotonic()
        stop(self.pid)
        self._stopped = told, time.monotonic()

    def resume(self) -> None:
        if self._stopped is not None:
            pause = Pause(*self._stopped, time.monotonic(), starved(self.pid))
            self.pauses.append(pause)
            self._stopped = None
        if not self.ended:
            resume(self.pid)

    def was_stopped(self, since: float, until: float) -> bool:
        """Tell whether it was stopped for a part of that time."""
        return any(
            pause.told <= until and since <= pause.resumed for pause in self.pauses
        )

    def deadline(self, loss: Told) -> float | None:
        """Return the moment by which it had to tell of a loss, if that is known.

        Who was stopped at that moment, or when about to tell, can tell when it goes on,
        and later if it then is without a processor. Who was giving it back learns of it
        from the answer, however late that comes.
        """
        deadline: float | None = loss["deadline"]
        for told, stood, resumed, before in self.pauses:
            if not loss["before"] <= told <= resumed <= loss["after"]:
                continue
            # Until it stood, it may have renewed the lease.
            over = resumed - stood >= loss["lease"]
            if over if deadline is None else told - LATE <= deadline <= resumed:
                # Threads that have ended no longer count.
                deadline = resumed + max(0.0, loss["starved"] - before)
        given_back = loss["given_back"]
        if deadline is not None and given_back is not None and given_back <= deadline:
            return None
        return deadline

    def kill(self) -> float:
        """End it with SIGKILL; return when."""
        if not self.ended:
            # Its parent waits for it, so that the id is not used again before.
            os.kill(self.pid, signal.SIGKILL)
        killed = time.monotonic()
        self.crew.until(lambda: self.ended, DEADLINE, "the end")
        return killed


class Crew:
    """A process that forks children, and everything that they tell, in order.

    It is ready when it is made, which takes seconds on a busy machine: whoever says
    from when until when children work counts from afterwards.
    """

    def __init__(self, environment: dict[str, str] | None = None) -> None:
        self._child = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.crew_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env={
                **os.environ,
                **names_of_databases(),
                **(environment or {}),
            },
            start_new_session=True,
        )
        self._told: queue.SimpleQueue[Told | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="crew", daemon=True)
        self._reader.start()
        self._members: dict[int, Member] = {}
        self._number = 0
        self._gone = False
        self._ready = False
        self.database: dict[str, Any] = {}
        self.until(lambda: self._ready, 4 * DEADLINE, "the start of the crew")

    def _read(self) -> None:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._told.put(json.loads(line))
        self._told.put(None)

    def take_in(self, wait: float = 0.0) -> list[Told]:
        """Hand out what was told since the last time."""
        news: list[Told] = []
        while True:
            try:
                told = self._told.get(timeout=wait) if wait else self._told.get_nowait()
            except queue.Empty:
                return news
            wait = 0.0
            if told is None:
                self._gone = True
                return news
            if told["event"] == "ready":
                self._ready = True
                continue
            member = self._members.get(told["who"])
            if member is None:
                continue
            member.told.append(told)
            member.pid = told.get("pid", member.pid)
            member.done = member.done or told["event"] == "done"
            member.ended = member.ended or told["event"] == "ended"
            news.append(told)

    def until(self, predicate: Any, within: float = DEADLINE, what: str = "") -> None:
        """Take in events until a condition comes true; fail when it doesn't."""
        end = time.monotonic() + within
        self.take_in()
        while not predicate():
            if time.monotonic() > end or self._gone:
                pytest.fail(f"{what or 'the condition'}: not within {within:g} s")
            self.take_in(wait=0.02)

    def fork(self, program: str, **arguments: Any) -> Member:
        """Run a program in a process of its own."""
        return self.fork_all(program, [arguments])[0]

    def fork_all(self, program: str, table: Iterable[dict[str, Any]]) -> list[Member]:
        """Run a program once per set of arguments, each in a process of its own."""
        members = []
        assert self._child.stdin is not None
        for arguments in table:
            self._number += 1
            member = self._members[self._number] = Member(self, self._number)
            message = {"program": program, "who": member.who, "with": arguments}
            message["database"] = self.database
            self._child.stdin.write((json.dumps(message) + "\n").encode())
            members.append(member)
        self._child.stdin.flush()
        # Those that are there already may keep the machine busy.
        self.until(
            lambda: all(member.pid for member in members), 4 * DEADLINE, "the forks"
        )
        return members

    def finish(self, members: Iterable[Member], within: float = 2 * DEADLINE) -> None:
        """Wait until programs have ended, none with an error."""
        members = list(members)
        self.until(lambda: all(m.ended for m in members), within, "the programs' end")
        for member in members:
            assert member.saw("error") is None, member.saw("error")

    def told(self) -> Iterator[Told]:
        """Return everything that was told so far, by all."""
        self.take_in()
        for member in self._members.values():
            yield from member.told

    def errors(self) -> list[Told]:
        """Return every error that reached a caller, of a release too."""
        return [told for told in self.told() if told["event"] in ERRORS]

    def history(self) -> list[Event]:
        """Return what was told so far as a history."""
        return [
            Event(
                told["event"],
                told["key"],
                told["token"],
                told["before"],
                told.get("after", told["at"]),
                str(told["who"]),
                self._members[told["who"]].deadline(told)
                if told["event"] == "loss"
                else None,
                told.get("permit", 0),
                told.get("permits", 1),
            )
            for told in self.told()
            if told["event"] in WHATS
        ]

    def forget(self) -> None:
        """Kill whoever is left, and start the next test with nothing told."""
        self.take_in()
        for member in self._members.values():
            if member.pid and not member.ended and not self._gone:
                with suppress(ProcessLookupError):
                    os.kill(member.pid, signal.SIGKILL)
        left = [m for m in self._members.values() if m.pid]
        if not self._gone:
            self.until(lambda: all(m.ended for m in left), what="the children's end")
        self._members.clear()
        self.database = {}

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def close(self) -> None:
        """End the process and all its children."""
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        with suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._reader.join(timeout=DEADLINE)
        # Who was left behind may keep it open; to close it would be to wait for them.
        if not self._reader.is_alive():
            self._child.stdout.close()
