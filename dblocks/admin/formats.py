"""How the admin formats durations, moments, texts and keys."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString, mark_safe
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import ngettext_lazy

from ..permits import SEPARATOR, apart
from ..texts import visible

MAX_NAMED = 10
"""The most locks that a message names."""

_UNITS = (86400.0, 3600.0, 60.0, 1.0)
AGO = (
    ngettext_lazy("%(count)d day ago", "%(count)d days ago", "count"),
    ngettext_lazy("%(count)d h ago", "%(count)d h ago", "count"),
    ngettext_lazy("%(count)d min ago", "%(count)d min ago", "count"),
    ngettext_lazy("%(count)d s ago", "%(count)d s ago", "count"),
)
LENGTH = (
    ngettext_lazy("%(count)d day", "%(count)d days", "count"),
    ngettext_lazy("%(count)d h", "%(count)d h", "count"),
    ngettext_lazy("%(count)d min", "%(count)d min", "count"),
    ngettext_lazy("%(count)d s", "%(count)d s", "count"),
)
OVERDUE = (
    ngettext_lazy("%(count)d day overdue", "%(count)d days overdue", "count"),
    ngettext_lazy("%(count)d h overdue", "%(count)d h overdue", "count"),
    ngettext_lazy("%(count)d min overdue", "%(count)d min overdue", "count"),
    ngettext_lazy("%(count)d s overdue", "%(count)d s overdue", "count"),
)


def phrase(phrases: Sequence[Any], seconds: float) -> str:
    """Format a duration in the largest unit that fits at least twice."""
    unit, text = next(
        (each for each in zip(_UNITS, phrases, strict=True) if seconds >= 2 * each[0]),
        (_UNITS[-1], phrases[-1]),
    )
    return str(text % {"count": max(0, int(seconds / unit))})


def exact(moment: datetime) -> str:
    """Format a moment in the current time zone and in UTC."""
    local = f"{localtime(moment):%Y-%m-%d %H:%M:%S %Z}"
    utc = f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    return utc if local == utc else f"{local} ({utc})"


def time_element(
    moment: datetime, phrases: Sequence[Any], seconds: float
) -> SafeString:
    """Return a moment as its distance from now, with the exact moment as the title.

    On a page that is written from right to left, the distance may be in English.
    """
    return format_html(
        '<time dir="auto" datetime="{}" title="{}">{}</time>',
        moment.isoformat(),
        exact(moment),
        phrase(phrases, seconds),
    )


def isolated(text: str) -> SafeString:
    """Return a text from a program or a user, isolated from its surroundings."""
    return format_html('<bdi class="dblocks-text">{}</bdi>', visible(text))


_SEPARATORS = r":;,./\\|_@=&?#+~-"
_BREAK = re.compile(rf"(?<=[{_SEPARATORS}])(?=[^{_SEPARATORS}])")


def wrapped(text: str, kind: str = "text") -> SafeString:
    """Return a text, isolated as well, that may be wrapped after its separators.

    Keys may be, and notes, which are mostly dotted names of functions.
    """
    parts = ((part,) for part in _BREAK.split(visible(text)))
    breakable = format_html_join(mark_safe("<wbr>"), "{}", parts)
    return format_html('<bdi class="dblocks-{}">{}</bdi>', kind, breakable)


def small(main: SafeString, *below: str | None) -> SafeString:
    """Return a cell, with any further texts below it in small type."""
    lines = ((text,) for text in below if text)
    smaller = format_html_join("", '<span class="dblocks-small">{}</span>', lines)
    return format_html("{}{}", main, smaller)


def names_of(row_keys: Sequence[str]) -> SafeString:
    """Return a list of locks, each key isolated from the text around it."""
    names = format_html_join(
        ", ", "{}", ((_name_of(row_key),) for row_key in row_keys[:MAX_NAMED])
    )
    return format_html("{}, …", names) if len(row_keys) > MAX_NAMED else names


def _name_of(row_key: str) -> SafeString:
    key, permit = apart(row_key)
    name = format_html("<bdi>{}</bdi>", visible(key))
    if permit is None:
        return name
    return format_html(_("{key} (permit {permit})"), key=name, permit=permit)


_ESCAPES = str.maketrans({"%": "%25", "\n": "%0A", "\r": "%0D", SEPARATOR: "%1F"})


def escaped(row_key: str) -> str:
    """Return a row's key for a form field, where browsers would change line ends.

    ``unquote()`` gives it back.
    """
    return row_key.translate(_ESCAPES)
