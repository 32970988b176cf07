"""Permits: four at a time beside one at a time, wanted by sixteen processes."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from uuid import uuid4

from benchmarks import contenders, contention, counting, crew
from benchmarks.contention import CROWD, CROWD_SECONDS, HOLD, Run
from benchmarks.figures import Figure, Result, Scale, Verdict, median_ratio

PERMITS = 4

COUNTED = 50
"""Cycles whose statements are counted."""

AT_A_TIME = (1, PERMITS)


def _lock(permits: int) -> Callable[[str], AbstractContextManager[object]]:
    def make(key: str) -> AbstractContextManager[object]:
        from dblocks import distributed_lock

        return distributed_lock(key, permits=permits)

    return make


CONTENDERS = {
    permits: replace(
        contenders.DBLOCKS, name=f"dblocks, permits={permits}", lock=_lock(permits)
    )
    for permits in AT_A_TIME
}


def measure(server: str, scale: Scale) -> Result:
    """Row 15: sixteen processes want one key for 2 ms each, four at a time or one.

    The two take turns. Statements are those of one process, alone with the key.
    """
    runs: dict[int, list[Run]] = {permits: [] for permits in AT_A_TIME}
    for number in range(scale.runs):
        for permits in AT_A_TIME if number % 2 == 0 else AT_A_TIME[::-1]:
            run = contention.contend(
                CONTENDERS[permits],
                processes=CROWD,
                seconds=scale.contend * CROWD_SECONDS / 2,
                hold=HOLD,
                permits=permits,
            )
            runs[permits].append(run)
    counts = crew.run_one(count_statements)
    return judge(server, runs, counts)


def judge(server: str, runs: dict[int, list[Run]], counts: dict[int, float]) -> Result:
    """Set four permits against one."""
    result = Result()
    for permits, mine in runs.items():
        name = CONTENDERS[permits].name
        result.figures += [
            Figure("grants a second", name, "/s", [run.rate for run in mine]),
            Figure(
                "least-served by most-served", name, "", [run.fairness for run in mine]
            ),
            Figure(
                "statements per grant",
                name,
                "",
                [run.statements_per_grant for run in mine],
            ),
            Figure("statements per cycle, alone", name, "", [counts[permits]]),
        ]
        for run in mine:
            result.faults += run.faults(f"16 processes, {permits} at a time")
    rates = {permits: [run.rate for run in mine] for permits, mine in runs.items()}
    fairness = statistics.median(run.fairness for run in runs[PERMITS])
    result.verdicts = [
        Verdict(
            15,
            f"16 processes, 2 ms: throughput of {PERMITS} permits against one",
            median_ratio(rates[PERMITS], rates[1]),
            "×",
            at_least=3.0,
        ),
        Verdict(
            15,
            f"16 processes, {PERMITS} permits: least-served by most-served",
            fairness,
            "",
            at_least=0.8,
        ),
        Verdict(
            15,
            f"statements for an acquire and release of {PERMITS} permits",
            counts[PERMITS],
            "",
            at_most=3.0 if server == "mariadb" else 2.0,
        ),
    ]
    return result


def count_statements() -> dict[int, float]:
    """Count what an acquire and release sends where permits are free."""
    counts = {}
    for permits, contender in CONTENDERS.items():
        lock = contender.lock(uuid4().hex)
        # Each permit gets its row.
        for _ in range(COUNTED):
            with lock:
                pass
        with counting.statements() as sent:
            for _ in range(COUNTED):
                with lock:
                    pass
        counts[permits] = len(sent) / COUNTED
    return counts
