"""Locks in Redis, beyond what the contract suite asks of every engine."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from io import StringIO
from types import FrameType
from typing import Any

import pytest
import redis
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from redis.exceptions import (
    AuthenticationError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

from dblocks import Lease, LeaseLost, LockTimeout, clock, distributed_lock, signals
from dblocks.backends.redis import scripts
from dblocks.backends.redis.backend import RedisBackend
from dblocks.backends.redis.prelude import Script
from dblocks.backends.values import Grant, Granted, Renewal, Request
from dblocks.conf import backends
from tests.faults.clocks import faketime
from tests.faults.crew import Crew
from tests.faults.exclusion import exclude
from tests.faults.history import verify
from tests.faults.proxy import Proxy
from tests.support.alarms import alarms
from tests.support.fixtures import OtherThread
from tests.support.processes import ROOT, Worker, Workers, resume, run_python, stop
from tests.support.services import HOST, Redis
from tests.support.timing import (
    DEADLINE,
    SLACK,
    always,
    eventually,
    excused,
    scaled,
    starved,
    takes,
)
from tests.test_ownership import in_forked_child

pytestmark = pytest.mark.engine("redis")

BACKEND = "dblocks.backends.redis.RedisBackend"
GRACE = 0.25

Threads = Callable[[], OtherThread]


def use(settings: Any, location: Any, *more: str, **config: Any) -> RedisBackend:
    """Keep the locks of all aliases there; each alias waits like another process."""
    entry = {"BACKEND": BACKEND, "LOCATION": location, **config}
    settings.DBLOCKS = dict.fromkeys(["default", *more], entry)
    return engine()


def engine() -> RedisBackend:
    backend = backends["default"]
    assert isinstance(backend, RedisBackend)
    return backend


@pytest.fixture(scope="module")
def shared() -> Iterator[Redis]:
    """Keep a server between tests that leave it as it was."""
    with Redis() as server:
        yield server


@pytest.fixture
def here(shared: Redis, settings: Any) -> Any:
    """Keep the locks of three aliases in a server, and look into it."""
    inside: Any = redis.Redis.from_url(shared.url())
    inside.flushall()
    use(settings, shared.url(), "second", "third")
    return inside


def token_of(key: str) -> int:
    """Take a key and give it back."""
    with distributed_lock(key, timeout=0) as lease:
        assert lease.fencing_token is not None
        return lease.fencing_token


def commands(inside: Any) -> int:
    """Count what clients have asked; what scripts do isn't counted."""
    stats = inside.info("commandstats")
    asked = ("evalsha", "eval", "blpop", "hello", "ping", "client|setinfo")
    return sum(
        int(stats.get(f"cmdstat_{name}", {"calls": 0})["calls"]) for name in asked
    )


# Servers that fail


@pytest.mark.parametrize("how", ["always", "everysec"])
def test_restart_with_append_only_file(settings: Any, key: str, how: str) -> None:
    """What is held stays held over a crash of the server, and tokens rise.

    While its disk is slow, a server keeps back for a moment what it has to write.
    """
    with Redis(arguments=["--appendfsync", how]) as server:
        use(settings, server.url())
        before = token_of(f"{key}:free")
        lease = distributed_lock(key, lease=30).acquire(timeout=0)
        eventually(server.has_written, what="all in the file")
        server.kill()
        server.start()
        assert distributed_lock(key, owner="other").try_acquire() is None
        lease.renew()
        assert lease.held
        assert lease.release()
        assert token_of(key) > (lease.fencing_token or 0)
        assert token_of(f"{key}:free") > before


@pytest.mark.parametrize("taken", [False, True])
def test_restart_without_file(settings: Any, key: str, taken: bool) -> None:
    """What was held is lost, the holder is told at its renewal, and tokens rise."""
    with Redis(arguments=["--appendonly", "no"]) as server:
        use(settings, server.url())
        before = token_of(f"{key}:free")
        lease = distributed_lock(key, lease=30).acquire(timeout=0)
        server.kill()
        server.start()
        assert token_of(f"{key}:free") > before
        with ExitStack() as theirs:
            if taken:
                later = distributed_lock(key, owner="other", timeout=0)
                outranks = theirs.enter_context(later).fencing_token
                assert (outranks or 0) > (lease.fencing_token or 0)
            with pytest.raises(LeaseLost) as caught:
                lease.renew()
        assert caught.value.reason == ("taken" if taken else "expired")
        assert lease.release() is False
        assert token_of(key) > (lease.fencing_token or 0)


@pytest.mark.parametrize("fault", ["killed", "stopped", "swallowed"])
def test_out_of_reach(settings: Any, key: str, fault: str) -> None:
    """The lease is lost on time, and no verb takes the fault for a lock that is taken.

    As soon as the server is back, locks work again.
    """
    length = scaled(2)
    with Redis() as server, Proxy(server.port) as proxy:
        times = {"socket_timeout": 0.3, "socket_connect_timeout": 0.3}
        use(settings, f"redis://127.0.0.1:{proxy.port}/0", OPTIONS=times)
        lost: list[float] = []
        lease = distributed_lock(key, lease=length).acquire(timeout=0)
        lease.on_lost(lambda lease: lost.append(time.monotonic()))
        waiter = OtherThread()
        patient = distributed_lock(key, timeout=scaled(6), lease=length)
        answer = waiter.start(patient.acquire)
        eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
        {
            "killed": server.kill,
            "stopped": lambda: stop(server.pid),
            "swallowed": lambda: setattr(proxy, "swallow", True),
        }[fault]()
        began, before = time.monotonic(), starved()
        try:
            for ask in (
                distributed_lock(key, lease=length, owner="other").try_acquire,
                distributed_lock(f"{key}:other", timeout=0.5).acquire,
                distributed_lock(key).locked,
            ):
                with takes(at_most=2.5 + SLACK), pytest.raises(RedisError) as caught:
                    ask()
                assert f"127.0.0.1:{proxy.port}" in str(caught.value)
            with pytest.raises(RedisError):
                answer.result(timeout=DEADLINE)
            eventually(lambda: lost, what="the loss")
            assert lost[0] - began < length + excused(before, length)
            assert not lease.held
            assert lease.lost_reason == "backend"
        finally:
            if fault == "killed":
                server.start()
            elif fault == "stopped":
                resume(server.pid)
            proxy.swallow = False
            waiter.close()
        # What was asked of a server that only stood is done when it goes on.
        after = distributed_lock(key, lease=length).acquire(timeout=scaled(8))
        assert (after.fencing_token or 0) > (lease.fencing_token or 0)
        after.release()


def test_black_hole_beyond_the_lease(settings: Any, key: str, threads: Threads) -> None:
    """A holder that is cut off knows in time; another has the key at the lease's end.

    The holder's socket hangs for longer.
    """
    length = scaled(2)
    with Redis() as server, Proxy(server.port) as proxy:
        use(settings, server.url())
        entry = {"BACKEND": BACKEND, "LOCATION": f"redis://127.0.0.1:{proxy.port}/0"}
        settings.DBLOCKS = {**settings.DBLOCKS, "cut off": entry}
        own = distributed_lock(key, backend="cut off", lease=length)
        lease = own.acquire(timeout=0)
        lost: list[float] = []
        lease.on_lost(lambda lease: lost.append(time.monotonic()))

        def wait() -> tuple[Lease, float, bool]:
            theirs = distributed_lock(key, timeout=DEADLINE, lease=60).acquire()
            return theirs, time.monotonic(), lease.held

        answer = threads().start(wait)
        eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
        proxy.swallow = True
        deadline = end = 0.0

        def watch() -> bool:
            nonlocal deadline, end
            before = time.monotonic()
            seen = engine().read_all([key]).get(key)
            if seen is not None and seen.owner == lease.owner:
                end = before + seen.remaining
            if left := lease.remaining():
                deadline = time.monotonic() + left
            return bool(answer.done())

        eventually(watch, what="the successor")
        theirs, granted, held = answer.result()
        assert not held
        assert end - 0.01 <= granted <= end + SLACK
        eventually(lambda: lost, what="the news")
        assert lost[0] <= deadline + SLACK
        assert lease.lost_reason == "backend"
        proxy.swallow = False
        assert lease.release() is False
        theirs.renew()
        assert theirs.release() is True


