"""Which locks a command is about, and the order that it shows them in."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from shlex import quote
from typing import Any

from .. import validation
from ..permits import in_order
from .rendering import EXPIRED, FREE, HELD, AnyLock, held_for

_WILDCARDS = {"*": ".*", "?": "."}
_MAGIC = re.compile(r"[*?[]")


@dataclass(frozen=True)
class Selection:
    """Conditions for locks; a lock must meet all that are given.

    Attributes:
        key: It has exactly this key, or is a permit of it.
        state: It is in this state.
        pattern: Its key matches this, as file names match in a shell.
        holder: It is held, and its holder's description has this in it, as whole words
            in any case; ``*`` and ``?`` stand for any characters and for one.
    """

    key: str | None = None
    state: str | None = None
    pattern: str | None = None
    holder: str | None = None

    def __post_init__(self) -> None:
        for option, text in (("--key", self.pattern), ("--holder", self.holder)):
            if text is None:
                continue
            validation.text(option, text, sys.maxsize)
            # A variable that a script forgot to set, perhaps.
            if not text.strip():
                raise ValueError(f"{option} must not be blank: {text!r}")

    @property
    def prefix(self) -> str:
        """What the keys begin with, as far as the pattern tells."""
        return _MAGIC.split(self.pattern or "", maxsplit=1)[0]

    @cached_property
    def _words(self) -> re.Pattern[str]:
        characters = (_WILDCARDS.get(c, re.escape(c)) for c in self.holder or "")
        text = "".join(characters)
        # "web-1" is neither "web-10" nor "db-web-1"; it may be "web-1.example.com".
        return re.compile(rf"(?<![\w.-]){text}(?![\w-])", re.IGNORECASE | re.DOTALL)

    def __contains__(self, lock: AnyLock) -> bool:
        if self.key not in (None, lock.lock_key):
            return False
        if self.state not in (None, lock.state):
            return False
        if self.pattern is not None and not fnmatchcase(lock.lock_key, self.pattern):
            return False
        if self.holder is None:
            return True
        is_held = lock.state in {HELD, EXPIRED}
        return is_held and self._words.search(lock.holder) is not None


def place_of(database: str | None, backend: str | None) -> str:
    """Return the option that leads another command to the same locks."""
    for option, alias in (("--database", database), ("--backend", backend)):
        if alias is not None:
            return f" {option} {quote(alias)}"
    return ""


def advice_for(key: str, place: str) -> str:
    """Say what to do about a key that none of the locks has."""
    if _MAGIC.search(key) and key.isprintable():
        # Behind a space, a dash would begin another option.
        between = "=" if key[0] == "-" else " "
        return f"for a pattern write --key{between}{quote(key)}, with list or release"
    return f"manage.py locks list{place} shows all"


def _by_age(lock: AnyLock) -> tuple[bool, float]:
    age = held_for(lock)
    return age is None, -(age or 0.0)


def _by_remaining(lock: AnyLock) -> tuple[bool, float]:
    return lock.state == FREE, float(lock.remaining)


ORDERS: dict[str, Callable[[AnyLock], Any]] = {
    "age": _by_age,
    "remaining": _by_remaining,
    "key": lambda lock: (),
}
"""The longest held first; the first to end first; by key, which also orders equals of
the other two. Free locks, which have neither age nor end, come last."""


def ordered(locks: Iterable[AnyLock], by: str = "key") -> list[AnyLock]:
    """Return locks in an order, a key's permits by their numbers."""
    first = ORDERS[by]
    return sorted(locks, key=lambda lock: (first(lock), in_order(lock.key)))
