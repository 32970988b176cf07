"""``objects.for_update``: the lock's row, locked until the transaction ends."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.transaction import TransactionManagementError

from dblocks import Lease, Lock, LockError, LockTimeout, distributed_lock
from dblocks.models import DistributedLock
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread, has_old_snapshots
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes
from tests.testapp.models import Account

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

locks = DistributedLock.objects
Leases = Callable[..., Lease]
Locks = Callable[..., Lock]
NESTED = (LockError, RuntimeError, TransactionManagementError)


def test_outside_a_transaction(key: str) -> None:
    """There is nothing that could hold the row: TransactionManagementError."""
    with pytest.raises(TransactionManagementError):
        locks.for_update(key)


@pytest.mark.parametrize("there", [True, False], ids=["known key", "new key"])
def test_returns_the_row(acquire: Leases, key: str, there: bool) -> None:
    """A free key's row is returned, made if need be."""
    if there:
        acquire().release()
    with transaction.atomic():
        row = locks.for_update(key, timeout=1)
        assert isinstance(row, DistributedLock)
        assert row.key == key


@pytest.mark.parametrize("option", ["nowait", "skip_locked"])
def test_free_key_without_waiting(acquire: Leases, key: str, option: str) -> None:
    """A free key is granted in either form that doesn't wait."""
    acquire().release()
    with transaction.atomic():
        row = locks.for_update(key, **{option: True})
        assert row is not None
        assert row.key == key


def test_leased_key_at_once(acquire: Leases, other: OtherThread, key: str) -> None:
    """For a key that is leased, nowait raises LockTimeout at once."""
    other.do(acquire, note="why")
    with (
        transaction.atomic(),
        takes(at_most=SLACK),
        pytest.raises(LockTimeout) as caught,
    ):
        locks.for_update(key, nowait=True)
    assert caught.value.key == key


def test_leased_key_skipped(acquire: Leases, other: OtherThread, key: str) -> None:
    """For a key that is leased, skip_locked returns None at once."""
    other.do(acquire)
    with transaction.atomic(), takes(at_most=SLACK):
        assert locks.for_update(key, skip_locked=True) is None


def test_wait_for_a_lease_ends(acquire: Leases, other: OtherThread, key: str) -> None:
    """A wait for a lease keeps to its timeout, fractions included."""
    other.do(acquire)
    with transaction.atomic():
        with takes(0.4, 0.4 + SLACK), pytest.raises(LockTimeout):
            locks.for_update(key, timeout=0.4)
        AccountFactory(name="after")
    assert Account.objects.filter(name="after").exists()


def test_wait_for_a_lease_that_ends(
    acquire: Leases, other: OtherThread, key: str
) -> None:
    """A lease that runs out while waiting lets the transaction in."""
    other.do(acquire, lease=0.5, renew=False)
    with transaction.atomic():
        assert locks.for_update(key, timeout=DEADLINE) is not None


def test_inside_a_lease_of_the_same_owner(acquire: Leases, key: str) -> None:
    """Who holds the lease would wait for itself: an error at once."""
    acquire()
    with transaction.atomic(), takes(at_most=1), pytest.raises(NESTED):
        locks.for_update(key, timeout=3)


@pytest.mark.parametrize("bad", ["", "k" * 256, "a\0b", 5, None], ids=repr)
def test_bad_key(bad: Any) -> None:
    """The rules for keys hold here too."""
    with pytest.raises(ValueError, match="key"), transaction.atomic():
        locks.for_update(bad)


@pytest.mark.parametrize(
    ("timeout", "error"),
    [
        ("3", TypeError),
        (-1, ValueError),
        (float("nan"), ValueError),
        (float("inf"), ValueError),
    ],
    ids=repr,
)
def test_bad_timeout(key: str, timeout: Any, error: type[Exception]) -> None:
    """The rules for timeouts hold here too."""
    with pytest.raises(error, match="timeout"), transaction.atomic():
        locks.for_update(key, timeout=timeout)


