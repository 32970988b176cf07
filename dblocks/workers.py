"""Threads of dblocks' own that make calls and linger for the next one."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeVar

from . import forks

LINGER = 2.0
"""Seconds for which an idle thread, with its open connections, waits for a call."""

Call = Callable[[], object]

T = TypeVar("T")


class Workers:
    """As many threads as there are calls at a time.

    Args:
        name: The threads' name.
        session: The context in which each of them runs.
    """

    def __init__(
        self,
        name: str,
        session: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.name = name
        self.session = session
        self.idle: deque[_Worker] = deque()
        forks.in_child(self.idle.clear)

    def start(self, call: Call) -> None:
        """Make a call, which must not raise, in a thread.

        Raises:
            RuntimeError: No thread can be started.
        """
        try:
            worker = self.idle.pop()
        except IndexError:
            worker = _Worker(self)
            # The call comes first, so that no interrupt leaves a thread without a call.
            worker.calls.put(call)
            worker.start()
        else:
            worker.calls.put(call)

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call a function; return the future of its result or its error.

        Raises:
            RuntimeError: No thread can be started.
        """
        future: Future[T] = Future()
        self.start(partial(fulfil, future, function))
        return future


def fulfil(future: Future[T], function: Callable[[], T]) -> None:
    """Call a function for a future, which gets its result or its error."""
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


class _Worker(threading.Thread):
    """Makes one call after the other; between calls it is in the list of idle ones."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(name=workers.name, daemon=True)
        self._workers = workers
        self.calls: queue.SimpleQueue[Call] = queue.SimpleQueue()

    def run(self) -> None:
        with self._workers.session():
            while (call := self._next()) is not None:
                call()
                del call
                self._workers.idle.append(self)

    def _next(self) -> Call | None:
        try:
            return self.calls.get(timeout=LINGER)
        except queue.Empty:
            try:
                self._workers.idle.remove(self)
            except ValueError:
                # start() has just taken this thread out, for a call.
                return self.calls.get()
            return None
