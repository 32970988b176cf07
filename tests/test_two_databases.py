"""Locks in a database of their own, beside the one with the data."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import (
    NotSupportedError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.backends.signals import connection_created
from django.db.transaction import TransactionManagementError

from dblocks import Lease, LeaseLost, Lock, distributed_lock
from dblocks.backends.database import dialects, own_connections, table
from dblocks.models import DistributedLock
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread, listening
from tests.support.timing import SLACK, always, scaled, takes
from tests.testapp.models import Account

locks = DistributedLock.objects.using("locks")


@pytest.fixture(autouse=True)
def locks_database(committed: None, settings: Any) -> Iterator[None]:
    """Two backends: ``default``, and ``apart`` in the database ``locks``."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    path = "dblocks.backends.database.DatabaseBackend"
    settings.DBLOCKS = {
        "default": {"BACKEND": path},
        "apart": {"BACKEND": path, "OPTIONS": {"using": "locks"}},
    }
    yield
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"DELETE FROM {DistributedLock._meta.db_table}")


@pytest.fixture
def apart(key: str) -> Callable[..., Lock]:
    """Make locks in the database of their own."""
    return lambda **options: distributed_lock(key, backend="apart", **options)


@pytest.fixture
def taken(apart: Callable[..., Lock], other: OtherThread) -> Callable[[], bool]:
    """Ask from another thread whether the lock kept apart is taken."""
    return lambda: bool(other.do(apart().locked))


def test_row_is_in_the_other_database(apart: Callable[..., Lock], key: str) -> None:
    """The backend's database has the row, the data's database hasn't."""
    with apart() as lease:
        assert lease.backend == "apart"
        assert locks.held().filter(pk=key).exists()
        assert not DistributedLock.objects.filter(pk=key).exists()


class ReadsData:
    """Reads everything from the data's database, as from a replica."""

    def db_for_read(self, model: type, **hints: Any) -> str:
        return "default"


def test_row_is_read_where_it_is(key: str, settings: Any) -> None:
    """What a row has not loaded yet doesn't come from where the router reads."""
    settings.DATABASE_ROUTERS = [ReadsData()]
    row = locks.acquire(key, owner="me", lease=60, note="mine")
    assert row is not None
    assert row.note == "mine"
    locks.force_release(key)
    with pytest.raises(DistributedLock.DoesNotExist):
        row.refresh_from_db(from_queryset=DistributedLock.objects.using("default"))
    row.refresh_from_db()
    assert row.owner == ""


def test_backends_are_independent(apart: Callable[..., Lock], key: str) -> None:
    """The same key in two backends is two locks."""
    with apart(), distributed_lock(key, owner="somebody else").acquire(timeout=0):
        pass


def test_taken_beside_an_open_transaction(
    apart: Callable[..., Lock], taken: Callable[[], bool]
) -> None:
    """On every database a lock kept apart can be taken inside atomic()."""
    with transaction.atomic():
        AccountFactory(name="mine")
        with apart():
            assert taken()
        assert taken()
    assert not taken()
    assert Account.objects.filter(name="mine").exists()


@pytest.mark.parametrize("using", ["default", "locks"])
def test_transaction_on_any_database_counts(
    key: str, apart: Callable[..., Lock], using: str, other: OtherThread
) -> None:
    """A release waits for an open transaction, whichever database that is on."""
    backend = {"default": "apart", "locks": "default"}[using]
    the_lock = distributed_lock(key, backend=backend)
    lease = the_lock.acquire(timeout=0)
    with transaction.atomic(using=using):
        lease.release()
        assert other.do(the_lock.locked)
    assert not other.do(the_lock.locked)


@pytest.mark.parametrize(
    ("outer", "inner"), [("default", "locks"), ("locks", "default")]
)
def test_last_transaction_decides(
    apart: Callable[..., Lock], taken: Callable[[], bool], outer: str, inner: str
) -> None:
    """With transactions on two databases, the last one to end frees the lock."""
    lease = apart().acquire(timeout=0)
    with transaction.atomic(using=outer):
        with transaction.atomic(using=inner):
            lease.release()
        assert taken()
    assert not taken()


