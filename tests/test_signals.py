"""The signals that tell the rest of a project what locks do."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.dispatch import Signal

from dblocks import Lease, Lock, LockTimeout, distributed_lock, signals
from dblocks.conf import backends
from dblocks.test import hold_elsewhere
from dblocks.waiting.queue import queues
from tests.support.fixtures import OtherThread, listening
from tests.support.timing import SLACK, eventually

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
NAMES = [
    "lock_acquired",
    "lock_released",
    "lock_lost",
    "lock_timed_out",
    "lock_force_released",
]


class Heard:
    """Collects what each signal said."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.threads: list[threading.Thread] = []

    def listener(self, name: str) -> Callable[..., None]:
        def hear(signal: Signal, sender: Any, **said: Any) -> None:
            self.events.append((name, said))
            self.threads.append(threading.current_thread())

        return hear

    def of(self, name: str, key: str) -> list[dict[str, Any]]:
        return [
            said for heard, said in self.events if heard == name and said["key"] == key
        ]


@pytest.fixture
def heard() -> Iterator[Heard]:
    """Listen to all signals for the time of the test."""
    heard = Heard()
    with ExitStack() as all_signals:
        for name in NAMES:
            signal: Signal = getattr(signals, name)
            all_signals.enter_context(listening(signal, heard.listener(name)))
        yield heard


def test_acquired_and_released(lock: Locks, heard: Heard, key: str) -> None:
    """An acquisition and its release are told once each, with key, owner and token."""
    with lock() as lease:
        (acquired,) = heard.of("lock_acquired", key)
        assert not heard.of("lock_released", key)
    (released,) = heard.of("lock_released", key)
    for said in (acquired, released):
        assert (said["owner"], said["fencing_token"]) == (
            lease.owner,
            lease.fencing_token,
        )
    assert 0 <= acquired["waited"] < SLACK
    assert 0 <= released["held_for"] < SLACK


def test_timed_out(
    lock: Locks, acquire: Leases, heard: Heard, key: str, other: OtherThread
) -> None:
    """A wait that ran out is told with the time waited; no other signal is sent."""
    acquire()
    heard.events.clear()
    with pytest.raises(LockTimeout):
        other.do(lock().acquire, timeout=0.3)
    (said,) = heard.of("lock_timed_out", key)
    assert 0.3 <= said["waited"] <= 0.3 + SLACK
    assert [name for name, _ in heard.events] == ["lock_timed_out"]


def test_lost(acquire: Leases, heard: Heard, key: str) -> None:
    """A loss is told once, with its reason, in a thread of dblocks."""
    lease = acquire(lease=0.4, renew=False)
    eventually(lambda: heard.of("lock_lost", key), within=0.4 + SLACK, what="lock_lost")
    (said,) = heard.of("lock_lost", key)
    assert (said["fencing_token"], said["reason"]) == (lease.fencing_token, "expired")
    assert heard.threads[-1] is not threading.current_thread()


def test_force_released(backend: str, acquire: Leases, heard: Heard, key: str) -> None:
    """A force release is told with who did it and why."""
    acquire(lease=600, renew=False)
    force_release = backends[backend].force_release
    assert force_release(key, by="operator", reason="stuck") is True
    (said,) = heard.of("lock_force_released", key)
    assert (said["by"], said["reason"]) == ("operator", "stuck")


def test_force_release_of_nothing_is_silent(
    backend: str, heard: Heard, key: str
) -> None:
    """Where nothing was released nothing is told."""
    assert backends[backend].force_release(key) is False
    assert not heard.events


def test_receiver_that_raises(lock: Locks, key: str) -> None:
    """A receiver's error doesn't reach the one who takes the lock."""

    def broken(**said: Any) -> None:
        raise RuntimeError("a broken receiver")

    with listening(signals.lock_acquired, broken), lock() as lease:
        assert lease.held


@pytest.mark.parametrize("keys", [1, 2])
def test_async_code_is_told_in_a_thread(
    lock: Locks, key: str, backend: str, keys: int
) -> None:
    """In async code as well, receivers may ask a database, or be async themselves."""
    loops: list[object] = []
    heard: list[str] = []

    def hear(**said: Any) -> None:
        loops.append(asyncio._get_running_loop())

    async def ahear(key: str, **said: Any) -> None:
        heard.append(key)

    every = [key, key + ":b"][:keys]

    async def try_both() -> None:
        mine = distributed_lock(*every, backend=backend)
        assert await mine.atry_acquire() is None
        with pytest.raises(LockTimeout):
            await mine.aacquire(timeout=0.1)

    with (
        listening(signals.lock_timed_out, hear, ahear),
        hold_elsewhere(key, backend=backend),
    ):
        async_to_sync(try_both)()
    assert loops == [None, None]
    assert heard == [key, key]


def test_told_out_of_the_queue(backend: str, lock: Locks, key: str) -> None:
    """Whoever waits next doesn't wait for the receivers of a wait that ran out."""
    queued: list[bool] = []

    def receive(key: str, **facts: object) -> None:
        queued.append(any(key in place for place in queues._queues))

    with (
        listening(signals.lock_timed_out, receive),
        hold_elsewhere(key, backend=backend),
        pytest.raises(LockTimeout),
    ):
        lock().acquire(timeout=0.05)
    assert queued == [False]
