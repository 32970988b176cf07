"""Locks around, inside and across the caller's transactions."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.db import DatabaseError, OperationalError, connection, transaction
from django.db.models import F, QuerySet
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from dblocks import (
    Lease,
    LeaseLost,
    Lock,
    LockTimeout,
    distributed_lock,
)
from dblocks.backends.database import dialects, transactions
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.waiting.queue import queues
from tests.support.alarms import alarms
from tests.support.factories import AccountFactory, let_expire, stored
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers, in_forked_child
from tests.support.timing import (
    DEADLINE,
    SLACK,
    always,
    eventually,
    quickest,
    scaled,
    takes,
)
from tests.testapp.models import Account

locks = DistributedLock.objects
Locks = Callable[..., Lock]
Leases = Callable[..., Lease]


class RolledBack(Exception):
    """Raised by a test to roll a transaction back."""


@pytest.fixture
def taken(lock: Locks, other: OtherThread) -> Callable[[], bool]:
    """Ask, from another thread and only by reading, whether the test's key is taken."""
    return lambda: bool(other.do(lock().locked))


def leave_by_commit() -> None:
    """End the block normally."""


def leave_by_exception() -> None:
    """End the block by an exception."""
    raise RolledBack


def leave_by_mark() -> None:
    """End the block normally, marked for rollback."""
    transaction.set_rollback(True)


ENDINGS = pytest.mark.parametrize(
    "end",
    [leave_by_commit, leave_by_exception, leave_by_mark],
    ids=["commit", "raise", "mark"],
)


# A lock taken before the transaction: on every database


@ENDINGS
@pytest.mark.parametrize("is_async", [False, True])
def test_release_waits_for_the_end(
    acquire: Leases, taken: Callable[[], bool], end: Callable[[], None], is_async: bool
) -> None:
    """A lease released in a transaction keeps the key until that ends.

    So does one that is released by async code which sync code runs there.
    """
    lease = acquire()
    release = async_to_sync(lease.arelease) if is_async else lease.release
    try:
        with transaction.atomic():
            AccountFactory()
            assert release() is True
            assert taken()
            end()
    except RolledBack:
        pass
    assert not taken()


def test_leaving_the_block_waits_for_the_end(
    lock: Locks, taken: Callable[[], bool], key: str
) -> None:
    """A block that is left inside a transaction keeps the key until the commit."""
    lease = lock().acquire(timeout=0)
    with transaction.atomic():
        with lease:
            AccountFactory()
        assert taken()
    assert not taken()


@pytest.mark.parametrize(
    "inner", [leave_by_commit, leave_by_exception], ids=["release", "rollback"]
)
def test_savepoint_is_not_the_end(
    acquire: Leases, taken: Callable[[], bool], inner: Callable[[], None]
) -> None:
    """The end of an inner block, by release or rollback, frees nothing."""
    lease = acquire()
    with transaction.atomic():
        try:
            with transaction.atomic():
                AccountFactory()
                lease.release()
                inner()
        except RolledBack:
            pass
        assert taken()
    assert not taken()


def test_nested_block_without_savepoint(
    acquire: Leases, taken: Callable[[], bool]
) -> None:
    """atomic(savepoint=False) inside is not the end either."""
    lease = acquire()
    with transaction.atomic():
        with transaction.atomic(savepoint=False):
            lease.release()
        assert taken()
    assert not taken()


def test_on_commit_hooks_run_before_the_release(
    acquire: Leases, taken: Callable[[], bool]
) -> None:
    """Hooks that the caller registered see the key still taken, in whichever order."""
    lease = acquire()
    seen: list[bool] = []
    with transaction.atomic():
        transaction.on_commit(lambda: seen.append(taken()))
        lease.release()
        transaction.on_commit(lambda: seen.append(taken()))
    assert seen == [True, True]
    assert not taken()


def test_failing_hook_doesnt_keep_the_lock(
    acquire: Leases, taken: Callable[[], bool]
) -> None:
    """A hook that raises after the commit doesn't leave the key taken."""
    lease = acquire()

    def broken() -> None:
        raise RolledBack

    with pytest.raises(RolledBack), transaction.atomic():  # noqa: PT012
        transaction.on_commit(broken)
        lease.release()
    assert not taken()


def test_block_around_the_transaction(lock: Locks, taken: Callable[[], bool]) -> None:
    """Taken before and left after the transaction, the key is free at once."""
    with lock():
        with transaction.atomic():
            AccountFactory()
        assert taken()
    assert not taken()