@pytest.mark.parametrize("using", [None, "default"])
def test_guard_across_databases(apart: Callable[..., Lock], using: str | None) -> None:
    """The guard can't pin a row in a transaction of another database."""
    with apart() as lease, pytest.raises(NotSupportedError), transaction.atomic():
        lease.guard(using=using)


def test_guard_on_the_locks_database(apart: Callable[..., Lock]) -> None:
    """using= names the locks' own database, where the guard works."""
    with apart() as lease, transaction.atomic(using="locks"):
        lease.guard(using="locks")


def test_guard_without_a_transaction(apart: Callable[..., Lock]) -> None:
    """The error names the database whose transaction it needs."""
    advice = re.escape("inside transaction.atomic(using='locks')")
    with apart() as lease, pytest.raises(TransactionManagementError, match=advice):
        lease.guard()


@pytest.mark.usefixtures("readers_beside_a_writer")
def test_atomic_across_databases(
    apart: Callable[..., Lock], taken: Callable[[], bool]
) -> None:
    """atomic=True commits the data while the lock apart is held."""
    seen: list[bool] = []
    with apart(atomic=True):
        AccountFactory(name="mine")
        transaction.on_commit(lambda: seen.append(taken()))
    assert seen == [True]
    assert Account.objects.filter(name="mine").exists()
    assert not taken()


def enter_again(lock: Lock, lease: Lease) -> None:
    """Take the lock once more, and give it back."""
    with lock as inner:
        assert inner.fencing_token == lease.fencing_token


def take_another(lock: Lock, lease: Lease) -> None:
    """Take a lock on another key, guarded as well."""
    with distributed_lock(f"{lease.key} too", backend="apart", atomic=True):
        AccountFactory(name="in a hook")


def renew(lock: Lock, lease: Lease) -> None:
    """Renew the lease."""
    lease.renew()


def renew_in_a_transaction(lock: Lock, lease: Lease) -> None:
    """Renew the lease in a transaction of the hook's own."""
    with transaction.atomic():
        lease.renew()


def release(lock: Lock, lease: Lease) -> None:
    """Give the lock back before its block does."""
    lease.release()


def use_the_manager(lock: Lock, lease: Lease) -> None:
    """Take another key, renew and release, by the manager's verbs."""
    key, owner, version = lease.key, lease._hold.grant.owner, lease.fencing_token
    assert version is not None
    assert locks.renew(key, owner=owner, version=version, lease=60)
    assert locks.acquire(f"{key} too", owner="me", lease=60)
    assert locks.release(key, owner=owner, version=version)


@pytest.mark.usefixtures("readers_beside_a_writer")
@pytest.mark.parametrize(
    "use",
    [
        enter_again,
        take_another,
        renew,
        renew_in_a_transaction,
        release,
        use_the_manager,
    ],
)
@pytest.mark.parametrize("depth", [0, 1])
def test_hook_uses_locks(
    apart: Callable[..., Lock], taken: Callable[[], bool], use: Any, depth: int
) -> None:
    """After the commit nothing is pinned that an ``on_commit`` hook would wait for."""
    seen: list[float] = []
    with ExitStack() as outer:
        for _ in range(depth):
            outer.enter_context(transaction.atomic())
        with apart(atomic=True) as lease:
            AccountFactory(name="mine")

            @transaction.on_commit
            def hook() -> None:
                with takes(at_most=3 * SLACK):
                    use(apart(), lease)
                seen.append(lease.remaining())

    assert len(seen) == 1
    assert Account.objects.filter(name="mine").exists()
    assert not taken()


def test_second_lock_of_a_transaction(
    apart: Callable[..., Lock], taken: Callable[[], bool]
) -> None:
    """What a transaction has pinned first hides no later grant from the guard.

    SQLite's one writer has no room for a later grant, and the error says so.
    """
    with transaction.atomic():
        with distributed_lock("first", backend="apart", atomic=True):
            AccountFactory(name="one")
        if connections["locks"].vendor == "sqlite":
            with pytest.raises(TransactionManagementError, match="Take all keys"):
                apart().acquire()
            return
        with apart(atomic=True):
            AccountFactory(name="two")
        assert taken()
    assert Account.objects.filter(name__in=["one", "two"]).count() == 2
    assert not taken()


