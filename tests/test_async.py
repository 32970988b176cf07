"""Locks in event loops: cancelled at any moment, waited for by hundreds, over HTTP."""

from __future__ import annotations

import asyncio
import math
import random
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.conf import settings
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper

from dblocks import Lease, Lock, LockTimeout, clock
from dblocks.backends.database.session_locks import SessionLock
from dblocks.backends.values import Reading
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.waiting import queue, wait
from tests.support import asgi
from tests.support.fixtures import OtherThread, in_memory
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, SLACK, eventually, scaled
from tests.test_ownership import run

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]

#: Asgiref's thread for sync code, the first waiter at its gate, the timekeeper, the
#: renewals, and what is just ending: on a busy machine several hand-overs overlap.
FEW_THREADS = 9


def asked_at_once(backend: str) -> int:
    """As many servers does an engine ask side by side, each in a thread."""
    return len(settings.DBLOCKS[backend]["LOCATION"]) if backend == "redlock" else 0


#: Of asgiref's thread, the renewals, the gate of who holds and of who is next, and the
#: holders', of whom several overlap on a busy machine.
FEW_CONNECTIONS = 9


class Open:
    """What is open in this process beside what was there at the start."""

    def __init__(self) -> None:
        self.connections: weakref.WeakSet[BaseDatabaseWrapper] = weakref.WeakSet()
        self.threads_before = set(threading.enumerate())
        self.most_threads = self.most_connections = 0

    def threads(self) -> int:
        return len(set(threading.enumerate()) - self.threads_before)

    def connected(self) -> int:
        if in_memory():
            # Django never closes a connection to a database in memory.
            return 0
        return sum(each.connection is not None for each in list(self.connections))

    def note(self) -> None:
        self.most_threads = max(self.most_threads, self.threads())
        self.most_connections = max(self.most_connections, self.connected())

    async def watch(self) -> None:
        while True:
            self.note()
            await asyncio.sleep(0.005)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Open:
    """Count the threads and connections that appear from now on."""
    # Asgiref's thread stays for the rest of the process.
    asyncio.run(sync_to_async(threading.get_ident)())
    opened = Open()
    connect = BaseDatabaseWrapper.connect

    def remember(self: BaseDatabaseWrapper) -> None:
        opened.connections.add(self)
        connect(self)

    monkeypatch.setattr(BaseDatabaseWrapper, "connect", remember)
    return opened


HoldUp = Callable[[str, Callable[[], object]], None]


@pytest.fixture
def hold_up(backend: str, monkeypatch: pytest.MonkeyPatch) -> HoldUp:
    """Do something each time before the engine is asked, by the verb's name."""
    kind = type(backends[backend])

    def hold_up(verb: str, first: Callable[[], object]) -> None:
        original = getattr(kind, verb)

        def ask(*arguments: Any) -> Any:
            first()
            return original(*arguments)

        monkeypatch.setattr(kind, verb, ask)

    return hold_up


@pytest.fixture
def slow(hold_up: HoldUp) -> None:
    """Let every look at a key take half a second."""
    hold_up("look", partial(time.sleep, 0.5))


Block = Callable[[], Callable[[], None]]


@pytest.fixture
def block(lock: Locks, other: OtherThread) -> Block:
    """Let a task wait for the key whose event loop is then blocked; return its end."""

    def block() -> Callable[[], None]:
        waiting, leave = threading.Event(), threading.Event()

        async def main() -> None:
            task = asyncio.create_task(lock().aacquire(timeout=2 * DEADLINE))
            await asyncio.sleep(0.3)
            waiting.set()
            assert leave.wait(2 * DEADLINE)
            await (await task).arelease()

        blocked = other.start(run, main())
        assert waiting.wait(DEADLINE)

        def unblock() -> None:
            leave.set()
            blocked.result(timeout=DEADLINE)

        return unblock

    return block


