"""Warnings for developers, at the place in their own code."""

from __future__ import annotations

import keyword
import re
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from django.apps import apps
from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections, router

_FIELD = re.compile(r"(?<!\{)\{([^\W\d]\w*)[.\[!:}]")
"""The beginning of a named field in a ``str.format`` template."""

_BETWEEN = (f"{__package__}.", "contextlib.", "django.utils.asyncio.")
"""The packages and modules between the developer's line and a warning."""


def warn(message: str) -> None:
    """Send a ``RuntimeWarning`` from where dblocks was called."""
    level = 2
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_globals.get("__name__")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, RuntimeWarning, stacklevel=level)


def _is_ours(module: object) -> bool:
    return isinstance(module, str) and f"{module}.".startswith(_BETWEEN)


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


@contextmanager
def replicas_watched() -> Iterator[None]:
    """In debug mode, warn of what a guarded block reads from a replica.

    A replica is a database that the routers read models from and write none to.
    """
    if not settings.DEBUG or not router.routers:
        yield
        return
    seen: list[str] = []

    def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append(context["connection"].alias)
        return execute(sql, params, many, context)

    with ExitStack() as noting:
        for replica in _replicas() - {DEFAULT_DB_ALIAS}:
            noting.enter_context(connections[replica].execute_wrapper(note))
        yield
    if seen:
        warn(
            f"A block under atomic=True has read from the replica {seen[0]!r}, which "
            f"may lag behind what the last holder committed; the guard doesn't see "
            f"that. Read what the lock protects from {DEFAULT_DB_ALIAS!r}: "
            f".using({DEFAULT_DB_ALIAS!r})."
        )


def _replicas() -> set[str]:
    models = apps.get_models()
    read = {router.db_for_read(model) for model in models}
    return read - {router.db_for_write(model) for model in models}
