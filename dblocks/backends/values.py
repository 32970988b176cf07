"""The values that pass between waiting, holding and the engines.

Durations are seconds; moments are of the local clock unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from .. import clock
from ..exceptions import LockTimeout
from ..permits import apart
from .gates import Gate

FOREVER = 10.0**9
"""Seconds, some thirty years: stands for no limit."""

PINNED_GRACE = 0.25
"""Seconds for which a key that is free but can't be taken is tried again.

A transaction may have the row pinned, perhaps only for an instant. Or others queue for
the key; if they haven't taken it by then, they count as stopped.
"""


class Grant(NamedTuple):
    """One grant of a key to an owner.

    Attributes:
        version: The fencing token; ``None`` on an engine without tokens.
        identity: On such an engine, tells this grant from others of its owner.
    """

    key: str
    owner: str
    version: int | None
    identity: str = ""


Described = tuple[str, str, int | None]
"""Owner, holder and token of a grant, as operators are told."""


class Granted(NamedTuple):
    """The answer to a request that was successful.

    Attributes:
        limit: No renewal moves the expiry beyond this many seconds from now.
        again: The owner had the key already, in another thread or process.
        gate: The key's gate, if the grant entered it; the release leaves it.
    """

    grant: Grant
    limit: float
    again: bool = False
    gate: Gate | None = None


class Binding(NamedTuple):
    """What binds a grant to the thread that has got it.

    Attributes:
        test_connection: The connection of a ``TestCase`` that it was granted on.
        is_rolled_back: Tells whether the test that it was granted in is over.
        renewal_bar: Tells whether a renewal would harm the thread's work. Other threads
            call this function for as long as the grant is held.
    """

    test_connection: object = None
    is_rolled_back: Callable[[], bool] | None = None
    renewal_bar: Callable[[], bool] | None = None


UNBOUND = Binding()
"""Binds nothing."""


@dataclass(slots=True)
class Request:
    """What an owner asks for.

    Attributes:
        permits: How many may have the key at a time.
        permit: The permit to begin with.
        explicit: The caller gave the owner's id, which may hold the key already in
            another thread or process.
        forfeits: Returns, once, how many holds of a grant of that owner were lost here
            and not released.
        returns: Takes such holds back if they were not subtracted.
        gate: The key's gate, which the caller has or queues for.
        queued: The caller has that gate; otherwise it yields to those that queue.
        identity: The identity of a new grant, where tokens don't tell one from another.
        binding: What binds a grant to the thread that asks; the engine fills it in.
        sent: Local clock before it was sent for the first time.
    """

    key: str
    owner: str
    lease: float
    max_hold: float = FOREVER
    hold_at_least: float = 0.0
    holder: str = ""
    note: str = ""
    explicit: bool = False
    forfeits: Callable[[Grant], int] = lambda grant: 0
    returns: Callable[[Grant, int], object] = lambda grant, holds: None
    gate: Gate | None = None
    queued: bool = False
    permits: int = 1
    permit: int = 0
    identity: str = ""
    binding: Binding = UNBOUND
    # Looked up each time, because tests move the clock.
    sent: float = field(default_factory=lambda: clock.monotonic())


@dataclass(frozen=True, slots=True)
class Reading:
    """What a look at a key has seen; by default, a key that nobody has.

    Attributes:
        remaining: Seconds until the key is free by itself. 0 or less: it is free, or,
            if an attempt has failed all the same, a transaction pins it.
        limit: Seconds beyond which no renewal moves the expiry.
        permit: Which permit of the lock was seen: the one that will be free first.
        owners: The owners of the lock's permits, as far as they were seen.
        identity: On an engine without tokens, the identity of the latest grant.
    """

    owner: str = ""
    holder: str = ""
    note: str = ""
    version: int | None = None
    acquired_at: datetime | None = None
    remaining: float = 0.0
    limit: float = FOREVER
    permit: int | None = None
    owners: frozenset[str] = frozenset()
    identity: str = ""

    def is_had_by(self, owner: str | None) -> bool:
        """Tell whether an owner has the key, or one of its permits."""
        return owner == self.owner or owner in self.owners

    @property
    def is_cooling(self) -> bool:
        """Whether its holder has released it, and it stays taken for a while."""
        return bool(self.holder) and not self.owner and self.remaining > 0

    def as_timeout(self, key: str, backend: str, timeout: float | None) -> LockTimeout:
        """Return the error for a wait that ran out with this as its last reading."""
        return LockTimeout(
            key,
            permit=self.permit,
            backend=backend,
            timeout=timeout,
            holder=self.holder,
            note=self.note,
            acquired_at=self.acquired_at,
            retry_after=self.remaining,
            cooling=self.is_cooling,
        )

    def is_of(self, grant: Grant) -> bool:
        """Tell whether a grant is the one that was seen, though it may be overdue."""
        return (self.owner, self.version, self.identity) == grant[1:]

    def reason_for(self, grant: Grant) -> str | None:
        """Return why a grant is no longer this key's, or ``None`` if it still is."""
        if self.is_of(grant):
            return None if self.remaining > 0 else "expired"
        if self.version is None or grant.version is None:
            if self.owner or self.identity not in ("", grant.identity):
                return "taken"
            # A force release leaves no time of acquisition.
            return "forced" if self.holder and self.acquired_at is None else "expired"
        if self.is_forced_from(grant):
            return "forced"
        return "taken" if self.version > grant.version else "expired"

    def is_forced_from(self, grant: Grant) -> bool:
        """Tell whether the grant was force-released, and nobody has had it since."""
        if self.version is None or grant.version is None:
            return False
        # Only a force release leaves no time of acquisition.
        return self.version == grant.version + 1 and self.acquired_at is None


