"""The benchmarks: their report and their count of overlaps, on made-up figures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection
from django.test import override_settings
from pytest_django import DjangoAssertNumQueries

from benchmarks import contenders, contention, floor, permits, report, sets, telemetry
from benchmarks.figures import (
    FULL,
    QUICK,
    Figure,
    Result,
    Series,
    Verdict,
    percentile,
)
from benchmarks.history import Grant, fairness, hand_offs, overlaps
from benchmarks.measurements import MEASUREMENTS, ServerReport
from dblocks import signals

GOOD = [Grant(1, 0.0, 0.0, 1.0, 1.1), Grant(2, 0.5, 1.25, 2.0, 2.1)]
MACHINE = {"date": "2026-11-21", "processors": "2"}
BAD = [*GOOD, Grant(3, 0.2, 1.5, 1.75, 1.8), Grant(4, 0.2, 1.9, 2.5, 2.6)]


@pytest.fixture
def reports() -> dict[str, ServerReport]:
    """Return what one server might have given."""
    result = Result(
        figures=[
            Figure("acquire and release, p50", "dblocks", "ms", [0.6, 0.5, 0.7]),
            Figure("acquire and release, p50", "django-db-mutex", "ms", [1234.5]),
        ],
        verdicts=[
            Verdict(1, "against two bare updates", 1.25, "×", at_most=1.3),
            Verdict(2, "faster than a peer", 2.0, "×", at_least=2.5),
            Verdict(10, "only reported", 3.0, ""),
        ],
        series=[Series("rows", "dblocks", [1, 10], [0.5, 0.6])],
    )
    return {
        "mariadb": ServerReport(
            {"sync_binlog": "0"}, {"uncontended": result}, ["one key: 2 overlaps"]
        ),
        "redis": ServerReport(),
    }


def test_overlaps_are_counted() -> None:
    """Each grant that began while another was certainly held is counted once."""
    assert overlaps(GOOD) == 0
    assert overlaps(reversed(BAD)) == 2


def test_overlaps_of_permits() -> None:
    """So many may have the key at once; one more is an overlap."""
    assert overlaps(BAD, permits=2) == 0
    fourth = Grant(5, 0.2, 1.6, 2.5, 2.6)
    assert overlaps([*BAD, fourth], permits=2) == 2
    assert overlaps([*BAD, fourth], permits=3) == 0


def test_hand_offs_are_those_to_waiters() -> None:
    """Who came after the release, or had the key before, was not handed it."""
    late = Grant(1, 2.2, 2.3, 3.0, 3.1)
    assert hand_offs([*GOOD, late]) == [0.25]


def test_fairness_of_the_unserved() -> None:
    """A process that was never served makes it 0, also when none was."""
    assert fairness([3, 4]) == 0.75
    assert fairness([0, 4]) == fairness([0, 0]) == 0.0


def test_percentiles_of_a_few_values() -> None:
    """Percentiles are values that were measured."""
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([3.0, 1.0, 2.0], 99) == 3.0


def test_page_has_figures_targets_and_faults(
    reports: dict[str, ServerReport],
) -> None:
    """The page says what was measured, and whether it is enough."""
    lines = report.page(MACHINE, reports, QUICK).splitlines()
    assert (
        "| 1 | against two bare updates | 1.25 × (≤\u00a01.30\u00a0×): met |" in lines
    )
    assert "| 2 | faster than a peer | 2 × (≥\u00a02.50\u00a0×): **not met** |" in lines
    assert "| 10 | only reported | 3 |" in lines
    assert "* MariaDB: one key: 2 overlaps" in lines
    name = "acquire and release, p50"
    assert f"| {name} | dblocks | 0.60 ms (0.50 to 0.70) |" in lines
    assert f"| {name} | django-db-mutex | 1,234 ms |" in lines
    assert "| MariaDB | sync_binlog | 0 |" in lines
    assert sum("images/benchmark-" in line for line in lines) == 1


def test_page_begins_with_what_the_figures_come_to(
    reports: dict[str, ServerReport],
) -> None:
    """Conclusions and pictures come before the first table, each with its figures."""
    text = report.page(MACHINE, reports, QUICK)
    beginning, _, _ = text.partition("\n| ")
    assert "on 2026-11-21" in beginning
    assert "  Acquire and release, p50: MariaDB 0.60 ms.\n" in beginning
    assert "hand-off" not in beginning
    assert "**1 of 2 [targets](#targets) was missed.**" in beginning
    assert "images/benchmark-rows.png" in beginning


def test_extract_has_only_what_was_measured(reports: dict[str, ServerReport]) -> None:
    """The terminal gets targets, figures and a line or two about the machine."""
    machine = {**dict.fromkeys(report.BRIEF, "known"), "memory": "enough"}
    lines = report.extract(machine, reports).splitlines()
    assert (
        "| 1 | against two bare updates | 1.25 × (≤\u00a01.30\u00a0×): met |" in lines
    )
    assert "| acquire and release, p50 | django-db-mutex | 1,234 ms |" in lines
    assert "* MariaDB: one key: 2 overlaps" in lines
    assert "| machine | Python | known |" in lines
    assert not any("memory" in line or line.startswith("#") for line in lines)


def blocks(lock: floor.Block) -> floor.Blocks:
    """Return what a process did whose floor took 0.2 ms of processor a cycle."""
    return {floor.FLOOR: floor.Block(1000, 2.0, 0.2), floor.DBLOCKS: lock}


@pytest.mark.parametrize(
    ("server", "met"),
    [
        ("mariadb", [False, True, False]),
        ("postgres", [True, True, False]),
        ("sqlite", [True, True, True]),
    ],
)
def test_lock_is_set_against_its_floor(server: str, met: list[bool]) -> None:
    """Times, processor time and throughput of all processes are each compared."""
    slower = [blocks(floor.Block(600, 2.0, 0.18))] * 2
    hot = {floor.FLOOR: [0.001] * 3, floor.DBLOCKS: [0.001, 0.0014, 0.1]}
    result = floor.judge(server, [hot], slower[:1], [slower])
    assert [verdict.value for verdict in result.verdicts] == [
        pytest.approx(value) for value in (1.4, 1.5, 0.6)
    ]
    assert [verdict.met for verdict in result.verdicts] == met
    assert [report.measured(figure) for figure in result.figures] == [
        *("1 ms", "1.40 ms"),
        *("200 µs", "300 µs"),
        *("1,000 /s", "600 /s"),
    ]


@pytest.fixture
def floor_table(transactional_db: None) -> Iterator[None]:
    """Make the floor's table, which no migration knows."""
    with override_settings(INSTALLED_APPS=[*settings.INSTALLED_APPS, "benchmarks"]):
        from benchmarks.models import FloorLock

        with connection.schema_editor() as editor:
            editor.create_model(FloorLock)
        yield
        with connection.schema_editor() as editor:
            editor.delete_model(FloorLock)


