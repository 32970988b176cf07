"""The process group of a command, and the two small programs that stand beside it."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from . import launcher, sentinel
from .signals import pipe

_PR_SET_CHILD_SUBREAPER = 36


class StartError(Exception):
    """The command could not be prepared: no process, or none that answers."""


def _spawn(
    module: object, *arguments: str, **options: object
) -> subprocess.Popen[bytes]:
    path = str(Path(str(getattr(module, "__file__", ""))).resolve())
    command = [sys.executable, "-I", "-S", path, *arguments]
    try:
        return subprocess.Popen(command, **options)  # type: ignore[call-overload, no-any-return]
    except OSError as error:
        raise StartError(f"no process could be started: {error}") from error


class Sentinel:
    """The supervisor's side of the sentinel."""

    def __init__(self) -> None:
        orders, self._orders = pipe()
        self._ready, ready = pipe()
        try:
            self._process = _spawn(
                sentinel,
                stdin=orders,
                stdout=ready,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )
        except StartError:
            os.close(self._orders)
            os.close(self._ready)
            raise
        finally:
            os.close(orders)
            os.close(ready)
        os.set_blocking(self._orders, False)

    @property
    def ready(self) -> int:
        """A file that can be read when the sentinel stands (or has failed to)."""
        return self._ready

    @property
    def pid(self) -> int:
        return self._process.pid

    def alive(self) -> bool:
        return self._process.poll() is None

    def order(self, group: int, term_at: float, kill_at: float) -> None:
        """Have a group terminated and killed at these moments, unless told anew."""
        self._say(f"{group} {term_at:.6f} {kill_at:.6f}\n")

    def _say(self, line: str) -> None:
        # A line is written whole or not at all. A sentinel that is gone is noticed
        # otherwise; one that doesn't read has an earlier order.
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._orders, line.encode())

    def dismiss(self) -> None:
        """The group is empty: let the sentinel end."""
        self._say("done\n")
        os.close(self._orders)
        os.close(self._ready)
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Group:
    """A command in a process group of its own.

    Entering the block starts the launcher; after :meth:`confirm`, :meth:`go` starts the
    command. What is left of the group when the block ends, by an error, is killed.

    Attributes:
        id: Its number, which is also that of the command's own process.
        ready: A file that can be read when the launcher stands (or has failed).
        started: Whether the command was started.
        status: How the command ended: its exit status, or minus a signal's number.
        error: The number of the error for which it could not be started.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self.command = list(command)
        self.environment = dict(environment)
        self.id = 0
        self.started = False
        self.status: int | None = None
        self.error: int | None = None

    def __enter__(self) -> Group:
        go, self._go = pipe()
        self.ready, status = pipe()
        os.set_blocking(self.ready, False)
        try:
            self._process = _spawn(
                launcher,
                str(go),
                str(status),
                *self.command,
                pass_fds=(go, status),
                env=self.environment,
            )
        except StartError:
            os.close(self._go)
            os.close(self.ready)
            raise
        finally:
            os.close(go)
            os.close(status)
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        failure = self._read()
        self.error = int(failure) if failure.isdigit() else None
        os.close(self._go)
        os.close(self.ready)
        if self.status is None:
            self._process.kill()
            self.status = self._process.wait()
        if self.id and not self.is_empty():
            self.signal(signal.SIGKILL)

    def confirm(self) -> None:
        """Note that the launcher stands in the new group.

        Raises:
            StartError: It doesn't.
        """
        if self._read() != launcher.READY:
            raise StartError("the launcher has failed")
        self.id = self._process.pid

    def _read(self) -> bytes:
        try:
            return os.read(self.ready, 64)
        except BlockingIOError:
            return b""

    def go(self) -> None:
        """Let the launcher become the command."""
        self.started = True
        with suppress(BrokenPipeError):  # a signal has ended it
            os.write(self._go, launcher.GO)

    def _collect(self, status: int) -> None:
        self.status = os.waitstatus_to_exitcode(status)
        self._process.returncode = self.status

    def reap(self) -> int | None:
        """Collect what has ended; return the signal that stopped the command, if any.

        As a subreaper this process is also the parent of the group's orphans.
        """
        stopped = None
        options = os.WNOHANG | os.WUNTRACED
        while True:
            try:
                pid, status = os.waitpid(-self.id, options)
            except ChildProcessError:
                return stopped
            if not pid:
                return stopped
            if os.WIFSTOPPED(status):
                if pid == self.id:
                    stopped = os.WSTOPSIG(status)
            elif pid == self.id:
                self._collect(status)

    def signal(self, number: int) -> None:
        sentinel.send(self.id, number)

    def terminate(self) -> None:
        sentinel.terminate(self.id)

    def is_empty(self) -> bool:
        """Tell whether the command has ended and has left nothing in its group."""
        return self.status is not None and not sentinel.send(self.id, 0)


def exit_status(status: int, error: int | None) -> int:
    """Return the exit status that a shell would report."""
    if error is not None:
        return 127 if error in {errno.ENOENT, errno.ENOTDIR} else 126
    return status if status >= 0 else 128 - status


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Be the parent of orphaned descendants, on Linux.

    Elsewhere, and as a rule here too, the system's first process collects them when
    they end. In a container that process may be any program, and an orphan that nobody
    collects would keep its group from ever being empty.
    """
    _subreaper(True)
    try:
        yield
    finally:
        _subreaper(False)


def _subreaper(adopt: bool) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)
