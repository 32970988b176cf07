"""``ATOMIC_REQUESTS``: the lock is taken before the transaction, freed after it."""

from __future__ import annotations

import sqlite3
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import wraps
from threading import Event
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.contrib.auth.decorators import login_required
from django.db import connection, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper
from django.http import HttpRequest, HttpResponse
from django.test.utils import CaptureQueriesContext
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import api_view
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from dblocks import LeaseLost, clock, current_lease, distributed_lock
from dblocks import transaction_lock as row_lock
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support.factories import AccountFactory, let_expire
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, eventually
from tests.support.web import Server, Site
from tests.testapp.models import Account

Taken = Callable[[], bool]


@pytest.fixture(autouse=True)
def atomic(atomic_requests: Callable[..., None]) -> None:
    """Every request is a transaction on the default database."""
    atomic_requests("default")


@pytest.fixture
def taken(key: str, other: OtherThread) -> Taken:
    """Ask from another thread whether the test's key is taken."""
    return lambda: bool(other.do(distributed_lock(key).locked))


def trace(queries: Any) -> list[str]:
    """Return what kinds of statements ran, in order, repetitions left out."""
    kinds: list[str] = []
    for query in queries:
        sql = query["sql"].upper()
        words = {
            "DBLOCKS_DISTRIBUTEDLOCK": "lock",
            "TESTAPP_ACCOUNT": "data",
            "BEGIN": "begin",
            "COMMIT": "commit",
            "ROLLBACK": "rollback",
        }
        kind = next((kind for word, kind in words.items() if word in sql), None)
        if kind is not None and kinds[-1:] != [kind]:
            kinds.append(kind)
    return kinds


#: What the views do besides, given by ``in_view``.
deeds: list[Callable[[], object]] = []


@pytest.fixture
def in_view() -> Iterator[list[Callable[[], object]]]:
    """Return what the views do besides, at their end."""
    yield deeds
    deeds.clear()


def add_one(request: Any = None, **kwargs: Any) -> HttpResponse:
    """Add an account, in a transaction and under a lock."""
    current_lease().check()
    assert connection.in_atomic_block
    AccountFactory(name="mine")
    for deed in list(deeds):
        deed()
    return HttpResponse("added")


def added() -> bool:
    return Account.objects.filter(name="mine").exists()


class AddOne(View):
    """A class-based view that adds an account."""

    def get(self, request: HttpRequest) -> HttpResponse:
        return add_one(request)


class RestAddOne(APIView):
    """REST framework's."""

    def get(self, request: Any) -> Response:
        add_one(request)
        return Response("added")


def rest_add_one(request: Any) -> Response:
    """A function for REST framework."""
    add_one(request)
    return Response("added")


def by_name(base: Any, *decorators: Any) -> Any:
    """Decorate ``dispatch`` of a new class."""
    new = type("ByName", (base,), {})
    return method_decorator(list(decorators), name="dispatch")(new).as_view()


def own_dispatch(lock: Any) -> Any:
    """Decorate a ``dispatch`` of the class's own, as the function that it is."""

    class OwnDispatch(AddOne):
        @lock
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

    return OwnDispatch.as_view()


#: Views whose lock is taken before the transaction begins.
WHOLE: dict[str, Callable[[Any], Any]] = {
    "function": lambda lock: lock(add_one),
    "below csrf_exempt": lambda lock: csrf_exempt(lock(add_one)),
    "above csrf_exempt": lambda lock: lock(csrf_exempt(add_one)),
    "below login_required": lambda lock: login_required(lock(add_one)),
    "above login_required": lambda lock: lock(login_required(add_one)),
    "below never_cache": lambda lock: never_cache(lock(add_one)),
    "above never_cache": lambda lock: lock(never_cache(add_one)),
    "all at once": lambda lock: csrf_exempt(
        login_required(lock(never_cache(csrf_exempt(add_one))))
    ),
    "class, dispatch by name": lambda lock: by_name(AddOne, lock),
    "class, own dispatch": own_dispatch,
    "class, above never_cache": lambda lock: by_name(AddOne, lock, never_cache),
    "class, below never_cache": lambda lock: by_name(AddOne, never_cache, lock),
    "class, above as_view": lambda lock: lock(AddOne.as_view()),
    "class, below csrf_exempt": lambda lock: csrf_exempt(by_name(AddOne, lock)),
    "REST function, above": lambda lock: lock(api_view(["GET"])(rest_add_one)),
    "REST class, dispatch": lambda lock: by_name(RestAddOne, lock),
    "REST class, above as_view": lambda lock: lock(RestAddOne.as_view()),
}
WHOLE_VIEWS = pytest.mark.parametrize("make", WHOLE.values(), ids=WHOLE)