def test_inner_acquisition_in_a_transaction(
    acquire: Leases, key: str, backend: str
) -> None:
    """A key that is held already is entered again inside a transaction."""
    outer = acquire()
    with transaction.atomic():
        AccountFactory()
        with distributed_lock(key, backend=backend) as inner:
            assert inner.fencing_token == outer.fencing_token
    assert outer.held
    assert outer.release() is True


@pytest.mark.parametrize(
    "verb",
    [
        "acquire",
        "try_acquire",
        pytest.param("renew", marks=pytest.mark.needs("has_table")),
        "release",
    ],
)
def test_autocommit_switched_off(lock: Locks, acquire: Leases, verb: str) -> None:
    """With autocommit off and no atomic block, every verb is an error.

    Where the locks aren't in a database, only those whose end nobody would see.
    """
    lease = acquire()
    transaction.set_autocommit(False)
    try:
        with pytest.raises(TransactionManagementError):  # noqa: PT012
            if verb in {"release", "renew"}:
                getattr(lease, verb)()
            else:
                getattr(lock(owner="other", timeout=0), verb)()
    finally:
        connection.rollback()
        transaction.set_autocommit(True)


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("block", [nullcontext, transaction.atomic])
@pytest.mark.parametrize("verb", ["force_release", "request_release", "prune"])
def test_operators_verbs_with_autocommit_off(
    committed: None, key: str, verb: str, block: Any, other: OtherThread
) -> None:
    """What nobody commits, as atomic() doesn't then, isn't said to be done.

    Nor does the refusal keep others waiting.
    """
    held = verb != "prune"
    assert locks.acquire(key, owner="me", lease=60 if held else 0.1)
    if not held:
        let_expire(key)
    arguments: list[Any] = [key] if held else [0]
    transaction.set_autocommit(False)
    try:
        with (
            pytest.raises(TransactionManagementError, match="Autocommit is off"),
            block(),
        ):
            getattr(locks, verb)(*arguments)
        assert stored(key).owner == "me"
        with takes(at_most=SLACK):
            other.do(lambda: locks.prune(0))
    finally:
        transaction.rollback()
        transaction.set_autocommit(True)
    assert not held or stored(key).owner == "me"


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_sqlite_inside_a_transaction(committed: None, key: str, is_async: bool) -> None:
    """SQLite has one writer: a lock inside atomic() is refused, with advice."""
    if connection.vendor != "sqlite":
        pytest.skip("this database has many writers")
    lock = distributed_lock(key)
    acquire = async_to_sync(lock.aacquire) if is_async else lock.acquire
    account = AccountFactory(balance=1)
    with transaction.atomic():
        with takes(at_most=SLACK), pytest.raises(TransactionManagementError) as caught:
            acquire(timeout=5)
        Account.objects.filter(pk=account.pk).update(balance=2)
    account.refresh_from_db()
    assert account.balance == 2
    for way in ("first", "decorate the view", "atomic=True", "transaction_lock"):
        assert way in str(caught.value)


@pytest.mark.needs("has_table")
def test_sqlite_renewal_inside_a_transaction(acquire: Leases) -> None:
    """Nor can a lease be renewed there, which says so; the lease stays as it is."""
    if connection.vendor != "sqlite":
        pytest.skip("this database has many writers")
    lease = acquire()
    with transaction.atomic():
        with pytest.raises(TransactionManagementError, match="renewed") as caught:
            lease.renew()
        assert lease.held
    assert "taken" not in str(caught.value)
    lease.renew()


@pytest.mark.needs("has_table")
def test_sqlite_inner_acquisition_writes_nothing(acquire: Leases, key: str) -> None:
    """On SQLite an inner acquisition in a transaction is counted in the process."""
    if connection.vendor != "sqlite":
        pytest.skip("this database has many writers")
    acquire()
    with transaction.atomic():
        AccountFactory()
        with CaptureQueriesContext(connection) as queries, distributed_lock(key):
            pass
    writes = [
        q["sql"]
        for q in queries
        if q["sql"].split()[0] in {"UPDATE", "INSERT", "DELETE"}
    ]
    assert not writes


# A lock taken inside the transaction


@pytest.mark.usefixtures("locks_beside")
def test_async_code_inside_a_transaction(
    lock: Locks, taken: Callable[[], bool], account: Account
) -> None:
    """Async code that sync code runs in a transaction keeps its lock until its end."""

    async def add() -> None:
        async with lock():
            seen = await Account.objects.aget(pk=account.pk)
            await Account.objects.filter(pk=account.pk).aupdate(
                balance=seen.balance + 1
            )

    with transaction.atomic():
        async_to_sync(add)()
        assert taken()
    assert not taken()
    assert balance_of(account) == 1


