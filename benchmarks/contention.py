"""One key that several processes or threads want."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any
from uuid import uuid4

from benchmarks import contenders, counting, crew, history
from benchmarks.contenders import Contender
from benchmarks.crew import Barrier
from benchmarks.figures import (
    Figure,
    Result,
    Scale,
    Series,
    Verdict,
    median_ratio,
    percentile,
)
from benchmarks.history import Grant

HOLD = 0.002
CROWD = 16
CROWD_SECONDS = 3.0
"""How much longer than other runs the one is in which the crowd is counted."""

LONGEST_TURN = 0.03
"""For how long two processes hold the key that they hand to each other, at most."""

THREADS_HOLD = 0.005
"""For how long each thread holds the key that threads share."""

PAUSE_AFTER_ERROR = 0.005


@dataclass
class Work:
    """What one process did."""

    grants: list[Grant] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    statements: int = 0


@dataclass
class Run:
    """What all processes of a run did in its time."""

    seconds: float
    works: list[Work]
    #: Whether each process had a key of its own.
    distinct: bool = False
    #: How many may have the key at a time.
    permits: int = 1

    @property
    def overlaps(self) -> int:
        return 0 if self.distinct else history.overlaps(self.grants, self.permits)

    @property
    def grants(self) -> list[Grant]:
        return [grant for work in self.works for grant in work.grants]

    @property
    def rate(self) -> float:
        return len(self.grants) / self.seconds

    @property
    def errors(self) -> Counter[str]:
        return sum((work.errors for work in self.works), Counter())

    @property
    def statements_per_grant(self) -> float:
        sent = sum(work.statements for work in self.works)
        return sent / max(1, len(self.grants))

    @property
    def fairness(self) -> float:
        return history.fairness(len(work.grants) for work in self.works)

    def faults(self, name: str) -> list[str]:
        """Return what must not happen to dblocks."""
        faults = [f"{name}: {count} {error}" for error, count in self.errors.items()]
        if self.overlaps:
            faults.append(f"{name}: {self.overlaps} overlaps")
        return faults


def contend(
    contender: Contender,
    *,
    processes: int,
    seconds: float,
    hold: float,
    distinct: bool = False,
    permits: int = 1,
) -> Run:
    """Let processes lock and unlock as often as they can: one key, or one each."""
    name = uuid4().hex
    keys = [f"{name}:{who}" if distinct else name for who in range(processes)]
    crew.run_one(contenders.prepare, contender=contender, keys=keys)
    barrier = crew.barrier(processes)
    works = crew.run(
        _work,
        [
            {
                "who": who,
                "contender": contender,
                "key": key,
                "seconds": seconds,
                "hold": hold,
                "barrier": barrier,
            }
            for who, key in enumerate(keys)
        ],
    )
    return Run(seconds, works, distinct, permits)


def _work(
    *,
    who: int,
    contender: Contender,
    key: str,
    seconds: float,
    hold: float,
    barrier: Barrier,
) -> Work:
    work = Work()
    _warm_up(contender, key, who)
    barrier.wait()
    end = time.monotonic() + seconds
    with counting.statements() as sent:
        while (wanted := time.monotonic()) < end:
            try:
                with contender.lock(key):
                    granted = time.monotonic()
                    if hold:
                        time.sleep(hold)
                    leaving = time.monotonic()
            except Exception as error:
                work.errors[type(error).__name__] += 1
                time.sleep(PAUSE_AFTER_ERROR)
            else:
                left = time.monotonic()
                if left <= end:
                    work.grants.append(Grant(who, wanted, granted, leaving, left))
                    work.statements = len(sent)
    return work


def _warm_up(contender: Contender, key: str, who: int) -> None:
    """Connect, and build what is built only once."""
    own = f"{key}:{who}"
    contenders.prepare(contender, [own])
    with contender.lock(own):
        pass


def measure_throughput(server: str, scale: Scale) -> Result:
    """Row 7: eight processes, one key, held for 2 ms."""
    everybody = contenders.on(server, waiting=True)
    runs: dict[str, list[Run]] = {contender.name: [] for contender in everybody}
    for number in range(scale.runs):
        for contender in everybody if number % 2 == 0 else everybody[::-1]:
            run = contend(contender, processes=8, seconds=scale.contend, hold=HOLD)
            runs[contender.name].append(run)
    result = Result()
    for name, mine in runs.items():
        result.figures += [
            Figure("grants a second", name, "/s", [run.rate for run in mine]),
            Figure(
                "least-served by most-served", name, "", [run.fairness for run in mine]
            ),
            Figure("errors", name, "", [sum(run.errors.values()) for run in mine]),
            Figure("overlaps", name, "", [run.overlaps for run in mine]),
        ]
    dblocks = runs.get(contenders.DBLOCKS.name, [])
    for run in dblocks:
        result.faults += run.faults("8 processes, one key")
    if dblocks and contenders.SESSION_LOCK.name in runs:

        def ratio(contender: Contender) -> float:
            mine, session = (
                [run.rate for run in runs[name]]
                for name in (contender.name, contenders.SESSION_LOCK.name)
            )
            return median_ratio(mine, session)

        result.verdicts = [
            Verdict(
                7,
                "8 processes, one key, 2 ms: throughput against the session lock's",
                ratio(contenders.DBLOCKS),
                "×",
                at_least=0.7,
                bare=ratio(contenders.QUEUED_BARE),
            )
        ]
    return result


def measure_crowd(server: str, scale: Scale) -> Result:
    """Row 6: sixteen processes, one key: who is served, and with how many statements.

    Held for 2 ms, as in row 7. On Redis, beside what else waits there.
    """
    peers = contenders.on(server, waiting=True) if server == "redis" else []
    everybody = peers or [contenders.DBLOCKS]
    runs: dict[str, list[Run]] = {contender.name: [] for contender in everybody}
    for number in range(scale.runs):
        for contender in everybody if number % 2 == 0 else everybody[::-1]:
            run = contend(
                contender,
                processes=CROWD,
                seconds=scale.contend * CROWD_SECONDS,
                hold=HOLD,
            )
            runs[contender.name].append(run)
    mine = runs[contenders.DBLOCKS.name]
    result = Result(
        verdicts=_verdicts_of_crowd(server, runs),
        faults=[fault for run in mine for fault in run.faults("16 processes, one key")],
    )
    for name, theirs in runs.items():
        fairness = [run.fairness for run in theirs]
        statements = [run.statements_per_grant for run in theirs]
        result.figures += [
            Figure("least-served by most-served", name, "", fairness),
            Figure("statements per grant", name, "", statements),
            Figure("grants a second", name, "/s", [run.rate for run in theirs]),
        ]
    return result


def _verdicts_of_crowd(server: str, runs: dict[str, list[Run]]) -> list[Verdict]:
    mine = runs[contenders.DBLOCKS.name]
    return [
        Verdict(
            6,
            "16 processes, one key: least-served by most-served",
            statistics.median(run.fairness for run in mine),
            "",
            at_least=0.5 if server == "sqlite" else 0.9,
        ),
        Verdict(
            6,
            "16 processes, one key: statements per grant",
            statistics.median(run.statements_per_grant for run in mine),
            "",
            at_most=8.0,
        ),
        *(
            Verdict(
                6,
                f"16 processes, one key: throughput against {name}",
                median_ratio([run.rate for run in mine], [run.rate for run in theirs]),
                "×",
                at_least=1.0,
            )
            for name, theirs in runs.items()
            if theirs is not mine
        ),
    ]


def measure_hand_off(server: str, scale: Scale) -> Result:
    """Row 5: from a release to the grant in another process, which is waiting."""
    everybody = contenders.on(server, waiting=True)
    if server == "sqlite":
        # Does nothing there.
        everybody.remove(contenders.DATABASE_LOCKS)
    times: dict[str, list[list[float]]] = {c.name: [] for c in everybody}
    faults: list[str] = []
    for number in range(scale.runs):
        for contender in everybody if number % 2 == 0 else everybody[::-1]:
            grants = play_ping_pong(contender, scale.hand_offs, seconds=scale.contend)
            times[contender.name].append(history.hand_offs(grants))
            if contender is contenders.DBLOCKS and history.overlaps(grants):
                faults.append("hand-off: overlaps")
    result = Result(faults=faults)
    medians: dict[tuple[str, int], float] = {}
    for name, runs in times.items():
        for percent in (50, 99):
            values = [percentile(run, percent) * 1000 for run in runs if run]
            if values:
                figure = Figure(f"hand-off, p{percent}", name, "ms", values)
                medians[name, percent] = figure.median
                result.figures.append(figure)
    mine = contenders.DBLOCKS.name
    if (mine, 50) in medians:
        bare = None
        if server not in {"redis", "zookeeper"}:
            bare = _bare_hand_off("hand-off, p50", LONGEST_TURN, scale)
            result.figures.append(bare)
        result.verdicts = _verdicts_of_hand_off(server, medians, bare)
    return result


def _verdicts_of_hand_off(
    server: str, medians: dict[tuple[str, int], float], bare: Figure | None
) -> list[Verdict]:
    mine = contenders.DBLOCKS.name
    target = "hand-off to a waiting process"
    if server == "zookeeper":
        # Its disk decides how long a hand-off takes.
        peer = contenders.KAZOO.name
        ratio = medians[mine, 50] / medians[peer, 50]
        return [Verdict(5, f"{target}, p50, against {peer}", ratio, "×", at_most=1.0)]
    return [
        Verdict(
            5,
            f"{target}, p50",
            medians[mine, 50],
            "ms",
            at_most={"redis": 1.5, "sqlite": 2.0}.get(server, 3.0),
            bare=None if bare is None else bare.median,
        ),
        Verdict(
            5,
            f"{target}, p99",
            medians[mine, 99],
            "ms",
            at_most=None if server == "sqlite" else 10.0,
        ),
    ]


def play_ping_pong(contender: Contender, rounds: int, seconds: float) -> list[Grant]:
    """Let two processes hand a key to each other; one waits whenever one holds."""
    key = uuid4().hex
    crew.run_one(contenders.prepare, contender=contender, keys=[key])
    shared = {"contender": contender, "key": key, "rounds": rounds, "seconds": seconds}
    barrier = crew.barrier(2)
    sides = crew.run(
        _ping_pong,
        [
            {**shared, "who": who, "other": end, "barrier": barrier}
            for who, end in enumerate(crew.pipe())
        ],
    )
    return [grant for side in sides for grant in side]


def _ping_pong(
    *,
    who: int,
    contender: Contender,
    key: str,
    rounds: int,
    seconds: float,
    other: Connection[Any, Any],
    barrier: Barrier,
) -> list[Grant]:
    grants: list[Grant] = []
    _warm_up(contender, key, who)
    barrier.wait()
    end = time.monotonic() + seconds
    # Each begins to wait when it hears that the other one has the key.
    going_on = who == 0 or other.recv()
    while going_on:
        wanted = time.monotonic()
        with contender.lock(key):
            granted = time.monotonic()
            last = len(grants) + 1 >= rounds or granted > end
            other.send(not last)
            time.sleep(random.uniform(LONGEST_TURN / 3, LONGEST_TURN))
            leaving = time.monotonic()
        grants.append(Grant(who, wanted, granted, leaving, time.monotonic()))
        going_on = not last and other.recv()
    return grants


def _bare_hand_off(name: str, rest: float, scale: Scale) -> Figure:
    """Measure how long a hand-off takes at least."""
    runs = [
        crew.run_one(_release_and_grant, rest=rest, rounds=scale.hand_offs)
        for _ in range(scale.runs)
    ]
    values = [percentile(times, 50) * 1000 for times in runs]
    return Figure(name, "a bare release and grant after a rest", "ms", values)


def _release_and_grant(*, rest: float, rounds: int) -> list[float]:
    """Time the two commits that each hand-off has, after a hold without work."""
    key = uuid4().hex
    contenders.prepare(contenders.BARE, [key])
    times = []
    lock = contenders.Bare(key)
    lock.__enter__()
    for _ in range(rounds):
        time.sleep(rest)
        leaving = time.monotonic()
        lock.__exit__()
        lock = contenders.Bare(key)
        lock.__enter__()
        times.append(time.monotonic() - leaving)
    return times


def measure_threads(server: str, scale: Scale) -> Result:
    """Row 9: from a release to the grant in another thread of the process."""
    runs = [
        crew.run_one(share_among_threads, threads=8, seconds=scale.contend)
        for _ in range(scale.runs)
    ]
    name = contenders.DBLOCKS.name
    asking = [float(run.asking) for run in runs]
    bare = _bare_hand_off("hand-off between threads, p50", THREADS_HOLD, scale)
    half, most = (
        Figure(
            f"hand-off between threads, p{percent}",
            name,
            "ms",
            [percentile(run.hand_offs, percent) * 1000 for run in runs],
        )
        for percent in (50, 99)
    )
    result = Result(
        figures=[
            bare,
            half,
            most,
            Figure("threads that ask at once", name, "", asking),
        ],
        verdicts=[
            Verdict(
                9,
                "hand-off between 8 threads of a process, p50",
                half.median,
                "ms",
                at_most=1.0,
                bare=bare.median,
            ),
            Verdict(
                9,
                "threads that ask the database while one holds",
                max(asking),
                "",
                at_most=1.0,
            ),
        ],
    )
    if any(run.overlaps for run in runs):
        result.faults.append("8 threads, one key: overlaps")
    return result


@dataclass(frozen=True)
class Sharing:
    """How threads shared a key."""

    hand_offs: list[float]
    #: The most threads that asked the database while one held the key.
    asking: int
    overlaps: int


def share_among_threads(*, threads: int, seconds: float) -> Sharing:
    """Let threads of this process contend for a key in turn."""
    from django.db import connections

    key = uuid4().hex
    grants: list[Grant] = []
    barrier = threading.Barrier(threads)

    def work() -> None:
        with contenders.DBLOCKS.lock(f"{key}:{threading.get_ident()}"):
            barrier.wait(crew.START_TIMEOUT)
        end = time.monotonic() + seconds
        while (wanted := time.monotonic()) < end:
            with contenders.DBLOCKS.lock(key):
                granted = time.monotonic()
                time.sleep(THREADS_HOLD)
                leaving = time.monotonic()
            left = time.monotonic()
            who = threading.get_ident()
            grants.append(Grant(who, wanted, granted, leaving, left))
        connections.close_all()

    with counting.statements() as sent:
        workers = [threading.Thread(target=work) for _ in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    return Sharing(
        history.hand_offs(grants), _most_asking(grants, sent), history.overlaps(grants)
    )


def _most_asking(grants: Iterable[Grant], sent: list[counting.Sent]) -> int:
    most = 0
    # At first all ask at once, as none waits yet.
    for grant in sorted(grants, key=lambda grant: grant.granted)[1:]:
        asking = {
            statement.thread
            for statement in sent
            if grant.granted < statement.at < grant.leaving
        }
        most = max(most, len(asking - {grant.who}))
    return most


def measure_long_wait(server: str, scale: Scale) -> Result:
    """Row 8: many threads of a process wait for long for keys that others hold."""
    runs = wait_for_long(keys=4, threads=10, seconds=scale.long_wait)
    name = contenders.DBLOCKS.name
    hand_off = Figure(
        "hand-off after the wait", name, "ms", [t * 1000 for t in runs.hand_offs]
    )
    result = Result(
        figures=[
            Figure(
                "statements a second and key, once all wait", name, "/s", [runs.average]
            ),
            Figure(
                "statements a second and key, at the end", name, "/s", [runs.at_end]
            ),
            hand_off,
        ]
    )
    if not scale.quick:
        # A waiter of Redis asks every 20 s: more rarely than the end of it lasts.
        is_redis = server == "redis"
        result.verdicts = [
            Verdict(
                8,
                "statements a second and key after a minute's wait",
                runs.average if is_redis else runs.at_end,
                "/s",
                at_most=0.2 if is_redis else 10.0,
            ),
            Verdict(
                8,
                "hand-off after a minute's wait, p50",
                hand_off.median,
                "ms",
                at_most=100.0,
            ),
        ]
    return result


@dataclass(frozen=True)
class LongWait:
    """A long wait: statements a second and key, and the first hand-offs after it."""

    #: From when all have begun to wait.
    average: float
    at_end: float
    hand_offs: list[float]


def wait_for_long(*, keys: int, threads: int, seconds: float) -> LongWait:
    """Hold keys in one process while the threads of another wait for them."""
    names = [uuid4().hex for _ in range(keys)]
    barrier = crew.barrier(2)
    shared = {"keys": names, "seconds": seconds, "barrier": barrier}
    sides = crew.run(
        _long_side, [{**shared, "threads": 0}, {**shared, "threads": threads}]
    )
    (start, sent_by_holder, released), (_, sent_by_waiters, granted) = sides
    end = min(released.values())
    sent = [at for at in sent_by_holder + sent_by_waiters if start <= at < end]
    settled, last = start + seconds / 10, seconds / 5
    return LongWait(
        average=sum(at >= settled for at in sent) / (end - settled) / keys,
        at_end=sum(at >= end - last for at in sent) / last / keys,
        hand_offs=[granted[key] - released[key] for key in names],
    )


def _long_side(
    *, keys: list[str], threads: int, seconds: float, barrier: Barrier
) -> tuple[float, list[float], dict[str, float]]:
    """The holder's side, or that of the waiting threads."""
    with counting.statements() as sent:
        if threads:
            barrier.wait()
            start = time.monotonic()
            moments = _wait_in_threads(keys, threads)
        else:
            start, moments = _hold_for_long(keys, seconds, barrier)
    return start, [statement.at for statement in sent], moments


