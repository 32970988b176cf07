"""The verbs that ``Lease`` and ``Leases`` share, and both as ``with`` blocks."""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    connections,
    transaction,
)
from django.utils.asyncio import async_unsafe

from . import clock, validation
from .advice import replicas_watched
from .backends.base import BaseBackend
from .backends.database import transactions
from .exceptions import LeaseLost
from .holding.holds import RELEASED, Hold
from .holding.sets import give_back, log_lapse
from .waiting.threads import call_in_thread

if TYPE_CHECKING:
    from .leases import Lease

logger = logging.getLogger("dblocks")

F = TypeVar("F", bound=Callable[..., Any])

# Typed here, because Django itself has no types.
sync_only: Callable[[F], F] = async_unsafe(
    "A lock's sync form was used inside a running event loop; use its async twin: "
    "async with, aacquire(), atry_acquire(), alocked(), arenew(), arelease()."
)

T = TypeVar("T", bound="LeaseBlock")
AtEnd = Callable[[Callable[[], object]], bool]

PATIENCE = 1.0
"""Seconds for which a renewal that meets a locked row is tried again."""

# Without the app in INSTALLED_APPS, releases wait for the end of transactions too.
transactions.watch()


class LeaseBlock(ABC):
    """One lease, or several that were taken together; each verb acts on all."""

    def __init__(self, atomic: bool) -> None:
        self._atomic = atomic
        self._block: AbstractContextManager[None] | None = None
        self._deferred = False
        self._committed = False

    def __reduce_ex__(self, protocol: object) -> Any:
        # A copy would share the file or connection of the grant's gate, and close it
        # while the grant still needs it.
        raise TypeError(
            f"A {type(self).__name__} can't be copied or pickled: hand it over itself, "
            f"or give both sides the same owner=."
        )

    @abstractmethod
    def _each(self) -> Sequence[Lease]:
        """Return the leases, in the order of their keys; at least one."""

    @property
    def _backend(self) -> BaseBackend:
        return self._each()[0]._hold.backend

    @property
    @abstractmethod
    def _open(self) -> bool:
        """Whether at least one lease has not been given back."""

    @property
    def backend(self) -> str:
        """The alias of the backend in the setting ``DBLOCKS``."""
        return self._backend.alias

    @property
    def owner(self) -> str:
        """The owner's id, up to 64 characters.

        To share a lock, give an id of your own as ``owner=``. A lock without one is
        freed by this process's releases, even if others have presented its id.
        """
        return self._each()[0]._hold.grant.owner

    @property
    def lost_reason(self) -> str | None:
        """Why the lease is lost, or ``None``. Of several leases, why the first was.

        ``"expired"``: its time ran out. ``"taken"``: somebody else has the lock.
        ``"forced"``: it was force-released, and nobody has had it since. ``"backend"``:
        the database was out of reach until the deadline. ``"forked"``: this is a child
        process, and the lease belongs to its parent.
        """
        first = self._first_lost()
        return None if first is None else first._lost_reason

    def _first_lost(self) -> Lease | None:
        lost = [each for each in self._each() if each._lost_reason is not None]
        return min(lost, key=lambda each: each._hold.over_at) if lost else None

    @property
    def release_requested(self) -> bool:
        """Whether the holder has been asked to finish; of several, whether any has.

        Does no I/O. The holder learns of the request with its next renewal, so with
        ``renew=False`` only by calling :meth:`renew`. Nothing is taken away. See
        ``DistributedLock.objects.request_release``.
        """
        return any(each._hold.release_requested for each in self._each())

    @property
    def held(self) -> bool:
        """Whether the lock is held, as far as this process knows. Does no I/O.

        Turns false before the database would grant the key to somebody else. There are
        three exceptions, and :meth:`guard` covers all of them: a force release, which
        is noticed at the next renewal; a database clock that is set forward; and a
        machine that was suspended and has no clock that counts suspension.
        """
        return all(each._hold.is_live() and each._open for each in self._each())

    def remaining(self) -> float:
        """Return the seconds that are left, 0.0 if none; of several leases, the fewest.

        Does no I/O. Counts on the local monotonic clock, from just before the last
        successful request was sent, and leaves a margin: 10 % of the lease or 0.25 s,
        whichever is more, but never more than half the lease.
        """
        return min(
            each._hold.remaining() if each._open else 0.0 for each in self._each()
        )

    def check(self) -> None:
        """Raise :exc:`LeaseLost` unless the lock is :attr:`held`. No I/O."""
        if not self.held:
            for each in self._each():
                each._hold.note_overdue()
            raise self._lost()

    def _lost(self) -> LeaseLost:
        first = self._first_lost()
        if first is None:
            closed = (each for each in self._each() if not each._open)
            first = next(closed, self._each()[0])
        return LeaseLost(
            first.key,
            fencing_token=first.fencing_token,
            reason=first._lost_reason or RELEASED,
        )

    @sync_only
    def guard(self, using: str | None = None) -> None:
        """Verify, in the caller's transaction, that the lock is still held.

        Pins the lock's row until that transaction ends, so nobody else can take the
        lock before the commit. Call it in the block that commits: on PostgreSQL a
        savepoint that is rolled back unpins the row. The row decides, not the clock: a
        lease that is overdue but that nobody else has taken passes. The holder's own
        renewals don't disturb the guard, at any isolation level. The rows of several
        keys are verified in one statement, in the order of the keys.

        Args:
            using: The alias of the transaction's database. Default: the lock's.

        Raises:
            LeaseLost: Somebody else may hold the lock. Let the exception roll the block
                back.
            TransactionManagementError: No transaction is open.
            NotSupportedError: The backend has no guard, or the locks live in another
                database.
            OperationalError: The transaction can't see the row: on PostgreSQL its
                snapshot is older than the lease; on SQLite others kept it out.
        """
        with self._verifying() as holds:
            self._backend.guard([hold.grant for hold in holds], using)

    @contextmanager
    def _verifying(self) -> Generator[list[Hold]]:
        leases = self._each()
        if any(not x._open or x._hold.lost_reason == "forked" for x in leases):
            raise self._lost()
        holds = [each._hold for each in leases]
        try:
            yield holds
        except LeaseLost as error:
            for hold in holds:
                if (hold.key, hold.grant.version) == (error.key, error.fencing_token):
                    hold.lose(error.reason)
            raise

    # Renewing

    @sync_only
    def renew(self, lease: float | timedelta | None = None) -> None:
        """Extend the lease from now.

        Args:
            lease: For how long, in seconds or as a ``timedelta``. Default: the lock's
                lease. A renewal never shortens a lease and never passes ``max_hold``.

        Raises:
            LeaseLost: The lease is lost. A lost lease is never brought back.
            DatabaseError: The database is out of reach, or a transaction has kept the
                row locked for more than a second. The lease runs on as before.
            TransactionManagementError: On SQLite, which has one writer, this thread has
                a transaction open there. The lease runs on as before.
        """
        seconds = None if lease is None else validation.lease(lease)
        self.check()
        left = [each._hold for each in self._each()]
        give_up = clock.monotonic() + PATIENCE
        while True:
            sent = clock.monotonic()
            outcome = self._backend.renew([hold.renewal(seconds) for hold in left])
            left = [x for x in left if not x.note_answer(outcome, sent, seconds)]
            if not left:
                break
            if clock.monotonic() >= give_up:
                why = "a transaction has its row locked"
                if not self._backend.has_table:
                    why = "too few servers have it"
                raise DatabaseError(
                    f"The lease on {left[0].key!r} was not renewed: {why}. It is held "
                    f"for {left[0].remaining():.1f} s more."
                )
            time.sleep(0.01)
        self.check()

    async def arenew(self, lease: float | timedelta | None = None) -> None:
        """Async twin of :meth:`renew`."""
        await call_in_thread(self._backend, lambda: self.renew(lease))

    # Releasing

    @sync_only
    def release(self) -> bool:
        """Give the lock back.

        Calling it again does nothing. Inside an open transaction the lock is kept, and
        renewed, until that transaction ends, by commit or by rollback.

        Returns:
            ``True`` if the lock was held until now, ``False`` if it had been lost or
            given back before.

        Raises:
            DatabaseError: The database is out of reach. The lease is left to lapse.
        """
        return self._release_or_defer()

    async def arelease(self) -> bool:
        """Async twin of :meth:`release`. Finishes if the task is cancelled."""
        caller = transactions.caller()
        at_end = None if caller is None else caller.at_end
        release = partial(self._release_or_defer, at_end)
        return await call_in_thread(self._backend, release)

    def _due(self) -> Sequence[Lease]:
        """Return the leases whose release isn't deferred to a transaction's end."""
        return [each for each in self._each() if not each._deferred]

    def _release_or_defer(self, at_end: AtEnd | None = transactions.at_own_end) -> bool:
        """Release, now or when the open transactions end.

        Args:
            at_end: Defers a call until they end; returns ``False`` if none is open. By
                default for this thread's transactions; ``None`` defers nothing.
        """
        if self._deferred or not self._open:
            return False
        due = self._due()
        # After a passed guard even an overdue row is pinned until the transaction ends.
        counts = self._committed or any(each._hold.is_live() for each in due)
        if counts and at_end and at_end(partial(self._release_at_end, due)):
            for each in (self, *due):
                each._deferred = True
            return self._committed or self.held
        return self._release_now(due)

    def _release_at_end(self, leases: Sequence[Lease]) -> None:
        try:
            # Raises with autocommit off: nobody sees when the data are committed.
            transactions.transaction_is_open()
            if self._open and not self._release_now(leases) and not self._committed:
                lost = self._first_lost()
                # If no lease is lost, some had been released before.
                if lost is not None:
                    logger.warning(
                        "lost before the transaction ended key=%r permit=%s reason=%s",
                        *(lost.key, lost._hold.permit, lost.lost_reason),
                    )
        except self._backend.errors as error:
            self._let_lapse(leases, error)

    @abstractmethod
    def _release_now(self, leases: Sequence[Lease]) -> bool:
        """Give leases back now, whatever transactions this thread has open."""

    def _undo(self) -> bool:
        """Give back what no caller has received; ``False`` if it is left to lapse."""
        closed = [each for each in self._each() if each._close()]
        if not give_back([each._hold for each in closed]):
            return False
        for each in closed:
            if not each._hold.counted and each.lost_reason is None:
                each._tell_released()
        return True

    def _let_lapse(self, leases: Sequence[Lease], error: BaseException) -> None:
        """Close leases that are open, without telling the engine: they lapse."""
        for each in leases:
            if each._close():
                each._hold.forsake()
        log_lapse([each._hold for each in leases], error)

    # As a context manager

    def __enter__(self: T) -> T:
        outer = self._block
        if outer is not None:
            raise RuntimeError(
                f"{self!r} has atomic=True and is entered already: leaving this block "
                f"would commit and release in the middle of the outer one. Use "
                f"transaction.atomic() for a part of it."
            )
        try:
            self._begin()
            return self
        except BaseException:
            if self._block is not None:
                self.__exit__(*sys.exc_info())
            raise

    @sync_only
    def _begin(self) -> None:
        self._refuse_released()
        if self._atomic:
            self._block = self._committing()
            self._block.__enter__()

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: Any) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            try:
                block.__exit__(exc_type, *exc_info)
            except BaseException:
                self._leave(sys.exc_info()[0])
                raise
        self._leave(exc_type)

    def _leave(self, exc_type: type[BaseException] | None) -> None:
        try:
            if self._release_or_defer():
                return
        except self._backend.errors as error:
            self._let_lapse(self._due(), error)
        self._raise_if_lost(exc_type)

    def _raise_if_lost(self, exc_type: type[BaseException] | None) -> None:
        lost = None if exc_type or self._committed else self._first_lost()
        # The rollback at a test's end undoes what the lock protected, too.
        if lost is not None and not lost._hold.is_over_with_its_test():
            raise self._lost()

    async def __aenter__(self: T) -> T:
        if self._atomic:
            raise TypeError("atomic=True can't be used with async with.")
        self._refuse_released()
        return self

    def _refuse_released(self) -> None:
        """Raise if a lease was given back: the block would run without its lock."""
        if not all(each._open for each in self._each()):
            raise self._lost()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, *exc_info: Any
    ) -> None:
        # RuntimeError: no thread can be started.
        errors: tuple[type[Exception], ...] = (*self._backend.errors, RuntimeError)
        try:
            await self.arelease()
        except errors as error:
            self._let_lapse(self._due(), error)
        self._raise_if_lost(exc_type)

    # Transactions that commit only while the lock is held

    @contextmanager
    def _committing(self) -> Generator[None]:
        with replicas_watched():
            with transaction.atomic():
                yield
                guarded = not connections[DEFAULT_DB_ALIAS].needs_rollback
                if guarded:
                    self._guard_commits([DEFAULT_DB_ALIAS])
            self._committed = guarded

    def _guard_commits(self, aliases: Sequence[str]) -> None:
        """Guard the open transactions on some databases, which are to commit next.

        Raises:
            LeaseLost: The lock is no longer held.
        """
        if not self._backend.has_guard:
            self.check()
            return
        with self._verifying() as holds:
            self._backend.guard_commits([hold.grant for hold in holds], aliases)
