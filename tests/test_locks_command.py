"""``locks``: what operators see and do."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from io import BytesIO, StringIO, TextIOWrapper
from typing import Any

import pytest
from django.contrib.admin.sites import site
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import CommandError
from django.core.management.color import color_style
from django.db import OperationalError, connection, connections, transaction
from django.test import RequestFactory
from django.utils import translation

from dblocks import distributed_lock
from dblocks.admin import DistributedLockAdmin
from dblocks.backends.base import BaseBackend
from dblocks.backends.locmem import LocMemBackend
from dblocks.backends.values import Entry, Reading, Waiters
from dblocks.conf import backends
from dblocks.interventions import Intervention
from dblocks.management import display, statuses
from dblocks.management.commands import locks
from dblocks.management.rendering import as_json, cells_in, holder_of, table
from dblocks.management.sources import Table
from dblocks.models import DistributedLock
from dblocks.signals import lock_force_released
from dblocks.test import clear_locks, hold_elsewhere, move_clock
from tests.support.commands import Commands, running_locks
from tests.support.factories import LockFactory, now, stored
from tests.support.fixtures import OtherThread, in_memory
from tests.support.processes import Workers
from tests.support.timing import DEADLINE, eventually

pytestmark = pytest.mark.usefixtures("committed")

Run = Callable[..., tuple[int, str, str]]


class Terminal(StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command as from the command line: its status, stdout and stderr."""
    return running_locks(capsys)


def one_of_each() -> None:
    LockFactory(held=True, key="held", note="at work")
    LockFactory(expired=True, key="expired")
    LockFactory(cooling=True, key="cooling")
    LockFactory(free=True, key="free")


def three_permits() -> None:
    LockFactory(held=True, key="job\x1f10", holder="host:1", note="shard ten")
    LockFactory(held=True, key="job\x1f2", holder="host:2")
    LockFactory(free=True, key="job\x1f0")
    # Its neighbours by their code points, and by their letters' case.
    for key in ("job", "job ", "jo", "JOB\x1f5"):
        LockFactory(free=True, key=key)


# list and show


def test_waiting(run: Run, workers: Workers, key: str) -> None:
    """Who queues is counted where the server knows; elsewhere nothing is claimed."""
    holder = workers.start("hold", key=key)
    holder.expect("held")
    queue = [{"key": key, "timeout": DEADLINE}] * 3
    waiters = workers.start_all("hold", queue)

    def shown() -> int | None:
        _status, out, _err = run("show", key, "--json")
        waiting: int | None = json.loads(out)["waiting"]
        return waiting

    if connection.vendor == "sqlite":
        assert shown() is None
    else:
        # The first of them is let to look.
        eventually(lambda: shown() == 3, what="three in the queue")

        def listed() -> int:
            _status, out, _err = run("list")
            [row] = [line for line in out.splitlines() if line.startswith(key)]
            number, note = row.split("\t")[-2:]
            assert note == "-"
            return int(number)

        request = RequestFactory().get("/")
        page = DistributedLockAdmin(DistributedLock, site)
        lock = page.get_queryset(request).get(pk=key)
        waiters_of = DistributedLock.objects.waiters
        doors = {
            "the list": listed,
            "the page": lambda: page.waiting(lock),
            "the manager": lambda: waiters_of(key).number,
        }

        def all_are_counted(door: Callable[[], Any]) -> bool:
            number = door()
            # While one that has queued for long looks at the key, it isn't counted.
            assert 1 <= number <= 3
            return bool(number == 3)

        for name, door in doors.items():
            eventually(partial(all_are_counted, door), what=f"three for {name}")
        assert DistributedLock.objects.waiters(key + "?").number == 0
    for process in (holder, *waiters):
        process.tell("release")
    for process in (holder, *waiters):
        process.until_done()


def test_holder_that_has_waited(workers: Workers, key: str) -> None:
    """Who has got the key at last is no waiter, whatever it keeps of its wait."""

    def number() -> int | None:
        found: int | None = DistributedLock.objects.waiters(key).number
        return found

    if connection.vendor == "sqlite":
        assert number() is None
        return
    first = workers.start("hold", key=key)
    first.expect("held")
    second = workers.start("hold", key=key, timeout=DEADLINE)
    eventually(lambda: number() == 1, what="one that waits")
    first.tell("release")
    first.until_done()
    second.expect("held")
    assert number() == 0
    third = workers.start("hold", key=key, timeout=DEADLINE)
    eventually(lambda: number() == 1, what="another one that waits")
    for process in (second, third):
        process.tell("release")
        process.until_done()
    eventually(lambda: number() == 0, what="nobody")


COLUMNS = [
    *("KEY", "PERMIT", "STATE", "HOLDER"),
    *("AGE", "REMAINING", "WAITING", "NOTE"),
]


