"""Processes by the dozen: ``python -m tests.faults.crew_worker`` forks one per program.

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
import logging
import multiprocessing
import os
import pickle
import random
import select
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any

from django.db import (
    DatabaseError,
    DataError,
    InterfaceError,
    connection,
    connections,
    transaction,
)
from django.db.models import F

from tests.faults import children
from tests.support.timing import starved

WHO = 0


def emit(event: str, **data: Any) -> None:
    """Write one event; lines of several processes don't mix, they are short."""
    data = {"event": event, "who": WHO, "at": time.monotonic(), **data}
    os.write(1, (json.dumps(data) + "\n").encode())


def wait_until(moment: float) -> None:
    """Wait until a moment by the clock that all processes share."""
    while (left := moment - time.monotonic()) > 0:
        time.sleep(min(left, 0.05))


def chosen(what: Any, chance: random.Random) -> tuple[Any, dict[str, Any]]:
    """Return the key or keys to ask for, and the number of permits.

    Args:
        what: A key; a list of keys, taken together in any order; or a key with the
            ``permits`` to choose from.
    """
    if isinstance(what, dict):
        return what["key"], {"permits": chance.choice(what["permits"])}
    if isinstance(what, list):
        return chance.sample(what, len(what)), {}
    return what, {}


def each(taken: Any) -> list[Any]:
    """Return the leases of what was taken: one, or those of several keys."""
    return list(taken.values()) if isinstance(taken, Mapping) else [taken]


def about(lease: Any) -> dict[str, Any]:
    """Return what all events tell of a lease."""
    token = lease.fencing_token
    return {"key": lease.key, "permit": lease.permit, "token": token}


def lock(key: str | list[str], **options: Any) -> Any:
    """Make a lock on a key or on several."""
    from dblocks import distributed_lock

    return distributed_lock(*([key] if isinstance(key, str) else key), **options)


@contextmanager
def granted(
    key: str | list[str],
    timeout: float = 0,
    *,
    watched: bool = False,
    deaf: float = 0.0,
    **options: Any,
) -> Iterator[Any]:
    """Hold a key, or several, and tell when they were granted and released.

    Yields the lease or leases, or ``None``.
    """
    before = time.monotonic()
    taken = lock(key, **options).try_acquire(timeout)
    after = time.monotonic()
    if taken is None:
        yield None
        return
    tell_grant(taken, before, after, options)
    tell_loss(taken, options.get("lease", 30.0), watched, deaf)
    try:
        yield taken
    except BaseException:
        give_back(taken)
        raise
    else:
        error = give_back(taken)
        if error is not None:
            raise error


def tell_grant(
    taken: Any, before: float, after: float, options: dict[str, Any]
) -> None:
    permits = options.get("permits", 1)
    for lease in each(taken):
        emit("grant", **about(lease), permits=permits, before=before, after=after)


#: By lease, the moment at which it is over for all that was last seen of it.
OVER: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()
#: By lease, the moment at which its release began.
GIVEN_BACK: weakref.WeakKeyDictionary[Any, float] = weakref.WeakKeyDictionary()


def tell_loss(taken: Any, length: float, watched: bool, deaf: float) -> None:
    """Tell of the loss of a lease, or of one of several, when it is announced.

    Of one that is ``watched``, which is observed all the time, with the moment by
    which that had to be.
    """
    granted = time.monotonic()

    def announce(lost: Any) -> None:
        time.sleep(deaf)
        over = watched and lost.lost_reason in {"expired", "backend"}
        emit(
            "loss",
            **about(lost),
            reason=lost.lost_reason,
            before=granted,
            after=time.monotonic(),
            starved=starved(),
            deadline=OVER.get(lost) if over else None,
            given_back=GIVEN_BACK.get(lost),
            lease=length,
        )

    taken.on_lost(announce)


