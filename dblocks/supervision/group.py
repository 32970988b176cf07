"""A command's process group, and the two helper programs beside it."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from . import launcher, sentinel

_PR_SET_CHILD_SUBREAPER = 36


class StartError(Exception):
    """A helper program could not be started, or doesn't answer."""


def _spawn(
    module: ModuleType, *arguments: str, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a helper program."""
    program = [sys.executable, "-I", "-S", os.path.realpath(str(module.__file__))]
    try:
        return subprocess.Popen([*program, *arguments], **options)
    except OSError as error:
        raise StartError(f"no process could be started: {error}") from error


class Sentinel:
    """The supervisor's side of the sentinel.

    Attributes:
        ready: A file that becomes readable when the sentinel is ready or has failed.
    """

    def __init__(self) -> None:
        self._process = _spawn(
            sentinel,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            cwd="/",
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders = self._process.stdin.fileno()
        self.ready = self._process.stdout.fileno()
        os.set_blocking(self._orders, False)

    def alive(self) -> bool:
        return self._process.poll() is None

    def order(self, group: int, term_at: float, kill_at: float) -> None:
        """Have a group terminated and killed at these moments, unless reordered."""
        # A line is written whole or not at all. A dead sentinel is noticed elsewhere;
        # one that doesn't read still has its last order.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._orders, f"{group} {term_at:.6f} {kill_at:.6f}\n".encode())

    def dismiss(self) -> None:
        """End the sentinel: the group is empty."""
        with self._process:
            self._process.kill()


class Group:
    """A command in its own process group.

    Entering the block starts the launcher; :meth:`go` starts the command. On Linux this
    process adopts orphaned descendants during the block. Otherwise process 1 would have
    to reap them; in a container that may be any program, and a group with an orphan
    that nobody reaps never becomes empty. Leaving the block by an error kills what is
    left of the group.

    Attributes:
        id: The group's number, and the command's process id.
        ready: A file that becomes readable when the launcher is ready or has failed.
        status: The command's exit status, or minus the signal that ended it.
        error: The ``errno`` for which the command could not be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._command = command
        self._environment = environment
        self.status: int | None = None
        self.error: int | None = None

    def __enter__(self) -> Group:
        self._before = _children()
        self._channel, inherited = socket.socketpair()
        with inherited:
            number = inherited.fileno()
            self._process = _spawn(
                launcher,
                *(str(number), *self._command),
                pass_fds=[number],
                env=self._environment,
            )
        self._channel.setblocking(False)
        self.ready = self._channel.fileno()
        self.id = self._process.pid
        _adopt_orphans(True)
        return self

    def __exit__(self, *error: object) -> None:
        if self.status is None:
            self._process.kill()
            self.status = self._process.wait()
        if not self.is_empty():
            self.signal(signal.SIGKILL)
        _adopt_orphans(False)
        with self._channel, suppress(OSError, ValueError):
            self.error = int(self._channel.recv(64))

    def go(self) -> None:
        """Have the launcher become the command."""
        with suppress(BrokenPipeError):  # a signal has ended the launcher
            self._channel.send(launcher.GO)

    def reap(self) -> int | None:
        """Reap ended processes; return the signal that stopped the command, if any."""
        stopped = None
        while True:
            try:
                pid, status = os.waitpid(-self.id, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return stopped
            if not pid:
                return stopped
            if pid == self.id and os.WIFSTOPPED(status):
                stopped = os.WSTOPSIG(status)
            elif pid == self.id:
                self.status = os.waitstatus_to_exitcode(status)
                self._process.returncode = self.status

    def reap_adopted(self) -> None:
        """Reap the adopted processes that had left the group.

        Children from before the block, and those in this process's own group, are left
        to others.
        """
        for pid in _children() - self._before:
            with suppress(ProcessLookupError, ChildProcessError):
                group = os.getpgid(pid)
                if pid != self.id and group not in {self.id, os.getpgrp()}:
                    os.waitpid(pid, os.WNOHANG)

    def signal(self, number: int) -> None:
        sentinel.send(self.id, number)

    def is_empty(self) -> bool:
        """Tell whether the command has ended and left nothing in its group."""
        return self.status is not None and not sentinel.send(self.id, 0)

    def exit_status(self) -> int:
        """Return the exit status that a shell would report."""
        if self.error is not None:
            return 127 if self.error in {errno.ENOENT, errno.ENOTDIR} else 126
        status = self.status or 0
        return status if status >= 0 else 128 - status


def _children() -> set[int]:
    """Return this process's children, where Linux tells."""
    found: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found |= {int(number) for number in file.read_text().split()}
    return found


def _adopt_orphans(adopt: bool) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
