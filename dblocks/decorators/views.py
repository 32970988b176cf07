"""Views: which request a call belongs to, and what the 423 looks like."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template import TemplateDoesNotExist, loader
from django.urls import ResolverMatch
from django.utils.cache import add_never_cache_headers
from django.utils.translation import ngettext
from django.views import View

from ..exceptions import LockTimeout
from .decoratable import bound_to, layers
from .templates import clean_note

_RETURNS_COROUTINE = ("dispatch", "http_method_not_allowed", "options")
"""The plain methods of Django's ``View`` that return a coroutine if it is async."""


def locked_response(request: HttpRequest, error: LockTimeout) -> HttpResponse:
    """Return the answer 423 Locked, which only says when the holder's lease can end.

    JSON where the request prefers it, else the project's template ``423.html``, with
    ``retry_after`` (seconds) in its context, or plain text if it has none.
    """
    seconds = max(1, math.ceil(error.retry_after))
    text = ngettext(
        "Someone else is working on this. Try again in %(seconds)d second.",
        "Someone else is working on this. Try again in %(seconds)d seconds.",
        seconds,
    ) % {"seconds": seconds}
    http = django_request(request)
    # JSON last: a client that accepts anything doesn't prefer it.
    kind = http.get_preferred_type(["text/plain", "text/html", "application/json"])
    response: HttpResponse
    if kind == "application/json":
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


def request_of(
    args: tuple[Any, ...], method: str | None, wrapper: Any
) -> HttpRequest | None:
    """Return a call's first argument, after ``self``, if it is a request.

    Args:
        method: What :func:`method_name` says of the function.
        wrapper: What has replaced the function.
    """
    kinds = _request_types()
    if args and isinstance(args[0], kinds):
        return args[0]
    # Not isinstance(), which would evaluate a lazy object.
    if len(args) > 1 and issubclass(type(args[1]), kinds):
        return args[1] if _is_self(args[0], method, wrapper) else None
    return None


def request_among(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the request that a call has, wherever a decorator above has put it."""
    every, kinds = (*args, *kwargs.values()), _request_types()
    # Not isinstance(), which would evaluate a lazy object.
    return next((x for x in every if issubclass(type(x), kinds)), None)


def _request_types() -> tuple[type[HttpRequest], ...]:
    drf = sys.modules.get("rest_framework.request")
    return (HttpRequest, drf.Request) if drf else (HttpRequest,)


def _is_self(value: Any, method: str | None, wrapper: Any) -> bool:
    """Tell whether a value is the object, or the class, that a method is called on."""
    kind: type = value if isinstance(value, type) else type(value)
    if method is None:
        # A function may become a method after it was decorated.
        members = (vars(each).values() for each in inspect.getmro(kind))
        return any(one is wrapper for each in members for one in each)
    if isinstance(value, View):
        return True
    scope, _, name = method.rpartition(".")
    # Not hasattr(), which runs properties.
    return any(
        each.__qualname__ == scope or name in vars(each)
        for each in (*inspect.getmro(kind), *inspect.getmro(type(kind)))
    )


def method_name(function: Any) -> str | None:
    """Return a function's qualified name, if the body of a class defines it."""
    name: str = getattr(function, "__qualname__", "")
    scope = name.rpartition(".")[0]
    return name if scope and not scope.endswith("<locals>") else None


def django_request(request: Any) -> HttpRequest:
    """Return Django's request under a REST framework one."""
    http: HttpRequest = getattr(request, "_request", request)
    return http


def view_note(request: HttpRequest | None) -> str:
    """Return the note of a view's call: the HTTP method, and the URL's pattern.

    Never the path itself, which can hold secrets. Empty where no URL led to the call.
    """
    route = getattr(request and request.resolver_match, "route", None)
    if request is None or route is None:
        return ""
    return clean_note(f"{request.method} {route or '/'}")


def is_async_view(function: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether a plain function's call returns an async view's coroutine."""
    if getattr(function, "__name__", None) not in _RETURNS_COROUTINE:
        return False
    return getattr(bound_to(View, function, args), "view_is_async", False)


def is_view_call(wrapper: Any, request: HttpRequest, args: tuple[Any, ...]) -> bool:
    """Tell whether a call with a request is that of the URL's view, not a helper's."""
    match = request.resolver_match
    if match is None:
        return True
    target: Any = match.func
    function = wrapper.__wrapped__
    kind = getattr(target, "view_class", None) or getattr(target, "cls", None)
    view = bound_to(View, function, args)
    if view is not None:
        leads_here = kind is not None and isinstance(view, kind)
        return leads_here and _is_handler(view, function)
    if is_below_api_view(wrapper, match):
        return True
    method = getattr(getattr(function, "func", None), "__func__", None)
    return any(layer is function or layer is method for layer in layers(target))


def _is_handler(view: View, function: Any) -> bool:
    """Tell whether Django calls a view's method; else the view's own code does."""
    names = ("dispatch", "http_method_not_allowed", *view.http_method_names)
    if getattr(function, "__name__", None) in names:
        return True
    # An action of REST framework has a name of its own.
    own = [*layers(function)]
    handlers = (getattr(view, name, None) for name in names)
    return any(x is one for each in handlers for x in layers(each) for one in own)


def is_below_api_view(wrapper: Any, match: ResolverMatch | None) -> bool:
    """Tell whether REST framework's ``api_view()`` has made a view from a function.

    It makes a class with the function's name.
    """
    kind = getattr(match and match.func, "cls", None)
    names = attrgetter("__module__", "__name__")
    return kind is not None and bool(names(kind) == names(wrapper))
