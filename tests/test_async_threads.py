"""Async verbs beside sync code that occupies the thread which asgiref gives it."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import pytest
from asgiref.sync import sync_to_async
from django.db.backends.utils import CursorWrapper

from dblocks import Lease, Lock, LockTimeout, distributed_lock, signals
from dblocks.backends.database import dialects
from dblocks.conf import backends
from dblocks.permits import row_keys
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, eventually
from tests.test_ownership import run

T = TypeVar("T")
Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]

#: For how long sync code waits for a key: longer than what it must not hold up takes.
LONG = 3 * SLACK


async def soon(awaitable: Awaitable[T], what: str) -> T:
    """Return the result, which must be there at once, give or take a busy machine."""
    task = asyncio.ensure_future(awaitable)
    done, _ = await asyncio.wait([task], timeout=SLACK)
    if not done:
        pytest.fail(f"{what} took more than {SLACK:g} s")
    return task.result()


async def reached(event: threading.Event) -> None:
    """Wait for what happens in a thread, without a thread."""
    for _ in range(round(DEADLINE / 0.01)):
        if event.is_set():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the thread didn't get there")


@asynccontextmanager
async def occupied() -> AsyncIterator[None]:
    """Keep the thread that ``sync_to_async`` uses busy for the time of the block."""
    began, over = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        over.wait(DEADLINE)

    working = asyncio.ensure_future(sync_to_async(work)())
    try:
        await reached(began)
        yield
    finally:
        over.set()
        await working


async def by_verb(lock: Lock, lease: Lease) -> None:
    """Release by the lease's own verb."""
    assert await lease.arelease() is True


async def by_leaving(lock: Lock, lease: Lease) -> None:
    """Release by leaving a block."""
    async with lease:
        pass


@pytest.mark.parametrize("release", [by_verb, by_leaving])
def test_sync_waiter_doesnt_hold_up_the_release(lock: Locks, release: Any) -> None:
    """A holder releases although a sync waiter for its key has asgiref's thread.

    The waiter then gets the key, and not a timeout.
    """

    async def main() -> None:
        lease = await lock().aacquire(timeout=0)
        began = threading.Event()

        def wait() -> bool:
            began.set()
            theirs = lock().try_acquire(timeout=LONG)
            return theirs is not None and theirs.release()

        waiting = asyncio.ensure_future(sync_to_async(wait)())
        try:
            await reached(began)
            await soon(release(lock(), lease), "the release")
            assert await soon(waiting, "the sync waiter") is True
        finally:
            await asyncio.wait([waiting], timeout=DEADLINE)

    run(main())


async def acquire(lock: Lock) -> None:
    """Take the key and give it back."""
    lease = await soon(lock.aacquire(timeout=0), "aacquire()")
    assert await soon(lease.arelease(), "arelease()") is True


async def attempt(lock: Lock) -> None:
    """Try for the key and give it back."""
    lease = await soon(lock.atry_acquire(), "atry_acquire()")
    assert lease is not None
    assert await soon(lease.arelease(), "arelease()") is True


async def enter(lock: Lock) -> None:
    """Enter and leave a block."""

    async def block() -> None:
        async with lock:
            pass

    await soon(block(), "the block")


async def instead(error: LockTimeout) -> str:
    """Answer in the place of a function that is locked out."""
    return "instead"


@pytest.mark.parametrize(
    ("on_locked", "answer"), [(None, "raised"), ("skip", None), (instead, "instead")]
)
def test_locked_out(lock: Locks, on_locked: Any, answer: Any) -> None:
    """A decorated call that is locked out is told so beside sync code, too."""

    @lock(timeout=0, on_locked=on_locked)
    async def job() -> str:
        return "ran"

    async def call() -> Any:
        try:
            return await job()
        except LockTimeout:
            return "raised"

    async def main() -> None:
        lease = await lock(owner="somebody else").aacquire(timeout=0)
        async with occupied():
            assert await soon(call(), "the call") == answer
        assert await lease.arelease() is True

    run(main())


