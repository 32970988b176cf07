"""The few verbs that an engine must have to keep locks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db import NotSupportedError

from .. import arguments
from ..waiting import Gate, pause

FOREVER = 10.0**9
"""Seconds, some thirty years: the holding limit of a lock that has none."""

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


@dataclass(slots=True)
class Request:
    """What an owner asks for. Durations are seconds.

    Attributes:
        count: The number of holds that the owner has with this one, if it knows; a
            request that is repeated after a lost reply then stays one hold.
        max_hold: How long after the acquisition no re-entry moves the expiry.
        queued: The caller has the key's gate; otherwise it lets those pass that queue.
        reenter: The owner may hold the key already.
        at_once: The caller won't wait.
    """

    key: str
    owner: str
    lease: float
    max_hold: float
    holder: str = ""
    note: str = ""
    count: int | None = None
    queued: bool = False
    reenter: bool = True
    at_once: bool = False


@dataclass(frozen=True)
class Reading:
    """What was seen of a key that somebody has.

    Attributes:
        remaining: Seconds until the key is free by itself; 0 or less means that it is
            free, and if an attempt failed all the same, that a transaction pins it.
    """

    owner: str = ""
    holder: str = ""
    note: str = ""
    version: int | None = None
    acquired_at: datetime | None = None
    remaining: float = 0.0

    def reason_for(self, grant: Grant) -> str | None:
        """Return why a grant is no longer this key's, or ``None`` if it still is."""
        if (self.owner, self.version) == (grant.owner, grant.version):
            return None if self.remaining > 0 else "expired"
        if self.version is None or grant.version is None:
            return "taken" if self.owner else "expired"
        # A force release is the only act that leaves no moment of acquisition.
        if self.version == grant.version + 1 and self.acquired_at is None:
            return "forced"
        return "taken" if self.version > grant.version else "expired"


@dataclass(frozen=True)
class Renewal:
    """A grant to be renewed, with its terms in seconds."""

    grant: Grant
    lease: float
    max_hold: float


@dataclass
class Renewed:
    """What became of renewals. Those in neither set were busy: try again soon."""

    extended: set[Grant] = field(default_factory=set)
    lost: dict[Grant, str] = field(default_factory=dict)


class RenewalSession:
    """What a renewal thread renews through; it belongs to that thread."""

    def __init__(self, backend: BaseBackend) -> None:
        self.backend = backend

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        """Extend grants, or say that they are lost."""
        return self.backend.renew(renewals)

    def close(self) -> None:
        """Give up what it has open."""


class BaseBackend(ABC):
    """An engine. One object an alias serves all threads of the process.

    Subclasses set the class attributes and implement the verbs. A verb that can't
    reach the engine raises the engine's own error; it never answers "taken".
    """

    #: Whether grants carry fencing tokens.
    has_fencing_tokens = True
    #: Whether a lease can be verified inside a business transaction.
    has_guard = False
    #: Names that ``OPTIONS`` may have.
    option_names: frozenset[str] = frozenset()

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        self.alias = alias
        self.options: dict[str, Any] = config["OPTIONS"]
        unknown = set(config) - {"BACKEND", "LEASE", "TIMEOUT", "OPTIONS"}
        if unknown:
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}] has unknown names: {', '.join(sorted(unknown))}."
            )
        unknown = set(self.options) - self.option_names
        if unknown:
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]['OPTIONS'] has unknown names: "
                f"{', '.join(sorted(unknown))}."
            )
        try:
            self.lease = arguments.lease(config["LEASE"], "LEASE")
            self.timeout = arguments.timeout(config["TIMEOUT"], "TIMEOUT")
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(f"DBLOCKS[{alias!r}]: {error}") from error

    @abstractmethod
    def try_acquire(self, request: Request, patience: float) -> Grant | Reading:
        """Grant a key or say who has it, without waiting for it.

        Args:
            patience: How long, in seconds, faults that pass may be sat out.
        """

    @abstractmethod
    def read(self, key: str) -> Reading | None:
        """Look at a key without touching it; ``None`` when it was never taken."""

    @abstractmethod
    def renew(self, renewals: Sequence[Renewal], patience: float = 1.0) -> Renewed:
        """Extend grants."""

    @abstractmethod
    def release(
        self,
        grant: Grant,
        *,
        count: int | None,
        hold_at_least: float,
        patience: float,
    ) -> bool:
        """Give back one hold, or all but ``count``; say whether it was current."""

    def gate(self, key: str) -> Gate | None:
        """Return a new gate to queue at for a key, or ``None`` where there is none."""
        return None

    def pause(self, known_for: float, *, alone: bool) -> float:
        """Return the seconds until the next look; see :func:`dblocks.waiting.pause`."""
        return pause(known_for, alone=alone)

    def renewal_session(self) -> RenewalSession:
        """Return what a renewal thread renews through."""
        return RenewalSession(self)

    def reason(self, grant: Grant) -> str:
        """Say why a grant that is no longer current is lost."""
        seen = self.read(grant.key)
        return (seen and seen.reason_for(grant)) or "expired"

    def test_connection(self) -> object:
        """Return the connection that a grant is bound to inside a ``TestCase``."""
        return None

    def is_in_database(self, using: str) -> bool:
        """Tell whether the locks are rows of this database."""
        return False

    def can_write(self) -> bool:
        """Tell whether a re-entry can be recorded now, or is only counted here."""
        return True

    def guard(self, grant: Grant, using: str | None) -> None:
        """Verify and pin a grant in the caller's transaction.

        Raises:
            LeaseLost: It is no longer current.
        """
        raise NotSupportedError(
            f"The backend {self.alias!r} has no guard: its locks and the guarded data "
            f"can't be in one transaction. Use lease.check() or the fencing token."
        )

    def pin(self, grant: Grant, aliases: Sequence[str], pins: ExitStack) -> None:
        """Guard the transactions on some databases that are about to commit.

        Args:
            pins: Closed after the commit; what must last until then goes in there.
        """
        raise NotImplementedError
