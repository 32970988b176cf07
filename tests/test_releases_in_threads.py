"""Several leases of one hold, released by several threads at once."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
from django.db import connection, transaction

from dblocks import Lease, Lock
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, takes

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]
Obtainable = Callable[..., bool]
Threads = Callable[[], OtherThread]

#: How long a held-back statement waits for the other release, which may wait for it.
HELD_BACK = 0.3

OWNERS = pytest.mark.parametrize(
    "owner", [None, "importer"], ids=["handed over", "explicit owner"]
)


def told_losses(*leases: Lease) -> list[Lease]:
    """Return a list to which each lease is added whose loss is told."""
    told: list[Lease] = []
    for lease in leases:
        lease.on_lost(told.append)
    return told


@OWNERS
@pytest.mark.needs("has_table")
@pytest.mark.parametrize("count", [2, 3])
def test_release_overtaken_by_the_next(
    acquire: Leases,
    threads: Threads,
    obtainable: Obtainable,
    owner: str | None,
    count: int,
) -> None:
    """A release whose statement comes after that of a later one takes nothing away."""
    leases = [acquire(owner=owner) for _ in range(count)]
    told = told_losses(*leases)
    on_its_way, others_done = threading.Event(), threading.Event()

    def hold_back(execute: Any, *args: Any) -> Any:
        if not on_its_way.is_set():
            on_its_way.set()
            others_done.wait(HELD_BACK)
        return execute(*args)

    def release_slowly() -> bool:
        with connection.execute_wrapper(hold_back):
            return leases[0].release()

    slow = threads().start(release_slowly)
    try:
        assert on_its_way.wait(DEADLINE)
        others = [threads().start(lease.release) for lease in leases[1:]]
        results = [other.result(timeout=DEADLINE) for other in others]
    finally:
        others_done.set()
    assert [slow.result(timeout=DEADLINE), *results] == [True] * count
    assert [lease.lost_reason for lease in leases] == [None] * count
    assert not told
    assert obtainable()


@OWNERS
def test_released_at_once(
    acquire: Leases, threads: Threads, obtainable: Obtainable, owner: str | None
) -> None:
    """Released at the same moment, round after round, each was held until then."""
    pair = threads(), threads()
    barrier = threading.Barrier(2, timeout=DEADLINE)
    pause = threading.Event()

    def release(lease: Lease, delay: float) -> bool:
        def late(execute: Any, *args: Any) -> Any:
            pause.wait(delay)
            return execute(*args)

        with connection.execute_wrapper(late):
            barrier.wait()
            return lease.release()

    for number in range(30):
        leases = [acquire(owner=owner) for _ in range(2)]
        told = told_losses(*leases)
        # Now the one statement is the later one, now the other, now neither.
        delays = [(0.01, 0), (0, 0.01), (0, 0)][number % 3]
        releasing = [
            thread.start(release, lease, delay)
            for thread, lease, delay in zip(pair, leases, delays, strict=True)
        ]
        results = [future.result(timeout=DEADLINE) for future in releasing]
        assert results == [True, True]
        assert [lease.lost_reason for lease in leases] == [None, None]
        assert not told
        assert obtainable()


@OWNERS
@pytest.mark.needs("has_table")
@pytest.mark.parametrize("place", ["in a transaction", "in autocommit"])
def test_entered_again_beside_a_release(
    acquire: Leases,
    other: OtherThread,
    obtainable: Obtainable,
    owner: str | None,
    place: str,
) -> None:
    """A release that waits, perhaps for this transaction, keeps nobody from entering.

    The one in the other thread waits here until the transaction is over, as it would
    where that has the row locked.
    """
    outer, inner = acquire(owner=owner), acquire(owner=owner)
    on_its_way, transaction_over = threading.Event(), threading.Event()

    def hold_back(execute: Any, *args: Any) -> Any:
        on_its_way.set()
        transaction_over.wait(DEADLINE)
        return execute(*args)

    def release_slowly() -> bool:
        with connection.execute_wrapper(hold_back):
            return inner.release()

    released = other.start(release_slowly)
    assert on_its_way.wait(DEADLINE)
    with transaction.atomic() if place == "in a transaction" else nullcontext():
        with takes(at_most=1 + SLACK):
            again = acquire(owner=owner)
        assert again.held
        assert again.fencing_token == outer.fencing_token
    transaction_over.set()
    assert released.result(DEADLINE) is True
    assert outer.release() is True
    assert not obtainable()
    assert again.release() is True
    assert obtainable()


@pytest.mark.needs("has_shared_owners")
def test_threads_of_one_owner_come_and_go(
    lock: Locks, threads: Threads, obtainable: Obtainable
) -> None:
    """Whoever enters while others leave is counted until it leaves, and no longer."""
    chance = random.Random(20240229)
    pauses = [[chance.uniform(0, 0.002) for _ in range(40)] for _ in range(3)]

    def visit(pauses: list[float]) -> None:
        for pause in pauses:
            with lock(owner="importer", lease=60, timeout=DEADLINE):
                time.sleep(pause)

    visits = [threads().start(visit, each) for each in pauses]
    for visited in visits:
        visited.result(DEADLINE)
    assert obtainable()
