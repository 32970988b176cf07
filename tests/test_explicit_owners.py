"""One owner id presented by several threads and processes, and after a crash."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

from dblocks import Lease, LeaseLost, Lock, distributed_lock
from dblocks.conf import backends
from dblocks.holding.registry import registry
from dblocks.models import DistributedLock
from dblocks.test import move_clock
from tests.support.factories import stored
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers
from tests.support.timing import SLACK, eventually, scaled
from tests.test_ownership import in_forked_child

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]

locks = DistributedLock.objects
OWNER = "the job"
CO_OWNERS = pytest.mark.needs("has_shared_owners")


def held_for(key: str) -> float:
    """Return how many seconds after its acquisition the key is free as it stands.

    Rounded, because SQLite's clock counts in milliseconds.
    """
    row = stored(key)
    assert row.acquired_at is not None
    seconds: float = (row.expires_at - row.acquired_at).total_seconds()
    return round(seconds, 2)


def is_cooling(backend: str, key: str) -> bool:
    """Does nobody hold the key, which is taken nevertheless?"""
    if backends[backend].has_table:
        found: bool = locks.cooling().filter(pk=key).exists()
        return found
    return [entry.state for entry in backends[backend].entries(key)] == ["cooling"]


# max_hold


@CO_OWNERS
@pytest.mark.needs("has_own_leases")
@pytest.mark.parametrize("max_hold", [2, 60, None])
def test_limit_outlives_a_crash(
    backend: str,
    workers: Workers,
    lock: Locks,
    acquire: Leases,
    key: str,
    max_hold: float | None,
) -> None:
    """A restarted job is bounded by the max_hold of its first life.

    It enters again under the same grant, whose end was set when that began: from then
    on somebody else may have the key, whatever the second life asked for.
    """
    length = scaled(2)
    options = {"owner": OWNER, "lease": length, "max_hold": length}
    first = workers.start("hold", key=key, backend=backend, **options)
    at = first.expect("held")["at"]
    first.kill()
    eventually(lambda: time.monotonic() > at + 0.8)
    again = acquire(owner=OWNER, lease=length, max_hold=max_hold and scaled(max_hold))
    assert again.held
    theirs = lock(owner="somebody else")

    def granted() -> Lease | None:
        asked, left = time.monotonic(), again.remaining()
        assert left > 0 or not again.held
        grant = theirs.try_acquire()
        assert not grant or time.monotonic() > asked + left, "two holders"
        return grant

    grant = eventually(granted, within=length + SLACK, what="the end of max_hold")
    assert time.monotonic() - at < length + SLACK
    assert again.lost_reason is not None
    assert grant is not None
    grant.release()


@CO_OWNERS
@pytest.mark.needs("has_own_leases")
def test_remaining_knows_the_limit(
    backend: str, workers: Workers, lock: Locks, key: str
) -> None:
    """What remains of a lease never goes beyond a co-owner's max_hold."""
    options = {"owner": OWNER, "lease": 10, "max_hold": 10}
    first = workers.start("hold", key=key, backend=backend, **options)
    held = first.expect("held")
    eventually(lambda: time.monotonic() > held["at"] + 1.3)
    again = lock(**options).acquire(timeout=0)
    assert 0 < again.remaining() <= held["at"] + 10 - time.monotonic()
    again.renew()
    assert 0 < again.remaining() <= held["at"] + 10 - time.monotonic()
    assert again.release() is True
    first.tell("release")
    assert first.expect("released")["result"] is True
    first.expect("done")


@pytest.mark.needs("has_table")
def test_limit_binds_co_owners(acquire: Leases, key: str) -> None:
    """Whoever enters or renews under a grant can't move it beyond its max_hold."""
    lease = acquire(owner=OWNER, lease=20, max_hold=20)
    version = lease.fencing_token
    assert version is not None
    assert locks.acquire(key, owner=OWNER, lease=600)
    assert held_for(key) <= 20
    assert locks.renew(key, owner=OWNER, version=version, lease=600)
    assert held_for(key) <= 20
    assert locks.release(key, owner=OWNER, version=version)
    assert lease.release() is True


@pytest.mark.needs("has_table")
def test_entered_for_longer_than_the_limit(acquire: Leases, key: str) -> None:
    """A lease that a co-owner's max_hold shortens has the margin of what is left."""
    row = locks.acquire(key, owner=OWNER, lease=1)
    assert row is not None
    locks.filter(pk=key).update(max_until=row.acquired_at + timedelta(seconds=60))
    lease = acquire(owner=OWNER, lease=3600)
    assert 50 < lease.remaining() <= 54
    lease.renew(7200)
    assert 50 < lease.remaining() <= 54
    assert lease.release() is True


