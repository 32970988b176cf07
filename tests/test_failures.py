"""When the database fails: a clear error, in time, and never "not acquired"."""

from __future__ import annotations

import gc
import logging
import sqlite3
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from operator import itemgetter
from typing import Any

import pytest
from django.db import (
    DatabaseError,
    OperationalError,
    connection,
    connections,
    transaction,
)

from dblocks import Lease, Lock, LockTimeout, distributed_lock
from dblocks.backends.database import dialects, execution, own_connections, table
from dblocks.backends.database.file_locks import gates_in_use
from dblocks.conf import backends
from dblocks.holding.sets import give_back
from dblocks.models import DistributedLock
from dblocks.permits import row_keys
from tests.support.factories import stored
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, always, scaled, takes

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

TABLE = DistributedLock._meta.db_table
Leases = Callable[..., Lease]
Locks = Callable[..., Lock]

VERBS = pytest.mark.parametrize("verb", ["acquire", "try_acquire"])


def attempt(lock: Lock, verb: str, timeout: float) -> Any:
    """Acquire in one of the two ways."""
    return getattr(lock, verb)(timeout=timeout)


# The table is missing


def rename(before: str, after: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"ALTER TABLE {before} RENAME TO {after}")


@contextmanager
def without_table() -> Iterator[None]:
    """The lock table has another name for the time of the block."""
    rename(TABLE, "mislaid")
    try:
        yield
    finally:
        rename("mislaid", TABLE)


@VERBS
@pytest.mark.parametrize("timeout", [0, 0.5])
def test_missing_table(key: str, verb: str, timeout: float) -> None:
    """A table that isn't there is the database's own error, which names it."""
    with (
        without_table(),
        takes(at_most=timeout + SLACK),
        pytest.raises(DatabaseError, match=TABLE),
    ):
        attempt(distributed_lock(key), verb, timeout)


def test_missing_table_for_the_manager(key: str) -> None:
    """The manager doesn't take a missing table for a taken key either."""
    with without_table(), pytest.raises(DatabaseError, match=TABLE):
        DistributedLock.objects.acquire(key, owner="me", lease=5)


def test_missing_table_and_locked(key: str) -> None:
    """locked() doesn't answer without a table."""
    with without_table(), pytest.raises(DatabaseError, match=TABLE):
        distributed_lock(key).locked()


class Held:
    """What somebody has."""


@pytest.mark.parametrize("run", [execution.execute, execution.fetch, dialects.ask])
def test_error_keeps_no_frames(run: Callable[..., Any]) -> None:
    """What callers of a failed statement had doesn't wait for the collector."""

    def drop() -> weakref.ref[Held]:
        held = Held()
        with suppress(DatabaseError):
            run(connection, "SELECT nothing FROM nowhere", {})
        return weakref.ref(held)

    gc.disable()
    try:
        assert drop()() is None
    finally:
        gc.enable()


def test_release_that_fails(acquire: Leases) -> None:
    """An explicit release that can't reach the row raises the database's error."""
    lease = acquire(lease=600)
    with without_table(), pytest.raises(DatabaseError):
        lease.release()


