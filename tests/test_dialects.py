"""What differs between databases: rounded timeouts, snapshots, prepared statements."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import datetime, timezone
from enum import IntEnum
from functools import partial
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from django.core.checks import run_checks
from django.db import (
    InterfaceError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.backends.utils import CursorWrapper
from django.test.utils import CaptureQueriesContext

from dblocks import (
    Lease,
    LeaseLost,
    Lock,
    LockTimeout,
    distributed_lock,
    transaction_lock,
)
from dblocks.backends.database import dialects, session_locks
from dblocks.backends.database import statements as texts
from dblocks.backends.database.dialects.base import TABLE
from dblocks.backends.database.dialects.mysql import MySQL
from dblocks.backends.database.dialects.postgresql import PostgreSQL
from dblocks.backends.database.fields import as_utc
from dblocks.backends.gates import GateClosed
from dblocks.conf import backends
from dblocks.models import DistributedLock, TokenFloor
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread, beside
from tests.support.processes import Workers
from tests.support.services import MariaDB
from tests.support.timing import DEADLINE, SLACK, eventually, scaled, takes
from tests.testapp.models import Account

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Note every statement of every thread, with its parameters."""
    seen: list[tuple[str, Any]] = []
    execute = CursorWrapper.execute

    def noted(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        seen.append((sql, params))
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", noted)
    return seen


# MySQL rounds the timeout of GET_LOCK() to whole seconds


@pytest.fixture
def as_mysql(committed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Speak to MariaDB, too, as to MySQL, whose statements it understands."""
    if connection.vendor != "mysql":
        pytest.skip("about MySQL")
    monkeypatch.setattr(dialects, "_ask", lambda connection: MySQL())
    monkeypatch.setattr(dialects, "_servers", {})
    monkeypatch.setitem(vars(connections["default"]), "_dblocks_dialect", MySQL())
    # Those of other tests know what server they lead to.
    session_locks.pool.close_idle()
    yield
    session_locks.pool.close_idle()


@contextmanager
def queued_for_elsewhere(key: str, lease: float) -> Iterator[None]:
    """Another process has the key, and yet another is the first to queue for it."""
    assert DistributedLock.objects.acquire(key, owner="another process", lease=lease)
    first = session_locks.SessionLock("default", key, 1.0)
    first.enter(1)
    assert first.held
    try:
        yield
    finally:
        first.leave()


@pytest.mark.usefixtures("as_mysql")
@pytest.mark.parametrize("timeout", [0.45, 1.55, 2.3])
def test_waits_for_session_locks_are_whole_seconds(
    statements: list[tuple[str, Any]],
    key: str,
    other: OtherThread,
    lock: Locks,
    timeout: float,
) -> None:
    """No wait is sent that the server would round, and none is longer than asked."""
    with queued_for_elsewhere(key, lease=60):
        statements.clear()
        with takes(timeout, timeout + SLACK), pytest.raises(LockTimeout):
            other.do(lock(timeout=timeout).acquire)
    waits = [params[1] for sql, params in statements if "GET_LOCK(" in sql]
    assert all(wait == int(wait) and wait >= 1 for wait in waits)
    assert waits or timeout < 2
    assert sum(waits) <= timeout
    # Who can't queue rests between two looks.
    assert len(statements) < 40 + 60 * timeout


@pytest.mark.usefixtures("as_mysql")
def test_lease_that_ends_within_a_second(
    statements: list[tuple[str, Any]], key: str, other: OtherThread, lock: Locks
) -> None:
    """A waiter whose session lock would take too long to wait for doesn't spin."""
    with queued_for_elsewhere(key, lease=0.9):
        statements.clear()
        lease = other.do(lock(timeout=DEADLINE).acquire)
        assert len(statements) < 120
        other.do(lease.release)


@pytest.mark.usefixtures("as_mysql")
def test_free_key_for_one_who_cant_queue(
    key: str,
    workers: Workers,
    other: OtherThread,
    lock: Locks,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever sees it first asks for it; nobody's turn is waited for."""
    monkeypatch.setattr(MySQL, "shortest_queueing", 2 * DEADLINE)
    holder = workers.start("hold", key=key)
    holder.expect("held")
    backend: Any = backends["default"]
    read, seen = backend.look, list[float]()

    def look(*args: Any) -> Any:
        reading = read(*args)
        seen.append(reading.remaining)
        return reading

    monkeypatch.setattr(backend, "look", look)
    waiting = other.start(lock(timeout=DEADLINE).acquire)
    eventually(lambda: len(seen) > 3, what="some looks")
    holder.tell("release")
    lease = waiting.result(DEADLINE)
    assert [left > 0 for left in seen] == [True] * (len(seen) - 1) + [False]
    assert other.do(lease.release) is True


# MariaDB's table locks


@pytest.mark.parametrize("is_first_grant", [False, True])
def test_locked_table(is_first_grant: bool, lock: Locks, other: OtherThread) -> None:
    """A try doesn't stand for as long as somebody has locked the whole table."""
    if not getattr(connection, "mysql_is_mariadb", False):
        pytest.skip("elsewhere no statement can be told how long to wait for a table")
    if not is_first_grant:
        lock().acquire().release()
    is_locked, leave = Event(), Event()

    def keep() -> bool:
        with connection.cursor() as cursor:
            cursor.execute(f"LOCK TABLES {TABLE} READ")
            is_locked.set()
            try:
                return leave.wait(DEADLINE)
            finally:
                cursor.execute("UNLOCK TABLES")

    keeping = other.start(keep)
    assert is_locked.wait(DEADLINE)
    with pytest.raises(LockTimeout):
        lock().acquire(timeout=0.1)
    leave.set()
    assert keeping.result(DEADLINE)
    lock().acquire().release()


# InnoDB's gap locks, at REPEATABLE READ


def lock_wait_timeout() -> int:
    """How long a statement of the caller's waits for others, in seconds."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT @@SESSION.innodb_lock_wait_timeout")
        return int(cursor.fetchone()[0])


@pytest.fixture
def with_gaps(committed: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MySQL's session is told, and at REPEATABLE READ alone, how long to wait.

    Afterwards it waits for as long as before. MariaDB's statement is told, always.
    """
    if connection.vendor != "mysql":
        pytest.skip("about InnoDB")
    if connection.mysql_is_mariadb:
        yield
        return
    with monkeypatch.context() as patch:
        options = connection.settings_dict["OPTIONS"]
        patch.setitem(options, "isolation_level", "repeatable read")
        connection.close()
        before = lock_wait_timeout()
        yield
        assert lock_wait_timeout() == before
        connection.close()


@pytest.fixture
def locked_gap(with_gaps: None, key: str) -> Iterator[None]:
    """Another transaction has locked where rows of the key and its like would be."""
    beside = connection.copy()
    with closing(beside), beside.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        cursor.execute("BEGIN")
        cursor.execute(
            f"SELECT * FROM {TABLE} WHERE `key` BETWEEN %s AND %s FOR UPDATE",
            [key, f"{key}~"],
        )
        yield
        cursor.execute("ROLLBACK")


@pytest.mark.usefixtures("as_mysql")
@pytest.mark.parametrize("keys", [1, 2])
def test_owners_release_that_pymysql_has_not_sent(key: str, keys: int) -> None:
    """After it has closed a connection, all that it says is that."""
    lock = distributed_lock(*[f"{key}{n}" for n in range(keys)], owner="me", lease=60)
    lease = lock.acquire(timeout=0)

    def refuse(*arguments: Any) -> Any:
        raise InterfaceError(0, "")

    with connection.execute_wrapper(refuse):
        assert lease.release() is True
    connection.close()
    assert not lock.locked()


@pytest.mark.usefixtures("as_mysql")
def test_servers_that_files_name(settings: Any, tmp_path: Path) -> None:
    """Each is asked what it is, and for the name of its database."""
    its = connection.settings_dict
    lines = [f"{name.lower()}={its[name]}" for name in ("HOST", "PORT", "USER")]
    lines += [f"password={its['PASSWORD']}", f"database={its['NAME']}"]
    nothing = dict.fromkeys(("HOST", "PORT", "USER", "PASSWORD", "NAME"), "")
    found = []
    for alias in ("one", "two"):
        path = tmp_path / alias
        path.write_text("\n".join(["[client]", *lines]))
        options = {"read_default_file": str(path)}
        beside(settings, alias, OPTIONS=options, **nothing)
        try:
            found.append(dialects.of(connections[alias]))
            name = found[-1].session_lock_name
            assert name(connections[alias], "key") == name(connection, "key")
        finally:
            connections[alias].close()
            del connections[alias], connections.settings[alias]
    assert found[0] is not found[1]


@pytest.mark.usefixtures("as_mysql")
def test_interrupted_insert(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt comes through, though PyMySQL has closed the connection."""
    mine = vars(connections["default"])
    monkeypatch.setitem(mine, "isolation_level", "repeatable read")

    def interrupt(execute: Any, sql: str, *arguments: Any) -> Any:
        if not sql.startswith("INSERT"):
            return execute(sql, *arguments)
        connection.connection.close()
        raise KeyboardInterrupt

    try:
        with connection.execute_wrapper(interrupt), pytest.raises(KeyboardInterrupt):
            distributed_lock(key).try_acquire()
    finally:
        connection.connection = None


@pytest.mark.usefixtures("locked_gap")
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize("permits", [1, 2])
def test_new_lease_in_a_locked_gap(key: str, keys: int, permits: int) -> None:
    """A row that can't be made is a key that is taken, which a try soon tells."""
    if keys > 1 and permits > 1:
        pytest.skip("several keys have no permits")
    names = [f"{key}:{number}" for number in range(keys)]
    with takes(0, 2 + SLACK):
        assert distributed_lock(*names, permits=permits).try_acquire() is None


@pytest.mark.usefixtures("locked_gap")
def test_locked_gap_where_statements_have_little_time(key: str) -> None:
    """A limit of the session's own makes no error of such a wait."""
    if dialects.of(connection).name != "mariadb":
        pytest.skip("its limit counts for reads alone")
    with connection.cursor() as cursor:
        cursor.execute("SET SESSION max_statement_time = 0.3")
        try:
            assert distributed_lock(key).try_acquire() is None
            cursor.execute("SELECT @@SESSION.max_statement_time")
            assert cursor.fetchone() == (0.3,)
        finally:
            cursor.execute("SET SESSION max_statement_time = DEFAULT")


@pytest.mark.usefixtures("locked_gap")
@pytest.mark.parametrize("keys", [1, 2])
@pytest.mark.parametrize(
    "how", [{"nowait": True}, {"skip_locked": True}, {"timeout": 1.5}]
)
def test_new_row_in_a_locked_gap(key: str, keys: int, how: dict[str, Any]) -> None:
    """The caller's time bounds the wait for somebody else's transaction."""
    names = [f"{key}:{number}" for number in range(keys)]
    with takes(0, 3 + SLACK):
        if "skip_locked" in how:
            with transaction_lock(*names, **how) as rows:
                assert rows is None
        else:
            with pytest.raises(LockTimeout), transaction_lock(*names, **how):
                pytest.fail("entered")


# Isolation that the settings leave to the server


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_isolation_of_the_session(level: str) -> None:
    """Where Django sets no level, the server is asked for the session's."""
    if connection.vendor != "mysql":
        pytest.skip("about MySQL and MariaDB, where Django sets a level")
    beside = connection.copy()
    beside.settings_dict["OPTIONS"]["isolation_level"] = None
    with closing(beside), beside.cursor() as cursor:
        cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        assert dialects.of(beside).session_isolation(beside) == level


# A server that rolls back whole transactions after a lock wait timeout

THOROUGH = "thorough"


@pytest.fixture
def thorough(committed: None, settings: Any) -> Iterator[None]:
    """Start such a server, which an alias and a backend reach."""
    if dialects.of(connection).name != "mariadb":
        pytest.skip("needs MariaDB")
    options = ["--innodb-rollback-on-timeout=ON", "--innodb-lock-wait-timeout=1"]
    with MariaDB(arguments=options) as server:
        server.url()
        connections.settings[THOROUGH] = connections.settings["default"] | {
            "NAME": "dblocks",
            "USER": "root",
            "PASSWORD": "",
            "HOST": "127.0.0.1",
            "PORT": str(server.port),
        }
        path = "dblocks.backends.database.DatabaseBackend"
        settings.DBLOCKS = {THOROUGH: {"BACKEND": path, "OPTIONS": {"using": THOROUGH}}}
        with connections[THOROUGH].schema_editor() as editor:
            for model in (DistributedLock, TokenFloor, Account):
                editor.create_model(model)
        yield
        connections[THOROUGH].close()
        del connections[THOROUGH]
        del connections.settings[THOROUGH]


def want_row(key: str, timeout: float) -> None:
    """Ask for the row, and do without it."""
    lock = transaction_lock(key, backend=THOROUGH, timeout=timeout)
    with suppress(LockTimeout), lock:
        pass


def want_lease(key: str) -> None:
    """Ask the manager for the lease."""
    DistributedLock.objects.using(THOROUGH).acquire(key, owner="me", lease=30)


WANTED = {
    "a row at once": partial(want_row, timeout=0),
    "a row": partial(want_row, timeout=5),
    "a lease": want_lease,
}


@pytest.mark.parametrize("want", WANTED.values(), ids=WANTED)
def test_rollback_on_timeout(
    thorough: None, key: str, other: OtherThread, want: Callable[[str], None]
) -> None:
    """A transaction that a wait has ended can't be committed without its beginning."""
    lock, began, over = transaction_lock(key, backend=THOROUGH), Event(), Event()

    def hold() -> None:
        with transaction.atomic(using=THOROUGH), lock:
            began.set()
            over.wait(DEADLINE)
        connections[THOROUGH].close()

    holding = other.start(hold)
    assert began.wait(DEADLINE)
    mine = Account.objects.using(THOROUGH)

    @transaction.atomic(using=THOROUGH)
    def work() -> None:
        mine.create(name="mine")
        want(key)
        mine.create(name="also mine")

    with suppress(OperationalError, transaction.TransactionManagementError):
        work()
    over.set()
    holding.result(timeout=DEADLINE)
    assert mine.count() in {0, 2}
    found = [each.id for each in run_checks(tags=["database"], databases=[THOROUGH])]
    assert "dblocks.W016" in found


# MariaDB's snapshot isolation, at REPEATABLE READ


@pytest.fixture
def snapshot_isolation(committed: None) -> Iterator[None]:
    """Switch on what MariaDB 11.6 and later have switched on."""
    if dialects.of(connection).name != "mariadb":
        pytest.skip("needs MariaDB")
    with connection.cursor() as cursor:
        cursor.execute("SHOW VARIABLES LIKE 'innodb_snapshot_isolation'")
        if cursor.fetchone() is None:
            pytest.skip("this MariaDB has no innodb_snapshot_isolation")
        cursor.execute("SET SESSION innodb_snapshot_isolation = ON")
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    yield
    connection.close()


@pytest.mark.usefixtures("snapshot_isolation")
def test_renewal_after_the_snapshot(
    acquire: Leases, other: OtherThread, obtainable: Callable[..., bool], key: str
) -> None:
    """The holder's own renewal doesn't disturb its guard, which pins the row."""
    lease, error = acquire(lease=scaled(1.0)), list[Exception]()

    @transaction.atomic
    def renewed() -> None:
        assert not Account.objects.filter(name="nobody").exists()
        Account.objects.create(name=key)
        other.do(lease.renew)
        lease.guard()
        assert not obtainable()

    try:
        renewed()
    except (LeaseLost, OperationalError) as raised:
        error.append(raised)
    assert not error
    assert Account.objects.filter(name=key).exists()
    assert lease.release()


@pytest.mark.usefixtures("snapshot_isolation")
def test_force_release_after_the_snapshot(
    acquire: Leases, other: OtherThread, key: str
) -> None:
    """Who was force-released behind the snapshot's back can't commit."""
    lease = acquire()

    @transaction.atomic
    def outdated() -> None:
        assert not Account.objects.filter(name="nobody").exists()
        Account.objects.create(name=key)
        other.do(DistributedLock.objects.force_release, key)
        lease.guard()

    with pytest.raises(LeaseLost) as caught:
        outdated()
    assert caught.value.reason == "forced"
    assert not Account.objects.filter(name=key).exists()


# Session locks


@pytest.mark.parametrize("automatic", [True, False])
def test_guard_after_the_snapshot(lock: Locks, key: str, automatic: bool) -> None:
    """A lock taken under an older snapshot can't be verified, which is no loss."""
    if connection.vendor != "postgresql":
        pytest.skip("elsewhere the guard sees rows as they are")
    with pytest.raises(OperationalError, match="snapshot"), transaction.atomic():  # noqa: PT012
        connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        AccountFactory()
        with lock(atomic=automatic) as lease:
            if not automatic:
                lease.guard()
    assert lease.lost_reason is None
    assert Account.objects.count() == 0
    assert lock(owner="other").acquire(timeout=0).release() is True


def test_connection_that_cant_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gate whose connection fails is closed, and its place is free again."""
    if not dialects.of(connection).has_session_locks:
        pytest.skip("needs session locks")
    session_locks.pool.close_idle()
    places = len(session_locks.pool._places)

    def fail(alias: str) -> Any:
        raise OperationalError("too many connections")

    monkeypatch.setattr(session_locks, "separate_connection", fail)
    for _ in range(session_locks.MAX_GATES + 1):
        gate = session_locks.SessionLock("default", "key", 0.0)
        with pytest.raises(GateClosed):
            gate.enter(0.1)
    assert len(session_locks.pool._places) == places


def test_gate_whose_connection_is_closed(committed: None) -> None:
    """Leaving it raises nothing: an interrupt would give way to that error.

    Psycopg closes a connection whose statement an interrupt could not cancel.
    """
    if not dialects.of(connection).has_session_locks:
        pytest.skip("needs session locks")
    session_locks.pool.close_idle()
    places = len(session_locks.pool._places)
    gate = session_locks.SessionLock("default", "key", 1.0)
    gate.enter(1)
    assert gate.held
    assert gate._connection is not None
    gate._connection.connection.close()
    gate.show_waiter(True)
    gate.leave()
    assert len(session_locks.pool._places) == places


def test_gate_at_the_end_of_the_process(
    committed: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that ends with a lease for which it had waited says nothing of it.

    By then no thread can be started.
    """
    if not dialects.of(connection).has_session_locks:
        pytest.skip("needs session locks")
    gate = session_locks.SessionLock("default", "key", 1.0)
    gate.enter(1)
    assert gate.held

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        gate.__del__()
    gate.leave()


# Statements that PostgreSQL parses once


@pytest.fixture
def prepared() -> Callable[[], int]:
    """Count the statements that the server has prepared for this session."""
    if connection.vendor != "postgresql":
        pytest.skip("needs PostgreSQL")
    connection.close()

    def count() -> int:
        with connection.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM pg_prepared_statements")
            return int(cursor.fetchone()[0])

    yield count
    connection.close()


def use(lock: Locks, times: int) -> None:
    for _ in range(times):
        with lock():
            pass


def test_prepared_after_a_while(prepared: Callable[[], int], lock: Locks) -> None:
    """A connection that takes locks again and again has them planned once."""
    use(lock, 3)
    assert prepared() == 0
    use(lock, 20)
    assert prepared() == 2
    assert connection.connection.prepare_threshold is None


def test_prepared_for_sets_and_permits(prepared: Callable[[], int], key: str) -> None:
    """So have those that take several keys or permits, unless they are very long."""
    locks: list[Lock[Any]] = [
        distributed_lock(key, permits=3),
        distributed_lock(f"{key}a", f"{key}b"),
        distributed_lock(*(f"{key}{number}" for number in range(100))),
    ]
    for times in (1, 20):
        # Those that made the rows don't count.
        connection.close()
        for lock in locks:
            for _ in range(times):
                lock.acquire().release()
    assert prepared() == 4


def test_prepared_statements_that_are_gone(
    prepared: Callable[[], int], lock: Locks
) -> None:
    """Who discards what a session has prepared loses nothing but the plans."""
    use(lock, 20)
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    use(lock, 5)
    assert not lock().locked()


def test_prepared_statements_of_the_manager_that_are_gone(
    prepared: Callable[[], int], lock: Locks
) -> None:
    """Its verbs, which repeat nothing, do without the plans as well."""
    locks, mine = DistributedLock.objects, {"key": lock().key, "owner": "me"}
    for gone in (False, False, True):
        use(lock, 10)
        if gone:
            with connection.cursor() as cursor:
                cursor.execute("DEALLOCATE ALL")
        row = locks.acquire(**mine, lease=60)
        assert row is not None
        assert locks.release(**mine, version=row.version)


def test_prepared_statements_that_are_gone_in_a_transaction(
    prepared: Callable[[], int], lock: Locks
) -> None:
    """What runs in a transaction, where nothing is repeated, needs none of them."""
    rows = transaction_lock(lock().key)
    for _ in range(5):
        use(lock, 2)
        with rows:
            pass
    with connection.cursor() as cursor:
        cursor.execute("DEALLOCATE ALL")
    with rows as row:
        assert row.key == lock().key


def test_statements_are_seen(prepared: Callable[[], int], lock: Locks) -> None:
    """Prepared ones pass through Django's wrappers as all others do."""
    use(lock, 20)
    seen: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        seen.append(sql)
        return execute(sql, *rest)

    with connection.execute_wrapper(note):
        use(lock, 1)
    assert [sql.split()[0] for sql in seen] == ["UPDATE", "UPDATE"]


def test_statements_are_logged(prepared: Callable[[], int], lock: Locks) -> None:
    """Django's log has them with their values."""
    use(lock, 20)
    with CaptureQueriesContext(connection) as queries:
        use(lock, 1)
    assert len(queries) == 2
    assert all(lock().key in query["sql"] for query in queries)


def test_not_behind_a_pooler(
    prepared: Callable[[], int], lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where statements run in another session than the driver's, none is prepared."""
    monkeypatch.setattr(
        dialects.of(connection).__class__, "session", ("1 + PG_BACKEND_PID()",)
    )
    texts.of.cache_clear()
    try:
        use(lock, 20)
        assert prepared() == 0
    finally:
        monkeypatch.undo()
        texts.of.cache_clear()


def test_one_thread_for_many_short_locks(lock: Locks) -> None:
    """No thread is started for a lock while the renewal scheduler lingers."""
    use(lock, 1)
    eventually(lambda: "dblocks-scheduler" in names())
    me, start = threading.current_thread(), threading.Thread.start
    started = []

    def noted(self: threading.Thread) -> None:
        # Other threads may still tidy up after earlier tests, and start more for that.
        if threading.current_thread() is me:
            started.append(self.name)
        start(self)

    # What earlier tests have left behind, as tasks that wait, gives back in threads.
    gc.collect()
    gc.disable()
    threading.Thread.start = noted  # type: ignore[method-assign]
    try:
        use(lock, 200)
    finally:
        threading.Thread.start = start  # type: ignore[method-assign]
        gc.enable()
    assert started == []


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_no_more_gates_than_there_are_places() -> None:
    """When all places are taken, the next gate is closed, and no connection opened."""
    pool = session_locks.Connections()
    pool._places.clear()
    with pytest.raises(GateClosed):
        pool.take("default")


def test_sqlite_has_one_isolation_and_no_sessions() -> None:
    """What the other databases can be asked of sessions, SQLite answers without I/O."""
    if connection.vendor != "sqlite":
        pytest.skip("about SQLite")
    dialect = dialects.of(connection)
    with CaptureQueriesContext(connection) as queries:
        assert dialect.isolation(connection) is None
        assert dialect.session_isolation(connection) is None
        assert not dialect.is_collision(OperationalError("database is locked"))
        with dialect.bounded(connection, 1.0) as level:
            assert level is None
    assert not queries.captured_queries


def test_moment_given_as_text() -> None:
    """A driver may give a moment as text: its digits are UTC."""
    moment = datetime(2026, 1, 2, 3, 4, 5, 600, tzinfo=timezone.utc)
    assert as_utc("2026-01-02 03:04:05.000600") == moment
    assert as_utc(moment.replace(tzinfo=None)) == moment
    assert as_utc(None) is None


class Psycopg2Level(IntEnum):
    """As Django names them with psycopg2, whose numbers aren't psycopg's."""

    READ_COMMITTED = 1
    REPEATABLE_READ = 2
    SERIALIZABLE = 3
    READ_UNCOMMITTED = 4


@pytest.mark.parametrize("level", Psycopg2Level, ids=lambda level: level.name)
def test_isolation_with_psycopg2(level: Psycopg2Level) -> None:
    """What may have an old snapshot is known by its name."""
    expected = {
        Psycopg2Level.REPEATABLE_READ: "repeatable read",
        Psycopg2Level.SERIALIZABLE: "serializable",
    }
    found = PostgreSQL().isolation(SimpleNamespace(isolation_level=level))
    assert found == expected.get(level)


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
@pytest.mark.parametrize("callback", [None, print], ids=["bare", "psycogreen"])
def test_gevent_with_psycopg2(
    driver: str, callback: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in C, and all greenlets with it, unless it is told how to wait."""
    patched = SimpleNamespace(is_module_patched=lambda name: True)
    monkeypatch.setitem(sys.modules, "gevent.monkey", patched)
    extensions = SimpleNamespace(get_wait_callback=lambda: callback)
    monkeypatch.setitem(sys.modules, "psycopg2", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "psycopg2.extensions", extensions)
    database = SimpleNamespace(__name__=driver)
    stops = PostgreSQL().waits_for_all(SimpleNamespace(Database=database))
    assert stops == (driver == "psycopg2" and callback is None)
