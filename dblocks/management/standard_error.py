"""Standard error, where a message holds up nothing and changes no exit status."""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any, NoReturn

from ..texts import encodable
from .worker import Worker

PATIENCE = 2.0
"""Seconds to wait for a reader when everything else is done."""


class StandardError:
    """A file for messages that neither blocks nor raises: a thread writes them.

    Writing to a pipe that nobody reads blocks, and so does writing to a terminal after
    Ctrl-S. Writing to a closed file or a full disk raises.

    Args:
        file: The file; ``None`` where the process has none.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self._worker: Worker | None = None
        self._has_failed = False

    def start(self) -> None:
        """Start the thread.

        Raises:
            RuntimeError: No thread can be started.
        """
        if self._worker is None:
            self._worker = Worker("dblocks-standard-error")

    def end(self) -> None:
        """Write what is left, and end the thread if there is one."""
        if self._worker is not None:
            self._end(self._flushed(PATIENCE))

    def isatty(self) -> bool:
        try:
            return bool(self._file.isatty())
        except (AttributeError, OSError, ValueError):  # none, or closed
            return False

    def write(self, text: str) -> int:
        self._call(lambda: self._file.write(encodable(text, self._file)))
        return len(text)

    def flush(self, patience: float = PATIENCE) -> bool:
        """Write all; ``False`` if that fails, or blocks for ``patience`` seconds."""
        return self._flushed(patience).done() and not self._has_failed

    def settle(self, status: int) -> None:
        """Write what is left, and see to it that the process ends with this status.

        Python flushes standard error at its end. If that fails, the status is 120; if
        it blocks, the process never ends.
        """
        try:
            flushing = self._flushed(PATIENCE)
        except KeyboardInterrupt:
            _exit(status)
        if not flushing.done():
            _exit(status)
        if isinstance(flushing.exception(), OSError):
            with suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self._file.fileno())
        self._end(flushing)

    def _end(self, flushing: Future[object]) -> None:
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.end(PATIENCE if flushing.done() else 0.0)

    def _flushed(self, patience: float) -> Future[object]:
        flushing = self._call(self._flush)
        while not wait([flushing], patience).done and not self._blocks():
            pass
        return flushing

    def _flush(self) -> None:
        flush = getattr(self._file, "flush", None)
        if flush is not None:
            flush()

    def _blocks(self) -> bool:
        try:
            return not select.select([], [self._file], [], 0)[1]
        except (OSError, TypeError, ValueError):
            return False

    def _call(self, function: Callable[[], object]) -> Future[object]:
        def call() -> object:
            try:
                return function()
            except BaseException:
                self._has_failed = True
                raise

        try:
            self.start()
        except RuntimeError:
            return _made(call)
        assert self._worker is not None
        return self._worker.call(call)


def _exit(status: int) -> NoReturn:
    """End the process now, after a short wait for standard output to be written."""
    try:
        wait([Worker("dblocks-standard-output").call(sys.stdout.flush)], PATIENCE)
    finally:
        os._exit(status)


def _made(call: Callable[[], object]) -> Future[object]:
    """Make a call in this thread, because no other can be started."""
    future: Future[object] = Future()
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
    return future
