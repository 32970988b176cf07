"""A thread for calls that may block, which can't keep the process alive.

Inside a ``TestCase`` there is none: only the test's own thread has its connection.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from django.db import connections

from ..workers import fulfil

T = TypeVar("T")


class Caller:
    """Makes calls at once, in the calling thread."""

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Call a function."""
        future: Future[T] = Future()
        fulfil(future, function)
        return future

    def end(self, patience: float) -> None:
        """Do nothing: all calls are made."""


class Worker(Caller):
    """Makes calls in a thread of its own, one after the other.

    Args:
        name: The thread's name.
        wake: Called after each call.

    Raises:
        RuntimeError: No thread can be started.
    """

    def __init__(self, name: str, wake: Callable[[], object] = lambda: None) -> None:
        self._wake = wake
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Have a function called."""
        future: Future[T] = Future()
        self._calls.put(partial(fulfil, future, partial(_closing, function)))
        return future

    def end(self, patience: float) -> None:
        """End the thread once its calls are made; wait that long at most for it."""
        self._calls.put(None)
        self._thread.join(patience)

    def _run(self) -> None:
        if hasattr(signal, "pthread_sigmask"):
            # After "stty tostop", writing from the background would stop the process;
            # and it is the main thread that notices a SIGCONT. Threads that are started
            # from here, such as those that renew, inherit this.
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTTOU, signal.SIGCONT])
        while (call := self._calls.get()) is not None:
            call()
            del call
            self._wake()


def _closing(function: Callable[[], T]) -> T:
    """Call a function, and close the connections of this thread."""
    try:
        return function()
    finally:
        connections.close_all()