def test_async_code_in_hooks_of_one_transaction(
    lock: Locks, taken: Callable[[], bool]
) -> None:
    """It releases at once in a hook, as sync code does: the data are visible."""
    seen: list[bool] = []

    async def use() -> None:
        async with lock(timeout=0):
            seen.append(await lock().alocked())

    with transaction.atomic():
        for _ in range(2):
            transaction.on_commit(lambda: async_to_sync(use)())
            transaction.on_commit(lambda: seen.append(taken()))
    assert seen == [True, False] * 2


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("end", [leave_by_commit, leave_by_exception])
def test_async_release_after_another_threads_transaction(
    acquire: Leases, taken: Callable[[], bool], end: Callable[[], None]
) -> None:
    """A transaction that async code runs elsewhere hides its caller's from nobody."""
    lease = acquire()

    def elsewhere() -> None:
        try:
            with suppress(RolledBack), transaction.atomic():
                end()
        finally:
            connection.close()

    async def work() -> None:
        await sync_to_async(elsewhere, thread_sensitive=False)()
        await lease.arelease()

    with transaction.atomic():
        async_to_sync(work)()
        assert taken()
    assert not taken()


def test_forked_child_is_in_no_transaction(committed: None) -> None:
    """Async code in a child waits for no end of the parent's."""
    with transaction.atomic():
        assert transactions.caller() is not None
        assert in_forked_child(lambda: transactions.caller() is None) is True


@pytest.mark.usefixtures("locks_beside")
def test_release_in_a_forked_child(key: str) -> None:
    """A child of a transaction's releases at once: it would never see the end."""

    def child() -> bool:
        with distributed_lock(key):
            pass
        return distributed_lock(key).locked()

    with transaction.atomic():
        connection.ensure_connection()
        assert in_forked_child(child) is False


@pytest.mark.usefixtures("locks_beside")
def test_transaction_of_a_forked_child(key: str) -> None:
    """A child that has left the inherited block begins transactions of its own."""

    def child() -> bool:
        block.__exit__(None, None, None)
        with transaction.atomic():
            with distributed_lock(key):
                pass
            return distributed_lock(key).locked()

    block = transaction.atomic()
    with block:
        connection.ensure_connection()
        assert in_forked_child(child) is True


@pytest.mark.django_db(transaction=False)
def test_transaction_of_a_test_cases_child(key: str) -> None:
    """The wrapping transaction of a TestCase doesn't count in a child, either."""

    def child() -> bool:
        with transaction.atomic(), distributed_lock(key) as lease:
            lease.guard()
            return lease.held

    connection.ensure_connection()
    assert in_forked_child(child) is True


def test_task_that_outlives_the_transaction(
    acquire: Leases, taken: Callable[[], bool]
) -> None:
    """Async code that was begun inside a transaction releases at once after its end."""
    lease, tasks = acquire(), list[asyncio.Task[bool]]()

    async def begin(over: asyncio.Event) -> None:
        async def release() -> bool:
            await over.wait()
            return await lease.arelease()

        tasks.append(asyncio.create_task(release()))

    def work(over: asyncio.Event) -> None:
        with transaction.atomic():
            async_to_sync(begin)(over)
        connection.close()

    async def main() -> None:
        over = asyncio.Event()
        await sync_to_async(work)(over)
        over.set()
        assert await tasks[0] is True

    asyncio.run(main())
    assert not taken()


def test_async_code_that_is_left_behind(
    acquire: Leases, taken: Callable[[], bool]
) -> None:
    """It releases at once, too, if an exception has ended the transaction around it."""
    lease, left, released = acquire(), threading.Event(), threading.Event()
    main_thread = threading.get_ident()

    async def work() -> None:
        signal.pthread_kill(main_thread, signal.SIGALRM)
        while not left.is_set():
            await asyncio.sleep(0.01)
        assert await lease.arelease() is True
        released.set()

    def interrupt(frame: object) -> None:
        raise RolledBack

    with alarms(interrupt), pytest.raises(RolledBack), transaction.atomic():
        async_to_sync(work)()
    left.set()
    assert released.wait(DEADLINE)
    assert not taken()


