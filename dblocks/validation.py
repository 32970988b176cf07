"""What callers may pass: refused here, before any I/O, or returned in one form.

Every function returns the value that dblocks works with (durations as ``float``
seconds) or raises ``TypeError`` for a wrong type and ``ValueError`` for a wrong
value, naming the argument and showing what was passed.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Literal, NamedTuple, TypeVar

from asgiref.sync import iscoroutinefunction

from .exceptions import InvalidKey
from .permits import MAX_PERMITS, SEPARATOR, row_key

T = TypeVar("T")

MAX_KEY = 255
MAX_KEYS = 1000
MAX_OWNER = 64
MAX_NOTE = 255
MIN_LEASE = 0.1
MAX_LEASE = 366 * 86400.0
MAX_BATCH = 10_000
"""Every database takes a statement with that many keys."""
MAX_AGE = 366_000 * 86400.0
"""Every database can express a moment that long ago: MySQL's years begin at 1000."""

Key = str | Callable[..., str | Iterable[str]]
"""A key, or a callable that makes it from the arguments of a decorated call."""

OnLocked = Callable[..., Any] | Literal["raise", "skip"] | None


class Unset:
    """The default of arguments whose default is a setting, or the lock's own."""

    def __repr__(self) -> str:
        return "…"  # in signatures: timeout=…

    def __reduce__(self) -> str:
        # A copy, such as that of a lock for a spawned process, has this very object.
        return "UNSET"


UNSET: Any = Unset()


def key(value: object, longest: int = MAX_KEY) -> str:
    """Return the name of a lock; anything else is an ``InvalidKey``."""
    try:
        name = text("key", value, longest, empty=False)
    except (TypeError, ValueError) as error:
        raise InvalidKey(str(error)) from None
    if SEPARATOR in name:
        raise InvalidKey(
            f"key must not contain U+001F, which separates a permit's number: {name!r}"
        )
    return name


def keys(values: Iterable[object]) -> tuple[str, ...]:
    """Return the names of locks that are taken together."""
    return _counted(tuple(map(key, values)))


def named(values: tuple[Key, ...]) -> tuple[Key, ...]:
    """Return the keys that name a lock; callables are called later."""
    return _counted(tuple([v if callable(v) else one_of(v) for v in values]))


def one_of(value: object) -> str:
    """Return the name of a lock; refuse a list: several keys are several arguments."""
    if isinstance(value, list | tuple):
        raise InvalidKey(
            f"key must be a str, not {value!r}; write several keys as several arguments"
        )
    return key(value)


def _counted(values: tuple[T, ...]) -> tuple[T, ...]:
    if not values:
        raise InvalidKey("keys must not be empty: there is nothing to lock")
    if len(values) > MAX_KEYS and (number := len(set(values))) > MAX_KEYS:
        raise InvalidKey(f"keys must number at most {MAX_KEYS:,}, not {number:,}")
    return values


def permits(value: object, *, of_one: bool) -> int:
    """Return how many may hold a lock, of one key or of several, at a time."""
    number = _integer("permits", value, 1, MAX_PERMITS)
    if number > 1 and not of_one:
        raise ValueError(f"permits={number} needs one key, given as a str")
    return number


def version(value: object) -> int:
    """Return the fencing token of a grant."""
    return _integer("version", value, -(2**63), 2**63 - 1)


def intervention(by: object, reason: object, grant: object) -> dict[str, Any]:
    """Return who intervenes, a user or a name or ``None``, and why.

    Args:
        grant: The fencing token of the grant that is meant; ``None`` for any.
    """
    if grant is not None:
        version(grant)
    if by is not None:
        text("by", str(by), sys.maxsize)
    return {"by": by, "reason": text("reason", reason, sys.maxsize)}


def key_of_permits(value: str, permits: int) -> None:
    """Refuse a key that has no room for the numbers of its permits."""
    _row_key(value, permits - 1, f"permits={permits}")


def key_of_row(value: object, permit: object) -> str:
    """Return the key of a lock's own row, or of the row of one of its permits."""
    name = key(value)
    if permit is None:
        return name
    number = _integer("permit", permit, 0, MAX_PERMITS - 1)
    return _row_key(name, number, f"permit={number}")


