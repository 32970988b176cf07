"""Ten thousand cycles leave a process as they found it."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from asgiref.sync import sync_to_async
from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.models import QuerySet

from dblocks import distributed_lock
from dblocks.models import DistributedLock
from tests.support.fixtures import OtherThread, in_memory
from tests.support.timing import DEADLINE, eventually

pytestmark = pytest.mark.usefixtures("committed")

CYCLES = 10_000

SLOWEST = 0.03
"""Seconds that a cycle may take on a machine that is busy otherwise, too."""


def sessions() -> int:
    """Count the server's sessions on this database."""
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute(
                "SELECT COUNT(*) FROM information_schema.processlist"
                " WHERE db = DATABASE()"
            )
        elif connection.vendor == "postgresql":
            cursor.execute(
                "SELECT COUNT(*) FROM pg_stat_activity"
                " WHERE datname = current_database()"
            )
        else:
            return 0
        return int(cursor.fetchone()[0])


def all_at_most(now: tuple[int, ...], then: tuple[int, ...]) -> bool:
    """Is each count no higher than it was?"""
    return all(a <= b for a, b in zip(now, then, strict=True))


@pytest.fixture
def leftovers(open_files: Callable[[], int]) -> Callable[[], tuple[int, int, int, int]]:
    """Count connections, threads, file descriptors and rows."""

    def count() -> tuple[int, int, int, int]:
        gc.collect()
        rows = QuerySet(DistributedLock).count()
        return sessions(), threading.active_count(), open_files(), rows

    return count


@pytest.mark.timeout(CYCLES * SLOWEST)
def test_ten_thousand_cycles(
    key: str,
    leftovers: Callable[[], tuple[int, int, int, int]],
    live_threads: Callable[[], set[threading.Thread]],
) -> None:
    """Ten thousand times acquire and release leave nothing behind."""
    lock = distributed_lock(key, timeout=0)

    def cycle() -> None:
        with lock:
            pass

    cycle()
    eventually(lambda: not live_threads(), what="a quiet start")
    before = leftovers()
    for _ in range(CYCLES):
        cycle()
    eventually(lambda: all_at_most(leftovers(), before), what="no leftovers")


def test_threads_that_come_and_go(
    key: str,
    leftovers: Callable[[], tuple[int, int, int, int]],
    threads: Callable[[], OtherThread],
) -> None:
    """Threads that lock, fail, and end leave nothing behind."""

    def work() -> None:
        with suppress(RuntimeError), distributed_lock(key, timeout=0):
            raise RuntimeError

    def one_thread() -> None:
        thread = threads()
        thread.do(work)
        thread.close()

    one_thread()
    before = leftovers()
    for _ in range(20):
        one_thread()
    eventually(lambda: all_at_most(leftovers(), before), what="no leftovers")


@pytest.mark.usefixtures("two_writers")
def test_cycles_inside_transactions(
    key: str, leftovers: Callable[[], tuple[int, int, int, int]]
) -> None:
    """Locks taken inside transactions leave no second connection."""

    def cycle() -> None:
        with transaction.atomic(), distributed_lock(key, timeout=0):
            pass

    cycle()
    before = leftovers()
    for _ in range(100):
        cycle()
    eventually(lambda: all_at_most(leftovers(), before), what="no leftovers")


def test_connections_that_users_close(
    key: str, leftovers: Callable[[], tuple[int, int, int, int]]
) -> None:
    """close_all() in the middle of a block costs a new connection, not a leaked one."""

    def cycle() -> None:
        with distributed_lock(key, timeout=0):
            connections.close_all()

    cycle()
    before = leftovers()
    for _ in range(20):
        cycle()
    eventually(lambda: all_at_most(leftovers(), before), what="no leftovers")


def test_cancelled_acquisitions(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that give back what a cancelled task acquired close their connections."""
    if in_memory():
        pytest.skip("Django never closes a connection to a database in memory")
    opened: list[tuple[threading.Thread, BaseDatabaseWrapper]] = []
    connect = BaseDatabaseWrapper.connect

    def remember(self: BaseDatabaseWrapper) -> None:
        opened.append((threading.current_thread(), self))
        connect(self)

    async def cancel_after(delay: float) -> None:
        task = asyncio.create_task(distributed_lock(key).aacquire(timeout=DEADLINE))
        await asyncio.sleep(delay)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await (await task).arelease()

    async def main() -> None:
        for step in range(60):
            await cancel_after(step * 0.0001)
        await sync_to_async(connections.close_all)()

    monkeypatch.setattr(BaseDatabaseWrapper, "connect", remember)
    asyncio.run(main())
    eventually(lambda: not distributed_lock(key).locked(), what="the release")

    def closed() -> bool:
        ended = [wrapper for thread, wrapper in opened if not thread.is_alive()]
        return all(wrapper.connection is None for wrapper in ended)

    try:
        # Those that gates stood on are kept for a moment, for the next waiter.
        eventually(closed, what="closed connections")
    finally:
        for thread, wrapper in opened:
            if not thread.is_alive() and wrapper.connection is not None:
                wrapper.connection.close()
