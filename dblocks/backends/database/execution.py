"""Runs a statement on a given connection, and makes sure that the reply is its own."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

from django.db import IntegrityError
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from ..values import Grant
from . import dialects, statements
from .connections import ReplyLost
from .dialects import Dialect

Values = dict[str, Any]
"""What a statement's placeholders stand for."""

MOST_KEPT = 64
"""The most values of a statement whose plan is kept. Longer statements are too many:
one for each number of keys."""

_NAMED = re.compile(r"%\((\w+)\)s")


@lru_cache(maxsize=256)
def _positional(sql: str) -> tuple[str, Callable[[Values], Sequence[Any]]]:
    """Return a statement with places for values, and what takes them from a dict."""
    names = _NAMED.findall(sql)
    if len(names) > 1:
        return _NAMED.sub("%s", sql), itemgetter(*names)
    return _NAMED.sub("%s", sql), lambda values: [values[name] for name in names]


def _filled(dialect: Dialect, sql: str, values: Values) -> tuple[str, Any]:
    """Return a statement, with positional values where that is faster, and its values.

    On SQLite it isn't: each time, Django searches for positions with a regular
    expression.
    """
    if dialect.fills_by_name:
        return sql, values
    text, pick = _positional(sql)
    return text, pick(values)


def execute(connection: Connection, sql: str, values: Values) -> tuple[int, int | None]:
    """Run a statement without a result; return the number of rows, and the version.

    On MySQL and MariaDB the driver reads both from the connection after the statement.
    A signal handler or the garbage collector may run another one there in between,
    whose reply must not be taken for this one's.
    """
    return _execute(dialects.of(connection), connection, sql, values)


def _execute(
    dialect: Dialect, connection: Connection, sql: str, values: Values
) -> tuple[int, int | None]:
    with dialect.cursor(connection) as cursor:
        if dialect.returns_rows:
            dialects.send(cursor, *_filled(dialect, sql, values))
            return cursor.rowcount, None
        inside = disturbed = False

        def note(statement: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal inside, disturbed
            disturbed, inside = disturbed or inside, True
            try:
                return statement(*arguments)
            finally:
                inside = False

        # The innermost wrapper: others run their statements before or after it.
        wrappers = connection.execute_wrappers
        wrappers.append(note)
        try:
            dialects.send(cursor, *_filled(dialect, sql, values))
        finally:
            wrappers.remove(note)
        if disturbed:
            raise ReplyLost("Another statement's reply came in between.")
        return cursor.rowcount, cursor.lastrowid


def changes(connection: Connection, sql: str, values: Values) -> bool:
    return bool(execute(connection, sql, values)[0])


def write(connection: Connection, name: str, grant: Grant, **values: object) -> bool:
    """Run the statement of that name; tell whether the grant was current."""
    dialect = dialects.of(connection)
    sql = getattr(statements.of(dialect), name)
    of_grant = {"key": grant.key, "owner": grant.owner, "version": grant.version}
    return bool(_execute(dialect, connection, sql, {**of_grant, **values})[0])


def fetch(
    connection: Connection, sql: str, values: Values, *, again: bool = False
) -> list[tuple[Any, ...]]:
    """Run a statement that returns rows; keep the plan of one that runs ``again``."""
    dialect = dialects.of(connection)
    kept = again and len(values) <= MOST_KEPT
    with dialect.cursor(connection) if kept else connection.cursor() as cursor:
        # Read to the end: only then is the statement over, and on SQLite committed.
        return list(dialects.send(cursor, *_filled(dialect, sql, values), "fetchall"))


def new_version(connection: Connection, sql: str, values: Values) -> int | None:
    """Run a statement that grants; the new version, or ``None`` if it didn't."""
    dialect = dialects.of(connection)
    if not dialect.returns_rows:
        rowcount, version = _execute(dialect, connection, sql, values)
        return version if rowcount else None
    rows = fetch(connection, sql, values, again=True)
    if not rows:
        return None
    row = rows[0]
    if len(row) > 1:
        dialect.note_session(connection, row[1])
    return int(row[0])


def new_versions(connection: Connection, sql: str, values: Values) -> dict[str, int]:
    """Run a statement that grants rows and returns them; the new versions, by key."""
    rows = fetch(connection, sql, values, again=True)
    if rows and len(rows[0]) > 2:
        dialects.of(connection).note_session(connection, rows[0][2])
    return {key: version for key, version, *_ in rows}


def inserted(
    connection: Connection, insert: Callable[..., Any], sql: str, values: Values
) -> Any:
    """Run an insert; return ``None`` if the row exists already."""
    savepoint = connection.savepoint() if connection.in_atomic_block else None
    try:
        result = insert(connection, sql, values)
    except IntegrityError:
        if savepoint:
            connection.savepoint_rollback(savepoint)
        return None
    if savepoint:
        connection.savepoint_commit(savepoint)
    return result
