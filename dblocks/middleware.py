"""The answer 423 for a ``LockTimeout`` that escapes any view."""

from __future__ import annotations

from django.http import HttpRequest, HttpResponse
from django.utils.deprecation import MiddlewareMixin

from .decorators.views import locked_response
from .exceptions import LockTimeout


class LockTimeoutMiddleware(MiddlewareMixin):
    """Answers 423 Locked, as a decorated view does, instead of 500.

    Works on sync and async stacks. Lets all other errors pass, ``LeaseLost`` too.
    """

    def process_exception(
        self, request: HttpRequest, exception: Exception
    ) -> HttpResponse | None:
        if isinstance(exception, LockTimeout):
            return locked_response(request, exception)
        return None
