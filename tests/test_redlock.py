"""Locks on most of five Redis servers, beyond what the contract suite asks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import redis
from django.db import DatabaseError, NotSupportedError
from redis.exceptions import RedisError

from dblocks import Lease, LeaseLost, Lock, LockTimeout, distributed_lock, signals
from dblocks.backends.redis import scripts
from dblocks.backends.redis.quorum import workers
from dblocks.backends.values import Grant, Request
from dblocks.conf import backends
from dblocks.holding.registry import registry
from tests.faults.crew import Crew
from tests.faults.exclusion import exclude
from tests.faults.proxy import Proxy
from tests.support.fixtures import OtherThread
from tests.support.processes import resume, stop
from tests.support.services import Redis
from tests.support.timing import (
    DEADLINE,
    SLACK,
    eventually,
    excused,
    scaled,
    starved,
    takes,
)
from tests.test_redis import BACKEND, heard

pytestmark = pytest.mark.engine("redis")


@pytest.fixture(scope="module")
def five() -> Iterator[list[Redis]]:
    """Keep five servers between tests."""
    with ExitStack() as stack:
        yield [stack.enter_context(Redis()) for _ in range(5)]


@pytest.fixture
def servers(five: list[Redis], settings: Any) -> Iterator[list[Redis]]:
    """Keep the locks in five servers, which all run when the test begins and ends."""
    use(settings, [server.url() for server in five])
    yield five
    for server in five:
        server.start()
        resume(server.pid)
        redis.Redis.from_url(server.url()).flushall()


#: A server that waits for a processor answers late, and must be heard all the same.
PATIENT = {"socket_timeout": 5, "socket_connect_timeout": 5}


def use(settings: Any, locations: list[str], options: Any = PATIENT) -> None:
    """Keep the locks of two aliases in these servers."""
    entry = {"BACKEND": BACKEND, "LOCATION": locations, "OPTIONS": options}
    settings.DBLOCKS = {"default": entry, "second": entry}


@pytest.fixture
def impatient(servers: list[Redis], settings: Any) -> None:
    """Wait for a server as briefly as is usual."""
    use(settings, [server.url() for server in servers], {})


def test_release_without_threads(
    servers: list[Redis], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the body raised is raised when no thread can be started to release."""

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pytest.raises(KeyError), distributed_lock(key, lease=5):  # noqa: PT012
        workers.idle.clear()
        monkeypatch.setattr(threading.Thread, "start", refuse)
        raise KeyError
    monkeypatch.undo()


def holders(servers: list[Redis], key: str) -> list[str]:
    """Return who has the key, by each server that runs."""
    found = []
    for server in servers:
        if server.running:
            inside: Any = redis.Redis.from_url(server.url(), decode_responses=True)
            found.append(inside.hget(f"dblocks:{{lock:{key}}}:row", "owner") or "")
    return found


def pause(server: Redis) -> None:
    stop(server.pid)


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("fault", [Redis.kill, pause], ids=["down", "stopped"])
def test_minority_is_out_of_reach(
    servers: list[Redis], settings: Any, key: str, number: int, fault: Any
) -> None:
    """Locks work, and no verb takes longer than one server may take to answer."""
    answers, times = 0.25, dict[str, float]()
    if number == 2:
        # With two out of reach, one late answer more would cost the majority.
        answers = scaled(0.5)
        times = {"socket_timeout": answers, "socket_connect_timeout": answers}
    use(settings, [server.url() for server in servers], times)
    seconds = answers if fault is pause else 0.1
    kept = distributed_lock(f"{key}:kept", lease=30).acquire(timeout=0)
    for server in servers[:number]:
        fault(server)
    for _ in range(3):
        with takes(at_most=seconds + SLACK / 2):
            lease = distributed_lock(key, lease=30).acquire(timeout=0)
        assert lease.fencing_token is None
        assert distributed_lock(key, owner="other").try_acquire() is None
        with takes(at_most=seconds + SLACK / 2):
            lease.renew()
        with takes(at_most=seconds + SLACK / 2):
            assert lease.release() is True
    kept.renew()
    assert kept.release() is True
    assert set(holders(servers[number:], key)) == {""}


