"""What happens to locks, and in which order, when a transaction ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings as django_settings
from django.db import (
    DatabaseError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.transaction import TransactionManagementError

from dblocks import Lease, LeaseLost, Lock, current_lease, distributed_lock, signals
from dblocks.backends.database import own_connections
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes
from tests.testapp.models import Account

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]

locks = DistributedLock.objects.using("locks")
PATH = "dblocks.backends.database.DatabaseBackend"
TABLE = DistributedLock._meta.db_table

two_databases = pytest.mark.skipif(
    "locks" not in django_settings.DATABASES,
    reason="LOCKS_DATABASE_URL names no second database",
)


class RolledBack(Exception):
    """Raised by a test to roll a transaction back."""


@pytest.fixture
def taken(lock: Locks, other: OtherThread) -> Callable[..., bool]:
    """Ask, from another thread and only by reading, whether a key is taken."""
    return lambda *key: bool(other.do(lock(*key).locked))


# What the body that runs on has


@pytest.mark.usefixtures("locks_beside")
@pytest.mark.parametrize("together", [False, True])
def test_current_lease_after_an_inner_block(
    backend: str, lock: Locks, acquire: Leases, key: str, together: bool
) -> None:
    """A block that was left gives the outer body no lease, though its own is kept.

    Else the outer body's data would be fenced by the other lock's token.
    """
    acquire(key + "!").release()
    inner = [key + "!", key + "?"] if together else [key + "!"]
    with transaction.atomic(), lock() as outer:
        with distributed_lock(*inner, backend=backend) as left:
            assert current_lease() is left
        assert left.held
        assert current_lease() is outer
        assert current_lease(key) is outer
        with lock() as again:
            assert current_lease() is again
        assert current_lease() is current_lease(key) is outer
        assert current_lease(key + "!").held


# Hooks that run before the release


def make_an_account() -> None:
    Account.objects.get_or_create(name="made in a hook")


def roll_back() -> None:
    with suppress(RolledBack), transaction.atomic():
        raise RolledBack


def nest() -> None:
    with transaction.atomic(), transaction.atomic():
        pass


def register_another_hook() -> None:
    with transaction.atomic():
        transaction.on_commit(make_an_account)


def use_a_lock() -> None:
    with distributed_lock("used in a hook", atomic=True):
        pass


HOOKS = pytest.mark.parametrize(
    "hook", [make_an_account, roll_back, nest, register_another_hook, use_a_lock]
)


@HOOKS
def test_hook_with_a_transaction(
    acquire: Leases, taken: Callable[..., bool], hook: Callable[[], None]
) -> None:
    """A hook that opens a transaction itself doesn't free the key for the next one."""
    lease = acquire()
    seen: list[bool] = []
    with transaction.atomic():
        transaction.on_commit(hook)
        transaction.on_commit(lambda: seen.append(taken()))
        lease.release()
        transaction.on_commit(hook)
        transaction.on_commit(lambda: seen.append(taken()))
    assert seen == [True, True]
    assert not taken()


@pytest.mark.usefixtures("locks_beside")
@HOOKS
def test_hook_with_a_transaction_after_an_inner_lock(
    lock: Locks, taken: Callable[..., bool], hook: Callable[[], None]
) -> None:
    """So it is for a block that was entered and left inside the transaction."""
    seen: list[bool] = []
    with transaction.atomic():
        with lock():
            transaction.on_commit(hook)
        transaction.on_commit(lambda: seen.append(taken()))
    assert seen == [True]
    assert not taken()


@two_databases
def test_hook_with_another_databases_transaction(
    acquire: Leases, taken: Callable[..., bool]
) -> None:
    """A hook may open its transaction on another database."""
    lease = acquire()
    seen: list[bool] = []

    def hook() -> None:
        with transaction.atomic(using="locks"):
            pass

    with transaction.atomic():
        transaction.on_commit(hook)
        transaction.on_commit(lambda: seen.append(taken()))
        lease.release()
    assert seen == [True]
    assert not taken()


