"""Several keys at once: all of them or none.

Free keys are asked for together. If that fails they are taken one by one, ordered by
their code points. All callers use this order, so they can't wait for each other in a
circle.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from .. import clock
from ..backends.gates import Gate
from ..backends.values import Reading, Taken
from ..holding.holds import Hold
from ..holding.registry import registry
from ..holding.renewal import scheduler
from ..holding.sets import give_back
from .attempt import Attempt
from .queue import queues
from .steps import InEventLoop, InThread, run
from .wait import get, get_in, timed_out


class Refused(NamedTuple):
    """Which key stayed taken, and its last reading."""

    attempt: Attempt
    seen: Reading


def get_all(attempts: Sequence[Attempt]) -> list[Hold] | Refused:
    """Get one key or several of a backend in this thread.

    Args:
        attempts: In the order of their keys; with one owner and one time limit.
    """
    if len(attempts) > 1:
        return run(lambda: get_all_in(InThread(), attempts))
    found = get(attempts[0])
    return [found] if isinstance(found, Hold) else Refused(attempts[0], found)


async def aget_all(attempts: Sequence[Attempt]) -> list[Hold] | Refused:
    """:func:`get_all` for async code; waits without holding a thread."""
    for attempt in attempts:
        attempt.loop = asyncio.get_running_loop()
        if attempt.own_hold() is None:
            attempt.backend.check_caller()
    return await get_all_in(InEventLoop(attempts[0].backend, _undo), attempts)


async def get_all_in(
    place: InThread, attempts: Sequence[Attempt]
) -> list[Hold] | Refused:
    """:func:`get_all` in steps that run in this place."""
    if len(attempts) > 1:
        return await _Together(attempts, place).get()
    found = await get_in(place, attempts[0])
    return [found] if isinstance(found, Hold) else Refused(attempts[0], found)


def _undo(found: Any) -> None:
    if isinstance(found, Gate):
        found.leave()
    elif isinstance(found, Hold):
        give_back([found])
    elif isinstance(found, list):
        give_back(found)


class _Together:
    """One attempt at several keys."""

    def __init__(self, attempts: Sequence[Attempt], place: InThread) -> None:
        self.attempts = attempts
        self.place = place
        self._make_owner()

    def _make_owner(self) -> None:
        new_owner = os.urandom(16).hex()
        for attempt in self.attempts:
            attempt.new_owner = new_owner

    async def get(self) -> list[Hold] | Refused:
        """Wait until all keys are taken, or the time is over."""
        taken = await self.place.call(self._take) if self._may_take() else None
        if isinstance(taken, Taken) and clock.monotonic() >= self.attempts[0].give_up:
            attempt = next(x for x in self.attempts if x.key == taken.key)
            return await self._refused(attempt, taken.seen)
        found = taken if isinstance(taken, list) else await self._one_by_one()
        while not isinstance(found, Refused):
            lost = next((hold for hold in found if not hold.is_live()), None)
            if lost is None:
                return found
            # Lost during the wait for the later ones, or before the answer came.
            attempt = self.attempts[found.index(lost)]
            await self._give_back(found)
            # A delayed statement that undoes these must not undo the next grants.
            self._make_owner()
            if clock.monotonic() >= attempt.give_up:
                return await self._refused(attempt, Reading())
            found = await self._one_by_one()
        return found

    async def _refused(self, attempt: Attempt, seen: Reading) -> Refused:
        return Refused(attempt, await timed_out(self.place, attempt, seen))

    def _may_take(self) -> bool:
        """Tell whether to ask for all keys together.

        Not if somebody in this process has one of them or waits for one. Where looking
        at a key asks no server, only this owner's own holds keep a try from asking.
        """
        first = self.attempts[0]
        if not first.backend.can_write():
            return False
        if first.timeout == 0 and first.backend.is_local:
            return all(attempt.own_hold() is None for attempt in self.attempts)
        for attempt in self.attempts:
            hold = registry.find(attempt.backend, attempt.key)
            if hold is not None and hold.is_live():
                return False
            if queues.find(attempt.backend, attempt.key) is not None:
                return False
        return True

    def _take(self) -> list[Hold] | Taken | None:
        first = self.attempts[0]
        keys = [attempt.key for attempt in self.attempts]
        patience = first.give_up - clock.monotonic()
        request = first.request()
        granted = first.backend.try_acquire_all(request, keys, patience)
        if not isinstance(granted, list):
            return granted
        grants, sent = first.in_time(granted, request.sent)
        holds = [
            Hold(attempt, each, sent, request.binding)
            for attempt, each in zip(self.attempts, grants, strict=True)
        ]
        scheduler.watch(*holds)
        return holds

    async def _one_by_one(self) -> list[Hold] | Refused:
        holds: list[Hold] = []
        try:
            for attempt in self.attempts:
                found = await get_in(self.place, attempt)
                if isinstance(found, Reading):
                    await self._give_back(holds)
                    return Refused(attempt, found)
                holds.append(found)
        except GeneratorExit:
            # The event loop is closed: they lapse.
            raise
        except BaseException:
            await self._give_back(holds)
            raise
        return holds

    async def _give_back(self, holds: list[Hold]) -> None:
        # Only once: even if the task is cancelled during the call, the call is made.
        due = holds.copy()
        holds.clear()
        if due:
            await self.place.call(partial(give_back, due))
