"""Break what a lock stands on: ``python -m tests.faults``, with ``--full`` for long.

Starts a private server for each engine, runs the fault tests on it, some at a time,
tells how each ended and what was measured. The exit status is 0 when everything held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults import record
from tests.support import services
from tests.support.services import MEMORY

ROOT = Path(__file__).resolve().parent.parent.parent
#: What the full counts take on one engine, about, on two cores.
FULL_SECONDS = 900.0
ENGINES = ("sqlite", "mariadb", "postgres")
#: Run when asked for, because few machines have its server.
MYSQL = "mysql"
NO_TESTS_COLLECTED = 5
#: For dozens of processes with several connections each, in several runs.
MORE_CONNECTIONS = {
    "mariadb": ["--max-connections=900"],
    MYSQL: ["--max-connections=900"],
    "postgres": ["-c", "max_connections=900"],
}

HERE = "tests/faults/"
CONTENTION, NETWORK = f"{HERE}test_contention.py::", f"{HERE}test_network.py::"
PROCESSES, SERVERS = f"{HERE}test_killed_and_stopped.py::", f"{HERE}test_servers.py::"

#: The tests of each fault and invariant, those that last longest first. What an
#: earlier one has run already is not run again.
FAULTS = {
    "F16": [f"{CONTENTION}test_isolation_levels"],
    "F4": [f"{PROCESSES}test_stopped_holders_are_refused"],
    "F22": [f"{HERE}test_soak.py"],
    "F13": [f"{CONTENTION}test_new_keys_are_raced_for"],
    "I1": [f"{CONTENTION}test_exclusion"],
    "I8": [f"{HERE}test_mutants.py"],
    "F5": [
        f"{PROCESSES}test_stopped_in_the_transaction",
        f"{PROCESSES}test_stopped_between_guard_and_commit",
    ],
    "control": [f"{PROCESSES}test_negative_control"],
    "F9": [f"{NETWORK}test_sessions_killed_by_the_server"],
    "F11": [f"{NETWORK}test_slow_network_that_resets"],
    "F8": [
        f"{SERVERS}test_server_killed",
        f"{SERVERS}test_server_down_for_longer_than_the_lease",
        f"{SERVERS}test_waiter_when_the_server_restarts",
        f"{SERVERS}test_waiter_when_the_server_stays_away",
        f"{SERVERS}test_async_waiters_when_the_server_restarts",
        f"{SERVERS}test_renewals_at_a_server_that_refuses_them",
    ],
    "F14": [f"{CONTENTION}test_pruning_under_contention"],
    "F6": [f"{SERVERS}test_wrong_wall_clocks"],
    "F7": [
        f"{SERVERS}test_wrong_wall_clocks",
        f"{SERVERS}test_server_killed",
        "tests/test_clock.py",
    ],
    "F18": [
        f"{PROCESSES}test_interrupted_anywhere",
        "tests/test_reentrant_code.py",
        "tests/test_interrupts.py",
    ],
    "F2": [f"{PROCESSES}test_killed_waiters"],
    "F3": [
        f"{NETWORK}test_lost_reply_to_an_acquire",
        f"{NETWORK}test_lost_reply_to_a_release",
        f"{NETWORK}test_lost_reply_within_a_set",
    ],
    "F21": ["tests/test_run_locked.py", "tests/test_supervision.py"],
    "I2": [f"{CONTENTION}test_tokens_under_force_release"],
    "I3": [f"{CONTENTION}test_tokens_that_are_not_current"],
    "I4": [f"{PROCESSES}test_stopped_holders_are_refused"],
    "I6": ["tests/test_leaks.py"],
    "F17": [f"{HERE}test_children.py"],
    "F19": [f"{SERVERS}test_out_of_connections", "tests/test_failures.py"],
    "F20": [f"{PROCESSES}test_holding_the_gil"],
    "F28": [f"{SERVERS}test_default_settings_of_sqlite"],
    "model": [
        "tests/test_state_machine.py",
        f"{HERE}test_history.py",
        f"{HERE}test_checkers.py",
    ],
    "F1": [
        f"{PROCESSES}test_killed_holders",
        f"{PROCESSES}test_killed_between_two_grants",
    ],
    "F10": [f"{NETWORK}test_black_hole_for_ever", f"{NETWORK}test_short_black_hole"],
    "F12": [
        f"{CONTENTION}test_every_waiter_is_served",
        f"{CONTENTION}test_overlapping_sets",
    ],
    "F15": [f"{CONTENTION}test_force_release_while_held"],
    "I5": [f"{NETWORK}test_black_hole_for_ever", f"{HERE}test_late_answers.py"],
    "I7": [f"{CONTENTION}test_other_keys_are_not_slowed"],
}

#: They measure time, and have the machine to themselves in a full run.
ALONE = {"F1", "F2", "F10", "F12", "F15", "I5", "I7"}


@dataclass
class Job:
    """One run of pytest."""

    engine: str
    name: str
    tests: list[str]
    environment: dict[str, str]
    output: Path
    alone: bool = False
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    seconds: float = 0.0

    def start(self, time_limit: int) -> None:
        self.started = time.monotonic()
        command = [sys.executable, "-m", "pytest", "--verbose", "--no-header"]
        # In one order, so that a seed runs again what it ran.
        command += ["-p", "no:randomly", "-p", "no:cacheprovider"]
        command += ["-o", f"timeout={time_limit}"]
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [*command, *self.tests],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def ended(self) -> bool:
        assert self.process is not None
        if self.process.poll() is None:
            return False
        self.seconds = time.monotonic() - self.started
        return True

    def stop(self) -> None:
        """Interrupt pytest, so that its fixtures clean up, and if need be kill it."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def row(self) -> dict[str, Any]:
        """Return how many of its tests passed, for those that measure nothing."""
        tail = self.output.read_text(errors="replace").rstrip().rpartition("\n")[2]
        passed = re.search(r"(\d+) passed", tail)
        figures = {"tests": int(passed[1])} if passed else {}
        return {"job": self.name, "figures": figures}

    @property
    def failed(self) -> bool:
        assert self.process is not None
        # A fault that an engine doesn't have leaves it without tests.
        return self.process.returncode not in {0, NO_TESTS_COLLECTED}

    def report(self) -> None:
        ending = "FAILED" if self.failed else "passed"
        title = f"{self.engine:<9}{self.name:<8}{ending} in {self.seconds:.0f} s"
        print(f"{time.strftime('%H:%M:%S')} {title}", flush=True)
        if self.failed:
            print(self.output.read_text(errors="replace"), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full counts")
    parser.add_argument("--engine", action="append", choices=[*ENGINES, MYSQL])
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--seed", type=int, help="that of a run that failed")
    parser.add_argument(
        "--duration",
        type=float,
        metavar="SECONDS",
        help=f"scales the full counts, meant for {FULL_SECONDS:.0f} s an engine",
    )
    parser.add_argument(
        "--jobs", type=int, default=3, help="runs at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="write the figures of the full counts into the documentation",
    )
    options = parser.parse_args()
    if options.duration is not None:
        options.full = True
    if options.record and (not options.full or options.duration):
        parser.error("--record is for the full counts")
    if MYSQL in (options.engine or ()):
        if services.MySQL.given:
            parser.error("servers are broken here: unset MYSQL_TEST_URL")
        if options.record:
            parser.error(f"the documentation has no figures of {MYSQL}")
    if options.record:
        try:
            options.commit = record.commit()
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            parser.error(f"--record names a commit: {error}")
    return options


def plan(options: argparse.Namespace, engine: str) -> Iterator[tuple[str, list[str]]]:
    """What to run on an engine: names, and the tests of each."""
    if not options.full and not options.fault:
        yield "faults", [HERE, f"--ignore={HERE}test_mutants.py"]
        yield "mutants", FAULTS["I8"]
        return
    done: set[str] = set()
    for fault, tests in FAULTS.items():
        rest = [test for test in tests if test not in done]
        if rest and (not options.fault or fault in options.fault):
            done.update(rest)
            yield fault, rest


@contextlib.contextmanager
def server(engine: str) -> Iterator[services.Server | None]:
    """Start a private server, for the engines that have one."""
    if engine == "sqlite":
        yield None
        return
    with services.SERVERS[engine](arguments=MORE_CONNECTIONS[engine]) as server:
        yield server


def jobs(
    options: argparse.Namespace,
    engine: str,
    seed: int,
    folder: Path,
    server: services.Server | None,
) -> Iterator[Job]:
    for name, tests in plan(options, engine):
        label = f"{engine}-{name}"
        if server is None:
            url = f"sqlite:///{folder / label}.sqlite3"
        else:
            url = server.url(f"faults_{name.lower()}")
        share = (options.duration or FULL_SECONDS) / FULL_SECONDS
        environment = {
            "DATABASE_URL": url,
            "DBLOCKS_FAULTS": "full" if options.full else "quick",
            "DBLOCKS_FAULTS_SEED": str(seed),
            "DBLOCKS_FAULTS_SHARE": str(share),
            "DBLOCKS_FAULTS_FIGURES": str(folder / "figures"),
            "DBLOCKS_FAULTS_JOB": name,
        }
        alone = options.full and name in ALONE
        yield Job(engine, name, tests, environment, folder / label, alone)


def run(waiting: list[Job], options: argparse.Namespace) -> list[Job]:
    """Run what is given, some at a time; return those that failed."""
    running, failed = list[Job](), list[Job]()
    waiting = sorted(waiting, key=lambda job: job.alone)
    try:
        while waiting or running:
            while waiting and len(running) < options.jobs:
                if running and (waiting[0].alone or running[0].alone):
                    break
                running.append(waiting.pop(0))
                running[-1].start(3600 if options.full else 90)
            for job in [job for job in running if job.ended()]:
                running.remove(job)
                job.report()
                if job.failed:
                    failed.append(job)
            time.sleep(0.05)
    finally:
        for job in running:
            job.stop()
    return failed


def summary(rows: list[dict[str, Any]]) -> None:
    """Print what was measured, one line a test and engine."""
    for row in sorted(rows, key=lambda row: (row["test"], row["engine"])):
        figures = record.cell(row["figures"])
        print(f"{row['test']:<58} {row['engine']:<11} {row['seconds']:>7} s  {figures}")


def main() -> int:
    options = parse()
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    services.exit_on_signals()
    started, failed, rows = time.monotonic(), list[Job](), list[dict[str, Any]]()
    engines = options.engine or list(ENGINES)
    # The quick part of all engines at once; the full one of one after another.
    together = [[engine] for engine in engines] if options.full else [engines]
    for group in together:
        began = time.monotonic()
        print(f"{', '.join(group)}, seed {seed}, {time.strftime('%F %T')}", flush=True)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
            (folder / "figures").touch()
            waiting = []
            for engine in group:
                where = stack.enter_context(server(engine))
                waiting += list(jobs(options, engine, seed, folder, where))
            bad = run(waiting, options)
            lines = (folder / "figures").read_text().splitlines()
            found = [json.loads(line) for line in lines]
            found += [job.row() for job in waiting]
        if options.record:
            seconds, again = time.monotonic() - began, bool(options.fault)
            lost = [job.name for job in bad]
            kept = [row for row in found if row["job"] not in lost]
            kept += [{"job": name, "figures": {"FAILED": 1}} for name in lost]
            commit = options.commit
            record.write(group[0], seed, seconds, kept, commit=commit, again=again)
        rows += [row for row in found if "test" in row]
        failed += bad
    print()
    summary(rows)
    print(f"\nseed {seed}, {time.monotonic() - started:.0f} s: ", end="")
    names = ", ".join(f"{job.engine} {job.name}" for job in failed)
    print(f"failed: {names}" if failed else "everything held")
    outdated = []
    if options.record or (options.full and not (options.duration or options.fault)):
        outdated = record.outdated(each for each in engines if each != MYSQL)
    for line in outdated:
        print(f"the recorded figures must not stand: {line}; use --record")
    return 1 if failed or outdated else 0


if __name__ == "__main__":
    sys.exit(main())
