"""Acquires and releases in a thread, so that the main thread hears signals.

Python runs a signal handler between two steps of the main thread, and a database that
doesn't answer makes one step last for seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from typing import TypeVar

from django.db import connections

from ..backends.values import Reading
from ..holding import owners
from ..holding.holds import Hold
from ..leases import Lease
from ..locks import Lock
from ..waiting.steps import run
from ..waiting.wait import Steps, give_back, steps

T = TypeVar("T")


def in_thread(function: Callable[[], T], wake: Callable[[], object]) -> Future[T]:
    """Call a function in a thread that doesn't keep the process from ending.

    Args:
        wake: Called in the thread when the result is there.
    """
    future: Future[T] = Future()

    def call() -> None:
        try:
            try:
                result = function()
            finally:
                connections.close_all()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
        wake()

    threading.Thread(target=call, name="dblocks-run-locked", daemon=True).start()
    return future


class Waiter:
    """Acquires a lock for the thread that makes it; can be called off at any moment.

    Args:
        wake: Called when there is a new reading.

    Attributes:
        reading: Who had the lock at the last look.
        called_off: Set it to stop waiting.
    """

    def __init__(self, lock: Lock, wake: Callable[[], object]) -> None:
        self._lock = lock
        self._wake = wake
        self._owner = owners.current()
        self.reading = Reading()
        self.called_off = threading.Event()

    def acquire(self) -> Lease | None:
        """Wait for the lock, in any thread; ``None`` if it stays taken."""
        attempt = self._lock._attempt(me=self._owner)
        found = run(self._watched(steps(attempt)))
        if isinstance(found, Reading):
            self.reading = found
            return None
        if self.called_off.is_set():
            give_back(found)
            return None
        return self._lock._lease(attempt, found)

    def _watched(self, steps: Steps) -> Steps:
        """Pass the steps on until called off; note the readings."""
        with closing(steps):
            try:
                step = next(steps)
                while not self.called_off.is_set():
                    try:
                        result = yield step
                    except Exception as error:
                        step = steps.throw(error)
                        continue
                    if isinstance(result, Reading):
                        self.reading = result
                        self._wake()
                    step = steps.send(result)
            except StopIteration as stop:
                found: Hold | Reading = stop.value
                return found
        return self.reading
