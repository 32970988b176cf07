"""A Galera cluster: what is written on one node while another lags behind."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta, timezone
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from dblocks import Lease, LeaseLost, Lock, distributed_lock, transaction_lock
from dblocks.backends.database import dialects
from dblocks.backends.database.dialects import galera
from dblocks.conf import backends
from dblocks.interventions import Intervention
from dblocks.models import DistributedLock, TokenFloor
from tests.support.fixtures import OtherThread
from tests.support.services import free_port
from tests.support.timing import DEADLINE, eventually
from tests.testapp.models import Account
from tests.topologies.galera import Node, cluster

TRIES = int(os.environ.get("DBLOCKS_TOPOLOGIES_TRIES", "3"))

A, B = "node0", "node1"

LEASES = {"expired": 0.5, "forced": 30.0}

pytestmark = [pytest.mark.database_backend, pytest.mark.timeout(60 + 5 * TRIES)]


@pytest.fixture(scope="module")
def nodes(django_db_setup: None, django_db_blocker: Any) -> Iterator[list[Node]]:
    """Run three nodes with the tables, which the aliases node0 to node2 reach."""
    with cluster() as nodes, django_db_blocker.unblock():
        base = dict(connections.settings["default"])
        for number, node in enumerate(nodes):
            nodes[0].url("dblocks")
            connections.settings[f"node{number}"] = base | {
                "ENGINE": "django.db.backends.mysql",
                "NAME": "dblocks",
                "USER": "root",
                "PASSWORD": "",
                "HOST": "127.0.0.1",
                "PORT": str(node.port),
                "OPTIONS": {"connect_timeout": 5, "read_timeout": 30},
            }
        with connections[A].schema_editor() as editor:
            for model in (DistributedLock, TokenFloor, Intervention, Account):
                editor.create_model(model)
        nodes[0].query("CREATE TABLE dblocks.obstacle (id SERIAL)")
        yield nodes
        for number in range(len(nodes)):
            connections[f"node{number}"].close()
            del connections[f"node{number}"]
            del connections.settings[f"node{number}"]


@pytest.fixture(autouse=True)
def on_every_node(
    nodes: list[Node], settings: Any, django_db_blocker: Any
) -> Iterator[None]:
    """Keep locks in a backend of each node's name."""
    path = "dblocks.backends.database.DatabaseBackend"
    settings.DBLOCKS = {
        f"node{number}": {"BACKEND": path, "OPTIONS": {"using": f"node{number}"}}
        for number in range(len(nodes))
    }
    with django_db_blocker.unblock():
        yield


@pytest.fixture(autouse=True)
def sessions(nodes: list[Node], on_every_node: None) -> Iterator[None]:
    """See to it that what a statement sets for itself is not left set."""
    yield
    for node in A, B:
        for name in "innodb_lock_wait_timeout", "innodb_snapshot_isolation":
            with connections[node].cursor() as cursor:
                cursor.execute(f"SELECT @@SESSION.{name}, @@GLOBAL.{name}")
                assert len(set(cursor.fetchone())) == 1, (node, name)


def lock(key: str, node: str, **options: Any) -> Lock:
    return distributed_lock(key, backend=node, **options)


class Lag:
    """A node that applies nothing of what the others write, until it catches up."""

    def __init__(self, node: Node, writer: Node) -> None:
        self.node, self.writer = node, writer
        self.timers: list[threading.Timer] = []
        self.blocker: Any = None

    def begin(self) -> None:
        before = self.seen()
        self.blocker = connections[B].copy()
        # The timer of end_in() closes it.
        self.blocker.inc_thread_sharing()
        with self.blocker.cursor() as cursor:
            cursor.execute("LOCK TABLES obstacle READ")
        self.writer.query("INSERT INTO dblocks.obstacle VALUES ()")
        eventually(lambda: self.received() > 0, what="a queue of writes")
        assert self.seen() == before

    def received(self) -> int:
        status = "SHOW STATUS LIKE 'wsrep_last_committed'"
        return self.number(self.writer, status) - self.number(self.node, status)

    def seen(self) -> str:
        return self.node.query("SELECT COUNT(*) FROM dblocks.obstacle")

    @staticmethod
    def number(node: Node, sql: str) -> int:
        return int(node.query(sql).split()[-1])

    def end(self) -> None:
        blocker, self.blocker = self.blocker, None
        if blocker is not None:
            blocker.close()

    def end_in(self, seconds: float) -> None:
        """Catch up in a moment, while the caller's commit waits for its turn."""
        self.timers.append(threading.Timer(seconds, self.end))
        self.timers[-1].start()


@pytest.fixture
def lag(nodes: list[Node]) -> Iterator[Lag]:
    """Let node1 lag behind node0 from where the test says so."""
    lag = Lag(nodes[1], nodes[0])
    yield lag
    for timer in lag.timers:
        timer.join()
    lag.end()
    eventually(lambda: lag.received() <= 0, what="the node's catching up")


