"""Decorated views: what a locked out visitor gets, and who counts as a view."""

from __future__ import annotations

import asyncio
import math
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.decorators import login_required
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import connection
from django.http import FileResponse, HttpRequest, HttpResponse, StreamingHttpResponse
from django.template.response import TemplateResponse
from django.test import RequestFactory
from django.test.utils import CaptureQueriesContext
from django.urls import ResolverMatch
from django.utils import translation
from django.utils.decorators import method_decorator
from django.utils.functional import classproperty
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from dblocks import Lease, LockTimeout, current_lease, distributed_lock
from dblocks import transaction_lock as row_lock
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.fixtures import OtherThread
from tests.support.web import Site, use_template
from tests.testapp.models import Account

NOTE = "a note that is nobody's business"
MIDDLEWARE = "dblocks.middleware.LockTimeoutMiddleware"

pytestmark = pytest.mark.usefixtures("committed")


@pytest.fixture
def elsewhere(key: str) -> Iterator[Lease]:
    """Somebody else holds the test's key, for 20.5 seconds unless it is renewed."""
    with hold_elsewhere(key, lease=20.5, note=NOTE) as lease:
        yield lease


@pytest.fixture
def lock(key: str) -> Callable[..., Any]:
    """Make locks on the test's key that don't wait."""

    def make(**options: Any) -> Any:
        name = options.pop("key", key)
        return distributed_lock(name, **{"timeout": 0, **options})

    return make


def inside(request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
    """Answer if the view's code runs under a lock of either form."""
    check_locked()
    return HttpResponse("inside")


def check_locked() -> None:
    if not connection.in_atomic_block:
        current_lease().check()


async def ainside(request: Any, *args: Any, **kwargs: Any) -> HttpResponse:
    """Do the same, some time later."""
    await asyncio.sleep(0)
    return inside(request)


# The answer


def test_locked(site: Site, lock: Any, elsewhere: Lease) -> None:
    """A locked out visitor gets 423 and is told when to come again."""
    response = site.serve(lock()(inside)).get("/")
    assert response.status_code == 423
    assert response.reason_phrase == "Locked"
    assert 15 <= int(response["Retry-After"]) <= 21
    assert "no-store" in response["Cache-Control"]


@pytest.mark.parametrize("form", [distributed_lock, row_lock])
@pytest.mark.parametrize("escapes", [False, True], ids=["answered", "escapes"])
def test_retry_after(
    site: Site, settings: Any, key: str, elsewhere: Lease, form: Any, escapes: bool
) -> None:
    """Whatever locks, a visitor is told when the holder's lease can end."""
    settings.MIDDLEWARE = [MIDDLEWARE]
    locked = form(key, timeout=0)
    view = partial(in_a_block, locked) if escapes else locked(inside)
    response = site.serve(view).get("/")
    assert response.status_code == 423
    assert 15 <= int(response["Retry-After"]) <= 21


def in_a_block(lock: Any, request: HttpRequest) -> HttpResponse:
    """A view that takes a lock inside."""
    with lock:
        return inside(request)


def test_not_locked(site: Site, lock: Any) -> None:
    """With the key free the view answers, and the key is free afterwards."""
    response = site.serve(lock()(inside)).get("/")
    assert (response.status_code, response.content) == (200, b"inside")
    assert not lock().locked()


@pytest.mark.parametrize(
    "accept",
    [None, "text/plain", "text/html", "application/json", "*/*"],
    ids=["nothing", "text", "html", "json", "anything"],
)
@pytest.mark.parametrize("template", [True, False], ids=["template", "no template"])
def test_discreet(
    site: Site,
    settings: Any,
    lock: Any,
    elsewhere: Lease,
    key: str,
    accept: str | None,
    template: bool,
) -> None:
    """The answer names neither the key nor the holder nor the note."""
    if template:
        use_template(settings, "<h1>Busy</h1>")
    headers = {"accept": accept} if accept else {}
    response = site.serve(lock()(inside)).get("/", headers=headers)
    assert response.status_code == 423
    whole = response.content.decode() + repr(response.headers)
    row = DistributedLock.objects.get(pk=key)
    assert row.holder
    for secret in (key, row.holder, row.owner, NOTE):
        assert secret not in whole


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        (None, "text/plain"),
        ("*/*", "text/plain"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "text/plain"),
        ("text/html;q=0.4, text/plain;q=0.5", "text/plain"),
        ("application/json", "application/json"),
        ("application/json, text/plain, */*", "application/json"),
        ("text/html;q=0.5, application/json", "application/json"),
        ("application/json;q=0.2, text/html", "text/plain"),
        ("image/png", "text/plain"),
    ],
    ids=str,
)
def test_kind_of_answer(
    site: Site, lock: Any, elsewhere: Lease, accept: str | None, kind: str
) -> None:
    """JSON where the request prefers that, else plain text, for browsers too."""
    headers = {"accept": accept} if accept else {}
    response = site.serve(lock()(inside)).get("/", headers=headers)
    assert response.status_code == 423
    assert response["Content-Type"].partition(";")[0] == kind
    if kind == "application/json":
        body = response.json()
        assert body["retry_after"] == int(response["Retry-After"])


