"""Rows that go away, by pruning or by hand, while somebody waits for their key."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from threading import Event
from typing import Any

import pytest
from django.db import OperationalError, connection, transaction
from django.db.models import QuerySet

from dblocks import distributed_lock, transaction_lock
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.factories import let_expire
from tests.support.fixtures import OtherThread, has_old_snapshots, in_memory
from tests.support.timing import DEADLINE, SLACK, always, eventually

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

#: For how long the waiters wait: longer than they may once the row is gone.
LONG = 3 * SLACK


def delete(key: str) -> None:
    """Delete the row by hand, held or not."""
    QuerySet(DistributedLock).filter(pk=key).delete()


def lapse_and_prune(key: str) -> None:
    """Let the holder's time run out and prune, in one moment."""
    with transaction.atomic():
        let_expire(key)
        assert DistributedLock.objects.prune(timedelta(seconds=10)) == 1


def between_reads(change: Callable[[], None]) -> None:
    """Change the table; where others' reads lock it whole, between two of them."""

    def changed() -> bool:
        try:
            change()
        except OperationalError:
            if not in_memory():
                raise
            return False
        return True

    eventually(changed, what="the change")


GOING = pytest.mark.parametrize("go", [delete, lapse_and_prune])


def in_block(key: str) -> Any:
    """Wait in the with form."""
    with transaction_lock(key, timeout=LONG) as row:
        return row.key


def in_function(key: str) -> Any:
    """Wait in the decorator form."""

    @transaction_lock("{key}", timeout=LONG)
    def function(key: str) -> str:
        return key

    return function(key)


def in_a_transaction(key: str) -> Any:
    """Wait in a transaction that has begun before."""
    with transaction.atomic():
        return in_block(key)


def by_manager(key: str) -> Any:
    """Wait at the level of the manager."""
    with transaction.atomic():
        return DistributedLock.objects.for_update(key, timeout=LONG).key


def for_a_lease(key: str) -> Any:
    """Wait for a lease."""
    with distributed_lock(key, timeout=LONG) as lease:
        return lease.key


FORMS = [in_block, in_function, in_a_transaction, by_manager, for_a_lease]


@GOING
@pytest.mark.parametrize("wait", FORMS)
def test_row_goes_while_leased(
    key: str, other: OtherThread, wait: Callable[[str], Any], go: Callable[[str], None]
) -> None:
    """Who waits for a lease gets the key when the row is gone, as no one has it."""
    if connection.vendor == "sqlite" and wait in {in_a_transaction, by_manager}:
        pytest.skip("who waits in a transaction has SQLite's only write lock")
    with hold_elsewhere(key):
        waiting = other.start(wait, key)
        always(lambda: not waiting.done(), during=0.3, what="the wait")
        between_reads(lambda: go(key))
        eventually(waiting.done, within=SLACK, what="the end of the wait")
        assert waiting.result() == key
    # It is there again.
    distributed_lock(key).acquire(timeout=0).release()


@pytest.mark.parametrize("wait", FORMS)
def test_row_goes_while_it_is_queued_for(
    key: str, threads: Callable[[], OtherThread], wait: Callable[[str], Any]
) -> None:
    """Who stands in the database's own queue for a row gets the key when it is gone.

    But not in a transaction at PostgreSQL's REPEATABLE READ that has begun before.
    """
    if in_memory() and wait is not for_a_lease:
        pytest.skip("a database in memory has no queue for its locked tables")
    distributed_lock(key).acquire(timeout=0).release()
    deleted, commit = Event(), Event()

    def delete_slowly() -> None:
        with transaction.atomic():
            delete(key)
            deleted.set()
            assert commit.wait(DEADLINE)

    deleting = threads().start(delete_slowly)
    try:
        assert deleted.wait(DEADLINE)
        waiting = threads().start(wait, key)
        always(lambda: not waiting.done(), during=0.3, what="the wait")
    finally:
        commit.set()
        deleting.result(timeout=DEADLINE)
    eventually(waiting.done, within=SLACK, what="the end of the wait")
    if wait in {in_a_transaction, by_manager} and has_old_snapshots():
        with pytest.raises(OperationalError):
            waiting.result()
    else:
        assert waiting.exception() is None
        assert waiting.result() == key


@pytest.mark.skipif("has_old_snapshots()", reason="such a transaction gets an error")
def test_tries_while_a_transaction_has_a_row_made_anew(
    key: str, threads: Callable[[], OtherThread]
) -> None:
    """A row that was pruned under a waiter refuses at once all the same."""
    if connection.vendor == "sqlite":
        pytest.skip("nobody waits beside SQLite's only writer")
    distributed_lock(key).acquire(timeout=0).release()
    pruning, waiter = threads(), threads()
    have, leave = Event(), Event()

    def wait() -> None:
        with transaction.atomic(), transaction_lock(key, timeout=LONG):
            have.set()
            assert leave.wait(DEADLINE)

    with pruning.in_transaction(lambda: delete(key)):
        waiting = waiter.start(wait)
        always(lambda: not waiting.done(), during=0.3, what="the wait")
    try:
        assert have.wait(DEADLINE)
        trying = threads().start(distributed_lock(key).try_acquire)
        eventually(trying.done, within=1 + SLACK, what="the answer to a try")
        assert trying.result() is None
    finally:
        leave.set()
        waiting.result(timeout=DEADLINE)


