"""Renewals owed on the connections of tests: nobody else sees the rows there.

Not a backend's, because a test may replace the setting, and with it all backends.
"""

from __future__ import annotations

from collections.abc import Callable

from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ..values import Grant, Renewal, Renewed
from . import table

_owed: dict[tuple[object, Grant], tuple[Renewal, Callable[[Renewed], object]]] = {}


def owe(
    connection: object, renewal: Renewal, answer: Callable[[Renewed], object]
) -> None:
    """Remember a renewal until its test next asks; ``answer`` gets the outcome."""
    _owed[connection, renewal.grant] = renewal, answer


def catch_up(connection: Connection) -> None:
    """Make the renewals that are owed on a connection."""
    if not (_owed and connection.in_atomic_block):
        return
    due = [place for place in list(_owed) if place[0] is connection]
    owed = [_owed.pop(place) for place in due]
    outcome = table.renew(connection, [renewal for renewal, _ in owed], overdue=True)
    for _, answer in owed:
        answer(outcome)
