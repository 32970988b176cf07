"""What there is to measure, and how one server is gone through."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks import (
    contention,
    crew,
    floor,
    permits,
    scale,
    sets,
    telemetry,
    uncontended,
)
from benchmarks.figures import Result, Scale

DATABASES = ("mariadb", "postgres", "sqlite")
COUNTED = (*DATABASES, "redis")
"""Where statements are counted."""

SERVERS = (*COUNTED, "zookeeper")
TITLES = {
    "mariadb": "MariaDB",
    "postgres": "PostgreSQL",
    "sqlite": "SQLite",
    "redis": "Redis",
    "zookeeper": "ZooKeeper",
}


@dataclass(frozen=True)
class Measurement:
    """One measurement; it may answer several of the targets' rows."""

    name: str
    title: str
    run: Callable[[str, Scale], Result]
    rows: tuple[int, ...]
    servers: tuple[str, ...] = DATABASES


MEASUREMENTS = [
    Measurement("uncontended", "A free key", uncontended.measure, (1, 2, 3), SERVERS),
    Measurement(
        "statements", "Statements", uncontended.count_statements, (4,), COUNTED
    ),
    Measurement("floor", "The floor", floor.measure, (13,)),
    Measurement("sets", "Several keys", sets.measure, (14,)),
    Measurement(
        "hand-off",
        "Hand-off between processes",
        contention.measure_hand_off,
        (5,),
        SERVERS,
    ),
    Measurement("crowd", "Sixteen processes", contention.measure_crowd, (6,), COUNTED),
    Measurement("permits", "Permits", permits.measure, (15,)),
    Measurement(
        "throughput",
        "Eight processes, one key",
        contention.measure_throughput,
        (7,),
        SERVERS,
    ),
    Measurement(
        "long-wait", "A long wait", contention.measure_long_wait, (8,), COUNTED
    ),
    Measurement("threads", "Threads", contention.measure_threads, (9,)),
    Measurement("rows", "Rows in the table", scale.measure_rows, (10,)),
    Measurement("prune", "Pruning", scale.measure_prune, (11,)),
    Measurement("renewal", "Renewal", scale.measure_renewal, (12,)),
    Measurement("telemetry", "Telemetry", telemetry.measure, (16,), ("sqlite",)),
    Measurement("scaling", "Processes", contention.measure_scaling, ()),
]


@dataclass
class ServerReport:
    """All that was found on one server."""

    environment: dict[str, str] = field(default_factory=dict)
    results: dict[str, Result] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def go_through(
    server: str,
    names: Sequence[str],
    how: Scale,
    environment: Mapping[str, str],
    answer: Callable[[ServerReport], None],
) -> None:
    """Run measurements in this process, which has nothing else to do.

    Opens no connection and starts no thread itself, because it forks those that do.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.update(environment, DJANGO_SETTINGS_MODULE="benchmarks.settings")

    import django

    from benchmarks import environment as surroundings

    django.setup()
    crew.run_one(_migrate)
    report = ServerReport()
    report.environment = crew.run_one(
        {
            "redis": surroundings.of_redis,
            "zookeeper": surroundings.of_zookeeper,
        }.get(server, surroundings.of_server)
    )
    for measurement in MEASUREMENTS:
        if measurement.name not in names or server not in measurement.servers:
            continue
        began = time.monotonic()
        say(f"{TITLES[server]}: {measurement.title} …")
        try:
            result = measurement.run(server, how)
        except crew.CrewError as error:
            report.faults.append(f"{measurement.title}: {error}")
            say(f"{TITLES[server]}: {measurement.title} failed\n{error}")
            continue
        report.results[measurement.name] = result
        report.faults += result.faults
        for verdict in result.verdicts:
            say(f"    {verdict.target}: {verdict.value:.3g} {verdict.unit}")
        say(f"    {time.monotonic() - began:.0f} s")
    answer(report)


def say(text: str) -> None:
    """Tell how far it is; the report itself goes to standard output."""
    print(text, file=sys.stderr, flush=True)


def _migrate() -> None:
    from django.core.management import call_command
    from django.db import connections

    for alias in connections:
        call_command(
            "migrate", database=alias, run_syncdb=True, verbosity=0, interactive=False
        )
