"""Several keys at once: all of them or none."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from django.db import OperationalError, connection, connections, transaction
from django.test.utils import CaptureQueriesContext

from dblocks import (
    InvalidKey,
    Lease,
    LeaseLost,
    Leases,
    Lock,
    LockError,
    LockTimeout,
    clock,
    current_lease,
    distributed_lock,
    signals,
    transaction_lock,
)
from dblocks.conf import backends
from dblocks.holding.sets import give_back
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere, move_clock
from dblocks.waiting.queue import queues
from dblocks.waiting.together import _Together
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread, fitting
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes
from tests.test_ownership import run

Together = Callable[..., Lock[Any]]


@pytest.fixture
def names(key: str) -> list[str]:
    """Three keys, not in their order."""
    return [f"{key}:{number}" for number in (3, 1, 2)]


@pytest.fixture
def together(backend: str, names: list[str]) -> Together:
    """Make locks of the three keys, or of others."""

    def make(*keys: Any, **options: Any) -> Lock[Any]:
        fit = fitting(backend, options)
        return distributed_lock(*(keys or names), backend=backend, **fit)

    return make


@pytest.fixture
def free(backend: str, other: OtherThread) -> Callable[..., bool]:
    """Ask whether somebody else can have every one of some keys."""

    def take(*keys: str) -> bool:
        for key in keys:
            lease = distributed_lock(key, backend=backend).try_acquire()
            if lease is None:
                return False
            lease.release()
        return True

    return lambda *keys: bool(other.do(take, *keys))


def test_in_one_order(together: Together, names: list[str]) -> None:
    """The leases come by key, in an order of their own; each can be found."""
    for _ in range(2):
        with together() as leases:
            assert isinstance(leases, Leases)
            assert list(leases) == sorted(names)
            assert leases.held
            assert current_lease() is leases
            assert current_lease(names[0]) is leases[names[0]]
            assert len({lease.owner for lease in leases.values()}) == 1
            assert repr(leases) == f"<Leases {', '.join(map(repr, leases))} held>"
            assert leases == dict(leases) != {}
            assert leases in {leases}
        assert not leases.held
        assert leases.lost_reason is None
        assert repr(leases).endswith(" released>")


def test_equal_keys_count_once(together: Together, key: str) -> None:
    """The lock says what was given; of a lock that has one key, which."""
    lock = together(key, key)
    assert (lock.keys, lock.key) == ((key, key), None)
    with lock as leases:
        assert list(leases) == [key]
        assert leases[key].held
    assert together(key).key == key


@pytest.mark.needs("has_cooling")
@pytest.mark.parametrize("known", [True, False], ids=["rows", "no rows"])
def test_all_or_none(
    together: Together,
    names: list[str],
    free: Callable[..., bool],
    backend: str,
    known: bool,
) -> None:
    """With one key taken none is had; the error tells of that one."""
    if known:
        together().acquire().release()
    with hold_elsewhere(names[2], backend=backend, note="the import"):
        assert together(hold_at_least=60).try_acquire() is None
        with takes(0.2, 0.2 + SLACK), pytest.raises(LockTimeout) as caught:
            together(hold_at_least=60).acquire(timeout=0.2)
        assert (caught.value.key, caught.value.note) == (names[2], "the import")
        assert "held elsewhere" in caught.value.holder
        assert 20 < caught.value.retry_after <= 60
        # Nor do they cool: nobody has used them.
        assert free(names[0], names[1])
    assert free(*names)


def test_one_timeout_for_all(
    together: Together, names: list[str], backend: str, other: OtherThread
) -> None:
    """The second key isn't waited for anew."""
    first, second = (hold_elsewhere(name, backend=backend) for name in names[1:])
    with second:
        first.__enter__()
        asked = other.start(together().acquire, timeout=scaled(3))
        eventually(
            lambda: queues.find(backends[backend], names[1]),
            what="the wait for the first key",
        )
        time.sleep(scaled(1.5))
        first.__exit__(None, None, None)
        # Waited for anew, it would take 3 s.
        with takes(0, scaled(1.5) + SLACK), pytest.raises(LockTimeout) as caught:
            asked.result(DEADLINE)
        assert caught.value.key == names[2]