def test_list(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table shows every lock with its state, holder and note, and their number."""
    one_of_each()
    head, *rows, count = screen_of(monkeypatch, 120)
    assert head.split() == [name for name in COLUMNS if name != "PERMIT"]
    assert [row.split()[:2] for row in rows] == [
        ["cooling", "cooling"],
        ["expired", "expired"],
        ["free", "free"],
        ["held", "held"],
    ]
    assert rows[-1].endswith("at work")
    assert "host:1:MainThread" in rows[-1]
    assert count == "4 locks"


def test_list_in_a_pipe(run: Run) -> None:
    """All columns between tabs: nothing is padded, cut, counted or coloured."""
    one_of_each()
    LockFactory(held=True, key="a\tb" + "c" * 200, note="n" * 255, holder="web 1")
    status, out, err = run("list", "--force-color")
    assert (status, err) == (0, "")
    head, *rows = (line.split("\t") for line in out.splitlines())
    assert head == COLUMNS
    assert {len(row) for row in rows} == {len(COLUMNS)}
    first = rows[0]
    assert (first[0], first[3]) == ("a\\tb" + "c" * 200, "web 1")
    assert first[-1] == "n" * 255
    assert [row[0] for row in rows[1:]] == ["cooling", "expired", "free", "held"]
    assert rows[-1][1:4] == ["-", "held", "host:1:MainThread"]


def test_reader_that_ends(commands: Commands) -> None:
    """A pipe to what doesn't read ends the command without a traceback."""
    process = commands.start("locks", "list")
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(DEADLINE) == 141
    assert process.stderr is not None
    assert process.stderr.read() == b""


@pytest.mark.parametrize(
    ("options", "status"),
    [
        pytest.param("closed", 0, id="closed"),
        pytest.param("/dev/full", 74, id="full"),
    ],
)
def test_output_that_cant_be_written(
    commands: Commands, options: str, status: int
) -> None:
    """All that matches is released all the same, and the status says what happened."""
    for key in ("a", "b", "c"):
        LockFactory(held=True, key=key)
    with ExitStack() as files:
        how: dict[str, Any] = {"preexec_fn": partial(os.close, 1)}
        if options != "closed":
            how = {"stdout": files.enter_context(open(options, "wb"))}
        process = commands.start("locks", "release", "--key", "*", "--yes", **how)
    _out, err = process.communicate(timeout=DEADLINE)
    assert b"Traceback" not in err
    assert process.returncode == status
    assert not DistributedLock.objects.held().exists()


def test_list_of_one_and_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count is a sentence in the right number."""
    assert screen_of(monkeypatch, 80)[-1] == "0 locks"
    LockFactory(free=True)
    assert screen_of(monkeypatch, 80)[-1] == "1 lock"


def keys_of(out: str) -> list[str]:
    """Return the keys of a list in a pipe."""
    return [line.split("\t")[0] for line in out.splitlines()[1:]]


@pytest.mark.parametrize(
    ("pattern", "keys"),
    [
        ("order:*", ["order:1", "order:22"]),
        ("order:?", ["order:1"]),
        ("*:[23]*", ["order:22", "Order:3"]),
        ("order", []),
        ("job", ["job", "job"]),
        ("100%_*", ["100%_\n"]),
        ("*", ["100%_\n", "Order:3", "job", "job", "order:1", "order:22"]),
    ],
)
def test_list_by_key(run: Run, pattern: str, keys: list[str]) -> None:
    """--key is a pattern of whole keys, whose letters are told apart."""
    for key in ("order:1", "order:22", "Order:3", "job\x1f1", "job\x1f0", "100%_\n"):
        LockFactory(held=True, key=key)
    found = json.loads(run("list", "--key", pattern, "--json")[1])
    assert [lock["key"] for lock in found] == sorted(keys)


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("web-1", ["a", "b"]),
        ("WEB-1", ["a", "b"]),
        ("web-1 pid 7", ["a"]),
        ("pid 7", ["a", "c"]),
        ("web", []),
        ("1", []),
        ("web-*", ["a", "b", "c"]),
        ("web-1?", ["c"]),
        ("example.com", []),
        (".", []),
    ],
)
def test_list_by_holder(run: Run, text: str, keys: list[str]) -> None:
    """--holder is whole words of who holds now: one host isn't taken for another."""
    LockFactory(held=True, key="a", holder="web-1 pid 7 MainThread")
    LockFactory(expired=True, key="b", holder="web-1.example.com pid 70 MainThread")
    LockFactory(held=True, key="c", holder="web-12 pid 7 MainThread")
    LockFactory(held=True, key="d", holder="my-web-1x pid 9 MainThread")
    LockFactory(cooling=True, key="e", holder="web-1 pid 7 MainThread")
    LockFactory(free=True, key="f", holder="web-1 pid 7 MainThread")
    assert keys_of(run("list", "--holder", text)[1]) == keys
    assert keys_of(run("list", "--holder", text, "--key", "[bc]")[1]) == [
        key for key in keys if key in "bc"
    ]


@pytest.mark.parametrize(
    ("order", "keys"),
    [
        ("key", ["a", "b", "c", "d", "e"]),
        ("age", ["c", "d", "b", "a", "e"]),
        ("remaining", ["d", "a", "b", "c", "e"]),
    ],
)
def test_list_in_order(run: Run, order: str, keys: list[str]) -> None:
    """--sort has the longest held, or the first to be over, first; free ones last."""
    LockFactory(cooling=True, key="a", expires_at=now(60))
    LockFactory(held=True, key="b", age=100, expires_at=now(120))
    LockFactory(held=True, key="c", age=300, expires_at=now(180))
    LockFactory(expired=True, key="d", age=200)
    LockFactory(free=True, key="e", age=900)
    assert keys_of(run("list", "--sort", order)[1]) == keys
    assert keys_of(run("list", "--sort", order, "--limit", "2")[1]) == keys[:2]
    found = json.loads(run("list", "--sort", order, "--limit", "3", "--json")[1])
    assert [lock["key"] for lock in found] == keys[:3]


def test_limit_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the count says how many are left out."""
    LockFactory.bulk(5, held=True)
    shown = screen_of(monkeypatch, 80, "--limit", "2")
    assert len(shown) == 4
    assert shown[-1] == "5 locks, 3 of them not shown"


@pytest.mark.parametrize("state", ["held", "expired", "cooling", "free"])
def test_list_by_state(run: Run, state: str) -> None:
    """--state shows the locks in that state alone."""
    one_of_each()
    found = json.loads(run("list", "--state", state, "--json")[1])
    assert [lock["key"] for lock in found] == [state]


def test_json(run: Run) -> None:
    """The documented shape, on standard output alone."""
    LockFactory(held=True, key="k", owner="o", note="nöte", version=7, age=60)
    status, out, err = run("list", "--json")
    assert (status, err) == (0, "")
    [lock] = json.loads(out)
    acquired_at, expires_at = (
        datetime.fromisoformat(lock.pop(name).replace("Z", "+00:00"))
        for name in ("acquired_at", "expires_at")
    )
    now = datetime.now(timezone.utc)
    assert timedelta(0) < now - acquired_at < timedelta(seconds=180)
    assert timedelta(0) < expires_at - now <= timedelta(seconds=3600)
    assert 119 < lock.pop("age") < 180
    assert lock.pop("waiting") is None
    assert lock.pop("release_requested_at") is None
    assert 3540 < lock.pop("remaining") <= 3600
    assert lock == {
        "key": "k",
        "permit": None,
        "state": "held",
        "owner": "o",
        "holder": "host:1:MainThread",
        "note": "nöte",
        "hold_count": 1,
        "fencing_token": 7,
    }


def test_json_of_nothing(run: Run) -> None:
    """No lock is an empty array."""
    assert run("list", "--json") == (0, "[]\n", "")


def test_show(run: Run) -> None:
    """One lock, a line for each of its facts; or JSON."""
    one_of_each()
    status, out, _ = run("show", "held")
    assert status == 0
    facts = dict(line.split(None, 1) for line in out.splitlines())
    assert (facts["key"], facts["state"], facts["note"]) == ("held", "held", "at work")
    assert json.loads(run("show", "free", "--json")[1])["age"] is None


AGO = r"\d\d\d\d-\d\d-\d\d \d\d:\d\d:\d\d UTC"
SHOWN = {
    "held": {
        "holder": "host:1:MainThread",
        "note": "at work",
        "age": f"1h01m, since {AGO}",
        "remaining": f"(59m..s|1h00m), until {AGO}",
        "fencing token": "1",
        "holds": "1",
        "owner": r"owner-\d+",
    },
    "expired": {
        "holder": "host:1:MainThread",
        "age": f"1h01m, since {AGO}",
        "overdue": f"1h00m, since {AGO}",
        "fencing token": "1",
        "holds": "1",
        "owner": r"owner-\d+",
    },
    "cooling": {
        "last holder": "web-1 pid 7 MainThread",
        "remaining": f"(59m..s|1h00m), until {AGO}",
        "fencing token": "1",
    },
    "free": {"fencing token": "1"},
}


@pytest.mark.parametrize("state", SHOWN)
def test_facts(run: Run, monkeypatch: pytest.MonkeyPatch, state: str) -> None:
    """Each fact is said once, times with units, and what isn't there not at all."""
    one_of_each()
    DistributedLock.objects.filter(pk="cooling")._raw_delete("default")
    LockFactory(cooling=True, key="cooling", holder="web-1 pid 7 MainThread")
    out = run("show", state)[1]
    facts = dict(line.split("\t") for line in out.splitlines())
    assert list(facts) == ["key", "state", *SHOWN[state]]
    for name, wanted in SHOWN[state].items():
        assert re.fullmatch(wanted, facts[name]), facts[name]
    screen = Terminal()
    call_command("locks", "show", state, stdout=screen, no_color=True)
    names = [line[:14].strip() for line in screen.getvalue().splitlines()]
    assert names == list(facts)


def test_show_of_none(run: Run) -> None:
    """A key without a row is status 1."""
    status, out, err = run("show", "no such key")
    assert (status, out) == (1, "")
    assert "no such key" in err


def test_list_of_permits(run: Run) -> None:
    """Key and permit stand apart, permits in the order of their numbers."""
    three_permits()
    head, *rows = run("list")[1].splitlines()
    assert head.split()[:3] == ["KEY", "PERMIT", "STATE"]
    of_job = [row.split()[:3] for row in rows if row.startswith("job")]
    assert of_job == [
        ["job", "-", "free"],
        ["job", "0", "free"],
        ["job", "2", "held"],
        ["job", "10", "held"],
        ["job", "-", "free"],
    ]
    locks = json.loads(run("list", "--json")[1])
    assert [(lock["key"], lock["permit"]) for lock in locks] == [
        ("JOB", 5),
        ("jo", None),
        ("job", None),
        ("job", 0),
        ("job", 2),
        ("job", 10),
        ("job ", None),
    ]


def test_show_of_permits(run: Run) -> None:
    """A key shows all its permits, and its own row if it has one; --permit one."""
    three_permits()
    shown = json.loads(run("show", "job", "--json")[1])
    assert shown["key"] == "job"
    assert list(shown) == ["key", "permits"]
    assert [lock["permit"] for lock in shown["permits"]] == [None, 0, 2, 10]
    head, *rows = run("show", "job")[1].splitlines()
    assert head.split()[:3] == ["KEY", "PERMIT", "STATE"]
    assert [row.split()[1] for row in rows] == ["-", "0", "2", "10"]
    one = json.loads(run("show", "job", "--permit", "10", "--json")[1])
    assert (one["key"], one["permit"], one["note"]) == ("job", 10, "shard ten")
    facts = dict(
        line.split(None, 1)
        for line in run("show", "job", "--permit", "10")[1].splitlines()
    )
    assert (facts["key"], facts["permit"], facts["holder"]) == ("job", "10", "host:1")
    assert json.loads(run("show", "JOB", "--json")[1])["permits"][0]["permit"] == 5
    assert "permit" not in run("show", "jo")[1]
    status, out, err = run("show", "job", "--permit", "7")
    assert (status, out) == (1, "")
    assert "there is no permit 7 of the lock 'job'" in err


def test_waiting_for_a_permit(run: Run, workers: Workers, key: str) -> None:
    """Who waits is counted at every permit of the key: whichever is free will do."""
    holders = workers.start_all("hold", [{"key": key, "permits": 2}] * 2)
    for holder in holders:
        holder.expect("held")
    waiter = workers.start("hold", key=key, permits=2, timeout=DEADLINE)

    def shown() -> list[int | None]:
        out = run("show", key, "--json")[1]
        return [lock["waiting"] for lock in json.loads(out)["permits"]]

    if connection.vendor == "sqlite":
        assert shown() == [None, None]
    else:
        eventually(lambda: shown() == [1, 1], what="one in the queue")
        assert DistributedLock.objects.waiters(key).number == 1
        page = DistributedLockAdmin(DistributedLock, site)
        lock = page.get_queryset(RequestFactory().get("/")).get(pk=f"{key}\x1f1")
        assert page.waiting(lock) == 1
    for process in (*holders, waiter):
        process.tell("release")
    for process in (*holders, waiter):
        process.until_done()


def test_table_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal no line is wider than it; to a file nothing is cut."""
    LockFactory(held=True, key="k" * 30, note="n" * 120)
    screen = screen_of(monkeypatch, 70)
    assert max(map(len, screen)) <= 70
    assert "…" in screen[1]
    file = StringIO()
    call_command("locks", "list", stdout=file)
    assert "n" * 120 in file.getvalue()


def test_keys_are_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is too long for its column pushes its own row's rest aside."""
    long = "tenant:" + "7" * 90
    for key in ("a", long, "z"):
        LockFactory(held=True, key=key, holder="web-1 pid 7 MainThread", note="n" * 90)
    head, first, second, third, _count = screen_of(monkeypatch, 80)
    assert second.startswith(f"{long}  held  ")
    assert len(first) == len(third) <= 80
    assert first.index("held") == third.index("held") == head.index("STATE") == 5


def screen_of(monkeypatch: pytest.MonkeyPatch, width: int, *options: str) -> list[str]:
    """Return what the list draws on a terminal of a width."""
    monkeypatch.setenv("COLUMNS", str(width))
    screen = Terminal()
    call_command("locks", "list", *options, stdout=screen, no_color=True)
    return screen.getvalue().splitlines()


def cells(text: str) -> int:
    """Count the columns of a terminal that a text of CJK, marks and emoji takes."""
    wide = sum(unicodedata.east_asian_width(c) in "WF" for c in text)
    marks = sum(unicodedata.combining(c) > 0 for c in text)
    return len(text) + wide - marks


@pytest.mark.parametrize("width", [80, 120, 200])
def test_wide_characters(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    """Columns stand one below the other, whatever the width of their characters."""
    keys = [
        "在庫:" + "商品" * 7,
        "\N{LOCK}:7",
        "jo\N{COMBINING ACUTE ACCENT}b",
        "plain",
    ]
    for key in keys:
        LockFactory(held=True, key=key, note="夜間レポート")
    head, *rows, _count = screen_of(monkeypatch, width)
    assert len(rows) == len(keys)
    for row in rows:
        before = row.partition("held")[0]
        assert cells(before) == head.index("STATE")
        assert cells(row) <= width


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("plain", 5),
        ("在庫", 4),
        ("\N{LOCK}", 2),
        ("e\N{COMBINING ACUTE ACCENT}", 1),
        ("\N{HEAVY BLACK HEART}", 1),
        ("\N{HEAVY BLACK HEART}\N{VARIATION SELECTOR-16}", 2),
        ("\N{LOCK}\N{VARIATION SELECTOR-16}", 2),
        ("\u1112\u1161\u11ab", 2),  # a syllable of Korean, written in its parts
        ("ﾛｯｸ", 3),
        ("ＡＢ", 4),
        ("\N{VARIATION SELECTOR-16}", 0),
    ],
)
def test_cells(text: str, width: int) -> None:
    """The width of a text is that of the cells that terminals give it."""
    assert cells_in(text) == width


