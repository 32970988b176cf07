"""Locks that nobody else wants: time and statements of an acquire and release."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from uuid import uuid4

from benchmarks import contenders, counting, crew
from benchmarks.contenders import Contender
from benchmarks.figures import Figure, Result, Scale, Verdict, median_ratio

SHORTEST_TURN = 3
"""Cycles of a turn, also where they take longer than its time."""

CYCLE = "acquire and release, p50"


def measure(server: str, scale: Scale) -> Result:
    """Rows 1 to 3: all contenders take turns in one process, in changing order."""
    runs = [
        crew.run_one(take_turns, server=server, turns=scale.turns, turn=scale.turn)
        for _ in range(scale.runs)
    ]
    medians = {
        name: [statistics.median(run[name]) * 1000 for run in runs] for name in runs[0]
    }
    result = Result(
        figures=[Figure(CYCLE, name, "ms", values) for name, values in medians.items()]
    )
    if contenders.DBLOCKS.name in medians:
        result.verdicts = _verdicts(server, medians)
    return result


def _verdicts(server: str, medians: dict[str, list[float]]) -> list[Verdict]:
    def ratio(one: Contender, other: Contender) -> float:
        return median_ratio(medians[one.name], medians[other.name])

    dblocks = contenders.DBLOCKS
    peer = {"redis": contenders.REDIS_PY, "zookeeper": contenders.KAZOO}.get(server)
    if peer is not None:
        return [
            Verdict(
                1,
                f"uncontended, p50, against {peer.name}",
                ratio(dblocks, peer),
                "×",
                at_most=1.2,
            )
        ]
    faster = {"mariadb": 2.5, "postgres": 2.0}.get(server)
    return [
        Verdict(
            1,
            "uncontended, p50, against two bare updates",
            ratio(dblocks, contenders.BARE),
            "×",
            at_most=2.0 if server == "sqlite" else 1.3,
        ),
        *(
            Verdict(
                2,
                f"faster than {peer.name}",
                ratio(peer, dblocks),
                "×",
                at_least=faster,
            )
            for peer in (
                contenders.DB_MUTEX,
                contenders.DATABASE_LOCKS_CLASS,
                contenders.DATABASE_LOCKS,
            )
            if not (server == "sqlite" and peer is contenders.DATABASE_LOCKS)
        ),
        Verdict(
            3,
            "faster than the published recipe",
            ratio(contenders.RECIPE, dblocks),
            "×",
            at_least=6.0,
        ),
    ]


def take_turns(*, server: str, turns: int, turn: float) -> dict[str, list[float]]:
    """Return the seconds of each cycle, by contender; the first turn warms up."""
    everybody = contenders.on(server)
    keys = _keys(everybody)
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(turns + 1):
        for contender in _rotated(everybody, number):
            cycles = _turn(contender, keys[contender], turn if number else turn / 2)
            if number:
                times[contender.name] += cycles
    return dict(times)


def _rotated(everybody: list[Contender], number: int) -> Sequence[Contender]:
    start = number % len(everybody)
    order = everybody[start:] + everybody[:start]
    return order if number % 2 else order[::-1]


def _keys(everybody: Iterable[Contender]) -> dict[Contender, str]:
    """Return a key for each: some of them leave theirs taken when they end."""
    keys = {contender: uuid4().hex for contender in everybody}
    for contender, key in keys.items():
        contenders.prepare(contender, [key])
    return keys


def _turn(contender: Contender, key: str, seconds: float) -> list[float]:
    times: list[float] = []
    clock = time.perf_counter
    end = clock() + seconds
    while clock() < end or len(times) < SHORTEST_TURN:
        began = clock()
        with contender.lock(key):
            pass
        times.append(clock() - began)
    return times


def count_statements(server: str, scale: Scale) -> Result:
    """Row 4: statements of an acquire and release, on all connections."""
    counts = crew.run_one(_count, server=server, cycles=10)
    target = Verdict(
        4,
        "statements for an acquire and release",
        counts[contenders.DBLOCKS.name],
        "",
        at_most=2.0,
    )
    return Result(
        figures=[
            Figure("statements and commits per cycle", name, "", [count])
            for name, count in counts.items()
        ],
        verdicts=[target],
    )


def _count(*, server: str, cycles: int) -> dict[str, float]:
    counts = {}
    for contender, key in _keys(contenders.on(server)).items():
        _turn(contender, key, 0.0)
        with counting.statements() as sent:
            for _ in range(cycles):
                with contender.lock(key):
                    pass
        counts[contender.name] = len(sent) / cycles
    return counts