def test_out_of_memory(settings: Any, key: str, threads: Threads) -> None:
    """No verb takes that for a lock that is taken; a lease is lost on time."""
    free, length = f"{key}:free", scaled(2.5)
    with Redis(arguments=["--maxmemory-policy", "noeviction"]) as server:
        use(settings, server.url(), "second")
        inside: Any = redis.Redis.from_url(server.url())
        lost: list[float] = []
        lease = distributed_lock(key, lease=length).acquire(timeout=0)
        lease.on_lost(lambda lease: lost.append(time.monotonic()))
        inside.config_set("maxmemory", 1)
        began = time.monotonic()
        for ask in (
            distributed_lock(free).try_acquire,
            distributed_lock(free, timeout=0.3).acquire,
            distributed_lock(free, f"{free}:2", timeout=0.3).acquire,
            distributed_lock(free, permits=2, timeout=0.3).acquire,
            # Somebody has it, but the queue can't be joined.
            distributed_lock(key, timeout=0.3, backend="second").acquire,
            lease.renew,
        ):
            with takes(at_most=SLACK), pytest.raises(OutOfMemoryError):
                ask()
        eventually(lambda: lost, what="the loss")
        assert lost[0] - began < length + SLACK
        assert lease.lost_reason == "backend"
        assert not distributed_lock(free).locked()
        inside.config_set("maxmemory", 0)
        later = distributed_lock(key, timeout=DEADLINE, backend="second").acquire()
        assert (later.fencing_token or 0) > (lease.fencing_token or 0)
        assert lease.release() is False
        assert later.release() is True


def test_replica(settings: Any, key: str) -> None:
    """What can't be written to is an error, also where the key is seen to be taken."""
    free = f"{key}:free"
    at_once = ["--repl-diskless-sync-delay", "0"]
    with Redis(arguments=at_once) as master, ExitStack() as stack:
        after = ["--replicaof", f"{HOST} {master.port}"]
        replica = stack.enter_context(Redis(arguments=after))
        use(settings, master.url())
        entry = {"BACKEND": BACKEND, "LOCATION": replica.url()}
        settings.DBLOCKS = {**settings.DBLOCKS, "replica": entry}
        here: dict[str, Any] = {"backend": "replica"}
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        eventually(distributed_lock(key, **here).locked, what="the copy")
        for ask in (
            distributed_lock(free, **here).try_acquire,
            distributed_lock(free, f"{free}:2", timeout=0.3, **here).acquire,
            distributed_lock(key, timeout=0.3, **here).acquire,
        ):
            with takes(at_most=2.5 + SLACK), pytest.raises(ReadOnlyError):
                ask()
        assert lease.release() is True
        assert not distributed_lock(free).locked()


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("NOREPLICAS", TryAgainError),
        ("OOM", OutOfMemoryError),
        ("READONLY", ReadOnlyError),
    ],
)
def test_errors_inside_scripts_before_redis_7(
    here: Any, code: str, kind: type[RedisError]
) -> None:
    """They mean what they mean outside."""
    said = f"ERR Error running script (call to f_1): @user_script: 9: -{code} not now"
    fails = f'return redis.error_reply("{said}")'
    with pytest.raises(kind, match=code):
        engine()._server.client.send("EVAL", fails, 0)


def test_name_that_moves_to_another_primary(
    settings: Any, key: str, threads: Threads
) -> None:
    """While the old one goes on as a replica and closes nothing: all follow."""
    at_once = ["--repl-diskless-sync-delay", "0"]
    with Redis(arguments=at_once) as old, ExitStack() as stack:
        after = [*at_once, "--replicaof", f"{HOST} {old.port}"]
        new = stack.enter_context(Redis(arguments=after))
        proxy = stack.enter_context(Proxy(old.port))
        use(settings, f"redis://{HOST}:{proxy.port}/0", "second")
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        waits = distributed_lock(key, backend="second", timeout=DEADLINE)
        waiter = threads().start(waits.acquire)
        inside: Any = redis.Redis.from_url(old.url())
        eventually(lambda: blocked(inside), what="the waiter at its bell")
        assert inside.wait(1, 5000) == 1
        redis.Redis.from_url(new.url()).replicaof("NO", "ONE")
        inside.replicaof(HOST, new.port)
        free = distributed_lock(f"{key}:free", timeout=DEADLINE)
        begins = threads().start(free.acquire)
        # Longer than an operation is patient by itself.
        time.sleep(1.5)
        proxy.target = new.port
        lease.renew()
        assert begins.result(timeout=DEADLINE).release() is True
        assert lease.release() is True
        assert waiter.result(timeout=DEADLINE).release() is True


