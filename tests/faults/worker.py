"""Processes by the dozen: ``python -m tests.faults.worker`` forks one per program.

A line ``{"word": "fork", "program": NAME, "who": N, ...}`` makes a child that runs a
program and tells its events, each with its ``who``, on this process's own output.
Children get no words: they begin at a moment by ``time.monotonic()`` and end by
themselves, at the latest when this process does. It has no connection and no thread of
its own, so that nothing is inherited by accident.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import django
from django.db import (
    DatabaseError,
    InterfaceError,
    connection,
    connections,
    transaction,
)
from django.db.models import F

WHO = 0


def emit(event: str, **data: Any) -> None:
    """Write one event; lines of several processes don't mix, they are short."""
    data = {"event": event, "who": WHO, "at": time.monotonic(), **data}
    os.write(1, (json.dumps(data) + "\n").encode())


def wait_until(moment: float) -> None:
    """Wait until a moment by the clock that all processes share."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


@contextmanager
def granted(key: str, timeout: float = 0, **options: Any) -> Iterator[Any]:
    """Hold a key and tell when it was granted and released; yields the lease."""
    from dblocks import distributed_lock

    before = time.monotonic()
    lease = distributed_lock(key, **options).try_acquire(timeout)
    after = time.monotonic()
    if lease is None:
        yield None
        return
    emit("grant", key=key, token=lease.fencing_token, before=before, after=after)
    try:
        yield lease
    finally:
        before = time.monotonic()
        with suppress(DatabaseError):
            if lease.release():
                emit("release", key=key, token=lease.fencing_token, before=before)


def observe(lease: Any) -> bool:
    """Tell whether the lease says that it is held, if it does."""
    before = time.monotonic()
    if held := bool(lease.held):
        emit("held", key=lease.key, token=lease.fencing_token, before=before)
    return held


def contend(
    keys: list[str],
    until: float,
    seed: int,
    start: float = 0.0,
    rounds: int = 1_000_000,
    hold: float = 0.002,
    isolation: str | None = None,
    nested: bool = False,
    stubborn: bool = False,
    **options: Any,
) -> None:
    """Take and give back keys in random order until a moment, or so many times."""
    chance = random.Random(seed)
    if isolation is not None:
        set_isolation(isolation)
    connection.ensure_connection()
    wait_until(start)
    granted_times = 0
    while granted_times < rounds and time.monotonic() < until:
        key = chance.choice(keys)
        if stubborn:
            try:
                with granted(key, **options) as lease:
                    if lease is not None:
                        observe(lease)
                        granted_times += 1
            except DatabaseError:
                trace = traceback.format_exc()
                connecting = "in get_new_connection" in trace
                emit("database", connecting=connecting, trace=trace[-6000:])
                time.sleep(0.05)
                connections.close_all()
            continue
        if nested:
            with transaction.atomic():
                connection.cursor().execute("SELECT 1")
                with granted(key, **options) as lease:
                    if lease is not None:
                        observe(lease)
                        granted_times += 1
            continue
        with granted(key, **options) as lease:
            time.sleep(chance.uniform(0, hold))
            if lease is not None:
                observe(lease)
                granted_times += 1


def set_isolation(level: str) -> None:
    """Let this process's transactions, and those of its other connections, have it."""
    config = connections.settings["default"]
    if connection.vendor == "postgresql":
        import psycopg

        level = psycopg.IsolationLevel[level.upper().replace(" ", "_")]
    config["OPTIONS"] = {**config["OPTIONS"], "isolation_level": level}
    connections.close_all()
    del connections["default"]


def update(
    key: str,
    account: int,
    mode: str,
    until: float,
    seed: int,
    window: float = 0.02,
    **options: Any,
) -> None:
    """Add one to a balance again and again, by a read, a pause and a write.

    ``mode`` is ``plain`` (nothing but the lease), ``checked`` (the lease is asked just
    before the write), ``guard`` (in a transaction that ends with the guard) or
    ``atomic`` (all of it in the lock's own transaction).
    """
    from dblocks import LeaseLost
    from tests.testapp.models import Account

    chance = random.Random(seed)
    rows = Account.objects.filter(pk=account)
    enough: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: enough.append(signum))
    while not enough and time.monotonic() < until:
        try:
            if mode == "atomic":
                atomically(key, rows, chance.uniform(0, window), options)
                continue
            with granted(key, **options) as lease:
                if lease is None:
                    continue
                balance = rows.get().balance
                emit("inside", key=key, token=lease.fencing_token)
                time.sleep(chance.uniform(0, window))
                before = time.monotonic()
                if mode == "guard":
                    with transaction.atomic():
                        rows.update(balance=balance + 1)
                        lease.guard()
                elif mode == "checked":
                    lease.check()
                    rows.update(balance=balance + 1)
                else:
                    rows.update(balance=balance + 1)
                emit("write", key=key, token=lease.fencing_token, before=before)
        except LeaseLost as error:
            emit("refused", key=key, reason=error.reason)
        except DatabaseError as error:
            emit("database", key=key, message=str(error)[:200])


