"""Keys that are joined from parts."""

from __future__ import annotations

import hashlib
import re
import sys
from datetime import date, datetime
from uuid import UUID

from . import validation
from .exceptions import InvalidKey

_READS_OTHERWISE = re.compile(
    r"|'.*|-?[0-9]+|[0-9]{4}-[0-9]{2}-[0-9]{2}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    re.DOTALL,
)
"""Strings that are empty, begin with ``'`` or read as a part of another type."""

_DIGEST = "%sha256-"
"""What a digest begins with. No part contains it, because ``%`` becomes ``%25``."""


def make_key(*parts: str | int | UUID | date) -> str:
    """Join parts into a key, so that different parts never give the same key.

    ``make_key("order", "acme", 7)`` is ``"order:acme:7"``. Values of different types
    are different parts: ``7`` and ``"7"`` give two keys, and so two locks. Pass the
    same thing in the same type everywhere.

    In a string, ``:`` becomes ``%3A`` and ``%`` becomes ``%25``. A string that would
    read as another type gets a leading ``'``: ``"7"`` becomes ``'7``. A key that would
    be longer than 255 characters is cut, and ends in a SHA-256 digest of the whole.
    Does no I/O. ::

        with distributed_lock(make_key("order", tenant.slug, number)):
            ...

        @distributed_lock(lambda request, number: make_key("order", number))
        def pay(request, number): ...

    Args:
        parts: One or more values of type ``str``, ``int``, ``UUID`` or ``date``. A
            member of an enumeration counts as its value if it is a ``str`` or ``int``.

    Returns:
        A key of 1 to 255 characters. A lock with ``permits`` needs a few characters for
        the number of the permit: keep the parts short there.

    Raises:
        InvalidKey: There is no part, or a part is ``None`` (all calls without a value
            would share one lock), or a part holds NUL, U+001F or a lone surrogate.
        TypeError: A part has another type. ``bool``, ``float`` and ``datetime`` are
            refused because equal values can be written in different ways.
    """
    if not parts:
        raise InvalidKey("make_key() needs at least one part: there is nothing to lock")
    whole = validation.key(":".join(map(_written, parts)), sys.maxsize)
    if len(whole) <= validation.MAX_KEY:
        return whole
    digest = _DIGEST + hashlib.sha256(whole.encode()).hexdigest()
    return whole[: validation.MAX_KEY - len(digest)] + digest


def _written(part: object) -> str:
    if isinstance(part, str):
        text = str.__str__(part).replace("%", "%25").replace(":", "%3A")
        return f"'{text}" if _READS_OTHERWISE.fullmatch(text) else text
    if isinstance(part, int) and not isinstance(part, bool):
        return int.__repr__(part)
    if isinstance(part, UUID):
        return str(part)
    if isinstance(part, date) and not isinstance(part, datetime):
        return part.isoformat()
    if part is None:
        raise InvalidKey(
            "a part of the key is None: all calls without a value would share one lock"
        )
    raise TypeError(
        f"a part of the key must be a str, int, UUID or date, not {part!r}: write it "
        f"as a str"
    )
