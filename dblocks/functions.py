"""Database expressions that the lock table's statements are made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from django.db.models import BooleanField, FloatField, Func, Subquery

from .fields import UTCDateTimeField

_SQLITE_FORMAT = "'%%%%Y-%%%%m-%%%%d %%%%H:%%%%M:%%%%f000'"


class UtcNow(Func):
    """The database's clock in UTC, read when the statement begins.

    Not Django's ``Now()``, which is the session's local time on MySQL and MariaDB,
    and never the transaction's clock: a lease that is taken two seconds into a
    transaction would be two seconds short. All uses within one statement agree.
    """

    output_field = UTCDateTimeField()
    arity = 0

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = f"STRFTIME({_SQLITE_FORMAT}, 'NOW')"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, template="UTC_TIMESTAMP(6)", **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(
            compiler, connection, template="STATEMENT_TIMESTAMP()", **context
        )


class After(Func):
    """``After(moment, seconds)``: the moment that many seconds later."""

    output_field = UTCDateTimeField()
    arity = 2

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        moment, seconds = self.source_expressions
        if isinstance(moment, UtcNow):
            moment_sql, params = "'NOW'", []
        else:
            moment_sql, params = compiler.compile(moment)
        seconds_sql, seconds_params = compiler.compile(seconds)
        modifier = f"PRINTF('%%%%+.6f seconds', {seconds_sql})"
        sql = f"STRFTIME({_SQLITE_FORMAT}, {moment_sql}, {modifier})"
        return sql.replace("%%%%", "%%"), [*params, *seconds_params]

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "(%(expressions)s SECOND)"
        return self.as_sql(
            compiler,
            connection,
            template=template,
            arg_joiner=" + INTERVAL ",
            **context,
        )

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "(%(expressions)s))"
        joiner = " + MAKE_INTERVAL(secs => "
        return self.as_sql(
            compiler, connection, template=template, arg_joiner=joiner, **context
        )


class SecondsUntil(Func):
    """``SecondsUntil(moment)``: from the database's now; negative when past."""

    output_field = FloatField()
    arity = 1

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        # Rounded: days in a double are some 40 µs off, and 20 s would be 20.00001.
        days = "JULIANDAY(%(expressions)s) - JULIANDAY('NOW')"
        template = f"ROUND(({days}) * 86400.0, 3)"
        return self.as_sql(compiler, connection, template=template, **context)

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = (
            "(TIMESTAMPDIFF(MICROSECOND, UTC_TIMESTAMP(6), %(expressions)s) / 1e6)"
        )
        return self.as_sql(compiler, connection, template=template, **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = (
            "EXTRACT(EPOCH FROM %(expressions)s - STATEMENT_TIMESTAMP())"
            "::double precision"
        )
        return self.as_sql(compiler, connection, template=template, **context)


class Announced(Func):
    """A new version that the statement's reply carries back, where it can.

    MySQL and MariaDB have no ``UPDATE … RETURNING``; ``LAST_INSERT_ID(expression)``
    puts the value into the reply's last insert id, without a second round trip.
    """

    arity = 1

    def as_sql(  # type: ignore[override]
        self, compiler: Any, connection: Any, **context: Any
    ) -> Any:
        return super().as_sql(
            compiler, connection, template="%(expressions)s", **context
        )

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return super().as_sql(compiler, connection, function="LAST_INSERT_ID")


class Locking(Subquery):
    """A subquery that locks what it reads, in autocommit too.

    Django's ``select_for_update()`` insists on a transaction, which a single
    statement is by itself.

    Args:
        queryset: What to select.
        strength: ``"UPDATE"``, ``"NO KEY UPDATE"`` (PostgreSQL) or ``"SHARE"``.
        skip_locked: Leave out rows that others have locked instead of waiting.
        materialize: Put it into a derived table: MySQL refuses a subquery on the
            table that the statement updates.
    """

    def __init__(
        self,
        queryset: Any,
        *,
        strength: str = "UPDATE",
        skip_locked: bool = False,
        materialize: bool = False,
        **extra: Any,
    ) -> None:
        self.clause = f" FOR {strength}" + " SKIP LOCKED" * skip_locked
        self.materialize = materialize
        super().__init__(queryset, **extra)

    def as_sql(
        self, compiler: Any, connection: Any, template: Any = None, **context: Any
    ) -> Any:
        sql, params = super().as_sql(
            compiler, connection, template="%(subquery)s", **context
        )
        if connection.vendor == "mysql":
            if self.clause == " FOR SHARE":
                # The spelling that MariaDB knows too.
                sql += " LOCK IN SHARE MODE"
            else:
                sql += self.clause.replace("NO KEY ", "")
            if self.materialize:
                sql = f"SELECT * FROM ({sql}) AS locked"
        elif connection.vendor == "postgresql":
            sql += self.clause
        return f"({sql})", params


class AnyOf(Func):
    """``AnyOf(column, subquery)`` on PostgreSQL, where the subquery runs but once.

    ``IN`` may become a join that runs a locking subquery again for every row.
    """

    output_field = BooleanField()
    conditional = True
    arity = 2
    template = "%(expressions)s)"
    arg_joiner = " = ANY(ARRAY"


class RowIn(Func):
    """``RowIn([key, owner, version], rows)``: the row is one of those expressions."""

    output_field = BooleanField()
    conditional = True

    def __init__(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.width = len(columns)
        super().__init__(*columns, *(value for row in rows for value in row))

    def as_sql(  # type: ignore[override]
        self, compiler: Any, connection: Any, **context: Any
    ) -> Any:
        parts, params = [], []
        for expression in self.source_expressions:
            sql, expression_params = compiler.compile(expression)
            parts.append(sql)
            params += expression_params
        tuples = [
            "(" + ", ".join(parts[start : start + self.width]) + ")"
            for start in range(0, len(parts), self.width)
        ]
        values = "VALUES " * (connection.vendor == "sqlite")
        return f"{tuples[0]} IN ({values}{', '.join(tuples[1:])})", params


class NobodyQueues(Func):
    """``NobodyQueues(gate)``: no session has the lock of that name or number.

    On PostgreSQL it is taken for the moment of the statement, whose commit frees it.
    """

    output_field = BooleanField()
    conditional = True
    arity = 1

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        return self.as_sql(compiler, connection, function="IS_FREE_LOCK", **context)

    def as_postgresql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        function = "PG_TRY_ADVISORY_XACT_LOCK"
        return self.as_sql(compiler, connection, function=function, **context)
