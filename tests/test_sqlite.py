"""Locks on SQLite, whose one writer every transaction shares, at all its settings."""

from __future__ import annotations

import errno
import gc
import os
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakValueDictionary

import pytest
from django.db import (
    DatabaseError,
    OperationalError,
    connection,
    connections,
    transaction,
)
from django.db.backends.sqlite3.base import DatabaseWrapper as SQLiteWrapper
from django.test.utils import CaptureQueriesContext

from dblocks import (
    Lease,
    LeaseLost,
    Lock,
    LockTimeout,
    distributed_lock,
    signals,
    transaction_lock,
)
from dblocks.backends.database import (
    file_locks,
    forking,
    one_writer,
    own_connections,
    permit_rows,
    several_rows,
    table,
)
from dblocks.backends.database.connections import run
from dblocks.backends.database.dialects.sqlite import BusyTimeout, SQLite
from dblocks.backends.gates import GateClosed
from dblocks.backends.values import PINNED_GRACE
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import move_clock
from tests.support.factories import AccountFactory, let_expire
from tests.support.fixtures import OtherThread
from tests.support.processes import Workers, in_forked_child
from tests.support.timing import DEADLINE, SLACK, STEP, eventually, scaled, takes
from tests.testapp.models import Account

pytestmark = pytest.mark.database_backend

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]


@pytest.fixture(autouse=True)
def file(committed: None) -> None:
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        pytest.skip("about a file of SQLite")


@contextmanager
def another_writer(seconds: float = DEADLINE) -> Iterator[None]:
    """Somebody else's transaction is writing until the block ends, or for so long."""
    began, over = threading.Event(), threading.Event()

    def write() -> None:
        name = connection.settings_dict["NAME"]
        with closing(sqlite3.connect(name, isolation_level=None)) as raw:
            raw.execute("BEGIN IMMEDIATE")
            began.set()
            over.wait(seconds)
            raw.execute("COMMIT")

    thread = threading.Thread(target=write)
    thread.start()
    assert began.wait(DEADLINE)
    try:
        yield
    finally:
        over.set()
        thread.join(DEADLINE)


def test_looking_inside_a_transaction_begins_none(lock: Locks) -> None:
    """locked() inside a block reads beside it, and leaves it able to write."""
    if connection.settings_dict["OPTIONS"].get("transaction_mode"):
        pytest.skip("a transaction that begins as a writer keeps the others out")
    with transaction.atomic():
        assert not lock().locked()
        with closing(sqlite3.connect(connection.settings_dict["NAME"])) as raw, raw:
            raw.execute("DELETE FROM testapp_account")
        AccountFactory(name="mine")
    assert Account.objects.filter(name="mine").exists()


@contextmanager
def only_reading() -> Iterator[None]:
    """What the block sends to the database writes nothing."""
    with CaptureQueriesContext(connection) as queries:
        yield
    statements = [query["sql"] for query in queries]
    assert statements
    assert all(sql.startswith("SELECT") for sql in statements), statements


# Who is refused, and who waits


def test_waiter_leaves_the_holders_transaction_alone(
    workers: Workers, key: str
) -> None:
    """A holder that has read can write, however many wait for its key."""
    account = AccountFactory()
    holder = workers.start("add_in_atomic_block", key=key, account=account.pk)
    holder.expect("read")
    waiters = [
        workers.start("count", key=key, account=account.pk, rounds=1, timeout=DEADLINE)
        for _ in range(2)
    ]
    for waiter in waiters:
        waiter.expect("ready")
        waiter.tell("go")
    triers = [workers.start("attempt", key=key) for _ in range(3)]
    for trier in triers:
        assert trier.expect("tried")["token"] is None
    time.sleep(0.3)
    holder.tell("write")
    holder.expect("committed")
    for waiter in waiters:
        waiter.until_done()
    account.refresh_from_db()
    assert account.balance == 3


@pytest.mark.parametrize("by_the_file", [True, False])
def test_who_is_refused_only_reads(
    lock: Locks,
    workers: Workers,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    by_the_file: bool,
) -> None:
    """Neither a try nor a wait that runs out writes while somebody has the key.

    Where the system has no locks that tell, one looks before one writes.
    """
    if not by_the_file:
        monkeypatch.setattr(file_locks, "AVAILABLE", False)
    holder = workers.start("hold", key=key)
    holder.expect("held")
    with only_reading():
        assert lock().try_acquire() is None
    with only_reading(), pytest.raises(LockTimeout):
        lock().acquire(timeout=0.3)
    holder.tell("release")
    holder.until_done()
    assert lock().acquire(timeout=0).release() is True


def test_who_is_refused_in_this_process_only_reads(
    lock: Locks, other: OtherThread, acquire: Leases
) -> None:
    """The same where another thread of this process has the key."""
    lease = other.do(acquire)
    with only_reading():
        assert lock().try_acquire() is None
    with only_reading(), pytest.raises(LockTimeout):
        lock().acquire(timeout=0.3)
    assert other.do(lease.release) is True


# How long anything takes


@pytest.mark.parametrize("timeout", [0, 0.5, 2])
def test_another_writer_counts_in_the_timeout(
    lock: Locks, key: str, timeout: float
) -> None:
    """The wait for the one writer ends with the caller's own, a try's in a second."""
    with another_writer(), takes(timeout, max(timeout, 0.5) + SLACK):
        assert lock().try_acquire(timeout=timeout) is None
    assert lock().acquire(timeout=0).release() is True


@pytest.mark.parametrize("own", [100, 60000])
def test_own_timeout_of_a_connection(lock: Locks, key: str, own: int) -> None:
    """The caller's timeout counts, whether the connection's is shorter or longer."""
    connection.close()
    try:
        for now in (100, own):
            with connection.cursor() as cursor:
                cursor.execute(f"PRAGMA busy_timeout = {now}")
            lock().acquire(timeout=DEADLINE).release()
        with another_writer(), takes(1.4, 1.5 + SLACK):
            assert lock().try_acquire(timeout=1.5) is None
        with another_writer(1.0), takes(0.3, 1.0 + SLACK):
            assert lock().acquire(timeout=DEADLINE).release() is True
    finally:
        connection.close()