def give_back(taken: Any) -> Exception | None:
    """Release and tell how that went; return the database's error."""
    before = time.monotonic()
    for lease in each(taken):
        GIVEN_BACK[lease] = before
    try:
        released = taken.release()
    except (DatabaseError, InterfaceError) as error:
        for lease in each(taken):
            emit("unreleased", **about(lease), **described())
        return error
    for lease in each(taken):
        # Of several, those that were not lost were held until now.
        if released or (lease is not taken and lease.lost_reason is None):
            emit("release", **about(lease), before=before)
        else:
            emit("unreleased", **about(lease), reason=lease.lost_reason)
    return None


def described() -> dict[str, Any]:
    """Describe the error that is being handled."""
    trace = traceback.format_exc()
    # Django's own statements for a new connection belong to its making.
    return {"connecting": "in ensure_connection" in trace, "trace": trace[-2500:]}


class Lapses(logging.Handler):
    """Tells of releases that failed where nothing could be raised."""

    def emit(self, record: logging.LogRecord) -> None:
        if "left to lapse" in record.getMessage():
            emit("lapsed", message=record.getMessage()[-1000:])


def observe(taken: Any) -> bool:
    """Tell whether the lease says that it is held, or all of several, if they do."""
    whole = True
    for lease in each(taken):
        before = time.monotonic()
        held = bool(lease.held)
        if left := lease.remaining():
            OVER[lease] = time.monotonic() + left
        # Whoever reads that may stop this process at once.
        if held:
            emit("held", **about(lease), before=before)
        whole = whole and held
    return whole


def contend(
    keys: list[Any],
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
    """Take and give back keys in random order until a moment, or so many times.

    What the keys may be, :func:`chosen` says.
    """
    chance = random.Random(seed)
    if isolation is not None:
        set_isolation(isolation)
    connection.ensure_connection()
    wait_until(start)
    granted_times = 0
    while granted_times < rounds and time.monotonic() < until:
        key, more = chosen(chance.choice(keys), chance)
        more |= options
        if stubborn:
            try:
                with granted(key, **more) as lease:
                    if lease is not None:
                        observe(lease)
                        granted_times += 1
            except (DatabaseError, InterfaceError):
                emit("database", **described())
                time.sleep(0.05)
                connections.close_all()
            continue
        if nested:
            with transaction.atomic():
                connection.cursor().execute("SELECT 1")
                with granted(key, **more) as lease:
                    if lease is not None:
                        observe(lease)
                        granted_times += 1
            continue
        with granted(key, **more) as lease:
            time.sleep(chance.uniform(0, hold))
            if lease is not None:
                observe(lease)
                granted_times += 1


def share(
    key: list[str],
    accounts: dict[str, int],
    rounds: int,
    start: float,
    seed: int,
    timeout: float,
) -> None:
    """Take one to three of some keys, in any order, and count up what they guard."""
    from tests.testapp.models import Account

    chance = random.Random(seed)
    connection.ensure_connection()
    wait_until(start)
    for _ in range(rounds):
        names = chance.sample(key, chance.choice([1, 2, 3]))
        with granted(names, timeout, lease=30) as leases:
            if leases is None:
                emit("gave up", key=names)
                continue
            observe(leases)
            before = time.monotonic()
            for lease in each(leases):
                rows = Account.objects.filter(pk=accounts[lease.key])
                rows.update(balance=rows.get().balance + 1)
            for lease in each(leases):
                emit("write", **about(lease), before=before)


def abandon(
    keys: list[str],
    until: float,
    seed: int,
    rounds: int,
    at_once: int,
    start: float = 0.0,
    **options: Any,
) -> None:
    """Take keys and give none back: who wants one has to wait for its lease's end."""
    from dblocks import distributed_lock

    chance = random.Random(seed)
    wait_until(start)
    taken = 0
    while taken < rounds and time.monotonic() < until:
        held = []
        for key in chance.sample(keys, at_once):
            before = time.monotonic()
            lease = distributed_lock(key, renew=False, **options).try_acquire()
            if lease is not None:
                emit("grant", **about(lease), before=before)
                held.append(lease)
        taken += len(held)
        while held:
            held = [lease for lease in held if observe(lease)]
            time.sleep(0.005)


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
    key: str | list[str],
    account: int | list[int],
    mode: str,
    until: float,
    seed: int,
    window: float = 0.02,
    **options: Any,
) -> None:
    """Add one to a balance again and again, by a read, a pause and a write.

    Of several accounts each has its key, or its permit.

    ``mode`` is ``plain`` (nothing but the lease), ``checked`` (the lease is asked just
    before the write), ``guard`` (in a transaction that ends with the guard) or
    ``atomic`` (all of it in the lock's own transaction).
    """
    from dblocks import LeaseLost

    guarded = Guarded(key, account)
    chance = random.Random(seed)
    enough: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, frame: enough.append(signum))
    while not enough and time.monotonic() < until:
        try:
            if mode == "atomic":
                atomically(guarded, chance.uniform(0, window), options)
                continue
            with granted(key, **options) as taken:
                if taken is None:
                    continue
                balances = guarded.read(taken)
                emit("inside", key=guarded.name)
                time.sleep(chance.uniform(0, window))
                before = time.monotonic()
                if mode != "checked":
                    # There, what matters is who is stopped after the check.
                    emit("writing", key=guarded.name)
                if mode == "guard":
                    with transaction.atomic():
                        write(balances)
                        taken.guard()
                elif mode == "checked":
                    taken.check()
                    write(balances)
                else:
                    write(balances)
                tell_write(taken, before)
        except LeaseLost as error:
            emit("refused", key=guarded.name, reason=error.reason)
        except DatabaseError:
            emit("database", key=guarded.name, **described())


