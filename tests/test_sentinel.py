"""Locks in a Redis service that Sentinel watches."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from typing import Any, TypeVar

import pytest
import redis
from redis.exceptions import AuthenticationError, RedisError

from dblocks import LeaseLost, LockTimeout, distributed_lock
from tests.support.processes import resume, stop
from tests.support.services import HOST, Redis
from tests.support.timing import DEADLINE, SLACK, eventually, takes
from tests.test_redis import BACKEND, engine, token_of

T = TypeVar("T")

pytestmark = pytest.mark.engine("redis")


class Sentinel(Redis):
    """Watches a master, and promotes its replica half a second after its end."""

    def __init__(self, master: Redis) -> None:
        super().__init__()
        self._master = master

    def command(self) -> list[str]:
        settings = self.folder / "sentinel.conf"
        settings.write_text(
            f"port {self.port}\n"
            f"bind {HOST}\n"
            f"unixsocket {self.folder / 'socket'}\n"
            f"dir {self.folder}\n"
            f"sentinel monitor service {HOST} {self._master.port} 1\n"
            f"sentinel down-after-milliseconds service 500\n"
            f"sentinel failover-timeout service 3000\n"
        )
        # Which Sentinel writes what it finds into.
        settings.chmod(0o666)
        self.folder.chmod(0o777)
        return [self.program("redis-server"), str(settings), "--sentinel"]


@pytest.fixture
def service(settings: Any) -> Iterator[tuple[Redis, Redis]]:
    """Run a master and its replica; keep the locks in the service."""
    with ExitStack() as stack:
        at_once = ["--repl-diskless-sync-delay", "0"]
        master = stack.enter_context(Redis(arguments=at_once))
        after = ["--replicaof", f"{HOST} {master.port}"]
        replica = stack.enter_context(Redis(arguments=after))
        inside: Any = redis.Redis.from_url(replica.url(), decode_responses=True)
        with closing(inside):
            eventually(
                lambda: inside.info()["master_link_status"] == "up", what="the copy"
            )
        sentinel = stack.enter_context(Sentinel(master))
        watch: Any = redis.Redis(HOST, sentinel.port, decode_responses=True)
        with closing(watch):
            eventually(
                lambda: watch.sentinel_master("service")["num-slaves"] == 1,
                what="the news of the replica",
            )
        entry = {
            "BACKEND": BACKEND,
            "LOCATION": "redis://service/0",
            "OPTIONS": {
                "sentinels": [(HOST, sentinel.port)],
                "socket_timeout": 0.5,
                "socket_connect_timeout": 0.5,
            },
        }
        settings.DBLOCKS = {"default": entry, "second": entry}
        yield master, replica


def in_threads(number: int, function: Callable[[], T]) -> list[T]:
    """Call a function in many threads at once, each with a connection of its own."""
    start = threading.Barrier(number, timeout=DEADLINE)

    def call() -> T:
        start.wait()
        return function()

    with ThreadPoolExecutor(number) as pool:
        return [each.result() for each in [pool.submit(call) for _ in range(number)]]


def look_and_take(key: str) -> int:
    """Return the token of a grant, however many others ask."""
    with distributed_lock(key, timeout=DEADLINE) as lease:
        return lease.fencing_token or 0


def until_role(server: Redis, role: str) -> None:
    inside: Any = redis.Redis.from_url(server.url(), decode_responses=True)

    def has_it() -> bool:
        # Sentinel closes the clients' connections to whom it promotes or demotes.
        with suppress(RedisError):
            return bool(inside.info()["role"] == role)
        return False

    with closing(inside):
        eventually(has_it, what=f"a new {role}")


@pytest.mark.timeout(90)
@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_failover(service: tuple[Redis, Redis], key: str, fault: str) -> None:
    """What the replica knew stays held, the holder renews there, and tokens rise."""
    master, replica = service
    before = max(in_threads(12, lambda: look_and_take(f"{key}:free")))
    lease = distributed_lock(key, lease=30).acquire(timeout=0)
    redis.Redis.from_url(master.url()).wait(1, 5000)
    if fault == "killed":
        master.kill()
    else:
        stop(master.pid)
    # An error, or the replica's answer if it was promoted while the try went on.
    with suppress(RedisError):
        assert distributed_lock(key, owner="other").try_acquire() is None
    until_role(replica, "master")
    # What was open to the old master costs one failure at most, not one each.
    with suppress(RedisError):
        lease.renew()
    lease.renew()
    with pytest.raises(LockTimeout):
        distributed_lock(key, owner="other", timeout=0).acquire()
    assert token_of(f"{key}:free") > before
    assert lease.release() is True
    assert token_of(key) > (lease.fencing_token or 0)
    if fault == "stopped":
        resume(master.pid)
        until_role(master, "slave")
        assert token_of(key) > (lease.fencing_token or 0)


def fails_over(watch: Any) -> bool:
    with suppress(RedisError):
        return bool(watch.sentinel_failover("service"))
    return False


def fail_over(settings: Any, replica: Redis) -> None:
    """Have Sentinel promote the replica, while the master goes on."""
    [(_, port)] = settings.DBLOCKS["default"]["OPTIONS"]["sentinels"]
    watch: Any = redis.Redis(HOST, port, decode_responses=True)
    with closing(watch):
        # It may not have heard yet how far the replica is.
        eventually(lambda: fails_over(watch), what="the failover")
        eventually(
            lambda: watch.sentinel_master("service")["port"] == replica.port,
            what="the news of it",
        )


@pytest.mark.timeout(90)
def test_master_of_old_that_goes_on(
    service: tuple[Redis, Redis], settings: Any, key: str
) -> None:
    """Sentinel leaves it a master for ten seconds if somebody asks for a failover.

    Once a connection has led to the new one, nobody asks the old one any more.
    """
    _, replica = service
    client = engine()._server.client
    under_way = [client._take() for _ in range(2)]
    fail_over(settings, replica)
    lease = distributed_lock(key, lease=30).acquire(timeout=0)
    for connection in under_way:
        client._give_back(connection)
    assert distributed_lock(key, owner="other").try_acquire() is None
    assert lease.release() is True


@pytest.mark.timeout(90)
def test_connection_that_came_late(
    service: tuple[Redis, Redis], settings: Any, key: str, monkeypatch: Any
) -> None:
    """Who was told of the old master, and is connected later, asks Sentinel again."""
    _, replica = service
    client = engine()._server.client
    client.close()
    meet, is_connected, goes_on = client._meet, threading.Event(), threading.Event()

    def meet_late(connection: Any) -> None:
        is_connected.set()
        assert goes_on.wait(DEADLINE)
        meet(connection)

    monkeypatch.setattr(client, "_meet", meet_late)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(distributed_lock(key, lease=30).try_acquire)
        assert is_connected.wait(DEADLINE)
        monkeypatch.setattr(client, "_meet", meet)
        fail_over(settings, replica)
        lease = distributed_lock(key, lease=30).acquire(timeout=0)
        goes_on.set()
        assert late.result() is None
    assert distributed_lock(key, owner="other").try_acquire() is None
    assert lease.release() is True


@pytest.mark.timeout(90)
def test_what_the_replica_did_not_know(service: tuple[Redis, Redis], key: str) -> None:
    """A grant that was not copied yet is lost, as is said; its token is outranked."""
    master, replica = service
    stop(replica.pid)
    redis.Redis.from_url(master.url()).client_kill_filter(_type="replica")
    lease = distributed_lock(key, lease=30).acquire(timeout=0)
    master.kill()
    resume(replica.pid)
    until_role(replica, "master")
    theirs = eventually(lambda: attempt(key), what="another grant")
    assert (theirs.fencing_token or 0) > (lease.fencing_token or 0)
    with pytest.raises(LeaseLost) as caught:
        lease.renew()
    assert caught.value.reason == "taken"
    assert theirs.release() is True


def attempt(key: str) -> Any:
    try:
        return distributed_lock(key, owner="other").try_acquire()
    except RedisError:
        return None


def test_forgotten_client(
    service: tuple[Redis, Redis],
    settings: Any,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it has opened to Sentinel is closed with it, not left to the collector.

    That may look at a socket before it looks at the one who would close it.
    """
    monkeypatch.setattr(redis.Redis, "__del__", lambda self: None)
    with distributed_lock(key):
        pass
    [(_, port)] = settings.DBLOCKS["default"]["OPTIONS"]["sentinels"]
    # Not those of other tests' clients.
    opened = [
        connection
        for connection in gc.get_objects()
        if type(connection) is redis.connection.Connection
        and connection.port == port
        and connection._sock is not None
    ]
    assert opened
    settings.DBLOCKS = {}

    def are_closed() -> bool:
        gc.collect()
        return all(each._sock is None for each in opened)

    eventually(are_closed, what="the end of the connections")


