"""The controlling terminal, and whose process group is in its foreground."""

from __future__ import annotations

import os
import signal
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any


class Terminal:
    """The terminal of this process's session; without one, all of it does nothing.

    A command that reads from the terminal must be in its foreground, or the kernel
    stops it. It is put there at once where both standard input and output are the
    terminal; otherwise, since the foreground may belong to a pager at the end of the
    pipe, only when it is stopped for want of it.
    """

    def __init__(self) -> None:
        self._modes: list[Any] | None = None
        self._file: int | None = None
        with suppress(OSError):
            flags = os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC
            self._file = os.open(os.ctermid(), flags)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @property
    def exists(self) -> bool:
        return self._file is not None

    def foreground(self) -> int | None:
        """Return the process group in the foreground."""
        if self._file is None:
            return None
        try:
            return os.tcgetpgrp(self._file)
        except OSError:  # it has hung up
            return None

    def give(self, group: int) -> bool:
        """Put a group into the foreground if this process is there."""
        if self._file is None or self.foreground() != os.getpgrp():
            return False
        with suppress(termios.error):
            self._modes = termios.tcgetattr(self._file)
        return self._put(group)

    def take_back(self, group: int, *, restore_modes: bool = False) -> None:
        """Put this process into the foreground if the group is there.

        Args:
            restore_modes: As before, because the group had no chance to do it.
        """
        if self._file is None or self.foreground() != group:
            return
        if self._put(os.getpgrp()) and restore_modes and self._modes is not None:
            with _background_output(), suppress(termios.error):
                termios.tcsetattr(self._file, termios.TCSANOW, self._modes)

    def _put(self, group: int) -> bool:
        assert self._file is not None
        try:
            with _background_output():
                os.tcsetpgrp(self._file, group)
        except OSError:
            return False
        return True


@contextmanager
def _background_output() -> Iterator[None]:
    """Change the terminal from the background without being stopped for it."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def is_interactive() -> bool:
    """Tell whether both standard input and standard output are terminals."""
    try:
        return os.isatty(0) and os.isatty(1)
    except OSError:
        return False