class Guarded:
    """The accounts that a key, several keys or the permits of one guard."""

    def __init__(self, key: str | list[str], account: int | list[int]) -> None:
        self.key = key
        self.keys = [key] if isinstance(key, str) else key
        self.accounts = [account] if isinstance(account, int) else account
        self.name = min(self.keys)

    def read(self, taken: Any) -> dict[int, int]:
        """Return the balances that what was taken guards, by account."""
        from tests.testapp.models import Account

        mine = map(self.account_of, each(taken))
        rows = Account.objects.filter(pk__in=mine).order_by("pk")
        return dict(rows.values_list("pk", "balance"))

    def account_of(self, lease: Any) -> int:
        """Return the account that one of the keys, or a permit, guards."""
        return self.accounts[self.keys.index(lease.key) + lease.permit]


def write(balances: dict[int, int]) -> None:
    """Add one to balances that were read."""
    from tests.testapp.models import Account

    for account, balance in balances.items():
        Account.objects.filter(pk=account).update(balance=balance + 1)


def tell_write(taken: Any, before: float) -> None:
    for lease in each(taken):
        emit("write", **about(lease), before=before)


def atomically(guarded: Guarded, pause: float, options: dict[str, Any]) -> None:
    from dblocks import LockTimeout

    timeout = options.get("timeout", 0)
    rest = {name: value for name, value in options.items() if name != "timeout"}
    before, already = time.monotonic(), starved()
    try:
        with lock(guarded.key, atomic=True, timeout=timeout, **rest) as taken:
            tell_grant(taken, before, time.monotonic(), rest)
            tell_loss(taken, rest["lease"], watched=False, deaf=0.0)
            balances = guarded.read(taken)
            emit("inside", key=guarded.name)
            time.sleep(pause)
            emit("writing", key=guarded.name)
            write(balances)
            before = time.monotonic()
        tell_write(taken, before)
    except LockTimeout:
        told = {"before": before, "starved": starved() - already}
        emit("gave up", key=guarded.name, timeout=timeout, **told)


