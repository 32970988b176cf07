"""``transaction_lock``: the database holds the key until a transaction ends."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import timedelta
from functools import partial
from threading import Event
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import (
    NotSupportedError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.transaction import TransactionManagementError
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views import View

from dblocks import (
    LeaseLost,
    LockError,
    LockTimeout,
    distributed_lock,
    transaction_lock,
)
from dblocks.backends.database import row_locks, table
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.factories import AccountFactory, stored
from tests.support.fixtures import OtherThread, has_old_snapshots, in_memory
from tests.support.timing import (
    DEADLINE,
    SLACK,
    always,
    eventually,
    quickest,
    scaled,
    takes,
)
from tests.support.web import Site
from tests.testapp.models import Account


@pytest.fixture(autouse=True)
def database(request: pytest.FixtureRequest) -> None:
    """Use the database as in production, but for a test that is a TestCase's."""
    if request.node.get_closest_marker("django_db") is None:
        request.getfixturevalue("committed")


DATABASE = "dblocks.backends.database.DatabaseBackend"
Threads = Callable[[], OtherThread]


def in_block(*keys: str, **options: Any) -> Any:
    """Take the keys in the with form; return what that yields."""
    with transaction_lock(*keys, **options) as row:
        return row


def in_function(key: str, **options: Any) -> Any:
    """Take the key in the decorator form; return something true."""

    @transaction_lock(key, **options)
    def function() -> str:
        assert connection.in_atomic_block
        return "ran"

    return function()


FORMS = pytest.mark.parametrize("form", [in_block, in_function])


@pytest.fixture
def pinned(key: str, other: OtherThread) -> Iterator[Event]:
    """Another thread's transaction has the key; set the event to end it."""
    has_it, leave = Event(), Event()

    def hold() -> None:
        with transaction_lock(key, nowait=True):
            has_it.set()
            assert leave.wait(DEADLINE)

    holding = other.start(hold)
    eventually(lambda: has_it.is_set() or holding.done(), what="the other's row")
    yield leave
    leave.set()
    holding.result(timeout=DEADLINE)


def granted_while_it_waits(key: str, other: OtherThread, wait: Any) -> tuple[Any, Any]:
    """Let another thread wait for the row of a lease that is committed meanwhile.

    Returns the row, and what the wait will come to.
    """
    with transaction.atomic():
        lease = {"owner": "somebody", "lease": DEADLINE}
        row = DistributedLock.objects.acquire(key, **lease)
        assert row is not None
        waiting = other.start(wait)
        always(lambda: not waiting.done(), during=0.5)
    return row, waiting


def test_leased_while_it_waited(key: str, other: OtherThread) -> None:
    """A transaction that has waited for a row which is leased by then lets it go."""
    if connection.vendor == "sqlite":
        pytest.skip("this database has no row locks")
    distributed_lock(key).acquire().release()
    locks = DistributedLock.objects
    refused = OperationalError if has_old_snapshots() else LockTimeout
    refusals: list[Exception] = []

    def wait() -> None:
        try:
            with transaction.atomic():
                in_block(key, timeout=2 * DEADLINE)
        except refused as error:
            refusals.append(error)

    row, waiting = granted_while_it_waits(key, other, wait)
    mine = {"owner": "somebody", "version": row.version}
    with takes(at_most=1 + SLACK):
        eventually(lambda: locks.renew(key, lease=DEADLINE, **mine), what="a renewal")
        assert locks.release(key, **mine)
    waiting.result(timeout=DEADLINE)
    if not has_old_snapshots():
        for refusal in refusals:
            assert "has to be rolled back" in str(refusal.__cause__)


@pytest.mark.parametrize("fails", [None, "read_all", "is_locked"])
def test_leased_while_its_savepoint_waited(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch, fails: str | None
) -> None:
    """A savepoint doesn't take back that the transaction must let such a row go.

    Nor does it go on if it can't be known whether it has the row.
    """
    if connection.vendor != "mysql":
        pytest.skip("this database unlocks the row, or locks none")
    distributed_lock(key).acquire().release()
    original = row_locks._select

    def fail(*arguments: Any) -> Any:
        raise OperationalError("Too many connections")

    def select(*arguments: Any) -> Any:
        rows = original(*arguments)
        if fails is not None:
            monkeypatch.setattr(table, fails, fail)
        return rows

    monkeypatch.setattr(row_locks, "_select", select)

    def wait() -> bool:
        with transaction.atomic():
            AccountFactory(name="anybody")
            refused = OperationalError if fails else LockTimeout
            with suppress(refused), transaction.atomic():
                in_block(key, timeout=2 * DEADLINE)
            return connection.needs_rollback

    _, waiting = granted_while_it_waits(key, other, wait)
    assert waiting.result(timeout=DEADLINE)
    assert not Account.objects.filter(name="anybody").exists()