def atomically(key: str, rows: Any, pause: float, options: dict[str, Any]) -> None:
    from dblocks import LockTimeout, distributed_lock

    timeout = options.get("timeout", 0)
    rest = {name: value for name, value in options.items() if name != "timeout"}
    before = time.monotonic()
    try:
        with distributed_lock(key, atomic=True, timeout=timeout, **rest) as lease:
            token = lease.fencing_token
            after = time.monotonic()
            emit("grant", key=key, token=token, before=before, after=after)
            balance = rows.get().balance
            emit("inside", key=key, token=token)
            time.sleep(pause)
            rows.update(balance=balance + 1)
            before = time.monotonic()
        emit("write", key=key, token=token, before=before)
    except LockTimeout:
        pass


def hold(
    key: str,
    until: float,
    timeout: float = 0,
    account: int | None = None,
    **options: Any,
) -> None:
    """Hold a key until a moment; say at once when the loss is announced.

    Each renewal is told, with the time that was left when its answer came. With an
    ``account`` a guarded write is tried after the loss.
    """
    with granted(key, timeout, **options) as lease:
        if lease is None:
            return
        lost = threading.Event()
        token = lease.fencing_token

        def announce(lease: Any) -> None:
            emit("lost", key=key, token=token, reason=lease.lost_reason)
            lost.set()

        lease.on_lost(announce)
        left = lease.remaining()
        while time.monotonic() < until and not lost.is_set():
            observe(lease)
            lost.wait(0.02)
            before, left = left, lease.remaining()
            if left > before:
                emit("renewed", key=key, left=before)
        if account is not None and lost.is_set():
            emit("guarded", key=key, token=token, refused=refuses(lease, account))


def refuses(lease: Any, account: int) -> bool:
    """Tell whether the guard refuses a write."""
    from dblocks import LeaseLost
    from tests.testapp.models import Account

    try:
        with transaction.atomic():
            Account.objects.filter(pk=account).update(balance=F("balance") + 1)
            lease.guard()
    except LeaseLost:
        return True
    return False


def wait(key: str, timeout: float, hold: float = 0.0, **options: Any) -> None:
    """Wait for a key, take it, give it back."""
    with granted(key, timeout, **options):
        time.sleep(hold)


def wait_in_threads(
    key: str,
    timeout: float,
    threads: int,
    start: float,
    given_back: float,
    **options: Any,
) -> None:
    """Let threads wait for one key, and count the statements that this costs.

    ``given_back``: the moment until which nobody can have it. The first second, in
    which they come and connect, isn't counted.
    """
    from django.db.backends.signals import connection_created

    counts = [0]

    def count(execute: Any, *args: Any) -> Any:
        counts[0] += 1
        return execute(*args)

    def created(connection: Any, **kwargs: Any) -> None:
        if count not in connection.execute_wrappers:
            connection.execute_wrappers.append(count)

    connection_created.connect(created)

    def one() -> None:
        wait(key, timeout, **options)
        connections.close_all()

    wait_until(start)
    crowd = [threading.Thread(target=one) for _ in range(threads)]
    for thread in crowd:
        thread.start()
    wait_until(start + 1)
    began, before = time.monotonic(), counts[0]
    wait_until(given_back)
    spent = counts[0] - before
    emit("statements", count=spent, seconds=time.monotonic() - began)
    for thread in crowd:
        thread.join()


def cycle(key: str, start: float, until: float, pause: float) -> None:
    """Take and give back a key that nobody else wants, and tell how long that took."""
    from dblocks import distributed_lock

    lock = distributed_lock(key, timeout=0)
    with lock:
        pass
    wait_until(start)
    took = []
    while time.monotonic() < until:
        began = time.monotonic()
        with lock:
            pass
        took.append(round(1e6 * (time.monotonic() - began)))
        time.sleep(pause)
    for number in range(0, len(took), 300):
        # One event must fit into one write to the pipe.
        emit("took", microseconds=took[number : number + 300])


def create(keys: list[str], starts: list[float], **options: Any) -> None:
    """Race for one new key after another, each at its moment, and keep the keys."""
    from dblocks import distributed_lock

    connection.ensure_connection()
    for key, start in zip(keys, starts, strict=True):
        wait_until(start)
        lease = distributed_lock(key, renew=False, **options).try_acquire()
        if lease is not None:
            emit("won", key=key, token=lease.fencing_token)
            KEPT.append(lease)


