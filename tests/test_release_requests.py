"""Asking the holder to finish: who learns of it, when, and what ends the request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.db import connections

from dblocks import Lease, Leases, Lock, current_lease, distributed_lock
from dblocks.backends.base import BaseBackend
from dblocks.conf import backends
from dblocks.exceptions import InvalidKey
from dblocks.models import DistributedLock
from dblocks.signals import lock_release_requested
from tests.support.factories import LockFactory, stored
from tests.support.fixtures import fitting
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled

LEASE = scaled(1.5)

Locks = Callable[..., Lock]
Acquire = Callable[..., Lease]


@pytest.fixture
def engine(backend: str) -> BaseBackend:
    return backends[backend]


@pytest.fixture
def heard() -> Iterator[list[dict[str, Any]]]:
    """Collect what the signal says."""
    heard: list[dict[str, Any]] = []

    def note(**facts: Any) -> None:
        heard.append(facts)

    lock_release_requested.connect(note)
    yield heard
    lock_release_requested.disconnect(note)


def test_next_renewal_tells(
    engine: BaseBackend, acquire: Acquire, heard: list[dict[str, Any]], key: str
) -> None:
    """The holder learns of it by its renewal, once, and keeps the lock."""
    lease = acquire(lease=LEASE)
    told: list[Lease] = []
    lease.on_release_requested(told.append)
    assert lease.release_requested is False
    assert engine.request_release(key, by="test", reason="a deployment") is True
    eventually(lambda: lease.release_requested, within=engine.lease + SLACK)
    eventually(lambda: told == [lease] and len(heard) == 1, what="the news")
    [facts] = heard
    assert facts["key"] == key
    assert facts["permit"] is None
    assert (facts["owner"], facts["backend"]) == (lease.owner, lease.backend)
    assert facts["fencing_token"] == lease.fencing_token
    assert facts["held_for"] > 0
    # It goes on being renewed, and being asked for; that is no news.
    assert engine.request_release(key)
    always(lambda: lease.held, during=LEASE * 1.5, what="held")
    assert (len(told), len(heard)) == (1, 1)
    # Who comes late to ask is told at once.
    lease.on_release_requested(told.append)
    eventually(lambda: len(told) == 2, what="the second callback")
    assert lease.release() is True


def test_explicit_renewal_tells(
    engine: BaseBackend, acquire: Acquire, key: str
) -> None:
    """Without renewals in the background nobody tells, until the holder renews."""
    lease = acquire(renew=False)
    assert engine.request_release(key)
    always(lambda: not lease.release_requested, during=0.3, what="not known")
    lease.renew()
    assert lease.release_requested


def test_ends_with_the_grant(engine: BaseBackend, acquire: Acquire, key: str) -> None:
    """The next holder isn't asked for what the last one was asked for."""
    first = acquire()
    assert engine.request_release(key)
    first.release()
    second = acquire()
    second.renew()
    assert not second.release_requested
    assert engine.force_release(key)
    third = acquire()
    third.renew()
    assert not third.release_requested


def test_ends_with_a_lapsed_grant(engine: BaseBackend, lock: Locks, key: str) -> None:
    """A holder that died takes the request with it."""
    mine = lock(lease=LEASE, renew=False).acquire()
    assert engine.request_release(key)
    successor = eventually(lambda: lock(owner="next").try_acquire(), what="the grant")
    successor.renew()
    assert not successor.release_requested
    assert mine.release() is False
    assert successor.release()


def test_nobody_to_ask(engine: BaseBackend, acquire: Acquire, key: str) -> None:
    """Of a key that nobody holds, or under another version, nobody is asked."""
    assert engine.request_release(key) is False
    lease = acquire()
    if engine.has_fencing_tokens:
        assert lease.fencing_token is not None
        assert engine.request_release(key, version=lease.fencing_token + 1) is False
        lease.renew()
        assert not lease.release_requested
        assert engine.request_release(key, version=lease.fencing_token) is True
    lease.release()
    assert engine.request_release(key) is False
    with pytest.raises(InvalidKey):
        engine.request_release("")


@pytest.mark.needs("has_cooling")
def test_cooling_key(engine: BaseBackend, acquire: Acquire, key: str) -> None:
    """A key that only cools has no holder."""
    acquire(hold_at_least=5).release()
    assert engine.request_release(key) is False


