"""The other process, on the test's database.

A message ``{"word": PROGRAM, ...}`` starts a program; it answers with events and may
wait for further words; ``done`` follows when it has ended.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from django.db import connections, transaction

#: To the parent; set in the child alone.
pipe: Connection


def emit(event: str, **data: Any) -> None:
    """Send one event with the moment at which it happened."""
    pipe.send({"event": event, "at": time.monotonic(), **data})


def receive() -> dict[str, Any]:
    """Receive one message; the parent's end ends this process."""
    try:
        message: dict[str, Any] = pipe.recv()
    except EOFError:
        sys.exit(0)
    return message


def wait_for(word: str) -> None:
    """Wait until the parent says the word."""
    message = receive()
    if message["word"] != word:
        raise AssertionError(f"expected {word!r}, was told {message!r}")


def hold(
    key: str, timeout: float = 0, *, announced: bool = False, **options: Any
) -> None:
    """Acquire, say so, and hold until told to release.

    If ``announced``, say before that it is about to ask.
    """
    from dblocks import distributed_lock

    if announced:
        connections["default"].ensure_connection()
        emit("asks")
    before = time.monotonic()
    lease = distributed_lock(key, **options).acquire(timeout=timeout)
    emit("held", token=lease.fencing_token, owner=lease.owner, before=before)
    wait_for("release")
    emit("released", result=lease.release())


def hold_aloud(key: str, timeout: float, **options: Any) -> None:
    """:func:`hold`, saying each time that the engine is asked for the key."""
    from dblocks.conf import backends

    engine: Any = backends["default"]
    ask = engine.try_acquire

    def ask_aloud(*args: Any) -> Any:
        emit("asks")
        return ask(*args)

    engine.try_acquire = ask_aloud
    try:
        hold(key, timeout, **options)
    finally:
        del engine.try_acquire


def obey(key: str, **options: Any) -> None:
    """Acquire, say when the lock is asked for, and hold until told to release."""
    from dblocks import distributed_lock

    lease = distributed_lock(key, **options).acquire(timeout=0)
    asked = threading.Event()
    lease.on_release_requested(lambda _: asked.set())
    emit("held", token=lease.fencing_token)
    while not asked.wait(0.1) and lease.held:
        pass
    emit("asked", held=lease.held and lease.release_requested)
    wait_for("release")
    emit("released", result=lease.release())


def attempt(key: str, **options: Any) -> None:
    """Try once, say how it went, give it back."""
    from dblocks import distributed_lock

    lease = distributed_lock(key, **options).try_acquire()
    emit("tried", token=lease and lease.fencing_token)
    if lease is not None:
        lease.release()


def race(key: str, **options: Any) -> None:
    """Stand at the start with an open connection, then try once and hold on."""
    from dblocks import distributed_lock

    connections["default"].ensure_connection()
    emit("ready")
    wait_for("go")
    lease = distributed_lock(key, **options).try_acquire()
    emit("tried", token=lease and lease.fencing_token, owner=lease and lease.owner)
    wait_for("release")
    if lease is not None:
        lease.release()


def toil(key: str, seconds: float) -> None:
    """Lock and release without a pause."""
    from dblocks import distributed_lock

    until = time.monotonic() + seconds
    lock = distributed_lock(key, timeout=seconds)
    while time.monotonic() < until:
        with lock:
            pass


def contend(
    key: str, seconds: float, hold: float = 0.0, timeout: float = 10, **options: Any
) -> None:
    """Lock and release without a pause; say when first, how often, the longest wait."""
    from dblocks import LockTimeout, distributed_lock

    grants, longest, tokens = 0, 0.0, list[int | None]()
    lock = distributed_lock(key, timeout=timeout, **options)
    until = time.monotonic() + seconds
    while (asked := time.monotonic()) < until:
        try:
            with lock as lease:
                longest = max(longest, time.monotonic() - asked)
                grants += 1
                tokens.append(lease.fencing_token)
                if grants == 1:
                    emit("granted", number=grants)
                time.sleep(hold)
        except LockTimeout:
            longest = max(longest, time.monotonic() - asked)
    emit("contended", grants=grants, longest=longest, tokens=tokens)


def take_sets(keys: list[str], rounds: int, seed: int, **options: Any) -> None:
    """Lock some of the keys, in any order, again and again; say from when to when."""
    from dblocks import distributed_lock

    chance = random.Random(seed)
    connections["default"].ensure_connection()
    emit("ready")
    wait_for("go")
    for _ in range(rounds):
        wanted = chance.sample(keys, chance.choice([2, 3]))
        with distributed_lock(*wanted, **options):
            start = time.monotonic()
            time.sleep(0.001)
            end = time.monotonic()
        emit("took", keys=wanted, start=start, end=end)