async def renew(lock: Lock) -> None:
    """Renew what is held."""
    lease = await soon(lock.aacquire(timeout=0), "aacquire()")
    await soon(lease.arenew(), "arenew()")
    assert await soon(lease.arelease(), "arelease()") is True


async def look(lock: Lock) -> None:
    """Look whether anybody has the key."""
    assert await soon(lock.alocked(), "alocked()") is False


VERBS = pytest.mark.parametrize("verb", [acquire, attempt, enter, renew, look])


@VERBS
def test_sync_code_holds_up_no_verb(lock: Locks, verb: Any) -> None:
    """No async verb waits for the sync code of other tasks."""

    async def main() -> None:
        async with occupied():
            await verb(lock())

    run(main())


def test_sync_code_holds_up_no_waiter(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """A task that waits for a key gets it although sync code goes on and on."""

    async def main() -> None:
        theirs = other.do(acquire)
        waiting = asyncio.ensure_future(lock().aacquire(timeout=DEADLINE))
        await asyncio.sleep(0)
        async with occupied():
            releasing = other.start(theirs.release)
            lease = await soon(waiting, "the wait")
            assert await soon(lease.arelease(), "arelease()") is True
        assert releasing.result(timeout=DEADLINE) is True

    run(main())


@pytest.fixture
def slow_key(key: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let every statement about one key hang; set once one does."""
    reached, over = threading.Event(), threading.Event()
    execute = CursorWrapper.execute

    def slow(self: CursorWrapper, sql: str, params: Any = None) -> Any:
        values = params.values() if isinstance(params, dict) else params or ()
        if f"{key}:slow" in values:
            reached.set()
            over.wait(DEADLINE)
        return execute(self, sql, params)

    monkeypatch.setattr(CursorWrapper, "execute", slow)
    reached.over = over  # type: ignore[attr-defined]
    yield reached
    over.set()


@VERBS
@pytest.mark.needs("has_table")
def test_keys_dont_wait_for_each_other(
    lock: Locks, key: str, slow_key: Any, verb: Any
) -> None:
    """What the database does slowly for one key holds up no verb on another."""

    async def main() -> None:
        slow = asyncio.ensure_future(lock(f"{key}:slow").aacquire(timeout=DEADLINE))
        try:
            await reached(slow_key)
            await verb(lock())
        finally:
            slow_key.over.set()
            lease = await slow
            await lease.arelease()

    run(main())


def test_set_before_the_server_is_known(
    backend: str,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    threads: Callable[[], OtherThread],
) -> None:
    """A process may begin with a try of several keys, in an event loop."""
    monkeypatch.setattr(dialects, "_servers", {})

    async def main() -> None:
        pair = distributed_lock(f"{key}:1", f"{key}:2", backend=backend)
        leases = await pair.atry_acquire()
        assert leases is not None
        assert await leases.arelease()

    # This thread's connection knows its server already.
    threads().do(run, main())


@pytest.mark.parametrize("permits", [1, 2])
@pytest.mark.parametrize(
    "cancelled", ["before the grant", "after the grant", "never", "loop is closed"]
)
def test_grant_that_nobody_receives_is_undone(
    lock: Locks,
    obtainable: Obtainable,
    monkeypatch: pytest.MonkeyPatch,
    cancelled: str,
    permits: int,
) -> None:
    """A grant is given back although its event loop ends before it is passed on.

    It doesn't cool, because nobody has had it.
    """
    backend = backends[lock().backend]
    cools = 600 if backend.has_cooling else 0
    wanted = lock(lease=30, hold_at_least=cools, permits=permits)
    asked, go_on, granted = (threading.Event() for _ in range(3))
    try_acquire = backend.try_acquire

    def slow(*arguments: Any) -> Any:
        asked.set()
        go_on.wait(DEADLINE)
        try:
            return try_acquire(*arguments)
        finally:
            granted.set()

    monkeypatch.setattr(backend, "try_acquire", slow)
    loop = asyncio.new_event_loop()
    task = loop.create_task(wanted.aacquire(timeout=0))
    loop.run_until_complete(reached(asked))
    monkeypatch.undo()
    if cancelled == "before the grant":
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
    elif cancelled == "loop is closed":
        loop.close()
    go_on.set()
    assert granted.wait(DEADLINE)
    # Time for the thread to hand the grant to the loop, which isn't running.
    time.sleep(0.05)
    if cancelled == "after the grant":
        task.cancel()
        loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    if cancelled == "never":
        del task
        gc.collect()
    rows = row_keys(lock().key, permits)

    def are_free() -> bool:
        return all(seen.remaining <= 0 for seen in backend.read_all(rows).values())

    eventually(are_free, within=2 * SLACK, what="the key")
    assert obtainable(permits=permits)


@pytest.mark.needs("has_cooling")
@pytest.mark.parametrize("had", [False, True], ids=["new", "had before"])
def test_cancelled_while_receivers_hear_of_it(lock: Locks, had: bool) -> None:
    """What a task is granted and never receives cools only if it had it before."""
    heard, go_on = threading.Event(), threading.Event()
    released: list[str] = []
    before: list[Lease] = []
    wanted = lock(hold_at_least=600)

    def hear(**facts: Any) -> None:
        if facts["reentered"] is had:
            heard.set()
            go_on.wait(DEADLINE)

    def note(key: str, **facts: Any) -> None:
        released.append(key)

    async def enter() -> None:
        if had:
            before.append(await wanted.aacquire())
        await wanted.aacquire()

    async def main() -> None:
        entering = asyncio.ensure_future(enter())
        await reached(heard)
        for lease in before:
            assert await lease.arelease() is True
        entering.cancel()
        await asyncio.wait([entering])
        go_on.set()

    signals.lock_acquired.connect(hear)
    signals.lock_released.connect(note)
    try:
        run(main())
        eventually(lambda: released == [wanted.key], what="the release")
    finally:
        signals.lock_acquired.disconnect(hear)
        signals.lock_released.disconnect(note)
    assert wanted.locked() is had


# What fails in the thread


@pytest.fixture
def unreachable(backend: str) -> Exception:
    """Return an error that the engine raises when it is out of reach."""
    return backends[backend].errors[0]("out of reach")


@pytest.fixture
def fail(unreachable: Exception) -> Callable[..., Any]:
    """Return what stands for a verb while the engine is out of reach."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise unreachable

    return fail


def test_error_is_raised_in_the_task(
    lock: Locks,
    monkeypatch: pytest.MonkeyPatch,
    unreachable: Exception,
    fail: Callable[..., Any],
) -> None:
    """What the engine says to a task's request is raised where the task awaits it."""
    monkeypatch.setattr(backends[lock().backend], "try_acquire", fail)
    with pytest.raises(type(unreachable), match="out of reach"):
        run(lock().aacquire(timeout=0))


def test_error_that_nobody_receives_is_logged(
    lock: Locks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    unreachable: Exception,
) -> None:
    """An error that comes after the task was cancelled is told to the log."""
    asked, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any, **options: Any) -> Any:
        asked.set()
        go_on.wait(DEADLINE)
        raise unreachable

    monkeypatch.setattr(backends[lock().backend], "try_acquire", slow)

    async def main() -> None:
        task = asyncio.ensure_future(lock().aacquire(timeout=0))
        await reached(asked)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        go_on.set()

    run(main())
    said = "failed when nobody waited any more error=out of reach"
    eventually(lambda: said in caplog.messages, what="the line in the log")


def test_release_that_fails_at_the_end_of_the_block(
    lock: Locks,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fail: Callable[..., Any],
) -> None:
    """Leaving an async block out of the engine's reach leaves the lock to lapse."""
    backend = backends[lock().backend]

    async def main() -> Lease:
        async with lock() as lease:
            monkeypatch.setattr(backend, "release", fail)
            monkeypatch.setattr(backend, "release_all", fail)
        return lease

    lease = run(main())
    assert not lease.held
    assert any("left to lapse" in line for line in caplog.messages)
