"""How often an explicit owner has a key: each hold is counted, and subtracted, once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from dblocks import Lease, Lock
from dblocks.backends.locmem import LocMemBackend
from dblocks.conf import backends
from dblocks.holding.holds import Hold
from dblocks.holding.registry import registry
from dblocks.test import move_clock
from tests.support.fixtures import OtherThread
from tests.support.reentrant import AtLine

Locks = Callable[..., Lock[Lease]]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]

OWNER = "the job"
CO_OWNERS = pytest.mark.needs("has_shared_owners")


@pytest.fixture
def traced() -> Iterator[None]:
    """Restore what traces the tests themselves."""
    tracing = sys.gettrace()
    yield
    sys.settrace(tracing)


def enter_elsewhere(lease: Lease) -> Callable[[], object]:
    """Count one more hold, as another process of the owner does; return its release."""
    hold = lease._hold
    outcome = hold.backend.reenter(hold.renewal(), None, 0.0)
    assert hold.grant in outcome.extended
    return partial(hold.backend.release, hold.grant, count=None, deadline=hold.deadline)


# Lost holds


@pytest.mark.engine("locmem")
@pytest.mark.usefixtures("traced")
def test_lost_holds_are_noted_at_any_line(acquire: Leases) -> None:
    """Whoever asks for lost holds while others are being noted gets each of them once.

    A signal handler or the garbage collector does; so does another thread.
    """
    hold = acquire(owner=OWNER)._hold
    place = hold.backend, hold.grant
    number, interrupted = 0, True
    while interrupted:
        number += 1
        registry.return_forfeited(*place, 1)
        taken: list[int] = []

        def take(into: list[int] = taken) -> None:
            into.append(registry.take_forfeited(*place))

        with AtLine(number, take) as at:
            registry.return_forfeited(*place, 1)
        interrupted = at.lines >= number
        take()
        assert sum(taken) == 2, at.where
    assert number > 1


def assert_counted_once(hold: Hold, again: Lease, key: str, where: object) -> None:
    """Beside the hold of elsewhere, only the one of the owner's return is counted."""
    assert again._hold is not hold
    assert count_of(hold, key) == 2, where
    assert again.release() is True


@pytest.mark.engine("locmem")
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("committed", [False, True], ids=["plain", "guarded"])
def test_lost_in_the_middle_of_a_release(
    acquire: Leases, lock: Locks, key: str, committed: bool, times: int
) -> None:
    """Of the holds that are lost then, the one that is given back is subtracted once.

    The timer that notes the loss doesn't wait for the release.
    """
    number, interrupted = 0, True
    while interrupted:
        number += 1
        leases = [acquire(owner=OWNER) for _ in range(times)]
        hold = leases[0]._hold
        leave = enter_elsewhere(leases[0])
        leases[-1]._committed = committed
        with AtLine(number, partial(hold.lose, "expired")) as at:
            leases[-1].release()
        interrupted = at.lines >= number
        hold.lose("expired")
        hold.deadline = 0.0
        assert_counted_once(hold, acquire(owner=OWNER), key, at.where)
        leave()
        assert not lock().locked()
    assert number > 10


@pytest.mark.engine("locmem")
@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("times", [1, 2, 3])
def test_released_in_the_middle_of_a_loss(
    acquire: Leases, lock: Locks, key: str, times: int
) -> None:
    """What a guard has found current is subtracted once, though it is lost as well."""
    number, interrupted = 0, True
    while interrupted:
        number += 1
        leases = [acquire(owner=OWNER) for _ in range(times)]
        hold = leases[0]._hold
        leave = enter_elsewhere(leases[0])
        leases[-1]._committed = True
        with AtLine(number, leases[-1].release) as at:
            hold.lose("expired")
        interrupted = at.lines >= number
        leases[-1].release()
        hold.deadline = 0.0
        assert_counted_once(hold, acquire(owner=OWNER), key, at.where)
        leave()
        assert not lock().locked()
    assert number > 5


def count_of(hold: Hold, key: str) -> int:
    """Return how many holds the engine counts."""
    engine = hold.backend
    assert isinstance(engine, LocMemBackend)
    (entry,) = engine.entries(key)
    return entry.hold_count


@CO_OWNERS
@pytest.mark.needs("has_own_leases")
def test_lost_long_ago(acquire: Leases, obtainable: Obtainable) -> None:
    """What was lost is subtracted however long a co-owner has kept the key since."""
    lost = acquire(owner=OWNER, lease=60)
    leave = enter_elsewhere(lost)
    lost._hold.lose("backend")
    registry.forget(lost._hold.deadline + 20 * 60)
    assert acquire(owner=OWNER).release() is True
    assert not obtainable()
    leave()
    assert obtainable()


# Holds that nobody receives


@CO_OWNERS
@pytest.mark.needs("has_own_leases")
@pytest.mark.parametrize("meanwhile", ["overdue", "noted", "taken anew"])
def test_re_entry_that_is_answered_too_late(
    backend: str,
    acquire: Leases,
    obtainable: Obtainable,
    lock: Locks,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
    meanwhile: str,
) -> None:
    """It was counted, and nobody has it: the owner takes the key anew."""
    theirs: list[Lease] = []
    outer = acquire(owner=OWNER, lease=60)
    engine: Any = backends[backend]
    reenter = engine.reenter

    def late(*arguments: Any) -> Any:
        outcome = reenter(*arguments)
        if meanwhile != "overdue":
            outer._hold.lose("expired")
        outer._hold.deadline = 0.0
        if meanwhile == "taken anew":
            patch.undo()
            theirs.append(other.do(lock(owner=OWNER, lease=60).acquire, timeout=0))
        return outcome

    with monkeypatch.context() as patch:
        patch.setattr(engine, "reenter", late)
        inner = acquire(owner=OWNER, lease=60)
    assert inner.held
    assert not outer.held
    assert inner.release() is True
    for lease in theirs:
        assert other.do(lease.release) is True
        assert acquire(owner=OWNER).release() is True
    assert obtainable()


@CO_OWNERS
@pytest.mark.needs("has_own_leases", "has_movable_clock")
def test_grant_that_comes_late_and_cant_be_renewed(
    backend: str,
    acquire: Leases,
    lock: Locks,
    obtainable: Obtainable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is nobody's; when its owner asks again, that is its only hold."""
    engine: Any = backends[backend]
    try_acquire = engine.try_acquire

    def late(*arguments: Any) -> Any:
        answer = try_acquire(*arguments)
        move_clock(545, backend=backend)
        return answer

    def fail(*arguments: Any) -> Any:
        raise engine.errors[0]("out of reach")

    with monkeypatch.context() as patch:
        patch.setattr(engine, "try_acquire", late)
        patch.setattr(engine, "renew", fail)
        with pytest.raises(engine.errors[0], match="out of reach"):
            lock(owner=OWNER, lease=600).acquire(timeout=0)
    assert not obtainable()
    assert acquire(owner=OWNER).release() is True
    assert obtainable()


@CO_OWNERS
@pytest.mark.needs("has_own_leases")
def test_lost_by_two_threads(
    acquire: Leases, lock: Locks, other: OtherThread, obtainable: Obtainable
) -> None:
    """Who takes the key anew while another thread's hold is being lost has it alone."""
    mine = acquire(owner=OWNER, lease=60)
    theirs = other.do(lock(owner=OWNER, lease=60).acquire, timeout=0)
    leave = enter_elsewhere(mine)
    mine._hold.lose("expired")
    assert theirs.release() is False
    again = acquire(owner=OWNER)
    leave()
    assert not obtainable()
    assert again.release() is True
    assert obtainable()