def test_leaving_when_the_release_fails(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Leaving a block whose release fails logs a warning and lets the lease lapse."""
    with without_table_at_the_end(), distributed_lock(key, lease=600) as lease:
        assert lease.held
        rename(TABLE, "mislaid")
    assert [
        record
        for record in caplog.records
        if record.levelno == logging.WARNING
        and record.name.split(".")[0] == "dblocks"
        and key in record.getMessage()
    ]
    assert stored(key).hold_count == 1


@contextmanager
def without_table_at_the_end() -> Iterator[None]:
    """Put the table back, whatever happened."""
    try:
        yield
    finally:
        with suppress(DatabaseError):
            rename("mislaid", TABLE)


# The database is out of reach, or refuses to write


@pytest.fixture
def alias(settings: Any) -> Iterator[Callable[..., str]]:
    """Make a backend on a changed copy of the default database."""

    def make(**changes: Any) -> str:
        config = dict(connections.settings["default"])
        options = {**config["OPTIONS"], **changes.pop("OPTIONS", {})}
        connections.settings["changed"] = {**config, **changes, "OPTIONS": options}
        path = "dblocks.backends.database.DatabaseBackend"
        settings.DBLOCKS = {
            "default": {"BACKEND": path},
            "changed": {"BACKEND": path, "OPTIONS": {"using": "changed"}},
        }
        return "changed"

    yield make
    with suppress(AttributeError, KeyError):
        connections["changed"].close()
        del connections["changed"]
    connections.settings.pop("changed", None)


@VERBS
@pytest.mark.parametrize("timeout", [0, 0.5])
def test_database_down(
    alias: Callable[..., str], key: str, verb: str, timeout: float
) -> None:
    """A database that doesn't answer is an OperationalError, in time."""
    nowhere: dict[str, dict[str, Any]] = {
        "sqlite": {"NAME": "/nonexistent/directory/db.sqlite3"},
        "mysql": {"HOST": "127.0.0.1", "PORT": "1"},
        "postgresql": {"HOST": "127.0.0.1", "PORT": "1"},
    }
    backend = alias(**nowhere[connection.vendor])
    with takes(at_most=timeout + SLACK), pytest.raises(OperationalError):
        attempt(distributed_lock(key, backend=backend), verb, timeout)


@VERBS
def test_read_only_database(alias: Callable[..., str], key: str, verb: str) -> None:
    """A database that can't be written is an error, not a taken key."""
    distributed_lock(key).acquire(timeout=0).release()
    read_only: dict[str, dict[str, Any]] = {
        "sqlite": {"init_command": "PRAGMA query_only = 1"},
        "mysql": {"init_command": "SET SESSION TRANSACTION READ ONLY"},
        "postgresql": {"options": "-c default_transaction_read_only=on"},
    }
    backend = alias(OPTIONS=read_only[connection.vendor])
    with (
        takes(at_most=0.3 + SLACK),
        pytest.raises(DatabaseError, match=r"(?i)read.?only"),
    ):
        attempt(distributed_lock(key, backend=backend), verb, 0.3)
    assert not distributed_lock(key).locked()


# Errors that pass


class Trouble:
    """Makes the next statements on the lock table fail, or lose their replies."""

    def __init__(
        self,
        error: Exception,
        *,
        times: int = 1,
        after: Callable[[], object] | None = None,
        only: str = "",
    ) -> None:
        self.error = error
        self.only = only
        self.times = times
        self.after = after
        self.sent: list[str] = []

    def __call__(
        self, execute: Any, sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        if TABLE not in sql or self.only not in sql:
            return execute(sql, params, many, context)
        self.sent.append(sql)
        if len(self.sent) > self.times:
            return execute(sql, params, many, context)
        if self.after is not None:
            execute(sql, params, many, context)
            self.after()
        with context["connection"].wrap_database_errors:
            raise self.error


def sqlite_busy() -> Exception:
    error = sqlite3.OperationalError("database is locked")
    error.sqlite_errorname, error.sqlite_errorcode = "SQLITE_BUSY", 5  # type: ignore[attr-defined]
    return error


def mysql_error(code: int, message: str) -> Exception:
    import MySQLdb

    return MySQLdb.OperationalError(code, message)


def postgresql_error(name: str) -> Exception:
    from psycopg import errors

    error: Exception = getattr(errors, name)(name)
    return error


TRANSIENT: dict[str, list[tuple[str, Callable[[], Exception]]]] = {
    "sqlite": [("busy", sqlite_busy)],
    "mysql": [
        (
            "deadlock",
            lambda: mysql_error(1213, "Deadlock found when trying to get lock"),
        ),
        ("lock wait", lambda: mysql_error(1205, "Lock wait timeout exceeded")),
    ],
    "postgresql": [
        ("deadlock", lambda: postgresql_error("DeadlockDetected")),
        ("serialization", lambda: postgresql_error("SerializationFailure")),
        ("lock wait", lambda: postgresql_error("LockNotAvailable")),
    ],
}


@pytest.fixture(params=TRANSIENT[connection.vendor], ids=itemgetter(0))
def passing_error(request: pytest.FixtureRequest) -> Exception:
    """Return one of the errors after which the same statement is worth repeating."""
    error: Exception = request.param[1]()
    return error


@pytest.mark.parametrize("timeout", [0, 5])
def test_passing_error_in_acquire(
    key: str, passing_error: Exception, timeout: float
) -> None:
    """An acquisition that met a transient error is repeated and grants one hold."""
    with distributed_lock(key) as first:
        pass
    trouble = Trouble(passing_error)
    with connection.execute_wrapper(trouble):
        lease = distributed_lock(key).acquire(timeout=timeout)
    assert len(trouble.sent) > 1
    assert lease.fencing_token == first.fencing_token + 1
    assert stored(key).hold_count == 1
    assert lease.release() is True


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("timeout", [0, DEADLINE])
@pytest.mark.parametrize("owner", [None, "me"])
def test_grant_that_is_over_when_its_answer_comes(
    key: str, times: int, timeout: float, owner: str | None
) -> None:
    """Nobody gets it: the key is asked for again, and once more if there is time."""
    lock = distributed_lock(key, lease=scaled(0.5), owner=owner)
    with lock as first:
        pass
    late = [scaled(1)] * times

    def slow(execute: Any, sql: str, *rest: Any) -> Any:
        result = execute(sql, *rest)
        if late and "hold_count = 1" in sql:
            time.sleep(late.pop())
        return result

    with connection.execute_wrapper(slow):
        lease = lock.try_acquire(timeout=timeout)
    assert not late
    if timeout == 0 and times == 2:
        assert lease is None
        return
    assert lease is not None
    lease.check()
    assert lease.fencing_token == first.fencing_token + times + 1
    assert stored(key).hold_count == 1
    assert lease.release()


COLLISIONS = [
    pytest.param(make, id=name)
    for name, make in TRANSIENT[connection.vendor]
    if name in {"deadlock", "serialization"}
]


@pytest.mark.parametrize("make", COLLISIONS)
def test_late_collision(
    key: str, make: Callable[[], Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who collides with others when its time is over already tries again."""
    distributed_lock(key).acquire(timeout=0).release()
    # A busy machine may let so little pass that nothing is left.
    monkeypatch.setattr(type(dialects.of(connection)), "patience", 1e-9)
    trouble = Trouble(make(), times=3)
    with connection.execute_wrapper(trouble):
        assert distributed_lock(key).acquire(timeout=0).release() is True
    assert len(trouble.sent) > 3


def test_passing_error_in_an_owners_return(
    acquire: Leases, lock: Locks, key: str, passing_error: Exception
) -> None:
    """Whoever comes back after a loss is counted once, as if no error had come."""
    lost = acquire(owner="me", lease=60)
    lost._hold.lose("expired")
    trouble = Trouble(passing_error, only="hold_count = COALESCE")
    with connection.execute_wrapper(trouble):
        lease = lock(owner="me").acquire(timeout=DEADLINE)
    assert len(trouble.sent) == 2
    assert stored(key).hold_count == 1
    assert lease.release() is True
    assert not lock().locked()


@pytest.mark.parametrize("times", [1, 10**9], ids=["passing", "lasting"])
def test_passing_error_after_a_permit(
    key: str, passing_error: Exception, times: int
) -> None:
    """A permit that was granted before the error is found again, and held once."""
    lock = distributed_lock(key, permits=2, owner="me")
    locks = [distributed_lock(key, permits=2, owner=name) for name in ("a", "b")]
    for each in [one.acquire(timeout=0) for one in locks]:
        each.release()
    granted: list[str] = []
    look = Trouble(passing_error, times=times, only="SELECT")

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if granted and "UPDATE" not in sql:
            return look(execute, sql, params, many, context)
        result = execute(sql, params, many, context)
        if TABLE in sql and "UPDATE" in sql:
            granted.append(sql)
        return result

    with connection.execute_wrapper(fail):
        lease = lock.try_acquire() if times == 1 else refused(lock)
    assert look.sent
    if lease is None:
        lease = lock.acquire(timeout=0)
    held = DistributedLock.objects.held().filter(key__startswith=key)
    assert [row.hold_count for row in held] == [1]
    assert lease.release() is True
    assert not held.all()
    if connection.vendor == "sqlite":
        assert not gates_in_use(connection, row_keys(key, 2))


def refused(lock: Lock) -> Lease | None:
    """Try while all looks fail, which on SQLite means that the key is taken."""
    with suppress(OperationalError):
        return lock.try_acquire()
    return None


def test_release_that_others_keep_off(
    acquire: Leases, lock: Locks, passing_error: Exception
) -> None:
    """A hold whose release certainly wasn't written is subtracted by its owner's next.

    Until then, or until its lease is over, it keeps the key.
    """
    lease = acquire(owner="me", lease=60)
    trouble = Trouble(passing_error, times=10**9, only="UPDATE")
    with (
        connection.execute_wrapper(trouble),
        pytest.raises(OperationalError),
    ):
        lease.release()
    assert lock().locked()
    assert lock(owner="me").acquire(timeout=0).release() is True
    assert not lock().locked()


@pytest.mark.parametrize("about", [1213, {"no": "code"}], ids=["code", "dict"])
def test_interrupt_that_looks_like_an_error(
    acquire: Leases, lock: Locks, key: str, about: object
) -> None:
    """A hold whose release was carried out before an interrupt is subtracted once."""

    class Interrupt(Exception):
        pass

    def interrupt(execute: Any, sql: str, *terms: Any) -> Any:
        result = execute(sql, *terms)
        if TABLE in sql and "UPDATE" in sql:
            raise Interrupt(about)
        return result

    assert DistributedLock.objects.acquire(key, owner="me", lease=60)
    lease = acquire(owner="me", lease=60)
    with connection.execute_wrapper(interrupt), pytest.raises(Interrupt):
        lease.release()
    assert stored(key).hold_count == 1
    assert lock(owner="me").acquire(timeout=0).release() is True
    assert stored(key).hold_count == 1


def test_passing_error_in_release(
    acquire: Leases, key: str, passing_error: Exception
) -> None:
    """A release that met a transient error is repeated and frees."""
    lease = acquire()
    with connection.execute_wrapper(Trouble(passing_error)):
        assert lease.release() is True
    assert not distributed_lock(key).locked()


def test_passing_error_in_renew(acquire: Leases, passing_error: Exception) -> None:
    """A renewal by hand that met a transient error is repeated."""
    lease = acquire(lease=5, renew=False)
    with connection.execute_wrapper(Trouble(passing_error)):
        lease.renew(lease=100)
    assert lease.remaining() > 80


def test_error_that_doesnt_pass(key: str, passing_error: Exception) -> None:
    """An error that comes again and again is raised after a second, not LockTimeout.

    SQLite's says that others have the whole database, and that counts as taken.
    """
    distributed_lock(key).acquire(timeout=0).release()
    trouble = Trouble(passing_error, times=10**9)
    with connection.execute_wrapper(trouble), takes(at_most=1 + SLACK):
        if connection.vendor == "sqlite":
            assert distributed_lock(key).try_acquire() is None
        else:
            with pytest.raises(OperationalError):
                distributed_lock(key).try_acquire()
    assert len(trouble.sent) > 1
    assert not distributed_lock(key).locked()


def test_trouble_in_the_callers_thread_alone(acquire: Leases) -> None:
    """Trouble on the caller's connection doesn't touch the background renewal."""
    length = scaled(2.4)
    lease = acquire(lease=length)
    error = TRANSIENT[connection.vendor][0][1]()
    with connection.execute_wrapper(Trouble(error, times=10**9)):
        always(lambda: lease.held, during=1.25 * length, what="held")


# Connections that break


@pytest.fixture
def server(committed: None) -> Iterator[str]:
    """Apply the test only where there is a server that can end a connection."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no server and no connections to it")
    yield connection.vendor
    # A thread that has met a dropped one sits out more, until it uses another.
    connection.close()
    connection.ensure_connection()
    distributed_lock("any").locked()


def kill_session(session: int) -> None:
    """Have the server end a session, if it is still there."""
    with connection.cursor() as cursor, suppress(OperationalError):
        if connection.vendor == "mysql":
            cursor.execute("KILL %s", [session])
        else:
            cursor.execute("SELECT pg_terminate_backend(%s)", [session])


@pytest.mark.parametrize("verb", ["acquire", "release", "renew", "locked"])
def test_connection_killed_by_the_server(
    server: str, acquire: Leases, lock: Locks, verb: str, other: OtherThread
) -> None:
    """A verb works on a dropped connection, and the caller's is left as found."""
    lease = acquire(lease=30)
    raw = connection.connection
    other.do(kill_session, own_session())
    if verb == "acquire":
        with lock(owner="other", key="another key").acquire(timeout=0) as theirs:
            assert theirs.held
    elif verb == "release":
        assert lease.release() is True
    elif verb == "renew":
        lease.renew()
        assert lease.held
    else:
        assert lock().locked() is True
    assert connection.connection is raw
    connection.close()


def test_connection_killed_while_it_is_opened(
    server: str,
    key: str,
    threads: Callable[[], OtherThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread's first connection is opened again."""
    kind, killer = type(connections["default"]), threads()
    switch = kind._set_autocommit

    def killed(self: Any, on: bool) -> None:
        monkeypatch.undo()
        killer.do(kill_session, own_session())
        switch(self, on)

    monkeypatch.setattr(kind, "_set_autocommit", killed)
    other = threads()
    lease = other.do(distributed_lock(key).acquire)
    assert other.do(lease.release) is True


@pytest.mark.parametrize("is_inside", [False, True], ids=["around", "inside"])
def test_connection_killed_after_the_commit(
    server: str,
    lock: Locks,
    obtainable: Callable[..., bool],
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
    is_inside: bool,
) -> None:
    """The lock is free although Django can't switch autocommit on again."""
    mine, kind = connections["default"], type(connections["default"])
    switch = kind._set_autocommit

    def killed(self: Any, on: bool) -> None:
        if self is mine and on:
            monkeypatch.undo()
            other.do(kill_session, own_session())
        switch(self, on)

    # Of the drivers, some ask the server to switch.
    with suppress(OperationalError), ExitStack() as blocks:
        if is_inside:
            blocks.enter_context(transaction.atomic())
        blocks.enter_context(lock(atomic=True))
        monkeypatch.setattr(kind, "_set_autocommit", killed)
    assert obtainable()
    with lock(key="another key"):
        pass
    connection.close()


@pytest.mark.skipif(connection.vendor != "postgresql", reason="errors of PostgreSQL's")
@pytest.mark.parametrize("owner", [None, "me"])
@pytest.mark.parametrize("limit", ["IdleSessionTimeout", "TransactionTimeout"])
def test_connection_ended_by_a_limit(
    acquire: Leases, limit: str, owner: str | None
) -> None:
    """What a limit of the server's has ended, is carried out on another connection.

    An explicit owner's hold is counted down once.
    """
    lease = acquire(owner=owner)
    with connection.execute_wrapper(Trouble(postgresql_error(limit))):
        assert lease.release() is True


@pytest.mark.parametrize("met", [False, True], ids=["unnoticed", "met before"])
@pytest.mark.parametrize("keys", [1, 2])
def test_owners_release_on_a_dropped_connection(
    server: str, key: str, other: OtherThread, keys: int, met: bool
) -> None:
    """Nothing was counted down there, so an explicit owner's hold is given back."""
    if server == "mysql" and not met:
        pytest.skip("an error of MySQL's doesn't tell")
    lock = distributed_lock(*[f"{key}{n}" for n in range(keys)], owner="me", lease=60)
    outer, inner = lock.acquire(timeout=0), lock.acquire(timeout=0)
    connection.ensure_connection()
    other.do(kill_session, own_session())
    if met:
        with suppress(DatabaseError), connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    assert inner.release() is True
    connection.close()
    assert stored(f"{key}0").hold_count == 1
    assert outer.release() is True
    assert not lock.locked()


def own_session() -> int:
    """Return the server's number of this thread's session."""
    raw = connection.connection
    return int(
        raw.thread_id() if connection.vendor == "mysql" else raw.info.backend_pid
    )


def other_sessions() -> list[int]:
    """Return the sessions of this database except the one asking."""
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute(
                "SELECT id FROM information_schema.processlist"
                " WHERE db = DATABASE() AND id <> CONNECTION_ID()"
            )
        else:
            cursor.execute(
                "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
                " AND pid <> pg_backend_pid() AND backend_type = 'client backend'"
            )
        return [row[0] for row in cursor.fetchall()]


def test_renewals_connection_is_killed(
    server: str, acquire: Leases, lock: Locks
) -> None:
    """The renewal recovers when its connection is dropped, again and again."""
    lease = acquire(lease=scaled(1.5))
    contender = lock(owner="somebody else")
    kills = 0
    for _ in range(4):
        for session in other_sessions():
            kill_session(session)
            kills += 1
        always(
            lambda: lease.held and contender.try_acquire() is None,
            during=scaled(0.5),
            what="held",
        )
    assert kills
    assert lease.release() is True


def lost_connection() -> Exception:
    """Return the driver's error for a connection that went away in mid-statement."""
    if connection.vendor == "mysql":
        return mysql_error(2013, "Lost connection to server during query")
    import psycopg

    return psycopg.OperationalError("server closed the connection unexpectedly")


def test_lost_reply(server: str, key: str, other: OtherThread) -> None:
    """When an acquisition's reply was lost, the retry finds its own grant."""
    with distributed_lock(key) as first:
        pass
    session = own_session()
    trouble = Trouble(lost_connection(), after=lambda: other.do(kill_session, session))
    with connection.execute_wrapper(trouble):
        lease = distributed_lock(key).acquire(timeout=5)
    connection.close()
    assert lease.fencing_token == first.fencing_token + 1
    assert stored(key).hold_count == 1
    assert lease.release() is True
    assert not distributed_lock(key).locked()


def losing_reply(other: OtherThread, only: str) -> Trouble:
    """Let the next such statement be carried out, and its connection be lost."""
    session = own_session()
    return Trouble(
        lost_connection(), after=lambda: other.do(kill_session, session), only=only
    )


def test_lost_reply_in_an_owners_return(
    server: str, key: str, acquire: Leases, lock: Locks, other: OtherThread
) -> None:
    """What may be subtracted already isn't again: a co-owner keeps the key."""
    lost = [acquire(owner="me", lease=60) for _ in range(2)]
    co_owner = DistributedLock.objects.acquire(key, owner="me", lease=60)
    assert co_owner is not None
    lost[0]._hold.lose("expired")
    trouble = losing_reply(other, "hold_count = COALESCE")
    with connection.execute_wrapper(trouble):
        lease = lock(owner="me").acquire(timeout=DEADLINE)
    connection.close()
    assert trouble.sent
    assert lease.release() is True
    assert stored(key).hold_count >= 1
    assert DistributedLock.objects.renew(
        key, owner="me", version=co_owner.version, lease=60
    )


def test_lost_reply_in_an_owners_release(
    server: str, key: str, acquire: Leases, lock: Locks, other: OtherThread
) -> None:
    """A hold that may be given back isn't subtracted when its owner comes back."""
    lease = acquire(owner="me", lease=60)
    co_owner = DistributedLock.objects.acquire(key, owner="me", lease=60)
    assert co_owner is not None
    trouble = losing_reply(other, "UPDATE")
    with connection.execute_wrapper(trouble), suppress(DatabaseError):
        lease.release()
    connection.close()
    assert stored(key).hold_count == 1
    assert lock(owner="me").acquire(timeout=0).release() is True
    assert DistributedLock.objects.renew(
        key, owner="me", version=co_owner.version, lease=60
    )


# Several at once


def test_entering_again_that_fails(
    lock: Locks, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """An inner acquisition that fails isn't counted: the outer one frees the key."""
    lease = lock().acquire(timeout=0)

    def fail(*arguments: Any) -> Any:
        raise OperationalError("out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(backends[lease.backend], "reenter", fail)
        with pytest.raises(OperationalError, match="out of reach"):
            lock().acquire(timeout=0)
    assert lease.release() is True
    assert stored(key).hold_count == 0


def test_set_that_cant_be_released(
    key: str, monkeypatch: pytest.MonkeyPatch, other: OtherThread
) -> None:
    """The error is raised once, and the set is left to lapse: nothing more is sent."""
    keys = [f"{key}:{number}" for number in range(2)]
    leases = distributed_lock(*keys).acquire(timeout=0)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OperationalError("out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(backends["default"], "release_all", fail)
        with pytest.raises(OperationalError, match="out of reach"):
            leases.release()
        assert leases.release() is False
    assert not leases.held
    assert leases.release() is False
    assert [stored(each).hold_count for each in keys] == [1, 1]
    assert other.do(distributed_lock(*keys).try_acquire) is None


def test_set_whose_release_is_looked_at_in_vain(
    key: str, passing_error: Exception
) -> None:
    """A set that was released is not released again because of a later error."""
    keys = [f"{key}:{number}" for number in range(2)]
    mine = distributed_lock(*keys, owner="me").acquire(timeout=0)
    row = DistributedLock.objects.acquire(keys[0], owner="me", lease=60)
    assert row is not None
    DistributedLock.objects.force_release(keys[1])
    released: list[str] = []
    look = Trouble(passing_error)

    def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("SELECT") and released:
            return look(execute, sql, params, many, context)
        released.append(sql)
        return execute(sql, params, many, context)

    with connection.execute_wrapper(fail), suppress(DatabaseError):
        mine.release()
    assert stored(keys[0]).hold_count == 1
    assert stored(keys[0]).owner == "me"


def test_part_of_a_set_that_cant_be_given_back(
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    acquire: Leases,
    other: OtherThread,
) -> None:
    """Who waits in vain for the rest of a set is told so, and what it had lapses."""
    other.do(acquire, f"{key}:b")

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OperationalError("out of reach")

    monkeypatch.setattr(backends["default"], "undo_all", fail)
    with pytest.raises(LockTimeout) as caught:
        distributed_lock(f"{key}:a", f"{key}:b").acquire(timeout=0.3)
    monkeypatch.undo()
    assert caught.value.key == f"{key}:b"
    [line] = [line for line in caplog.messages if "left to lapse" in line]
    assert f"key={key + ':a'!r}" in line
    assert "error=out of reach" in line
    assert stored(f"{key}:a").hold_count == 1
    assert other.do(distributed_lock(f"{key}:a").try_acquire) is None


def test_renewal_of_a_pinned_row(
    acquire: Leases, key: str, two_writers: None, other: OtherThread
) -> None:
    """A renewal that somebody's transaction holds up for a second raises."""
    lease = acquire(lease=60)
    pinned, over = threading.Event(), threading.Event()

    def pin() -> None:
        with transaction.atomic():
            DistributedLock.objects.select_for_update().get(pk=key)
            pinned.set()
            over.wait(DEADLINE)

    pinning = other.start(pin)
    assert pinned.wait(DEADLINE)
    try:
        with pytest.raises(DatabaseError):
            lease.renew()
        assert lease.held
    finally:
        over.set()
        pinning.result(DEADLINE)
    lease.renew()


def test_connection_that_fails_to_close(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A connection that fails while it is closed is given up, with a line at DEBUG."""

    def fail() -> None:
        raise OperationalError("gone away")

    caplog.set_level(logging.DEBUG, "dblocks")
    mine = own_connections.separate_connection("default")
    close = mine.close
    monkeypatch.setattr(mine, "close", fail)
    own_connections.close(mine)
    assert "closing failed database=default" in caplog.messages
    close()


def test_row_that_is_busy_all_the_time(
    key: str, lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set and an inner lock meet the database's error, if it isn't a passing one."""

    class BrokenDisk(Exception):
        # Without one, PostgreSQL's error would be about the connection.
        sqlstate = "58030"

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OperationalError("disk I/O error") from BrokenDisk()

    monkeypatch.setattr(backends["default"], "_take_all", fail)
    with pytest.raises(OperationalError, match="disk I/O error"):
        distributed_lock(f"{key}:a", f"{key}:b").acquire(timeout=0)
    with lock():
        monkeypatch.setattr(table, "reenter", fail)
        with pytest.raises(OperationalError, match="disk I/O error"):
            lock().acquire(timeout=0)
        monkeypatch.undo()


def test_grant_that_cant_be_given_back(
    acquire: Leases, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What nobody waits for any more, and can't be released, is left to lapse."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OperationalError("out of reach")

    lease = acquire(lease=60)
    monkeypatch.setattr(backends["default"], "undo_all", fail)
    give_back([lease._hold])
    monkeypatch.undo()
    assert any("left to lapse" in line for line in caplog.messages)