def test_down_when_a_waiter_queues(
    settings: Any, key: str, threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that is down for a while fails no waiter who has time."""
    with Redis() as server:
        use(settings, server.url(), "second")
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        theirs: Any = backends["second"]
        queue, goes_on = theirs._server.queue, threading.Timer(2, server.start)

        def late(*arguments: Any) -> Any:
            monkeypatch.undo()
            server.kill()
            goes_on.start()
            return queue(*arguments)

        eventually(server.has_written, what="all in the file")
        monkeypatch.setattr(theirs._server, "queue", late)
        waits = distributed_lock(key, backend="second", timeout=DEADLINE)
        answer = threads().start(waits.acquire)
        eventually(goes_on.finished.is_set, what="the restart")
        eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
        assert lease.release() is True
        answer.result(timeout=DEADLINE).release()


@pytest.mark.parametrize("fault", ["killed", "read-only"])
def test_end_of_a_wait_at_a_server_that_fails(
    settings: Any, key: str, threads: Threads, fault: str
) -> None:
    """The error comes when the caller's time is over, not a second or two later."""
    with Redis() as server:
        use(settings, server.url(), "second")
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        waits = distributed_lock(key, backend="second", timeout=1.5)
        waiter = threads().start(waits.acquire)
        inside: Any = redis.Redis.from_url(server.url())
        eventually(lambda: blocked(inside), what="the waiter at its bell")
        with takes(0.5, 1.5 + SLACK / 2):
            if fault == "killed":
                server.kill()
            else:
                inside.replicaof(HOST, 1)
            with pytest.raises(RedisError):
                waiter.result(timeout=DEADLINE)
        server.start()
        inside.replicaof("NO", "ONE")
        assert lease.release() is True


def test_wait_that_ends_after_the_lease_at_a_silent_server(
    settings: Any, key: str, threads: Threads
) -> None:
    """What another waiter saw of a lease tells nothing once that lease has ended."""
    length = scaled(2)
    with Redis() as server:
        use(settings, server.url(), "second")
        lease = distributed_lock(key, lease=length, renew=False).acquire(timeout=0)
        waits = distributed_lock(key, backend="second", timeout=DEADLINE)
        first = threads().start(waits.acquire)
        eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
        stop(server.pid)
        try:
            eventually(lambda: not lease.held, what="the lease's end")
            time.sleep(scaled(0.5))
            with pytest.raises(RedisError):
                waits.acquire(timeout=0.5)
        finally:
            resume(server.pid)
        first.result(timeout=DEADLINE).release()


@pytest.mark.parametrize("fault", ["unblocked", "no replicas", "busy"])
def test_answers_that_pass(here: Any, key: str, threads: Threads, fault: str) -> None:
    """They fail nobody who has time: a waiter, one that begins to wait, a release."""
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    waits = distributed_lock(key, backend="second", timeout=DEADLINE)
    waiter = threads().start(waits.acquire)
    eventually(lambda: blocked(here), what="the waiter at its bell")
    back = threading.Timer(0.5, here.config_set, ("min-replicas-to-write", 0))
    if fault == "unblocked":
        # As all are when their server becomes a replica.
        for client in blocked(here):
            here.client_unblock(client, error=True)
    elif fault == "no replicas":
        here.config_set("min-replicas-to-write", 1)
        back.start()
    else:
        here.config_set("lua-time-limit", 10)
        make_busy(here, threads)
    free = threads().start(distributed_lock(f"{key}:free", timeout=DEADLINE).acquire)
    assert lease.release() is True
    for answer in (waiter, free):
        assert answer.result(timeout=DEADLINE).release() is True
    if back.ident:
        back.join()


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("database", ["0", "1"])
def test_connection_to_a_busy_server(
    settings: Any, key: str, threads: Threads, database: str, protocol: int
) -> None:
    """It is as busy to who connects, chooses a database and asks for the cluster."""
    with Redis(arguments=["--lua-time-limit", "10"]) as server:
        use(settings, f"{server.url(database)}?protocol={protocol}")
        make_busy(redis.Redis.from_url(server.url()), threads)
        with distributed_lock(key, timeout=DEADLINE):
            pass


def make_busy(inside: Any, threads: Threads) -> None:
    """Have a server run a script of somebody else for half a second."""
    threading.Timer(0.6, inside.script_kill).start()
    script = threads().start(inside.eval, "while true do end", 0)
    time.sleep(0.1)
    assert not script.done()


def blocked(inside: Any) -> list[int]:
    """Return the ids of the clients that wait at a bell."""
    return [int(x["id"]) for x in inside.client_list() if "b" in x["flags"]]


def test_faults_are_sat_out_while_the_caller_waits(settings: Any, key: str) -> None:
    """However long that is."""
    with Redis() as server:
        use(settings, server.url())
        token_of(key)
        eventually(server.has_written, what="all in the file")
        server.kill()
        back = threading.Timer(11, server.start)
        back.start()
        with takes(10.5, 13 + SLACK), distributed_lock(key, lease=60, timeout=40):
            pass
        back.join()


@pytest.mark.parametrize("count", [2, 5])
def test_lost_reply_to_a_co_owners_release(
    settings: Any, key: str, threads: Threads, count: int
) -> None:
    """A release that is sent again because its reply was lost counts once."""
    with Redis() as server, Proxy(server.port) as proxy:
        use(settings, f"redis://127.0.0.1:{proxy.port}/0")
        lock = distributed_lock(key, owner="shared", timeout=0)
        leases = [threads().do(lock.acquire) for _ in range(count)]
        token_of(f"{key}:other")  # the server knows the scripts by now
        for left in range(count - 1, 0, -1):
            proxy.after = scripts.RELEASE.digest.encode()
            proxy.lose_replies = 1
            assert leases.pop().release() is True
            assert proxy.lose_replies == 0
            (entry,) = engine().entries(key)
            assert (entry.hold_count, entry.state) == (left, "held")
        assert leases.pop().release() is True
        assert not lock.locked()


@pytest.mark.parametrize(
    "script", [scripts.ACQUIRE, scripts.RENEW, scripts.RELEASE, scripts.ACQUIRE_ALL]
)
def test_lost_replies(settings: Any, key: str, script: scripts.Script) -> None:
    """What was done already is found done."""
    with Redis() as server, Proxy(server.port) as proxy:
        use(settings, f"redis://127.0.0.1:{proxy.port}/0")
        for lock in (distributed_lock(key), distributed_lock(key, f"{key}:other")):
            with lock as lease:
                lease.renew()
            proxy.after = script.digest.encode()
            proxy.lose_replies = 1
            with lock as lease:
                lease.renew()
                assert lease.release() is True
            proxy.lose_replies = 0
            assert not lock.locked()
        assert proxy.lost >= 1


@contextmanager
def reply_lost(
    script: scripts.Script, meanwhile: Callable[[], object]
) -> Iterator[None]:
    """The next run of a script is carried out, and its reply is lost.

    Args:
        meanwhile: Called in between, before the loss is known.
    """
    client: Any = engine()._server.client
    run = client._run

    def lose(which: scripts.Script, *arguments: Any) -> Any:
        answer = run(which, *arguments)
        if which is not script:
            return answer
        client._run = run
        meanwhile()
        raise RedisConnectionError("reset by peer")

    client._run = lose
    yield
    assert client._run == run


@contextmanager
def heard(signal: Any) -> Iterator[list[dict[str, Any]]]:
    """Collect what a signal tells."""
    told: list[dict[str, Any]] = []

    def hear(signal: Any, sender: Any, **said: Any) -> None:
        told.append(said)

    signal.connect(hear)
    yield told
    signal.disconnect(hear)


@pytest.mark.parametrize("owner", [None, "shared"])
@pytest.mark.parametrize("successors", [1, 3])
def test_lost_reply_to_a_release(
    here: Any, key: str, owner: str | None, successors: int
) -> None:
    """Who takes the key before it is sent again doesn't make it a loss."""
    lock = distributed_lock(key, lease=30, timeout=0, backend="second")
    leases: list[Lease] = []

    def meanwhile() -> None:
        for _ in range(successors - 1):
            lock.acquire().release()
        leases.append(lock.acquire())

    with (
        heard(signals.lock_lost) as lost,
        reply_lost(scripts.RELEASE, meanwhile),
        distributed_lock(key, owner=owner, lease=30, timeout=0),
    ):
        pass
    assert not lost
    assert leases[0].release() is True


@pytest.mark.parametrize("with_version", [False, True])
def test_lost_reply_to_a_force_release(here: Any, key: str, with_version: bool) -> None:
    """When it is sent again it ends no later grant, and tells what it has ended."""
    lease = distributed_lock(key, lease=30).acquire(timeout=0)
    version = lease.fencing_token if with_version else None
    later = distributed_lock(key, lease=30, backend="second")
    leases: list[Lease] = []
    with (
        heard(signals.lock_force_released) as forced,
        reply_lost(scripts.FORCE_RELEASE, lambda: leases.append(later.acquire(0))),
    ):
        assert engine().force_release(key, version=version) is True
    assert [each["fencing_token"] for each in forced] == [lease.fencing_token]
    assert lease.release() is False
    leases[0].renew()
    assert leases[0].release() is True


def test_clock_set_back(here: Any, key: str) -> None:
    """Tokens rise, what is held stays held, and what is free can be had."""
    before = token_of(key)
    lease = distributed_lock(f"{key}:held", lease=30).acquire(timeout=0)
    hour = 3_600_000_000
    # As a clock that was an hour ahead left them.
    for name, moments in {
        key: ["version"],
        f"{key}:held": ["acquired", "expires", "min_until", "max_until"],
    }.items():
        row = engine()._server.row(name)
        for moment in moments:
            if here.hget(row, moment) != b"0":
                here.hincrby(row, moment, hour)
    assert distributed_lock(f"{key}:held", owner="other").try_acquire() is None
    lease.renew()
    assert lease.release() is True
    assert token_of(key) == before + hour + 1
    assert token_of(f"{key}:held") > (lease.fencing_token or 0)


@pytest.mark.parametrize("verb", ["release", "renew", "several", "force"])
def test_version_of_the_future(here: Any, key: str, verb: str) -> None:
    """A row is kept for as long as a new one would have smaller tokens."""
    names = [key, f"{key}!"]
    distributed_lock(*names).acquire(timeout=0).release()
    days = 86_400_000
    for name in names:
        here.hincrby(engine()._server.row(name), "version", 9 * days * 1000)
    asked = names if verb == "several" else names[:1]
    lease = distributed_lock(*asked, lease=30).acquire(timeout=0)
    if verb == "renew":
        lease.renew()
    elif verb == "force":
        assert engine().force_release(key) is True
    else:
        assert lease.release() is True
    for name in asked:
        assert here.pttl(engine()._server.row(name)) > 9 * days
    lease.release()


# Settings


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({}, "LOCATION"),
        ({"LOCATION": None}, "LOCATION"),
        ({"LOCATION": []}, "LOCATION"),
        ({"LOCATION": ["redis://:s3cret@a", 1]}, "LOCATION"),
        ({"LOCATION": ["redis://:s3cret@a", "redis://:s3cret@a"]}, "twice"),
        ({"LOCATION": "redis://:s3cret@a/0,redis://:s3cret@b/0"}, "as a list"),
        ({"LOCATION": ["redis://a", "redis://:s3cret@b;redis://c"]}, "as a list"),
        ({"LOCATION": "redis://:s3,cret@a"}, "percent-encode"),
        ({"LOCATION": "redis://me:s3cret@a/locks"}, "'redis://a/locks'"),
        ({"LOCATION": "rediss://:s3cret@a/1/2"}, "number of a database"),
        ({"LOCATION": "127.0.0.1:6379?password=s3cret"}, "'127.0.0.1:6379'"),
        ({"LOCATION": "localhost:6379"}, "scheme"),
        ({"LOCATION": "http://:s3cret@localhost"}, "scheme"),
        ({"LOCATION": "redis://:s3cret@localhost:port"}, "percent-encoded"),
        ({"LOCATION": "redis://:s3/cret@localhost"}, "percent-encoded"),
        ({"LOCATION": "redis://:s3?cret@localhost"}, "percent-encoded"),
        ({"LOCATION": "redis://:s3#cret@localhost"}, "percent-encoded"),
        ({"LOCATION": "redis://:s3[cret@localhost"}, "percent-encoded"),
        ({"LOCATION": "redis://a", "OPTIONS": {"colour": 1}}, "colour"),
        ({"LOCATION": "redis://a", "OPTIONS": {"retry": 1}}, "retry can't be set"),
        ({"LOCATION": "redis://a", "OPTIONS": {"protocol": 4}}, "protocol"),
        ({"LOCATION": "redis://a", "OPTIONS": {"protocol": math.inf}}, "OPTIONS"),
        ({"LOCATION": "redis://a", "OPTIONS": {"socket_timeout": "5"}}, "seconds"),
        ({"LOCATION": "redis://a?decode_responses=1"}, "decode_responses can't"),
        ({"LOCATION": "redis://a", "OPTIONS": {"sentinels": ["a:1"]}}, "OPTIONS"),
        ({"LOCATION": "redis://a", "KEY_PREFIX": "{a}"}, "KEY_PREFIX"),
        ({"LOCATION": "redis://a", "KEY_PREFIX": 1}, "KEY_PREFIX"),
        ({"LOCATION": "redis://a", "HOST": "b"}, "HOST"),
    ],
)
def test_bad_settings(settings: Any, config: dict[str, Any], named: str) -> None:
    """They are refused before any I/O, by a message without user or password."""
    settings.DBLOCKS = {"default": {"BACKEND": BACKEND, **config}}
    with pytest.raises(ImproperlyConfigured) as caught:
        distributed_lock("k").locked()
    text = str(caught.value)
    assert "default" in text
    assert named in text
    assert "s3" not in text
    assert "cret" not in text


