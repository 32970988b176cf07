"""The lease: how long it lasts, how it is kept, and how its loss is noticed."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from django.db.backends.utils import CursorWrapper

import dblocks
from dblocks import Lease, LeaseLost, Lock, clock, current_lease, distributed_lock
from dblocks.conf import backends
from dblocks.holding.news import NEWS
from dblocks.test import move_clock
from tests.support.fixtures import OtherThread
from tests.support.timing import (
    DEADLINE,
    SLACK,
    STEP,
    always,
    eventually,
    excused,
    scaled,
    starved,
)

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]


@pytest.mark.needs("has_own_leases")
@pytest.mark.parametrize(
    ("lease", "margin"),
    [(0.3, 0.15), (0.6, 0.25), (1, 0.25), (2.5, 0.25), (10, 1.0), (60, 6.0)],
)
def test_remaining_keeps_a_margin(acquire: Leases, lease: float, margin: float) -> None:
    """remaining() is the lease less the time since the request less the margin."""
    before = time.monotonic()
    held = acquire(lease=lease)
    remaining = held.remaining()
    elapsed = time.monotonic() - before
    assert lease - margin - elapsed - 0.001 <= remaining <= lease - margin


def test_remaining_runs_down(acquire: Leases, key: str) -> None:
    """remaining() goes down with the monotonic clock and stops at 0.0."""
    long = acquire(lease=60, renew=False)
    readings = []
    for _ in range(2):
        before, remaining = time.monotonic(), long.remaining()
        readings.append((before, remaining, time.monotonic()))
        eventually(lambda after=before: time.monotonic() > after + 0.1)
    (early, first, soon), (late, second, latest) = readings
    assert late - soon - 0.001 <= first - second <= latest - early + 0.001
    short = acquire(f"{key}:short", lease=scaled(0.3), renew=False)
    eventually(lambda: not short.held)
    assert short.remaining() == 0.0


def test_held_and_check(acquire: Leases, key: str) -> None:
    """check() passes while held and raises LeaseLost when it no longer is."""
    lease = acquire(lease=scaled(0.4), renew=False)
    lease.check()
    eventually(lambda: not lease.held, within=scaled(0.4) + SLACK)
    with pytest.raises(LeaseLost) as caught:
        lease.check()
    assert (caught.value.key, caught.value.fencing_token) == (key, lease.fencing_token)


def test_released_lease_is_not_held(acquire: Leases) -> None:
    """After its release a lease proves nothing."""
    lease = acquire()
    lease.release()
    assert not lease.held
    assert lease.lost_reason is None
    with pytest.raises(LeaseLost):
        lease.check()


def test_never_held_once_somebody_else_may_have_it(
    acquire: Leases, lock: Locks
) -> None:
    """held is false before the key could go to another owner."""
    lease = acquire(lease=scaled(0.5), renew=False)
    theirs = lock(owner="somebody else")

    def granted() -> Lease | None:
        asked, left = time.monotonic(), lease.remaining()
        assert left > 0 or not lease.held
        grant = theirs.try_acquire()
        assert not grant or time.monotonic() > asked + left
        return grant

    eventually(granted, within=scaled(0.5) + SLACK, what="the take-over").release()


def test_held_costs_no_statement(
    acquire: Leases, django_assert_num_queries: Any
) -> None:
    """held, remaining() and check() do no I/O."""
    lease = acquire()
    with django_assert_num_queries(0):
        assert lease.held
        assert lease.remaining()
        lease.check()


def test_renewal_keeps_the_lock(acquire: Leases, obtainable: Obtainable) -> None:
    """Renewed in the background, a lease holds for several times its length."""
    # A busy machine may keep the renewal back for more than a second.
    length = scaled(2.4)
    held = acquire(lease=length)
    always(lambda: held.held and not obtainable(), during=2.5 * length, what="held")
    assert held.release() is True


@pytest.mark.needs("has_own_leases")
@pytest.mark.parametrize(
    ("keys", "options"),
    [(1, {}), (1, {"permits": 2}), (1, {"owner": "the job"}), (2, {})],
)
def test_grant_that_came_late(
    key: str,
    backend: str,
    monkeypatch: pytest.MonkeyPatch,
    keys: int,
    options: dict[str, Any],
) -> None:
    """An engine that is out of reach for longer than a lease grants a whole one then.

    One whose countdown began with the request would be over when the work begins.
    """
    engine, lease = backends[backend], scaled(0.5)
    verb = "try_acquire" if keys == 1 else "try_acquire_all"
    ask = getattr(engine, verb)
    names = [key, key + "!"][:keys]
    with distributed_lock(*names, backend=backend, **options):
        """Keys that have rows are granted together."""

    def answer_late(*arguments: Any) -> Any:
        time.sleep(1.2 * lease)
        return ask(*arguments)

    monkeypatch.setattr(engine, verb, answer_late)
    with distributed_lock(*names, backend=backend, lease=lease, **options) as held:
        held.check()
        assert held.remaining() > 0


def test_no_renewal_on_request(acquire: Leases, obtainable: Obtainable) -> None:
    """With renew=False the lease ends on time although its holder lives."""
    acquire(lease=scaled(0.5), renew=False)
    eventually(obtainable, within=scaled(0.5) + SLACK, what="the end of the lease")


@pytest.mark.needs("has_own_leases", "has_movable_clock")
def test_renew_extends_from_now(
    backend: str, acquire: Leases, obtainable: Obtainable
) -> None:
    """renew() starts the lease anew."""
    lease = acquire(lease=60, renew=False)
    for _ in range(3):
        move_clock(40, backend=backend)
        assert not obtainable()
        before = time.monotonic()
        lease.renew()
        remaining = lease.remaining()
        assert 54 - (time.monotonic() - before) - 0.001 <= remaining <= 54
    assert lease.held


@pytest.mark.needs("has_own_leases")
def test_renew_for_another_time(acquire: Leases) -> None:
    """renew(lease=) asks for another length."""
    lease = acquire(lease=1, renew=False)
    lease.renew(lease=60)
    assert 50 < lease.remaining() <= 54


def test_renew_never_brings_a_lost_lease_back(
    acquire: Leases, obtainable: Obtainable
) -> None:
    """renew() of a lease that ran out raises LeaseLost, and others can take the key."""
    lease = acquire(lease=scaled(0.3), renew=False)
    eventually(lambda: lease.lost_reason, what="the loss")
    for _ in range(2):
        with pytest.raises(LeaseLost) as caught:
            lease.renew(lease=60)
        assert caught.value.reason == "expired"
    assert not lease.held
    eventually(obtainable, within=SLACK, what="the end of the lease")


def test_renew_after_release(acquire: Leases, obtainable: Obtainable) -> None:
    """renew() of a released lease raises LeaseLost and takes nothing."""
    lease = acquire()
    lease.release()
    with pytest.raises(LeaseLost):
        lease.renew()
    assert obtainable()


class Losses:
    """Remembers what the callback was told, when, and in which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[Lease, float, threading.Thread]] = []

    def __call__(self, lease: Lease) -> None:
        self.calls.append((lease, time.monotonic(), threading.current_thread()))


