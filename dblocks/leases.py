"""Leases: the proof of holding a lock."""

from __future__ import annotations

import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from django.db import (
    DEFAULT_DB_ALIAS,
    DatabaseError,
    InterfaceError,
    connections,
    transaction,
)
from django.utils.asyncio import async_unsafe

from . import clock, signals, validation
from .backends.database import transactions
from .exceptions import LeaseLost
from .holding import losses, owners
from .holding.holds import PATIENCE, RELEASED, Hold, nobody
from .waiting.threads import call_in_thread
from .waiting.wait import log_lapse

logger = logging.getLogger("dblocks")

sync_only = async_unsafe(
    "A lock's sync form was used inside a running event loop; use its async twin: "
    "async with, aacquire(), atry_acquire(), alocked(), arenew(), arelease()."
)


class Lease:
    """The proof of holding a lock, for a bounded time that is renewed.

    A context manager that releases on leaving, and then raises :exc:`LeaseLost` if the
    lease was lost meanwhile and the body raised nothing itself. May be handed to
    another thread and released there. One that nothing refers to any more is renewed
    no longer, with a ``ResourceWarning``. ::

        with distributed_lock("import") as lease:
            for row in rows:
                lease.check()
                ...
    """

    def __init__(self, hold: Hold, atomic: bool) -> None:
        self._hold = hold
        self._atomic = atomic
        self._block: AbstractContextManager[None] | None = None
        self._deferred = False
        self._committed = False
        self._ref = weakref.ref(self)
        hold.leases.add(self._ref)
        hold.promised = nobody

    def __repr__(self) -> str:
        state = "held" if self.held else self.lost_reason or RELEASED
        return f"<Lease {self.key!r} fencing_token={self.fencing_token} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        # Run by the garbage collector, at any point: it must not note a loss.
        if hasattr(self, "_ref") and self._open and self._hold.lost_reason is None:
            _warn(
                f"The lease on {self.key!r} (fencing token {self.fencing_token}) was "
                f"dropped without release(); it is not renewed any more.",
                ResourceWarning,
                stacklevel=2,
            )

    @property
    def _open(self) -> bool:
        return self._ref in self._hold.leases

    def _close(self) -> bool:
        """Count it as given back, once."""
        try:
            self._hold.leases.remove(self._ref)
        except KeyError:
            return False
        return True

    @property
    def key(self) -> str:
        """What is locked."""
        return self._hold.grant.key

    @property
    def owner(self) -> str:
        """The owner's id, up to 64 characters."""
        return self._hold.grant.owner

    @property
    def backend(self) -> str:
        """The alias of the backend in ``DBLOCKS``."""
        return self._hold.backend.alias

    @property
    def fencing_token(self) -> int | None:
        """A number greater than that of every earlier grant of this key, ever.

        Re-entering gives the same one. A resource that remembers the greatest token
        it has seen can refuse whoever comes with a smaller one (Kleppmann, "How to do
        distributed locking", 2016). ``None`` on engines without tokens.
        """
        return self._hold.grant.version

    @property
    def lost_reason(self) -> str | None:
        """Why the lease is lost, or ``None``.

        ``"expired"``, ``"taken"`` (somebody else has it), ``"forced"``
        (force-released, and nobody has had it since), ``"backend"`` (the database was
        out of reach until the deadline) or ``"forked"`` (a child process inherited
        it).
        """
        return self._hold.lost_reason

    @property
    def held(self) -> bool:
        """Whether the lock is held for all that is known here. No I/O.

        Never true once the database would grant the key to somebody else, but for
        three cases that :meth:`guard` covers: a force release, known at the next
        renewal; a database clock that was set forward; and a suspended machine
        without a clock that counts suspension.
        """
        return self._hold.is_live() and self._open

    def remaining(self) -> float:
        """Return the seconds that are left, 0.0 when over.

        Counted on the local monotonic clock from before the last successful request
        was sent, less a margin of max(10 % of the lease, 0.25 s), itself at most half
        the lease.
        """
        return self._hold.remaining() if self._open else 0.0

    def check(self) -> None:
        """Raise :exc:`LeaseLost` unless the lock is :attr:`held`. No I/O."""
        if not self.held:
            self._hold.note_overdue()
            raise self._lost()

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            self.key,
            fencing_token=self.fencing_token,
            reason=self.lost_reason or RELEASED,
        )

    @sync_only
    def guard(self, using: str | None = None) -> None:
        """Verify, in the caller's transaction, that the lock is still held.

        Pins the lock's row until that transaction ends: nobody can take the lock over
        before the commit. It asks the row, not the clock: overdue but not taken
        passes. The holder's own renewals don't disturb it, at any isolation level.

        Args:
            using: The alias of the transaction's database; default: the lock's.

        Raises:
            LeaseLost: Somebody else may have the lock; let it roll back the block.
            TransactionManagementError: There is no transaction open.
            NotSupportedError: The backend has no guard, or the locks live in another
                database.
        """
        with self._verifying():
            self._hold.backend.guard(self._hold.grant, using)

    @contextmanager
    def _verifying(self) -> Generator[None]:
        if not self._open or self.lost_reason == "forked":
            raise self._lost()
        try:
            yield
        except LeaseLost as error:
            self._hold.lose(error.reason)
            raise

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once, with the lease, when the lease is found lost.

        It runs in a thread of dblocks, by the local deadline at the latest (after a
        force release, at the next renewal); at once if the lease is lost already. Its
        errors are logged.
        """
        self._hold.callbacks.append((self._ref, callback))
        self._hold.note_overdue()
        if self._hold.lost_reason is not None:
            losses.call_back(self._hold)

    # Renewing

    @sync_only
    def renew(self, lease: object = None) -> None:
        """Extend the lease from now.

        Args:
            lease: For how long, seconds or ``timedelta``; default: the lock's lease.
                It never shortens and never passes ``max_hold``.

        Raises:
            LeaseLost: It is gone; a lost lease is never brought back.
            DatabaseError: The database is out of reach, or a transaction has the row
                pinned for longer than a second; the lease runs on as before.
        """
        seconds = None if lease is None else validation.lease(lease)
        self.check()
        hold = self._hold
        give_up = clock.monotonic() + PATIENCE
        while True:
            sent = clock.monotonic()
            outcome = hold.backend.renew([hold.renewal(seconds)])
            if hold.grant in outcome.extended:
                hold.extend(sent, seconds)
                break
            if hold.grant in outcome.lost:
                hold.lose(outcome.lost[hold.grant])
                break
            if clock.monotonic() >= give_up:
                raise DatabaseError(
                    f"The lease on {self.key!r} was not renewed: a transaction has "
                    f"its row locked. It is held for {self.remaining():.1f} s more."
                )
            time.sleep(0.01)
        self.check()

    async def arenew(self, lease: object = None) -> None:
        """:meth:`renew` for async code."""
        await call_in_thread(self._hold.backend, lambda: self.renew(lease))

    # Releasing

    @sync_only
    def release(self) -> bool:
        """Give the lock back.

        Idempotent. Inside an open transaction the lock is kept, and renewed, until
        that transaction has ended, by commit or by rollback.

        Returns:
            ``True`` if it was held until now, ``False`` if it had been lost or given
            back before.

        Raises:
            DatabaseError: The database is out of reach; the lease is left to lapse.
        """
        return self._release_or_defer()

    async def arelease(self) -> bool:
        """:meth:`release` for async code. Goes on if the task is cancelled."""
        return await call_in_thread(self._hold.backend, self._release_now)

    def _release_or_defer(self) -> bool:
        if self._deferred or not self._open:
            return False
        if self._hold.is_live() and transactions.transaction_is_open():
            self._deferred = True
            transactions.at_end(transactions.RELEASE, self._release_at_end)
            return True
        return self._release_now()

    def _release_at_end(self) -> None:
        try:
            if self._open and not self._release_now() and not self._committed:
                logger.warning(
                    "lost before the transaction ended key=%r reason=%s",
                    self.key,
                    self.lost_reason,
                )
        except (DatabaseError, InterfaceError) as error:
            log_lapse(self._hold, error)

    def _release_now(self) -> bool:
        """Give it back without regard to the transactions of this thread."""
        if not self._close():
            return False
        hold = self._hold
        held = hold.release(self._committed)
        if held and not hold.counted:
            self._tell_released()
        return held

    def _tell_released(self) -> None:
        if logger.isEnabledFor(logging.DEBUG) or signals.lock_released.receivers:
            facts = self._hold.facts(held_for=clock.monotonic() - self._hold.started)
            logger.debug(
                "released key=%(key)r backend=%(backend)s owner=%(owner)s "
                "fencing_token=%(fencing_token)s held_for=%(held_for).3f",
                facts,
            )
            signals.lock_released.send_robust(self._hold.sender, **facts, lease=self)

    # As a context manager

    @sync_only
    def __enter__(self) -> Lease:
        if self._atomic:
            block = self._committing()
            try:
                block.__enter__()
            except BaseException:
                self._leave(sys.exc_info()[0])
                raise
            self._block = block
        return self

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
            self._release_or_defer()
        except (DatabaseError, InterfaceError) as error:
            if self._close():
                self._hold.forsake()
            log_lapse(self._hold, error)
        self._raise_if_lost(exc_type)

    def _raise_if_lost(self, exc_type: type[BaseException] | None) -> None:
        if exc_type is None and not self._committed and self.lost_reason is not None:
            raise self._lost()

    async def __aenter__(self) -> Lease:
        if self._atomic:
            raise TypeError("atomic=True can't be used with async with.")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, *exc_info: Any
    ) -> None:
        try:
            await self.arelease()
        except (DatabaseError, InterfaceError, RuntimeError) as error:
            # RuntimeError: no thread can be started.
            if self._close():
                self._hold.forsake()
            log_lapse(self._hold, error)
        self._raise_if_lost(exc_type)

    # Transactions that commit only while the lock is held

    @contextmanager
    def _committing(self) -> Generator[None]:
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
        if not self._hold.backend.has_guard:
            self.check()
            return
        with self._verifying():
            self._hold.backend.guard_commits(self._hold.grant, aliases)

    def _is_in_database(self, using: str) -> bool:
        return self._hold.backend.is_in_database(using)


def current_lease(key: str | None = None) -> Lease:
    """Return the innermost lease of the current owner. ::

        @distributed_lock("order:{order_id}")
        def ship(order_id):
            order = Order.objects.filter(pk=order_id)
            order.fenced_update(current_lease(), shipped=True)

    Args:
        key: Only of this key.

    Raises:
        LookupError: There is none.
    """
    lease = next(owners.current().leases(key), None)
    if lease is None:
        wanted = "lease" if key is None else f"lease on {key!r}"
        raise LookupError(f"The current thread or task has no {wanted}.")
    return lease
