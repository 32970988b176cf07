"""Plots of what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Series
from benchmarks.measurements import TITLES, ServerReport


@dataclass(frozen=True)
class Plot:
    """What a plot shows."""

    title: str
    x: str
    y: str
    #: Whether the contenders are too far apart for a linear scale.
    wide: bool = False


PLOTS = {
    "distinct-keys": Plot(
        "Grants a second, each process with a key of its own",
        "processes",
        "grants a second",
    ),
    "one-key": Plot("Grants a second, one key for all", "processes", "grants a second"),
    "rows": Plot("An acquire over the rows in the table", "rows", "p50, ms"),
    "statements": Plot(
        "Statements per grant, one key for all", "processes", "statements per grant"
    ),
}


def draw(reports: Mapping[str, ServerReport], folder: Path) -> None:
    """Draw each plot into a file, with a part for each server."""
    for name, plot in PLOTS.items():
        lines = {
            server: [
                series
                for result in report.results.values()
                for series in result.series
                if series.plot == name
            ]
            for server, report in reports.items()
        }
        lines = {server: mine for server, mine in lines.items() if mine}
        if lines:
            _draw(plot, lines, folder / f"benchmark-{name}.png")


def _draw(plot: Plot, lines: Mapping[str, list[Series]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(lines), 3.5), layout="constrained")
    parts = figure.subplots(1, len(lines), squeeze=False)[0]
    for part, (server, mine) in zip(parts, lines.items(), strict=True):
        for series in mine:
            part.plot(series.x, series.y, marker="o", label=series.label)
        part.set_title(TITLES[server])
        part.set_xscale("log")
        part.set_xticks(mine[0].x, [f"{x:g}" for x in mine[0].x], minor=False)
        part.minorticks_off()
        part.set_xlabel(plot.x)
        if plot.wide:
            part.set_yscale("log")
        else:
            part.set_ylim(bottom=0)
        part.grid(alpha=0.3)
        part.legend(fontsize="small")
    parts[0].set_ylabel(plot.y)
    figure.suptitle(plot.title)
    figure.savefig(path, dpi=100)