def sell(node: str, key: str) -> bool:
    """Sell the last piece, unless it has been sold as far as this node knows."""
    sales = Account.objects.using(node).filter(name=key)
    if sales.exists():
        return False
    Account.objects.using(node).create(name=key)
    return True


def sell_guarded(key: str, lease: Lease, lag: Lag) -> None:
    """Sell the last piece on node1, as far as that knows, while it is still held."""
    with transaction.atomic(using=B):
        assert sell(B, key)
        lag.end_in(0.2)
        lease.guard()


def insert_too(number: int, name: str, lag: Lag) -> None:
    """Insert on node1, which lags, a row that node0 has inserted."""
    with transaction.atomic(using=B):
        Account.objects.using(B).create(pk=number, name=name)
        lag.end_in(0.2)


def sold(node: str, key: str) -> int:
    return Account.objects.using(node).filter(name=key).count()


def next_grant(how: str, key: str) -> Lease:
    """Have the key granted on node0 to whoever comes after the holder."""
    if how == "forced":
        assert backends[A].force_release(key)
    return lock(key, A).acquire(timeout=DEADLINE)


def test_abilities(nodes: list[Node]) -> None:
    """A node is known for one: it certifies writes, and has no session locks."""
    assert nodes[2].query("SHOW STATUS LIKE 'wsrep_cluster_size'").endswith("3")
    dialect = dialects.of(connections[A])
    assert dialect.certifies
    assert not dialect.has_session_locks