MAIN = {
    name: WHOLE[name]
    for name in [
        "function",
        "all at once",
        "class, dispatch by name",
        "REST function, above",
        "REST class, dispatch",
    ]
}
MAIN_VIEWS = pytest.mark.parametrize("make", MAIN.values(), ids=MAIN)


@pytest.fixture
def signed_in(settings: Any, site: Site) -> None:
    """Somebody is signed in."""
    settings.MIDDLEWARE = ["tests.support.web.signed_in"]


# The order


@WHOLE_VIEWS
@pytest.mark.usefixtures("signed_in")
def test_order(site: Site, key: str, make: Any, taken: Taken) -> None:
    """Lock, begin, view, guard, commit, release: in this order, without a warning."""
    client = site.serve(make(distributed_lock(key, timeout=0)))
    with CaptureQueriesContext(connection) as queries:
        response = client.get("/", headers={"accept": "application/json"})
    assert response.status_code == 200, response.content
    assert trace(queries) == [
        *("lock", "begin", "data", "lock", "commit", "lock"),
    ], [query["sql"] for query in queries]
    assert added()
    assert not taken()


def test_hooks_run_before_the_release(site: Site, key: str, taken: Taken) -> None:
    """on_commit hooks run after the commit, with the key still taken."""
    seen: list[tuple[bool, bool]] = []

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: seen.append((taken(), added())))
        return add_one()

    assert site.serve(view).get("/").status_code == 200
    assert seen == [(True, True)]
    assert not taken()


@pytest.fixture
def slow_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Let each commit take its time; the list tells when each one was through."""
    original = BaseDatabaseWrapper.commit
    done: list[float] = []

    def commit(self: BaseDatabaseWrapper) -> None:
        time.sleep(0.2)
        original(self)
        done.append(time.monotonic())

    monkeypatch.setattr(BaseDatabaseWrapper, "commit", commit)
    return done


@pytest.mark.parametrize("make", [WHOLE["function"], WHOLE["class, dispatch by name"]])
def test_two_requests_at_once(
    server: Server, key: str, slow_commit: list[float], make: Any
) -> None:
    """Of two requests over HTTP the second never sees what the first one found.

    The commits are slow, so that a lock freed before its commit is caught at it.
    """
    account = AccountFactory()
    views: list[tuple[float, int]] = []

    def add(request: HttpRequest) -> HttpResponse:
        balance = Account.objects.get(pk=account.pk).balance
        views.append((time.monotonic(), balance))
        Account.objects.filter(pk=account.pk).update(balance=balance + 1)
        return HttpResponse("added")

    class Add(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            return add(request)

    lock = distributed_lock(key, timeout=DEADLINE)
    view = lock(add) if make is WHOLE["function"] else by_name(Add, lock)
    server.site.serve(view)
    answers = [server.start("/") for _ in range(2)]
    assert [answer.result(DEADLINE).status for answer in answers] == [200, 200]
    account.refresh_from_db()
    assert account.balance == 2
    assert [balance for _, balance in views] == [0, 1]
    assert slow_commit[0] < views[1][0]


def test_busy_over_http(server: Server, key: str) -> None:
    """While one request is in its transaction, another one is told to come again."""
    begun, leave = Event(), Event()

    @distributed_lock(key, timeout=0)
    def view(request: HttpRequest) -> HttpResponse:
        begun.set()
        assert leave.wait(DEADLINE)
        return add_one()

    server.site.serve(view)
    first = server.start()
    try:
        eventually(begun.is_set, what="the first request")
        second = server.get()
    finally:
        leave.set()
    assert second.status == 423
    assert int(second.headers["Retry-After"]) >= 1
    assert first.result(DEADLINE).status == 200
    assert server.get().status == 200


# The guard


def force(key: str) -> None:
    """Take the lock away by force."""
    assert DistributedLock.objects.force_release(key)


def replace(key: str) -> None:
    """Let the lease run out and somebody else take the lock."""
    let_expire(key)
    distributed_lock(key, owner="somebody else").acquire(timeout=0).release()


@pytest.fixture(params=[force, replace])
def robbed(
    request: pytest.FixtureRequest, key: str, other: OtherThread, in_view: list[Any]
) -> None:
    """Let the lock be lost while the view is in its transaction."""
    if connection.vendor != "sqlite":
        in_view.append(lambda: other.do(request.param, key))
    elif request.param is force:
        in_view.append(lambda: force(key))
    else:
        pytest.skip("SQLite has one writer: nobody takes over during a transaction")


@MAIN_VIEWS
@pytest.mark.usefixtures("signed_in", "robbed")
def test_robbed(site: Site, key: str, make: Any) -> None:
    """A view that lost its lock can't commit: 500, and nothing was changed."""
    view = make(distributed_lock(key, renew=False))
    response = site.serve(view).get("/", headers={"accept": "application/json"})
    assert response.status_code == 500
    assert response.exc_info[0] is LeaseLost
    assert not added()


