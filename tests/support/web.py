"""Requests: a site of the test's own views, asked directly or over HTTP."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.contrib.staticfiles.handlers import StaticFilesHandler
from django.db import connections
from django.http import HttpRequest, HttpResponse
from django.test import AsyncClient, Client
from django.test.testcases import LiveServerThread
from django.urls import path
from django.utils.functional import SimpleLazyObject

from tests.support.fixtures import OtherThread, in_memory
from tests.support.timing import DEADLINE
from tests.testapp.models import Account

View = Callable[..., Any]


class Site:
    """URLs for the views of one test, and clients that ask for them.

    Views are under ``/``, ``/1/``, ``/2/`` …; each takes an optional ``order_id``.
    """

    def __init__(self, settings: Any) -> None:
        self._settings = settings

    def serve(self, *views: Any) -> Client:
        """Put views at URLs; return a client to which an error is a response 500."""
        urls: Any = ModuleType("tests.support.web.urls")
        urls.urlpatterns = []
        for number, view in enumerate(views):
            prefix = f"{number}/" if number else ""
            urls.urlpatterns += [
                path(prefix, view),
                path(f"{prefix}order/<order_id>/", view),
            ]
        self._settings.ROOT_URLCONF = urls
        return Client(raise_request_exception=False)

    def aserve(self, *views: Any) -> AsyncClient:
        """Do the same on an async stack."""
        self.serve(*views)
        return AsyncClient(raise_request_exception=False)


@pytest.fixture
def site(committed: None, settings: Any) -> Site:
    """Serve views of the test's own, in a project without middleware or templates."""
    settings.MIDDLEWARE = []
    settings.TEMPLATES = [{**django_settings.TEMPLATES[0], "DIRS": []}]
    return Site(settings)


@pytest.fixture
def atomic_requests(
    committed: None, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., None]:
    """Set ``ATOMIC_REQUESTS`` on databases."""

    def switch_on(*aliases: str) -> None:
        for alias in aliases:
            monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)

    return switch_on


@dataclass
class Answer:
    """What came back over HTTP."""

    status: int
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Server:
    """A server with a thread per request, each with database connections of its own."""

    def __init__(self, site: Site, threads: Callable[[], OtherThread]) -> None:
        self.site = site
        self._threads = threads
        self._server = LiveServerThread("127.0.0.1", StaticFilesHandler)
        self._server.daemon = True
        self._server.start()
        assert self._server.is_ready.wait(DEADLINE)
        if self._server.error is not None:
            raise self._server.error

    def get(self, url: str = "/") -> Answer:
        """Make a request over HTTP."""
        port = self._server.port
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE)
        try:
            connection.request("GET", url)
            response = connection.getresponse()
            body = response.read().decode()
            return Answer(response.status, dict(response.getheaders()), body)
        finally:
            connection.close()

    def start(self, url: str = "/") -> Any:
        """Make a request in a thread; the future's result is the answer."""
        return self._threads().start(self.get, url)

    def close(self) -> None:
        self._server.terminate()


@pytest.fixture
def server(
    site: Site, threads: Callable[[], OtherThread], settings: Any
) -> Iterator[Server]:
    """Serve over HTTP, requests in parallel."""
    if in_memory():
        pytest.skip("a database in memory belongs to one thread's connection")
    settings.ALLOWED_HOSTS = ["127.0.0.1"]
    server = Server(site, threads)
    yield server
    server.close()


class SignedIn:
    """A user without a database."""

    pk = 7
    is_authenticated = True
    is_active = True


async def auser() -> SignedIn:
    """Return the user as async decorators ask for it."""
    return SignedIn()


def signed_in(get_response: View) -> View:
    """Middleware: somebody is signed in."""

    def middleware(request: HttpRequest) -> HttpResponse:
        request.user = SignedIn()  # type: ignore[assignment]
        request.auser = auser  # type: ignore[attr-defined]
        response: HttpResponse = get_response(request)
        return response

    return middleware


def lazily_signed_in(get_response: View) -> View:
    """Middleware: who is signed in is asked of the database when it matters."""

    def middleware(request: HttpRequest) -> HttpResponse:
        request.user = SimpleLazyObject(Account.objects.count)  # type: ignore[assignment]
        request.auser = auser  # type: ignore[attr-defined]
        response: HttpResponse = get_response(request)
        return response

    return middleware


def use_template(settings: Any, source: str) -> None:
    """Give the project a template ``423.html``."""
    loader = ("django.template.loaders.locmem.Loader", {"423.html": source})
    settings.TEMPLATES = [
        {
            **django_settings.TEMPLATES[0],
            "APP_DIRS": False,
            "OPTIONS": {
                **django_settings.TEMPLATES[0]["OPTIONS"],
                "loaders": [loader],
            },
        }
    ]