def test_loss_is_noticed_on_time(acquire: Leases) -> None:
    """on_lost is called at the local deadline, in another thread, once."""
    lease = acquire(lease=scaled(0.6), renew=False)
    losses = Losses()
    lease.on_lost(losses)
    deadline, before = time.monotonic() + lease.remaining(), starved()
    eventually(lambda: losses.calls, within=scaled(0.6) + SLACK, what="on_lost")
    late = excused(before, scaled(0.6))
    always(lambda: len(losses.calls) == 1, during=scaled(0.3), what="a single call")
    (told, at, thread) = losses.calls[0]
    assert told is lease
    assert deadline - 0.05 <= at <= deadline + scaled(0.4) + late
    assert thread is not threading.current_thread()
    assert lease.lost_reason == "expired"


def test_each_callback_is_called(
    acquire: Leases, caplog: pytest.LogCaptureFixture
) -> None:
    """An error in one callback is logged and doesn't keep others from being called."""
    lease = acquire(lease=scaled(0.3), renew=False)
    losses = Losses()

    def broken(lease: Lease) -> None:
        raise RuntimeError("a broken callback")

    lease.on_lost(broken)
    lease.on_lost(losses)
    eventually(
        lambda: losses.calls, within=scaled(0.3) + SLACK, what="the second callback"
    )
    logged = [record for record in caplog.records if record.exc_info]
    assert any("a broken callback" in str(record.exc_info[1]) for record in logged)
    assert {record.name.split(".")[0] for record in logged} == {"dblocks"}


def test_slow_callback_delays_nobody(acquire: Leases, key: str) -> None:
    """A callback that takes its time doesn't put off the loss of another lease."""
    done = threading.Event()
    slow = acquire(lease=scaled(0.3), renew=False)
    slow.on_lost(lambda lease: done.wait(DEADLINE))
    lease = acquire(key + "!", lease=scaled(0.6), renew=False)
    try:
        eventually(
            lambda: lease.lost_reason,
            within=scaled(0.6) + SLACK,
            what="the second loss",
        )
        assert not lease.held
    finally:
        done.set()


