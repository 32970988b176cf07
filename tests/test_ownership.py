"""Who owns: threads, tasks, forked children, and whoever presents the same owner id."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import connections

from dblocks import Lease, LeaseLost, Lock, LockTimeout, current_lease
from dblocks.backends.database import forking
from tests.support.fixtures import OtherThread, in_memory, outranks
from tests.support.processes import in_forked_child
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]


def run(main: Any) -> Any:
    """Run a coroutine with a deadline, and close the connections of its sync code."""

    async def bounded() -> Any:
        try:
            return await asyncio.wait_for(main, 2 * DEADLINE)
        finally:
            await sync_to_async(connections.close_all)()

    return asyncio.run(bounded())


# Threads


def test_thread_re_enters(acquire: Leases) -> None:
    """One thread acquires what it already holds, with the same token and owner."""
    first, second = acquire(), acquire()
    assert first.fencing_token == second.fencing_token
    assert first.owner == second.owner
    assert first is not second


def test_threads_are_different_owners(
    acquire: Leases, lock: Locks, other: OtherThread
) -> None:
    """What one thread holds, another doesn't enter."""
    acquire()
    assert other.do(lock().try_acquire) is None


def test_owner_is_made_anew(acquire: Leases) -> None:
    """Each outermost acquisition of a thread has an owner of its own."""
    first = acquire()
    first.release()
    assert acquire().owner != first.owner


def test_thread_number_used_again(lock: Locks) -> None:
    """A new thread with a dead thread's number doesn't inherit its lock."""
    leases: list[Lease] = []
    numbers: dict[str, int] = {}

    def take() -> None:
        numbers["holder"] = threading.get_ident()
        leases.append(lock().acquire(timeout=0))
        connections.close_all()

    attempts: list[Lease | None] = []

    def attempt() -> None:
        if threading.get_ident() == numbers["holder"]:
            attempts.append(lock().try_acquire())
            connections.close_all()

    holder = threading.Thread(target=take)
    holder.start()
    holder.join(DEADLINE)
    for _ in range(50):
        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join(DEADLINE)
        if attempts:
            break
    leases[0].release()
    assert attempts in ([None], []), "entered by its number"
    if not attempts:
        pytest.skip("this system didn't use the thread's number again")


def test_explicit_owner_re_enters_in_another_thread(
    acquire: Leases, lock: Locks, other: OtherThread, obtainable: Obtainable
) -> None:
    """The same owner id enters from any thread; each hold is released."""
    first = acquire(owner="importer")
    second = other.do(lock(owner="importer").acquire, timeout=0)
    assert second.fencing_token == first.fencing_token
    assert second.owner == first.owner == "importer"
    assert first.release() is True
    assert not obtainable()
    assert second.held
    assert other.do(second.release) is True
    assert obtainable()


def test_explicit_owners_differ(acquire: Leases, lock: Locks) -> None:
    """Two explicit owners in one thread exclude each other, and the thread's own."""
    acquire(owner="a")
    assert lock(owner="b").try_acquire() is None
    assert lock().try_acquire() is None


def test_lease_handed_to_another_thread(
    acquire: Leases, other: OtherThread, obtainable: Obtainable
) -> None:
    """A lease may be renewed and released by a thread that didn't acquire it."""
    lease = acquire()
    other.do(lease.check)
    other.do(lease.renew)
    assert other.do(lease.release) is True
    assert obtainable()
    assert outranks(acquire(), lease)


def test_lease_outlives_its_thread(
    lock: Locks, threads: Callable[[], OtherThread], obtainable: Obtainable
) -> None:
    """A lease from a thread that has ended is still renewed and held."""
    thread = threads()
    lease = thread.do(lock(lease=scaled(1.2)).acquire, timeout=0)
    thread.close()
    always(lambda: lease.held and not obtainable(), during=scaled(2.7), what="held")
    assert lease.release() is True


@pytest.mark.parametrize(
    "verb", ["acquire", "try_acquire", "locked", "with", "renew", "release"]
)
def test_sync_form_in_an_event_loop(lock: Locks, acquire: Leases, verb: str) -> None:
    """The sync forms refuse to block a running event loop."""
    lease = acquire()

    async def main() -> None:
        the_lock = lock(owner="task")
        if verb == "with":
            with the_lock:
                pass
        elif verb in {"renew", "release"}:
            getattr(lease, verb)()
        else:
            getattr(the_lock, verb)()

    with pytest.raises(SynchronousOnlyOperation):
        run(main())
    assert lease.release() is True


# Tasks