def _hold_for_long(
    keys: list[str], seconds: float, barrier: Barrier
) -> tuple[float, dict[str, float]]:
    from dblocks import distributed_lock

    leases = {key: distributed_lock(key).acquire() for key in keys}
    barrier.wait()
    start = time.monotonic()
    time.sleep(seconds)
    released = {}
    for key, lease in leases.items():
        released[key] = time.monotonic()
        lease.release()
        time.sleep(0.25)
    return start, released


def _wait_in_threads(keys: list[str], threads: int) -> dict[str, float]:
    from django.db import connections

    from dblocks import distributed_lock

    granted: dict[str, float] = {}

    def wait(key: str) -> None:
        with distributed_lock(key, timeout=None):
            granted.setdefault(key, time.monotonic())
        connections.close_all()

    workers = [
        threading.Thread(target=wait, args=[key])
        for key in keys
        for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return granted


def measure_scaling(server: str, scale: Scale) -> Result:
    """Grants a second over the number of processes, each key held for no time."""
    result = Result()
    for distinct, plot, what, everybody in (
        (
            True,
            "distinct-keys",
            "a key each",
            [contenders.DBLOCKS, contenders.BARE, contenders.SESSION_LOCK],
        ),
        (
            False,
            "one-key",
            "one key",
            [contenders.DBLOCKS, contenders.SESSION_LOCK, contenders.RECIPE],
        ),
    ):
        present = [c for c in everybody if server in c.servers]
        runs: dict[Contender, list[Run]] = {contender: [] for contender in present}
        for number, processes in enumerate(scale.processes):
            for contender in present if number % 2 == 0 else present[::-1]:
                run = contend(
                    contender,
                    processes=processes,
                    seconds=scale.contend / 2,
                    hold=0.0,
                    distinct=distinct,
                )
                runs[contender].append(run)
        for contender, mine in runs.items():
            result.series.append(
                Series(
                    plot, contender.name, scale.processes, [run.rate for run in mine]
                )
            )
            result.figures += [
                Figure(f"{what}, {processes} processes", contender.name, "/s", [rate])
                for processes, rate in zip(
                    scale.processes, (run.rate for run in mine), strict=True
                )
            ]
        mine = runs[contenders.DBLOCKS]
        result.faults += [fault for run in mine for fault in run.faults(plot)]
        if not distinct:
            asked = [run.statements_per_grant for run in mine]
            name = contenders.DBLOCKS.name
            result.series.append(Series("statements", name, scale.processes, asked))
    return result