def test_waits_for_the_last(
    together: Together, names: list[str], backend: str, other: OtherThread
) -> None:
    """What comes free while it waits is taken."""

    def take() -> list[bool]:
        with together(timeout=DEADLINE) as leases:
            return [lease.held for lease in leases.values()]

    with hold_elsewhere(*names[:2], backend=backend):
        asked = other.start(take)
        time.sleep(0.3)
        assert not asked.done()
    assert asked.result(DEADLINE) == [True] * 3


@pytest.mark.needs("has_own_leases", "has_movable_clock")
def test_lost_while_others_are_waited_for(
    together: Together, names: list[str], backend: str, other: OtherThread
) -> None:
    """A key that is lost meanwhile is taken again before the block begins."""
    last = max(names)

    def take() -> list[bool]:
        with together(timeout=61 + DEADLINE, lease=60, renew=False) as leases:
            return [lease.held for lease in leases.values()]

    with hold_elsewhere(last, lease=600, backend=backend):
        asked = other.start(take)
        eventually(
            lambda: queues.find(backends[backend], last),
            what="the wait for the last key",
        )
        move_clock(61, backend=backend)
    assert asked.result(DEADLINE) == [True] * 3


@pytest.mark.needs("has_own_leases")
def test_verbs(together: Together, names: list[str]) -> None:
    """What is done to the leases is done to each."""
    leases = together(lease=5, renew=False).acquire()
    leases.check()
    before = {name: leases[name].remaining() for name in names}
    assert leases.remaining() <= min(before.values())
    leases.renew(60)
    assert all(lease.remaining() > 50 for lease in leases.values())
    leases[names[0]].renew(90)
    assert 50 < leases.remaining() < 60
    assert leases.release() is True
    assert leases.release() is False
    with pytest.raises(LeaseLost):
        leases.check()
    assert not hasattr(leases, "fencing_token")


def test_one_is_released_by_itself(
    together: Together, names: list[str], free: Callable[..., bool]
) -> None:
    """A lease can be given back alone; the set is held no longer, the others are."""
    with together() as leases:
        assert leases[names[0]].release() is True
        assert not leases.held
        assert free(names[0])
        assert not free(names[1])
        with pytest.raises(LeaseLost) as caught:
            leases.check()
        assert (caught.value.key, caught.value.reason) == (names[0], "released")
    assert free(*names)


def test_one_is_lost(
    together: Together, names: list[str], backend: str, free: Callable[..., bool]
) -> None:
    """The others stay held until released; the loss is told once, with its lease."""
    told: list[Lease] = []

    def lose(leases: Leases) -> None:
        leases.on_lost(told.append)
        assert backends[backend].force_release(names[1])
        with pytest.raises(LeaseLost) as caught:
            leases.renew()
        assert caught.value.key == names[1]
        assert (leases.held, leases.lost_reason) == (False, "forced")
        eventually(lambda: told, what="the callback")
        assert told == [leases[names[1]]]
        assert leases[names[0]].held
        assert not free(names[0])

    with pytest.raises(LeaseLost) as caught, together() as leases:
        lose(leases)
    assert caught.value.key == names[1]
    assert free(*names)
    assert len(told) == 1


