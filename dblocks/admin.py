"""The admin of locks: what is held, by whom, since when, and how to free it.

Nothing can be added, changed or deleted here. The one act, force release, has a
permission of its own and a confirmation page, and releases only the grants that the
page showed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, unquote, urlencode

import django
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import label_for_field
from django.contrib.admin.utils import quote as pk_quote
from django.contrib.admin.views.main import ChangeList
from django.contrib.admin.widgets import AdminTextInputWidget
from django.contrib.auth import get_permission_codename
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db import connections, transaction
from django.db.models import Q, Value
from django.db.models.functions import Lower
from django.db.models.lookups import Contains
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import (
    Truncator,
    capfirst,
    smart_split,
    unescape_string_literal,
)
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from . import arguments
from .backends.database import DatabaseBackend
from .changelist import LockChangeList, LockPaginator, StateFilter
from .conf import DEFAULT_ALIAS, backends
from .exceptions import InvalidKey
from .functions import SecondsUntil
from .gates import Queues
from .models import DistributedLock, LockQuerySet, State
from .wording import (
    AGO,
    AHEAD,
    OVERDUE,
    escaped,
    exact,
    names_of,
    phrase,
    time_element,
    unescaped,
)

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[DistributedLock]
else:
    ModelAdmin = admin.ModelAdmin

MAX_AT_ONCE = 500
"""So many locks fit on one confirmation page, under Django's limit of form fields."""

PATIENCE = 1.0
"""Seconds for which a lock whose row is locked by a transaction is tried again."""

_RELEASED = ngettext_lazy(
    "Released {count} lock: {keys}.", "Released {count} locks: {keys}.", "count"
)
_CHANGED = ngettext_lazy(
    "Left {count} lock alone, which was released or changed hands since the page was "
    "shown: {keys}.",
    "Left {count} locks alone, which were released or changed hands since the page "
    "was shown: {keys}.",
    "count",
)
_BUSY = ngettext_lazy(
    "Left {count} lock alone, whose row an open transaction has locked, perhaps to "
    "commit: {keys}. Try again.",
    "Left {count} locks alone, whose rows open transactions have locked, perhaps to "
    "commit: {keys}. Try again.",
    "count",
)


class ReleaseForm(forms.Form):
    """Why locks are taken from their holders."""

    reason = forms.CharField(
        label=gettext_lazy("Reason"),
        help_text=gettext_lazy("For the locks’ history: what happened, who was asked."),
        max_length=255,
        widget=AdminTextInputWidget(attrs={"autocomplete": "off"}),
    )


def _is_free(lock: DistributedLock) -> bool:
    return State(lock.state) is State.FREE


@dataclass(frozen=True)
class Shown:
    """A lock as a page showed it: its key and which grant, in one form field.

    Browsers change line ends in form fields; quoted, any key survives.
    """

    key: str
    version: int

    def __str__(self) -> str:
        return f"{self.version}:{quote(self.key, safe='')}"

    @classmethod
    def parse(cls, values: Iterable[str]) -> list[Shown]:
        """Read form fields; what no page of ours made is left out."""
        shown = {}
        for value in values:
            version, _colon, key = value.partition(":")
            try:
                lock = cls(arguments.key(unquote(key)), int(version))
            except (InvalidKey, ValueError):
                continue
            shown[lock.key] = lock
        return list(shown.values())


