"""``run_locked``: options, exit statuses, locks that are lost, databases that fail."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import NotSupportedError, connection

from dblocks import distributed_lock
from dblocks.backends.locmem import LocMemBackend
from dblocks.backends.values import Grant, Granted, Reading, Request
from dblocks.conf import backends
from dblocks.holding.holds import margin
from dblocks.management.commands import run_locked
from dblocks.management.run_plan import Plan, make_plan
from dblocks.models import DistributedLock
from dblocks.supervision import launcher, sentinel, supervisor
from dblocks.supervision.signals import Signals
from dblocks.supervision.supervisor import Supervisor
from dblocks.test import clear_locks, hold_elsewhere
from tests.support.commands import (
    SLEEP,
    Commands,
    environment,
    family,
    finish,
    gone,
    relay,
    run,
    running,
    shell,
    stubborn_family,
)
from tests.support.factories import stored
from tests.support.fixtures import OtherThread
from tests.support.timing import DEADLINE, SLACK, takes

# Usage

USAGE = {
    "no command": (["k"], "-- COMMAND"),
    "no command after the dashes": (["k", "--"], "-- COMMAND"),
    "no dashes": (["k", "true"], "-- COMMAND"),
    "no key": (["--", "true"], "KEY"),
    "negative wait": (["k", "--wait", "-1", "--", "true"], "0 or more"),
    "wait that is no number": (["k", "--wait", "soon", "--", "true"], "write seconds"),
    "endless wait": (["k", "--wait", "inf", "--", "true"], "write seconds"),
    "negative lease": (["k", "--lease=-5", "--", "true"], "0 or more"),
    "lease of nothing": (["k", "--lease", "0", "--", "true"], "from 0.1 s"),
    "negative hold": (["k", "--hold-at-least", "-1", "--", "true"], "0 or more"),
    "keys around an option": (
        ["k", "--wait", "1", "k2", "--", "true"],
        "k2; write: manage.py run_locked KEY [KEY ...] [options]",
    ),
    "empty second key": (["k", "", "--", "true"], "empty"),
    "no permits": (["k", "--permits", "0", "--", "true"], "from 1 to 1,000"),
    "permits in words": (["k", "--permits", "two", "--", "true"], "--permits"),
    "permits of several keys": (
        ["k", "k2", "--permits", "2", "--", "true"],
        "permits=2 needs one key",
    ),
    "no room for permits": (
        ["k" * 255, "--permits", "2", "--", "true"],
        "253 characters with permits=2",
    ),
    "both waits": (["k", "--wait", "1", "--no-wait", "--", "true"], "not allowed with"),
    "long grace": (
        ["k", "--lease", "9", "--kill-after", "4", "--", "true"],
        "write --kill-after 3 or less",
    ),
    "empty key": (["", "--", "true"], "empty"),
    "long note": (["k", "--note", "x" * 256, "--", "true"], "longer than 255"),
    "no such backend": (["k", "--backend", "nope", "--", "true"], "nope"),
    "no such option": (["k", "--frob", "--", "true"], "--frob"),
    "abbreviated option": (["k", "--skip", "--", "true"], "--skip"),
    "exit code": (["k", "--conflict-exit-code", "256", "--", "true"], "0 to 255"),
    "shell words": (["k", "--shell", "--", "a", "b"], "in quotes"),
    "shell words without dashes": (["k", "--shell", "a", "b"], "arguments: b"),
    "shell without a line": (["k", "--shell"], "-- COMMAND"),
    "shell before an option": (["k", "--shell", "--no-wait"], "-- COMMAND"),
    "shell without a key": (["--shell", "true"], "KEY"),
    "shell and django": (
        ["k", "--shell", "--django", "--", "check"],
        "not allowed with",
    ),
}


@pytest.mark.parametrize(("arguments", "advice"), USAGE.values(), ids=USAGE)
def test_bad_usage(
    arguments: list[str], advice: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Bad usage is status 64 and one line that says what to write."""
    assert run(*arguments) == 64
    out, err = capfd.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert advice in err


def test_bad_usage_from_code() -> None:
    """Called from code, bad usage is an exception with the same status."""
    for arguments in (["k"], ["k", "true"], ["k", "--wait", "-1", "--", "true"]):
        with pytest.raises(CommandError) as caught:
            call_command("run_locked", *arguments)
        assert caught.value.returncode == 64


def test_call_in_another_thread() -> None:
    """Only the main thread can pass signals on: elsewhere it is status 69."""
    with ThreadPoolExecutor() as pool:
        calling = pool.submit(call_command, "run_locked", "k", "--", "true")
        with pytest.raises(CommandError, match="needs the main thread") as caught:
            calling.result(DEADLINE)
    assert caught.value.returncode == 69