@two_databases
def test_async_hook_beside_a_closed_connection(
    lock: Locks, taken: Callable[..., bool]
) -> None:
    """A connection that was closed inside its block has no transaction any more."""
    seen: list[bool] = []

    async def use() -> None:
        async with lock(timeout=0):
            pass

    with transaction.atomic():
        with transaction.atomic(using="locks"):
            connections["locks"].ensure_connection()
            connections["locks"].close()
        transaction.on_commit(lambda: async_to_sync(use)())
        transaction.on_commit(lambda: seen.append(taken()))
    assert seen == [False]


def test_failing_hook_after_one_with_a_transaction(
    acquire: Leases, taken: Callable[..., bool]
) -> None:
    """The key is free, too, when a later hook raises."""
    lease = acquire()
    seen: list[bool] = []

    def fail() -> None:
        seen.append(taken())
        raise RolledBack

    with pytest.raises(RolledBack), transaction.atomic():  # noqa: PT012
        transaction.on_commit(make_an_account)
        transaction.on_commit(fail)
        lease.release()
    assert seen == [True]
    assert not taken()


# Several releases


class Interrupted(BaseException):
    """What a signal handler may raise at any point, as KeyboardInterrupt is."""


@contextmanager
def interrupted_receiver() -> Iterator[None]:
    """The first receiver of ``lock_released`` is interrupted."""
    heard: list[str] = []

    def interrupt(signal: Any, sender: Any, key: str, **said: Any) -> None:
        heard.append(key)
        if len(heard) == 1:
            raise Interrupted

    signals.lock_released.connect(interrupt)
    try:
        yield
    finally:
        signals.lock_released.disconnect(interrupt)
    assert heard


