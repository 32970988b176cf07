"""Writing what was measured as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from benchmarks import plots, summary
from benchmarks.contenders import CONTENDERS
from benchmarks.figures import Figure, Scale, Verdict, number
from benchmarks.measurements import MEASUREMENTS, TITLES, Measurement, ServerReport

Reports = Mapping[str, ServerReport]

METHOD = (
    "`python -m benchmarks` writes this page.\n"
    "It starts private servers with their own default durability (Redis with its "
    "append-only file switched on), and measures everything in one run.\n"
    "Contenders take turns, in changing order.\n"
    "Where a figure was measured several times, by processes of their own, it is the "
    "median, and the least and the greatest follow in brackets.\n"
    "Most ratios are taken run by run, and the median is given: it can differ a little "
    "from the ratio of two medians.\n"
    "Nothing but the lock is measured: the server is on the same machine."
)

BRIEF = ("processors", "load before the run", "Python", "Django")
"""What an extract says of the machine."""


def page(machine: Mapping[str, str], reports: Reports, how: Scale) -> str:
    """Return the whole page."""
    parts = [
        "# Benchmarks",
        _introduction(machine, how),
        "## In short",
        summary.conclusions(reports),
        *_pictures(reports),
        "## How it was measured",
        METHOD,
        "## Targets",
        targets(reports),
        *_faults(reports),
        "## Contenders",
        contenders_table(machine),
        *_measured(reports),
        "## Environment",
        environment_tables(machine, reports),
    ]
    return "\n\n".join(parts) + "\n"


def extract(machine: Mapping[str, str], reports: Reports) -> str:
    """Return only what was measured, for the terminal."""
    parts = [
        targets(reports),
        *_faults(reports),
        *(
            tables
            for measurement in MEASUREMENTS
            if (tables := figure_tables(measurement, reports))
        ),
        environment_tables({name: machine[name] for name in BRIEF}, reports),
    ]
    return "\n\n".join(parts)


def _introduction(machine: Mapping[str, str], how: Scale) -> str:
    text = (
        "What locks cost, beside other locks and beside the least that a database can "
        "do.\n"
        f"Measured on {machine['date']} on one machine with {machine['processors']} "
        "processors; [its environment](#environment) is at the end.\n"
        "The figures are good for comparing with each other."
    )
    if how.quick:
        text += "\n\n**A quick run: its figures are for trying the command only.**"
    return text


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def measured(figure: Figure) -> str:
    """Return a figure's median and its spread."""
    unit = f" {figure.unit}" if figure.unit else ""
    text = f"{number(figure.median)}{unit}"
    low, high = number(min(figure.values)), number(max(figure.values))
    return text if low == high else f"{text} ({low} to {high})"


def limit(verdict: Verdict) -> str:
    """Return what a target asks for."""
    unit = f" {verdict.unit}" if verdict.unit else ""
    if verdict.at_most is not None:
        return f"≤ {number(verdict.at_most)}{unit}"
    if verdict.at_least is not None:
        return f"≥ {number(verdict.at_least)}{unit}"
    return "reported"


def judged(verdict: Verdict) -> str:
    """Return what was measured and whether that is enough."""
    unit = f" {verdict.unit}" if verdict.unit else ""
    text = f"{number(verdict.value)}{unit}"
    if not verdict.has_limit:
        return text
    word = "met" if verdict.met else "**not met**"
    kept_together = limit(verdict).replace(" ", "\N{NO-BREAK SPACE}")
    text = f"{text} ({kept_together}): {word}"
    if verdict.bare is not None and not verdict.met:
        text += f"; bare updates: {number(verdict.bare)}{unit}"
    return text


