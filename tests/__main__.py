"""Run pytest on the databases and engines, each with the settings that matter.

``python -m tests [--database NAME ...] [--thorough] [--coverage] [pytest arguments]``.
Servers are private. The tests of a configuration are divided into runs of their own
databases, unless arguments say what to run. Several runs go on at a time; the output of
each is shown when it ends, in full if it failed. A database that can't be started is an
error.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests.configurations import (
    CONFIGURATIONS,
    SECONDS_OF_FAULTS,
    SECONDS_OF_MUTANTS,
    SECONDS_OF_TOPOLOGIES,
    SHARE,
    TOPOLOGIES,
    Configuration,
    seconds,
    shares,
)
from tests.support import services
from tests.support.services import MEMORY

ROOT = Path(__file__).resolve().parent.parent
MUTANTS = "tests/faults/test_mutants.py"
TIME_LIMIT = 1500
NO_TESTS_COLLECTED = 5
SLOWEST = 25
FEWEST_JOBS, MOST_JOBS = 2, 14
#: Seconds after which the processors show what a run does.
SETTLING = 5
#: Share of the processors' time that must be idle for another run.
SPARE = 0.06


@dataclass
class Run:
    """One pytest process, its output and its tests' durations kept in files."""

    name: str
    python: list[str]
    arguments: list[str]
    environment: dict[str, str]
    folder: Path
    #: How many seconds it takes, more or less.
    expected: int
    #: Whether it leaves processors idle most of the time.
    waits: bool
    duration: float = field(init=False, default=0.0)
    #: Seconds of a processor that it and its children took.
    computed: float = field(init=False, default=0.0)
    process: subprocess.Popen[bytes] = field(init=False)
    started_at: float = field(init=False)

    def start(self) -> None:
        self.started_at = time.monotonic()
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *self.python,
                    *("-m", "pytest", f"--junitxml={self.durations}"),
                    f"--color={'yes' if sys.stdout.isatty() else 'no'}",
                    *self.arguments,
                ],
                cwd=ROOT,
                env=os.environ | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.txt"

    @property
    def durations(self) -> Path:
        return self.folder / f"{self.name}.xml"

    def ended(self) -> bool:
        self.duration = time.monotonic() - self.started_at
        before = computed_by_children()
        if self.process.poll() is not None:
            self.computed = computed_by_children() - before
        elif self.duration > TIME_LIMIT:
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
        title = f"{self.name}: {'FAILED' if failed else 'passed'}"
        print(f"\n{title} in {self.duration:.0f} s\n{text}", flush=True)

    def skipped(self) -> Iterator[str]:
        """Why tests were skipped."""
        if self.durations.exists():
            for test in ElementTree.parse(self.durations).iter("skipped"):
                yield test.get("message", "")

    def tests(self) -> Iterator[tuple[float, str]]:
        """How long each test took, set-up and teardown included."""
        if not self.durations.exists():
            return
        for test in ElementTree.parse(self.durations).iter("testcase"):
            name = f"{test.get('classname')}.{test.get('name')}"
            yield float(test.get("time", 0)), f"{self.name}: {name}"


class Jobs:
    """Decides how many runs go on at a time.

    Tests mostly wait. Unless told how many, more go on where that leaves processors
    idle, once it shows what those do that run already.
    """

    def __init__(self, jobs: int | None) -> None:
        self._jobs = jobs
        self._look()

    def _look(self) -> None:
        self._looked_at, self._idle = time.monotonic(), idle_seconds()

    def may_start(self, running: int) -> bool:
        """Tell whether another run may start beside so many."""
        if self._jobs is not None or running < FEWEST_JOBS:
            return running < (self._jobs or FEWEST_JOBS)
        passed = time.monotonic() - self._looked_at
        if passed < SETTLING or running >= MOST_JOBS:
            return False
        spare = (idle_seconds() - self._idle) / passed / (os.cpu_count() or 1)
        self._look()
        return spare > SPARE


def computed_by_children() -> float:
    """Seconds of a processor that ended children, and theirs, took."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def idle_seconds() -> float:
    """Seconds for which processors had nothing to do, if the system counts them."""
    with contextlib.suppress(FileNotFoundError):
        idle = Path("/proc/stat").read_text().split(maxsplit=5)[4]
        return int(idle) / os.sysconf("SC_CLK_TCK")
    return 0.0


def run_all(runs: list[Run], *, jobs: int | None, arguments: list[str]) -> list[str]:
    """Run what is given, some at a time; the names of those that failed."""
    waiting, running, failed = list(runs), list[Run](), list[str]()
    most = Jobs(jobs)
    try:
        while waiting or running:
            while waiting and most.may_start(len(running)):
                running.append(waiting.pop(0))
                running[-1].start()
            for run in [run for run in running if run.ended()]:
                running.remove(run)
                # Arguments may select tests that one database doesn't have.
                good = {0, NO_TESTS_COLLECTED} if arguments else {0}
                bad = run.process.returncode not in good
                run.report(failed=bad, whole=bool(arguments))
                if bad:
                    failed.append(run.name)
            time.sleep(0.05)
    finally:
        for run in running:
            run.stop()
    return failed


def show_durations(runs: list[Run]) -> None:
    print(f"\nThe {SLOWEST} slowest tests")
    slowest = sorted((test for run in runs for test in run.tests()), reverse=True)
    for duration, name in slowest[:SLOWEST]:
        print(f"{duration:6.1f} s  {name}")
    print("\nThe runs, and their seconds of a processor")
    for run in sorted(runs, key=lambda run: run.duration, reverse=True):
        print(f"{run.duration:6.0f} s {run.computed:5.0f} s  {run.name}")


def show_what_is_not_applicable(runs: list[Run]) -> None:
    """Show what engines weren't asked because they declare not to have it."""
    prefix = "not applicable: "
    found = Counter(
        reason.removeprefix(prefix)
        for run in runs
        for reason in run.skipped()
        if reason.startswith(prefix)
    )
    print("\nTests that are not applicable")
    for reason, tests in sorted(found.items()):
        print(f"{tests:6d}  {reason}")