def test_no_loss_without_loss(acquire: Leases) -> None:
    """A lease that was released in time is never reported as lost."""
    lease = acquire(lease=scaled(0.6), renew=False)
    losses = Losses()
    lease.on_lost(losses)
    assert lease.release() is True
    always(lambda: not losses.calls and lease.lost_reason is None, during=scaled(0.9))


@pytest.mark.needs("has_own_leases", "has_movable_clock")
@pytest.mark.parametrize("owner", [None, "importer"])
def test_others_see_what_an_inner_acquisition_renews(
    backend: str, acquire: Leases, obtainable: Obtainable, owner: str | None
) -> None:
    """Entering again extends the lease, for the holder and for everybody else."""
    outer = acquire(owner=owner, lease=60, renew=False)
    move_clock(40, backend=backend)
    inner = acquire(owner=owner, lease=60, renew=False)
    move_clock(40, backend=backend)
    assert outer.held
    assert not obtainable()
    assert inner.release() is True
    assert outer.release() is True


@pytest.mark.parametrize("place", ["by itself", "in its block"])
def test_no_loss_of_what_was_released(
    backend: str, acquire: Leases, key: str, place: str
) -> None:
    """What becomes of the grant later doesn't concern a lease that was given back."""
    outer = acquire()
    losses, requests = Losses(), Losses()

    def lose(inner: Lease) -> None:
        inner.on_lost(losses)
        inner.on_release_requested(requests)
        assert inner.release() is True
        backends[backend].request_release(key)
        outer.renew()
        backends[backend].force_release(key)
        with pytest.raises(LeaseLost):
            outer.renew()
        outer_losses = Losses()
        outer.on_lost(outer_losses)
        eventually(lambda: outer_losses.calls, what="the news of the outer one")
        assert inner.lost_reason is None
        with pytest.raises(LeaseLost) as caught:
            inner.check()
        assert caught.value.reason == "released"

    if place == "by itself":
        lose(acquire())
    else:
        with acquire() as inner:
            lose(inner)
    assert not losses.calls
    assert not requests.calls
    assert outer.release() is False


def test_loss_is_logged(
    acquire: Leases, caplog: pytest.LogCaptureFixture, key: str
) -> None:
    """A loss is a warning of the logger dblocks that names the key."""
    caplog.set_level(logging.DEBUG, logger="dblocks")
    lease = acquire(lease=scaled(0.3), renew=False)
    eventually(lambda: lease.lost_reason, what="the loss")

    def logged() -> list[logging.LogRecord]:
        return [
            record
            for record in caplog.records
            if record.levelno == logging.WARNING and key in record.getMessage()
        ]

    eventually(logged, within=SLACK, what="the warning")
    assert logged()[0].name.split(".")[0] == "dblocks"


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Make the statements of other threads hang once the event is set."""
    hanging, over = threading.Event(), threading.Event()
    execute = CursorWrapper.execute
    main = threading.current_thread()

    def slow(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        if hanging.is_set() and threading.current_thread() is not main:
            over.wait(DEADLINE)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", slow)
    yield hanging
    over.set()


@pytest.mark.needs("has_table")
def test_loss_is_noticed_while_a_renewal_hangs(
    acquire: Leases, hang: threading.Event
) -> None:
    """A renewal that hangs on a dead socket doesn't put off the notice of the loss."""
    lease = acquire(lease=scaled(0.9))
    losses = Losses()
    lease.on_lost(losses)
    hang.set()
    eventually(lambda: losses.calls, within=scaled(0.9) + SLACK, what="on_lost")
    assert not lease.held
    assert lease.lost_reason in {"backend", "expired"}
    with pytest.raises(LeaseLost):
        lease.check()


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> list[tuple[threading.Thread, str]]:
    """Collect every statement of every thread of this process."""
    seen: list[tuple[threading.Thread, str]] = []

    def counted(name: str) -> None:
        original = getattr(CursorWrapper, name)

        def call(self: CursorWrapper, sql: str, *args: Any, **kwargs: Any) -> Any:
            seen.append((threading.current_thread(), sql))
            return original(self, sql, *args, **kwargs)

        monkeypatch.setattr(CursorWrapper, name, call)

    counted("execute")
    counted("executemany")
    return seen