@pytest.mark.parametrize("timeout", [0, 1.5])
def test_several_keys_beside_another_writer(
    key: str, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for it no longer than one key does, and tell that they timed out."""
    monkeypatch.setattr(SQLite, "patience", 2.5)
    keys = [f"{key}:{number}" for number in range(3)]
    distributed_lock(*keys).acquire().release()
    told = []

    def note(key: str, **facts: Any) -> None:
        told.append(key)

    signals.lock_timed_out.connect(note)
    try:
        with another_writer(), takes(2.4, 2.5 + SLACK):
            assert distributed_lock(*keys).try_acquire(timeout=timeout) is None
    finally:
        signals.lock_timed_out.disconnect(note)
    assert told == keys[:1]
    assert distributed_lock(*keys).acquire(timeout=0).release() is True


@pytest.mark.parametrize("at", range(1, 8))
def test_new_set_goes_to_somebody(key: str, other: OtherThread, at: int) -> None:
    """Of two that try for it, one has it, wherever others and a writer come between."""
    lock = distributed_lock(*(f"{key}:{number}" for number in range(2)), timeout=0)
    answers: list[Any] = []
    statements = 0

    with ExitStack() as writing:

        def come_between(execute: Any, *arguments: Any) -> Any:
            nonlocal statements
            statements += 1
            if statements == at:
                answers.append(other.do(lock.try_acquire))
                if answers == [None]:
                    writing.enter_context(another_writer())
            return execute(*arguments)

        with connection.execute_wrapper(come_between):
            answers.append(lock.try_acquire())
    had = [leases for leases in answers if leases is not None]
    assert len(had) == 1
    had[0].release()


def test_waits_for_another_writer(lock: Locks) -> None:
    """A free key is had as soon as the other's transaction is over."""
    with another_writer(1.0), takes(0.3, 1.0 + SLACK):
        lease = lock().acquire(timeout=DEADLINE)
    assert lease.release() is True


def test_release_waits_for_another_writer(acquire: Leases) -> None:
    """A release sits out a transaction that the driver's timeout would sit out."""
    lease = acquire(lease=30)
    with another_writer(2):
        assert lease.release() is True


def test_patience_is_left_as_found(lock: Locks, key: str, workers: Workers) -> None:
    """SQLite's own timeout is the caller's, whatever happened on the connection."""

    def patience() -> Any:
        with connection.cursor() as cursor:
            return cursor.execute("PRAGMA busy_timeout").fetchone()[0]

    before = patience()
    assert before > 0
    with lock():
        assert patience() == before
    with another_writer():
        assert lock().try_acquire() is None
    assert patience() == before
    # A signal handler that raises keeps the block from being left.
    bound = BusyTimeout(connection, 0.5)
    bound.__enter__()
    assert patience() == 500
    del bound
    assert patience() == before


def test_longest_timeout(lock: Locks) -> None:
    """However long the wait, SQLite is told of no more than it can count."""
    with lock(timeout=sys.float_info.max) as lease:
        assert lease.held


# The holder's own transactions


@pytest.mark.parametrize("others", [(), ("another",)])
@pytest.mark.parametrize("writes", [True, False])
def test_renewals_leave_the_holders_transaction_alone(
    key: str, writes: bool, others: tuple[str, ...]
) -> None:
    """A transaction that outlasts renewals can write, and its guard passes."""
    account = AccountFactory()
    lease = distributed_lock(key, *others, lease=scaled(2)).acquire(timeout=0)
    with transaction.atomic():
        balance = Account.objects.get(pk=account.pk).balance
        time.sleep(scaled(1))
        if writes:
            Account.objects.filter(pk=account.pk).update(balance=balance + 1)
        lease.guard()
    account.refresh_from_db()
    assert account.balance == int(writes)
    assert lease.release() is True


def test_renewals_find_the_gap(acquire: Leases) -> None:
    """A lease lives on among writers that leave hardly a gap."""
    lease = acquire(lease=scaled(2))
    over = threading.Event()

    def write() -> None:
        name = connection.settings_dict["NAME"]
        with closing(sqlite3.connect(name, timeout=30, isolation_level=None)) as raw:
            while not over.is_set():
                raw.execute("BEGIN IMMEDIATE")
                time.sleep(0.03)
                raw.execute("COMMIT")
                time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        time.sleep(scaled(4))
        assert lease.held
    finally:
        over.set()
        writer.join(DEADLINE)
    assert lease.release() is True


def test_renewals_connect_while_others_have_the_file(
    key: str, other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To turn WAL on, a new connection waits until the file is free for a moment."""
    if "init_command" not in connection.settings_dict["OPTIONS"]:
        pytest.skip("about WAL")
    backend, refused = backends["default"], list[OperationalError]()
    name, connect = connection.settings_dict["NAME"], SQLiteWrapper.get_new_connection

    def try_to_connect(self: SQLiteWrapper, params: Any) -> Any:
        try:
            return connect(self, params)
        except sqlite3.OperationalError as error:
            refused.append(error)
            raise

    monkeypatch.setattr(SQLiteWrapper, "get_new_connection", try_to_connect)

    def ask() -> object:
        with backend.renewal_session():
            return backend.read_all([key])

    connection.close()
    with closing(sqlite3.connect(name, isolation_level=None)) as raw:
        raw.execute("PRAGMA locking_mode = EXCLUSIVE")
        raw.execute("UPDATE testapp_account SET balance = 7")
        answer = other.start(ask)
        time.sleep(0.2)
    assert answer.result(DEADLINE) == backend.read_all([key])
    assert not refused


# The pessimistic form


def test_exclusive_transactions(
    key: str, lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a rollback journal they keep readers out, and must not wait for themselves.

    Nobody else changes anything meanwhile, so that they can look by themselves.
    """
    connection.ensure_connection()
    monkeypatch.setitem(vars(connections["default"]), "transaction_mode", "EXCLUSIVE")
    with takes(at_most=1), transaction.atomic():
        with transaction_lock(key, timeout=DEADLINE):
            AccountFactory()
        assert not lock(key).locked()
        assert DistributedLock.objects.for_update(key, nowait=True).key == key
    lease = lock(key).acquire()
    DistributedLock.objects.force_release(key)
    with takes(at_most=1), pytest.raises(LeaseLost), transaction.atomic():
        lease.guard()


def test_row_lock_waits_for_another_writer(key: str) -> None:
    """A transaction of its own waits for the writer, whatever its mode."""
    with another_writer(0.5), transaction_lock(key, timeout=DEADLINE):
        AccountFactory()
    assert Account.objects.count() == 1


def test_row_lock_waits_in_a_fresh_transaction(key: str) -> None:
    """The caller's transaction waits too, where it has not read yet."""
    if connection.transaction_mode == "IMMEDIATE":
        pytest.skip("such a transaction waits when it begins")
    locked = transaction_lock(key, timeout=DEADLINE)
    with another_writer(0.5), transaction.atomic(), locked:
        AccountFactory()
    assert Account.objects.count() == 1


def test_try_beside_a_row_lock_answers(
    lock: Locks, key: str, other: OtherThread
) -> None:
    """A key that a transaction has locked is told as taken within a second."""
    locked, over = threading.Event(), threading.Event()

    def hold() -> None:
        with transaction_lock(key):
            locked.set()
            over.wait(DEADLINE)

    holding = other.start(hold)
    try:
        assert locked.wait(DEADLINE)
        with takes(at_most=1 + SLACK / 2):
            assert lock().try_acquire() is None
    finally:
        over.set()
        holding.result(DEADLINE)


def test_row_locks_of_deferred_transactions_exclude_each_other(
    key: str, workers: Workers, other: OtherThread
) -> None:
    """Two that lock, read and write lose nothing and fail at nothing."""
    account = AccountFactory()

    def add(rounds: int) -> None:
        for _ in range(rounds):
            with transaction_lock(key, timeout=DEADLINE):
                balance = Account.objects.get(pk=account.pk).balance
                time.sleep(STEP / 5)
                Account.objects.filter(pk=account.pk).update(balance=balance + 1)

    adding = other.start(add, 20)
    add(20)
    adding.result(DEADLINE)
    account.refresh_from_db()
    assert account.balance == 40


# The queue


def queueing_threads() -> int:
    return sum(thread.name == "dblocks-queue" for thread in threading.enumerate())


@pytest.fixture
def queue() -> None:
    if not file_locks.AVAILABLE:
        pytest.skip("about a system with open-file-description locks")


def until_somebody_queues(key: str) -> None:
    """Wait for the first in the queue, who has the second of the key's bytes."""
    gate = file_locks.gate_of(connection, key)
    assert gate is not None
    descriptor = file_locks._Descriptor.take(gate._path)
    second = gate._byte + 1
    eventually(lambda: not descriptor.is_free(second), what="the first in the queue")
    descriptor.give_back()


@pytest.mark.usefixtures("queue")
def test_waiters_are_served_in_order(workers: Workers, key: str) -> None:
    """The first process that waits is served before those that come later."""
    holder = workers.start("hold", key=key)
    held = holder.expect("held")
    waiters = []
    for _ in range(3):
        waiter = workers.start("hold", key=key, timeout=DEADLINE, announced=True)
        waiter.expect("asks")
        waiters.append(waiter)
        until_somebody_queues(key)
    # The later ones have time to queue, too; who comes late can't overtake either.
    time.sleep(0.5)
    holder.tell("release")
    holder.until_done()
    # The kernel wakes all that stand behind the first, so that these may overtake.
    first = waiters[0].expect("held")
    waiters[0].tell("release")
    waiters[0].until_done()
    assert first["token"] == held["token"] + 1
    for waiter in waiters[1:]:
        waiter.tell("release")
    for waiter in waiters[1:]:
        waiter.until_done()


@pytest.mark.usefixtures("queue")
def test_waits_that_end_leave_one_thread(
    lock: Locks, workers: Workers, key: str
) -> None:
    """However many waits run out, one thread is left in the kernel's queue.

    It lets the next one in when it comes to its turn.
    """
    eventually(lambda: queueing_threads() == 0, what="the end of earlier tests' waits")
    holder = workers.start("hold", key=key)
    holder.expect("held")
    for _ in range(5):
        assert lock().try_acquire(timeout=0.05) is None
    assert queueing_threads() == 1
    holder.tell("release")
    holder.until_done()
    eventually(lambda: queueing_threads() == 0, what="the thread's end")
    assert lock().acquire(timeout=0).release() is True


@pytest.mark.usefixtures("queue")
def test_stopped_waiter_costs_the_grace(
    workers: Workers, lock: Locks, key: str
) -> None:
    """A waiter that was stopped at the head of the queue bars nobody."""
    holder = workers.start("hold", key=key)
    holder.expect("held")
    stopped = workers.start("hold", key=key, timeout=DEADLINE)
    until_somebody_queues(key)
    stopped.stop()
    holder.tell("release")
    holder.until_done()
    for _ in range(2):
        with takes(at_most=0.25 + SLACK):
            lease = lock().acquire(timeout=DEADLINE)
        assert lease.release() is True
    stopped.resume()
    stopped.expect("held")
    stopped.tell("release")
    stopped.until_done()


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("size", [2, one_writer.MOST_GATES + 1])
def test_several_keys_yield_to_the_queue(key: str, size: int) -> None:
    """Who wants several keys doesn't overtake the one that queues for one of them."""
    lock = distributed_lock(*(f"{key}:{number}" for number in range(size)))
    for name in (lock.keys[0], lock.keys[-1]):
        lock.acquire().release()
        gate = file_locks.gate_of(connection, str(name))
        assert gate is not None
        assert gate.try_enter()
        with takes(at_least=0.2):
            lock.acquire().release()
        gate.leave()


@pytest.mark.usefixtures("queue")
def test_many_keys_ask_the_kernel_once(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set with more keys than gates asks once whether anybody uses a gate."""
    lock = distributed_lock(*(f"{key}:{n}" for n in range(one_writer.MOST_GATES + 1)))
    lock.acquire().release()
    gate = file_locks.gate_of(connection, key)
    assert gate is not None
    # A thread that queued in an earlier test may only just have got its turn.
    eventually(lambda: gate.is_free(of_all=True), what="a file whose gates are free")
    asked = []
    call = file_locks._Descriptor._call

    def noted(descriptor: Any, command: int, *terms: int) -> bytes:
        asked.append(command)
        return call(descriptor, command, *terms)

    monkeypatch.setattr(file_locks._Descriptor, "_call", noted)
    lock.acquire().release()
    assert len(asked) == 1


@pytest.mark.usefixtures("queue")
def test_killed_holder_leaves_nothing(workers: Workers, lock: Locks, key: str) -> None:
    """The kernel frees what a killed process had; its lease lapses."""
    holder = workers.start("hold", key=key, lease=1)
    holder.expect("held")
    holder.kill()
    with takes(at_most=1 + SLACK):
        lease = lock().acquire(timeout=DEADLINE)
    assert lease.release() is True


@pytest.mark.usefixtures("queue")
def test_forked_child_keeps_no_lock(
    acquire: Leases, lock: Locks, workers: Workers, key: str
) -> None:
    """What the parent had of the file isn't freed, nor kept, by its child."""
    lease = acquire()
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os.close(writer)
        os.read(reader, 1)
        os._exit(0)
    os.close(reader)
    try:
        trier = workers.start("attempt", key=key)
        assert trier.expect("tried")["token"] is None
        assert lease.release() is True
        waiter = workers.start("hold", key=key, timeout=0)
        waiter.expect("held")
        waiter.tell("release")
        waiter.until_done()
    finally:
        os.close(writer)
        os.waitpid(child, 0)


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize("moved", [False, True])
def test_file_that_is_gone(
    lock: Locks, workers: Workers, key: str, moved: bool
) -> None:
    """To delete or move the file costs the order for a while, and no grant."""
    assert lock().acquire(timeout=0).release() is True
    name = Path(str(connection.settings_dict["NAME"]) + file_locks.SUFFIX)
    assert name.stat().st_size == 0
    holder = workers.start("hold", key=key)
    holder.expect("held")
    if moved:
        name.rename(name.with_suffix(".moved"))
    else:
        name.unlink()
    assert lock(key=f"{key}:2").acquire(timeout=0).release() is True
    assert name.exists()
    waiter = workers.start("hold", key=key, timeout=DEADLINE)
    assert lock().try_acquire() is None
    holder.tell("release")
    holder.until_done()
    waiter.expect("held")
    # This one has come since: for it, the file is there again.
    with only_reading():
        assert lock().try_acquire() is None
    waiter.tell("release")
    waiter.until_done()


def test_file_that_is_no_database(key: str, tmp_path: Path) -> None:
    """That is Django's error, not the driver's."""
    path = tmp_path / "garbage"
    path.write_bytes(b"x" * 4096)
    settings = {**connection.settings_dict, "NAME": str(path), "OPTIONS": {}}
    garbage = SQLiteWrapper(settings, "default")
    with closing(garbage), pytest.raises(DatabaseError, match="not a database"):
        run(garbage, table.read, key)


@pytest.mark.parametrize("what", ["transaction_lock", "guard"])
def test_error_that_ends_the_transaction(
    acquire: Leases, key: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """A transaction whose beginning SQLite has rolled back doesn't commit its end."""
    lease = acquire()

    def full(own: Any, *arguments: Any) -> Any:
        # As SQLite does with a rollback journal.
        own.connection.execute("ROLLBACK")
        raise OperationalError("database or disk is full")

    locking = transaction_lock(f"{key}:another")
    act = lease.guard if what == "guard" else locking.__enter__
    with transaction.atomic():
        AccountFactory(name="beginning")
        with monkeypatch.context() as patch:
            patch.setattr(table, "pin" if what == "guard" else "touch", full)
            with pytest.raises(OperationalError, match="full"):
                act()
        assert connection.needs_rollback
    assert not Account.objects.filter(name="beginning").exists()


@pytest.mark.usefixtures("queue")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files for others")
def test_file_that_root_makes(tmp_path: Path) -> None:
    """Whoever owns the database can open it; a file that was there is left as it is."""
    theirs = tmp_path / "theirs"
    theirs.touch()
    os.chown(theirs, 12345, 23456)
    file_locks._Descriptor(str(theirs))
    made = Path(f"{theirs}{file_locks.SUFFIX}")
    assert (made.stat().st_uid, made.stat().st_gid) == (12345, 23456)
    os.chown(made, 0, 0)
    file_locks._Descriptor(str(theirs))
    assert made.stat().st_uid == 0


@pytest.mark.usefixtures("queue")
def test_file_in_a_folder_that_a_group_shares(tmp_path: Path) -> None:
    """Whoever can write the database can write it, whatever the umask was."""
    shared = tmp_path / "shared"
    shared.touch()
    shared.chmod(0o664)
    umask = os.umask(0o077)
    try:
        file_locks._Descriptor(str(shared))
    finally:
        os.umask(umask)
    made = Path(f"{shared}{file_locks.SUFFIX}")
    assert made.stat().st_mode & 0o777 == 0o664


# Gates that are interrupted, or too many


@pytest.mark.usefixtures("queue")
def test_garbage_in_the_thread_that_queues(
    lock: Locks, workers: Workers, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A collection while that thread starts, of another gate too, stops nobody."""
    holder = workers.start("hold", key=key)
    holder.expect("held")
    start = file_locks._Asker._bootstrap_inner  # type: ignore[attr-defined]

    def collect(self: Any) -> None:
        gc.collect()
        start(self)

    monkeypatch.setattr(file_locks._Asker, "_bootstrap_inner", collect)
    gate: Any = file_locks.gate_of(connections["default"], f"{key}:other")
    gate.itself = gate
    del gate
    with takes(at_most=0.3 + SLACK):
        assert lock().try_acquire(timeout=0.3) is None
    holder.tell("release")
    holder.until_done()


def test_again_at_once_without_file_locks(
    lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nobody can queue, nobody is waited for."""
    monkeypatch.setattr(file_locks, "AVAILABLE", False)
    with takes(at_most=SLACK):
        for _ in range(10):
            assert lock().acquire(timeout=0).release() is True


def test_reading_under_two_locks(workers: Workers, key: str) -> None:
    """A transaction that only reads commits although others have written since."""
    account = AccountFactory()
    reader = workers.start("read_in_atomic_block", key=key, account=account.pk)
    reader.expect("read")
    other = distributed_lock(f"{key}:other").try_acquire()
    # Beside an open transaction only WAL lets others write, if it isn't a writer's.
    options = connection.settings_dict["OPTIONS"]
    is_wal = "WAL" in options.get("init_command", "")
    assert (other is not None) is (is_wal and "transaction_mode" not in options)
    if other is not None:
        other.release()
    reader.tell("go on")
    reader.expect("committed")
    reader.until_done()
    assert distributed_lock(key).acquire(timeout=0).release() is True


def test_busy_key_has_no_holder(lock: Locks, workers: Workers, key: str) -> None:
    """Where the file is busy and the key is free, no earlier holder is named."""
    workers.start("attempt", key=key).until_done()
    with another_writer(), pytest.raises(LockTimeout) as caught:
        lock().acquire(timeout=0)
    assert caught.value.holder == ""
    assert caught.value.acquired_at is None


def test_reentering_beside_another_writer(acquire: Leases, lock: Locks) -> None:
    """Who has the key enters it again, whoever writes."""
    lease = acquire()
    with another_writer():
        inner = lock().acquire(timeout=0)
        assert inner.fencing_token == lease.fencing_token
    assert inner.release() is True
    assert lease.held


@pytest.fixture
def without_readers(lock: Locks) -> Iterator[None]:
    """Somebody else's transaction keeps even readers out, except with WAL."""
    lock().acquire(timeout=0).release()
    name = connection.settings_dict["NAME"]
    connection.close()
    with closing(sqlite3.connect(name, isolation_level=None)) as raw:
        raw.execute("BEGIN EXCLUSIVE")
        yield
        raw.execute("ROLLBACK")
    with warnings.catch_warnings():
        # Where Django fails to connect, it leaves what it has opened.
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    assert lock().acquire(timeout=0).release() is True


@pytest.mark.usefixtures("without_readers")
@pytest.mark.parametrize("options", [{}, {"permits": 2}], ids=repr)
def test_beside_one_that_keeps_readers_out(lock: Locks, options: Any) -> None:
    """The key counts as taken, and no look outlasts the caller's wait."""
    with takes(at_most=1 + SLACK):
        assert lock(**options).try_acquire() is None
    with takes(2, 2 + SLACK), pytest.raises(LockTimeout):
        lock(**options).acquire(timeout=2)


@pytest.mark.usefixtures("without_readers")
@pytest.mark.filterwarnings("ignore:unclosed database:ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("own", [0.05, 0.1, 7])
def test_connecting_beside_one_that_keeps_readers_out(
    lock: Locks, own: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new connection whose first statement reads the file waits no longer."""
    if "init_command" in connection.settings_dict["OPTIONS"]:
        pytest.skip("WAL keeps no reader out")
    command = "PRAGMA synchronous = FULL; PRAGMA cache_size = 100"
    options = {"init_command": command, "timeout": own}
    for name, value in options.items():
        monkeypatch.setitem(connection.settings_dict["OPTIONS"], name, value)
    connection.close()
    with takes(at_most=1 + SLACK):
        assert lock().try_acquire() is None
    with takes(2, 2 + SLACK), pytest.raises(LockTimeout):
        lock().acquire(timeout=2)
    with takes(at_most=1 + SLACK), pytest.raises(LockTimeout):
        transaction_lock(lock().key, nowait=True).__enter__()
    assert connection.connection is None


@pytest.mark.parametrize("command", ["", "PRAGMA busy_timeout = 500"])
def test_connecting_leaves_the_timeout_as_configured(
    lock: Locks, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is on a connection that a lock has opened, as on Django's."""
    options = connection.settings_dict["OPTIONS"]
    commands = filter(None, [options.get("init_command"), command])
    monkeypatch.setitem(options, "init_command", "; ".join(commands))
    connection.close()
    connection.ensure_connection()
    ask = "PRAGMA busy_timeout"
    expected = connection.connection.execute(ask).fetchone()
    connection.close()
    assert lock().try_acquire().release()  # type: ignore[union-attr]
    assert connection.connection.execute(ask).fetchone() == expected


def test_readers_are_kept_out_during_a_wait(
    lock: Locks, acquire: Leases, other: OtherThread
) -> None:
    """Who waits for a key by then is told that it is taken."""
    acquire()
    other.do(connection.ensure_connection)
    name = connection.settings_dict["NAME"]
    with closing(sqlite3.connect(name, isolation_level=None)) as raw:
        waiting = other.start(lock().acquire, timeout=2)
        time.sleep(0.3)
        raw.execute("BEGIN EXCLUSIVE")
        with pytest.raises(LockTimeout):
            waiting.result(timeout=DEADLINE)
        raw.execute("ROLLBACK")


@pytest.mark.usefixtures("without_readers")
@pytest.mark.parametrize("joins", [True, False])
@pytest.mark.parametrize("options", [{"timeout": 0.5}, {"nowait": True}], ids=repr)
def test_row_lock_beside_one_that_keeps_readers_out(
    key: str, options: Any, joins: bool
) -> None:
    """The same, in the caller's transaction or in one of its own."""
    if joins and connection.transaction_mode == "IMMEDIATE":
        pytest.skip("such a transaction waits when it begins, and not for dblocks")
    with ExitStack() as block:
        if joins:
            block.enter_context(transaction.atomic())
        with takes(at_most=1 + SLACK), pytest.raises(LockTimeout):
            block.enter_context(transaction_lock(key, **options))


@pytest.fixture
def start_writer(file: None) -> Iterator[Callable[[], None]]:
    """Begin a transaction that sets a balance to 7, and waits for readers to commit."""
    if connection.settings_dict["OPTIONS"]:
        pytest.skip("about Django's own settings")
    AccountFactory()
    wrote = threading.Event()

    def write() -> None:
        name = connection.settings_dict["NAME"]
        with closing(sqlite3.connect(name, isolation_level=None)) as raw:
            raw.execute("BEGIN IMMEDIATE")
            raw.execute("UPDATE testapp_account SET balance = 7")
            wrote.set()
            raw.execute("PRAGMA busy_timeout = 60000")
            raw.execute("COMMIT")

    writer = threading.Thread(target=write)

    def start() -> None:
        writer.start()
        assert wrote.wait(DEADLINE)
        eventually(keeps_readers_out, what="the wait for readers")

    yield start
    writer.join(DEADLINE)


def keeps_readers_out() -> bool:
    """Does a transaction let no new reader in?"""
    name = connection.settings_dict["NAME"]
    with closing(sqlite3.connect(name, timeout=0)) as raw:
        try:
            raw.execute("SELECT COUNT(*) FROM testapp_account").fetchone()
        except sqlite3.OperationalError:
            return True
    return False


@pytest.mark.parametrize("automatic", [True, False])
def test_guard_beside_a_writer_that_waits_for_readers(
    lock: Locks, automatic: bool, start_writer: Callable[[], None]
) -> None:
    """Who can't verify, because others have the file, doesn't say the lock is lost."""
    refused = nullcontext() if automatic else pytest.raises(OperationalError)
    with refused, lock(atomic=automatic) as lease, transaction.atomic():
        # The writer can't commit before this reader has ended, and lets none in.
        assert Account.objects.get().balance == 0
        start_writer()
        if not automatic:
            lease.guard()
    assert lease.lost_reason is None
    eventually(lambda: not keeps_readers_out(), what="the writer's commit")
    assert Account.objects.get().balance == 7
    assert lock().acquire(timeout=0).release() is True


@pytest.mark.parametrize("reads", [True, False])
def test_inner_block_beside_another_writer(
    acquire: Leases,
    key: str,
    other: OtherThread,
    monkeypatch: pytest.MonkeyPatch,
    reads: bool,
) -> None:
    """What follows an inner block that can't verify is not committed after a loss."""
    if connection.settings_dict["OPTIONS"].get("transaction_mode"):
        pytest.skip("a transaction that begins as a writer keeps the others out")
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "timeout", 0.1)
    connection.close()
    lease = acquire(atomic=True, lease=600, renew=False)
    name, forced = connection.settings_dict["NAME"], list[bool]()
    with (
        closing(sqlite3.connect(name, isolation_level=None)) as raw,
        suppress(OperationalError),
        transaction.atomic(),
    ):
        with lease:
            if reads:
                Account.objects.count()
            raw.execute("BEGIN IMMEDIATE")
        raw.execute("ROLLBACK")
        with suppress(OperationalError):
            forced.append(other.do(DistributedLock.objects.force_release, key))
        AccountFactory(name="mine")
    connection.close()
    assert Account.objects.filter(name="mine").exists() is not any(forced)


def test_overdue_beside_a_writer_that_waits_for_readers(
    lock: Locks, key: str, other: OtherThread, start_writer: Callable[[], None]
) -> None:
    """An overdue lock that nobody has taken counts as held: nobody can take it now."""
    with lock(atomic=True, renew=False) as lease:
        other.do(let_expire, key)
        assert Account.objects.get().balance == 0
        start_writer()
    assert lease.lost_reason is None


@pytest.mark.parametrize("automatic", [True, False])
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "forced"])
def test_lost_beside_a_writer_that_waits_for_readers(
    lock: Locks,
    key: str,
    other: OtherThread,
    automatic: bool,
    taken: bool,
    start_writer: Callable[[], None],
) -> None:
    """A lock that was lost before the transaction read anything is seen to be lost."""
    with (  # noqa: PT012
        pytest.raises(LeaseLost) as lost,
        lock(atomic=automatic) as lease,
        transaction.atomic(),
    ):
        assert other.do(DistributedLock.objects.force_release, key)
        new = other.do(lock().acquire) if taken else None
        assert Account.objects.get().balance == 0
        start_writer()
        if not automatic:
            lease.guard()
    assert lost.value.reason == lease.lost_reason == ("taken" if taken else "forced")
    if new is not None:
        assert other.do(new.release)


@pytest.mark.usefixtures("queue")
@pytest.mark.parametrize(("keys", "permits"), [(1, 1), (2, 1), (1, 2)])
def test_key_that_is_being_taken(
    key: str,
    keys: int,
    permits: int,
    threads: Callable[[], OtherThread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Who comes between another one's look and grant doesn't write after it."""
    names = [f"{key}:{number}" for number in range(keys)]
    lock = distributed_lock(*names, permits=permits, timeout=0)
    for lease in [lock.acquire() for _ in range(permits)]:
        lease.release()
    move_clock(60)
    monkeypatch.setattr(one_writer, "PAUSES", [STEP] * 1000)
    entered, wrote = threading.Barrier(permits + 1, timeout=DEADLINE), set[object]()
    # Who finds another writer leaves its gate and begins again.
    writes = threading.RLock()

    def slowly(take: Callable[..., Any]) -> Callable[..., Any]:
        def taken(*args: Any) -> Any:
            me = threading.current_thread()
            if me is not threading.main_thread() and me not in wrote:
                entered.wait()
                time.sleep(5 * STEP)
            with writes:
                wrote.add(me)
                return take(*args)

        return taken

    def alone(read: Callable[..., Any]) -> Callable[..., Any]:
        def apart(*args: Any) -> Any:
            # Without WAL, a reader makes a writer begin again, too.
            with writes:
                return read(*args)

        return apart

    for module in (table, permit_rows, several_rows):
        monkeypatch.setattr(module, "take", slowly(module.take))
    for name in ("read", "read_all"):
        monkeypatch.setattr(table, name, alone(getattr(table, name)))
    others = [threads() for _ in range(permits)]
    leases = [other.start(lock.acquire) for other in others]
    entered.wait()
    assert lock.try_acquire() is None
    assert threading.main_thread() not in wrote
    for other, lease in zip(others, leases, strict=True):
        assert other.do(lease.result(DEADLINE).release) is True


@pytest.mark.usefixtures("queue")
def test_gate_that_is_garbage(tmp_path: Path) -> None:
    """A descriptor that is given back while it is collected stays open."""

    class Gate:
        def __del__(self) -> None:
            self.descriptor.give_back()

    # No other test gives back a descriptor of this file.
    database = tmp_path / "database"
    database.touch()
    path = str(database)
    gate: Any = Gate()
    gate.descriptor = file_locks._Descriptor(path)
    gate.descriptor.gate = gate
    del gate
    gc.collect()
    [kept] = file_locks._idle[path]
    assert kept.is_free(0)


@pytest.mark.usefixtures("queue")
def test_descriptor_that_is_taken_while_it_is_collected(tmp_path: Path) -> None:
    """Whoever takes a descriptor out again, before the collection is over, keeps it."""
    database = tmp_path / "database"
    database.touch()
    taken: list[file_locks._Descriptor] = []

    class Gate:
        def __del__(self) -> None:
            self.descriptor.give_back()
            taken.append(file_locks._Descriptor.take(str(database)))

    gate: Any = Gate()
    gate.descriptor = file_locks._Descriptor(str(database))
    gate.descriptor.gate = gate
    del gate
    gc.collect()
    [descriptor] = taken
    assert descriptor.lock(0)


@pytest.mark.usefixtures("queue")
def test_interrupt_while_a_gate_is_dropped(
    tmp_path: Path, open_files: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever it comes, the kernel's lock and the file go with the gate."""
    database = tmp_path / "database"
    database.touch()
    # It is reported where nothing can catch it.
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    first = file_locks.FileLock(str(database), "first")
    assert first.try_enter()
    first.leave()
    before, calls, left = open_files(), 0, 0

    def interrupt(frame: FrameType, event: str, called: Any) -> None:
        nonlocal left
        # Python looks for signals when it has entered a function or called C code.
        looks = event in {"call", "c_return"}
        if looks and frame.f_code.co_filename == file_locks.__file__:
            left -= 1
            if not left:
                raise KeyboardInterrupt

    while left <= 0:
        calls += 1
        gate = file_locks.FileLock(str(database), f"key {calls}")
        byte = gate._byte
        assert gate.try_enter()
        left = calls
        with suppress(KeyboardInterrupt):
            sys.setprofile(interrupt)
            del gate
        sys.setprofile(None)
        probe = file_locks._Descriptor(str(database))
        assert probe.is_free(byte), calls
        probe.close()
        assert open_files() <= before, calls
    assert calls > 3


# A queue that can't be had: the waiter looks from time to time instead


GateFor = Callable[[str], file_locks.FileLock]


@pytest.fixture
def gate_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[GateFor]:
    """Return a gate of a key that somebody has entered, as if by another process."""
    entered: list[file_locks.FileLock] = []

    def make(key: str) -> file_locks.FileLock:
        taken = file_locks.gate_of(connection, key)
        gate = file_locks.gate_of(connection, key)
        assert taken is not None
        assert gate is not None
        assert taken.try_enter()
        gate.taken = taken  # type: ignore[attr-defined]
        entered.append(taken)
        return gate

    yield make
    monkeypatch.undo()
    for taken in entered:
        taken.leave()


def queues_for(gate: file_locks.FileLock) -> bool:
    """Tell whether a thread stands in the kernel's queue for this gate's key."""
    place = gate._path, gate._byte
    threads = threading.enumerate()
    return any(getattr(thread, "_place", None) == place for thread in threads)


@pytest.mark.usefixtures("queue")
def test_write_without_the_gate(
    gate_for: GateFor, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It doesn't wait inside SQLite, where it would sit out a hold of the gate's."""
    waits: list[int] = []
    take = table.take

    def noted(own: Any, request: Any) -> Any:
        waits.append(own.connection.execute("PRAGMA busy_timeout").fetchone()[0])
        return take(own, request)

    monkeypatch.setattr(table, "take", noted)
    monkeypatch.setattr(one_writer, "PAUSES", [])
    gate_for(key)
    with another_writer():
        assert distributed_lock(key, timeout=0).try_acquire() is None
    assert len(waits) > 1
    assert set(waits) == {0}
    assert distributed_lock(key, timeout=0).acquire().release()


@pytest.mark.usefixtures("queue")
def test_no_thread_to_queue(
    gate_for: GateFor, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no thread can be started, the gate is closed and nothing is left open."""

    def fail(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    gate = gate_for(key)
    monkeypatch.setattr(file_locks._Asker, "start", fail)
    with pytest.raises(GateClosed):
        gate.enter(1)
    assert (gate._path, gate._byte) not in file_locks._askers
    assert not gate.held


@pytest.mark.usefixtures("queue")
def test_too_many_queues(
    gate_for: GateFor, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where as many threads queue as may."""
    monkeypatch.setattr(file_locks, "MOST_ASKERS", 0)
    gate = gate_for(key)
    with pytest.raises(GateClosed):
        gate.enter(1)
    assert not gate.held


@pytest.fixture
def most(queue: None, monkeypatch: pytest.MonkeyPatch) -> int:
    """How many files the queue may have open: five more than are in use."""
    file_locks._idle.clear()
    most = len(file_locks._File.all_open) + 5
    monkeypatch.setattr(file_locks, "MOST_OPEN", most)
    return most


@pytest.mark.parametrize("permits", [1, 20])
def test_many_keys_leave_files_to_open(key: str, permits: int, most: int) -> None:
    """Who holds many keys, one by one, goes on without gates, and excludes others."""
    with ExitStack() as stack:
        for number in range(20):
            name = key if permits > 1 else f"{key}:{number}"
            owner = f"owner {number}"
            held = distributed_lock(name, owner=owner, permits=permits, timeout=0)
            stack.enter_context(held)
        assert len(file_locks._File.all_open) <= most
        last = distributed_lock(name, permits=permits, timeout=STEP)
        with pytest.raises(LockTimeout):
            last.acquire()
    assert last.acquire().release()


def test_idle_descriptors_of_other_files(key: str, tmp_path: Path, most: int) -> None:
    """They keep nobody out of the queue: they are closed when others need them."""
    for number in range(5):
        other = tmp_path / str(number)
        other.touch()
        gate = file_locks.FileLock(str(other), key)
        assert gate.try_enter()
        gate.leave()
    mine = file_locks.gate_of(connection, key)
    assert mine is not None
    assert mine.try_enter()
    mine.leave()
    assert len(file_locks._File.all_open) < most


@pytest.mark.usefixtures("queue")
def test_two_gates_of_a_key(gate_for: GateFor, key: str) -> None:
    """Of one process one gate queues for a key; another is told so at once."""
    first = gate_for(key)
    second = file_locks.gate_of(connections["default"], key)
    assert second is not None
    first.enter(0)
    with takes(at_most=SLACK), pytest.raises(GateClosed):
        second.enter(DEADLINE)
    first.taken.leave()  # type: ignore[attr-defined]
    eventually(lambda: first.held, what="the turn of the first")
    first.leave()


@pytest.mark.usefixtures("queue")
def test_file_that_cant_be_locked(
    gate_for: GateFor, key: str, lock: Locks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a file system without locks the gate is closed, and locks work without it."""

    def fail(*arguments: Any) -> bytes:
        raise OSError(errno.ENOLCK, "No locks available")

    gate = gate_for(key)
    monkeypatch.setattr(file_locks._Descriptor, "_call", fail)
    assert gate.is_free()
    with pytest.raises(GateClosed):
        gate.try_enter()
    with lock(f"{key}:2") as lease:
        assert lease.held


@pytest.mark.usefixtures("queue")
def test_lock_that_fails_while_it_is_waited_for(
    gate_for: GateFor, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread whose wait for the file fails ends, and hands nothing on."""
    lock_byte = file_locks._Descriptor.lock

    def fail(self: Any, byte: int, *, wait: bool = False) -> bool:
        if wait:
            raise OSError(errno.ENOLCK, "No locks available")
        return lock_byte(self, byte)

    gate = gate_for(key)
    monkeypatch.setattr(file_locks._Descriptor, "lock", fail)
    gate.enter(0.2)
    eventually(lambda: not queues_for(gate), what="the thread's end")
    assert not gate.held


@pytest.mark.usefixtures("queue")
def test_set_beside_a_gate_that_somebody_has_entered(key: str) -> None:
    """Nobody has a key whose gate somebody has: a try waits for that for an instant."""
    keys = [f"{key}:{name}" for name in "ab"]
    distributed_lock(*keys).acquire().release()
    gate = file_locks.gate_of(connection, keys[0])
    assert gate is not None
    # Who has the gate of a key that was released just now is about to take it.
    time.sleep(PINNED_GRACE)
    assert gate.try_enter()
    try:
        assert not distributed_lock(*keys).locked()
        leases = distributed_lock(*keys, timeout=0).acquire()
    finally:
        gate.leave()
    assert leases.release()


@pytest.mark.parametrize("state", ["held", "held here", "cooling"])
@pytest.mark.parametrize("rows", ["without rows", "with rows"])
def test_refused_set_writes_nothing(
    key: str, other: OtherThread, workers: Workers, state: str, rows: str
) -> None:
    """Who is refused one of several keys has only read, and knows which."""
    keys = [f"{key}:{name}" for name in "abc"]
    if rows == "with rows":
        distributed_lock(*keys).acquire().release()
    match state:
        case "held":
            workers.start("hold", key=keys[1]).expect("held")
        case "held here":
            lease = other.do(distributed_lock(keys[1], lease=60).acquire)
        case _:
            distributed_lock(keys[1], hold_at_least=60).acquire().release()
    before = list(DistributedLock.objects.values_list("key", "version"))
    # Nobody has the gate of a key that cools: the write is tried, and changes nothing.
    looking = nullcontext if state == "cooling" else only_reading
    with looking(), pytest.raises(LockTimeout) as refused:
        distributed_lock(*keys, timeout=0).acquire()
    with looking():
        assert distributed_lock(*keys).try_acquire() is None
    assert refused.value.key == keys[1]
    assert refused.value.retry_after > 0
    assert list(DistributedLock.objects.values_list("key", "version")) == before
    if state == "held here":
        other.do(lease.release)


FORKS_AND_ENDS = """
import os, subprocess, sys, time
sys.path[:0] = {path!r}
from django.conf import settings
settings.configure(
    INSTALLED_APPS=["dblocks"],
    DATABASES={{"default": {{
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": {file!r},
        "OPTIONS": {{"init_command": "PRAGMA journal_mode=WAL"}},
    }}}},
)
import django
django.setup()
from django.core.management import call_command
from django.db import connections
from dblocks import distributed_lock
from dblocks.holding import renewal

if len(sys.argv) > 1:
    distributed_lock("other").acquire().release()
    print("ready", flush=True)
    if sys.argv[1] == "stays":
        sys.stdin.readline()
        print(distributed_lock("key").try_acquire() is not None, flush=True)
    sys.exit()
call_command("migrate", verbosity=0)
renewal.LINGER = 0.2 if {rests} else renewal.LINGER
for generation in range({forks}):
    with distributed_lock("key", lease={lease}):
        time.sleep({lease} * 2 / 3)  # It is renewed, on a connection of dblocks' own.
    time.sleep({rests})
    if os.fork():
        os._exit(0)
{closes}
time.sleep(0.2)
this = [sys.executable, __file__]
subprocess.run([*this, "goes"], stdout=subprocess.DEVNULL)
stays = subprocess.Popen(
    [*this, "stays"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
stays.stdout.readline()
lease = distributed_lock("key").acquire()
print("taken twice:", stays.communicate("go")[0].strip(), lease.held, flush=True)
"""


@pytest.mark.parametrize(
    ("closes", "rests", "forks"),
    [
        ("connections.close_all()", 0, 1),
        ("", 0, 1),
        # The thread that renewed has ended, and closed its connection.
        ("", 1, 1),
        ("", 0, 2),
    ],
)
def test_child_of_a_process_that_has_ended(
    tmp_path: Path, closes: str, rests: int, forks: int
) -> None:
    """A daemon, whether or not it closes Django's, shares the file with others."""
    script = tmp_path / "daemon.py"
    file = str(tmp_path / "db.sqlite3")
    told = {"path": sys.path, "file": file, "closes": closes}
    told |= {"rests": rests, "forks": forks, "lease": scaled(1.0)}
    script.write_text(FORKS_AND_ENDS.format(**told))
    command = [sys.executable, "-W", "ignore", str(script)]
    # The pipe is at its end when the daemon is, too.
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "taken twice: False True\n", done.stderr


@pytest.mark.parametrize("closes", [False, True])
def test_fork_beside_a_thread_that_uses_the_file(
    other: OtherThread, closes: bool
) -> None:
    """Closing might wait for ever for what that thread has of SQLite's."""
    connection.ensure_connection()
    other.do(DistributedLock.objects.exists)
    if closes:
        # It may be about to connect again.
        other.do(lambda: connection.close())
    assert in_forked_child(lambda: connection.connection is not None) is True


def test_fork_after_a_thread_that_used_the_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has closed its connection and ended: it has nothing of SQLite's any more."""
    connection.ensure_connection()
    # Apart from what threads of other tests may have left open.
    mine = connections["default"]
    monkeypatch.setattr(forking, "_files", WeakValueDictionary({id(mine): mine}))

    def use() -> None:
        DistributedLock.objects.exists()
        connection.close()

    thread = threading.Thread(target=use)
    gc.disable()
    try:
        thread.start()
        thread.join(DEADLINE)
        assert in_forked_child(lambda: connection.connection is None) is True
    finally:
        gc.enable()


def test_fork_while_a_renewal_writes(other: OtherThread) -> None:
    """The child doesn't have for ever what that thread had of the file's locks."""
    writing = threading.Event()

    def write(connection: Any) -> None:
        connection.connection.execute("BEGIN IMMEDIATE")
        writing.set()
        time.sleep(20 * STEP)
        connection.connection.execute("ROLLBACK")

    def can_write() -> bool:
        name = connection.settings_dict["NAME"]
        with closing(sqlite3.connect(name, isolation_level=None)) as raw:
            raw.execute("BEGIN IMMEDIATE")
        return True

    running = other.start(lambda: run(connections["default"], write))
    assert writing.wait(DEADLINE)
    assert in_forked_child(can_write) is True
    running.result(timeout=DEADLINE)


def test_fork_while_connections_come_and_go(other: OtherThread) -> None:
    """Looking for those of ended threads doesn't fail, or no fork would wait."""
    made = [own_connections.separate_connection("default") for _ in range(300)]
    for each in made:
        forking._note(each)
    over = threading.Event()

    def open_and_close() -> None:
        while not over.is_set():
            forking.forget(made[0])
            forking._note(made[0])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        running = other.start(open_and_close)
        for _ in range(300):
            forking._forget_ended()
    finally:
        sys.setswitchinterval(interval)
        over.set()
        for each in made:
            own_connections.close(each)
    running.result(timeout=DEADLINE)


def test_fork_while_a_connection_is_closed(
    other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last one to be closed has the whole file locked, to empty its log."""
    closing_it = threading.Event()
    close = SQLite.close

    def slowly(self: SQLite, own: Any) -> None:
        if own is separate:
            own.connection.execute("BEGIN EXCLUSIVE")
            closing_it.set()
            time.sleep(20 * STEP)
        close(self, own)

    def can_write() -> bool:
        name = connection.settings_dict["NAME"]
        with closing(sqlite3.connect(name, isolation_level=None)) as raw:
            raw.execute("BEGIN IMMEDIATE")
        return True

    separate = own_connections.separate_connection("default")
    separate.ensure_connection()
    monkeypatch.setattr(SQLite, "close", slowly)
    running = other.start(lambda: own_connections.close(separate))
    assert closing_it.wait(DEADLINE)
    assert in_forked_child(can_write) is True
    running.result(timeout=DEADLINE)


def test_nothing_begins_while_a_thread_forks(
    other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What would be in SQLite at that moment waits until the fork is over."""
    some_thread = -1
    monkeypatch.setattr(forking, "_forking", {some_thread})
    running = other.start(lambda: run(connections["default"], lambda connection: 7))
    time.sleep(5 * STEP)
    assert not running.done()
    forking._forking.clear()
    assert running.result(timeout=DEADLINE) == 7