def test_no_sentinel(settings: Any, key: str) -> None:
    """A Sentinel out of reach, or one without the service, is an error."""
    with Redis() as master, Sentinel(master) as sentinel:
        for port, service in ((sentinel.port, "other"), (master.port + 1, "service")):
            settings.DBLOCKS = {
                "default": {
                    "BACKEND": BACKEND,
                    "LOCATION": f"redis://{service}/0",
                    "OPTIONS": {"sentinels": [(HOST, port)]},
                }
            }
            with pytest.raises(RedisError) as caught:
                distributed_lock(key).try_acquire()
            assert f"No master found for '{service}' (DBLOCKS" in str(caught.value)


@pytest.mark.parametrize("given", [{}, {"password": "s3cret"}])
def test_wrong_password_of_a_sentinel(settings: Any, key: str, given: Any) -> None:
    """That is said at once, however long the caller would wait, without the password.

    If one of several Sentinels can't be reached, it might know the master later.
    """
    with Redis() as master, Sentinel(master) as sentinel:
        watch: Any = redis.Redis(HOST, sentinel.port)
        watch.acl_setuser("default", reset_passwords=True, passwords=["+right"])
        entry = {"BACKEND": BACKEND, "LOCATION": "redis://service/0"}
        sentinels = [(HOST, sentinel.port)]
        options = {"sentinels": sentinels, "sentinel_kwargs": given}
        settings.DBLOCKS = {"default": {**entry, "OPTIONS": options}}
        with takes(at_most=1 + SLACK), pytest.raises(AuthenticationError) as caught:
            distributed_lock(key, timeout=DEADLINE).acquire()
        assert "sentinel_kwargs" in str(caught.value)
        assert "s3cret" not in str(caught.value)
        sentinels.append((HOST, master.port + 1))
        settings.DBLOCKS = {"default": {**entry, "OPTIONS": options}}
        with pytest.raises(RedisError, match="AuthenticationError, Conn") as other:
            distributed_lock(key).try_acquire()
        assert not isinstance(other.value, AuthenticationError)


def test_silent_sentinels(settings: Any, key: str) -> None:
    """All of them together take no longer than a server that doesn't answer."""
    with ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server((HOST, 0))) for _ in "123"]
        sentinels = [each.getsockname() for each in silent]
        options = {"sentinels": sentinels, "socket_timeout": 1.5}
        entry = {"BACKEND": BACKEND, "LOCATION": "redis://service/0"}
        settings.DBLOCKS = {"default": {**entry, "OPTIONS": options}}
        with takes(1.4, 1.6 + SLACK), pytest.raises(RedisError, match="TimeoutError"):
            distributed_lock(key).try_acquire()
