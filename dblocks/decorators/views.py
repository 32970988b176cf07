"""What is special about views: whose request, what 423 looks like."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist, loader
from django.utils.cache import add_never_cache_headers
from django.utils.translation import ngettext
from django.views import View

from ..exceptions import LockTimeout
from .templates import clean_note


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
    http = django_request(request)
    types = ["text/html", "text/plain", "application/json"]
    response: HttpResponse
    if http.get_preferred_type(types) == "application/json":
        response = JsonResponse({"detail": text, "retry_after": seconds})
    else:
        try:
            template = loader.get_template("423.html")
        except TemplateDoesNotExist:
            response = HttpResponse(text, content_type="text/plain; charset=utf-8")
        else:
            response = HttpResponse(template.render({"retry_after": seconds}, http))
    response.status_code = 423
    response["Retry-After"] = str(seconds)
    add_never_cache_headers(response)
    return response


def request_of(args: tuple[Any, ...], has_self: bool) -> HttpRequest | None:
    """Return the request that a call's first argument, after ``self``, is."""
    drf = sys.modules.get("rest_framework.request")
    kinds = (HttpRequest, drf.Request) if drf else (HttpRequest,)
    for argument in args[: 2 if has_self else 1]:
        if isinstance(argument, kinds):
            return argument
    return None


def is_method(function: Any) -> bool:
    """Tell whether a function was defined in the body of a class."""
    scope = getattr(function, "__qualname__", "").rpartition(".")[0]
    return bool(scope) and not scope.endswith("<locals>")


def django_request(request: Any) -> HttpRequest:
    """Return Django's request under a REST framework one."""
    http: HttpRequest = getattr(request, "_request", request)
    return http


def view_note(request: HttpRequest | None) -> str:
    """Return the note of a call as a view: the method, and the URL's pattern.

    Never the path itself, which can hold secrets. Empty where no URL led to the call.
    """
    route = getattr(request and request.resolver_match, "route", None)
    if request is None or route is None:
        return ""
    return clean_note(f"{request.method} {route or '/'}")


def _view_of(function: Any, args: tuple[Any, ...]) -> View | None:
    """Return the class-based view whose method is called, if it is one's."""
    # method_decorator() hands over a partial of the bound method.
    owners = (getattr(layer, "__self__", None) for layer in _layers(function))
    return next((one for one in (*args[:1], *owners) if isinstance(one, View)), None)


def is_async_view(function: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a method of an async class-based view is called."""
    return getattr(_view_of(function, args), "view_is_async", False)


def is_view_call(wrapper: Any, request: HttpRequest, args: tuple[Any, ...]) -> bool:
    """Tell whether a call with a request is the URL's view, and not a helper's."""
    match = request.resolver_match
    if match is None:
        return True
    target: Any = match.func
    function = wrapper.__wrapped__
    kind = getattr(target, "view_class", None) or getattr(target, "cls", None)
    view = _view_of(function, args)
    if view is not None:
        return kind is not None and isinstance(view, kind)
    names = attrgetter("__module__", "__name__")
    if kind is not None and names(kind) == names(wrapper):
        # REST framework's api_view() makes a class of the function's name.
        return True
    method = getattr(getattr(function, "func", None), "__func__", None)
    return any(layer is function or layer is method for layer in _layers(target))


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
