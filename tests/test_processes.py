"""Locks between real processes: killed, stopped, racing, counting."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise

import pytest
from django.db import connection

from dblocks import Lock, distributed_lock
from dblocks.models import DistributedLock
from tests.support.factories import AccountFactory, stored
from tests.support.processes import Event, Worker, Workers
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("committed")

Locks = Callable[..., Lock]


def finish(*workers: Worker) -> None:
    """Let programs that wait for the word release, and end."""
    for worker in workers:
        worker.tell("release")
    for worker in workers:
        worker.until_done()


def test_processes_are_different_owners(workers: Workers, key: str) -> None:
    """What one process holds, another doesn't enter, until it is released."""
    holder = workers.start("hold", key=key)
    token = holder.expect("held")["token"]
    assert distributed_lock(key).try_acquire() is None
    finish(holder)
    with distributed_lock(key).acquire(timeout=0) as lease:
        assert lease.fencing_token > token


def test_explicit_owner_across_processes(workers: Workers, key: str) -> None:
    """The same owner id in another process re-enters with the same token."""
    holder = workers.start("hold", key=key, owner="importer")
    token = holder.expect("held")["token"]
    with distributed_lock(key, owner="importer").acquire(timeout=0) as lease:
        assert lease.fencing_token == token
        assert stored(key).hold_count == 2
        finish(holder)
        assert distributed_lock(key, owner="somebody else").try_acquire() is None
        assert lease.held
    assert not distributed_lock(key).locked()


def test_holder_that_never_unlocks(workers: Workers, key: str) -> None:
    """A process that never unlocks is replaced when its lease is over, not before."""
    holder = workers.start("hold", key=key, lease=1, renew=False)
    event = holder.expect("held")
    with takes(at_most=1 + SLACK):
        lease = distributed_lock(key).acquire(timeout=7)
    assert time.monotonic() - event["before"] >= 1
    assert lease.fencing_token > event["token"]
    holder.tell("release")
    assert holder.expect("released")["result"] is False
    holder.until_done()
    assert lease.held
    assert lease.release() is True


def test_renewal_in_another_process(workers: Workers, key: str) -> None:
    """A process that works on keeps its key for several leases."""
    holder = workers.start("hold", key=key, lease=scaled(1.2))
    holder.expect("held")
    always(lambda: distributed_lock(key).locked(), during=scaled(2.8), what="held")
    holder.tell("release")
    assert holder.expect("released")["result"] is True
    holder.until_done()


def test_renewal_beside_busy_writers(workers: Workers, key: str) -> None:
    """A lease is renewed however busy others keep the database."""
    with distributed_lock(key, lease=scaled(1.8)) as lease:
        toilers = [{"key": f"{key}:{n}", "seconds": scaled(3)} for n in range(3)]
        busy = workers.start_all("toil", toilers)
        always(lambda: lease.held, during=scaled(3), what="held")
        for worker in busy:
            worker.until_done()


def test_killed_holder(workers: Workers, key: str) -> None:
    """After kill -9 the next waiter has the key after the lease, not before."""
    length = scaled(1)
    holder = workers.start("hold", key=key, lease=length)
    holder.expect("held")
    first_end = stored(key).expires_at
    eventually(
        lambda: stored(key).expires_at > first_end, within=DEADLINE, what="a renewal"
    )
    holder.kill()
    with takes(at_most=length + SLACK):
        end = stored(key).expires_at
        lease = distributed_lock(key).acquire(timeout=DEADLINE)
    assert stored(key).acquired_at >= end
    lease.release()


def test_killed_waiter(workers: Workers, key: str) -> None:
    """A process killed while it waits gets nothing and leaves nothing."""
    with distributed_lock(key).acquire(timeout=0):
        waiter = workers.start("hold", key=key, timeout=DEADLINE, announced=True)
        waiter.expect("asks")
        holder = stored(key).owner
        always(lambda: stored(key).owner == holder, during=0.5)
        assert waiter.alive
        waiter.kill()
    always(lambda: not distributed_lock(key).locked(), during=0.5, what="free")
    distributed_lock(key).acquire(timeout=0).release()


def test_stopped_holder_is_refused_at_the_guard(workers: Workers, key: str) -> None:
    """A process stopped past its lease, and replaced, can't commit its old reading."""
    account = AccountFactory()
    holder = workers.start("add_under_guard", key=key, account=account.pk, lease=0.5)
    token = holder.expect("read")["token"]
    holder.stop()
    with distributed_lock(key).acquire(timeout=DEADLINE) as lease:
        assert lease.fencing_token > token
        Account.objects.filter(pk=account.pk).update(balance=100)
    holder.resume()
    holder.tell("write")
    lost = holder.expect("lost")
    assert (lost["token"], lost["reason"] is not None) == (token, True)
    assert holder.expect("released")["result"] is False
    holder.until_done()
    account.refresh_from_db()
    assert account.balance == 100