def test_permits(engine: BaseBackend, lock: Locks, key: str) -> None:
    """One permit's holder is asked, the others' are not."""
    first = lock(permits=2).acquire()
    second = lock(permits=2, owner="second").acquire()
    assert engine.request_release(key) is False
    assert engine.request_release(key, permit=second.permit)
    first.renew()
    second.renew()
    assert (first.release_requested, second.release_requested) == (False, True)
    assert first.release()
    assert second.release()


def test_several_keys(engine: BaseBackend, backend: str, key: str) -> None:
    """Of several keys any may be asked for; each lease knows its own."""
    names = [key + ":a", key + ":b"]
    fit = fitting(backend, {"backend": backend, "lease": LEASE})
    told: list[Lease] = []
    with distributed_lock(*names, **fit) as leases:
        assert isinstance(leases, Leases)
        leases.on_release_requested(told.append)
        assert engine.request_release(names[1])
        eventually(lambda: told, what="the news")
        assert leases.release_requested
        assert not leases[names[0]].release_requested
        assert told == [leases[names[1]]]


def test_reentrance(engine: BaseBackend, lock: Locks, key: str) -> None:
    """Inner leases of the same grant are asked too."""
    with lock() as outer:
        assert engine.request_release(key)
        with lock() as inner:
            inner.renew()
            assert inner.release_requested
            assert outer.release_requested
            assert current_lease(key).release_requested


def test_callback_that_fails(
    engine: BaseBackend,
    acquire: Acquire,
    key: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its error is logged, and the others run."""
    lease = acquire()
    told: list[Lease] = []

    def fail(lease: Lease) -> None:
        raise ValueError("not today")

    lease.on_release_requested(fail)
    lease.on_release_requested(told.append)
    assert engine.request_release(key)
    lease.renew()
    eventually(lambda: told, what="the second callback")
    assert "not today" in caplog.text
    assert lease.held


def test_async(engine: BaseBackend, lock: Locks, key: str) -> None:
    """A task leads until it is asked to finish, without any I/O of its own."""

    def ask() -> bool:
        try:
            return engine.request_release(key)
        finally:
            connections.close_all()

    async def lead() -> bool:
        async with lock(lease=LEASE) as lease:
            asked = await asyncio.to_thread(ask)
            while lease.held and not lease.release_requested:
                await asyncio.sleep(0.01)
            return bool(asked and lease.held)

    assert asyncio.run(asyncio.wait_for(lead(), DEADLINE)) is True


@pytest.mark.needs("has_table")
def test_manager(acquire: Acquire, key: str, caplog: pytest.LogCaptureFixture) -> None:
    """The row tells since when, the log who asked and why; once more does nothing."""
    caplog.set_level("INFO", "dblocks")
    lease = acquire(renew=False)
    locks = DistributedLock.objects
    token = lease.fencing_token
    assert locks.request_release(key, version=token, by="ana", reason="deployment")
    since = stored(key).release_requested_at
    assert since is not None
    assert abs((since - stored(key).acquired_at).total_seconds()) < DEADLINE
    [line] = [x.getMessage() for x in caplog.records if "requested" in x.getMessage()]
    assert "by=ana reason=deployment" in line
    assert key in line
    assert locks.request_release(key)
    assert stored(key).release_requested_at == since
    lease.release()
    assert stored(key).release_requested_at is None


@pytest.mark.needs("has_table")
def test_expired_holder(committed: None, key: str) -> None:
    """Who is overdue may be dead: nobody says that it was asked."""
    row = LockFactory(key=key, expired=True)
    assert row.owner
    assert DistributedLock.objects.request_release(key) is False
    assert stored(key).release_requested_at is None


@pytest.mark.needs("has_shared_owners")
def test_another_process(
    workers: Workers, engine: BaseBackend, backend: str, key: str, lock: Locks
) -> None:
    """Two processes that present one owner's id are both asked."""
    options = fitting(backend, {"owner": "leader", "lease": LEASE})
    lease = lock(**options).acquire()
    worker = workers.start("obey", key=key, backend=backend, **options)
    assert worker.expect("held")["token"] == lease.fencing_token
    assert engine.request_release(key)
    eventually(lambda: lease.release_requested, what="the request")
    assert worker.expect("asked", within=LEASE + SLACK)["held"] is True
    assert lease.held
    assert lease.release()
    worker.tell("release")
    assert worker.expect("released")["result"] is True
    worker.until_done()


@pytest.mark.needs("has_table")
@pytest.mark.django_db
def test_in_a_test_case(key: str) -> None:
    """Inside a TestCase's transaction the holder finds out when it renews."""
    with distributed_lock(key) as lease:
        assert DistributedLock.objects.request_release(key)
        lease.renew()
        assert lease.release_requested