def test_name_that_resolves_slowly(
    servers: list[Redis], settings: Any, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A majority doesn't wait for a server that no timeout of a socket gives up."""
    resolve = socket.getaddrinfo

    def resolve_slowly(host: Any, *args: Any, **options: Any) -> Any:
        if host == "slow.invalid":
            time.sleep(scaled(4))
        return resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolve_slowly)
    places = [*(server.url() for server in servers[1:]), "redis://slow.invalid:1/0"]
    times = {"socket_timeout": 0.5, "socket_connect_timeout": 0.5}
    use(settings, places, times)
    with takes(at_most=2 + SLACK):
        lease = distributed_lock(key, lease=30).acquire(timeout=0)
    with takes(at_most=2 + SLACK):
        assert lease.release() is True


def test_messages_do_not_speak_of_tokens(servers: list[Redis], key: str) -> None:
    """There are none, so no message advises to use one, or shows one."""
    with (
        distributed_lock(key) as lease,
        pytest.raises(NotSupportedError, match=r"Use lease\.check\(\)\.$"),
    ):
        lease.guard()
    with pytest.warns(ResourceWarning, match=f"on '{key}' was dropped"):
        distributed_lock(key).acquire()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [Redis.kill, pause], ids=["down", "stopped"])
def test_majority_is_out_of_reach(servers: list[Redis], key: str, fault: Any) -> None:
    """That is an error and never "taken"; what is held is lost on time."""
    length = scaled(2)
    lost: list[float] = []
    lease = distributed_lock(key, lease=length).acquire(timeout=0)
    lease.on_lost(lambda lease: lost.append(time.monotonic()))
    for server in servers[:3]:
        fault(server)
    began, before = time.monotonic(), starved()
    for ask in (
        distributed_lock(f"{key}:other", lease=length).try_acquire,
        distributed_lock(f"{key}:other", f"{key}:third", timeout=0.3).acquire,
        distributed_lock(f"{key}:other", permits=2, timeout=0.3).acquire,
        distributed_lock(key).locked,
        lease.renew,
    ):
        with takes(at_most=2 + SLACK), pytest.raises(RedisError) as caught:
            ask()
        assert "3 of 5 servers did not answer" in str(caught.value)
    # Nothing stays behind on those that did.
    assert set(holders(servers[3:], f"{key}:other")) <= {""}
    eventually(lambda: lost, what="the loss")
    assert lost[0] - began < length + excused(before, length)
    assert lease.lost_reason == "backend"


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("what", ["key", "set", "permit"])
def test_waiters_while_a_majority_restarts(
    servers: list[Redis], key: str, what: str
) -> None:
    """It fails no waiter who has time, nor one who comes meanwhile."""
    keys = [key, f"{key}:2"] if what == "set" else [key]
    more: dict[str, Any] = {"permits": 2} if what == "permit" else {}
    number = more.get("permits", 1)
    leases = [
        distributed_lock(key, lease=60, owner=f"{key}:{each}", **more).acquire()
        for each in range(number)
    ]
    wait = distributed_lock(*keys, backend="second", timeout=DEADLINE, **more)
    free = distributed_lock(f"{key}:free", backend="second", timeout=DEADLINE)
    with ThreadPoolExecutor(2) as pool:
        waiter = pool.submit(wait.acquire)
        time.sleep(0.3)
        for server in servers[:3]:
            eventually(server.has_written, what="all in the file")
            server.kill()
        meanwhile = pool.submit(free.acquire)
        time.sleep(1)
        for server in servers[:3]:
            server.start()
        assert meanwhile.result(timeout=DEADLINE).release() is True
        assert all(lease.release() for lease in leases)
        assert waiter.result(timeout=DEADLINE).release() is True


