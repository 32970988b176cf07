"""What a renewal, a late answer or a waiter that is gone does to the others."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError, connection

from dblocks import Lease, Lock, clock
from dblocks.backends.values import Renewal
from dblocks.conf import backends
from dblocks.holding.registry import registry
from dblocks.holding.renewal import RenewalScheduler, scheduler
from dblocks.signals import lock_lost
from dblocks.waiting.attempt import Attempt
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]


@pytest.fixture
def losses() -> Any:
    """Collect the losses that are told."""
    told: list[str] = []

    def note(reason: str, **kwargs: object) -> None:
        told.append(reason)

    lock_lost.connect(note)
    yield told
    lock_lost.disconnect(note)


class Hanging:
    """Lets the renewals of an engine hang, at first for ever."""

    def __init__(self, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.over = threading.Event(), threading.Event()
        engine: Any = backends[backend]
        renew = engine.renew

        def hang(renewals: Any) -> Any:
            if not self.reached.is_set():
                self.reached.set()
                self.over.wait(DEADLINE)
            return renew(renewals)

        monkeypatch.setattr(engine, "renew", hang)


@pytest.fixture
def hanging(backend: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the first renewal hang until the end of the test."""
    hanging = Hanging(backend, monkeypatch)
    yield hanging
    hanging.over.set()


def test_renewal_that_meets_the_release(
    lock: Locks, hanging: Hanging, losses: list[str]
) -> None:
    """What is renewed while it is given back is no loss, whoever comes first."""
    with lock(lease=scaled(1.5)):
        assert hanging.reached.wait(DEADLINE)
    hanging.over.set()
    always(lambda: not losses, during=0.5, what="quiet")


def test_renewal_that_hangs(
    lock: Locks, acquire: Leases, hanging: Hanging, key: str
) -> None:
    """One that hangs for a long lease costs the short ones nothing."""
    long = acquire(lease=scaled(2.0))
    assert hanging.reached.wait(DEADLINE)
    short = acquire(f"{key}:short", lease=scaled(1.2))
    always(lambda: short.held and long.held, during=scaled(3.0), what="held")


def test_only_renewal_hangs(acquire: Leases, hanging: Hanging) -> None:
    """A connection that hangs isn't waited for until the lease is lost."""
    lease = acquire(lease=scaled(2.0))
    assert hanging.reached.wait(DEADLINE)
    always(lambda: lease.held, during=scaled(3.0), what="held")


def test_renewal_that_hangs_and_fails(
    acquire: Leases, hanging: Hanging, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once another has taken its place, its failure makes nothing due."""
    engine: Any = backends[backend]
    renew, replaced = engine.renew, threading.Event()
    sent: list[object] = []

    def fail_if_late(renewals: Any) -> Any:
        sent.append(renewals)
        is_first = len(sent) == 1
        outcome = renew(renewals)
        if is_first:
            raise OperationalError("The answer came too late.")
        replaced.set()
        return outcome

    monkeypatch.setattr(engine, "renew", fail_if_late)
    lease = acquire(lease=scaled(4.0))
    # Half the time until the next one is due.
    quiet = lease.remaining() / 6
    assert replaced.wait(DEADLINE)
    hanging.over.set()
    always(lambda: lease.held and len(sent) == 2, during=quiet, what="quiet")


def test_waiter_of_a_closed_loop(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """A waiter whose event loop was closed keeps nobody waiting."""
    lease = acquire()

    def abandon() -> None:
        loop = asyncio.new_event_loop()
        task = loop.create_task(lock(timeout=DEADLINE).aacquire())
        loop.run_until_complete(asyncio.sleep(0.3))
        # No exception comes out: the task is left where it waits.
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.close()

    other.do(abandon)
    waiting = other.start(lock(timeout=DEADLINE).acquire)
    time.sleep(0.3)
    lease.release()
    with takes(at_most=SLACK):
        other.do(waiting.result(DEADLINE).release)


def test_first_waiter_in_a_busy_loop(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """One behind it finds the key free when its own time runs out."""
    lease = acquire()
    began, over = threading.Event(), threading.Event()

    async def busy() -> None:
        waiting = asyncio.ensure_future(lock(timeout=2 * DEADLINE).aacquire())
        await asyncio.sleep(0.3)
        began.set()
        over.wait(DEADLINE)
        await (await waiting).arelease()

    loop = threading.Thread(target=asyncio.run, args=[busy()])
    loop.start()
    try:
        assert began.wait(DEADLINE)
        releasing = other.start(lambda: (time.sleep(0.2), lease.release()))
        assert lock(timeout=1 + SLACK).acquire().release()
        assert releasing.result(DEADLINE)[1] is True
    finally:
        over.set()
        loop.join(DEADLINE)
    assert not loop.is_alive()


@pytest.mark.needs("has_table")
def test_wrapper_that_asks_the_database(lock: Locks) -> None:
    """A project's wrapper may run statements of its own around those of a lock."""

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        result = execute(sql, params, many, context)
        if "dblocks_" in sql:
            with connection.cursor() as cursor:
                cursor.execute("SELECT 1")
        return result

    with connection.execute_wrapper(explain):
        lease = lock().acquire(timeout=1)
        assert lease.release()


@pytest.mark.needs("has_table")
def test_holds_of_different_length(
    acquire: Leases, backend: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two holds of one grant are renewed together, for the longer of their leases."""
    asked: list[Renewal] = []
    engine: Any = backends[backend]
    renew = engine.renew

    def noted(renewals: list[Renewal]) -> Any:
        asked.extend(renewals)
        return renew(renewals)

    long = acquire(lease=20, owner="worker")
    # Another thread of the owner has begun at the same moment.
    with monkeypatch.context() as changed:
        changed.setattr(Attempt, "own_hold", lambda self: None)
        short = other.do(acquire, lease=4, owner="worker")
    assert short._hold is not long._hold
    monkeypatch.setattr(engine, "renew", noted)
    long._hold.renew_at = short._hold.renew_at = 0.0
    scheduler.hurry()
    eventually(lambda: asked, what="the renewal")
    assert asked == [long._hold.renewal()]


def test_deadline_between_two_looks_at_the_clock(
    acquire: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease that becomes overdue while it is looked at is told of all the same."""
    lease, told, looks = acquire(renew=False), threading.Event(), 0
    lease.on_lost(lambda lease: told.set())
    me, read = threading.current_thread(), clock.monotonic

    def late() -> float:
        nonlocal looks
        if threading.current_thread() is not me:
            return read()
        looks += 1
        return read() + (0 if looks == 1 else 3600)

    monkeypatch.setattr(registry, "all", lambda: [lease._hold])
    monkeypatch.setattr(clock, "monotonic", late)
    for _ in range(2):
        if registry.watches(lease._hold):
            scheduler._look(read())
    assert told.wait(DEADLINE)


class Ending(RenewalScheduler):
    """A scheduler whose thread ends between two looks at it."""

    @property
    def _thread(self) -> Any:
        found, self.left = self.left, None
        return found

    @_thread.setter
    def _thread(self, thread: threading.Thread | None) -> None:
        self.left = thread


def test_scheduler_that_ends_just_then(acquire: Leases) -> None:
    """A lock that is taken as the scheduler's thread ends is no AttributeError."""
    ending = Ending()
    ending._thread = threading.current_thread()
    lease = acquire()
    ending.watch(lease._hold)
    assert lease.held
