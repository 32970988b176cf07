"""A project of one ASGI process, with views that lock, served by uvicorn."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cache

import uvicorn
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import path

from dblocks import distributed_lock
from tests.support.fixtures import fitting
from tests.support.timing import DEADLINE, eventually


class Room:
    """Counts who is inside at once, and remembers who was."""

    def __init__(self, backend: str = "default") -> None:
        self.backend = backend
        self.inside = self.most = 0
        self.tokens: list[int] = []
        self.arrived = 0

    async def visit(self, token: int | None, seconds: float) -> None:
        self.inside += 1
        self.most = max(self.most, self.inside)
        try:
            await asyncio.sleep(seconds)
            self.tokens.append(token or 0)
        finally:
            self.inside -= 1


room = Room()


async def block(request: HttpRequest, key: str) -> HttpResponse:
    """A view that locks a part of what it does."""
    timeout = float(request.GET.get("timeout", DEADLINE))
    room.arrived += 1
    options = fitting(room.backend, {"lease": 10})
    lock = distributed_lock(key, backend=room.backend, timeout=timeout, **options)
    async with lock as lease:
        await room.visit(lease.fencing_token, float(request.GET.get("stay", 0.001)))
    return HttpResponse(str(lease.fencing_token))


async def visit(request: HttpRequest, key: str) -> HttpResponse:
    await room.visit(0, 0.001)
    return HttpResponse("done")


@cache
def locked(backend: str) -> Callable[..., Awaitable[HttpResponse]]:
    """Lock a view in an engine."""
    options = fitting(backend, {"lease": 10})
    lock = distributed_lock("{key}", backend=backend, timeout=DEADLINE, **options)
    return lock(visit)


async def decorated(request: HttpRequest, key: str) -> HttpResponse:
    """A view that is locked as a whole."""
    return await locked(room.backend)(request, key)


async def idle(request: HttpRequest, key: str) -> HttpResponse:
    """A view without a lock."""
    room.arrived += 1
    await asyncio.sleep(float(request.GET["stay"]))
    return HttpResponse("done")


urlpatterns = [
    path("block/<key>", block),
    path("decorated/<key>", decorated),
    path("idle/<key>", idle),
]


@contextmanager
def serving(backend: str) -> Iterator[int]:
    """Serve these views, which lock in an engine, in a thread; the port."""
    config = uvicorn.Config(
        get_asgi_application(),
        lifespan="off",
        ws="none",
        http="h11",
        loop="asyncio",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = uvicorn.Server(config)
    room.__init__(backend)  # type: ignore[misc]
    with socket.socket() as listening, override_settings(ROOT_URLCONF=__name__):
        listening.bind(("127.0.0.1", 0))
        thread = threading.Thread(
            target=lambda: asyncio.run(server.serve([listening])), name="uvicorn"
        )
        thread.start()
        try:
            eventually(lambda: server.started, what="the server")
            yield listening.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(DEADLINE)


async def get(port: int, address: str, *, hang_up: float | None = None) -> str:
    """Ask over HTTP; return the status, or hang up after so many seconds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(
            f"GET /{address} HTTP/1.1\r\nHost: localhost\r\n"
            f"Connection: close\r\n\r\n".encode()
        )
        await writer.drain()
        if hang_up is not None:
            await asyncio.sleep(hang_up)
            return ""
        answer = await reader.read()
        return answer.split(b" ", 2)[1].decode()
    finally:
        writer.close()
        await writer.wait_closed()
