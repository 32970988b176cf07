"""Connections of dblocks' own: when they are closed, and how long they wait."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import (
    DatabaseError,
    OperationalError,
    close_old_connections,
    connection,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created

from dblocks import distributed_lock, transaction_lock
from dblocks.backends.database import connections as database_connections
from dblocks.backends.database import dialects, own_connections
from dblocks.backends.database.connections import LEAST_REPEATS
from dblocks.test import hold_elsewhere
from tests.support.factories import stored
from tests.support.fixtures import OtherThread, beside, listening
from tests.support.timing import DEADLINE, SLACK, eventually, scaled

pytestmark = [
    pytest.mark.usefixtures("two_writers"),
    pytest.mark.database_backend,
]


def sessions() -> int:
    """Count the server's sessions on this database."""
    query = {
        "mysql": "SELECT COUNT(*) FROM information_schema.processlist"
        " WHERE db = DATABASE()",
        "postgresql": "SELECT COUNT(*) FROM pg_stat_activity"
        " WHERE datname = current_database() AND backend_type = 'client backend'",
    }[connection.vendor]
    with connection.cursor() as cursor:
        cursor.execute(query)
        return int(cursor.fetchone()[0])


@pytest.fixture
def max_age(committed: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], None]:
    """Set for how long Django keeps connections that are made from now on."""

    def set_to(seconds: float | None) -> None:
        monkeypatch.setitem(connections.settings["default"], "CONN_MAX_AGE", seconds)

    return set_to


def lease(key: str) -> None:
    """Take and release inside a transaction."""
    with transaction.atomic(), distributed_lock(key, timeout=0):
        pass


def release_at_the_end(key: str) -> None:
    """Take inside a transaction and keep it to its end."""
    with transaction.atomic():
        assert distributed_lock(key).acquire(timeout=0).release()


def look(key: str) -> None:
    """Ask inside a transaction who has the key."""
    with transaction.atomic():
        assert not distributed_lock(key).locked()


def fail(key: str) -> None:
    """Be refused inside a transaction."""
    with hold_elsewhere(key), transaction.atomic():
        assert distributed_lock(key).try_acquire() is None


def lock_the_row(key: str) -> None:
    """Lock the row inside a transaction."""
    with transaction.atomic(), transaction_lock(key, timeout=0):
        pass


USES = pytest.mark.parametrize(
    "use", [lease, release_at_the_end, look, fail, lock_the_row]
)


def end_own_session() -> None:
    """Close Django's connection in such a way that nobody but the server learns it."""
    connections["default"].connection.close()


@USES
@pytest.mark.parametrize("age", [None, 600], ids=["for ever", "for minutes"])
def test_threads_that_end(
    key: str, max_age: Callable[[Any], None], use: Callable[[str], None], age: Any
) -> None:
    """A thread that ends leaves no connection, however long Django keeps its own."""
    max_age(age)
    before = sessions()
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            use(f"{key}:{number}")
            end_own_session()
        except BaseException as error:
            errors.append(error)

    for number in range(3):
        thread = threading.Thread(target=work, args=[number])
        thread.start()
        thread.join(DEADLINE)
        assert not thread.is_alive()
    assert not errors
    eventually(lambda: sessions() <= before, within=SLACK, what="the end of sessions")


def close_all() -> None:
    """What ends a thread's work in many programs."""
    connections.close_all()


def close_each() -> None:
    """The same, one by one."""
    for one in connections.all(initialized_only=True):
        one.close()


@USES
@pytest.mark.parametrize("close", [close_all, close_each])
def test_closed_with_djangos(
    key: str,
    max_age: Callable[[Any], None],
    other: OtherThread,
    use: Callable[[str], None],
    close: Callable[[], None],
) -> None:
    """Who closes the thread's connections closes those of dblocks beside them too."""
    max_age(None)
    before = sessions()
    other.do(use, key)
    other.do(close)
    eventually(lambda: sessions() <= before, within=SLACK, what="the end of sessions")
    # The thread can go on.
    other.do(use, key)
    other.do(close)
    eventually(lambda: sessions() <= before, within=SLACK, what="the end of sessions")


def by_one() -> None:
    """What Celery calls between tasks."""
    connections["default"].close_if_unusable_or_obsolete()


