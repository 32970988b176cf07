"""Deletes rows, and keeps the tokens of later rows above theirs.

Before rows are deleted, the floor is raised: no new row's tokens start below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from django.apps import apps
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper as Connection
from django.db.models import F, Max, Value
from django.db.models.functions import Greatest

from . import dialects, statements, transactions
from .connections import committing, run, run_in_transaction
from .execution import execute, fetch
from .table import ensure_floor, numbered

T = TypeVar("T")

SPARE = 1_000_000
"""How far the floor is raised above itself and the rows' tokens: by more than these can
have risen since an old snapshot, or can rise until the rows are deleted."""

FLOOR = "\0floor"
"""The floor among the rows that a transaction has locked. No key has a NUL."""


def prune(using: str, stale: Any, keys: Sequence[str]) -> int:
    """Delete those of some rows that are still stale; return how many.

    In a transaction of its own that locks only the rows it deletes.
    """
    floor = apps.get_model("dblocks", "TokenFloor").objects.using(using)

    def delete(connection: Connection) -> int:
        # The floor first: an insert that waits for it reads the raised one.
        floor.select_for_update().get(pk=1)
        transactions.note_row_lock(using, FLOOR)
        rows = stale.filter(key__in=keys).select_for_update(
            skip_locked=dialects.of(connection).has_row_locks
        )
        doomed = dict(rows.values_list("key", "version"))
        if doomed:
            highest = Value(max(doomed.values()))
            floor.filter(pk=1).update(value=Greatest(F("value"), highest))
            sql = statements.on(connection).delete(len(doomed))
            execute(connection, sql, numbered(list(doomed)))
        return len(doomed)

    ensure_floor(committing(using))
    return run_in_transaction(using, delete)


def remove(rows: Any, delete: Callable[[Any], T]) -> T:
    """Have Django delete the rows of a queryset, held ones too.

    The floor is raised outside the caller's transaction, because nobody can make a row
    while a transaction has the floor locked. If the caller's has it locked already, the
    floor is raised inside: on another connection that would wait for the caller.
    """
    own = connections[rows.db]
    has_floor = transactions.may_have_row_lock(own.alias, FLOOR)
    if dialects.of(own).has_row_locks and not has_floor:
        floor = run(own, _raise_floor, _highest(rows))
    else:
        # A write first: after a read, SQLite doesn't wait for other writers.
        ensure_floor(own)
        floor = _raise_floor(own, _highest(rows))
    return delete(rows.filter(version__lte=floor))


def _highest(rows: Any) -> int:
    return rows.order_by().aggregate(highest=Max("version"))["highest"] or 0


def _raise_floor(connection: Connection, version: int) -> int:
    """Raise the floor far above a token, and above what it was; return it."""
    ensure_floor(connection)
    texts = statements.on(connection)
    execute(connection, texts.raise_floor, {"version": version, "spare": SPARE})
    [(floor,)] = fetch(connection, texts.floor, {})
    return int(floor)
