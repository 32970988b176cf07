"""``manage.py demo``, as a newcomer runs it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import HTTPCookieProcessor, build_opener

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.db import connection

from dblocks import distributed_lock
from testproject.databases import SQLITE
from testproject.shop.carts import PATIENCE, WAYS
from testproject.shop.crew import Crew
from testproject.shop.management.commands import demo
from testproject.shop.meeting import Meeting
from testproject.shop.sale import Result, Sale
from testproject.shop.selling import VARIANTS
from tests.support import services
from tests.support.fixtures import in_memory
from tests.support.processes import ROOT
from tests.support.timing import DEADLINE, eventually, scaled

SMALL = ["--stock=5", "--buyers=20", "--processes=3"]
TIME_LIMIT = 55
CARTS = re.compile(r"^ (\S.*?) +(\d+) +(\d+) +(\d+\.\d) s +(\d+) ms$", re.MULTILINE)
ROW = re.compile(r"^ (\S.*?) +(\d+) +(-?\d+) +(\d+) +(\d+) +(\d+) +(\d+) +(\d+) ms$")


@contextmanager
def scratch_database(folder: Path) -> Iterator[str]:
    """Make an empty database beside the test's; its URL."""
    if connection.vendor == "sqlite":
        yield f"sqlite:///{folder}/demo.sqlite3"
        return
    name = f"dblocks_demo_{uuid.uuid4().hex[:12]}"
    quoted = connection.ops.quote_name(name)
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {quoted}")
        try:
            yield urlsplit(os.environ["DATABASE_URL"])._replace(path=name).geturl()
        finally:
            # A server may not have noticed yet that its clients were killed.
            force = " WITH (FORCE)" if connection.vendor == "postgresql" else ""
            cursor.execute(f"DROP DATABASE {quoted}{force}")


@pytest.fixture
def environment(committed: None, tmp_path: Path) -> Iterator[dict[str, str]]:
    """Environment variables under which manage.py works on a scratch database."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    if settings.ISOLATION == "repeatable read":
        pytest.skip("test_shop holds the sales at this isolation level")
    with scratch_database(tmp_path) as url:
        environment = os.environ | {
            "DATABASE_URL": url,
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
        }
        # On a server that was there before, nobody has made this one.
        environment.pop("LOCKS_DATABASE_URL", None)
        yield environment


def start(environment: dict[str, str], *arguments: str) -> subprocess.Popen[str]:
    # The children of the demo inherit its standard error: communicate() returns when
    # the last of them has ended.
    return subprocess.Popen(
        [sys.executable, "manage.py", "demo", *arguments],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def running(
    environment: dict[str, str], *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    """Run the demo; at the end of the block it is told to end if it hasn't."""
    with start(environment, *arguments) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_demo(environment: dict[str, str]) -> None:
    """The unsafe oversell, the safe don't, and lost locks are taken over."""
    with running(environment, *SMALL) as process:
        output, errors = process.communicate(timeout=TIME_LIMIT)
    if connection.vendor == "sqlite" and "WAL" not in settings.SQLITE_OPTIONS:
        # With a rollback journal, renewals wait for readers too, and may say so.
        waits = r"renewal failed .* error=database is locked\n"
        errors = re.sub(waits, "", errors)
    assert (process.returncode, errors) == (0, ""), output
    rows = {
        match[1]: [int(cell) for cell in match.groups()[1:]]
        for match in map(ROW.match, output.splitlines())
        if match is not None
    }
    shown = [variant for variant in VARIANTS.values() if variant.applies()]
    assert set(rows) == {variant.title for variant in shown}
    for variant in shown:
        sold, _left, oversold, refused, _retries, _rate, _wait = rows[variant.title]
        assert sold + refused == 20
        assert oversold == max(0, sold - 5)
        assert (oversold == 0) is variant.safe, variant.title
    assert rows["version column"][4] > 0
    carts = {match[1]: match.groups()[1:] for match in CARTS.finditer(output)}
    assert set(carts) == {way.title for way in WAYS.values()}
    for way in WAYS.values():
        reserved, timed_out, took, slowest = map(float, carts[way.title])
        assert reserved + timed_out == 3 * demo.CARTS
        assert (timed_out == 0) is way.safe
        # Who times out has waited for so long.
        assert way.safe or slowest >= 1000 * PATIENCE
        assert slowest <= 1000 * took + 100
    assert "is killed by SIGKILL" in output
    assert "LeaseLost: The lease on" in output
    assert "stock: 9; sold to: Bob" in output
    assert "All as it should be" in output


