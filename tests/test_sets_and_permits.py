"""What must never happen to several keys at once, and to the permits of a key."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from django.db import transaction
from django.db.models import F

from dblocks import Lease, LeaseLost, Leases, current_lease, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.permits import row_key
from dblocks.test import hold_elsewhere, move_clock
from dblocks.waiting.queue import queues
from tests.support.factories import AccountFactory, stored
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, eventually, scaled

Make = Callable[..., Any]


@pytest.fixture
def keys(key: str) -> list[str]:
    """Return three keys in the order in which they are taken."""
    return [f"{key}:{number}" for number in range(3)]


@pytest.fixture
def several(backend: str) -> Make:
    """Make locks on several keys, or on one with permits."""

    def make(*keys: str, **options: Any) -> Any:
        return distributed_lock(*keys, backend=backend, **options)

    return make


def wait_for(other: OtherThread, lock: Any, key: str, backend: str) -> Any:
    """Let a thread wait until it has a lock, for which it must wait at a key."""
    waiting = other.start(lock.acquire, timeout=DEADLINE)
    eventually(
        lambda: queues.find(backends[backend], key) is not None or waiting.done(),
        what=f"the wait for {key}",
    )
    assert not waiting.done()
    return waiting


# Several keys


@pytest.mark.needs("has_guard")
@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("block", ["guard", "atomic"])
def test_one_lost_key_stops_the_commit(
    backend: str, keys: list[str], lost: int, block: str
) -> None:
    """Whichever key of a set is lost, nothing is committed; the others stay held."""
    account = AccountFactory()
    lock = distributed_lock(*keys, atomic=block == "atomic", renew=False)
    leases = lock.acquire(timeout=0)
    assert DistributedLock.objects.force_release(keys[lost])

    def update() -> None:
        with transaction.atomic() if block == "guard" else leases:
            rows = type(account).objects.filter(pk=account.pk)
            rows.update(balance=F("balance") + 1)
            if block == "guard":
                leases.guard()

    with pytest.raises(LeaseLost) as caught:
        update()
    if block == "guard":
        kept = [leases[name].held for name in keys]
        assert kept == [number != lost for number in range(3)]
        assert leases.release() is False
    assert (caught.value.key, caught.value.reason) == (keys[lost], "forced")
    account.refresh_from_db()
    assert account.balance == 0
    assert not lock.locked()


def test_who_waits_has_nothing_behind_it(
    several: Make, backend: str, keys: list[str], other: OtherThread
) -> None:
    """Who waits for a key has none that comes after it, in whatever order given."""
    first, second, third = keys
    with several(first).acquire(timeout=0):
        waiting = wait_for(other, several(third, second, first), first, backend)
        assert not several(second, third).locked()
    leases = waiting.result(timeout=DEADLINE)
    assert list(leases) == keys
    assert leases.held
    assert other.do(leases.release)


def test_opposite_orders(
    several: Make, keys: list[str], threads: Callable[[], OtherThread]
) -> None:
    """Two who take the same keys in opposite orders take turns, without an end."""
    one, another = threads(), threads()

    def toil(lock: Any) -> int:
        rounds = 0
        for _ in range(15):
            with lock.acquire(timeout=DEADLINE / 3) as leases:
                rounds += leases.held
        return rounds

    running = [
        one.start(toil, several(*keys)),
        another.start(toil, several(*reversed(keys))),
    ]
    assert [each.result(timeout=DEADLINE) for each in running] == [15, 15]


@pytest.mark.parametrize(
    "cools", [0, pytest.param(60, marks=pytest.mark.needs("has_cooling"))]
)
@pytest.mark.parametrize("taken", range(3))
def test_refused_set_leaves_nothing(
    several: Make, keys: list[str], other: OtherThread, taken: int, cools: float
) -> None:
    """What was taken of a set that stays incomplete is free again, and doesn't cool."""
    # Once with rows, once without.
    for _ in range(2):
        holder = other.do(several(keys[taken]).acquire, timeout=0)
        assert several(*keys, hold_at_least=cools).try_acquire() is None
        rest = [name for name in keys if name != keys[taken]]
        assert not any(several(name).locked() for name in rest)
        assert holder.held
        assert other.do(holder.release)
        assert not several(*keys).locked()


