"""What is particular to locks in ZooKeeper."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import NotSupportedError
from kazoo.client import KazooClient
from kazoo.exceptions import (
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    RolledBackError,
    RuntimeInconsistency,
    UnimplementedError,
)
from kazoo.protocol.serialization import Exists
from kazoo.protocol.states import ZnodeStat
from kazoo.security import make_acl, make_digest_acl

from dblocks import Lease, Lock, LockTimeout, distributed_lock
from dblocks.backends.values import Request
from dblocks.backends.zookeeper import asking, nodes, sessions
from dblocks.backends.zookeeper.handler import Answer
from dblocks.conf import backends
from dblocks.management import sources
from dblocks.permits import row_key, row_keys
from dblocks.signals import lock_force_released
from tests.faults.crew import Crew
from tests.faults.exclusion import exclude
from tests.support.commands import running_locks
from tests.support.fixtures import OtherThread
from tests.support.processes import ROOT, Workers, resume, run_python, stop
from tests.support.services import HOST, Server, ZooKeeper, free_port
from tests.support.timing import (
    DEADLINE,
    SLACK,
    STEP,
    always,
    eventually,
    scaled,
    takes,
)

pytestmark = pytest.mark.engine("zookeeper")

PATH = "dblocks.backends.zookeeper.ZooKeeperBackend"

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Configure = Callable[..., str]


def engine(alias: str = "zookeeper") -> Any:
    return backends[alias]


def queued(thread: OtherThread, lock: Lock, key: str) -> Any:
    """Have a thread wait for a key, alone; the future of its lease."""
    waiting = thread.start(lock.acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number == 1)
    return waiting


def session(alias: str = "zookeeper") -> sessions.Session:
    # Its connection is broken if this process stood still, on a busy machine.
    address = engine(alias)._address
    return sessions.patiently(address, DEADLINE, lambda session, give_up: session)


def folder(key: str, alias: str = "zookeeper") -> str:
    return session(alias).folder(key)


def places(key: str, alias: str = "zookeeper") -> list[str]:
    """Return the names of the nodes of a key, in order."""
    give_up = time.monotonic() + 1e6
    return session(alias).children([folder(key, alias)], give_up)[0] or []


@pytest.fixture
def configure(backend: str, settings: Any) -> Iterator[Configure]:
    """Add an alias for an engine as the shared one but for changes."""
    made: list[str] = []

    def add(alias: str, **changes: Any) -> str:
        config = {**settings.DBLOCKS["zookeeper"], **changes}
        settings.DBLOCKS = {**settings.DBLOCKS, alias: config}
        made.append(alias)
        return alias

    yield add
    for alias in made:
        with suppress(ImproperlyConfigured):
            sessions.close(engine(alias)._address)


@pytest.fixture(scope="module")
def shared_server() -> Iterator[ZooKeeper]:
    with ZooKeeper() as server:
        yield server


@pytest.fixture
def server(shared_server: ZooKeeper) -> ZooKeeper:
    """A server that the test may kill."""
    shared_server.start()
    return shared_server


@pytest.fixture
def own(configure: Configure, server: ZooKeeper) -> str:
    """Return the alias of an engine on that server."""
    return configure("own", LOCATION=server.url())


@pytest.fixture
def long(configure: Configure) -> str:
    """Return the alias of an engine whose leases outlast what a test does."""
    return configure("long", LEASE=30)


@pytest.fixture
def ensemble() -> Iterator[list[ZooKeeper]]:
    """Run three servers as one."""
    members = [f"{HOST}:{free_port()}:{free_port()}" for _ in range(3)]
    servers = [ZooKeeper(number=n, members=members) for n in (1, 2, 3)]
    with ExitStack() as stack:
        stack.callback(lambda: [each.close() for each in servers])
        # They answer once two are there.
        starting = [threading.Thread(target=each.start) for each in servers]
        for thread in starting:
            thread.start()
        for thread in starting:
            thread.join(DEADLINE * 4)
        assert all(each.ask("srvr") for each in servers)
        yield servers


def leader(servers: list[ZooKeeper]) -> ZooKeeper:
    return next(each for each in servers if "Mode: leader" in each.ask("srvr"))


# Settings


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"LOCATION": ""}, "must name servers"),
        ({"LOCATION": 2181}, "must be a str or a list"),
        ({"LOCATION": "zk1:2181/locks"}, "KEY_PREFIX"),
        ({"LOCATION": "zk1:2181,zk2:x"}, "not 'zk2:x'"),
        ({"LOCATION": ["zk1:99999"]}, "ports from 1 to 65535"),
        ({"LOCATION": "[::1"}, "must name hosts"),
        ({"LOCATION": ":2181"}, "must name hosts"),
        ({"LOCATION": "user@zk1:2181"}, "must name hosts"),
        ({"LOCATION": "zk 1"}, "must name hosts"),
        ({"LOCATION": "zk1?x"}, "must name hosts"),
        ({"LOCATION": "zk1\0:2181"}, "must name hosts"),
        ({"KEY_PREFIX": ""}, "must be a path"),
        ({"KEY_PREFIX": "a/../b"}, "must be a path"),
        ({"KEY_PREFIX": 7}, "must be a str"),
        ({"OPTIONS": {"read_only": True}}, "read_only"),
        ({"PREFIX": "x"}, "PREFIX"),
    ],
)
def test_bad_settings(configure: Configure, changes: Any, said: str) -> None:
    """What can't be right is refused when the backend is made, with the setting."""
    alias = configure("wrong", **changes)
    with pytest.raises(ImproperlyConfigured, match=said) as caught:
        engine(alias)
    assert "DBLOCKS['wrong']" in str(caught.value)


def test_no_location(backend: str, settings: Any) -> None:
    """There is no server by default."""
    settings.DBLOCKS = {"wrong": {"BACKEND": PATH}}
    with pytest.raises(ImproperlyConfigured, match="LOCATION is missing"):
        engine("wrong")


def test_location_as_list(configure: Configure, settings: Any, key: str) -> None:
    """Several servers may be a list."""
    location = settings.DBLOCKS["zookeeper"]["LOCATION"]
    alias = configure("listed", LOCATION=[location, location], KEY_PREFIX="a/b")
    with distributed_lock(key, backend=alias) as lease:
        assert lease.held
        assert session(alias).folder(key).startswith("/a/b/")
        assert places(key, alias)


def test_missing_package(backend: str) -> None:
    """Without kazoo the error says what to install; nothing else imports it."""
    program = """
import sys
import django
from django.conf import settings
settings.configure(DBLOCKS={"zk": {"BACKEND": %r, "LOCATION": "zk1"}})
django.setup()
import dblocks, dblocks.locks, dblocks.checks, dblocks.backends.locmem
assert not any(name.split(".")[0] == "kazoo" for name in sys.modules)
sys.modules["kazoo"] = None
from dblocks.conf import backends
backends["zk"]
"""
    ended = run_python("-c", program % PATH)
    assert "ImproperlyConfigured" in ended.stderr
    assert 'pip install "django-dblocks[zookeeper]"' in ended.stderr


@pytest.mark.parametrize("lease", [0.1, 600])
def test_session_of_another_length(
    configure: Configure, key: str, lease: float
) -> None:
    """A lease that the server has no sessions for is an error that says what to set."""
    alias = configure("odd", LEASE=lease)
    with pytest.raises(ImproperlyConfigured, match="tickTime") as caught:
        distributed_lock(key, backend=alias).try_acquire()
    assert f"LEASE is {lease:g} s" in str(caught.value)


def test_no_server(
    configure: Configure, key: str, live_threads: Callable[[], set[Any]]
) -> None:
    """A server that doesn't answer is kazoo's error, soon, and leaves nothing open."""
    alias = configure("nowhere", LOCATION=f"{HOST}:{free_port()}")
    with takes(at_most=5 + SLACK), pytest.raises(ConnectionLoss, match="LOCATION"):
        distributed_lock(key, backend=alias).acquire(timeout=1)
    assert issubclass(ConnectionLoss, engine(alias).errors)
    eventually(lambda: not live_threads(), what="the end of the threads")