def test_guard_is_final(site: Site, key: str, in_view: list[Any]) -> None:
    """What the guard let through and was committed is no LeaseLost afterwards."""
    in_view.append(
        lambda: transaction.on_commit(
            lambda: DistributedLock.objects.force_release(key)
        )
    )
    response = site.serve(distributed_lock(key, renew=False)(add_one)).get("/")
    assert response.status_code == 200
    assert added()


@MAIN_VIEWS
@pytest.mark.parametrize("lost", [False, True], ids=["held", "lost"])
@pytest.mark.usefixtures("signed_in")
def test_marked_for_rollback(
    site: Site, key: str, make: Any, in_view: list[Any], lost: bool
) -> None:
    """A transaction that will be rolled back isn't guarded; a loss is still told."""
    in_view.append(lambda: transaction.set_rollback(True))
    if lost:
        # In the view, however long it took to get there.
        in_view.append(lambda: clock.advance(31))
        in_view.append(lambda: eventually(lambda: not current_lease(key).held))
    view = make(distributed_lock(key, lease=30, renew=False))
    client = site.serve(view)
    with CaptureQueriesContext(connection) as queries:
        response = client.get("/", headers={"accept": "application/json"})
    assert response.status_code == (500 if lost else 200)
    if lost:
        assert response.exc_info[0] is LeaseLost
    kinds = trace(queries)
    assert kinds[kinds.index("begin") + 1 : kinds.index("rollback")] == ["data"]
    assert not added()


# The ends of a transaction


@MAIN_VIEWS
@pytest.mark.usefixtures("signed_in")
def test_exception(
    site: Site, key: str, make: Any, taken: Taken, in_view: list[Any]
) -> None:
    """A view's exception rolls its transaction back and frees the key."""

    def fail() -> None:
        raise ZeroDivisionError

    in_view.append(fail)
    view = make(distributed_lock(key))
    response = site.serve(view).get("/", headers={"accept": "application/json"})
    assert response.exc_info[0] is ZeroDivisionError
    assert not added()
    assert not taken()


@pytest.mark.parametrize(
    "call",
    [
        lambda view, request: view(request=request),
        lambda view, request: view("first", request),
    ],
    ids=["by name", "second"],
)
def test_request_that_a_decorator_passes_on(site: Site, key: str, call: Any) -> None:
    """The view's transaction doesn't depend on how it is given the request."""

    def view(*args: Any, **kwargs: Any) -> HttpResponse:
        add_one()
        raise ZeroDivisionError

    locked = distributed_lock(key)(view)
    above = wraps(locked)(lambda request: call(locked, request))
    response = site.serve(above).get("/", headers={"accept": "application/json"})
    assert response.exc_info[0] is ZeroDivisionError
    assert not added()