def count(key: str, account: int, rounds: int, **options: Any) -> None:
    """Add one to a balance, by a plain read and a plain write under the lock."""
    from dblocks import distributed_lock
    from tests.testapp.models import Account

    connections["default"].ensure_connection()
    emit("ready")
    wait_for("go")
    for _ in range(rounds):
        before = time.monotonic()
        with distributed_lock(key, **options) as lease:
            start = time.monotonic()
            balance = Account.objects.get(pk=account).balance
            Account.objects.filter(pk=account).update(balance=balance + 1)
            end = time.monotonic()
        emit("grant", token=lease.fencing_token, before=before, start=start, end=end)


@contextmanager
def slow_commits(seconds: float) -> Iterator[None]:
    """Let each commit to the default database take so long."""
    connection: Any = connections["default"]
    commit = connection.commit

    def commit_late() -> None:
        time.sleep(seconds)
        commit()

    connection.commit = commit_late
    try:
        yield
    finally:
        del connection.commit


def add_in_atomic_block(
    key: str,
    account: int,
    result: int | None = None,
    commit_takes: float = 0,
    **options: Any,
) -> None:
    """Add one to a balance under ``atomic=True``, pausing before the write.

    With ``result`` the sum goes to that account: a write that no database refuses
    because of what others wrote.
    """
    from dblocks import LeaseLost, distributed_lock
    from tests.testapp.models import Account

    try:
        with (
            slow_commits(commit_takes),
            distributed_lock(key, atomic=True, **options) as lease,
        ):
            balance = Account.objects.get(pk=account).balance
            emit("read", balance=balance, token=lease.fencing_token)
            wait_for("write")
            Account.objects.filter(pk=result or account).update(balance=balance + 1)
    except LeaseLost as error:
        emit("lost", reason=error.reason, token=error.fencing_token)
    else:
        emit("committed")


def read_in_atomic_block(key: str, account: int) -> None:
    """Read a balance under ``atomic=True``, and pause."""
    from dblocks import distributed_lock
    from tests.testapp.models import Account

    with distributed_lock(key, atomic=True):
        emit("read", balance=Account.objects.get(pk=account).balance)
        wait_for("go on")
    emit("committed")


def add_under_guard(key: str, account: int, **options: Any) -> None:
    """Add one to a balance in a transaction that ends with the guard."""
    from dblocks import LeaseLost, distributed_lock
    from tests.testapp.models import Account

    lease = distributed_lock(key, **options).acquire(timeout=0)
    balance = Account.objects.get(pk=account).balance
    emit("read", balance=balance, token=lease.fencing_token)
    wait_for("write")
    try:
        with transaction.atomic():
            Account.objects.filter(pk=account).update(balance=balance + 1)
            lease.guard()
    except LeaseLost as error:
        emit("lost", reason=error.reason, token=error.fencing_token)
    else:
        emit("committed")
    emit("released", result=lease.release())


def warm_cache(key: str, pages: list[str], **options: Any) -> None:
    """Run the function of the page about recipes, and stand still at each page."""
    from dblocks import LeaseLost, Lock, distributed_lock
    from tests.support.pages import function

    def lock(name: str, **terms: Any) -> Lock:
        return distributed_lock(key, **terms, **options)

    def fill(page: str) -> None:
        emit("fills", page=page)
        wait_for("go on")

    recipe = function("recipes.md", "warm_cache", distributed_lock=lock)
    try:
        recipe(fill, pages)
    except LeaseLost as error:
        emit("lost", reason=error.reason)


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program
    for program in (
        hold,
        hold_aloud,
        obey,
        attempt,
        race,
        toil,
        contend,
        take_sets,
        count,
        add_in_atomic_block,
        read_in_atomic_block,
        add_under_guard,
        warm_cache,
    )
}


def serve(channel: Connection, databases: Mapping[str, Mapping[str, Any]]) -> None:
    """Run programs until the parent closes the pipe.

    ``databases``: what replaces the databases' settings, by alias.
    """
    global pipe
    pipe = channel
    os.setsid()
    for alias, replaced in databases.items():
        connections.settings[alias].update(replaced)
    while True:
        message = receive()
        program = PROGRAMS[message.pop("word")]
        try:
            program(**message)
        except Exception as error:  # the parent's test fails with it
            emit("error", type=type(error).__name__, message=str(error))
        connections.close_all()
        emit("done")