@pytest.mark.parametrize(
    ("accept", "kind"),
    [("text/html", "text/html"), ("application/json", "application/json")],
)
def test_template(
    site: Site, settings: Any, lock: Any, elsewhere: Lease, accept: str, kind: str
) -> None:
    """The project's 423.html is used, but for a request that prefers JSON."""
    use_template(settings, "<p>Again in {{ retry_after }} at {{ request.path }}</p>")
    response = site.serve(lock()(inside)).get("/", headers={"accept": accept})
    assert response.status_code == 423
    assert response["Content-Type"].partition(";")[0] == kind
    if kind == "text/html":
        expected = f"<p>Again in {response['Retry-After']} at /</p>"
        assert response.content.decode() == expected


@pytest.mark.parametrize("engines", [True, False], ids=["engines", "no engine"])
@pytest.mark.parametrize("method", ["get", "post"])
@pytest.mark.parametrize(
    ("language", "sentence"),
    [
        ("en", "Someone else is working on this. Try again in {} seconds."),
        ("ja", "他の人が処理中です。{} 秒後にもう一度お試しください。"),
        ("zh-hans", "其他人正在处理。请在 {} 秒后重试。"),
    ],
    ids=["en", "ja", "zh-hans"],
)
def test_plain_text(
    site: Site,
    settings: Any,
    lock: Any,
    elsewhere: Lease,
    language: str,
    sentence: str,
    method: str,
    engines: bool,
) -> None:
    """Without a template a browser gets one sentence, in the visitor's language."""
    if not engines:
        settings.TEMPLATES = []
    ask = getattr(site.serve(lock()(inside)), method)
    with translation.override(language):
        page = ask("/", headers={"accept": "text/html,*/*;q=0.8"})
        data = ask("/", headers={"accept": "application/json"})
    assert page.status_code == data.status_code == 423
    assert page["Content-Type"] == "text/plain; charset=utf-8"
    assert page.content.decode() == sentence.format(page["Retry-After"])
    assert data.json()["detail"] == sentence.format(data["Retry-After"])


@pytest.mark.parametrize("lease", [0.9, 1.2], ids=["less than a second", "more"])
def test_whole_seconds(site: Site, lock: Any, key: str, lease: float) -> None:
    """Retry-After is rounded up to whole seconds, at least one."""
    client = site.serve(lock()(inside))
    began = time.monotonic()
    with hold_elsewhere(key, lease=lease):
        response = client.get("/")
    took = time.monotonic() - began
    least, most = (max(1, math.ceil(left)) for left in (lease - took, lease))
    assert least <= int(response["Retry-After"]) <= most


def test_cooling(site: Site, lock: Any, other: OtherThread) -> None:
    """A key that is cooling is locked until its time is over."""
    other.do(lock(hold_at_least=30).acquire).release()
    response = site.serve(lock()(inside)).get("/")
    assert response.status_code == 423
    assert 25 <= int(response["Retry-After"]) <= 30


def test_key_of_the_url(site: Site, key: str) -> None:
    """The key is built from the URL: another order is not locked."""
    view = distributed_lock(key + ":{order_id}", timeout=0)(inside_an_order)
    client = site.serve(view)
    with hold_elsewhere(f"{key}:5"):
        assert client.get("/order/5/").status_code == 423
        assert client.get("/order/6/").status_code == 200


def inside_an_order(request: HttpRequest, order_id: str) -> HttpResponse:
    """A view of one order."""
    return inside(request)


# Kinds of views


class Plain(View):
    """A class-based view without a lock."""

    def get(self, request: HttpRequest, order_id: str = "0") -> HttpResponse:
        return inside(request)


class Async(View):
    """A class-based view of coroutine functions."""

    async def get(self, request: HttpRequest, order_id: str = "0") -> HttpResponse:
        return await ainside(request)


def on_class(base: Any, *decorators: Any) -> Any:
    """Decorate ``dispatch`` of a new class from outside."""
    new = type("OnClass", (base,), {})
    return method_decorator(list(decorators), name="dispatch")(new).as_view()


def on_dispatch(base: Any, lock: Any) -> Any:
    """Decorate a ``dispatch`` of the class's own."""

    class OnDispatch(base):  # type: ignore[misc]
        @method_decorator(lock)
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

    return OnDispatch.as_view()


def on_method(base: Any, lock: Any) -> Any:
    """Decorate one method from outside."""
    new = type("OnMethod", (base,), {"get": base.get})
    return method_decorator(lock, name="get")(new).as_view()


def directly(base: Any, lock: Any) -> Any:
    """Decorate one method as the function that it is."""
    return type("Directly", (base,), {"get": lock(base.get)}).as_view()


class Rest(APIView):
    """REST framework's class-based view."""

    def get(self, request: Any, order_id: str = "0") -> Response:
        check_locked()
        return Response({"is": "inside"})


def rest(request: Any, order_id: str = "0") -> Response:
    """A view function for REST framework."""
    check_locked()
    return Response({"is": "inside"})


class Orders(ViewSet):
    """Views that one class has several of."""

    def list(self, request: Any, order_id: str = "0") -> Response:
        return Response({"is": "inside"})


