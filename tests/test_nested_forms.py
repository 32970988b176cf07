"""``distributed_lock`` and ``transaction_lock`` on one key by one owner: an error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dblocks import LockError, LockTimeout, distributed_lock, transaction_lock
from dblocks.models import DistributedLock
from tests.support.fixtures import OtherThread
from tests.support.timing import SLACK, takes
from tests.testapp.models import Account

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

WAIT = 3 * SLACK


class RolledBack(Exception):
    """Raised by a test to roll a transaction back."""


def in_block(key: str, **options: Any) -> None:
    """Lock the key's row in a with block."""
    with transaction_lock(key, **options):
        pass


def in_function(key: str, **options: Any) -> None:
    """Lock the key's row in a decorated function."""

    @transaction_lock(key, **options)
    def locked() -> None:
        pass

    locked()


def by_manager(key: str, **options: Any) -> None:
    """Lock the key's row by the manager."""
    with transaction.atomic():
        DistributedLock.objects.for_update(key, **options)


FORMS = pytest.mark.parametrize("form", [in_block, in_function, by_manager])


def refusal(form: Any, key: str, **options: Any) -> str:
    """Return the name of the error that this way of locking the row raises."""
    try:
        form(key, **options)
    except LockError as error:
        return type(error).__name__
    return "none"


# An explicit owner's lease


@FORMS
@pytest.mark.parametrize("owner", [None, "the job"])
def test_row_inside_a_lease(key: str, form: Any, owner: str | None) -> None:
    """A row inside its owner's lease is refused at once, whoever names the owner."""
    with distributed_lock(key, owner=owner), takes(at_most=SLACK):
        assert refusal(form, key, timeout=WAIT) == "LockError"


@FORMS
def test_row_beside_a_permit(key: str, form: Any) -> None:
    """A permit of the key is another row, which isn't in the way."""
    with distributed_lock(key, permits=3):
        assert refusal(form, key, timeout=WAIT) == "none"


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("owner", [None, "the job"])
def test_row_after_a_lease_in_the_transaction(key: str, owner: str | None) -> None:
    """A lease that is kept to the transaction's end is in the way until then."""
    with transaction.atomic():
        with distributed_lock(key, owner=owner):
            pass
        with takes(at_most=SLACK):
            assert refusal(in_block, key, timeout=WAIT) == "LockError"
    assert refusal(in_block, key, timeout=WAIT) == "none"


@pytest.mark.parametrize("owner", [None, "the job"])
def test_row_beside_another_threads_lease(
    key: str, owner: str | None, other: OtherThread
) -> None:
    """Another thread's lease is waited for, whoever owns it."""
    lease = other.do(distributed_lock(key, owner=owner).acquire)
    assert refusal(in_block, key, timeout=0.2) == "LockTimeout"
    other.do(lease.release)


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("owner", [None, "the job"])
def test_lease_inside_a_row(key: str, owner: str | None) -> None:
    """A lease inside its own transaction's row is refused at once."""
    with transaction_lock(key), takes(at_most=SLACK):
        with pytest.raises(LockError) as caught:
            distributed_lock(key, owner=owner).acquire(timeout=WAIT)
        assert not isinstance(caught.value, LockTimeout)


# When the row is no longer locked


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("begun", [True, False], ids=["after a read", "at first"])
def test_lease_after_going_back(key: str, other: OtherThread, begun: bool) -> None:
    """Once going back to a savepoint has freed the row, a lease can be had.

    On PostgreSQL it always does. InnoDB keeps the row to the transaction's end, and
    the lease stays refused for as long, unless the savepoint came before everything
    else: then MariaDB and MySQL roll back the whole.
    """
    assert granted(key)
    with transaction.atomic():
        if begun:
            assert not Account.objects.filter(name="anybody").exists()
        with pytest.raises(RolledBack), transaction.atomic():  # noqa: PT012
            in_block(key)
            raise RolledBack
        if connection.vendor == "postgresql" or not begun:
            assert other.do(granted, key)
            assert granted(key)
        else:
            assert not other.do(granted, key)
            with takes(at_most=SLACK):
                assert refusal(acquire_and_release, key, timeout=WAIT) == "LockError"
    assert granted(key)


@pytest.mark.usefixtures("two_writers")
def test_lease_after_an_exception_out_of_the_block(
    key: str, other: OtherThread
) -> None:
    """An exception that stays inside the transaction leaves the row locked."""
    with transaction.atomic():
        with pytest.raises(RolledBack), transaction_lock(key):
            raise RolledBack
        assert not other.do(granted, key)
        with takes(at_most=SLACK):
            assert refusal(acquire_and_release, key, timeout=WAIT) == "LockError"
    assert granted(key)