@pytest.mark.needs("has_table")
def test_release_wakes_a_thread_of_the_process(
    lock: Locks,
    other: OtherThread,
    statements: list[tuple[threading.Thread, str]],
) -> None:
    """It takes the key at once, without looking whether that is free."""
    verbs = []
    for _ in range(5):
        lease = lock().acquire()
        statements.clear()
        acquired = other.start(lock(timeout=DEADLINE).acquire)
        eventually(lambda: statements, what="its first look")
        time.sleep(0.15)
        statements.clear()
        lease.release()
        granted = acquired.result(DEADLINE)
        mine = [
            sql.split()[0]
            for thread, sql in statements
            if thread is not threading.current_thread()
        ]
        verbs.append(mine)
        other.do(granted.release)
    # It looks ten times a second, and so perhaps just now.
    assert any("SELECT" not in mine for mine in verbs), verbs


@pytest.mark.needs("has_table")
def test_a_thousand_leases(
    acquire: Leases, key: str, statements: list[tuple[threading.Thread, str]]
) -> None:
    """A thousand leases are renewed together, with a handful of statements per tick."""
    length, ticks = 120.0, 4
    leases = [acquire(f"{key}:{number}", lease=length) for number in range(1000)]
    statements.clear()
    for _ in range(ticks):
        # All are due now, and soon have almost nine tenths of their length again.
        clock.advance(length / 3)
        eventually(
            lambda: all(lease.remaining() > 0.7 * length for lease in leases),
            what="the renewal",
        )
    renewals = len(statements)
    assert all(lease.held for lease in leases)
    released = [lease.release() for lease in leases]
    assert all(released)
    assert ticks <= renewals <= 20 * ticks, renewals


def test_forced_out_beside_its_successor(
    acquire: Leases, lock: Locks, key: str, backend: str, other: OtherThread
) -> None:
    """Renewing the successor, in the same process, doesn't renew who was forced out."""
    first = acquire(lease=60)
    assert backends[backend].force_release(key)
    second = other.do(lock(lease=60).acquire)
    # Both are due from now on, and neither was before the key had its successor.
    clock.advance(second.remaining() / 2)
    eventually(lambda: not first.held, within=scaled(0.5) + SLACK, what="the loss")
    assert first.lost_reason == "taken"
    assert second.held
    other.do(second.release)