def test_leased_again_at_the_end_of_its_wait(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does a transaction go on that had the row neither before nor now."""
    if connection.vendor != "mysql":
        pytest.skip("this database unlocks the row, or locks none")
    distributed_lock(key).acquire().release()
    original, selects = row_locks._select, iter([False])

    def select(connection: Any, wait: Any, fresh: bool) -> Any:
        # Leased before it, and free again.
        if not next(selects, True):
            return None
        rows = original(connection, wait, fresh)
        time.sleep(wait.left)
        return rows

    monkeypatch.setattr(row_locks, "_select", select)

    def wait() -> bool:
        with transaction.atomic():
            with suppress(LockTimeout):
                in_block(key, timeout=scaled(2))
            return connection.needs_rollback

    _, waiting = granted_while_it_waits(key, other, wait)
    assert waiting.result(timeout=DEADLINE)


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("how", [{"nowait": True}, {"skip_locked": True}], ids=str)
def test_leased_before_it_was_tried(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """No transaction goes on that has locked a row which was leased by then."""
    distributed_lock(key).acquire().release()
    original, locks, rows = row_locks._select, DistributedLock.objects, []
    lease = {"owner": "somebody", "lease": DEADLINE}

    def select(*arguments: Any) -> Any:
        if not rows:
            rows.append(other.do(locks.acquire, key, **lease))
        return original(*arguments)

    monkeypatch.setattr(row_locks, "_select", select)
    with suppress(OperationalError), transaction.atomic():
        AccountFactory(name="anybody")
        with suppress(LockTimeout):
            assert in_block(key, **how) is None
        if not connection.needs_rollback:
            mine = {**lease, "version": rows[0].version}
            with takes(at_most=1 + SLACK):
                assert other.do(locks.renew, key, **mine)


@pytest.fixture
def without_snapshot() -> None:
    """Apply the test only where a leased row is unlocked again."""
    isolation = connection.settings_dict["OPTIONS"].get("isolation_level")
    if connection.vendor == "sqlite" or isolation in {"repeatable read", 3}:
        pytest.skip("this database has no row locks, or the snapshot keeps them")


@pytest.mark.usefixtures("without_snapshot")
@pytest.mark.parametrize("locked", [False, True], ids=["alone", "beside others"])
def test_leased_before_it_asked(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch, locked: bool
) -> None:
    """A transaction waits for a lease that came between its look and its select.

    So it does if another one's statement has the row locked at that moment.
    """
    distributed_lock(key).acquire().release()
    original, asks, committed = row_locks._select, Event(), Event()

    def select(*arguments: Any) -> Any:
        asks.set()
        assert committed.wait(DEADLINE)
        return original(*arguments)

    def wait() -> None:
        with transaction.atomic():
            assert in_block(key, timeout=DEADLINE).key == key

    monkeypatch.setattr(row_locks, "_select", select)
    is_locked, others = table.is_locked, iter([True] if locked else [])
    monkeypatch.setattr(
        table, "is_locked", lambda *args: next(others, False) or is_locked(*args)
    )
    with transaction.atomic():
        row = DistributedLock.objects.acquire(key, owner="somebody", lease=DEADLINE)
        assert row is not None
        waiting = other.start(wait)
        assert asks.wait(DEADLINE)
    committed.set()
    always(lambda: not waiting.done(), during=0.3, what="the wait")
    assert DistributedLock.objects.release(key, owner="somebody", version=row.version)
    waiting.result(timeout=DEADLINE)


@pytest.mark.usefixtures("without_snapshot")
def test_guarded_before_it_looked_again(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does it take the holder's guard for a lock of its own, which it has not."""
    distributed_lock(key).acquire().release()
    original, asks, leased = row_locks._select, Event(), Event()
    asked, guarded = Event(), Event()

    def select(*arguments: Any) -> Any:
        asks.set()
        assert leased.wait(DEADLINE)
        rows = original(*arguments)
        asked.set()
        assert guarded.wait(DEADLINE)
        return rows

    def wait() -> None:
        with transaction.atomic():
            assert in_block(key, timeout=DEADLINE).key == key

    monkeypatch.setattr(row_locks, "_select", select)
    waiting = other.start(wait)
    assert asks.wait(DEADLINE)
    with distributed_lock(key) as lease:
        leased.set()
        assert asked.wait(DEADLINE)
        with transaction.atomic():
            lease.guard()
            guarded.set()
            always(lambda: not waiting.done(), during=0.3, what="the wait")
    waiting.result(timeout=DEADLINE)


@pytest.mark.usefixtures("two_writers")
def test_timeout_of_several_keys(key: str, threads: Threads) -> None:
    """It bounds the wait for all of them, however many transactions have them."""
    keys = [f"{key}:{number}" for number in range(4)]
    for each in keys:
        distributed_lock(each).acquire().release()

    def hold(each: str, locked: Event, seconds: float) -> None:
        with transaction.atomic(), transaction_lock(each):
            locked.set()
            time.sleep(seconds)

    holding = []
    for number, each in enumerate(keys, start=1):
        locked = Event()
        seconds = number * scaled(0.8)
        holding.append(threads().start(hold, each, locked, seconds))
        assert locked.wait(DEADLINE)
    with takes(at_most=scaled(1) + SLACK), pytest.raises(LockTimeout):
        in_block(*keys, timeout=scaled(1))
    for transaction_of_others in holding:
        transaction_of_others.result(timeout=DEADLINE)


# A free key


@FORMS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"timeout": 0},
        {"timeout": 0.5},
        {"timeout": timedelta(seconds=1)},
        {"timeout": None},
        {"nowait": True},
        {"skip_locked": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("known", [True, False], ids=["known key", "new key"])
def test_free_key(key: str, form: Any, options: Any, known: bool) -> None:
    """A free key is granted at once in every form, made if need be."""
    if known:
        distributed_lock(key).acquire(timeout=0).release()
    with takes(at_most=SLACK):
        assert form(key, **options)
    assert not connection.in_atomic_block


def test_row(key: str) -> None:
    """The block gets the row of the key."""
    with transaction_lock(key) as row:
        assert isinstance(row, DistributedLock)
        assert row.key == key


@pytest.mark.parametrize("error", [None, ZeroDivisionError], ids=["commit", "rollback"])
def test_its_own_transaction(key: str, error: type[Exception] | None) -> None:
    """Without a transaction it opens one, which ends with the block."""
    try:
        with transaction_lock(key):
            assert connection.in_atomic_block
            AccountFactory(name="mine")
            if error is not None:
                raise error
    except ZeroDivisionError:
        pass
    assert not connection.in_atomic_block
    assert Account.objects.filter(name="mine").exists() is (error is None)


@FORMS
@pytest.mark.usefixtures("two_writers")
def test_callers_transaction(key: str, form: Any, other: OtherThread) -> None:
    """In a transaction it joins that, and holds until its end."""
    with transaction.atomic():
        assert form(key)
        AccountFactory(name="mine")
        assert connection.in_atomic_block
        with takes(at_most=SLACK):
            assert other.do(distributed_lock(key).try_acquire) is None
        assert not other.do(Account.objects.filter(name="mine").exists)
    assert other.do(in_function, key, nowait=True) == "ran"


def test_used_again(key: str, threads: Threads, readers_beside_a_writer: None) -> None:
    """One object serves again and again, and several threads at once."""
    account = AccountFactory()
    lock = transaction_lock(key, timeout=DEADLINE)

    def add() -> None:
        for _ in range(5):
            with lock:
                balance = Account.objects.get(pk=account.pk).balance
                Account.objects.filter(pk=account.pk).update(balance=balance + 1)

    adding = [threads().start(add) for _ in range(2)]
    for one in adding:
        one.result(timeout=DEADLINE)
    account.refresh_from_db()
    assert account.balance == 10


@pytest.mark.parametrize("method", [False, True], ids=["function", "method"])
def test_templates(key: str, method: bool) -> None:
    """The key is built from the call's arguments."""

    @transaction_lock(key + ":{product_id}", timeout=0)
    def sell(product_id: int) -> int:
        return product_id

    class Shop:
        @transaction_lock(lambda self, product_id: f"{key}:{product_id}", timeout=0)
        def sell(self, product_id: int) -> int:
            return product_id

    call = Shop().sell if method else sell
    with hold_elsewhere(f"{key}:7"):
        with pytest.raises(LockTimeout) as caught:
            call(7)
        assert call(8) == 8
    assert caught.value.key == f"{key}:7"


# A key that is leased


@pytest.mark.parametrize(
    ("form", "timeout"),
    [(in_block, 0.3), (in_function, timedelta(seconds=0.6))],
    ids=["number", "timedelta"],
)
def test_wait_for_a_lease(key: str, form: Any, timeout: Any) -> None:
    """The wait ends on time, to a fraction of a second."""
    seconds = getattr(timeout, "total_seconds", lambda: timeout)()
    with (
        hold_elsewhere(key, note="why", lease=20),
        takes(seconds - 0.05, seconds + SLACK),
        pytest.raises(LockTimeout) as caught,
    ):
        form(key, timeout=timeout)
    error = caught.value
    assert (error.key, error.note, error.timeout) == (key, "why", seconds)
    assert error.holder
    assert 15 < error.retry_after <= 20


def test_timeout_of_the_settings(key: str, settings: Any) -> None:
    """Without timeout= the setting's is waited for."""
    settings.DBLOCKS = {"default": {"TIMEOUT": 0.3}}
    with hold_elsewhere(key), takes(0.25, 0.3 + SLACK), pytest.raises(LockTimeout):
        in_block(key)


@FORMS
def test_nowait(key: str, form: Any) -> None:
    """nowait=True raises at once."""
    with hold_elsewhere(key), takes(at_most=SLACK), pytest.raises(LockTimeout):
        form(key, nowait=True)


@FORMS
def test_skip_locked(key: str, form: Any) -> None:
    """skip_locked=True yields None, or skips the function, at once."""
    with hold_elsewhere(key), takes(at_most=SLACK):
        assert form(key, skip_locked=True) is None


@FORMS
def test_lease_that_ends(key: str, form: Any, other: OtherThread) -> None:
    """A lease that runs out while waiting lets the transaction in."""
    lease = other.do(distributed_lock(key, lease=0.5, renew=False).acquire)
    with takes(at_most=0.5 + SLACK):
        assert form(key, timeout=DEADLINE)
    assert not lease.held


@FORMS
@pytest.mark.parametrize("how", [{"timeout": 0.3}, {"nowait": True}], ids=str)
def test_transaction_stays_usable(key: str, form: Any, how: Any) -> None:
    """After a wait that ran out the caller's transaction goes on and commits."""
    with hold_elsewhere(key), transaction.atomic():
        before = AccountFactory(name="before")
        with pytest.raises(LockTimeout):
            form(key, **how)
        Account.objects.filter(pk=before.pk).update(balance=1)
        AccountFactory(name="after")
    assert Account.objects.filter(name="before", balance=1).exists()
    assert Account.objects.filter(name="after").exists()


def test_leased_row_is_left_alone(key: str) -> None:
    """A refusal changes nothing about the lease."""
    with hold_elsewhere(key) as lease:
        version = stored(key).version
        assert in_block(key, skip_locked=True) is None
        assert stored(key).version == version
        lease.renew()
        assert lease.held


# A key that another transaction has


@pytest.fixture
def old_snapshots() -> None:
    """Apply the test only where a transaction can't lock what it can't see."""
    if not has_old_snapshots():
        pytest.skip("about PostgreSQL at REPEATABLE READ")


@pytest.mark.usefixtures("two_writers")
class TestPinned:
    """Both forms against a row that another transaction has locked."""

    @pytest.mark.parametrize(("form", "timeout"), [(in_block, 0.6), (in_function, 0.3)])
    def test_timeout(self, pinned: Event, key: str, form: Any, timeout: float) -> None:
        """A wait ends on time, to a fraction of a second."""
        with takes(timeout - 0.05, timeout + SLACK), pytest.raises(LockTimeout) as it:
            form(key, timeout=timeout)
        assert it.value.timeout == timeout

    @FORMS
    def test_nowait(self, pinned: Event, key: str, form: Any) -> None:
        """nowait=True raises at once."""
        with takes(at_most=SLACK), pytest.raises(LockTimeout):
            form(key, nowait=True)

    @FORMS
    def test_skip_locked(self, pinned: Event, key: str, form: Any) -> None:
        """skip_locked=True passes over it at once."""
        with takes(at_most=SLACK):
            assert form(key, skip_locked=True) is None

    @FORMS
    def test_commit_lets_in(
        self, pinned: Event, key: str, form: Any, threads: Threads
    ) -> None:
        """The end of the other transaction lets the waiting one in."""
        waiting = threads().start(form, key, timeout=DEADLINE)
        always(lambda: not waiting.done(), during=0.3, what="waiting")
        pinned.set()
        assert waiting.result(timeout=DEADLINE)

    @pytest.mark.parametrize("how", [{"timeout": 0.3}, {"nowait": True}], ids=str)
    def test_transaction_stays_usable(self, pinned: Event, key: str, how: Any) -> None:
        """After a wait that ran out the caller's transaction goes on and commits."""
        with transaction.atomic():
            before = AccountFactory(name="before")
            with pytest.raises(LockTimeout):
                in_block(key, **how)
            Account.objects.filter(pk=before.pk).update(balance=1)
        assert Account.objects.filter(name="before", balance=1).exists()

    def test_try_for_a_lease(self, pinned: Event, key: str) -> None:
        """A try for a lease on it answers within a second."""

        def is_refused() -> None:
            assert distributed_lock(key).try_acquire() is None

        assert quickest(is_refused) < 1

    def test_wait_for_a_lease(self, pinned: Event, key: str, threads: Threads) -> None:
        """A lease is granted when the transaction has ended."""
        waiting = threads().start(distributed_lock(key).acquire, timeout=DEADLINE)
        always(lambda: not waiting.done(), during=0.3, what="waiting")
        pinned.set()
        assert waiting.result(timeout=DEADLINE).release() is True

    def test_locked(self, pinned: Event, key: str) -> None:
        """locked() answers at once, without having seen the transaction."""
        with takes(at_most=SLACK):
            assert distributed_lock(key).locked() is False

    @pytest.mark.usefixtures("old_snapshots")
    def test_key_behind_the_snapshot(self, key: str) -> None:
        """A row that a snapshot can't see is an error, never a silent pass."""
        for options in ({"timeout": 1}, {"nowait": True}, {"skip_locked": True}):
            with transaction.atomic():
                assert Account.objects.count() == 0
                with pytest.raises(OperationalError):
                    in_block(f"{key}{options}", **options)


def in_transaction(key: str) -> Any:
    """Lock the row by the manager's verb."""
    with transaction.atomic():
        return DistributedLock.objects.for_update(key)


@pytest.mark.usefixtures("old_snapshots")
@pytest.mark.parametrize("options", [{"timeout": 5}, {"nowait": True}], ids=str)
@pytest.mark.parametrize("form", [in_block, in_transaction])
def test_data_behind_the_snapshot(
    key: str, form: Any, other: OtherThread, options: Any
) -> None:
    """After another's turn a transaction that has read before is refused the row."""
    in_block(key)
    with transaction.atomic():
        assert Account.objects.count() == 0
        other.do(form, key)
        with pytest.raises(OperationalError):
            in_block(key, **options)


@pytest.mark.parametrize("keys", [1, 3])
def test_data_behind_the_snapshot_of_one_transaction(
    key: str, keys: int, other: OtherThread
) -> None:
    """A holder whose own transaction has no snapshot counts for those that have one."""
    if connection.vendor != "postgresql":
        pytest.skip("elsewhere a row is locked as it is")
    names = [f"{key}:{number}" for number in range(keys)]
    for name in names:
        distributed_lock(name).acquire(timeout=0).release()

    def write() -> None:
        with transaction_lock(*names):
            AccountFactory(name="theirs")

    with pytest.raises(OperationalError, match="serialize"), transaction.atomic():  # noqa: PT012
        connection.cursor().execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        assert not Account.objects.exists()
        other.do(write)
        with transaction_lock(*names, timeout=0):
            AccountFactory(name="mine")
    assert Account.objects.get().name == "theirs"


@pytest.mark.usefixtures("two_writers")
def test_what_the_last_holder_has_written(
    key: str, other: OtherThread, threads: Threads
) -> None:
    """Whoever waited for a transaction of another's own sees what that has written."""
    in_block(key)
    locked, leave = Event(), Event()

    def hold() -> None:
        with transaction.atomic():
            DistributedLock.objects.for_update(key)
            locked.set()
            assert leave.wait(DEADLINE)
            AccountFactory(name="written")

    def count() -> int:
        with transaction_lock(key, timeout=DEADLINE):
            return Account.objects.filter(name="written").count()

    holding = other.start(hold)
    eventually(lambda: locked.is_set() or holding.done(), what="the other's row")
    waiting = threads().start(count)
    always(lambda: not waiting.done(), during=0.3, what="waiting")
    leave.set()
    holding.result(DEADLINE)
    assert waiting.result(DEADLINE) == 1


@pytest.mark.parametrize("form", [in_block, in_function, in_transaction])
def test_overdue_holder_afterwards(key: str, form: Any, other: OtherThread) -> None:
    """Whoever had the row meanwhile excludes the commit of an overdue holder."""
    lease = distributed_lock(key, lease=0.3, renew=False).acquire()
    eventually(lambda: not distributed_lock(key).locked(), what="the lease's end")
    other.do(form, key)
    with pytest.raises(LeaseLost) as caught, transaction.atomic():
        lease.guard()
    assert caught.value.reason == "expired"
    # Nobody got a lease, so the next token is the next number.
    with distributed_lock(key) as after:
        assert after.fencing_token == (lease.fencing_token or 0) + 1


@pytest.mark.parametrize("options", [{}, {"nowait": True}, {"skip_locked": True}])
def test_overdue_holder_that_would_cool(
    key: str, options: Any, other: OtherThread
) -> None:
    """A key that was free stays free, for this transaction and for later ones."""
    lock = distributed_lock(key, lease=0.3, renew=False, hold_at_least=30)
    lease = lock.acquire()
    eventually(lambda: not lock.locked(), what="the lease's end")

    def twice() -> None:
        with transaction.atomic():
            for _ in range(2):
                assert DistributedLock.objects.for_update(key, **options)

    for _ in range(2):
        other.do(twice)
    assert lease.release() is False
    with lock:
        pass


@pytest.mark.usefixtures("two_writers")
def test_many_overdue_holders(key: str, other: OtherThread) -> None:
    """Ending what they have locks no row, and no gap, of anybody else's."""
    names = [f"{key}:{number}" for number in range(6)]
    held = distributed_lock(f"{key}:held").acquire()
    left = [distributed_lock(n, lease=0.3, renew=False).acquire() for n in names]
    eventually(lambda: not distributed_lock(*names).locked(), what="the leases' end")
    has_it, leave = Event(), Event()

    def work() -> None:
        with transaction_lock(*names):
            has_it.set()
            assert leave.wait(DEADLINE)

    working = other.start(work)
    assert has_it.wait(DEADLINE)
    try:
        held.renew()
        for new in (f"{key}:0:new", f"{key}:z"):
            with distributed_lock(new, timeout=0):
                pass
    finally:
        leave.set()
        working.result(timeout=DEADLINE)
    assert held.release() is True
    assert not any(lease.release() for lease in left)


def test_row_lock_that_is_rolled_back(key: str, other: OtherThread) -> None:
    """What was done under the row never happened: the overdue holder may commit."""

    def fail() -> None:
        with suppress(ZeroDivisionError), transaction_lock(key):
            1 / 0  # noqa: B018

    lease = distributed_lock(key, lease=0.3, renew=False).acquire()
    eventually(lambda: not distributed_lock(key).locked(), what="the lease's end")
    other.do(fail)
    with transaction.atomic():
        lease.guard()
    assert lease.release() is False


def test_lease_in_a_row_lock_on_sqlite(key: str, other: OtherThread) -> None:
    """On SQLite a lease waits for the transaction that has the write lock."""
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        pytest.skip("about a file of SQLite")
    has_it, leave = Event(), Event()

    def hold() -> None:
        with transaction_lock(key):
            has_it.set()
            assert leave.wait(DEADLINE)

    holding = other.start(hold)
    eventually(has_it.is_set, what="the write lock")
    try:
        for form in (in_block, in_function):
            with takes(0.25, 0.3 + SLACK), pytest.raises(LockTimeout):
                form(key, timeout=0.3)
            with takes(at_most=SLACK), pytest.raises(LockTimeout):
                form(key, nowait=True)
            with takes(at_most=SLACK):
                assert form(key, skip_locked=True) is None
    finally:
        leave.set()
    holding.result(timeout=DEADLINE)
    assert distributed_lock(key).acquire(timeout=1).release()


def test_sqlite_takes_the_whole_database(key: str, other: OtherThread) -> None:
    """On SQLite another key's transaction is in the way too: there is one writer."""
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        pytest.skip("about a file of SQLite")
    with transaction_lock(key), pytest.raises(LockTimeout):
        other.do(in_block, key + "!", nowait=True)


# Nesting


@pytest.mark.parametrize("inner", [in_block, in_function])
def test_inside_a_lease(key: str, inner: Any) -> None:
    """Inside its owner's lease it would wait for itself: an error at once."""
    with (
        distributed_lock(key),
        takes(at_most=SLACK),
        pytest.raises(LockError) as caught,
    ):
        inner(key, timeout=DEADLINE)
    assert not isinstance(caught.value, LockTimeout)
    assert "same owner" in str(caught.value)


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("opened", [True, False], ids=["in a transaction", "without"])
def test_lease_inside(key: str, opened: bool) -> None:
    """A lease inside would wait for its own transaction: an error at once."""

    def take() -> None:
        with (
            transaction_lock(key),
            takes(at_most=SLACK),
            pytest.raises(LockError) as caught,
        ):
            distributed_lock(key).acquire(timeout=DEADLINE)
        assert not isinstance(caught.value, LockTimeout)

    if opened:
        with transaction.atomic():
            take()
    else:
        take()
    assert distributed_lock(key).acquire(timeout=0).release()


def test_inside_itself(key: str) -> None:
    """One form inside itself is the same transaction's lock."""
    with transaction_lock(key), transaction_lock(key, nowait=True) as row:
        assert row is not None
    assert in_block(key, nowait=True)


@pytest.mark.usefixtures("two_writers")
def test_other_key_inside(key: str) -> None:
    """Leases on other keys inside are nobody's business."""
    with transaction_lock(key), distributed_lock(key + "!") as lease:
        assert lease.held


# What is refused


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"nowait": True, "timeout": 1}, ValueError, ["nowait", "timeout"]),
        ({"nowait": True, "timeout": 0}, ValueError, ["nowait", "timeout"]),
        ({"nowait": True, "timeout": None}, ValueError, ["nowait", "timeout"]),
        ({"skip_locked": True, "timeout": 1}, ValueError, ["skip_locked", "timeout"]),
        ({"skip_locked": True, "timeout": None}, ValueError, ["timeout"]),
        ({"nowait": True, "skip_locked": True}, ValueError, ["nowait", "skip_locked"]),
        ({"nowait": "yes"}, TypeError, ["nowait", "'yes'"]),
        ({"skip_locked": 1}, TypeError, ["skip_locked", "1"]),
        ({"timeout": "3"}, TypeError, ["timeout", "'3'"]),
        ({"timeout": -1}, ValueError, ["timeout", "-1"]),
        ({"timeout": float("nan")}, ValueError, ["timeout", "nan"]),
        ({"timeout": float("inf")}, ValueError, ["timeout", "inf"]),
        ({"backend": 5}, TypeError, ["backend", "5"]),
        ({"lease": 5}, TypeError, ["lease"]),
    ],
    ids=str,
)
def test_bad_options(options: Any, error: Any, words: list[str]) -> None:
    """Options that don't fit are refused when the lock is made."""
    with pytest.raises(error) as caught:
        transaction_lock("k", **options)
    for word in words:
        assert word in str(caught.value)


