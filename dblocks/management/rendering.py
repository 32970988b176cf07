"""Locks as JSON for programs, and as tables and lines of text for people."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import count, pairwise, takewhile
from typing import Any

from ..backends.values import Entry, Reading
from ..models import DistributedLock, State

AnyLock = DistributedLock | Entry
"""A lock or a permit: a row of the table with its state, or what an engine tells."""

HELD, EXPIRED, COOLING, FREE = State.values
COLORS = {HELD: "SUCCESS", EXPIRED: "ERROR", COOLING: "WARNING", FREE: "HTTP_INFO"}
"""Django's name for the style of each state."""

_COLUMNS = ("KEY", "PERMIT", "STATE", "HOLDER", "AGE", "REMAINING", "WAITING", "NOTE")
_SHARES = {"KEY": 2, "HOLDER": 1, "NOTE": 1}
"""The columns that shrink, and which part of the space that is left each gets."""
_LEAST = 8
"""The narrowest that a shrinking column gets."""
_EMPTY = "-"

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def as_json(lock: AnyLock, waiting: int | None = None) -> dict[str, Any]:
    """Return a lock as the option ``--json`` writes it, in its documented shape."""
    remaining = float(lock.remaining)
    age = None
    if lock.state in {HELD, EXPIRED} and lock.acquired_at and lock.expires_at:
        # Both by the clock of the database or the engine.
        lasts = (lock.expires_at - lock.acquired_at).total_seconds()
        age = round(max(0.0, lasts - remaining), 3)
    return {
        "key": lock.lock_key,
        "permit": lock.permit,
        "state": str(lock.state),
        "owner": lock.owner,
        "holder": lock.holder,
        "note": lock.note,
        "hold_count": lock.hold_count,
        "fencing_token": lock.version,
        "acquired_at": _moment(lock.acquired_at),
        "expires_at": _moment(lock.expires_at),
        "age": age,
        "remaining": round(max(0.0, remaining), 3),
        "waiting": waiting,
    }


def _moment(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    utc = moment.astimezone(timezone.utc)
    return utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def aligned(facts: Mapping[str, object]) -> list[str]:
    """Return a line for each name and value."""
    width = max(map(len, facts))
    return [f"{name:{width}}  {_text(value)}" for name, value in facts.items()]


def table(locks: Sequence[dict[str, Any]], width: int) -> list[tuple[str, str | None]]:
    """Return the lines of a table, each with its lock's state, cut to a width.

    Only where there are permits do they have a column. Where it is too wide, columns
    without a value are left out; then holder and note shrink, and the key half as much.
    """
    columns = {
        name: [name, *column]
        for name, *column in zip(_COLUMNS, *map(_cells, locks), strict=True)
    }
    if all(lock["permit"] is None for lock in locks):
        del columns["PERMIT"]
    widths = {name: max(map(_width, column)) for name, column in columns.items()}
    if locks and _total(widths) > width:
        for name, column in columns.items():
            if set(column[1:]) == {_EMPTY}:
                del widths[name]
    while _total(widths) > width:
        wide = [name for name in _SHARES if widths.get(name, 0) > _LEAST]
        if not wide:
            break
        widths[max(wide, key=lambda name: widths[name] / _SHARES[name])] -= 1
    fitted = [[_fit(text, widths[name]) for text in columns[name]] for name in widths]
    lines = ["  ".join(line).rstrip() for line in zip(*fitted, strict=True)]
    states = [None, *(lock["state"] for lock in locks)]
    return list(zip(lines, states, strict=True))


def _total(widths: Mapping[str, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _cells(lock: dict[str, Any]) -> list[str]:
    shown = dict(lock)
    if lock["state"] == FREE:
        shown |= {"holder": None, "note": None}
    shown["age"] = _duration(lock["age"])
    shown["remaining"] = _duration(lock["remaining"] or None)
    return [_text(shown[column.lower()]) for column in _COLUMNS]


def _fit(text: str, width: int) -> str:
    if _width(text) > width:
        kept = takewhile(lambda end: _width(text[:end]) < width, count(1))
        text = text[: max(kept, default=0)] + "…"
    return text + " " * (width - _width(text))


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _text(value: object) -> str:
    """Return a value without control characters, which would steer the terminal."""
    text = _EMPTY if value in (None, "") else str(value)
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _duration(value: float | None) -> str:
    if value is None:
        return _EMPTY
    for (unit, size), (smaller, part) in pairwise(_UNITS):
        if value >= size:
            whole, rest = divmod(int(value), size)
            return f"{whole}{unit}{rest // part:02d}{smaller}"
    return f"{value:.0f}s"


def named(key: str, permit: int | None) -> str:
    """Name a lock or one of its permits within a sentence."""
    lock = f"the lock {key!r}"
    return lock if permit is None else f"permit {permit} of {lock}"


def holder_of(reading: Reading) -> str:
    """Say who has a lock, and when it can be free."""
    who = reading.holder or "somebody"
    note = f" ({reading.note})" if reading.note else ""
    rest = f"{max(0.0, reading.remaining):.1f} s"
    is_one = reading.permit is None
    if reading.owner:
        if reading.acquired_at is not None:
            who += f" since {reading.acquired_at:%Y-%m-%d %H:%M:%S} UTC"
        held = "it is held" if is_one else "all permits are taken, one"
        return f"{held} by {who}{note}; its lease can end in {rest}"
    if reading.remaining > 0:
        what = "it" if is_one else "one of its permits"
        return f"{who}{note} has released {what}, and it stays taken for another {rest}"
    return "others queue for it, or a transaction has its row locked"