@pytest.mark.usefixtures("two_writers")
def test_lease_after_a_second_lock_was_rolled_back(key: str) -> None:
    """A row that the outer block has locked stays so when an inner one goes back."""
    with transaction.atomic():
        in_block(key)
        with pytest.raises(RolledBack), transaction.atomic(), transaction_lock(key):
            raise RolledBack
        with takes(at_most=SLACK):
            assert refusal(acquire_and_release, key, timeout=WAIT) == "LockError"
    assert granted(key)


@pytest.mark.usefixtures("two_writers")
def test_lease_after_a_savepoint_was_kept(key: str) -> None:
    """A savepoint that ends normally leaves the row locked, and the lease refused."""
    with transaction.atomic():
        with transaction.atomic():
            in_block(key)
        with takes(at_most=SLACK):
            assert refusal(acquire_and_release, key, timeout=WAIT) == "LockError"
    assert granted(key)


@pytest.mark.usefixtures("two_writers")
def test_lease_after_a_savepoint_was_marked(key: str, other: OtherThread) -> None:
    """A savepoint that is marked for rollback goes back, too, when it is left."""
    assert granted(key)
    with transaction.atomic():
        assert not Account.objects.filter(name="anybody").exists()
        with transaction.atomic():
            in_block(key)
            transaction.set_rollback(True)
        freed = connection.vendor == "postgresql"
        assert other.do(granted, key) is freed
        with takes(at_most=SLACK):
            seen = refusal(acquire_and_release, key, timeout=WAIT)
        assert seen == ("none" if freed else "LockError")
    assert granted(key)


@pytest.mark.usefixtures("two_writers")
def test_lease_after_a_block_without_savepoint(key: str, other: OtherThread) -> None:
    """What must be rolled back, and has not been, keeps its rows locked."""
    with transaction.atomic():
        with pytest.raises(RolledBack), transaction.atomic(savepoint=False):  # noqa: PT012
            in_block(key)
            raise RolledBack
        assert not other.do(granted, key)
        with takes(at_most=SLACK):
            assert refusal(acquire_and_release, key, timeout=WAIT) == "LockError"
    assert granted(key)


@pytest.mark.parametrize("opened", [True, False], ids=["in its own", "without"])
@FORMS
def test_lease_in_a_hook(
    key: str, form: Any, other: OtherThread, opened: bool, request: Any
) -> None:
    """An ``on_commit`` hook can have what the commit has just unlocked.

    So it can in a transaction of its own, where a second session can write.
    """
    if opened:
        request.getfixturevalue("two_writers")
    seen: list[str] = []

    def hook() -> None:
        with transaction.atomic() if opened else nullcontext():
            seen.append(refusal(acquire_and_release, key, timeout=WAIT))

    with transaction.atomic():
        form(key)
        transaction.on_commit(hook)
    assert seen == ["none"]
    assert other.do(granted, key)


def test_lease_in_a_hook_of_its_own_transaction(key: str) -> None:
    """So it is if ``transaction_lock`` itself has opened the transaction."""
    seen: list[bool] = []
    with transaction_lock(key):
        transaction.on_commit(lambda: seen.append(granted(key)))
    assert seen == [True]


@FORMS
def test_row_in_a_hook(key: str, form: Any) -> None:
    """A hook can lock the row again; then a lease on it is refused again."""
    seen: list[str] = []

    def hook() -> None:
        with transaction.atomic():
            form(key)
            if connection.vendor != "sqlite":
                seen.append(refusal(acquire_and_release, key, timeout=WAIT))

    with transaction_lock(key):
        transaction.on_commit(hook)
    assert set(seen) <= {"LockError"}
    assert granted(key)


@FORMS
def test_lease_beside_another_databases_transaction(
    key: str, form: Any, other: OtherThread
) -> None:
    """The row is free when its transaction ends, though another database's goes on."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    with transaction.atomic(using="locks"):
        form(key)
        assert other.do(granted, key)
        assert granted(key)
    assert other.do(granted, key)


def test_reentry_under_an_old_snapshot(key: str) -> None:
    """The holder's own re-entry doesn't make its guarded commit fail."""
    with distributed_lock(key, atomic=True):
        with connection.cursor() as cursor:
            if connection.vendor == "postgresql":
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            cursor.execute("SELECT COUNT(*) FROM dblocks_distributedlock")
        with distributed_lock(key):
            pass


def acquire_and_release(key: str, **options: Any) -> None:
    """Take a lease and give it back."""
    distributed_lock(key).acquire(**options).release()


def granted(key: str) -> bool:
    """Tell whether a lease can be had at once, and give it back."""
    return refusal(acquire_and_release, key, timeout=0) == "none"
