"""A lock beside its floor: ``python -m benchmarks --only floor --database postgres``.

The floor is the least that a durable lock asks of Django. It is two
conditional updates of a row that exists, each checked by the number of rows that it
changed::

    UPDATE benchmarks_floorlock SET owner = %s, version = version + 1
        WHERE key = %s AND owner = ''
    UPDATE benchmarks_floorlock SET owner = '' WHERE key = %s AND owner = %s
        AND version = %s

They go through ``connection.cursor()`` in autocommit, on the same connection, database
and settings as the lock, to a table of three columns and no index but its key's. Each
is a commit, as durable as the lock's. The floor has no clock, no expiry, no queue and
no fencing token, and knows its version by counting: it is a measure, not a lock.

dblocks is ``with lock: pass``, its lock made once.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple
from uuid import uuid4

from django.db import connection

from benchmarks import contenders, crew
from benchmarks.crew import Barrier
from benchmarks.figures import Figure, Result, Scale, Verdict, median_ratio

FLOOR = "the floor"
DBLOCKS = contenders.DBLOCKS.name

CROWD = 16

ORDER = (FLOOR, DBLOCKS, DBLOCKS, FLOOR)
"""Whose block is when: neither is always the first."""

WARM_UP = 5
"""How much shorter than a hot loop the one that warms up is."""

HOT = {"mariadb": 1.35, "postgres": 1.45, "sqlite": 1.4}
"""How much longer than its floor a lock may take, at p50."""

Lock = AbstractContextManager[object]


class Floor:
    """The two updates, as a context manager that is made once for a key."""

    def __init__(self, key: str) -> None:
        from benchmarks.models import FloorLock

        FloorLock.objects.create(key=key)
        self.key = key
        self.owner = os.urandom(16).hex()
        self.version = 0
        column = connection.ops.quote_name("key")
        self.take = (
            "UPDATE benchmarks_floorlock SET owner = %s, version = version + 1"
            f" WHERE {column} = %s AND owner = ''"
        )
        self.free = (
            f"UPDATE benchmarks_floorlock SET owner = '' WHERE {column} = %s"
            " AND owner = %s AND version = %s"
        )

    def __enter__(self) -> None:
        with connection.cursor() as cursor:
            cursor.execute(self.take, [self.owner, self.key])
            if cursor.rowcount != 1:
                raise RuntimeError(f"{self.key!r} is taken.")
        self.version += 1

    def __exit__(self, *exc_info: object) -> None:
        with connection.cursor() as cursor:
            cursor.execute(self.free, [self.key, self.owner, self.version])
            if cursor.rowcount != 1:
                raise RuntimeError(f"{self.key!r} was taken away.")


class Block(NamedTuple):
    """What a process did in one or several blocks of cycles."""

    cycles: int
    seconds: float
    #: Processor time of all threads of the process.
    computed: float

    @property
    def rate(self) -> float:
        return self.cycles / self.seconds


Blocks = dict[str, Block]


def measure(server: str, scale: Scale) -> Result:
    """Row 13: a lock beside two narrow updates, by turns, each made once for its key.

    The floor is an update that sets owner and version where the owner is empty, and
    one that empties the owner where owner and version are its own: through Django's
    cursor, in autocommit, on the same connection, in a table of these three columns.
    """
    # The three take turns as well, because a machine's speed drifts.
    hot, alone, crowd = [], [], []
    for _ in range(scale.runs):
        hot.append(crew.run_one(alternate, cycles=scale.cycles))
        alone += race(processes=1, seconds=scale.contend / 6)
        crowd.append(race(processes=CROWD, seconds=scale.contend / 3))
    return judge(server, hot, alone, crowd)


def judge(
    server: str,
    hot: Sequence[dict[str, list[float]]],
    alone: Sequence[Blocks],
    crowd: Sequence[Sequence[Blocks]],
) -> Result:
    """Set the lock's times, processor time and throughput against the floor's."""
    p50: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    for name in (FLOOR, DBLOCKS):
        p50[name] = [statistics.median(run[name]) * 1000 for run in hot]
        computed[name] = [
            run[name].computed / run[name].cycles * 1_000_000 for run in alone
        ]
        rates[name] = [sum(blocks[name].rate for blocks in run) for run in crowd]
    figures = []
    for what, unit, values in (
        ("hot loop, acquire and release, p50", "ms", p50),
        ("client processor time of a cycle", "µs", computed),
        (f"{CROWD} processes, a key each, cycles a second", "/s", rates),
    ):
        figures += [Figure(what, name, unit, mine) for name, mine in values.items()]
    return Result(figures=figures, verdicts=_verdicts(server, p50, computed, rates))


def _verdicts(server: str, *measured: dict[str, list[float]]) -> list[Verdict]:
    p50, computed, rate = (
        median_ratio(values[DBLOCKS], values[FLOOR]) for values in measured
    )
    return [
        Verdict(
            13, "hot loop, p50, against the floor's", p50, "×", at_most=HOT[server]
        ),
        Verdict(
            13, "client processor time, against the floor's", computed, "×", at_most=1.7
        ),
        Verdict(
            13,
            f"{CROWD} processes, a key each: throughput against the floor's",
            rate,
            "×",
            at_least=None if server == "sqlite" else 0.7,
        ),
    ]


def _locks() -> dict[str, Lock]:
    key = uuid4().hex
    return {FLOOR: Floor(key), DBLOCKS: contenders.DBLOCKS.lock(key)}


def alternate(*, cycles: int) -> dict[str, list[float]]:
    """Return the seconds of each cycle: one of the floor, one of the lock, and on."""
    locks = _locks()
    _hot_loop(locks, cycles // WARM_UP)
    return _hot_loop(locks, cycles)


def _hot_loop(locks: dict[str, Lock], cycles: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in locks}
    turns = [(lock, times[name].append) for name, lock in locks.items()]
    clock = time.perf_counter
    for _ in range(cycles):
        for lock, note in turns:
            began = clock()
            with lock:
                pass
            note(clock() - began)
    return times


def race(*, processes: int, seconds: float) -> list[Blocks]:
    """Let processes lock a key each, in blocks by turns that they begin together."""
    barrier = crew.barrier(processes)
    call = {"seconds": seconds, "barrier": barrier}
    return crew.run(_blocks_by_turns, [call] * processes)


def _blocks_by_turns(*, seconds: float, barrier: Barrier) -> Blocks:
    locks = _locks()
    blocks: dict[str, list[Block]] = {name: [] for name in locks}
    for lock in locks.values():
        _block(lock, seconds / WARM_UP)
    for name in ORDER:
        barrier.wait()
        blocks[name].append(_block(locks[name], seconds))
    return {
        name: Block(*map(sum, zip(*mine, strict=True))) for name, mine in blocks.items()
    }


def _block(lock: Lock, seconds: float) -> Block:
    cycles = 0
    computed = time.process_time()
    began = now = time.perf_counter()
    while now - began < seconds:
        with lock:
            pass
        cycles += 1
        now = time.perf_counter()
    return Block(cycles, now - began, time.process_time() - computed)