@pytest.mark.usefixtures("locks_beside")
class TestTakenInside:
    """Lock operations inside ``atomic()`` run outside the caller's transaction."""

    def test_visible_at_once(
        self, acquire: Leases, taken: Callable[[], bool], key: str
    ) -> None:
        """A lock taken inside an open transaction is visible to others at once."""
        with transaction.atomic():
            AccountFactory()
            acquire()
            assert taken()

    def test_excludes_at_once(
        self, acquire: Leases, lock: Locks, other: OtherThread
    ) -> None:
        """Others are refused without having to wait for the transaction."""
        with transaction.atomic():
            acquire()
            with takes(at_most=SLACK):
                assert other.do(lock().try_acquire) is None

    @ENDINGS
    def test_end_without_release(
        self, acquire: Leases, taken: Callable[[], bool], end: Callable[[], None]
    ) -> None:
        """A lease that wasn't released outlives the transaction it was taken in."""
        try:
            with transaction.atomic():
                lease = acquire()
                end()
        except RolledBack:
            pass
        assert lease.held
        assert taken()
        assert lease.release() is True
        assert not taken()

    @ENDINGS
    def test_released_at_the_end(
        self, lock: Locks, taken: Callable[[], bool], end: Callable[[], None]
    ) -> None:
        """A block inside a transaction keeps the key until commit or rollback."""
        try:
            with transaction.atomic():
                with lock():
                    AccountFactory()
                assert taken()
                end()
        except RolledBack:
            pass
        assert not taken()

    def test_caller_is_neither_committed_nor_rolled_back(self, lock: Locks) -> None:
        """All lock operations leave the caller's open transaction open."""
        with pytest.raises(RolledBack), transaction.atomic():  # noqa: PT012
            AccountFactory(name="mine")
            with lock() as lease:
                lease.renew()
            assert connection.in_atomic_block
            assert Account.objects.filter(name="mine").exists()
            raise RolledBack
        assert not Account.objects.filter(name="mine").exists()

    def test_refusal_leaves_the_transaction_usable(
        self, acquire: Leases, lock: Locks, other: OtherThread
    ) -> None:
        """After a LockTimeout inside a transaction the transaction goes on."""
        theirs = other.do(lock().acquire, timeout=0)
        with transaction.atomic():
            with pytest.raises(LockTimeout):
                acquire()
            AccountFactory(name="after")
        assert other.do(theirs.release) is True
        assert Account.objects.filter(name="after").exists()

    def test_nothing_of_it_in_the_callers_connection(self, lock: Locks) -> None:
        """No statement of the lock runs in the caller's transaction."""
        with (
            transaction.atomic(),
            CaptureQueriesContext(connection) as queries,
            lock(),
        ):
            pass
        assert not [q["sql"] for q in queries if "dblocks" in q["sql"]]

    def test_kept_lock_is_re_entrant(self, lock: Locks) -> None:
        """Between the block's end and the commit the same owner enters again."""
        with transaction.atomic():
            with lock() as first:
                pass
            with lock() as second:
                assert second.fencing_token == first.fencing_token

    def test_kept_lock_is_renewed(self, lock: Locks, taken: Callable[[], bool]) -> None:
        """Between the block's end and the commit the lease is renewed."""
        with transaction.atomic():
            with lock(lease=scaled(1.5)):
                AccountFactory()
            always(taken, during=scaled(2), what="taken")
        assert not taken()

    def test_own_connection_is_closed_at_the_end(
        self, lock: Locks, open_files: Callable[[], int]
    ) -> None:
        """A transaction that took locks leaves no connection open."""
        with transaction.atomic(), lock():
            pass
        before = open_files()
        for _ in range(5):
            with transaction.atomic(), lock():
                pass
        eventually(lambda: open_files() <= before, what="closed connections")

    def test_waiting_inside_a_transaction(
        self, lock: Locks, other: OtherThread, workers: Workers, key: str, backend: str
    ) -> None:
        """A wait inside a transaction sees a release that was committed meanwhile."""
        # In a process of its own, which can't wake the waiter.
        holder = workers.start("hold", key=key, backend=backend)
        token = holder.expect("held")["token"]

        def release_when_waited_for() -> None:
            eventually(lambda: queues.find(backends[backend], key), what="the wait")
            holder.tell("release")

        with transaction.atomic():
            assert Account.objects.count() == 0
            telling = other.start(release_when_waited_for)
            lease = lock().acquire(timeout=DEADLINE)
            telling.result(timeout=DEADLINE)
            mine = lease.fencing_token
            # Redlock has no tokens.
            assert mine > token if token is not None else mine is None
            lease.release()
        assert holder.expect("released")["result"] is True
        holder.until_done()


# Inside a TestCase