def planned(*options: str) -> Plan:
    parser = run_locked.Command().create_parser("manage.py", "run_locked")
    given = parser.parse_args(["k", *options, "--", "true"])
    return make_plan(**vars(given), from_command_line=False)


@pytest.mark.parametrize(
    ("lease", "grace"), [("0.2", 0.05), ("0.5", 0.125), ("0.75", 0.25), ("6", 2)]
)
def test_default_kill_after(lease: str, grace: float) -> None:
    """Even a short lease is renewed before the command would be terminated."""
    plan = planned("--lease", lease)
    assert plan.kill_after == pytest.approx(grace)
    left = float(lease) - margin(float(lease))
    assert plan.kill_after < left - left / 3


@pytest.mark.parametrize(
    ("lease", "grace"), [("2", "1"), ("50", "20"), ("1d", "10h"), ("0.2", "0.1")]
)
def test_advice_about_kill_after(lease: str, grace: str) -> None:
    """What the refusal of a grace says to write is accepted."""
    with pytest.raises(CommandError) as caught:
        planned("--lease", lease, "--kill-after", grace)
    advice = re.search("write (.+) or less, or (.+) or more", str(caught.value))
    assert advice is not None
    planned("--lease", lease, *advice[1].split())
    planned("--kill-after", grace, *advice[2].split())


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    """The help names unit and default of each option, and three examples."""
    assert run("--help") == 0
    text = capsys.readouterr().out
    own = text.partition("  --version")[0]
    assert own.count("Default") + own.count("This is the default") >= 12
    assert text.count("manage.py run_locked ") == 4  # the usage and three examples


# Exit status

STATUS = {
    "success": (["true"], 0),
    "its own": (["sh", "-c", "exit 3"], 3),
    "killed": (["sh", "-c", "kill -9 $$"], 137),
    "terminated": (["sh", "-c", "kill -TERM $$"], 143),
    "not found": (["no-such-program"], 127),
    "empty name": ([""], 127),
    "not executable": (["/etc/passwd"], 126),
    "a folder": (["/tmp"], 126),
}


@pytest.mark.parametrize(("command", "status"), STATUS.values(), ids=STATUS)
@pytest.mark.usefixtures("shared")
def test_exit_status(command: list[str], status: int, key: str) -> None:
    """The command's status is passed on, and the lock is free afterwards."""
    assert run(key, "--", *command) == status
    assert not distributed_lock(key).locked()


