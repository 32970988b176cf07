"""Renewals owed to tests: only a test's own connection sees its rows.

Not a backend's, because a test may replace the setting, and with it all backends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ..values import Grant, Renewal, Renewed
from . import table, transactions


class _Owed(NamedTuple):
    renewal: Renewal
    answer: Callable[[Renewed], object]
    is_live: Callable[[], bool]
    #: The block, or the savepoint, that it was made in, whose rollback would undo it.
    block: object = None


_owed: dict[tuple[object, Grant], _Owed] = {}


def owe(
    connection: object,
    renewal: Renewal,
    answer: Callable[[Renewed], object],
    is_live: Callable[[], bool],
) -> None:
    """Remember a renewal until its test next asks, if it is still held then."""
    _owed[connection, renewal.grant] = _Owed(renewal, answer, is_live)


def catch_up(connection: Connection) -> None:
    """Make the renewals that are owed on a connection.

    A renewal is made again if its block has ended, perhaps by a rollback.
    """
    if not (_owed and connection.in_atomic_block):
        return
    # Savepoints, not blocks: a decorator's block is the same object at each call.
    blocks = [connection.atomic_blocks[0], *filter(None, connection.savepoint_ids)]
    due: dict[tuple[object, Grant], _Owed] = {}
    for place, it in list(_owed.items()):
        if place[0] is connection and it.block not in blocks:
            if it.is_live():
                due[place] = it
            else:
                _owed.pop(place, None)
    outcome = table.renew(connection, [x.renewal for x in due.values()], overdue=True)
    for place, it in due.items():
        if _owed.get(place) is it:
            _owed[place] = it._replace(block=blocks[-1])
        it.answer(outcome)


def settled(alias: str) -> Connection:
    """Return this thread's connection, on which no renewal is owed any more."""
    transactions.unpin_if_over()
    connection: Connection = connections[alias]
    catch_up(connection)
    return connection
