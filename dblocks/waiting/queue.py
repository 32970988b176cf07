"""The waiters of this process: one queue for each key and number of permits."""

from __future__ import annotations

import asyncio
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from .. import clock, forks
from ..backends.base import BaseBackend
from ..backends.gates import QUEUE_FOR
from ..backends.values import Reading
from ..bells import Bell
from ..holding.registry import registry

LOOK_EVERY = 0.0005
"""Seconds between the first looks at the key by the waiter that has the gate."""

LONGEST_PAUSE = 0.1
"""Seconds between looks at a key that has been taken for a long time."""

ABANDONED_FOR = 10.0
"""Seconds for which nobody here queues at a gate that was found abandoned."""

MOST_ABANDONED = 1000
"""The most gates that are remembered as abandoned."""

NEWS = 2 * QUEUE_FOR
"""Seconds for which the others may use what the first waiter has seen.

The time for which the first waiter queues at a gate doesn't count.
"""


def pause(backend: BaseBackend, known_for: float, *, alone: bool) -> float:
    """Return the seconds until the next look at a key.

    Args:
        known_for: For how many seconds nothing has changed.
        alone: Nobody else looks at the key, because the gate keeps them away.
    """
    if alone:
        return min(max(LOOK_EVERY, known_for / 100), LONGEST_PAUSE)
    if backend.is_local:
        mean = max(2 * LOOK_EVERY, known_for / 50)
    else:
        mean = max(0.005, known_for / 10)
    return random.uniform(0.5, 1.5) * min(mean, LONGEST_PAUSE)


class Waiter:
    """A waiter, which can be woken from any thread at any time."""

    __slots__ = ("_bell", "_event", "_loop", "_woken", "is_passed_by")

    def __init__(self) -> None:
        self._woken = False
        self._bell = Bell()
        self._loop = asyncio._get_running_loop()
        self._event: asyncio.Event | None = None
        #: It did nothing when it was its turn, and has not come back since.
        self.is_passed_by = False

    def wake(self) -> None:
        """End the present wait, or else the next one."""
        self._woken = True
        self._bell.ring()
        if self._loop is not None and self._event is not None:
            # If the loop is closed, its waiters are gone.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._event.set)

    def is_gone(self) -> bool:
        """Tell whether the event loop that it waited in is closed."""
        return self._loop is not None and self._loop.is_closed()

    def wait(self, seconds: float) -> bool:
        """Wait until woken, or for this long; return whether it was woken."""
        self._bell.wait(seconds)
        return self._come_back()

    async def await_(self, seconds: float) -> bool:
        """:meth:`wait` without holding a thread."""
        loop = asyncio.get_running_loop()
        event = self._event = self._event or asyncio.Event()
        if not self._woken:
            # Before Python 3.12, wait_for() may swallow a cancellation.
            timer = loop.call_later(seconds, event.set)
            try:
                await event.wait()
            finally:
                timer.cancel()
        event.clear()
        return self._come_back()

    def _come_back(self) -> bool:
        self.is_passed_by = False
        woken, self._woken = self._woken, False
        return woken

    def shares_loop(self, other: Waiter) -> bool:
        """Tell whether both wait in the same event loop."""
        return self._loop is not None and self._loop is other._loop


