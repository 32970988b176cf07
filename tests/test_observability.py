"""The recipes for watching locks do what their page says."""

from __future__ import annotations

import ast
import itertools
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.test import RequestFactory

from dblocks import (
    Lease,
    LeaseLost,
    Lock,
    LockTimeout,
    distributed_lock,
    signals,
    transaction_lock,
)
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere, move_clock
from tests.support.fixtures import OtherThread, in_memory
from tests.support.pages import DOCS, files
from tests.support.processes import ROOT
from tests.support.timing import SLACK, eventually, scaled

Locks = Callable[..., Lock]
SIGNALS = [
    signals.lock_acquired,
    signals.lock_released,
    signals.lock_timed_out,
    signals.lock_lost,
    signals.lock_force_released,
]
PAGE = "observability.md"


@pytest.fixture
def recipe() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Run a file of the page; what it connects is disconnected afterwards."""
    before = [list(signal.receivers) for signal in SIGNALS]
    kept = []

    def load(name: str) -> dict[str, Any]:
        names: dict[str, Any] = {"__name__": name}
        exec(compile(files(PAGE)[name], name, "exec"), names)
        kept.append(names)
        return names

    yield load
    for signal, receivers in zip(SIGNALS, before, strict=True):
        signal.receivers[:] = receivers
        signal.sender_receivers_cache.clear()


@pytest.mark.needs("has_movable_clock")
def test_counts(
    recipe: Callable[[str], dict[str, Any]], backend: str, lock: Locks, key: str
) -> None:
    """The receivers count grants, waits that ran out, and losses with their reason."""
    metrics = recipe("shop/metrics.py")
    with lock(), lock():
        pass
    with hold_elsewhere(key, backend=backend), suppress(LockTimeout):
        lock().acquire(timeout=0.2)
    with pytest.raises(LeaseLost), lock(lease=30):
        move_clock(31, backend=backend)
    # The re-entry isn't a grant; the one held elsewhere is.
    assert metrics["grants"] == {"test": 3}
    assert metrics["timeouts"] == {"test": 1}
    assert 0.2 <= metrics["seconds_waited"]["test"] < 2
    eventually(lambda: metrics["losses"], what="the loss")
    assert metrics["losses"] == {("test", "expired"): 1}


@pytest.mark.needs("has_movable_clock")
def test_lines_for_programs(
    recipe: Callable[[str], dict[str, Any]],
    backend: str,
    lock: Locks,
    key: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Every signal becomes one JSON object that says what the page says."""
    caplog.set_level(logging.INFO, logger="shop.locks")
    recipe("shop/events.py")

    def events() -> dict[str, dict[str, Any]]:
        said = [json.loads(r.message) for r in caplog.records if r.name == "shop.locks"]
        return {one["event"]: one for one in said if one["key"] == key}

    with lock() as lease:
        assert lock(owner="other").try_acquire() is None
    with pytest.raises(LeaseLost), lock(lease=30):
        move_clock(31, backend=backend)
    eventually(lambda: "lock_lost" in events(), what="the loss")
    assert events()["lock_released"]["fencing_token"] == lease.fencing_token
    table = (DOCS / PAGE).read_text(encoding="utf-8")
    for name, said in events().items():
        (row,) = [line for line in table.splitlines() if line.startswith(f"| `{name}`")]
        documented = set(re.findall(r"`(\w+)`", row)) - {name, "lease"}
        assert set(said) == documented | {"event", "key", "permit", "backend"}


@pytest.mark.needs("has_table")
def test_stuck_locks(
    recipe: Callable[[str], dict[str, Any]],
    acquire: Callable[..., Lease],
    key: str,
    other: OtherThread,
) -> None:
    """The queries find who died and who doesn't end, and nobody else."""
    alerts = recipe("shop/alerts.py")
    other.do(acquire, key + ":died", lease=30, renew=False, note="import")
    other.do(acquire, key + ":endless", lease=100_000, note="report")
    move_clock(timedelta(hours=2))
    acquire(key + ":young")

    def report() -> list[str]:
        return [line for line in alerts["report"]() if line.startswith(key)]

    died, endless = report()
    assert died.startswith(f"{key}:died: ")
    assert died.endswith("died or lost it (import)")
    assert endless.startswith(f"{key}:endless: ")
    assert endless.endswith("(report)")
    DistributedLock.objects.force_release(key + ":endless")
    assert report() == [died]