def test_settings_that_fail_when_used(settings: Any, committed: None, key: str) -> None:
    """What shows only in connecting is an error of the engine that names them."""
    use(settings, f"redis://{'a' * 64}/0")
    with pytest.raises(RedisError, match=r"LOCATION .* or its OPTIONS"):
        distributed_lock(key, timeout=DEADLINE).acquire()
    (message,) = found()
    assert message.id == "dblocks.W011"


@pytest.mark.parametrize(
    "location",
    ["redis://a/", "redis://a/15/", "redis://:a%2Cb%3B@a/1", "unix:///run/redis.sock"],
)
def test_good_locations(settings: Any, location: str) -> None:
    """A number may be missing, a socket has a path, a password may have anything."""
    use(settings, location)
    assert engine()._server.client.name.startswith(location.partition(":")[0])


def test_sentinel_takes_what_the_url_says(settings: Any) -> None:
    """With Sentinel, user, password, database and TLS are LOCATION's all the same."""
    options = {"sentinels": [("127.0.0.1", 1)]}
    use(settings, "rediss://me:s3cret@service/7", OPTIONS=options)
    pool: Any = engine()._server.client._pool
    assert pool.service_name == "service"
    assert pool.connection_kwargs["username"] == "me"
    assert pool.connection_kwargs["password"] == "s3cret"
    assert pool.connection_kwargs["db"] == 7
    assert "SSL" in pool.connection_class.__name__


def test_user_with_few_commands(settings: Any, shared: Redis, key: str) -> None:
    """Those that the documentation names are enough, and the scripts use no others."""
    page = (ROOT / "docs" / "engines.md").read_text()
    rules = re.findall(r"(?:^| )(\+[a-z|]+)", page, re.MULTILINE)
    inside: Any = redis.Redis.from_url(shared.url())
    may = {"enabled": True, "keys": ["dblocks:*"], "commands": rules}
    inside.acl_setuser("few", reset=True, passwords=["+x"], **may)
    use(settings, f"redis://few:x@{HOST}:{shared.port}/1", "second")
    lease = distributed_lock(key).acquire(timeout=0)
    assert engine().request_release(key) is True
    assert [entry.key for entry in engine().entries(key)] == [key]
    assert lease.release() is True
    every = [each for each in vars(scripts).values() if type(each) is Script]
    texts = "".join(each.text for each in every)
    used = {name.lower() for name in re.findall(r"redis\.call\('([A-Z]+)'", texts)}
    assert used <= {rule[1:] for rule in rules}


def test_unix_socket(settings: Any, shared: Redis, key: str) -> None:
    """A server may be reached by its socket."""
    use(settings, f"unix://{shared._socket}?db=0")
    with distributed_lock(key, timeout=0) as lease:
        lease.renew()
        assert redis.Redis.from_url(shared.url()).exists(f"dblocks:{{lock:{key}}}:row")