@contextmanager
def interrupted_statement(error: type[BaseException]) -> Iterator[None]:
    """The first statement of the first release is interrupted."""
    stopped: list[str] = []

    def interrupt(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        ended = not context["connection"].in_atomic_block
        if ended and TABLE in sql and "UPDATE" in sql and not stopped:
            stopped.append(sql)
            raise error
        return execute(sql, params, many, context)

    with connection.execute_wrapper(interrupt):
        yield
    assert stopped


@pytest.fixture
def three(acquire: Leases, key: str) -> list[Lease]:
    """Return leases on three keys."""
    return [acquire(f"{key} {name}") for name in ("first", "second", "third")]


def release_all(leases: list[Lease]) -> None:
    """Release leases in a transaction, and swallow what comes of its end."""
    with suppress(Interrupted, RolledBack), transaction.atomic():
        for lease in leases:
            assert lease.release() is True


def test_interrupted_receiver(three: list[Lease], taken: Callable[..., bool]) -> None:
    """What a receiver is interrupted by at the first release keeps no key taken."""
    with interrupted_receiver():
        release_all(three)
    assert [lease.key for lease in three if taken(lease.key)] == []
    assert not any(lease.held for lease in three)


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("error", [RolledBack, Interrupted])
def test_interrupted_statement(
    three: list[Lease], taken: Callable[..., bool], error: type[BaseException]
) -> None:
    """A release that fails for whatever reason loses none of the others."""
    with interrupted_statement(error):
        release_all(three)
    assert len([lease.key for lease in three if taken(lease.key)]) <= 1


def test_interrupted_receiver_after_a_rollback(
    three: list[Lease], taken: Callable[..., bool]
) -> None:
    """So it is when an exception of the body's ends the transaction."""
    with (  # noqa: PT012
        interrupted_receiver(),
        pytest.raises((RolledBack, Interrupted)),
        transaction.atomic(),
    ):
        for lease in three:
            lease.release()
        raise RolledBack
    assert [lease.key for lease in three if taken(lease.key)] == []


# Marked for rollback


def in_block(lock: Lock, body: Callable[[Lease], None]) -> None:
    with lock as lease:
        body(lease)


def by_lease(lock: Lock, body: Callable[[Lease], None]) -> None:
    with lock.acquire() as lease:
        body(lease)


def in_function(lock: Lock, body: Callable[[Lease], None]) -> None:
    @lock
    def run() -> None:
        body(current_lease())

    run()


FORMS = pytest.mark.parametrize("form", [in_block, by_lease, in_function])


@FORMS
def test_marked_for_rollback_and_overdue(
    lock: Locks, form: Callable[..., None]
) -> None:
    """A body that marks its transaction for rollback still learns of the loss."""

    def body(lease: Lease) -> None:
        eventually(lambda: lease.lost_reason, what="the end of the lease")
        AccountFactory(name="mine")
        transaction.set_rollback(True)

    raised = outcome(form, lock(atomic=True, lease=0.3, renew=False), body)
    assert raised == "LeaseLost: expired"
    assert not Account.objects.filter(name="mine").exists()


@FORMS
@pytest.mark.usefixtures("locks_beside")
def test_marked_for_rollback_and_forced_out(
    lock: Locks, form: Callable[..., None], backend: str, key: str, other: OtherThread
) -> None:
    """So it does when nothing was known of the loss until the release."""

    def body(lease: Lease) -> None:
        assert other.do(backends[backend].force_release, key)
        AccountFactory(name="mine")
        transaction.set_rollback(True)

    raised = outcome(form, lock(atomic=True, lease=600, renew=False), body)
    assert raised == "LeaseLost: forced"
    assert not Account.objects.filter(name="mine").exists()


@FORMS
def test_marked_for_rollback_and_held(
    lock: Locks, taken: Callable[..., bool], form: Callable[..., None]
) -> None:
    """A transaction that is rolled back while the lock is held is no error."""

    def body(lease: Lease) -> None:
        AccountFactory(name="mine")
        transaction.set_rollback(True)

    assert outcome(form, lock(atomic=True), body) == "left"
    assert not Account.objects.filter(name="mine").exists()
    assert not taken()


def outcome(form: Callable[..., None], *args: Any) -> str:
    """Run a form of lock and say how it ended."""
    try:
        form(*args)
    except (LeaseLost, DatabaseError) as error:
        return f"{type(error).__name__}: {getattr(error, 'reason', error)}"
    return "left"


# Locks in a database of their own


@pytest.fixture
def apart(key: str, settings: Any) -> Callable[..., Lock]:
    """Make locks in the database ``locks``, beside the one with the data."""
    settings.DBLOCKS = {
        "default": {"BACKEND": PATH},
        "apart": {"BACKEND": PATH, "OPTIONS": {"using": "locks"}},
    }
    return lambda **options: distributed_lock(key, backend="apart", **options)


@pytest.fixture
def committed_locks(readers_beside_a_writer: None) -> Iterator[None]:
    """The database ``locks`` as in production, and emptied afterwards."""
    yield
    with connections["locks"].cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE}")
    connections["locks"].close()


def assert_pinned(key: str, obtainable: Callable[[], bool]) -> None:
    """Wait for the end of a lease apart, whose key then goes to nobody."""
    eventually(
        lambda: locks.expired().filter(pk=key).exists(), what="the end of the lease"
    )
    with takes(at_most=1 + SLACK):
        assert not obtainable()


