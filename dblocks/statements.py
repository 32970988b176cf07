"""SQL that the ORM writes once and dblocks keeps.

Building a query in Python costs more than its round trip to the database. A
statement is therefore compiled once for each kind of database, with slots where its
values go, and kept for the life of the process.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper
from django.db.models import CharField, Expression, Field, FloatField


class Slot(Expression):
    """The place of a value that is filled in at each execution."""

    def __init__(self, name: str, output_field: Field[Any, Any] | None = None) -> None:
        super().__init__(output_field=output_field or FloatField())
        self.name = name

    def as_sql(self, compiler: Any, connection: Any) -> Any:
        return "%s", [self]

    def as_postgresql(self, compiler: Any, connection: Any) -> Any:
        # With server-side binding a parameter's type must be known. Text is not cast
        # to the column's type, which would cut it to the column's length.
        text = isinstance(self.output_field, CharField)
        kind = "text" if text else self.output_field.db_type(connection)
        return f"%s::{kind}", [self]


class Statement:
    """Compiled SQL with slots; constants stand in its text."""

    __slots__ = ("_names", "sql")

    def __init__(self, sql: str, params: Any) -> None:
        pieces = _PLACEHOLDER.split(sql)
        self.sql = pieces[0]
        self._names: list[str] = []
        for param, piece in zip(params, pieces[1:], strict=True):
            if isinstance(param, Slot):
                self._names.append(param.name)
            self.sql += _literal(param) + piece

    def execute(
        self, connection: BaseDatabaseWrapper, values: dict[str, Any]
    ) -> CursorWrapper:
        """Run it on a connection and return the cursor; the caller closes it."""
        cursor = connection.cursor()
        cursor.execute(self.sql, [values[name] for name in self._names])
        return cursor


_PLACEHOLDER = re.compile(r"(?<!%)%s")


def _literal(param: object) -> str:
    """Return what stands for a parameter in the text of a statement."""
    if isinstance(param, Slot):
        return "%s"
    if param is None:
        return "NULL"
    if param == "":
        return "''"
    if isinstance(param, bool):
        return str(param).upper()
    # psycopg's own types among them are printed with their names.
    if isinstance(param, int):
        return str(int(param))
    if isinstance(param, float):
        return repr(float(param))
    raise TypeError(f"{param!r} can't be kept in a statement: give it a slot.")


_kinds: dict[tuple[object, ...], str] = {}


def kind(connection: BaseDatabaseWrapper) -> str:
    """Return ``"mariadb"`` or the connection's vendor; asks each server once."""
    if connection.vendor != "mysql":
        return connection.vendor
    settings = connection.settings_dict
    server = (settings["ENGINE"], settings["HOST"], settings["PORT"])
    if server not in _kinds:
        mariadb: bool = connection.mysql_is_mariadb  # type: ignore[attr-defined]
        _kinds[server] = "mariadb" if mariadb else "mysql"
    return _kinds[server]


def kept(build: Callable[..., Statement]) -> Callable[..., Statement]:
    """Decorate what builds a statement: once a kind of database and variant."""
    statements: dict[tuple[object, ...], Statement] = {}

    @wraps(build)
    def statement(connection: BaseDatabaseWrapper, *variant: object) -> Statement:
        name = (kind(connection), *variant)
        try:
            return statements[name]
        except KeyError:
            return statements.setdefault(name, build(connection, *variant))

    return statement