@pytest.mark.usefixtures("shared")
def test_words_are_not_parsed(
    key: str, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """What follows the dashes reaches the program as it stands."""
    words = ["--", "-v", "--settings=x", "a b", "$HOME", "*", "", "ä\udce4"]
    code = "import os, sys; os.write(1, b'\\0'.join(map(os.fsencode, sys.argv[1:])))"
    assert run(key, "--", sys.executable, "-c", code, *words) == 0
    assert capfdbinary.readouterr().out == b"\0".join(map(os.fsencode, words))


@pytest.mark.usefixtures("shared")
def test_shell(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """With --shell the command is one line for the shell, with or without dashes."""
    line = "echo one | tr a-z A-Z; exit 5"
    for words in (
        [key, "--shell", "--", line],
        ["--shell", key, "--", line],
        [key, "--shell", line],
        ["--shell", line, key],
        [key, "--shell", line, "--no-wait", "--note", "n"],
    ):
        assert run(*words) == 5
        assert capfd.readouterr().out == "ONE\n"
    assert stored(key).note == "n"
    assert run(key, "--shell", "--", "-x; exit 5") == 5


@pytest.mark.usefixtures("shared")
def test_unknown_management_command(
    key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A management command that doesn't exist is not found, like a program."""
    assert run(key, "--django", "--", "no_such_command") == 127
    assert "no_such_command" in capfd.readouterr().err


def test_taken(
    shared: None, key: str, other: OtherThread, capfd: pytest.CaptureFixture[str]
) -> None:
    """A taken lock is status 75, or another, and the message says who has it."""
    lease = other.do(distributed_lock(key, note="the note").acquire, timeout=0)
    holder = stored(key).holder
    assert run(key, "--", "echo", "ran") == 75
    out, err = capfd.readouterr()
    assert out == ""
    for word in (key, holder, "the note", "since", "UTC", "--wait"):
        assert word in err
    assert run(key, "--conflict-exit-code", "9", "--", "true") == 9
    capfd.readouterr()
    assert run(key, "-v", "0", "--", "true") == 75
    assert run(key, "--skip-if-locked", "--", "echo", "ran") == 0
    assert capfd.readouterr() == ("", "")
    with takes(at_least=0.3, at_most=0.3 + SLACK):
        assert run(key, "--wait", "0.3", "--", "true") == 75
    assert f"waiting 0.3 s at most for the lock {key!r}" in capfd.readouterr().err
    with takes(at_least=0.2):
        assert run(key, "--wait", "200ms", "--skip-if-locked", "--", "true") == 0
    assert capfd.readouterr() == ("", "")
    other.do(lease.release)


def test_wait_that_ends(shared: None, key: str, other: OtherThread) -> None:
    """Once the lock is released, the waiting command runs."""
    lease = other.do(distributed_lock(key).acquire, timeout=0)

    def release_later() -> None:
        time.sleep(0.3)
        lease.release()

    releasing = other.start(release_later)
    assert run(key, "--wait", "15", "--", "true") == 0
    releasing.result(timeout=DEADLINE)


NOTES = {
    "program": (["--", "true", "s3cret"], "true"),
    "path": (["--", "/bin/echo", "s3cret"], "echo"),
    "longer than a note": (["--", "x" * 300], "x" * 255),
    "no text": (["--", "/bin/\udce4"], "\\udce4"),
    "empty name": (["--", ""], ""),
    "shell": (["--shell", "--", "/bin/echo s3cret | cat"], "echo"),
    "shell without dashes": (["--shell", "A=s3cret /bin/echo s3cret"], "echo"),
    "shell, one word": (["--shell", "--", " true;"], "true"),
    "assignments": (["--shell", "--", "A=s3cret B='s3 cret' C=\"x y\" true x"], "true"),
    "assignments alone": (["--shell", "--", "A=s3cret"], "sh"),
    "expansion": (["--shell", "--", "A=$(echo s3cret) true"], "sh"),
    "backquotes": (["--shell", "--", "A=`echo s3cret s3cret`"], "sh"),
    "redirection": (["--shell", "--", ">/dev/null echo s3cret"], "sh"),
    "quoted word": (["--shell", "--", "'true' s3cret"], "sh"),
    "nothing": (["--shell", "--", ""], "sh"),
    "given": (["--note", "why", "--", "true"], "why"),
    "given as empty": (["--note", "", "--", "true"], ""),
}


@pytest.mark.parametrize(("arguments", "note"), NOTES.values(), ids=NOTES)
@pytest.mark.usefixtures("shared")
def test_note(arguments: list[str], note: str, key: str) -> None:
    """Without --note, others see the program's name, and nothing of its arguments."""
    run(key, *arguments)
    assert stored(key).note == note


@pytest.mark.usefixtures("shared")
def test_hold_at_least(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A quick command keeps the lock for as long as it was told."""
    assert run(key, "--hold-at-least", "60", "--", "true") == 0
    assert run(key, "--", "true") == 75
    assert "stays taken for another" in capfd.readouterr().err
    assert DistributedLock.objects.cooling().filter(pk=key).exists()


@pytest.mark.parametrize("more", [[], [":more"]], ids=["one key", "two keys"])
@pytest.mark.parametrize(
    ("program", "status"), [("no-such-program", 127), ("/etc/passwd", 126)]
)
@pytest.mark.usefixtures("shared")
def test_hold_at_least_without_a_run(
    program: str, status: int, more: list[str], key: str
) -> None:
    """Where nothing was run, the lock is free at once."""
    keys = [key, *(key + end for end in more)]
    assert run(*keys, "--hold-at-least", "60", "--", program) == status
    assert not distributed_lock(*keys).locked()


@pytest.mark.usefixtures("shared")
def test_hold_at_least_of_a_start_that_is_stopped(
    key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So it is where a signal comes before the command."""
    original = Supervisor._prepare

    def prepare(self: Supervisor) -> bool:
        signal.raise_signal(signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Supervisor, "_prepare", prepare)
    assert run(key, "--hold-at-least", "60", "--", "true") == 143
    assert not distributed_lock(key).locked()


def test_environment(shared: None, key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The command learns key, owner and fencing token, and sees the rest as before."""
    script = 'echo "$DBLOCKS_KEY $DBLOCKS_OWNER $DBLOCKS_FENCING_TOKEN $PATH"'
    assert run(key, "--", "sh", "-c", script) == 0
    found_key, owner, token, path = capfd.readouterr().out.strip().split(" ", 3)
    assert (found_key, int(token), path) == (
        key,
        stored(key).version,
        os.environ["PATH"],
    )
    assert len(owner) == 32


TOLD = (
    "import json, os\n"
    "names = [name for name in os.environ if name.startswith('DBLOCKS_')\n"
    "         and not name.startswith(('DBLOCKS_TEST_', 'DBLOCKS_FAULTS'))]\n"
    "print(json.dumps({name: os.environ[name] for name in names}))"
)
"""Prints what a command is told."""


def told(out: str) -> dict[str, str]:
    """Return what a command was told, the owner apart from the rest."""
    found: dict[str, str] = json.loads(out)
    assert len(found.pop("DBLOCKS_OWNER")) == 32
    return found


@pytest.fixture
def told_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run as the command of another ``run_locked``."""
    for name in ("KEY", "FENCING_TOKEN", "PERMIT", "OWNER", "KEYS", "FENCING_TOKENS"):
        monkeypatch.setenv(f"DBLOCKS_{name}", "another's")
    monkeypatch.setenv("DBLOCKS_TEST_DATABASES", "")


@pytest.mark.usefixtures("shared", "told_by_another")
def test_environment_of_one_key(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is left of what another run_locked around it has told."""
    assert run(key, "--", sys.executable, "-c", TOLD) == 0
    token = str(stored(key).version)
    assert told(capfd.readouterr().out) == {
        "DBLOCKS_KEY": key,
        "DBLOCKS_FENCING_TOKEN": token,
    }


@pytest.mark.parametrize("permits", ["1", "3"])
@pytest.mark.usefixtures("shared", "told_by_another")
def test_environment_of_a_permit(
    key: str, permits: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """With --permits the command is told the number of its permit."""
    assert run(key, "--permits", permits, "--", sys.executable, "-c", TOLD) == 0
    [row] = DistributedLock.objects.filter(key__startswith=key)
    assert told(capfd.readouterr().out) == {
        "DBLOCKS_KEY": key,
        "DBLOCKS_FENCING_TOKEN": str(row.version),
        "DBLOCKS_PERMIT": str(row.permit or 0),
    }


@pytest.mark.usefixtures("shared", "told_by_another")
def test_environment_of_several_keys(
    key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command is told all keys in their order, each with its token."""
    keys = [f"{key} b", f'{key} "ä"', f"{key} b"]
    assert run(*keys, "--", sys.executable, "-c", TOLD) == 0
    found = told(capfd.readouterr().out)
    assert json.loads(found.pop("DBLOCKS_KEYS")) == sorted(set(keys))
    tokens = json.loads(found.pop("DBLOCKS_FENCING_TOKENS"))
    assert tokens == {each: stored(each).version for each in keys}
    assert not found
    assert not distributed_lock(*keys).locked()


def test_one_of_several_keys_taken(
    shared: None, key: str, other: OtherThread, capfd: pytest.CaptureFixture[str]
) -> None:
    """None is taken then, and the message names the one that stayed taken."""
    keys = [f"{key}:{number}" for number in range(3)]
    lease = other.do(distributed_lock(keys[1], note="the note").acquire, timeout=0)
    assert run(*keys, "--", "echo", "ran") == 75
    out, err = capfd.readouterr()
    assert out == ""
    assert f"the lock {keys[1]!r} was not free: it is held by" in err
    assert run(*keys, "--wait", "0.3", "--", "true") == 75
    err = capfd.readouterr().err
    assert f"waiting 0.3 s at most for the lock {keys[1]!r}" in err
    assert not distributed_lock(keys[0], keys[2]).locked()
    other.do(lease.release)
    assert run(*keys, "--", "true") == 0


def test_all_permits_taken(
    shared: None, key: str, other: OtherThread, capfd: pytest.CaptureFixture[str]
) -> None:
    """So many at a time run; the next one is told that all permits are taken."""
    lock = distributed_lock(key, permits=2)
    first = other.do(lock.acquire, timeout=0)
    assert run(key, "--permits", "2", "--", "true") == 0
    with distributed_lock(key, permits=2, owner="another"):
        assert run(key, "--permits", "2", "--", "true") == 75
        assert run(key, "--permits", "3", "--", "true") == 0
    err = capfd.readouterr().err
    assert "was not free: all permits are taken, one by" in err
    other.do(first.release)


@pytest.mark.usefixtures("shared")
def test_no_files_are_inherited(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The command has the standard streams and no other file, no connection."""
    connection.ensure_connection()
    assert run(key, "--", "ls", "/proc/self/fd") == 0
    # ls itself has the folder open.
    assert capfd.readouterr().out.split() == ["0", "1", "2", "3"]


@pytest.mark.usefixtures("shared")
def test_many_open_files(key: str) -> None:
    """It runs commands beside more open files than select() can count."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(2048, limits[1]), limits[1]))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        assert run(key, "--", "sh", "-c", "exit 4") == 4
    assert not distributed_lock(key).locked()


def test_signals_and_handlers_are_restored(shared: None, key: str) -> None:
    """After a call from code this process has its own signal handlers again."""
    before = {n: signal.getsignal(n) for n in signal.valid_signals()}
    call_command("run_locked", key, "--", "true")
    assert {n: signal.getsignal(n) for n in signal.valid_signals()} == before


def test_wake_at_the_end(monkeypatch: pytest.MonkeyPatch, other: OtherThread) -> None:
    """A thread that wakes the block at its end writes into no file opened later."""
    writing, is_open = threading.Event(), []

    def write(file: int, data: bytes) -> None:
        writing.set()
        time.sleep(0.2)
        with suppress(OSError):
            os.fstat(file)
            is_open.append(file)

    with Signals() as signals:
        monkeypatch.setattr("dblocks.supervision.signals.os.write", write)
        waking = other.start(signals.wake)
        assert writing.wait(DEADLINE)
    waking.result(timeout=DEADLINE)
    monkeypatch.undo()
    assert len(is_open) == 1
    signals.wake()


def test_child_re_enters(commands: Commands, key: str) -> None:
    """A child that takes the same key with the owner it was told re-enters."""
    code = (
        "import os, django; django.setup()\n"
        "from dblocks import distributed_lock\n"
        "key, owner = os.environ['DBLOCKS_KEY'], os.environ['DBLOCKS_OWNER']\n"
        "assert distributed_lock(key).try_acquire() is None\n"
        "with distributed_lock(key, owner=owner).acquire(timeout=0) as lease:\n"
        "    assert str(lease.fencing_token) == os.environ['DBLOCKS_FENCING_TOKEN']\n"
        "    print('entered')\n"
    )
    program = (
        "import json, os; from django.conf import settings\n"
        "for a, c in json.loads(os.environ['DBLOCKS_TEST_DATABASES']).items():\n"
        "    settings.DATABASES[a].update(c)\n" + code
    )
    process = commands.start("run_locked", key, "--", sys.executable, "-c", program)
    assert finish(process) == (0, "entered\n", "")
    assert not distributed_lock(key).locked()


def test_django_command(commands: Commands, key: str) -> None:
    """With --django the child is this project's manage.py with its settings."""
    process = commands.start(
        "run_locked", key, "--django", "--", "locks", "show", key, "--json"
    )
    status, out, err = finish(process)
    assert (status, err) == (0, "")
    assert '"state": "held"' in out
    assert '"note": "locks"' in out


# A lost lease


@pytest.mark.parametrize("stubborn", [False, True], ids=["obedient", "ignores TERM"])
def test_force_release(commands: Commands, key: str, stubborn: bool) -> None:
    """After a force release the group is ended, the status is 76, the reason told."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[key, "--lease", "3", "--kill-after", "0.4"],
        *(stubborn_family(file) if stubborn else shell(SLEEP, file)),
    )
    pids = family(commands, file) if stubborn else commands.pids(file)
    DistributedLock.objects.force_release(key)
    status, _, err = finish(process)
    assert status == 76
    assert "force-released" in err
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_one_of_several_lost(commands: Commands, key: str, lost: int) -> None:
    """Whichever is lost, the group is ended, and the others are given back."""
    keys = [f"{key}:{number}" for number in range(3)]
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[*keys, "--lease", "3", "--kill-after", "0.4"],
        *stubborn_family(file),
    )
    pids = family(commands, file)
    DistributedLock.objects.force_release(keys[lost])
    status, _, err = finish(process)
    assert status == 76
    assert f"the lease on {keys[lost]!r} is lost, the lock was force-released" in err
    assert not any(running(pid) for pid in pids)
    assert not distributed_lock(*keys).locked()


def test_wrapper_of_several_keys_stopped(commands: Commands, key: str) -> None:
    """Of a wrapper stopped past its leases no process runs when the first one ends."""
    keys = [f"{key}:{number}" for number in range(3)]
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[*keys, "--lease", "6", "--kill-after", "1"],
        *stubborn_family(file),
    )
    pids = family(commands, file)
    process.send_signal(signal.SIGSTOP)
    leases = distributed_lock(*keys).acquire(timeout=DEADLINE)
    assert not any(running(pid) for pid in pids)
    process.send_signal(signal.SIGCONT)
    assert finish(process)[0] == 76
    assert leases.release() is True


def test_lost_to_somebody_else(commands: Commands, key: str) -> None:
    """The command of a taken lock is ended; the exit status can be chosen."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[key, "--lease", "3", "--lost-exit-code", "42"],
        *shell(SLEEP, file),
    )
    [pid] = commands.pids(file)
    DistributedLock.objects.force_release(key)
    with distributed_lock(key).acquire(timeout=DEADLINE) as lease:
        status, _, err = finish(process)
        assert status == 42
        assert "somebody else holds the lock" in err
        assert not running(pid)
        assert lease.held


def test_lost_while_it_ended(
    shared: None, key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loss that shows only at the release is status 76 too."""
    original = Supervisor.run

    def run_and_lose(self: Supervisor, *args: Any) -> Any:
        outcome = original(self, *args)
        DistributedLock.objects.force_release(key)
        return outcome

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Supervisor, "run", run_and_lose)
        assert run(key, "--", "true") == 76
    assert "may not have been alone" in capfd.readouterr().err


# The database gone


def test_database_out_of_reach(commands: Commands, key: str) -> None:
    """A database that can't be reached is status 69 and one line."""
    if connection.vendor == "sqlite":
        env = environment(NAME="/no/such/folder/file.sqlite3")
    else:
        env = environment(HOST="127.0.0.1", PORT="1")
    status, out, err = finish(commands.start("run_locked", key, "--", "true", env=env))
    assert (status, out) == (69, "")
    assert len(err.splitlines()) == 1
    assert "out of reach" in err


@pytest.fixture
def server(shared: None) -> None:
    """Apply the test only where the database is a server that can be cut off."""
    if connection.vendor == "sqlite":
        pytest.skip("a file has no connection that could be cut")


@pytest.mark.usefixtures("server")
def test_database_gone_while_waiting(commands: Commands, key: str) -> None:
    """A database that goes away during the wait is status 69."""
    with relay() as through, distributed_lock(key).acquire(timeout=0):
        env = environment(HOST="127.0.0.1", PORT=str(through.port))
        process = commands.start(
            "run_locked", key, "--wait", "60", "--", "true", env=env
        )
        assert process.stderr is not None
        assert b"waiting" in process.stderr.readline()
        through.cut()
        status, _, err = finish(process)
    assert status == 69
    assert "out of reach" in err


@pytest.mark.usefixtures("server")
def test_database_gone_while_running(commands: Commands, key: str) -> None:
    """The command has ended before the lease does that can't be renewed."""
    file = commands.file()
    with relay() as through:
        env = environment(HOST="127.0.0.1", PORT=str(through.port))
        process = commands.start(
            "run_locked",
            *[key, "--lease", "6", "--kill-after", "1"],
            *stubborn_family(file),
            env=env,
        )
        pids = family(commands, file)
        through.cut()
        lease = distributed_lock(key).acquire(timeout=DEADLINE)
        assert not any(running(pid) for pid in pids)
        status, _, err = finish(process)
    assert status == 76
    assert "terminating the command" in err
    assert lease.release() is True


@pytest.mark.usefixtures("server")
def test_database_gone_at_release(commands: Commands, key: str) -> None:
    """The command's status stands; the lock is left to lapse, and that is said."""
    file, end = commands.file(), commands.file()
    script = f"echo $$ >> {{file}}; while ! [ -e {end} ]; do sleep 0.02; done; exit 3"
    with relay() as through:
        env = environment(HOST="127.0.0.1", PORT=str(through.port))
        process = commands.start(
            "run_locked", key, "--lease", "30", *shell(script, file), env=env
        )
        commands.pids(file)
        through.cut()
        end.touch()
        status, _, err = finish(process)
    assert status == 3
    assert "left to lapse" in err
    assert distributed_lock(key).locked()


def test_failing_renewals_on_sqlite(commands: Commands, key: str) -> None:
    """A write transaction that outlasts the lease ends the command, too."""
    if connection.vendor != "sqlite":
        pytest.skip("other databases have many writers")
    file = commands.file()
    process = commands.start("run_locked", key, "--lease", "1.5", *shell(SLEEP, file))
    [pid] = commands.pids(file)
    with connection.cursor() as cursor:
        cursor.execute("BEGIN IMMEDIATE")
        try:
            gone(pid)
        finally:
            cursor.execute("ROLLBACK")
    assert finish(process)[0] == 76


# Engines without a table


class Particular(LocMemBackend):
    """Refuses what it can't keep, before it is asked for a lock."""

    def check_terms(self, lease: float, hold_at_least: float) -> None:
        if lease != self.lease:
            raise ValueError(f"lease must be {self.lease}, not {lease}")
        if hold_at_least:
            raise NotSupportedError("nothing cools here")


class Unplugged(LocMemBackend):
    """Is out of reach."""

    errors = (ConnectionError,)

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        raise ConnectionError("nobody\nlistens")


class Refused(LocMemBackend):
    """Learns from its server that its settings are wrong."""

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        raise ImproperlyConfigured("LEASE is 100 s:\nset another")


class CutOff(LocMemBackend):
    """Is out of reach once it has granted a lock."""

    errors = (ConnectionError,)

    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        raise ConnectionError("nobody\nlistens")


@pytest.fixture
def engine(settings: Any, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Return the options for an engine in memory, or for the one that is the parameter.

    Its locks need no database.
    """
    kind = getattr(request, "param", LocMemBackend)
    path = f"{kind.__module__}.{kind.__name__}"
    settings.DBLOCKS = {"engine": {"BACKEND": path}}
    yield ["--backend", "engine"]
    clear_locks("engine")


@pytest.mark.usefixtures("told_by_another")
def test_engine(engine: list[str], key: str, capfd: pytest.CaptureFixture[str]) -> None:
    """The command runs under the engine's lock, and is told of it."""
    arguments = [*engine, "--hold-at-least", "60", "--", sys.executable, "-c", TOLD]
    assert run(key, *arguments) == 0
    [entry] = backends["engine"].entries()
    assert told(capfd.readouterr().out) == {
        "DBLOCKS_KEY": key,
        "DBLOCKS_FENCING_TOKEN": str(entry.version),
    }
    assert (entry.key, entry.state, entry.note) == (
        key,
        "cooling",
        os.path.basename(sys.executable),
    )
    assert run(key, *engine, "--", "true") == 75
    assert "stays taken for another" in capfd.readouterr().err


def test_taken_on_an_engine(
    engine: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A wait that runs out says who has the lock; one that ends runs the command."""
    with hold_elsewhere(key, note="the note", backend="engine"):
        assert run(key, *engine, "--wait", "0.2", "--", "echo", "ran") == 75
        out, err = capfd.readouterr()
        assert out == ""
        for word in (key, "held elsewhere", "the note", "since", "within 0.2 s"):
            assert word in err
        assert run(key, *engine, "--permits", "2", "--", "true") == 0
    assert run(key, *engine, "--wait", "5", "--", "true") == 0


@pytest.mark.parametrize("engine", [Unplugged], indirect=True)
def test_engine_out_of_reach(
    engine: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """An engine that doesn't answer is status 69 and one line that names it."""
    assert run(key, *engine, "--", "echo", "ran") == 69
    out, err = capfd.readouterr()
    assert out == ""
    assert (
        "the backend 'engine' is out of reach: ConnectionError: nobody listens" in err
    )
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("engine", [Refused], indirect=True)
def test_engine_misconfigured(
    engine: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Settings that only the server finds wrong are status 78 and one line."""
    assert run(key, *engine, "--", "echo", "ran") == 78
    assert capfd.readouterr() == ("", "CommandError: LEASE is 100 s: set another\n")


@pytest.mark.parametrize("engine", [CutOff], indirect=True)
def test_engine_gone_at_release(
    engine: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command's status stands; the lock is left to lapse, and that is said."""
    assert run(key, *engine, "--", "sh", "-c", "exit 3") == 3
    err = capfd.readouterr().err
    assert "left to lapse: ConnectionError: nobody listens" in err


@pytest.mark.parametrize("engine", [CutOff], indirect=True)
def test_engine_gone_after_nothing_was_run(
    engine: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """That the lock is left to lapse is said as well."""
    assert run(key, *engine, "--", "no-such-program") == 127
    assert "left to lapse: the log says why" in capfd.readouterr().err


@pytest.mark.parametrize("engine", [Particular], indirect=True)
@pytest.mark.parametrize(
    ("options", "word"),
    [(["--lease", "7"], "lease must be 30"), (["--hold-at-least", "1"], "cools")],
)
def test_terms_that_an_engine_refuses(
    engine: list[str],
    options: list[str],
    word: str,
    key: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """What the engine can't promise is bad usage; the defaults are its own."""
    assert run(key, *engine, *options, "--", "echo", "ran") == 64
    out, err = capfd.readouterr()
    assert out == ""
    assert word in err
    assert len(err.splitlines()) == 1
    assert run(key, *engine, "--", "true") == 0


def test_migrate_under_an_engine(
    engine: list[str],
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """No table is made for a lock that isn't in one."""

    def make_tables(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(run_locked, "make_tables", make_tables)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    # As from there, else the child would be a pytest that is asked for help.
    spec = find_spec("tests.support.manage")
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
    assert run(key, *engine, "--django", "--", "migrate", "--help") == 0
    assert "usage: manage.py migrate" in capfd.readouterr().out


# Many at once


def test_ten_at_once(commands: Commands, key: str) -> None:
    """Ten that are started at once with --hold-at-least run the command once."""
    file = commands.file()
    processes = [
        commands.start(
            "run_locked",
            *[key, "--skip-if-locked", "--hold-at-least", "30"],
            *shell("echo $$ >> {file}", file),
        )
        for _ in range(10)
    ]
    for process in processes:
        assert finish(process, within=3 * DEADLINE) == (0, "", "")
    assert len(file.read_text().split()) == 1


@pytest.fixture
def empty_database(shared: None, tmp_path: Path) -> Iterator[str]:
    """Return the name of a database without any table."""
    if connection.vendor == "sqlite":
        yield str(tmp_path / "empty.sqlite3")
        return
    name = f"empty_{os.getpid()}"
    with connection.cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
    yield name
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name}")


def test_missing_table(commands: Commands, key: str, empty_database: str) -> None:
    """A missing lock table is status 78 and one line that says what to write."""
    env = environment(NAME=empty_database)
    status, _, err = finish(commands.start("run_locked", key, "--", "true", env=env))
    assert status == 78
    assert len(err.splitlines()) == 1
    assert "migrate dblocks" in err


def test_outdated_table(commands: Commands, key: str, empty_database: str) -> None:
    """A deployment that brings migrations of dblocks, or that was interrupted, goes on.

    Until then every command says what to write, and so does the check.
    """
    env = environment(NAME=empty_database)

    def status_of(*arguments: str) -> int:
        status, _, err = finish(commands.start(*arguments, env=env))
        if status:
            assert "migrate dblocks" in err
        return status

    for state in ("0001", "0003"):
        assert status_of("migrate", "dblocks", state, "-v0") == 0
        assert status_of("check", "--database=default", "--fail-level=WARNING") == 1
    assert status_of("migrate", "dblocks", "0002", "-v0") == 0
    assert status_of("run_locked", key, "--", "true") == 78
    assert status_of("locks", "release", key, "--yes") == 78
    migrate = "run_locked", key, "--django", "--", "migrate", "-v0"
    assert status_of(*migrate) == 0
    assert status_of("run_locked", key, "--", "true") == 0


def test_first_deployment(commands: Commands, empty_database: str) -> None:
    """Ten machines that start the first migrate at once: one of them does it."""
    env = environment(NAME=empty_database)
    arguments = [
        *["run_locked", "migrate", "--skip-if-locked", "--hold-at-least", "60"],
        *["--django", "--", "migrate", "--verbosity", "0"],
    ]
    processes = [commands.start(*arguments, env=env) for _ in range(10)]
    for process in processes:
        status, out, err = finish(process, within=3 * DEADLINE)
        assert (status, out) == (0, ""), err
    status, out, _ = finish(
        commands.start("locks", "show", "migrate", "--json", env=env)
    )
    assert status == 0
    assert '"state": "cooling"' in out
    assert '"fencing_token": 1,' in out


# Helper programs that can't be had


@pytest.mark.usefixtures("shared")
def test_no_process_can_be_started(
    key: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A machine without room for processes is status 126, and the lock is free."""

    def fail(*arguments: Any, **options: Any) -> Any:
        raise OSError("Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", fail)
    assert run(key, "--", "true") == 126
    assert "no process could be started: Resource temp" in capfd.readouterr().err
    assert not distributed_lock(key).locked()


def no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.usefixtures("shared")
def test_no_thread_can_be_started(
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither can one without room for threads run a command: status 126."""
    file = tmp_path / "ran"
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        assert run(key, "--", "touch", str(file)) == 126
    assert "no thread could be started: can't start new" in capfd.readouterr().err
    assert not file.exists()
    assert not distributed_lock(key).locked()


@pytest.mark.usefixtures("shared")
def test_no_more_threads(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once the command runs, no other thread is needed for the release."""
    original = Supervisor.run

    def run_supervised(self: Supervisor, *args: Any) -> Any:
        outcome = original(self, *args)
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        return outcome

    monkeypatch.setattr(Supervisor, "run", run_supervised)
    assert run(key, "--", "sh", "-c", "exit 3") == 3
    monkeypatch.undo()
    assert not distributed_lock(key).locked()


@pytest.mark.parametrize("helper", [launcher, sentinel], ids=["launcher", "sentinel"])
@pytest.mark.usefixtures("shared")
def test_helper_that_fails(
    key: str,
    helper: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A helper program that ends at once is status 126; the command never starts."""
    broken, file = tmp_path / "broken.py", tmp_path / "ran"
    broken.write_text("raise SystemExit(1)")
    monkeypatch.setattr(helper, "__file__", str(broken))
    assert run(key, "--", "touch", str(file)) == 126
    assert "a helper program has failed" in capfd.readouterr().err
    assert not file.exists()
    assert not distributed_lock(key).locked()


@pytest.mark.usefixtures("shared")
def test_helper_that_says_nothing(
    key: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """So is one that gives no sign of life in time."""
    silent = tmp_path / "silent.py"
    silent.write_text(f"import time; time.sleep({DEADLINE})")
    monkeypatch.setattr(sentinel, "__file__", str(silent))
    monkeypatch.setattr(supervisor, "STARTING", 0.5)
    assert run(key, "--", "true") == 126
    assert "no sign of life within 0.5 s" in capfd.readouterr().err
    assert not distributed_lock(key).locked()


@pytest.mark.usefixtures("shared")
def test_management_command_from_code(
    key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Called from code, --django needs no manage.py: Django's own does the work."""
    call_command("run_locked", key, "--django", "--", "locks", "--help")
    assert "usage: __main__.py locks" in capfd.readouterr().out
