"""Run pytest once for every database configuration, on private servers.

``python -m tests [--database NAME ...] [--coverage] [pytest arguments]``. Three runs go
on at a time; the output of each is shown when it ends, in full if it failed. A database
that can't be started is an error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests import services

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT = 1500
NO_TESTS_COLLECTED = 5


@dataclass(frozen=True, slots=True)
class Configuration:
    """A database to run the tests on."""

    name: str
    server: str | None = None
    isolation: str = "read committed"
    #: What SQLite is told; with nothing, it is as ``startproject`` leaves it.
    sqlite: tuple[str, ...] = ("WAL", "IMMEDIATE")
    #: Run the core of the tests alone, unless told what to run.
    core: bool = False
    #: Modules to leave out, unless told what to run.
    without: tuple[str, ...] = ()
    #: Run the quick part of the fault tests, and nothing else.
    faults: bool = False

    def urls(self, folder: Path, server: services.Server | None) -> list[str]:
        """The URLs of the default database and of the one with the alias locks."""
        if server is not None:
            name = f"dblocks_{self.name.replace('-', '_')}"
            return [server.url(name), server.url(f"{name}_locks")]
        if self.name == "sqlite-memory":
            return ["sqlite://:memory:"] * 2
        return [
            f"sqlite:///{folder}/{self.name}-{name}.sqlite3"
            for name in ("main", "locks")
        ]


CORE = [
    "atomic_requests",
    "clock",
    "database",
    "explicit_owners",
    "failures",
    "fencing",
    "for_update",
    "input",
    "lease",
    "lock",
    "lost_replies",
    "manager",
    "nested_forms",
    "ownership",
    "processes",
    "pruned_rows",
    "releases_in_threads",
    "shop",
    "sqlite",
    "state_machine",
    "transaction_ends",
    "transaction_lock",
    "transactions",
    "two_databases",
]
"""The modules of tests in which the database's isolation or version may tell."""

BROWSER = ("admin_browser",)
"""The modules that drive the admin in a browser, where the database hardly tells."""

LONG = (*BROWSER, "demo", "leaks", "reentrant_code", "shop_site", "user_projects")
"""The modules that take long."""

CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("mariadb", "mariadb"),
        Configuration("postgres", "postgres", without=BROWSER),
        Configuration("sqlite", without=BROWSER),
        Configuration("mariadb-rr", "mariadb", "repeatable read", core=True),
        Configuration("postgres-rr", "postgres", "repeatable read", core=True),
        Configuration("sqlite-default", sqlite=(), without=BROWSER),
        Configuration("sqlite-wal", sqlite=("WAL",), core=True),
        Configuration("sqlite-immediate", sqlite=("IMMEDIATE",), core=True),
        Configuration("sqlite-memory", core=True),
        Configuration("faults-mariadb", "mariadb", faults=True),
        Configuration("faults-postgres", "postgres", faults=True),
        Configuration("faults-sqlite", faults=True),
    )
}


@dataclass
class Run:
    """One pytest process, its output kept in a file."""

    configuration: Configuration
    command: list[str]
    environment: dict[str, str]
    output: Path
    process: subprocess.Popen[bytes] = field(init=False)
    started_at: float = field(init=False)

    def start(self) -> None:
        self.started_at = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                self.command,
                cwd=ROOT,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def duration(self) -> float:
        return time.monotonic() - self.started_at

    def ended(self) -> bool:
        if self.process.poll() is None and self.duration > TIME_LIMIT:
            self.stop()
            with self.output.open("a") as output:
                output.write(f"\nStopped after {TIME_LIMIT} seconds.\n")
        return self.process.returncode is not None

    def stop(self) -> None:
        """Interrupt pytest, so that its fixtures clean up, and if need be kill it."""
        if self.process.poll() is not None:
            return
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def report(self, *, failed: bool, whole: bool) -> None:
        text = self.output.read_text(errors="replace").rstrip()
        if not failed and not whole:
            text = text.rpartition("\n")[2]
        title = f"{self.configuration.name}: {'FAILED' if failed else 'passed'}"
        print(f"\n{title} in {self.duration:.0f} s\n{text}", flush=True)


def run_all(runs: list[Run], *, jobs: int, arguments: list[str]) -> list[str]:
    """Run what is given, some at a time; the names of those that failed."""
    waiting, running, failed = list(runs), list[Run](), list[str]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(waiting.pop(0))
                running[-1].start()
            for run in [run for run in running if run.ended()]:
                running.remove(run)
                # Arguments may select tests that one database doesn't have.
                good = {0, NO_TESTS_COLLECTED} if arguments else {0}
                bad = run.process.returncode not in good
                run.report(failed=bad, whole=bool(arguments))
                if bad:
                    failed.append(run.configuration.name)
            time.sleep(0.05)
    finally:
        for run in running:
            run.stop()
    return failed


def coverage(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "coverage", *arguments], cwd=ROOT, check=True)


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        description="Run the tests on all databases. "
        "Other arguments are handed on to pytest.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--database",
        action="append",
        choices=CONFIGURATIONS,
        dest="databases",
        help="only this one; may be repeated",
    )
    parser.add_argument(
        "--core",
        action="append",
        choices=CONFIGURATIONS,
        default=[],
        help="run only the core of the tests on this one; may be repeated",
    )
    parser.add_argument(
        "--short",
        action="append",
        choices=CONFIGURATIONS,
        default=[],
        help="leave out the tests that take long on this one; may be repeated",
    )
    parser.add_argument("--coverage", action="store_true", help="measure and report")
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.environ.get("DBLOCKS_TEST_JOBS", "3"),
        help="runs at a time (default: $DBLOCKS_TEST_JOBS or 3)",
    )
    return parser.parse_known_args()


def main() -> int:
    options, arguments = parse()
    selected = [CONFIGURATIONS[name] for name in options.databases or CONFIGURATIONS]
    if not options.databases and (arguments or options.coverage):
        # Arguments select from the tests, and broken copies count for no coverage.
        selected = [each for each in selected if not each.faults]
    command = [sys.executable, "-m"]
    if options.coverage:
        coverage("erase")
        command += ["coverage", "run", "-m"]
    command += ["pytest", f"--color={'yes' if sys.stdout.isatty() else 'no'}"]

    services.exit_on_signals()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str | None, services.Server] = {}
        runs = []
        for configuration in selected:
            kind = configuration.server
            if kind is not None and kind not in servers:
                servers[kind] = stack.enter_context(services.SERVERS[kind]())
            main_url, locks_url = configuration.urls(folder, servers.get(kind))
            environment = {
                "DATABASE_URL": main_url,
                "LOCKS_DATABASE_URL": locks_url,
                "DATABASE_ISOLATION": configuration.isolation,
                "SQLITE_OPTIONS": ",".join(configuration.sqlite),
                "PYTHONDEVMODE": "1",
            }
            output = folder / f"{configuration.name}.txt"
            if configuration.faults:
                del environment["LOCKS_DATABASE_URL"]
                whole_command = [*command, "tests/faults", *arguments]
                runs.append(Run(configuration, whole_command, environment, output))
                continue
            core = configuration.core or configuration.name in options.core
            without = LONG if configuration.name in options.short else None
            chosen = [f"tests/test_{name}.py" for name in CORE if core]
            for name in without or configuration.without:
                chosen.append(f"--ignore=tests/test_{name}.py")
            whole_command = command + (arguments or chosen)
            runs.append(Run(configuration, whole_command, environment, output))
        failed = run_all(runs, jobs=options.jobs, arguments=arguments)

    if options.coverage:
        coverage("combine", "--quiet")
        coverage("report")
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
