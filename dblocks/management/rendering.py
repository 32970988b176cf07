"""Locks as JSON for programs, and as tables and lines of text for people."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from ..backends.values import Entry, Reading
from ..models import DistributedLock, State
from ..texts import visible

AnyLock = DistributedLock | Entry
"""A lock or a permit: a row of the table with its state, or what an engine tells."""

HELD, EXPIRED, COOLING, FREE = State.values
COLORS = {HELD: "SUCCESS", EXPIRED: "ERROR", COOLING: "WARNING"}
"""Django's name for the style of each state, in the admin's colours; free has none."""

_COLUMNS = ("KEY", "PERMIT", "STATE", "HOLDER", "AGE", "REMAINING", "WAITING", "NOTE")
_CUT = ("HOLDER", "NOTE")
"""The columns whose text is cut; keys are there to be copied."""
_PROCESS = re.compile(r"(?P<host>\S+)(?P<number> pid \d+(?: |$))")
"""How dblocks describes a holder: host and process, then the thread or task."""
_LEAST = 8
"""The narrowest that a shrinking column gets."""
_EMPTY = "-"

_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def as_json(lock: AnyLock, waiting: int | None = None) -> dict[str, Any]:
    """Return a lock as the option ``--json`` writes it, in its documented shape."""
    remaining = float(lock.remaining)
    age = held_for(lock)
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
        "age": None if age is None else round(age, 3),
        "remaining": round(max(0.0, remaining), 3),
        "waiting": waiting,
        "release_requested_at": _moment(lock.release_requested_at),
    }


def taken_for(lock: AnyLock) -> float | None:
    """Return how many seconds ago a lock was taken, where that is known."""
    if not (lock.acquired_at and lock.expires_at):
        return None
    # Both by the clock of the database or the engine.
    lasts = (lock.expires_at - lock.acquired_at).total_seconds()
    return max(0.0, lasts - float(lock.remaining))


def held_for(lock: AnyLock) -> float | None:
    """Return for how many seconds somebody has held a lock, if anybody does."""
    return taken_for(lock) if lock.state in {HELD, EXPIRED} else None


def _moment(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    utc = moment.astimezone(timezone.utc)
    return utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def facts_of(lock: AnyLock, waiting: int | None = None) -> dict[str, str]:
    """Return what there is to say of a lock, in units for people."""
    is_held = lock.state in {HELD, EXPIRED}
    remaining = abs(float(lock.remaining))
    facts: dict[str, object] = {
        "key": lock.lock_key,
        "permit": lock.permit,
        "state": lock.state,
        "holder" if is_held else "last holder": lock.holder,
        "note": lock.note,
    }
    if is_held:
        facts["age"] = _span(held_for(lock), "since", lock.acquired_at)
    if lock.state == EXPIRED:
        facts["overdue"] = _span(remaining, "since", lock.expires_at)
    elif lock.state != FREE:
        facts["remaining"] = _span(remaining, "until", lock.expires_at)
    if lock.release_requested_at is not None:
        facts["asked to release"] = f"since {_clock(lock.release_requested_at)}"
    facts["waiting"] = waiting
    facts["fencing token"] = lock.version
    if is_held:
        facts |= {"holds": lock.hold_count, "owner": lock.owner}
    given = {name: value for name, value in facts.items() if value not in (None, "")}
    return {name: _text(value) for name, value in given.items()}


def _span(seconds: float | None, preposition: str, moment: datetime | None) -> str:
    if moment is None:
        return _duration(seconds)
    return f"{_duration(seconds)}, {preposition} {_clock(moment)}"


def _clock(moment: datetime) -> str:
    return f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"


def aligned(facts: Mapping[str, str]) -> list[str]:
    """Return a line for each name and value."""
    width = max(map(len, facts))
    return [f"{name:{width}}  {value}" for name, value in facts.items()]


def tab_separated(locks: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line of names and one of values for each lock, of all columns always."""
    return ["\t".join(cells) for cells in (_COLUMNS, *map(_cells, locks))]


def table(locks: Sequence[dict[str, Any]], width: int) -> list[tuple[str, str | None]]:
    """Return the lines of a table for a width, each with its lock's state.

    Permits have a column only if there are any. If the table is too wide, columns
    without a value are left out; then holder and note are cut; then the note is left
    out. A key is never cut: one that takes more than half of the width pushes the rest
    of its line aside. Of a holder, the host's name is cut, not the process's number.
    """
    columns = {
        name: [name, *column]
        for name, *column in zip(_COLUMNS, *map(_cells, locks), strict=True)
    }
    if all(lock["permit"] is None for lock in locks):
        del columns["PERMIT"]
    widths = {name: max(map(cells_in, column)) for name, column in columns.items()}
    if locks and _total(widths) > width:
        for name, column in columns.items():
            if set(column[1:]) == {_EMPTY}:
                del widths[name]
        sizes = map(cells_in, columns["KEY"])
        widths["KEY"] = max(size for size in sizes if size <= max(_LEAST, width // 2))
    least = {name: max(map(_least, columns[name])) for name in _CUT}
    while _total(widths) > width:
        if wide := [name for name in _CUT if widths.get(name, 0) > least[name]]:
            widths[max(wide, key=lambda name: widths[name])] -= 1
        elif "NOTE" in widths:
            del widths["NOTE"]
        elif widths["KEY"] > _LEAST:
            widths["KEY"] -= 1
        else:
            break
    fitted = [
        [_fit(text, size, cut=name in _CUT) for text in columns[name]]
        for name, size in widths.items()
    ]
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


def _least(text: str) -> int:
    """Return how narrow a column with this text may get."""
    process = _PROCESS.match(text)
    return max(_LEAST, cells_in(f"…{process['number']}…") if process else 0)


def _fit(text: str, size: int, *, cut: bool) -> str:
    if cut and cells_in(text) > size:
        process = _PROCESS.match(text)
        if process and cells_in(process[0]) >= size:
            # The host is cut, and the number is not.
            end = process["number"] + ("…" if process[0] != text else "")
            text = _cut(process["host"], size - cells_in(end)) + end
        else:
            text = _cut(text, size)
    return text + " " * (size - cells_in(text))


def _cut(text: str, size: int) -> str:
    """Return the beginning of a text that is too long, in at most ``size`` cells."""
    kept = len(text)
    while kept and cells_in(text[:kept]) >= size:
        kept -= 1
    return text[:kept] + "…"


def cells_in(text: str) -> int:
    """Return how many cells of a terminal a text takes."""
    if text.isascii():
        return len(text)
    cells = [_cells_of(character) for character in text]
    # A sign that is asked to be shown as an emoji is as wide as one.
    emoji = sum(
        cells[at - 1] == 1 for at, sign in enumerate(text) if at and sign == "\ufe0f"
    )
    return sum(cells) + emoji


def _cells_of(character: str) -> int:
    if unicodedata.category(character) in {"Mn", "Me"}:
        return 0
    # Vowels and finals of Korean syllables that are written in parts, after a wide one.
    if "\u1160" <= character <= "\u11ff":
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def _text(value: object) -> str:
    return _EMPTY if value in (None, "") else visible(str(value))


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


def unheld(lock: AnyLock) -> str:
    """Say why nobody was asked for a lock that isn't held."""
    return (
        f"{named(lock.lock_key, lock.permit)} is {lock.state}: it has no holder who "
        f"could answer; nobody was asked"
    )


def holder_of(reading: Reading) -> str:
    """Say who has a lock, as a ``LockTimeout`` does."""
    return reading.as_timeout("", "", None)._state()