def test_released_elsewhere_while_it_is_re_entered(
    acquire: Leases,
    key: str,
    backend: str,
    other: OtherThread,
    obtainable: Callable[..., bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A lease that another thread releases doesn't take the new one along."""
    first = acquire()
    engine = backends[backend]
    ask = engine.reenter
    releasing: list[Future[bool]] = []

    def release_meanwhile(*arguments: Any) -> Any:
        monkeypatch.undo()
        outcome = ask(*arguments)
        releasing.append(other.start(first.release))
        return outcome

    monkeypatch.setattr(engine, "reenter", release_meanwhile)
    second = acquire()
    assert releasing[0].result(timeout=DEADLINE) is True
    assert second.held
    assert not obtainable()
    assert second.release() is True
    assert obtainable()


def test_no_thread_for_renewals(
    acquire: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no thread can be started for a moment, renewal goes on after that."""

    def at_work() -> bool:
        names = [thread.name for thread in threading.enumerate()]
        return any(name.startswith("dblocks-renewal") for name in names)

    eventually(lambda: not at_work(), what="the end of earlier threads")
    starts: list[str] = []
    start = threading.Thread.start

    def fail_at_first(thread: threading.Thread) -> None:
        if thread.name.startswith("dblocks-renewal"):
            starts.append(thread.name)
            if len(starts) == 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_at_first)
    lease = acquire(lease=scaled(1.5))
    always(lambda: lease.held, during=scaled(2), what="held")
    assert len(starts) > 1


@pytest.mark.needs("has_own_leases")
def test_no_daemon_threads(
    acquire: Leases,
    obtainable: Obtainable,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where threads can't be daemons, leases end by the clock, unrenewed."""
    make = threading.Thread.__init__

    def refuse(thread: threading.Thread, *args: Any, **kwargs: Any) -> None:
        # Not those by which Redlock asks its servers: without them nothing is granted.
        if kwargs.get("name") in {"dblocks-scheduler", NEWS}:
            raise RuntimeError("daemon threads are disabled in this (sub)interpreter")
        make(thread, *args, **kwargs)

    def at_work() -> bool:
        return any(t.name == "dblocks-scheduler" for t in threading.enumerate())

    eventually(lambda: not at_work(), what="the end of earlier threads")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "__init__", refuse)
        lease = acquire(lease=scaled(0.5))
        eventually(lambda: not lease.held, what="the end of the lease")
        with pytest.raises(LeaseLost):
            lease.check()
    assert "no thread can be started" in caplog.text
    # The next lease is watched again, and the news told.
    eventually(obtainable, what="a free key")
    lease = acquire(lease=scaled(1.5))
    always(lambda: lease.held, during=scaled(2), what="held")
    assert "lost key" in caplog.text


def test_renewal_ends_with_the_last_lease(
    acquire: Leases, live_threads: Callable[[], set[threading.Thread]]
) -> None:
    """When nothing is held any more no thread is left behind."""
    leases = [acquire(lease=scaled(1.5)), acquire(lease=scaled(1.5), renew=False)]
    # It is renewed once.
    always(lambda: leases[0].held, during=scaled(0.5))
    for lease in leases:
        lease.release()
    eventually(lambda: not live_threads(), what="the end of the threads")


def test_renewal_starts_again(
    acquire: Leases, live_threads: Callable[[], set[threading.Thread]]
) -> None:
    """After the renewal has ended for want of leases, the next lease is renewed."""
    acquire(lease=scaled(0.6)).release()
    eventually(lambda: not live_threads(), what="the end of the threads")
    lease = acquire(lease=scaled(1.5))
    always(lambda: lease.held, during=scaled(2), what="held")


def test_current_lease(lock: Locks, key: str, other: OtherThread) -> None:
    """current_lease() is the innermost lease, or the innermost one of a key."""

    def nest() -> None:
        with pytest.raises(LookupError):
            current_lease()
        with lock() as outer:
            assert current_lease() is outer
            with lock(key + "!") as inner:
                assert current_lease() is inner
                assert current_lease(key) is outer
                assert current_lease(key + "!") is inner
                with lock() as again:
                    assert current_lease() is again
                    assert current_lease(key) is again
            assert current_lease() is outer
            with pytest.raises(LookupError):
                current_lease(key + "!")
        with pytest.raises(LookupError):
            current_lease(key)

    other.do(nest)


def test_current_lease_is_the_owners(lock: Locks, key: str, other: OtherThread) -> None:
    """Another owner has no current lease."""
    with lock(), pytest.raises(LookupError):
        other.do(current_lease, key)


def test_leases_of_one_owner_in_any_order(
    acquire: Leases, obtainable: Obtainable
) -> None:
    """Outer and inner lease are released in any order; both must be."""
    outer, inner = acquire(lease=5), acquire(lease=5)
    assert outer.release() is True
    assert not outer.held
    assert inner.held
    assert not obtainable()
    assert inner.release() is True
    assert obtainable()


@pytest.mark.needs("has_own_leases")
def test_inner_acquisition_renews(acquire: Leases) -> None:
    """An inner acquisition starts the lease anew for the outer one too."""
    outer = acquire(lease=scaled(2), renew=False)
    at = time.monotonic()
    eventually(lambda: time.monotonic() > at + scaled(0.5))
    assert outer.remaining() < scaled(1.3)
    acquire(lease=scaled(2))
    assert outer.remaining() > scaled(1.5)


@pytest.mark.needs("has_own_leases")
def test_inner_acquisition_only_extends(acquire: Leases) -> None:
    """An inner acquisition with a short lease doesn't take time from the outer one."""
    outer = acquire(lease=60)
    inner = acquire(lease=scaled(0.5))
    assert outer.remaining() > 50
    inner.release()
    assert outer.remaining() > 50
    at = time.monotonic()
    always(lambda: outer.held, during=scaled(0.6))
    assert time.monotonic() - at >= scaled(0.6) - STEP


@pytest.mark.parametrize("more", [[], [":other"]], ids=["one", "set"])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(
    backend: str, key: str, copied: Callable[[object], object], more: list[str]
) -> None:
    """A lease can't be copied, and whoever tries does it no harm."""
    keys = [key, *(key + each for each in more)]
    held: Any = distributed_lock(*keys, backend=backend, timeout=0).acquire()
    with pytest.raises(TypeError, match="can't be copied"):
        copied(held)
    gc.collect()
    assert held.held
    assert held.release()


def test_public_names() -> None:
    """Everything that is public is importable from the package and listed there."""
    names = {
        "distributed_lock",
        "current_lease",
        "Lock",
        "Lease",
        "LockError",
        "LockTimeout",
    }
    names |= {"LeaseLost", "InvalidKey"}
    assert names <= set(dblocks.__all__)
    assert all(hasattr(dblocks, name) for name in dblocks.__all__)