def delete_by_queryset(key: str) -> None:
    """Delete the row as Django's own shell would."""
    DistributedLock.objects.filter(pk=key).delete()


def delete_by_instance(key: str) -> None:
    """Delete the row through its object."""
    DistributedLock.objects.get(pk=key).delete()


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("remove", [delete_by_queryset, delete_by_instance])
@pytest.mark.parametrize("stage", ["done", "waiting"])
def test_new_key_beside_a_deletion(
    key: str,
    threads: Callable[[], OtherThread],
    remove: Callable[[str], None],
    stage: str,
) -> None:
    """A deletion in an open transaction, or one that waits, holds up no other key."""
    distributed_lock(key).acquire(timeout=0).release()

    def tried() -> Any:
        attempt = threads().start(distributed_lock(f"{key}:new").try_acquire)
        eventually(attempt.done, within=SLACK, what="the answer to a try")
        return attempt.result()

    if stage == "done":
        with threads().in_transaction(lambda: remove(key)):
            lease = tried()
    else:
        lock_row = DistributedLock.objects.for_update
        with threads().in_transaction(lambda: lock_row(key)):
            deleting = threads().start(remove, key)
            always(lambda: not deleting.done(), during=0.3, what="the wait")
            lease = tried()
        # Django deletes a queryset in a transaction, which has a snapshot there.
        is_refused = has_old_snapshots() and remove is delete_by_queryset
        with pytest.raises(OperationalError) if is_refused else nullcontext():
            deleting.result(timeout=DEADLINE)
    assert lease is not None
    lease.release()


@pytest.mark.usefixtures("two_writers")
def test_token_rises_over_a_deletion_of_what_was_just_released(
    key: str, other: OtherThread
) -> None:
    """A row that a deletion finds only in its last statement leaves the floor, too."""
    with distributed_lock(f"{key}:early"):
        pass
    for _ in range(3):
        distributed_lock(key).acquire(timeout=0).release()
    lease = other.do(distributed_lock(key).acquire, timeout=0)

    def release_first(execute: Any, sql: str, *how: Any) -> Any:
        if sql.startswith("DELETE") and lease.held:
            other.do(lease.release)
        return execute(sql, *how)

    with connection.execute_wrapper(release_first):
        DistributedLock.objects.free().delete()
    with distributed_lock(key) as later:
        assert later.fencing_token > lease.fencing_token


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("remove", [delete_by_queryset, delete_by_instance])
def test_token_rises_over_a_deletion_below_the_floor(
    key: str, other: OtherThread, remove: Callable[[str], None]
) -> None:
    """A row that goes on during its deletion, past a floor that was above it."""

    def grants(number: int, key: str = key) -> int:
        with transaction.atomic():
            table = DistributedLock.objects
            for _ in range(number):
                row = table.acquire(key, owner="o", lease=9)
                assert row is not None
                assert table.release(key, owner="o", version=row.version)
            return row.version

    floor = grants(1)
    grants(2, f"{key}:pruned")
    let_expire(f"{key}:pruned")
    assert DistributedLock.objects.prune(timedelta(seconds=10)) == 1
    seen: list[int] = []

    def go_on_first(execute: Any, sql: str, *how: Any) -> Any:
        if sql.startswith("DELETE") and not seen:
            seen.append(other.do(grants, 5))
        return execute(sql, *how)

    with connection.execute_wrapper(go_on_first):
        remove(key)
    assert seen[0] > floor
    assert not DistributedLock.objects.filter(pk=key).exists()
    assert grants(1) > seen[0]


@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("remove", [delete_by_queryset, delete_by_instance])
@pytest.mark.parametrize("before", ["prune", "acquire"])
def test_deletion_after_the_floor_was_locked(
    key: str, other: OtherThread, remove: Callable[[str], None], before: str
) -> None:
    """A deletion doesn't wait for the transaction that it is part of."""
    with distributed_lock(key) as lease:
        token = lease.fencing_token

    def change() -> None:
        with transaction.atomic():
            if before == "prune":
                DistributedLock.objects.prune(timedelta(seconds=10))
                lapse_and_prune(f"{key}:pruned")
            else:
                DistributedLock.objects.acquire(f"{key}:new", owner="o", lease=9)
            remove(key)

    distributed_lock(f"{key}:pruned").acquire(timeout=0).release()
    changing = other.start(change)
    eventually(changing.done, within=SLACK, what="the deletion")
    changing.result()
    with distributed_lock(key) as lease:
        assert lease.fencing_token > token