def serve(key: str, account: int, rounds: int, seed: int, locked: bool) -> None:
    """Answer requests that read and then write, each in a transaction of its own."""
    from django.core.handlers.base import BaseHandler
    from django.http import HttpRequest, HttpResponse
    from django.test import RequestFactory

    from dblocks import distributed_lock
    from tests.testapp.models import Account

    chance = random.Random(seed)
    rows = Account.objects.filter(pk=account)

    def view(request: HttpRequest) -> HttpResponse:
        balance = rows.get().balance
        time.sleep(chance.uniform(0, 0.01))
        rows.update(balance=balance + 1)
        return HttpResponse()

    if locked:
        view = distributed_lock(key, timeout=60)(view)
    handle = BaseHandler().make_view_atomic(view)
    for _ in range(rounds):
        try:
            handle(RequestFactory().get("/"))
        except DatabaseError:
            emit("database", **described())
        else:
            emit("answered")


def hold(
    key: str | list[str],
    until: float,
    timeout: float = 0,
    account: int | None = None,
    deaf: float = 0.0,
    **options: Any,
) -> None:
    """Hold a key, or several, until a moment; say at once when a loss is announced.

    One that is ``deaf`` says it so many seconds late.

    Each renewal is told, with the time that was left when its answer came. With an
    ``account`` a guarded write is tried after the loss.
    """
    with granted(key, timeout, watched=True, deaf=deaf, **options) as lease:
        if lease is None:
            return
        lost = threading.Event()
        lease.on_lost(lambda lease: lost.set())
        left = lease.remaining()
        while time.monotonic() < until and not lost.is_set():
            observe(lease)
            lost.wait(0.02)
            before, left = left, lease.remaining()
            if left > before:
                emit("renewed", key=key, left=before)
        if account is not None and lost.is_set():
            refused = refuses(lease, account)
            emit("guarded", key=key, refused=refused)


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


def wait(
    key: str | list[str], timeout: float, hold: float = 0.0, **options: Any
) -> None:
    """Wait for a key, or several, take it, give it back."""
    connection.ensure_connection()
    emit("asks")
    before = starved()
    with granted(key, timeout, **options):
        emit("waited", starved=starved() - before)
        time.sleep(hold)


