"""Permits: the rows of a lock that several may hold at a time.

A lock with N permits has a row for each; a row's key is the lock's key, U+001F and a
number from 0. Each is a lock like any other; only this module takes such keys apart.
"""

from __future__ import annotations

SEPARATOR = "\x1f"

MAX_PERMITS = 1000


def row_keys(key: str, permits: int) -> list[str]:
    """Return the keys of a lock's rows: its own, or those of its permits."""
    if permits == 1:
        return [key]
    return [f"{key}{SEPARATOR}{number}" for number in range(permits)]


def row_key(key: str, permit: int | None) -> str:
    """Return the key of one row."""
    return key if permit is None else f"{key}{SEPARATOR}{permit}"


def apart(row_key: str) -> tuple[str, int | None]:
    """Return the key and the permit of a row; ``None`` for a lock without permits."""
    key, separator, number = row_key.rpartition(SEPARATOR)
    if not separator or not number.isascii() or not number.isdigit():
        return row_key, None
    return key, int(number)


def in_order(row_key: str) -> tuple[str, int]:
    """Return the sort key of a row: its key, then the number of its permit."""
    key, permit = apart(row_key)
    return key, -1 if permit is None else permit


def span(key: str) -> tuple[str, str]:
    """Return the bounds of the row keys of a key's permits; the upper is exclusive."""
    return key + SEPARATOR, key + chr(ord(SEPARATOR) + 1)