@pytest.mark.needs("has_guard")
@two_databases
@pytest.mark.usefixtures("committed_locks")
class TestPinApart:
    """The row apart is pinned until the outermost transaction has ended."""

    @pytest.fixture
    def obtainable(
        self, apart: Callable[..., Lock], other: OtherThread
    ) -> Callable[[], bool]:
        """Ask whether somebody else would be granted the key (and give it back)."""

        def ask() -> bool:
            lease = apart(owner="somebody else").try_acquire()
            return lease is not None and lease.release()

        return lambda: bool(other.do(ask))

    @pytest.mark.parametrize("depth", [1, 2])
    def test_overdue_before_the_outer_commit(
        self,
        apart: Callable[..., Lock],
        obtainable: Callable[[], bool],
        key: str,
        depth: int,
    ) -> None:
        """Nobody is granted the key between the guard's verdict and the commit."""
        with ExitStack() as outer:
            for _ in range(depth):
                outer.enter_context(transaction.atomic())
            with apart(atomic=True, lease=0.5, renew=False):
                AccountFactory(name="mine")
            assert_pinned(key, obtainable)
        assert Account.objects.filter(name="mine").exists()
        assert obtainable()

    def test_overdue_after_a_block_on_the_locks_database(
        self,
        apart: Callable[..., Lock],
        obtainable: Callable[[], bool],
        key: str,
    ) -> None:
        """A transaction on the lock's database that ends first is no guard."""
        lease = apart(atomic=True, lease=0.5, renew=False).acquire(timeout=0)

        def write() -> None:
            with transaction.atomic(using="locks"), lease:
                AccountFactory(name="mine")

        with transaction.atomic():
            if connections["locks"].vendor == "sqlite":
                with pytest.raises(TransactionManagementError, match="guarded"):
                    write()
                return
            write()
            assert_pinned(key, obtainable)
        assert Account.objects.filter(name="mine").exists()

    def test_autocommit_switched_off(self, apart: Callable[..., Lock]) -> None:
        """Nobody sees when such a transaction commits: the block is rolled back."""
        lease = apart(atomic=True).acquire(timeout=0)
        connection.set_autocommit(False)
        try:
            with pytest.raises(TransactionManagementError, match="Autocommit"), lease:
                AccountFactory(name="mine")
            connection.commit()
        finally:
            connection.rollback()
            connection.set_autocommit(True)
        assert not Account.objects.filter(name="mine").exists()

    def test_pin_that_fails_at_first(
        self,
        apart: Callable[..., Lock],
        obtainable: Callable[[], bool],
        key: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Who tries again after the pin's connection failed has the row pinned."""
        connect, failures = own_connections.separate_connection, [True]

        def fail_once(alias: str, **options: Any) -> Any:
            made = connect(alias, **options)
            if failures:
                failures.pop()
                monkeypatch.setattr(made, "connect", refuse)
            return made

        def refuse() -> None:
            raise OperationalError("too many connections")

        def write() -> None:
            lease = apart(atomic=True, lease=0.5, renew=False).acquire(timeout=0)
            with lease:
                AccountFactory(name="mine")
                monkeypatch.setattr(own_connections, "separate_connection", fail_once)

        with transaction.atomic():
            with pytest.raises(OperationalError, match="too many"):
                write()
            write()
            assert_pinned(key, obtainable)
        assert Account.objects.filter(name="mine").exists()

    def test_interrupted_while_it_is_unpinned(
        self,
        apart: Callable[..., Lock],
        obtainable: Callable[[], bool],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """The row doesn't stay pinned by a connection that nobody closes."""
        connect, made = own_connections.separate_connection, list[Any]()

        def interrupt() -> None:
            raise Interrupted

        def interruptible(alias: str, **options: Any) -> Any:
            made.append(connect(alias, **options))
            monkeypatch.setattr(made[-1], "rollback", interrupt)
            return made[-1]

        def write() -> None:
            with apart(atomic=True):
                AccountFactory(name="mine")
                monkeypatch.setattr(
                    own_connections, "separate_connection", interruptible
                )

        with pytest.raises(Interrupted), transaction.atomic():
            write()
        free = obtainable()
        for pin in made:
            pin.close()
        assert free

    @pytest.mark.parametrize("same", [True, False], ids=["same key", "other key"])
    def test_pinned_twice(
        self, apart: Callable[..., Lock], key: str, same: bool
    ) -> None:
        """Guarded locks one in the other don't wait for each other's pins."""
        inner = distributed_lock(
            key if same else f"{key}:inner", backend="apart", atomic=True
        )
        with takes(at_most=2 * SLACK), apart(atomic=True):
            AccountFactory(name="outer")
            with inner:
                AccountFactory(name="inner")
        assert Account.objects.filter(name__in=["outer", "inner"]).count() == 2

    @pytest.mark.parametrize("same", [True, False], ids=["same key", "other key"])
    def test_pinned_in_a_row(
        self, apart: Callable[..., Lock], key: str, same: bool
    ) -> None:
        """Nor do those that follow each other in one outer transaction."""
        following = distributed_lock(
            key if same else f"{key}:next", backend="apart", atomic=True
        )
        ends: Any = nullcontext()
        if connections["locks"].vendor == "sqlite" and not same:
            # The first one's pin has SQLite's one writer; that is said at once.
            ends = pytest.raises(TransactionManagementError, match="SQLite")
        with takes(at_most=2 * SLACK), ends, transaction.atomic():
            for lock in (apart(atomic=True), following):
                with lock:
                    AccountFactory()

    def test_overdue_before_the_outer_rollback(
        self, apart: Callable[..., Lock], obtainable: Callable[[], bool], key: str
    ) -> None:
        """A rollback of the outermost transaction ends the pin as well."""
        with suppress(RolledBack), transaction.atomic():
            with apart(atomic=True, lease=0.5, renew=False):
                AccountFactory(name="mine")
            assert_pinned(key, obtainable)
            raise RolledBack
        assert not Account.objects.filter(name="mine").exists()
        assert obtainable()

    def test_force_release_waits_for_the_outer_commit(
        self, apart: Callable[..., Lock], key: str, other: OtherThread
    ) -> None:
        """Nobody forces the lock away between the verdict and the commit."""
        committed: list[bool] = []

        def force() -> bool:
            done = bool(locks.force_release(key))
            committed.append(Account.objects.filter(name="mine").exists())
            return done

        with transaction.atomic():
            with apart(atomic=True, lease=600):
                AccountFactory(name="mine")
            forced = other.start(force)
            always(lambda: not forced.done(), during=0.5, what="waiting")
        # Released, or forced first: both come after the commit.
        forced.result(timeout=DEADLINE)
        assert committed == [True]

    def test_forced_out_before_the_inner_end(
        self, apart: Callable[..., Lock], key: str, other: OtherThread
    ) -> None:
        """A block that lost its lock is rolled back, and the outer one goes on."""
        with transaction.atomic():
            AccountFactory(name="outer")
            with pytest.raises(LeaseLost), apart(atomic=True, lease=600, renew=False):  # noqa: PT012
                AccountFactory(name="inner")
                assert other.do(locks.force_release, key)
        assert {one.name for one in Account.objects.all()} == {"outer"}


@pytest.mark.needs("has_table")
@two_databases
@pytest.mark.django_db(databases=["default", "locks"])
class TestApartInATestCase:
    """Inside Django's ``TestCase`` locks apart are on the test's own connections."""

    @pytest.mark.parametrize("depth", [0, 1])
    def test_commits(self, apart: Callable[..., Lock], key: str, depth: int) -> None:
        """atomic=True works, in a transaction of the test's or none."""

        def body(lease: Lease) -> None:
            AccountFactory(name="mine")

        with ExitStack() as outer:
            for _ in range(depth):
                outer.enter_context(transaction.atomic())
            with takes(at_most=SLACK):
                assert outcome(in_block, apart(atomic=True), body) == "left"
        assert Account.objects.filter(name="mine").exists()
        assert not apart().locked()

    def test_forced_out(self, apart: Callable[..., Lock], key: str) -> None:
        """A holder that was force-released meanwhile is rolled back."""

        def body(lease: Lease) -> None:
            AccountFactory(name="mine")
            assert locks.force_release(key)

        lock = apart(atomic=True, lease=600, renew=False)
        with takes(at_most=SLACK):
            assert outcome(in_block, lock, body) == "LeaseLost: forced"
        assert not Account.objects.filter(name="mine").exists()

    def test_excludes(self, apart: Callable[..., Lock], key: str) -> None:
        """A key that somebody else holds is refused, and free afterwards."""
        with hold_elsewhere(key, backend="apart"):
            assert apart(atomic=True).try_acquire() is None
        lock = apart(atomic=True, timeout=0)
        assert outcome(in_block, lock, Lease.check) == "left"
        assert not apart().locked()


# A release at the end that comes too late, or fails


@pytest.mark.needs("has_guard")
def test_overdue_and_guarded_inside_another_block(
    lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an inner block has pinned is released after the outer one's end."""
    lease = lock(atomic=True, lease=0.3, renew=False).acquire(timeout=0)
    release, inside = backends[lease.backend].release, list[bool]()

    def note(*arguments: Any, **options: Any) -> bool:
        inside.append(connection.in_atomic_block)
        return release(*arguments, **options)

    monkeypatch.setattr(backends[lease.backend], "release", note)
    with transaction.atomic():
        with lease:
            AccountFactory(name="mine")
            eventually(lambda: lease.lost_reason, what="the end of the lease")
        assert not inside
    assert inside == [False]
    assert Account.objects.filter(name="mine").exists()


@two_databases
@pytest.mark.needs("has_table")
def test_autocommit_switched_off_before_the_release(
    lock: Locks, taken: Callable[..., bool], caplog: pytest.LogCaptureFixture
) -> None:
    """A release that waits for a transaction whose end nobody sees: the lock lapses."""
    lease = lock(lease=scaled(0.6)).acquire(timeout=0)
    try:
        with transaction.atomic():
            assert lease.release() is True
            connections["locks"].set_autocommit(False)
        assert any("left to lapse" in line for line in caplog.messages)
    finally:
        connections["locks"].set_autocommit(True)
    assert not lease.held
    eventually(
        lambda: not taken(), within=scaled(0.6) + SLACK, what="the end of the lease"
    )


def test_lost_before_the_transaction_ended(
    acquire: Leases,
    backend: str,
    key: str,
    locks_beside: None,
    other: OtherThread,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A lock that was to be kept to the end, and is lost before it, is logged."""
    with transaction.atomic():
        acquire(lease=60).release()
        assert other.do(backends[backend].force_release, key)
    told = f"lost before the transaction ended key={key!r} permit=None reason=forced"
    assert told in caplog.messages


def test_one_of_several_released_before_the_end(
    backend: str, key: str, locks_beside: None, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost, and nothing is said to be, if one key was released earlier."""
    lock = distributed_lock(key, key + "!", backend=backend)
    with transaction.atomic(), lock as leases:
        leases[key].release()
        assert lock.locked()
    assert not lock.locked()
    # Another test's loss may only be told now.
    assert [line for line in caplog.messages if key in line] == []


def test_release_at_the_end_that_fails(
    lock: Locks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit stands when the release behind it fails: the lock lapses."""
    lease = lock().acquire(timeout=0)

    def fail(*arguments: Any, **options: Any) -> Any:
        raise backends[lease.backend].errors[0]("out of reach")

    with transaction.atomic():
        account = AccountFactory()
        lease.release()
        monkeypatch.setattr(backends[lease.backend], "release", fail)
        monkeypatch.setattr(backends[lease.backend], "release_all", fail)
    assert Account.objects.filter(pk=account.pk).exists()
    assert not lease.held
    assert any("left to lapse" in line for line in caplog.messages)


@pytest.mark.usefixtures("two_writers")
def test_released_by_a_task_meanwhile(key: str, other: OtherThread) -> None:
    """What was given back in a transaction, a task elsewhere doesn't free earlier."""
    with transaction.atomic():
        lease = distributed_lock(key).acquire()
        assert lease.release()
        assert not other.do(asyncio.run, lease.arelease())
        assert other.do(distributed_lock(key).locked)
    assert not distributed_lock(key).locked()


def release_in_a_transaction(leases: Any) -> bool:
    with transaction.atomic():
        return bool(leases.release())


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize(
    "give_back",
    [
        lambda leases: leases.release(),
        lambda leases: asyncio.run(leases.arelease()),
        release_in_a_transaction,
    ],
    ids=["thread", "task", "transaction"],
)
def test_rest_of_a_set_released_meanwhile(
    key: str, other: OtherThread, give_back: Callable[[Any], bool]
) -> None:
    """Of a set, a key that was given back alone in a transaction is kept as well."""
    with transaction.atomic():
        leases = distributed_lock(key, key + "!").acquire()
        assert leases[key].release()
        other.do(give_back, leases)
        assert other.do(distributed_lock(key).locked)
        assert not other.do(distributed_lock(key + "!").locked)
    assert not distributed_lock(key).locked()