@pytest.fixture
def as_recommended() -> None:
    """Leave out where SQLite has other settings what they don't matter for."""
    if connection.vendor == "sqlite" and set(settings.SQLITE_OPTIONS) != set(SQLITE):
        pytest.skip("SQLite's settings don't matter")


@pytest.fixture
def any_database(as_recommended: None) -> None:
    """Leave out on all other databases what the database doesn't matter for."""
    if connection.vendor != "sqlite":
        pytest.skip("the database doesn't matter")


@pytest.fixture
def locks_in(
    any_database: None, environment: dict[str, str]
) -> Iterator[Callable[[str], dict[str, str]]]:
    """Environment variables under which manage.py keeps locks in another engine."""
    with ExitStack() as stack:

        def start_engine(name: str) -> dict[str, str]:
            [address] = stack.enter_context(services.engine(name)).values()
            scheme = "zookeeper://" if name == "zookeeper" else ""
            return environment | {
                "LOCKS_URL": scheme + address,
                "LOCKS_LEASE": str(scaled(2)),
            }

        yield start_engine


@pytest.mark.parametrize(
    ("engine", "place", "has_tokens"),
    [
        pytest.param("redis", "locks in Redis", True, id="redis"),
        pytest.param("redlock", "locks on 5 servers of Redis", False, id="redlock"),
        pytest.param("zookeeper", "locks in ZooKeeper", True, id="zookeeper"),
    ],
)
def test_demo_with_locks_elsewhere(
    locks_in: Callable[[str], dict[str, str]],
    engine: str,
    place: str,
    has_tokens: bool,
) -> None:
    """The same is sold, who was paused too early can't commit, and the rest is said."""
    with running(locks_in(engine), *SMALL) as process:
        output, errors = process.communicate(timeout=TIME_LIMIT)
    assert (process.returncode, errors) == (0, ""), output
    assert f"with {place}" in output
    said = " ".join(output.split())
    assert "there is no guard" in said
    titles = {match[1] for match in map(ROW.match, output.splitlines()) if match}
    assert VARIANTS["check"].title in titles
    assert not titles & {VARIANTS[name].title for name in ("guard", "row-lock")}
    assert "LeaseLost: The lease on" in output
    assert "stock: 9; sold to: Bob" in output
    assert "A pause between check() and the commit would go unnoticed" in said
    assert len(re.findall(r", fencing token \d+\n", output)) == 4 * has_tokens
    assert ("has no fencing tokens" in said) is not has_tokens
    assert "All as it should be" in output


def test_engine_that_does_not_answer(
    any_database: None, environment: dict[str, str]
) -> None:
    """The demo says in one line that it can't reach what keeps the locks."""
    environment["LOCKS_URL"] = "redis://localhost:1"
    with running(environment, *SMALL) as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert errors.startswith("CommandError: Redis can't be used: ")


def test_no_site_with_locks_elsewhere(
    any_database: None, environment: dict[str, str]
) -> None:
    """The site's board would show nothing, so it isn't opened."""
    environment["LOCKS_URL"] = "redis://localhost:1"
    with running(environment, "--serve", "--no-sale") as process:
        _, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 1
    assert "unset LOCKS_URL" in errors


def test_interrupted_demo(as_recommended: None, environment: dict[str, str]) -> None:
    """Ctrl-C ends the demo and its processes, and the next one can begin at once."""
    with running(environment, *SMALL) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if ROW.match(line):
                break
        process.send_signal(signal.SIGINT)
        _output, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (130, "CommandError: Interrupted.\n")


class Visitor:
    """A browser without a window, which keeps cookies."""

    def __init__(self, site: str) -> None:
        self.site = site
        self._opener = build_opener(HTTPCookieProcessor())

    def get(self, path: str) -> str:
        with self._opener.open(self.site + path, timeout=DEADLINE) as answer:
            self.text: str = answer.read().decode()
        return self.text

    def submit(self, path: str, **fields: str) -> str:
        """Send the page's form, its hidden fields included."""
        hidden = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', self.text)
        data = urlencode({**dict(hidden), **fields}).encode()
        with self._opener.open(self.site + path, data, timeout=DEADLINE) as answer:
            self.text = answer.read().decode()
        return self.text


