"""The list of locks and a lock's page, read-only."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any
from urllib.parse import unquote

from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.views.main import PAGE_VAR, ChangeList
from django.core.paginator import Paginator
from django.db import connections
from django.db.models import Q, Value
from django.db.models.functions import Collate, Lower
from django.db.models.lookups import Contains
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator, smart_split, unescape_string_literal
from django.utils.timezone import localtime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ..backends.database import dialects, session_locks
from ..interventions import Intervention
from ..models import DistributedLock, State
from ..texts import visible
from .changelist import LockChangeList, LockPaginator, StateFilter
from .force_release import ForceReleaseAdmin, told
from .formats import (
    AGO,
    LENGTH,
    OVERDUE,
    escaped,
    exact,
    isolated,
    small,
    time_element,
    wrapped,
)

MAX_NOTE = 80
"""Characters of a note in the list; the lock's page has all of it."""


@admin.register(DistributedLock)
class DistributedLockAdmin(ForceReleaseAdmin):
    """Shows locks, and lets users with the permission force their release."""

    list_display = ("listed_key", "shown_state", "listed_holder", "since", "left")
    list_filter = (StateFilter,)
    list_per_page = 50
    paginator = LockPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("key", "holder", "note")
    search_help_text = gettext_lazy(
        "Search by key, holder and note. Free locks are found when the state is “free” "
        "or “all”."
    )
    confirmed_fields = (
        *("shown_key", "shown_permit", "shown_state", "shown_holder", "shown_note"),
        *("since", "left"),
    )
    fields = readonly_fields = (
        *confirmed_fields[:5],
        *("since_exact", "left_exact", "asked_for", "waiting"),
        *("version_number", "hold_count", "shown_owner"),
    )

    class Media:
        css = {"all": ["dblocks/admin.css"]}
        js = ["dblocks/admin.js"]

    # The list

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        # Django's icontains is case-sensitive on columns that compare exactly.
        collation = dialects.of(connections[queryset.db]).letters_collation
        columns = [
            Lower(Collate(field, collation) if collation else field)
            for field in self.search_fields
        ]
        for word in smart_split(search_term):
            if len(word) > 1 and word[0] in "\"'" and word[0] == word[-1]:
                word = unescape_string_literal(word)
            wanted = Lower(Value(word))
            matches = [Contains(column, wanted) for column in columns]
            queryset = queryset.filter(Q(*matches, _connector=Q.OR))
        return queryset, False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LockChangeList

    def get_ordering(self, request: HttpRequest) -> tuple[str, ...]:
        """The longest held first; with free rows by key: only that has an index."""
        state = request.GET.get(StateFilter.parameter_name, State.HELD)
        has_free = state not in {State.HELD, State.EXPIRED, State.COOLING}
        return ("key",) if has_free else ("acquired_at", "key")

    def count_waiters(self, locks: Iterable[Any]) -> None:
        """Note for each lock how many wait for it, as far as the server knows."""
        taken = {lock.lock_key for lock in locks if lock.state != State.FREE}
        counts = session_locks.waiters(connections[DistributedLock.objects.db], taken)
        for lock in locks:
            lock.waiting_count = counts.get(lock.lock_key, 0)

    def get_actions(self, request: HttpRequest, action_location: Any = None) -> Any:
        """Return none where the list shows free locks alone."""
        if request.GET.get(StateFilter.parameter_name) == State.FREE:
            return {}
        # Django has this argument from 6.1 on.
        where = () if action_location is None else (action_location,)
        return super().get_actions(request, *where)

    def action_checkbox(self, obj: DistributedLock) -> SafeString:
        if obj.state == State.FREE:
            return SafeString()
        ticked = copy(obj)
        ticked.key = escaped(obj.key)
        return super().action_checkbox(ticked)

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        post: Any = request.POST.copy()
        ticked = [unquote(key) for key in post.getlist(ACTION_CHECKBOX_NAME)]
        post.setlist(ACTION_CHECKBOX_NAME, [key for key in ticked if "\0" not in key])
        request.POST = post
        return super().response_action(request, *args, **kwargs)

    # Columns and fields

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        fields = super().get_fields(request, obj)
        if obj is not None and obj.permit is None:
            return [name for name in fields if name != "shown_permit"]
        return fields

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def listed_key(self, lock: DistributedLock) -> SafeString:
        """The key, and in small type the permit and the note."""
        permit = number = self.shown_permit(lock)
        if number is not None:
            permit = format_html(_("permit {number}"), number=number)
        # Some languages put marks of direction before the dots, which would be shown.
        note = Truncator(lock.note).chars(MAX_NOTE, "…")
        return small(self.shown_key(lock), permit, note and wrapped(note))

    @admin.display(description=gettext_lazy("holder"), ordering="holder")
    def listed_holder(self, lock: Any) -> SafeString:
        """The holder, and in small type the number of those who wait."""
        waiting = None
        if count := lock.waiting_count:
            text = ngettext("%(count)d waiting", "%(count)d waiting", count)
            waiting = text % {"count": count}
        return small(self.shown_holder(lock), waiting)

    @admin.display(description=gettext_lazy("key"))
    def shown_key(self, lock: DistributedLock) -> SafeString:
        return wrapped(lock.lock_key, "key")

    @admin.display(description=gettext_lazy("permit"), empty_value="")
    def shown_permit(self, lock: DistributedLock) -> SafeString | None:
        if lock.permit is None:
            return None
        return format_html('<span class="dblocks-permit">{}</span>', lock.permit)

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def shown_state(self, lock: DistributedLock) -> SafeString:
        state = State(lock.state)
        return format_html(
            '<span class="dblocks-state dblocks-{}">{}</span>', state.value, state.label
        )

    @admin.display(description=gettext_lazy("holder"))
    def shown_holder(self, lock: DistributedLock) -> SafeString:
        """The holder; for a released lock, the last holder."""
        if not lock.holder:
            return self.get_empty_value_display()
        if lock.owner:
            return isolated(lock.holder)
        return format_html(
            '<span class="dblocks-last">{}</span>',
            format_html(_("last: {holder}"), holder=isolated(lock.holder)),
        )

    @admin.display(description=gettext_lazy("note"))
    def shown_note(self, lock: DistributedLock) -> SafeString:
        return wrapped(lock.note) if lock.note else self.get_empty_value_display()

    @admin.display(description=gettext_lazy("held since"), ordering="acquired_at")
    def since(self, lock: Any) -> SafeString | None:
        if lock.acquired_at is None or lock.state == State.FREE:
            return None
        return time_element(lock.acquired_at, AGO, -lock.until_acquired)

    @admin.display(description=gettext_lazy("remaining"), ordering="expires_at")
    def left(self, lock: DistributedLock) -> SafeString | None:
        if lock.state == State.FREE:
            return None
        phrases = OVERDUE if lock.remaining <= 0 else LENGTH
        return time_element(lock.expires_at, phrases, abs(lock.remaining))

    @admin.display(description=gettext_lazy("waiting"))
    def waiting(self, lock: Any) -> int | str:
        """The number of waiters, where it is known."""
        self.count_waiters([lock])
        return lock.waiting_count or self.get_empty_value_display()

    @admin.display(description=gettext_lazy("held since"))
    def since_exact(self, lock: DistributedLock) -> SafeString:
        since = self.since(lock)
        if since is None:
            return self.get_empty_value_display()
        return format_html("{}, {}", since, exact(lock.acquired_at))

    @admin.display(description=gettext_lazy("remaining"))
    def left_exact(self, lock: DistributedLock) -> SafeString:
        left = self.left(lock)
        if left is None:
            return self.get_empty_value_display()
        return format_html("{}, {}", left, exact(lock.expires_at))

    @admin.display(description=gettext_lazy("release requested"))
    def asked_for(self, lock: DistributedLock) -> SafeString | str:
        """When the holder was asked to finish."""
        if lock.release_requested_at is None:
            return self.get_empty_value_display()
        return exact(lock.release_requested_at)

    @admin.display(description=gettext_lazy("fencing token"))
    def version_number(self, lock: DistributedLock) -> str:
        return str(lock.version)

    @admin.display(description=gettext_lazy("owner"))
    def shown_owner(self, lock: DistributedLock) -> SafeString | str:
        return isolated(lock.owner) if lock.owner else self.get_empty_value_display()

    # History

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        """Show all releases and requests of this key, instead of the log's entries.

        The log has only those made by users of the admin.
        """
        response = super().history_view(request, object_id, extra_context)
        if isinstance(response, TemplateResponse):
            context: Any = response.context_data
            records: Any = Intervention.objects.using(DistributedLock.objects.db)
            records = records.filter(key=context["object"].pk).order_by("-pk")
            pages = Paginator(records, 100)
            page = pages.get_page(request.GET.get(PAGE_VAR, 1))
            page.object_list = [HistoryEntry(record) for record in page.object_list]
            context["action_list"] = page
            context["pagination_required"] = pages.num_pages > 1
            context["page_range"] = list(pages.get_elided_page_range(page.number))
        return response


class HistoryEntry:
    """What was done, as the admin's template of an object's history asks for it."""

    def __init__(self, record: Intervention) -> None:
        self._record = record
        self.action_time = localtime(record.at)
        #: Who did it; the template wants a user object.
        self.user = {"get_username": visible(record.by)}

    def get_change_message(self) -> str:
        record = self._record
        return told(record.kind, record.holder, record.version, record.reason)
