"""System checks: what can be wrong with a deployment, before it goes wrong.

Each has a section in ``docs/checks.md``. Errors concern the settings alone. What
concerns a database is a warning and tagged ``database``, so that the first ``migrate``
isn't stopped by the table that it is about to make. Without ``--database`` nothing is
asked of a server.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.utils.connection import ConnectionDoesNotExist

from .backends.base import BaseBackend
from .backends.messages import error, warning
from .conf import backends


def _made() -> tuple[list[BaseBackend], list[Exception]]:
    """Return the backends that can be made, and why the others can't."""
    made: list[BaseBackend] = []
    faults: list[Exception] = []
    try:
        aliases = list(backends.settings)
    except ImproperlyConfigured as fault:
        return [], [fault]
    for alias in aliases:
        try:
            backends[alias].check_configured()
            made.append(backends[alias])
        except (ImproperlyConfigured, ConnectionDoesNotExist) as fault:
            faults.append(fault)
    return made, faults


@checks.register
def check_settings(**kwargs: Any) -> list[checks.CheckMessage]:
    """E001: every backend in ``DBLOCKS`` can be made as it is configured."""
    return [error("E001", str(e), "Correct the setting DBLOCKS.") for e in _made()[1]]


@checks.register
def check_deployment(**kwargs: Any) -> Iterator[checks.CheckMessage]:
    """W006, W008 and W009: what the settings and the process tell."""
    for backend in _made()[0]:
        if backend.lease < 1:
            yield warning(
                "W008",
                f"DBLOCKS[{backend.alias!r}]: a LEASE of {backend.lease:g} s is for "
                f"tests only.",
                "A busy machine misses such a renewal: use 10 s or more.",
            )
        yield from backend.check()
    uwsgi: Any = sys.modules.get("uwsgi")
    options = getattr(uwsgi, "opt", {})
    if uwsgi is not None and not {"enable-threads", b"enable-threads"} & set(options):
        yield warning(
            "W006",
            "uWSGI runs no threads here: leases are not renewed.",
            "Start uWSGI with --enable-threads.",
        )


@checks.register(checks.Tags.database)
def check_connections(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """W004 and W005: what the settings tell of the lock's database."""
    return [m for b in _made()[0] for m in b.check_connection(databases)]


@checks.register(checks.Tags.database)
def check_databases(
    databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """W001 to W003 and W007: what the lock's database tells."""
    messages: list[checks.CheckMessage] = []
    for backend in _made()[0]:
        # Several backends may be in one database.
        found = backend.check_server(databases or ())
        messages += [message for message in found if message not in messages]
    return messages