@pytest.mark.needs("has_table")
@pytest.mark.django_db
class TestInATestCase:
    """In the wrapping transaction of Django's TestCase locks work as outside one."""

    def test_acquire_and_release(self, key: str) -> None:
        """A lock excludes another owner, and its release frees it at once."""
        with distributed_lock(key) as lease:
            assert lease.held
            assert distributed_lock(key, owner="other").try_acquire() is None
        with distributed_lock(key, owner="other") as theirs:
            assert theirs.fencing_token > lease.fencing_token

    def test_on_the_tests_own_connection(self, key: str) -> None:
        """The row is in the test's transaction, where the test can see it."""
        with CaptureQueriesContext(connection) as queries, distributed_lock(key):
            assert stored(key).hold_count == 1
        assert [query for query in queries if "dblocks_distributedlock" in query["sql"]]

    def test_wrapping_transaction_doesnt_count(self, key: str) -> None:
        """release() frees at once, since the test's own transaction never commits."""
        distributed_lock(key).acquire(timeout=0).release()
        assert not distributed_lock(key).locked()

    def test_inner_transaction_counts(self, key: str) -> None:
        """A transaction that the test itself opens keeps the lock until its end."""
        lease = distributed_lock(key).acquire(timeout=0)
        with transaction.atomic():
            lease.release()
            assert distributed_lock(key).locked()
        assert not distributed_lock(key).locked()

    def test_lock_taken_in_an_inner_transaction(self, key: str) -> None:
        """Inside atomic() a lock can be taken, on SQLite too."""
        with transaction.atomic(), distributed_lock(key):
            AccountFactory()
        assert not distributed_lock(key).locked()

    def test_re_entering(self, key: str) -> None:
        """Locks are re-entrant in a TestCase."""
        with distributed_lock(key) as outer, distributed_lock(key) as inner:
            assert inner.fencing_token == outer.fencing_token
        assert not distributed_lock(key).locked()

    def test_guard(self, key: str) -> None:
        """The guard works in a TestCase."""
        with distributed_lock(key) as lease, transaction.atomic():
            lease.guard()

    def test_atomic(self, key: str) -> None:
        """atomic=True works in a TestCase."""
        with distributed_lock(key, atomic=True):
            AccountFactory(name="mine")
        assert Account.objects.filter(name="mine").exists()
        assert not distributed_lock(key).locked()

    def test_expiry(self, key: str) -> None:
        """A lease that isn't renewed lapses although the transaction's clock stands."""
        lease = distributed_lock(key, lease=0.4, renew=False).acquire(timeout=0)
        theirs = distributed_lock(key, owner="other").acquire(timeout=0.4 + SLACK)
        assert not lease.held
        theirs.release()

    def test_lease_counts_from_its_grant(self, key: str) -> None:
        """A lease taken late in the test's transaction has its whole time."""
        at = time.monotonic()
        eventually(lambda: time.monotonic() > at + scaled(0.7))
        with distributed_lock(key, lease=scaled(0.6), renew=False):
            assert distributed_lock(key, owner="other").try_acquire() is None
            assert locks.held().filter(pk=key).exists()

    @pytest.mark.parametrize("others", [(), ("another",)])
    def test_renewal(self, key: str, others: tuple[str, ...]) -> None:
        """A held lease, or those of a set, are kept for several times their length."""
        lease = distributed_lock(key, *others, lease=scaled(1.2)).acquire(timeout=0)
        theirs = distributed_lock(key, owner="other")
        always(lambda: theirs.try_acquire() is None, during=scaled(2.8), what="held")
        assert lease.release() is True


# atomic=True


@pytest.fixture
def account(committed: None) -> Account:
    """Return an account with nothing in it."""
    account: Account = AccountFactory()
    return account


def balance_of(account: Account) -> int:
    return Account.objects.get(pk=account.pk).balance


