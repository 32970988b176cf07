"""What the contract suite starts from: a committed database, a key, other owners.

``backend`` is where another engine joins: tests that take it (or ``lock``, ``acquire``)
say nothing about tables and run unchanged wherever a backend keeps the contract.
"""

from __future__ import annotations

import itertools
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, connections, transaction
from django.dispatch import Signal
from django.test.utils import setup_databases, teardown_databases

from dblocks import Lease, Lock, LockError, distributed_lock
from dblocks.conf import backends
from tests.support.processes import Fleet, Workers
from tests.support.timing import DEADLINE

SERIAL = itertools.count()


def in_memory() -> bool:
    """Is the test database private to this process?"""
    return connection.vendor == "sqlite" and connection.is_in_memory_db()


def wipe() -> None:
    """Empty the tables that tests write, by hand and in autocommit."""
    with connection.cursor() as cursor:
        for table in ("distributedlock", "intervention"):
            cursor.execute(f"DELETE FROM dblocks_{table}")
        for table in ("deposit", "account", "entry"):
            cursor.execute(f"DELETE FROM testapp_{table}")


@pytest.fixture(scope="session")
def django_db_setup(
    django_test_environment: None, django_db_blocker: Any
) -> Iterator[None]:
    """Make all test databases; pytest-django's own makes those that marks ask for."""
    with django_db_blocker.unblock():
        databases = setup_databases(
            verbosity=0, interactive=False, serialized_aliases=()
        )
    yield
    with django_db_blocker.unblock():
        teardown_databases(databases, verbosity=0)


@pytest.fixture
def committed(django_db_setup: None, django_db_blocker: Any) -> Iterator[None]:
    """The database as in production: autocommit, seen by other sessions.

    In place of ``django_db(transaction=True)``, which empties every table after each
    test: here only those that the tests write, which takes milliseconds.
    """
    with django_db_blocker.unblock():
        connection.ensure_connection()
        try:
            yield
        finally:
            connection.close()
            wipe()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run what takes a backend on each; on the database's alone what is marked so."""
    if "backend" in metafunc.fixturenames:
        aliases = settings.CONTRACT_BACKENDS
        if metafunc.definition.get_closest_marker("database_backend") is not None:
            aliases = ["default"]
        engine = metafunc.definition.get_closest_marker("engine")
        if engine is not None:
            aliases = [alias for alias in aliases if alias in engine.args]
        metafunc.parametrize("backend", aliases, indirect=True)


def tried_on(item: pytest.Item) -> str | None:
    """Return the alias of the engine that a test takes, if it takes one."""
    call = getattr(item, "callspec", None)
    return call and call.params.get("backend")


def lacking(item: pytest.Item, alias: str) -> str | None:
    """Return what a test needs and an engine declares not to have, as a sentence.

    Other processes need locks that are kept outside this one, in some system.
    """
    needed = [name for marker in item.iter_markers("needs") for name in marker.args]
    if tried_on(item) and "workers" in getattr(item, "fixturenames", ()):
        needed.append("system")
    for ability in needed:
        declared = getattr(backends[alias], ability)
        if not declared:
            return f"not applicable: {alias} declares {ability} = {declared}"
    return None


def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Say what isn't applicable to an engine; leave out what isn't about engines.

    A test that takes no backend uses the database's. It runs where that is tested;
    elsewhere it appears only if it needs what the engine there lacks.
    """
    aliases = settings.CONTRACT_BACKENDS
    usual = "default" if "default" in aliases else aliases[0]

    def is_chosen(item: pytest.Item) -> bool:
        engine = item.get_closest_marker("engine")
        if engine is not None:
            return not set(engine.args).isdisjoint(aliases)
        reason = lacking(item, tried_on(item) or usual)
        if reason is not None:
            # By a mark, so that nothing is set up for it.
            item.add_marker(pytest.mark.skip(reason=reason))
        tried = tried_on(item)
        return tried in aliases if tried else usual == "default" or reason is not None

    chosen = [item for item in items if is_chosen(item)]
    config.hook.pytest_deselected(items=[i for i in items if i not in chosen])
    items[:] = chosen


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> str:
    """Return the alias of the engine under test, with its storage ready."""
    alias = str(request.param)
    request.getfixturevalue("committed")
    if alias not in {"default", "locmem"}:
        # The process's connection, which stays.
        backends[alias].read_all(["ready"])
    return alias


@pytest.fixture
def key() -> str:
    """Return a key that no other test uses."""
    return f"test:{next(SERIAL)}:{uuid.uuid4().hex[:12]}"


def fitting(backend: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return options of a lock as an engine can have them.

    One whose leases are all of one length has a short one in the tests, which stands
    for the test's own: what depends on that length needs ``has_own_leases``.
    """
    if not backends[backend].has_own_leases:
        options.pop("lease", None)
    return options


@pytest.fixture
def lock(backend: str, key: str) -> Callable[..., Lock]:
    """Make locks on the test's key (or another one) in the engine under test."""

    def make(key: str = key, **options: Any) -> Lock:
        return distributed_lock(key, backend=backend, **fitting(backend, options))

    return make


