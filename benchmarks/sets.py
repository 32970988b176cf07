"""Several keys at once: ``python -m benchmarks --only sets --database postgres``.

The floor of a set is the least that Django can do for so many keys: the two narrow
updates of :mod:`benchmarks.floor` for each of them, those that take in one transaction
and those that free in another. It has no clock and no expiry, and who takes the same
keys in another order can deadlock it.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from uuid import uuid4

from django.db import transaction

from benchmarks import counting, crew
from benchmarks.figures import Figure, Result, Scale, Verdict, median_ratio
from benchmarks.floor import Floor

SIZES = 2, 10, 100

NESTED_SIZE = 10
"""How many single locks, one inside the other, are set beside a lock of as many keys.

In a hundred of them a cycle would take a tenth of a second.
"""

FLOOR = "an update a key, in one transaction"
DBLOCKS = "dblocks, one lock of several keys"
NESTED = "dblocks, a lock a key"

WARM_UP = 5
"""How much shorter than what is measured the loop is that warms up."""

COUNTED = 20
"""Cycles whose statements are counted."""

Lock = AbstractContextManager[object]
Times = Mapping[int, Mapping[str, Sequence[float]]]


class FloorOfSet:
    """The narrow updates of so many keys, as a context manager made once for them."""

    def __init__(self, keys: Sequence[str]) -> None:
        self.floors = [Floor(key) for key in keys]

    def __enter__(self) -> None:
        with transaction.atomic():
            for floor in self.floors:
                floor.__enter__()

    def __exit__(self, *exc_info: object) -> None:
        with transaction.atomic():
            for floor in self.floors:
                floor.__exit__()


class Nested:
    """Single locks, made once, that are taken one after the other."""

    def __init__(self, keys: Sequence[str]) -> None:
        from dblocks import distributed_lock

        self.locks = [distributed_lock(key) for key in keys]
        self.stack = ExitStack()

    def __enter__(self) -> None:
        for lock in self.locks:
            self.stack.enter_context(lock)

    def __exit__(self, *exc_info: object) -> None:
        self.stack.close()


def measure(server: str, scale: Scale) -> Result:
    """Row 14: a lock of several free keys, beside narrow updates and single locks.

    By turns in one process, each made once for its keys. The updates, one a key as
    the floor's, take all keys in one transaction and free them in another. The single
    locks are nested. Statements are counted by themselves, on all connections.
    """
    cycles = {size: max(scale.cycles // size, scale.cycles // 20) for size in SIZES}
    runs = [crew.run_one(take_turns, cycles=cycles) for _ in range(scale.runs)]
    counts = crew.run_one(count_statements)
    return judge(runs, counts)


def judge(runs: Sequence[Times], counts: Mapping[int, tuple[float, float]]) -> Result:
    """Set the lock's times against the others', and judge its statements."""
    result = Result()
    for size in SIZES:
        medians = {
            name: [statistics.median(run[size][name]) * 1000 for run in runs]
            for name in runs[0][size]
        }
        result.figures += [
            Figure(f"{size} keys, acquire and release, p50", name, "ms", values)
            for name, values in medians.items()
        ]
        result.verdicts += _verdicts(size, medians)
    for end, (what, most) in enumerate((("acquire", 2.0), ("release", 1.0))):
        sent = {size: counts[size][end] for size in SIZES}
        result.figures += [
            Figure(f"statements to {what} {size} keys", DBLOCKS, "", [count])
            for size, count in sent.items()
        ]
        result.verdicts.append(
            Verdict(
                14,
                f"statements to {what} 2, 10 and 100 keys, the most",
                max(sent.values()),
                "",
                at_most=most,
            )
        )
    return result


def _verdicts(size: int, medians: Mapping[str, list[float]]) -> list[Verdict]:
    verdicts = [
        Verdict(
            14,
            f"{size} keys at once, p50, against an update a key in one transaction",
            median_ratio(medians[DBLOCKS], medians[FLOOR]),
            "×",
            at_most=1.5 if size >= 10 else None,
        )
    ]
    if NESTED in medians:
        verdicts.append(
            Verdict(
                14,
                f"{size} keys at once: faster than as many nested locks",
                median_ratio(medians[NESTED], medians[DBLOCKS]),
                "×",
                at_least=5.0,
            )
        )
    return verdicts


def take_turns(*, cycles: Mapping[int, int]) -> Times:
    """Return the seconds of each cycle, by number of keys and contender."""
    times: dict[int, dict[str, list[float]]] = {}
    for size, most in cycles.items():
        everybody = _contenders(size)
        _loop(everybody, max(3, most // WARM_UP))
        times[size] = _loop(everybody, most)
    return times


def _contenders(size: int) -> dict[str, Lock]:
    from dblocks import distributed_lock

    keys = [uuid4().hex for _ in range(size)]
    found: dict[str, Lock] = {
        FLOOR: FloorOfSet(keys),
        DBLOCKS: distributed_lock(*keys),
    }
    if size == NESTED_SIZE:
        found[NESTED] = Nested(keys)
    return found


def _loop(everybody: Mapping[str, Lock], cycles: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = defaultdict(list)
    order = list(everybody.items())
    clock = time.perf_counter
    for _ in range(cycles):
        for name, lock in order:
            began = clock()
            with lock:
                pass
            times[name].append(clock() - began)
        # None is always the one that comes after another.
        order.reverse()
    return dict(times)


def count_statements() -> dict[int, tuple[float, float]]:
    """Count what is sent to acquire and to release, by number of keys."""
    counts = {}
    for size in SIZES:
        lock = _contenders(size)[DBLOCKS]
        with lock:
            pass
        taken = freed = 0
        with counting.statements() as sent:
            for _ in range(COUNTED):
                before = len(sent)
                lock.__enter__()
                middle = len(sent)
                lock.__exit__(None, None, None)
                taken += middle - before
                freed += len(sent) - middle
        counts[size] = taken / COUNTED, freed / COUNTED
    return counts
