"""Leases: the proof of holding a lock."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, DatabaseError, InterfaceError, connections
from django.db import transaction as db_transaction
from django.utils.asyncio import async_unsafe

from . import arguments, clock, ownership, signals, transactions
from .backends.base import Grant
from .exceptions import LeaseLost
from .holds import Hold
from .renewal import timekeeper
from .waiting import Gate, lines

if TYPE_CHECKING:
    from .locks import Lock

logger = logging.getLogger("dblocks")

PATIENCE = 1.0
"""Seconds for which passing faults are sat out where the caller's wait is shorter."""

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

    def __init__(self, lock: Lock, hold: Hold) -> None:
        self._hold = hold
        self._atomic = lock.atomic
        self._block: AbstractContextManager[None] | None = None
        self._open = True
        self._deferred = False
        self._committed = False
        with hold.mutex:
            hold.leases += 1

    def __repr__(self) -> str:
        state = "held" if self.held else self.lost_reason or "released"
        return f"<Lease {self.key!r} fencing_token={self.fencing_token} {state}>"

    def __del__(self, _warn: Any = warnings.warn) -> None:
        # Run by the garbage collector, at any point: it must not note a loss.
        if getattr(self, "_open", False) and self._hold.lost_reason is None:
            _warn(
                f"The lease on {self.key!r} (fencing token {self.fencing_token}) was "
                f"dropped without release(); it is not renewed any more.",
                ResourceWarning,
                stacklevel=2,
            )

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
    def open(self) -> bool:
        """Whether it has not been released."""
        return self._open

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
        return self._open and self._hold.is_live()

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
            raise self._lost()

    def _lost(self) -> LeaseLost:
        return LeaseLost(
            self.key,
            fencing_token=self.fencing_token,
            reason=self.lost_reason or "released",
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
        if not self._open or self.lost_reason == "forked":
            raise self._lost()
        try:
            self._hold.backend.guard(self._hold.grant, using)
        except LeaseLost as error:
            self._hold.lose(error.reason)
            raise

    def on_lost(self, callback: Callable[[Lease], object]) -> None:
        """Call a function once, with the lease, when the lease is found lost.

        It runs in a thread of dblocks, by the local deadline at the latest (after a
        force release, at the next renewal); at once if the lease is lost already. Its
        errors are logged.
        """
        with self._hold.mutex:
            self._hold.callbacks.append((weakref.ref(self), callback))
            lost = self.lost_reason
        if lost is not None:
            from .renewal import run_callbacks

            run_callbacks(self._hold)

    def belongs_to(self, hold: Hold | None) -> bool:
        """Tell whether it is one of the leases of a hold."""
        return self._hold is hold

    def note_written(self, grant: Grant, sent: float, lease: float) -> bool:
        """Note that the database has counted it; ``False`` if that has another grant.

        Args:
            grant: What the database answered.
            sent: Local clock before it was asked.
            lease: For how many seconds.
        """
        hold = self._hold
        with hold.mutex:
            if hold.grant != grant or not hold.extend(sent, lease):
                return False
            hold.written += 1
            return True

    def leave_hold(self, grant: Grant) -> None:
        """Undo the joining of a hold that is not what the database has granted."""
        hold = self._hold
        with hold.mutex:
            self._open = False
            hold.leases -= 1
            outdated = hold.grant != grant and not hold.closed
        if outdated:
            hold.lose("expired")

    def take_gate(self, gate: Gate | None) -> bool:
        """Keep a gate until the release; ``False`` if it isn't needed."""
        hold = self._hold
        with hold.mutex:
            if gate is None or not gate.held:
                return False
            if hold.leases > 1 or hold.gate is not None or not hold.is_live():
                return False
            hold.gate = gate
            return True

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
        self._renew_now(None if lease is None else arguments.lease(lease))

    async def arenew(self, lease: object = None) -> None:
        """:meth:`renew` for async code."""
        seconds = None if lease is None else arguments.lease(lease)
        await sync_to_async(self._renew_now)(seconds)

    def _renew_now(self, lease: float | None) -> None:
        self.check()
        hold = self._hold
        give_up = clock.monotonic() + PATIENCE
        while True:
            sent = clock.monotonic()
            outcome = hold.backend.renew([hold.renewal(lease)])
            if hold.grant in outcome.extended:
                hold.extend(sent, lease)
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
        releasing = asyncio.ensure_future(sync_to_async(self._release_or_defer)())
        try:
            return await asyncio.shield(releasing)
        except asyncio.CancelledError:
            releasing.add_done_callback(_retrieve)
            raise

    def _release_or_defer(self) -> bool:
        if not self._open or self._deferred:
            return False
        if self.lost_reason is None and transactions.transaction_is_open():
            if not self._hold.is_live():
                return self.release_now()
            self._deferred = True
            transactions.at_end(self._release_at_end)
            return True
        return self.release_now()

    def _release_at_end(self) -> None:
        try:
            if not self.release_now() and not self._committed:
                logger.warning(
                    "lost before the transaction ended key=%r reason=%s",
                    self.key,
                    self.lost_reason,
                )
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)

    def _log_lapse(self, error: Exception) -> None:
        logger.warning(
            "not released, left to lapse key=%r fencing_token=%s error=%s",
            self.key,
            self.fencing_token,
            error,
        )

    def release_now(self) -> bool:
        """Give it back without regard to the transactions of this thread."""
        hold = self._hold
        with hold.mutex:
            if not self._open:
                return False
            live = hold.is_live() or (self._committed and hold.lost_reason != "forked")
            self._open = False
            hold.leases -= 1
            left = hold.leases
            uncounted = hold.written <= left
            if not uncounted:
                hold.written -= 1
            if not left:
                hold.closed = True
        if not left:
            timekeeper.discard(hold)
        if not live:
            return False
        if uncounted:
            return True
        try:
            held = hold.backend.release(
                hold.grant,
                count=None if hold.explicit else left,
                hold_at_least=hold.terms.hold_at_least,
                patience=PATIENCE,
            )
        finally:
            if not left:
                hold.leave_gate()
                lines.wake(hold.backend, hold.grant.key)
        if not held:
            hold.lose(hold.backend.reason(hold.grant))
            return False
        if not left:
            self._tell_released()
        return True

    def give_back(self) -> None:
        """Release what nobody waits for any more; if that fails, let it lapse."""
        try:
            self.release_now()
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)

    def _tell_released(self) -> None:
        held_for = clock.monotonic() - self._hold.started
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug(
                "released key=%r backend=%s owner=%s fencing_token=%s held_for=%.3f",
                self.key,
                self.backend,
                self.owner,
                self.fencing_token,
                held_for,
            )
        if signals.lock_released.receivers:
            from .locks import Lock

            signals.lock_released.send_robust(
                sender=Lock,
                key=self.key,
                backend=self.backend,
                owner=self.owner,
                fencing_token=self.fencing_token,
                held_for=held_for,
                lease=self,
            )

    # As a context manager

    @sync_only
    def __enter__(self) -> Lease:
        if self._atomic:
            block = self._committing()
            try:
                block.__enter__()
            except BaseException:
                self._leave(*sys.exc_info())
                raise
            self._block = block
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._block is not None:
            block, self._block = self._block, None
            try:
                block.__exit__(exc_type, exc, traceback)
            except BaseException:
                self._leave(*sys.exc_info())
                raise
        self._leave(exc_type, exc, traceback)

    def _leave(
        self,
        exc_type: type[BaseException] | None = None,
        exc: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        try:
            self._release_or_defer()
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)
        if self.lost_reason is not None and exc_type is None and not self._committed:
            raise self._lost()

    async def __aenter__(self) -> Lease:
        if self._atomic:
            raise TypeError("atomic=True can't be used with async with.")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            await self.arelease()
        except (DatabaseError, InterfaceError) as error:
            self._log_lapse(error)
        if self.lost_reason is not None and exc_type is None:
            raise self._lost()

    @contextmanager
    def _committing(self, using: str = DEFAULT_DB_ALIAS) -> Generator[None]:
        """A transaction that commits only while the lock is still held."""
        with ExitStack() as pins:
            with db_transaction.atomic(using=using):
                yield
                self.verify([using], pins)
            self.note_commit()

    def note_commit(self) -> None:
        """Note that a guarded transaction was committed: that verdict is final."""
        self._committed = True

    def is_in_database(self, using: str) -> bool:
        """Tell whether the lock is a row of this database."""
        return self._hold.backend.is_in_database(using)

    def verify(self, aliases: Sequence[str], pins: ExitStack) -> None:
        """Guard the transactions on some databases that are about to commit.

        Transactions that will be rolled back are let through.

        Args:
            pins: Closed after the commits.

        Raises:
            LeaseLost: The lock is no longer held.
        """
        aliases = [a for a in aliases if not connections[a].needs_rollback]
        if not aliases:
            return
        if not self._open or self.lost_reason == "forked":
            raise self._lost()
        if not self._hold.backend.has_guard:
            self.check()
            return
        try:
            self._hold.backend.pin(self._hold.grant, aliases, pins)
        except LeaseLost as error:
            self._hold.lose(error.reason)
            raise


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
    lease = ownership.current().innermost(key)
    if lease is None:
        wanted = "a lease" if key is None else f"a lease on {key!r}"
        raise LookupError(f"The current thread or task has no {wanted[2:]}.")
    return lease


def _retrieve(future: asyncio.Future[bool]) -> None:
    if not future.cancelled() and future.exception() is not None:
        logger.warning("not released, left to lapse error=%s", future.exception())
