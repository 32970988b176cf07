"""What the database's user may: no more than the documentation says it must."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from django.db import DatabaseError, connection, connections, transaction

from dblocks import distributed_lock, transaction_lock
from dblocks.models import DistributedLock
from tests.support.fixtures import beside
from tests.support.pages import marked

pytestmark = [pytest.mark.usefixtures("two_writers"), pytest.mark.database_backend]

USER = f"web{os.getpid()}"


def execute(statement: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement)


def grant(name: str) -> None:
    """Grant what the page says below a mark."""
    text = marked("servers.md", name, "sql").replace("TO web;", f"TO {USER};")
    for statement in filter(str.strip, text.split(";")):
        execute(statement)


@pytest.fixture
def web(committed: None, settings: Any) -> Iterator[str]:
    """Make a backend whose user may connect, and nothing else; its alias."""
    execute(f"CREATE USER {USER}")
    try:
        yield beside(settings, USER, USER=USER, PASSWORD="")
    finally:
        connections[USER].close()
        del connections[USER], connections.settings[USER]
        if connection.vendor == "postgresql":
            execute(f"DROP OWNED BY {USER}")
        execute(f"DROP USER {USER}")


def test_locks(web: str, key: str) -> None:
    """Locks of all kinds need three rights on a table, and two on another."""
    lock = distributed_lock(key, backend=web)
    with pytest.raises(DatabaseError, match="denied"):
        lock.try_acquire()
    grant("rights-locks")
    with lock.acquire() as lease:
        lease.renew()
        with transaction.atomic(USER):
            lease.guard(USER)
    with transaction.atomic(USER), distributed_lock(f"{key}a", f"{key}b", backend=web):
        pass
    with distributed_lock(key, permits=2, backend=web):
        pass
    with transaction.atomic(USER), transaction_lock(f"{key}c", backend=web) as row:
        assert row is not None


def test_operators(web: str, key: str) -> None:
    """A request and a forced release leave an entry, or change nothing."""
    grant("rights-locks")
    locks = DistributedLock.objects.using(USER)
    with distributed_lock(key, backend=web) as lease:
        for verb in (locks.request_release, locks.force_release):
            with pytest.raises(DatabaseError, match="denied"):
                verb(key)
        lease.renew()
        assert not lease.release_requested
    grant("rights-operators")
    held = distributed_lock(key, backend=web).acquire()
    assert locks.request_release(key)
    assert locks.force_release(key)
    assert not held.release()


def test_pruning(web: str, key: str) -> None:
    """Pruning deletes rows, and raises the floor of the tokens."""
    grant("rights-locks")
    locks = DistributedLock.objects.using(USER)
    with distributed_lock(key, backend=web):
        pass
    with pytest.raises(DatabaseError, match="denied"):
        locks.filter(key=key).prune(0)
    grant("rights-pruning")
    assert locks.filter(key=key).prune(0) == 1
