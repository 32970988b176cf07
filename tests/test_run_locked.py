"""``run_locked``: real commands, real signals, real databases."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import NotSupportedError, connection, connections

from dblocks import distributed_lock
from dblocks.backends.locmem import LocMemBackend
from dblocks.backends.values import Grant, Granted, Reading, Request
from dblocks.conf import backends
from dblocks.management.commands import run_locked
from dblocks.management.commands.run_locked import Command
from dblocks.models import DistributedLock
from dblocks.supervision.signals import Signals
from dblocks.supervision.supervisor import Supervisor
from dblocks.test import clear_locks, hold_elsewhere
from tests.support.commands import (
    Commands,
    environment,
    finish,
    gone,
    relay,
    running,
    state_of,
)
from tests.support.factories import stored
from tests.support.fixtures import OtherThread, in_memory
from tests.support.timing import DEADLINE, SLACK, always, eventually, takes

SLEEP = "echo $$ >> {file}; exec sleep 60"
#: Ignores SIGTERM, in the shell and in what it starts.
STUBBORN = "trap '' TERM; echo $$ >> {file}; while :; do sleep 0.1; done"


@pytest.fixture
def shared(committed: None) -> None:
    """Apply the test only where other processes and threads see the database."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")


@pytest.fixture
def commands(shared: None, tmp_path: Path) -> Iterator[Commands]:
    """Start management commands that are killed when the test ends."""
    commands = Commands(tmp_path)
    yield commands
    commands.close()


