"""The full counts: ``python -m tests.faults --full``.

Starts a private server for each engine, runs the fault tests on it, and prints what was
measured. The exit status is 0 when everything held.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import services

ROOT = Path(__file__).resolve().parent.parent.parent
FULL_SECONDS = 3600.0
ENGINES = ("sqlite", "mariadb", "postgres")

FAULTS = {
    "F1": "test_killed_holders",
    "F2": "test_killed_waiters",
    "F3": "test_lost_reply",
    "F4": "test_stopped_holders_are_refused",
    "F5": "test_stopped_in_the_transaction or test_stopped_between_guard_and_commit",
    "F6": "test_wrong_wall_clocks",
    "F7": "test_wrong_wall_clocks or test_server_killed",
    "F8": "test_server_killed",
    "F9": "test_sessions_killed_by_the_server",
    "F10": "black_hole",
    "F11": "test_slow_network_that_resets",
    "F12": "test_every_waiter_is_served",
    "F13": "test_new_keys_are_raced_for",
    "F14": "test_pruning_under_contention",
    "F15": "test_force_release_while_held",
    "F16": "test_isolation_levels",
    "F17": "test_fork_while_holding",
    "F18": "test_interrupted_anywhere",
    "F19": "test_out_of_connections",
    "F20": "test_holding_the_gil",
    "I1": "test_exclusion",
    "I2": "test_tokens_under_force_release",
    "I3": "test_tokens_that_are_not_current",
    "I8": "test_mutants",
    "control": "test_negative_control",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--full", action="store_true", help="the full counts")
    parser.add_argument("--engine", action="append", choices=ENGINES)
    parser.add_argument("--fault", action="append", choices=FAULTS)
    parser.add_argument("--seed", type=int, help="that of a run that failed")
    parser.add_argument(
        "--duration",
        type=float,
        metavar="SECONDS",
        help="scales the full counts; they are meant for about an hour an engine",
    )
    return parser.parse_args()


@contextlib.contextmanager
def database(engine: str, folder: Path) -> Iterator[str]:
    """Give the URL of a private database."""
    if engine == "sqlite":
        yield f"sqlite:///{folder / 'faults.sqlite3'}"
        return
    with services.SERVERS[engine]() as server:
        yield server.url("dblocks")


def run(engine: str, options: argparse.Namespace, seed: int, folder: Path) -> int:
    """Run the tests on one engine; return pytest's exit status."""
    command = [
        *(sys.executable, "-m", "pytest", "tests/faults", "--verbose", "--no-header"),
        *("-p", "no:randomly", "-o", f"timeout={7200 if options.full else 180}"),
    ]
    if options.fault:
        command += ["-k", " or ".join(FAULTS[fault] for fault in options.fault)]
    with database(engine, folder) as url:
        environment = {
            **os.environ,
            "DATABASE_URL": url,
            "DBLOCKS_FAULTS": "full" if options.full else "quick",
            "DBLOCKS_FAULTS_SEED": str(seed),
            "DBLOCKS_FAULTS_SHARE": str(
                (options.duration or FULL_SECONDS) / FULL_SECONDS
            ),
            "DBLOCKS_FAULTS_FIGURES": str(folder / "figures"),
        }
        return subprocess.run(
            command, cwd=ROOT, env=environment, check=False
        ).returncode


def summary(rows: list[dict[str, Any]]) -> None:
    """Print what was measured, one line a test and engine."""
    for row in sorted(rows, key=lambda row: (row["test"], row["engine"])):
        figures = ", ".join(f"{name} {value}" for name, value in row["figures"].items())
        print(f"{row['test']:<58} {row['engine']:<11} {row['seconds']:>7} s  {figures}")


def main() -> int:
    options = parse()
    seed = options.seed if options.seed is not None else random.randrange(10**6)
    services.exit_on_signals()
    started, statuses = time.monotonic(), {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = folder / "figures"
        figures.touch()
        for engine in options.engine or ENGINES:
            print(
                f"\n{engine}, seed {seed}, {time.strftime('%Y-%m-%d %H:%M:%S')}",
                flush=True,
            )
            statuses[engine] = run(engine, options, seed, folder)
        print()
        summary([json.loads(line) for line in figures.read_text().splitlines()])
    # A fault that an engine doesn't have leaves it without tests: 5.
    failed = [engine for engine, status in statuses.items() if status not in {0, 5}]
    print(f"\nseed {seed}, {time.monotonic() - started:.0f} s: ", end="")
    print(f"failed on {', '.join(failed)}" if failed else "everything held")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
