"""The commands' exit statuses, and the errors that end a command with one of them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError
from django.db import NotSupportedError, connections

from ..backends.base import BaseBackend
from ..backends.database import dialects
from ..backends.database.checks import flaw_of_tables
from ..conf import backends
from ..decorators.commands import CONFLICT as CONFLICT

NOTHING_DONE = 1
# From sysexits.h.
USAGE = 64
UNAVAILABLE = 69
IO_ERROR = 74
LOST = 76
CONFIG = 78
# The shell's.
CANT_RUN = 126
NOT_FOUND = 127
INTERRUPTED = 130
BROKEN_PIPE = 141


def bad_usage(message: object) -> CommandError:
    """Return the error for arguments that are wrong or don't go together."""
    return CommandError(str(message), returncode=USAGE)


def checked(check: Callable[..., Any], *arguments: object, **options: object) -> Any:
    """Call a function that validates arguments; what it refuses is bad usage."""
    try:
        return check(*arguments, **options)
    except (TypeError, ValueError, NotSupportedError) as error:
        raise bad_usage(error) from error


def find_backend(alias: str) -> BaseBackend:
    """Return a backend; one that isn't in the settings is bad usage."""
    try:
        return backends[alias]
    except ImproperlyConfigured as error:
        # The setting itself may be malformed.
        with suppress(ImproperlyConfigured):
            if alias not in backends.settings:
                raise bad_usage(f"--backend {alias}: {error}") from error
        raise misconfigured(error) from error


def failure(error: Exception, backend: BaseBackend) -> CommandError:
    """Turn an error of the engine that keeps the locks into a line and a status."""
    if isinstance(error, ImproperlyConfigured):
        return misconfigured(error)
    if backend.has_table:
        return database_failure(error, backend.using)
    return out_of_reach(f"the backend {backend.alias!r}", error)


def database_failure(error: Exception, using: str) -> CommandError:
    """Turn an error of the locks' database into one line and an exit status."""
    dialect = dialects.known(connections[using])
    if dialect.is_wait_over(error):
        return CommandError(
            f"an open transaction in the database {using!r} has the lock's row, or the "
            f"whole table, locked, and the wait for it is over: end it, or try again "
            f"({one_line(error)})",
            returncode=UNAVAILABLE,
        )
    if dialect.is_busy(error):
        return CommandError(
            f"the database {using!r} is busy: another process is writing to it; try "
            f"again ({one_line(error)})",
            returncode=UNAVAILABLE,
        )
    with suppress(Exception):
        flaw = flaw_of_tables(connections[using])
        if flaw is not None:
            return CommandError(
                f"in the database {using!r} {flaw}: run manage.py migrate dblocks "
                f"--database {using} first",
                returncode=CONFIG,
            )
    return out_of_reach(f"the database {using!r}", error)


def misconfigured(error: ImproperlyConfigured) -> CommandError:
    """Return the error for settings that are wrong, as far as that shows."""
    return CommandError(" ".join(str(error).split()), returncode=CONFIG)


def out_of_reach(where: str, error: Exception) -> CommandError:
    """Return the error for a database or backend that doesn't answer."""
    return CommandError(
        f"{where} is out of reach: {one_line(error)}", returncode=UNAVAILABLE
    )


def one_line(error: BaseException) -> str:
    """Return an error's class and message on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
