"""One attempt to get a key: who asks the engine for what, and what a grant becomes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial

from .. import clock
from ..backends.values import FOREVER, Reading, Request
from ..holding.holds import Claim, Hold, registry
from ..holding.renewal import scheduler


@dataclass(eq=False)
class Attempt(Claim):
    """What one owner asks for, as often as it takes.

    Attributes:
        timeout: How long to wait, in seconds; 0 tries once, ``None`` waits for ever.
        started, give_up: Local clock, of the first moment and the last.
        reentered: The owner had the key already.
    """

    timeout: float | None
    reentered: bool = False

    def __post_init__(self) -> None:
        self.started = clock.monotonic()
        timeout = FOREVER if self.timeout is None else self.timeout
        self.give_up = self.started + timeout

    def own_hold(self) -> Hold | None:
        """Return what this owner holds already, if it is live."""
        hold = registry.find(self.backend, self.key)
        if hold is None or not hold.is_live():
            return None
        if self.owner is None:
            return hold if hold.by is self.by and not hold.explicit else None
        return hold if hold.grant.owner == self.owner else None

    def held_here(self, version: int | None = None) -> bool:
        """Tell whether this process has the key, with this token or with any.

        The hold itself must not stay in the frame of one that waits: it would be
        renewed for as long as that waits, also when its leases are forgotten.
        """
        hold = registry.find(self.backend, self.key)
        return (
            hold is not None
            and hold.is_live()
            and version in (None, hold.grant.version)
        )

    def make(self, queued: bool = False) -> Hold | Reading:
        """Ask for the key once.

        Args:
            queued: The key's gate is this one's.

        Returns:
            The hold, with one more acquisition counted, or who has the key instead.
        """
        patience = self.give_up - clock.monotonic()
        hold = self.own_hold()
        if hold is not None and hold.enter_again(self, patience):
            self.reentered = True
            if not registry.watches(hold):
                # Its leases were forgotten.
                scheduler.watch(hold)
            return hold
        latest = registry.find(self.backend, self.key)
        if latest is not None:
            latest.note_overdue()
            if latest.test_connection is not None:
                seen = self._seen_in_test(latest)
                if seen is not None:
                    return seen
        request = self._request(queued)
        sent = clock.monotonic()
        answer = self.backend.try_acquire(request, patience)
        if isinstance(answer, Reading):
            return answer
        self.reentered = answer.again
        hold = Hold(self, answer, sent)
        scheduler.watch(hold)
        return hold

    def _seen_in_test(self, hold: Hold) -> Reading | None:
        """Return what only the connection of a ``TestCase`` can read.

        Another connection would wait for the test's transaction.
        """
        if hold.test_connection is self.backend.test_connection() or not hold.is_live():
            return None
        return Reading(
            owner=hold.grant.owner,
            holder=hold.by.holder,
            note=hold.note,
            version=hold.grant.version,
            remaining=hold.remaining(),
        )

    def _request(self, queued: bool) -> Request:
        terms = self.terms
        request = Request(
            self.key,
            self.owner or os.urandom(16).hex(),
            terms.lease,
            terms.max_hold,
            terms.hold_at_least,
            self.by.holder,
            self.note,
            explicit=self.owner is not None,
            queued=queued,
        )
        if self.owner is not None:
            request.forfeits = partial(registry.take_forfeited, self.backend)
        return request