async def acoroutine() -> None:
    """Do nothing."""


class AsyncCall:
    """An object whose call is a coroutine."""

    async def __call__(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    "function",
    [acoroutine, partial(acoroutine), staticmethod(acoroutine), AsyncCall()],
    ids=["function", "partial", "static method", "object"],
)
def test_async_function(function: Any) -> None:
    """Django has no async transactions: a coroutine function is a TypeError."""
    with pytest.raises(TypeError, match="async"):
        transaction_lock("k")(function)


@pytest.mark.parametrize(
    "key", ["k", lambda *args: f"k{Account.objects.count()}"], ids=["literal", "reads"]
)
def test_async_class(site: Site, key: Any) -> None:
    """So is an async class-based view, whose dispatch looks like a function."""

    @method_decorator(transaction_lock(key), name="dispatch")
    class Async(View):
        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    for response in (
        site.serve(Async.as_view()).get("/"),
        async_to_sync(site.aserve(Async.as_view()).get)("/"),
    ):
        assert response.exc_info[0] is TypeError
        assert "async" in str(response.exc_info[1])


def test_sync_method_of_an_async_class(site: Site, key: str) -> None:
    """A sync method of such a view isn't async."""

    class Async(View):
        @transaction_lock(key)
        def pay(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse("paid")

        async def get(self, request: HttpRequest) -> HttpResponse:
            return await sync_to_async(self.pay)(request)

    assert site.serve(Async.as_view()).get("/").content == b"paid"


def test_in_an_event_loop(key: str) -> None:
    """The sync form inside a running event loop is refused; in a thread it works."""

    async def directly() -> Any:
        return in_block(key)

    async def in_a_thread() -> Any:
        await asyncio.sleep(0)
        return await sync_to_async(in_block)(key)

    with pytest.raises(SynchronousOnlyOperation):
        async_to_sync(directly)()
    assert async_to_sync(in_a_thread)()


def test_in_an_event_loop_on_any_backend(key: str, settings: Any) -> None:
    """What is wrong with the call comes before what is wrong with the backend."""
    settings.DBLOCKS = {"memory": {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}}

    async def enter() -> None:
        with transaction_lock(key, backend="memory"):
            pass

    async def lock_row() -> None:
        DistributedLock.objects.for_update(key)

    for directly in (enter, lock_row):
        with pytest.raises(SynchronousOnlyOperation):
            async_to_sync(directly)()


@FORMS
def test_backend_without_rows(key: str, settings: Any, form: Any) -> None:
    """A backend that has no rows can't: NotSupportedError."""
    settings.DBLOCKS = {"memory": {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}}
    with pytest.raises(NotSupportedError, match="memory"):
        form(key, backend="memory")


@FORMS
@pytest.mark.parametrize("opened", [True, False], ids=["in a transaction", "without"])
def test_locks_in_another_database(
    key: str, settings: Any, form: Any, opened: bool
) -> None:
    """A row in another database says nothing about this transaction."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    settings.DBLOCKS = {"apart": {"BACKEND": DATABASE, "OPTIONS": {"using": "locks"}}}
    if opened:
        with transaction.atomic(), pytest.raises(NotSupportedError, match="locks"):
            form(key, backend="apart")
    else:
        with pytest.raises(NotSupportedError, match="locks"):
            form(key, backend="apart")


def test_transaction_on_the_locks_database(key: str, settings: Any) -> None:
    """In a transaction of the locks' own database it works there."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    settings.DBLOCKS = {"apart": {"BACKEND": DATABASE, "OPTIONS": {"using": "locks"}}}
    with (
        transaction.atomic(using="locks"),
        transaction_lock(key, backend="apart") as row,
    ):
        assert row is not None
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"DELETE FROM {DistributedLock._meta.db_table}")


