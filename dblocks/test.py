"""Support for the tests of projects that use locks.

:func:`hold_elsewhere` plays the competitor, :func:`move_clock` lets leases run out
without waiting, :func:`clear_locks` empties a backend between tests.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from asgiref.sync import sync_to_async

from . import clock, validation
from .conf import DEFAULT_ALIAS, backends
from .distributed_locks import distributed_lock
from .holding import owners
from .holding.registry import registry
from .holding.renewal import scheduler
from .lease_blocks import sync_only
from .locks import Lock
from .validation import UNSET

__all__ = ["amove_clock", "clear_locks", "hold_elsewhere", "move_clock"]


class hold_elsewhere:
    """Somebody else holds a key, or several, for the time of the block. ::

        with hold_elsewhere("checkout", note="nightly import"):
            response = self.client.post("/checkout/")
        assert response.status_code == 423

    The holder is an owner of its own, neither the current thread nor task: the block
    is refused the key as by another process. Taken at once and, on the database,
    outside the block's own transactions, or on the test's connection inside a
    ``TestCase``; renewed until the end of the block, then released. In async tests:
    ``async with``.

    Args:
        keys: What is held.
        permits: How many may hold the key at a time: the holder has one of them. For
            a key that is taken altogether, open as many blocks.
        lease: For how long without renewal; default: the backend's.
        note: The holder's note.
        backend: Alias in the setting ``DBLOCKS``.

    Returns:
        On entering, the holder's :class:`~dblocks.Lease` (of several keys the
        :class:`~dblocks.Leases`), which can be released before the block's end.

    Raises:
        LockTimeout: On entering: the key is taken already.
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
            *map(validation.key, keys),
            permits=permits,
            timeout=0,
            lease=lease,
            note=note,
            backend=backend,
        )
        self._owner = owners.Owner("held elsewhere")
        self._leases: list[Any] = []

    @sync_only
    def __enter__(self) -> Any:
        lease = self._lock._acquire_for(self._owner)
        self._leases.append(lease)
        return lease

    @sync_only
    def __exit__(self, kind: object, exc: BaseException | None, tb: object) -> None:
        try:
            # Not release(): a transaction of the block's is none of the holder's.
            self._leases.pop()._release_now()
        except backends[self._lock.backend].errors:
            # The block may have broken the test's transaction: its error counts.
            if exc is None:
                raise

    async def __aenter__(self) -> Any:
        return await sync_to_async(self.__enter__)()

    async def __aexit__(self, *exc_info: Any) -> None:
        await sync_to_async(self.__exit__)(*exc_info)


def move_clock(seconds: float | timedelta, *, backend: str = DEFAULT_ALIAS) -> None:
    """Let that much time pass for the locks, in no time. ::

        with distributed_lock("import", lease=30) as lease:
            move_clock(31)
            assert not lease.held

    As if this process had been suspended: nothing was renewed meanwhile, so that
    leases shorter than this are lost when it returns (their callbacks run in a thread,
    soon afterwards), and longer ones are renewed at the next moment.

    A server's clock can't be moved: its locks are made older instead, which comes to
    the same for this process. Others, which share the test database, or the
    ``KEY_PREFIX`` in Redis, but not the moved clock, find their leases shortened.

    Args:
        seconds: Forward only; the clock is never set back.
        backend: The alias of the backend whose locks grow older: a database, Redis or
            ``LocMemBackend``.

    Raises:
        NotImplementedError: The engine can't do that, as ZooKeeper can't.
    """
    by = validation.duration("seconds", seconds)
    # The rows first: a lease renewed in between is thought shorter than it is.
    backends[backend].move_clock(by)
    clock.advance(by)
    for hold in registry.all():
        hold.note_overdue()
    scheduler.hurry()


async def amove_clock(
    seconds: float | timedelta, *, backend: str = DEFAULT_ALIAS
) -> None:
    """:func:`move_clock` for async tests."""
    await sync_to_async(move_clock)(seconds, backend=backend)


def clear_locks(backend: str = DEFAULT_ALIAS) -> None:
    """Free all keys of a backend, held and cooling ones; tokens go on rising.

    For tests on ``LocMemBackend`` and Redis, where nothing rolls back what a test
    leaves behind. Whoever still holds a lease finds it force-released.

    Args:
        backend: Alias in the setting ``DBLOCKS``, of a database, Redis or
            ``LocMemBackend``.

    Raises:
        NotImplementedError: The engine can't do that.
    """
    backends[backend].clear()