def targets(reports: Reports) -> str:
    """Return the table of targets, a column for each server."""
    cells: dict[tuple[int, str], dict[str, str]] = {}
    for server, report in reports.items():
        for result in report.results.values():
            for verdict in result.verdicts:
                line = cells.setdefault((verdict.row, verdict.target), {})
                line[server] = judged(verdict)
    servers = [s for s in reports if any(s in line for line in cells.values())]
    return table(
        ["", "What", *(TITLES[server] for server in servers)],
        [
            [str(row), what, *(line.get(server, "") for server in servers)]
            for (row, what), line in sorted(cells.items(), key=lambda item: item[0][0])
        ],
    )


def missed(reports: Reports) -> list[str]:
    """Return the targets that were not met."""
    return [
        f"{TITLES[server]}: {verdict.row}. {verdict.target}: {judged(verdict)}"
        for server, report in reports.items()
        for result in report.results.values()
        for verdict in result.verdicts
        if not verdict.met
    ]


def _faults(reports: Reports) -> list[str]:
    """Return what went wrong in dblocks, if anything did."""
    faults = [
        f"* {TITLES[server]}: {fault.strip().splitlines()[-1]}"
        for server, report in reports.items()
        for fault in report.faults
    ]
    return ["**Errors and overlaps of dblocks:**", "\n".join(faults)] if faults else []


def contenders_table(machine: Mapping[str, str]) -> str:
    """Return who was measured, and what of it is written to disk."""
    volatile = sorted({c.name for c in CONTENDERS if not c.durable})
    rows = [
        [
            contender.name,
            machine.get(contender.package, "") if contender.package else "",
            contender.writes,
            "yes" if contender.durable else "no",
            contender.waits,
        ]
        for contender in CONTENDERS
    ]
    heads = ["Contender", "Version", "Writes", "Durable", "Waits by"]
    return (
        f"{table(heads, rows)}\n\n"
        f"Not durable: {', '.join(volatile)}. When they grant a lock, nothing of it is "
        "on disk, so none of them pays for a commit, and the lock goes with the "
        "connection or with the server's memory. The same is true of dblocks on Redis."
    )


def _measured(reports: Reports) -> list[str]:
    parts = []
    for measurement in MEASUREMENTS:
        tables = figure_tables(measurement, reports)
        if tables:
            summary = measurement.run.__doc__ or ""
            text = " ".join(summary.split())
            parts += [f"## {measurement.title}", text, tables]
    return parts


def figure_tables(measurement: Measurement, reports: Reports) -> str:
    """Return a measurement's figures: a line for each figure and contender."""
    cells: dict[tuple[str, str], dict[str, str]] = {}
    for server, report in reports.items():
        result = report.results.get(measurement.name)
        for figure in result.figures if result else []:
            line = cells.setdefault((figure.name, figure.contender), {})
            line[server] = measured(figure)
    if not cells:
        return ""
    servers = [s for s in reports if any(s in line for line in cells.values())]
    order = list(dict.fromkeys(name for name, _ in cells))
    return table(
        ["Figure", "Contender", *(TITLES[server] for server in servers)],
        [
            [name, contender, *(line.get(server, "") for server in servers)]
            for (name, contender), line in sorted(
                cells.items(), key=lambda item: order.index(item[0][0])
            )
        ],
    )


def _pictures(reports: Reports) -> list[str]:
    drawn = {
        series.plot
        for report in reports.values()
        for result in report.results.values()
        for series in result.series
    }
    return [
        f"![{plot.title}](images/benchmark-{name}.png)"
        for name, plot in plots.PLOTS.items()
        if name in drawn
    ]


def environment_tables(machine: Mapping[str, str], reports: Reports) -> str:
    """Return what the figures were measured on, durability included."""
    rows = [["machine", name, value] for name, value in machine.items()]
    for server, report in reports.items():
        for name, value in report.environment.items():
            rows.append([TITLES[server], name, value])
    return table(["", "", ""], rows)


def write(text: str, reports: Reports, folder: Path) -> None:
    """Write the page and draw its plots."""
    images = folder / "images"
    images.mkdir(parents=True, exist_ok=True)
    (folder / "benchmarks.md").write_text(text)
    plots.draw(reports, images)