def run(*arguments: str) -> int:
    """Run the command in this process, as from the command line."""
    command = Command()
    try:
        command.run_from_argv(["manage.py", "run_locked", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def shell(script: str, file: Path) -> list[str]:
    return ["--", "sh", "-c", script.format(file=file)]


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
        "permits=2 is for one key",
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
    "         and not name.startswith('DBLOCKS_TEST_')]\n"
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


# Streams


def test_streams_pass_through(commands: Commands, key: str) -> None:
    """Input and both outputs pass byte for byte, closed ends included."""
    data = bytes(range(256)) * 4096
    script = "tee /dev/stderr"
    process = commands.start(
        "run_locked", key, "--", "sh", "-c", script, stdin=subprocess.PIPE
    )
    out, err = process.communicate(data, timeout=DEADLINE)
    assert process.returncode == 0
    assert out == data
    assert err == data


def test_closed_streams(commands: Commands, key: str) -> None:
    """It works without standard streams."""
    file = commands.file()
    line = 'exec "$@" <&- >&- 2>&-'
    process = subprocess.Popen(
        [
            *["sh", "-c", line, "sh", sys.executable, "-m", "tests.support.manage"],
            *["run_locked", key, *shell("echo $$ >> {file}; exit 4", file)],
        ],
        env=environment(),
    )
    assert process.wait(DEADLINE) == 4
    commands.pids(file)


class PseudoTerminal:
    """A session whose controlling terminal is in this test's hands."""

    def __init__(self, commands: Commands, *arguments: str) -> None:
        self.pid, self.file = pty.fork()
        if not self.pid:
            try:
                os.execvpe(
                    sys.executable,
                    [sys.executable, "-m", "tests.support.manage", *arguments],
                    environment(),
                )
            finally:
                os._exit(99)
        self.seen = b""

    def type(self, data: bytes) -> None:
        os.write(self.file, data)

    def read_until(self, wanted: bytes) -> None:
        until = time.monotonic() + DEADLINE
        while wanted not in self.seen:
            assert time.monotonic() < until, self.seen
            if select.select([self.file], [], [], 0.1)[0]:
                with suppress(OSError):
                    self.seen += os.read(self.file, 4096)

    def wait(self) -> int:
        def ended() -> tuple[int, int] | None:
            if select.select([self.file], [], [], 0)[0]:
                with suppress(OSError):
                    self.seen += os.read(self.file, 4096)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            return (pid, status) if pid else None

        _, status = eventually(ended, what="the end of the terminal's session")
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.file)


@pytest.fixture
def terminal(commands: Commands) -> Iterator[Callable[..., PseudoTerminal]]:
    """Run commands on pseudo-terminals."""
    made: list[PseudoTerminal] = []

    def make(*arguments: str) -> PseudoTerminal:
        connections.close_all()
        made.append(PseudoTerminal(commands, *arguments))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_interactive_command(terminal: Callable[..., PseudoTerminal], key: str) -> None:
    """A command that reads from the terminal is in its foreground."""
    script = 'read line; echo "got $line"; tty'
    session = terminal("run_locked", key, "--", "sh", "-c", f"echo ready; {script}")
    session.read_until(b"ready")
    session.type(b"hello\n")
    session.read_until(b"got hello")
    assert session.wait() == 0
    assert b"/dev/" in session.seen


def test_skip_on_a_terminal(terminal: Callable[..., PseudoTerminal], key: str) -> None:
    """Whoever runs cron's line by hand is told why it does nothing."""
    with hold_elsewhere(key, note="the night's import"):
        session = terminal("run_locked", key, "--skip-if-locked", "--", "echo", "ran")
        session.read_until(b"nothing was run")
        assert session.wait() == 0
        quiet = terminal("run_locked", key, "--skip-if-locked", "-v0", "--", "true")
        assert quiet.wait() == 0
    assert f"the lock {key!r} was not free: ".encode() in session.seen
    assert b"the night's import" in session.seen
    assert quiet.seen == b""


def test_interrupt_key(terminal: Callable[..., PseudoTerminal], key: str) -> None:
    """Ctrl-C ends the command, and its status is passed on."""
    session = terminal("run_locked", key, "--", "cat", "-")
    # Its answer shows that it is cat that runs; a shell may put a signal off.
    session.type(b"ready\n")
    session.read_until(b"ready\r\nready\r\n")
    session.type(b"\x03")
    assert session.wait() == 130
    assert not distributed_lock(key).locked()


def test_foreground_on_demand(
    terminal: Callable[..., PseudoTerminal], commands: Commands, key: str
) -> None:
    """Where output goes elsewhere, the terminal is handed over when it is read."""
    file = commands.file()
    manage = f"{sys.executable} -m tests.support.manage"
    inner = "read line; echo got $line"
    script = f"echo ready; {manage} run_locked inner-{key} -- sh -c '{inner}' > {file}"
    session = terminal("run_locked", key, "--", "bash", "-c", script)
    session.read_until(b"ready")
    session.type(b"hello\n")
    assert session.wait() == 0
    assert file.read_text() == "got hello\n"


def test_suspend_key(
    terminal: Callable[..., PseudoTerminal], commands: Commands, key: str
) -> None:
    """Ctrl-Z stops the command and the wrapper; continued, both go on."""
    file = commands.file()
    manage = f"{sys.executable} -m tests.support.manage"
    inner = f"echo $$ >> {file}; echo inner-ready; read line; exit 7"
    session = terminal(
        "run_locked",
        f"outer-{key}",
        "--",
        "bash",
        "--norc",
        "-i",
        "-c",
        f"{manage} run_locked {key} -- sh -c '{inner}'; "
        f"echo suspended; fg; echo end $?",
    )
    session.read_until(b"inner-ready")
    [pid] = commands.pids(file)
    session.type(b"\x1a")
    session.read_until(b"suspended")
    session.type(b"line\n")
    session.read_until(b"end 7")
    assert not running(pid)
    session.wait()


# Signals

ENDING = ["INT", "TERM", "HUP", "QUIT", "USR1", "USR2"]


def test_signals_while_waiting(commands: Commands, key: str) -> None:
    """Each signal ends the wait within half a second; the command never starts."""
    file = commands.file()
    with distributed_lock(key).acquire(timeout=0):
        waiting = [
            (
                name,
                commands.start("run_locked", key, "--wait", "60", *shell(SLEEP, file)),
            )
            for name in ENDING
        ]
        for name, process in waiting:
            assert process.stderr is not None
            assert b"waiting 60 s at most" in process.stderr.readline()
            number = getattr(signal, f"SIG{name}")
            with takes(at_most=0.5 + SLACK / 2):
                process.send_signal(number)
                assert process.wait(DEADLINE) == 128 + number, name
    assert not file.exists()
    assert not distributed_lock(key).locked()


def test_signal_while_waiting_for_the_second_key(commands: Commands, key: str) -> None:
    """What was taken already is given back at once."""
    first, second = f"{key}:1", f"{key}:2"
    with distributed_lock(second).acquire(timeout=0):
        process = commands.start(
            "run_locked", first, second, "--wait", "60", "--", "true"
        )
        assert process.stderr is not None
        assert second.encode() in process.stderr.readline()
        assert distributed_lock(first).locked()
        process.send_signal(signal.SIGTERM)
        assert process.wait(DEADLINE) == 128 + signal.SIGTERM
        assert not distributed_lock(first).locked()


def test_signal_to_a_call_from_code(shared: None, key: str, other: OtherThread) -> None:
    """There, too, what was taken already is given back."""
    first, second = f"{key}:1", f"{key}:2"
    lease = other.do(distributed_lock(second).acquire, timeout=0)

    def interrupt() -> None:
        eventually(distributed_lock(first).locked, what="the first key taken")
        os.kill(os.getpid(), signal.SIGTERM)

    interrupting = other.start(interrupt)
    with pytest.raises(SystemExit) as caught:
        call_command("run_locked", first, second, "--wait", "60", "--", "true")
    assert caught.value.code == 128 + signal.SIGTERM
    interrupting.result(timeout=DEADLINE)
    eventually(lambda: not distributed_lock(first).locked(), what="the first key free")
    other.do(lease.release)


def test_harmless_signals_while_waiting(commands: Commands, key: str) -> None:
    """Signals that end nobody don't end the wait."""
    with distributed_lock(key).acquire(timeout=0):
        process = commands.start("run_locked", key, "--wait", "60", "--", "true")
        assert process.stderr is not None
        process.stderr.readline()
        for name in ("WINCH", "CONT"):
            process.send_signal(getattr(signal, f"SIG{name}"))
        always(lambda: process.poll() is None, during=0.3)
    assert finish(process)[0] == 0


FORWARDED = """
for name in INT TERM HUP QUIT USR1 USR2 WINCH CONT; do trap "echo $name >> {file}" $name
done
trap 'exit 9' ALRM
echo $$ >> {file}
while :; do sleep 0.05; done
"""


def test_signals_are_forwarded(commands: Commands, key: str) -> None:
    """Every signal that the wrapper gets, the command gets."""
    file = commands.file()
    process = commands.start("run_locked", key, *shell(FORWARDED, file))
    eventually(lambda: file.exists() and file.read_text().strip(), what="the command")
    for name in ("INT", "TERM", "HUP", "QUIT", "USR1", "USR2", "WINCH", "CONT"):
        process.send_signal(getattr(signal, f"SIG{name}"))
        eventually(lambda name=name: name in file.read_text(), what=name)  # type: ignore[misc]
    process.send_signal(signal.SIGALRM)
    assert finish(process)[0] == 9


@pytest.mark.parametrize("name", ["INT", "TERM", "HUP", "QUIT"])
def test_signal_ends_command(commands: Commands, key: str, name: str) -> None:
    """A command that a signal ends is status 128 + n, its lock released."""
    file = commands.file()
    process = commands.start("run_locked", key, *shell(SLEEP, file))
    [pid] = commands.pids(file)
    number = getattr(signal, f"SIG{name}")
    process.send_signal(number)
    status, _, _ = finish(process)
    assert status == 128 + number
    assert not running(pid)
    assert not distributed_lock(key).locked()


#: Says so when it is told to finish, and needs half a second for it.
FINISHING = (
    "trap 'echo TERM >> {file}; sleep 0.5; exit 3' TERM; echo $$ > {file}; "
    "while :; do sleep 0.05; done"
)


@pytest.mark.parametrize("keys", [1, 2])
def test_asked_for(commands: Commands, key: str, keys: int) -> None:
    """Who is asked for the lock tells the command, once, and waits for it."""
    file = commands.file()
    names = [f"{key}:{number}" for number in range(keys)]
    process = commands.start(
        "run_locked", *names, "--lease", "1.5", *shell(FINISHING, file)
    )
    commands.pids(file)
    assert DistributedLock.objects.request_release(names[-1])
    status, _, said = finish(process)
    assert status == 3
    assert file.read_text().split()[1:] == ["TERM"]
    assert "the lock is asked for" in said
    assert not distributed_lock(*names).locked()


def test_asked_for_in_vain(commands: Commands, key: str) -> None:
    """With --ignore-requests the command isn't told."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        key,
        "--lease=1.5",
        "--ignore-requests",
        *shell(FINISHING, file),
    )
    commands.pids(file)
    assert DistributedLock.objects.request_release(key)
    first = stored(key).expires_at
    eventually(lambda: stored(key).expires_at > first, what="a renewal")
    always(lambda: "TERM" not in file.read_text(), during=0.7, what="not told")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 3


def test_stop_without_terminal(commands: Commands, key: str) -> None:
    """SIGTSTP stops the command, SIGCONT continues it; the lease is renewed."""
    file = commands.file()
    process = commands.start("run_locked", key, "--lease", "2", *shell(SLEEP, file))
    [pid] = commands.pids(file)
    process.send_signal(signal.SIGTSTP)
    eventually(lambda: state_of(pid) == "T", what="the stop")
    first = stored(key).expires_at
    eventually(lambda: stored(key).expires_at > first, what="a renewal")
    process.send_signal(signal.SIGCONT)
    eventually(lambda: state_of(pid) != "T", what="the continuation")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 143


def test_ignored_signal_stays_ignored(commands: Commands, key: str) -> None:
    """Under nohup a hang-up ends neither the wrapper nor the command."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        key,
        *shell("echo $$ >> {file}; sleep 0.7; exit 3", file),
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    [pid] = commands.pids(file)
    process.send_signal(signal.SIGHUP)
    os.kill(pid, signal.SIGHUP)
    assert finish(process)[0] == 3


def test_signal_between_grant_and_start(
    shared: None, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal after the grant and before the start: the command never starts."""
    original = Supervisor._start

    def interrupted(self: Supervisor) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Supervisor, "_start", interrupted)
    file = tmp_path / "ran"
    assert run(key, "--", "touch", str(file)) == 143
    assert not file.exists()
    assert not distributed_lock(key).locked()


# The group


def test_lock_is_kept_for_grandchildren(commands: Commands, key: str) -> None:
    """The lock is released when the last process of the group has ended."""
    file = commands.file()
    script = "(echo $(exec sh -c 'echo $PPID') >> {file}; sleep 1.2) & exit 5"
    with takes(at_least=1.2):
        process = commands.start("run_locked", key, *shell(script, file))
        commands.pids(file)
        always(distributed_lock(key).locked, during=0.4)
        assert finish(process)[0] == 5
    assert not distributed_lock(key).locked()


def test_sentinel_ends_with_the_command(commands: Commands, key: str) -> None:
    """Nothing is left when the command has ended."""
    file = commands.file()
    process = commands.start("run_locked", key, *shell(SLEEP, file))
    commands.pids(file)
    children = children_of(process.pid)
    assert len(children) == 2
    process.terminate()
    finish(process)
    gone(*children, within=SLACK)


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(word) for word in text.split()]


def stubborn_family(file: Path) -> list[str]:
    """A command that ignores SIGTERM, with a child that does too."""
    inner = STUBBORN.format(file=file)
    return ["--", "sh", "-c", f"({inner}) & trap '' TERM; {inner}"]


def family(commands: Commands, file: Path) -> list[int]:
    """Wait until something of the family is up; return all of its group."""
    [pid, *_] = commands.pids(file)
    group = os.getpgid(pid)
    pids = [
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _group_of(int(path.name)) == group
    ]
    assert len(pids) >= 2
    commands.pids(file)
    return pids


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def test_wrapper_killed(commands: Commands, key: str) -> None:
    """After kill -9 of the wrapper the group dies with it, at once."""
    file = commands.file()
    process = commands.start("run_locked", key, *stubborn_family(file))
    pids = family(commands, file)
    children = children_of(process.pid)
    process.kill()
    gone(*pids, *children, within=SLACK)
    process.wait(DEADLINE)
    assert distributed_lock(key).locked()


def test_wrapper_and_its_group_killed(commands: Commands, key: str) -> None:
    """The sentinel survives what kills the wrapper's whole process group."""
    file = commands.file()
    process = commands.start("run_locked", key, *stubborn_family(file))
    pids = family(commands, file)
    children = children_of(process.pid)
    os.killpg(process.pid, signal.SIGKILL)
    gone(*pids, *children, within=SLACK)


def test_wrapper_stopped(commands: Commands, key: str) -> None:
    """Of a wrapper stopped past its lease no process runs when the lease ends."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[key, "--lease", "1.5", "--kill-after", "0.3"],
        *stubborn_family(file),
    )
    pids = family(commands, file)
    process.send_signal(signal.SIGSTOP)
    lease = distributed_lock(key).acquire(timeout=DEADLINE)
    assert not any(running(pid) for pid in pids)
    process.send_signal(signal.SIGCONT)
    status, _, err = finish(process)
    assert status == 76, err
    assert "the lease is lost" in err
    assert lease.release() is True


def test_stopped_wrapper_terminates_first(commands: Commands, key: str) -> None:
    """The sentinel, too, sends SIGTERM before SIGKILL."""
    file, heard = commands.file(), commands.file()
    script = f"trap 'echo 1 > {heard}; exit' TERM; echo $$ >> {{file}}; "
    script += "while :; do sleep 0.05; done"
    process = commands.start("run_locked", key, "--lease", "1.5", *shell(script, file))
    [pid] = commands.pids(file)
    process.send_signal(signal.SIGSTOP)
    commands.pids(heard)
    gone_or_zombie = lambda: not running(pid)  # noqa: E731
    eventually(gone_or_zombie, what="the command's end")
    process.send_signal(signal.SIGCONT)
    assert finish(process)[0] == 76


def test_sentinel_that_came_first(
    shared: None, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the sentinel has terminated is no success, even if the lease is held."""
    started, heard = tmp_path / "started", tmp_path / "heard"
    original = Signals.wait

    def wait(self: Signals, *args: Any) -> bool:
        if started.exists():
            # The thread that renews goes on.
            eventually(heard.exists, what="the sentinel's signal")
        return original(self, *args)

    monkeypatch.setattr(Signals, "wait", wait)
    script = f"trap 'echo 1 > {heard}; exit' TERM; echo 1 > {started}; "
    script += "while :; do sleep 0.05; done"
    assert run(key, "--lease", "1.5", "--", "sh", "-c", script) == 76


def test_dead_sentinel_is_replaced(commands: Commands, key: str) -> None:
    """A sentinel that was killed is replaced, and the new one does its work."""
    file = commands.file()
    process = commands.start("run_locked", key, *shell(SLEEP, file))
    [pid] = commands.pids(file)
    [sentinel] = [child for child in children_of(process.pid) if child != pid]
    os.kill(sentinel, signal.SIGKILL)
    eventually(
        lambda: [c for c in children_of(process.pid) if c not in {pid, sentinel}],
        what="another sentinel",
    )
    time.sleep(0.3)  # it may have been born this moment
    process.kill()
    gone(pid, within=SLACK)


# A lost lease


@pytest.mark.parametrize("stubborn", [False, True], ids=["obedient", "ignores TERM"])
def test_force_release(commands: Commands, key: str, stubborn: bool) -> None:
    """After a force release the group is ended, the status is 76, the reason told."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[key, "--lease", "1.5", "--kill-after", "0.4"],
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
        *[*keys, "--lease", "1.5", "--kill-after", "0.4"],
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
        *[*keys, "--lease", "1.5", "--kill-after", "0.3"],
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
        *[key, "--lease", "1.5", "--lost-exit-code", "42"],
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
            *[key, "--lease", "2", "--kill-after", "0.4"],
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

    def check_terms(self, *, lease: float, hold_at_least: float, **how: Any) -> None:
        if lease != self.lease:
            raise ValueError(f"lease must be {self.lease}, not {lease}")
        if hold_at_least:
            raise NotSupportedError("nothing cools here")


class Unplugged(LocMemBackend):
    """Is out of reach."""

    errors = (ConnectionError,)

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        raise ConnectionError("nobody\nlistens")


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


@pytest.mark.parametrize("engine", [CutOff], indirect=True)
def test_engine_gone_at_release(
    engine: list[str], key: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """The command's status stands; the lock is left to lapse, and that is said."""
    assert run(key, *engine, "--", "sh", "-c", "exit 3") == 3
    err = capfd.readouterr().err
    assert "left to lapse: ConnectionError: nobody listens" in err


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
    engine: list[str], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No table is made for a lock that isn't in one."""

    def make_tables(*arguments: object) -> None:
        raise AssertionError(arguments)

    monkeypatch.setattr(run_locked, "make_tables", make_tables)
    monkeypatch.setenv("DJANGO_SETTINGS_MODULE", "tests.settings")
    assert run(key, *engine, "--django", "--", "migrate", "--help") == 0


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


def test_first_deployment(commands: Commands, key: str, empty_database: str) -> None:
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
