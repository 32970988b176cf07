"""In debug mode: warnings of what a decorated call does outside its lock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from django.conf import settings
from django.db import connections
from django.http import HttpRequest, HttpResponseBase

from ..advice import warn
from .views import django_request

SHOWN = 120
"""How many characters of a statement a warning shows."""

WHO_ASKS = ("django.contrib.auth", "django.contrib.sessions")
"""Packages that may query while a key is made, as ``request.user`` does."""


class LateWork:
    """Finds work that a view leaves for later, when its lock is free again."""

    def __init__(self, request: HttpRequest, name: str) -> None:
        self._name = name
        self._session: Any = getattr(django_request(request), "session", None)
        self._was_modified = self._is_modified()
        self._session_key = getattr(self._session, "session_key", None)

    @classmethod
    def of(cls, request: HttpRequest | None, name: str) -> LateWork | None:
        """Return a watcher for a view's call that is about to run, in debug mode."""
        if request is None or not settings.DEBUG:
            return None
        return cls(request, name)

    def _is_modified(self) -> bool:
        return bool(getattr(self._session, "modified", False))

    def warn(self, response: object) -> None:
        """Warn about work that is still to be done."""
        # A new session must be saved later, or the visitor gets no cookie.
        is_same = getattr(self._session, "session_key", None) == self._session_key
        if not self._was_modified and self._is_modified() and is_same:
            warn(
                f"{self._name}: this view changes the session, which is saved after "
                f"its lock is released: another request may read it before, and "
                f"overwrite it or be overwritten. Under the lock, call "
                f"request.session.save() and set request.session.modified = False, or "
                f"keep such data in a table."
            )
        if not isinstance(response, HttpResponseBase):
            return
        # REST framework's responses are rendered late too, but from data at hand.
        template = getattr(response, "template_name", None)
        unrendered = template is not None and not getattr(response, "is_rendered", True)
        if response.streaming or unrendered:
            warn(
                f"{self._name}: this response is "
                f"{'rendered' if unrendered else 'streamed'} after the view has "
                f"returned and its lock is released. Do the work that the lock "
                f"protects in the view itself."
            )


@contextmanager
def queries_seen() -> Iterator[list[str]]:
    """Collect the statements that a block runs, except those that identify the user."""
    seen: list[str] = []

    def note(execute: Any, sql: str, *rest: Any) -> Any:
        if not _finds_out_who_asks(sys._getframe().f_back):
            seen.append(sql)
        return execute(sql, *rest)

    with ExitStack() as noting:
        for connection in connections.all():
            noting.enter_context(connection.execute_wrapper(note))
        yield seen


def _finds_out_who_asks(frame: FrameType | None) -> bool:
    ours = __name__.partition(".")[0] + "."
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(WHO_ASKS):
            return True
        if module.startswith(ours):
            break
        frame = frame.f_back
    return False


def warn_of_queries(queries: list[str], name: str) -> None:
    """Warn if statements ran while the key of a call was made."""
    if queries:
        warn(
            f"{name}: queries ran while the key or the note was made "
            f"({len(queries)}, first {queries[0][:SHOWN]!r}). What they read is older "
            f"than the lock: a call that has waited goes on with stale data. Make the "
            f"key from ids, or read again under the lock (refresh_from_db())."
        )