@pytest.mark.parametrize(
    "make",
    [
        WHOLE["REST function, above"],
        WHOLE["REST class, dispatch"],
        WHOLE["REST class, above as_view"],
    ],
)
def test_exception_that_rest_framework_answers(
    site: Site, key: str, make: Any, taken: Taken, in_view: list[Any]
) -> None:
    """REST framework's own errors roll back too: it marks the transaction."""

    def refuse() -> None:
        raise ValidationError("no")

    in_view.append(refuse)
    view = make(distributed_lock(key))
    response = site.serve(view).get("/", headers={"accept": "application/json"})
    assert response.status_code == 400
    assert not added()
    assert not taken()


def test_set_rollback(site: Site, key: str, taken: Taken) -> None:
    """set_rollback() undoes the view's work; its answer is sent."""

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        response = add_one()
        transaction.set_rollback(True)
        return response

    response = site.serve(view).get("/")
    assert (response.status_code, response.content) == (200, b"added")
    assert not added()
    assert not taken()


def test_savepoints(site: Site, key: str) -> None:
    """A block inside that is rolled back is not the transaction's end."""

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        try:
            with transaction.atomic():
                AccountFactory(name="undone")
                raise ZeroDivisionError
        except ZeroDivisionError:
            pass
        return add_one()

    assert site.serve(view).get("/").status_code == 200
    assert added()
    assert not Account.objects.filter(name="undone").exists()


def test_durable_block(site: Site, key: str) -> None:
    """A durable block in the view stays Django's own error."""

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        with transaction.atomic(durable=True):
            return add_one()

    response = site.serve(view).get("/")
    assert response.exc_info[0] is RuntimeError
    assert "durable" in str(response.exc_info[1])


def test_explicit_release(site: Site, key: str, taken: Taken) -> None:
    """release() in the view keeps the key until the commit, guarded as before."""
    seen: list[bool] = []

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        assert current_lease(key).release() is True
        transaction.on_commit(lambda: seen.append(taken()))
        AccountFactory(name="mine")
        return HttpResponse()

    assert site.serve(view).get("/").status_code == 200
    assert seen == [True]
    assert added()
    assert not taken()


def test_atomic_as_well(site: Site, key: str, taken: Taken) -> None:
    """atomic=True is one transaction with the request's."""
    seen: list[bool] = []

    @distributed_lock(key, atomic=True)
    def view(request: HttpRequest) -> HttpResponse:
        transaction.on_commit(lambda: seen.append(taken()))
        return add_one()

    assert site.serve(view).get("/").status_code == 200
    assert seen == [True]
    assert not taken()


def test_locked_out(site: Site, key: str) -> None:
    """Who is locked out begins no transaction."""
    client = site.serve(distributed_lock(key, timeout=0)(add_one))
    with hold_elsewhere(key), CaptureQueriesContext(connection) as queries:
        assert client.get("/").status_code == 423
    assert "begin" not in trace(queries)


# A request twice


def twice(get_response: Any) -> Any:
    """Middleware: try again after an error."""

    def middleware(request: HttpRequest) -> Any:
        response = get_response(request)
        return get_response(request) if response.status_code == 500 else response

    return middleware


def test_second_attempt(site: Site, settings: Any, key: str, in_view: Any) -> None:
    """A request that a middleware sends again is a transaction again."""
    settings.MIDDLEWARE = [f"{__name__}.twice"]

    def fail_once() -> None:
        in_view.clear()
        raise ZeroDivisionError

    in_view.append(fail_once)
    assert site.serve(distributed_lock(key)(add_one)).get("/").status_code == 200
    assert Account.objects.filter(name="mine").count() == 1


# Which databases


@pytest.mark.parametrize("above", [True, False], ids=["above", "below"])
def test_non_atomic_requests(site: Site, key: str, above: bool) -> None:
    """A view that wants no transaction has none, and its lock."""

    def view(request: HttpRequest) -> HttpResponse:
        current_lease(key).check()
        return HttpResponse(str(connection.in_atomic_block))

    lock = distributed_lock(key)
    if above:
        locked = transaction.non_atomic_requests(lock(view))
    else:
        locked = lock(transaction.non_atomic_requests(view))
    assert site.serve(locked).get("/").content == b"False"


