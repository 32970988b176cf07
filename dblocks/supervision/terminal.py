"""The controlling terminal and its foreground process group."""

from __future__ import annotations

import os
import signal
import termios
from contextlib import suppress
from typing import Any


class Terminal:
    """The terminal of this process's session; without one, no method does anything.

    The kernel stops a command that reads from the terminal in the background. If both
    standard input and output are the terminal, the command is put into the foreground
    at once. Otherwise the foreground may belong to a pager at the end of the pipe, and
    the command gets it only once it is stopped for lack of it.
    """

    def __init__(self) -> None:
        self._modes: list[Any] | None = None
        # Without a terminal, every call with this number fails, as after a hang-up.
        self._file = -1
        with suppress(OSError):
            self._file = os.open(os.ctermid(), os.O_RDWR | os.O_NOCTTY)

    def close(self) -> None:
        with suppress(OSError):
            os.close(self._file)

    @property
    def exists(self) -> bool:
        return self._file >= 0

    def give(self, group: int) -> bool:
        """Put a group into the foreground if this process is in it."""
        return self._hand_over(os.getpgrp(), group)

    def take_back(self, group: int, *, restore_modes: bool = False) -> bool:
        """Put this process into the foreground if the group is in it.

        A group that was killed couldn't restore the terminal's modes.
        """
        modes = self._modes if restore_modes else None
        return self._hand_over(group, os.getpgrp(), modes)

    def _hand_over(self, old: int, new: int, modes: list[Any] | None = None) -> bool:
        # So that this process may change the terminal from the background.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU])
        try:
            if os.tcgetpgrp(self._file) != old:
                return False
            if old == os.getpgrp():
                self._modes = termios.tcgetattr(self._file)
            os.tcsetpgrp(self._file, new)
            if modes is not None:
                termios.tcsetattr(self._file, termios.TCSANOW, modes)
            return True
        except (OSError, termios.error):
            return False
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
