"""The wait for a key that somebody else has."""

from __future__ import annotations

import logging
from functools import partial

from .. import clock, signals
from ..backends.gates import Gate, GateClosed
from ..backends.values import PINNED_GRACE, Reading
from ..holding.holds import Hold
from ..texts import visible
from .attempt import Attempt
from .queue import (
    LONGEST_PAUSE,
    LOOK_EVERY,
    Waiter,
    WaitQueue,
    pause,
    queues,
)
from .steps import InThread, run

logger = logging.getLogger("dblocks")

MAX_PAUSE = 5.0
"""Seconds after which a waiter checks whether it is first, or the first is stuck."""

COUNTED = 0.25
"""Seconds after which the first of a queue shows that it waits, to be counted."""

SHARED = 10
"""How many pauses a waiter whose time is over makes to get the first one's answer.

Not seconds: an event loop that lags may have the answer and not have passed it on.
"""

DOUBTS = 5
"""How many pauses a waiter makes before it takes a silent first waiter for stuck.

Not seconds: after a stop of the whole process the first waiter was silent, too.
"""

LONG_WAIT = 1.0
"""Seconds after which a wait is worth a line in the log."""


def get(attempt: Attempt) -> Hold | Reading:
    """Get a key in this thread: the hold, or who has the key instead."""
    seen = None
    queue = queues.find(attempt.backend, attempt.key, attempt.permits)
    if queue is None or _overtakes(attempt):
        found = attempt.make()
        if isinstance(found, Hold):
            return found
        seen = found
    return run(lambda: _Wait(attempt, InThread()).get(seen))


async def get_in(place: InThread, attempt: Attempt) -> Hold | Reading:
    """:func:`get` in steps that run in this place."""
    seen = None
    if _overtakes(attempt):
        found = await place.call(attempt.make)
        if isinstance(found, Hold):
            return found
        seen = found
    return await _Wait(attempt, place).get(seen)


async def timed_out(place: InThread, attempt: Attempt, seen: Reading) -> Reading:
    """Tell observers that an attempt's time is over; return who has the key, if any."""
    if seen.remaining <= 0:
        # The row still describes a holder that has released.
        seen = Reading(permit=seen.permit)
    if (observer := signals.observer) is not None:
        observer.timed_out(attempt)
    if signals.lock_timed_out.receivers:
        send = partial(
            signals.send,
            signals.lock_timed_out,
            attempt.sender,
            key=attempt.key,
            permit=seen.permit,
            backend=attempt.backend.alias,
            waited=clock.monotonic() - attempt.started,
            holder=seen.holder,
            note=seen.note,
            retry_after=max(0.0, seen.remaining),
        )
        await place.tell(send)
    return seen


def _overtakes(attempt: Attempt) -> bool:
    """Tell whether an attempt is made before joining the other waiters of the process.

    They may be waiting for this very owner.
    """
    return (
        attempt.timeout == 0
        or attempt.owner is not None
        or attempt.own_hold() is not None
        or not attempt.backend.can_write()
    )


def _is_held(gate: Gate | None) -> bool:
    return gate is not None and gate.held


