"""Locks in a Redis Cluster: keys on several nodes, and nodes that change."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import pytest
import redis
from redis.crc import REDIS_CLUSTER_HASH_SLOTS as SLOTS
from redis.crc import key_slot
from redis.exceptions import (
    ClusterDownError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from dblocks import Lease, LeaseLost, LockTimeout, distributed_lock
from dblocks.backends.redis.backend import RedisBackend
from dblocks.backends.redis.cluster import Address, ClusterClient
from dblocks.backends.values import Grant, Granted, Renewal, Request
from dblocks.conf import backends
from tests.support.fixtures import OtherThread
from tests.support.processes import resume, stop
from tests.support.services import HOST, Redis
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes
from tests.test_redis import BACKEND, GRACE, token_of

pytestmark = [pytest.mark.engine("redis"), pytest.mark.timeout(90)]

Threads = Callable[[], OtherThread]

FIRST = range(0, SLOTS, 5462)


class Node(Redis):
    """One server of a cluster, which loses only its own slots when it is down."""

    def command(self) -> list[str]:
        if not self._served:
            # The nodes' own port is 10000 above: out of the ephemeral range as well.
            self.port = random.randrange(20000, 22000)
        return [
            *super().command(),
            *("--cluster-enabled", "yes"),
            *("--cluster-require-full-coverage", "no"),
        ]

    @property
    def inside(self) -> Any:
        return redis.Redis.from_url(self.url())

    def cluster(self, *command: object) -> Any:
        return self.inside.execute_command("CLUSTER", *command)


class Cluster:
    """Three masters, each with a third of the slots."""

    def __init__(self, nodes: list[Node]) -> None:
        self.nodes = nodes
        for epoch, (node, first) in enumerate(zip(nodes, FIRST, strict=True)):
            node.cluster("SET-CONFIG-EPOCH", epoch + 1)
            node.cluster("ADDSLOTS", *range(first, min(first + 5462, SLOTS)))
            nodes[0].cluster("MEET", HOST, node.port)
        for node in nodes:
            eventually(lambda node=node: self._knows_all(node), what="a whole cluster")

    def _knows_all(self, node: Node) -> bool:
        state = node.cluster("INFO")
        return (
            b"cluster_state:ok" in state
            and b"cluster_slots_assigned:%d\r" % SLOTS in state
            and len(node.cluster("SLOTS")) == 3
        )

    def id_of(self, number: int) -> str:
        return str(self.nodes[number].cluster("MYID"), "ascii")

    def owner(self, slot: int, *, at: int) -> int:
        """Return who has a slot, as a node sees it."""
        ports = [node.port for node in self.nodes]
        return next(
            ports.index(port)
            for first, last, (_, port, *_), *_ in self.nodes[at].cluster("SLOTS")
            if first <= slot <= last
        )

    def assign(self, slot: int, number: int, *at: int) -> None:
        """Tell some nodes, or all, who has a slot now."""
        for each in at or range(3):
            self.nodes[each].cluster("SETSLOT", slot, "NODE", self.id_of(number))

    def begin_move(self, slot: int, source: int, target: int) -> None:
        ids = self.id_of(source), self.id_of(target)
        self.nodes[target].cluster("SETSLOT", slot, "IMPORTING", ids[0])
        self.nodes[source].cluster("SETSLOT", slot, "MIGRATING", ids[1])

    def move(self, source: int, target: int, *names: object) -> None:
        to = HOST, self.nodes[target].port, "", 0, 5000, "KEYS"
        if names:
            self.nodes[source].inside.execute_command("MIGRATE", *to, *names)

    def move_keys(self, slot: int, source: int, target: int) -> None:
        names = self.nodes[source].cluster("GETKEYSINSLOT", slot, 1000)
        self.move(source, target, *names)

    @contextmanager
    def moves(self, slot: int, source: int, target: int) -> Iterator[None]:
        """A slot is on its way to another node; afterwards it is back."""
        self.begin_move(slot, source, target)
        yield
        self.move_keys(slot, source, target)
        self.assign(slot, target, target, source)
        self.begin_move(slot, target, source)
        self.move_keys(slot, target, source)
        self.assign(slot, source, source, target)


def slot_of(key: str) -> int:
    return int(key_slot(f"{{lock:{key}}}".encode()))


def on(number: int, key: str) -> str:
    """Return a key like this one whose slot is one of this node's."""
    names = (f"{key}:{each}" for each in count())
    return next(name for name in names if slot_of(name) // 5462 == number)


@pytest.fixture(scope="module")
def shared() -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster([stack.enter_context(Node()) for _ in range(3)])


@pytest.fixture
def cluster(shared: Cluster, settings: Any) -> Cluster:
    """Keep the locks in a cluster, of which the settings name the first node."""
    entry = {"BACKEND": BACKEND, "LOCATION": shared.nodes[0].url()}
    settings.DBLOCKS = dict.fromkeys(["default", "second", "third"], entry)
    return shared


@pytest.fixture
def keys(cluster: Cluster, key: str) -> list[str]:
    """Return a key of each node."""
    return [on(number, key) for number in range(3)]


def engine(alias: str = "default") -> RedisBackend:
    backend = backends[alias]
    assert isinstance(backend, RedisBackend)
    return backend


def redirects(cluster: Cluster) -> int:
    """Count how often the nodes have redirected a client."""
    return sum(
        node.inside.info("errorstats").get(f"errorstat_{name}", {"count": 0})["count"]
        for node in cluster.nodes
        for name in ("MOVED", "CROSSSLOT")
    )


def test_keys_on_all_nodes(cluster: Cluster, keys: list[str]) -> None:
    """A lock is the same wherever its key is, and the way there is learned once."""
    for key in keys:
        before = token_of(key)
        with distributed_lock(key, owner="me", timeout=0) as lease:
            assert (lease.fencing_token or 0) > before
            with distributed_lock(key, owner="me", timeout=0) as again:
                assert again.fencing_token == lease.fencing_token
            assert distributed_lock(key, owner="other").try_acquire() is None
            assert distributed_lock(key, backend="second").locked()
            lease.renew()
            assert lease.held
        assert not distributed_lock(key).locked()
        assert token_of(key) > (lease.fencing_token or 0)
    assert cluster.nodes[2].inside.exists(f"dblocks:{{lock:{keys[2]}}}:row")
    known = redirects(cluster)
    for number, key in enumerate(keys):
        token_of(key)
        token_of(on(number, f"{key}:new"))
    assert redirects(cluster) == known


def test_keys_in_different_slots(cluster: Cluster, keys: list[str]) -> None:
    """They are taken all or none, renewed and released, one after another."""
    with distributed_lock(*keys, timeout=0) as leases:
        leases.renew()
        assert leases.held
        assert {key: lease.held for key, lease in leases.items()} == dict.fromkeys(
            keys, True
        )
        for key in keys:
            assert distributed_lock(key, backend="second").try_acquire() is None
        leases.renew()
        assert leases.release() is True
    held = distributed_lock(keys[1], timeout=0, backend="third").acquire()
    with pytest.raises(LockTimeout) as caught:
        distributed_lock(*keys, timeout=0).acquire()
    assert caught.value.key == sorted(keys)[sorted(keys).index(keys[1])]
    assert held.release() is True
    assert not distributed_lock(*keys).locked()
    known = redirects(cluster)
    with distributed_lock(*keys, timeout=0) as leases:
        leases.renew()
    assert redirects(cluster) == known


def test_verbs_before_a_redirect(cluster: Cluster, key: str) -> None:
    """Several keys of one node tell too that it is one of a cluster.

    Each alias stands for a process that has asked for nothing before.
    """
    first, second = on(0, f"{key}:a"), on(0, f"{key}:b")
    assert slot_of(first) != slot_of(second)
    grants = []
    for each in (first, second):
        granted = engine().try_acquire(Request(each, "me", 30.0), 0.0)
        assert isinstance(granted, Granted)
        grants.append(granted.grant)
    renewals = [Renewal(each, 30.0) for each in grants]
    assert backends["second"].renew(renewals).extended == set(grants)
    assert set(backends["third"].read_all([first, second])) == {first, second}
    engine("third").move_clock(31)
    assert not distributed_lock(first, second).locked()
    assert engine().release_all(grants, count=0, deadline=0.0) == set(grants)


def test_keys_in_one_slot(cluster: Cluster, key: str) -> None:
    """They are taken by one command, and so released."""
    same = [f"{key}}}{each}" for each in range(3)]
    assert len(set(map(slot_of, same))) == 1
    token_of(same[0])
    asked = [calls(node) for node in cluster.nodes]
    with distributed_lock(*same, timeout=0):
        pass
    assert sum(map(calls, cluster.nodes)) - sum(asked) <= 4  # two are EVAL


def calls(node: Node) -> int:
    stats = node.inside.info("commandstats")
    names = ("evalsha", "eval")
    return sum(stats.get(f"cmdstat_{each}", {"calls": 0})["calls"] for each in names)


def test_permits(cluster: Cluster, keys: list[str]) -> None:
    """A lock with permits is on one node, and each is renewed while its slot moves."""
    for number, key in enumerate(keys):
        first, second, third = (
            distributed_lock(key, permits=2, owner=owner, timeout=0)
            for owner in ("first", "second", "third")
        )
        with first.acquire() as one, second.acquire() as two:
            assert {one.permit, two.permit} == {0, 1}
            assert third.try_acquire() is None
            grants = [one._hold.grant, two._hold.grant]
            renewals = [Renewal(grant, 30.0) for grant in grants]
            assert engine().renew(renewals).extended == set(grants)
            with cluster.moves(slot_of(key), number, (number + 1) % 3):
                row = f"dblocks:{{lock:{key}}}:row:1"
                cluster.move(number, (number + 1) % 3, row)
                assert engine().renew(renewals).extended == set(grants)
            assert {each.permit for each in engine("second").entries(key)} == {0, 1}
        assert not first.locked()


@pytest.mark.parametrize("number", range(3))
def test_hand_over(
    cluster: Cluster, keys: list[str], threads: Threads, number: int
) -> None:
    """A release wakes those who wait, in order, wherever the key is."""
    key, order = keys[number], []
    lease = distributed_lock(key, lease=60, timeout=0).acquire()

    def take(alias: str) -> None:
        with distributed_lock(key, lease=60, timeout=DEADLINE, backend=alias):
            order.append(alias)

    answers = []
    for waiting, alias in enumerate(("second", "third"), 1):
        answers.append(threads().start(take, alias))
        eventually(
            lambda waiting=waiting: engine().waiters(key).number == waiting,
            what="the waiter",
        )
    eventually(lambda: blocked(cluster.nodes[number]) >= 2, what="both at their bells")
    with takes(at_most=GRACE + SLACK):
        lease.release()
        for answer in answers:
            answer.result(timeout=DEADLINE)
    assert order == ["second", "third"]


def blocked(node: Node) -> int:
    return int(node.inside.info("clients")["blocked_clients"])


def test_operators(cluster: Cluster, keys: list[str]) -> None:
    """A process that was never redirected lists the locks of all nodes and ends any."""
    note = f"of {keys[0]}"
    with ExitStack() as stack:
        for key in keys:
            stack.enter_context(suppress(LeaseLost))
            stack.enter_context(distributed_lock(key, timeout=0, note=note))
        found = {each.key for each in engine("second").entries() if each.note == note}
        assert found == set(keys)
        assert [each.key for each in engine("third").entries(keys[2])] == [keys[2]]
        for key in keys:
            assert engine("third").request_release(key)
            assert engine("third").force_release(key)
            assert not distributed_lock(key).locked()


def test_checks(cluster: Cluster) -> None:
    """Each master's settings are looked at."""
    assert list(engine().check_server([])) == []
    inside = cluster.nodes[1].inside
    inside.config_set("maxmemory-policy", "allkeys-lru")
    try:
        (message,) = engine().check_server([])
    finally:
        inside.config_set("maxmemory-policy", "noeviction")
    assert message.id == "dblocks.W012"
    assert f":{cluster.nodes[1].port}/" in message.msg


def test_nodes_that_do_not_know_their_host(cluster: Cluster, keys: list[str]) -> None:
    """They are where the node was reached that names them."""
    for node in cluster.nodes:
        try:
            kind = "cluster-preferred-endpoint-type"
            node.inside.config_set(kind, "unknown-endpoint")
        except ResponseError:
            pytest.skip("this Redis knows no other kinds")
    try:
        for key in keys:
            token_of(key)
        assert engine("second").entries(keys[2])
    finally:
        for node in cluster.nodes:
            node.inside.config_set(kind, "ip")


def test_slot_moves(cluster: Cluster, keys: list[str], threads: Threads) -> None:
    """A lock goes on while its slot moves to another node, and after that.

    Nobody else is granted it at any moment.
    """
    key = keys[1]
    slot = slot_of(key)
    lease = distributed_lock(key, lease=60, timeout=0).acquire()
    other = distributed_lock(key, lease=60, timeout=0, backend="second")
    patient = distributed_lock(key, lease=60, timeout=DEADLINE, backend="third")
    assert other.try_acquire() is None
    answer = threads().start(patient.acquire)
    eventually(lambda: blocked(cluster.nodes[1]), what="the waiter at its bell")
    cluster.begin_move(slot, 1, 2)
    # Not all of the lock's keys exist: that tells nothing about who has it.
    with takes(at_most=1 + SLACK), pytest.raises(TryAgainError):
        other.try_acquire()
    lease.renew()
    cluster.move_keys(slot, 1, 2)
    lease.renew()  # as the old node says, at the new one
    assert other.locked()
    with pytest.raises(TryAgainError):
        other.try_acquire()
    cluster.assign(slot, 2, 1)
    # The new one doesn't know yet: the two name each other.
    with pytest.raises(TryAgainError):
        other.try_acquire()
    cluster.assign(slot, 2)
    assert other.try_acquire() is None
    lease.renew()
    assert lease.held
    eventually(lambda: blocked(cluster.nodes[2]), what="the waiter at its new bell")
    with takes(at_most=GRACE + SLACK):
        assert lease.release() is True
        theirs = answer.result(timeout=DEADLINE)
    assert (theirs.fencing_token or 0) > (lease.fencing_token or 0)
    assert theirs.release() is True
    cluster.begin_move(slot, 2, 1)
    cluster.move_keys(slot, 2, 1)
    cluster.assign(slot, 1, 1, 2, 0)
    assert token_of(key) > (theirs.fencing_token or 0)
    known = redirects(cluster)
    token_of(key)
    assert redirects(cluster) == known


def test_script_meets_a_key_that_has_moved(
    cluster: Cluster,
    keys: list[str],
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it had done by then is found done when it is sent again."""
    key = keys[1]
    monkeypatch.setattr(engine()._server.client, "_patience", DEADLINE)
    lease = distributed_lock(key, lease=60, timeout=0).acquire()
    # All keys that a release names exist, but not the bell that it rings.
    engine()._server.queue(Request(key, "x", 60.0), "aa waits", 20.0)
    inside, base = cluster.nodes[1].inside, f"dblocks:{{lock:{key}}}:"
    inside.zadd(f"{base}rung", {"bb": 2e15})
    with cluster.moves(slot_of(key), 1, 2):
        answer = threads().start(lease.release)
        eventually(
            lambda: inside.hget(f"{base}row", "owner") == b"",
            what="the first half of the release",
        )
    assert answer.result(timeout=DEADLINE) is True
    assert not distributed_lock(key).locked()


@pytest.mark.parametrize("error", [ClusterDownError, TryAgainError])
def test_fault_while_queueing(
    keys: list[str],
    threads: Threads,
    monkeypatch: pytest.MonkeyPatch,
    error: type[RedisError],
) -> None:
    """It fails no waiter who has time."""
    lease = distributed_lock(keys[1], lease=60, timeout=0).acquire()
    failed = threading.Event()

    def fail(*arguments: object) -> None:
        monkeypatch.undo()
        failed.set()
        raise error("not now")

    monkeypatch.setattr(engine("second")._server, "queue", fail)
    waits = distributed_lock(keys[1], backend="second", timeout=DEADLINE)
    answer = threads().start(waits.acquire)
    assert failed.wait(DEADLINE)
    assert lease.release() is True
    answer.result(timeout=DEADLINE).release()


@pytest.mark.parametrize(
    ("location", "host", "expected"),
    [
        ("redis://locks:7000/0", "::1", "redis://[::1]:7001/0"),
        (
            "rediss://me:p%40ss@locks?client_name=x",
            "two",
            "rediss://me:p%40ss@two:7001?client_name=x",
        ),
        ("unix:///run/redis.sock?db=0", "two", "redis://two:7001?db=0"),
    ],
)
def test_url_of_a_node(location: str, host: str, expected: str) -> None:
    """It is reached as the first one is."""
    client = ClusterClient("default", location, {})
    assert client._url(Address(host, 7001)) == expected


@pytest.mark.parametrize("protocol", [2, 3])
def test_server_alone(settings: Any, key: str, protocol: int) -> None:
    """It isn't asked for a cluster if it says what it is, and once otherwise."""
    with Redis() as server:
        settings.DBLOCKS = {
            "default": {
                "BACKEND": BACKEND,
                "LOCATION": server.url(),
                "OPTIONS": {"protocol": protocol},
            }
        }
        with distributed_lock(key, f"{key}:other", timeout=0) as leases:
            leases.renew()
            assert distributed_lock(key, owner="other").try_acquire() is None
            assert len(list(engine().entries())) == 2
            assert list(engine().check_server([])) == []
        engine()._server.client.close()
        token_of(key)
        stats = redis.Redis.from_url(server.url()).info("commandstats")
        asked = [name for name in stats if name.startswith("cmdstat_cluster")]
        assert [stats[name]["calls"] for name in asked] == [1] * (protocol == 2)


@pytest.mark.parametrize("host", [None, b"", b"?"])
def test_node_without_a_host(host: bytes | None) -> None:
    """It is where the node was reached that names it."""
    client = ClusterClient("default", "redis://locks:7000/0", {})
    client._note([[0, SLOTS - 1, [host, 7001, b"id"]]], client)
    assert client.at("any").name == "redis://locks:7001/0"


def test_slot_without_a_node(cluster: Cluster, keys: list[str]) -> None:
    """A cluster that is down for a while fails no acquire that has time."""
    key, owner = keys[2], cluster.nodes[2]
    token_of(key)
    owner.cluster("DELSLOTS", slot_of(key))
    with pytest.raises(ClusterDownError):
        distributed_lock(key, timeout=0).acquire()
    back = threading.Timer(1.5, owner.cluster, ("ADDSLOTS", slot_of(key)))
    back.start()
    with takes(at_least=1), distributed_lock(key, timeout=DEADLINE):
        pass
    back.join()


def test_all_nodes_are_silent(cluster: Cluster, settings: Any, key: str) -> None:
    """A caller waits for one of the other nodes, not for each."""
    times = {"socket_timeout": 1.5, "socket_connect_timeout": 1.5}
    entry = {**settings.DBLOCKS["default"], "OPTIONS": times}
    settings.DBLOCKS = {"default": entry}
    assert distributed_lock(key).locked() is False
    with ExitStack() as stack:
        for node in cluster.nodes:
            stop(node.pid)
            stack.callback(resume, node.pid)
        with takes(at_most=3 + SLACK), pytest.raises(RedisError):
            distributed_lock(key).try_acquire()


def test_leases_beside_a_silent_node(cluster: Cluster, keys: list[str]) -> None:
    """They are renewed while it hangs, for longer than they last."""
    length = scaled(3)
    leases = [distributed_lock(key, lease=length).acquire(timeout=0) for key in keys]
    stop(cluster.nodes[1].pid)
    try:
        eventually(lambda: not leases[1].held, what="the loss")
        always(lambda: leases[0].held and leases[2].held, during=length)
    finally:
        resume(cluster.nodes[1].pid)
    assert [lease.release() for lease in leases] == [True, False, True]


def test_no_right_to_the_map(cluster: Cluster, settings: Any, keys: list[str]) -> None:
    """That is an error, even on the key's own node, lest a list lack other locks."""
    few = "ACL", "SETUSER", "few", "on", "nopass", "~*", "&*", "+@all", "-cluster"
    for node in cluster.nodes:
        node.inside.execute_command(*few)
    options = {"username": "few", "password": "any", "protocol": 2}
    settings.DBLOCKS = {"default": {**settings.DBLOCKS["default"], "OPTIONS": options}}
    with pytest.raises(NoPermissionError):
        list(backends["default"].entries())
    for each in keys:
        with pytest.raises(NoPermissionError):
            distributed_lock(each).try_acquire()


def test_node_restarts(cluster: Cluster, keys: list[str], threads: Threads) -> None:
    """What is held stays held, and the locks on the other nodes don't suffer.

    The node is the one that the settings name.
    """
    leases = distributed_lock(*keys, lease=60, timeout=0).acquire()
    assert len(engine().read_all(keys)) == 3
    patient = distributed_lock(keys[0], lease=60, timeout=3 * DEADLINE)
    # Of this process, no other node knows.
    assert distributed_lock(keys[0], backend="third").locked()
    before = blocked(cluster.nodes[0])
    answer = threads().start(patient.acquire)
    down = cluster.nodes[0]
    eventually(lambda: blocked(down) > before, what="the waiter at its bell")
    eventually(down.has_written, what="all in the file")
    down.kill()
    grants = [leases[key]._hold.grant for key in keys]
    more = [Grant(on(0, f"{keys[0]}:{each}"), "x", 1) for each in range(5)]
    with takes(at_most=1 + SLACK):
        renewed = engine().renew([Renewal(each, 60.0) for each in more + grants])
    assert (renewed.extended, renewed.lost) == (set(grants[1:]), {})
    with pytest.raises(RedisError):
        engine().renew([Renewal(grants[0], 60.0)])
    with pytest.raises(RedisError):
        engine().read_all(keys)
    with pytest.raises(RedisError):
        distributed_lock(keys[0], owner="other").try_acquire()
    # Of several, those on the other nodes are released all the same.
    with pytest.raises(RedisError):
        engine().release_all(grants[:2], count=0, deadline=0.0)
    assert leases[keys[1]].release() is False
    assert token_of(keys[1]) > (leases[keys[1]].fencing_token or 0)
    # Another node takes one of its slots over.
    moved = on(0, f"{keys[0]}:moved")
    cluster.assign(slot_of(moved), 1, 1, 2)
    cluster.nodes[1].cluster("BUMPEPOCH")
    token_of(moved)
    assert not distributed_lock(moved, backend="third").locked()
    down.start()
    eventually(lambda: knows(leases[keys[0]]), what="the node's return")
    assert distributed_lock(keys[0], owner="other").try_acquire() is None
    assert leases[keys[0]].held
    eventually(lambda: blocked(down) > 0, what="the waiter at its bell again")
    assert leases[keys[0]].release() is True
    theirs = answer.result(timeout=DEADLINE)
    assert (theirs.fencing_token or 0) > (leases[keys[0]].fencing_token or 0)
    theirs.release()
    assert leases[keys[2]].release() is True
    eventually(lambda: cluster.owner(slot_of(moved), at=0) == 1, what="the news")
    cluster.begin_move(slot_of(moved), 1, 0)
    cluster.move_keys(slot_of(moved), 1, 0)
    cluster.assign(slot_of(moved), 0, 0, 1, 2)


def knows(lease: Lease) -> bool:
    """Renew, if the cluster is up again."""
    with suppress(RedisError):
        lease.renew()
        return True
    return False
