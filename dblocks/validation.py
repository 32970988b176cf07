"""What callers may pass: refused here, before any I/O, or returned in one form.

Every function returns the value that dblocks works with (durations as ``float``
seconds) or raises ``TypeError`` for a wrong type and ``ValueError`` for a wrong
value, naming the argument and showing what was passed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

from .exceptions import InvalidKey

MAX_KEY = 255
MAX_OWNER = 64
MAX_NOTE = 255
MIN_LEASE = 0.1
MAX_LEASE = 366 * 86400.0

OnLocked = Literal["raise", "skip"] | Callable[..., Any] | None


class Unset:
    """The default of arguments whose default is a setting."""

    def __repr__(self) -> str:
        return "<from settings>"


UNSET = Unset()


def key(value: object) -> str:
    """Return the name of a lock; anything else is an ``InvalidKey``."""
    try:
        return text("key", value, MAX_KEY, empty=False)
    except (TypeError, ValueError) as error:
        raise InvalidKey(str(error)) from None


def text(
    name: str, value: object, longest: int = MAX_NOTE, *, empty: bool = True
) -> str:
    """Return free text; ``name`` is the argument's."""
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a str, not {value!r}")
    flaw = ""
    if not value and not empty:
        flaw = "empty"
    elif len(value) > longest:
        flaw = f"longer than {longest} characters ({len(value)})"
    elif "\0" in value:
        flaw = "holding a NUL character"
    elif re.search("[\ud800-\udfff]", value):
        flaw = "holding a lone surrogate"
    if flaw:
        raise ValueError(f"{name} must not be {flaw}: {value!r}")
    return str.__str__(value)


def owner(value: object) -> str:
    """Return an explicit owner id."""
    return text("owner", value, MAX_OWNER, empty=False)


def duration(name: str, value: object) -> float:
    """Return a duration in seconds, 0 or more."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            seconds = float(value)
        except OverflowError:
            seconds = math.inf
    else:
        raise TypeError(
            f"{name} must be a number of seconds or a timedelta, not {value!r}"
        )
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be finite and not negative: {value!r}")
    return seconds


def lease(value: object, name: str = "lease") -> float:
    """Return how long a lock is held without being renewed."""
    return bounded(name, value, MIN_LEASE)


def timeout(value: object, name: str = "timeout") -> float | None:
    """Return how long to wait; ``None`` is for ever."""
    return None if value is None else duration(name, value)


def bounded(name: str, value: object, least: float = 0.0) -> float:
    """Return a duration of at least ``least`` and at most 366 days."""
    seconds = duration(name, value)
    if not least <= seconds <= MAX_LEASE:
        raise ValueError(f"{name} must be from {least:g} s to 366 days, not {value!r}")
    return seconds


def max_hold(value: object, renew: bool) -> float | None:
    """Return the holding limit, or ``None`` for none."""
    if value is None:
        return None
    seconds = bounded("max_hold", value, MIN_LEASE)
    if not renew:
        raise ValueError(
            f"max_hold={value!r} limits renewal, and renew=False switches it off: "
            f"use lease= alone for a fixed time."
        )
    return seconds


def flag(name: str, value: object) -> bool:
    """Return a ``bool``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {value!r}")
    return value


def on_locked(value: object) -> OnLocked:
    """Return what a decorated call does when the wait ran out."""
    if value is None or value == "raise" or value == "skip" or callable(value):
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"on_locked must be None, 'raise', 'skip' or a callable, not {value!r}")


@dataclass(frozen=True)
class RowWait:
    """How ``SELECT … FOR UPDATE`` treats a taken key."""

    timeout: float | None
    skip: bool = False


def row_wait(nowait: object, skip_locked: object, timeout_value: object) -> RowWait:
    """Return how to wait; at most one of the three may be given."""
    nowait = flag("nowait", nowait)
    skip_locked = flag("skip_locked", skip_locked)
    if nowait and skip_locked:
        raise ValueError("nowait=True and skip_locked=True exclude each other")
    if not nowait and not skip_locked:
        return RowWait(timeout(timeout_value))
    if timeout_value is not None:
        name = "nowait" if nowait else "skip_locked"
        raise ValueError(
            f"{name}=True doesn't wait: leave out timeout={timeout_value!r}, or give "
            f"timeout alone"
        )
    return RowWait(0.0, skip=skip_locked)