@pytest.mark.parametrize("note", ["", "shop.management.commands.nightly_report"])
def test_process_is_never_cut(monkeypatch: pytest.MonkeyPatch, note: str) -> None:
    """On 80 columns the name of a long host is cut, and its process can be read."""
    host = "ip-172-31-45-120.eu-central-1.compute.internal"
    for key, thread in [("nightly-report", " MainThread"), ("z" * 20, "")]:
        holder = f"{host} pid 4194304{thread}"
        LockFactory(held=True, key=key, holder=holder, note=note)
    _head, row, other, _count = screen_of(monkeypatch, 80)
    assert re.search(r" held +\S*… pid 4194304 … ", row)
    assert re.search(r" held +\S*… pid 4194304  ", other)
    assert len(row) <= 80
    _head, row, *_ = screen_of(monkeypatch, 240)
    assert f"{host} pid 4194304 MainThread" in row


def test_room_for_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 80 columns the key gets what columns without a value don't need."""
    key = "tenant-12:order:2024-11-22:770"
    LockFactory(held=True, key=key, holder="web-3.example.com pid 4711 MainThread")
    head, row, _count = screen_of(monkeypatch, 80)
    assert head.split() == ["KEY", "STATE", "HOLDER", "AGE", "REMAINING"]
    assert row.split()[0] == key
    assert len(row) <= 80
    LockFactory(held=True, key=key + "?", note="the night's report for all tenants")
    head, row, _other, _count = screen_of(monkeypatch, 80)
    assert head.split()[-1] == "NOTE"
    assert len(row.split()[0]) >= 20
    head, row, _other, _count = screen_of(monkeypatch, 200)
    assert head.split()[-2:] == ["WAITING", "NOTE"]
    assert "…" not in row


def test_color_on_a_terminal_only() -> None:
    """Colour is for terminals."""
    LockFactory(expired=True)
    screen, file = Terminal(), StringIO()
    call_command("locks", "list", stdout=screen, force_color=True)
    call_command("locks", "list", stdout=file, force_color=True)
    assert "\x1b[" in screen.getvalue()
    assert "\x1b[" not in file.getvalue()


def test_free_has_no_color() -> None:
    """As in the admin, what is free doesn't stand out."""
    LockFactory(free=True, key="k")
    for verb in (["list"], ["show", "k"]):
        screen = Terminal()
        call_command("locks", *verb, stdout=screen, force_color=True)
        assert "\x1b[" not in screen.getvalue()


def test_control_characters_stay_off_the_screen(run: Run) -> None:
    """What somebody wrote into a note can't steer the operator's terminal."""
    LockFactory(held=True, key="k", note="\x1b[2Jgone\n")
    out = run("list")[1]
    assert "\x1b" not in out
    assert "\\x1b[2Jgone\\n" in out


STEERING = "web\x1b[2J\r\n\u202e\x9b pid 1"
SEEN = r"web\x1b[2J\r\n\u202e\x9b pid 1"


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["show", STEERING],
        ["release", STEERING],
        ["release", STEERING, "--ask"],
        ["release", STEERING, "--yes"],
        ["release", "--key", "*", "--yes"],
        ["release", "job", "--yes"],
    ],
    ids=["list", "show", "question", "ask", "release", "release all", "permits"],
)
def test_nothing_steers_the_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    """No key, holder or note does, whatever it says: it is shown instead."""
    for key in (STEERING, "job\x1f1", "job\x1f2"):
        LockFactory(held=True, key=key, holder=STEERING, note=STEERING)
    monkeypatch.setattr("builtins.input", lambda: "n")
    _status, out, err = run(*arguments)
    assert (out + err).replace("\n", "").replace("\t", "").isprintable()
    assert SEEN in out + err


@pytest.mark.parametrize("verb", [["list"], ["show", STEERING]], ids=["list", "show"])
def test_json_does_not_steer_the_terminal(run: Run, verb: list[str]) -> None:
    """It has the exact texts, as JSON writes what can't be printed."""
    LockFactory(held=True, key=STEERING, holder=STEERING)
    _status, out, _err = run(*verb, "--json")
    assert out.replace("\n", "").isprintable()
    facts = json.loads(out)
    facts = facts[0] if verb == ["list"] else facts
    assert (facts["key"], facts["holder"]) == (STEERING, STEERING)


def printed(encoding: str, *arguments: str, **options: Any) -> str:
    """Return what the command writes to a stream that knows few characters."""
    stream = TextIOWrapper(BytesIO(), encoding=encoding)
    call_command("locks", *arguments, stdout=stream, **options)
    stream.seek(0)
    return stream.read()


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_narrow_encoding(encoding: str) -> None:
    """What the output's encoding lacks is shown as an escape, and no error."""
    LockFactory(held=True, key="注文é", holder="höst", note="€")
    key, holder = r"\u6ce8\u6587", "h\\xf6st" if encoding == "ascii" else "höst"
    for verb in (["list"], ["show", "注文é"]):
        shown = printed(encoding, *verb)
        assert key in shown
        assert holder in shown
        facts = json.loads(printed(encoding, *verb, json=True))
        facts = facts[0] if verb == ["list"] else facts
        assert (facts["key"], facts["note"]) == ("注文é", "€")
    asked = printed(encoding, "release", "注文é", ask=True)
    assert f"Asked {holder} to release the lock '{key}" in asked
    told = printed(encoding, "release", "注文é", yes=True)
    assert told.startswith(f"Released '{key}")
    assert DistributedLock.objects.free().filter(pk="注文é").exists()
    with translation.override("ja"):
        assert printed(encoding, "prune", "--older-than", "0")
    assert not DistributedLock.objects.exists()


