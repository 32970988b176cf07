"""Column types of the lock table: exact text, UTC moments, the guard's index."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper

#: Collations under which text is equal only when its code points are. MySQL's and
#: MariaDB's defaults take "job", "Job ", and "jób" for one name, and their older
#: ``_bin`` collations ignore trailing blanks.
_MYSQL, _MARIADB, _POSTGRESQL = "utf8mb4_0900_bin", "utf8mb4_nopad_bin", "C"


def exact_collation(connection: BaseDatabaseWrapper) -> str | None:
    """Return the collation that compares text exactly on this database."""
    if connection.vendor == "mysql":
        return _MARIADB if getattr(connection, "mysql_is_mariadb", False) else _MYSQL
    return _POSTGRESQL if connection.vendor == "postgresql" else None


def as_utc(value: datetime | str | None) -> datetime | None:
    """Return a moment as the database's driver gave it as an aware UTC one."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return value and value.replace(tzinfo=timezone.utc)


class ExactCharField(models.CharField):  # type: ignore[type-arg]
    """A ``CharField`` whose values are compared code point by code point."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        return {
            **super().db_parameters(connection),
            "collation": exact_collation(connection),
        }


class UTCDateTimeField(models.DateTimeField):  # type: ignore[type-arg]
    """A moment, stored and returned in UTC.

    Unlike Django's own it depends neither on ``USE_TZ`` nor on the database's
    ``TIME_ZONE`` setting nor on the session's time zone: leases are compared by
    the database's UTC clock. Values are always aware; a naive one is taken as UTC.
    """

    def get_prep_value(self, value: Any) -> Any:
        value = self.to_python(value) if isinstance(value, str) else value
        if isinstance(value, datetime):
            if value.tzinfo is None:
                return value.replace(tzinfo=timezone.utc)
            return value.astimezone(timezone.utc)
        return value

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        if not prepared:
            value = self.get_prep_value(value)
        if not isinstance(value, datetime) or connection.vendor == "postgresql":
            return value
        # Fixed width, so that SQLite's comparison as text is one by time.
        return value.strftime("%Y-%m-%d %H:%M:%S.%f")

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        if compiler.connection.vendor == "postgresql":
            # A timestamptz arrives in the session's zone, ambiguous in the hour
            # that daylight saving repeats.
            sql = f"({sql} AT TIME ZONE 'UTC')"
        return sql, params

    def from_db_value(
        self, value: datetime | None, expression: Any, connection: Any
    ) -> datetime | None:
        # Whatever zone Django attached, the digits are those of the column: UTC.
        return as_utc(value)


class GuardConstraint(models.UniqueConstraint):
    """A unique index on PostgreSQL alone, for ``SELECT … FOR KEY SHARE``.

    There, a row lock of that strength conflicts with an update of the columns of a
    unique index and with nothing else: with the version in one, the guard holds off
    take-overs and lets renewals through. InnoDB must not have it: a second unique
    index is what its inserts deadlock on.
    """

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        if schema_editor.connection.vendor == "postgresql":
            return super().constraint_sql(model, schema_editor)
        return None

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        if schema_editor.connection.vendor == "postgresql":
            return super().create_sql(model, schema_editor)
        return None

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        if schema_editor.connection.vendor == "postgresql":
            return super().remove_sql(model, schema_editor)
        return None
