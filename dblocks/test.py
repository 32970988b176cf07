"""Support for the tests of projects that use locks.

:func:`hold_elsewhere` plays the competitor, :func:`move_clock` lets leases run out
without waiting, :func:`clear_locks` empties a backend between tests.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.utils.asyncio import async_unsafe

from . import clock, validation
from .conf import DEFAULT_ALIAS, backends
from .distributed_locks import distributed_lock
from .holding import owners
from .holding.registry import registry
from .holding.renewal import scheduler
from .lease_blocks import LeaseBlock
from .locks import Lock
from .validation import UNSET
from .waiting.threads import call_in_thread

__all__ = [
    "aclear_locks",
    "amove_clock",
    "clear_locks",
    "hold_elsewhere",
    "move_clock",
]

FARTHEST = 100 * 365.25 * 86400.0
"""Seconds for one move of the clock, at most: databases can't count further back."""


class hold_elsewhere:
    """Let somebody else hold one key or several while the block runs. ::

        with hold_elsewhere("checkout", note="nightly import"):
            response = self.client.post("/checkout/")
        assert response.status_code == 423

    The holder is an owner of its own, neither the current thread nor the current task.
    Inside the block the key is refused as if another process held it. Entering takes
    the key at once or raises :exc:`~dblocks.LockTimeout`. It gives the holder's
    :class:`~dblocks.Lease` (with several keys, the :class:`~dblocks.Leases`), which may
    be released before the block ends. The lease is renewed until the end of the block
    and then released. On a database the lock is taken outside the block's own
    transactions; inside a ``TestCase``, on the test's connection. In async tests use
    ``async with``.

    Args:
        keys: What is held.
        permits: How many owners may hold the key at a time; this holder gets one of
            them. To take all permits, open that many blocks.
        lease: How long the key is held without renewal, in seconds or as a
            ``timedelta``. Default: the backend's.
        note: The holder's note.
        backend: An alias in the setting ``DBLOCKS``.
    """

    def __init__(
        self,
        *keys: str,
        permits: int = 1,
        lease: float | timedelta = UNSET,
        note: str = "",
        backend: str = DEFAULT_ALIAS,
    ) -> None:
        self._lock: Lock[Any] = distributed_lock(
            *map(validation.one_of, keys),
            permits=permits,
            timeout=0,
            lease=lease,
            note=note,
            backend=backend,
        )
        self._owner = owners.Owner("held elsewhere")
        self._leases: list[Any] = []

    @async_unsafe("Inside a running event loop write: async with hold_elsewhere(...).")
    def __enter__(self) -> Any:
        lease = self._lock._acquire_for(self._owner)
        self._leases.append(lease)
        return lease

    @async_unsafe("Inside a running event loop write: async with hold_elsewhere(...).")
    def __exit__(self, kind: object, exc: BaseException | None, tb: object) -> None:
        lease = self._leases.pop()
        try:
            # Not release(), which is postponed until the block's transaction ends.
            lease._release_now(lease._each())
        # Not the alias's backend: the block may have replaced the setting.
        except lease._backend.errors:
            # The block may have broken the test's transaction: its error counts.
            if exc is None:
                raise

    async def __aenter__(self) -> Any:
        lease = await call_in_thread(
            backends[self._lock.backend],
            partial(self._lock._acquire_for, self._owner),
            LeaseBlock._undo,
        )
        self._leases.append(lease)
        return lease

    async def __aexit__(self, *exc_info: Any) -> None:
        backend = self._leases[-1]._backend
        await call_in_thread(backend, partial(self.__exit__, *exc_info))


@async_unsafe("Inside a running event loop write: await amove_clock().")
def move_clock(seconds: float | timedelta, *, backend: str = DEFAULT_ALIAS) -> None:
    """Let time pass for the locks, without waiting. ::

        with distributed_lock("import", lease=30) as lease:
            move_clock(31)
            assert not lease.held

    The effect is that of suspending this process for that long: nothing is renewed in
    between. Shorter leases are lost when the function returns; their callbacks run soon
    afterwards, in a thread. Longer leases are renewed right away.

    The clock of a server can't be moved. dblocks makes the server's locks older
    instead, which has the same effect in this process. Other processes that share the
    test database, or the ``KEY_PREFIX`` in Redis, find their leases shortened. Outside
    a ``TestCase``, leave transactions first that have a lock's row locked or guarded:
    this would wait for them.

    Args:
        seconds: How much time, in seconds or as a ``timedelta``; never negative, and at
            most 100 years.
        backend: The alias of the backend: a database, Redis or ``LocMemBackend``.

    Raises:
        NotImplementedError: The engine can't do this, like ZooKeeper.
    """
    by = validation.duration("seconds", seconds)
    if by > FARTHEST:
        raise ValueError(f"seconds must be at most 100 years, not {seconds!r}")
    # The rows first: then a lease that is renewed in between counts as too short here,
    # never as too long.
    backends[backend].move_clock(by)
    clock.advance(by)
    for hold in registry.all():
        hold.note_overdue()
    scheduler.hurry()


async def amove_clock(
    seconds: float | timedelta, *, backend: str = DEFAULT_ALIAS
) -> None:
    """Async twin of :func:`move_clock`."""
    await sync_to_async(move_clock)(seconds, backend=backend)


@async_unsafe("Inside a running event loop write: await aclear_locks().")
def clear_locks(backend: str = DEFAULT_ALIAS) -> None:
    """Free all keys of a backend, held or cooling. Fencing tokens go on rising.

    For tests on ``LocMemBackend`` and Redis, where no rollback removes what a test
    leaves behind. A lease that is still held is lost, as by a force release.

    Args:
        backend: The alias of the backend.

    Raises:
        NotSupportedError: The engine can't list its locks; all of dblocks' own can.
    """
    backends[backend].clear()


async def aclear_locks(backend: str = DEFAULT_ALIAS) -> None:
    """Async twin of :func:`clear_locks`."""
    await sync_to_async(clear_locks)(backend)
