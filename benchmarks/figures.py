"""What measurements hand over to the report."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Scale:
    """How long and how much is measured."""

    quick: bool
    #: Processes, one after another, that each give one value of a figure.
    runs: int
    #: Times that each contender has its turn in an uncontended run, and for how long.
    turns: int
    turn: float
    #: Cycles of a hot loop.
    cycles: int
    #: Seconds in which processes contend.
    contend: float
    #: To each of two processes.
    hand_offs: int
    long_wait: float
    #: Rows in the table, smallest first.
    table: tuple[int, ...]
    renewing: float
    processes: tuple[int, ...]


FULL = Scale(
    quick=False,
    runs=3,
    turns=30,
    turn=0.05,
    cycles=1000,
    contend=3.0,
    hand_offs=100,
    long_wait=65.0,
    table=(1, 100, 10_000, 1_000_000),
    renewing=27.0,
    processes=(1, 2, 4, 8, 16, 32),
)
QUICK = Scale(
    quick=True,
    runs=1,
    turns=8,
    turn=0.03,
    cycles=300,
    contend=0.8,
    hand_offs=15,
    long_wait=3.0,
    table=(1, 100, 10_000),
    renewing=10.0,
    processes=(1, 4, 16),
)


@dataclass(frozen=True)
class Figure:
    """One quantity of one contender, measured once or several times."""

    name: str
    contender: str
    unit: str
    values: Sequence[float]

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Verdict:
    """A target and what was measured."""

    row: int
    target: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None
    #: What the least that makes a lock durable reaches in the same run.
    bare: float | None = None

    @property
    def met(self) -> bool:
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )

    @property
    def has_limit(self) -> bool:
        return self.at_most is not None or self.at_least is not None


@dataclass(frozen=True)
class Series:
    """A line in a plot."""

    plot: str
    label: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass
class Result:
    """What one measurement found on one server."""

    figures: list[Figure] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    #: Errors and overlaps of dblocks, which are faults; those of peers are figures.
    faults: list[str] = field(default_factory=list)


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return how one contender's runs compare with another's, run by run."""
    return statistics.median(a / b for a, b in zip(ones, others, strict=True))


def number(value: float) -> str:
    """Return a figure with as many digits as make sense."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile; of a few values, the nearest that there is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
