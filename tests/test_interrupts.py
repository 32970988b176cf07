"""Exceptions that a signal's handler raises anywhere, in the bookkeeping too."""

from __future__ import annotations

import asyncio
import gc
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
from django.db import connection, connections, transaction

from dblocks import Lease, Lock, locks
from dblocks.backends.database import transactions
from dblocks.holding.registry import Registry, registry
from dblocks.holding.renewal import RenewalScheduler
from dblocks.lease_blocks import LeaseBlock
from dblocks.waiting import steps
from dblocks.waiting.queue import WaitQueues
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, takes

Leases = Callable[..., Lease]
Locks = Callable[..., Lock]

#: Where a block is entered.
ENTERING: set[Any] = {
    inspect.unwrap(function).__code__
    for function in (Lock.__enter__, Lock._enter, LeaseBlock.__enter__)
}
#: What refuses event loops, around these too.
WRAPPER: Any = Lock.acquire.__code__


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Leave no lease to later tests that only the collector finds, with its frames."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_exception_before_the_first_step_of_a_wait(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """No coroutine is left behind that was never awaited."""
    lease = other.do(acquire)

    def fail(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code is steps.run.__code__:
            sys.setprofile(None)
            raise RuntimeError("interrupted")

    sys.setprofile(fail)
    try:
        with warnings.catch_warnings(record=True) as caught:
            with pytest.raises(RuntimeError, match="interrupted"):
                lock(timeout=DEADLINE).acquire()
            assert not caught
    finally:
        sys.setprofile(None)
    assert other.do(lease.release)


def test_exception_after_the_grant(
    lock: Locks, key: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was granted to a call that failed is not renewed, whenever garbage goes."""

    def fail(*args: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr(locks, "_tell_acquired", fail)
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            with pytest.raises(RuntimeError, match="interrupted"):
                lock().acquire(timeout=0)
        assert all(hold.grant.key != key for hold in registry.all())
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "function",
    [RenewalScheduler.watch, Registry.add],
    ids=["watched", "registered"],
)
@pytest.mark.parametrize("event", ["call", "return"])
def test_interrupt_in_the_bookkeeping(
    lock: Locks, key: str, function: Any, event: str
) -> None:
    """An interrupt there leaves it at work for those to come."""

    def interrupt(frame: FrameType, what: str, argument: object) -> Any:
        if frame.f_code is not function.__code__:
            return None
        if what == event:
            sys.settrace(None)
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            lock().acquire(timeout=0)
    finally:
        sys.settrace(before)

    def somebody_else() -> None:
        with lock(f"{key}:other").acquire(timeout=0):
            pass
        connections.close_all()

    # Not a fixture's thread, which would be waited for.
    thread = threading.Thread(target=somebody_else, daemon=True)
    thread.start()
    thread.join(DEADLINE)
    assert not thread.is_alive()


def interrupted(code: Any, call: Callable[[], object]) -> None:
    """Make a call that a signal interrupts where that function is called first."""

    def interrupt(frame: FrameType, what: str, argument: object) -> None:
        if frame.f_code is code:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            call()
    finally:
        sys.settrace(before)


@pytest.mark.usefixtures("committed")
def test_interrupt_while_a_waiter_leaves(
    lock: Locks, key: str, other: OtherThread
) -> None:
    """Those who come later don't wait behind it."""
    holds = other.do(lambda: lock().acquire(timeout=0))
    asks = lock(timeout=0.05).acquire
    interrupted(WaitQueues.leave.__code__, asks)
    other.do(holds.release)
    with takes(at_most=1), lock(timeout=DEADLINE):
        pass


@pytest.mark.usefixtures("committed")
@pytest.mark.parametrize(
    "function", [transactions.transaction_is_open, transactions._run_all]
)
def test_interrupt_at_the_end_of_a_transaction(
    lock: Locks, obtainable: Callable[..., bool], function: Any
) -> None:
    """What was postponed until then is done."""
    lease = lock().acquire(timeout=0)
    block = transaction.atomic()
    block.__enter__()
    assert lease.release() is True
    interrupted(function.__code__, lambda: block.__exit__(None, None, None))
    assert obtainable()


def enters(block: Lock | Lease, steps: int) -> bool:
    """Enter a block, interrupted after so many steps; tell whether that succeeded."""

    def interrupt(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal steps
        is_inner = frame.f_back is not None and frame.f_back.f_code in ENTERING
        if frame.f_code is WRAPPER and is_inner:
            # An exception that is raised in its except clause would not be forgotten.
            steps -= what == "return"
        elif frame.f_code in ENTERING:
            # What happens at the outermost one's end is the caller's.
            is_inner |= frame.f_back is not None and frame.f_back.f_code is WRAPPER
            steps -= is_inner or what != "return"
        else:
            return None
        if steps < 0:
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with block:
            sys.settrace(before)
            return True
    except KeyboardInterrupt:
        return False
    finally:
        sys.settrace(before)


def assert_nothing_is_left(key: str, enter: Callable[[str, int], bool]) -> None:
    """Interrupt the entering of a block after ever more steps, until it succeeds.

    Args:
        enter: Enters a block of a key, interrupted after so many steps, and tells
            whether that succeeded.
    """
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)
            entered = False
            for steps in range(100):
                entered = enter(f"{key}:{steps}", steps)
                assert not connection.in_atomic_block
                mine = [x for x in registry.all() if x.grant.key.startswith(key)]
                assert not [x for x in mine if x.is_referred_to()]
                if entered:
                    break
        assert entered
        assert steps
    finally:
        gc.enable()


@pytest.mark.parametrize("atomic", [False, True], ids=["plain", "atomic"])
@pytest.mark.parametrize("what", ["lock", "lease"])
def test_interrupt_while_entering(
    lock: Locks, key: str, what: str, atomic: bool
) -> None:
    """A block that isn't entered renews nothing, and leaves no transaction open."""
    # Somebody refers to them, as to those at the top of a module.
    known = []

    def enter(name: str, steps: int) -> bool:
        known.append(lock(name, atomic=atomic, timeout=0))
        return enters(known[-1] if what == "lock" else known[-1].acquire(), steps)

    assert_nothing_is_left(key, enter)


def test_interrupt_while_entering_in_async_code(lock: Locks, key: str) -> None:
    """Nor does such a block of a task: what was granted is given back."""
    known = []

    def enter(name: str, steps: int) -> bool:
        known.append(lock(name, timeout=0))
        return asyncio.run(aenters(known[-1], steps))

    assert_nothing_is_left(key, enter)


async def aenters(block: Lock, steps: int) -> bool:
    """Enter a block in a task, interrupted after so many steps."""

    def interrupt(frame: FrameType, what: str, argument: object) -> Any:
        nonlocal steps
        if frame.f_code is not Lock._aenter.__code__:
            return None
        steps -= what == "line"
        if steps < 0:
            sys.settrace(None)
            raise InterruptedError
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        async with block:
            return True
    except InterruptedError:
        return False
    finally:
        sys.settrace(before)