def test_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """--watch draws anew, within the screen, until it is interrupted."""
    LockFactory.bulk(40, free=True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt
        DistributedLock.objects.filter(key__contains="1").delete()

    monkeypatch.setattr(display.time, "sleep", sleep)
    screen = Terminal()
    call_command("locks", "list", "--watch", "0.5", stdout=screen)
    first, second = screen.getvalue().split("\x1b[H\x1b[2J")[1:]
    assert naps == [0.5, 0.5]
    assert len(first.splitlines()) <= 24
    assert "40 locks, 19 of them not shown" in first
    assert first != second


def test_watch_of_long_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines that the terminal wraps count as several."""
    for number in range(20):
        LockFactory(held=True, key=f"{number:02}" + "k" * 150)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "24")

    def sleep(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(display.time, "sleep", sleep)
    screen = Terminal()
    call_command("locks", "list", "--watch", stdout=screen, no_color=True)
    _home, drawn = screen.getvalue().split("\x1b[H\x1b[2J")
    lines = drawn.splitlines()
    used = sum(-(-len(line) // 80) for line in lines)
    assert 20 <= used <= 23
    assert lines[-1] == f"20 locks, {20 - (len(lines) - 2)} of them not shown"


# release


def test_release(run: Run) -> None:
    """--yes releases at once; signal and log say who did it and why."""
    LockFactory(held=True, key="k", version=3)
    told: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs)

    lock_force_released.connect(receive)
    try:
        status, out, _ = run("release", "k", "--yes", "--reason", "host is gone")
    finally:
        lock_force_released.disconnect(receive)
    assert status == 0
    assert out.startswith("Released 'k'")
    assert stored("k").version == 4
    assert DistributedLock.objects.free().filter(pk="k").exists()
    [kwargs] = told
    assert (kwargs["reason"], kwargs["fencing_token"]) == ("host is gone", 3)
    assert isinstance(kwargs["by"], str)


def test_ask(run: Run) -> None:
    """--ask takes nothing away and doesn't ask back; the row tells since when."""
    LockFactory(held=True, key="k", version=3)
    status, out, _ = run("release", "k", "--ask", "--reason", "deployment")
    assert (status, out) == (0, "Asked host:1:MainThread to release the lock 'k'.\n")
    row = stored("k")
    assert (row.version, row.owner != "") == (3, True)
    _, shown, _ = run("show", "k")
    assert "asked to release" in shown
    [facts] = json.loads(run("list", "--json")[1])
    assert facts["release_requested_at"].endswith("Z")


def test_ask_all_that_match(run: Run) -> None:
    """Of those that match, who holds is asked."""
    LockFactory(held=True, key="a:1")
    LockFactory(cooling=True, key="a:2")
    LockFactory(held=True, key="b:1")
    status, out, _ = run("release", "--key", "a:*", "--ask")
    assert (status, out.count("Asked")) == (0, 1)
    asked = DistributedLock.objects.filter(release_requested_at__isnull=False)
    assert [row.key for row in asked] == ["a:1"]


def test_ask_nobody(run: Run) -> None:
    """Nobody holds what only cools, or is overdue; --older-than is for force."""
    LockFactory(cooling=True, key="k")
    LockFactory(expired=True, key="over")
    LockFactory(free=True, key="free")
    for key, state in [("k", "cooling"), ("over", "expired")]:
        status, out, err = run("release", key, "--ask")
        assert (status, out) == (1, "")
        assert f"the lock {key!r} is {state}: it has no holder who could" in err
        assert "nobody was asked" in err
    for options in (["--ask"], []):
        status, out, err = run("release", "free", *options)
        assert (status, out) == (1, "")
        assert "the lock 'free' is free: nobody holds it" in err
    status, out, err = run("release", "--key", "*", "--ask")
    assert (status, out) == (1, "")
    assert "no held lock matches: nobody was asked" in err
    assert run("release", "k", "--ask", "--older-than", "1")[0] == 64


@pytest.mark.parametrize("which", [["k"], ["--key", "k*"]], ids=["key", "pattern"])
def test_ask_who_has_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch, which: list[str]
) -> None:
    """A later holder than the one that was found is not asked."""
    LockFactory(held=True, key="k")
    ask = Table.request_release

    def ask_too_late(*arguments: Any, **how: Any) -> bool:
        DistributedLock.objects.force_release("k")
        DistributedLock.objects.acquire("k", owner="another", lease=60)
        return ask(*arguments, **how)

    monkeypatch.setattr(Table, "request_release", ask_too_late)
    status, out, err = run("release", *which, "--ask")
    assert (status, out) == (1, "")
    assert "has changed hands: nobody was asked" in err
    assert stored("k").release_requested_at is None


def test_release_logs(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    """A force release is a warning in the log, with its reason."""
    LockFactory(held=True, key="k")
    run("release", "k", "--yes", "--reason", "host is gone")
    # Holders that other tests have forced out learn of it when it suits them.
    told = [r for r in caplog.records if r.getMessage().startswith("force-released")]
    [record] = told
    assert record.levelname == "WARNING"
    assert "host is gone" in record.getMessage()


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ("y", 0),
        ("YES", 0),
        ("n", 1),
        ("", 1),
        (EOFError(), 1),
        # As under nohup, or once the terminal is gone.
        (OSError(errno.EBADF, "Bad file descriptor"), 1),
    ],
    ids=["y", "YES", "n", "return", "end of file", "unreadable"],
)
def test_release_asks(
    run: Run, monkeypatch: pytest.MonkeyPatch, answer: Any, status: int
) -> None:
    """Without --yes it shows whom it hits and asks; anything but yes does nothing."""
    LockFactory(held=True, key="k", note="at work")

    def reply() -> str:
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    monkeypatch.setattr("builtins.input", reply)
    found, out, err = run("release", "k")
    assert found == status
    for word in ("'k'", "host:1:MainThread", "at work", "[y/N]"):
        assert word in err
    assert (out == "") == (status == 1)
    assert DistributedLock.objects.held().filter(pk="k").exists() == (status == 1)


