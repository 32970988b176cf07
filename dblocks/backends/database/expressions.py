"""The database's clock in Django's queries."""

from __future__ import annotations

from typing import Any

from django.db.models import FloatField, Func

from . import dialects
from .fields import UTCDateTimeField


class UtcNow(Func):
    """The database's clock in UTC, read when the statement begins.

    Never the transaction's clock; and not Django's ``Now()``, which on MySQL and
    MariaDB is the session's local time.
    """

    output_field = UTCDateTimeField()
    arity = 0

    def as_sql(self, compiler: Any, connection: Any, **context: Any) -> Any:  # type: ignore[override]
        return dialects.of(connection).now, []


class After(Func):
    """``After(moment, seconds)``: the moment that many seconds later."""

    output_field = UTCDateTimeField()
    arity = 2

    def as_sql(self, compiler: Any, connection: Any, **context: Any) -> Any:  # type: ignore[override]
        moment, before = compiler.compile(self.source_expressions[0])
        seconds, after = compiler.compile(self.source_expressions[1])
        return dialects.of(connection).after(moment, seconds), [*before, *after]


class SecondsUntil(Func):
    """``SecondsUntil(moment)``: from the database's now; negative for the past."""

    output_field = FloatField()
    arity = 1

    def as_sql(self, compiler: Any, connection: Any, **context: Any) -> Any:  # type: ignore[override]
        moment, params = compiler.compile(self.source_expressions[0])
        return dialects.of(connection).seconds_until(moment), params