def test_wrong_password(settings: Any, key: str) -> None:
    """That is said at once, without the password, and is never "taken"."""
    with Redis() as server:
        inside: Any = redis.Redis.from_url(server.url())
        inside.acl_setuser(
            "me", enabled=True, passwords=["+right"], keys=["*"], categories=["+@all"]
        )
        inside.config_set("requirepass", "right")
        place = f"127.0.0.1:{server.port}"
        for location in (
            f"redis://{place}/0",
            f"redis://:s3cret@{place}/0",
            f"redis://me:s3cret@{place}/0",
        ):
            use(settings, location)
            with takes(at_most=1 + SLACK / 2), pytest.raises(RedisError) as caught:
                distributed_lock(key, timeout=DEADLINE).acquire()
            assert isinstance(caught.value, AuthenticationError)
            assert place in str(caught.value)
            assert "s3cret" not in str(caught.value)
            (message,) = found()
            assert message.id == "dblocks.W011"
            assert "s3cret" not in f"{message.msg} {message.hint}"
        use(settings, f"redis://me:right@{place}/0")
        assert token_of(key)


def test_without_redis_py() -> None:
    """The error says what to install."""
    program = (
        "import sys; sys.modules['redis'] = None\n"
        f"from django.utils.module_loading import import_string\n"
        f"import_string({BACKEND!r})"
    )
    result = run_python("-c", program)
    assert 'pip install "django-dblocks[redis]"' in result.stderr


def found() -> list[Any]:
    """Return what the system checks say of Redis."""
    return [
        message
        for message in run_checks(databases=["default"])
        if str(message.id) in {"dblocks.W011", "dblocks.W012", "dblocks.W013"}
    ]


def test_checks(settings: Any, committed: None) -> None:
    """W011 to W013 say what puts locks at risk, and nothing of a good server."""
    with Redis() as server:
        use(settings, server.url())
        assert not found()
        inside: Any = redis.Redis.from_url(server.url())
        inside.config_set("maxmemory-policy", "allkeys-lru")
        (message,) = found()
        assert message.id == "dblocks.W012"
        assert "allkeys-lru" in message.msg
        inside.config_set("appendonly", "no")
        assert [each.id for each in found()] == ["dblocks.W012", "dblocks.W013"]
        server.stop()
        (message,) = found()
        assert message.id == "dblocks.W011"
        assert f"127.0.0.1:{server.port}" in message.msg


# Names

ODD = [
    "a",
    "A",
    "a ",
    "a}:row",
    "a}:row:1",
    "a}:queue",
    "{a}",
    "}",
    "{",
    "{}",
    "*",
    "?",
    "[a]",
    "[^a]",
    "\\",
    "\\*",
    "a\nb",
    "a\r\n$1\r\nb",
    "\x01\x1e\x7f",
    "\u00e9",
    "e\u0301",
    "\U0001f4a5",
    "\U0001f4a5" * 253,
    "x" * 253,
]


@pytest.mark.filterwarnings("ignore:.*is taken literally:RuntimeWarning")
def test_odd_keys(here: Any) -> None:
    """Keys never share their state, whatever is in them, and are told as they are."""
    leases = []
    for number, key in enumerate(ODD):
        plain = distributed_lock(key, owner=f"{number}", lease=100)
        permit = distributed_lock(key, owner=f"p{number}", lease=100, permits=2)
        leases += [plain.acquire(timeout=0), permit.acquire(timeout=0)]
        engine()._server.queue(Request(key, "", 9.0), f"ab{number} }}:row:1", 9.0)
    for number, key in enumerate(ODD):
        entries = {e.permit: e.owner for e in engine().entries(key)}
        assert entries.pop(None) == f"{number}"
        assert list(entries.values()) == [f"p{number}"]
        assert engine().waiters(key).names == ("}:row:1",)
    told = StringIO()
    call_command("locks", "list", "--json", "--backend", "default", stdout=told)
    rows = json.loads(told.getvalue())
    assert sorted(row["key"] for row in rows) == sorted(2 * ODD)
    for key in ODD[1::2]:
        assert engine().force_release(key)
    for number, key in enumerate(ODD):
        (entry,) = (e for e in engine().entries(key) if e.permit is None)
        assert entry.owner == ("" if number % 2 else f"{number}")
        assert distributed_lock(key).locked() is not bool(number % 2)
    for number, lease in enumerate(leases):
        # Of every second key the lock without permits was forced.
        assert lease.release() is (number % 4 != 2)


def test_prefixes_are_apart(here: Any, shared: Redis, settings: Any) -> None:
    """Locks with another prefix are others, and patterns in a prefix match nothing."""
    settings.DBLOCKS = {
        prefix or "default": {
            "BACKEND": BACKEND,
            "LOCATION": shared.url(),
            "KEY_PREFIX": prefix,
        }
        for prefix in ("", "x:", "?:", "[x]:")
    }
    for alias in settings.DBLOCKS:
        with distributed_lock("k", backend=alias, timeout=0):
            pass
    for alias in settings.DBLOCKS:
        assert len(list(backends[alias].entries())) == 1
    assert len(here.keys("*row")) == 4