@admin.register(DistributedLock)
class DistributedLockAdmin(ModelAdmin):
    """Locks, read-only, with force release for those who may."""

    list_display = (
        "shown_key",
        "shown_state",
        "shown_holder",
        "since",
        "left",
        "waiting",
    )
    list_filter = (StateFilter,)
    list_per_page = 50
    ordering = ("key",)
    paginator = LockPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    search_fields = ("key", "holder", "note")
    search_help_text = gettext_lazy("Search by key, holder and note.")
    actions = ("force_release",)
    fields = readonly_fields = (
        "shown_key",
        "shown_state",
        "shown_holder",
        "shown_note",
        "since_exact",
        "left_exact",
        "waiting",
        "version_number",
        "hold_count",
        "owner",
    )
    confirmed_fields = (
        "shown_key",
        "shown_state",
        "shown_holder",
        "shown_note",
        "since",
        "left",
    )
    force_release_template = "admin/dblocks/distributedlock/force_release.html"

    class Media:
        css = {"all": ["dblocks/admin.css"]}
        js = ["dblocks/admin.js"]

    # Permissions

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: it would be a release without a trace."""
        return False

    def has_force_release_permission(
        self, request: HttpRequest, obj: DistributedLock | None = None
    ) -> bool:
        """Tell whether the user may see locks and take them from their holders."""
        codename = get_permission_codename("force_release", self.opts)
        user: Any = request.user
        return self.has_view_permission(request, obj) and user.has_perm(
            f"{self.opts.app_label}.{codename}"
        )

    # Reading

    @property
    def locks(self) -> LockQuerySet:
        """The table of the default backend, wherever that keeps its locks."""
        backend = backends[DEFAULT_ALIAS]
        using = backend.using if isinstance(backend, DatabaseBackend) else None
        return cast(LockQuerySet, DistributedLock.objects.using(using))

    def get_queryset(self, request: HttpRequest) -> LockQuerySet:
        rows: Any = super().get_queryset(request).using(self.locks.db)
        rows = rows.with_state().annotate(until_acquired=SecondsUntil("acquired_at"))
        return cast(LockQuerySet, rows)

    def get_search_results(
        self, request: HttpRequest, queryset: Any, search_term: str
    ) -> tuple[Any, bool]:
        # Django's own icontains is case-sensitive where keys are compared exactly.
        for word in smart_split(search_term):
            if len(word) > 1 and word[0] in "\"'" and word[0] == word[-1]:
                word = unescape_string_literal(word)
            wanted = Lower(Value(word))
            matches = Q()
            for field in self.search_fields:
                matches |= Q(Contains(Lower(field), wanted))
            queryset = queryset.filter(matches)
        return queryset, False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return LockChangeList

    # Selecting: a browser would change the line ends of a key in a form field

    def action_checkbox(self, obj: DistributedLock) -> SafeString:
        ticked = copy(obj)
        ticked.key = escaped(obj.key)
        return super().action_checkbox(ticked)

    def response_action(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        post: Any = request.POST.copy()
        ticked = post.getlist(ACTION_CHECKBOX_NAME)
        post.setlist(ACTION_CHECKBOX_NAME, [unescaped(key) for key in ticked])
        request.POST = post
        return super().response_action(request, *args, **kwargs)

    # Columns

    @admin.display(description=gettext_lazy("key"), ordering="key")
    def shown_key(self, lock: DistributedLock) -> SafeString:
        return format_html('<bdi class="dblocks-key">{}</bdi>', lock.key)

    @admin.display(description=gettext_lazy("state"), ordering="state")
    def shown_state(self, lock: DistributedLock) -> SafeString:
        state = State(lock.state)
        return format_html(
            '<span class="dblocks-state dblocks-{}">{}</span>', state.value, state.label
        )

    @admin.display(description=gettext_lazy("holder"), ordering="holder")
    def shown_holder(self, lock: DistributedLock) -> SafeString | None:
        """The holder; who released a lock isn't its holder any more."""
        if not lock.owner:
            return None
        return format_html('<bdi class="dblocks-text">{}</bdi>', lock.holder)

    @admin.display(description=gettext_lazy("note"))
    def shown_note(self, lock: DistributedLock) -> SafeString | None:
        if not lock.note:
            return None
        return format_html('<bdi class="dblocks-text">{}</bdi>', lock.note)

    @admin.display(description=gettext_lazy("held since"), ordering="-acquired_at")
    def since(self, lock: Any) -> SafeString | None:
        if lock.acquired_at is None or _is_free(lock):
            return None
        return time_element(lock.acquired_at, phrase(AGO, -lock.until_acquired))

    @admin.display(description=gettext_lazy("remaining"), ordering="expires_at")
    def left(self, lock: DistributedLock) -> SafeString | None:
        if _is_free(lock):
            return None
        phrases = OVERDUE if lock.remaining <= 0 else AHEAD
        return time_element(lock.expires_at, phrase(phrases, abs(lock.remaining)))

    @admin.display(description=gettext_lazy("waiting"))
    def waiting(self, lock: Any) -> int | None:
        """How many queue for it, where that is known."""
        length: int | None
        if hasattr(lock, "waiting"):
            length = lock.waiting
        else:
            length = Queues(connections[self.locks.db]).length(lock.key)
        return length

    @admin.display(description=gettext_lazy("held since"))
    def since_exact(self, lock: DistributedLock) -> SafeString | None:
        since = self.since(lock)
        return since and format_html("{}, {}", since, exact(lock.acquired_at))

    @admin.display(description=gettext_lazy("remaining"))
    def left_exact(self, lock: DistributedLock) -> SafeString | None:
        left = self.left(lock)
        return left and format_html("{}, {}", left, exact(lock.expires_at))

    @admin.display(description=gettext_lazy("fencing token"))
    def version_number(self, lock: DistributedLock) -> str:
        return str(lock.version)

    # Force release: two doors, one room

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_force_release"
        view: Any = self.admin_site.admin_view(self.force_release_view)
        # A release is seen by others at once and its log entry says what has happened:
        # neither may wait for, or be undone by, a transaction around the request.
        for alias in connections:
            view = transaction.non_atomic_requests(alias)(view)
        return [path("force-release/", view, name=name), *super().get_urls()]

    def _reverse(self, name: str, *args: str) -> str:
        return reverse(f"admin:{name}", args=args, current_app=self.admin_site.name)

    def _url(self, name: str, *args: str) -> str:
        model = f"{self.opts.app_label}_{self.opts.model_name}"
        return self._reverse(f"{model}_{name}", *args)

    def _list_url(self, request: HttpRequest) -> str:
        return self._with_filters(request, self._url("changelist"))

    def _with_filters(self, request: HttpRequest, url: str) -> str:
        filters = self.get_preserved_filters(request)
        context: Any = {"preserved_filters": filters, "opts": self.opts}
        return str(add_preserved_filters(context, url))

    @admin.action(
        permissions=["force_release"],
        description=gettext_lazy("Force release selected %(verbose_name_plural)s"),
    )
    def force_release(
        self, request: HttpRequest, queryset: LockQuerySet
    ) -> HttpResponse | None:
        """Ask for confirmation; the page's own address does the rest."""
        return self._confirmation(request, queryset)

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lock = kwargs.get("obj")
        if (
            lock is not None
            and not _is_free(lock)
            and self.has_force_release_permission(request, lock)
        ):
            url = f"{self._url('force_release')}?{urlencode({'key': lock.key})}"
            context["force_release_url"] = self._with_filters(request, url)
        return super().render_change_form(request, context, *args, **kwargs)

    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Show what would be released, by GET; release what was shown, by POST."""
        if not self.has_force_release_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._confirmed(request)
        keys = [key for key in request.GET.getlist("key") if "\0" not in key]
        return self._confirmation(
            request, self.get_queryset(request).filter(pk__in=keys)
        ) or HttpResponseRedirect(self._list_url(request))

    def _confirmed(self, request: HttpRequest) -> HttpResponse:
        """Release what the page showed and nobody has touched since; report all."""
        shown = Shown.parse(request.POST.getlist("lock"))
        if not shown:
            self._nothing(request)
        current = self.get_queryset(request).in_bulk([each.key for each in shown])
        locks, changed = [], []
        for each in shown:
            if each.key in current and current[each.key].version == each.version:
                locks.append(current[each.key])
            else:
                changed.append(each.key)
        released: list[str] = []
        busy: list[str] = []
        form = ReleaseForm(request.POST)
        if locks and not form.is_valid():
            self._report(request, released, changed, busy)
            return self._page(request, locks, form)
        for lock in locks:
            if self._is_busy(lock.key):
                busy.append(lock.key)
            elif self.release_lock(request, lock, form.cleaned_data["reason"]):
                released.append(lock.key)
            else:
                changed.append(lock.key)
        self._report(request, released, changed, busy)
        return HttpResponseRedirect(self._list_url(request))

    def _is_busy(self, key: str) -> bool:
        """Tell whether a transaction has the row locked, and still has it a moment on.

        It may be committing what it did under this lock, and would keep the request
        waiting for as long as it lasts.
        """
        rows = self.locks.filter(pk=key).select_for_update(skip_locked=True)
        if not connections[rows.db].features.has_select_for_update_skip_locked:
            return False
        give_up = time.monotonic() + PATIENCE
        while True:
            with transaction.atomic(using=rows.db):
                if rows.first() is not None:
                    return False
            if time.monotonic() > give_up:
                return True
            time.sleep(PATIENCE / 20)

    def release_lock(
        self, request: HttpRequest, lock: DistributedLock, reason: str
    ) -> bool:
        """Release this grant of a lock and record it; else leave the lock alone."""
        if not self.locks.force_release(
            lock.key, version=lock.version, by=request.user, reason=reason
        ):
            return False
        message = _(
            "Force released (was held by %(holder)s, fencing token %(token)s). "
            "Reason: %(reason)s"
        )
        self.log_change(
            request,
            lock,
            message % {"holder": lock.holder, "token": lock.version, "reason": reason},
        )
        return True

    def _confirmation(self, request: HttpRequest, rows: Any) -> HttpResponse | None:
        taken = rows.exclude(state=str(State.FREE)).order_by("key")
        locks = list(taken[: MAX_AT_ONCE + 1])
        if locks:
            return self._page(request, locks, ReleaseForm())
        self._nothing(request)
        return None

    def _nothing(self, request: HttpRequest) -> None:
        text = _("There was nothing to release: nobody holds what was selected.")
        self.message_user(request, text, messages.WARNING)

    def _page(
        self, request: HttpRequest, locks: Sequence[DistributedLock], form: ReleaseForm
    ) -> HttpResponse:
        shown = locks[:MAX_AT_ONCE]
        crumbs = [
            (self._reverse("index"), _("Home")),
            (
                self._reverse("app_list", self.opts.app_label),
                self.opts.app_config.verbose_name,
            ),
            (self._list_url(request), capfirst(self.opts.verbose_name_plural)),
        ]
        if len(shown) == 1:
            url = self._with_filters(
                request, self._url("change", pk_quote(shown[0].key))
            )
            crumbs.append((url, Truncator(shown[0].key).chars(60)))
        context = {
            **self.admin_site.each_context(request),
            "title": _("Force release"),
            "subtitle": shown[0].key if len(shown) == 1 else None,
            "opts": self.opts,
            "crumbs": crumbs,
            "crumbs_are_list": django.VERSION >= (6, 1),
            "headers": [self._label(name) for name in self.confirmed_fields],
            "rows": [
                (Shown(lock.key, lock.version), self._cells(lock)) for lock in shown
            ],
            "count": len(shown),
            "limit": MAX_AT_ONCE if len(locks) > MAX_AT_ONCE else None,
            "form": form,
            "form_url": self._with_filters(request, self._url("force_release")),
            "back_url": crumbs[-1][0],
        }
        request.current_app = self.admin_site.name
        return TemplateResponse(request, self.force_release_template, context)

    def _label(self, name: str) -> str:
        return capfirst(str(label_for_field(name, self.model, self)))

    def _cells(self, lock: DistributedLock) -> list[tuple[str, str]]:
        empty = str(self.get_empty_value_display())
        return [
            (self._label(name), getattr(self, name)(lock) or empty)
            for name in self.confirmed_fields
        ]

    def _report(
        self,
        request: HttpRequest,
        released: list[str],
        changed: list[str],
        busy: list[str],
    ) -> None:
        """Say what was released and what was left alone, and why."""
        outcomes: list[tuple[int, Any, list[str]]] = [
            (messages.SUCCESS, _RELEASED, released),
            (messages.WARNING, _CHANGED, changed),
            (messages.WARNING, _BUSY, busy),
        ]
        for level, text, keys in outcomes:
            if keys:
                # Not format_html(), whose strings would always be plural.
                message = SafeString(text.format(count=len(keys), keys=names_of(keys)))
                self.message_user(request, message, level)

    # History

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: Any = None
    ) -> HttpResponse:
        """Show what was done to this key alone.

        The log's column takes "Job" and "job" for one on MySQL and MariaDB.
        """
        response = super().history_view(request, object_id, extra_context)
        if isinstance(response, TemplateResponse):
            context: Any = response.context_data
            page, key = context["action_list"], context["object"].pk
            entries = [e for e in page.paginator.object_list if e.object_id == key]
            context["action_list"] = Paginator(entries, 100).get_page(page.number)
        return response