@pytest.mark.needs("has_cooling")
def test_refused_set_of_an_explicit_owner(
    several: Make, keys: list[str], other: OtherThread
) -> None:
    """What was taken of it cools: a co-owner may have had it."""
    *before, last = sorted(keys)
    holder = other.do(several(last).acquire, timeout=0)
    # Who only tries may be refused before anything is taken.
    lock = several(*keys, owner="ann", hold_at_least=600)
    assert lock.try_acquire(timeout=scaled(0.3)) is None
    assert other.do(holder.release) is True
    assert all(several(name).locked() for name in before)
    assert not several(last).locked()
    assert several(before[0], owner="ann").try_acquire() is None


@pytest.mark.parametrize("owner", [None, "ann"])
def test_refused_set_keeps_what_was_had_before(
    several: Make, keys: list[str], other: OtherThread, owner: str | None
) -> None:
    """A key that the owner had already is held as often as before."""
    first, second, _ = keys
    mine = several(first, owner=owner).acquire(timeout=0)
    holder = other.do(several(second).acquire, timeout=0)
    assert several(second, first, owner=owner).try_acquire() is None
    assert mine.held
    assert current_lease(first) is mine
    assert mine.release()
    assert not several(first).locked()
    assert other.do(holder.release)


@pytest.mark.needs("has_own_leases", "has_movable_clock")
def test_lost_while_the_others_are_waited_for(
    several: Make, backend: str, keys: list[str], other: OtherThread
) -> None:
    """A key whose lease ran out in the wait for the next one is taken again."""
    first, second, _ = keys
    holder = several(second, lease=600, renew=False).acquire(timeout=0)
    lock = several(first, second, lease=100, renew=False, timeout=None)
    waiting = other.start(lock.acquire)
    eventually(
        lambda: queues.find(backends[backend], second) is not None, what="the wait"
    )
    earlier = several(first).locked()
    move_clock(120, backend=backend)
    assert holder.release()
    leases = waiting.result(timeout=DEADLINE)
    assert earlier
    assert leases.held
    assert isinstance(leases, Leases)
    assert other.do(leases.release)


# Permits


@pytest.fixture(params=["threads", "explicit owners"])
def permits(
    request: pytest.FixtureRequest, several: Make, backend: str, key: str
) -> Make:
    """Take permits of the test's key, each for somebody else."""
    serial = itertools.count()

    def take(number: int) -> list[Lease]:
        if request.param == "threads":
            elsewhere = [
                hold_elsewhere(key, permits=number, backend=backend)
                for _ in range(number)
            ]
            return [holder.__enter__() for holder in elsewhere]
        owners = [f"owner {next(serial)}" for _ in range(number)]
        locks = [several(key, permits=number, owner=owner) for owner in owners]
        return [lock.acquire(timeout=0) for lock in locks]

    return take


def test_never_more_than_permits(several: Make, permits: Make, key: str) -> None:
    """Each of so many owners has a permit of its own, and one more has none."""
    # Once without rows, once with.
    for _ in range(2):
        held = permits(3)
        assert sorted(lease.permit for lease in held) == [0, 1, 2]
        lock = several(key, permits=3)
        assert lock.locked()
        assert lock.try_acquire() is None
        assert held[1].release()
        assert not lock.locked()
        with lock.acquire(timeout=0) as lease:
            assert lease.permit == held[1].permit
            assert lock.locked()
        assert held[0].release()
        assert held[2].release()