def wait_in_threads(
    key: str | list[str],
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


def cycle(key: str, start: float, length: float, pause: float) -> None:
    """Take and give back a key that nobody else wants, and tell how long that took.

    From ``start``, or when it gets there, for ``length`` seconds and at least a hundred
    times: of a few, the slow ones say what else the machine has to do.
    """
    from dblocks import distributed_lock

    lock = distributed_lock(key, timeout=0)
    with lock:
        pass
    wait_until(start)
    took, until = list[int](), time.monotonic() + length
    while time.monotonic() < until or len(took) < 100:
        began = time.monotonic()
        with lock:
            pass
        took.append(round(1e6 * (time.monotonic() - began)))
        time.sleep(pause)
    for number in range(0, len(took), 300):
        # One event must fit into one write to the pipe.
        emit("took", microseconds=took[number : number + 300])


def create(keys: list[Any], starts: list[float], seed: int = 0, **options: Any) -> None:
    """Race for one new key, set or permit after another, each at its moment.

    All are kept.
    """
    chance = random.Random(seed)
    connection.ensure_connection()
    for what, start in zip(keys, starts, strict=True):
        key, more = chosen(what, chance)
        wait_until(start)
        taken = lock(key, renew=False, **more, **options).try_acquire()
        if taken is not None:
            for lease in each(taken):
                emit("won", **about(lease))
            KEPT.append(taken)


KEPT: list[Any] = []


def guarded_pause(
    key: str | list[str], account: int, lease: float, pause: float, **options: Any
) -> None:
    """Stop between the guard and the commit, for as long as somebody stops us."""
    from tests.testapp.models import Account

    taken = lock(key, lease=lease, **options).acquire(timeout=0)
    with transaction.atomic():
        balance = Account.objects.get(pk=account).balance
        Account.objects.filter(pk=account).update(balance=balance + 1)
        taken.guard()
        emit("guarded", tokens={one.key: one.fencing_token for one in each(taken)})
        time.sleep(pause)
    emit("committed", result=taken.release())


def fail_to_release(key: str, leave: bool) -> None:
    """Let the database fail at a release: of a block that is left, or by the verb."""
    from dblocks import distributed_lock

    def fail(*args: Any) -> None:
        # None that would be tried again.
        raise DataError("planted")

    with distributed_lock(key) if leave else granted(key):
        connection.execute_wrappers.append(fail)


def fork_while_holding(key: str, lease: float, method: str) -> None:
    """Make a child while holding; it tells what it finds, and the lease goes on."""
    from dblocks import distributed_lock

    # Dozens begin together, and SQLite has one writer.
    mine = distributed_lock(key, lease=lease).acquire(timeout=10)
    until = time.monotonic() + 1.2 * lease
    children.HELD.append(mine)
    if method == "os.fork":
        child = os.fork()
        if not child:
            emit("child", **children.look(key, lease))
            os._exit(0)
        os.waitpid(child, 0)
    else:
        with suppress(TypeError):
            emit("pickled", size=len(pickle.dumps(mine)))
        context = multiprocessing.get_context(method)
        with ProcessPoolExecutor(1, context, children.begin_with_a_parent) as pool:
            emit("child", **pool.submit(children.look, key, lease).result())
    while observe(mine) and time.monotonic() < until:
        time.sleep(0.02)
    emit("parent", released=mine.release(), reason=mine.lost_reason)


def hold_the_gil(key: str, lease: float, seconds: float) -> None:
    """Let no other thread run for longer than the lease, then ask whether it's held."""
    from dblocks import LeaseLost, distributed_lock

    connection.ensure_connection()
    # Nor between these calls, whatever the machine does meanwhile: the question must be
    # answered by the clock, not by the timer, and before a renewal was due.
    sys.setswitchinterval(10 * seconds)
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


PARTS = ("acquire", "body", "release")
"""The parts of a lock's use that are interrupted."""


class Landings:
    """Where interrupts landed: in which part of a lock's use, and in which function."""

    def __init__(self) -> None:
        self.stages: Counter[str] = Counter()
        self.places: Counter[str] = Counter()

    def note(self, stage: str, frames: Iterable[FrameType]) -> bool:
        """Note one, innermost frame first; whether it was inside a lock's use."""
        if stage == "outside":
            return False
        self.stages[stage] += 1
        self.places[next(filter(None, map(place, frames)), f"the {stage}")] += 1
        return True

    def tell(self) -> None:
        emit("stages", **self.stages)
        places = self.places.most_common()
        for number in range(0, len(places), 20):
            # One event must fit into one write to the pipe.
            emit("places", places=dict(places[number : number + 20]))


def place(frame: FrameType) -> str:
    """Return module and function of a frame of dblocks; of another nothing."""
    module = frame.f_globals.get("__name__", "")
    return f"{module}:{frame.f_code.co_name}" if module.startswith("dblocks") else ""


def inside_out(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def suspended(task: Any) -> list[FrameType]:
    """Return the frames of a task that waits, innermost first."""
    frames: list[FrameType] = []
    awaited = task.get_coro()
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        frames.insert(0, frame)
        awaited = awaited.cr_await
    return frames


def by_turns(key: str, number: int) -> tuple[Any, dict[str, Any]]:
    """Return what to lock: one key, two, or one of three permits."""
    if number % 3 == 1:
        return [f"{key}:2", f"{key}:1"], {}
    return key, {"permits": 3} if number % 3 else {}


def interrupted(
    key: str, seed: int, hits: int, lease: float, ordinary: bool = False
) -> None:
    """Be interrupted at random points of acquire, body and release, so many times.

    By ``KeyboardInterrupt``, or by an ordinary exception; of a lock on a key, on two,
    or with permits, by turns.
    """
    warnings.simplefilter("ignore", ResourceWarning)
    chance = random.Random(seed)
    kind = Interruption if ordinary else KeyboardInterrupt
    landings, stage, inside = Landings(), "outside", False

    def interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal inside
        inside = landings.note(stage, inside_out(frame))
        raise kind

    signal.signal(signal.SIGALRM, interrupt)

    def enter(part: str) -> None:
        nonlocal stage
        stage = part
        if part == target:
            # On a fast machine a release is over in a tenth of that.
            longest = chance.choice([3e-4, 3e-3])
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, longest))

    hit = rounds = 0

    def is_enough() -> bool:
        # A release may be over before the interrupt comes.
        rarest = min(landings.stages[part] for part in PARTS)
        return hit >= hits and (rarest >= hits / 20 or hit >= 3 * hits)

    while not is_enough():
        rounds += 1
        target, inside = chance.choice(PARTS), False
        # Else most would land where a connection is made, after the last one's end.
        connection.ensure_connection()
        try:
            try:
                enter("acquire")
                asked, options = by_turns(f"{key}:{rounds}", rounds)
                with lock(asked, lease=lease, timeout=0, **options):
                    enter("body")
                    time.sleep(chance.uniform(0, 0.004))
                    enter("release")
                stage = "outside"
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except kind:
            hit += inside
        except (DatabaseError, SystemError) as error:
            # A driver whose reply was cut off in the middle.
            emit("database", message=str(error)[:200])
            connections.close_all()
        stage = "outside"
    connections.close_all()
    landings.tell()
    emit("interrupted", hits=hit, rounds=rounds)
    tell_threads()


