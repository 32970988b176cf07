"""The waiters of this process, in order, one queue a key."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from contextlib import suppress
from dataclasses import replace

from .. import clock, forks
from ..backends.base import BaseBackend
from ..backends.gates import QUEUE_FOR
from ..backends.values import Reading
from ..holding.registry import registry

LOOK_EVERY = 0.0005
"""Seconds between looks at the key of the one that has the gate, at first."""

LONGEST_PAUSE = 0.1
"""Seconds between looks at a key that has been taken for long."""

ABANDONED_FOR = 10.0
"""Seconds for which nobody here queues at a gate after whoever has it didn't come."""

MOST_ABANDONED = 1000
"""Gates of which that is noted."""

NEWS = 2 * QUEUE_FOR
"""Seconds for which what the first waiter has seen is good enough for the others.

Not counted is the time for which it queues at a gate.
"""


def pause(backend: BaseBackend, known_for: float, *, alone: bool) -> float:
    """Return the seconds until the next look at a key.

    Args:
        known_for: Since when, in seconds, nothing has changed.
        alone: Nobody else looks at it, because the gate keeps them away.
    """
    if alone:
        return min(max(LOOK_EVERY, known_for / 100), LONGEST_PAUSE)
    if backend.is_local:
        mean = max(2 * LOOK_EVERY, known_for / 50)
    else:
        mean = max(0.005, known_for / 10)
    return random.uniform(0.5, 1.5) * min(mean, LONGEST_PAUSE)


class Waiter:
    """One that waits; it can be woken from any thread, at any moment."""

    __slots__ = ("_bell", "_event", "_loop", "_woken")

    def __init__(self) -> None:
        self._woken = False
        # A bare lock, not an Event, whose own mutex a signal handler could meet.
        self._bell = threading.Lock()
        self._bell.acquire()
        self._loop = asyncio._get_running_loop()
        self._event: asyncio.Event | None = None

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""
        self._woken = True
        with suppress(RuntimeError):
            self._bell.release()
        if self._loop is not None and self._event is not None:
            # A closed loop took along who waited.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    def is_gone(self) -> bool:
        """Tell whether the event loop that it waited in is closed."""
        return self._loop is not None and self._loop.is_closed()

    def wait(self, seconds: float) -> bool:
        """Wait until woken, or for this long; return whether it was woken."""
        self._bell.acquire(timeout=max(0.0, min(seconds, threading.TIMEOUT_MAX)))
        woken, self._woken = self._woken, False
        return woken

    async def await_(self, seconds: float) -> bool:
        """:meth:`wait` without holding a thread."""
        loop = asyncio.get_running_loop()
        event = self._event = self._event or asyncio.Event()
        if not self._woken:
            # Not wait_for(), which before Python 3.12 may swallow a cancellation.
            timer = loop.call_later(seconds, event.set)
            try:
                await event.wait()
            finally:
                timer.cancel()
        event.clear()
        woken, self._woken = self._woken, False
        return woken


class WaitQueue:
    """The waiters of this process for one key, first come first."""

    def __init__(self) -> None:
        self.waiters: deque[Waiter] = deque()
        self._seen: tuple[Reading, float] | None = None
        self._good_until = 0.0
        #: The key was given back in this process since it was seen.
        self.freed = False

    def saw(self, reading: Reading) -> None:
        """Note what the engine said of the key."""
        now = clock.monotonic()
        self._seen, self._good_until, self.freed = (reading, now), now + NEWS, False

    def sleeps(self, seconds: float) -> None:
        """Note that nobody will look at the key for so long."""
        self._good_until = clock.monotonic() + seconds + NEWS

    def last_seen(self) -> Reading | None:
        """Return what it said of late, with the time that is left by now.

        ``None`` if nobody knows: none has asked yet, or the key has been given back.
        """
        if self._seen is None or self.freed:
            return None
        reading, at = self._seen
        now = clock.monotonic()
        if now > self._good_until:
            return None
        return replace(reading, remaining=reading.remaining - (now - at))

    def is_first(self, waiter: Waiter) -> bool:
        """Tell whether it is this one's turn to ask the engine."""
        with suppress(IndexError):
            while self.waiters[0].is_gone():
                self.waiters.popleft()
            return self.waiters[0] is waiter
        return False

    def wake_first(self) -> None:
        """Tell the first one that it is its turn."""
        with suppress(IndexError):
            self.waiters[0].wake()


class WaitQueues:
    """The wait queues of the process, by backend and key; empty ones don't exist."""

    def __init__(self) -> None:
        # Only joining and leaving, which wait for nothing inside, take it.
        self._mutex = threading.RLock()
        self._queues: dict[tuple[BaseBackend, str], WaitQueue] = {}
        #: Until when the gates of keys count as abandoned: who has one is stopped, or
        #: a session that outlived its process.
        self._abandoned: dict[tuple[BaseBackend, str], float] = {}

    def find(self, backend: BaseBackend, key: str) -> WaitQueue | None:
        """Return the queue for a key, if somebody waits for it."""
        return self._queues.get((backend, key))

    def join(self, backend: BaseBackend, key: str, waiter: Waiter) -> WaitQueue:
        """Join the queue for a key."""
        place = backend, key
        with self._mutex:
            while True:
                queue = self._queues.setdefault(place, WaitQueue())
                queue.waiters.append(waiter)
                # A signal handler may have come and gone in between.
                if self._queues.get(place) is queue:
                    return queue

    def leave(self, backend: BaseBackend, key: str, waiter: Waiter) -> None:
        """Leave the queue, wherever in it, or none; a new first one is woken."""
        place = backend, key
        with self._mutex:
            queue = self._queues.get(place)
            if queue is None:
                return
            with suppress(ValueError):
                queue.waiters.remove(waiter)
            if not queue.waiters:
                self._queues.pop(place, None)
        queue.wake_first()

    def is_abandoned(self, backend: BaseBackend, key: str) -> bool:
        """Tell whether to queue at a key's gate is to queue in vain."""
        return clock.monotonic() < self._abandoned.get((backend, key), 0.0)

    def note_abandoned(self, backend: BaseBackend, key: str) -> None:
        """Note that whoever has a key's gate didn't come for the key in time."""
        if len(self._abandoned) >= MOST_ABANDONED:
            self._abandoned.clear()
        self._abandoned[backend, key] = clock.monotonic() + ABANDONED_FOR

    def freed(self, backend: BaseBackend, key: str) -> None:
        """Tell the first in the queue that the key may be free now."""
        queue = self._queues.get((backend, key))
        if queue is not None:
            queue.freed = True
            queue.wake_first()


queues = WaitQueues()
registry.freed = queues.freed
forks.in_child(queues.__init__)  # type: ignore[misc]
