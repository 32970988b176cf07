"""How waiters learn that a key may be free, in what order, and who asks the database.

Three things are piled on each other, and correctness depends on none of them:

* In one process, those that wait for one key stand in a :class:`Line`; only the first
  asks the database, and a release in the same process wakes it. The others cost no
  statement, no thread and no connection, also when their time runs out.
* Among processes, the first of each line queues at a :class:`Gate`, which a backend
  may have: a lock of the database session, which the server hands on in order. Who
  has it looks at the row every few milliseconds, and keeps it until the row is
  released, so that nobody barges in and the server wakes the next waiter by itself.
* Where there is no gate, they look with jittered pauses, which are bounded, because
  pauses that double each time starve the one that has waited longest.
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

LOOK_EVERY = 0.002
"""Seconds between looks at the row of the one that has the gate, at first."""

LONGEST_PAUSE = 0.1
"""Seconds between looks when the wait has become long."""


def pauses(*, alone: bool) -> Iterator[float]:
    """Yield the seconds to wait before each look at the key.

    Args:
        alone: Nobody else looks at it, because the gate keeps them away.
    """
    if alone:
        waited = 0.0
        while True:
            pause = min(max(LOOK_EVERY, waited / 200), LONGEST_PAUSE)
            waited += pause
            yield pause
    longest = 0.005
    while True:
        yield random.uniform(0.5, 1.5) * longest
        longest = min(longest * 1.3, LONGEST_PAUSE)


class Place:
    """A place in a line; it can be woken from any thread."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._woken: asyncio.Event | None = None

    def wake(self) -> None:
        """End the wait that is under way, or the next one."""
        self._event.set()
        loop, woken = self._loop, self._woken
        if loop is not None and woken is not None:
            # A closed loop took along who waited.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(woken.set)

    def wait(self, seconds: float) -> None:
        """Wait until woken, or for this long."""
        self._event.wait(seconds)
        self._event.clear()

    async def await_(self, seconds: float) -> None:
        """:meth:`wait` without holding a thread."""
        if self._woken is None:
            self._loop, self._woken = asyncio.get_running_loop(), asyncio.Event()
        if not self._event.is_set():
            # Not wait_for(), which before Python 3.12 may swallow a cancellation.
            assert self._loop is not None
            timer = self._loop.call_later(seconds, self._woken.set)
            try:
                await self._woken.wait()
            finally:
                timer.cancel()
        self._woken.clear()
        self._event.clear()


class Line:
    """Those in this process that wait for one key, first come first."""

    def __init__(self) -> None:
        self.places: deque[Place] = deque()
        self._seen: tuple[Reading, float] | None = None

    def saw(self, reading: Reading) -> None:
        """Note what the database said of the key."""
        self._seen = reading, clock.monotonic()

    def last_seen(self) -> Reading | None:
        """Return what it said last, with the time that is left by now."""
        if self._seen is None:
            return None
        reading, at = self._seen
        return replace(reading, remaining=reading.remaining - (clock.monotonic() - at))

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

    def join(self, backend: object, key: str) -> tuple[Line, Place]:
        """Stand in line for a key."""
        place = Place()
        with self._mutex:
            line = self._lines.setdefault((backend, key), Line())
            line.places.append(place)
        return line, place

    def leave(self, backend: object, key: str, place: Place) -> None:
        """Go out of line, wherever in it; a new first one is woken."""
        with self._mutex:
            line = self._lines[backend, key]
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

    def waiting(self, backend: object, key: str) -> int:
        """Return how many of this process wait for a key."""
        line = self._lines.get((backend, key))
        return len(line.places) if line is not None else 0


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
