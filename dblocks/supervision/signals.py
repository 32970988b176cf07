"""The signals that this process gets, put in a queue instead of taking effect."""

from __future__ import annotations

import fcntl
import os
import select
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any

#: Always handed on to the command.
_NAMES = ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT")
FORWARDED = {getattr(signal, f"SIG{name}") for name in _NAMES}

#: About this process itself, not orders to it; or not to be caught.
_OWN = {
    getattr(signal, f"SIG{name}")
    for name in (
        *("ABRT", "BUS", "FPE", "ILL", "SEGV", "SYS", "TRAP", "STKFLT", "EMT"),
        *("PIPE", "URG", "XCPU", "XFSZ", "CHLD", "TTIN", "TTOU"),
        *("KILL", "STOP", "TSTP"),
    )
    if hasattr(signal, f"SIG{name}")
}

#: Don't end a process by default.
_HARMLESS = {
    getattr(signal, f"SIG{name}")
    for name in ("WINCH", "CONT", "TSTP", "INFO")
    if hasattr(signal, f"SIG{name}")
}


def pipe() -> tuple[int, int]:
    """Make a pipe that no child inherits, apart from the standard streams.

    Where one of those is closed, its number would be given to the pipe.
    """
    ends = []
    for end in os.pipe():
        ends.append(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3))
        os.close(end)
    return ends[0], ends[1]


class Signals:
    """A block in which signals are collected; in the main thread only.

    Those that the caller of this process had set to be ignored, as ``nohup`` does,
    stay ignored. SIGTSTP is added by :meth:`catch_stops`; until then it stops this
    process as usual.
    """

    def __init__(self) -> None:
        self._pending: deque[int] = deque()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._read, self._write = pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in signal.valid_signals() - _OWN:
            handler = signal.getsignal(number)
            if handler is signal.SIG_DFL or (
                number in FORWARDED and handler is not signal.SIG_IGN
            ):
                self._catch(number, self._note)
        # A child that ends wakes the wait.
        self._catch(signal.SIGCHLD, _pass)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)

    def _catch(self, number: int, handler: Callable[..., None]) -> None:
        previous = signal.signal(number, handler)
        self._previous.setdefault(number, previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._pending.append(number)

    def catch_stops(self) -> None:
        """Collect SIGTSTP too, unless it is ignored."""
        if signal.getsignal(signal.SIGTSTP) is not signal.SIG_IGN:
            self._catch(signal.SIGTSTP, self._note)

    def let_stops(self) -> None:
        """Let SIGTSTP stop this process again."""
        if signal.SIGTSTP in self._previous:
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)

    def wake(self) -> None:
        """End the wait; from any thread."""
        with suppress(OSError):  # it is full, or closed: nobody sleeps
            os.write(self._write, b"\0")

    def wait(self, timeout: float, *files: int) -> bool:
        """Sleep until a signal or a call of :meth:`wake`, so many seconds at most.

        Returns:
            Whether one of the files can be read, which ends the wait as well.
        """
        ready = select.select([self._read, *files], [], [], max(0.0, timeout))[0]
        if self._read in ready:
            with suppress(BlockingIOError):
                while os.read(self._read, 4096):
                    pass
        return any(file in ready for file in files)

    def take(self) -> list[int]:
        """Return what has come, in order, and forget it."""
        taken = []
        while self._pending:
            taken.append(self._pending.popleft())
        return taken

    def ending(self) -> int | None:
        """Return the first signal in the queue that would have ended this process."""
        for number in list(self._pending):
            if number not in _HARMLESS:
                return number
        return None


def _pass(number: int, frame: FrameType | None) -> None:
    pass