@pytest.mark.usefixtures("two_writers")
class TestBesideOthers:
    """Two transactions on one key."""

    def test_lease_inside_of_the_same_owner(self, acquire: Leases, key: str) -> None:
        """A lease inside would wait for its own transaction: an error at once."""
        acquire().release()
        with transaction.atomic():
            assert locks.for_update(key, timeout=1) is not None
            with takes(at_most=1), pytest.raises(NESTED):
                distributed_lock(key).acquire(timeout=3)

    @pytest.fixture
    def pinned(self, key: str, acquire: Leases, other: OtherThread) -> Any:
        """Another thread's transaction has the row; set the event to end it."""
        acquire().release()
        has_it, leave = Event(), Event()

        def pin() -> None:
            with transaction.atomic():
                assert locks.for_update(key, timeout=1) is not None
                has_it.set()
                leave.wait(DEADLINE)

        future = other.start(pin)
        eventually(lambda: has_it.is_set() or future.done(), what="the other's row")
        yield leave
        leave.set()
        future.result(timeout=DEADLINE)

    def test_nowait(self, pinned: Event, key: str) -> None:
        """nowait raises LockTimeout at once and leaves the transaction usable."""
        with transaction.atomic():
            with takes(at_most=SLACK), pytest.raises(LockTimeout):
                locks.for_update(key, nowait=True)
            AccountFactory(name="after")
        assert Account.objects.filter(name="after").exists()

    def test_skip_locked(self, pinned: Event, key: str) -> None:
        """skip_locked returns None at once and leaves the transaction usable."""
        with transaction.atomic():
            with takes(at_most=SLACK):
                assert locks.for_update(key, skip_locked=True) is None
            AccountFactory(name="after")
        assert Account.objects.filter(name="after").exists()

    @pytest.mark.parametrize("timeout", [0.3, 0.7])
    def test_timeout(self, pinned: Event, key: str, timeout: float) -> None:
        """A wait ends on time, to a fraction of a second, and leaves all usable."""
        with transaction.atomic():
            account = AccountFactory(name="before")
            with takes(timeout - 0.05, timeout + SLACK), pytest.raises(LockTimeout):
                locks.for_update(key, timeout=timeout)
            Account.objects.filter(pk=account.pk).update(name="after")
        assert Account.objects.filter(name="after").exists()

    def test_session_is_left_as_found(self, pinned: Event, key: str) -> None:
        """A wait that ran out leaves no timeout behind in the caller's session."""
        question = {
            "postgresql": (
                "SELECT current_setting('lock_timeout'), "
                "current_setting('statement_timeout')"
            ),
            "mysql": "SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout",
        }[connection.vendor]

        def ask() -> Any:
            with connection.cursor() as cursor:
                cursor.execute(question)
                return cursor.fetchone()

        before = ask()
        with transaction.atomic():
            with pytest.raises(LockTimeout):
                locks.for_update(key, timeout=0.2)
            assert ask() == before
        with transaction.atomic():
            assert locks.for_update(f"{key}:free", timeout=0.2) is not None
            assert ask() == before
        assert ask() == before

    def test_commit_lets_the_next_one_in(
        self, pinned: Event, key: str, threads: Callable[[], OtherThread]
    ) -> None:
        """A waiting transaction gets the row when the other ends.

        On PostgreSQL not if its snapshot is older than the other's commit.
        """

        def wait() -> str:
            with transaction.atomic():
                row = locks.for_update(key, timeout=DEADLINE)
                assert row is not None
                return str(row.key)

        waiting = threads().start(wait)
        always(lambda: not waiting.done(), during=0.3, what="waiting")
        pinned.set()
        if has_old_snapshots():
            with pytest.raises(OperationalError, match="could not serialize"):
                waiting.result(timeout=DEADLINE)
        else:
            assert waiting.result(timeout=DEADLINE) == key

    def test_a_lease_is_refused_meanwhile(self, pinned: Event, lock: Locks) -> None:
        """A try for a lease answers within a second while a transaction has the row."""
        with takes(at_most=1):
            assert lock(owner="somebody else").try_acquire() is None

    def test_a_lease_is_granted_afterwards(
        self, pinned: Event, lock: Locks, threads: Callable[[], OtherThread]
    ) -> None:
        """A wait for a lease ends when the transaction does."""
        waiting = threads().start(lock().acquire, timeout=DEADLINE)
        always(lambda: not waiting.done(), during=0.3, what="waiting")
        pinned.set()
        assert waiting.result(timeout=DEADLINE).release() is True

    def test_waiting_for_a_lease_doesnt_stop_its_renewal(
        self, acquire: Leases, key: str, other: OtherThread
    ) -> None:
        """A transaction that waits for a lease never keeps the row from its holder."""
        lease = acquire(lease=scaled(2.4))

        def wait() -> None:
            with transaction.atomic():
                locks.for_update(key, timeout=scaled(3.2))

        waiting = other.start(wait)
        always(lambda: lease.held, during=scaled(3), what="held")
        with pytest.raises(LockTimeout):
            waiting.result(timeout=DEADLINE)
        assert lease.release() is True
