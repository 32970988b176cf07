"""Management commands: how they end when they are locked out."""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError

from ..exceptions import LockTimeout
from .decoratable import bound_to

CONFLICT = 75
"""The exit status for a lock that is taken: ``EX_TEMPFAIL`` of sysexits.h."""


class CommandLockTimeout(LockTimeout, CommandError):
    """A ``LockTimeout`` that ends a management command in one line, with status 75."""

    def __init__(self, error: LockTimeout) -> None:
        super().__init__(error.key, timeout=error.timeout)
        self.__dict__.update(vars(error))
        self.returncode = CONFLICT
        # The context would be the same error once more.
        self.__suppress_context__ = True


def raise_again(function: Any, args: tuple[Any, ...], error: LockTimeout) -> NoReturn:
    """Raise the error of a decorated call, for a command as a ``CommandError``."""
    if bound_to(BaseCommand, function, args) is not None:
        raise CommandLockTimeout(error)
    raise error