def test_async_twins(lock: Locks, obtainable: Obtainable) -> None:
    """Each operation has its async twin."""

    async def main() -> None:
        the_lock = lock()
        lease = await the_lock.aacquire(timeout=0)
        assert await the_lock.alocked() is True
        await lease.arenew()
        inner = await the_lock.atry_acquire()
        assert inner is not None
        assert inner.fencing_token == lease.fencing_token
        assert await inner.arelease() is True
        assert await lease.arelease() is True
        assert await the_lock.alocked() is False

    run(main())
    assert obtainable()


def test_async_with(lock: Locks, obtainable: Obtainable, key: str) -> None:
    """async with holds the lock for its block; the lease is the current one."""

    async def main() -> None:
        async with lock() as lease:
            assert lease.held
            assert current_lease(key) is lease
            assert not await sync_to_async(obtainable)()

    run(main())
    assert obtainable()


def test_siblings_are_different_owners(lock: Locks) -> None:
    """Tasks under gather, which share a thread for sync code, exclude each other."""

    async def holder(entered: asyncio.Event, leave: asyncio.Event) -> None:
        async with lock():
            entered.set()
            await asyncio.wait_for(leave.wait(), DEADLINE)

    async def sibling(entered: asyncio.Event, leave: asyncio.Event) -> Lease | None:
        await asyncio.wait_for(entered.wait(), DEADLINE)
        try:
            return await lock().atry_acquire()
        finally:
            leave.set()

    async def main() -> Any:
        events = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(holder(*events), sibling(*events))

    assert run(main())[1] is None


def test_siblings_take_turns(lock: Locks) -> None:
    """Waiting tasks don't block the loop that the holder needs, and never overlap."""
    inside = most = entries = 0

    async def contend() -> None:
        nonlocal inside, most, entries
        for _ in range(3):
            async with lock(timeout=DEADLINE):
                inside += 1
                most = max(most, inside)
                await asyncio.sleep(0.005)
                inside -= 1
                entries += 1

    async def main() -> None:
        await asyncio.gather(*[contend() for _ in range(4)])

    run(main())
    assert (most, entries) == (1, 12)


def test_task_re_enters(lock: Locks) -> None:
    """One task acquires what it already holds."""

    async def main() -> None:
        async with lock() as outer:
            await asyncio.sleep(0)
            async with lock() as inner:
                assert inner.fencing_token == outer.fencing_token
                assert inner.owner == outer.owner

    run(main())


def test_child_task_is_another_owner(lock: Locks) -> None:
    """A task that the holder starts, with a copy of its context, doesn't hold."""

    async def main() -> None:
        async with lock():
            assert await asyncio.create_task(lock().atry_acquire()) is None

    run(main())


def test_sync_code_of_a_task_is_another_owner(lock: Locks) -> None:
    """Sync code that a holding task awaits doesn't hold; an explicit owner does."""

    async def main() -> None:
        async with lock():
            assert await sync_to_async(lock().try_acquire)() is None
        async with lock(owner="shared") as lease:
            inner = await sync_to_async(lock(owner="shared").try_acquire)()
            assert inner is not None
            assert inner.fencing_token == lease.fencing_token
            await inner.arelease()

    run(main())


def test_one_call_of_sync_code_is_one_owner(lock: Locks) -> None:
    """One call of sync_to_async re-enters; the next call is another owner."""
    kept: list[Lease] = []

    def first() -> None:
        with lock(), lock():
            pass
        kept.append(lock().acquire(timeout=0))

    async def main() -> None:
        await sync_to_async(first)()
        assert await sync_to_async(lock().try_acquire)() is None
        assert await kept[0].arelease() is True

    run(main())


def test_task_entered_from_sync_code_is_another_owner(
    acquire: Leases, lock: Locks
) -> None:
    """A thread that holds and enters async_to_sync is another owner there."""
    acquire()
    assert async_to_sync(lock().atry_acquire)() is None


def test_lease_handed_to_another_task(lock: Locks, obtainable: Obtainable) -> None:
    """A lease may be released by a task that didn't acquire it."""

    async def main() -> None:
        lease = await lock().aacquire(timeout=0)
        assert await asyncio.create_task(lease.arelease()) is True

    run(main())
    assert obtainable()


def test_async_timeout(lock: Locks, acquire: Leases) -> None:
    """An async wait that ran out raises LockTimeout, and the loop ran on meanwhile."""
    acquire()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    async def main() -> None:
        ticker = asyncio.create_task(tick())
        with takes(0.5, 0.5 + SLACK), pytest.raises(LockTimeout):
            await lock().aacquire(timeout=0.5)
        until = ticks + 5
        waiting = asyncio.create_task(lock().aacquire(timeout=DEADLINE))
        while ticks <= until:
            await asyncio.sleep(0.01)
        assert not waiting.done()
        for task in (waiting, ticker):
            task.cancel()
        await asyncio.wait([waiting])

    run(main())


