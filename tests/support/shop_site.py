"""The shop as a site, under gunicorn, and a fixture for it."""

from __future__ import annotations

import http.client
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from django.urls import reverse

from dblocks.test import hold_elsewhere
from testproject.shop.board import EXPORT_LOCK, EXPORTS
from testproject.shop.sale import empty_shop
from tests.support.fixtures import in_memory
from tests.support.gunicorn import Gunicorn
from tests.support.timing import DEADLINE, eventually, scaled

THREADS = 4
THINKING = scaled(0.15)
"""Seconds, more or less, that a checkout takes; a payment takes exactly that."""


@dataclass
class Answer:
    """What came back over HTTP, and from which process."""

    status: int
    headers: http.client.HTTPMessage
    body: str

    @property
    def process(self) -> str:
        return str(self.headers["X-Process"])

    @property
    def page(self) -> str:
        """The name of the page, as its ``main`` element has it."""
        found = re.search(r'data-page="([\w-]+)"', self.body)
        assert found is not None, self.body
        return found[1]


class Server(Gunicorn):
    """gunicorn with the shop's site."""

    def __init__(self, workers: int, log: Path) -> None:
        super().__init__(
            "tests.support.wsgi",
            workers,
            log,
            *("--worker-class", "gthread", "--threads", str(THREADS)),
            # One worker can't take all requests and let them wait.
            *("--worker-connections", str(THREADS + 1)),
            SHOP_THINKING=str(THINKING),
        )
        self.workers, self.log = workers, log

    def ask(self, method: str, path: str, body: str = "", **headers: str) -> Answer:
        connection = http.client.HTTPConnection(
            "127.0.0.1", self.port, timeout=DEADLINE
        )
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return Answer(answer.status, answer.headers, answer.read().decode())
        finally:
            connection.close()

    def wait(self) -> None:
        """Wait until every worker has answered once."""
        seen: set[str] = set()

        def all_answer() -> bool:
            with ThreadPoolExecutor(2 * self.workers) as threads:
                paths = [reverse("shop:catalogue")] * (2 * self.workers)
                answers = list(threads.map(lambda path: self.ask("GET", path), paths))
            assert {answer.status for answer in answers} == {200}
            seen.update(answer.process for answer in answers)
            return len(seen) == self.workers

        eventually(all_answer, what=f"{self.workers} workers")

    def stop(self) -> None:
        """See it end; whatever it had to complain about is a failure."""
        super().stop()
        log = self.log.read_text()
        assert "Traceback" not in log, log


@pytest.fixture(scope="module")
def shop_servers(
    django_db_setup: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[int], Server]]:
    """Start the site with so many workers, once."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    folder = tmp_path_factory.mktemp("gunicorn")
    started: dict[int, Server] = {}

    def serve(workers: int) -> Server:
        if workers not in started:
            started[workers] = Server(workers, folder / f"{workers}.log")
            started[workers].wait()
        return started[workers]

    yield serve
    with ExitStack() as ends:
        for server in started.values():
            server.terminate()
            ends.callback(server.stop)


@pytest.fixture
def shop(committed: None) -> Iterator[None]:
    """An empty shop, in the database as in production."""
    yield
    empty_shop()


@pytest.fixture
def shop_server(shop: None, shop_servers: Callable[[int], Server]) -> Server:
    """The site, with two workers of several threads."""
    return shop_servers(2)


def export_elsewhere() -> hold_elsewhere:
    """One of the exports that may run at a time, in another process."""
    return hold_elsewhere(EXPORT_LOCK, permits=EXPORTS)