@pytest.mark.parametrize("above", [True, False], ids=["above", "below"])
def test_non_atomic_class(site: Site, key: str, above: bool) -> None:
    """The same for a class-based view."""

    class NonAtomic(View):
        def get(self, request: HttpRequest) -> HttpResponse:
            current_lease(key).check()
            return HttpResponse(str(connection.in_atomic_block))

    decorators = [transaction.non_atomic_requests, distributed_lock(key)]
    view = by_name(NonAtomic, *(decorators if above else decorators[::-1]))
    assert site.serve(view).get("/").content == b"False"


@pytest.fixture
def two_databases(atomic_requests: Callable[..., None]) -> Iterator[None]:
    """Every request is a transaction on two databases."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    atomic_requests("locks")
    yield
    with connections["locks"].cursor() as cursor:
        for model in (Account, DistributedLock):
            cursor.execute(f"DELETE FROM {model._meta.db_table}")


class Commits:
    """Notes which database commits when."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.order: list[str] = []
        original = BaseDatabaseWrapper.commit

        def commit(connection: BaseDatabaseWrapper) -> None:
            original(connection)
            if connection is connections[connection.alias]:
                self.order.append(connection.alias)

        monkeypatch.setattr(BaseDatabaseWrapper, "commit", commit)


@pytest.mark.parametrize("using", ["default", "locks"])
@pytest.mark.usefixtures("two_databases")
def test_locks_database_commits_last(
    site: Site, settings: Any, key: str, monkeypatch: pytest.MonkeyPatch, using: str
) -> None:
    """Of several databases the lock's own commits last, and all under the lock."""
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": using}}}
    commits = Commits(monkeypatch)

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        for alias in ("default", "locks"):
            assert connections[alias].in_atomic_block
            Account.objects.using(alias).create(name="mine")
        return HttpResponse()

    assert site.serve(view).get("/").status_code == 200
    assert commits.order == [
        *({"default", "locks"} - {using}),
        using,
    ]
    for alias in ("default", "locks"):
        assert Account.objects.using(alias).filter(name="mine").exists()
    assert not distributed_lock(key).locked()


@pytest.mark.parametrize("using", ["default", "locks"])
@pytest.mark.usefixtures("two_databases")
def test_robbed_of_two_databases(
    site: Site, settings: Any, key: str, using: str
) -> None:
    """A view that lost its lock commits on neither database."""
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": using}}}

    @distributed_lock(key, renew=False)
    def view(request: HttpRequest) -> HttpResponse:
        for alias in ("default", "locks"):
            Account.objects.using(alias).create(name="mine")
        DistributedLock.objects.using(using).force_release(key)
        return HttpResponse()

    assert site.serve(view).get("/").exc_info[0] is LeaseLost
    for alias in ("default", "locks"):
        assert not Account.objects.using(alias).filter(name="mine").exists()


@pytest.mark.parametrize("rob", [False, True], ids=["held", "robbed"])
@pytest.mark.usefixtures("two_databases", "two_writers")
def test_only_the_locks_database_is_rolled_back(
    site: Site, settings: Any, key: str, other: OtherThread, rob: bool
) -> None:
    """The guard holds for the database that commits, whatever becomes of the lock's."""
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}

    @distributed_lock(key, renew=False)
    def view(request: HttpRequest) -> HttpResponse:
        Account.objects.create(name="mine")
        if rob:
            other.do(DistributedLock.objects.using("locks").force_release, key)
        transaction.set_rollback(True, using="locks")
        return HttpResponse()

    response = site.serve(view).get("/")
    assert response.status_code == (500 if rob else 200)
    assert added() is not rob


@pytest.mark.usefixtures("two_databases", "readers_beside_a_writer")
def test_guard_that_cannot_be_asked(site: Site, key: str) -> None:
    """An old snapshot on the lock's database doesn't let another one commit."""
    if connection.vendor != "sqlite" or connection.settings_dict["OPTIONS"].get(
        "transaction_mode"
    ):
        pytest.skip("only a deferred transaction of SQLite can be too old to write")
    with connection.cursor() as cursor:
        cursor.execute("PRAGMA journal_mode")
        if cursor.fetchone()[0] != "wal":
            pytest.skip("with a rollback journal nobody writes beside a reader")

    @distributed_lock(key, lease=60)
    def view(request: HttpRequest) -> HttpResponse:
        Account.objects.count()
        with closing(sqlite3.connect(connection.settings_dict["NAME"])) as raw, raw:
            raw.execute("DELETE FROM testapp_account")
        Account.objects.using("locks").create(name="mine")
        return HttpResponse()

    assert site.serve(view).get("/").status_code == 500
    assert not Account.objects.using("locks").filter(name="mine").exists()