def hide(view: Any) -> Any:
    """A decorator that doesn't use functools.wraps."""

    def inner(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        return view(request, *args, **kwargs)

    return inner


class Owner:
    """Not a view, but with views for methods, like Django's admin."""

    def page(self, request: HttpRequest, order_id: str = "0") -> HttpResponse:
        return inside(request)


def callable_object(lock: Any) -> Any:
    """Return an object that is a view, like Django's feeds."""
    return type("Feed", (Owner,), {"__call__": lock(Owner.page)})()


def bound_method(lock: Any) -> Any:
    """Return a view that is a method of an object."""
    return type("Locked", (Owner,), {"page": lock(Owner.page)})().page


def bound_through_method_decorator(lock: Any) -> Any:
    """Return the same, decorated in Django's way."""
    return type("Locked", (Owner,), {"page": method_decorator(lock)(Owner.page)})().page


VIEWS: dict[str, Callable[[Any], Any]] = {
    "function": lambda lock: lock(inside),
    "below csrf_exempt": lambda lock: csrf_exempt(lock(inside)),
    "above csrf_exempt": lambda lock: lock(csrf_exempt(inside)),
    "below login_required": lambda lock: login_required(lock(inside)),
    "above login_required": lambda lock: lock(login_required(inside)),
    "below never_cache": lambda lock: never_cache(lock(inside)),
    "above never_cache": lambda lock: lock(never_cache(inside)),
    "between": lambda lock: csrf_exempt(lock(never_cache(inside))),
    "partial": lambda lock: partial(lock(inside), extra=1),
    "object": callable_object,
    "bound method": bound_method,
    "bound method, method_decorator": bound_through_method_decorator,
    "class, dispatch by name": lambda lock: on_class(Plain, lock),
    "class, own dispatch": lambda lock: on_dispatch(Plain, lock),
    "class, one method": lambda lock: on_method(Plain, lock),
    "class, directly": lambda lock: directly(Plain, lock),
    "class, above never_cache": lambda lock: on_class(Plain, lock, never_cache),
    "class, below never_cache": lambda lock: on_class(Plain, never_cache, lock),
    "class, above as_view": lambda lock: lock(Plain.as_view()),
    "class, above a decorated one's as_view": lambda lock: lock(
        on_class(Plain, never_cache)
    ),
    "REST function, below": lambda lock: api_view(["GET"])(lock(rest)),
    "REST function, above": lambda lock: lock(api_view(["GET"])(rest)),
    "REST class, dispatch": lambda lock: on_class(Rest, lock),
    "REST class, one method": lambda lock: on_method(Rest, lock),
    "REST class, directly": lambda lock: directly(Rest, lock),
    "REST set": lambda lock: type(
        "Locked", (Orders,), {"list": lock(Orders.list)}
    ).as_view({"get": "list"}),
}
ASYNC_VIEWS: dict[str, Callable[[Any], Any]] = {
    "async function": lambda lock: lock(ainside),
    "async function, below csrf_exempt": lambda lock: csrf_exempt(lock(ainside)),
    "async function, above csrf_exempt": lambda lock: lock(csrf_exempt(ainside)),
    "async function, below never_cache": lambda lock: never_cache(lock(ainside)),
    "async function, above never_cache": lambda lock: lock(never_cache(ainside)),
    "async function, below login_required": lambda lock: login_required(lock(ainside)),
    "async class, dispatch by name": lambda lock: on_class(Async, lock),
    "async class, own dispatch": lambda lock: on_dispatch(Async, lock),
    "async class, one method": lambda lock: on_method(Async, lock),
    "async class, directly": lambda lock: directly(Async, lock),
    "async class, above csrf_exempt": lambda lock: on_class(Async, lock, csrf_exempt),
    "async class, below csrf_exempt": lambda lock: on_class(Async, csrf_exempt, lock),
    "async class, above as_view": lambda lock: lock(Async.as_view()),
}
ALL_VIEWS = pytest.mark.parametrize(
    "make", [*VIEWS.values(), *ASYNC_VIEWS.values()], ids=[*VIEWS, *ASYNC_VIEWS]
)
MAIN_KINDS = {
    name: make
    for name, make in (VIEWS | ASYNC_VIEWS).items()
    if name
    in {
        "function",
        "class, dispatch by name",
        "class, directly",
        "REST function, below",
        "REST class, dispatch",
        "async function",
        "async class, dispatch by name",
        "async class, directly",
    }
}
MAIN_VIEWS = pytest.mark.parametrize("make", MAIN_KINDS.values(), ids=MAIN_KINDS)
MAIN_ASYNC_VIEWS = pytest.mark.parametrize(
    "make",
    [make for name, make in MAIN_KINDS.items() if name in ASYNC_VIEWS],
    ids=[name for name in MAIN_KINDS if name in ASYNC_VIEWS],
)


@pytest.fixture(params=["WSGI", "ASGI"])
def ask(request: pytest.FixtureRequest, site: Site, settings: Any) -> Any:
    """Ask a view for its page on a sync or an async stack, signed in."""
    settings.MIDDLEWARE = ["tests.support.web.signed_in"]

    def get(view: Any, url: str = "/", **headers: str) -> Any:
        if request.param == "WSGI":
            return site.serve(view).get(url, headers=headers)
        return async_to_sync(site.aserve(view).get)(url, headers=headers)

    return get


@ALL_VIEWS
def test_every_kind_of_view(ask: Any, lock: Any, make: Any, key: str) -> None:
    """Each kind of view runs under its lock, answers 423 when that is taken."""
    view = make(lock())
    with hold_elsewhere(key):
        assert ask(view, accept="application/json").status_code == 423
    response = ask(view, accept="application/json")
    assert response.status_code == 200, response.content
    assert b"inside" in response.content
    assert not lock().locked()


TEMPLATED = {
    name: VIEWS[name]
    for name in [
        "above csrf_exempt",
        "class, above never_cache",
        "class, below never_cache",
        "class, above as_view",
        "class, above a decorated one's as_view",
        "REST function, above",
        "REST function, below",
        "REST class, dispatch",
    ]
} | {
    name: ASYNC_VIEWS[name]
    for name in ["async class, dispatch by name", "async class, above as_view"]
}


@pytest.mark.parametrize("make", TEMPLATED.values(), ids=TEMPLATED)
def test_template_of_every_kind(ask: Any, key: str, make: Any) -> None:
    """A key's template finds what the URL captured, through other decorators too."""
    template = key + ":{order_id}"
    view = make(distributed_lock(template, timeout=0))
    with hold_elsewhere(f"{key}:5"):
        found = [
            ask(view, f"/order/{number}/", accept="application/json").status_code
            for number in (5, 6)
        ]
    assert found == [423, 200]


def test_request_in_a_template(ask: Any, key: str) -> None:
    """A field may look into the request."""
    view = distributed_lock(key + ":{request.user.pk}", timeout=0)(anybody)
    with hold_elsewhere(f"{key}:7"):
        assert ask(view).status_code == 423
    assert ask(view).status_code == 200


@MAIN_ASYNC_VIEWS
@pytest.mark.parametrize("of", ["template", "callable"])
def test_lazy_user_in_the_key_of_an_async_view(
    ask: Any, settings: Any, key: str, make: Any, of: str
) -> None:
    """The key may be the first to ask the database who is signed in."""
    settings.MIDDLEWARE = ["tests.support.web.lazily_signed_in"]
    texts = {
        "template": key + ":{request.user.real}",
        "callable": lambda *args, **_: f"{key}:{request_in(args).user.real}",
    }
    view = make(distributed_lock(texts[of], timeout=0))
    with hold_elsewhere(f"{key}:{Account.objects.count()}"):
        assert ask(view).status_code == 423
    assert ask(view).content == b"inside"


def request_in(args: tuple[Any, ...]) -> Any:
    """Return the request that a view or a method of its class is called with."""
    return next(each for each in args if isinstance(each, HttpRequest))


def anybody(request: HttpRequest) -> HttpResponse:
    """A view function."""
    return HttpResponse()


def test_exceptions_pass(site: Site, lock: Any) -> None:
    """A view's own error is a 500, and the key is free afterwards."""

    def broken(request: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError

    response = site.serve(lock()(broken)).get("/")
    assert response.status_code == 500
    assert response.exc_info[0] is ZeroDivisionError
    assert not lock().locked()


@MAIN_VIEWS
def test_lease_lost(site: Site, lock: Any, key: str, make: Any, settings: Any) -> None:
    """A lease that was lost in the view is an error like any other: 500."""
    settings.MIDDLEWARE = ["tests.support.web.signed_in", MIDDLEWARE]

    def lose(**said: Any) -> None:
        DistributedLock.objects.force_release(key)
        said["lease"].on_lost(lambda lease: None)

    from dblocks.signals import lock_acquired

    lock_acquired.connect(lose)
    try:
        view = make(distributed_lock(key, renew=False))
        response = site.serve(view).get("/", headers={"accept": "application/json"})
    finally:
        lock_acquired.disconnect(lose)
    assert response.status_code == 500
    assert response.exc_info[0].__name__ == "LeaseLost"


# on_locked


def test_raise(site: Site, lock: Any, elsewhere: Lease) -> None:
    """on_locked="raise" lets the LockTimeout out of the view."""
    response = site.serve(lock(on_locked="raise")(inside)).get("/")
    assert response.status_code == 500
    assert response.exc_info[0] is LockTimeout


def apologise(error: LockTimeout, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Answer instead of the view."""
    return HttpResponse(f"sorry, {error.retry_after > 0}", status=409)


async def aapologise(error: LockTimeout, request: Any, *a: Any, **kw: Any) -> Any:
    """Do the same, some time later."""
    await asyncio.sleep(0)
    return apologise(error, request)


@MAIN_VIEWS
def test_callable(ask: Any, lock: Any, make: Any, elsewhere: Lease) -> None:
    """A callable's answer is the view's."""
    response = ask(make(lock(on_locked=apologise)), accept="application/json")
    assert (response.status_code, response.content) == (409, b"sorry, True")


@MAIN_ASYNC_VIEWS
def test_async_callable(ask: Any, lock: Any, make: Any, elsewhere: Lease) -> None:
    """An async view's callable may be async."""
    response = ask(make(lock(on_locked=aapologise)))
    assert (response.status_code, response.content) == (409, b"sorry, True")


@MAIN_VIEWS
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "free"])
def test_skip_is_refused(ask: Any, lock: Any, make: Any, key: str, taken: bool) -> None:
    """A view must answer, so it can't be skipped: a TypeError, whether taken or not."""
    view = make(lock(on_locked="skip"))
    if taken:
        with hold_elsewhere(key):
            response = ask(view, accept="application/json")
    else:
        response = ask(view, accept="application/json")
    assert response.status_code == 500
    assert response.exc_info[0] is TypeError
    assert "skip" in str(response.exc_info[1])


# Notes


@ALL_VIEWS
def test_note(ask: Any, lock: Any, make: Any, key: str) -> None:
    """A view notes its method and its URL's pattern: a path could hold a secret."""
    view = make(lock())
    ask(view, "/order/secret/", accept="application/json")
    assert note_of(key) == "GET order/<order_id>/"


def note_of(key: str) -> str:
    """Return the note of a key, which its row keeps after the release."""
    return DistributedLock.objects.get(pk=key).note


def test_note_of_the_root(site: Site, lock: Any, key: str) -> None:
    """An empty pattern is the site's root."""
    site.serve(lock()(inside)).post("/")
    assert note_of(key) == "POST /"


@pytest.mark.parametrize("template", ["", ":{request.method}"], ids=["literal", "made"])
def test_note_of_a_long_pattern(key: str, template: str) -> None:
    """A pattern that is longer than a note is cut."""
    view = distributed_lock(key + template)(inside)
    request = RequestFactory().get("/")
    request.resolver_match = ResolverMatch(view, (), {}, route="long" * 100)
    assert view(request).content == b"inside"
    note = note_of(key + (":GET" if template else ""))
    assert note == "GET " + ("long" * 100)[:251]


@MAIN_VIEWS
@pytest.mark.parametrize("note", ["for {order_id}", lambda *args, **kwargs: "for 5"])
def test_given_note(ask: Any, key: str, make: Any, note: Any) -> None:
    """A note that is given rules, in views too."""
    view = make(distributed_lock(key, timeout=0, note=note))
    ask(view, "/order/5/", accept="application/json")
    assert note_of(key) == "for 5"


async def loads_user(request: HttpRequest) -> HttpResponse:
    """An async view that finds out who asks before it takes its lock."""
    user = await request.auser()  # type: ignore[attr-defined]
    key = request.headers["X-Key"]
    async with distributed_lock(key, note=f"checkout by {user}"):
        return await ainside(request)


@pytest.mark.parametrize(
    ("view", "note", "expected"),
    [
        (inside, "", "GET /"),
        (inside, "checkout by {request.user}", "checkout by somebody"),
        (ainside, "", "GET /"),
        (ainside, "checkout by {request.user}", "checkout by somebody"),
        (loads_user, None, "checkout by somebody"),
    ],
    ids=["default", "asked for", "async default", "async asked for", "async block"],
)
def test_note_of_who_asks(
    site: Site, settings: Any, lock: Any, key: str, view: Any, note: Any, expected: str
) -> None:
    """The note names the user where it is asked to, and never by itself."""
    settings.MIDDLEWARE = [
        SESSION,
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ]
    user = User.objects.create_user("somebody")
    client = site.serve(view if note is None else lock(note=note)(view))
    client.force_login(user)
    try:
        response = client.get("/", headers={"X-Key": key})
    finally:
        user.delete()
        Session.objects.all().delete()
    assert response.content == b"inside"
    assert note_of(key) == expected


def test_note_without_a_url(lock: Any, key: str) -> None:
    """A request that no URL has been found for: the function is noted."""
    lock()(inside)(RequestFactory().get("/"))
    assert note_of(key) == "tests.test_views.inside"


NAMES = {
    "function": "inside",
    "class": "OnClass.dispatch",
    "above as_view": "OnClass",
    "method": "Owner.page",
}


@pytest.mark.parametrize(("kind", "name"), NAMES.items(), ids=NAMES)
def test_note_of_a_helper(
    site: Site, lock: Any, key: str, kind: str, name: str
) -> None:
    """A view that another view calls is noted as the function that it is."""
    site.serve(helped(HELPERS[kind](lock()))).get("/")
    assert note_of(key) == f"tests.test_views.{name}"


# Who is a view


def helped(helper: Any) -> Any:
    """Return a view that calls a function with its request."""

    def view(request: HttpRequest, **kwargs: Any) -> HttpResponse:
        helper(request)
        return HttpResponse("done")

    return view


HELPERS: dict[str, Callable[[Any], Any]] = {
    "function": lambda lock: lock(inside),
    "class": lambda lock: on_class(Plain, lock),
    "above as_view": lambda lock: lock(on_class(Plain, never_cache)),
    "api_view": lambda lock: lock(api_view(["GET"])(rest)),
    "method": bound_method,
}


@pytest.mark.parametrize("make", HELPERS.values(), ids=HELPERS)
def test_view_as_a_helper(site: Site, lock: Any, make: Any, elsewhere: Lease) -> None:
    """A view that another view calls raises: a 423 must not pass for success."""
    response = site.serve(helped(make(lock()))).get("/")
    assert response.status_code == 500
    assert response.exc_info[0] is LockTimeout


def pay(self: Any, request: HttpRequest) -> HttpResponse:
    return HttpResponse(b"done")


def test_methods_under_other_names(lock: Any, elsewhere: Lease) -> None:
    """A method is known by the body of its class, or by its object."""

    class Shop:
        @lock()
        def __secret(self, request: HttpRequest) -> HttpResponse:
            return pay(self, request)

        get = lock()(lambda self, request: pay(self, request))

        @lock()
        def _hidden(self, request: HttpRequest) -> HttpResponse:
            return pay(self, request)

        post = _hidden
        del _hidden

        def secret(self, request: HttpRequest) -> HttpResponse:
            return self.__secret(request)

    class Page(View):
        get = lock()(Shop.post)

    request = RequestFactory().get("/")
    for method in (Shop().secret, Shop().get, Shop().post, Page().get):
        assert method(request).status_code == 423


def test_function_becomes_a_method(site: Site, lock: Any, elsewhere: Lease) -> None:
    """A method is known by its class, too, if the function was made outside of it."""
    locked = lock()(pay)

    class Page(View):
        get = locked
        post = pay

    class Outer(View):
        def get(self, request: HttpRequest) -> Any:
            return locked(self, request)

    shop = type("Shop", (), {"get": locked})()
    for view in (Page.as_view(), shop.get):
        assert site.serve(view).get("/").status_code == 423
    response = site.serve(Outer.as_view()).get("/")
    assert response.exc_info[0] is LockTimeout


@pytest.mark.parametrize("atomic", [False, True])
def test_sync_method_of_an_async_view(site: Site, lock: Any, atomic: bool) -> None:
    """A sync method runs in the thread that an async view calls it in."""

    class Page(View):
        @lock(atomic=atomic)
        def pay(self, request: HttpRequest) -> bytes:
            return inside(request).content

        async def get(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse(await sync_to_async(self.pay)(request))

    for ask in (
        site.serve(Page.as_view()).get,
        async_to_sync(site.aserve(Page.as_view()).get),
    ):
        assert b"inside" in ask("/").content


def test_class_property(lock: Any) -> None:
    """A property of a class isn't asked for its value by the search for a request."""

    class Shop:
        @classproperty
        @lock(timeout=0)
        def keys(cls) -> str:
            return current_lease().key

    assert Shop.keys


def test_static_helper(lock: Any, elsewhere: Lease) -> None:
    """A second argument that is a request makes no view of what isn't a method."""

    class Shop:
        @staticmethod
        @lock()
        def pay(order: str, request: HttpRequest) -> HttpResponse:
            return inside(request)

    with pytest.raises(LockTimeout):
        Shop.pay("order", RequestFactory().get("/"))


@pytest.mark.parametrize("async_view", [False, True], ids=["sync", "async"])
def test_method_as_a_helper(
    site: Site, lock: Any, elsewhere: Lease, async_view: bool
) -> None:
    """So does a method that a view calls itself: its caller isn't Django."""

    class Page(View):
        @lock()
        def pay(self, request: HttpRequest) -> HttpResponse:
            return inside(request)

        def get(self, request: HttpRequest) -> HttpResponse:
            assert self.pay(request)
            return HttpResponse("done")

    class Async(View):
        @lock()
        async def pay(self, request: HttpRequest) -> HttpResponse:
            return inside(request)

        async def get(self, request: HttpRequest) -> HttpResponse:
            assert await self.pay(request)
            return HttpResponse("done")

    response = site.serve((Async if async_view else Page).as_view()).get("/")
    assert response.exc_info[0] is LockTimeout


def test_class_as_a_helper_of_a_class(site: Site, lock: Any, elsewhere: Lease) -> None:
    """So does a class-based view that another one calls."""
    helper = on_class(Plain, lock())

    class Outer(View):
        @method_decorator(never_cache)
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

        def get(self, request: HttpRequest) -> HttpResponse:
            helper(request)
            return HttpResponse("done")

    response = site.serve(Outer.as_view()).get("/")
    assert response.exc_info[0] is LockTimeout


def test_class_of_the_same_base_as_a_helper(
    site: Site, lock: Any, elsewhere: Lease
) -> None:
    """Nor is a view taken for another one that shares its dispatch."""
    base: Any = type(
        "Base", (Plain,), {"dispatch": method_decorator(never_cache)(View.dispatch)}
    )
    helper = lock()(base.as_view())

    class Outer(base):  # type: ignore[misc]
        def get(self, request: HttpRequest) -> HttpResponse:
            helper(request)
            return HttpResponse("done")

    response = site.serve(Outer.as_view()).get("/")
    assert response.exc_info[0] is LockTimeout


def test_skipped_helper(site: Site, lock: Any, elsewhere: Lease) -> None:
    """A helper may be skipped, though it gets a request."""
    helper = lock(on_locked="skip")(inside)
    assert site.serve(helped(helper)).get("/").content == b"done"


def test_no_resolver_match(lock: Any, elsewhere: Lease) -> None:
    """A request that no URL has been found for is a view's (as RequestFactory's)."""
    response = lock()(inside)(RequestFactory().get("/"))
    assert response.status_code == 423


def charge(amount: int, request: HttpRequest) -> HttpResponse:
    """A function whose first argument isn't a request."""
    return inside(request)


def test_request_in_second_place(lock: Any, elsewhere: Lease) -> None:
    """A function that gets a request after something else is no view."""
    with pytest.raises(LockTimeout):
        lock()(charge)(5, RequestFactory().get("/"))


def test_request_by_name(lock: Any, elsewhere: Lease) -> None:
    """Nor is one that gets it by name, as Django never calls a view."""
    with pytest.raises(LockTimeout):
        lock()(inside)(request=RequestFactory().get("/"))


def test_no_request(lock: Any, elsewhere: Lease) -> None:
    """Without a request a call is no view's."""
    with pytest.raises(LockTimeout):
        lock()(inside)(None)


def test_hidden_view(site: Site, lock: Any, elsewhere: Lease) -> None:
    """Below a decorator that hides the view it can't be told from a helper."""
    response = site.serve(hide(lock()(inside))).get("/")
    assert response.exc_info[0] is LockTimeout


def test_view_that_calls_itself(site: Site, lock: Any) -> None:
    """A view may call itself: its own lock is no obstacle."""

    @lock()
    def view(request: HttpRequest, depth: int = 2) -> HttpResponse:
        return view(request, depth - 1) if depth else inside(request)

    assert site.serve(view).get("/").content == b"inside"


# The middleware


@pytest.mark.parametrize("kind", ["function", "class", "async", "REST"])
def test_middleware(
    ask: Any, settings: Any, lock: Any, elsewhere: Lease, kind: str, key: str
) -> None:
    """A LockTimeout that escapes any view is answered like a decorated view's."""
    settings.MIDDLEWARE = ["tests.support.web.signed_in", MIDDLEWARE]

    def function(request: HttpRequest) -> HttpResponse:
        with lock():
            raise AssertionError

    async def afunction(request: HttpRequest) -> HttpResponse:
        async with lock():
            raise AssertionError

    class ByClass(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return function(request)

    view = {
        "function": function,
        "class": ByClass.as_view(),
        "async": afunction,
        "REST": api_view(["GET"])(function),
    }[kind]
    response = ask(view, accept="application/json")
    assert response.status_code == 423
    assert 15 <= int(response["Retry-After"]) <= 60
    assert key not in response.content.decode()


def test_middleware_and_other_errors(site: Site, settings: Any) -> None:
    """Other errors pass the middleware."""
    settings.MIDDLEWARE = [MIDDLEWARE]

    def broken(request: HttpRequest) -> HttpResponse:
        raise ZeroDivisionError

    assert site.serve(broken).get("/").exc_info[0] is ZeroDivisionError


@MAIN_ASYNC_VIEWS
def test_template_that_asks_the_database(
    ask: Any, settings: Any, lock: Any, make: Any, elsewhere: Lease
) -> None:
    """An async view's 423.html may need the database, as a base template does."""
    settings.MIDDLEWARE = ["tests.support.web.lazily_signed_in"]
    use_template(settings, "{{ user.real }} has to wait")
    response = ask(make(lock()))
    assert (response.status_code, response.content) == (423, b"0 has to wait")


# Work after the view


def streaming(request: HttpRequest) -> Any:
    """Answer little by little."""
    return StreamingHttpResponse(iter(["a", "b"]))


def file(request: HttpRequest) -> Any:
    """Answer with a file."""
    return FileResponse(open(__file__, "rb"))


def unrendered(request: HttpRequest) -> Any:
    """Answer with what is rendered later."""
    return TemplateResponse(request, "423.html", {})


def rendered(request: HttpRequest) -> Any:
    """Answer with what has been rendered."""
    return unrendered(request).render()


async def astreaming(request: HttpRequest) -> Any:
    """Answer little by little, asynchronously."""
    return streaming(request)


LATE = [streaming, file, unrendered, astreaming]


def warned_by(site: Site, view: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        response = site.serve(view).get("/", headers={"accept": "application/json"})
        assert response.status_code == 200, response.exc_info
        response.close()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


@pytest.mark.parametrize("view", LATE)
def test_late_work_in_debug_mode(
    site: Site, settings: Any, lock: Any, view: Any
) -> None:
    """In debug mode a response whose work comes after the release is warned about."""
    settings.DEBUG = True
    use_template(settings, "page")
    (message,) = warned_by(site, lock()(view))
    assert view.__name__ in message
    assert "released" in message


@pytest.mark.parametrize("view", LATE)
def test_late_work_in_production(
    site: Site, settings: Any, lock: Any, view: Any
) -> None:
    """Otherwise nothing is said."""
    use_template(settings, "page")
    assert warned_by(site, lock()(view)) == []


QUIET: dict[str, Callable[[Any], Any]] = {
    "plain": lambda lock: lock(inside),
    "rendered": lambda lock: lock(rendered),
    "REST": lambda lock: lock(api_view(["GET"])(rest)),
    "REST below": lambda lock: api_view(["GET"])(lock(rest)),
}


@pytest.mark.parametrize("make", QUIET.values(), ids=QUIET)
def test_no_late_work(site: Site, settings: Any, lock: Any, make: Any) -> None:
    """A response that is complete when the view returns is no cause for a warning."""
    settings.DEBUG = True
    use_template(settings, "page")
    assert warned_by(site, make(lock())) == []


# The session


def changes_session(request: HttpRequest) -> Any:
    """Count in the session."""
    request.session["n"] = request.session.get("n", 0) + 1
    return HttpResponse("counted")


def saves_session(request: HttpRequest) -> Any:
    """Count in the session, and save it under the lock."""
    response = changes_session(request)
    request.session.save()
    request.session.modified = False
    return response


def renews_session(request: HttpRequest) -> Any:
    """Save the session under another key, which the visitor must be told."""
    response = changes_session(request)
    request.session.cycle_key()
    request.session.modified = True
    return response


def reads_session(request: HttpRequest) -> Any:
    """Look at the session."""
    return HttpResponse(str(request.session.get("n")))


def session_changed_above(view: Any) -> Any:
    """Change the session before the lock is taken."""

    def outer(request: HttpRequest) -> Any:
        changes_session(request)
        return view(request)

    return outer


SESSION = "django.contrib.sessions.middleware.SessionMiddleware"
SIGNED_COOKIES = "django.contrib.sessions.backends.signed_cookies"
FORMS: dict[str, Callable[[str], Any]] = {
    "lease": lambda key: distributed_lock(key, timeout=0),
    "row": lambda key: row_lock(key, timeout=0),
}


@pytest.fixture
def sessions(site: Site, settings: Any) -> None:
    """Give visitors sessions, without a table, in debug mode."""
    settings.DEBUG = True
    settings.MIDDLEWARE = [SESSION]
    settings.SESSION_ENGINE = SIGNED_COOKIES


async def achanges_session(request: HttpRequest) -> Any:
    """Count in the session, asynchronously."""
    return changes_session(request)


class ChangesSession(View):
    """Counts in the session, as a class."""

    def get(self, request: HttpRequest) -> Any:
        """Do it."""
        return changes_session(request)


def api_changes_session(request: Any) -> Response:
    """Count in the session, for the REST framework."""
    changes_session(request)
    return Response({})


MODIFYING: dict[str, Callable[[Any], Any]] = {
    "function": lambda lock: lock(changes_session),
    "async": lambda lock: lock(achanges_session),
    "class": lambda lock: method_decorator(lock, name="dispatch")(
        type("Counts", (ChangesSession,), {})
    ).as_view(),
    "REST": lambda lock: lock(api_view(["GET"])(api_changes_session)),
    "REST below": lambda lock: api_view(["GET"])(lock(api_changes_session)),
}


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize("make", MODIFYING.values(), ids=MODIFYING)
def test_session_is_saved_too_late(site: Site, lock: Any, make: Any) -> None:
    """In debug mode a view that leaves a modified session behind is warned about."""
    (message,) = warned_by(site, make(lock()))
    assert "session" in message
    assert "released" in message


@pytest.mark.usefixtures("sessions")
def test_session_is_saved_too_late_for_a_row_lock(site: Site, key: str) -> None:
    """The row is free by then as well."""
    (message,) = warned_by(site, row_lock(key)(changes_session))
    assert "changes_session" in message


SPARING: dict[str, Callable[[Any], Any]] = {
    "saved": lambda lock: lock(saves_session),
    "renewed": lambda lock: lock(renews_session),
    "read": lambda lock: lock(reads_session),
    "changed above": lambda lock: session_changed_above(lock(reads_session)),
    "undecorated": lambda lock: changes_session,
}


@pytest.mark.usefixtures("sessions")
@pytest.mark.parametrize("make", SPARING.values(), ids=SPARING)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_session_is_left_alone(site: Site, key: str, make: Any, form: Any) -> None:
    """A session that is saved under the lock, or not its view's, is no cause for it."""
    assert warned_by(site, make(form(key))) == []


@pytest.mark.usefixtures("sessions")
def test_session_in_production(site: Site, settings: Any, lock: Any) -> None:
    """Otherwise nothing is said."""
    settings.DEBUG = False
    assert warned_by(site, lock()(changes_session)) == []


@pytest.mark.usefixtures("sessions")
def test_no_sessions(site: Site, settings: Any, lock: Any) -> None:
    """A project may have none."""
    settings.MIDDLEWARE = []
    assert warned_by(site, lock()(inside)) == []


# Keys that read


def accounts(request: HttpRequest) -> str:
    """Make a key from data."""
    return f"accounts:{Account.objects.count()}"


@pytest.mark.parametrize(
    ("form", "function"),
    [(distributed_lock, inside), (distributed_lock, ainside), (row_lock, inside)],
    ids=["distributed_lock", "async", "transaction_lock"],
)
@pytest.mark.parametrize(
    "text", [accounts, "basket:{request.user.real}"], ids=["callable", "template"]
)
def test_key_that_reads(
    site: Site, settings: Any, form: Any, function: Any, text: Any
) -> None:
    """In debug mode a key is warned about that is made of what a query reads."""
    settings.DEBUG = True
    settings.MIDDLEWARE = ["tests.support.web.lazily_signed_in"]
    (message,) = warned_by(site, form(text)(function))
    assert "inside" in message
    assert "SELECT" in message


def test_note_that_reads(site: Site, settings: Any, lock: Any) -> None:
    """A note is made before the lock is taken as well."""
    settings.DEBUG = True
    (message,) = warned_by(site, lock(note=accounts)(inside))
    assert "note" in message


def test_key_that_reads_in_production(site: Site, lock: Any) -> None:
    """Otherwise nothing is said."""
    assert warned_by(site, lock(key=accounts)(inside)) == []


@pytest.mark.parametrize("function", [inside, ainside])
def test_key_of_who_asks(site: Site, settings: Any, function: Any) -> None:
    """Who is signed in, and with which session, isn't what a lock protects."""
    settings.DEBUG = True
    settings.MIDDLEWARE = [
        SESSION,
        "django.contrib.auth.middleware.AuthenticationMiddleware",
    ]
    user = User.objects.create_user("somebody")
    view = distributed_lock("user:{request.user.pk}")(function)
    client = site.serve(view)
    client.force_login(user)
    try:
        with CaptureQueriesContext(connection) as queries:
            response = client.get("/")
    finally:
        user.delete()
        Session.objects.all().delete()
    assert response.status_code == 200, response.exc_info
    assert any("auth_user" in query["sql"] for query in queries)


# The pessimistic form


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS)
def test_row_lock(ask: Any, key: str, make: Any) -> None:
    """A view with a transaction_lock answers 423 in the same way."""
    view = make(row_lock(key, timeout=0))
    with hold_elsewhere(key):
        response = ask(view, accept="application/json")
        assert response.status_code == 423
        assert int(response["Retry-After"]) >= 1
    response = ask(view, accept="application/json")
    assert response.status_code == 200, response.content
    assert b"inside" in response.content


def test_row_lock_as_a_helper(site: Site, key: str, elsewhere: Lease) -> None:
    """A view with a transaction_lock that another view calls raises."""
    response = site.serve(helped(row_lock(key, timeout=0)(inside))).get("/")
    assert response.exc_info[0] is LockTimeout


@pytest.mark.parametrize(
    "make",
    [make for name, make in MAIN_KINDS.items() if name in VIEWS],
    ids=[name for name in MAIN_KINDS if name in VIEWS],
)
def test_row_lock_skipped(ask: Any, key: str, make: Any) -> None:
    """A view must answer, so skip_locked is refused there."""
    response = ask(make(row_lock(key, skip_locked=True)), accept="application/json")
    assert response.exc_info[0] is TypeError
    assert "skip_locked" in str(response.exc_info[1])
