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
"""The strings that would read as a part of another type, or as none."""

_DIGEST = "%sha256-"
"""What a digest begins with; no part has it, whose every ``%`` is written ``%25``."""


def make_key(*parts: str | int | UUID | date) -> str:
    """Join parts to a key, so that different parts never give the same key.

    ``make_key("order", tenant, 7)`` is ``"order:acme:7"``. Parts of different types are
    different: ``7`` and ``"7"`` give two keys, and so two locks; give the same thing
    in the same type everywhere. In a string ``:`` is written ``%3A``, ``%`` is written
    ``%25``, and one that would read as another type has ``'`` before it: ``"7"`` is
    ``'7``. What doesn't fit into 255 characters gives way to a SHA-256 digest of the
    whole; the beginning stays readable. No I/O. ::

        with distributed_lock(make_key("order", tenant.slug, number)):
            ...

        @distributed_lock(lambda request, number: make_key("order", number))
        def pay(request, number): ...

    Args:
        parts: One or more of ``str``, ``int``, ``UUID`` and ``date``. Members of an
            enumeration count as their value if they are ``str`` or ``int``.

    Returns:
        A key of 1 to 255 characters. With ``permits`` a key must be shorter by the
        number of the permit: keep parts short there.

    Raises:
        InvalidKey: There is no part; one is ``None``, for which all calls without a
            value would share a lock; one holds NUL, U+001F or a lone surrogate.
        TypeError: A part is of another type. ``bool``, ``float`` and ``datetime`` are
            refused because equal ones can be written in different ways.
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