@pytest.mark.needs("has_own_leases")
def test_limit_ends_with_its_grant(acquire: Leases) -> None:
    """A new grant to the same owner isn't bounded by the earlier one's max_hold."""
    acquire(owner=OWNER, lease=20, max_hold=20).release()
    lease = acquire(owner=OWNER, lease=600)
    assert lease.remaining() > 500
    lease.renew()
    assert lease.remaining() > 500
    assert lease.release() is True


# hold_at_least


@CO_OWNERS
@pytest.mark.needs("has_cooling")
def test_cooling_after_a_co_owners_release(
    backend: str, workers: Workers, lock: Locks, obtainable: Obtainable, key: str
) -> None:
    """The first one's hold_at_least counts though another process releases last."""
    lease = lock(owner=OWNER, hold_at_least=600).acquire(timeout=0)
    second = workers.start("hold", key=key, backend=backend, owner=OWNER)
    assert second.expect("held")["token"] == lease.fencing_token
    assert lease.release() is True
    second.tell("release")
    assert second.expect("released")["result"] is True
    second.expect("done")
    assert not obtainable()
    assert is_cooling(backend, key)


@CO_OWNERS
@pytest.mark.needs("has_cooling")
def test_cooling_after_another_process_began(
    backend: str, workers: Workers, lock: Locks, obtainable: Obtainable, key: str
) -> None:
    """The hold_at_least of another process counts for who entered without one."""
    options = {"owner": OWNER, "hold_at_least": 600}
    first = workers.start("hold", key=key, backend=backend, **options)
    first.expect("held")
    lease = lock(owner=OWNER).acquire(timeout=0)
    first.tell("release")
    assert first.expect("released")["result"] is True
    first.expect("done")
    assert lease.release() is True
    assert not obtainable()
    assert is_cooling(backend, key)


@pytest.mark.needs("has_table")
def test_cooling_after_a_release_by_the_manager(
    acquire: Leases, obtainable: Obtainable, key: str
) -> None:
    """The manager, which knows the row alone, leaves it cooling too."""
    lease = acquire(owner=OWNER, hold_at_least=600)
    row = locks.acquire(key, owner=OWNER, lease=30)
    assert row is not None
    assert lease.release() is True
    assert locks.release(key, owner=OWNER, version=row.version)
    assert not obtainable()
    assert locks.cooling().filter(pk=key).exists()


@pytest.mark.needs("has_table")
def test_cooling_ends_on_time(acquire: Leases, key: str) -> None:
    """What a co-owner's release leaves cooling is counted from the acquisition."""
    lease = acquire(owner=OWNER, hold_at_least=600)
    row = locks.acquire(key, owner=OWNER, lease=30)
    assert row is not None
    lease.release()
    locks.release(key, owner=OWNER, version=row.version)
    assert held_for(key) == 600


# How often it is held


@pytest.mark.needs("has_own_leases", "has_movable_clock")
@pytest.mark.parametrize("thread", ["the same thread", "another thread"])
@pytest.mark.parametrize("back", ["before", "after", "last"])
def test_taken_again_in_the_margin(
    backend: str, lock: Locks, other: OtherThread, thread: str, back: str
) -> None:
    """An owner whose lease is over takes the key anew, and one release frees it.

    The lease counts as over a margin before the database would grant the key to
    others; its hold goes with it, whether and whenever it is released.
    """
    do: Callable[..., Any] = other.do if thread == "another thread" else call
    lost = lock(owner=OWNER, lease=60, renew=False).acquire(timeout=0)
    move_clock(57, backend=backend)
    assert not lost.held
    if back == "before":
        assert lost.release() is False
    lease = do(lock(owner=OWNER).acquire, timeout=0)
    if back == "after":
        assert lost.release() is False
    assert lease.held
    assert lease.release() is True
    if back == "last":
        assert lost.release() is False
    assert not lock().locked()


