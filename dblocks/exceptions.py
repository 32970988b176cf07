"""What can go wrong with a lock."""

from __future__ import annotations

import copyreg
from datetime import datetime

from .texts import visible


class LockError(Exception):
    """The base class of what dblocks raises about locks.

    It is raised itself if one owner nests both forms of a lock on one key.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # Not through __init__, whose keywords are required.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class InvalidKey(LockError, ValueError):
    """A key that can't name a lock: empty, too long, or of forbidden characters."""


class LockTimeout(LockError):
    """The wait ran out while somebody else held the key.

    It never stands for a fault of the database: those stay Django's own.

    Attributes:
        key: The key that was asked for; of several keys, the one that stayed taken.
        permit: The number of the permit that will be free first; ``None`` without
            permits.
        backend: The alias of the backend in the setting ``DBLOCKS``.
        timeout: How long the caller was willing to wait, in seconds; ``None`` is
            forever.
        holder: Who holds it, for people (host, process, thread or task), or ``""``.
        note: The holder's note, or ``""``.
        acquired_at: When the holder got it, an aware ``datetime`` in UTC, or ``None``.
        retry_after: Seconds until the holder's lease can end, at least 0.
        cooling: Whether the holder has released it, and it stays taken for its
            ``hold_at_least``.
    """

    def __init__(
        self,
        key: str,
        *,
        timeout: float | None,
        holder: str = "",
        note: str = "",
        acquired_at: datetime | None = None,
        retry_after: float = 0.0,
        permit: int | None = None,
        backend: str = "default",
        cooling: bool = False,
    ) -> None:
        self.key = key
        self.permit = permit
        self.backend = backend
        self.timeout = timeout
        self.holder = holder
        self.note = note
        self.acquired_at = acquired_at
        self.retry_after: float = max(0.0, retry_after)
        self.cooling = cooling
        super().__init__(key)

    def __str__(self) -> str:
        within = f" within {self.timeout:g} s" if self.timeout else ""
        return (
            f"The lock {self.key!r} was not free{within}: {self._state()}; try again "
            f"later, or wait longer with timeout=."
        )

    def _state(self) -> str:
        """Say who has the lock, as far as that is known, and when it can be free."""
        if not self.holder and not self.retry_after:
            return (
                "others queue for it or, in a database, a transaction has its row or "
                "the whole database locked"
            )
        who, left = visible(self.holder) or "somebody", f"{self.retry_after:.1f} s"
        note = f" ({visible(self.note)})" if self.note else ""
        is_one = self.permit is None
        if self.cooling:
            what = "it" if is_one else "one of its permits"
            return (
                f"{who}{note} has released {what}, and it stays taken for another "
                f"{left}"
            )
        if self.acquired_at is not None:
            who += f" since {self.acquired_at:%Y-%m-%d %H:%M:%S} UTC"
        held = "it is held" if is_one else "all permits are taken, one"
        return f"{held} by {who}{note}; its lease can end in {left}"


class LeaseLost(LockError):
    """The lease is over although nobody released it. Stop: somebody else may follow.

    Attributes:
        key: The key of the lost lease.
        fencing_token: Its fencing token, or ``None`` on engines without tokens.
        reason: ``"expired"``, ``"taken"``, ``"forced"``, ``"backend"`` or ``"forked"``,
            as in :attr:`Lease.lost_reason`; ``"released"`` if the lease had been given
            back.
    """

    _MEANINGS = {
        "expired": "its time ran out",
        "taken": "somebody else holds the lock now",
        "forced": "the lock was force-released",
        "backend": "what keeps the lock could not be reached in time to renew it",
        "forked": "it belongs to the parent process",
    }

    def __init__(
        self, key: str, *, fencing_token: int | None = None, reason: str
    ) -> None:
        self.key = key
        self.fencing_token = fencing_token
        self.reason = reason
        super().__init__(key)

    def __str__(self) -> str:
        token = self.fencing_token
        known_by = "" if token is None else f" (fencing token {token})"
        if self.reason == "released":
            return (
                f"The lease on {self.key!r}{known_by} was released: it proves nothing "
                f"now. Take the lock again."
            )
        meaning = self._MEANINGS.get(self.reason, self.reason)
        return (
            f"The lease on {self.key!r}{known_by} is lost: {meaning}. Stop the work "
            f"that it protected; what was not guarded may have been done twice."
        )