def test_lease_that_too_few_servers_have(
    servers: list[Redis], key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It isn't said to have run out by itself, though a majority answers."""
    length = scaled(2)
    lease = distributed_lock(key, lease=length).acquire(timeout=0)
    redis.Redis.from_url(servers[0].url()).flushall()
    for server in servers[1:3]:
        server.kill()
    eventually(lambda: not lease.held, within=length + SLACK, what="the loss")
    assert lease.lost_reason == "backend"
    eventually(lambda: "leases=1 error=too few servers have" in caplog.text)


def test_restarted_without_file(settings: Any, key: str) -> None:
    """Two servers that forget what they granted change nothing; three lose it."""
    # Like another process, so that a loss is known by the renewal alone.
    other = distributed_lock(key, lease=60, timeout=0, backend="second")
    with ExitStack() as stack:
        forgetful = ["--appendonly", "no"]
        servers = [stack.enter_context(Redis(arguments=forgetful)) for _ in range(5)]
        urls = [server.url() for server in servers]
        use(settings, urls)
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        for server in servers[:2]:
            server.kill()
        assert other.try_acquire() is None
        for server in servers[:2]:
            server.start()
        assert other.try_acquire() is None
        lease.renew()
        assert holders(servers, key) == ["", ""] + [lease.owner] * 3
        assert other.try_acquire() is None
        assert lease.release() is True
        lease = distributed_lock(key, lease=60).acquire(timeout=0)
        assert holders(servers, key) == [lease.owner] * 5
        for server in servers[2:]:
            server.kill()
        with pytest.raises(RedisError, match="3 of 5 servers did not answer"):
            other.try_acquire()
        for server in servers[2:]:
            server.start()
        with other.acquire() as theirs:
            # Until its next renewal there are two holders.
            assert lease.held
            with pytest.raises(LeaseLost) as caught:
                lease.renew()
            assert caught.value.reason == "taken"
            assert not lease.held
            assert lease.release() is False
            theirs.renew()


def test_votes_that_split(servers: list[Redis], key: str) -> None:
    """Where none has a majority both give back what they have, and go on."""
    inside = [redis.Redis.from_url(server.url()) for server in servers]
    other = OtherThread()
    end = time.time() + 2
    # Somebody has two servers for a moment, somebody else other two.
    for number, each in enumerate(inside[:4]):
        server = backends["default"]._servers[number]  # type: ignore[attr-defined]
        each.hset(
            server.row(key),
            mapping={
                "owner": f"split {number // 2}",
                "holder": "h",
                "note": "",
                "version": 1,
                "acquired": 1,
                "count": 1,
                "min_until": 0,
                "expires": int(end * 1e6),
                "max_until": int((end + 7) * 1e6),
            },
        )
    with pytest.raises(LockTimeout):
        distributed_lock(key, timeout=0.3).acquire()
    assert sorted(holders(servers, key)) == ["", *["split 0"] * 2, *["split 1"] * 2]
    with takes(at_most=2.5 + SLACK):
        lease = distributed_lock(key, timeout=DEADLINE).acquire()
    # The servers' clocks count milliseconds.
    assert time.time() > end - 0.01
    lease.release()
    other.close()


def test_contenders(servers: list[Redis], key: str) -> None:
    """Two that ask at once, again and again, both get the key, and never together."""
    inside = 0
    counts = {"default": 0, "second": 0}
    faults: list[str] = []
    until = time.monotonic() + scaled(3)

    def contend(alias: str) -> None:
        nonlocal inside
        lock = distributed_lock(key, backend=alias, timeout=DEADLINE)
        while time.monotonic() < until:
            with lock:
                inside += 1
                if inside > 1:
                    faults.append(alias)
                time.sleep(0.001)
                inside -= 1
                counts[alias] += 1
            time.sleep(0.001)

    threads = [threading.Thread(target=contend, args=[alias]) for alias in counts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * DEADLINE)
    assert not faults
    assert min(counts.values()) > 5
    eventually(lambda: set(holders(servers, key)) == {""}, within=SLACK)


@pytest.fixture
def crew(servers: list[Redis], committed: None) -> Iterator[Crew]:
    """Run programs in processes whose locks are on these servers."""
    urls = ",".join(server.url() for server in servers)
    crew = Crew({"REDLOCK_URLS": urls})
    # On a busy machine its start would take the whole time for which they contend.
    crew.fork_all("contend", [])
    yield crew
    crew.close()


@pytest.mark.timeout(120)
def test_exclusion_with_killed_and_stopped_holders(crew: Crew, key: str) -> None:
    """No two hold a key at once, whatever becomes of holders."""
    length = scaled(1)
    assert exclude(crew, key, "redlock", length=length, lease=length) > 20


def test_undo_of_a_co_owner(servers: list[Redis], settings: Any, key: str) -> None:
    """A co-owner's attempt that fails takes nothing from the one that holds."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(each.port)) for each in servers]
        use(settings, [f"redis://127.0.0.1:{proxy.port}/0" for proxy in proxies])
        lease = distributed_lock(key, owner="both", lease=30).acquire(timeout=0)
        other = OtherThread()
        for proxy in proxies[:3]:
            proxy.after, proxy.resets = scripts.ACQUIRE.digest.encode(), 1.0
        with pytest.raises(RedisError):
            other.do(distributed_lock(key, owner="both", backend="second").try_acquire)
        other.close()
        lease.renew()
        assert holders(servers, key) == ["both"] * 5
        assert distributed_lock(key).locked()
        assert lease.release() is True


def test_late_grants_are_not_valid(
    servers: list[Redis], settings: Any, key: str
) -> None:
    """What a majority granted too late to be of use is given back."""
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(each.port)) for each in servers]
        urls = [f"redis://127.0.0.1:{proxy.port}/0" for proxy in proxies]
        use(settings, urls, {"socket_timeout": 2})
        with distributed_lock(key):
            pass
        for proxy in proxies[:3]:
            proxy.delay = (0.15, 0.2)
        assert distributed_lock(key, lease=0.1, renew=False).try_acquire() is None
        assert set(holders(servers, key)) == {""}


@pytest.mark.parametrize("verb", ["acquire", "acquire_all"])
def test_undo_that_comes_late(servers: list[Redis], key: str, verb: str) -> None:
    """What undoes a request leaves alone what its sender was granted after it."""
    server = backends["default"]._servers[0]  # type: ignore[attr-defined]

    def ask(identity: str) -> Any:
        request = Request(key, "owner", 30.0, identity=identity)
        if verb == "acquire":
            return server.acquire(request)
        return server.acquire_all(request, [key])

    def undo(identity: str) -> None:
        grants = [Grant(key, "owner", None, identity)]
        server.release_all(grants, count=0, undo=True)

    assert ask("1")
    assert ask("2")
    ask("1")
    undo("1")
    assert server.read_all([key])[key].owner == "owner"
    undo("2")
    assert server.read_all([key])[key].owner == ""


@pytest.mark.parametrize("permits", [1, 3])
def test_minority_is_given_back(servers: list[Redis], key: str, permits: int) -> None:
    """Who is refused leaves nothing on the servers that had granted."""
    lock = distributed_lock(key, permits=permits, timeout=0, lease=30)
    owners = [
        distributed_lock(key, permits=permits, owner=f"{n}") for n in range(permits)
    ]
    leases = [each.acquire(timeout=0) for each in owners]
    for server in servers[:2]:
        redis.Redis.from_url(server.url()).flushall()
    assert lock.try_acquire() is None
    names = [key] if permits == 1 else [f"{key}\x1f{n}" for n in range(permits)]
    for name in names:
        row = backends["default"]._servers[0].row(name)  # type: ignore[attr-defined]
        for server in servers[:2]:
            assert not redis.Redis.from_url(server.url()).hget(row, "owner")
    for lease in leases:
        assert lease.release() is True


@pytest.mark.parametrize("verb", ["renew", "release", "enter"])
def test_force_release_ends_a_grant_for_its_owner_too(
    servers: list[Redis], key: str, verb: str
) -> None:
    """An owner that takes the key again leaves its forced lease dead."""
    lock = distributed_lock(key, owner="worker", lease=30, timeout=0)
    forced = lock.acquire()
    assert backends["default"].force_release(key)
    restarted = OtherThread()
    again = distributed_lock(key, owner="worker", lease=30, backend="second")
    lease = restarted.do(again.acquire, 0)
    if verb == "renew":
        with pytest.raises(LeaseLost):
            forced.renew()
    elif verb == "enter":
        # A co-owner of the new grant, not of the one that was forced.
        lock.acquire().release()
    assert forced.release() is False
    assert forced.lost_reason == "taken"
    assert distributed_lock(key).locked()
    restarted.do(lease.renew)
    assert restarted.do(lease.release) is True
    assert not distributed_lock(key).locked()
    restarted.close()


@pytest.mark.parametrize("owner", [None, "worker"])
def test_reason_after_a_successor(servers: list[Redis], key: str, owner: Any) -> None:
    """Who was forced, and others had the key since, is told that it was taken."""
    lease = distributed_lock(key, lease=30).acquire(timeout=0)
    assert backends["default"].force_release(key)
    distributed_lock(key, owner=owner, backend="second").acquire(timeout=0).release()
    with pytest.raises(LeaseLost) as caught:
        lease.renew()
    assert caught.value.reason == "taken"


def test_co_owner_on_servers_without_the_grant(servers: list[Redis], key: str) -> None:
    """A co-owner shares the grant of the majority, and leaves nothing elsewhere."""
    for server in servers[3:]:
        server.kill()
    lease = distributed_lock(key, owner="both", lease=30).acquire(timeout=0)
    for server in servers[3:]:
        server.start()
    other = OtherThread()
    co_owner = distributed_lock(key, owner="both", lease=30, backend="second")
    theirs = other.do(co_owner.acquire, 0)
    assert holders(servers, key) == ["both"] * 3 + [""] * 2
    assert lease.release() is True
    other.do(theirs.renew)
    assert distributed_lock(key).locked()
    assert other.do(theirs.release) is True
    assert set(holders(servers, key)) == {""}
    other.close()


def test_force_release_while_a_server_is_down(servers: list[Redis], key: str) -> None:
    """It says that it freed the key, also if few of those in reach know the grant."""
    for server in servers[3:]:
        server.kill()
    lease = distributed_lock(key, lease=30).acquire(timeout=0)
    for server in servers[3:]:
        server.start()
    servers[0].kill()
    assert distributed_lock(key).locked()
    with heard(signals.lock_force_released) as forced:
        assert backends["default"].force_release(key) is True
        assert backends["default"].force_release(key) is False
    assert [each["owner"] for each in forced] == [lease.owner]
    with distributed_lock(key, backend="second", timeout=0):
        assert lease.release() is False


def test_force_release_of_what_no_majority_granted(
    servers: list[Redis], key: str
) -> None:
    """A key that can be had isn't reported as freed."""
    request = Request(key, "minority", 30.0, identity="1")
    for server in backends["default"]._servers[:2]:  # type: ignore[attr-defined]
        server.acquire(request)
    assert backends["default"].force_release(key) is False


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Give a context in which scripts fail on some servers of an alias.

    ``script``: only this one. ``afterwards``: only the reply is lost.
    """

    @contextmanager
    def fail(
        alias: str, *numbers: int, script: Any = None, afterwards: bool = False
    ) -> Iterator[None]:
        with monkeypatch.context() as patch:
            for number in numbers:
                client = backends[alias]._servers[number].client  # type: ignore[attr-defined]
                send = client.run

                def run(asked: Any, *args: Any, send: Any = send, **how: Any) -> Any:
                    fails = script in (None, asked)
                    answer = (
                        send(asked, *args, **how) if afterwards or not fails else None
                    )
                    if fails:
                        raise redis.ConnectionError("not reached")
                    return answer

                patch.setattr(client, "run", run)
            yield

    return fail


def enter_twice(lock: Lock, failing: Callable[..., Any]) -> tuple[Lease, Lease]:
    """Acquire a lock, and enter it again where two servers miss that."""
    outer = lock.acquire()
    with failing("default", 0, 1):
        return outer, lock.acquire()


@pytest.mark.parametrize("verb", ["join", "enter", "several"])
def test_holds_that_a_minority_has_not_counted(
    servers: list[Redis], key: str, failing: Callable[..., Any], verb: str
) -> None:
    """The last of an owner's holds keeps the key, whichever servers missed others."""
    keys = [key, f"{key}!"] if verb == "several" else [key]
    last = OtherThread()
    alias = "default" if verb == "enter" else "second"
    first = distributed_lock(*keys, owner="both", lease=30).acquire(timeout=0)
    others = []
    for missed in ([0, 1], [2, 3]):
        by = OtherThread() if verb != "enter" else last
        lock = distributed_lock(*keys, owner="both", lease=30, backend=alias)
        with failing(alias, *missed):
            others.append((by, by.do(lock.acquire, 0)))
    assert first.release() is True
    by, lease = others[0]
    assert by.do(lease.release) is True
    for each in keys:
        assert distributed_lock(each, lease=30).try_acquire() is None
    by, lease = others[1]
    by.do(lease.renew)
    assert by.do(lease.release) is True
    for each in keys:
        assert distributed_lock(each, timeout=0).acquire().release() is True
    for by, _ in others:
        by.close()
    last.close()


def test_remains_of_an_owners_earlier_grant(servers: list[Redis], key: str) -> None:
    """What a minority has of it lapses, however often the owner comes back."""
    row = Request(key, "me", 1.0, max_hold=10.0, explicit=True, identity="earlier")
    lock = distributed_lock(key, owner="me", lease=1, timeout=0)
    lock.acquire().release()
    for number in (0, 1):
        server = backends["default"]._servers[number]  # type: ignore[attr-defined]
        server.acquire(row)
    give_up = time.monotonic() + 1.1
    while time.monotonic() < give_up:
        lease = lock.try_acquire()
        assert lease is None or lease.release() is True
        time.sleep(0.05)
    # By now it has lapsed there, and gives way to a new one.
    assert lock.acquire().release() is True
    assert set(holders(servers, key)) == {""}


@pytest.mark.parametrize("reached", [(), (2, 3, 4)], ids=["nobody", "others"])
def test_join_that_is_not_renewed(
    servers: list[Redis], key: str, failing: Callable[..., Any], reached: Sequence[int]
) -> None:
    """A co-owner hasn't got the key unless most of those that count it extend it."""
    first = distributed_lock(key, owner="both", lease=30).acquire(timeout=0)
    other = OtherThread()
    joining = distributed_lock(key, owner="both", lease=30, backend="second")
    acquire = failing("second", 3, 4, script=scripts.ACQUIRE)
    unreached = [n for n in range(5) if n not in reached]
    renew = failing("second", *unreached, script=scripts.RENEW)
    with acquire, renew, pytest.raises(RedisError):
        other.do(joining.try_acquire)
    other.close()
    # Nor has any server counted it.
    assert first.release() is True
    assert set(holders(servers, key)) == {""}


def test_join_that_one_server_does_not_renew(
    servers: list[Redis], settings: Any, key: str, failing: Callable[..., Any]
) -> None:
    """While most answer, a fault of one is no error."""
    use(settings, [server.url() for server in servers[:3]])
    first = distributed_lock(key, owner="both", lease=30).acquire(timeout=0)
    redis.Redis.from_url(servers[2].url()).flushall()
    other = OtherThread()
    joining = distributed_lock(key, owner="both", lease=30, backend="second")
    with failing("second", 0, script=scripts.RENEW):
        assert other.do(joining.try_acquire) is None
    other.close()
    assert first.release() is True
    assert set(holders(servers[:3], key)) == {""}


def test_release_without_a_majority_that_agrees(
    servers: list[Redis], key: str, failing: Callable[..., Any]
) -> None:
    """It was held, unless so many refuse that no majority can have the grant."""
    with failing("default", 0, 1):
        lease = distributed_lock(key, lease=30).acquire(timeout=0)
    with failing("default", 2, 3):
        assert lease.held
        assert lease.release() is True


@pytest.mark.parametrize("number", [1, 5])
@pytest.mark.parametrize("replies", [False, True])
def test_lost_holds_that_cant_be_subtracted(
    servers: list[Redis],
    settings: Any,
    key: str,
    failing: Callable[..., Any],
    replies: bool,
    number: int,
) -> None:
    """Nobody else gets the key for it: they are not subtracted twice."""
    use(settings, [server.url() for server in servers[:number]])
    theirs = OtherThread()
    co_owner = distributed_lock(key, owner="me", lease=30, backend="second")
    lock = distributed_lock(key, owner="me", lease=30, timeout=0)
    held = theirs.do(co_owner.acquire, 0)
    lost = lock.acquire()
    hold = lost._hold
    registry.return_forfeited(hold.backend, hold.grant, 1)
    hold._ends("expired")
    subtracting = failing(
        "default", *range(number), script=scripts.FORFEIT, afterwards=replies
    )
    with subtracting, pytest.raises(RedisError):
        lock.acquire()
    lease = lock.acquire()
    assert lease.release() is True
    assert distributed_lock(key).try_acquire() is None
    theirs.do(held.renew)
    assert theirs.do(held.release) is True
    theirs.close()


def test_server_that_counts_late(
    servers: list[Redis], key: str, failing: Callable[..., Any]
) -> None:
    """A release tells all servers that may have counted a new grant by then."""
    lock = distributed_lock(key, owner="me", lease=30, timeout=0)
    with failing("default", 0, 1, afterwards=True, script=scripts.ACQUIRE):
        lease = lock.acquire()
    assert holders(servers, key) == ["me"] * 5
    assert lease.release() is True
    assert set(holders(servers, key)) == {""}


def test_inner_hold_that_a_server_missed(
    servers: list[Redis], key: str, failing: Callable[..., Any]
) -> None:
    """It is given back where it was counted, and the outer one stays everywhere."""
    lock = distributed_lock(key, owner="me", lease=30, timeout=0)
    outer, inner = enter_twice(lock, failing)
    with failing("default", 2, 3):
        outer.renew()
    assert inner.release() is True
    assert holders(servers, key) == ["me"] * 5
    assert outer.release() is True


def test_owner_that_comes_back_after_a_loss(
    servers: list[Redis], key: str, failing: Callable[..., Any]
) -> None:
    """What it has lost, and where that was counted, doesn't keep it out."""
    lock = distributed_lock(key, owner="me", lease=30, timeout=0)
    outer, inner = enter_twice(lock, failing)
    outer._hold.lose("backend")
    assert inner.lost_reason == "backend"
    with failing("default", 4):
        lease = lock.acquire()
        lease.renew()
    assert lease.release() is True
    assert holders(servers, key)[:4] == [""] * 4


def test_entry_that_a_minority_counted(
    servers: list[Redis], key: str, failing: Callable[..., Any]
) -> None:
    """It is given back."""
    lock = distributed_lock(key, owner="me", lease=30, timeout=0)
    outer = lock.acquire()
    with failing("default", 0, 1, 2), pytest.raises(RedisError):
        lock.acquire()
    assert outer.release() is True
    assert set(holders(servers, key)) == {""}


def test_renewal_where_a_hold_is_not_counted(
    servers: list[Redis], key: str, failing: Callable[..., Any]
) -> None:
    """A server on which the key would be free without the co-owner doesn't count."""
    first = distributed_lock(key, owner="both", lease=30).acquire(timeout=0)
    other = OtherThread()
    with failing("second", 0, 1):
        joining = distributed_lock(key, owner="both", lease=30, backend="second")
        theirs = other.do(joining.acquire, 0)
    with failing("second", 4), pytest.raises(DatabaseError, match="too few"):
        other.do(theirs.renew)
    other.do(theirs.renew)
    assert other.do(theirs.release) is True
    assert first.release() is True
    other.close()


def test_undo_of_a_co_owner_cools(servers: list[Redis], key: str) -> None:
    """What an owner has had cools, although a co-owner's attempt ends it."""
    engine: Any = backends["default"]
    lock = distributed_lock(key, owner="both", lease=30, hold_at_least=20)
    lease = lock.acquire(timeout=0)
    request = Request(key, "both", 30.0, explicit=True, identity="later")
    granted = {server: [server.acquire(request).grant] for server in engine._servers}
    assert lease.release() is True
    engine._undo(request, [], granted)
    assert set(holders(servers, key)) == {""}
    assert distributed_lock(key).locked()