def test_clocks(nodes: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """W015 names the nodes whose clock differs, and passes over who doesn't answer."""

    def found() -> list[str]:
        messages = backends[A].check_server([A])
        return [m.msg for m in messages if m.id == "dblocks.W015"]

    assert found() == []
    ahead = galera._ahead
    shift = {str(nodes[1].port): 20.0, str(nodes[2].port): -3.0}
    monkeypatch.setattr(
        galera,
        "_ahead",
        lambda node: ahead(node) + shift.get(node.settings_dict["PORT"], 0.0),
    )
    assert sorted(re.findall(r":(\d+) is (.+? s \w+)", "".join(found()))) == sorted(
        [(str(nodes[1].port), "20.0 s ahead"), (str(nodes[2].port), "3.0 s behind")]
    )
    others = galera._others

    def unreachable(connection: Any) -> Iterator[Any]:
        for node in others(connection):
            node.settings_dict["PORT"] = str(free_port())
            yield node

    monkeypatch.setattr(galera, "_others", unreachable)
    assert found() == []


@pytest.mark.parametrize("how", ["expired", "forced"])
@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_last_piece_is_sold_once(
    lag: Lag, key: str, other: OtherThread, how: str, level: str
) -> None:
    """An outdated holder on a node that lags can't commit after the next grant."""
    for number in range(TRIES):
        name = f"{key}:{number}"
        lease = lock(name, B, lease=LEASES[how], renew=False).acquire()
        with connections[B].cursor() as cursor:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        lag.begin()
        successor = other.do(next_grant, how, name)
        assert successor.fencing_token > lease.fencing_token
        assert other.do(sell, A, name)
        with pytest.raises(LeaseLost) as caught:
            sell_guarded(name, lease, lag)
        assert caught.value.key == name
        eventually(lambda: lag.received() <= 0)
        assert sold(B, name) == 1
        lease.release()
        assert other.do(successor.release)


@pytest.fixture
def default_is_b(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let atomic() without a database be about node1."""
    for module in ("django.db.transaction", "dblocks.lease_blocks"):
        monkeypatch.setattr(f"{module}.DEFAULT_DB_ALIAS", B)


@pytest.mark.usefixtures("default_is_b")
def test_atomic_blocks(lag: Lag, key: str, other: OtherThread) -> None:
    """The commit of an atomic=True block is refused likewise."""

    @lock(key, B, atomic=True, renew=False)
    def outdated() -> None:
        lag.begin()
        other.do(next_grant, "forced", key).release()
        assert sell(B, key)
        assert other.do(sell, A, key)
        lag.end_in(0.2)

    with pytest.raises(LeaseLost):
        outdated()
    assert sold(B, key) == 1


@pytest.mark.usefixtures("default_is_b")
def test_nested_blocks(lag: Lag, key: str, other: OtherThread) -> None:
    """A guard in an inner block speaks up when the outermost one can't commit."""

    @lock(key, B, atomic=True, renew=False)
    def outdated() -> None:
        lag.begin()
        other.do(next_grant, "forced", key).release()
        sell(B, key)
        lag.end_in(0.2)

    with pytest.raises(LeaseLost), transaction.atomic():
        outdated()
    assert sold(B, key) == 0


def test_data_elsewhere(lag: Lag, key: str, other: OtherThread) -> None:
    """Where the data are in another database, the cluster is asked before."""

    @lock(key, B, atomic=True, renew=False)
    def outdated() -> None:
        Account.objects.create(name=key)
        lag.begin()
        other.do(next_grant, "forced", key).release()
        lag.end_in(0.2)

    with pytest.raises(LeaseLost):
        outdated()
    assert not Account.objects.filter(name=key).exists()


def test_renewal_on_another_node(lag: Lag, key: str, other: OtherThread) -> None:
    """A conflict with a renewal of the lease itself is no loss, nor is a later one."""
    account = f"{key}:account"

    @lock(key, B, atomic=True, renew=False)
    def renewed_there() -> None:
        Account.objects.create(name=account)
        lag.begin()
        rows = DistributedLock.objects.using(A).filter(key=key)
        assert rows.update(expires_at=rows.get().expires_at + timedelta(seconds=1))
        lag.end_in(0.2)

    renewed_there()
    assert Account.objects.filter(name=account).exists()
    # The lease is over, and its guard with it.
    lag.begin()
    Account.objects.using(A).create(pk=2 * 10**6, name=key)
    with pytest.raises(OperationalError):
        insert_too(2 * 10**6, key, lag)


def test_conflict_over_other_rows(lag: Lag, key: str, other: OtherThread) -> None:
    """Who loses a conflict over something else has not lost the lock."""
    account = Account.objects.using(A).create(name=key)
    row = eventually(lambda: Account.objects.using(B).filter(pk=account.pk).first())

    def write(balance: int) -> None:
        with transaction.atomic(using=B):
            row.balance = balance
            row.save()
            lag.end_in(0.2)
            lease.guard()

    with lock(key, B) as lease:
        lag.begin()
        Account.objects.using(A).filter(pk=account.pk).update(balance=1)
        with pytest.raises(OperationalError, match="Deadlock"):
            write(2)
        assert lease.held
        write(3)
    row.refresh_from_db()
    assert row.balance == 3


def test_rolled_back_guard(lag: Lag, key: str, other: OtherThread) -> None:
    """A transaction that ends by itself leaves nothing to say for the next one."""
    lease = lock(key, B, renew=False).acquire()
    with transaction.atomic(using=B):
        lease.guard()
        transaction.set_rollback(True, using=B)
    lag.begin()
    Account.objects.using(A).create(pk=10**6, name=key)
    other.do(next_grant, "forced", key).release()
    with pytest.raises(OperationalError):
        insert_too(10**6, key, lag)
    assert not lease.release()


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_renewals_beside_guards(key: str, nodes: list[Node], level: str) -> None:
    """What the guard writes and what the renewals write don't disturb each other."""
    with lock(key, B, lease=1.2) as lease:
        with connections[B].cursor() as cursor:
            cursor.execute(f"SET SESSION TRANSACTION ISOLATION LEVEL {level}")
        for _ in range(12):
            with transaction.atomic(using=B):
                sell(B, key)
                time.sleep(0.1)
                lease.guard()
                time.sleep(0.05)
            lease.renew()
        assert lease.held
    expires = DistributedLock.objects.using(B).get(key=key).expires_at
    assert expires < time_of(B)


def time_of(node: str) -> Any:
    with connections[node].cursor() as cursor:
        cursor.execute("SELECT UTC_TIMESTAMP(6) + INTERVAL 0.001 SECOND")
        return cursor.fetchone()[0].replace(tzinfo=timezone.utc)


def test_force_release_races_the_commit(
    key: str, nodes: list[Node], other: OtherThread
) -> None:
    """A force release on another node comes before the commit, or after it."""
    ends = [0, 0]
    for number in range(10 * TRIES):
        name = f"{key}:{number}"
        lease = lock(name, B, renew=False).acquire()
        held = DistributedLock.objects.using(A).filter(key=name, owner=lease.owner)
        eventually(held.exists)
        start = threading.Barrier(2)

        def force(name: str = name, start: threading.Barrier = start) -> Lease:
            start.wait(DEADLINE)
            successor = next_grant("forced", name)
            sell(A, name)
            return successor

        forced = other.start(force)
        try:
            with transaction.atomic(using=B):
                assert sell(B, name)
                start.wait(DEADLINE)
                time.sleep(number % 10 / 1000)
                lease.guard()
            ends[0] += 1
        except LeaseLost:
            ends[1] += 1
        successor = forced.result(DEADLINE)
        assert sold(A, name) == 1
        lease.release()
        assert other.do(successor.release)
    assert all(ends), ends


def test_grants_on_two_nodes(lag: Lag, key: str, other: OtherThread) -> None:
    """A key that is taken is not granted by a node that has not heard of it."""
    lock(key, B).acquire().release()
    lag.begin()
    lease = other.do(lock(key, A).acquire)
    lag.end_in(0.2)
    assert lock(key, B).try_acquire() is None
    assert other.do(lease.release)


def test_row_locks_on_two_nodes(key: str, other: OtherThread) -> None:
    """Of two transactions that have locked a key's row, one can be committed."""
    lock(key, B).acquire().release()
    eventually(DistributedLock.objects.using(A).filter(key=key, owner="").exists)

    def lock_there() -> None:
        with transaction.atomic(using=A), transaction_lock(key, backend=A, timeout=0):
            pass

    def lock_here() -> None:
        with transaction.atomic(using=B), transaction_lock(key, backend=B, timeout=0):
            other.do(lock_there)

    with pytest.raises(OperationalError, match="Deadlock"):
        lock_here()