@pytest.mark.needs("has_own_leases")
@pytest.mark.parametrize("undone", [True, False], ids=["undone", "not undone"])
def test_one_is_lost_during_the_wait(
    together: Together,
    lock: Callable[..., Lock[Any]],
    names: list[str],
    other: OtherThread,
    backend: str,
    undone: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is still the caller's is extended, or granted anew: it's nobody else's."""
    first, *_, last = sorted(names)
    length = scaled(3)
    together().acquire().release()
    kept = other.do(lock(last).acquire)
    engine: Any = backends[backend]
    late: list[Any] = []
    undo_all = engine.undo_all

    def fail(grants: Any) -> None:
        late.append(partial(undo_all, grants))
        monkeypatch.undo()
        raise engine.errors[0]("read timed out")

    if not undone:
        monkeypatch.setattr(engine, "undo_all", fail)
    # Between the local deadline of the first and the end of its row.
    timer = threading.Timer(0.93 * length, other.do, [kept.release])
    timer.start()
    leases = together(lease=length, renew=False).acquire(timeout=DEADLINE)
    timer.join()
    for undo in late:
        # The server was slow.
        undo()
    assert leases.remaining() > length / 2
    time.sleep(length / 4)
    assert not other.do(lock(first).try_acquire)
    assert not other.do(lock(last).try_acquire)
    assert leases.held
    assert leases.release() is True


@pytest.mark.needs("has_own_leases")
@pytest.mark.parametrize(
    ("overdue", "limit", "freed"),
    [(1, 60, True), (20, 60, False), (5, -2, False)],
    ids=["in the margin", "over", "at its limit"],
)
def test_overdue_part_of_a_set(
    together: Together,
    names: list[str],
    free: Callable[..., bool],
    overdue: float,
    limit: float,
    freed: bool,
) -> None:
    """Its row, which would be in its way, is freed; not later: it may be another's."""
    leases = together(lease=120).acquire()
    holds = [lease._hold for lease in leases.values()]
    holds[0].deadline = clock.monotonic() - overdue
    holds[0].limit = clock.monotonic() + limit
    assert give_back(holds)
    first, *others = sorted(names)
    assert free(*others)
    assert free(first) is freed
    assert leases.release() is False
    backends[holds[0].backend.alias].force_release(first)


@pytest.mark.needs("has_table")
def test_one_is_lost_when_the_time_is_over(
    together: Together,
    names: list[str],
    free: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was granted too late is given back, and the time-out is told once."""
    together().acquire().release()
    take = _Together._take

    def take_slowly(self: _Together) -> Any:
        holds: Any = take(self)
        holds[0].deadline = clock.monotonic() - 1
        return holds

    def hear(signal: Any, sender: Any, key: str, **said: Any) -> None:
        told.append(key)

    told: list[str] = []
    monkeypatch.setattr(_Together, "_take", take_slowly)
    signals.lock_timed_out.connect(hear)
    try:
        with pytest.raises(LockTimeout):
            together(lease=120, timeout=0).acquire()
    finally:
        signals.lock_timed_out.disconnect(hear)
    assert told == sorted(names)[:1]
    assert free(*names)


def test_one_is_lost_in_a_transaction(
    committed: None, together: Together, names: list[str], backend: str
) -> None:
    """A release that waits for the transaction's end says what it says at once."""
    leases = together().acquire()
    assert backends[backend].force_release(names[1])
    with pytest.raises(LeaseLost):
        leases.renew()
    with transaction.atomic():
        assert leases.release() is False
    assert leases.release() is False


@pytest.mark.needs("has_table")
@pytest.mark.usefixtures("committed", "two_writers")
@pytest.mark.parametrize("size", [2, 6, 20])
def test_release_beside_a_row_that_is_locked(
    together: Together, key: str, size: int, other: OtherThread
) -> None:
    """A transaction that has a stranger's row locked doesn't hold up a release."""
    stranger = together(f"{key}:stranger").acquire()
    leases = together(*(f"{key}:{number}" for number in range(size))).acquire()
    with other.in_transaction(stranger.guard):
        assert leases.release() is True
    assert stranger.release() is True


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("owner", [None, "me"])
@pytest.mark.parametrize("size", [2, 10, 100, 300])
def test_statements(together: Together, key: str, size: int, owner: str | None) -> None:
    """Free keys cost what one costs, however many they are."""
    names = [f"{key}:{number}" for number in range(size)]
    lock = together(*names, owner=owner)
    lock.acquire().release()
    for _ in range(2):
        with CaptureQueriesContext(connection) as taking:
            leases = lock.acquire()
        with transaction.atomic(), CaptureQueriesContext(connection) as guarding:
            leases.guard()
        with CaptureQueriesContext(connection) as renewing:
            leases.renew()
        with CaptureQueriesContext(connection) as releasing:
            assert leases.release() is True
        assert len(taking) <= 2, taking.captured_queries
        assert len(guarding) == 1, guarding.captured_queries
        assert len(renewing) == 1 + size // 250, renewing.captured_queries
        assert len(releasing) == 1, releasing.captured_queries


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("known", [0, 1], ids=["no rows", "some rows"])
def test_new_set_is_granted_as_a_whole(
    together: Together, names: list[str], other: OtherThread, known: int
) -> None:
    """Others never see a part of it taken, which it might have to give back."""
    if connection.vendor == "mysql":
        pytest.skip("no statement grants several keys, all or none")
    for name in names[:known]:
        together(name).acquire().release()
    seen: list[int] = []

    def look(execute: Any, *arguments: Any) -> Any:
        seen.append(other.do(DistributedLock.objects.held().count))
        return execute(*arguments)

    with connection.execute_wrapper(look):
        leases = together().acquire(timeout=0)
    assert set(seen) <= {0, len(names)}, seen
    assert leases.release() is True


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("size", [2, 10, 1000])
def test_statements_of_a_new_set(together: Together, key: str, size: int) -> None:
    """All rows that are missing are made at once, however many they are."""
    if connection.vendor == "mysql":
        pytest.skip("no statement grants several keys, all or none")
    lock = together(*(f"{key}:{number}" for number in range(size)))
    with CaptureQueriesContext(connection) as taking:
        leases = lock.acquire()
    assert len(leases) == size
    made = [query for query in taking if "INSERT INTO" in query["sql"]]
    assert len(made) == 1
    assert len(taking) <= 5, taking.captured_queries
    assert leases.release() is True


@pytest.mark.needs("has_table")
def test_tokens_of_a_new_set(together: Together, key: str) -> None:
    """They rise above all that were pruned, in each of its rows."""
    before: list[int] = []
    for _ in range(3):
        with together() as leases:
            tokens = [lease.fencing_token or 0 for lease in leases.values()]
        assert min(tokens) > max(before, default=0)
        before = tokens
        rows = DistributedLock.objects.filter(key__startswith=key)
        assert rows.prune(older_than=0) == len(tokens)


def pay(balance: int, account: Any, lock: Any, lost: str | None = None) -> None:
    """Write a balance under a lock that commits only while it is held."""
    with lock:
        account.balance = balance
        account.save()
        if lost is not None:
            DistributedLock.objects.force_release(lost)


@pytest.mark.needs("has_guard")
def test_guard(together: Together, names: list[str]) -> None:
    """The guard pins all rows; one that is lost is enough to roll back."""
    account = AccountFactory()
    leases = together().acquire()

    def guarded(balance: int) -> None:
        with transaction.atomic():
            pay(balance, account, transaction.atomic())
            leases.guard()

    guarded(1)
    DistributedLock.objects.force_release(names[2])
    with pytest.raises(LeaseLost) as caught:
        guarded(2)
    assert (caught.value.key, caught.value.reason) == (names[2], "forced")
    account.refresh_from_db()
    assert account.balance == 1
    assert leases[names[0]].held
    assert leases.release() is False


@pytest.mark.needs("has_guard")
def test_atomic(together: Together, names: list[str]) -> None:
    """A transaction commits only while all are held."""
    account = AccountFactory()
    pay(1, account, together(atomic=True))
    with pytest.raises(LeaseLost):
        pay(2, account, together(atomic=True), lost=names[0])
    account.refresh_from_db()
    assert account.balance == 1


def test_templates_and_callables(backend: str, key: str) -> None:
    """A decorated call may have several templates, and callables that make several."""
    seen: list[list[str]] = []

    @distributed_lock(f"{key}:{{source}}", f"{key}:{{target}}", backend=backend)
    def transfer(source: int, target: int) -> None:
        found = current_lease()
        assert isinstance(found, Leases)
        seen.append(list(found))

    @distributed_lock(lambda cart: [f"{key}:{sku}" for sku in cart], backend=backend)
    def reserve(cart: list[int]) -> None:
        found = current_lease()
        assert isinstance(found, Leases)
        seen.append(list(found))

    @distributed_lock(
        f"{key}:shop", lambda cart: {f"{key}:{sku}" for sku in cart}, backend=backend
    )
    async def areserve(cart: list[int]) -> None:
        found = current_lease()
        assert isinstance(found, Leases)
        seen.append(list(found))

    transfer(2, 1)
    transfer(3, target=3)
    reserve([7, 5, 7])
    reserve([4])
    run(areserve([8]))
    assert seen == [
        [f"{key}:1", f"{key}:2"],
        [f"{key}:3"],
        [f"{key}:5", f"{key}:7"],
        [f"{key}:4"],
        [f"{key}:8", f"{key}:shop"],
    ]


@pytest.mark.parametrize("made", [[], iter(()), [""], [5], 5, None, b"key"], ids=repr)
def test_callable_makes_no_keys(committed: None, made: Any) -> None:
    """What names no lock is refused before anything happens."""

    @distributed_lock(lambda: made)
    def work() -> None:
        raise AssertionError("ran")

    with CaptureQueriesContext(connection) as queries, pytest.raises(InvalidKey):
        work()
    assert len(queries) == 0


def test_bad_input(committed: None) -> None:
    """So is what the arguments say wrongly, with the value in the message."""
    with pytest.raises(InvalidKey, match="empty"):
        distributed_lock()
    with pytest.raises(InvalidKey, match="1,000, not 1,001"):
        distributed_lock(*map(str, range(1001)))
    assert len(distributed_lock(*["a"] * 1001).keys) == 1001
    with pytest.raises(InvalidKey, match=r"U\+001F"):
        distributed_lock("a", "b\x1f2")
    for keys in (["a", "b"], ["a", "a"]):
        with pytest.raises(ValueError, match="permits=2 needs one key, given as a str"):
            distributed_lock(*keys, permits=2)
    with pytest.raises(InvalidKey):
        transaction_lock()
    for keys in (["a", "b"], ["a"]):
        several = distributed_lock(lambda keys: keys, permits=2)
        with pytest.raises(ValueError, match="permits=2 needs one key, given as a str"):
            several(lambda keys: None)(keys)


@pytest.fixture
def lasting(backend: str, settings: Any) -> Iterator[str]:
    """Return the alias of an engine whose leases outlast a busy moment.

    Where all have one length, that of the tests is too short for a thousand keys.
    """
    if backends[backend].has_own_leases:
        yield backend
        return
    config = {**settings.DBLOCKS[backend], "LEASE": 60.0}
    settings.DBLOCKS = {**settings.DBLOCKS, "lasting": config}
    yield "lasting"
    from dblocks.backends.zookeeper import sessions

    sessions.close(backends["lasting"]._address)  # type: ignore[attr-defined]


def test_a_thousand(lasting: str, key: str) -> None:
    """As many as may be given."""
    names = [f"{key}:{number}" for number in range(1000)]
    lock: Lock[Any] = distributed_lock(*names, lease=60, backend=lasting)
    for _ in range(2):
        with lock as leases:
            assert len(leases) == 1000
            leases.check()


def test_reentering(
    together: Together, names: list[str], free: Callable[..., bool]
) -> None:
    """An owner takes sets that share keys, and single ones of them."""
    with together(*names[:2]) as outer:
        with together() as inner, together(names[0]) as single:
            tokens = {name: lease.fencing_token for name, lease in outer.items()}
            assert single.fencing_token == inner[names[0]].fencing_token
            assert (
                tokens.items()
                <= {name: lease.fencing_token for name, lease in inner.items()}.items()
            )
        assert outer.held
        assert free(names[2])
        assert not free(names[0])
    assert free(*names)


def test_explicit_owner(
    together: Together,
    names: list[str],
    other: OtherThread,
    free: Callable[..., bool],
) -> None:
    """Whoever presents the same id re-enters, in whole or in part."""
    mine = together(owner="me").acquire()
    theirs = other.do(together(*names[1:], owner="me").acquire, timeout=0)
    assert mine.release() is True
    assert free(names[0])
    assert not free(names[1])
    assert theirs.held
    assert other.do(theirs.release) is True
    assert free(*names)
    for _ in range(2):
        with together(owner="me") as leases:
            assert leases.owner == "me"


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("had", [0, 1, 2])
def test_explicit_owner_in_another_process(
    together: Together, names: list[str], had: int
) -> None:
    """What it has there counts one more hold, what it gets here one."""
    locks = DistributedLock.objects
    together().acquire().release()
    row = locks.acquire(names[had], owner="me", lease=30)
    assert row is not None
    with together(owner="me") as leases:
        counts = dict(locks.values_list("key", "hold_count"))
        assert counts == {name: 2 if name == names[had] else 1 for name in names}
        assert leases[names[had]].fencing_token == row.version
    assert locks.held().get().key == names[had]
    assert locks.release(names[had], owner="me", version=row.version) is True
    assert not locks.held().exists()


@pytest.mark.needs("has_cooling")
def test_entered_again_while_others_are_waited_for(
    together: Together, names: list[str], backend: str, free: Callable[..., bool]
) -> None:
    """What a set had entered again is given back as what it was; it cools."""
    first, second, last = sorted(names)
    outer = together(first, hold_at_least=60).acquire()

    def release() -> None:
        outer.release()
        connections.close_all()

    releasing = threading.Timer(0.3, release)
    with hold_elsewhere(last, backend=backend):
        releasing.start()
        with pytest.raises(LockTimeout):
            together(timeout=0.8).acquire()
        releasing.join()
        assert free(second)
        assert not free(first)


@pytest.mark.needs("has_shared_owners", "has_own_leases")
@pytest.mark.parametrize("what", ["another set", "one key"])
def test_co_owner_comes_while_others_are_waited_for(
    together: Together, names: list[str], backend: str, other: OtherThread, what: str
) -> None:
    """What a set has is renewed while it waits for the rest, whoever else enters it."""
    first, second, last = sorted(names)
    options = {"owner": "me", "lease": scaled(1.2)}
    with hold_elsewhere(second, last, backend=backend) as others:
        waiting = other.start(
            lambda: together(first, second, timeout=DEADLINE, **options).acquire()
        )
        seen = together(first)
        eventually(seen.locked, what="the first key")
        if what == "another set":
            assert together(first, last, timeout=0, **options).try_acquire() is None
        else:
            lease = together(first, timeout=0, **options).acquire()
            assert lease.release() is True
        always(seen.locked, during=scaled(1.8), what="the first key")
        others[second].release()
        leases = waiting.result(DEADLINE)
    try:
        always(lambda: leases.held, during=scaled(1.8), what="held")
    finally:
        assert leases.release() is True


@pytest.mark.needs("has_shared_owners")
def test_set_of_two_owners_ids(
    together: Together,
    names: list[str],
    free: Callable[..., bool],
    backend: str,
    workers: Workers,
) -> None:
    """A set may share one key by its owner's id and another with a co-owner."""
    first, second = sorted(names)[:2]
    outer = together(first).acquire()
    both = together(first, second, owner=outer.owner).acquire()
    co_owner = {"key": second, "backend": backend, "owner": outer.owner}
    theirs = workers.start("hold", **co_owner)
    theirs.expect("held")
    assert outer.release() is True
    assert both.release() is True
    assert free(first)
    assert not free(second)
    theirs.tell("release")
    assert theirs.expect("released")["result"] is True
    theirs.until_done()
    assert free(second)


def test_loop_that_is_closed(
    together: Together, names: list[str], backend: str, free: Callable[..., bool]
) -> None:
    """A closed event loop takes a waiting set along: what it had lapses."""
    loop = asyncio.new_event_loop()
    with hold_elsewhere(max(names), backend=backend):
        lock = together(lease=scaled(1.2))
        waiting = loop.create_task(lock.aacquire(timeout=None))

        def has_the_first() -> bool:
            loop.run_until_complete(asyncio.sleep(0.05))
            return distributed_lock(min(names), backend=backend).locked()

        eventually(has_the_first, what="the first key taken")
        loop.close()
        eventually(lambda: free(min(names)), what="the end of the lease")
        waiting.get_coro().close()
        waiting._log_destroy_pending = False


@pytest.mark.needs("has_cooling")
def test_cooling(
    together: Together, names: list[str], free: Callable[..., bool]
) -> None:
    """What was held and is given back early cools."""
    with together(hold_at_least=2):
        pass
    assert not free(names[1])
    eventually(lambda: free(*names), what="the end of cooling")


def test_locked(together: Together, names: list[str], backend: str) -> None:
    """A set is locked when one of its keys is."""
    assert not together().locked()
    with hold_elsewhere(names[1], backend=backend):
        assert together().locked()
        assert run(together().alocked())
    assert not together().locked()


@pytest.mark.needs("has_table")
def test_locked_is_one_statement(together: Together, names: list[str]) -> None:
    """However many keys are asked about."""
    with together() as leases, CaptureQueriesContext(connection) as queries:
        assert together(*leases).locked()
    assert sum("SELECT" in query["sql"] for query in queries) == 1


def test_signals(together: Together, names: list[str]) -> None:
    """Each key has signals of its own."""
    said: list[tuple[str, str]] = []

    def acquired(key: str, **facts: Any) -> None:
        said.append(("acquired", key))

    def released(key: str, **facts: Any) -> None:
        said.append(("released", key))

    signals.lock_acquired.connect(acquired)
    signals.lock_released.connect(released)
    try:
        with together():
            pass
    finally:
        signals.lock_acquired.disconnect(acquired)
        signals.lock_released.disconnect(released)
    in_order = sorted(names)
    assert said == [("acquired", name) for name in in_order] + [
        ("released", name) for name in in_order
    ]


def test_async(together: Together, names: list[str], free: Callable[..., bool]) -> None:
    """All of it has async twins."""

    async def main() -> None:
        async with together() as leases:
            assert list(leases) == sorted(names)
            assert current_lease() is leases
            await leases.arenew()
            assert await together().alocked()
        assert not leases.held
        again = await together().atry_acquire()
        assert again is not None
        assert await again.arelease() is True
        assert await again.arelease() is False

    run(main())
    assert free(*names)


def test_cancelled(
    together: Together,
    names: list[str],
    backend: str,
    free: Callable[..., bool],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A task that is cancelled at any moment leaves nothing behind."""
    chance = random.Random(20240229)

    async def visit(timeout: float) -> None:
        with suppress(LockTimeout):
            async with together(timeout=timeout):
                await asyncio.sleep(0.001)

    async def cancel(timeout: float) -> None:
        task = asyncio.create_task(visit(timeout))
        await asyncio.sleep(chance.uniform(0, 0.03))
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def all_free() -> None:
        for _ in range(40):
            await cancel(DEADLINE)

    async def one_taken() -> None:
        # The earlier ones are held already, or being given back.
        async with hold_elsewhere(max(names), backend=backend):
            for timeout in (DEADLINE, 0, 0.01) * 10:
                await cancel(timeout)

    run(all_free())
    # What is cancelled may be given back in the background.
    eventually(lambda: free(*names), what="the keys")
    run(one_taken())
    eventually(lambda: free(*names), what="the keys")
    key = names[0].rpartition(":")[0]
    assert [line for line in caplog.messages if f"lost key='{key}" in line] == []


def test_opposite_orders(together: Together, key: str) -> None:
    """Threads that want overlapping sets in careless orders all get them."""
    names = [f"{key}:{number}" for number in range(5)]
    inside: dict[str, int] = dict.fromkeys(names, 0)
    errors: list[object] = []

    def work(seed: int) -> None:
        chance = random.Random(seed)
        try:
            for _ in range(8):
                wanted = chance.sample(names, chance.choice([1, 2, 3]))
                with together(*wanted, timeout=2 * DEADLINE):
                    for name in wanted:
                        inside[name] += 1
                        assert inside[name] == 1, name
                    time.sleep(0.001)
                    for name in wanted:
                        inside[name] -= 1
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=work, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * DEADLINE)
    assert errors == []


def test_opposite_orders_of_processes(backend: str, workers: Workers, key: str) -> None:
    """So do processes, and no two of them ever have the same key."""
    names = [f"{key}:{number}" for number in range(4)]
    options = {"keys": names, "rounds": 6, "backend": backend}
    tables = [{**options, "timeout": 2 * DEADLINE, "seed": seed} for seed in range(3)]
    takers = workers.start_all("take_sets", tables)
    for taker in takers:
        taker.expect("ready")
    for taker in takers:
        taker.tell("go")
    turns = [turn for taker in takers for turn in taker.until_done(3 * DEADLINE)]
    assert len(turns) == 18
    for name in names:
        inside = sorted((t["start"], t["end"]) for t in turns if name in t["keys"])
        assert all(end <= start for (_, end), (start, _) in pairwise(inside)), name


def test_hold_elsewhere(names: list[str], together: Together, backend: str) -> None:
    """The competitor of a test holds several as well."""
    with hold_elsewhere(*names, backend=backend) as leases:
        assert list(leases) == sorted(names)
        for name in names:
            assert together(name).try_acquire() is None
    with together(timeout=0):
        pass


# In the caller's transaction


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("size", [2, 3])
def test_rows(names: list[str], size: int, committed: None) -> None:
    """transaction_lock() locks all rows and yields them by key, in their order."""
    wanted = names[:size]
    for _ in range(2):
        with transaction_lock(*wanted, timeout=DEADLINE) as rows:
            assert list(rows) == sorted(wanted)
            assert all(row.key == name for name, row in rows.items())
            with pytest.raises(LockError):
                distributed_lock(wanted[0]).acquire(timeout=0)


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("nowait", [True, False])
def test_rows_of_which_one_is_leased(
    names: list[str], committed: None, nowait: bool, free: Callable[..., bool]
) -> None:
    """All or none; what isn't leased stays free for others."""
    how: dict[str, Any] = {"nowait": True} if nowait else {"timeout": 0.2}
    lock = transaction_lock(*names, **how)
    with hold_elsewhere(names[0]):
        with pytest.raises(LockTimeout) as caught, lock:
            raise AssertionError("entered")
        assert caught.value.key == names[0]
        assert free(*names[1:])
        with transaction_lock(*names, skip_locked=True) as rows:
            assert rows is None
    with lock as rows:
        assert len(rows) == 3


@pytest.fixture
def leased_in_between(
    names: list[str],
    threads: Callable[[], OtherThread],
    committed: None,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[list[Any]]:
    """Lease the first key between the look at the rows and their being locked."""
    from dblocks.backends.database import row_locks

    holder, select = threads(), row_locks._select
    leases: list[Any] = []

    def lease_then_select(*arguments: Any, **options: Any) -> Any:
        if leases:
            return select(*arguments, **options)
        leases.append(holder.do(distributed_lock(min(names)).acquire, timeout=0))
        try:
            return select(*arguments, **options)
        finally:
            # Not before: a release would come before the snapshot.
            leases.append(holder)

    monkeypatch.setattr(row_locks, "_select", lease_then_select)
    yield leases
    for lease in leases[:1]:
        holder.do(lease.release)


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("joined", [True, False], ids=["joined", "own transaction"])
def test_lease_in_between(
    names: list[str],
    leased_in_between: list[Any],
    threads: Callable[[], OtherThread],
    joined: bool,
    committed: None,
) -> None:
    """Who has a lease on one key can have the next: nobody waits in a circle."""
    if connection.vendor == "sqlite":
        pytest.skip("a transaction has the one writer's lock")
    waiting = threads()

    def lock_rows() -> None:
        outer = transaction.atomic() if joined else nullcontext()
        with outer, transaction_lock(*names, timeout=DEADLINE) as rows:
            assert len(rows) == 3

    done = waiting.start(lock_rows)
    eventually(lambda: len(leased_in_between) == 2, what="the lease")
    first, holder = leased_in_between
    has_snapshot = joined and os.environ["DATABASE_ISOLATION"] == "repeatable read"
    if has_snapshot and connection.vendor == "mysql":
        # The leased row is pinned: its holder can't renew it.
        with pytest.raises(LockTimeout):
            done.result(SLACK)
        return
    with takes(0, SLACK):
        holder.do(distributed_lock(max(names)).acquire, timeout=SLACK / 2).release()
    holder.do(first.release)
    # PostgreSQL's snapshot is older than the release.
    with pytest.raises(OperationalError) if has_snapshot else nullcontext():
        done.result(DEADLINE)


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("how", ["nowait", "skip_locked", "timeout"])
def test_rows_of_which_one_is_locked(
    names: list[str], threads: Callable[[], OtherThread], how: str, committed: None
) -> None:
    """In a transaction of its own, a refused set keeps no row locked."""
    if connection.vendor == "sqlite":
        pytest.skip("a transaction has the one writer's lock")
    options: dict[str, Any] = {how: 0.3 if how == "timeout" else True}
    holder, another = threads(), threads()
    # An insert may split InnoDB's page at a locked row, which locks the gap before it.
    with transaction_lock(*names):
        pass
    blocking = transaction_lock(max(names))
    holder.do(blocking.__enter__)
    try:
        with suppress(LockTimeout), transaction_lock(*names, **options) as rows:
            assert rows is None
            another.do(distributed_lock(min(names)).acquire, timeout=0).release()
        another.do(distributed_lock(names[1]).acquire, timeout=0).release()
    finally:
        holder.do(blocking.__exit__, None, None, None)


@pytest.mark.needs("has_table")
def test_rows_exclude_sets(
    names: list[str], together: Together, other: OtherThread, committed: None
) -> None:
    """Leases of several keys find the rows of a transaction taken."""
    with transaction_lock(*names[:2]):
        # On SQLite because of the one writer's lock.
        assert other.do(together().try_acquire) is None
    lease = other.do(together().try_acquire)
    assert other.do(lease.release) is True


@pytest.mark.needs("has_table")
def test_rows_by_decorator(key: str, committed: None) -> None:
    """A decorated call locks the rows of all its keys."""
    from dblocks.backends.database import transactions

    @transaction_lock(f"{key}:{{one}}", lambda one, two: [f"{key}:{two}"])
    def work(one: int, two: int) -> list[str]:
        # Those of another database's last transaction may still be remembered.
        names = [name for _, name in transactions._thread.row_locks]
        return sorted(name for name in names if name.startswith(key))

    assert work(2, 1) == [f"{key}:1", f"{key}:2"]