def test_idle_connections_after_a_fault(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is given up with a broken connection is closed at once."""

    def broken(*arguments: Any) -> None:
        raise RedisConnectionError("gone")

    client: Any = backends[backend]._server.client
    client.close()
    taken = [client._take() for _ in range(3)]
    for each in taken:
        client._give_back(each)
    monkeypatch.setattr(taken[-1], "send_packed_command", broken)
    with pytest.raises(RedisConnectionError):
        client.send("PING")
    assert [each._sock for each in taken] == [None] * 3
    assert client.send("PING")


def test_idle_connections_of_a_dropped_engine(settings: Any, shared: Redis) -> None:
    """Settings that change leave no open socket to the garbage collector."""
    settings.DBLOCKS = {"default": {"BACKEND": BACKEND, "LOCATION": shared.url()}}
    client: Any = backends["default"]._server.client
    assert client.send("PING")
    [connection] = client._idle
    sock = connection._sock
    del client, connection
    gc.disable()
    try:
        settings.DBLOCKS = {}
        assert sock.fileno() == -1
    finally:
        gc.enable()


# Waiters


def asks(worker: Worker, key: str, number: int) -> Worker:
    """Wait until a worker queues as the so-maniest."""
    alias = backends["redis"]
    eventually(lambda: alias.waiters(key).number == number, what="the queue")
    return worker


@pytest.fixture
def line(workers: Workers, key: str) -> Callable[[int], list[Worker]]:
    """Make processes that wait for the key, one after the other."""

    def make(number: int) -> list[Worker]:
        return [
            asks(
                workers.start("hold", key=key, timeout=40, backend="redis"),
                key,
                place + 1,
            )
            for place in range(number)
        ]

    return make


def test_first_come_first_served(
    key: str, workers: Workers, line: Callable[[int], list[Worker]]
) -> None:
    """Processes get the key in the order in which they came, each at once."""
    lease = distributed_lock(key, backend="redis", lease=60).acquire(timeout=0)
    waiters = line(4)
    names = backends["redis"].waiters(key).names
    assert [f"pid {w.pid}" in name for w, name in zip(waiters, names, strict=True)] == [
        True
    ] * 4
    tokens = [lease.fencing_token or 0]
    freed = time.monotonic()
    lease.release()
    for waiter in waiters:
        held = waiter.expect("held")
        assert held["at"] - freed < 0.2 + SLACK
        tokens.append(held["token"])
        waiter.tell("release")
        freed = waiter.expect("released")["at"]
    assert tokens == sorted(set(tokens))
    assert backends["redis"].waiters(key).number == 0


def test_who_was_just_told_when_to_look_sleeps_on(here: Any, key: str) -> None:
    """In a queue that moves on, a release wakes hardly anybody whose turn hasn't come.

    Each waiter is told once as one of the last, and once as one of the next.
    """
    server = engine()._server
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    request = Request(key, "x", 60.0)
    tickets = [f"{number:x}" for number in range(9)]
    for ticket in tickets:
        server.queue(request, ticket, 20.0)
    began = time.monotonic()
    lease.release()
    for ticket in tickets[:6]:
        granted = server.acquire(Request(key, ticket, 60.0), ticket)
        assert isinstance(granted, Granted)
        server.release_all([granted.grant], count=0)
    took = time.monotonic() - began
    for ticket in tickets[7:]:
        words = here.lrange(server._bell(key, ticket), 0, -1)
        assert 1 <= len(words) <= 2 + took / GRACE, words


def test_first_is_late_after_one_that_died(here: Any, key: str) -> None:
    """The second doesn't overtake it when what was kept for the dead one lapses."""
    server = engine()._server

    def ask_late() -> tuple[float, Any, Any, Any]:
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        for ticket in ("aa dead", "bb", "cc"):
            server.queue(Request(key, "x", 60.0), ticket, 20.0)
        began = time.monotonic()
        lease.release()
        time.sleep(GRACE + 0.05)
        second = server.acquire(Request(key, "second", 60.0), "cc")
        queued, _ = server.queue(Request(key, "second", 60.0), "cc", 20.0)
        took = time.monotonic() - began
        first = server.acquire(Request(key, "first", 60.0), "bb")
        for each in (first, second):
            if isinstance(each, Granted):
                server.release_all([each.grant], count=0)
        for ticket in ("aa dead", "bb", "cc"):
            server.leave(key, ticket)
        return took, first, second, queued

    # After half a second the second may have it.
    answers = (ask_late() for _ in range(10))
    _, first, second, queued = next(each for each in answers if each[0] < 2 * GRACE)
    assert isinstance(first, Granted)
    assert not isinstance(second, Granted)
    assert queued is False


def test_last_of_many_looks_while_the_key_is_kept(here: Any, key: str) -> None:
    """It looks again in little more than a second, however many are before it."""
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    leave_dead_waiters(key, 41)
    lease.release()
    is_free, turn = engine()._server.queue(Request(key, "x", 60.0), "28 live", 20.0)
    assert not is_free
    assert 4 * GRACE < turn < 5 * GRACE + 1


def test_all_whose_turn_is_the_same_look_in_order(here: Any, key: str) -> None:
    """Of many who may take a key that nobody releases, the first looks first."""
    lease = distributed_lock(key, lease=20, renew=False).acquire(timeout=0)
    # The earliest and the latest moment that the server may have meant.
    moments = []
    for number in range(12):
        ticket, asked = f"{number:x} live", time.monotonic()
        is_free, turn = engine()._server.queue(Request(key, "x", 60.0), ticket, 20.0)
        assert not is_free
        moments.append((asked + turn, time.monotonic() + turn))
    (fifth, _), (_, last) = moments[4], moments[-1]
    assert last - fifth > 0.1
    lease.release()


def test_waiting_costs_next_to_nothing(
    here: Any, key: str, threads: Callable[[], OtherThread]
) -> None:
    """Those who wait for a key that is held ask the server some ten times a minute.

    One of the process does, also if others have asked before they joined it.
    """
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    answers = []
    for owner in (None, None, "importer"):
        lock = distributed_lock(key, backend="second", owner=owner, timeout=50)
        answers.append(threads().start(lock.acquire))
        eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
        always(lambda: not answers[-1].done(), during=0.2, what="the wait")
    before = commands(here)
    time.sleep(12)
    # Renewals of this one's own are not due yet, or just once.
    assert commands(here) - before <= 3
    freed = time.monotonic()
    lease.release()
    theirs = answers[0].result(timeout=DEADLINE)
    assert time.monotonic() - freed < 0.1 + SLACK
    theirs.release()
    for answer in answers[1:]:
        answer.result(timeout=DEADLINE).release()


@pytest.mark.parametrize("dead", [1, 2, 3])
@pytest.mark.parametrize("how", ["killed", "stopped"])
@pytest.mark.parametrize("end", ["released", "expired"])
def test_waiters_that_die(
    key: str,
    workers: Workers,
    line: Callable[[int], list[Worker]],
    dead: int,
    how: str,
    end: str,
) -> None:
    """Each of them costs a quarter of a second, and nobody is forgotten.

    After a lease that ran out, the first costs two of them.
    """
    holder = workers.start("hold", key=key, backend="redis", lease=scaled(3))
    holder.expect("held")
    waiters = line(dead + 2)
    for waiter in waiters[:dead]:
        {"killed": waiter.kill, "stopped": waiter.stop}[how]()
    if end == "released":
        free = time.monotonic()
        holder.tell("release")
    else:
        holder.kill()
        seen = backends["redis"].read_all([key])[key]
        free = time.monotonic() + seen.remaining
    held = waiters[dead].expect("held")
    assert held["at"] - free < dead * GRACE + 0.3 + SLACK
    waiters[dead].tell("release")
    freed = waiters[dead].expect("released")["at"]
    held = waiters[-1].expect("held")
    assert held["at"] - freed < dead * GRACE + 0.3 + SLACK
    waiters[-1].tell("release")
    waiters[-1].until_done()
    if how == "stopped":
        for waiter in waiters[:dead]:
            waiter.tell("release")
            waiter.resume()
        for waiter in waiters[:dead]:
            assert waiter.until_done()[-1]["result"] is True


@pytest.mark.parametrize("permits", [1, 2])
def test_try_where_all_waiters_are_dead(here: Any, key: str, permits: int) -> None:
    """A key that is free isn't refused for longer than a moment for each of them."""
    lock = distributed_lock(key, permits=permits, timeout=0, lease=60)
    theirs = [
        distributed_lock(key, permits=permits, owner=f"{n}", lease=60).acquire(0)
        for n in range(permits)
    ]
    request = Request(key, "x", 60.0, permits=permits)
    for name in ("aa dead", "bb dead", "cc dead"):
        assert engine()._server.queue(request, name, 20.0)[0] is False
    began = time.monotonic()
    for lease in theirs:
        lease.release()
    mine = eventually(lock.try_acquire, within=3 * GRACE + SLACK, what="the grant")
    assert time.monotonic() - began > GRACE / 2
    mine.release()


def leave_dead_waiters(key: str, number: int, name: str = "dead") -> None:
    """Queue as processes that are killed while they wait."""
    request = Request(key, "x", 60.0)
    for each in range(number):
        assert engine()._server.queue(request, f"{each:x} {name}", 20.0)[0] is False


@pytest.mark.parametrize("end", ["released", "cooled"])
@pytest.mark.parametrize("dead", [4, 5, 20])
def test_many_dead_waiters_before_a_live_one(
    here: Any, key: str, threads: Threads, dead: int, end: str
) -> None:
    """Who waits behind them gets a key that is free after little more than a second."""
    cools = 0.0 if end == "released" else 2.0
    lease = distributed_lock(key, lease=60, hold_at_least=cools).acquire(timeout=0)
    leave_dead_waiters(key, dead)
    patient = distributed_lock(key, backend="second", timeout=DEADLINE)
    answer = threads().start(patient.acquire)
    eventually(lambda: engine().waiters(key).number == dead + 1, what="the waiter")
    lease.release()
    with takes(at_most=cools + 5 * GRACE + SLACK):
        answer.result(timeout=DEADLINE).release()


def test_try_behind_many_dead_waiters(here: Any, key: str) -> None:
    """A try is refused a free key for a moment, however many they are."""
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    leave_dead_waiters(key, 30)
    lease.release()
    lock = distributed_lock(key, timeout=0)
    eventually(lock.try_acquire, within=6 * GRACE + SLACK, what="the grant").release()


def test_reserved_key_is_not_polled(here: Any, key: str) -> None:
    """Who comes while the key is kept for one that has died waits without asking."""
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    request = Request(key, "x", 60.0)
    engine()._server.queue(request, "aa dead", 20.0)
    before = commands(here)
    with takes(GRACE / 2, 3 * GRACE + SLACK):
        lease.release()
        with distributed_lock(key, timeout=5):
            pass
    assert commands(here) - before < 25


def test_those_who_wait_come_first(here: Any, key: str) -> None:
    """A lease that ran out leaves the key to who waits, for a moment, not to others."""
    length = 0.3
    lease = distributed_lock(key, lease=length, renew=False).acquire(timeout=0)
    began = lease._hold.started
    engine()._server.queue(Request(key, "x", 60.0), "aa", 20.0)
    lock = distributed_lock(key, timeout=0, backend="second")
    eventually(lock.try_acquire, what="the grant").release()
    assert clock.monotonic() - began > length + GRACE - 0.05
    assert lease.release() is False


def test_let_in_by_mistake(here: Any, key: str) -> None:
    """Two are told that the key is free: the one that is too late queues again."""
    server = engine()._server
    request = Request(key, "x", 0.1)
    lease = distributed_lock(key, lease=0.1, renew=False).acquire(timeout=0)
    for ticket in ("aa", "bb"):
        server.queue(request, ticket, 20.0)
    time.sleep(0.15)
    assert server.queue(request, "aa", 20.0)[0] is True
    # Of the holder that is overdue.
    assert engine().force_release(key)
    assert server.queue(request, "bb", 20.0)[0] is True
    with_bb = server.acquire(Request(key, "b", 60.0), "bb")
    assert with_bb.grant.owner == "b"  # type: ignore[union-attr]
    is_free, turn = server.queue(request, "aa", 20.0)
    assert not is_free
    assert turn > 50
    assert engine().waiters(key).number == 1
    assert lease.release() is False


def test_end_of_the_wait_meets_the_bell(here: Any, key: str) -> None:
    """Whoever gives up at the moment of the release leaves the key to others."""
    with_time = distributed_lock(key, backend="second", timeout=0.3)
    patient = distributed_lock(key, backend="third", timeout=DEADLINE)
    hasty, other = OtherThread(), OtherThread()

    def wait() -> bool:
        lease = with_time.try_acquire(0.3)
        if lease is not None:
            lease.release()
        return lease is not None

    got = set()
    for number in range(20):
        lease = distributed_lock(key, lease=60).acquire(timeout=1)
        began = time.monotonic()
        answer = hasty.start(wait)
        queue_up(key, 1, answer)
        second = other.start(patient.acquire)
        queue_up(key, 2, answer)
        moment = began + 0.29 + 0.001 * number
        time.sleep(max(0.0, moment - time.monotonic()))
        lease.release()
        freed = time.monotonic()
        theirs = second.result(timeout=DEADLINE)
        assert time.monotonic() - freed < GRACE + 0.1 + SLACK / 2
        other.do(theirs.release)
        got.add(answer.result(timeout=DEADLINE))
    nothing_left(here)
    hasty.close()
    other.close()


def queue_up(key: str, number: int, hasty: Future[bool]) -> None:
    """Wait until so many queue, unless the time of the hasty one is over before."""
    eventually(
        lambda: hasty.done() or engine().waiters(key).number == number,
        what="the queue",
    )


def nothing_left(inside: Any) -> None:
    """Of those who waited nothing is in the server any more, but for a moment."""
    left = ("queue", "alive", "rung", "bell", "told", "done")
    eventually(
        lambda: not [name for part in left for name in inside.keys(f"*:{part}*")],
        within=1 + SLACK,
        what="the end of the queue",
    )


def test_co_owner_leaves_the_queue(here: Any, key: str) -> None:
    """Who waited and is let in by a co-owner's grant queues no more."""
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    waiters = [OtherThread(), OtherThread()]
    answers = [
        waiter.start(
            distributed_lock(key, backend=alias, owner="both", timeout=10).acquire
        )
        for waiter, alias in zip(waiters, ["second", "third"], strict=True)
    ]
    eventually(lambda: engine().waiters(key).number == 2, what="the waiters")
    lease.release()
    leases = [answer.result(timeout=DEADLINE) for answer in answers]
    assert leases[0].fencing_token == leases[1].fencing_token
    assert engine().waiters(key).number == 0
    assert not here.keys("*:queue")
    for waiter, theirs in zip(waiters, leases, strict=True):
        waiter.do(theirs.release)
        waiter.close()


def test_co_owner_whose_time_is_over(here: Any, key: str, threads: Threads) -> None:
    """Who waited behind others of its process enters if its owner has the key.

    The first of that process sleeps: the release has told others when to look.
    """
    lease = distributed_lock(key, lease=60).acquire(timeout=0)
    length = scaled(2)
    answers = []
    for alias, owner, timeout, before in (
        ("third", "both", DEADLINE, 0),
        ("second", None, DEADLINE, 3),
        ("second", "both", length, 0),
    ):
        leave_dead_waiters(key, before)
        lock = distributed_lock(key, backend=alias, owner=owner, timeout=timeout)
        number = (engine().waiters(key).number or 0) + 1
        answers.append(threads().start(lock.acquire))
        if answers[2:]:
            always(lambda: not answers[2].done(), during=0.2, what="the wait")
        else:
            eventually(lambda n=number: engine().waiters(key).number == n)
    leave_dead_waiters(key, 3, "behind")
    lease.release()
    theirs = answers[0].result(timeout=DEADLINE)
    with takes(at_most=length + SLACK):
        co_owners = answers[2].result(timeout=DEADLINE)
    assert co_owners.fencing_token == theirs.fencing_token
    assert co_owners.release() is True
    assert theirs.release() is True
    answers[1].result(timeout=DEADLINE).release()


class Interrupted(Exception):
    """Raised by a handler of a signal."""


# A socket that is just being connected is lost in redis-py.
@pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")
def test_signal_ends_a_wait(here: Any, key: str) -> None:
    """A handler that raises in the middle of a wait leaves nothing in the queue."""

    def interrupt(frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code.co_name in {"__del__", "_remove", "remove", "gc_callback"}:
                # Python ignores what a finalizer or a weak reference's callback raises.
                arm(0.001)
                return
            frame = frame.f_back
        raise Interrupted

    other = OtherThread()
    lease = other.do(distributed_lock(key, lease=60).acquire, 0)
    with alarms(interrupt) as arm:
        for number in range(10):
            with pytest.raises(Interrupted):  # noqa: PT012
                arm(0.02 + 0.01 * number)
                distributed_lock(key, backend="second", timeout=DEADLINE).acquire()
    other.do(lease.release)
    with takes(at_most=2 * GRACE + SLACK), distributed_lock(key, timeout=5):
        pass
    eventually(lambda: engine().waiters(key).number == 0, within=3, what="the end")
    other.close()
    gc.collect()


def test_signal_handlers_that_lock(here: Any, key: str) -> None:
    """A handler takes another lock in the middle of a command, on the same server."""
    done = []

    def lock(frame: FrameType | None) -> None:
        with distributed_lock(f"{key}:handler", timeout=5):
            done.append(True)
        # Not before: on a busy machine handlers would pile up.
        arm(0.002)

    began = time.monotonic()
    tokens = [token_of(key)]
    with alarms(lock) as arm:
        arm(0.002)
        while (passed := time.monotonic() - began) < 1.5 or len(done) <= 50:
            assert passed < DEADLINE
            tokens.append(token_of(key))
    assert tokens == sorted(set(tokens))


def test_fork_while_holding(here: Any, key: str) -> None:
    """Parent and child go on, each on connections of its own."""
    with distributed_lock(key, lease=30, timeout=0) as lease:

        def child() -> list[Any]:
            tokens = [token_of(f"{key}:child") for _ in range(50)]
            refused = distributed_lock(key).try_acquire()
            return [lease.lost_reason, refused, tokens == sorted(set(tokens))]

        tokens: list[int] = []
        over = threading.Event()

        def work() -> None:
            while not over.is_set():
                tokens.append(token_of(f"{key}:parent"))

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(5):
                assert in_forked_child(child) == ["forked", None, True]
        finally:
            over.set()
            worker.join(DEADLINE)
        assert tokens == sorted(set(tokens))
        lease.renew()


def test_threads_that_begin_together_in_a_forked_child(backend: str) -> None:
    """None of them gets a connection of the parent's while others are closed."""
    client: Any = backends[backend]._server.client
    inherited = [client._take() for _ in range(8)]
    for each in inherited:
        client._give_back(each)

    def child() -> list[bool]:
        closing, goes_on = threading.Event(), threading.Event()
        close = inherited[-1].disconnect

        def slowly() -> None:
            closing.set()
            goes_on.wait(DEADLINE)
            close()

        inherited[-1].disconnect = slowly
        first = threading.Thread(target=client._take)
        first.start()
        in_time = closing.wait(DEADLINE)
        taken = client._take()
        goes_on.set()
        first.join(DEADLINE)
        return [in_time, taken in inherited]

    assert in_forked_child(child) == [True, False]
    client.close()


# Many at once


def test_hundreds_of_keys(here: Any, key: str) -> None:
    """A set is taken, renewed and released by one command each."""
    token_of(key)
    keys = [f"{key}:{number}" for number in range(400)]
    for _ in range(2):
        before = commands(here)
        leases = distributed_lock(*keys, lease=scaled(3)).acquire(timeout=0)
        assert commands(here) - before <= 2
        taken = commands(here)
        time.sleep(scaled(2.5))
        renewals = commands(here) - taken
        assert leases.held
        assert 2 <= renewals <= 8
        before = commands(here)
        assert leases.release() is True
        assert commands(here) - before <= 3
    assert not distributed_lock(*keys).locked()


# Exclusion


@pytest.mark.parametrize(
    "wrong", [{"owner": "other"}, {"version": -1}, {"version": 1}], ids=str
)
def test_not_the_current_grant(here: Any, key: str, wrong: dict[str, Any]) -> None:
    """With another owner or version each verb changes nothing, and says so."""
    lease = distributed_lock(key, owner="me", lease=30).acquire(timeout=0)
    (before,) = engine().entries(key)
    current = Grant(key, "me", lease.fencing_token)
    if "version" in wrong:
        wrong = {"version": (current.version or 0) + wrong["version"]}
    other = current._replace(**wrong)
    assert set(engine().renew([Renewal(other, 60.0)]).lost) == {other}
    assert set(engine().reenter(Renewal(other, 60.0), None, 1.0).lost) == {other}
    for count in (None, 0, 3):
        assert engine().release(other, count=count, deadline=0.0) is False
    engine().undo_all([other])
    engine()._server.forfeit(other, 1)
    (after,) = engine().entries(key)
    assert replace(after, remaining=0.0) == replace(before, remaining=0.0)
    assert lease.release() is True
    # Nor is a release that was not lost told twice.
    assert engine().release(current, count=0, deadline=0.0) is False


@pytest.fixture
def crew(committed: None) -> Iterator[Crew]:
    crew = Crew()
    # On a busy machine its start would take the whole time for which they contend.
    crew.fork_all("contend", [])
    yield crew
    crew.close()


@pytest.mark.timeout(120)
def test_exclusion_with_killed_and_stopped_holders(crew: Crew, key: str) -> None:
    """No two hold a key at once, and its tokens rise, whatever becomes of holders."""
    length = scaled(0.5)
    assert exclude(crew, key, "redis", length=length, lease=length) > 50


@pytest.mark.timeout(120)
def test_wrong_wall_clocks(backend: str, key: str) -> None:
    """Clients a day ahead and a day behind get what the server's clock grants."""
    code = "import time; print(time.time())"
    crews: list[Crew] = []
    try:
        for days in (1, -1):
            wrong = faketime(FAKETIME=f"{days:+d}d")
            shown = run_python("-c", code, env={**os.environ, **wrong}).stdout
            assert abs(float(shown) - time.time() - days * 86400) < 60
            crew = Crew(wrong)
            crews.append(crew)
            name = f"{key}:{days:+d}d"
            told = {"key": name, "until": time.monotonic() + 60, "backend": backend}
            holder = crew.fork("hold", lease=20.0, renew=False, **told)
            holder.expect("held", within=2 * DEADLINE)
            [entry] = backends[backend].entries(name)
            assert 20 - SLACK - DEADLINE < entry.remaining <= 20
            assert entry.acquired_at is not None
            assert abs(entry.acquired_at.timestamp() - time.time()) < 60
            assert distributed_lock(name, backend=backend).try_acquire() is None
        row = {
            "keys": [
                f"{key}:0",
                [f"{key}:0", f"{key}:1"],
                {"key": f"{key}:p", "permits": [2, 3]},
            ],
            "until": time.monotonic() + DEADLINE,
            "rounds": 60,
            "timeout": 1.0,
            "backend": backend,
        }
        table = [{**row, "seed": seed} for seed in range(2)]
        working = [crew.fork_all("contend", table) for crew in crews]
        history = []
        for number, crew in enumerate(crews):
            crew.finish(working[number], within=3 * DEADLINE)
            for event in crew.history():
                process = f"{event.process} of crew {number}"
                history.append(replace(event, process=process))
        verify(history)
        assert sum(event.what == "grant" for event in history) > 100
    finally:
        for crew in crews:
            crew.close()


def test_a_wait_that_runs_out(here: Any, key: str) -> None:
    """LockTimeout tells who has the key, and nothing is left of the wait."""
    other = OtherThread()
    lease = other.do(distributed_lock(key, lease=60, note="why").acquire, 0)
    with pytest.raises(LockTimeout) as caught:
        distributed_lock(key, timeout=0.3, backend="second").acquire()
    assert caught.value.note == "why"
    assert 50 < caught.value.retry_after <= 60
    other.do(lease.release)
    nothing_left(here)
    other.close()