@pytest.mark.needs("has_fencing_tokens")
def test_each_permit_rises_by_itself(
    permits: Make, several: Make, backend: str, key: str
) -> None:
    """A permit's tokens rise; number, token and owner are those of its own row."""
    highest = dict.fromkeys(range(3), 0)
    # Each begins with a permit of its own, which another one may have by then.
    for _ in range(4):
        held = permits(3)
        for lease in held:
            assert lease.fencing_token is not None
            assert lease.fencing_token > highest[lease.permit]
            highest[lease.permit] = lease.fencing_token
            if backend == "default":
                row = stored(row_key(key, lease.permit))
                assert (row.version, row.owner) == (lease.fencing_token, lease.owner)
        for lease in held:
            lease.renew()
            assert lease.release()
    assert not several(key, permits=3).locked()


def test_fewer_permits_than_before(several: Make, permits: Make, key: str) -> None:
    """Who asks for fewer permits sees those below that number alone."""
    held = {lease.permit: lease for lease in permits(3)}
    lock = several(key, permits=2)
    assert held[2].release()
    assert lock.try_acquire() is None
    assert held[0].release()
    with lock.acquire(timeout=0) as lease:
        assert lease.permit == 0
        with several(key, permits=3, owner="d").acquire(timeout=0) as more:
            assert more.permit == 2
    assert held[1].release()


def test_owner_has_one_permit(several: Make, key: str, other: OtherThread) -> None:
    """Whoever presents the same owner re-enters its permit, from elsewhere too."""
    lock = several(key, permits=3, owner="ann")
    mine = lock.acquire(timeout=0)
    theirs = other.do(lock.acquire, timeout=0)
    assert (theirs.permit, theirs.fencing_token) == (mine.permit, mine.fencing_token)
    with several(key, permits=3).acquire(timeout=0) as another:
        assert another.permit != mine.permit
    assert mine.release()
    assert theirs.held
    assert other.do(theirs.release)
    assert not lock.locked()


def test_owner_enters_the_permit_that_is_left(
    several: Make, backend: str, key: str
) -> None:
    """Who has two permits, since there were fewer, and lost one enters the other."""
    elsewhere = [hold_elsewhere(key, permits=2, backend=backend) for _ in range(2)]
    first, second = sorted((h.__enter__() for h in elsewhere), key=lambda h: h.permit)
    mine = several(key, permits=3).acquire(timeout=0)
    assert first.release()
    lower = several(key, permits=2).acquire(timeout=0)
    assert (mine.permit, lower.permit) == (2, 0)
    assert backends[backend].force_release(key, permit=0)
    again = several(key, permits=3).acquire(timeout=0)
    assert (again.permit, again.fencing_token) == (2, mine.fencing_token)
    assert lower.lost_reason == "forced"
    assert all(lease.release() for lease in (again, mine, second))


def holds(backend: str, key: str) -> list[tuple[str, int]]:
    """Return which permits of a key are held, and how many times each."""
    if backends[backend].has_table:
        rows = DistributedLock.objects.held().filter(key__startswith=key)
        return [(row.key, row.hold_count) for row in rows]
    entries = backends[backend].entries(key)
    return [(each.key, each.hold_count) for each in entries if each.state == "held"]


@pytest.mark.needs("has_shared_owners")
def test_owner_in_another_process_has_the_same_permit(
    several: Make, backend: str, key: str, workers: Workers
) -> None:
    """A restarted worker re-enters the permit that its zombie has."""
    mine = several(key, permits=3, owner="ann").acquire(timeout=0)
    worker = workers.start("hold", key=key, backend=backend, permits=3, owner="ann")
    assert worker.expect("held")["token"] == mine.fencing_token
    permit = row_key(key, mine.permit)
    assert holds(backend, key) == [(permit, 2)]
    assert mine.release()
    assert holds(backend, key) == [(permit, 1)]
    worker.tell("release")
    assert worker.expect("released")["result"] is True
    worker.until_done()
    assert holds(backend, key) == []