def test_site(as_recommended: None, environment: dict[str, str]) -> None:
    """The shop is left open; the operator frees the lock that the demo holds."""
    address = f"127.0.0.1:{services.free_port()}"
    with running(environment, "--serve", address, "--no-sale") as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "viewer, password" in line:
                break
        found = re.search(r"operator, password (\w+)", said)
        assert found is not None, said
        visitor = Visitor(f"http://{address}")
        eventually(lambda: answers(address), what="the site")
        assert "Reserved globe" in visitor.get("/")
        assert visitor.get("/locks/").count('class="pill held"') == 1
        key = re.findall(r'data-key="([^"]+)"', visitor.text)[-1]
        visitor.get("/admin/login/")
        visitor.submit("/admin/login/", username="operator", password=found[1])
        release = "/admin/dblocks/distributedlock/force-release/"
        visitor.get(f"{release}?key={key}")
        visitor.submit(release, reason="somebody wants to buy it")
        assert 'class="pill held"' not in visitor.get("/locks/")
        for line in process.stdout:
            if "was taken from us" in line:
                break
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=DEADLINE)
    assert process.returncode == 0


def answers(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except OSError:
        return False
    return True


def test_nothing_to_do() -> None:
    """Neither a sale nor a site is refused."""
    with pytest.raises(CommandError, match="nothing to do without --serve"):
        call_command("demo", no_sale=True)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"stock": 0}, id="stock"),
        pytest.param({"threads": 0}, id="threads"),
        pytest.param({"processes": 1}, id="processes"),
        pytest.param({"stock": 10, "buyers": 19}, id="buyers"),
    ],
)
def test_refused_numbers(options: dict[str, int]) -> None:
    """A sale in which nothing could be seen is refused."""
    with pytest.raises(CommandError, match="twice as many buyers as pieces"):
        call_command("demo", **options)


def test_refused_database(committed: None) -> None:
    """A database that other processes can't see is refused."""
    if not in_memory():
        pytest.skip("other processes see this database")
    with pytest.raises(CommandError, match="belongs to one process"):
        call_command("demo")


def test_second_demo(committed: None) -> None:
    """Two demos on one database don't disturb each other: the second is refused."""
    if in_memory():
        pytest.skip("a database in memory is refused anyway")
    with (
        distributed_lock("shop:demo", owner="somebody else"),
        pytest.raises(CommandError, match="Another demo is at work"),
    ):
        call_command("demo")


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a variant have a given outcome; the problems that the demo sees in it."""

    def judge(name: str, *, sold: int) -> list[str]:
        result = Result(10, sold, 10 - sold, 0, 0, duration=1, waits=[0.01])
        monkeypatch.setattr(demo, "hold_sale", lambda *args: result)
        command = demo.Command()
        command.verbosity = 0
        command.problems = []
        command.show_sale(VARIANTS[name], Sale(), Crew())
        return command.problems

    return judge


@pytest.mark.parametrize(
    ("name", "sold", "problems"),
    [
        pytest.param("lock", 10, [], id="safe"),
        pytest.param(
            "lock",
            11,
            ["'distributed_lock, atomic' sold 11 of 10."],
            id="safe-oversold",
        ),
        pytest.param(
            "lock", 9, ["'distributed_lock, atomic' sold 9 of 10."], id="safe-undersold"
        ),
        pytest.param("plain", 40, [], id="unsafe"),
        pytest.param(
            "plain",
            10,
            ["'read, check, write' didn't oversell this time."],
            id="unsafe-by-chance",
        ),
    ],
)
def test_judgement(outcome: Any, name: str, sold: int, problems: list[str]) -> None:
    """The demo fails when a sale didn't go as the table says it goes."""
    assert outcome(name, sold=sold) == problems


@pytest.mark.parametrize(
    ("name", "timed_out", "adds_up", "problems"),
    [
        pytest.param("together", 0, True, [], id="safe"),
        pytest.param(
            "together",
            2,
            True,
            ["'one lock of several keys' let 2 time out."],
            id="late",
        ),
        pytest.param(
            "together",
            0,
            False,
            ["'one lock of several keys' left a stock that doesn't add up."],
            id="wrong",
        ),
        pytest.param("nested", 1, True, [], id="careless"),
        pytest.param(
            "nested",
            0,
            True,
            ['"nested locks, in the cart\'s order" let none time out this time.'],
            id="careless-by-chance",
        ),
    ],
)
def test_judgement_of_carts(
    name: str,
    timed_out: int,
    adds_up: bool,
    problems: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The demo fails when carts didn't meet as it says they do."""
    meeting = Meeting(9 - timed_out, timed_out, 2.0, 1.0, adds_up)
    monkeypatch.setattr(demo, "let_carts_meet", lambda *args, **options: meeting)
    command = demo.Command()
    command.verbosity = 0
    command.problems = []
    command.show_meeting(WAYS[name], Crew())
    assert command.problems == problems
