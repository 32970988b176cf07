"""Leases that are dropped: nothing but their users keeps them alive and renewed."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from django.db import OperationalError

from dblocks import Lease, LeaseLost, Lock, clock, distributed_lock, locks, signals
from dblocks.backends.values import Grant, Granted
from dblocks.conf import backends
from dblocks.holding.holds import Claim, Hold, terms
from dblocks.holding.owners import Owner
from dblocks.holding.registry import Registry, registry
from tests.support.fixtures import OtherThread, fitting
from tests.support.timing import DEADLINE, SLACK, eventually

Locks = Callable[..., Lock[Any]]
Leases = Callable[..., Lease]

pytestmark = pytest.mark.filterwarnings("ignore:The lease on:ResourceWarning")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Whatever needs the garbage collector stays alive."""
    gc.disable()
    yield
    gc.enable()


def held_during(lock: Locks, work: Callable[[], object]) -> Callable[[], object]:
    """Drop a lease on leaving, and say who still has it."""
    lease = lock().acquire(timeout=DEADLINE)
    work()
    return weakref.ref(lease)


def assert_gone(dropped: Callable[[], object]) -> None:
    """Fail if a lease lives on; the scheduler may look at it for an instant."""
    eventually(lambda: dropped() is None, within=SLACK, what="the end of the lease")


def nothing() -> None:
    pass