def enter(lock: Lock) -> None:
    """Take a lock in the block form."""
    with suppress(LockTimeout), lock:
        raise AssertionError


async def aenter(lock: Lock) -> None:
    """Take a lock in the async block form."""
    with suppress(LockTimeout):
        async with lock:
            raise AssertionError


def as_view(lock: Lock) -> None:
    """Answer 423."""
    request = RequestFactory().get("/")
    assert lock(lambda request: None)(request).status_code == 423


def as_row(lock: Lock, **options: Any) -> None:
    """Ask for the row instead."""
    with (
        suppress(LockTimeout),
        transaction_lock(lock.key, **options) as row,
    ):
        assert row is None


def enough(error: LockTimeout) -> str:
    """Make do without."""
    return error.holder


GOING_WITHOUT: dict[str, Callable[[Lock], Any]] = {
    "with": enter,
    "async with": async_to_sync(aenter),
    "function": lambda lock: lock(print)(),
    "skip": lambda lock: replace(lock, on_locked="skip")(print)(),
    "callable": lambda lock: replace(lock, on_locked=enough)(print)(),
    "view": as_view,
    "row": partial(as_row, timeout=0.2),
    "row at once": partial(as_row, nowait=True),
    "row skipped": partial(as_row, skip_locked=True),
    "run_locked": lambda lock: call_command(
        "run_locked", lock.key, "--skip-if-locked", "--", "true"
    ),
}


@pytest.mark.needs("has_table")
@pytest.mark.parametrize("go", GOING_WITHOUT.values(), ids=GOING_WITHOUT)
def test_going_without(
    committed: None, key: str, caplog: pytest.LogCaptureFixture, go: Any
) -> None:
    """Whoever goes without the lock leaves one line, which says who had it."""
    if in_memory():
        pytest.skip("a database in memory belongs to one thread's connection")
    caplog.set_level(logging.INFO, logger="dblocks")
    with hold_elsewhere(key, note="the night's import"), suppress(LockTimeout):
        go(distributed_lock(key, timeout=1.2))
    (line,) = [
        record.getMessage()
        for record in caplog.records
        if record.levelname == "INFO" and record.name == "dblocks"
    ]
    assert line.startswith(f"timed out key={key!r} holder=")
    assert f"pid {os.getpid()}" in line
    assert 'note="the night\'s import"' in line
    assert 0 <= float(line.rpartition("waited=")[2]) < 1.2 + SLACK


ROW_FORMS = {name: go for name, go in GOING_WITHOUT.items() if name.startswith("row")}


@pytest.mark.needs("has_table")
@pytest.mark.usefixtures("two_writers")
@pytest.mark.parametrize("go", ROW_FORMS.values(), ids=ROW_FORMS)
def test_going_without_a_row(
    key: str, other: OtherThread, caplog: pytest.LogCaptureFixture, go: Any
) -> None:
    """So does who goes without what a transaction has, which doesn't tell whose."""
    caplog.set_level(logging.INFO, logger="dblocks")
    with transaction_lock(key):
        other.do(go, distributed_lock(key))
    (line,) = [line for line in caplog.messages if "timed out" in line]
    assert line.startswith(f"timed out key={key!r} holder= ")