def coverage(*arguments: str) -> bool:
    """Run a command of coverage's; tell whether it was satisfied."""
    command = [sys.executable, "-m", "coverage", *arguments]
    return subprocess.run(command, cwd=ROOT).returncode == 0


def report_coverage(*, whole: bool) -> bool:
    """Show what was covered; tell whether that is enough, if it is of all tests."""
    coverage("combine", "--quiet")
    return coverage("report", *([] if whole else ["--fail-under=0"]))


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
        "--brief",
        action="append",
        choices=CONFIGURATIONS,
        default=[],
        help="run only what Python's and Django's versions may change on this one, "
        "of the core of the tests; may be repeated",
    )
    parser.add_argument(
        "--short",
        action="append",
        choices=CONFIGURATIONS,
        default=[],
        help="leave out the tests that take long on this one; may be repeated",
    )
    parser.add_argument(
        "--thorough",
        action="store_true",
        help="run what takes twice as long, too: other isolation levels and settings, "
        "topologies of servers, mutants",
    )
    parser.add_argument(
        "--coverage",
        action="store_true",
        help="measure and report; unless databases are named, be thorough, and fail "
        "below the floor that setup.cfg sets",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=os.environ.get("DBLOCKS_TEST_JOBS"),
        help="runs at a time (default: $DBLOCKS_TEST_JOBS, or "
        f"{FEWEST_JOBS} to {MOST_JOBS} as processors are idle)",
    )
    return parser.parse_known_args()


def divided(
    configuration: Configuration, options: argparse.Namespace, arguments: list[str]
) -> Iterator[tuple[int, list[str]]]:
    """What pytest is told for each run of a configuration, and how long it takes."""
    if configuration.faults:
        folder = ["tests/faults", f"--ignore={MUTANTS}"]
        yield SECONDS_OF_FAULTS, [*folder, *arguments]
    elif configuration.mutants:
        yield SECONDS_OF_MUTANTS, [MUTANTS, *arguments]
    elif arguments:
        yield 0, arguments
    elif configuration.topologies:
        paths = [TOPOLOGIES / f"test_{name}.py" for name in configuration.topologies]
        yield SECONDS_OF_TOPOLOGIES, [str(path) for path in paths]
    else:
        brief = configuration.name in options.brief
        short = configuration.name in options.short
        # Where there are few runs, and of those that come last, shorter ones keep the
        # processors busy.
        length: float = SHARE
        if brief or short:
            length = SHARE / 2
        elif configuration.engine is not None:
            length = SHARE * 3 / 4
        for share in shares(configuration.modules(brief=brief, short=short), length):
            yield seconds(share), [f"tests/test_{name}.py" for name in share]


def main() -> int:
    options, arguments = parse()
    if options.thorough:
        os.environ.setdefault("DBLOCKS_TEST_STOPS", "100")
    selected = [CONFIGURATIONS[name] for name in options.databases or CONFIGURATIONS]
    if not options.databases:
        if not (options.thorough or options.coverage):
            selected = [each for each in selected if not each.thorough]
        if arguments or options.coverage:
            # Arguments select from the tests, and broken copies count for no coverage.
            selected = [each for each in selected if not (each.faults or each.mutants)]
        if arguments:
            selected = [each for each in selected if not each.topologies]
    mysql = [each for each in selected if each.server == "mysql"]
    if mysql and not services.MySQL.is_there():
        selected = [each for each in selected if each not in mysql]
        print("mysql: not run, for there is no server; see MYSQL_TEST_URL", flush=True)
    measured = []
    if options.coverage:
        coverage("erase")
        measured = ["-m", "coverage", "run"]

    services.exit_on_signals()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=MEMORY)))
        servers: dict[str | None, services.Server] = {}
        engines: dict[str | None, dict[str, str]] = {None: {}}
        runs = []
        for configuration in selected:
            kind = configuration.server
            if kind is not None and kind not in servers:
                servers[kind] = stack.enter_context(services.SERVERS[kind]())
            engine = configuration.engine
            if engine is not None and engine not in engines:
                engines[engine] = stack.enter_context(services.engine(engine))
            parts = divided(configuration, options, arguments)
            for number, (expected, selection) in enumerate(parts, 1):
                name = f"{configuration.name}-{number}"
                environment = configuration.environment(folder, servers.get(kind), name)
                environment |= engines[engine]
                short = configuration.name in options.short
                told = () if short else configuration.python
                python = [sys.executable, *told, *measured]
                waits = engine is not None
                run = Run(name, python, selection, environment, folder, expected, waits)
                runs.append(run)
        # First those beside which others keep the processors busy; last the short ones,
        # lest one processor be idle while a long one ends.
        runs.sort(key=lambda run: (run.waits, run.expected), reverse=True)
        failed = run_all(runs, jobs=options.jobs, arguments=arguments)
        if not arguments:
            show_durations(runs)
            show_what_is_not_applicable(runs)

    if options.coverage:
        whole = not options.databases and not arguments
        if not report_coverage(whole=whole):
            failed.append("coverage")
    if failed:
        print(f"\nFailed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