@pytest.mark.parametrize("excluded", ["default", "locks"])
@pytest.mark.usefixtures("two_databases")
def test_excluding_one_of_two(site: Site, key: str, excluded: str) -> None:
    """non_atomic_requests(using=…) excludes that database alone."""

    @transaction.non_atomic_requests(using=excluded)
    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        open_on = [a for a in ("default", "locks") if connections[a].in_atomic_block]
        return HttpResponse(" ".join(open_on))

    (expected,) = {"default", "locks"} - {excluded}
    assert site.serve(view).get("/").content.decode() == expected


@pytest.mark.parametrize("rob", [False, True], ids=["held", "robbed"])
def test_locks_in_a_database_of_their_own(
    site: Site, settings: Any, key: str, rob: bool, readers_beside_a_writer: None
) -> None:
    """Data in one database, locks in another: guarded too, on every database."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}
    seen: list[bool] = []

    @distributed_lock(key, renew=False)
    def view(request: HttpRequest) -> HttpResponse:
        if rob:
            DistributedLock.objects.using("locks").force_release(key)
        transaction.on_commit(lambda: seen.append(distributed_lock(key).locked()))
        return add_one()

    response = site.serve(view).get("/")
    assert response.status_code == (500 if rob else 200)
    assert added() is not rob
    assert seen == ([] if rob else [True])
    assert not distributed_lock(key).locked()


# Stacks and helpers


STACKS = {
    "function": lambda a, b: a(b(add_one)),
    "with a decorator between": lambda a, b: a(never_cache(b(add_one))),
    "class": lambda a, b: by_name(AddOne, a, b),
    "class, one after the other": lambda a, b: method_decorator(a, name="dispatch")(
        method_decorator(b, name="dispatch")(type("Twice", (AddOne,), {}))
    ).as_view(),
    "class and above": lambda a, b: a(by_name(AddOne, b)),
}


@pytest.mark.parametrize("make", STACKS.values(), ids=STACKS)
def test_stacked(site: Site, key: str, make: Any, in_view: list[Any]) -> None:
    """Both locks are taken before the transaction and freed after the commit."""
    keys = [key, key + "!"]
    seen: list[bool] = []

    def look() -> None:
        seen.extend(distributed_lock(one).locked() for one in keys)

    in_view.append(lambda: transaction.on_commit(look))
    view = make(*(distributed_lock(one, timeout=0) for one in keys))
    client = site.serve(view)
    with CaptureQueriesContext(connection) as queries:
        assert client.get("/").status_code == 200
    assert seen == [True, True]
    assert trace(queries)[:3] == ["lock", "begin", "data"]
    assert not any(distributed_lock(one).locked() for one in keys)
    for one in keys:
        with hold_elsewhere(one):
            assert client.get("/").status_code == 423


@pytest.mark.parametrize("make", STACKS.values(), ids=STACKS)
@pytest.mark.parametrize("lost", [0, 1], ids=["outer", "inner"])
def test_stacked_and_robbed(
    site: Site, key: str, make: Any, lost: int, in_view: list[Any]
) -> None:
    """Whichever of the two locks was lost, the view can't commit."""
    keys = [key, key + "!"]
    in_view.append(lambda: force(keys[lost]))
    view = make(*(distributed_lock(one, renew=False) for one in keys))
    assert site.serve(view).get("/").exc_info[0] is LeaseLost
    assert not added()