@USES
@pytest.mark.parametrize("clean_up", [by_one, close_old_connections])
def test_obsolete_with_djangos(
    key: str,
    max_age: Callable[[Any], None],
    other: OtherThread,
    use: Callable[[str], None],
    clean_up: Callable[[], None],
) -> None:
    """What closes the thread's connections when they are old closes dblocks' too."""
    max_age(0.2)
    before = sessions()
    other.do(use, key)

    def cleaned_up() -> bool:
        other.do(clean_up)
        return sessions() <= before

    eventually(cleaned_up, within=0.2 + SLACK, what="the end of sessions")


def test_kept_with_djangos(
    key: str,
    max_age: Callable[[Any], None],
    other: OtherThread,
) -> None:
    """An open transaction keeps its connection beside it although others clean up."""
    max_age(0.05)

    def work() -> bool:
        with transaction.atomic():
            held = distributed_lock(key).acquire(timeout=0)
            for _ in range(3):
                close_old_connections()
                assert distributed_lock(key).locked()
            return held.release()

    assert other.do(work) is True
    other.do(connections.close_all)


# How long renewals wait for the network


#: More seconds than a renewal thread may wait for one dead connection: a lease of the
#: default length must outlive it.
TOO_LONG = 10


@pytest.fixture
def patient(committed: None, settings: Any) -> Iterator[Callable[..., str]]:
    """Make a backend whose database has other options; its alias."""

    def make(autocommit: bool = True, **options: Any) -> str:
        return beside(settings, "patient", AUTOCOMMIT=autocommit, OPTIONS=options)

    before = sessions()
    yield make
    if "patient" in connections.settings:
        connections["patient"].close()
        del connections["patient"]
        del connections.settings["patient"]
    eventually(lambda: sessions() <= before, what="the end of sessions")


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Collect what the driver gets for each connection of other threads."""
    seen: list[dict[str, Any]] = []
    user = threading.current_thread()
    kind = type(connections["default"])
    connect = kind.get_new_connection

    def remember(self: Any, conn_params: dict[str, Any]) -> Any:
        if threading.current_thread() is not user:
            seen.append(dict(conn_params))
        return connect(self, conn_params)

    monkeypatch.setattr(kind, "get_new_connection", remember)
    return seen


#: The driver's options that bound a wait, and how many of each make a second.
BOUNDS = {
    "mysql": {"connect_timeout": 1, "read_timeout": 1, "write_timeout": 1},
    "postgresql": {"connect_timeout": 1, "tcp_user_timeout": 1000},
}


@pytest.mark.parametrize("seconds", [60, 2], ids=["longer", "shorter"])
def test_renewals_network_timeouts(
    key: str, patient: Callable[..., str], connected: list[dict[str, Any]], seconds: int
) -> None:
    """Renewals wait as short as dblocks wants it, or shorter if the project does."""
    bounds = BOUNDS[connection.vendor]
    backend = patient(**{name: seconds * unit for name, unit in bounds.items()})
    with distributed_lock(key, backend=backend, lease=scaled(1.5), timeout=0) as held:
        end = stored(key).expires_at
        eventually(lambda: stored(key).expires_at > end, what="a renewal")
        assert held.held
    assert connected
    for params in connected:
        for name, unit in bounds.items():
            assert int(params[name]) <= min(seconds, TOO_LONG) * unit, name


class Uncopied(int):
    """As an ``SSLContext``, which is an option of PyMySQL's."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("cannot pickle it")


def test_options_that_cant_be_copied(key: str, patient: Callable[..., str]) -> None:
    """Locks beside a transaction, waiters' and renewals' connections do without."""
    backend = patient(connect_timeout=Uncopied(30))
    with transaction.atomic("patient"):
        lease = distributed_lock(key, backend=backend, lease=scaled(1)).acquire()
    end = stored(key).expires_at
    eventually(lambda: stored(key).expires_at > end, what="a renewal")
    assert lease.release()


@pytest.mark.parametrize(
    ("given", "used"),
    [(30, 5), (2, 2), (0.5, 0.5), ("2.5", "2.5"), (None, 5), (0, 5), (-1, 5)],
)
def test_shorter_of_two_waits(
    patient: Callable[..., str], given: object, used: object
) -> None:
    """Some drivers know fractions, and some wait for ever at zero or below."""
    alias = patient(connect_timeout=given)
    apart = own_connections.separate_connection(alias, connect_timeout=5)
    assert apart.settings_dict["OPTIONS"]["connect_timeout"] == used
    own_connections.close(apart)


