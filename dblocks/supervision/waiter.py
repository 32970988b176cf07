"""Acquiring and releasing in a thread, while the main thread hears signals.

A Python signal handler runs between two steps of the main thread, and a database that
doesn't answer makes one step last for seconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from typing import Any

from django.db import connections

from .. import ownership
from ..acquisition import Acquisition
from ..backends.base import Reading
from ..leases import Lease
from ..locks import Lock
from ..steps import Step, run


class _CalledOff(Exception):
    """The waiter was told to stop."""


class Waiter(threading.Thread):
    """Acquires a lock; can be called off at any moment.

    Attributes:
        lease: The lease, when it was granted.
        reading: Who has the lock, by the last look.
        error: What was raised, explained.
        critical: Something is under way that should not be interrupted.

    Args:
        timeout: How long to wait, in seconds.
        first: Called in the thread before the lock is asked for.
        explain: Called in the thread with what was raised; returns ``error``.
        wake: Called when there is something new.
    """

    def __init__(
        self,
        lock: Lock,
        timeout: float,
        *,
        first: Callable[[Waiter], object],
        explain: Callable[[Exception], Exception],
        wake: Callable[[], object],
    ) -> None:
        super().__init__(name="dblocks-waiter", daemon=True)
        self._lock = lock
        self._timeout = timeout
        self._first = first
        self._explain = explain
        self._wake = wake
        self._owner = ownership.current()
        self._called_off = threading.Event()
        self._mutex = threading.Lock()
        self.lease: Lease | None = None
        self.reading: Reading | None = None
        self.error: Exception | None = None
        self.critical = False

    def call_off(self) -> None:
        """Stop waiting; a lease that is granted all the same is given back."""
        with self._mutex:
            self._called_off.set()

    def sleep(self, seconds: float) -> bool:
        """Sleep in the thread; return whether to go on."""
        return not self._called_off.wait(seconds)

    def run(self) -> None:
        try:
            self._first(self)
            self._acquire()
        except Exception as error:
            self.error = self._explain(error)
        finally:
            connections.close_all()
            self._wake()

    def _acquire(self) -> None:
        steps = Acquisition(self._lock, self._owner, self._timeout).steps()
        try:
            found = run(self._watched(steps))
        except _CalledOff:
            return
        self._end(found)

    def _watched(
        self, steps: Generator[Step, Any, Lease | Reading]
    ) -> Generator[Step, Any, Lease | Reading]:
        """Hand the steps on, looking at their results, until called off."""
        try:
            step = next(steps)
            while True:
                if self._called_off.is_set():
                    raise _CalledOff
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
            found: Lease | Reading = stop.value
            return found
        finally:
            steps.close()

    def _end(self, found: Lease | Reading) -> None:
        if isinstance(found, Reading):
            self.reading = found
            return
        with self._mutex:
            if not self._called_off.is_set():
                self.lease = found
                return
        found.release()


class Releaser(threading.Thread):
    """Releases a lease.

    Attributes:
        result: Whether it was held until now; ``None`` while that isn't known.
        error: What was raised.
    """

    def __init__(self, lease: Lease, *, wake: Callable[[], object]) -> None:
        super().__init__(name="dblocks-releaser", daemon=True)
        self._lease = lease
        self._wake = wake
        self.result: bool | None = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._lease.release()
        except Exception as error:
            self.error = error
        finally:
            connections.close_all()
            self._wake()
