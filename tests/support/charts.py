"""Draws a dashboard of Grafana from what Prometheus answered, by matplotlib."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = 24
"""Into which Grafana divides the width of a dashboard."""

COLOURS = (
    *("#3274d9", "#e0752d", "#56a64b", "#8f3bb8"),
    *("#e02f44", "#1f9e9e", "#c4a000", "#7f7f7f"),
)
INK, QUIET, LINES = "#24292e", "#6a737d", "#e3e6ea"

Line = Sequence[tuple[float, float]]


def short(value: float, _: object = None) -> str:
    return f"{value:g}"


def ops(value: float, _: object = None) -> str:
    return f"{value:g} ops/s"


def seconds(value: float, _: object = None) -> str:
    return f"{value:g} s" if value >= 1 or not value else f"{value * 1000:g} ms"


UNITS: dict[str, Callable[..., str]] = {"short": short, "ops": ops, "s": seconds}


def draw(
    board: Any, panels: Mapping[str, Mapping[str, Line]], step: float, path: Path
) -> None:
    """Draw the panels where the dashboard has them, under their titles."""
    from matplotlib.figure import Figure

    rows = max(each["gridPos"]["y"] + each["gridPos"]["h"] for each in board["panels"])
    figure = Figure(figsize=(11, rows * 0.34), facecolor="#f4f5f5")
    moments = [
        at for lines in panels.values() for line in lines.values() for at, _ in line
    ]
    for panel in board["panels"]:
        place = panel["gridPos"]
        left, width = place["x"] / COLUMNS, place["w"] / COLUMNS
        top, height = 1 - place["y"] / rows, place["h"] / rows
        _card(figure, left, top - height, width, height)
        figure.text(
            left + 0.012,
            top - 0.012,
            panel["title"],
            va="top",
            weight="bold",
            color=INK,
            size=11,
        )
        inner = (
            left + 0.058,
            top - height + 2.2 / rows,
            width - 0.074,
            height - 3.5 / rows,
        )
        axes = figure.add_axes(inner)
        _plot(axes, panels[panel["title"]], step)
        _scale(axes, min(moments), max(moments), panel["fieldConfig"]["defaults"])
    figure.savefig(path, dpi=130)


def _card(figure: Any, x: float, y: float, width: float, height: float) -> None:
    from matplotlib.patches import Rectangle

    gap = 0.003
    card = Rectangle((x + gap, y + gap), width - 2 * gap, height - 2 * gap)
    card.set(facecolor="white", edgecolor=LINES, zorder=-1)
    figure.add_artist(card)


def _plot(axes: Any, lines: Mapping[str, Line], step: float) -> None:
    for (name, line), colour in zip(sorted(lines.items()), COLOURS, strict=False):
        x, y = _with_gaps(line, step)
        axes.plot(x, y, color=colour, label=name, linewidth=1.5)
        axes.fill_between(x, y, color=colour, alpha=0.1, linewidth=0)
    axes.legend(
        loc="upper left",
        bbox_to_anchor=(-0.02, -0.11),
        ncols=4,
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        handlelength=1,
        columnspacing=1.2,
    )


def _scale(axes: Any, start: float, end: float, field: Mapping[str, Any]) -> None:
    """Label the axes: minutes and seconds from the start, and the panel's unit."""
    from matplotlib.ticker import MaxNLocator, MultipleLocator

    def clock(at: float, _: object) -> str:
        return f"{round(at - start) // 60}:{round(at - start) % 60:02}"

    axes.set_xlim(start, end)
    axes.xaxis.set_major_locator(MultipleLocator(20, offset=start % 20))
    axes.xaxis.set_major_formatter(clock)
    axes.yaxis.set_major_locator(MaxNLocator(5, integer=field["unit"] == "short"))
    axes.yaxis.set_major_formatter(UNITS[field["unit"]])
    axes.margins(y=0.12)
    axes.set_ylim(bottom=field["min"])
    axes.tick_params(colors=QUIET, labelsize=8, length=0)
    axes.grid(color=LINES, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)


def _with_gaps(line: Line, step: float) -> tuple[list[float], list[float]]:
    """Return a line's points, broken where Prometheus had none for a while."""
    x: list[float] = []
    y: list[float] = []
    for at, value in line:
        if x and at - x[-1] > 1.5 * step:
            x.append(at)
            y.append(math.nan)
        x.append(at)
        y.append(value)
    return x, y
