"""Losses and renewals while log handlers fail; leases that nobody can release."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import OperationalError, connection
from django.db.backends.utils import CursorWrapper

from dblocks import Lease, Lock, workers
from dblocks.backends.values import Renewed
from dblocks.conf import backends
from dblocks.holding import news
from dblocks.holding.renewal import RenewalScheduler
from dblocks.models import DistributedLock
from tests.support.processes import run_python
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]

TABLE = DistributedLock._meta.db_table


class Unfit(logging.Handler):
    """A log handler that raises or blocks, in the threads that dblocks starts."""

    def __init__(self, times: float) -> None:
        super().__init__(logging.WARNING)
        #: How many times it fails.
        self.times = times
        self.reached = threading.Event()
        self.over = threading.Event()
        self._user = threading.current_thread()

    def handle(self, record: logging.LogRecord) -> bool:
        # In place of emit(), before which the caller would take the handler's lock.
        if threading.current_thread() is self._user or self.times <= 0:
            return True
        self.times -= 1
        self.reached.set()
        self.fail()
        return True

    def fail(self) -> None:
        raise NotImplementedError


class Raising(Unfit):
    """The disk is full."""

    def fail(self) -> None:
        raise RuntimeError("a broken log handler")


class Blocking(Unfit):
    """The log's collector doesn't read any more."""

    def fail(self) -> None:
        self.over.wait(DEADLINE)


@pytest.fixture(
    params=[(Raising, 1), (Raising, float("inf")), (Blocking, 1)],
    ids=["raises once", "raises always", "blocks"],
)
def handler(request: pytest.FixtureRequest) -> Iterator[Unfit]:
    """Give the logger of dblocks a handler that fails."""
    kind, times = request.param
    handler = kind(times)
    logging.getLogger("dblocks").addHandler(handler)
    yield handler
    logging.getLogger("dblocks").removeHandler(handler)
    handler.over.set()


def told_of(lease: Lease) -> threading.Event:
    """Return an event that is set when the lease's loss is told."""
    told = threading.Event()
    lease.on_lost(lambda lease: told.set())
    return told


# A thread of an unfit handler's own may end with its error.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_loss_that_cant_be_logged(acquire: Leases, key: str, handler: Unfit) -> None:
    """A loss is told on time although the log handler that hears of it fails."""
    told = told_of(acquire(lease=0.4, renew=False))
    assert told.wait(0.4 + SLACK)
    # Nor does it matter to those that come after it.
    assert handler.reached.wait(DEADLINE)
    later = told_of(acquire(f"{key}:later", lease=0.4, renew=False))
    assert later.wait(0.4 + SLACK)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_renewals_after_a_loss_that_cant_be_logged(
    acquire: Leases, key: str, handler: Unfit, obtainable: Obtainable
) -> None:
    """Other leases are renewed after, and while, a log handler fails."""
    before = acquire(f"{key}:before", lease=scaled(1.5))
    acquire(f"{key}:lost", lease=0.3, renew=False)
    assert handler.reached.wait(DEADLINE)
    after = acquire(lease=scaled(1.5))
    always(lambda: before.held and after.held, during=scaled(3), what="held")
    assert not obtainable()
    assert before.release() is True
    assert after.release() is True