KEPT: list[Any] = []


def guarded_pause(key: str, account: int, lease: float, pause: float) -> None:
    """Stop between the guard and the commit, for as long as somebody stops us."""
    from dblocks import distributed_lock
    from tests.testapp.models import Account

    taken = distributed_lock(key, lease=lease).acquire(timeout=0)
    with transaction.atomic():
        balance = Account.objects.get(pk=account).balance
        Account.objects.filter(pk=account).update(balance=balance + 1)
        taken.guard()
        emit("guarded", token=taken.fencing_token)
        time.sleep(pause)
    emit("committed", result=taken.release())


def fork_while_holding(key: str, lease: float, until: float) -> None:
    """Fork while holding; the child tells what it can do with what it inherited."""
    from dblocks import LeaseLost, distributed_lock

    mine = distributed_lock(key, lease=lease).acquire(timeout=0)
    emit("holds", token=mine.fencing_token)
    child = os.fork()
    if not child:
        found: dict[str, Any] = {"held": mine.held, "reason": mine.lost_reason}
        try:
            mine.check()
        except LeaseLost as error:
            found["check"] = error.reason
        found["released"] = mine.release()
        found["obtained"] = distributed_lock(key).try_acquire() is not None
        with distributed_lock(key + ":child", lease=lease).acquire(timeout=5) as own:
            found["own"] = own.held
        emit("child", **found)
        os._exit(0)
    os.waitpid(child, 0)
    while time.monotonic() < until:
        if not observe(mine):
            emit("lost", key=key, reason=mine.lost_reason)
            return
        time.sleep(0.02)
    emit("parent", released=mine.release())


def hold_the_gil(key: str, lease: float, seconds: float) -> None:
    """Let no other thread run for longer than the lease, then ask whether it's held."""
    from dblocks import LeaseLost, distributed_lock

    mine = distributed_lock(key, lease=lease).acquire(timeout=0)
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))
    try:
        mine.check()
    except LeaseLost as error:
        emit("checked", reason=error.reason, released=mine.release())
    else:
        emit("checked", reason=None, released=mine.release())


class Interruption(Exception):
    """An error that may come anywhere, such as a soft time limit's."""


def interrupted(
    key: str, seed: int, hits: int, lease: float, ordinary: bool = False
) -> None:
    """Be interrupted at random points of acquire, body and release, so many times.

    By ``KeyboardInterrupt``, or by an ordinary exception.
    """
    from dblocks import distributed_lock

    warnings.simplefilter("ignore", ResourceWarning)
    chance = random.Random(seed)
    kind = Interruption if ordinary else KeyboardInterrupt

    def interrupt(signum: int, frame: Any) -> None:
        raise kind

    signal.signal(signal.SIGALRM, interrupt)
    hit = rounds = 0
    while hit < hits:
        rounds += 1
        timer = chance.choice([chance.uniform(1e-5, 0.003), chance.uniform(1e-5, 0.01)])
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, timer)
                with distributed_lock(f"{key}:{rounds}", lease=lease, timeout=0):
                    time.sleep(chance.uniform(0, 0.004))
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except kind:
            hit += 1
        except (DatabaseError, SystemError) as error:
            # A driver whose reply was cut off in the middle.
            emit("database", message=str(error)[:200])
            connections.close_all()
    connections.close_all()
    emit("interrupted", hits=hit, rounds=rounds)
    tell_threads()


def cancelled(key: str, seed: int, hits: int, lease: float) -> None:
    """Have tasks cancelled at random points of acquire, body and release."""
    import asyncio

    from asgiref.sync import sync_to_async

    from dblocks import distributed_lock

    warnings.simplefilter("ignore", ResourceWarning)
    chance = random.Random(seed)

    async def body(name: str) -> None:
        async with distributed_lock(name, lease=lease, timeout=1):
            await asyncio.sleep(chance.uniform(0, 0.004))

    async def cancel_all() -> tuple[int, int]:
        hit = rounds = 0
        while hit < hits:
            rounds += 1
            task = asyncio.create_task(body(f"{key}:{rounds % 5}"))
            await asyncio.sleep(chance.uniform(0, 0.012))
            task.cancel()
            try:
                await task
            except asyncio.CancelledError:
                hit += 1
        await sync_to_async(connections.close_all)()
        return hit, rounds

    hit, rounds = asyncio.run(cancel_all())
    emit("interrupted", hits=hit, rounds=rounds)
    tell_threads()


def tell_threads() -> None:
    until = time.monotonic() + 10
    while time.monotonic() < until and dblocks_threads():
        time.sleep(0.02)
    emit("threads", names=dblocks_threads())


