"""A statement that was carried out although its reply never came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
from django.db import connection, transaction

from dblocks import Lease, distributed_lock, signals
from dblocks.backends.database import table
from dblocks.backends.values import Granted, Reading, Renewal, Request
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import move_clock
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE
from tests.test_failures import kill_session, lost_connection, own_session

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]

TABLE = DistributedLock._meta.db_table


@contextmanager
def first_reply_lost(meanwhile: Callable[[], object]) -> Iterator[list[str]]:
    """The next write of the lock table is carried out, and its reply is lost.

    Args:
        meanwhile: Called in between, before the loss is known.
    """
    carried_out: list[str] = []

    def lose(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if TABLE in sql and "UPDATE" in sql and not carried_out:
            carried_out.append(sql)
            meanwhile()
            with context["connection"].wrap_database_errors:
                raise lost_connection()
        return result

    with connection.execute_wrapper(lose):
        yield carried_out
    connection.close()


@pytest.fixture
def server() -> None:
    """Skip where no reply can be lost."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no server and no replies to lose")


@pytest.fixture
def losses() -> Iterator[list[str]]:
    """Collect the keys that ``lock_lost`` tells of."""
    keys: list[str] = []

    def hear(signal: Any, sender: Any, key: str, **said: Any) -> None:
        keys.append(key)

    signals.lock_lost.connect(hear)
    yield keys
    signals.lock_lost.disconnect(hear)


class Successor:
    """Takes the key as soon as it is free, and ends the connection of the releaser."""

    def __init__(self, key: str, other: OtherThread, owner: str | None, goes: bool):
        self._lock = distributed_lock(key, owner=owner)
        self._other = other
        self._goes = goes
        connection.ensure_connection()
        self._session = own_session()
        self.lease: Lease | None = None

    def __call__(self) -> None:
        self.lease = self._other.do(self._lock.acquire, timeout=DEADLINE)
        if self._goes:
            self._other.do(self.lease.release)
        self._other.do(kill_session, self._session)


@pytest.fixture
def successor(
    key: str, other: OtherThread, request: pytest.FixtureRequest, server: None
) -> Iterator[Successor]:
    """Return who takes the key before the loss of the reply is known."""
    successor = Successor(key, other, *request.param)
    yield successor
    if successor.lease is not None:
        other.do(successor.lease.release)


SUCCESSORS = pytest.mark.parametrize(
    "successor",
    [
        (None, False),
        (None, True),
        ("somebody else", False),
    ],
    indirect=True,
    ids=["held", "held and released", "held by an explicit owner"],
)


@SUCCESSORS
def test_released_and_taken_over(
    key: str, successor: Successor, losses: list[str]
) -> None:
    """A release that was carried out is one, though somebody else came meanwhile."""
    lease = distributed_lock(key).acquire(timeout=0)
    told: list[Lease] = []
    lease.on_lost(told.append)
    with first_reply_lost(successor) as carried_out:
        assert lease.release() is True
    assert carried_out
    assert lease.lost_reason is None
    assert (told, losses) == ([], [])
    assert lease.release() is False


@SUCCESSORS
def test_left_and_taken_over(key: str, successor: Successor, losses: list[str]) -> None:
    """Leaving the block raises no LeaseLost: it was held until it was released."""
    block = distributed_lock(key)
    lease = block.__enter__()
    error = None
    with first_reply_lost(successor) as carried_out:
        try:
            block.__exit__(None, None, None)
        except Exception as raised:
            error = raised
    assert carried_out
    assert error is None
    assert lease.lost_reason is None
    assert losses == []


@SUCCESSORS
def test_successor_keeps_the_key(key: str, successor: Successor) -> None:
    """The repeated release takes nothing away from who has the key by then."""
    lease = distributed_lock(key).acquire(timeout=0)
    with first_reply_lost(successor):
        lease.release()
    theirs = successor.lease
    assert theirs is not None
    held = DistributedLock.objects.held().filter(pk=key)
    assert [row.version for row in held] == [theirs.fencing_token] * theirs.held


# Several keys at once


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("number", [2, 3])
def test_set_whose_grant_was_lost(key: str, number: int, other: OtherThread) -> None:
    """A set that was granted without a word is found by the retry, whole."""
    keys = [f"{key}:{each}" for each in range(number)]
    with distributed_lock(*keys):
        pass
    with first_reply_lost(lambda: None) as carried_out:
        leases = distributed_lock(*keys).acquire(timeout=0)
    assert carried_out
    assert leases.held
    assert other.do(distributed_lock(keys[-1]).try_acquire) is None
    leases.check()
    assert leases.release() is True
    assert not distributed_lock(*keys).locked()