def _integer(name: str, value: object, least: int, most: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an int, not {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be from {least:,} to {most:,}, not {value!r}")
    return value


def _row_key(key: str, permit: int, asked: str) -> str:
    """Return the key of a permit's row, for which the key must leave room."""
    whole = row_key(key, permit)
    if len(whole) > MAX_KEY:
        room = MAX_KEY - len(row_key("", permit))
        raise InvalidKey(
            f"key must not be longer than {room} characters with {asked} "
            f"({len(key)}): {key!r}"
        )
    return whole


def text(name: str, value: Any, longest: int = MAX_NOTE, *, empty: bool = True) -> str:
    """Return free text; ``name`` is the argument's."""
    kind = type(value)
    # Not isinstance(), for which a lazy object of Django's is what it stands for.
    if not issubclass(kind, str):
        # The message names the type, because a lazy translation looks like a str.
        raise TypeError(f"{name} must be a str, not {value!r} ({kind.__name__})")
    flaw = ""
    if not value and not empty:
        flaw = "be empty"
    elif len(value) > longest:
        flaw = f"be longer than {longest} characters ({len(value)})"
    elif "\0" in value:
        flaw = "contain a NUL character"
    elif not value.isascii() and re.search("[\ud800-\udfff]", value):
        flaw = "contain a lone surrogate"
    if flaw:
        raise ValueError(f"{name} must not {flaw}: {value!r}")
    return str.__str__(value)


def owner(value: object) -> str:
    """Return an explicit owner id."""
    return text("owner", value, MAX_OWNER, empty=False)


def literal(name: str, value: str | Callable[..., Any]) -> str:
    """Return a key or a note that no decorator makes from a call's arguments."""
    if callable(value):
        raise TypeError(
            f"{name}={value!r} is a callable, which only the decorator form calls; "
            f"here the {name} must be a str."
        )
    return value


def duration(name: str, value: object) -> float:
    """Return a duration in seconds, 0 or more."""
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
        raise TypeError(
            f"{name} must be a number of seconds or a timedelta, not {value!r}"
        )
    # An int can be too large for a float.
    if not 0 <= seconds <= sys.float_info.max:
        raise ValueError(f"{name} must be finite and not negative: {value!r}")
    return float(seconds)


def lease(value: object, name: str = "lease") -> float:
    """Return how long a lock is held without being renewed."""
    return bounded(name, value, MIN_LEASE)


def timeout(value: object, name: str = "timeout") -> float | None:
    """Return how long to wait; ``None`` is for ever."""
    if isinstance(value, float) and value == math.inf:
        raise ValueError(f"{name} must be finite, not {value!r}: None waits for ever")
    return None if value is None else duration(name, value)


def age(value: object, name: str = "older_than") -> float:
    """Return how long something must have been the case."""
    seconds = duration(name, value)
    if seconds > MAX_AGE:
        raise ValueError(f"{name} must be from 0 s to 366000 days, not {value!r}")
    return seconds


def batch_size(value: object) -> int:
    """Return how many rows are deleted together."""
    return _integer("batch_size", value, 1, MAX_BATCH)


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
    if isinstance(value, type) and issubclass(value, BaseException):
        raise TypeError(
            f"on_locked={value!r} is an exception, which a call would return and not "
            f"raise: give a function that raises it"
        )
    if value is None or value == "raise" or value == "skip" or callable(value):
        return value
    kind = ValueError if isinstance(value, str) else TypeError
    raise kind(f"on_locked must be None, 'raise', 'skip' or a callable, not {value!r}")


def is_async(function: Any) -> bool:
    """Tell whether a call returns a coroutine."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return iscoroutinefunction(function) or iscoroutinefunction(call)


def callback(value: object) -> None:
    """Refuse what can't be called later, from a thread that runs no event loop."""
    if not callable(value):
        raise TypeError(f"callback must be a callable, not {value!r}")
    if is_async(value):
        raise TypeError(
            f"callback must be a plain function, not the async {value!r}, which a "
            f"thread can't await: give one that calls loop.call_soon_threadsafe()"
        )


class RowWait(NamedTuple):
    """How ``SELECT … FOR UPDATE`` treats a taken key."""

    timeout: float | None
    skip: bool = False
    backend: str = "default"


def row_wait(nowait: object, skip_locked: object, patience: object) -> RowWait | None:
    """Return how to wait, or ``None`` if no argument says.

    At most one of ``nowait``, ``skip_locked`` and ``timeout`` may be given.
    """
    given = {
        "nowait=True": flag("nowait", nowait),
        "skip_locked=True": flag("skip_locked", skip_locked),
        f"timeout={patience!r}": patience is not UNSET,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise ValueError(f"{' and '.join(names)} exclude each other: give one alone")
    if nowait or skip_locked:
        return RowWait(0.0, skip=bool(skip_locked))
    return None if patience is UNSET else RowWait(timeout(patience))
