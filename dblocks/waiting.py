"""How waiters learn that a key may be free, in what order, and who asks the database.

Three things are piled on each other, and correctness depends on none of them:

* In one process, those that wait for one key stand in a :class:`Line`; only the first
  asks the database, and a release in the same process wakes it. The others cost no
  statement, no thread and no connection, also when their time runs out.
* Among processes, the first of each line queues at a :class:`Gate`, which a backend
  may have: a lock of the database session, which the server hands on in order. Who
  has it looks at the row every few milliseconds, and keeps it until the row is
  released, so that nobody barges in and the server wakes the next waiter by itself.
* Where there is no gate, they look with jittered pauses, which depend on how long the
  key has been seen taken: pauses that grow with each look starve the one that has
  waited longest.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from . import clock

if TYPE_CHECKING:
    from .backends.base import Reading

LOOK_EVERY = 0.0005
"""Seconds between looks at the row of the one that has the gate, at first."""

LONGEST_PAUSE = 0.1
"""Seconds between looks at a key that has been taken for long."""

QUEUE_FOR = 1.2
"""Seconds for which one queues at a gate; a signal is not noticed in the meantime."""

QUEUE_BRIEFLY = 0.4
"""The same while the key is free or soon will be: who has the gate may be stopped."""

NEWS = 2 * QUEUE_FOR
"""Seconds for which what the first in line has seen is good enough for the others."""


def pause(known_for: float, *, alone: bool) -> float:
    """Return the seconds until the next look at a key.

    They grow with the time for which the same grant has been seen, not with the time
    that the caller has waited: who has waited longest must not look most seldom.

    Args:
        known_for: Since when, in seconds, nothing has changed.
        alone: Nobody else looks at it, because the gate keeps them away.
    """
    if alone:
        return min(max(LOOK_EVERY, known_for / 100), LONGEST_PAUSE)
    return random.uniform(0.5, 1.5) * min(max(0.005, known_for / 10), LONGEST_PAUSE)


def local_pause(known_for: float) -> float:
    """:func:`pause` where looks are reads of a file, which hold up no server's work."""
    mean = min(max(2 * LOOK_EVERY, known_for / 50), LONGEST_PAUSE)
    return random.uniform(0.5, 1.5) * mean


def pauses() -> Iterator[float]:
    """Yield the seconds until each next look at what many look at."""
    started = clock.monotonic()
    while True:
        yield pause(clock.monotonic() - started, alone=False)


class Place:
    """A place in a line; it can be woken from any thread."""

    __slots__ = ("_async", "_event", "_woken")

    def __init__(self) -> None:
        self._woken = False
        # Made when it is waited: most never are.
        self._event: threading.Event | None = None
        self._async: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""
        self._woken = True
        if self._event is not None:
            self._event.set()
        if self._async is not None:
            loop, event = self._async
            # A closed loop took along who waited.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(event.set)

    def wait(self, seconds: float) -> bool:
        """Wait until woken, or for this long; return whether it was woken."""
        if self._event is None:
            self._event = threading.Event()
        if not self._woken:
            self._event.wait(seconds)
        self._event.clear()
        woken, self._woken = self._woken, False
        return woken

    async def await_(self, seconds: float) -> bool:
        """:meth:`wait` without holding a thread."""
        if self._async is None:
            self._async = asyncio.get_running_loop(), asyncio.Event()
        loop, event = self._async
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


class Line:
    """Those in this process that wait for one key, first come first."""

    def __init__(self) -> None:
        self.places: deque[Place] = deque()
        self._seen: tuple[Reading, float] | None = None

    def saw(self, reading: Reading) -> None:
        """Note what the database said of the key."""
        self._seen = reading, clock.monotonic()

    def last_seen(self) -> Reading | None:
        """Return what it said of late, with the time that is left by now."""
        if self._seen is None:
            return None
        reading, at = self._seen
        age = clock.monotonic() - at
        if age > NEWS:
            return None
        return replace(reading, remaining=reading.remaining - age)

    def is_first(self, place: Place) -> bool:
        """Tell whether it is this one's turn to ask the database."""
        return bool(self.places) and self.places[0] is place


class Lines:
    """The lines of the process, by backend and key; empty ones don't exist."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._mutex = threading.Lock()
        self._lines: dict[tuple[object, str], Line] = {}

    def join(self, backend: object, key: str, place: Place) -> Line:
        """Stand in line for a key."""
        with self._mutex:
            line = self._lines.setdefault((backend, key), Line())
            line.places.append(place)
        return line

    def leave(self, backend: object, key: str, place: Place) -> None:
        """Go out of line, wherever in it, or nowhere; a new first one is woken."""
        with self._mutex:
            line = self._lines.get((backend, key))
            if line is None:
                return
            with suppress(ValueError):
                line.places.remove(place)
            if not line.places:
                del self._lines[backend, key]
                return
            first = line.places[0]
        first.wake()

    def wake(self, backend: object, key: str) -> None:
        """Tell the first in line that the key may be free now."""
        line = self._lines.get((backend, key))
        if line is not None:
            with self._mutex:
                first = line.places[0] if line.places else None
            if first is not None:
                first.wake()


lines = Lines()
os.register_at_fork(after_in_child=lines.reset)


class Gate(ABC):
    """A queue for one key that spans processes. One object an attempt."""

    #: Whether the caller has it.
    held = False

    @abstractmethod
    def enter(self, seconds: float) -> None:
        """Queue for this long at most; afterwards see :attr:`held`.

        Raises:
            GateClosed: It can't be had: wait without it.
        """

    @abstractmethod
    def leave(self) -> None:
        """Let the next one in. Never raises; may be called from any thread."""


class GateClosed(Exception):
    """There is no gate to wait at; jittered pauses have to do."""
