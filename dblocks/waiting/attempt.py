"""One attempt to get a key: who asks for what, and what becomes of a grant."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from zlib import crc32

from .. import clock
from ..backends.base import BaseBackend
from ..backends.gates import Gate
from ..backends.values import FOREVER, Granted, Reading, Renewal, Request
from ..holding.holds import Claim, Hold
from ..holding.registry import registry
from ..holding.renewal import scheduler
from ..holding.sets import give_back
from ..permits import row_keys

MOST_NOTED = 1000
"""The most keys for which the process remembers its last permit."""

_last_permits: dict[tuple[BaseBackend, str], int] = {}


def _note_permit(backend: BaseBackend, key: str, permit: int) -> None:
    if len(_last_permits) >= MOST_NOTED:
        _last_permits.clear()
    _last_permits[backend, key] = permit


@dataclass(eq=False)
class Attempt(Claim):
    """One owner's request for a key, repeated until it is granted or its time is over.

    Attributes:
        timeout: How long to wait, in seconds; 0 tries once, ``None`` waits for ever.
        started, give_up: Local clock, when it starts and when it gives up.
        permits: How many may have the key at a time.
        new_owner: The owner's id for a new grant. Default: a random one each time.
        reentered: The owner had the key already.
        had_to_wait: The key was not free at once.
    """

    timeout: float | None
    started: float
    permits: int = 1
    new_owner: str | None = None
    reentered: bool = False
    had_to_wait: bool = False

    def __post_init__(self) -> None:
        timeout = FOREVER if self.timeout is None else self.timeout
        self.give_up = self.started + timeout
        self.row_keys = row_keys(self.key, self.permits)

    def own_hold(self) -> Hold | None:
        """Return the live hold that this owner has already, if any."""
        for row_key in self.row_keys:
            hold = registry.find(self.backend, row_key)
            if hold is None or not hold.is_live():
                continue
            if self.owner is None:
                mine = hold.by is self.by and not hold.explicit
            else:
                mine = hold.grant.owner == self.owner
            if mine:
                return hold
        return None

    def held_here(self, version: int | None = None) -> bool:
        """Tell whether this process has the key, with this token or with any.

        A waiter's frame must not keep the hold itself: it would be renewed for as long
        as the waiter waits, even when its leases are forgotten.
        """
        if self.permits > 1:
            # Another permit may be released first.
            return False
        hold = registry.find(self.backend, self.key)
        return (
            hold is not None
            and hold.is_live()
            and version in (None, hold.grant.version)
        )

    def make(self, gate: Gate | None = None) -> Hold | Reading:
        """Ask for the key once.

        Args:
            gate: The key's gate, which this caller has or queues for.

        Returns:
            The hold, with one more acquisition counted, or who has the key instead.
        """
        patience = self.give_up - clock.monotonic()
        while (hold := self.own_hold()) is not None:
            # If this hold turns out to be lost, the owner may have another permit.
            if not hold.enter_again(self, patience):
                continue
            self.reentered = True
            if not registry.watches(hold):
                # Its leases were dropped, so the scheduler no longer watches it.
                scheduler.watch(hold)
            return hold
        for row_key in self.row_keys:
            latest = registry.find(self.backend, row_key)
            if latest is None:
                continue
            latest.note_overdue()
            if latest.binding.test_connection is not None:
                seen = self._seen_in_test(latest)
                if seen is not None:
                    return seen
        found = self._ask(gate, patience)
        if found is None:
            # The key is very likely free by now, which is no reason for a time-out.
            found = self._ask(gate, 0.0) or Reading()
        if isinstance(found, Hold) and found.permit is not None:
            _note_permit(self.backend, self.key, found.permit)
        return found

    def _ask(self, gate: Gate | None, patience: float) -> Hold | Reading | None:
        """Return the engine's answer; ``None`` if it is a grant that is over by now."""
        request = self.request(gate)
        answer = self.backend.try_acquire(request, patience)
        if isinstance(answer, Reading):
            return answer
        self.reentered = answer.again
        (answer,), sent = self.in_time([answer], request.sent)
        hold = Hold(self, answer, sent, request.binding)
        scheduler.watch(hold)
        if hold.is_live():
            return hold
        # This process or the engine stood still: others may have had the key since.
        give_back([hold])
        return None

    def in_time(
        self, grants: Sequence[Granted], sent: float
    ) -> tuple[Sequence[Granted], float]:
        """Renew grants that came so late that a lease counted from ``sent`` is over.

        An engine that was out of reach may have made them only just now. With
        ``max_hold``, renew earlier: its limit, counted from ``sent``, is too short.

        Returns:
            The grants, and the local clock from which their leases count.
        """
        terms, now = self.terms, clock.monotonic()
        limited = terms.max_hold < FOREVER
        if now < sent + (terms.interval if limited else terms.lease - terms.margin):
            return grants, sent
        renewals = [Renewal(each.grant, terms.lease) for each in grants]
        try:
            renewed = self.backend.renew(renewals)
            keys = [each.grant.key for each in grants]
            seen = self.backend.read_all(keys) if limited else {}
        except BaseException:
            if self.owner is not None:
                for each in grants:
                    registry.return_forfeited(self.backend, each.grant, 1)
            raise
        if not renewed.extended.issuperset(each.grant for each in grants):
            return grants, sent
        limits = [seen.get(each.grant.key, Reading()).limit for each in grants]
        return [
            each._replace(limit=min(each.limit, limit))
            for each, limit in zip(grants, limits, strict=True)
        ], now

    def _seen_in_test(self, hold: Hold) -> Reading | None:
        """Describe a live hold that was granted on another connection's ``TestCase``.

        Its row is in that test's transaction, for which a query here would wait.
        """
        test_connection = self.backend.test_connection()
        if hold.binding.test_connection is test_connection or not hold.is_live():
            return None
        return Reading(
            owner=hold.grant.owner,
            holder=hold.by.holder,
            note=hold.note,
            version=hold.grant.version,
            remaining=hold.remaining(),
        )

    def _first_permit(self) -> int:
        """Return the permit to begin with."""
        if self.owner is not None:
            # The owner's other threads and processes begin there too.
            return crc32(self.owner.encode()) % self.permits
        last = _last_permits.get((self.backend, self.key), self.permits)
        return last if last < self.permits else random.randrange(self.permits)

    def request(self, gate: Gate | None = None) -> Request:
        """Return what the engine is asked for."""
        terms = self.terms
        request = Request(
            self.key,
            self.owner or self.new_owner or os.urandom(16).hex(),
            terms.lease,
            terms.max_hold,
            terms.hold_at_least,
            self.by.holder,
            self.note,
            explicit=self.owner is not None,
            gate=gate,
            queued=gate is not None and gate.held,
            permits=self.permits,
        )
        if self.permits > 1:
            request.permit = self._first_permit()
        if self.owner is not None:
            request.forfeits = partial(registry.take_forfeited, self.backend)
            request.returns = partial(registry.return_forfeited, self.backend)
        return request
