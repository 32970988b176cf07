"""Running a statement on the connection that is given, and trusting its reply."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
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
"""Values up to which a plan is kept; there are too many longer statements, each for
another number of keys."""

_NAMED = re.compile(r"%\((\w+)\)s")


@cache
def _positional(sql: str) -> tuple[str, tuple[str, ...]]:
    return _NAMED.sub("%s", sql), tuple(_NAMED.findall(sql))


def _filled(dialect: Dialect, sql: str, values: Values) -> tuple[str, Any]:
    """Return a statement by position where that is faster, and what it is filled with.

    On SQLite it isn't: Django looks for positions with a regular expression each time.
    """
    if dialect.fills_by_name:
        return sql, values
    text, names = _positional(sql)
    return text, [values[name] for name in names]


def execute(connection: Connection, sql: str, values: Values) -> tuple[int, int | None]:
    """Run a statement that returns no rows; how many it changed, and the version.

    On MySQL and MariaDB the driver reads both from the connection after the statement.
    A signal handler or the garbage collector may run another one there in between,
    whose reply must not be taken for this one's.
    """
    dialect = dialects.of(connection)
    with dialect.cursor(connection) as cursor:
        if dialect.returns_rows:
            cursor.execute(*_filled(dialect, sql, values))
            return cursor.rowcount, None
        inside = disturbed = False

        def note(statement: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal inside, disturbed
            disturbed, inside = disturbed or inside, True
            try:
                return statement(*arguments)
            finally:
                inside = False

        # The innermost: what other wrappers run, they run before or after.
        wrappers = connection.execute_wrappers
        wrappers.append(note)
        try:
            cursor.execute(*_filled(dialect, sql, values))
        finally:
            wrappers.remove(note)
        if disturbed:
            raise ReplyLost("Another statement's reply came in between.")
        return cursor.rowcount, cursor.lastrowid


def changes(connection: Connection, sql: str, values: Values) -> bool:
    return bool(execute(connection, sql, values)[0])


def write(connection: Connection, name: str, grant: Grant, **values: object) -> bool:
    """Run the statement of that name; whether the grant was current."""
    sql = getattr(statements.of(dialects.of(connection)), name)
    return changes(connection, sql, {**grant._asdict(), **values})


def fetch(
    connection: Connection, sql: str, values: Values, *, again: bool = False
) -> list[tuple[Any, ...]]:
    """Run a statement that returns rows; ``again`` and again, its plan is kept."""
    dialect = dialects.of(connection)
    kept = again and len(values) <= MOST_KEPT
    with dialect.cursor(connection) if kept else connection.cursor() as cursor:
        cursor.execute(*_filled(dialect, sql, values))
        return list(cursor.fetchall())


def new_version(connection: Connection, sql: str, values: Values) -> int | None:
    """Run a statement that grants; the new version, or ``None`` if it didn't."""
    dialect = dialects.of(connection)
    if not dialect.returns_rows:
        rowcount, version = execute(connection, sql, values)
        return version if rowcount else None
    with dialect.cursor(connection) as cursor:
        cursor.execute(*_filled(dialect, sql, values))
        # The statement is over, and on SQLite committed, when nothing is left of it.
        rows = cursor.fetchall()
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
    """Run an insert; ``None`` when the row is there already."""
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
