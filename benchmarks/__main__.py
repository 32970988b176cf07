"""Measure dblocks and its peers: ``python -m benchmarks``.

Starts private servers, each with its own default durability, measures one after
another and writes ``docs/benchmarks.md`` with its plots. What is measured in part, or
quickly, is printed instead, unless it is told where to; of single rows, only their
tables are: ``python -m benchmarks --only floor --database postgres``.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import environment, report
from benchmarks.figures import FULL, QUICK, Scale
from benchmarks.measurements import (
    MEASUREMENTS,
    SERVERS,
    TITLES,
    ServerReport,
    go_through,
    say,
)
from tests.support import services

DOCS = Path(__file__).resolve().parent.parent / "docs"

# The servers' own defaults; those of tests.support.services are smaller.
ARGUMENTS = {
    "mariadb": ["--innodb-buffer-pool-size=128M", "--innodb-log-file-size=96M"]
}


def parse() -> argparse.Namespace:
    rows = {str(row): m.name for m in MEASUREMENTS for row in m.rows}
    names = {measurement.name: measurement.name for measurement in MEASUREMENTS}
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure dblocks and its peers side by side.",
    )
    parser.add_argument("--quick", action="store_true", help="small and inexact")
    parser.add_argument(
        "--database",
        action="append",
        choices=SERVERS,
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--only",
        action="append",
        choices=rows | names,
        metavar="ROW",
        help=f"only this row of the targets (1 to {len(rows)}), or one of "
        f"{', '.join(names)}; may be repeated",
    )
    parser.add_argument(
        "--check", action="store_true", help="fail if a target is missed"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help="where the page goes (default: docs, if everything is measured)",
    )
    options = parser.parse_args()
    if not (options.output or options.quick or options.database or options.only):
        options.output = DOCS
    options.database = [
        s for s in SERVERS if not options.database or s in options.database
    ]
    chosen = [(rows | names)[name] for name in options.only or names]
    options.only = [name for name in names if name in chosen]
    return options


@contextlib.contextmanager
def started(server: str) -> Iterator[dict[str, str]]:
    """Run a server; yield what a measuring process must have in its environment."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        in_files = {
            "DATABASE_URL": f"sqlite:///{folder}/benchmark.sqlite3",
            "MANY_URL": f"sqlite:///{folder}/many.sqlite3",
        }
        if server == "sqlite":
            yield in_files
            return
        running = stack.enter_context(
            services.SERVERS[server](durable=True, arguments=ARGUMENTS.get(server, []))
        )
        if server == "redis":
            yield {**in_files, "REDIS_URL": running.url()}
            return
        if server == "zookeeper":
            yield {**in_files, "ZOOKEEPER_HOSTS": running.url()}
            return
        yield {
            "DATABASE_URL": running.url("benchmark"),
            "MANY_URL": running.url("many"),
            "SERVER_PID": str(running.pid),
        }


def measure(server: str, names: list[str], how: Scale) -> ServerReport:
    """Go through one server's measurements in a process of their own."""
    context = multiprocessing.get_context("spawn")
    with started(server) as surroundings:
        mine, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=go_through, args=(server, names, how, surroundings, theirs.send)
        )
        process.start()
        theirs.close()
        try:
            found: ServerReport = mine.recv()
        except EOFError:
            found = ServerReport(faults=["The measuring process ended early."])
        except BaseException:
            process.terminate()
            raise
        finally:
            process.join()
        return found


def main() -> int:
    options = parse()
    services.exit_on_signals()
    how = QUICK if options.quick else FULL
    machine = environment.of_machine()
    reports = {
        server: measure(server, options.only, how) for server in options.database
    }
    if options.output is not None:
        page = report.page(machine, reports, how)
        report.write(page, reports, options.output)
    elif len(options.only) < len(MEASUREMENTS):
        print(report.extract(machine, reports))
    else:
        print(report.page(machine, reports, how))
    faults = [
        f"{TITLES[server]}: {fault}"
        for server, found in reports.items()
        for fault in found.faults
    ]
    for fault in faults:
        say(f"FAULT {fault}")
    missed = report.missed(reports)
    for text in missed:
        say(f"MISSED {text}")
    return 1 if faults or (options.check and missed) else 0


if __name__ == "__main__":
    sys.exit(main())