class _Wait:
    """The wait of one attempt."""

    def __init__(self, attempt: Attempt, place: InThread) -> None:
        self.attempt = attempt
        self.place = place
        self.backend = attempt.backend
        self.key = attempt.key
        self.waiter = Waiter()
        self.queue: WaitQueue

    async def get(self, seen: Reading | None) -> Hold | Reading:
        """Wait until the key is taken, or the time is over."""
        attempt = self.attempt
        if attempt.timeout == 0 and seen is not None and seen.remaining > 0:
            return await timed_out(self.place, attempt, seen)
        found = await self._queue(seen)
        if isinstance(found, Hold):
            return found
        # After leaving the queue: no waiter stands behind a slow receiver of a signal.
        return await timed_out(self.place, attempt, found)

    async def _queue(self, seen: Reading | None) -> Hold | Reading:
        """Wait as one of the waiters of this process."""
        place = self.backend, self.key, self.attempt.permits
        try:
            self.queue = queues.join(*place, self.waiter)
            return await self._stand(seen)
        finally:
            try:
                queues.leave(*place, self.waiter)
            except BaseException:
                # After an interrupt, too: nobody may wait for ever behind this waiter.
                queues.leave(*place, self.waiter)
                raise

    async def _stand(self, seen: Reading | None) -> Hold | Reading:
        """Wait to be first in this process, then for the key."""
        attempt = self.attempt
        if seen is not None:
            self.queue.saw(seen)
        await self._until_first(seen)
        if attempt.owner is not None and attempt.had_to_wait:
            # Its owner may have got the key meanwhile.
            seen = None
        elif seen is None and clock.monotonic() >= attempt.give_up:
            # Its time is over: the first waiter's reading is good for all of them.
            seen = self.queue.last_answer(attempt.give_up)
        if seen is None:
            if attempt.owner is not None or not attempt.held_here():
                found = await self.place.call(partial(self._make, None))
                if isinstance(found, Hold):
                    return found
                seen = found
            else:
                seen = await self.place.call(self._read)
        gate: Gate | None = None
        if self.queue.is_first(self.waiter):
            # In the thread that asks the engine: whether there may be a gate depends on
            # its connection.
            request = attempt.request()
            gate = await self.place.call(partial(self.backend.gate, request))
        try:
            found = await self._look(seen, gate)
            # Not with permits: another one may already be free for the next waiter.
            is_one = self.attempt.permits == 1
            if is_one and isinstance(found, Hold) and found.keep_gate(gate):
                gate = None
            return found
        finally:
            if gate is not None:
                gate.leave()

    async def _until_first(self, seen: Reading | None) -> None:
        """Wait for this waiter's turn, or for an answer if its time is over first."""
        queue = self.queue
        explicit, give_up = self.attempt.owner, self.attempt.give_up
        longest = MAX_PAUSE if explicit is None else LONGEST_PAUSE
        pauses, doubts = SHARED, 0
        while not queue.is_first(self.waiter):
            self.attempt.had_to_wait = True
            left = give_up - clock.monotonic()
            if left > 0:
                seconds = min(left, LONGEST_PAUSE if doubts else longest)
                woken = await self.place.pause(self.waiter, seconds)
            elif seen or queue.last_seen(give_up) or queue.asks_instead() or not pauses:
                return
            else:
                # The first waiter is asking; hundreds must not repeat its question.
                pauses -= 1
                woken = await self.place.pause(self.waiter, LONGEST_PAUSE)
            news = queue.last_seen(give_up)
            if explicit is not None and news is not None and news.is_had_by(explicit):
                # Its owner got the key in another thread or process.
                return
            if woken or not queue.is_silent(MAX_PAUSE):
                doubts = 0
            elif doubts < DOUBTS:
                # Perhaps the whole process stood still, and the first waiter goes on.
                doubts += 1
            else:
                # The first waiter is stuck, for example because its loop is blocked.
                queue.pass_by_first(self.waiter)

    def _read(self) -> Reading:
        left = self.attempt.give_up - clock.monotonic()
        with self.queue.asking():
            seen = self.backend.look(self.attempt.row_keys, left)
        # Noted by the asking thread: a lagging event loop would take old news for new.
        self.queue.saw(seen)
        return seen

    def _make(self, gate: Gate | None) -> Hold | Reading:
        with self.queue.asking():
            found = self.attempt.make(gate)
        # In the same step: a task that is cancelled in another one would keep the key.
        if isinstance(found, Reading):
            self.queue.saw(found)
        elif gate is not None and gate.shows_waiter:
            gate.show_waiter(False)
        return found

    def _enter(self, gate: Gate, seconds: float) -> Gate:
        # Noted by the thread that sleeps: when it wakes, the event loop may be blocked.
        self.queue.sleeps(seconds)
        gate.enter(seconds)
        self.queue.wakes()
        return gate

    async def _look(self, seen: Reading, gate: Gate | None) -> Hold | Reading:
        """Look at the key until it is free and an attempt succeeds."""
        attempt = self.attempt
        attempt.had_to_wait = True
        known, known_since = seen.version, clock.monotonic()
        told = False
        while True:
            now = clock.monotonic()
            until = attempt.give_up
            if seen.remaining <= 0:
                # Free, but it can't be taken, perhaps only for an instant.
                until = max(until, attempt.started + PINNED_GRACE)
            if now >= until:
                return seen
            if not told and now - attempt.started > LONG_WAIT:
                told = True
                logger.debug(
                    "waiting key=%r permit=%s holder=%s",
                    *(attempt.key, seen.permit, visible(seen.holder)),
                )
            # If somebody lets this waiter in, the key is very likely free: don't look.
            try:
                known_for = now - known_since
                let_in = await self._pause(seen, gate, until, known_for)
            except GateClosed:
                gate = None
                continue
            if not let_in:
                seen = await self.place.call(self._read)
            is_free = seen.remaining <= 0 and not self._yields(seen, gate)
            if let_in or is_free or seen.is_had_by(attempt.owner):
                overdue = not let_in and seen.remaining <= -PINNED_GRACE
                found = await self.place.call(partial(self._make, gate))
                latest = found.grant if isinstance(found, Hold) else found
                taken = latest.version != seen.version
                if overdue and taken and gate and not (gate.held or gate.is_bell):
                    queues.note_abandoned(self.backend, self.key)
                if isinstance(found, Hold):
                    return found
                seen = found
            if seen.version != known:
                known, known_since = seen.version, clock.monotonic()

    def _yields(self, seen: Reading, gate: Gate | None) -> bool:
        """Tell whether to queue again rather than ask for a free key.

        The owner of the key's gate is about to take the key. Not after a force release:
        then the former holder may still have the gate.
        """
        if gate is None or gate.held or gate.is_bell or seen.acquired_at is None:
            return False
        left = PINNED_GRACE + seen.remaining
        return (
            left > gate.shortest
            and clock.monotonic() + left < self.attempt.give_up
            and not queues.is_abandoned(self.backend, self.key)
        )

    async def _pause(
        self,
        seen: Reading,
        gate: Gate | None,
        until: float,
        known_for: float,
    ) -> bool:
        """Pause before the next look; tell whether the key was handed on meanwhile."""
        now = clock.monotonic()
        limit = until - now
        if seen.remaining > 0:
            limit = min(limit, seen.remaining)
        is_bell = gate is not None and gate.is_bell
        if not is_bell and self.attempt.held_here(seen.version):
            return await self.place.pause(self.waiter, min(LONGEST_PAUSE, limit))
        abandoned = queues.is_abandoned(self.backend, self.key)
        if gate is not None and not _is_held(gate) and not abandoned:
            # Not beyond its time: it would sit out the hold of whoever is let in.
            wait = min(gate.patience(seen.remaining), self.attempt.give_up - now)
            if -PINNED_GRACE < seen.remaining <= 0 and not is_bell:
                # After the grace, nobody yields to a gate whose owner is absent.
                wait = min(wait, PINNED_GRACE + seen.remaining)
            if wait >= gate.shortest:
                await self.place.call(partial(self._enter, gate, wait))
                waited = clock.monotonic() - now > LOOK_EVERY
                return _is_held(gate) and (waited or is_bell)
        alone = _is_held(gate)
        if gate and alone and known_for > COUNTED and not gate.shows_waiter:
            await self.place.call(partial(gate.show_waiter, True))
        seconds = pause(self.backend, known_for, alone=alone)
        return await self.place.pause(self.waiter, min(seconds, limit))