class Taken(NamedTuple):
    """The answer to a request for several keys of which this one is taken.

    Nothing was written.
    """

    key: str
    seen: Reading


def first_free(seen: Mapping[str, Reading], keys: Sequence[str]) -> Reading:
    """Return the reading of the row that is free first; a missing row is free."""
    free = Reading()
    key = min(keys, key=lambda key: seen.get(key, free).remaining)
    owners = frozenset(each.owner for each in seen.values() if each.remaining > 0)
    return replace(seen.get(key, free), permit=apart(key)[1], owners=owners)


@dataclass(frozen=True, slots=True)
class Entry:
    """A lock, or one of its permits, as operators see it, by the engine's clock.

    Has the attributes of ``DistributedLock`` that the commands need.

    Attributes:
        key: The row's key; ``lock_key`` and ``permit`` are its parts.
        remaining: Seconds until the key is free by itself; 0 or less: it is.
        release_requested_at: When the holder was asked to finish.
    """

    key: str
    owner: str = ""
    holder: str = ""
    note: str = ""
    hold_count: int = 0
    version: int | None = None
    acquired_at: datetime | None = None
    expires_at: datetime | None = None
    remaining: float = 0.0
    release_requested_at: datetime | None = None

    @property
    def lock_key(self) -> str:
        """What is locked."""
        return apart(self.key)[0]

    @property
    def permit(self) -> int | None:
        """Which permit of it, from 0; ``None`` for a lock without permits."""
        return apart(self.key)[1]

    @property
    def state(self) -> str:
        """``held``, ``expired``, ``cooling`` or ``free``."""
        if self.remaining > 0:
            return "held" if self.owner else "cooling"
        return "expired" if self.owner else "free"


class Waiters(NamedTuple):
    """Who waits for a key.

    Attributes:
        number: How many; ``None`` if the engine doesn't know.
        since: When the first of them began to wait, if known.
        names: Who they are, for people, as far as known.
    """

    number: int | None = None
    since: datetime | None = None
    names: tuple[str, ...] = ()


class Renewal(NamedTuple):
    """A grant to be extended."""

    grant: Grant
    lease: float


@dataclass(slots=True)
class Renewed:
    """The outcome of renewals.

    Attributes:
        extended, lost: Grants in neither were busy, or out of reach: try again soon.
        requested: Grants whose holder is asked to finish.
        out_of_reach: Grants that too few servers have, or none that could be asked.
    """

    extended: set[Grant] = field(default_factory=set)
    lost: dict[Grant, str] = field(default_factory=dict)
    requested: set[Grant] = field(default_factory=set)
    out_of_reach: set[Grant] = field(default_factory=set)