class TestAtomic:
    """``atomic=True``: the body commits only while the lock is held."""

    def test_commits(
        self, lock: Locks, account: Account, taken: Callable[[], bool]
    ) -> None:
        """The body runs in a transaction that is committed when the block ends."""
        with lock(atomic=True) as lease:
            assert connection.in_atomic_block
            assert lease.held
            Account.objects.filter(pk=account.pk).update(balance=5)
        assert not connection.in_atomic_block
        assert balance_of(account) == 5
        assert not taken()

    def test_body_exception_rolls_back(
        self, lock: Locks, account: Account, taken: Callable[[], bool]
    ) -> None:
        """An exception rolls the body back, passes through and frees the lock."""
        with pytest.raises(RolledBack), lock(atomic=True):  # noqa: PT012
            Account.objects.filter(pk=account.pk).update(balance=5)
            raise RolledBack
        assert balance_of(account) == 0
        assert not taken()

    @pytest.mark.parametrize("keys", ["one", "several"])
    def test_entered_twice(
        self, lock: Locks, account: Account, key: str, backend: str, keys: str
    ) -> None:
        """Nothing is committed or released in the middle of the block."""
        more = [] if keys == "one" else [f"{key}:more"]
        outer = distributed_lock(key, *more, backend=backend, atomic=True, timeout=0)
        with pytest.raises(RolledBack), outer as lease:  # noqa: PT012
            Account.objects.filter(pk=account.pk).update(balance=5)
            with pytest.raises(RuntimeError, match=r"atomic=True.*already"), lease:
                pytest.fail("entered again")
            assert lease.held
            assert connection.in_atomic_block
            raise RolledBack
        assert balance_of(account) == 0
        assert not outer.locked()

    def test_released_after_the_commit(
        self, lock: Locks, taken: Callable[[], bool]
    ) -> None:
        """At the moment of the commit the lock is still held."""
        seen: list[bool] = []
        with lock(atomic=True):
            transaction.on_commit(lambda: seen.append(taken()))
        assert seen == [True]
        assert not taken()

    @pytest.mark.needs("has_guard")
    @pytest.mark.usefixtures("two_writers")
    def test_forced_out(
        self, lock: Locks, account: Account, key: str, other: OtherThread
    ) -> None:
        """A holder that was force-released meanwhile can't commit."""
        with pytest.raises(LeaseLost) as caught, lock(atomic=True):  # noqa: PT012
            Account.objects.filter(pk=account.pk).update(balance=5)
            assert other.do(locks.force_release, key)
        assert caught.value.reason == "forced"
        assert balance_of(account) == 0

    @pytest.mark.needs("has_guard")
    @pytest.mark.usefixtures("two_writers")
    def test_replaced(
        self, lock: Locks, account: Account, key: str, other: OtherThread
    ) -> None:
        """A holder that was replaced can't commit what it made of old data."""
        result = AccountFactory()
        with pytest.raises(LeaseLost), lock(atomic=True, lease=600, renew=False):  # noqa: PT012
            before = balance_of(account)
            other.do(let_expire, key)
            theirs = other.do(lock(lease=600, renew=False).acquire, timeout=0)
            other.do(Account.objects.filter(pk=account.pk).update, balance=100)
            other.do(theirs.release)
            Account.objects.filter(pk=result.pk).update(balance=before + 1)
        assert (balance_of(account), balance_of(result)) == (100, 0)

    @pytest.mark.needs("has_guard")
    def test_grant_of_another_version(
        self, lock: Locks, account: Account, key: str
    ) -> None:
        """A block whose grant is no longer the row's is rolled back."""
        with pytest.raises(LeaseLost), lock(atomic=True, lease=600, renew=False):  # noqa: PT012
            Account.objects.filter(pk=account.pk).update(balance=5)
            QuerySet(DistributedLock).filter(pk=key).update(version=F("version") + 1)
        assert balance_of(account) == 0

    @pytest.mark.needs("has_guard")
    def test_overdue_but_not_taken_commits(
        self, lock: Locks, account: Account, key: str
    ) -> None:
        """An overdue lease that nobody has taken still commits, and leaves silently."""
        with lock(atomic=True, lease=0.3, renew=False) as lease:
            Account.objects.filter(pk=account.pk).update(balance=5)
            eventually(lambda: lease.lost_reason, what="the end of the lease")
        assert balance_of(account) == 5

    @pytest.mark.usefixtures("locks_beside")
    def test_inner_block_keeps_the_lock(
        self, lock: Locks, taken: Callable[[], bool]
    ) -> None:
        """Inside another transaction the lock is kept until that one ends."""
        with transaction.atomic():
            with lock(atomic=True):
                AccountFactory()
            assert taken()
        assert not taken()

    def test_async_block(self, lock: Locks) -> None:
        """Django has no async transactions: atomic=True there is a TypeError."""

        async def main() -> None:
            async with lock(atomic=True):
                pass

        with pytest.raises(TypeError, match="atomic"):
            async_to_sync(main)()


# guard()


