"""The values that travel between those who wait, those who hold and the engines.

Durations are seconds; moments are of the local clock unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import NamedTuple

from ..permits import apart
from .gates import Gate

FOREVER = 10.0**9
"""Seconds, some thirty years: the limit of what has none."""

PINNED_GRACE = 0.25
"""Seconds for which a key is tried again that is free but can't be had.

A transaction may have it pinned, perhaps for an instant only; or others queue for it,
and if they haven't taken it by then, they don't come.
"""


class Grant(NamedTuple):
    """One grant of a key to an owner; ``version`` is the fencing token.

    An engine without tokens has ``None`` there.
    """

    key: str
    owner: str
    version: int | None


class Granted(NamedTuple):
    """The answer to a request that was successful.

    Attributes:
        limit: No renewal moves the expiry beyond this many seconds from now.
        again: The owner had the key already, by another thread or process.
        gate: The key's gate, if it was entered for this; to be left after the release.
    """

    grant: Grant
    limit: float
    again: bool = False
    gate: Gate | None = None


@dataclass(slots=True)
class Request:
    """What an owner asks for.

    Attributes:
        permits: How many may have the key at a time.
        permit: The permit to begin with.
        explicit: The owner's id was given by the caller and may hold the key already,
            in another thread or process.
        forfeits: Says, once, how many holds of a grant of that owner were lost here
            and not given back.
        gate: The key's gate, at which the caller queues or which it has.
        queued: The caller has that gate; otherwise it yields to those that queue.
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
    gate: Gate | None = None
    queued: bool = False
    permits: int = 1
    permit: int = 0


@dataclass(frozen=True, slots=True)
class Reading:
    """What was seen of a key that somebody has.

    Attributes:
        remaining: Seconds until the key is free by itself; 0 or less means that it is
            free, and if an attempt failed all the same, that a transaction pins it.
        limit: Seconds beyond which no renewal moves the expiry.
        permit: Which of a lock's permits this is of, the one that is free first.
    """

    owner: str = ""
    holder: str = ""
    note: str = ""
    version: int | None = None
    acquired_at: datetime | None = None
    remaining: float = 0.0
    limit: float = FOREVER
    permit: int | None = None

    def reason_for(self, grant: Grant) -> str | None:
        """Return why a grant is no longer this key's, or ``None`` if it still is."""
        if (self.owner, self.version) == (grant.owner, grant.version):
            return None if self.remaining > 0 else "expired"
        if self.version is None or grant.version is None:
            # A force release leaves who had it, and nothing else of the grant.
            is_forced = self.holder and self.acquired_at is None
            return "taken" if self.owner else "forced" if is_forced else "expired"
        if self.is_forced_from(grant):
            return "forced"
        return "taken" if self.version > grant.version else "expired"

    def is_forced_from(self, grant: Grant) -> bool:
        """Tell whether the grant was force-released, and nobody has had it since."""
        if self.version is None or grant.version is None:
            return False
        # A force release is the only act that leaves no moment of acquisition.
        return self.version == grant.version + 1 and self.acquired_at is None


def first_free(seen: Mapping[str, Reading], keys: Sequence[str]) -> Reading:
    """Return what was seen of the row that is free first; one that isn't there is."""
    free = Reading()
    key = min(keys, key=lambda key: seen.get(key, free).remaining)
    return replace(seen.get(key, free), permit=apart(key)[1])


@dataclass(frozen=True, slots=True)
class Entry:
    """A lock, or one of its permits, as operators see it, by the engine's clock.

    Has what the commands ask of a row of ``DistributedLock``, under the same names.

    Attributes:
        key: The row's, of which ``lock_key`` and ``permit`` are the parts.
        remaining: Seconds until the key is free by itself; 0 or less: it is.
        release_requested_at: Since when the holder has been asked to finish.
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
        number: How many; ``None`` where the engine doesn't know.
        since: Since when the first of them waits, where that is known.
        names: Who they are, for people, as far as that is known.
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
    """What became of renewals.

    Attributes:
        extended, lost: Those in neither were busy: try again soon.
        requested: Those whose holder is asked to finish.
    """

    extended: set[Grant] = field(default_factory=set)
    lost: dict[Grant, str] = field(default_factory=dict)
    requested: set[Grant] = field(default_factory=set)
