"""How a lock is acquired: who asks the database when, and what a grant becomes."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator
from functools import partial
from typing import TYPE_CHECKING, Any

from . import clock, ownership, signals
from .backends.base import FOREVER, PINNED_GRACE, Grant, Reading, Request
from .conf import backends
from .exceptions import LockTimeout
from .holds import Hold, registry
from .leases import PATIENCE, Lease
from .renewal import timekeeper
from .steps import Aside, Call, Pause, Step, arun, run
from .waiting import (
    LONGEST_PAUSE,
    LOOK_EVERY,
    QUEUE_BRIEFLY,
    QUEUE_FOR,
    Gate,
    GateClosed,
    Line,
    Place,
    lines,
)

if TYPE_CHECKING:
    from .locks import Lock

logger = logging.getLogger("dblocks")

MAX_PAUSE = 5.0
"""Seconds after which one that stands in line looks whether it is first."""

LONG_WAIT = 1.0
"""Seconds after which a wait is worth a line in the log."""

Steps = Generator[Step, Any, Lease | Reading]


class Acquisition:
    """One owner's attempt to get a key, until it has it or its time is over.

    Args:
        timeout: How long to wait, in seconds; 0 tries once, ``None`` waits for ever.
    """

    def __init__(self, lock: Lock, me: ownership.Owner, timeout: float | None) -> None:
        self.lock = lock
        self.me = me
        self.timeout = timeout
        self.key = lock.literal_key
        self.backend = backends[lock.backend]
        self.started = clock.monotonic()
        self.give_up = self.started + (FOREVER if timeout is None else timeout)
        self.terms = lock.terms(self.backend)

    def run(self) -> Lease | Reading:
        """Acquire in this thread: the lease, or who has the key instead."""
        return run(self.steps())

    async def arun(self) -> Lease | Reading:
        """:meth:`run` for async code."""
        found: Lease | Reading = await arun(
            self.steps(), kind=Lease, undo=Lease.give_back
        )
        return found

    def lease(self, found: Lease | Reading) -> Lease:
        """Return the lease that was granted, or raise ``LockTimeout``."""
        if isinstance(found, Lease):
            return found
        raise LockTimeout(
            self.key,
            timeout=self.timeout,
            holder=found.holder,
            note=found.note,
            acquired_at=found.acquired_at,
            retry_after=found.remaining,
        )

    def steps(self) -> Steps:
        """Acquire in steps, with the result of :meth:`run`."""
        seen: Reading | None = None
        if self._overtakes():
            found = yield Call(self._attempt)
            if isinstance(found, Lease):
                return found
            seen = found
        place = Place()
        try:
            line = lines.join(self.backend, self.key, place)
            return (yield from self._stand_in_line(line, place, seen))
        finally:
            lines.leave(self.backend, self.key, place)

    def _overtakes(self) -> bool:
        """Tell whether it tries before it stands behind the others of this process.

        They may be waiting for this owner itself.
        """
        return (
            self.timeout == 0
            or self.lock.owner is not None
            or self._own_hold() is not None
            or not self.backend.can_write()
        )

    def _stand_in_line(self, line: Line, place: Place, seen: Reading | None) -> Steps:
        explicit = self.lock.owner
        while not line.is_first(place) and clock.monotonic() < self.give_up:
            longest = MAX_PAUSE if explicit is None else LONGEST_PAUSE
            left = self.give_up - clock.monotonic()
            woken = yield Pause(place, min(left, longest))
            news = line.last_seen()
            if news is not None and explicit is not None and news.owner == explicit:
                # Its owner has the key meanwhile.
                break
            if news is None and not woken and left > MAX_PAUSE:
                # The first is stuck.
                break
        if seen is None and clock.monotonic() >= self.give_up:
            # Its time is over: what the first has seen holds for all.
            seen = line.last_seen()
        if seen is None and (explicit is not None or not self._is_held_here()):
            found: Lease | Reading = yield Call(self._attempt)
            if isinstance(found, Lease):
                return found
            seen = found
        if seen is None:
            seen = (yield Call(partial(self.backend.read, self.key))) or Reading()
        gate: Gate | None = None
        if line.is_first(place):
            # In the thread whose connection tells whether there may be one.
            gate = yield Call(partial(self.backend.gate, self.key))
        try:
            found = yield from self._look(line, place, seen, gate)
            if isinstance(found, Lease) and found.take_gate(gate):
                gate = None
            return found
        finally:
            if gate is not None:
                gate.leave()

    def _is_held_here(self, version: int | None = None) -> bool:
        """Tell whether this process has the key, with this token or with any.

        The hold itself must not stay in the frame of one that waits: it would be
        renewed for as long as that waits, also when its leases are forgotten.
        """
        here = timekeeper.holder(self.backend, self.key)
        return here is not None and version in (None, here.grant.version)

    def _look(
        self, line: Line, place: Place, seen: Reading, gate: Gate | None
    ) -> Steps:
        """Look at the row until it is free and the attempt succeeds."""
        line.saw(seen)
        known, known_since = seen.version, clock.monotonic()
        told = False
        while True:
            now = clock.monotonic()
            # Free, but not to be had, perhaps for an instant only.
            until = self.give_up
            if seen.remaining <= 0:
                until = max(until, self.started + PINNED_GRACE)
            if now >= until:
                self._timed_out(seen, now - self.started)
                return seen
            if not told and now - self.started > LONG_WAIT:
                told = True
                logger.info("waiting key=%r holder=%s", self.key, seen.holder)
            limit = until - now
            if seen.remaining > 0:
                limit = min(limit, seen.remaining)
            # Somebody has let this one in, and the row is free in all likelihood.
            let_in = False
            if self._is_held_here(seen.version):
                let_in = yield Pause(place, min(LONGEST_PAUSE, limit))
            elif gate is not None and not gate.held:
                queue_for = QUEUE_FOR if seen.remaining > QUEUE_FOR else QUEUE_BRIEFLY
                try:
                    yield Aside(partial(gate.enter, min(until - now, queue_for)))
                except GateClosed:
                    gate = None
                    continue
                let_in = gate.held and clock.monotonic() - now > LOOK_EVERY
            else:
                alone = gate is not None
                pause = self.backend.pause(now - known_since, alone=alone)
                let_in = yield Pause(place, min(pause, limit))
            if not let_in:
                seen = (yield Call(partial(self.backend.read, self.key))) or Reading()
                line.saw(seen)
            if let_in or seen.remaining <= 0 or seen.owner == self.lock.owner:
                queued = gate is not None and gate.held
                found = yield Call(partial(self._attempt, queued))
                if isinstance(found, Lease):
                    return found
                seen = found
                line.saw(seen)
            if seen.version != known:
                known, known_since = seen.version, clock.monotonic()

    def _timed_out(self, seen: Reading, waited: float) -> None:
        from .locks import Lock

        signals.lock_timed_out.send_robust(
            sender=Lock,
            key=self.key,
            backend=self.backend.alias,
            waited=waited,
            holder=seen.holder,
            note=seen.note,
            retry_after=max(0.0, seen.remaining),
        )

    # One attempt

    def _attempt(self, queued: bool = False) -> Lease | Reading:
        """Ask for the key once.

        Args:
            queued: The key's gate is this one's.
        """
        hold = self._own_hold()
        can_write = hold is None or self.backend.can_write()
        lease = None
        if hold is not None and (self.lock.owner is None or not can_write):
            # Before anything is asked: another thread may release the others of this
            # hold meanwhile. What an explicit owner has elsewhere, nobody knows here.
            lease = self._joined(hold)
            if lease is None:
                hold = None
        if lease is None or can_write:
            sent = clock.monotonic()
            request = self._request(hold, queued)
            try:
                patience = max(self.give_up - sent, PATIENCE)
                found = self.backend.try_acquire(request, patience)
            except BaseException:
                if lease is not None:
                    lease.give_back()
                raise
            if not isinstance(found, Reading):
                lease = self._granted(found, sent, lease)
            elif hold is None:
                return found
            elif (reason := found.reason_for(hold.grant)) is not None:
                hold.lose(reason)
                if lease is not None:
                    lease.give_back()
                return found
            else:
                # Still ours; a guard of our own transaction has it pinned.
                lease = lease or self._joined(hold)
                if lease is None:
                    return found
        self.me.add(lease)
        self._tell_acquired(lease, lease.belongs_to(hold))
        return lease

    def _own_hold(self) -> Hold | None:
        if self.lock.owner is None:
            hold = self.me.holds.get((self.backend, self.key))
        else:
            hold = registry.find(self.backend, self.key, self.lock.owner)
        return hold if hold is not None and hold.is_live() else None

    def _joined(self, hold: Hold) -> Lease | None:
        """Return one more lease of a hold, not yet written, if that is still live."""
        with hold.mutex:
            return Lease(self.lock, hold) if hold.is_live() else None

    def _request(self, hold: Hold | None, queued: bool) -> Request:
        terms, explicit = self.terms, self.lock.owner
        if hold is not None:
            owner = hold.grant.owner
        else:
            owner = explicit or os.urandom(16).hex()
        return Request(
            key=self.key,
            owner=owner,
            lease=terms.lease,
            max_hold=terms.max_hold if hold is None else hold.terms.max_hold,
            holder=ownership.holder(self.me),
            note=self.lock.note,
            count=None if explicit else 1 if hold is None else hold.leases,
            queued=queued,
            reenter=hold is not None or explicit is not None,
            at_once=self.timeout == 0,
        )

    def _granted(self, grant: Grant, sent: float, joined: Lease | None) -> Lease:
        lock, backend, terms = self.lock, self.backend, self.terms
        if joined is not None:
            if joined.note_written(grant, sent, terms.lease):
                return joined
            joined.leave_hold(grant)
        with registry.mutex:
            hold = None
            if lock.owner is not None:
                # Another thread may have been granted the same.
                hold = registry.find(backend, grant.key, lock.owner)
            if hold is not None:
                with hold.mutex:
                    lease = Lease(lock, hold)
                    if lease.note_written(grant, sent, terms.lease):
                        return lease
                lease.leave_hold(grant)
            hold = Hold(
                backend, grant, terms, sent, explicit=bool(lock.owner), note=lock.note
            )
            hold.test_connection = backend.test_connection()
            lease = Lease(lock, hold)
            hold.written = 1
            if lock.owner is not None:
                registry.add(hold)
            else:
                self.me.holds[backend, grant.key] = hold
        timekeeper.add(hold)
        return lease

    def _tell_acquired(self, lease: Lease, reentered: bool) -> None:
        waited = clock.monotonic() - self.started
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "acquired key=%r backend=%s owner=%s fencing_token=%s waited=%.3f",
                self.key,
                self.backend.alias,
                lease.owner,
                lease.fencing_token,
                waited,
            )
        if signals.lock_acquired.receivers:
            from .locks import Lock

            signals.lock_acquired.send_robust(
                sender=Lock,
                key=self.key,
                backend=self.backend.alias,
                owner=lease.owner,
                fencing_token=lease.fencing_token,
                waited=waited,
                reentered=reentered,
                lease=lease,
            )