@pytest.mark.needs("has_guard")
class TestGuard:
    """``Lease.guard()``: the proof of holding, inside the caller's transaction."""

    def test_outside_a_transaction(self, acquire: Leases) -> None:
        """Without a transaction there is nothing to guard."""
        with pytest.raises(TransactionManagementError):
            acquire().guard()

    def test_passes_while_held(self, acquire: Leases, account: Account) -> None:
        """The holder's guard passes, again and again."""
        lease = acquire()
        with transaction.atomic():
            Account.objects.filter(pk=account.pk).update(balance=5)
            lease.guard()
            lease.guard()
        assert balance_of(account) == 5

    def test_default_database_by_name(self, acquire: Leases) -> None:
        """using= names the database of the guarded transaction."""
        lease = acquire()
        with transaction.atomic():
            lease.guard(using="default")

    def test_forced_out(self, acquire: Leases, account: Account, key: str) -> None:
        """After a force release the guard raises LeaseLost and rolls back."""
        lease = acquire(lease=600, renew=False)
        locks.force_release(key)
        with pytest.raises(LeaseLost) as caught, transaction.atomic():  # noqa: PT012
            Account.objects.filter(pk=account.pk).update(balance=5)
            lease.guard()
        assert caught.value.reason == "forced"
        assert balance_of(account) == 0

    def test_forced_out_by_its_own_transaction(self, acquire: Leases, key: str) -> None:
        """The reason is what the transaction itself has done, if nothing else is."""
        lease = acquire(lease=600, renew=False)
        with pytest.raises(LeaseLost) as caught, transaction.atomic():  # noqa: PT012
            locks.force_release(key)
            lease.guard()
        assert caught.value.reason == "forced"

    def test_replaced(
        self, acquire: Leases, account: Account, lock: Locks, key: str
    ) -> None:
        """After a take-over the guard raises LeaseLost, the successor gone or not."""
        lease = acquire(lease=600, renew=False)
        let_expire(key)
        lock(owner="somebody else").acquire(timeout=0).release()
        with pytest.raises(LeaseLost), transaction.atomic():  # noqa: PT012
            Account.objects.filter(pk=account.pk).update(balance=5)
            lease.guard()
        assert balance_of(account) == 0

    def test_same_owner_later_grant(
        self, acquire: Leases, lock: Locks, key: str
    ) -> None:
        """A later grant to the same owner doesn't vouch for the earlier one."""
        lease = acquire(owner="me", lease=600, renew=False)
        locks.force_release(key)
        row = locks.acquire(key, owner="me", lease=600)
        assert row is not None
        with pytest.raises(LeaseLost), transaction.atomic():
            lease.guard()

    def test_released(self, acquire: Leases) -> None:
        """The guard of a released lease raises LeaseLost."""
        lease = acquire()
        lease.release()
        with pytest.raises(LeaseLost), transaction.atomic():
            lease.guard()

    @pytest.mark.usefixtures("two_writers")
    def test_successor_renews(
        self, acquire: Leases, account: Account, key: str, other: OtherThread
    ) -> None:
        """A guard that finds its lease lost keeps nothing of the successor's locked."""
        if dialects.of(connection).isolation(connection) is not None:
            pytest.skip("with snapshots, InnoDB keeps whatever a statement finds")
        lease = acquire(lease=600, renew=False)
        locks.force_release(key)
        row = locks.acquire(key, owner="somebody", lease=60)
        assert row is not None
        mine = {"owner": "somebody", "version": row.version, "lease": 60}
        with transaction.atomic():
            Account.objects.filter(pk=account.pk).update(balance=5)
            with pytest.raises(LeaseLost), transaction.atomic():
                lease.guard()
            with takes(at_most=1 + SLACK):
                assert other.do(locks.renew, key, **mine)

    def test_overdue_but_not_taken(
        self, acquire: Leases, account: Account, key: str
    ) -> None:
        """The guard asks the row, not the clock: overdue and not taken passes."""
        lease = acquire(lease=0.3, renew=False)
        eventually(
            lambda: locks.expired().filter(pk=key).exists(), what="the end of the lease"
        )
        with transaction.atomic():
            Account.objects.filter(pk=account.pk).update(balance=5)
            lease.guard()
        assert balance_of(account) == 5

    def test_never_retried(self, acquire: Leases) -> None:
        """The guard's statement runs once: after an error the transaction is gone."""
        lease = acquire()
        calls: list[str] = []

        def fail(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            calls.append(sql)
            raise OperationalError("deadlock found when trying to get lock")

        with (
            pytest.raises((DatabaseError, LeaseLost)),
            transaction.atomic(),
            connection.execute_wrapper(fail),
        ):
            lease.guard()
        assert len(calls) == 1


@pytest.mark.needs("has_guard")
@pytest.mark.usefixtures("two_writers")
class TestGuardBesideOthers:
    """The guard pins the row; renewals go on beside it."""

    def test_force_release_waits(
        self, acquire: Leases, key: str, other: OtherThread
    ) -> None:
        """Nobody takes the lock away between the guard and the commit."""
        lease = acquire(lease=600, renew=False)
        with transaction.atomic():
            lease.guard()
            forced = other.start(locks.force_release, key)
            always(lambda: not forced.done(), during=0.5, what="waiting")
        assert forced.result(timeout=DEADLINE) is True

    def test_take_over_waits(
        self, acquire: Leases, lock: Locks, key: str, other: OtherThread
    ) -> None:
        """An overdue lock that is guarded is taken over only after the commit."""
        lease = acquire(lease=0.3, renew=False)
        eventually(
            lambda: locks.expired().filter(pk=key).exists(), what="the end of the lease"
        )
        with transaction.atomic():
            lease.guard()
            waiting = other.start(lock().acquire, timeout=DEADLINE)
            always(lambda: not waiting.done(), during=0.7, what="waiting")
        granted = waiting.result(timeout=DEADLINE)
        assert granted.fencing_token > lease.fencing_token
        granted.release()

    @pytest.mark.parametrize("also", [[], ["!"]], ids=["one key", "two keys"])
    def test_try_beside_a_guard_is_short(
        self, acquire: Leases, key: str, other: OtherThread, also: list[str]
    ) -> None:
        """A try against a guarded row answers within a second."""
        keys = [key, *(key + more for more in also)]
        distributed_lock(*keys).acquire(timeout=0).release()
        lease = acquire(lease=0.3, renew=False)
        eventually(
            lambda: locks.expired().filter(pk=key).exists(), what="the end of the lease"
        )

        def is_refused() -> None:
            assert other.do(distributed_lock(*keys).try_acquire) is None

        with transaction.atomic():
            lease.guard()
            assert quickest(is_refused) < 1

    def test_renewals_before_the_guard(self, acquire: Leases, account: Account) -> None:
        """A guard passes in a transaction with a snapshot older than renewals."""
        lease = acquire(lease=scaled(1.2))
        with transaction.atomic():
            assert balance_of(account) == 0
            always(lambda: lease.held, during=scaled(2), what="held")
            Account.objects.filter(pk=account.pk).update(balance=5)
            lease.guard()
        assert balance_of(account) == 5
        assert lease.held

    def test_renewals_after_the_guard(
        self, acquire: Leases, account: Account, key: str
    ) -> None:
        """A transaction that outlasts the lease after its guard still commits."""
        lease = acquire(lease=1.2)
        with transaction.atomic():
            lease.guard()
            always(lambda: connection.in_atomic_block, during=2.4)
            Account.objects.filter(pk=account.pk).update(balance=5)
            lease.guard()
        assert balance_of(account) == 5
        assert stored(key).version == lease.fencing_token

    def test_guarded_row_doesnt_stop_other_renewals(
        self, acquire: Leases, key: str, lock: Locks, other: OtherThread
    ) -> None:
        """While one row is pinned, the process's other leases are renewed."""
        pinned = acquire(lease=scaled(1.2))
        free = acquire(key + "!", lease=scaled(1.2))
        with transaction.atomic():
            pinned.guard()
            always(lambda: free.held, during=scaled(2.1), what="the other lease held")
            assert other.do(lock(key + "!").try_acquire) is None


@pytest.mark.needs("has_table")
def test_snapshot_is_warned_of(
    key: str,
    committed: None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Taking a lock inside a snapshot's transaction is logged, once a database."""
    if connection.vendor == "sqlite":
        pytest.skip("no lock is taken beside a transaction there")
    monkeypatch.setattr(transactions, "_snapshots_warned", set())
    with transaction.atomic():
        for number in range(2):
            with distributed_lock(f"{key} {number}"):
                pass
    warned = [r for r in caplog.records if "Take the lock first" in r.getMessage()]
    assert len(warned) == (1 if settings.ISOLATION == "repeatable read" else 0)


@pytest.mark.needs("has_table")
def test_transaction_that_cant_begin(
    lock: Locks, monkeypatch: pytest.MonkeyPatch, obtainable: Callable[..., bool]
) -> None:
    """With atomic=True the lock is given back when its transaction can't begin."""

    def fail(self: Any) -> None:
        raise OperationalError("out of reach")

    monkeypatch.setattr(transaction.Atomic, "__enter__", fail)
    with pytest.raises(OperationalError, match="out of reach"), lock(atomic=True):
        pytest.fail("entered")
    monkeypatch.undo()
    assert obtainable()
