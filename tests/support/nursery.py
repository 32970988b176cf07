"""Programs that are forked from a process which has loaded Django.

Each costs a tenth of a process that loads it itself, and has what such a process has:
arguments, an environment and standard streams of its own, a session of its own, the
handlers of signals with which Python starts, and the interpreter's way to end.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent.parent

#: More than any message has.
SIZE = 1 << 17

Stream = int | IO[Any]

T = TypeVar("T")


class Program:
    """A forked program, in the hands of a test as by ``subprocess.Popen``."""

    def __init__(
        self, status: int, streams: Sequence[IO[bytes] | None], what: str
    ) -> None:
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self._what = what
        self._output: list[futures.Future[bytes]] = []
        self._status = os.fdopen(status, "rb", buffering=0)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        """Return the exit status, as ``Popen`` has it, or ``None`` before the end."""
        return self._look(0)

    def _look(self, seconds: float | None) -> int | None:
        if (
            self.returncode is None
            and select.select([self._status], [], [], seconds)[0]
        ):
            self.returncode = int(self._status.readline())
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        status = self._look(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self._what, timeout or 0)
        return status

    def communicate(
        self, data: bytes = b"", timeout: float | None = None
    ) -> tuple[bytes, bytes]:
        """Write all input, read all output, wait for the end.

        As with ``Popen``, it may be called again after a time-out, which also ends the
        wait for others that have the output open.
        """
        started = time.monotonic()
        if not self._output:
            _in_thread(lambda: _feed(self.stdin, data))
            self._output.append(_in_thread(lambda: _drain(self.stdout)))
            self._output.append(_in_thread(lambda: _drain(self.stderr)))
        if futures.wait(self._output, timeout).not_done:
            raise subprocess.TimeoutExpired(self._what, timeout or 0)
        if timeout is not None:
            timeout = max(0.0, started + timeout - time.monotonic())
        self.wait(timeout)
        out, err = self._output
        return out.result(), err.result()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _feed(stream: IO[bytes] | None, data: bytes) -> None:
    if stream is not None and not stream.closed:
        with suppress(BrokenPipeError), stream:
            stream.write(data)


def _drain(stream: IO[bytes] | None) -> bytes:
    if stream is None or stream.closed:
        return b""
    with stream:
        return stream.read()


def _in_thread(function: Callable[[], T]) -> futures.Future[T]:
    """Call a function in a thread for which nothing waits, not even Python's end."""
    future = futures.Future[T]()

    def call() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


class Nursery:
    """The process that forks; it has loaded Django with this environment."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._channel, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.nursery", str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )

    def start(
        self,
        module: str,
        *arguments: str,
        env: dict[str, str] | None = None,
        stdin: Stream = subprocess.DEVNULL,
        stdout: Stream = subprocess.PIPE,
        stderr: Stream = subprocess.PIPE,
    ) -> Program:
        """Run a module's ``main`` as ``python -m`` does, in the project's folder."""
        told = {
            "module": module,
            "arguments": arguments,
            "environment": env or self.environment,
        }
        status, tells = os.pipe()
        theirs, ours = [tells], list[IO[bytes] | None]()
        for stream, mode in ((stdin, "wb"), (stdout, "rb"), (stderr, "rb")):
            own, passed = ends(stream, mode)
            ours.append(own)
            theirs.append(passed)
        socket.send_fds(self._channel, [json.dumps(told).encode()], theirs)
        for file in theirs:
            os.close(file)
        return Program(status, ours, module)

    def close(self) -> None:
        self._channel.close()
        self._process.wait()


def ends(stream: Stream, mode: str) -> tuple[IO[bytes] | None, int]:
    """Return what the caller of a program keeps of a stream, and what that gets."""
    if stream == subprocess.DEVNULL:
        return None, os.open(os.devnull, os.O_RDWR)
    if stream != subprocess.PIPE:
        return None, os.dup(stream if isinstance(stream, int) else stream.fileno())
    reader, writer = os.pipe()
    own, passed = (reader, writer) if mode == "rb" else (writer, reader)
    return os.fdopen(own, mode), passed


def serve(channel: socket.socket) -> dict[str, Any] | None:
    """Fork for each message; return it in the process that is to be the program."""
    # Nobody asks how those that watch programs have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, files, _, _ = socket.recv_fds(channel, SIZE, 4)
        if not message:
            return None
        if not os.fork():
            channel.close()
            become_program(*files)
            told: dict[str, Any] = json.loads(message)
            return told
        for file in files:
            os.close(file)


def become_program(status: int, *streams: int) -> None:
    """Fork once more, to tell the number of the process and how it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        for stream in streams:
            os.close(stream)
        _, ended = os.waitpid(pid, 0)
        os.write(status, b"%d\n" % os.waitstatus_to_exitcode(ended))
        os._exit(0)
    os.setsid()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.write(status, b"%d\n" % os.getpid())
    os.close(status)


def main() -> None:
    import_module("tests.support.preloaded")
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        told = serve(channel)
    if told is None:
        return
    os.environ.clear()
    os.environ.update(told["environment"])
    module = import_module(told["module"])
    sys.modules["__main__"] = module
    sys.argv = [str(module.__file__), *told["arguments"]]
    module.main()


if __name__ == "__main__":
    main()
