"""Locks used in the middle of dblocks: by signal handlers, by the garbage collector."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper

from dblocks import Lease, LeaseLost, LockError, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.alarms import alarms
from tests.support.factories import AccountFactory, stored
from tests.support.fixtures import in_memory
from tests.support.nursery import Nursery
from tests.support.processes import inherited, names_of_databases
from tests.support.reentrant import PROGRAM
from tests.testapp.models import Account

pytestmark = pytest.mark.timeout(PROGRAM + 10)

Run = Callable[..., None]


@pytest.fixture(scope="module")
def loaded(django_db_setup: None) -> Iterator[Nursery]:
    """Keep the process from which programs are forked."""
    # Not measured: a handler would wait for coverage's mutex, which it interrupts.
    environment = inherited(("COVERAGE",))
    # With such a storm of signals a short lease is not renewed in time.
    environment |= {**names_of_databases(), "ZOOKEEPER_LEASE": "30"}
    with closing(Nursery(environment)) as loaded:
        yield loaded


@pytest.fixture
def run(backend: str, key: str, loaded: Nursery, tmp_path: Path) -> Run:
    """Run a program of ``tests.support.reentrant``, which must end well."""
    if backends[backend].has_table and in_memory():
        pytest.skip("a database in memory belongs to one process")

    def run(name: str, **arguments: Any) -> None:
        told = json.dumps({**arguments, "key": key, "backend": backend})
        errors = tmp_path / "errors"
        with errors.open("wb") as file:
            program = loaded.start(
                "tests.support.reentrant", name, told, stdout=file, stderr=file
            )
        try:
            status = program.wait(PROGRAM)
        finally:
            program.kill()
        # Where it stood, and what of.
        assert status == 0, errors.read_text()[-4000:]

    return run


@pytest.mark.parametrize("action", ["acquire_and_release", "release"])
@pytest.mark.parametrize("subject", ["take", "wait"])
def test_signal_at_any_line(run: Run, subject: str, action: str) -> None:
    """A handler's use of other locks neither hangs nor spoils what it interrupts."""
    run("sweep", subject=subject, action=action)


def test_signal_that_waits(run: Run) -> None:
    """A handler may wait for a lock, wherever it interrupts the use of another."""
    run("sweep", subject="take", action="wait_in_vain")


def test_signal_that_releases_what_is_waited_for(run: Run) -> None:
    """A handler may release the very lock that is being waited for."""
    run("sweep", subject="wait_for_release", action="release_awaited")


@pytest.mark.parametrize("subject", ["take", "wait"])
def test_collected_at_any_line(run: Run, subject: str) -> None:
    """So may the garbage collector, by closing a generator that holds a lock."""
    run("sweep", subject=subject, action="close_generator")


def test_alarms(run: Run) -> None:
    """Hundreds of real alarms, in the middle of locks' statements too, do no harm."""
    run("alarmed", rounds=300)


@pytest.mark.needs("has_table")
def test_alarms_at_a_taken_key(run: Run) -> None:
    """A taken key is never granted, whatever else a handler sends meanwhile."""
    if connection.vendor == "postgresql":
        pytest.skip("what a handler sends there in a statement's middle, hangs")
    run("alarmed_at_taken_key", rounds=300)


def test_alarm_that_comes_as_its_block_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """What signals these tests send, none of them reaches a later one."""
    setitimer, heard = signal.setitimer, []

    def late(timer: int, seconds: float) -> None:
        setitimer(timer, seconds)
        if not seconds:
            # It was on its way when the timer was stopped.
            signal.raise_signal(signal.SIGALRM)

    def again(frame: object) -> None:
        heard.append(frame)
        arm(60)

    before = signal.getsignal(signal.SIGALRM)
    monkeypatch.setattr(signal, "setitimer", late)
    with alarms(again) as arm:
        signal.raise_signal(signal.SIGALRM)
    assert len(heard) == 1
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is before


# Statements whose result is that of another one
#
# The driver for MySQL and MariaDB asks the connection, after a statement, for the
# number of rows and for the number that was announced. What runs in between on the
# same connection, as the handler of a signal does that arrived during the statement,
# leaves its own there.


class Interruptions:
    """Runs an action after the n-th statement that writes locks, before its result."""

    def __init__(self) -> None:
        self.action: Callable[[], object] | None = None
        self.left = 0
        self.happened = False

    def arm(self, action: Callable[[], object], number: int) -> None:
        """Let it happen after so many others."""
        self.action, self.left, self.happened = action, number, False

    def disarm(self) -> None:
        """Let nothing happen any more."""
        self.action = None

    def sent(self, query: bytes) -> None:
        """Note that a statement was carried out."""
        table = DistributedLock._meta.db_table.encode()
        writes = b"UPDATE `" in query or b"INSERT " in query or b"UPDATE (" in query
        if self.action is None or table not in query or not writes:
            return
        if self.left:
            self.left -= 1
            return
        action, self.action, self.happened = self.action, None, True
        action()


@pytest.fixture
def interruptions(committed: None, monkeypatch: pytest.MonkeyPatch) -> Interruptions:
    """Interrupt this thread's statements between their end and their result."""
    if connection.vendor != "mysql":
        pytest.skip("the other drivers keep a statement's result with its cursor")
    from MySQLdb.connections import Connection

    interruptions = Interruptions()
    query = Connection.query

    def interrupted(self: Any, sql: bytes) -> None:
        query(self, sql)
        interruptions.sent(bytes(sql))

    monkeypatch.setattr(Connection, "query", interrupted)
    return interruptions


