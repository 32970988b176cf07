"""A PostgreSQL server with a synchronous replica: failover, and its standstill."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from django.db import Error, connections, transaction
from django.db.models import F

from dblocks import LockError, distributed_lock
from dblocks.models import DistributedLock, TokenFloor
from tests.support.fixtures import OtherThread
from tests.support.processes import stop
from tests.support.services import PostgreSQL, Standby
from tests.support.timing import DEADLINE, SLACK, eventually, scaled
from tests.testapp.models import Account

ALIAS = "pair"
THREADS = 4
KEYS = 2


class Pair:
    """A primary and its synchronous standby."""

    def __init__(self, primary: PostgreSQL, standby: Standby) -> None:
        self.primary, self.standby = primary, standby

    def ask(self, sql: str, *parameters: Any) -> list[Any]:
        """Return what the primary answers to one who is nobody's lock's holder."""
        url = self.primary.url("locks")
        with psycopg.connect(url, autocommit=True) as operator:
            cursor = operator.execute(sql, parameters)
            return [] if cursor.description is None else cursor.fetchall()

    def waiting(self) -> list[int]:
        """Return the sessions that wait for the standby in their commit."""
        waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        return [pid for (pid,) in self.ask(waits)]

    def sender(self) -> int:
        """Return the process of the primary that tells the standby of commits."""
        return int(self.ask("SELECT pid FROM pg_stat_replication")[0][0])

    def is_synchronous(self) -> bool:
        return bool(
            self.ask("SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'")
        )


@pytest.fixture
def pair(postgres: int, another: Callable[..., str]) -> Iterator[Pair]:
    """Start the two, with the tables, and a backend whose driver finds the primary."""
    with PostgreSQL() as primary:
        primary.url("locks")
        with Standby(primary=primary) as standby:
            pair = Pair(primary, standby)
            another(
                ALIAS,
                HOST="127.0.0.1,127.0.0.1",
                PORT=f"{primary.port},{standby.port}",
                USER="postgres",
                PASSWORD="",
                NAME="locks",
                OPTIONS={"target_session_attrs": "read-write"},
            )
            with connections[ALIAS].schema_editor() as editor:
                for model in (DistributedLock, TokenFloor, Account):
                    editor.create_model(model)
            pair.ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'")
            pair.ask("SELECT pg_reload_conf()")
            eventually(pair.is_synchronous, what="the synchronous standby")
            yield pair
            connections[ALIAS].close()


class Client:
    """A thread that counts under a lock, whatever becomes of the server."""

    def __init__(self, key: str, account: int, tokens: list[int]) -> None:
        self._key, self._account, self._tokens = key, account, tokens
        self.acknowledged = self.unclear = 0
        self.ends = threading.Event()

    def __call__(self) -> None:
        lock = distributed_lock(self._key, backend=ALIAS, lease=scaled(1), timeout=5)
        while not self.ends.is_set():
            try:
                with lock as lease:
                    self._tokens.append(lease.fencing_token)
                    self._count(lease)
            except (Error, LockError):
                time.sleep(0.05)
            connections[ALIAS].close_if_unusable_or_obsolete()

    def _count(self, lease: Any) -> None:
        self.unclear += 1
        with transaction.atomic(ALIAS):
            mine = Account.objects.using(ALIAS).filter(pk=self._account)
            mine.update(balance=F("balance") + 1)
            lease.guard()
        self.unclear -= 1
        self.acknowledged += 1


class Failover:
    """What clients were told before and after the standby took over, and what is so."""

    def __init__(
        self, pair: Pair, key: str, threads: Callable[[], OtherThread]
    ) -> None:
        self.pair = pair
        keys = [f"{key}:{number}" for number in range(KEYS)]
        self.tokens: dict[str, list[int]] = {key: [] for key in keys}
        self.account = Account.objects.using(ALIAS).create(name=key, balance=0).pk
        self.clients = [
            Client(keys[number % KEYS], self.account, self.tokens[keys[number % KEYS]])
            for number in range(THREADS)
        ]
        self.threads = threads

    def run(self, *, lags: bool) -> None:
        """Kill the primary, which the standby may not have heard from for a while."""
        running = [self.threads().start(client) for client in self.clients]
        try:
            self._until_granted(20)
            if lags:
                sender = self.pair.sender()
                stop(sender)
                self._until_granted(5)
            self.pair.primary.kill()
            if lags:
                os.kill(sender, signal.SIGKILL)
            self.pair.standby.promote()
            self._until_granted(20)
        finally:
            for client in self.clients:
                client.ends.set()
        for each in running:
            each.result(DEADLINE)
        connections[ALIAS].close()
        balance = Account.objects.using(ALIAS).get(pk=self.account).balance
        acknowledged = sum(client.acknowledged for client in self.clients)
        unclear = sum(client.unclear for client in self.clients)
        assert balance <= acknowledged + unclear
        self.lost = max(0, acknowledged - balance)

    def _until_granted(self, more: int) -> None:
        before = {key: len(granted) for key, granted in self.tokens.items()}
        eventually(
            lambda: all(len(self.tokens[k]) > n + more for k, n in before.items()),
            what="grants",
        )

    def tokens_rise(self) -> bool:
        return all(each == sorted(set(each)) for each in self.tokens.values())


def test_failover(pair: Pair, key: str, threads: Callable[[], OtherThread]) -> None:
    """The primary is killed, the standby promoted: tokens rise, and nothing is lost."""
    failover = Failover(pair, key, threads)
    failover.run(lags=False)
    assert failover.tokens_rise()
    assert failover.lost == 0


def test_asynchronous_failover(
    pair: Pair, key: str, threads: Callable[[], OtherThread]
) -> None:
    """The control: a replica that nobody waits for loses what it hasn't heard of."""
    pair.ask("ALTER SYSTEM RESET synchronous_standby_names")
    pair.ask("SELECT pg_reload_conf()")
    eventually(lambda: not pair.is_synchronous(), what="the reload")
    failover = Failover(pair, key, threads)
    failover.run(lags=True)
    assert failover.lost > 0
    assert not failover.tokens_rise()


@pytest.mark.parametrize("end", ["pg_cancel_backend", "pg_terminate_backend"])
def test_standby_is_dead(
    pair: Pair, key: str, threads: Callable[[], OtherThread], end: str
) -> None:
    """A try hangs in its commit; if that wait is ended, the grant is not denied."""
    lock = distributed_lock(key, backend=ALIAS, timeout=0)
    with lock as lease:
        token = lease.fencing_token
    pair.standby.kill()
    holder, rival = threads(), threads()
    acquiring = holder.start(lock.acquire)
    eventually(pair.waiting, what="the wait for the standby")
    # Somebody has it, for all that others can tell.
    assert rival.start(lock.try_acquire).result(SLACK + 1) is None
    assert not acquiring.done()
    # What was committed here is granted, though no replica has it.
    pair.ask(f"SELECT {end}(%s)", pair.waiting()[0])
    lease = acquiring.result(DEADLINE)
    assert lease.held
    assert lease.fencing_token > token
    assert rival.do(lock.try_acquire) is None
    # The standby ends the wait of who gives it back.
    releasing = holder.start(lease.release)
    eventually(pair.waiting, what="the wait for the standby")
    assert not releasing.done()
    pair.standby.start()
    assert releasing.result(DEADLINE)