def cancelled(key: str, seed: int, hits: int, lease: float) -> None:
    """Have tasks cancelled at random points of acquire, body and release."""
    import asyncio

    from asgiref.sync import sync_to_async

    warnings.simplefilter("ignore", ResourceWarning)
    chance = random.Random(seed)

    landings = Landings()

    async def body(number: int, stage: list[str]) -> None:
        asked, options = by_turns(f"{key}:{number}", number)
        stage[0] = "acquire"
        async with lock(asked, lease=lease, timeout=1, **options):
            stage[0] = "body"
            await asyncio.sleep(chance.uniform(0, 0.004))
            stage[0] = "release"
        stage[0] = "outside"

    async def cancel(number: int) -> bool:
        stage, target = ["outside"], chance.choice(PARTS)
        task = asyncio.create_task(body(number, stage))
        while stage[0] != target and not task.done():
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            # The event loop's pauses are a millisecond, longer than many a release.
            await asyncio.sleep(chance.uniform(0, 0.002))
        where = stage[0], suspended(task)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return landings.note(*where)
        return False

    async def cancel_all() -> tuple[int, int]:
        hit = rounds = 0
        while hit < hits:
            # One of the two waits for the other.
            number = rounds // 2 % 6
            hit += sum(await asyncio.gather(cancel(number), cancel(number)))
            rounds += 2
        await sync_to_async(connections.close_all)()
        return hit, rounds

    hit, rounds = asyncio.run(cancel_all())
    landings.tell()
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
    from dblocks import LeaseLost
    from dblocks.backends.values import Grant
    from dblocks.conf import backends
    from dblocks.models import DistributedLock

    def guard(owner: str, version: int) -> bool:
        try:
            with transaction.atomic():
                backends["default"].guard([Grant(key, owner, version)], None)
        except LeaseLost:
            return False
        return True

    chance = random.Random(seed)
    locks = DistributedLock.objects
    row = locks.acquire(key, owner="holder", lease=600)
    before = DistributedLock.objects.values().get(pk=key)
    tries = dict.fromkeys(["force_release", "renew", "release", "guard"], 0)
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
        verb = (
            chance.choice(["renew", "release", "guard"]) if owner else "force_release"
        )
        tries[verb] += 1
        if verb == "force_release":
            changed += locks.force_release(key, version=row.version - 1)
        elif verb == "renew":
            changed += locks.renew(key, owner=owner, version=version, lease=900)
        elif verb == "release":
            changed += locks.release(key, owner=owner, version=version)
        else:
            changed += guard(owner, version)
    same = before == DistributedLock.objects.values().get(pk=key)
    current = guard("holder", row.version)
    emit("tried", changed=changed, same=same, current=current, tries=tries)