def test_pin_outlasts_a_limit_for_idle_transactions(apart: Callable[..., Lock]) -> None:
    """What is pinned stays so while the caller's own transaction is at work.

    On PostgreSQL 17 and later, also beyond a limit for whole transactions.
    """
    limits = {
        "postgresql": "SELECT set_config(name, '1000', false) FROM pg_settings WHERE "
        "name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')",
        "mariadb": "SET SESSION idle_transaction_timeout = 1",
    }
    limit = limits.get(dialects.of(connections["locks"]).name)
    if limit is None:
        pytest.skip("it has no such limit")

    def configure(connection: Any, **kwargs: Any) -> None:
        if connection.alias == "locks":
            connection.cursor().execute(limit)

    with listening(connection_created, configure), transaction.atomic():
        with apart(atomic=True):
            AccountFactory(name="mine")
        time.sleep(2)
        assert own_connections.pin_connection("locks").is_usable()


@pytest.mark.parametrize("is_second", [False, True], ids=["first", "second"])
def test_successor_renews_beside_a_refused_guard(
    apart: Callable[..., Lock], key: str, other: OtherThread, is_second: bool
) -> None:
    """A guard that finds its lease lost keeps nothing locked, and others still can."""
    if is_second and connections["locks"].vendor == "sqlite":
        pytest.skip("it has one writer, and no room for a later grant")
    locks, rows = DistributedLock.objects.using("locks"), list[Any]()
    first = distributed_lock("first", backend="apart", atomic=True)

    def lose() -> None:
        with apart(atomic=True, lease=600, renew=False):
            locks.force_release(key)
            rows.append(locks.acquire(key, owner="somebody", lease=60))

    with transaction.atomic():
        if is_second:
            with first:
                AccountFactory(name="one")
        with pytest.raises(LeaseLost):
            lose()
        mine = {"owner": "somebody", "version": rows[0].version, "lease": 60}
        with takes(at_most=1 + SLACK):
            assert other.do(locks.renew, key, **mine)
        if not is_second:
            with first:
                AccountFactory(name="one")
    assert Account.objects.filter(name="one").exists()


def test_second_lock_whose_guard_fails(
    apart: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error that may have let go what was pinned first lets nothing commit."""
    if connections["locks"].vendor == "sqlite":
        pytest.skip("it has one writer, and no room for a later grant")

    def lose(pinning: Any, grants: Any) -> Any:
        # As a server does with a deadlock's victim.
        pinning.rollback()
        raise OperationalError("Deadlock found")

    with transaction.atomic():
        with distributed_lock("first", backend="apart", atomic=True):
            AccountFactory(name="one")
        monkeypatch.setattr(table, "pin", lose)
        with pytest.raises(OperationalError, match="Deadlock"), apart(atomic=True):
            AccountFactory(name="two")
        assert connection.needs_rollback
    assert not Account.objects.filter(name__in=["one", "two"]).exists()


def test_forced_out_across_databases(apart: Callable[..., Lock], key: str) -> None:
    """A holder that was force-released can't commit, though its lock is elsewhere."""
    block = apart(atomic=True, lease=600, renew=False)
    with pytest.raises(LeaseLost), block:  # noqa: PT012
        AccountFactory(name="mine")
        assert locks.force_release(key)
    assert not Account.objects.filter(name="mine").exists()


def test_renewal_across_databases(
    apart: Callable[..., Lock], taken: Callable[[], bool], key: str
) -> None:
    """Leases in both databases are renewed by one process."""
    here = distributed_lock(key, lease=scaled(1.2)).acquire(timeout=0)
    there = apart(lease=scaled(1.2)).acquire(timeout=0)
    always(
        lambda: here.held and there.held and taken(), during=scaled(2.6), what="held"
    )
    assert here.release() is True
    assert there.release() is True


def test_manager_of_the_default_backend(settings: Any) -> None:
    """The manager works on the database that DBLOCKS names, unless told otherwise."""
    assert DistributedLock.objects.all().db == "default"
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}
    assert DistributedLock.objects.all().db == "locks"
    assert DistributedLock.objects.db == "locks"
    assert DistributedLock.objects.db_manager("default").db == "default"
    assert DistributedLock.objects.using("default").all().db == "default"