@pytest.fixture
def acquire(lock: Callable[..., Lock]) -> Iterator[Callable[..., Lease]]:
    """Acquire at once; what is still held at the end of the test is released."""
    leases: list[Lease] = []

    def take(*args: Any, **options: Any) -> Lease:
        lease = lock(*args, **options).acquire(timeout=0)
        leases.append(lease)
        return lease

    yield take
    for lease in reversed(leases):
        with suppress(LockError):
            lease.release()


def outranks(later: Lease, earlier: Lease) -> bool:
    """Is this a later grant than that one, by the engine's tokens if it has any?"""
    if backends[later.backend].has_fencing_tokens:
        assert later.fencing_token is not None
        assert earlier.fencing_token is not None
        return later.fencing_token > earlier.fencing_token
    assert later.fencing_token is earlier.fencing_token is None
    return later.owner != earlier.owner


class OtherThread:
    """A thread of its own that does one thing after another, each with a deadline."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="other")
        self._closed = False

    def start(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin in that thread; the future's result raises what the function raised."""
        return self._executor.submit(function, *args, **kwargs)

    def do(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Do it in that thread and wait for the result."""
        return self.start(function, *args, **kwargs).result(timeout=DEADLINE)

    @contextmanager
    def in_transaction(self, act: Callable[[], object]) -> Iterator[None]:
        """Keep a transaction open in that thread, in which something was done."""
        done, leave = threading.Event(), threading.Event()

        def stay() -> None:
            with transaction.atomic():
                act()
                done.set()
                assert leave.wait(DEADLINE)

        staying = self.start(stay)
        try:
            assert done.wait(DEADLINE)
            yield
        finally:
            leave.set()
            staying.result(timeout=2 * DEADLINE)

    def close(self) -> None:
        """Close its connections and end the thread."""
        if not self._closed:
            self._closed = True
            self.start(connections.close_all)
            self._executor.shutdown()


@pytest.fixture
def threads() -> Iterator[Callable[[], OtherThread]]:
    """Make threads that are closed, with their connections, when the test ends."""
    made: list[OtherThread] = []

    def make() -> OtherThread:
        made.append(OtherThread())
        return made[-1]

    yield make
    for thread in made:
        thread.close()


@pytest.fixture
def other(threads: Callable[[], OtherThread]) -> OtherThread:
    """Return somebody else: a second thread of this process."""
    return threads()


@pytest.fixture
def obtainable(lock: Callable[..., Lock], other: OtherThread) -> Callable[..., bool]:
    """Ask whether somebody else would be granted the test's key (and give it back)."""

    def attempt(options: dict[str, Any]) -> bool:
        lease = lock(**options).try_acquire()
        if lease is None:
            return False
        lease.release()
        return True

    def ask(**options: Any) -> bool:
        return bool(other.do(attempt, options))

    return ask


@pytest.fixture(scope="session")
def fleet(django_db_setup: None) -> Iterator[Fleet]:
    """Keep worker processes between tests; starting one costs a second of Django."""
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.fixture
def workers(committed: None, request: pytest.FixtureRequest) -> Iterator[Workers]:
    """Start programs of ``tests.support.worker`` on the test's database."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    workers = Workers(request.getfixturevalue("fleet"))
    yield workers
    workers.close()


@pytest.fixture
def readers_beside_a_writer(committed: None) -> None:
    """Apply the test only where other threads can read what a transaction writes to."""
    if in_memory():
        pytest.skip("a database in memory locks whole tables, against readers too")


@contextmanager
def listening(signal: Signal, *receivers: Callable[..., Any]) -> Iterator[None]:
    """Connect receivers for the time of the block."""
    for receiver in receivers:
        signal.connect(receiver)
    try:
        yield
    finally:
        for receiver in receivers:
            signal.disconnect(receiver)


def has_old_snapshots() -> bool:
    """Is this where a transaction can't lock what its snapshot doesn't have?"""
    isolation = connection.settings_dict["OPTIONS"].get("isolation_level")
    return connection.vendor == "postgresql" and isolation == 3


@pytest.fixture
def two_writers(committed: None) -> None:
    """Apply the test only where a session can write beside an open transaction."""
    if connection.vendor == "sqlite":
        pytest.skip(
            "SQLite has one writer: nothing can be written beside an open transaction"
        )


@pytest.fixture
def locks_beside(committed: None, request: pytest.FixtureRequest) -> None:
    """Apply the test only where a lock can be taken beside an open transaction.

    On an engine that has no table the locks need no second writer.
    """
    if backends[tried_on(request.node) or "default"].has_table:
        request.getfixturevalue("two_writers")


def beside(settings: Any, alias: str, **changes: Any) -> str:
    """Make a backend for a database as the default one but for changes; its alias."""
    config = dict(connections.settings["default"])
    options = {**config["OPTIONS"], **changes.pop("OPTIONS", {})}
    connections.settings[alias] = {**config, **changes, "OPTIONS": options}
    path = "dblocks.backends.database.DatabaseBackend"
    settings.DBLOCKS = {
        "default": {"BACKEND": path},
        alias: {"BACKEND": path, "OPTIONS": {"using": alias}},
    }
    return alias


@pytest.fixture
def live_threads() -> Callable[[], set[threading.Thread]]:
    """Return the threads that have appeared since the test began."""
    before = set(threading.enumerate())
    return lambda: set(threading.enumerate()) - before


@pytest.fixture
def open_files() -> Callable[[], int]:
    """Count this process's open file descriptors."""
    return lambda: len(os.listdir("/proc/self/fd"))