@CO_OWNERS
@pytest.mark.needs("has_own_leases")
def test_lost_holds_of_an_earlier_grant(
    backend: str, acquire: Leases, lock: Locks, workers: Workers, key: str
) -> None:
    """What was lost with one grant isn't subtracted from a co-owner's later one."""
    lost = [acquire(owner=OWNER) for _ in range(2)]
    backends[backend].force_release(key)
    with pytest.raises(LeaseLost):
        lost[0].renew()
    co_owner = workers.start("hold", key=key, owner=OWNER, backend=backend, lease=30)
    co_owner.expect("held")
    assert acquire(owner=OWNER).release() is True
    assert lock(owner="somebody else").try_acquire() is None
    co_owner.tell("release")
    co_owner.until_done()
    assert lock(owner="somebody else").acquire(timeout=0).release() is True


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("times", [1, 3])
def test_count_starts_from_one(
    backend: str, acquire: Leases, key: str, times: int
) -> None:
    """However often it was held before, a key that is taken again is held once."""
    lost = [acquire(owner=OWNER, lease=60, renew=False) for _ in range(times)]
    assert stored(key).hold_count == times
    move_clock(57, backend=backend)
    lease = acquire(owner=OWNER)
    assert stored(key).hold_count == 1
    second = acquire(owner=OWNER)
    assert stored(key).hold_count == 2
    assert [one.release() for one in lost] == [False] * times
    assert lease.release() is True
    assert distributed_lock(key).locked()
    assert second.release() is True
    assert not distributed_lock(key).locked()


@pytest.mark.needs("has_table")
def test_taken_again_while_the_row_is_locked(
    two_writers: None, backend: str, lock: Locks, other: OtherThread, key: str
) -> None:
    """What was lost isn't forgotten by an attempt that meets a locked row."""
    if not connection.features.has_select_for_update:
        pytest.skip("has no locked rows")
    lost = lock(owner=OWNER, lease=60, renew=False).acquire(timeout=0)
    move_clock(57, backend=backend)
    assert not lost.held

    def refuse() -> None:
        with transaction.atomic():
            assert locks.select_for_update().get(pk=key)
            assert other.do(lock(owner=OWNER, timeout=0).try_acquire) is None

    refuse()
    lease = lock(owner=OWNER).acquire(timeout=0)
    assert stored(key).hold_count == 1
    assert lease.release() is True
    assert not lock().locked()


@pytest.mark.needs("has_table")
def test_re_entered_beside_a_co_owner(acquire: Leases, key: str) -> None:
    """Re-entering here doesn't forget what the owner holds in another process."""
    first = acquire(owner=OWNER)
    row = locks.acquire(key, owner=OWNER, lease=30)
    assert row is not None
    second = acquire(owner=OWNER)
    assert locks.get(pk=key).hold_count == 3
    assert second.release()
    assert first.release()
    assert locks.held().get(pk=key).hold_count == 1
    assert locks.release(key, owner=OWNER, version=row.version)


def test_lost_holds_in_a_forked_child(acquire: Leases) -> None:
    """The parent alone subtracts the holds that it has lost."""
    hold = acquire(owner=OWNER)._hold
    registry.return_forfeited(hold.backend, hold.grant, 2)
    take = partial(registry.take_forfeited, hold.backend, hold.grant)
    assert in_forked_child(take) == 0
    assert take() == 2


@pytest.mark.needs("has_table")
@pytest.mark.parametrize(("permits", "at"), [(1, 1), (1, 2), (1, 3), (3, 1), (3, 2)])
def test_try_while_a_co_owner_writes(
    two_writers: None, key: str, other: OtherThread, permits: int, at: int
) -> None:
    """A co-owner's statement, which has the row locked for an instant, refuses nobody.

    It ends after that many statements of the try; the last one finds the row locked.
    """
    lock = distributed_lock(key, owner=OWNER, permits=permits)
    permit = 0 if permits > 1 else None
    theirs = locks.acquire(key, owner=OWNER, lease=30, permit=permit)
    assert theirs is not None
    sent = 0
    with ExitStack() as writing:

        def count(execute: Any, *arguments: Any) -> Any:
            nonlocal sent
            sent += 1
            try:
                return execute(*arguments)
            finally:
                if sent == at:
                    writing.close()

        writing.enter_context(other.in_transaction(lambda: locked(theirs.pk)))
        with connection.execute_wrapper(count):
            mine = lock.try_acquire()
    assert mine is not None
    assert mine.fencing_token == theirs.version
    assert stored(theirs.pk).hold_count == 2
    assert mine.release() is True


def locked(row: str) -> None:
    """Lock a row in the current transaction."""
    assert locks.select_for_update().get(pk=row)