class Inside:
    """Fails when two are inside at once."""

    def __init__(self) -> None:
        self.count = self.entries = 0

    @contextmanager
    def visit(self) -> Iterator[None]:
        assert not self.count, "two are inside"
        self.count += 1
        self.entries += 1
        try:
            yield
        finally:
            self.count -= 1


def test_a_thousand_cancellations(
    backend: str, lock: Locks, key: str, opened: Open, committed: None
) -> None:
    """Tasks cancelled anywhere in acquire, body and release leave nothing behind."""
    chance = random.Random(20240229)
    keys = [f"{key}:{number}" for number in range(4)]
    inside = {name: Inside() for name in keys}
    cancelled = 0
    pace = 0.0

    async def visit(name: str, stay: float) -> None:
        async with lock(name, lease=60, timeout=DEADLINE):
            with inside[name].visit():
                await asyncio.sleep(stay)

    async def by_hand(name: str, stay: float) -> None:
        acquiring = lock(name, lease=60).aacquire(timeout=DEADLINE)
        lease = await asyncio.wait_for(acquiring, 2 * DEADLINE)
        try:
            with inside[name].visit():
                await asyncio.sleep(stay)
        finally:
            await lease.arelease()

    async def cancel(task: asyncio.Task[None], after: float) -> None:
        nonlocal cancelled
        await asyncio.sleep(after)
        cancelled += task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    async def round_of(size: int) -> None:
        tasks = []
        for number in range(size):
            form = chance.choice([visit, by_hand])
            stay = chance.choice([0, 0.0005, 0.002])
            tasks.append(asyncio.create_task(form(keys[number % 4], stay)))
        # From before the first has the lock until after the last has given it back.
        spread = chance.choice([0.2, 2, 20]) * pace
        await asyncio.gather(*[cancel(t, chance.uniform(0, spread)) for t in tasks])

    def entries() -> int:
        return sum(each.entries for each in inside.values())

    async def main() -> None:
        nonlocal pace
        started = time.monotonic()
        for _ in range(5):
            async with lock():
                pass
        # At its slowest what leaves time for 25 rounds.
        pace = min((time.monotonic() - started) / 5, 0.03)
        # On a machine that has become busy, more rounds until some had the lock.
        while cancelled < 1000 or entries() <= 10:
            await round_of(40)
            # What was abandoned keeps the threads busy that ask several servers.
            await asyncio.sleep(0.1 * (asked_at_once(backend) > 0))
        for name in keys:
            # Of the last ones, some are still being given back.
            lease = await lock(name).aacquire(timeout=5 * SLACK)
            await lease.arelease()

    try:
        run(main())
    except asyncio.TimeoutError:
        pytest.fail(f"time is over: {cancelled} cancelled, {entries()} got in")
    assert entries() > 10
    eventually(lambda: not opened.threads(), what="the end of the threads")
    eventually(lambda: not opened.connected(), what="the end of the connections")


@pytest.mark.needs("has_table")
def test_cancelled_at_the_end_of_its_wait(
    lock: Locks,
    key: str,
    other: OtherThread,
    obtainable: Obtainable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was granted to a task that never heard of it is given back."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite's gates don't show who waits")
    show = SessionLock.show_waiter
    cancels: list[Callable[[], object]] = []
    shown = threading.Event()

    def show_and_cancel(self: SessionLock, waits: bool) -> None:
        if not waits:
            cancels.pop()()
        show(self, waits)
        shown.set()

    async def main() -> None:
        task = asyncio.create_task(lock(lease=60, timeout=2 * DEADLINE).aacquire())
        loop = asyncio.get_running_loop()
        cancels.append(lambda: loop.call_soon_threadsafe(task.cancel))
        assert await asyncio.to_thread(shown.wait, DEADLINE)
        await asyncio.to_thread(other.do, release)
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(SessionLock, "show_waiter", show_and_cancel)
    # As another process has it: among themselves, waiters of one need no gate.
    rows = DistributedLock.objects
    row = other.do(rows.acquire, key, owner="theirs", lease=600)
    release = partial(rows.release, key, owner="theirs", version=row.version)
    run(main())
    assert not cancels
    eventually(obtainable, within=DEADLINE, what="the key")