@pytest.mark.usefixtures("two_writers")
def test_stopped_holder_in_its_transaction(workers: Workers, key: str) -> None:
    """Stopped inside atomic=True, replaced and resumed, it is rolled back."""
    account, result = AccountFactory.create_batch(2)
    lease_time = 0.6
    holder = workers.start(
        "add_in_atomic_block",
        key=key,
        account=account.pk,
        result=result.pk,
        lease=lease_time,
    )
    token = holder.expect("read")["token"]
    holder.stop()
    stopped_at = time.monotonic()
    with distributed_lock(key).acquire(timeout=DEADLINE) as lease:
        assert lease.fencing_token > token
        Account.objects.filter(pk=account.pk).update(balance=100)
    eventually(lambda: time.monotonic() > stopped_at + 2 * lease_time)
    holder.resume()
    holder.tell("write")
    lost = holder.expect("lost")
    assert lost["token"] == token
    holder.until_done()
    result.refresh_from_db()
    assert result.balance == 0


def test_stopped_holder_that_nobody_replaced(workers: Workers, key: str) -> None:
    """Stopped past its lease and replaced by nobody, it commits after all."""
    account = AccountFactory()
    holder = workers.start("add_under_guard", key=key, account=account.pk, lease=0.5)
    holder.expect("read")
    holder.stop()
    eventually(
        DistributedLock.objects.expired().filter(pk=key).exists, what="the lease's end"
    )
    holder.resume()
    holder.tell("write")
    holder.expect("committed")
    holder.until_done()
    account.refresh_from_db()
    assert account.balance == 1


def test_eight_processes_race_for_a_new_key(workers: Workers, key: str) -> None:
    """Eight processes try a key without a row at once: one winner, no error."""
    racers = workers.start_all("race", [{"key": key}] * 8)
    for racer in racers:
        racer.expect("ready", within=2 * DEADLINE)
    for racer in racers:
        racer.tell("go")
    tokens = [racer.expect("tried")["token"] for racer in racers]
    finish(*racers)
    assert len([token for token in tokens if token is not None]) == 1, tokens
    assert not distributed_lock(key).locked()


def test_many_new_keys_are_raced_for(workers: Workers, key: str) -> None:
    """Four processes race for one new key after another: one winner each, no error."""
    for number in range(10):
        racers = workers.start_all("race", [{"key": f"{key}:{number}"}] * 4)
        for word, answer in (("go", "ready"), ("release", "tried")):
            events = [racer.expect(answer, within=2 * DEADLINE) for racer in racers]
            for racer in racers:
                racer.tell(word)
        for racer in racers:
            racer.until_done()
        workers.close()
        assert len([event for event in events if event["token"] is not None]) == 1, (
            events
        )


def test_grants_never_overlap(workers: Workers, key: str) -> None:
    """Processes that count by reading and writing lose nothing under the lock."""
    account, rounds, processes = AccountFactory(), 25, 4
    arguments = {
        "key": key,
        "account": account.pk,
        "rounds": rounds,
        "timeout": DEADLINE,
    }
    counters = workers.start_all("count", [arguments] * processes)
    for counter in counters:
        counter.expect("ready", within=2 * DEADLINE)
    for counter in counters:
        counter.tell("go")
    grants: list[Event] = []
    for counter in counters:
        grants += counter.until_done(within=2 * DEADLINE)
    account.refresh_from_db()
    assert account.balance == rounds * processes == len(grants)
    grants.sort(key=lambda grant: grant["start"])
    tokens = [grant["token"] for grant in grants]
    assert tokens == sorted(set(tokens))
    for earlier, later in pairwise(grants):
        assert earlier["end"] <= later["start"], (earlier, later)


@pytest.mark.usefixtures("two_writers")
def test_release_after_the_commit(workers: Workers, key: str) -> None:
    """Processes that count inside transactions see each other's commits.

    The commit is slow, so that a lock freed before it is caught at that.
    """
    account = AccountFactory()
    arguments = {"key": key, "account": account.pk, "timeout": DEADLINE}
    holder = workers.start("add_in_atomic_block", **arguments, commit_takes=0.3)
    holder.expect("read")
    second = workers.start("add_in_atomic_block", **arguments)
    eventually(
        lambda: DistributedLock.objects.waiters(key).number == 1, what="the wait"
    )
    holder.tell("write")
    holder.expect("committed")
    assert second.expect("read")["balance"] == 1
    second.tell("write")
    second.expect("committed")
    for worker in (holder, second):
        worker.until_done()
    account.refresh_from_db()
    assert account.balance == 2
    assert connection.get_autocommit()