def test_trying_in_vain(
    lock: Locks, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever only tries knows what it means that it was in vain."""
    caplog.set_level(logging.INFO, logger="dblocks")
    with hold_elsewhere(key, backend=backend):
        assert lock().try_acquire() is None
    assert [line for line in caplog.messages if key in line] == []


def test_owner_with_control_characters(
    lock: Locks, backend: str, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An owner's id that a visitor chose forges no line."""
    caplog.set_level(logging.DEBUG, logger="dblocks")
    mine = lock(owner="a\nb\x1b]0;c\x07")
    with mine:
        pass
    lease = mine.acquire()
    assert backends[backend].request_release(key)
    lease.renew()
    assert backends[backend].force_release(key)
    with pytest.raises(LeaseLost):
        lease.renew()
    verbs = {"acquired", "released", "asked to release", "lost"}

    def told() -> dict[str, str]:
        lines = [line for line in caplog.messages if f"key={key!r}" in line]
        return {line.partition(" key=")[0]: line for line in lines}

    eventually(lambda: verbs <= told().keys(), what="every line")
    for verb in verbs:
        assert told()[verb].isprintable()
        assert r"owner=a\nb\x1b]0;c\x07" in told()[verb]


@pytest.mark.needs("has_table")
def test_texts_with_control_characters(
    committed: None, key: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No holder, note, name or reason forges a line, or steers a terminal."""
    caplog.set_level(logging.INFO, logger="dblocks")
    evil = "a\nb\x1b]0;c\x07"
    locks = DistributedLock.objects
    assert locks.acquire(key, owner=evil, lease=60, holder=evil, note=evil)
    with pytest.raises(LockTimeout) as refused:
        distributed_lock(key, timeout=0).acquire()
    assert locks.request_release(key, by=evil, reason=evil)
    assert locks.force_release(key, by=evil, reason=evil)
    told = [line for line in caplog.messages if key in line]
    assert len(told) == 3
    for text in [*told, str(refused.value)]:
        assert text.isprintable()
        assert "a\\nb\\x1b" in text
    assert refused.value.holder == evil


def texts_of(module: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield level and text of each line that a module logs."""
    constants: dict[str, ast.expr] = {
        target.id: node.value
        for node in ast.walk(module)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for call in ast.walk(module):
        if not isinstance(call, ast.Call):
            continue
        # logger.info("…"), or call(logger.info, "…").
        words = [call.func, *call.args]
        for word, text in itertools.pairwise(words):
            if isinstance(word, ast.Attribute) and ast.unparse(word.value) == "logger":
                if word.attr == "isEnabledFor":
                    continue
                if isinstance(text, ast.Name):
                    text = constants[text.id]
                level = "ERROR" if word.attr == "exception" else word.attr.upper()
                yield level, re.sub(r"%(\(\w+\))?[.\d]*\w", "…", ast.literal_eval(text))


def test_each_line_is_documented() -> None:
    """The page has a sentence for each line that dblocks logs, and for no other."""
    logged = set()
    references = 0
    for module in (ROOT / "dblocks").rglob("*.py"):
        source = module.read_text(encoding="utf-8")
        logged |= set(texts_of(ast.parse(source)))
        references += len(re.findall(r"\blogger\.(?!isEnabledFor)\w+", source))
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([A-Z]+) \| `(.+?)` \| ([A-Z].*\.) \|$", page, re.M)
    assert logged == {(level, text) for level, text, _sentence in rows}
    assert len(rows) == references


@pytest.mark.needs("has_own_leases", "has_movable_clock")
def test_lines_for_people(
    lock: Locks,
    acquire: Callable[..., Lease],
    backend: str,
    key: str,
    other: OtherThread,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each line of the log is on the page, with its level and its names."""
    caplog.set_level(logging.DEBUG, logger="dblocks")
    lease = other.do(acquire, lease=30)
    lock().try_acquire(timeout=scaled(2))
    with suppress(LockTimeout):
        lock().acquire(timeout=0)
    lease.release()
    acquire()
    assert backends[backend].force_release(key)
    acquire(key + ":lost", lease=30)
    move_clock(31, backend=backend)
    eventually(
        lambda: any(line.startswith("lost ") for line in caplog.messages),
        what="the line about the loss",
    )
    page = (DOCS / PAGE).read_text(encoding="utf-8")
    documented = {
        (level, words): names
        for level, words, names in re.findall(
            r"^\| (\w+) \| `([\w ,-]+?) (\w+=.*?)`", page, re.M
        )
    }
    came = set()
    for record in caplog.records.copy():
        if record.name != "dblocks" or "key=" not in record.getMessage():
            continue
        words, _, rest = record.getMessage().partition(" key=")
        if words.startswith("no gate"):
            continue
        came.add(words)
        names = documented[record.levelname, words]
        assert re.findall(r"(\w+)=", names) == re.findall(r"(\w+)=", "key=" + rest)
    assert came >= {
        *("acquired", "waiting", "timed out", "released", "force-released", "lost")
    }