@pytest.mark.parametrize("lost", ["closed before", "closed since", "no text"])
def test_release_without_an_answer(
    run: Run, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """Where nobody can answer, or not in words, nothing is confirmed."""
    LockFactory(held=True, key="k")
    stdin = TextIOWrapper(BytesIO(b"\xff\n"), encoding="utf-8")
    if lost == "closed since":
        stdin.close()
    monkeypatch.setattr("sys.stdin", None if lost == "closed before" else stdin)
    status, out, err = run("release", "k")
    assert (status, out) == (1, "")
    assert "not confirmed: nothing was released" in err
    assert stored("k").version == 1


def test_no_connection_idles_at_the_question(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server may end an idle connection before somebody answers."""
    LockFactory(held=True, key="k")
    idle: list[bool] = []

    def reply() -> str:
        idle.append(connection.connection is not None and not in_memory())
        return "y"

    monkeypatch.setattr("builtins.input", reply)
    assert run("release", "k")[0] == 0
    assert idle == [False]


def test_release_of_what_was_shown(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock that changes hands while the question stands is left alone."""
    LockFactory(held=True, key="k")

    def reply() -> str:
        DistributedLock.objects.force_release("k")
        DistributedLock.objects.acquire("k", owner="another", lease=60)
        return "y"

    monkeypatch.setattr("builtins.input", reply)
    status, _, err = run("release", "k")
    assert status == 1
    assert "changed hands" in err
    assert stored("k").owner == "another"


@pytest.mark.parametrize(
    ("which", "answer"),
    [(["k"], "y"), (["--key", "k*"], "1"), (["--holder", "host:1"], "1")],
    ids=["key", "pattern", "holder"],
)
def test_cooling_since_it_was_shown(
    run: Run, monkeypatch: pytest.MonkeyPatch, which: list[str], answer: str
) -> None:
    """A grant that its holder has released keeps what is left of its hold_at_least."""
    LockFactory(held=True, key="k", owner="o", min_until=now(3600))

    def reply() -> str:
        assert DistributedLock.objects.release("k", owner="o", version=1)
        return answer

    monkeypatch.setattr("builtins.input", reply)
    status, out, err = run("release", *which)
    assert (status, out) == (1, "")
    assert "released or changed hands" in err
    assert DistributedLock.objects.cooling().filter(pk="k", version=1).exists()
    # Shown as cooling, it is released.
    assert run("release", "k", "--yes")[0] == 0
    assert DistributedLock.objects.free().filter(pk="k", version=2).exists()


QUOTED = """'it'"'"'s $HOME*'"""

REFUSED: dict[str, tuple[list[str], str]] = {
    "another grant": (["held", "--fencing-token", "99"], "99"),
    "too young": (["held", "--older-than", "2d"], "has not been held"),
    "free": (["free"], "is free"),
    "unknown": (["nobody's"], 'there is no lock "nobody\'s"; manage.py locks list'),
    "asterisk": (["he*"], "no lock 'he*'; for a pattern write --key 'he*'"),
    "question mark": (["hel?"], "; for a pattern write --key 'hel?'"),
    "for a shell": (["it's $HOME*"], f"write --key {QUOTED}, with list"),
    "control character": (["a\n*"], "'a\\n*'; manage.py locks list shows all"),
    "bracket": (["hel[d]"], "; for a pattern write --key 'hel[d]'"),
}


@pytest.mark.parametrize(("arguments", "words"), REFUSED.values(), ids=REFUSED)
def test_release_refused(run: Run, arguments: list[str], words: str) -> None:
    """What there is nothing to do to is status 1, and nothing happens."""
    one_of_each()
    status, out, err = run("release", *arguments, "--yes")
    assert (status, out) == (1, "")
    assert words in err
    assert DistributedLock.objects.held().count() == 1


@pytest.mark.parametrize("place", ["--backend locmem", "--database default"])
def test_advice_leads_to_the_same_place(run: Run, place: str) -> None:
    """The list to look at is that of the database or backend that was asked."""
    status, out, err = run("show", "nobody's", *place.split())
    assert (status, out) == (1, "")
    assert f"; manage.py locks list {place} shows all" in err


def test_database_beside_a_wrong_entry(run: Run, settings: Any) -> None:
    """The default backend's entry is wrong: status 78, also with --database."""
    settings.DBLOCKS = {"default": {"BACKEND": "dblocks.backends.nowhere.Backend"}}
    for named in ([], ["--database", "default"]):
        status, out, err = run("list", *named)
        assert (status, out) == (78, "")
        assert "nowhere" in err


def test_advice_for_a_pattern_that_begins_with_a_dash(run: Run) -> None:
    """Copied, it isn't taken for another option."""
    LockFactory(held=True, key="-hello")
    assert "write --key='-hel*', with list" in run("show", "--", "-hel*")[2]
    assert "-hello" in run("list", "--key=-hel*")[1]


@pytest.mark.parametrize(
    "arguments", [["--older-than", "1h"], ["--fencing-token", "1"]]
)
def test_release_that_applies(run: Run, arguments: list[str]) -> None:
    """The right token, or one held for long enough, is released."""
    LockFactory(held=True, key="k")
    assert run("release", "k", "--yes", *arguments)[0] == 0


def test_release_of_a_permit(run: Run) -> None:
    """The permit that is named is released, and no other."""
    three_permits()
    status, out, err = run("release", "job", "--permit", "10", "--yes")
    assert (status, err) == (0, "")
    assert out.startswith("Released 'job', permit 10 (")
    assert [row.permit for row in DistributedLock.objects.held()] == [2]
    # The only one that is left needn't be named.
    assert run("release", "job", "--yes")[1].startswith("Released 'job', permit 2 (")
    status, _, err = run("release", "job", "--yes")
    assert (status, "the lock 'job' is free" in err) == (1, True)
    status, _, err = run("release", "job", "--permit", "10", "--yes")
    assert (status, "permit 10 of the lock 'job' is free" in err) == (1, True)


def test_release_of_several_permits(run: Run) -> None:
    """Of several, one must be named; the error lists them, and nothing happens."""
    three_permits()
    status, out, err = run("release", "job", "--yes")
    assert (status, out) == (64, "")
    assert "--permit N for one of 2 (host:2), 10 (host:1)" in err
    assert DistributedLock.objects.held().count() == 2
    for permit in range(30):
        LockFactory(held=True, holder="host", key=f"all\x1f{permit}")
    assert run("release", "all", "--yes")[2].count("(host)") == locks.MAX_NAMED


def test_release_of_a_plain_key_beside_permits(run: Run) -> None:
    """Without a number it is the lock without permits, where that is taken."""
    LockFactory(held=True, key="job\x1f0")
    LockFactory(held=True, key="job")
    assert run("release", "job", "--yes")[1].startswith("Released 'job' (")
    assert [row.permit for row in DistributedLock.objects.held()] == [0]


def test_release_of_a_permit_asks(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The question names key and permit."""
    three_permits()
    monkeypatch.setattr("builtins.input", lambda: "n")
    status, _, err = run("release", "job", "--permit", "2")
    assert status == 1
    assert "Permit 2 of the lock 'job':" in err


ALL = ["release", "--holder", "web-3"]


def of_web_3() -> None:
    """Make what a dead host left, and its neighbours."""
    LockFactory(held=True, key="a", version=3, holder="web-3 pid 7 MainThread")
    LockFactory(expired=True, key="b\x1f2", holder="web-3 pid 7 Thread-1")
    LockFactory(held=True, key="c", holder="web-33 pid 7 MainThread")
    LockFactory(cooling=True, key="d", holder="web-3 pid 7 MainThread")
    LockFactory(free=True, key="e", holder="web-3 pid 7 MainThread")


def keys_taken() -> set[str]:
    return set(DistributedLock.objects.exclude(owner="").values_list("pk", flat=True))


def test_release_of_what_a_host_held(run: Run) -> None:
    """--holder releases what that host holds, each with a line, and nothing else."""
    of_web_3()
    told: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs)

    lock_force_released.connect(receive)
    try:
        status, out, err = run(*ALL, "--yes", "--reason", "the host is gone")
    finally:
        lock_force_released.disconnect(receive)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "Released 'a' (fencing token 3, web-3 pid 7 MainThread).",
        "Released 'b', permit 2 (fencing token 1, web-3 pid 7 Thread-1).",
    ]
    assert keys_taken() == {"c"}
    assert DistributedLock.objects.cooling().filter(pk="d").exists()
    assert {(each["key"], each["reason"]) for each in told} == {
        ("a", "the host is gone"),
        ("b", "the host is gone"),
    }
    assert run(*ALL, "--yes")[0] == 1


@pytest.mark.parametrize(
    ("options", "left"),
    [
        (["--key", "order:*"], {"other", "order"}),
        (["--key", "order:*", "--holder", "web-1"], {"order:2", "other", "order"}),
        (["--key", "*", "--older-than", "2h"], {"order:1", "other", "order"}),
        (["--key", "nothing"], {"order:1", "order:2", "other", "order"}),
    ],
)
def test_release_by_pattern(run: Run, options: list[str], left: set[str]) -> None:
    """What matches all options is released, and what is cooling too."""
    LockFactory(held=True, key="order:1", holder="web-1 pid 1 t")
    LockFactory(held=True, key="order:2", holder="web-2 pid 2 t", age=7300)
    LockFactory(held=True, key="other", holder="web-3 pid 2 t")
    LockFactory(held=True, key="order", holder="web-3 pid 2 t")
    LockFactory(cooling=True, key="order:3")
    LockFactory(free=True, key="order:4", age=9000)
    status, _out, err = run("release", *options, "--yes")
    assert status == (1 if "nothing" in options else 0)
    assert ("nothing that is taken matches" in err) == (status == 1)
    assert keys_taken() == left
    cooling = DistributedLock.objects.cooling().exists()
    assert cooling == (options != ["--key", "order:*"])


@pytest.mark.parametrize(
    ("answer", "status"), [("2", 0), (" 2 ", 0), ("1", 1), ("y", 1), ("", 1)]
)
def test_release_of_several_asks(
    run: Run, monkeypatch: pytest.MonkeyPatch, answer: str, status: int
) -> None:
    """It shows what it would release and asks for how many that are."""
    of_web_3()
    monkeypatch.setattr("builtins.input", lambda: answer)
    found, out, err = run(*ALL)
    assert found == status
    assert (out == "") == (status == 1)
    head, first, second, *rest = err.splitlines()
    assert head.split()[:3] == ["KEY", "PERMIT", "STATE"]
    assert first.split()[:3] == ["a", "-", "held"]
    assert second.split()[:3] == ["b", "2", "expired"]
    assert "two may be at work" in rest[0]
    assert rest[1].startswith("2 locks; type 2 to force the release: ")
    assert keys_taken() == ({"a", "b\x1f2", "c"} if status else {"c"})


def test_release_of_several_of_which_one_changed(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What changes hands while the question stands is left alone and named."""
    of_web_3()

    def reply() -> str:
        DistributedLock.objects.force_release("a")
        DistributedLock.objects.acquire("a", owner="another", lease=60)
        return "2"

    monkeypatch.setattr("builtins.input", reply)
    status, out, err = run(*ALL)
    assert status == 1
    assert len(out.splitlines()) == 1
    assert (
        "1 of 2 was released or changed hands, and was left alone: the lock 'a'" in err
    )
    assert stored("a").owner == "another"


class Plain:
    """A stream that can only be written to."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def test_question_on_a_plain_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stream has nothing to flush, the question counts as asked."""
    LockFactory(held=True, key="k")
    monkeypatch.setattr("builtins.input", lambda: "y")
    stderr = Plain()
    call_command("locks", "release", "k", stdout=StringIO(), stderr=stderr)
    assert "Release it? [y/N] " in stderr.text
    assert DistributedLock.objects.free().filter(pk="k").exists()


def test_question_in_a_narrow_encoding(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the encoding of standard error lacks is shown as an escape there, too."""
    LockFactory(held=True, key="注文")
    monkeypatch.setattr("builtins.input", lambda: "y")
    stderr = TextIOWrapper(BytesIO(), encoding="ascii")
    call_command("locks", "release", "注文", stdout=StringIO(), stderr=stderr)
    stderr.seek(0)
    assert r"\u6ce8\u6587" in stderr.read()
    assert DistributedLock.objects.free().filter(pk="注文").exists()


def test_options_by_position() -> None:
    """The command can be made as Django's own."""
    plain = locks.Command(StringIO(), StringIO(), True)
    colored = locks.Command(StringIO(), StringIO(), False, True)
    assert plain.style.ERROR("x") == "x"
    assert colored.style.ERROR("x") == color_style(force_color=True).ERROR("x") != "x"


@pytest.fixture
def writers(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads for messages that are started in the test."""
    started: list[threading.Thread] = []
    start = threading.Thread.start

    def note(thread: threading.Thread) -> None:
        if thread.name == "dblocks-standard-error":
            started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", note)
    return started


def test_threads_of_a_call_from_code(
    writers: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only messages take a thread, and it has ended when the call returns."""
    LockFactory(held=True, key="k")
    call_command("locks", "list", stdout=StringIO())
    assert not writers
    monkeypatch.setattr("builtins.input", lambda: "y")
    stderr = StringIO()
    call_command("locks", "release", "k", stdout=StringIO(), stderr=stderr)
    assert "Release it? [y/N] " in stderr.getvalue()
    assert writers
    assert not any(thread.is_alive() for thread in writers)


# prune


def test_prune(run: Run) -> None:
    """Old free and expired rows go; held and cooling ones stay."""
    one_of_each()
    assert run("prune", "--older-than", "30m", "--dry-run") == (
        0,
        "2 locks would be deleted.\n",
        "",
    )
    assert DistributedLock.objects.count() == 4
    assert run("prune", "--older-than", "30m") == (0, "2 locks were deleted.\n", "")
    kept = DistributedLock.objects.order_by("key").values_list("key", flat=True)
    assert list(kept) == ["cooling", "held"]
    assert run("prune", "--older-than", "2h")[1] == "0 locks were deleted.\n"


def test_prune_one(run: Run) -> None:
    """One is singular."""
    LockFactory(free=True)
    assert run("prune", "--older-than", "1", "--dry-run")[1] == (
        "1 lock would be deleted.\n"
    )
    assert run("prune", "--older-than", "1")[1] == "1 lock was deleted.\n"


def test_prune_shows_progress(run: Run) -> None:
    """With more verbosity, or on a terminal, large tables show progress."""
    LockFactory.bulk(1200, free=True)
    status, out, err = run("prune", "--older-than", "60", "-v", "2")
    assert (status, out) == (0, "1200 locks were deleted.\n")
    batches = range(200, 1201, 200)
    assert err.splitlines() == [f"{deleted} locks ..." for deleted in batches]


# Usage


@pytest.mark.parametrize(
    "arguments",
    [
        ["list"],
        ["show", "held"],
        ["show", "unknown"],
        ["release", "held", "--yes"],
        ["release", "unknown", "--yes"],
        ["prune", "--older-than", "1"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_verbosity_0_is_silent(run: Run, arguments: list[str]) -> None:
    """With verbosity 0 only the status speaks."""
    one_of_each()
    status, out, err = run(*arguments, "--verbosity", "0")
    assert (out, err) == ("", "")
    assert status == ("unknown" in arguments)


USAGE: dict[str, tuple[list[str], str]] = {
    "no verb": ([], "list|show|release|prune"),
    "no such verb": (["frob"], "frob"),
    "no key": (["release"], "KEY"),
    "all and yes": (["release", "--yes"], "--key PATTERN or --holder TEXT"),
    "key twice": (["release", "k", "--key", "k*"], "without --key"),
    "key and holder": (["release", "k", "--holder", "h"], "without --key"),
    "token of several": (["release", "--key", "k", "--fencing-token", "1"], "need KEY"),
    "permit of several": (["release", "--holder", "h", "--permit", "1"], "need KEY"),
    "reason": (["release", "k", "--reason", "r" * 256], "--reason must not be longer"),
    "no such order": (["list", "--sort", "note"], "note"),
    "limit": (["list", "--limit", "0"], "1 or more"),
    "no age": (["prune"], "--older-than"),
    "negative age": (["prune", "--older-than", "-1"], "0 or more"),
    "no such state": (["list", "--state", "lost"], "lost"),
    "no such database": (["list", "--database", "nope"], "nope"),
    "no such backend": (["list", "--backend", "nope"], "nope"),
    "both": (
        ["list", "--database", "default", "--backend", "default"],
        "not allowed with",
    ),
    "json and watch": (["list", "--json", "--watch"], "not allowed with"),
    "watch without a pause": (["list", "--watch", "0"], "from 0.1 s to 366 days"),
    "long key": (["show", "k" * 256], "longer than 255"),
    "token": (["release", "k", "--fencing-token", "x"], "--fencing-token"),
    "permit": (["show", "k", "--permit", "x"], "--permit"),
    "blank holder": (
        ["release", "--holder", "", "--yes"],
        "--holder must not be blank",
    ),
    "blank holder to ask": (["release", "--holder", " ", "--ask"], "--holder must not"),
    "no text": (["list", "--key", "\udcff*"], "--key must not contain a lone"),
    "no text to release": (["release", "--holder", "\udcff", "--yes"], "--holder must"),
    "blank pattern": (["release", "--key", " ", "--yes"], "--key must not be blank"),
    "one is blank": (["release", "--key", "", "--holder", "h", "--yes"], "--key must"),
    "blank holder to list": (["list", "--holder", ""], "--holder must not be blank"),
    "endless age": (["prune", "--older-than", "366001d"], "from 0 s to 366000 days"),
    "endless age to hold": (
        ["release", "k", "--older-than", "9" * 400 + "d", "--yes"],
        "--older-than must be",
    ),
    "negative permit": (["release", "k", "--permit", "-1"], "from 0 to 999"),
    "permit in the key": (["show", "k\x1f1"], "U+001F"),
}


@pytest.mark.parametrize(("arguments", "word"), USAGE.values(), ids=USAGE)
def test_bad_usage(run: Run, arguments: list[str], word: str) -> None:
    """Bad usage is status 64 and one line, and nothing happens."""
    LockFactory(held=True, key="k", holder="host pid 1 (a thread)")
    status, out, err = run(*arguments)
    assert (status, out) == (64, "")
    assert len(err.splitlines()) == 1
    assert word in err
    assert (stored("k").version, stored("k").release_requested_at) == (1, None)


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["list", "--state", "hold"], "manage.py locks list"),
        (["release", "k", "--yess"], "manage.py locks"),
        (["prune"], "manage.py locks prune"),
        (["free"], "manage.py locks"),
        ([], "manage.py locks"),
    ],
)
def test_bad_usage_leads_to_help(run: Run, arguments: list[str], command: str) -> None:
    """Who wrote an option wrong is sent to the help that names it."""
    status, _out, err = run(*arguments)
    assert status == 64
    assert err.endswith(f"; {command} --help shows what to write\n")


def test_bad_usage_from_code() -> None:
    """Called from code, bad usage is an exception with the same status."""
    with pytest.raises(CommandError) as caught:
        call_command("locks", "prune")
    assert caught.value.returncode == 64
    assert "; locks prune --help shows" in str(caught.value)


def test_missing_table(run: Run) -> None:
    """A database without the table is status 78 and one line."""

    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE dblocks_distributedlock RENAME TO put_aside")
    try:
        status, out, err = run("list")
    finally:
        with connections["default"].cursor() as cursor:
            cursor.execute("ALTER TABLE put_aside RENAME TO dblocks_distributedlock")
    assert (status, out) == (78, "")
    assert "migrate dblocks" in err


def test_help(run: Run) -> None:
    """Every option has a default in its help; there are three examples."""
    status, out, _ = run("--help")
    assert status == 0
    assert out.count("manage.py locks ") == 6  # the usage and five examples
    for verb in ("list", "show", "release", "prune"):
        assert run(verb, "--help")[0] == 0


# Engines without a table


class Silent(LocMemBackend):
    """Can't list its locks."""

    errors = (ConnectionError,)
    entries = BaseBackend.entries  # type: ignore[assignment]


class WithoutTokens(LocMemBackend):
    """Has no fencing tokens, and knows who waits."""

    has_fencing_tokens = False

    def entries(self, key: str | None = None) -> list[Entry]:
        return [replace(entry, version=None) for entry in super().entries(key)]

    def waiters(self, key: str) -> Waiters:
        return Waiters(3)


class Unplugged(LocMemBackend):
    """Lists its locks, and is out of reach for the rest."""

    errors = (ConnectionError,)

    def waiters(self, key: str) -> Waiters:
        raise ConnectionError("nobody\nlistens")

    def force_release(self, key: str, **how: Any) -> bool:
        raise ConnectionError("nobody\nlistens")


class Unreachable(Unplugged):
    """Is out of reach, which one who iterates finds out."""

    def entries(self, key: str | None = None) -> Iterable[Entry]:  # type: ignore[override]
        yield from ()
        raise ConnectionError("nobody\nlistens")


class Refused(LocMemBackend):
    """Learns from its server that its settings are wrong."""

    def entries(self, key: str | None = None) -> list[Entry]:
        raise ImproperlyConfigured("LEASE is 100 s:\nset another")


@pytest.fixture
def engine(run: Run, settings: Any, request: pytest.FixtureRequest) -> Iterator[Run]:
    """Run the command on an engine in memory, or on the one that is the parameter."""
    kind = getattr(request, "param", LocMemBackend)
    path = f"{kind.__module__}.{kind.__name__}"
    settings.DBLOCKS = {"engine": {"BACKEND": path}}

    yield lambda *arguments: run(*arguments, "--backend", "engine")
    clear_locks("engine")


def one_of_each_in_memory() -> ExitStack:
    """Make what :func:`one_of_each` does; the holders last as long as the block."""
    here: dict[str, Any] = {"backend": "engine"}
    for key, least in (("cooling", 3600), ("free", 0)):
        distributed_lock(key, hold_at_least=least, **here).acquire().release()
    holders = ExitStack()
    overdue = distributed_lock("expired", lease=30, renew=False, **here).acquire()
    holders.callback(overdue.release)
    move_clock(40, backend="engine")
    held = hold_elsewhere("held", lease=3600, note="at work", **here)
    holders.enter_context(held)
    move_clock(120, backend="engine")
    return holders


def permits_in_memory(*names: str) -> ExitStack:
    holders = ExitStack()
    for name in names:
        held = hold_elsewhere("job", permits=3, note=name, backend="engine")
        holders.enter_context(held)
    return holders


def seen(key: str) -> Reading:
    return backends["engine"].read_all([key])[key]


def test_list_of_an_engine(engine: Run) -> None:
    """The table is that of rows, and --state shows the locks in that state alone."""
    LockFactory(held=True, key="row")
    with one_of_each_in_memory():
        status, out, err = engine("list")
        assert (status, err) == (0, "")
        head, *rows = out.splitlines()
        assert head.split() == COLUMNS
        states = ["cooling", "expired", "free", "held"]
        assert [row.split()[:3] for row in rows] == [
            [each, "-", each] for each in states
        ]
        assert rows[-1].endswith("at work")
        assert keys_of(engine("list", "--key", "*ee*", "--sort", "age")[1]) == ["free"]
        assert keys_of(engine("list", "--holder", "held elsewhere")[1]) == ["held"]
        assert keys_of(engine("list", "--holder", "pid *")[1]) == ["expired", "held"]
        for state in states:
            found = json.loads(engine("list", "--state", state, "--json")[1])
            assert [lock["key"] for lock in found] == [state]


def test_json_of_an_engine(engine: Run) -> None:
    """The shape is that of rows, by the engine's clock."""
    with one_of_each_in_memory():
        lock = json.loads(engine("show", "held", "--json")[1])
        [listed] = json.loads(engine("list", "--state", "held", "--json")[1])
        cooling = json.loads(engine("show", "cooling", "--json")[1])
        expired = json.loads(engine("show", "expired", "--json")[1])
        held = seen("held")
    assert list(lock) == list(listed)
    acquired_at, expires_at = (
        datetime.fromisoformat(lock.pop(name).replace("Z", "+00:00"))
        for name in ("acquired_at", "expires_at")
    )
    now = datetime.now(timezone.utc)
    assert timedelta(seconds=119) < now - acquired_at < timedelta(seconds=180)
    assert timedelta(0) < expires_at - now <= timedelta(seconds=3600)
    assert 119 < lock.pop("age") < 180
    assert 3400 < lock.pop("remaining") <= 3600
    assert lock.pop("release_requested_at") is None
    assert lock.pop("holder").endswith("held elsewhere")
    assert lock == {
        "key": "held",
        "permit": None,
        "state": "held",
        "owner": held.owner,
        "note": "at work",
        "hold_count": 1,
        "fencing_token": held.version,
        "waiting": None,
    }
    assert (cooling["owner"], cooling["age"]) == ("", None)
    assert 3400 < cooling["remaining"] < 3600
    assert expired["remaining"] == 0
    assert 150 < expired["age"] < 200


def test_watch_of_an_engine(engine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """--watch asks the engine anew each time."""
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 2:
            raise KeyboardInterrupt
        distributed_lock("later", backend="engine").acquire().release()

    monkeypatch.setattr(display.time, "sleep", sleep)
    _status, out, _err = engine("list", "--watch")
    assert [line.split("\t")[0] for line in out.splitlines()] == ["KEY", "KEY", "later"]


def test_default_engine(run: Run, settings: Any) -> None:
    """The default backend is asked, whatever it is; --database names a table."""
    LockFactory(held=True, key="row")
    settings.DBLOCKS = {
        "default": {"BACKEND": "dblocks.backends.locmem.LocMemBackend"},
    }
    with hold_elsewhere("entry"):
        # Others may have left theirs, free, in this process's memory.
        held = json.loads(run("list", "--json", "--state", "held")[1])
        assert [lock["key"] for lock in held] == ["entry"]
        found = json.loads(run("list", "--json", "--database", "default")[1])
        assert [lock["key"] for lock in found] == ["row"]
        assert run("show", "row")[0] == 1
    clear_locks()


def test_permits_of_an_engine(engine: Run) -> None:
    """They are shown apart, and one of several must be named to be released."""
    with hold_elsewhere("jo", backend="engine"), permits_in_memory("one", "two"):
        shown = json.loads(engine("show", "job", "--json")[1])
        assert (shown["key"], len(shown["permits"])) == ("job", 2)
        first, second = shown["permits"]
        assert first["permit"] < second["permit"]
        assert {first["note"], second["note"]} == {"one", "two"}
        number = str(second["permit"])
        one = json.loads(engine("show", "job", "--permit", number, "--json")[1])
        assert one["owner"] == second["owner"]
        assert engine("list")[1].splitlines()[0].split()[:2] == ["KEY", "PERMIT"]
        status, out, err = engine("release", "job", "--yes")
        assert (status, out) == (64, "")
        assert "2 permits of the lock 'job' are taken" in err
        status, out, _ = engine("release", "job", "--permit", number, "--yes")
        assert (status, out.startswith(f"Released 'job', permit {number} (")) == (
            0,
            True,
        )
        assert engine("release", "job", "--permit", number, "--yes")[0] == 1
        out = engine("release", "job", "--yes")[1]
        assert out.startswith(f"Released 'job', permit {first['permit']} (")
    assert engine("show", "job", "--permit", "999")[0] == 1


def test_release_on_an_engine(engine: Run) -> None:
    """Token and age choose the grant; the signal says who did it and why."""
    told: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs)

    with one_of_each_in_memory():
        for arguments, words in [
            (["held", "--fencing-token", "99"], "99"),
            (["held", "--older-than", "2d"], "has not been held"),
            (["free"], "is free"),
            (["nobody's"], "there is no lock"),
        ]:
            status, out, err = engine("release", *arguments, "--yes")
            assert (status, out) == (1, "")
            assert words in err
        token = seen("held").version
        lock_force_released.connect(receive)
        try:
            status, out, _ = engine(
                *["release", "held", "--yes", "--reason", "host is gone"],
                *["--fencing-token", str(token), "--older-than", "60"],
            )
        finally:
            lock_force_released.disconnect(receive)
        assert status == 0
        assert out.startswith(f"Released 'held' (fencing token {token}, ")
        [kwargs] = told
        assert (kwargs["backend"], kwargs["reason"]) == ("engine", "host is gone")
        assert isinstance(kwargs["by"], str)
        assert engine("release", "--key", "cool*", "--yes")[0] == 0
        free = json.loads(engine("list", "--state", "free", "--json")[1])
        assert [lock["key"] for lock in free] == ["cooling", "free", "held"]


@pytest.mark.parametrize("engine", [LocMemBackend, WithoutTokens], indirect=True)
def test_release_on_an_engine_asks(
    engine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the grant that was shown is released, with and without fencing tokens."""
    answers = ["n", "take over", "y"]

    def reply() -> str:
        answer = answers.pop(0)
        if answer == "take over":
            assert backends["engine"].force_release("k")
            holders.enter_context(hold_elsewhere("k", backend="engine"))
            return "y"
        return answer

    monkeypatch.setattr("builtins.input", reply)
    with ExitStack() as holders:
        first = hold_elsewhere("k", note="at work", backend="engine")
        holders.enter_context(first)
        status, out, err = engine("release", "k")
        assert (status, out) == (1, "")
        for word in ("'k'", "at work", "[y/N]", "nothing was released"):
            assert word in err
        status, out, err = engine("release", "k")
        assert (status, out) == (1, "")
        assert "changed hands" in err
        assert engine("release", "k")[0] == 0
        assert not distributed_lock("k", backend="engine").locked()


@pytest.mark.parametrize("engine", [LocMemBackend, WithoutTokens], indirect=True)
def test_cooling_on_an_engine_since_it_was_shown(
    engine: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant that its holder has released keeps what is left of its hold_at_least."""
    lock = distributed_lock("k", hold_at_least=3600, backend="engine")
    lease = lock.acquire()

    def reply() -> str:
        assert lease.release()
        return "y"

    monkeypatch.setattr("builtins.input", reply)
    status, out, err = engine("release", "k")
    assert (status, out) == (1, "")
    assert "released or changed hands" in err
    assert lock.locked()
    assert engine("release", "k", "--yes")[0] == 0
    assert not lock.locked()


@pytest.mark.parametrize("engine", [WithoutTokens], indirect=True)
def test_engine_without_tokens(engine: Run) -> None:
    """Without tokens, null is shown, and none can be asked for; waiters are counted."""
    with hold_elsewhere("k", backend="engine"):
        shown = json.loads(engine("show", "k", "--json")[1])
        assert (shown["fencing_token"], shown["waiting"]) == (None, 3)
        assert "None" not in engine("show", "k")[1]
        status, out, err = engine("release", "k", "--yes", "--fencing-token", "1")
        assert (status, out) == (64, "")
        assert "leave out --fencing-token" in err
        status, out, _ = engine("release", "k", "--yes")
        assert status == 0
        assert "token" not in out
    assert json.loads(engine("show", "k", "--json")[1])["waiting"] is None


@pytest.mark.parametrize(
    "arguments", [["--older-than", "1"], ["--older-than=1", "--dry-run"]]
)
def test_prune_on_an_engine(engine: Run, arguments: list[str]) -> None:
    """What has no table needs no pruning; that is bad usage, in one line."""
    status, out, err = engine("prune", *arguments)
    assert (status, out) == (64, "")
    assert len(err.splitlines()) == 1
    assert "the backend 'engine' needs no pruning" in err


VERBS = [["list"], ["list", "--watch"], ["show", "k"], ["release", "k", "--yes"]]


@pytest.mark.parametrize("engine", [Silent], indirect=True)
@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_engine_that_cannot_list(engine: Run, arguments: list[str]) -> None:
    """What an engine can't do is bad usage, in one line."""
    status, out, err = engine(*arguments)
    assert (status, out) == (64, "")
    assert len(err.splitlines()) == 1
    assert "The backend 'engine' can't list its locks" in err


@pytest.mark.parametrize(
    "engine", [Unreachable, Unplugged], indirect=True, ids=["at once", "later"]
)
@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_engine_out_of_reach(engine: Run, arguments: list[str]) -> None:
    """An engine that doesn't answer is status 69 and one line that names it."""
    with hold_elsewhere("k", backend="engine"):
        status, out, err = engine(*arguments)
    assert (status, out) == (69, "")
    assert (
        "the backend 'engine' is out of reach: ConnectionError: nobody listens" in err
    )
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("engine", [Refused], indirect=True)
@pytest.mark.parametrize("arguments", VERBS, ids=" ".join)
def test_engine_misconfigured(engine: Run, arguments: list[str]) -> None:
    """Settings that only the server finds wrong are status 78 and one line."""
    status, out, err = engine(*arguments)
    assert (status, out) == (78, "")
    assert err == "CommandError: LEASE is 100 s: set another\n"


def test_engine_that_cannot_be_made(run: Run, settings: Any) -> None:
    """A backend whose class isn't there is status 78."""
    settings.DBLOCKS = {"engine": {"BACKEND": "no.such.Backend"}}
    status, out, err = run("list", "--backend", "engine")
    assert (status, out) == (78, "")
    assert "no.such.Backend" in err


@pytest.mark.parametrize("setting", [{"LEASE": 30}, ["default"], {"default": 30}])
def test_malformed_setting(run: Run, settings: Any, setting: Any) -> None:
    """A setting that isn't made of dicts is status 78, and one line says so."""
    settings.DBLOCKS = setting
    status, out, err = run("list")
    assert (status, out) == (78, "")
    assert len(err.splitlines()) == 1
    assert "DBLOCKS m" in err
    with pytest.raises(CommandError, match="DBLOCKS m") as caught:
        call_command("run_locked", "a", "--", "true")
    assert caught.value.returncode == 78


# What is said in unusual cases


def test_user_without_a_name(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who releases by force is on record as unknown where the system has no name."""

    def fail() -> str:
        raise KeyError("getpwuid(): uid not found: 4711")

    monkeypatch.setattr(locks.getpass, "getuser", fail)
    LockFactory(held=True, key="k")
    assert run("release", "k", "--yes")[0] == 0
    assert Intervention.objects.get(key="k").by == "unknown"


def test_user_whose_name_is_no_text(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name may be whatever bytes the environment has."""
    monkeypatch.setattr(locks.getpass, "getuser", lambda: "caf\udce9")
    LockFactory(held=True, key="k")
    assert run("release", "k", "--yes")[0] == 0
    assert Intervention.objects.get(key="k").by == r"caf\udce9"


@pytest.mark.parametrize(
    ("reading", "said"),
    [
        (
            Reading(),
            "others queue for it or, in a database, a transaction has its row or the "
            "whole database locked",
        ),
        (
            Reading(remaining=2, holder="web-1"),
            "web-1 has released it, and it stays taken for another 2.0 s",
        ),
        (
            Reading(owner="o", remaining=2),
            "it is held by somebody; its lease can end in 2.0 s",
        ),
        (
            Reading(owner="o", remaining=2, holder="web-1", note="job", permit=0),
            "all permits are taken, one by web-1 (job); its lease can end in 2.0 s",
        ),
        (
            Reading(owner="o", remaining=2, holder="web\n", note="\x1b[2J"),
            r"it is held by web\n (\x1b[2J); its lease can end in 2.0 s",
        ),
    ],
    ids=["nobody", "cooling", "held", "permit", "hostile"],
)
def test_who_has_it(reading: Reading, said: str) -> None:
    """Whoever is refused is told who has the lock, as far as that is known."""
    assert holder_of(reading) == said


@pytest.mark.parametrize("width", [60, 30, 12, 1])
def test_narrow_table(width: int) -> None:
    """However narrow the terminal is, a lock has a line, and its key can be copied."""
    keys = ["nightly-import-of-orders", "stock:4711", "k"]
    for key in keys:
        LockFactory(held=True, key=key, note="at work")
    found = [as_json(lock) for lock in DistributedLock.objects.with_state()]
    _heading, *lines = [line for line, _state in table(found, width)]
    assert sorted(line.split()[0] for line in lines) == sorted(keys)


def test_asking_a_holder_without_a_token(run: Run) -> None:
    """An engine without tokens is asked too, and only while the same owner holds."""
    with hold_elsewhere("k", backend="locmem") as lease:
        assert run("release", "k", "--ask", "--yes", "--backend", "locmem")[0] == 0
        lease.renew()
        assert lease.release_requested


def test_busy_database() -> None:
    """On SQLite a database that another process writes to is not out of reach."""
    error = statuses.database_failure(OperationalError("database is locked"), "default")
    assert error.returncode == 69
    is_sqlite = connection.vendor == "sqlite"
    assert ("the database 'default' is busy" in str(error)) == is_sqlite
    assert ("the database 'default' is out of reach" in str(error)) != is_sqlite
    assert "OperationalError: database is locked" in str(error)


@pytest.mark.usefixtures("committed")
def test_interrupted(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the row is waited for ends the command in one line."""
    LockFactory(key="k", held=True)

    def wait_in_vain(*_: Any, **__: Any) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Table, "force_release", wait_in_vain)
    status, out, err = run("release", "k", "--yes")
    assert (status, out) == (130, "")
    assert "interrupted: what was not reported may not have been done" in err
    assert run("release", "k", "--yes", "--verbosity", "0") == (130, "", "")
    with pytest.raises(KeyboardInterrupt):
        call_command("locks", "release", "k", "--yes")


def test_interrupted_at_the_question(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C is no answer: the command is interrupted, and nothing was released."""
    LockFactory(key="k", held=True)

    def reply() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", reply)
    status, out, err = run("release", "k")
    assert (status, out) == (130, "")
    assert "[y/N] \n" in err
    assert stored("k").version == 1


@pytest.mark.usefixtures("two_writers")
def test_row_locked_by_a_transaction(run: Run, other: OtherThread) -> None:
    """A row that a transaction has pinned is not a database out of reach."""
    lease = distributed_lock("k").acquire()

    def release_impatiently() -> tuple[int, str, str]:
        limit = "SET innodb_lock_wait_timeout = 1"
        if connection.vendor == "postgresql":
            limit = "SET lock_timeout = '1s'"
        with connection.cursor() as cursor:
            cursor.execute(limit)
        return run("release", "k", "--yes")

    with transaction.atomic():
        lease.guard()
        status, out, err = other.do(release_impatiently)
    assert (status, out) == (69, "")
    assert "has the lock's row, or the whole table, locked" in err
    assert "out of reach" not in err
    assert lease.release()