class WaitQueue:
    """The waiters of this process for the same rows, first come, first served."""

    def __init__(self) -> None:
        self.waiters: deque[Waiter] = deque()
        self._seen: tuple[Reading, float] | None = None
        self._good_until = 0.0
        #: One entry for each waiter whose question the engine hasn't answered yet.
        self._asking: list[None] = []
        #: Local clock until which the first waiter is known to be active or asleep.
        self._active_until = clock.monotonic()
        #: This process has released the key, and nobody has asked for it since.
        self._unasked = False

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Note, in the thread that asks the engine, that its answer is outstanding."""
        self._asking.append(None)
        try:
            yield
        finally:
            self._asking.pop()

    def saw(self, reading: Reading) -> None:
        """Note what the engine said of the key."""
        now = clock.monotonic()
        self._seen = reading, now
        self._active_until = now
        # Not less: another waiter may ask while the first one sleeps for longer.
        self._good_until = max(self._good_until, now + NEWS)

    def sleeps(self, seconds: float) -> None:
        """Note that the first waiter won't look at the key for that many seconds."""
        self._active_until = clock.monotonic() + seconds
        self._good_until = self._active_until + NEWS

    def wakes(self) -> None:
        """Note that the first waiter is about to look at the key."""
        self.sleeps(0.0)

    def last_seen(self, give_up: float) -> Reading | None:
        """Return the latest reading, with the time that was left then.

        ``None`` if there is none: nobody has asked yet, or the key has been released.

        Args:
            give_up: When the waiter's time is over. A reading that was good at that
                moment stays good, however late the waiter comes for it.
        """
        # Once: a release in another thread may forget it at any moment.
        seen = self._seen
        if seen is None or min(clock.monotonic(), give_up) > self._good_until:
            return None
        return seen[0]

    def last_answer(self, give_up: float) -> Reading | None:
        """Return the latest reading for a waiter whose time is over.

        While a question is outstanding, the reading may be of any age: hundreds must
        not ask an engine that doesn't answer. ``None`` if the lease in it has ended
        since: only the engine knows whether somebody still has the key.
        """
        seen = self._seen
        if seen is None or not (self._asking or self.last_seen(give_up)):
            return None
        reading, at = seen
        left = reading.remaining - (clock.monotonic() - at)
        if left <= 0 < reading.remaining:
            return None
        return replace(reading, remaining=left)

    def forget(self) -> None:
        """Note that what was seen is out of date: this process has released the key."""
        self._seen, self._unasked = None, True

    def asks_instead(self) -> bool:
        """Tell, once, whether a waiter whose time is over is to ask for all others.

        That is so if the first waiter sleeps, and doesn't know of a release here.
        """
        sleeps = clock.monotonic() + NEWS < self._good_until
        if self._seen is not None or not self._unasked or not sleeps:
            return False
        self._unasked = False
        return True

    def _first(self) -> Waiter | None:
        """Return the waiter whose turn it is."""
        with suppress(IndexError):
            while self.waiters[0].is_gone():
                self.waiters.popleft()
            first = self.waiters[0]
            if not first.is_passed_by:
                return first
            return next((w for w in tuple(self.waiters) if not w.is_passed_by), first)
        return None

    def is_first(self, waiter: Waiter) -> bool:
        """Tell whether it is this waiter's turn to ask the engine."""
        return self._first() is waiter

    def wake_first(self) -> None:
        """Tell the first waiter that it is its turn."""
        self._active_until = clock.monotonic()
        if (first := self._first()) is not None:
            first.wake()

    def is_silent(self, seconds: float) -> bool:
        """Tell whether no first waiter has been active for that many seconds."""
        return clock.monotonic() > self._active_until + seconds

    def pass_by_first(self, waiter: Waiter) -> None:
        """Go on without the first waiter, and without the others in its event loop.

        Args:
            waiter: The waiter that has waited in vain. Its event loop isn't blocked.
        """
        first = self._first() or waiter
        is_blocked = not first.shares_loop(waiter)
        for each in tuple(self.waiters):
            if each is first or (is_blocked and each.shares_loop(first)):
                each.is_passed_by = True
        self.wake_first()


class WaitQueues:
    """The wait queues of the process, by backend and key; empty ones don't exist.

    A key has one for each number of permits, which decides what rows a waiter looks at.
    """

    def __init__(self) -> None:
        # Taken only by joining and leaving, neither of which waits for anything inside.
        self._mutex = threading.RLock()
        self._queues: dict[tuple[BaseBackend, str], dict[int, WaitQueue]] = {}
        #: Until when the gates of keys count as abandoned: a stopped process has such a
        #: gate, or a session that outlived its process.
        self._abandoned: dict[tuple[BaseBackend, str], float] = {}

    def find(
        self, backend: BaseBackend, key: str, permits: int = 1
    ) -> WaitQueue | None:
        """Return the queue for a key, if somebody waits for it."""
        return self._queues.get((backend, key), {}).get(permits)

    def join(
        self, backend: BaseBackend, key: str, permits: int, waiter: Waiter
    ) -> WaitQueue:
        """Join the queue for a key."""
        with self._mutex:
            while True:
                of_key = self._queues.setdefault((backend, key), {})
                queue = of_key.setdefault(permits, WaitQueue())
                queue.waiters.append(waiter)
                # A signal handler may have joined and left in between.
                if self.find(backend, key, permits) is queue:
                    return queue

    def leave(
        self, backend: BaseBackend, key: str, permits: int, waiter: Waiter
    ) -> None:
        """Take a waiter out of its queue; if it was first, wake the new first one.

        Nobody else: each waiter that wakes asks the engine, and hundreds may leave at a
        time. Without effect if the waiter has left already.
        """
        with self._mutex:
            of_key = self._queues.get((backend, key), {})
            queue = of_key.get(permits)
            if queue is None:
                return
            was_first = queue.is_first(waiter)
            try:
                queue.waiters.remove(waiter)
            except ValueError:
                # An interrupt has ended the first try to leave, perhaps at this point.
                was_first = True
            if not queue.waiters:
                of_key.pop(permits, None)
            if not of_key:
                self._queues.pop((backend, key), None)
        if was_first:
            queue.wake_first()

    def is_abandoned(self, backend: BaseBackend, key: str) -> bool:
        """Tell whether it is useless to queue at a key's gate."""
        return clock.monotonic() < self._abandoned.get((backend, key), 0.0)

    def note_abandoned(self, backend: BaseBackend, key: str) -> None:
        """Note that the owner of a key's gate didn't take the key in time."""
        if len(self._abandoned) >= MOST_ABANDONED:
            self._abandoned.clear()
        self._abandoned[backend, key] = clock.monotonic() + ABANDONED_FOR

    def freed(self, backend: BaseBackend, key: str) -> None:
        """Wake the first waiter in each of the key's queues: the key may be free."""
        of_key = self._queues.get((backend, key), {})
        for permits in list(of_key):
            queue = of_key.get(permits)
            if queue is not None:
                queue.forget()
                queue.wake_first()


queues = WaitQueues()
registry.freed = queues.freed
forks.in_child(queues.__init__)  # type: ignore[misc]