def soak(
    table: list[dict[str, Any]],
    until: float,
    seed: int,
    lease: float,
    measure: float | None = None,
) -> None:
    """Hold locks and write under their guard, whatever happens, until a moment.

    Each row of the ``table`` has a key, several, or one with ``permits``, and the
    accounts that they guard. From the moment ``measure`` on the memory is told.
    """
    from dblocks import LeaseLost

    chance = random.Random(seed)
    while time.monotonic() < until:
        if measure is not None and time.monotonic() > measure:
            emit("memory", kilobytes=memory())
            measure = None if measure >= until - 1 else until - 1
        row = chance.choice(table)
        guarded = Guarded(row["key"], row["account"])
        keys = chance.sample(guarded.keys, len(guarded.keys))
        options = {"lease": lease, "permits": row.get("permits", 1)}
        committing = False
        try:
            with granted(keys, chance.choice([0, 0.2, 1.0]), **options) as taken:
                if taken is None:
                    continue
                balances = guarded.read(taken)
                time.sleep(chance.uniform(0, 0.1))
                observe(taken)
                before = time.monotonic()
                with transaction.atomic():
                    write(balances)
                    taken.guard()
                    committing = True
                for one in each(taken):
                    value = balances[guarded.account_of(one)] + 1
                    more = {"value": value, "kind": row["kind"]}
                    emit("write", **about(one), before=before, **more)
        except LeaseLost as error:
            emit("refused", key=guarded.name, reason=error.reason)
        except (DatabaseError, InterfaceError) as error:
            message = str(error)[:100]
            emit("database", key=guarded.name, doubt=committing, message=message)
            connections.close_all()
            time.sleep(chance.uniform(0, 0.2))
    if measure is not None:
        emit("memory", kilobytes=memory())


def memory() -> int:
    """Return the kilobytes that this process has in memory."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") // 1024


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        abandon,
        cancelled,
        contend,
        create,
        cycle,
        fail_to_release,
        fork_while_holding,
        guarded_pause,
        serve,
        share,
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
    logging.getLogger("dblocks").addHandler(Lapses(logging.WARNING))
    connections.settings["default"].update(database)
    try:
        PROGRAMS[program](**arguments)
    except BaseException as error:  # the parent's test fails with it
        trace = traceback.format_exc()
        emit("error", type=type(error).__name__, trace=trace[-2000:])
    connections.close_all()
    emit("done")
    os._exit(0)


def reap(forked: dict[int, int]) -> None:
    """Tell which children have ended."""
    while forked:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        who = forked.pop(pid)
        emit("ended", who=who, status=os.waitstatus_to_exitcode(status))


def main() -> None:
    """Fork children until the parent closes the pipe; then end them."""
    children.begin()
    for module in ("dblocks.distributed_locks", "dblocks.backends.database.backend"):
        # Else each child would do it, all of them at the moment when they begin.
        import_module(module)
    if "LD_PRELOAD" in os.environ:
        # libfaketime spoils the sleep until a moment, which Python 3.11 made its own.
        time.sleep = lambda seconds: select.select([], [], [], seconds) and None
    forked: dict[int, int] = {}
    pending = b""
    emit("ready")
    try:
        while True:
            ready, _, _ = select.select([0], [], [], 0.02)
            reap(forked)
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
                forked[pid] = who
                emit("born", who=who, pid=pid)
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
