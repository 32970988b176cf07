"""The admin's list: filtered by state, paged through without counting all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Page, Paginator
from django.http import HttpRequest
from django.utils.translation import gettext_lazy, pgettext_lazy

from ..models import State
from ..permits import in_order

MAX_COUNT = 1000
"""The most locks that are counted and paged through; beyond it, search or filter."""


class StateFilter(admin.SimpleListFilter):
    """Filters by a row's present state, judged by the database's clock.

    Most rows are free and trouble nobody: they are shown only on request.
    """

    title = gettext_lazy("state")
    parameter_name = "state"

    ALL = "all"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [*State.choices, (self.ALL, pgettext_lazy("state of a lock", "all"))]

    def choices(self, changelist: Any) -> Iterator[Any]:
        default, *others = super().choices(changelist)
        yield {**default, "display": pgettext_lazy("state of a lock", "not free")}
        yield from others

    def queryset(self, request: HttpRequest, queryset: Any) -> Any:
        if self.value() is None:
            return queryset.exclude(state=State.FREE)
        if self.value() in State.values:
            return getattr(queryset, str(self.value()))()
        return queryset


class _AtLeast(int):
    """A count that stopped early, and says so as text."""

    def __str__(self) -> str:
        return f"≥{int(self)}"


class LockPaginator(Paginator):  # type: ignore[type-arg]
    """Reads the keys once, up to a limit, and pages through those.

    Counting or sorting without an index is a pass over the table. This makes one such
    pass, and none if rows are ordered by key. The permits of a key are ordered by their
    numbers.
    """

    object_list: Any

    @cached_property
    def keys(self) -> list[str]:
        rows = self.object_list.values_list("pk", flat=True)
        keys = list(rows[: MAX_COUNT + 1])
        first = next(iter(rows.query.order_by), None)
        if first in ("key", "-key"):
            keys.sort(key=in_order, reverse=first == "-key")
        return keys

    @cached_property
    def count(self) -> int:
        count = len(self.keys)
        return _AtLeast(MAX_COUNT) if count > MAX_COUNT else count

    def page(self, number: Any) -> Any:
        number = self.validate_number(number)
        start = (number - 1) * self.per_page
        return Page(self.rows(self.keys[start : start + self.per_page]), number, self)

    def rows(self, keys: Sequence[str]) -> list[Any]:
        rows = {row.pk: row for row in self.object_list.filter(pk__in=keys)}
        return [rows[key] for key in keys if key in rows]


class LockChangeList(ChangeList):
    """Finds its rows by the keys that its paginator has read, and counts waiters."""

    def get_results(self, request: HttpRequest) -> None:
        super().get_results(request)
        if (self.show_all and self.can_show_all) or not self.multi_page:
            paginator: Any = self.paginator
            self.result_list = paginator.rows(paginator.keys)
        # There is no count of all to compare it with.
        self.full_result_count = self.result_count
        page: Any = self.model_admin
        page.count_waiters(self.result_list)