def test_silent_server(
    configure: Configure,
    key: str,
    threads: Callable[[], OtherThread],
) -> None:
    """A server that accepts and says nothing keeps no thread waiting for another."""
    with socket.create_server((HOST, 0)) as silent:
        location = f"{HOST}:{silent.getsockname()[1]}"
        alias = configure("silent", LOCATION=location, LEASE=30)
        lock = distributed_lock(key, backend=alias)
        with takes(at_most=8 + SLACK):
            asking = [threads().start(lock.try_acquire) for _ in range(5)]
            for each in asking:
                with pytest.raises(ConnectionLoss, match="LOCATION"):
                    each.result(5 * DEADLINE)


def test_silent_server_among_others(configure: Configure, key: str) -> None:
    """It doesn't use up the time for the first connection, though it is tried first."""
    with socket.create_server((HOST, 0)) as silent:
        there = f"{HOST}:{silent.getsockname()[1]}"
        location = [there, engine()._address.hosts]
        options = {"randomize_hosts": False}
        alias = configure("mixed", LOCATION=location, LEASE=30, OPTIONS=options)
        assert distributed_lock(key, backend=alias).acquire().release() is True


def test_check(configure: Configure) -> None:
    """W019 says that the servers can't be asked, and why; a good one has no message."""

    def told(alias: str) -> list[Any]:
        return list(engine(alias).check_server(["default"]))

    assert not told("zookeeper")
    port = free_port()
    acl = [make_digest_acl("dblocks", "secret", all=True)]
    options = {"auth_data": [("digest", "dblocks:secret")], "default_acl": acl}
    prefix = f"checked-{time.monotonic_ns()}"
    mine = configure("mine", KEY_PREFIX=prefix, OPTIONS=options)
    assert distributed_lock("k", backend=mine).acquire().release()
    assert not told(mine)
    for alias, said in (
        (configure("nowhere", LOCATION=f"{HOST}:{port}"), f"{HOST}:{port}"),
        (configure("odd", LEASE=600), "LEASE is 600 s"),
        (configure("theirs", KEY_PREFIX=prefix), "auth_data"),
    ):
        (message,) = told(alias)
        assert message.id == "dblocks.W019"
        assert said in message.msg


def test_waiter_is_no_holder(lock: Locks, backend: str, key: str) -> None:
    """Who waits at a free key, and may give up, doesn't have it."""
    gate = backends[backend].gate(Request(key, "the waiter", 30.0))
    assert gate is not None
    gate.enter(DEADLINE)
    assert gate.held
    try:
        assert not lock().locked()
    finally:
        gate.leave()
    with lock().acquire(timeout=DEADLINE) as lease:
        assert lease.held


def test_password(configure: Configure, key: str) -> None:
    """Nodes can be kept from others, who are told what to check; four rights do."""
    rights = dict.fromkeys(("read", "write", "create", "delete"), True)
    acl = [make_digest_acl("dblocks", "secret", **rights)]
    options = {"auth_data": [("digest", "dblocks:secret")], "default_acl": acl}
    prefix = f"guarded-{time.monotonic_ns()}"
    mine = configure("mine", KEY_PREFIX=prefix, OPTIONS=options)
    theirs = configure("theirs", KEY_PREFIX=prefix)
    with distributed_lock(key, backend=mine) as lease:
        assert lease.held
        for other in (key, f"{key}:other"):
            with pytest.raises(NoAuthError, match="auth_data"):
                distributed_lock(other, backend=theirs).try_acquire()
        assert backends[mine].request_release(key)
        (entry,) = backends[mine].entries(key)
        assert entry.expires_at is not None
    forced = distributed_lock(key, backend=mine).acquire()
    assert backends[mine].force_release(key)
    assert forced.release() is False
    with distributed_lock(key, f"{key}:other", backend=mine):
        pass
    assert distributed_lock(key, permits=2, backend=mine).acquire().release()


def test_lock_of_others_that_may_be_read(configure: Configure, key: str) -> None:
    """Who may only read is told who has it; only a write would tell for how long."""
    may = make_acl("world", "anyone", read=True)
    acl = [make_digest_acl("dblocks", "secret", all=True), may]
    options = {"auth_data": [("digest", "dblocks:secret")], "default_acl": acl}
    prefix = f"readable-{time.monotonic_ns()}"
    mine = configure("mine", KEY_PREFIX=prefix, OPTIONS=options)
    theirs = configure("theirs", KEY_PREFIX=prefix)
    with distributed_lock(key, backend=mine) as lease:
        for alias, has_age in ((mine, True), (theirs, False)):
            (entry,) = backends[alias].entries(key)
            assert (entry.key, entry.owner) == (key, lease.owner)
            assert (entry.expires_at is not None) is has_age


def test_credentials_in_a_wrong_form(configure: Configure, key: str) -> None:
    """Options that kazoo can't read are the project's mistake, and named."""
    alias = configure("odd", OPTIONS={"auth_data": "digest:dblocks:secret"})
    with pytest.raises(ImproperlyConfigured, match=r"'odd'.*auth_data") as caught:
        distributed_lock(key, backend=alias).try_acquire()
    assert "secret" not in str(caught.value)


def test_refused_acl(configure: Configure, key: str) -> None:
    """An ACL that the server refuses is kazoo's error, and says what to check."""
    options = {"default_acl": [make_acl("auth", "", all=True)]}
    alias = configure("odd", OPTIONS=options)
    for keys in ([key], [key, key + ":2"]):
        with pytest.raises(InvalidACLError, match="default_acl"):
            distributed_lock(*keys, backend=alias).try_acquire()


