"""What an engine must do to keep locks, and what else it may do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, NotSupportedError

from .. import validation
from ..signals import announce_force_release, log_request
from .gates import Gate
from .values import (
    Described,
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    Taken,
    Waiters,
    first_free,
)


def _refuse_unknown(place: str, given: Iterable[str], known: frozenset[str]) -> None:
    unknown = set(given) - known
    if unknown:
        raise ImproperlyConfigured(
            f"{place} has unknown names: {', '.join(sorted(map(str, unknown)))}; "
            f"it may have {', '.join(sorted(known)) or 'none'}."
        )


class BaseBackend(ABC):
    """An engine. One object per alias serves all threads of the process.

    Subclasses set the class attributes and implement the verbs. A verb that can't reach
    the engine raises the engine's own error; it never answers "taken".
    """

    #: Whether grants carry fencing tokens.
    has_fencing_tokens = True
    #: Whether a lease can be verified inside a business transaction.
    has_guard = False
    #: Whether the locks are rows, which the admin can show and the commands prune.
    has_table = False
    #: Whether looking at a key asks no server.
    is_local = False
    #: Whether one explicit owner may hold locks in several processes.
    has_shared_owners = True
    #: Whether a key can stay taken after an early release.
    has_cooling = True
    #: Whether leases may differ in length.
    has_own_leases = True
    #: Whether tests can let time pass for the locks.
    has_movable_clock = True
    #: What OpenTelemetry's semantic conventions call its server (``db.system.name``).
    system: str | None = None
    #: What the engine raises if it can't be reached, or can't do what was asked.
    errors: tuple[type[Exception], ...] = (DatabaseError, InterfaceError)
    #: Names that the entry of every engine in ``DBLOCKS`` may have.
    common_names = frozenset({"BACKEND", "LEASE", "TIMEOUT", "OPTIONS"})
    #: Further names that its own entry may have.
    setting_names: frozenset[str] = frozenset()
    #: Names that ``OPTIONS`` may have; ``None`` for those of another library.
    option_names: frozenset[str] | None = frozenset()

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        self.alias = alias
        self.options: dict[str, Any] = config["OPTIONS"]
        place = f"DBLOCKS[{alias!r}]"
        _refuse_unknown(place, config, self.common_names | self.setting_names)
        if self.option_names is not None:
            _refuse_unknown(f"{place}['OPTIONS']", self.options, self.option_names)
        try:
            self.lease = validation.lease(config["LEASE"], "LEASE")
            self.timeout = validation.timeout(config["TIMEOUT"], "TIMEOUT")
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(f"DBLOCKS[{alias!r}]: {error}") from error

    def check_terms(self, lease: float, hold_at_least: float) -> None:  # noqa: B027
        """Raise ``NotSupportedError`` or ``ValueError`` for what it can't promise."""

    # What every engine must have

    @abstractmethod
    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        """Grant a key or say who has it, without waiting for it.

        If an explicit owner has the key already, count one more hold.

        Args:
            patience: For how many seconds passing faults may be sat out. The engine's
                own patience counts if it is longer.
        """

    @abstractmethod
    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        """Extend a grant that gets one more hold.

        Args:
            count: How many holds there are afterwards. ``None`` adds one, for an owner
                whose other holds this process can't see.
        """

    @abstractmethod
    def read_all(
        self, keys: Sequence[str], patience: float | None = None
    ) -> dict[str, Reading]:
        """Look at keys without changing them. Leaves out those that were never taken.

        Args:
            patience: For how many seconds passing faults may be sat out. Default: the
                engine's own patience.
        """

    def look(self, keys: Sequence[str], patience: float | None = None) -> Reading:
        """Look at the row of a key, or at the rows of its permits.

        Returns:
            Who has the key; of several permits, the one that will be free first.
        """
        return first_free(self.read_all(keys, patience), keys)

    @abstractmethod
    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        """Extend grants."""

    @abstractmethod
    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        """Give back one hold, or all but ``count``; say whether the grant was current.

        The last one frees the key, or leaves it cooling.

        Args:
            count: How many holds are left. ``None`` takes one off, for an owner whose
                other holds this process can't see.
            deadline: The local clock's time before which the grant can't have run out.
        """

    def may_have_written(self, error: BaseException) -> bool:
        """Tell whether a verb that raised this error may have been carried out."""
        return True

    # What an engine may do in fewer steps

    def try_acquire_all(
        self, request: Request, keys: Sequence[str], patience: float
    ) -> list[Granted] | Taken | None:
        """Grant several free keys at once, or none; ``None`` if that isn't possible.

        After a ``None`` the caller asks for the keys one by one, and learns who has
        one. Where a refused caller must not write, the answer is ``Taken``, and the
        caller asks one by one only if it has time left.

        Args:
            request: For whom, and how; its own key is ignored.
        """
        return None

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, deadline: float
    ) -> set[Grant]:
        """:meth:`release` for several grants. Return those that were current."""
        return {g for g in grants if self.release(g, count=count, deadline=deadline)}

    def undo_all(self, grants: Sequence[Grant]) -> None:
        """Give back grants of one owner that nobody has used. None of them cools."""
        self.release_all(grants, count=0, deadline=0.0)

    # What an engine may have

    @property
    def using(self) -> str:
        """The alias of the database whose rows the locks are."""
        raise NotSupportedError(
            f"The backend {self.alias!r} keeps no rows in a database."
        )

    def gate(self, request: Request) -> Gate | None:
        """Return a new gate at which to queue for a key, or ``None`` without gates."""
        return None

    def renewal_session(self) -> AbstractContextManager[object]:
        """Return the context in which a renewal thread runs."""
        return nullcontext()

    def close(self) -> None:  # noqa: B027
        """Free the keys and queue places of this process, which is about to end.

        Needed if the engine would keep them beyond the process's end.
        """

    def reason(self, grant: Grant) -> str:
        """Say why a grant that is no longer current is lost."""
        seen = self.read_all([grant.key]).get(grant.key, Reading())
        return seen.reason_for(grant) or "expired"

    def is_in_database(self, using: str) -> bool:
        """Tell whether the locks are rows of this database."""
        return self.has_table and using == self.using

    def can_write(self) -> bool:
        """Tell whether a re-entry can be written now, not only counted here."""
        return True

    def check_caller(self) -> None:  # noqa: B027
        """Raise if async code would wait for a transaction of its own sync caller."""

    def guard(self, grants: Sequence[Grant], using: str | None) -> None:
        """Verify and pin grants in the caller's transaction.

        Raises:
            LeaseLost: One of them is no longer current.
        """
        or_token = " or the fencing token" if self.has_fencing_tokens else ""
        raise NotSupportedError(
            f"The backend {self.alias!r} has no guard: its locks and the guarded data "
            f"can't be in one transaction. Use lease.check(){or_token}."
        )

    def guard_commits(self, grants: Sequence[Grant], aliases: Sequence[str]) -> None:
        """Guard the transactions on some databases that are about to commit.

        The grants stay pinned until the outermost of the transactions has ended.
        """
        raise NotImplementedError

    # Operators

    def entries(self, key: str | None = None) -> Iterable[Entry]:
        """Return what the engine knows of all locks, or of one key and its permits."""
        raise NotSupportedError(f"The backend {self.alias!r} can't list its locks.")

    def waiters(self, key: str) -> Waiters:
        """Return who waits for a key, as far as the engine knows."""
        return Waiters()

    def force_release(
        self,
        key: str,
        *,
        version: int | None = None,
        older_than: float | timedelta | None = None,
        by: object = None,
        reason: str = "",
        permit: int | None = None,
    ) -> bool:
        """Take a key away from its holder, and fence that holder off.

        Like the method of ``DistributedLock.objects``, which knows only the locks of a
        database.
        """
        row_key = validation.key_of_row(key, permit)
        how = validation.intervention(by, reason, version)
        age = 0.0
        if older_than is not None:
            age = validation.age(older_than)
        ended = self.end_grant(row_key, version, age)
        if ended is None:
            return False
        announce_force_release(type(self), row_key, ended, backend=self.alias, **how)
        return True

    def end_grant(
        self, row_key: str, version: int | None, age: float
    ) -> Described | None:
        """Free a row that was held for ``age`` seconds, with this version or any.

        Returns:
            Owner, holder and token of the grant that it ended, if it ended one.
        """
        raise NotSupportedError(f"The backend {self.alias!r} can't force a release.")

    def request_release(
        self,
        key: str,
        *,
        version: int | None = None,
        by: object = None,
        reason: str = "",
        permit: int | None = None,
    ) -> bool:
        """Ask the holder of a key to finish. Nothing is taken away.

        Like the method of ``DistributedLock.objects``, which knows only the locks of a
        database.
        """
        row_key = validation.key_of_row(key, permit)
        how = validation.intervention(by, reason, version)
        asked = self.ask_holder(row_key, version)
        if asked is None:
            return False
        log_request(row_key, asked, **how)
        return True

    def ask_holder(self, row_key: str, version: int | None) -> Described | None:
        """Record that a row's holder is asked to finish, with this version or any.

        Returns:
            Owner, holder and token of the grant, if there is one.
        """
        raise NotSupportedError(f"The backend {self.alias!r} can't ask for a release.")

    # Checks

    def check_configured(self) -> None:  # noqa: B027
        """Raise ``ImproperlyConfigured`` if what the settings name doesn't exist."""

    def check(self) -> Iterable[CheckMessage]:
        """Yield messages about the choice of this engine."""
        return ()

    def check_connection(
        self, databases: Sequence[str] | None
    ) -> Iterable[CheckMessage]:
        """Yield messages about the settings of the engine's server, without asking it.

        Only if the server is one of these databases; with ``None``, always.
        """
        return ()

    def check_server(self, databases: Sequence[str]) -> Iterable[CheckMessage]:
        """Ask the server, if it is one of these databases, and yield messages."""
        return ()

    # Tests

    def test_connection(self) -> object:
        """Return the connection of the ``TestCase`` that this thread is in, if any."""
        return None

    def is_in_test_case(self) -> bool:
        """Tell whether a ``TestCase`` in any thread wraps work on this engine."""
        return False

    def owe(  # noqa: B027
        self,
        connection: object,
        renewal: Renewal,
        answer: Callable[[Renewed], object],
        is_live: Callable[[], bool],
    ) -> None:
        """Remember a renewal that only a test's own connection can make.

        ``answer`` is called with the outcome. If ``is_live`` returns ``False`` by then,
        the renewal is dropped.
        """

    def move_clock(self, seconds: float) -> None:
        """Let time pass for the locks."""
        raise NotImplementedError(
            f"The clock of the backend {self.alias!r} can't be moved: use "
            f"LocMemBackend."
        )

    def clear(self) -> None:
        """Free all keys."""
        for entry in self.entries():
            if entry.state != "free":
                key, permit = entry.lock_key, entry.permit
                self.force_release(
                    key, permit=permit, by="dblocks.test", reason="cleared"
                )