@pytest.mark.usefixtures("floor_table")
def test_floor_is_two_statements(
    django_assert_num_queries: DjangoAssertNumQueries,
) -> None:
    """The floor excludes others, is there again when it is left, and does no more."""
    lock, other = floor.Floor("key"), floor.Floor("other")
    other.key = lock.key
    with django_assert_num_queries(4):
        for _ in range(2):
            with lock:
                pass
    with lock, pytest.raises(RuntimeError, match="taken"):
        other.__enter__()


@pytest.mark.usefixtures("floor_table")
def test_set_is_judged_by_its_floor() -> None:
    """A lock of several keys is measured beside its updates and as many locks."""
    times = sets.take_turns(cycles=dict.fromkeys(sets.SIZES, 3))
    assert {size: set(mine) for size, mine in times.items()} == {
        2: {sets.FLOOR, sets.DBLOCKS},
        10: {sets.FLOOR, sets.DBLOCKS, sets.NESTED},
        100: {sets.FLOOR, sets.DBLOCKS},
    }
    run = {
        size: {sets.FLOOR: [0.002], sets.DBLOCKS: [0.001 * size]} for size in sets.SIZES
    }
    run[10][sets.NESTED] = [0.06]
    result = sets.judge([run], {2: (1.0, 1.0), 10: (2.0, 1.0), 100: (3.0, 1.0)})
    assert [(round(v.value, 3), v.met) for v in result.verdicts] == [
        *((1.0, True), (5.0, False), (6.0, True), (50.0, False)),
        *((3.0, False), (1.0, True)),
    ]


def crowd(*served: int, at_a_time: int) -> contention.Run:
    """Return a run of a second in which processes had a permit so many times."""
    works = [
        contention.Work([Grant(who, t, t, t, t) for t in range(count)], statements=4)
        for who, count in enumerate(served)
    ]
    return contention.Run(1.0, works, permits=at_a_time)


def test_permits_are_judged_by_one() -> None:
    """Throughput is compared with that of one at a time; fairness is not."""
    runs = {1: [crowd(1, 1, at_a_time=1)], 4: [crowd(4, 3, at_a_time=4)]}
    result = permits.judge("sqlite", runs, {1: 2.0, 4: 3.0})
    assert [(v.value, v.met) for v in result.verdicts] == [
        *((3.5, True), (0.75, False), (3.0, False)),
    ]
    assert permits.judge("mariadb", runs, {1: 2.0, 4: 3.0}).verdicts[2].met