@pytest.mark.usefixtures("committed")
def test_opened_by_half(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that an error left out of autocommit isn't used: nobody commits."""
    if connection.vendor != "mysql":
        pytest.skip("this database's driver switches it on without a statement")
    kind = type(connections["default"])
    switch, kills = kind._set_autocommit, [OperationalError("Query was interrupted")]

    def interrupted(self: Any, autocommit: bool) -> None:
        if kills and self is not connections["default"]:
            raise kills.pop()
        switch(self, autocommit)

    with transaction.atomic():
        monkeypatch.setattr(kind, "_set_autocommit", interrupted)
        with pytest.raises(OperationalError, match="interrupted"):
            distributed_lock(key).acquire()
        lease = distributed_lock(key).acquire()
        assert other.do(distributed_lock(key).locked)
        lease.release()
    assert not other.do(distributed_lock(key).locked)


@pytest.mark.usefixtures("committed")
def test_opened_without_the_projects_settings(key: str) -> None:
    """A project's receiver may choose the schema: it is called again after an error."""
    opened: list[Any] = []

    def configure(connection: Any, **kwargs: Any) -> None:
        opened.append(connection)
        if len(opened) == 1:
            raise OperationalError("canceling statement due to user request")

    with transaction.atomic():
        connection.ensure_connection()
        with listening(connection_created, configure):
            with pytest.raises(OperationalError, match="canceling"):
                distributed_lock(key).acquire()
            lease = distributed_lock(key).acquire()
        assert own_connections.connection_beside("default") in opened[1:]
        lease.release()


@pytest.mark.parametrize("is_own", [True, False], ids=["thread", "beside"])
def test_read_only_session(
    key: str, patient: Callable[..., str], other: OtherThread, is_own: bool
) -> None:
    """A connection of dblocks' own that can't write isn't used again.

    In threads for async code, and beside a transaction.
    """
    read_only = {
        "postgresql": "SET default_transaction_read_only = on",
        "mysql": "SET SESSION TRANSACTION READ ONLY",
    }
    if connection.vendor not in read_only:
        pytest.skip("a file is read-only for all, or for none")
    lock, opened = distributed_lock(key, backend=patient(), timeout=0), list[Any]()

    def configure(connection: Any, **kwargs: Any) -> None:
        if connection is not connections[connection.alias]:
            opened.append(connection)
            if len(opened) == 1:
                connection.cursor().execute(read_only[connection.vendor])

    def twice() -> None:
        with ExitStack() as block:
            if is_own:
                own_connections.run_apart()
            else:
                block.enter_context(transaction.atomic("patient"))
            with pytest.raises(DatabaseError, match=r"(?i)read.?only"):
                lock.acquire()
            lock.acquire().release()
        connections.close_all()

    with listening(connection_created, configure):
        other.do(twice)
    assert len(opened) == 2


def test_database_without_autocommit(key: str, patient: Callable[..., str]) -> None:
    """What runs on connections of dblocks' own is committed there too."""
    lock = distributed_lock(key, backend=patient(autocommit=False), lease=scaled(1))
    lease = async_to_sync(lock.aacquire)(timeout=0)
    end = stored(key).expires_at
    assert distributed_lock(key).locked()
    eventually(lambda: stored(key).expires_at > end, what="a renewal")
    assert async_to_sync(lease.arelease)()
    assert not distributed_lock(key).locked()


@pytest.mark.parametrize("collisions", [LEAST_REPEATS, LEAST_REPEATS + 1])
def test_collisions_of_an_operators_transaction(
    collisions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is repeated some times at least, however long the first one has waited."""
    dialect = type(dialects.of(connection))
    monkeypatch.setattr(dialect, "is_transient", lambda self, error: True)
    monkeypatch.setattr(dialect, "is_collision", lambda self, error: True)
    monkeypatch.setattr(database_connections, "PATIENCE", 0.0)
    left = [OperationalError("collision") for _ in range(collisions)]

    def act(own: Any) -> str:
        if left:
            raise left.pop()
        return "done"

    if collisions > LEAST_REPEATS:
        with pytest.raises(OperationalError, match="collision"):
            database_connections.run_in_transaction("default", act)
    else:
        assert database_connections.run_in_transaction("default", act) == "done"
