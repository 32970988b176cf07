"""psycopg's pool, with fewer connections than threads: locks don't come from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dblocks import distributed_lock
from dblocks.backends.database import own_connections
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, always, eventually, takes

SIZE = 2
TIMEOUT = 1


@pytest.fixture
def pooled(postgres: int, another: Callable[..., str]) -> Iterator[str]:
    """Return the alias of a backend whose database has a small pool."""
    pool = {"min_size": SIZE, "max_size": SIZE, "timeout": TIMEOUT}
    alias = another("pooled", OPTIONS={"pool": pool}, CONN_MAX_AGE=0)
    yield alias
    own_connections.idle.close_idle()
    connections[alias].close_pool()


def use(alias: str) -> None:
    """Take a connection out of the pool, and keep it as a request does."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT 1")


def stats(alias: str) -> dict[str, Any]:
    found: dict[str, Any] = connections[alias].pool.get_stats()
    return found


def sessions() -> set[int]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
            "AND backend_type = 'client backend'"
        )
        return {pid for (pid,) in cursor.fetchall()}


def test_release_while_the_pool_is_empty(
    pooled: str, key: str, threads: Callable[[], OtherThread]
) -> None:
    """A thread that has no connection open can release, look and acquire."""
    lock = distributed_lock(key, backend=pooled)
    lease = lock.acquire(timeout=0)
    for _ in range(SIZE):
        threads().do(use, pooled)
    with takes(at_most=TIMEOUT / 2):
        assert lock.locked()
        assert lease.renew() is None
        assert lease.release()
        assert not lock.locked()
        with lock:
            pass


def test_waiters_leave_the_pool_alone(
    key: str,
    threads: Callable[[], OtherThread],
    workers: Workers,
    request: pytest.FixtureRequest,
) -> None:
    """More threads wait than the pool has connections: others still get one."""
    holder = workers.start("hold", key=key)
    holder.expect("held")
    # Only now: a process knows no database that isn't in its settings.
    pooled = request.getfixturevalue("pooled")
    lock = distributed_lock(key, backend=pooled)
    waiters = [threads() for _ in range(SIZE + 1)]
    waiting = [each.start(lock.try_acquire, 1.5) for each in waiters]
    client = threads()

    def request_is_served() -> bool:
        client.do(use, pooled)
        client.do(lambda: connections[pooled].close())
        return True

    always(request_is_served, during=1)
    assert [each.result() for each in waiting] == [None] * (SIZE + 1)
    assert stats(pooled).get("requests_errors", 0) == 0
    holder.tell("release")
    holder.until_done()


def test_connections_of_its_own_are_few(pooled: str, key: str) -> None:
    """One after the other they share one, which is closed when it is needed no more."""
    connections[pooled].ensure_connection()
    connections[pooled].close()
    eventually(lambda: stats(pooled)["pool_available"] == SIZE, what="the pool")
    before = sessions()
    for number in range(10):
        with distributed_lock(f"{key}:{number}", backend=pooled):
            pass
    own = sessions() - before
    assert len(own) == 1
    eventually(lambda: not own & sessions(), what="the end of the idle session")


def test_open_connections_serve(pooled: str, key: str) -> None:
    """Where a thread has one open, its locks run on that."""
    use(pooled)
    whole = SIZE - 1
    eventually(lambda: stats(pooled)["pool_available"] == whole, what="the others")
    before = sessions()
    with distributed_lock(key, backend=pooled):
        assert sessions() <= before


def test_nested_locks(
    pooled: str, key: str, threads: Callable[[], OtherThread]
) -> None:
    """More threads than connections nest locks and close what they have: none waits."""

    def nest(number: int) -> None:
        outer = distributed_lock(f"{key}:{number % SIZE}", backend=pooled)
        inner = distributed_lock(key, backend=pooled, timeout=DEADLINE)
        for _ in range(5):
            lease = outer.acquire(timeout=DEADLINE)
            with transaction.atomic(pooled), inner:
                pass
            connections[pooled].close()
            assert lease.release()

    running = [threads().start(nest, number) for number in range(4 * SIZE)]
    for each in running:
        each.result(2 * DEADLINE)
    keys = [key, *(f"{key}:{number}" for number in range(SIZE))]
    assert not any(distributed_lock(each, backend=pooled).locked() for each in keys)