RUNS = [[0.001, 0.001, 0.004], [0.002] * 3, [0.005] * 9]
"""Hand-offs of three runs: in seconds, and not equally many."""


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dblocks hand a key over as `RUNS` says, and kazoo always in 4 ms."""
    here = [contenders.DBLOCKS, contenders.KAZOO]
    runs = dict(zip(here, map(iter, (RUNS, [[0.004]] * len(RUNS))), strict=True))
    for name, double in {
        "contenders.on": lambda server, waiting: here,
        "play_ping_pong": lambda contender, rounds, seconds: next(runs[contender]),
        "history.hand_offs": lambda hand_offs: hand_offs,
        "history.overlaps": lambda hand_offs: 0,
        "crew.run_one": lambda *args, **kwargs: [0.001],
    }.items():
        monkeypatch.setattr(f"benchmarks.contention.{name}", double)


def medians(result: Result) -> dict[str, float]:
    """Return what the page says of dblocks among the figures."""
    mine = [each for each in result.figures if each.contender == "dblocks"]
    return {figure.name: figure.median for figure in mine}


@pytest.mark.usefixtures("played")
def test_hand_off_has_one_value() -> None:
    """What is judged is what stands among the figures: the median of the runs."""
    result = contention.measure_hand_off("mariadb", FULL)
    judged = {verdict.target: verdict.value for verdict in result.verdicts}
    target = "hand-off to a waiting process"
    assert medians(result) == {"hand-off, p50": 2.0, "hand-off, p99": 4.0}
    assert judged == {f"{target}, p50": 2.0, f"{target}, p99": 4.0}


@pytest.mark.usefixtures("played")
def test_hand_off_is_compared_by_the_figures() -> None:
    """In ZooKeeper a hand-off is set against that of kazoo's own lock."""
    verdict, *others = contention.measure_hand_off("zookeeper", FULL).verdicts
    assert (verdict.value, verdict.met, others) == (0.5, True, [])


def test_hand_off_between_threads_has_one_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is judged is what stands among the figures: the median of the runs."""
    runs = iter([contention.Sharing(run, 1, 0) for run in RUNS])
    bare = Figure("hand-off between threads, p50", "bare", "ms", [1.0])
    monkeypatch.setattr(contention, "_bare_hand_off", lambda *args: bare)
    monkeypatch.setattr(contention.crew, "run_one", lambda *args, **kwargs: next(runs))
    result = contention.measure_threads("mariadb", FULL)
    assert medians(result) == {
        "hand-off between threads, p50": 2.0,
        "hand-off between threads, p99": 4.0,
        "threads that ask at once": 1.0,
    }
    assert [verdict.value for verdict in result.verdicts] == [2.0, 1.0]


def test_hand_off_after_a_long_wait_has_one_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is judged is what stands among the figures: the median of the keys."""
    wait = contention.LongWait(10.0, 9.0, [0.010, 0.020, 0.040, 0.060])
    monkeypatch.setattr(contention, "wait_for_long", lambda **kwargs: wait)
    result = contention.measure_long_wait("mariadb", FULL)
    assert medians(result)["hand-off after the wait"] == pytest.approx(30.0)
    assert [v.value for v in result.verdicts] == [9.0, pytest.approx(30.0)]


def test_telemetry_is_judged_by_what_it_adds() -> None:
    """A call with telemetry is set against one without, in microseconds."""
    run = {
        telemetry.OFF: [0.000040, 0.000041, 0.1],
        telemetry.BARE: [0.0000415],
        telemetry.SDK: [0.000062],
    }
    result = telemetry.judge([run])
    assert [(round(v.value, 3), v.met) for v in result.verdicts] == [
        (0.5, True),
        (21.0, False),
    ]


def test_telemetry_is_measured_by_turns(settings: Any) -> None:
    """A turn of each: nothing, no provider, and the SDK."""
    kind = "benchmarks.telemetry.NamedBackend"
    settings.DBLOCKS = {"memory": {"BACKEND": kind}}
    times = telemetry.take_turns(turns=2)
    assert {name: len(mine) for name, mine in times.items()} == {
        telemetry.OFF: 2,
        telemetry.BARE: 2,
        telemetry.SDK: 2,
    }
    assert signals.observer is None


def test_each_row_has_one_measurement() -> None:
    """The rows of the targets are numbered without a gap."""
    rows = [row for measurement in MEASUREMENTS for row in measurement.rows]
    assert sorted(rows) == list(range(1, len(rows) + 1))


def test_missed_targets(reports: dict[str, ServerReport]) -> None:
    """Only what has a limit can be missed."""
    assert report.missed(reports) == [
        "MariaDB: 2. faster than a peer: 2 × (≥\u00a02.50\u00a0×): **not met**"
    ]


def test_page_and_plots_are_written(
    reports: dict[str, ServerReport], tmp_path: Path
) -> None:
    """Each plot that has lines becomes a picture beside the page."""
    pytest.importorskip("matplotlib", exc_type=ImportError)
    report.write("# Benchmarks\n", reports, tmp_path / "docs")
    assert (tmp_path / "docs/benchmarks.md").read_text() == "# Benchmarks\n"
    pictures = [path.name for path in (tmp_path / "docs/images").iterdir()]
    assert pictures == ["benchmark-rows.png"]