@pytest.mark.usefixtures("no_collector")
class TestKeptByNothing:
    """No frame of a call that is over keeps its callers' leases."""

    @pytest.mark.parametrize("before", ["new", "known", "taken"])
    def test_acquisition(self, lock: Locks, other: OtherThread, before: str) -> None:
        """However it was acquired, a lease that is dropped is gone at once."""

        def release_later(lease: Lease) -> bool:
            time.sleep(0.3)
            return lease.release()

        if before != "new":
            theirs = other.do(lock().acquire)
            released = other.start(release_later, theirs)
            if before == "known":
                assert released.result(timeout=DEADLINE)
        assert_gone(held_during(lock, nothing))

    def test_making_of_another_lock(self, lock: Locks, key: str) -> None:
        """So is one that was a variable of a function that then made a lock."""
        lease: Lease | None = lock().acquire()
        dropped = weakref.ref(lease)
        distributed_lock(f"{key}:other")
        lease = None
        assert_gone(dropped)

    def test_question(self, lock: Locks, key: str) -> None:
        """So is one whose holder asked for another key."""
        assert_gone(held_during(lock, lock(f"{key}:other").locked))

    def test_set_that_is_not_released(
        self, lock: Locks, backend: str, key: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So is one whose holder could not release others."""

        def fail(*arguments: Any, **options: Any) -> Any:
            raise OperationalError("out of reach")

        def release() -> None:
            options = fitting(backend, {"lease": 5})
            leases = distributed_lock(
                f"{key}:1", f"{key}:2", backend=backend, **options
            ).acquire(timeout=0)
            with monkeypatch.context() as patch:
                patch.setattr(backends[backend], "release_all", fail)
                patch.setattr(backends[backend], "release", fail)
                with suppress(OperationalError):
                    leases.release()

        assert_gone(held_during(lock, release))

    def test_receiver_that_fails(
        self, lock: Locks, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So is one of which a signal's receiver was told, and failed."""
        # The tests' own handler keeps what is logged, with all frames.
        monkeypatch.setattr(logging.getLogger("django.dispatch"), "disabled", True)

        def fail(**facts: object) -> None:
            raise ValueError("told")

        signals.lock_acquired.connect(fail)
        try:
            assert_gone(held_during(lock, nothing))
        finally:
            signals.lock_acquired.disconnect(fail)

    def test_error_in_async_code(
        self, lock: Locks, key: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        """So is one whose holder awaited what failed; the error is told once."""

        async def hold() -> Callable[[], object]:
            lost = await lock(f"{key}:lost").aacquire()
            await lost.arelease()
            lease = await lock().aacquire()
            with pytest.raises(LeaseLost):
                await lost.arenew()
            return weakref.ref(lease)

        async def drop() -> Callable[[], object]:
            task = asyncio.create_task(hold())
            return await task

        assert_gone(asyncio.run(drop()))
        assert not [line for line in caplog.messages if "nobody waited" in line]


# Blocks that somebody else leaves


def in_generator(lock: Lock[Any]) -> Iterator[Lease]:
    with lock as lease:
        yield lease


def test_generator_that_another_thread_closes(
    lock: Locks, other: OtherThread, key: str
) -> None:
    """The block that is closed is the generator's, not that of who closes it."""
    shared = lock(permits=2, timeout=0)
    generator = in_generator(shared)
    theirs = other.do(next, generator)
    with shared as mine:
        generator.close()
        assert mine.held
        assert not theirs.held
        with shared as inner:
            assert inner.permit == mine.permit
        assert mine.held
    assert not mine.held


def test_asynchronous_generator_that_is_abandoned(lock: Locks) -> None:
    """A task of its own finishes it, while another task has the same lock."""
    shared = lock(permits=2, timeout=0)
    taken: list[Lease] = []

    async def rows() -> AsyncIterator[int]:
        async with shared as lease:
            taken.append(lease)
            yield 1
            yield 2

    async def read_one() -> None:
        async for _ in rows():
            break

    async def main() -> None:
        async with shared as mine:
            await asyncio.create_task(read_one())
            gc.collect()
            until = time.monotonic() + DEADLINE
            while taken[0].held and time.monotonic() < until:
                await asyncio.sleep(0.01)
            assert not taken[0].held
            assert mine.held

    asyncio.run(main())


def test_left_where_it_was_not_entered(lock: Locks, other: OtherThread) -> None:
    """Nobody leaves one of several blocks that others are in."""
    shared = lock(permits=2, timeout=0)
    shared.__enter__()
    other.do(shared.__enter__)
    third = OtherThread()
    with pytest.raises(RuntimeError, match="not entered"):
        third.do(shared.__exit__, None, None, None)
    third.close()
    other.do(shared.__exit__, None, None, None)
    shared.__exit__(None, None, None)


# The registry


@pytest.mark.parametrize("tokens", [(None, None), (5, 6)])
def test_grant_that_is_noted_too_late(
    backend: str, key: str, tokens: tuple[int | None, int | None]
) -> None:
    """An answer that comes when its lease is over ends no other's hold."""
    how, now = terms(1.0), clock.monotonic()

    def hold(owner: str, token: int | None, sent: float) -> Hold:
        claim = Claim(backends[backend], key, how, Owner(owner), None, "", locks.Lock)
        granted = Granted(Grant(key, owner, token), 100.0)
        return Hold(claim, granted, sent)

    mine, late = hold("mine", tokens[1], now), hold("late", tokens[0], now - 2)
    registry.add(mine)
    registry.add(late)
    assert mine.is_live()
    assert not late.is_live()
    for each in (mine, late):
        registry.discard(each)


def test_finalizer_while_the_registry_forgets(lock: Locks, key: str) -> None:
    """The garbage collector may take locks in the middle of that."""
    mine = Registry()
    place = backends["default"]
    kept = [threading.Event() for _ in range(2000)]
    for number, each in enumerate(kept):
        mine._latest[place, str(number)] = weakref.ref(each)  # type: ignore[assignment]

    class Garbage:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            mine._latest[place, f"new {id(self)}"] = weakref.ref(kept[0])  # type: ignore[assignment]

    threshold = gc.get_threshold()
    try:
        for _ in range(20):
            Garbage()
            gc.set_threshold(10)
            mine.forget(0.0)
            gc.set_threshold(*threshold)
    finally:
        gc.set_threshold(*threshold)
    assert len(mine._latest) >= len(kept)
