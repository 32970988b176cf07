"""How one thread wakes another, also from a signal handler or a finalizer."""

from __future__ import annotations

import threading
from contextlib import suppress


class Bell:
    """Wakes the thread that waits, or the next one that will.

    Attributes:
        rung_for: Why it rang last.
    """

    __slots__ = ("_lock", "rung_for")

    def __init__(self) -> None:
        self.rung_for: object = None
        # A bare lock: a signal handler could block on the mutex inside an Event.
        self._lock = threading.Lock()
        self._lock.acquire()

    def ring(self, why: object = None) -> None:
        self.rung_for = why
        with suppress(RuntimeError):
            self._lock.release()

    def wait(self, seconds: float) -> bool:
        """Wait for a ring, and use it up; tell whether there was one."""
        return self._lock.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
