"""Large numbers: rows in the table, rows to prune, leases to renew."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from benchmarks import contenders, crew
from benchmarks.crew import Barrier
from benchmarks.figures import Figure, Result, Scale, Series, Verdict, percentile

MANY = "many"
"""The alias of the database whose lock table is filled; in the other it is small."""

ONE_ROW = "a table of 1 row beside it"
ONE_KEY = "always the same key"
ANY_KEY = "another key each time"

WORKERS = 4
PAUSE = 0.01
ALONE = 3
"""How much longer than other runs the one without pruning is."""

LEASES = 1_000

_NUMBERS = {
    "mysql": "(SELECT seq AS number FROM seq_{start}_to_{stop}) AS numbers",
    "postgresql": "generate_series({start}, {stop}) AS numbers(number)",
    "sqlite": (
        "(WITH RECURSIVE counting(number) AS (SELECT {start} UNION ALL"
        " SELECT number + 1 FROM counting WHERE number < {stop})"
        " SELECT number FROM counting) AS numbers"
    ),
}
_KEY = {
    "mysql": "CONCAT('row:', LPAD(number, 7, '0'))",
    "postgresql": "'row:' || lpad(number::text, 7, '0')",
    "sqlite": "'row:' || substr('0000000' || number, -7)",
}


def row_key(number: int) -> str:
    """Return the key of one of the rows that are filled in."""
    return f"row:{number:07}"


def empty() -> None:
    """Remove what other measurements left; only a benchmark may do that."""
    from dblocks.models import DistributedLock

    rows = DistributedLock._base_manager.using("default").all()
    rows._raw_delete("default")


def fill(*, rows: int) -> None:
    """Fill the table up to a number of free rows, in the database's own SQL."""
    from django.db import connections

    from dblocks.models import DistributedLock

    connection = connections[MANY]
    present = DistributedLock.objects.using(MANY).count()
    key = "`key`" if connection.vendor == "mysql" else "key"
    numbers = _NUMBERS[connection.vendor].format(start=present + 1, stop=rows)
    with connection.cursor() as cursor:
        if rows > present:
            cursor.execute(
                f"INSERT INTO dblocks_distributedlock ({key}, owner, holder, note,"
                f" hold_count, version, expires_at) SELECT {_KEY[connection.vendor]},"
                f" '', 'web-1 pid 4711 MainThread', '', 0, 1, '2020-01-01 00:00:00'"
                f" FROM {numbers}"
            )
        table = "TABLE " if connection.vendor == "mysql" else ""
        vacuum = "VACUUM " if connection.vendor == "postgresql" else ""
        cursor.execute(f"{vacuum}ANALYZE {table}dblocks_distributedlock")


