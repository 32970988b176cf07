"""PgBouncer before the database: nothing is left in sessions that others share."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import psycopg
import pytest
from django.core import checks
from django.db import connection, connections

from dblocks import distributed_lock
from dblocks.test import hold_elsewhere
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, eventually, scaled
from tests.testapp.models import Account
from tests.topologies.conftest import MakePooler

PROCESSES = 4
SESSIONS = 5


def name() -> str:
    return str(connection.settings_dict["NAME"])


def advisory_locks() -> int:
    """Count the session locks that anybody has in the test's database."""
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM pg_locks WHERE locktype = 'advisory' AND database = "
            "(SELECT oid FROM pg_database WHERE datname = CURRENT_DATABASE())"
        )
        return int(cursor.fetchone()[0])


def timeouts(url: str, sessions: int = SESSIONS) -> set[str]:
    """Return what several sessions of a pool, held at once, have as lock_timeout."""
    with ExitStack() as stack:
        clients = [stack.enter_context(psycopg.connect(url)) for _ in range(sessions)]
        return {str(c.execute("SHOW lock_timeout").fetchone()[0]) for c in clients}


@pytest.fixture(params=["transaction", "statement", "session"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    "query",
    ["", "?DISABLE_SERVER_SIDE_CURSORS=True"],
    ids=["newcomer's settings", "documented settings"],
)
def test_nothing_is_left_behind(
    pooler: MakePooler,
    workers_through: Callable[[str], Workers],
    key: str,
    query: str,
) -> None:
    """Contention, a kill, everybody's kill: who shares the pool notices nothing."""
    url = pooler(size=SESSIONS).address(name())
    workers = workers_through(url + query)
    row = {"key": key, "seconds": scaled(3), "lease": scaled(1)}
    crowd = workers.start_all("contend", [row] * PROCESSES)
    crowd[0].expect("granted")
    crowd[0].kill()
    for worker in crowd[1:]:
        assert worker.until_done()[-1]["grants"] >= 3
    assert advisory_locks() == 0
    assert timeouts(url) == {"0"}
    crowd = workers.start_all("contend", [row | {"seconds": DEADLINE}] * PROCESSES)
    for worker in crowd:
        # From then on all but one of them wait.
        worker.expect("granted")
    for worker in crowd:
        worker.kill()
    assert timeouts(url) == {"0"}
    assert advisory_locks() == 0


def test_exclusion(
    pooler: MakePooler,
    workers_through: Callable[[str], Workers],
    key: str,
    mode: str,
) -> None:
    """Reads and writes under the lock, by processes behind the pooler, lose nothing."""
    account = Account.objects.create(name=key, balance=0)
    workers = workers_through(pooler(mode).address(name()))
    row = {"key": key, "account": account.pk, "rounds": 10, "timeout": DEADLINE}
    crowd = workers.start_all("count", [row] * PROCESSES)
    for worker in crowd:
        worker.expect("ready")
    for worker in crowd:
        worker.tell("go")
    tokens = [e["token"] for worker in crowd for e in worker.until_done()]
    account.refresh_from_db()
    assert account.balance == 10 * PROCESSES
    assert len(set(tokens)) == len(tokens) == 10 * PROCESSES
    assert advisory_locks() == 0


@pytest.fixture
def behind(pooler: MakePooler, mode: str, another: Callable[..., str]) -> str:
    """Return the alias of a backend that reaches its locks through the pooler."""
    return another("behind", HOST="127.0.0.1", PORT=str(pooler(mode).port))


def waits(key: str, alias: str) -> None:
    with hold_elsewhere(key):
        assert distributed_lock(key, backend=alias).try_acquire(timeout=0.5) is None


def test_told_once(behind: str, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """The first waiter finds the pooler; one line says so, however many follow."""
    caplog.set_level(logging.WARNING, logger="dblocks")
    for number in range(3):
        waits(f"{key}:{number}", behind)
    lines = [r.getMessage() for r in caplog.records if "session locks" in r.message]
    assert len(lines) == 1
    assert f"database={behind}" in lines[0]
    connections[behind].close()
    assert advisory_locks() == 0


def test_direct_connections_queue(
    another: Callable[..., str], other: OtherThread, postgres: int, key: str
) -> None:
    """Without a pooler a waiter has a session lock, and its timeout ends with it."""
    direct = another("direct")
    with hold_elsewhere(key):
        waiter = other.start(distributed_lock(key, backend=direct).try_acquire, 1)
        eventually(advisory_locks, what="the session lock")
        assert waiter.result(DEADLINE) is None
    other.close()
    eventually(lambda: not advisory_locks(), what="its end")


def found(alias: str) -> list[Any]:
    messages = checks.run_checks(tags=[checks.Tags.database], databases=[alias])
    return [message for message in messages if message.id == "dblocks.W014"]


def test_check(
    behind: str, another: Callable[..., str], settings: Any, mode: str
) -> None:
    """W014 finds the pooler, and is silent where session locks aren't wanted."""
    assert [str(behind) in message.msg for message in found(behind)] == [True]
    assert not found(another("direct"))
    settings.DBLOCKS[behind]["OPTIONS"]["session_locks"] = False
    settings.DBLOCKS = dict(settings.DBLOCKS)
    assert not found(behind)
