"""Column types of the lock table: exact text, UTC moments, the guard's index."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper as Connection

from . import dialects


def as_utc(value: datetime | str | None) -> datetime | None:
    """Turn a moment from the database's driver into an aware one in UTC."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value and value.replace(tzinfo=timezone.utc)


class ExactCharField(models.CharField):  # type: ignore[type-arg]
    """A ``CharField`` whose values are compared code point by code point."""

    def db_parameters(self, connection: Connection) -> Any:
        return {
            **super().db_parameters(connection),
            "collation": dialects.of(connection).exact_collation,
        }


class UTCDateTimeField(models.DateTimeField):  # type: ignore[type-arg]
    """A moment, stored and returned in UTC.

    Unlike Django's own it depends neither on ``USE_TZ`` nor on the database's
    ``TIME_ZONE`` setting nor on the session's time zone: leases are compared by
    the database's UTC clock. Values are always aware; a naive one is taken as UTC.
    """

    def get_prep_value(self, value: Any) -> Any:
        value = self.to_python(value) if isinstance(value, str) else value
        if not isinstance(value, datetime):
            return value
        return as_utc(value) if value.tzinfo is None else value.astimezone(timezone.utc)

    def get_db_prep_value(
        self, value: Any, connection: Connection, prepared: bool = False
    ) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        if not isinstance(value, datetime) or dialects.of(connection).has_zones:
            return value
        # Fixed width: then SQLite, which compares text, compares times.
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        query = compiler.query
        selected = query.annotation_select.values()
        # Where a filter asks for a window function, the result is a subquery's.
        if query.subquery and not any(each.contains_over_clause for each in selected):
            # The database goes on to use the value, and needs its time zone.
            return sql, params
        return dialects.of(compiler.connection).utc(sql), params

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: Any
    ) -> datetime | None:
        # Whatever zone Django attached, the digits are those of the column: UTC.
        return as_utc(value)


class GuardConstraint(models.UniqueConstraint):
    """A unique index on PostgreSQL alone, for ``SELECT … FOR KEY SHARE``.

    There, a row lock of that strength conflicts only with an update of the columns of a
    unique index. With the version in such an index, the guard holds off take-overs and
    lets renewals through. InnoDB must not have it: its inserts would deadlock on a
    second unique index.
    """

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        wanted = dialects.of(schema_editor.connection).has_guard_index
        return super().constraint_sql(model, schema_editor) if wanted else None

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        wanted = dialects.of(schema_editor.connection).has_guard_index
        return super().create_sql(model, schema_editor) if wanted else None

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        wanted = dialects.of(schema_editor.connection).has_guard_index
        return super().remove_sql(model, schema_editor) if wanted else None