def dblocks_threads() -> list[str]:
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("dblocks")]


def stale_tokens(key: str, rounds: int, seed: int) -> None:
    """Try every verb with tokens that are not current."""
    from dblocks.models import DistributedLock

    chance = random.Random(seed)
    locks = DistributedLock.objects
    row = locks.acquire(key, owner="holder", lease=600)
    before = DistributedLock.objects.values().get(pk=key)
    changed = 0
    for _ in range(rounds):
        owner, version = chance.choice(
            [
                ("holder", row.version - chance.randint(1, 9)),
                ("holder", row.version + chance.randint(1, 9)),
                ("other", row.version),
                ("Holder", row.version),
                ("holder ", row.version),
                ("", row.version),
            ]
        )
        if not owner:
            changed += locks.force_release(key, version=row.version - 1)
        elif chance.random() < 0.5:
            changed += locks.renew(key, owner=owner, version=version, lease=900)
        else:
            changed += locks.release(key, owner=owner, version=version)
    same = before == DistributedLock.objects.values().get(pk=key)
    emit("tried", changed=changed, same=same)


def soak(
    keys: dict[str, int],
    until: float,
    seed: int,
    lease: float,
    measure: float | None = None,
) -> None:
    """Hold keys and write under their guard, whatever happens, until a moment.

    ``keys`` has the account that each guards. From the moment ``measure`` on the memory
    is told.
    """
    from dblocks import LeaseLost
    from tests.testapp.models import Account

    chance = random.Random(seed)
    while time.monotonic() < until:
        if measure is not None and time.monotonic() > measure:
            emit("memory", kilobytes=memory())
            measure = None if measure >= until - 1 else until - 1
        key, account = chance.choice(list(keys.items()))
        rows = Account.objects.filter(pk=account)
        committing = False
        try:
            with granted(key, chance.choice([0, 0.2, 1.0]), lease=lease) as mine:
                if mine is None:
                    continue
                balance = rows.get().balance
                time.sleep(chance.uniform(0, 0.1))
                observe(mine)
                before = time.monotonic()
                with transaction.atomic():
                    rows.update(balance=balance + 1)
                    mine.guard()
                    committing = True
                emit(
                    "write",
                    key=key,
                    token=mine.fencing_token,
                    before=before,
                    value=balance + 1,
                )
        except LeaseLost as error:
            emit("refused", key=key, reason=error.reason)
        except (DatabaseError, InterfaceError) as error:
            emit("database", key=key, doubt=committing, message=str(error)[:100])
            connections.close_all()
            time.sleep(chance.uniform(0, 0.2))


def memory() -> int:
    """Return the kilobytes that this process has in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        cancelled,
        contend,
        create,
        cycle,
        fork_while_holding,
        guarded_pause,
        hold,
        hold_the_gil,
        interrupted,
        soak,
        stale_tokens,
        update,
        wait,
        wait_in_threads,
    )
}


def run(who: int, program: str, database: dict[str, Any], arguments: Any) -> None:
    """Be a child: run one program, and end without anything of the parent's."""
    global WHO
    WHO = who
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    connections.settings["default"].update(database)
    try:
        PROGRAMS[program](**arguments)
    except BaseException as error:  # the parent's test fails with it
        trace = traceback.format_exc()
        emit("error", type=type(error).__name__, trace=trace[-2000:])
    connections.close_all()
    emit("done")
    os._exit(0)


def reap(children: dict[int, int]) -> None:
    """Tell which children have ended."""
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        who = children.pop(pid)
        emit("ended", who=who, status=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Fork children until the parent closes the pipe; then end them."""
    django.setup()
    if "LD_PRELOAD" in os.environ:
        # libfaketime spoils the sleep until a moment, which Python 3.11 made its own.
        time.sleep = lambda seconds: select.select([], [], [], seconds) and None
    for alias, name in json.loads(os.environ["DBLOCKS_TEST_NAMES"]).items():
        # A test may have others for a while.
        if alias in connections.settings:
            connections.settings[alias]["NAME"] = name
    children: dict[int, int] = {}
    pending = b""
    emit("ready")
    try:
        while True:
            ready, _, _ = select.select([0], [], [], 0.02)
            reap(children)
            if not ready:
                continue
            data = os.read(0, 65536)
            if not data:
                return
            pending += data
            *lines, pending = pending.split(b"\n")
            for line in lines:
                message = json.loads(line)
                who = message["who"]
                pid = os.fork()
                if not pid:
                    os.close(0)
                    run(who, message["program"], message["database"], message["with"])
                children[pid] = who
                emit("born", who=who, pid=pid)
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