def test_refused_transaction(lock: Locks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else the server refuses in it is kazoo's error of that name."""
    mine = session()
    wait = mine.wait

    def refused(*args: Any) -> Any:
        found = wait(*args)
        if not isinstance(found, list) or not isinstance(found[-1], ZnodeStat):
            return found
        return [RolledBackError(), UnimplementedError(), RuntimeInconsistency()]

    monkeypatch.setattr(mine, "wait", refused)
    with pytest.raises(UnimplementedError):
        lock().try_acquire()


# Terms


def test_refused_terms(configure: Configure, key: str) -> None:
    """What can't be kept is refused without asking the server."""
    alias = configure("nowhere", LOCATION=f"{HOST}:1", LEASE=30)
    for terms in ({"lease": 29}, {"lease": 31}, {"hold_at_least": 1}):
        with pytest.raises(NotSupportedError, match=next(iter(terms))):
            distributed_lock(key, backend=alias, **terms).try_acquire()


def test_renewal_of_another_length(acquire: Leases) -> None:
    """A longer lease can't be had later either."""
    lease = acquire()
    with pytest.raises(NotSupportedError, match="LEASE"):
        lease.renew(60)
    assert lease.held


def test_own_length_may_be_given(backend: str, key: str) -> None:
    """The session's timeout itself is accepted."""
    with distributed_lock(key, backend=backend, lease=engine().lease) as lease:
        assert lease.held


def test_not_renewed(lock: Locks, key: str, other: OtherThread) -> None:
    """A lease that isn't renewed ends, although the session goes on."""
    with takes(at_least=0.9 * engine().lease, at_most=engine().lease + SLACK):
        lease = lock(renew=False).acquire()
        theirs = other.do(lock().acquire, timeout=DEADLINE)
    assert lease.lost_reason == "expired"
    assert theirs.fencing_token > lease.fencing_token
    assert places(key)[0]
    other.do(theirs.release)


# Names and listing

NASTY = [
    "a/b",
    "a%2Fb",
    "a%252Fb",
    "/",
    "//",
    ".",
    "..",
    "...",
    "%2E",
    "%2e",
    "zookeeper",
    "Job",
    "job",
    "job ",
    "j\u00f6b",
    "jo\u0308b",
    "\U0001f512",
    "\x01\x7f\u0085\ufff0\ue000",
    "\U0010ffff" * 255,
]


def test_any_key(configure: Configure) -> None:
    """Every key is a lock of its own, and is listed as it was given."""
    # Elsewhere there may be leases that a test before this one has dropped.
    alias = configure("nasty", KEY_PREFIX=f"nasty-{time.monotonic_ns()}")
    with ExitStack() as stack:
        for name in NASTY:
            stack.enter_context(distributed_lock(name, backend=alias, timeout=0))
        listed = [entry.key for entry in engine(alias).entries()]
        assert sorted(listed) == sorted(NASTY)
        assert all(distributed_lock(name, backend=alias).locked() for name in NASTY)
    assert not list(engine(alias).entries())


def test_names(backend: str) -> None:
    """No two keys have one name, and a name leads back to its key."""
    assert len({nodes.escaped(key) for key in NASTY}) == len(NASTY)
    assert [nodes.unescaped(nodes.escaped(key)) for key in NASTY] == NASTY


def test_order_across_the_overflow(backend: str) -> None:
    """The counter of a folder wraps around; the order of places doesn't."""
    numbers = ["2147483646", "2147483647", "-2147483648", "-2147483647"]
    names = [f"{os.urandom(16).hex()}-{number}" for number in numbers]
    assert nodes.in_order(names[::-1]) == names
    assert nodes.in_order(["lost+found", *names[:1], "x-0000000001"]) == names[:1]


def test_listing(acquire: Leases, lock: Locks, key: str, other: OtherThread) -> None:
    """Operators see who has a key or a permit, since when, and what for."""
    lease = acquire(note="nightly", owner="ann")
    acquire(owner="ann")
    permit = acquire(key + ":p", permits=3)
    (entry,) = engine().entries(key)
    assert (entry.key, entry.owner, entry.note) == (key, "ann", "nightly")
    assert (entry.version, entry.hold_count) == (lease.fencing_token, 2)
    assert str(os.getpid()) in entry.holder
    assert abs(entry.acquired_at.timestamp() - time.time()) < SLACK
    assert entry.state == "held"
    (entry,) = engine().entries(key + ":p")
    assert entry.key == f"{key}:p\x1f{permit.permit}"


def test_listing_of_waiters(
    acquire: Leases, lock: Locks, key: str, threads: Callable[[], OtherThread]
) -> None:
    """So are those who wait, but for those behind another one of their process."""
    assert engine().waiters(key).number == 0
    lease = acquire()
    waiting = queued(threads(), lock(), key)
    _, since, names = engine().waiters(key)
    assert abs(since.timestamp() - time.time()) < SLACK
    assert [str(os.getpid()) in name for name in names] == [True]
    assert len(list(engine().entries(key))) == 1
    time.sleep(0.3)
    released = time.time()
    lease.release()
    waiting.result(DEADLINE)
    # It has the key since then, not since it began to wait.
    eventually(
        lambda: (
            next(iter(engine().entries(key))).acquired_at.timestamp() > released - 0.2
        )
    )
    assert engine().waiters(key).number == 0
    waiting.result(DEADLINE).release()


def test_force_release(
    acquire: Leases, lock: Locks, key: str, other: OtherThread
) -> None:
    """Operators free a key; its holder learns of it with the next renewal."""
    lease = acquire()
    assert not engine().force_release(key, version=lease.fencing_token - 1)
    assert not engine().force_release(key, older_than=60)
    assert lease.held
    eventually(lambda: engine().force_release(key, older_than=0.2))
    assert not engine().force_release(key)
    eventually(lambda: lease.lost_reason == "forced", within=engine().lease)
    theirs = other.do(lock().acquire, timeout=0)
    assert theirs.fencing_token > lease.fencing_token
    other.do(theirs.release)


def test_force_release_under_a_waiter(long: str, key: str, other: OtherThread) -> None:
    """The next one is let in at once."""
    lock = distributed_lock(key, backend=long, renew=False)
    lease = lock.acquire(timeout=0)
    waiting = queued(other, lock, key)
    with takes(at_most=SLACK):
        assert engine(long).force_release(key)
        theirs = waiting.result(DEADLINE)
    assert lease.release() is False
    assert lease.lost_reason == "taken"
    assert theirs.held
    other.do(theirs.release)


def test_force_release_of_what_is_just_granted(
    acquire: Leases,
    lock: Locks,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The time for which somebody has waited isn't the age of the grant."""
    lease = acquire()
    waiting = queued(other, lock(), key)
    time.sleep(0.3)
    mine, freed = session(), []
    write = mine.write

    def late(*args: Any) -> Any:
        monkeypatch.undo()
        freed.append(engine().force_release(key, older_than=0.2))
        return write(*args)

    monkeypatch.setattr(mine, "write", late)
    lease.release()
    theirs = waiting.result(DEADLINE)
    assert freed == [False]
    assert other.do(theirs.release)


# The queue


def test_fifo_among_processes(
    backend: str, workers: Workers, key: str, acquire: Leases
) -> None:
    """Processes get the key in the order in which they asked; tokens rise."""
    lease = acquire()
    queue = []
    for number in range(1, 5):
        queue.append(workers.start("hold", key=key, timeout=DEADLINE, backend=backend))
        eventually(lambda n=number: engine().waiters(key).number == n)
    tokens = [lease.fencing_token]
    lease.release()
    for worker in queue:
        tokens.append(worker.expect("held")["token"])
        assert engine().read_all([key])[key].version == tokens[-1]
        worker.tell("release")
        assert worker.expect("released")["result"] is True
        worker.until_done()
    assert tokens == sorted(set(tokens))
    assert not places(key)


@pytest.mark.timeout(120)
def test_exclusion_with_killed_and_stopped_holders(backend: str, key: str) -> None:
    """No two hold a key at once, and its tokens rise, whatever becomes of holders."""
    crew = Crew()
    try:
        # On a busy machine its start would take the whole time for which they contend.
        crew.fork_all("contend", [])
        assert exclude(crew, key, backend, length=engine().lease) > 20
    finally:
        crew.close()


@pytest.mark.parametrize("permits", [1, 2])
def test_no_herd(
    configure: Configure,
    acquire: Leases,
    key: str,
    threads: Callable[[], OtherThread],
    permits: int,
) -> None:
    """Each waiter watches the one before it alone; nobody wakes all of them."""
    holders = [acquire(permits=permits, owner=f"o{n}") for n in range(permits)]
    # Each with a session of its own, like processes.
    aliases = [configure(f"waiter-{number}") for number in range(4)]
    waiting = []
    for number, alias in enumerate(aliases, 1):
        lock = distributed_lock(key, backend=alias, permits=permits)
        waiting.append(threads().start(lock.acquire, timeout=DEADLINE))
        eventually(lambda n=number: engine().waiters(key).number == n)

    def watched(alias: str) -> list[str]:
        return sorted(
            path for path, by in session(alias).client._child_watchers.items() if by
        )

    queue = nodes.queue_key(key, permits)
    line = [f"{folder(queue)}/{name}" for name in places(queue)]
    rows = [folder(row) for row in row_keys(key, permits)]
    # The first of those who wait for permits watches these.
    firsts = [line[:1]] if permits == 1 else [rows]
    expected = firsts + [[path] for path in (line[1:4] if permits == 1 else line[:3])]
    eventually(lambda: [watched(alias) for alias in aliases] == expected)
    holders[0].release()
    for future in waiting:
        assert future.result(DEADLINE).release()


def test_more_permits_than_are_looked_at_in_one_go(
    acquire: Leases, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A free one is found wherever it is; if there is none, all have been seen."""
    monkeypatch.setattr(asking, "AT_ONCE", 2)
    looked: list[int] = []
    children = session().children

    def look(folders: Sequence[str], *more: Any) -> Any:
        looked.append(len(folders))
        return children(folders, *more)

    monkeypatch.setattr(session(), "children", look)
    held = {}
    for number in range(5):
        lease = acquire(timeout=0, permits=5, owner=f"o{number}")
        held[lease.permit] = lease
    assert sorted(held) == [0, 1, 2, 3, 4]
    looked.clear()
    with pytest.raises(LockTimeout, match="all permits are taken"):
        acquire(timeout=0, permits=5, owner="late")
    # Two at a time, and the queue.
    assert looked == [3, 3, 2]
    assert held[3].release()
    assert acquire(timeout=0, permits=5, owner="late").permit == 3


def test_waiter_for_fewer_permits(
    configure: Configure,
    acquire: Leases,
    key: str,
    threads: Callable[[], OtherThread],
) -> None:
    """It queues for those; the others are for callers that know of them, in order."""
    held = [acquire(permits=2, owner=f"o{n}") for n in range(2)]
    few = distributed_lock(key, backend=configure("few"), permits=2)
    many = distributed_lock(key, backend=configure("many"), permits=3)
    first = threads().start(few.acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number == 1)
    third = many.acquire(timeout=0)
    assert third.permit == 2
    second = threads().start(many.acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number == 2)
    with takes(at_most=SLACK):
        assert third.release()
        assert second.result(DEADLINE).permit == 2
    assert not first.done()
    assert held[1].release()
    assert first.result(DEADLINE).permit == held[1].permit
    for each in (first, second):
        assert each.result().release()


def test_waiter_for_more_permits(
    configure: Configure,
    acquire: Leases,
    key: str,
    threads: Callable[[], OtherThread],
) -> None:
    """Who asks for fewer permits later is served later."""
    three = [acquire(permits=3, owner=f"o{n}") for n in range(3)]
    held = sorted(three, key=lambda lease: lease.permit or 0)
    few = distributed_lock(key, backend=configure("few"), permits=2)
    many = distributed_lock(key, backend=configure("many"), permits=3)
    first = threads().start(many.acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number == 1)
    second = threads().start(few.acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number == 2)
    assert held[0].release()
    assert first.result(DEADLINE).permit == 0
    assert few.try_acquire() is None
    assert not second.done()
    assert held[1].release()
    assert second.result(DEADLINE).permit == 1
    for each in (first, second):
        assert each.result().release()


def test_dead_waiter(
    backend: str, workers: Workers, key: str, acquire: Leases, lock: Locks
) -> None:
    """A waiter that is killed holds up nobody for longer than a lease.

    Until then, who asks is told that others queue.
    """
    lease = acquire()
    dead, alive = (
        workers.start("hold", key=key, timeout=DEADLINE, backend=backend, announced=n)
        for n in (False, False)
    )
    eventually(lambda: engine().waiters(key).number == 2)
    first = engine().waiters(key).names[0]
    if f"pid {dead.pid} " not in first:
        dead, alive = alive, dead
    dead.kill()
    lease.release()
    with pytest.raises(LockTimeout, match="others queue for it"):
        lock().acquire(timeout=0)
    with takes(at_most=engine().lease + 0.5 + SLACK):
        alive.expect("held")
    alive.tell("release")
    alive.until_done()


@pytest.mark.parametrize("how", ["times out", "is terminated"])
def test_waiter_that_ends(
    acquire: Leases, key: str, settings: Any, how: str, backend: str
) -> None:
    """A process that gives up and ends leaves no node, which would block the key."""
    acquire()
    program = f"""
import sys
import django
from django.conf import settings
from django.core.management import execute_from_command_line
settings.configure(
    INSTALLED_APPS=["dblocks"], DBLOCKS={{"default": {settings.DBLOCKS[backend]!r}}}
)
django.setup()
if {how == "times out"}:
    from dblocks import distributed_lock
    assert distributed_lock({key!r}).try_acquire(timeout=0.2) is None
else:
    execute_from_command_line(["", "run_locked", {key!r}, "--wait=60", "--", "true"])
"""
    waiter = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        if how == "is terminated":
            eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
            time.sleep(0.3)
            waiter.terminate()
            assert waiter.wait(DEADLINE) == 128 + signal.SIGTERM
        assert waiter.wait(DEADLINE) in (0, 128 + signal.SIGTERM)
    finally:
        waiter.kill()
        waiter.wait()
    assert len(places(key)) == 1


def test_statements_while_waiting(
    long: str, key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits leaves the server alone."""
    with distributed_lock(key, backend=long):
        sent: list[object] = []
        waiting = other.start(distributed_lock(key, backend=long).try_acquire, 6)
        eventually(lambda: engine(long).waiters(key).number == 1)
        time.sleep(0.2)
        client = session(long).client
        call = client._call

        def count(request: Any, answer: Any) -> Any:
            # Not what keeps the holder's session alive.
            if type(request).__name__ != "Exists":
                sent.append(request)
            return call(request, answer)

        monkeypatch.setattr(client, "_call", count)
        time.sleep(2)
        assert len(sent) <= 1, sent
        monkeypatch.undo()
        assert waiting.result(DEADLINE) is None


# Sessions


def expire(alias: str = "zookeeper") -> None:
    """End a session at the server, as if nothing had been heard of it for too long."""
    mine = session(alias)
    twin = KazooClient(mine.address.hosts, client_id=mine.client.client_id)
    twin.start()
    twin.stop()
    twin.close()


def renewed(lease: Lease) -> bool:
    """Renew a lease; a client that is still looking for its server can't."""
    with suppress(KazooException):
        lease.renew()
        return True
    return False


def test_expired_session(
    acquire: Leases, lock: Locks, key: str, other: OtherThread
) -> None:
    """A session that is over takes its leases along; the next one is another."""
    lease = acquire()
    expire()
    eventually(lambda: lease.lost_reason, within=engine().lease)
    assert lease.lost_reason == "expired"
    theirs = other.do(lock().acquire, timeout=DEADLINE)
    assert theirs.fencing_token > lease.fencing_token
    assert lease.release() is False
    assert theirs.held
    assert other.do(theirs.release)


@pytest.mark.parametrize("permits", [1, 2])
def test_folder_of_an_expired_session(lock: Locks, key: str, permits: int) -> None:
    """The server deletes the nodes in it, and the process the folder."""
    lease = lock(permits=permits).acquire()
    held = folder(row_key(key, lease.permit if permits > 1 else None))
    expire()
    eventually(lambda: lease.lost_reason, within=engine().lease)

    def is_gone() -> bool:
        with suppress(KazooException):
            return not session().client.exists(held)
        return False

    eventually(is_gone, what="the folder's end")
    assert lease.release() is False


def test_session_that_is_replaced_at_once(
    lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lease ends with the session that has asked for it, not with the next one."""
    mine = session()
    take, before = mine.take, mine.id

    def replaced(*args: Any) -> Any:
        taken = take(*args)
        expire()
        eventually(lambda: mine.client.connected and mine.id != before)
        return taken

    monkeypatch.setattr(mine, "take", replaced)
    lease = lock().acquire()
    monkeypatch.undo()
    eventually(lambda: lease.lost_reason, within=engine().lease)
    assert lease.lost_reason == "expired"
    assert lease.release() is False


def test_session_that_was_given_up(
    configure: Configure, server: Server, key: str
) -> None:
    """A client that no longer tries to connect keeps no lease."""
    options = {"connection_retry": {"max_tries": 1, "delay": 0.02}}
    alias = configure("hasty", LOCATION=server.url(), LEASE=scaled(10), OPTIONS=options)
    lease = distributed_lock(key, backend=alias).acquire()
    mine = session(alias)
    server.kill()
    eventually(mine.is_over)
    server.start()
    eventually(lambda: lease.lost_reason, within=engine(alias).lease)
    assert lease.lost_reason == "backend"


def test_expired_session_of_a_waiter(
    backend: str, workers: Workers, lock: Locks, key: str
) -> None:
    """Who waits in a session that is over goes on waiting in the next one."""
    worker = workers.start("hold", key=key, backend=backend)
    worker.expect("held")
    thread = OtherThread()
    try:
        waiting = queued(thread, lock(), key)
        expire()
        eventually(lambda: engine().waiters(key).number == 1)
        time.sleep(0.3)
        worker.tell("release")
        lease = waiting.result(DEADLINE)
        assert lease.held
        thread.do(lease.release)
    finally:
        thread.close()
    worker.until_done()
    assert not places(key)


def test_waiter_whose_session_was_given_up(
    configure: Configure, server: Server, key: str, other: OtherThread
) -> None:
    """Who waits is granted a node of its own session, not one that will soon go."""
    terms = {"LOCATION": server.url(), "LEASE": scaled(12)}
    options = {"connection_retry": {"max_tries": 1, "delay": 0.02}}
    mine, theirs = configure("mine", **terms), configure("h", OPTIONS=options, **terms)
    lease = distributed_lock(key, backend=mine).acquire()
    hasty = distributed_lock(key, backend=theirs)
    waiting = other.start(hasty.acquire, timeout=2 * DEADLINE)
    eventually(lambda: engine(mine).waiters(key).number == 1)
    given_up = session(theirs)
    server.kill()
    eventually(given_up.is_over)
    server.start()
    eventually(lambda: renewed(lease), what="a renewal")
    assert lease.release()
    # The node of the session that was given up holds up nobody until it goes.
    with takes(at_most=engine(theirs).lease / 2):
        granted = waiting.result(DEADLINE)
    path = f"{folder(key, theirs)}/{places(key, theirs)[0]}"
    assert session(theirs) is not given_up
    stat = session(theirs).client.exists(path)
    assert stat.ephemeralOwner == session(theirs).id
    assert granted.held
    assert other.do(granted.release)


def test_killed_holder(backend: str, workers: Workers, lock: Locks, key: str) -> None:
    """The key of a process that is killed is free when its session is over."""
    worker = workers.start("hold", key=key, backend=backend)
    token = worker.expect("held")["token"]
    worker.kill()
    with takes(at_least=engine().lease / 3, at_most=engine().lease + 0.3 + SLACK):
        lease = lock().acquire(timeout=DEADLINE)
    assert lease.fencing_token > token
    lease.release()


def test_server_is_killed(configure: Configure, server: Server, key: str) -> None:
    """Out of reach until the deadline, a lease is lost; then all goes on."""
    # Longer than a busy machine takes to kill it, and to find it out of reach.
    own = configure("own", LOCATION=server.url(), LEASE=scaled(4))
    lease = distributed_lock(key, backend=own).acquire()
    server.kill()
    assert lease.held
    eventually(lambda: not lease.held, within=engine(own).lease)
    assert lease.lost_reason == "backend"
    with takes(at_most=2 + SLACK), pytest.raises(KazooException):
        distributed_lock(key, backend=own).try_acquire()
    server.start()
    again = distributed_lock(key, backend=own).acquire(timeout=DEADLINE)
    assert again.fencing_token > lease.fencing_token
    assert lease.release() is False
    assert again.held
    assert len(places(key, own)) == 1
    assert again.release()
    eventually(lambda: not session(own).client.exists(folder(key, own)))


def test_server_restarts_within_a_lease(
    configure: Configure, server: Server, key: str
) -> None:
    """A lease that outlasts the outage is kept, and so is a waiter's place."""
    alias = configure("patient", LOCATION=server.url(), LEASE=scaled(8))
    lease = distributed_lock(key, backend=alias).acquire()
    thread = OtherThread()
    try:
        waiting = thread.start(
            distributed_lock(key, backend=alias).acquire, timeout=2 * DEADLINE
        )
        eventually(lambda: engine(alias).waiters(key).number == 1)
        server.kill()
        server.start()
        always(lambda: lease.held, during=1, what="held")
        eventually(lambda: renewed(lease), what="a renewal")
        assert lease.release()
        theirs = waiting.result(DEADLINE)
        assert theirs.fencing_token > lease.fencing_token
        thread.do(theirs.release)
    finally:
        thread.close()
    assert not places(key, alias)


def test_forced_release_while_the_server_is_away(
    configure: Configure,
    server: Server,
    key: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for the server as long as the listing before it, as for a new leader."""
    alias = configure("patient", LOCATION=server.url(), LEASE=30)
    lease = distributed_lock(key, backend=alias).acquire()
    comes_back = threading.Timer(2, server.start)

    def answer() -> str:
        server.kill()
        comes_back.start()
        return "y"

    monkeypatch.setattr("builtins.input", answer)
    # On a busy machine a server takes longer to start than the command waits.
    monkeypatch.setattr(sources, "PATIENCE", DEADLINE)
    status, out, _ = running_locks(capfd)("release", key, "--backend", alias)
    comes_back.join()
    assert (status, out.startswith(f"Released {key!r}")) == (0, True)
    assert lease.release() is False


def test_requests_while_no_server_answers(
    configure: Configure, server: Server, key: str
) -> None:
    """What keeps a session alive isn't queued for a server that may come back late."""
    alias = configure("patient", LOCATION=server.url(), LEASE=scaled(8))
    distributed_lock(key, backend=alias).acquire().release()
    mine = session(alias)
    server.kill()
    eventually(lambda: not mine.client.connected)
    for _ in range(2):
        # As often, the server would have heard of it four times.
        time.sleep(scaled(1.6))
        assert len(mine.client._queue) <= 1
        mine.doom(folder(key, alias), "0" * 32)
    server.start()
    eventually(lambda: not mine._leftovers, what="the end of the leftovers")


def test_leftovers_after_an_error(
    lock: Locks, key: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """An error that nobody foresaw is logged, and what is left behind is deleted."""
    mine = session()

    def wrong(*args: Any) -> None:
        monkeypatch.undo()
        raise ValueError("unforeseen")

    monkeypatch.setattr(mine, "sweep", wrong)
    lease = lock(renew=False).acquire()
    mine.doom(folder(key), places(key)[0].partition("-")[0])
    eventually(lambda: not places(key), what="the end of the node")
    assert "unforeseen" in caplog.text
    lease.release()


def test_leftover_that_is_made_while_others_are_deleted(
    acquire: Leases, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A waiter's node may be made just after its thread was told to delete it."""
    mine, sweep = session(), sessions.Session.sweep
    acquire(renew=False)
    [place] = places(key)
    mark = place.partition("-")[0]
    # Those of earlier tests may be deleted only now.
    swept = Counter[str]()

    def sweep_early(self: sessions.Session, folder: str, swept_mark: str) -> None:
        swept[swept_mark] += 1
        if swept_mark != mark or swept[mark] > 1:
            sweep(self, folder, swept_mark)
        else:
            # It looked before there was a node, which is given up only now.
            mine.doom(folder, mark)

    monkeypatch.setattr(sessions.Session, "sweep", sweep_early)
    mine.doom(folder(key), mark)
    eventually(lambda: not mine._leftovers, what="the end of the leftovers")
    assert swept[mark] == 2
    assert not places(key)


def test_release_that_fails(configure: Configure, server: Server, key: str) -> None:
    """What could not be given back is deleted as soon as the server answers."""
    alias = configure("patient", LOCATION=server.url(), LEASE=scaled(30))
    lease = distributed_lock(key, backend=alias).acquire()
    server.kill()
    with pytest.raises(KazooException):
        lease.release()
    server.start()
    eventually(lambda: not places(key, alias), what="the end of the node")


def test_fork(acquire: Leases, lock: Locks, key: str, other: OtherThread) -> None:
    """A child has neither its parent's lease nor its session; it makes its own."""
    lease = acquire()
    mine = session().id
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        said = "nothing"
        try:
            refused = lock().try_acquire() is None
            with lock(key + ":child") as own:
                said = (
                    f"{lease.lost_reason} {refused} {own.held} {session().id != mine}"
                )
            said += f" {lease.release()}"
        except BaseException as error:
            said = repr(error)
        finally:
            os.write(theirs, said.encode())
            os._exit(0)
    os.close(theirs)
    with open(ours) as pipe:
        assert pipe.read() == "forked True True True False"
    os.waitpid(child, 0)
    assert session().id == mine
    always(lambda: lease.held, during=engine().lease, what="held by the parent")
    assert lease.release()


# Nothing is left


def test_nothing_is_left(
    lock: Locks,
    acquire: Leases,
    key: str,
    other: OtherThread,
    live_threads: Callable[[], set[Any]],
    open_files: Callable[[], int],
) -> None:
    """Grants, refusals, waits that end or run out leave no node, watch or socket."""
    files = open_files()
    for _ in range(10):
        with lock(), lock(key + ":p", permits=2):
            assert other.do(lock().try_acquire) is None
            with pytest.raises(LockTimeout):
                other.do(lock().acquire, timeout=0.05)
            second = other.do(lock(key + ":p", permits=2).acquire)
            with pytest.raises(LockTimeout):
                lock(key + ":p", permits=2, owner="x").acquire(timeout=0.05)
            assert other.do(second.release)
        distributed_lock(key, key + ":2", backend="zookeeper").acquire().release()
    mine = session()

    def left() -> list[str]:
        names = mine.client.get_children(mine.address.root)
        return [n for n in names if n.startswith(nodes.escaped(key))]

    eventually(lambda: not left(), what="the end of the nodes")
    # Other tests may have lost some, of which is known until their time is over.
    assert not [row for row, _ in mine.grants if row.startswith(key)]
    assert not mine._bells
    watching = [p for p in mine.client._child_watchers if key.split(":")[-1] in p]
    assert len(watching) <= 4, watching
    other.close()
    eventually(lambda: not live_threads(), what="the end of the threads")
    assert open_files() <= files + 1


# Interrupted requests


def test_request_that_kazoo_was_not_told_of(configure: Configure, key: str) -> None:
    """What was interrupted between queue and pipe keeps nobody else's waiting."""
    alias = configure("patient", LEASE=scaled(30))
    with distributed_lock(key, backend=alias):
        mine = session(alias)
        for _ in range(3):
            queued = mine.handler.async_result()
            mine.client._queue.append((Exists(mine.address.root, None), queued))
            with takes(at_most=SLACK):
                assert not distributed_lock(key + ":2", backend=alias).locked()
            assert queued.wait(DEADLINE)


# Lost replies


@pytest.fixture
def lose_reply(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Lose the answer to the next request of a kind, which the server has heard."""

    def lose(kind: str) -> None:
        mine = session()
        call = mine.client._call
        lost: list[object] = []

        def lossy(request: Any, answer: Any) -> Any:
            if type(request).__name__ == kind and not lost:
                lost.append(request)
                unheard = mine.handler.async_result()
                unheard.rawlink(lambda _: answer.set_exception(ConnectionLoss()))
                return call(request, unheard)
            return call(request, answer)

        monkeypatch.setattr(mine.client, "_call", lossy)

    return lose


def test_lost_reply_to_an_acquire(
    lose_reply: Callable[[str], None], lock: Locks, key: str
) -> None:
    """The key is granted all the same, once."""
    lose_reply("Transaction")
    lease = lock().acquire(timeout=0)
    assert len(places(key)) == 1
    assert engine().read_all([key])[key].version == lease.fencing_token
    assert lease.release()
    assert not places(key)


def test_lost_reply_to_a_release(
    lose_reply: Callable[[str], None], lock: Locks, key: str
) -> None:
    """It was held until then, as far as anybody can tell."""
    lease = lock().acquire()
    lose_reply("Delete")
    assert lease.release() is True
    assert not places(key)


def test_lost_reply_to_a_waiter(
    lose_reply: Callable[[str], None],
    lock: Locks,
    acquire: Leases,
    key: str,
    other: OtherThread,
) -> None:
    """It has one place in the queue."""
    lease = acquire()
    lose_reply("Transaction")
    waiting = queued(other, lock(), key)
    time.sleep(0.3)
    assert len(places(key)) == 2
    lease.release()
    other.do(waiting.result(DEADLINE).release)
    assert not places(key)


def test_waiter_that_is_let_in_too_late(
    configure: Configure,
    acquire: Leases,
    lock: Locks,
    key: str,
    threads: Callable[[], OtherThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose lease is over when it hears of it, and somebody else's, queues again."""
    take = partial(distributed_lock(key, backend=configure("theirs")).acquire, DEADLINE)
    other, third, leases = threads(), threads(), list[Lease]()
    promoted = asking.Asking._promoted

    def stand_still(*arguments: Any) -> Any:
        monkeypatch.undo()
        found = promoted(*arguments)
        leases.append(third.do(take))
        return found

    monkeypatch.setattr(asking.Asking, "_promoted", stand_still)
    lease = acquire()
    waiting = queued(other, lock(), key)
    lease.release()
    eventually(lambda: leases, what="the next grant")
    eventually(lambda: engine().waiters(key).number == 1, what="the waiter")
    assert third.do(leases[0].release)
    assert other.do(waiting.result(DEADLINE).release)
    assert not places(key)


@pytest.mark.parametrize("is_free", [True, False], ids=["free", "taken"])
def test_standstill_between_two_requests(
    long: str,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
    is_free: bool,
) -> None:
    """Who comes late with the next request hears the answer of a server that is up."""
    lock = distributed_lock(key, backend=long)
    lock.acquire().release()
    mine, leases = session(long), list[Lease]()
    children = mine.children

    def stand_still(*arguments: Any, **options: Any) -> Any:
        found = children(*arguments, **options)
        monkeypatch.undo()
        if not is_free:
            leases.append(other.do(lock.acquire))
        time.sleep(sessions.PATIENCE + 0.2)
        return found

    monkeypatch.setattr(mine, "children", stand_still)
    lease = lock.try_acquire()
    assert (lease is not None) is is_free
    for each in leases or [lease]:
        assert each is not None
        assert each.release()


def test_standstill_of_explicit_owners(
    long: str, key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has waited for another's request all that time still gets a turn."""
    mine = session(long)
    asks, goes_on = threading.Event(), threading.Event()
    acquire = partial(distributed_lock(key, backend=long, owner="a").acquire, timeout=0)
    children = mine.children

    def stand_still(*arguments: Any, **options: Any) -> Any:
        monkeypatch.undo()
        asks.set()
        assert goes_on.wait(DEADLINE)
        return children(*arguments, **options)

    monkeypatch.setattr(mine, "children", stand_still)
    theirs = other.start(acquire)
    assert asks.wait(DEADLINE)
    threading.Timer(sessions.PATIENCE + 0.05, goes_on.set).start()
    lock = distributed_lock(f"{key}:2", backend=long, owner="b")
    assert lock.acquire(timeout=0).release()
    assert other.do(theirs.result(DEADLINE).release)


@pytest.mark.parametrize("is_named", [False, True], ids=["any", "version"])
def test_lost_reply_to_a_force_release(
    long: str,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
    is_named: bool,
) -> None:
    """It ends one grant, and reports that one, although the next one has the key."""
    lock = distributed_lock(key, backend=long, renew=False)
    lease = lock.acquire(timeout=0)
    waiting = queued(other, lock, key)
    mine, reported = session(long), []
    remove = mine.remove

    def unanswered(paths: Any, give_up: float) -> Any:
        removed = remove(paths, give_up)
        if any(removed):
            monkeypatch.undo()
            waiting.result(DEADLINE)
            raise ConnectionLoss
        return removed

    def report(**values: Any) -> None:
        reported.append(values["fencing_token"])

    monkeypatch.setattr(mine, "remove", unanswered)
    lock_force_released.connect(report)
    try:
        version = lease.fencing_token if is_named else None
        assert engine(long).force_release(key, version=version)
    finally:
        lock_force_released.disconnect(report)
    assert reported == [lease.fencing_token]
    theirs = waiting.result(DEADLINE)
    assert engine().read_all([key])[key].version == theirs.fencing_token
    assert other.do(theirs.release)


def test_lost_reply_to_a_request(
    acquire: Leases,
    lock: Locks,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It asks the holder to finish, and not the next one."""
    lease = acquire()
    waiting = queued(other, lock(), key)
    mine = session()
    write = mine.write

    def unanswered(*args: Any) -> Any:
        monkeypatch.undo()
        assert write(*args)
        assert lease.release()
        waiting.result(DEADLINE)
        raise ConnectionLoss

    monkeypatch.setattr(mine, "write", unanswered)
    engine().request_release(key)
    theirs = waiting.result(DEADLINE)
    theirs.renew()
    assert not theirs.release_requested
    other.do(theirs.release)


def test_look_that_is_out_of_date(
    acquire: Leases, lock: Locks, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two that find the key free at once, one gets it."""
    lease = acquire()
    mine = session()
    look, looks = mine.children, []

    def first_free(folders: Any, *args: Any) -> Any:
        looks.append(folders)
        return [[]] * len(folders) if len(looks) == 1 else look(folders, *args)

    monkeypatch.setattr(mine, "children", first_free)
    assert lock(owner="another").try_acquire() is None
    assert len(looks) > 1
    assert len(places(key)) == 1
    assert lease.held


def test_set_that_comes_second(
    configure: Configure, lock: Locks, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a set has taken in vain is nobody's, when its keys are asked for singly."""
    other = configure("other")
    with distributed_lock(key + ":2", backend=other):
        mine = session()
        look, looks = mine.children, []

        def first_free(folders: Any, *args: Any) -> Any:
            looks.append(folders)
            seen = look(folders, *args)
            return [seen[0], []] if len(looks) == 1 else seen

        monkeypatch.setattr(mine, "children", first_free)
        # Its own thread, which deletes what is left behind, is late.
        monkeypatch.setattr(mine, "doom", lambda *args: None)
        both = distributed_lock(key, key + ":2", backend="zookeeper")
        with pytest.raises(LockTimeout) as caught:
            both.acquire(timeout=0)
        assert caught.value.key == key + ":2"
        assert not places(key)


def test_set_too_long_for_a_transaction(backend: str, key: str, lock: Locks) -> None:
    """What a server would not read as one request is taken key by key."""
    number = 200
    letters = "\U0001f512" * (250 - len(key))
    keys = [f"{key}{n:04d}{letters}" for n in range(number)]
    with lock() as other:
        before = session().client._connection._socket
        with distributed_lock(*keys, backend=backend, timeout=DEADLINE) as leases:
            assert len(leases) == number
            assert leases.held
            leases.renew()
            assert all(places(each) for each in keys[:: number // 10])
        assert not any(places(each) for each in keys)
        assert session().client._connection._socket is before
        assert other.held


def test_place_that_was_freed_meanwhile(
    lock: Locks, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A place that an operator deletes before it is granted is not granted."""
    mine = session()
    take, takes = mine.take, []

    def freed(*args: Any) -> Any:
        taken = take(*args)
        takes.append(taken)
        return taken._replace(places=[[]]) if len(takes) == 1 else taken

    monkeypatch.setattr(mine, "take", freed)
    with lock() as lease:
        assert lease.held
        assert len(takes) == 2
        assert len(places(key)) == 1


def test_second_place_of_a_waiter(
    acquire: Leases,
    lock: Locks,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A waiter that a lost reply has given two places keeps one."""
    lease = acquire()
    mine = session()
    take = mine.take

    def twice(*args: Any) -> Any:
        monkeypatch.undo()
        take(*args)
        return take(*args)

    monkeypatch.setattr(mine, "take", twice)
    waiting = other.start(lock().acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number)
    lease.release()
    other.do(waiting.result(DEADLINE).release)
    assert not places(key)


def test_interrupted_set(
    backend: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an exception leaves of a set is deleted, whatever was noted before."""
    mine = session()

    class Interrupted(dict[Any, Any]):
        def __setitem__(self, name: Any, held: Any) -> None:
            if self:
                raise KeyboardInterrupt
            super().__setitem__(name, held)

    monkeypatch.setattr(mine, "grants", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        distributed_lock(key, key + ":2", backend=backend).acquire()
    monkeypatch.undo()
    eventually(lambda: not places(key + ":2"), what="the end of the node")
    eventually(lambda: not places(key), what="the end of the node")


def test_interrupted_grant_to_a_waiter(
    acquire: Leases,
    lock: Locks,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What an exception leaves of a waiter's grant is deleted."""
    lease = acquire()
    mine = session()

    class Interrupted(dict[Any, Any]):
        def __setitem__(self, name: Any, held: Any) -> None:
            raise KeyboardInterrupt

    waiting = other.start(lock().acquire, timeout=DEADLINE)
    eventually(lambda: engine().waiters(key).number)
    monkeypatch.setattr(mine, "grants", Interrupted(mine.grants))
    lease.release()
    with pytest.raises(KeyboardInterrupt):
        waiting.result(DEADLINE)
    monkeypatch.undo()
    eventually(lambda: not places(key), what="the end of the node")


def test_explicit_owner_behind_one_that_hangs(
    own: str, server: Server, key: str, threads: Callable[[], OtherThread]
) -> None:
    """A server that hangs is found out in time beside a thread with all patience."""
    distributed_lock(key, backend=own).acquire().release()
    stop(server.pid)
    try:
        patient = distributed_lock(key, backend=own, owner="a")
        waiting = threads().start(patient.acquire, timeout=DEADLINE)
        time.sleep(0.2)
        hasty = distributed_lock(key + ":2", backend=own, owner="b")
        with takes(at_most=2 + SLACK), pytest.raises(KazooException):
            hasty.try_acquire()
    finally:
        resume(server.pid)
    waiting.result(2 * DEADLINE).release()


def test_set_of_an_explicit_owner(
    backend: str,
    lock: Locks,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While it is being granted, the owner's other threads wait; then they re-enter."""
    mine = session()
    take, asked = mine.take, []

    def slow(*args: Any) -> Any:
        monkeypatch.undo()
        taken = take(*args)
        asked.append(other.start(lock(owner="ann").try_acquire))
        time.sleep(scaled(0.3))
        return taken

    monkeypatch.setattr(mine, "take", slow)
    both = distributed_lock(key, key + ":2", backend=backend, owner="ann")
    with both.acquire(timeout=0) as leases:
        again = asked[0].result(DEADLINE)
        assert again.fencing_token == leases[key].fencing_token
        other.do(again.release)


def test_deleted_root(configure: Configure, key: str) -> None:
    """Operators may delete all that there is; what is above the keys is made again."""
    alias = configure("rooted", KEY_PREFIX=f"rooted-{time.monotonic_ns()}/locks")
    lease = distributed_lock(key, backend=alias).acquire()
    mine = session(alias)
    mine.client.delete(mine.address.root.rpartition("/")[0], recursive=True)
    assert list(engine(alias).entries()) == []
    assert engine(alias).waiters(key).number == 0
    assert lease.release() is False
    with distributed_lock(key, backend=alias) as again:
        assert again.fencing_token > lease.fencing_token


def test_force_release_of_what_is_just_released(
    acquire: Leases, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever asks for the grant's age too late has nothing left to free."""
    lease, mine = acquire(), session()
    contents = mine.contents

    def released(*args: Any) -> Any:
        found = contents(*args)
        assert lease.release()
        eventually(lambda: not mine.client.exists(folder(key)))
        return found

    monkeypatch.setattr(mine, "contents", released)
    assert not engine().force_release(key, older_than=0.001)


def test_interrupted_acquire(
    lock: Locks, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an exception in the middle leaves behind is deleted."""
    mine = session()
    take = mine.take

    def interrupted(*args: Any) -> Any:
        take(*args)
        raise KeyboardInterrupt

    monkeypatch.setattr(mine, "take", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock().acquire()
    monkeypatch.undo()
    eventually(lambda: not places(key), what="the end of the node")


def test_interrupted_release(
    lock: Locks, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was to be given back is, all the same."""
    lease = lock().acquire()

    def interrupted(*args: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(session(), "give_back", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lease.release()
    eventually(lambda: not places(key), what="the end of the node")


# Ensembles


@pytest.fixture
def three(configure: Configure, ensemble: list[ZooKeeper]) -> str:
    location = [each.url() for each in ensemble]
    return configure("three", LOCATION=location, LEASE=scaled(6))


def test_leader_is_killed(three: str, ensemble: list[ZooKeeper], key: str) -> None:
    """A lease survives the election of another leader, and tokens go on rising."""
    lease = distributed_lock(key, backend=three).acquire(timeout=DEADLINE)
    leader(ensemble).kill()
    always(lambda: lease.held, during=scaled(8), what="held")
    assert lease.release()
    with distributed_lock(key, backend=three) as again:
        assert again.fencing_token > lease.fencing_token


def test_server_is_paused(three: str, ensemble: list[ZooKeeper], key: str) -> None:
    """The client goes over to another server in time."""
    lease = distributed_lock(key, backend=three).acquire(timeout=DEADLINE)
    port = session(three).client._connection._socket.getpeername()[1]
    paused = next(each for each in ensemble if each.port == port)
    stop(paused.pid)
    try:
        always(lambda: lease.held, during=scaled(8), what="held")
        assert lease.release()
    finally:
        resume(paused.pid)


def test_cut_off_with_its_server(
    configure: Configure, ensemble: list[ZooKeeper], key: str
) -> None:
    """Who reaches only a server that is paused is over before others get the key."""
    first = leader(ensemble)
    follower = next(each for each in ensemble if each is not first)
    mine = configure("mine", LOCATION=follower.url(), LEASE=scaled(3))
    theirs = configure("theirs", LOCATION=first.url(), LEASE=scaled(3))
    for _ in range(3):
        lease = distributed_lock(key, backend=mine).acquire(timeout=DEADLINE)
        time.sleep(scaled(0.5))
        # At the worst moment: the leader hasn't heard of this yet.
        lease.renew()
        stop(follower.pid)
        try:
            taken = distributed_lock(key, backend=theirs).acquire(timeout=DEADLINE)
            assert not lease.held
            assert taken.held
            taken.release()
        finally:
            resume(follower.pid)


def test_cut_off_after_idleness(
    configure: Configure, ensemble: list[ZooKeeper], key: str
) -> None:
    """So is who had been silent until it got the key, just before its server stops."""
    first = leader(ensemble)
    follower = next(each for each in ensemble if each is not first)
    mine = configure("mine", LOCATION=follower.url(), LEASE=scaled(6))
    theirs = configure("theirs", LOCATION=first.url(), LEASE=scaled(6))
    lock = distributed_lock(key, backend=mine)
    lock.acquire(timeout=DEADLINE).release()
    for _ in range(2):
        # Not as long as kazoo takes to send a ping of its own.
        time.sleep(scaled(1.5))
        lease = lock.acquire(timeout=DEADLINE)
        stop(follower.pid)
        try:
            taken = distributed_lock(key, backend=theirs).acquire(timeout=DEADLINE)
            assert not lease.held
            taken.release()
        finally:
            resume(follower.pid)


def test_renewed_by_the_majority_alone(
    configure: Configure, ensemble: list[ZooKeeper], key: str
) -> None:
    """A server that has lost the others still answers, and renews nothing."""
    follower = next(each for each in ensemble if each is not leader(ensemble))
    others = [each for each in ensemble if each is not follower]
    alias = configure("alone", LOCATION=follower.url(), LEASE=scaled(6))
    lease = distributed_lock(key, backend=alias).acquire(timeout=DEADLINE)
    for each in others:
        stop(each.pid)
    try:
        # It doesn't know yet.
        assert session(alias).client.exists(folder(key, alias))
        with pytest.raises(KazooException):
            lease.renew()
    finally:
        for each in others:
            resume(each.pid)
    assert lease.held
    # Its server is looking for the others.
    eventually(lambda: any("leader" in each.ask("srvr") for each in ensemble))
    with suppress(KazooException):
        lease.release()


@pytest.mark.parametrize("data", [b"", b"no JSON", b"[1]", b'"text"'])
def test_nodes_that_others_made(data: bytes) -> None:
    """A node whose content isn't ours is read as one that says nothing."""
    assert nodes.Content.read(data) == nodes.Content()


def test_connection_that_breaks_before_the_answer(backend: str) -> None:
    """The error names the servers."""
    mine, answer = session(), Answer()
    answer.set_exception(ConnectionLoss())
    with pytest.raises(ConnectionLoss, match=mine.address.hosts):
        mine.wait(answer, 1)


def test_answer_to_kazoo() -> None:
    """Kazoo can ask an answer whether it is here, and whether it is good."""
    good, bad = Answer(), Answer()
    assert (good.ready(), good.successful()) == (False, False)
    good.set("path")
    bad.set_exception(ValueError())
    assert (good.ready(), good.successful()) == (True, True)
    assert (bad.ready(), bad.successful()) == (True, False)


def test_pause_of_almost_a_lease(long: str, key: str) -> None:
    """Whoever was silent for long asks only after the leader has resumed the session.

    The server that answers may not have told the leader that the session lives.
    """
    lock = distributed_lock(key, backend=long)
    lock.acquire().release()
    mine = session(long)
    number, connection = mine.id, mine.handler._latest
    held = distributed_lock(f"{key}:held", backend=long).acquire()
    # As if the process had stood still.
    mine._heard_at -= 0.8 * engine(long).lease
    lease = lock.acquire(timeout=DEADLINE)
    assert mine.handler._latest is not connection
    assert session(long) is mine
    assert mine.id == number
    assert held.held
    held.renew()
    assert held.release() is True
    assert lease.release() is True


def test_leftovers_at_a_server_that_is_behind(
    own: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before leftovers are looked for, the server learns what the leader knows."""
    mine, sent = session(own), list[str]()

    def noting(name: str) -> Callable[..., Any]:
        send = getattr(mine.client, name)

        def note(*args: Any) -> Any:
            sent.append(name)
            return send(*args)

        return note

    for name in ("sync_async", "get_children_async"):
        monkeypatch.setattr(mine.client, name, noting(name))
    mine.sweep(folder(key, own), "mark")
    assert sent == ["sync_async", "get_children_async"]


@pytest.mark.parametrize("permits", [1, 2])
def test_waiter_in_an_event_loop_that_is_busy(
    own: str, configure: Configure, server: ZooKeeper, key: str, permits: int
) -> None:
    """A loop that stands still keeps others from a free key for a lease at most."""
    theirs = configure("theirs", LOCATION=server.url())
    options = {"permits": permits, "timeout": DEADLINE}
    lock = distributed_lock(key, backend=own, **options)
    holders = [lock.acquire()]
    others = [OtherThread() for _ in range(permits - 1)]
    holders += [each.do(lock.acquire) for each in others]
    waits, goes_on = threading.Event(), threading.Event()

    async def wait() -> None:
        async with distributed_lock(key, backend=own, **options):
            pass

    async def stand_still() -> None:
        waiting = asyncio.create_task(wait())
        while engine(own).waiters(key).number == 0:
            await asyncio.sleep(STEP)
        waits.set()
        goes_on.wait(3 * DEADLINE)
        await waiting

    loop = OtherThread()
    done = loop.start(asyncio.run, stand_still())
    assert waits.wait(DEADLINE)
    other = OtherThread()
    with takes(at_most=engine(own).lease + 2 * SLACK):
        assert holders[0].release() is True
        lease = other.do(distributed_lock(key, backend=theirs, **options).acquire)
    assert other.do(lease.release) is True
    goes_on.set()
    # It takes a place anew, and its turn comes.
    done.result(DEADLINE)
    for each, held in zip(others, holders[1:], strict=True):
        assert each.do(held.release) is True
    for each in (loop, other, *others):
        each.close()


def test_places_after_an_outage(own: str, key: str) -> None:
    """A place isn't given up because its waiter couldn't stand at it."""
    mine = session(own)
    holder = distributed_lock(key, backend=own).acquire()
    place = engine(own).gate(Request(key, "waiter", mine.address.lease))
    place.rest()
    place.attend()
    assert place._rests_since == math.inf
    place.enter(0)
    assert len(places(key, own)) == 2
    # As after a reconnection, of less than a lease ago.
    mine._connected_at = math.inf
    place._rests_since = -math.inf
    always(lambda: len(places(key, own)) == 2, during=mine.address.lease / 5)
    mine._connected_at = 0.0
    eventually(lambda: len(places(key, own)) == 1, what="the end of the place")
    place.leave()
    assert holder.release() is True


def test_mutex_in_a_forked_child(own: str) -> None:
    """What another thread of the parent had is free there."""
    other = OtherThread()
    fresh = sessions.Session(session(own).address)
    assert other.do(fresh.mutex.acquire)
    fresh.forget_parent()
    assert fresh.mutex.acquire(timeout=DEADLINE)
    other.close()