@pytest.mark.usefixtures("server")
def test_set_whose_release_was_lost(key: str, losses: list[str]) -> None:
    """A set that was released without a word was held until then."""
    keys = [f"{key}:{each}" for each in range(2)]
    leases = distributed_lock(*keys).acquire(timeout=0)
    with first_reply_lost(lambda: None) as carried_out:
        assert leases.release() is True
    assert carried_out
    assert losses == []
    assert not distributed_lock(*keys).locked()


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("size", [1, 2])
def test_reply_that_is_made_good_after_the_leases_end(key: str, size: int) -> None:
    """A grant that is over by then is no grant: the key is asked for again."""
    lock = distributed_lock(*(f"{key}:{n}" for n in range(size)), lease=0.5)
    lock.acquire().release()
    with first_reply_lost(lambda: time.sleep(0.7)) as carried_out:
        leases = lock.acquire(timeout=DEADLINE)
    assert carried_out
    assert leases.held
    assert leases.release() is True


@pytest.mark.usefixtures("two_writers")
def test_lost_grant_by_another_clock(key: str, other: OtherThread) -> None:
    """The server that is asked afterwards may be ahead, as after a failover."""
    lock = distributed_lock(key, lease=30)
    lock.acquire().release()
    ahead = partial(other.do, partial(move_clock, 1))
    with first_reply_lost(ahead) as carried_out:
        lease = lock.acquire(timeout=DEADLINE)
    assert carried_out
    assert lease.held
    assert lease.release() is True


@pytest.mark.usefixtures("server")
def test_lost_grant_with_a_limit(key: str) -> None:
    """The time until the loss is known counts once."""
    lock = distributed_lock(key, lease=4, max_hold=4)
    lock.acquire().release()
    with first_reply_lost(lambda: time.sleep(2.2)) as carried_out:
        lease = lock.acquire(timeout=DEADLINE)
    assert carried_out
    assert lease.held
    assert lease.remaining() > 0.5
    assert lease.release() is True


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("seconds", [1.5, 2.5])
def test_late_grant_with_a_limit(
    key: str, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """It counts from the grant, not from when a server that was away was asked."""
    take = table.take

    def away(*arguments: Any) -> Any:
        monkeypatch.undo()
        time.sleep(seconds)
        return take(*arguments)

    monkeypatch.setattr(table, "take", away)
    lease = distributed_lock(key, max_hold=2).acquire(timeout=DEADLINE)
    assert 1 < lease.remaining() < 2
    assert lease.release() is True


def test_grant_of_an_earlier_request(key: str) -> None:
    """A repeated request finds its own grant; a later one of that owner's doesn't."""
    engine = backends["default"]
    first = Request(key, "somebody", lease=20.0)
    granted = engine.try_acquire(first, 0.0)
    assert isinstance(granted, Granted)
    time.sleep(1.2)
    later = Request(key, "somebody", lease=20.0)
    assert isinstance(engine.try_acquire(later, 0.0), Reading)
    again = engine.try_acquire(first, 0.0)
    assert isinstance(again, Granted)
    assert again.grant == granted.grant
    assert engine.release(granted.grant, count=None, deadline=0.0)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("late", [1, 2])
def test_lost_grant_that_is_seen_late(
    key: str, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    """If a look comes late, the next one finds the grant: nobody keeps the key."""
    lock = distributed_lock(key, lease=4)
    lock.acquire().release()
    original = table.read
    looks: list[str] = []

    def read(*arguments: Any) -> Any:
        looks.append(key)
        if len(looks) == late:
            time.sleep(0.5)
        return original(*arguments)

    monkeypatch.setattr(table, "read", read)
    with first_reply_lost(lambda: None) as carried_out:
        lease = lock.acquire(timeout=0)
    assert carried_out
    assert len(looks) >= late
    assert lease.release() is True


@pytest.mark.usefixtures("two_writers")
def test_look_that_is_slow(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row that a renewal passed over doesn't count as extended, however late."""
    locks = [distributed_lock(f"{key}:{n}", lease=2, renew=False) for n in range(2)]
    leases = [lock.acquire(timeout=0) for lock in locks]
    grants = [lease._hold.grant for lease in leases]
    look = table.read_all

    def look_slowly(*arguments: Any) -> Any:
        seen = look(*arguments)
        time.sleep(1.5)
        return seen

    def pin() -> None:
        DistributedLock.objects.select_for_update().get(pk=grants[0].key)

    time.sleep(1)
    with other.in_transaction(pin):
        monkeypatch.setattr(table, "read_all", look_slowly)
        outcome = backends["default"].renew([Renewal(grant, 2.0) for grant in grants])
    assert grants[0] not in outcome.extended
    for lease in leases:
        lease.release()


@pytest.mark.usefixtures("two_writers")
def test_lost_grant_whose_row_is_locked(key: str, other: OtherThread) -> None:
    """A grant whose reply was lost is found again, although its row is locked."""
    distributed_lock(key).acquire().release()
    has_it, leave = threading.Event(), threading.Event()

    def pin() -> None:
        with transaction.atomic():
            DistributedLock.objects.select_for_update().get(pk=key)
            has_it.set()
            leave.wait(0.4)

    def meanwhile() -> None:
        pinning.append(other.start(pin))
        assert has_it.wait(DEADLINE)

    pinning: list[Any] = []
    with first_reply_lost(meanwhile) as carried_out:
        lease = distributed_lock(key).acquire(timeout=DEADLINE)
    assert carried_out
    pinning[0].result(timeout=DEADLINE)
    assert lease.held
    assert lease.release() is True