def test_helper_in_the_transaction(
    site: Site, two_writers: None, key: str, taken: Taken
) -> None:
    """A decorated view called as a helper keeps its lock until the commit."""
    seen: list[bool] = []
    helper = distributed_lock(key)(add_one)

    @distributed_lock(key + "!")
    def view(request: HttpRequest) -> HttpResponse:
        helper(request)
        seen.append(taken())
        transaction.on_commit(lambda: seen.append(taken()))
        return HttpResponse()

    assert site.serve(view).get("/").status_code == 200
    assert seen == [True, True]
    assert added()
    assert not taken()


def test_helper_of_the_same_lock(site: Site, key: str, taken: Taken) -> None:
    """A helper under the same lock re-enters it, on every database."""
    helper = distributed_lock(key)(add_one)

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        helper(request)
        transaction.set_rollback(True)
        return HttpResponse()

    assert site.serve(view).get("/").status_code == 200
    assert not added()
    assert not taken()


def test_view_in_a_row_lock(site: Site, key: str) -> None:
    """transaction_lock below distributed_lock joins its transaction."""
    view = distributed_lock(key)(row_lock(key + "!")(add_one))
    assert site.serve(view).get("/").status_code == 200
    assert added()


# Where the transaction can't wait for the lock


def one_method(lock: Any) -> Any:
    """Decorate one method."""
    return type("OneMethod", (AddOne,), {"get": lock(AddOne.get)}).as_view()


def one_method_by_name(lock: Any) -> Any:
    """Decorate one method in Django's way."""
    new = type("OneMethod", (AddOne,), {"get": AddOne.get})
    return method_decorator(lock, name="get")(new).as_view()


def around_dispatch(lock: Any) -> Any:
    """Decorate a class below one that has a ``dispatch`` of its own."""

    class Below(method_decorator(lock, name="dispatch")(type("B", (AddOne,), {}))):  # type: ignore[misc]
        def dispatch(self, *args: Any, **kwargs: Any) -> Any:
            return super().dispatch(*args, **kwargs)

    return Below.as_view()


def hide(view: Any) -> Any:
    """A decorator that copies nothing."""

    def inner(request: HttpRequest) -> Any:
        return view(request)

    return inner


LATE: dict[str, Callable[[Any], Any]] = {
    "one method": one_method,
    "one method, by name": one_method_by_name,
    "dispatch below another": around_dispatch,
    "one method below a locked dispatch": lambda lock: by_name(
        one_method(lock).view_class, distributed_lock("above")
    ),
    "dispatch below another, locked": lambda lock: by_name(
        around_dispatch(lock).view_class, distributed_lock("above")
    ),
    "below api_view": lambda lock: api_view(["GET"])(lock(rest_add_one)),
    "below a decorator that hides it": lambda lock: hide(lock(add_one)),
}
LATE_VIEWS = pytest.mark.parametrize("make", LATE.values(), ids=LATE)


def advice(make: Any) -> str:
    """Return what a warning of a late lock says should be done."""
    if make is LATE["below api_view"]:
        return "Put it above @api_view."
    return "Decorate the whole view (for a class method_decorator("


def warned(site: Site, view: Any) -> tuple[Any, list[str]]:
    """Return the answer, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        response = site.serve(view).get("/", headers={"accept": "application/json"})
    return response, [
        str(one.message) for one in caught if one.category is RuntimeWarning
    ]


@LATE_VIEWS
@pytest.mark.usefixtures("two_writers")
def test_late_lock(
    site: Site, key: str, make: Any, taken: Taken, in_view: list[Any]
) -> None:
    """A lock taken inside the transaction is kept until its end, with a warning."""
    seen: list[bool] = []
    in_view.append(lambda: transaction.on_commit(lambda: seen.append(taken())))
    response, (message,) = warned(site, make(distributed_lock(key)))
    assert response.status_code == 200
    assert "ATOMIC_REQUESTS" in message
    assert advice(make) in message
    assert seen == [True]
    assert added()
    assert not taken()


@LATE_VIEWS
@pytest.mark.usefixtures("two_writers")
def test_late_lock_and_rollback(
    site: Site, key: str, make: Any, taken: Taken, in_view: list[Any]
) -> None:
    """It is freed at the end of a transaction that is rolled back, too."""
    seen: list[bool] = []
    in_view.append(lambda: transaction.set_rollback(True))
    in_view.append(lambda: seen.append(taken()))
    response, _ = warned(site, make(distributed_lock(key)))
    assert response.status_code == 200
    assert seen == [True]
    assert not added()
    assert not taken()


@LATE_VIEWS
def test_late_lock_on_sqlite(site: Site, key: str, make: Any) -> None:
    """SQLite can't take a lock inside a transaction: an error that says what to do."""
    if connection.vendor != "sqlite":
        pytest.skip("this database has many writers")
    response, (message,) = warned(site, make(distributed_lock(key)))
    assert response.status_code == 500
    assert response.exc_info[0] is transaction.TransactionManagementError
    assert "ATOMIC_REQUESTS" in message
    assert advice(make) in message
    assert not added()