def measure_rows(server: str, scale: Scale) -> Result:
    """Row 10: an acquire with many rows in the table, and with one."""
    name = contenders.DBLOCKS.name
    result = Result()
    runs: list[dict[str, float]] = []
    lines: dict[str, list[float]] = defaultdict(list)
    crew.run_one(empty)
    for rows in scale.table:
        crew.run_one(fill, rows=rows)
        runs = [
            crew.run_one(compare, rows=rows, turns=scale.turns // 2, turn=scale.turn)
            for _ in range(scale.runs)
        ]
        for table in (ONE_ROW, ONE_KEY, ANY_KEY):
            values = [run[table] * 1000 for run in runs]
            result.figures.append(
                Figure(f"acquire, p50, {rows:,} rows, {table}", name, "ms", values)
            )
            lines[table].append(statistics.median(values))
    result.series = [
        Series("rows", table, scale.table, line) for table, line in lines.items()
    ]
    result.verdicts = [
        Verdict(
            10,
            f"acquire with {scale.table[-1]:,} rows against 1 row, p50",
            statistics.median(run[ONE_KEY] / run[ONE_ROW] for run in runs),
            "×",
            at_most=1.2,
        ),
        Verdict(
            10,
            f"the same, of {scale.table[-1]:,} keys another one each time",
            statistics.median(run[ANY_KEY] / run[ONE_ROW] for run in runs),
            "×",
        ),
    ]
    return result


def compare(*, rows: int, turns: int, turn: float) -> dict[str, float]:
    """Return the median seconds of an acquire in the small and in the large table."""
    from dblocks import distributed_lock

    some = row_key((rows + 1) // 2)
    choices: dict[str, tuple[str, Callable[[], str]]] = {
        ONE_ROW: ("default", lambda: row_key(1)),
        ONE_KEY: (MANY, lambda: some),
        ANY_KEY: (MANY, lambda: row_key(random.randint(1, rows))),
    }
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(turns + 1):
        names = list(choices) if number % 2 else list(choices)[::-1]
        for name in names:
            backend, key = choices[name]
            end = time.perf_counter() + turn
            while time.perf_counter() < end:
                lock = distributed_lock(key(), backend=backend)
                began = time.perf_counter()
                lease = lock.acquire()
                took = time.perf_counter() - began
                lease.release()
                if number:
                    times[name].append(took)
    return {name: statistics.median(mine) for name, mine in times.items()}


def measure_prune(server: str, scale: Scale) -> Result:
    """Row 11: how much pruning slows down those who lock meanwhile."""
    rows = scale.table[-1]
    crew.run_one(fill, rows=rows)
    without, _ = _work_beside(seconds=scale.contend * ALONE)
    during, took = _work_beside(seconds=None)
    name = contenders.DBLOCKS.name
    result = Result(
        figures=[
            Figure("rows pruned a second", name, "/s", [rows / took]),
            *(
                Figure(f"acquire and release, p{percent}, {when}", name, "ms", [value])
                for when, times in (("alone", without), ("beside", during))
                for percent in (50, 99)
                for value in [percentile(times, percent) * 1000]
            ),
        ]
    )
    result.verdicts = [
        Verdict(
            11,
            f"while {rows:,} rows are pruned: p99 of others",
            percentile(during, 99) / percentile(without, 99),
            "×",
            at_most=2.0,
        )
    ]
    return result


def _work_beside(seconds: float | None) -> tuple[list[float], float]:
    """Let workers lock beside a pruner, or beside one that only waits so long."""
    barrier = crew.barrier(WORKERS + 1)
    stop = crew.event()
    calls = [
        {"who": who, "seconds": seconds, "barrier": barrier, "stop": stop}
        for who in range(WORKERS + 1)
    ]
    *workers, [took] = crew.run(_prune_or_work, calls)
    return [t for worker in workers for t in worker], took


def _prune_or_work(
    *, who: int, seconds: float | None, barrier: Barrier, stop: crew.Event
) -> list[float]:
    """Lock a key of its own until the last of them, the pruner, is done."""
    from dblocks import distributed_lock
    from dblocks.models import DistributedLock

    if who == WORKERS:
        barrier.wait()
        began = time.monotonic()
        try:
            if seconds is None:
                DistributedLock.objects.using(MANY).prune(3600)
            else:
                time.sleep(seconds)
        finally:
            stop.set()
        return [time.monotonic() - began]
    lock = distributed_lock(f"worker:{who}", backend=MANY, timeout=30)
    with lock:
        pass
    barrier.wait()
    times = []
    while not stop.is_set():
        began = time.perf_counter()
        with lock:
            pass
        times.append(time.perf_counter() - began)
        time.sleep(PAUSE)
    return times


def measure_renewal(server: str, scale: Scale) -> Result:
    """Row 12: what it costs to keep many leases alive."""
    pid = os.environ.get("SERVER_PID")
    client, at_server, lost = crew.run_one(
        renew, seconds=scale.renewing, server=int(pid) if pid else None
    )
    name = contenders.DBLOCKS.name
    figures = [Figure(f"{LEASES:,} leases, client", name, "% of a core", [client])]
    if at_server is not None:
        figures.append(
            Figure(f"{LEASES:,} leases, server", name, "% of a core", [at_server])
        )
    return Result(
        figures=figures,
        verdicts=[
            Verdict(
                12,
                f"renewing {LEASES:,} leases: time of one core",
                client,
                "%",
                at_most=2.0,
            )
        ],
        faults=[f"renewal: {lost} leases were lost"] if lost else [],
    )


def renew(*, seconds: float, server: int | None) -> tuple[float, float | None, int]:
    """Return the percentages of a core that renewals cost, and the leases lost."""
    from dblocks import distributed_lock

    leases = [distributed_lock(row_key(n)).acquire() for n in range(LEASES)]
    # The first renewals still fall into step.
    time.sleep(seconds / 3)
    began, used = time.monotonic(), time.process_time()
    used_by_server = None if server is None else processor_time(server)
    time.sleep(seconds)
    passed = time.monotonic() - began
    client = (time.process_time() - used) / passed * 100
    at_server = None
    if server is not None and used_by_server is not None:
        at_server = (processor_time(server) - used_by_server) / passed * 100
    lost = sum(not lease.held for lease in leases)
    for lease in leases:
        lease.release()
    return client, at_server, lost


def processor_time(pid: int) -> float:
    """Return the seconds that a process and its children have computed."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if stat.parent.name == str(pid):
            ticks += sum(map(int, fields[11:15]))
        elif fields[1] == str(pid):
            ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")
