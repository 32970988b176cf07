"""Force release and requests to finish: permission, confirmation page, record."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote, urlencode

import django
from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.templatetags.admin_urls import add_preserved_filters
from django.contrib.admin.utils import label_for_field, quote
from django.contrib.admin.widgets import AdminTextInputWidget
from django.core.exceptions import PermissionDenied
from django.db import DatabaseError, connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.safestring import SafeString
from django.utils.text import Truncator, capfirst
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext_lazy

from .. import clock, validation
from ..backends.database import dialects, table
from ..backends.database.expressions import SecondsUntil
from ..interventions import Intervention
from ..models import DistributedLock, LockQuerySet, State
from ..permits import apart, in_order
from ..texts import visible
from .formats import escaped, names_of

logger = logging.getLogger("dblocks")

MAX_AT_ONCE = 500
"""The most locks on one confirmation page, below Django's limit of form fields."""

PERMISSION = "dblocks.force_release_distributedlock"

PATIENCE = 1.0
"""Seconds for which the first row that a transaction has locked is tried again."""


class ReleaseForm(forms.Form):
    """Asks why the locks are asked for, or taken from their holders."""

    reason = forms.CharField(
        label=gettext_lazy("Reason (required)"),
        help_text=gettext_lazy("For the locks’ history: what happened, who was asked."),
        max_length=255,
        widget=AdminTextInputWidget(attrs={"autocomplete": "off"}),
    )


def field_of(lock: DistributedLock) -> str:
    """Return the form field for what is shown: a grant, or a key that cools after it.

    The fencing token doesn't tell them apart: it stays when the holder releases.
    """
    return f"{lock.state}:{lock.version}:{escaped(lock.key)}"


def parsed(fields: Iterable[str]) -> dict[str, tuple[bool, int]]:
    """Return whether each row was cooling, and its fencing token.

    Fields that our page didn't make are skipped.
    """
    shown = {}
    for each in fields:
        with suppress(ValueError):
            state, version, row_key = each.split(":", 2)
            key = validation.key_of_row(*apart(unquote(row_key)))
            shown[key] = State(state) is State.COOLING, int(version)
    return shown


_OUTCOMES = {
    "released": ngettext_lazy(
        "Released {count} lock: {keys}.", "Released {count} locks: {keys}.", "count"
    ),
    "asked": ngettext_lazy(
        "Asked for {count} lock: {keys}.", "Asked for {count} locks: {keys}.", "count"
    ),
    "changed": ngettext_lazy(
        "Left {count} lock alone, which was released or changed hands since the page "
        "was shown: {keys}.",
        "Left {count} locks alone, which were released or changed hands since the page "
        "was shown: {keys}.",
        "count",
    ),
    "unheld": ngettext_lazy(
        "Nobody holds {count} lock, so nobody was asked: {keys}.",
        "Nobody holds {count} locks, so nobody was asked: {keys}.",
        "count",
    ),
    "free": ngettext_lazy(
        "Left {count} lock alone, which is free: {keys}.",
        "Left {count} locks alone, which are free: {keys}.",
        "count",
    ),
    "locked": ngettext_lazy(
        "Left {count} lock alone, because another process is writing to the database: "
        "{keys}. Try again.",
        "Left {count} locks alone, because another process is writing to the database: "
        "{keys}. Try again.",
        "count",
    ),
    "busy": ngettext_lazy(
        "Left {count} lock alone, whose row an open transaction has locked, perhaps to "
        "commit: {keys}. Try again.",
        "Left {count} locks alone, whose rows open transactions have locked, perhaps "
        "to commit: {keys}. Try again.",
        "count",
    ),
}
"""The possible outcomes for a lock on the page, and the message for each."""


def told(kind: str, holder: str, token: int, reason: str) -> str:
    """Say what was done, for the history."""
    if kind == Intervention.Kind.REQUEST:
        text = _("Asked for (held by %(holder)s, fencing token %(token)s).")
    else:
        text = _("Force released (last held by %(holder)s, fencing token %(token)s).")
    text %= {"holder": holder, "token": token}
    if reason:
        text = _("%(what)s Reason: %(reason)s") % {"what": text, "reason": reason}
    return visible(text)


def is_busy(key: str, patience: float) -> bool:
    """Tell whether a transaction has the row locked, and not just for a moment.

    The transaction may be committing work done under this lock. The release, and with
    it the web request, would have to wait for its end.
    """
    connection = connections[DistributedLock.objects.db]
    if not dialects.of(connection).has_row_locks:
        return False
    give_up = clock.monotonic() + patience
    while table.is_locked(connection, key):
        if clock.monotonic() > give_up:
            return True
        time.sleep(PATIENCE / 20)
    return False


class ForceReleaseAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Allows only viewing, and force release, which has its own permission.

    The list's action and the button on a lock's page both lead to the confirmation
    page, whose POST releases the grants that it showed, or asks their holders to.
    """

    actions = ("force_release",)
    #: The columns of the confirmation page.
    confirmed_fields: tuple[str, ...] = ()

    def _refuse(self, request: HttpRequest, obj: Any = None) -> bool:
        """Refuse: deleting would be a release without a trace."""
        return False

    has_add_permission = has_change_permission = has_delete_permission = _refuse

    def has_force_release_permission(
        self, request: HttpRequest, obj: DistributedLock | None = None
    ) -> bool:
        """Tell whether the user may see locks and take them from their holders."""
        may_release: bool = request.user.has_perm(PERMISSION)
        return may_release and self.has_view_permission(request, obj)

    def get_queryset(self, request: HttpRequest) -> LockQuerySet:
        rows: Any = super().get_queryset(request)
        rows = rows.with_state().annotate(until_acquired=SecondsUntil("acquired_at"))
        return cast(LockQuerySet, rows)

    # Addresses

    def get_urls(self) -> list[URLPattern]:
        name = f"{self.opts.app_label}_{self.opts.model_name}_force_release"
        view: Any = self.admin_site.admin_view(self.force_release_view)
        # A release is visible to others at once, and its log entry records a fact. A
        # transaction around the request must not delay or undo either.
        for alias in connections:
            view = transaction.non_atomic_requests(alias)(view)
        return [path("force-release/", view, name=name), *super().get_urls()]

    def _url(self, request: HttpRequest, name: str, *args: str, **query: str) -> str:
        """Return an address of this model that keeps the list's filters."""
        filters = self.get_preserved_filters(request)
        context: Any = {"preserved_filters": filters, "opts": self.opts}
        name = f"admin:{self.opts.app_label}_{self.opts.model_name}_{name}"
        url = reverse(name, args=args, current_app=self.admin_site.name)
        if query:
            url += f"?{urlencode(query)}"
        return str(add_preserved_filters(context, url))

    # The ways to the confirmation page

    @admin.action(
        permissions=["force_release"],
        description=gettext_lazy("Force release selected %(verbose_name_plural)s"),
    )
    def force_release(self, request: HttpRequest, queryset: Any) -> HttpResponse | None:
        """Show the confirmation page; its form posts to an address of its own."""
        if request.POST.get("select_across") == "1":
            return self._to_page(request, queryset, [])
        # Locks that were ticked may no longer match the list's filter or search.
        ticked = request.POST.getlist(ACTION_CHECKBOX_NAME)
        rows = self.get_queryset(request).filter(pk__in=ticked)
        return self._to_page(request, rows, ticked)

    def _to_page(
        self, request: HttpRequest, queryset: Any, chosen: Sequence[str]
    ) -> HttpResponse | None:
        """Show those of the rows that aren't free; name the chosen ones that are."""
        taken = queryset.exclude(state=State.FREE).order_by("key")
        locks = sorted(taken[: MAX_AT_ONCE + 1], key=lambda lock: in_order(lock.key))
        if not locks:
            self._nothing(request)
            return None
        free = queryset.filter(pk__in=chosen).free()
        names = free.order_by("key").values_list("pk", flat=True)
        self._tell(request, {"free": list(names)})
        return self._page(request, locks, ReleaseForm())

    def render_change_form(
        self, request: HttpRequest, context: Any, *args: Any, **kwargs: Any
    ) -> Any:
        lock = kwargs["obj"]
        is_taken = lock.state != State.FREE
        if is_taken and self.has_force_release_permission(request, lock):
            url = self._url(request, "force_release", key=lock.key)
            context["force_release_url"] = url
        return super().render_change_form(request, context, *args, **kwargs)

    def force_release_view(self, request: HttpRequest) -> HttpResponse:
        """Show what would be released, by GET; release or ask for it, by POST."""
        if not self.has_force_release_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            return self._confirmed(request)
        keys = [key for key in request.GET.getlist("key") if "\0" not in key]
        if not keys:
            # The user had to log in again, and the POST was lost: no lock is known.
            return self._to_list(request)
        rows = self.get_queryset(request).filter(pk__in=keys)
        return self._to_page(request, rows, keys) or self._to_list(request)

    def _to_list(self, request: HttpRequest) -> HttpResponse:
        return HttpResponseRedirect(self._url(request, "changelist"))

    # The page

    def _nothing(self, request: HttpRequest) -> None:
        text = _("There was nothing to release: nobody holds what was selected.")
        self.message_user(request, text, messages.WARNING)

    def _page(
        self, request: HttpRequest, locks: Sequence[DistributedLock], form: ReleaseForm
    ) -> HttpResponse:
        shown = locks[:MAX_AT_ONCE]
        states = [lock.state for lock in shown]
        list_name = capfirst(self.opts.verbose_name_plural)
        crumbs = [(self._url(request, "changelist"), list_name)]
        named = {}
        if len(shown) == 1:
            url = self._url(request, "change", quote(shown[0].key))
            crumbs.append((url, Truncator(str(shown[0])).chars(60)))
            # A user who has to log in first comes back to this page.
            named["key"] = shown[0].key
        context = {
            **self.admin_site.each_context(request),
            "title": _("Force release"),
            "subtitle": str(shown[0]) if len(shown) == 1 else None,
            "opts": self.opts,
            "crumbs": crumbs,
            "crumbs_are_list": django.VERSION >= (6, 1),
            "rows": self._rows(shown),
            "limit": MAX_AT_ONCE if len(locks) > MAX_AT_ONCE else None,
            "held": states.count(State.HELD),
            "expired": states.count(State.EXPIRED),
            "form": form,
            "form_url": self._url(request, "force_release", **named),
            "back_url": crumbs[-1][0],
        }
        request.current_app = self.admin_site.name
        template = "admin/dblocks/distributedlock/force_release.html"
        return TemplateResponse(request, template, context)

    def _rows(
        self, locks: Sequence[DistributedLock]
    ) -> list[tuple[str, list[tuple[str, str]]]]:
        """Return the form field of each lock, and its cells with their labels."""
        names = list(self.confirmed_fields)
        if all(lock.permit is None for lock in locks):
            names.remove("shown_permit")
        labels = [capfirst(str(label_for_field(n, self.model, self))) for n in names]
        empty, rows = self.get_empty_value_display(), []
        for lock in locks:
            cells = [getattr(self, name)(lock) or empty for name in names]
            rows.append((field_of(lock), list(zip(labels, cells, strict=True))))
        return rows

    # The release

    def _confirmed(self, request: HttpRequest) -> HttpResponse:
        """Release, or ask for, the grants that the page showed, if still current."""
        shown = parsed(request.POST.getlist("lock"))
        if not shown:
            self._nothing(request)
        rows: Any = self.get_queryset(request)
        current = rows.exclude(state=State.FREE).in_bulk(list(shown))
        locks = []
        keys: dict[str, list[str]] = {outcome: [] for outcome in _OUTCOMES}
        for key, grant in shown.items():
            lock = current.get(key)
            if lock is not None and (not lock.owner, lock.version) == grant:
                locks.append(lock)
            else:
                keys["changed"].append(key)
        form = ReleaseForm(request.POST)
        try:
            if locks and not form.is_valid():
                return self._page(request, locks, form)
            kinds = Intervention.Kind
            kind = kinds.REQUEST if "ask" in request.POST else kinds.FORCE_RELEASE
            outcome = ""
            for lock in locks:
                reason = form.cleaned_data["reason"]
                # Once another writer was in the way, don't wait for it at each lock.
                if outcome != "locked":
                    # Nor wait for the long transactions of several locks in turn.
                    patience = 0.0 if keys["busy"] else PATIENCE
                    outcome = self._act(request, lock, kind, reason, patience)
                keys[outcome].append(lock.key)
            return self._to_list(request)
        finally:
            # Even if the database fails: the next page tells what has been done.
            self._tell(request, keys)

    def _tell(self, request: HttpRequest, keys: Mapping[str, Sequence[str]]) -> None:
        """Leave a message for each outcome that some locks have."""
        for outcome, text in _OUTCOMES.items():
            if names := keys.get(outcome):
                is_done = outcome in {"released", "asked"}
                level = messages.SUCCESS if is_done else messages.WARNING
                # format_html() would always take the plural.
                sentence = text.format(count=len(names), keys=names_of(names))
                self.message_user(request, SafeString(sentence), level)

    def _act(
        self,
        request: HttpRequest,
        lock: DistributedLock,
        kind: str,
        reason: str,
        patience: float,
    ) -> str:
        """Release this grant or ask its holder to; record it, return the outcome."""
        is_request = kind == Intervention.Kind.REQUEST
        # No later grant, and no key that cools because its holder has released it.
        same = DistributedLock.objects.filter(owner=lock.owner)
        act = same.request_release if is_request else same.force_release
        if is_request and lock.state != State.HELD:
            return "unheld"
        which = {"permit": lock.permit, "version": lock.version}
        try:
            if is_busy(lock.key, patience):
                return "busy"
            if not act(lock.lock_key, **which, by=request.user, reason=reason):
                return "changed"
        except DatabaseError as error:
            dialect = dialects.of(connections[DistributedLock.objects.db])
            if dialect.is_busy(error):
                return "locked"
            if dialect.is_wait_over(error):
                return "busy"
            raise
        text = told(kind, lock.holder, lock.version, reason)
        try:
            self.log_change(request, lock, text)
        except DatabaseError as error:
            # It is done, and in the lock's history.
            logger.warning(
                "not in the admin's log key=%r permit=%s error=%s",
                *(lock.lock_key, lock.permit, error),
            )
        return "asked" if is_request else "released"