def test_callable_key_in_a_block() -> None:
    """Without a call there are no arguments: TypeError."""
    with pytest.raises(TypeError, match="callable"), transaction_lock(lambda: "k"):
        pass


def test_skipped_view(key: str) -> None:
    """A view has to answer: skip_locked is refused, free key or not."""

    @transaction_lock(key, skip_locked=True)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    with pytest.raises(TypeError, match="skip_locked"):
        view(RequestFactory().get("/"))


# SQLite


@pytest.mark.parametrize("writes", ["has written", "is writing"])
def test_after_reading_on_sqlite(key: str, writes: str) -> None:
    """In a transaction that has read already, SQLite's own error passes at once."""
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        pytest.skip("about a file of SQLite")
    AccountFactory()
    mode = connection.transaction_mode
    connection.transaction_mode = "DEFERRED"
    name = connection.settings_dict["NAME"]
    try:
        with closing(sqlite3.connect(name, isolation_level=None)) as raw:
            if writes == "has written":
                journal = raw.execute("PRAGMA journal_mode").fetchone()[0]
                if journal != "wal":
                    pytest.skip("nobody else can have written where there is no WAL")
            with transaction.atomic():
                assert Account.objects.count() == 1
                raw.execute("BEGIN IMMEDIATE")
                raw.execute("UPDATE testapp_account SET balance = 1")
                if writes == "has written":
                    raw.execute("COMMIT")
                locked = pytest.raises(OperationalError, match="locked")
                with takes(at_most=SLACK), locked:
                    in_block(key, timeout=DEADLINE)
    finally:
        connection.transaction_mode = mode