def test_without_atomic_requests(
    site: Site, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ATOMIC_REQUESTS a view runs in no transaction, and nothing is said."""
    monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", False)

    @distributed_lock(key)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(str(connection.in_atomic_block))

    response, messages = warned(site, view)
    assert (response.content, messages) == (b"False", [])


@pytest.mark.usefixtures("two_writers")
def test_helper_of_an_undecorated_view(site: Site, key: str, taken: Taken) -> None:
    """Called in the transaction of an undecorated view, a lock is late as well."""
    seen: list[bool] = []
    helper = distributed_lock(key)(add_one)

    def view(request: HttpRequest) -> HttpResponse:
        helper(request)
        transaction.on_commit(lambda: seen.append(taken()))
        return HttpResponse()

    response, (message,) = warned(site, view)
    assert response.status_code == 200
    assert "ATOMIC_REQUESTS" in message
    assert seen == [True]
    assert not taken()


# Async views


async def adouble(request: HttpRequest) -> HttpResponse:
    """An async view."""
    return HttpResponse("async")


class ADouble(View):
    """An async class-based view."""

    async def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse("async")


ASYNC: dict[str, Callable[[Any], Any]] = {
    "function": lambda lock: lock(adouble),
    "function, below csrf_exempt": lambda lock: csrf_exempt(lock(adouble)),
    "class": lambda lock: by_name(ADouble, lock),
    "class, above csrf_exempt": lambda lock: by_name(ADouble, lock, csrf_exempt),
    "class, one method": lambda lock: type(
        "OneMethod", (ADouble,), {"get": lock(ADouble.get)}
    ).as_view(),
    "class, above as_view": lambda lock: lock(ADouble.as_view()),
    "class, twice": lambda lock: lock(by_name(ADouble, lock)),
}


@pytest.mark.parametrize("make", ASYNC.values(), ids=ASYNC)
@pytest.mark.parametrize("stack", ["WSGI", "ASGI"])
def test_async_views(site: Site, key: str, make: Any, stack: str) -> None:
    """Django can't make async views atomic, and says so of decorated ones as well."""
    view = make(distributed_lock(key, timeout=0))
    if stack == "WSGI":
        response = site.serve(view).get("/")
    else:
        response = async_to_sync(site.aserve(view).get)("/")
    assert response.status_code == 500
    assert response.exc_info[0] is RuntimeError
    assert "ATOMIC_REQUESTS" in str(response.exc_info[1])
    assert not distributed_lock(key).locked()


@pytest.mark.parametrize("make", ASYNC.values(), ids=ASYNC)
def test_async_views_excluded(site: Site, key: str, make: Any) -> None:
    """With non_atomic_requests they run, under their lock."""
    view = transaction.non_atomic_requests(make(distributed_lock(key, timeout=0)))
    response = async_to_sync(site.aserve(view).get)("/")
    assert (response.status_code, response.content) == (200, b"async")


def test_sync_view_on_an_async_stack(
    site: Site, key: str, in_view: list[Any], readers_beside_a_writer: None
) -> None:
    """A sync view that an async server runs in a thread is as atomic as ever."""
    seen: list[bool] = []
    look = distributed_lock(key)
    in_view.append(lambda: transaction.on_commit(lambda: seen.append(look.locked())))
    view = distributed_lock(key)(add_one)
    try:
        response = async_to_sync(site.aserve(view).get)("/")
        assert (response.status_code, seen) == (200, [True])
        assert added()
        assert not look.locked()
    finally:
        async_to_sync(sync_to_async(connections.close_all))()
