"""The demo's tables, line by line."""

from __future__ import annotations

from .meeting import Meeting
from .sale import Result

WIDTH = 79
COLUMNS = [5, 5, 9, 8, 8, 7, 8]
HEADER = [
    ["sold", "left", "oversold", "refused", "retries", "orders", "median"],
    ["", "", "", "", "", "per s", "wait"],
]
TITLE = WIDTH - sum(COLUMNS)

CART_COLUMNS = [10, 11, 9, 14]
CART_HEADER = ["reserved", "timed out", "took", "slowest cart"]


def line(title: str, cells: list[str], columns: list[int] = COLUMNS) -> str:
    """Return a line of a table."""
    return f"{title:<{WIDTH - sum(columns)}}" + "".join(
        f"{cell:>{width}}" for cell, width in zip(cells, columns, strict=True)
    )


def cells(result: Result) -> list[str]:
    return [
        str(result.sold),
        str(result.left),
        str(result.oversold),
        str(result.refused),
        str(result.retries),
        f"{result.orders_per_second:.0f}",
        f"{result.median_wait * 1000:.0f} ms",
    ]


def cart_cells(meeting: Meeting) -> list[str]:
    return [
        str(meeting.reserved),
        str(meeting.timed_out),
        f"{meeting.duration:.1f} s",
        f"{meeting.slowest * 1000:.0f} ms",
    ]