def test_loop_that_is_closed(
    backend: str,
    lock: Locks,
    obtainable: Obtainable,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was granted to a task of a loop that is closed meanwhile lapses."""
    loop = asyncio.new_event_loop()
    call_soon = loop.call_soon_threadsafe
    kind = type(backends[backend])
    try_acquire = kind.try_acquire
    stopped, passed_on = threading.Event(), threading.Event()

    def try_when_stopped(*arguments: Any) -> Any:
        assert stopped.wait(DEADLINE)
        return try_acquire(*arguments)

    def call_soon_and_tell(*arguments: Any, **options: Any) -> asyncio.Handle:
        try:
            return call_soon(*arguments, **options)
        finally:
            passed_on.set()

    monkeypatch.setattr(kind, "try_acquire", try_when_stopped)
    task = loop.create_task(lock(lease=scaled(1.2)).aacquire(timeout=0))
    loop.run_until_complete(asyncio.sleep(0))
    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon_and_tell)
    stopped.set()
    assert passed_on.wait(DEADLINE)
    assert not obtainable()
    loop.close()
    eventually(obtainable, what="the end of the lease")
    assert not task.done()
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def waiters(lock: Locks, count: int, **options: Any) -> Any:
    """Return a coroutine of so many tasks that take the key, and their visits."""
    inside = Inside()
    waiting = 0

    async def visit() -> None:
        nonlocal waiting
        waiting += 1
        async with lock(lease=60, **options):
            with inside.visit():
                await asyncio.sleep(0)

    async def main(opened: Open, meanwhile: Coroutine[Any, Any, object]) -> list[Any]:
        watching = asyncio.create_task(opened.watch())
        tasks = [asyncio.create_task(visit()) for _ in range(count)]
        while waiting < count:
            await asyncio.sleep(0.01)
        # Time enough to look for those who would each take a thread.
        await asyncio.sleep(0.3)
        await meanwhile
        results = await asyncio.gather(*tasks, return_exceptions=True)
        opened.note()
        watching.cancel()
        return results

    return main, inside


def test_hundreds_wait(
    backend: str, acquire: Leases, lock: Locks, other: OtherThread, opened: Open
) -> None:
    """Hundreds of waiting tasks cost a few threads and connections; all get in."""
    lease = other.do(acquire)
    main, inside = waiters(lock, 200, timeout=2 * DEADLINE)
    release = sync_to_async(other.do, thread_sensitive=False)(lease.release)
    assert run(main(opened, release)) == [None] * 200
    assert inside.entries == 200
    # The loop's own pool ran the release.
    assert opened.most_threads <= FEW_THREADS + 1 + asked_at_once(backend)
    assert opened.most_connections <= FEW_CONNECTIONS


def test_hundreds_wait_where_attempts_take_long(
    backend: str,
    lock: Locks,
    opened: Open,
    hold_up: HoldUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor do those who look whether the first is stuck when it has just become first.

    Between a release and the answer to the next one there is nothing to be seen.
    """
    monkeypatch.setattr(wait, "MAX_PAUSE", 0.5)
    hold_up("try_acquire", partial(time.sleep, 0.02))
    main, inside = waiters(lock, 100, timeout=2 * DEADLINE)
    assert run(main(opened, asyncio.sleep(0))) == [None] * 100
    assert inside.entries == 100
    assert opened.most_threads <= FEW_THREADS + asked_at_once(backend)


def test_first_one_is_stuck(
    lock: Locks,
    acquire: Leases,
    block: Block,
    threads: Callable[[], OtherThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those who wait behind a task whose event loop is blocked pass it by."""
    monkeypatch.setattr(wait, "MAX_PAUSE", 0.5)
    lease = acquire()

    def visit() -> None:
        with lock(timeout=DEADLINE):
            pass

    unblock = block()
    visits = [threads().start(visit) for _ in range(3)]
    lease.release()
    try:
        for each in visits:
            each.result(timeout=DEADLINE)
    finally:
        unblock()


@pytest.mark.usefixtures("committed")
def test_first_one_is_stuck_when_the_time_is_over(
    lock: Locks,
    key: str,
    workers: Workers,
    block: Block,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who waits behind it asks, and finds the key free: old news are no answer."""
    monkeypatch.setattr(queue, "NEWS", 0.2)
    holder = workers.start("hold", key=key, backend=lock().backend)
    holder.expect("held")
    unblock = block()
    holder.tell("release")
    holder.expect("released")
    try:
        lock().acquire(timeout=2.5).release()
    finally:
        unblock()


def test_news_in_an_event_loop_that_lags(
    backend: str,
    key: str,
    lock: Locks,
    acquire: Leases,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it passes on late is not taken for new: the key was released meanwhile."""
    monkeypatch.setattr(queue, "NEWS", 0.1)
    lease = other.do(acquire)
    kind = type(backends[backend])
    look, asked, blocked, told = kind.look, *[threading.Event() for _ in range(3)]

    def look_once_blocked(*arguments: Any) -> Reading:
        asked.set()
        assert blocked.wait(DEADLINE)
        seen = look(*arguments)
        told.set()
        return seen

    async def main() -> None:
        task = asyncio.create_task(lock().aacquire(timeout=2 * DEADLINE))
        await asyncio.sleep(0.3)
        monkeypatch.setattr(kind, "look", look_once_blocked)
        while not asked.is_set():
            await asyncio.sleep(0.01)
        blocked.set()
        assert told.wait(DEADLINE)
        time.sleep(0.3)
        other.do(lease.release)
        line = queue.queues.find(backends[backend], key)
        assert line is not None
        for _turn in range(3):
            await asyncio.sleep(0)
            news = line.last_seen(math.inf)
            assert news is None or not news.is_had_by(lease.owner)
        await (await task).arelease()

    run(main())


def test_first_one_after_a_standstill(
    lock: Locks, acquire: Leases, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all of them stood still, nobody is passed by: they keep their order."""
    monkeypatch.setattr(wait, "MAX_PAUSE", 0.5)
    lease = other.do(acquire)
    served: list[int] = []

    async def visit(number: int) -> None:
        async with lock(timeout=2 * DEADLINE):
            served.append(number)

    async def main() -> None:
        visits = []
        for number in range(9):
            visits.append(asyncio.create_task(visit(number)))
            await asyncio.sleep(0.1)
        time.sleep(1.2)
        await asyncio.sleep(0.3)
        await lease.arelease()
        await asyncio.gather(*visits)

    run(main())
    assert served == sorted(served)


def test_first_one_whose_answer_does_not_come(
    lock: Locks,
    acquire: Leases,
    other: OtherThread,
    hold_up: HoldUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is passed by: the others don't wait for the engine's answer to it."""
    monkeypatch.setattr(wait, "MAX_PAUSE", 0.3)
    lease = other.do(acquire)
    served: list[int] = []
    hangs, all_others = [True], threading.Event()

    def hang_once() -> None:
        with suppress(IndexError):
            hangs.pop()
            assert all_others.wait(DEADLINE)

    async def visit(number: int) -> None:
        async with lock(timeout=2 * DEADLINE):
            served.append(number)
            # Until the next one has seen the key taken, so that it looks.
            await asyncio.sleep(0.05)
        if len(served) == 5:
            all_others.set()

    async def main() -> None:
        visits = []
        for number in range(6):
            visits.append(asyncio.create_task(visit(number)))
            await asyncio.sleep(0.05)
        hold_up("look", hang_once)
        await asyncio.sleep(0.3)
        await lease.arelease()
        await asyncio.gather(*visits)

    run(main())
    assert not hangs
    assert sorted(served) == [*range(6)]


def test_order_after_one_is_passed_by() -> None:
    """The next one comes instead, not who noticed; and the first, when it is back."""
    line = queue.WaitQueue()
    first, second, third = waiting = [queue.Waiter() for _ in range(3)]
    line.waiters.extend(waiting)
    line.pass_by_first(third)
    assert line.is_first(second)
    assert second.wait(0)
    line.waiters.remove(second)
    assert line.is_first(third)
    first.wait(0)
    assert line.is_first(first)


def test_order_after_a_blocked_event_loop_is_passed_by() -> None:
    """All its tasks are passed by, but only where it isn't the loop that goes on."""
    line = queue.WaitQueue()

    async def join() -> list[queue.Waiter]:
        return [queue.Waiter() for _ in range(2)]

    loops = [asyncio.new_event_loop() for _ in range(2)]
    (first, second), (third, _) = [loop.run_until_complete(join()) for loop in loops]
    line.waiters.extend([first, second, third])
    line.pass_by_first(second)
    assert line.is_first(second)
    first.is_passed_by = False
    line.pass_by_first(third)
    assert line.is_first(third)
    for loop in loops:
        loop.close()


def test_release_just_when_an_answer_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What another thread forgets at that moment is no error for who looks at it."""
    line, read = queue.WaitQueue(), clock.monotonic

    def read_late() -> float:
        line.forget()
        return read()

    for look in (line.last_seen, line.last_answer):
        line.saw(Reading(remaining=60.0))
        monkeypatch.setattr(clock, "monotonic", read_late)
        look(math.inf)
        assert look(math.inf) is None
        monkeypatch.setattr(clock, "monotonic", read)


def test_hundreds_time_out(
    backend: str, acquire: Leases, lock: Locks, other: OtherThread, opened: Open
) -> None:
    """Nor do they when the time of all runs out at once; each is told who holds."""
    length = backends[other.do(acquire, note="the import").backend].lease
    main, inside = waiters(lock, 200, timeout=0.6)
    results = run(main(opened, asyncio.sleep(0)))
    assert {type(result) for result in results} == {LockTimeout}
    assert {result.note for result in results} == {"the import"}
    assert all(length - 10 < result.retry_after <= length for result in results)
    assert opened.most_threads <= FEW_THREADS + asked_at_once(backend)
    assert opened.most_connections <= FEW_CONNECTIONS
    assert not inside.entries


def test_hundreds_time_out_at_a_slow_server(
    backend: str,
    lock: Locks,
    opened: Open,
    acquire: Leases,
    other: OtherThread,
    slow: None,
) -> None:
    """Nor before the first of them has had any answer."""
    other.do(acquire, note="the import")
    main, _ = waiters(lock, 200, timeout=0.2)
    results = run(main(opened, asyncio.sleep(0)))
    assert {type(result) for result in results} == {LockTimeout}
    assert {result.note for result in results} == {"the import"}
    assert opened.most_threads <= FEW_THREADS + asked_at_once(backend)


def test_hundreds_time_out_at_a_server_that_stands_still(
    backend: str,
    lock: Locks,
    opened: Open,
    acquire: Leases,
    other: OtherThread,
    hold_up: HoldUp,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor when the first has no answer for long: what it was told before is true."""
    monkeypatch.setattr(queue, "NEWS", 0.1)
    other.do(acquire, note="the import")
    main, _ = waiters(lock, 200, timeout=1)
    hang = [3.0, 0.0]

    def hang_the_second_time() -> None:
        with suppress(IndexError):
            time.sleep(hang.pop())

    hold_up("look", hang_the_second_time)
    results = run(main(opened, asyncio.sleep(0)))
    assert not hang
    assert {type(result) for result in results} == {LockTimeout}
    assert {result.note for result in results} == {"the import"}
    assert opened.most_threads <= FEW_THREADS + asked_at_once(backend)


def test_hundreds_time_out_where_the_event_loop_lags(
    backend: str,
    lock: Locks,
    opened: Open,
    acquire: Leases,
    other: OtherThread,
    hold_up: HoldUp,
) -> None:
    """Nor if the first one's answer comes in time, and the event loop lags behind."""
    other.do(acquire, note="the import")
    main, _ = waiters(lock, 200, timeout=0.2)
    loops: list[asyncio.AbstractEventLoop] = []

    def let_the_loop_lag() -> None:
        if loops:
            loops.pop().call_soon_threadsafe(time.sleep, 2)
        time.sleep(0.5)

    async def lagging() -> list[Any]:
        loops.append(asyncio.get_running_loop())
        hold_up("look", let_the_loop_lag)
        results: list[Any] = await main(opened, asyncio.sleep(0))
        return results

    results = run(lagging())
    assert {type(result) for result in results} == {LockTimeout}
    assert {result.note for result in results} == {"the import"}
    assert opened.most_threads <= FEW_THREADS + asked_at_once(backend)


def test_first_come_first_served(lock: Locks, acquire: Leases) -> None:
    """Tasks of one process get the key in the order in which they asked for it."""
    lease = acquire()
    order: list[int] = []

    async def visit(number: int) -> None:
        async with lock(timeout=DEADLINE):
            order.append(number)

    async def main() -> None:
        tasks = []
        for number in range(20):
            tasks.append(asyncio.create_task(visit(number)))
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        await lease.arelease()
        await asyncio.gather(*tasks)

    run(main())
    assert order == list(range(20))


def test_waiter_doesnt_hold_up_its_own_reentry(lock: Locks) -> None:
    """A task re-enters although others stand in line for the key."""

    async def wait() -> None:
        async with lock(timeout=DEADLINE):
            pass

    async def main() -> None:
        async with lock(owner=None):
            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.sleep(0.1)
            async with lock(timeout=SLACK):
                pass
        await asyncio.gather(*waiting)

    run(main())


def test_explicit_owner_passes_the_line(lock: Locks) -> None:
    """So does whoever presents the holder's owner id."""

    async def wait() -> None:
        async with lock(timeout=DEADLINE):
            pass

    async def co_owner() -> None:
        async with lock(owner="me", timeout=SLACK):
            pass

    async def main() -> None:
        async with lock(owner="me"):
            waiting = [asyncio.create_task(wait()) for _ in range(3)]
            await asyncio.sleep(0.1)
            await asyncio.create_task(co_owner())
        await asyncio.gather(*waiting)

    run(main())


def test_crossing_twice(lock: Locks) -> None:
    """Async code that sync code of a holding task enters is another owner again."""

    def sync_code() -> Lease | None:
        return async_to_sync(lock().atry_acquire)()

    async def main() -> None:
        async with lock():
            assert await sync_to_async(sync_code)() is None

    run(main())


def test_renewal_while_the_loop_is_blocked(
    lock: Locks, obtainable: Obtainable, other: OtherThread
) -> None:
    """A loop that is blocked for longer than the lease doesn't lose the lock."""

    async def main() -> None:
        length = scaled(2.4)
        async with lock(lease=length) as lease:
            until = time.monotonic() + 1.5 * length
            while time.monotonic() < until:
                time.sleep(0.1)
                assert lease.held
            assert not await sync_to_async(obtainable)()

    run(main())


def test_loss_while_the_loop_is_blocked(lock: Locks) -> None:
    """The loss of a lease is noticed and told although the loop is blocked."""

    async def main() -> None:
        lease = await lock(lease=0.4, renew=False).aacquire()
        lost = threading.Event()
        lease.on_lost(lambda lease: lost.set())
        assert lost.wait(0.4 + SLACK)
        assert not lease.held
        assert await lease.arelease() is False

    run(main())


def test_timeout_around_a_block(lock: Locks, obtainable: Obtainable) -> None:
    """A block that is given up from outside releases."""

    async def stay() -> None:
        async with lock():
            await asyncio.sleep(DEADLINE)

    async def main() -> None:
        with pytest.raises((asyncio.TimeoutError, TimeoutError)):
            await asyncio.wait_for(stay(), 0.2)

    run(main())
    eventually(obtainable, within=SLACK, what="the key")


# Over HTTP


@pytest.fixture
def port(backend: str) -> Iterator[int]:
    """One ASGI process serves, and locks in the engine under test; its port."""
    with asgi.serving(backend) as port:
        yield port


def ask(port: int, *addresses: str, **options: Any) -> list[str]:
    """Send requests at once; their statuses."""

    async def main() -> list[str]:
        return await asyncio.gather(
            *[asgi.get(port, address, **options) for address in addresses]
        )

    return run(main())


@pytest.mark.parametrize("view", ["block", "decorated"])
def test_parallel_requests(port: int, key: str, view: str) -> None:
    """Requests for one key, served by one process, never overlap, and none starves."""
    assert ask(port, *[f"{view}/{key}"] * 40) == ["200"] * 40
    assert (asgi.room.most, len(asgi.room.tokens)) == (1, 40)


def test_requests_for_several_keys(port: int, key: str) -> None:
    """Requests for other keys don't wait for each other."""
    addresses = [f"block/{key}{number}?stay=0.3" for number in range(8)]
    assert ask(port, *addresses) == ["200"] * 8
    assert asgi.room.most > 1


def test_waiting_requests_cost_no_connections(
    port: int,
    backend: str,
    key: str,
    opened: Open,
    acquire: Leases,
    other: OtherThread,
) -> None:
    """Requests that wait add no connections, and no threads to those of Django."""

    async def peak(address: str, count: int) -> tuple[int, int]:
        asgi.room.arrived = opened.most_threads = opened.most_connections = 0
        requests = [asyncio.create_task(asgi.get(port, address)) for _ in range(count)]
        while asgi.room.arrived < count:
            await asyncio.sleep(0.01)
            opened.note()
        await asyncio.sleep(0.2)
        opened.note()
        await asyncio.gather(*requests)
        return opened.most_threads, opened.most_connections

    async def main() -> None:
        count, before = 25, set(threading.enumerate())
        djangos, _ = await peak(f"idle/{key}?stay=1", count)
        # A request's thread ends some time after its answer. A renewal may have begun.
        while any(
            not thread.name.startswith("dblocks-")
            for thread in set(threading.enumerate()) - before
        ):
            await asyncio.sleep(0.01)
        threads, connected = await peak(f"block/{key}?timeout=1", count)
        assert threads <= djangos + FEW_THREADS + asked_at_once(backend)
        assert connected <= FEW_CONNECTIONS

    other.do(acquire)
    run(main())


def test_clients_that_hang_up(
    port: int, key: str, lock: Locks, obtainable: Obtainable
) -> None:
    """A client that goes away while it waits, or while inside, leaves the key free."""
    addresses = [f"block/{key}?stay=0.2"] * 10
    ask(port, *addresses, hang_up=0.3)
    eventually(lambda: not asgi.room.inside, what="nobody inside")
    eventually(obtainable, within=DEADLINE, what="the key")
    assert ask(port, f"block/{key}") == ["200"]
    assert asgi.room.most == 1


@pytest.mark.parametrize("verb", ["aacquire", "atry_acquire", "__aenter__"])
def test_atomic_lock_in_async_code(lock: Locks, verb: str) -> None:
    """A lock whose block would be a transaction is refused before it is taken."""
    with pytest.raises(TypeError, match="atomic=True can't be used in async code"):
        run(getattr(lock(atomic=True), verb)())
    assert not lock().locked()


def test_atomic_lease_in_an_async_block(lock: Locks) -> None:
    """A lease whose block would be a transaction can't be entered by async with."""
    lease = lock(atomic=True).acquire(timeout=0)

    async def main() -> None:
        async with lease:
            pytest.fail("entered")

    with pytest.raises(TypeError, match="atomic=True can't be used with async with"):
        run(main())
    assert lease.release() is True
