"""What is special about views: who calls, what 423 looks like, whose transaction."""

from __future__ import annotations

import inspect
import math
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MethodType
from typing import Any

from django.conf import settings
from django.db import connections, transaction
from django.http import HttpRequest, HttpResponse, HttpResponseBase, JsonResponse
from django.template import TemplateDoesNotExist, loader
from django.utils.cache import add_never_cache_headers
from django.utils.translation import ngettext
from django.views import View

from . import transactions
from .exceptions import LockTimeout
from .leases import Lease

TEMPLATE = "423.html"


# The answer


def locked_response(request: HttpRequest, error: LockTimeout) -> HttpResponse:
    """Return the answer 423 Locked, which says when to come again and nothing else.

    The project's template ``423.html``, with ``retry_after`` (seconds) in its context;
    without one plain text; JSON where the request prefers it.
    """
    seconds = max(1, math.ceil(error.retry_after))
    text = ngettext(
        "Somebody else is at work on this. Try again in %(seconds)d second.",
        "Somebody else is at work on this. Try again in %(seconds)d seconds.",
        seconds,
    ) % {"seconds": seconds}
    response: HttpResponse
    if _prefers_json(request):
        response = JsonResponse({"detail": text, "retry_after": seconds})
    else:
        try:
            template = loader.get_template(TEMPLATE)
        except TemplateDoesNotExist:
            response = HttpResponse(text, content_type="text/plain; charset=utf-8")
        else:
            context = {"retry_after": seconds}
            response = HttpResponse(template.render(context, _http(request)))
    response.status_code = 423
    response.reason_phrase = "Locked"
    response["Retry-After"] = str(seconds)
    add_never_cache_headers(response)
    return response


def _prefers_json(request: HttpRequest) -> bool:
    types = ["text/html", "text/plain", "application/json"]
    return _http(request).get_preferred_type(types) == "application/json"


# Who calls


def request_of(function: Any, args: tuple[Any, ...]) -> HttpRequest | None:
    """Return the request that a call's first argument, after ``self``, is."""
    for argument in args[: 2 if _is_method(function) else 1]:
        if isinstance(argument, HttpRequest):
            return argument
        drf = sys.modules.get("rest_framework.request")
        if drf is not None and isinstance(argument, drf.Request):
            request: HttpRequest = argument
            return request
    return None


def _is_method(function: Any) -> bool:
    """Tell whether a function was defined in the body of a class."""
    scope = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(scope) and not scope.endswith("<locals>")


def _http(request: Any) -> HttpRequest:
    """Return Django's request under a REST framework one."""
    http: HttpRequest = getattr(request, "_request", request)
    return http


def view_of(function: Any, args: tuple[Any, ...]) -> View | None:
    """Return the class-based view whose method is called, if it is one's."""
    if args and isinstance(args[0], View):
        return args[0]
    while function is not None:
        # method_decorator() hands over a partial of the bound method.
        bound = getattr(getattr(function, "func", function), "__self__", None)
        if isinstance(bound, View):
            return bound
        function = getattr(function, "__wrapped__", None)
    return None


def is_view_call(
    wrapper: Callable[..., Any],
    function: Callable[..., Any],
    request: HttpRequest,
    view: View | None,
) -> bool:
    """Tell whether a call with a request is the URL's view, and not a helper's."""
    match = request.resolver_match
    if match is None:
        return True
    target: Any = match.func
    kind = getattr(target, "view_class", None) or getattr(target, "cls", None)
    if view is not None:
        return kind is not None and isinstance(view, kind)
    if kind is not None and _names(kind) == _names(wrapper):
        # REST framework's api_view() makes a class of the function's name.
        return True
    method = getattr(getattr(function, "func", None), "__func__", None)
    wanted = [one for one in (wrapper, function, method) if one is not None]
    return any(layer is one for layer in _layers(target) for one in wanted)


def _layers(target: Any) -> Iterator[Any]:
    """Yield a callable and what it calls, as far as it says what that is."""
    while target is not None:
        yield target
        if isinstance(target, partial):
            target = target.func
        elif isinstance(target, MethodType):
            target = target.__func__
        elif hasattr(target, "__wrapped__") or inspect.isroutine(target):
            target = getattr(target, "__wrapped__", None)
        else:
            target = type(target).__call__