def test_cancelled_body_releases(lock: Locks, obtainable: Obtainable) -> None:
    """A task that is cancelled in its block leaves the lock free."""

    async def hold(entered: asyncio.Event) -> None:
        async with lock():
            entered.set()
            await asyncio.sleep(DEADLINE)

    async def main() -> None:
        entered = asyncio.Event()
        task = asyncio.create_task(hold(entered))
        await asyncio.wait_for(entered.wait(), DEADLINE)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main())
    eventually(obtainable, within=SLACK, what="the release")


def test_cancelled_wait_takes_nothing(
    acquire: Leases, lock: Locks, obtainable: Obtainable
) -> None:
    """A task that is cancelled while it waits doesn't get the lock afterwards."""
    lease = acquire()

    async def main() -> None:
        task = asyncio.create_task(lock().aacquire(timeout=None))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, SLACK)

    run(main())
    assert lease.release() is True
    eventually(obtainable, within=SLACK, what="the key")


@pytest.mark.parametrize("after", [0.0, 0.001, 0.002, 0.004, 0.008])
def test_cancelled_acquire_leaves_nothing(
    lock: Locks, obtainable: Obtainable, after: float
) -> None:
    """An acquisition that is cancelled at any moment holds nothing soon afterwards."""

    async def main() -> None:
        task = asyncio.create_task(lock(lease=30).aacquire(timeout=0))
        await asyncio.sleep(after)
        if not task.cancel():
            await task.result().arelease()
            return
        try:
            lease = await task
        except asyncio.CancelledError:
            return
        await lease.arelease()

    run(main())
    eventually(obtainable, within=2 * SLACK, what="the key")


# Forked children


def test_inherited_lease_is_lost(acquire: Leases, obtainable: Obtainable) -> None:
    """In a forked child the parent's lease is lost; the parent's goes on."""
    lease = acquire(lease=scaled(1.2))

    def child() -> list[Any]:
        renewal = "renewed"
        try:
            lease.renew()
        except LeaseLost as error:
            renewal = str(error.reason)
        return [
            lease.held,
            lease.remaining(),
            lease.lost_reason,
            renewal,
            lease.release(),
        ]

    assert in_forked_child(child) == [False, 0.0, "forked", "forked", False]
    always(
        lambda: lease.held and not obtainable(),
        during=scaled(1.1),
        what="the parent's lease",
    )
    assert lease.release() is True


def test_check_in_a_forked_child(acquire: Leases) -> None:
    """check() in the child raises LeaseLost with the reason."""
    lease = acquire()

    def child() -> str:
        with pytest.raises(LeaseLost) as caught:
            lease.check()
        return str(caught.value.reason)

    assert in_forked_child(child) == "forked"
    assert lease.held


def test_child_has_no_current_lease(acquire: Leases) -> None:
    """The child's owner is a new one, with no current lease."""
    acquire()

    def child() -> str:
        with pytest.raises(LookupError):
            current_lease()
        return "none"

    assert in_forked_child(child) == "none"


def test_leaving_an_inherited_block(lock: Locks, obtainable: Obtainable) -> None:
    """A child that leaves the parent's block releases nothing of the parent's."""
    with lock() as lease:
        reached = in_forked_child(
            lambda: lease.__exit__(RuntimeError, RuntimeError(), None)
        )
        assert not reached
        assert not obtainable()
        assert lease.held


def test_fork_that_waits_for_a_thread(
    lock: Locks, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork may need a mutex of a thread's that is about to take a lock."""
    some_thread = -1
    monkeypatch.setattr(forking, "PATIENCE", 0.1)
    monkeypatch.setattr(forking, "_forking", {some_thread})
    try:
        assert other.do(lambda: lock().acquire().release()) is True
    finally:
        # What it waits for ends, with the test.
        forking._forking.clear()


def test_forked_child_is_another_owner(acquire: Leases, lock: Locks) -> None:
    """A child doesn't enter what its parent holds, and can lock by itself."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    lease = acquire(lease=scaled(2))
    connections.close_all()

    def child() -> list[Any]:
        refused = lock().try_acquire() is None
        with lock("child's own key", lease=scaled(1.2)).acquire(timeout=2) as own:
            until = time.monotonic() + scaled(2)
            while own.held and time.monotonic() < until:
                time.sleep(0.05)
            kept = own.held
        connections.close_all()
        return [refused, kept]

    assert in_forked_child(child) == [True, True]
    lease.renew()
    assert lease.release() is True