def test_busy_timeout_is_left_as_found(key: str) -> None:
    """SQLite's own patience is the same afterwards."""
    if connection.vendor != "sqlite":
        pytest.skip("about SQLite")

    def patience() -> Any:
        with connection.cursor() as cursor:
            return cursor.execute("PRAGMA busy_timeout").fetchone()

    before = patience()
    with hold_elsewhere(key), pytest.raises(LockTimeout):
        in_block(key, timeout=0.1)
    in_block(key, timeout=0.1)
    assert patience() == before


@pytest.mark.django_db
def test_in_a_test_case(key: str) -> None:
    """In the wrapping transaction of Django's TestCase both forms work."""
    assert in_block(key)
    assert in_function(key, nowait=True) == "ran"
    with hold_elsewhere(key), pytest.raises(LockTimeout):
        in_block(key, nowait=True)
    assert distributed_lock(key).acquire(timeout=0).release()


def test_representation(key: str) -> None:
    """A lock's representation names its keys; it has a key of its own if it is one."""
    one, two = transaction_lock(key), transaction_lock(key, f"{key}:2")
    assert (one.key, two.key) == (key, None)
    assert repr(one) == f"<TransactionLock {key!r} backend='default'>"
    assert repr(two) == f"<TransactionLock {key!r}, '{key}:2' backend='default'>"


@pytest.mark.parametrize("setting", [True, False], ids=["set", "switched"])
def test_autocommit_switched_off(committed: None, key: str, setting: bool) -> None:
    """Nobody would see when the row is unlocked, and no row could be made apart."""
    if setting and in_memory():
        pytest.skip("a database in memory is never connected anew")
    settings = connections["default"].settings_dict
    connection.close()
    settings["AUTOCOMMIT"] = not setting
    if not setting:
        connection.set_autocommit(False)
    try:
        with pytest.raises(TransactionManagementError):
            transaction_lock(key, timeout=0).__enter__()
    finally:
        settings["AUTOCOMMIT"] = True
        connection.set_autocommit(True)
        connection.close()