def _names(thing: Any) -> tuple[str, str]:
    return thing.__module__, thing.__name__


# Whose transaction


class OwnTransactions(set[str]):
    """Tells Django's handler to leave the request's transactions to the decorator.

    As ``_non_atomic_requests`` on a view it contains every database. Its members are
    those that the project itself excluded with ``non_atomic_requests``.
    """

    def __contains__(self, alias: object) -> bool:
        return True


def atomic_aliases() -> list[str]:
    """Return the databases with ``ATOMIC_REQUESTS``."""
    return [alias for alias in connections if _is_atomic(alias)]


def _is_atomic(alias: str) -> bool:
    return bool(connections.settings[alias]["ATOMIC_REQUESTS"])


class RequestTransactions:
    """The transactions of one request, opened under its locks."""

    ATTRIBUTE = "_dblocks_transactions"

    def __init__(self) -> None:
        self.leases: list[Lease] = []
        self.opened = False

    @classmethod
    def of(cls, request: HttpRequest) -> RequestTransactions:
        """Return the request's own, made when it is first asked for."""
        http = _http(request)
        own: RequestTransactions | None = getattr(http, cls.ATTRIBUTE, None)
        if own is None:
            own = cls()
            setattr(http, cls.ATTRIBUTE, own)
        return own

    def due(self, request: HttpRequest, excluded: set[str]) -> list[str]:
        """Return the databases on which Django left the transaction to us.

        Args:
            excluded: Those on which what is decorated wants none.
        """
        match = request.resolver_match
        mark = getattr(match and match.func, "_non_atomic_requests", None)
        if self.opened or not isinstance(mark, OwnTransactions):
            return []
        excluded = {*mark, *excluded}
        return [alias for alias in atomic_aliases() if alias not in excluded]

    @contextmanager
    def open(self, aliases: list[str]) -> Iterator[None]:
        """Begin, run the view, guard, commit; the lock's own database last."""
        if not aliases:
            yield
            return
        self.opened = True
        try:
            with self._blocks(aliases):
                yield
        finally:
            # The request may come again, from a middleware that tries twice.
            self.opened = False

    @contextmanager
    def _blocks(self, aliases: list[str]) -> Iterator[None]:
        own = [a for a in aliases if any(x.is_in_database(a) for x in self.leases)]
        order = own + [alias for alias in aliases if alias not in own]
        with ExitStack() as pins:
            with ExitStack() as blocks:
                for alias in order:
                    blocks.enter_context(transaction.atomic(using=alias))
                yield
                for lease in self.leases:
                    lease.verify(order, pins)
            for lease in self.leases:
                lease.note_commit()


def warn_of_open_transaction(name: str) -> None:
    """Warn if Django began the request's transaction before the lock was taken."""
    for alias in atomic_aliases():
        if transactions.in_transaction(connections[alias]):
            warnings.warn(
                f"{name}: ATOMIC_REQUESTS began the transaction on {alias!r} before "
                f"the lock is taken. The lock is kept until that transaction ends, "
                f"but what was read before may be old, and the commit isn't guarded. "
                f"Decorate the whole view (for a class method_decorator(…, "
                f'name="dispatch")).',
                RuntimeWarning,
                stacklevel=4,
            )
            return


def warn_of_late_work(response: object, name: str) -> None:
    """In debug mode, warn of a response whose work is still to be done."""
    if not settings.DEBUG or not isinstance(response, HttpResponseBase):
        return
    # REST framework's responses are rendered late too, from data that are there.
    template = getattr(response, "template_name", None)
    unrendered = template is not None and not getattr(response, "is_rendered", True)
    if response.streaming or unrendered:
        warnings.warn(
            f"{name}: this response is {'rendered' if unrendered else 'streamed'} "
            f"after the view has returned and its lock is released. Do the work that "
            f"the lock protects in the view itself.",
            RuntimeWarning,
            stacklevel=4,
        )
