"""Warnings for developers, at the place in their own code."""

from __future__ import annotations

import keyword
import re
import sys
import warnings
from types import FrameType

_FIELD = re.compile(r"(?<!\{)\{([^\W\d]\w*)[.\[!:}]")
"""How a field of a ``str.format`` template begins that has a name."""

_PACKAGE = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Send a ``RuntimeWarning`` from where dblocks was called."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] == _PACKAGE


def warn_of_template(key: str) -> None:
    """Warn of a literal key that looks like a decorator's template."""
    if "{" not in key:
        return
    for name in _FIELD.findall(key):
        if not keyword.iskeyword(name):
            warn(
                f"The key {key!r} is taken literally: only the decorator form fills in "
                f"{name!r}, and here everybody shares one lock. Write an f-string, or "
                f"decorate the function."
            )
            return
