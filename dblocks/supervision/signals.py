"""Queues the signals that this process gets, instead of letting them take effect."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any


def _named(*names: str) -> set[int]:
    """Return the signals of these names that the system has."""
    return {getattr(signal, f"SIG{n}") for n in names if hasattr(signal, f"SIG{n}")}


#: Always forwarded to the command.
_FORWARDED = _named("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT")

#: Concern this process itself, or can't be caught.
_OWN = _named(
    *("ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP", "STKFLT", "EMT"),
    *("PIPE", "URG", "XCPU", "XFSZ", "CHLD", "TTIN", "TTOU"),
    *("KILL", "STOP", "TSTP"),
)

#: Don't end a process by default.
_HARMLESS = _named("WINCH", "CONT", "TSTP", "INFO")


class Signals:
    """A block that queues signals; in the main thread only.

    Signals that the caller of this process ignores, as ``nohup`` does, stay ignored.
    SIGTSTP stops this process as usual until :meth:`catch_stops`.
    """

    def __enter__(self) -> Signals:
        self._pending: deque[int] = deque()
        self._previous: dict[int, Any] = {}
        #: Held while a byte is written: once closed, the number may be another file's.
        self._waking = threading.Lock()
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in signal.valid_signals() - _OWN:
            handler = signal.getsignal(number)
            if handler is signal.SIG_DFL or (
                number in _FORWARDED and handler is not signal.SIG_IGN
            ):
                self._catch(number, self._note)
        # A child that ends must end the wait.
        self._catch(signal.SIGCHLD, lambda number, frame: None)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        # Another thread may still call wake().
        with self._waking:
            write, self._write = self._write, -1
            os.close(write)

    def _catch(self, number: int, handler: Callable[[int, object], None]) -> None:
        self._previous.setdefault(number, signal.signal(number, handler))

    def _note(self, number: int, frame: object) -> None:
        self._pending.append(number)

    def catch_stops(self) -> None:
        """Queue SIGTSTP too, unless it is ignored."""
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._catch(signal.SIGTSTP, self._note)

    def let_stops(self) -> None:
        """Let SIGTSTP stop this process again."""
        if signal.SIGTSTP in self._previous:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def wake(self) -> None:
        """End the wait; from any thread."""
        with self._waking, suppress(OSError):  # full or closed: nobody sleeps
            os.write(self._write, b"\0")

    def wait(self, timeout: float, *files: int) -> bool:
        """Sleep until a signal, a call of :meth:`wake` or the timeout.

        A readable file ends the wait too; tell whether there is one.
        """
        # Not select(), which knows no file number beyond 1,023.
        poll = select.poll()
        for file in (self._read, *files):
            poll.register(file, select.POLLIN)
        ready = {file for file, _ in poll.poll(max(0.0, timeout) * 1000)}
        if self._read in ready:
            with suppress(BlockingIOError):
                while os.read(self._read, 4096):
                    pass
        return any(file in ready for file in files)

    def has(self, number: int) -> bool:
        """Tell whether a signal is queued."""
        return number in list(self._pending)

    def take(self) -> list[int]:
        """Empty the queue and return it."""
        return [self._pending.popleft() for _ in range(len(self._pending))]

    def ending(self) -> int | None:
        """Return the first queued signal that would have ended this process."""
        return next((n for n in list(self._pending) if n not in _HARMLESS), None)