class Meanwhile:
    """What a handler does."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.leases: list[Lease] = []
        # Tokens that differ from those of other keys, and a row to lock.
        for name in ("kept", "other"):
            for _ in range(3):
                distributed_lock(f"{key}:{name}").acquire(timeout=0).release()

    def acquire_and_release(self) -> None:
        """Take another key and give it back."""
        distributed_lock(f"{self.key}:other").acquire(timeout=0).release()

    def acquire(self) -> None:
        """Take another key."""
        self.leases.append(distributed_lock(f"{self.key}:kept").acquire(timeout=0))

    def acquire_new(self) -> None:
        """Take another key, which has no row yet."""
        self.leases.append(distributed_lock(f"{self.key}:new").acquire(timeout=0))

    def insert(self) -> None:
        """Insert a row of another table."""
        AccountFactory()

    def update_nothing(self) -> None:
        """Update no row at all."""
        Account.objects.filter(pk=-1).update(balance=1)


@pytest.fixture
def meanwhile(committed: None, key: str) -> Iterator[Meanwhile]:
    """Give back what handlers have taken."""
    meanwhile = Meanwhile(key)
    yield meanwhile
    for lease in meanwhile.leases:
        with suppress(LockError):
            lease.release()


ACTIONS = pytest.mark.parametrize(
    "action",
    ["acquire_and_release", "acquire", "acquire_new", "insert", "update_nothing"],
)

#: After how many other statements of the same call.
NUMBERS = pytest.mark.parametrize("number", [0, 1])


@pytest.mark.needs("has_table")
@ACTIONS
@NUMBERS
@pytest.mark.parametrize("owner", [None, "importer"], ids=["thread", "explicit owner"])
def test_taken_key_is_never_granted(
    key: str,
    interruptions: Interruptions,
    meanwhile: Meanwhile,
    action: str,
    number: int,
    owner: str | None,
) -> None:
    """A try for a key that somebody has is refused, whatever runs in its middle."""
    with hold_elsewhere(key) as theirs:
        interruptions.arm(getattr(meanwhile, action), number)
        lease = distributed_lock(key, owner=owner).try_acquire()
        interruptions.disarm()
        assert lease is None
        assert theirs.held
        row = stored(key)
        assert (row.owner, row.version) == (theirs.owner, theirs.fencing_token)


@pytest.mark.needs("has_table")
@ACTIONS
@NUMBERS
@pytest.mark.parametrize("known", [True, False], ids=["known key", "new key"])
@pytest.mark.parametrize("owner", [None, "importer"], ids=["thread", "explicit owner"])
def test_grant_has_its_own_token(
    key: str,
    interruptions: Interruptions,
    meanwhile: Meanwhile,
    action: str,
    number: int,
    known: bool,
    owner: str | None,
) -> None:
    """A grant has the token of its own row, whatever runs in its middle."""
    if known:
        distributed_lock(key).acquire(timeout=0).release()
    interruptions.arm(getattr(meanwhile, action), number)
    lease = distributed_lock(key, owner=owner).acquire(timeout=1)
    interruptions.disarm()
    row = stored(key)
    assert (row.owner, row.version) == (lease.owner, lease.fencing_token)
    # An explicit owner's may be counted one too high, until the lease is over.
    assert row.hold_count in ({1} if owner is None else {1, 2})
    assert lease.release() is True
    assert distributed_lock(key).locked() == (row.hold_count == 2)


@pytest.mark.needs("has_table")
@ACTIONS
def test_release_knows_its_own_result(
    key: str, interruptions: Interruptions, meanwhile: Meanwhile, action: str
) -> None:
    """A release says whether its own lease was held, whatever runs in its middle."""
    lease = distributed_lock(key).acquire(timeout=0)
    interruptions.arm(getattr(meanwhile, action), 0)
    assert lease.release() is True
    assert interruptions.happened
    assert not distributed_lock(key).locked()
    lost = distributed_lock(key).acquire(timeout=0)
    assert DistributedLock.objects.force_release(key)
    interruptions.arm(getattr(meanwhile, action), 0)
    assert lost.release() is False
    interruptions.disarm()
    assert lost.lost_reason == "forced"


@pytest.mark.needs("has_table")
@ACTIONS
def test_renewal_knows_its_own_result(
    key: str, interruptions: Interruptions, meanwhile: Meanwhile, action: str
) -> None:
    """A renewal says whether its own lease is held, whatever runs in its middle."""
    lease = distributed_lock(key, renew=False).acquire(timeout=0)
    interruptions.arm(getattr(meanwhile, action), 0)
    lease.renew()
    assert interruptions.happened
    assert DistributedLock.objects.force_release(key)
    interruptions.arm(getattr(meanwhile, action), 0)
    with pytest.raises(LeaseLost):
        lease.renew()
    interruptions.disarm()
    assert not lease.held


@pytest.mark.needs("has_table")
@pytest.mark.timeout(20)
def test_interrupted_in_djangos_mutex(
    committed: None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that interrupts Django's connection with its mutex locked may use locks.

    A signal's handler does, since Python 3.14 runs one there.
    """
    validate = BaseDatabaseWrapper.validate_thread_sharing
    inner: list[Lease | None] = []

    def interrupted(self: Any) -> None:
        if not inner:
            inner.append(None)
            with self._thread_sharing_lock:
                inner[0] = distributed_lock(f"{key}!", timeout=0).acquire()
        validate(self)

    for name in (key, f"{key}!"):
        distributed_lock(name).acquire(timeout=0).release()
    monkeypatch.setattr(BaseDatabaseWrapper, "validate_thread_sharing", interrupted)
    with distributed_lock(key, timeout=0) as outer:
        assert inner[0] is not None
        for lease in (outer, inner[0]):
            assert stored(lease.key).owner == lease.owner
        assert inner[0].release() is True
    assert not distributed_lock(key).locked()
    assert connection.connection is not None