@pytest.fixture
def failing_renewals(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let so many of the next statements of other threads about locks fail."""
    left = 0
    execute = CursorWrapper.execute
    user = threading.current_thread()

    def fail(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        nonlocal left
        if left and threading.current_thread() is not user and TABLE in sql:
            left -= 1
            raise OperationalError("the database is not itself")
        return execute(self, sql, params)

    def let_fail(times: int) -> None:
        nonlocal left
        left = times

    monkeypatch.setattr(CursorWrapper, "execute", fail)
    return let_fail


@pytest.mark.needs("has_table")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_failed_renewal_that_cant_be_logged(
    acquire: Leases, handler: Unfit, failing_renewals: Callable[[int], None]
) -> None:
    """A failed renewal is repeated in time although the failure can't be logged."""
    lease = acquire(lease=scaled(3))
    failing_renewals(1)
    assert handler.reached.wait(DEADLINE)
    always(lambda: lease.held, during=scaled(3.5), what="held")
    assert lease.release() is True


# Leases that are not given back


def drop(leases: list[Lease]) -> None:
    """Refer to them no more, which warns."""
    with pytest.warns(ResourceWarning, match="dropped without release"):
        leases.clear()
    gc.collect()


@pytest.mark.parametrize("dropped_first", [True, False], ids=["inner", "outer"])
def test_dropped_inner_lease(
    acquire: Leases, lock: Locks, obtainable: Obtainable, dropped_first: bool
) -> None:
    """A dropped inner lease keeps nothing renewed once the outer one is released.

    The outer one's object is referred to all the time: it holds nothing any more.
    """
    # No other thread runs while all that tests have left is collected.
    length = scaled(2)
    outer = acquire(lease=length)
    inner = [lock(lease=length).acquire(timeout=0)]
    if not dropped_first:
        assert outer.release() is True
    drop(inner)
    if dropped_first:
        assert outer.release() is True
    eventually(obtainable, within=length + SLACK, what="the end of the lease")
    assert not outer.held


def test_dropped_inner_lease_of_a_held_one(
    acquire: Leases, lock: Locks, obtainable: Obtainable
) -> None:
    """An outer lease that is held is renewed on, whatever becomes of an inner one."""
    outer = acquire(lease=scaled(2.4))
    inner = [lock(lease=scaled(2.4)).acquire(timeout=0)]
    drop(inner)
    always(lambda: outer.held, during=scaled(3.5), what="held")
    assert not obtainable()


@pytest.mark.needs("has_table")
def test_left_to_lapse(lock: Locks, obtainable: Obtainable) -> None:
    """A lease that couldn't be released on leaving is not renewed any more."""
    left: list[Lease] = []
    try:
        with lock(lease=scaled(1.2)) as lease:
            left.append(lease)
            connection.set_autocommit(False)
    finally:
        connection.rollback()
        connection.set_autocommit(True)
    eventually(obtainable, within=scaled(1.2) + SLACK, what="the end of the lease")
    assert not left[0].held


def test_all_have_been_told() -> None:
    """A process that is about to end can wait for those who are being told."""
    told: list[str] = []
    let_go = threading.Event()
    for name in ("one", "two"):
        news.apart(lambda name=name: (let_go.wait(0.3), told.append(name)))
    news.settle(DEADLINE)
    assert sorted(told) == ["one", "two"]
    news.apart(lambda: let_go.wait(DEADLINE))
    with takes(at_least=0.2, at_most=0.2 + SLACK):
        news.settle(0.2)
    let_go.set()


def test_one_is_only_about_to_be_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that has not begun to run yet is waited for too."""
    starting = threading.Thread(name=news.NEWS)
    looks = [[starting], [starting], []]
    monkeypatch.setattr(threading, "enumerate", lambda: looks.pop(0))
    news.settle(DEADLINE)
    assert looks == []


# A process that can start no thread


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Let no thread be started until this is undone."""

    def fail(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    return monkeypatch


def test_news_wait_for_a_thread(no_threads: pytest.MonkeyPatch) -> None:
    """What can't be told for want of a thread is told once there is one."""
    told = threading.Event()
    news.apart(told.set)
    assert news.pending
    assert not told.is_set()
    no_threads.undo()
    news.start_pending()
    assert told.wait(DEADLINE)


def test_settling_starts_what_waits_for_a_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits until all have been told also waits for a thread that can tell."""
    start, refused = threading.Thread.start, [None] * 3

    def start_at_last(self: threading.Thread) -> None:
        if refused:
            refused.pop()
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", start_at_last)
    told = threading.Event()
    news.apart(told.set)
    assert news.pending
    news.settle(DEADLINE)
    assert told.is_set()


def test_no_thread_to_renew(
    no_threads: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That nothing can be renewed is logged, and is no reason to refuse a lock."""
    RenewalScheduler()._start()
    assert "leases are not renewed: no thread can be started" in caplog.messages


def test_thread_that_is_chosen_as_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that idles to its end makes the call for which it was just chosen."""
    monkeypatch.setattr(workers, "LINGER", 1.0)
    crew = workers.Workers("test-workers")
    first, second = threading.Event(), threading.Event()
    crew.start(first.set)
    assert first.wait(DEADLINE)
    chosen = eventually(lambda: crew.idle and crew.idle.pop(), what="an idle thread")
    time.sleep(1.3)
    assert chosen.is_alive()
    chosen.calls.put(second.set)
    assert second.wait(DEADLINE)
    eventually(lambda: not chosen.is_alive(), what="the thread's end")


def test_news_at_the_end_of_a_process() -> None:
    """A process that ends meanwhile tells it first, and ends as it should."""
    program = """
import sys, threading, time
import django
from django.conf import settings
settings.configure(
    DBLOCKS={"default": {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}}
)
django.setup()
from dblocks import distributed_lock

lease = distributed_lock("a", lease=0.1, renew=False).acquire()
noted = threading.Event()
lease.on_lost(lambda lease: (noted.set(), time.sleep(0.3)))
noted.wait(10)
sys.exit(3)
"""
    ended = run_python("-c", program)
    assert ended.returncode == 3, ended.stderr
    assert "lost key='a'" in ended.stderr


def test_row_that_stays_locked(
    backend: str, acquire: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that answers, and can't extend the lease, was not out of reach."""
    monkeypatch.setattr(backends[backend], "renew", lambda renewals: Renewed())
    lease = acquire(lease=scaled(0.6))
    eventually(lambda: lease.lost_reason is not None, what="the loss")
    assert lease.lost_reason == "expired"
