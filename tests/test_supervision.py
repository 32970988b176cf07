"""The processes of ``run_locked``: streams, terminals, signals, a wrapper that dies."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from django.core.management import call_command
from django.db import connections

from dblocks import distributed_lock
from dblocks.models import DistributedLock
from dblocks.supervision import supervisor
from dblocks.supervision.group import StartError
from dblocks.supervision.sentinel import now
from dblocks.supervision.signals import Signals
from dblocks.supervision.supervisor import Supervisor
from dblocks.test import hold_elsewhere
from tests.support.commands import (
    MANAGE,
    SLEEP,
    Commands,
    environment,
    family,
    finish,
    gone,
    run,
    running,
    shell,
    stubborn_family,
)
from tests.support.factories import stored
from tests.support.fixtures import OtherThread
from tests.support.nursery import Program
from tests.support.processes import ROOT, state_of
from tests.support.timing import DEADLINE, SLACK, always, eventually, scaled, takes

# How they are started

STATE = """
import os, sys, threading
import django
print(sys.argv, sys.flags, sys.modules["__main__"].__spec__.name, os.getcwd())
print(os.listdir("/proc/self/fd"), sys.stdin.read(), sys.stdout, sys.stderr)
signals = "SigBlk", "SigIgn", "SigCgt"
print([line for line in open("/proc/self/status") if line.startswith(signals)])
print(os.getpid() == os.getsid(0) == os.getpgid(0), threading.active_count())
print(sorted(os.environ.items()))
"""
END = """
import atexit, sys, threading, time
atexit.register(print, "the end")
threading.Thread(target=lambda: time.sleep(0.1) or print("late")).start()
sys.exit("a message")
"""
INTERRUPTED = """
import os, signal, sys, time
sys.excepthook = lambda *about: print(about[0])
os.kill(os.getpid(), signal.SIGINT)
time.sleep(60)
"""


@pytest.mark.parametrize("code", [STATE, END, INTERRUPTED], ids=["state", "end", "INT"])
def test_forked_like_started(commands: Commands, code: str) -> None:
    """Nothing tells a command that the tests have forked from one that they started."""
    started, forked = (
        finish(commands.start("shell", "--no-imports", "-c", code, fresh=fresh))
        for fresh in (True, False)
    )
    assert forked == started
    assert forked[1]


def test_forked_whose_child_keeps_its_output() -> None:
    """A time-out ends the wait for a forked command's output, as for a started one."""
    with subprocess.Popen(
        ["sh", "-c", "sleep 60 & exec sleep 60"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        status, tells = os.pipe()
        os.write(tells, b"%d\n" % process.pid)
        program = Program(status, [None, process.stdout, process.stderr], "sh")
        with takes(0.2, 0.2 + SLACK), pytest.raises(subprocess.TimeoutExpired):
            program.communicate(timeout=0.2)
        os.killpg(process.pid, signal.SIGKILL)
        os.write(tells, b"-9\n")
        os.close(tells)
        assert program.communicate(timeout=DEADLINE) == (b"", b"")
    assert program.returncode == -9


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

    def __init__(self, program: Sequence[str]) -> None:
        self.pid, self.file = pty.fork()
        if not self.pid:
            try:
                os.execvpe(program[0], program, environment())
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
    """Run management commands, or a program, on pseudo-terminals."""
    made: list[PseudoTerminal] = []

    def make(*arguments: str, program: Sequence[str] = MANAGE) -> PseudoTerminal:
        connections.close_all()
        made.append(PseudoTerminal([*program, *arguments]))
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


def test_suspend_key_without_a_shell(
    terminal: Callable[..., PseudoTerminal], key: str
) -> None:
    """Where no shell could continue a stopped command, Ctrl-Z stops nothing."""
    script = 'echo ready; read line; echo "got $line"'
    session = terminal("run_locked", key, "--", "sh", "-c", script)
    session.read_until(b"ready")
    session.type(b"\x1a")
    session.read_until(b"not stopped: no shell could continue it, so the command")
    session.type(b"hello\n")
    session.read_until(b"got hello")
    assert session.wait() == 0


#: In the foreground of a terminal where programs in the background may not write.
TOSTOP = "trap 'exit 5' TERM; stty tostop; echo ready; while :; do sleep 0.05; done"


@pytest.mark.parametrize(
    ("act", "status"),
    [
        (DistributedLock.objects.request_release, 5),
        (DistributedLock.objects.force_release, 76),
    ],
    ids=["asked", "forced"],
)
def test_message_from_the_background(
    terminal: Callable[..., PseudoTerminal],
    key: str,
    act: Callable[[str], object],
    status: int,
) -> None:
    """After "stty tostop" neither a message nor a log line stops the wrapper."""
    manage = f"{sys.executable} -m tests.support.manage"
    line = f'{manage} run_locked {key} --lease 3 -- sh -c "{TOSTOP}"'
    session = terminal("-i", "-c", f"{line}; echo end $?", program=["bash", "--norc"])
    session.read_until(b"ready\r\n")
    act(key)
    session.read_until(b"end %d\r\n" % status)
    session.wait()


def test_stopped_output(
    terminal: Callable[..., PseudoTerminal], commands: Commands, key: str
) -> None:
    """After Ctrl-S a message waits, and nothing else does."""
    file = commands.file()
    session = terminal("run_locked", key, "--lease", "3", *shell(SILENT, file))
    commands.pids(file)
    session.type(b"\x13")
    assert DistributedLock.objects.request_release(key)
    assert session.wait() == 3
    assert not distributed_lock(key).locked()


# Standard error that takes nothing


@pytest.fixture(params=["closed", "without a reader", "full", "blocked"])
def deaf(request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """Return the options for a process whose standard error takes no message."""
    if request.param == "closed":
        yield {"preexec_fn": partial(os.close, 2)}
    elif request.param == "full":
        with open("/dev/full", "wb") as full:
            yield {"stderr": full}
    elif request.param == "blocked":
        with blocked() as pipe:
            yield {"stderr": pipe}
    else:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "wb") as writable:
            yield {"stderr": writable}


@contextmanager
def blocked() -> Iterator[BinaryIO]:
    """A pipe that is full, and that nobody reads."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"), os.fdopen(writer, "wb") as writable:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, bytes(4096))
        os.set_blocking(writer, True)
        yield writable


def test_status_without_messages(
    commands: Commands, key: str, deaf: dict[str, Any]
) -> None:
    """The exit status says what the message can't."""
    expected = {
        ("run_locked", key, "--", "true"): 75,
        ("run_locked", f"{key}:free", "--", "no-such-program"): 127,
        ("run_locked", key): 64,
        ("run_locked", "--no-such-option"): 64,
        ("locks", "show", f"{key}:none"): 1,
        # The question can't be asked.
        ("locks", "release", key): 1,
    }
    yes = commands.file()
    yes.write_text("yes\n")
    with distributed_lock(key).acquire(timeout=0) as lease, yes.open() as stdin:
        processes = {
            arguments: commands.start(*arguments, stdin=stdin, **deaf)
            for arguments in expected
        }
        found = {arguments: p.wait(DEADLINE) for arguments, p in processes.items()}
        assert found == expected
        lease.renew()
    assert not distributed_lock(f"{key}:free").locked()


SETTLE = """
import os, signal, sys, threading
from dblocks.management.standard_error import StandardError

class Interrupted:
    def write(self, text):
        pass

    def flush(self):
        os.kill(os.getpid(), signal.SIGINT)
        threading.Event().wait()

print("out")
file = StandardError(Interrupted() if "interrupted" in sys.argv else sys.stderr)
file.write("err")
file.settle(3)
"""


def settled(*arguments: str, **options: Any) -> tuple[int, bytes]:
    """Return a process's status and output, after it has said something on both."""
    process = subprocess.run(
        [sys.executable, "-c", SETTLE, *arguments],
        env={**environment(), "PYTHONUNBUFFERED": ""},
        cwd=ROOT,
        timeout=DEADLINE,
        **options,
    )
    return process.returncode, process.stdout


def test_output_beside_blocked_messages() -> None:
    """What was written to standard output is not lost with the messages."""
    with blocked() as stderr:
        assert settled(stdout=subprocess.PIPE, stderr=stderr) == (3, b"out\n")


def test_blocked_output_beside_blocked_messages() -> None:
    """Unless it is blocked as well: the process ends all the same."""
    with blocked() as stdout, blocked() as stderr:
        assert settled(stdout=stdout, stderr=stderr)[0] == 3


def test_interrupted_while_messages_block() -> None:
    """Ctrl-C ends the wait for a reader, and changes nothing else."""
    ended = settled("interrupted", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert ended == (3, b"out\n")


def test_asked_for_without_messages(
    commands: Commands, key: str, deaf: dict[str, Any]
) -> None:
    """The command is told to finish, and finishes."""
    file = commands.file()
    process = commands.start(
        "run_locked", key, "--lease", "3", *shell(SILENT, file), **deaf
    )
    commands.pids(file)
    assert DistributedLock.objects.request_release(key)
    assert process.wait(DEADLINE) == 3
    assert file.read_text().split()[1:] == ["TERM"]
    assert not distributed_lock(key).locked()


def test_lost_without_messages(
    commands: Commands, key: str, deaf: dict[str, Any]
) -> None:
    """The group is ended when the lease is lost."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        *[key, "--lease", "3", "--kill-after", "0.4"],
        *stubborn_family(file),
        **deaf,
    )
    pids = family(commands, file)
    DistributedLock.objects.force_release(key)
    assert process.wait(DEADLINE) == 76
    assert not any(running(pid) for pid in pids)


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


#: The same; the shell would say that its sleep was terminated.
SILENT = f"exec 2>&-; {FINISHING}"


@pytest.mark.parametrize("keys", [1, 2])
def test_asked_for(commands: Commands, key: str, keys: int) -> None:
    """Who is asked for the lock tells the command, once, and waits for it."""
    file = commands.file()
    names = [f"{key}:{number}" for number in range(keys)]
    process = commands.start(
        "run_locked", *names, "--lease", "3", *shell(FINISHING, file)
    )
    commands.pids(file)
    assert DistributedLock.objects.request_release(names[-1])
    status, _, said = finish(process)
    assert status == 3
    assert file.read_text().split()[1:] == ["TERM"]
    assert "somebody asked for the lock" in said
    assert not distributed_lock(*names).locked()


def test_asked_for_in_vain(commands: Commands, key: str) -> None:
    """With --ignore-requests the command isn't told."""
    file = commands.file()
    process = commands.start(
        "run_locked",
        key,
        f"--lease={scaled(1.5)}",
        "--ignore-requests",
        *shell(FINISHING, file),
    )
    commands.pids(file)
    assert DistributedLock.objects.request_release(key)
    first = stored(key).expires_at
    eventually(lambda: stored(key).expires_at > first, what="a renewal")
    always(lambda: "TERM" not in file.read_text(), during=scaled(0.7), what="not told")
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 3


def test_stop_without_terminal(commands: Commands, key: str) -> None:
    """SIGTSTP stops the command, SIGCONT continues it; the lease is renewed."""
    file = commands.file()
    options = [key, f"--lease={scaled(2)}"]
    process = commands.start("run_locked", *options, *shell(SLEEP, file))
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


def assert_never_started(key: str, folder: Path) -> None:
    """SIGTERM came first: the command doesn't run, and the key is free."""
    file = folder / "ran"
    assert run(key, "--", "touch", str(file)) == 143
    assert not file.exists()
    assert not distributed_lock(key).locked()


def test_signal_between_grant_and_start(
    shared: None, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal after the grant and before the start: the command never starts."""
    original = Supervisor._start

    def interrupted(self: Supervisor) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Supervisor, "_start", interrupted)
    assert_never_started(key, tmp_path)


@pytest.mark.parametrize("helper", ["group", "sentinel"])
def test_signal_that_ends_a_helper_too(
    shared: None,
    key: str,
    helper: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal to all processes, as by Ctrl-C or systemd, is no fault of a helper."""
    original = Supervisor._prepare

    def interrupted(self: Supervisor) -> bool:
        ended = getattr(self, helper)
        os.kill(ended._process.pid, signal.SIGKILL)
        while select.select([ended.ready], [], [])[0] and os.read(ended.ready, 1):
            pass
        select.select([self.group.ready], [], [])
        os.kill(os.getpid(), signal.SIGTERM)
        return original(self)

    monkeypatch.setattr(Supervisor, "_prepare", interrupted)
    assert_never_started(key, tmp_path)


# The group


def test_lock_is_kept_for_grandchildren(commands: Commands, key: str) -> None:
    """The lock is released when the last process of the group has ended."""
    file = commands.file()
    goes_on = "while [ -e {file} ]; do sleep 0.1; done"
    script = f"(echo $(exec sh -c 'echo $PPID') >> {{file}}; {goes_on}) & exit 5"
    process = commands.start("run_locked", key, *shell(script, file))
    commands.pids(file)
    always(
        lambda: distributed_lock(key).locked() and process.poll() is None, during=0.4
    )
    file.unlink()
    assert finish(process)[0] == 5
    assert not distributed_lock(key).locked()


def test_detached_processes_are_reaped(commands: Commands, key: str) -> None:
    """What has left the group, and its parent, leaves no zombie when it ends."""
    file, end = commands.file(), commands.file()
    detached = f"echo $$ >> {file}; until test -e {end}; do sleep 0.02; done"
    script = f'(setsid sh -c "{detached}" &); exec sleep 60'
    process = commands.start(
        "run_locked", key, "--", "sh", "-c", script.replace("$$", "\\$\\$")
    )
    [pid] = commands.pids(file)
    eventually(lambda: pid in children_of(process.pid), what="the adoption")
    end.touch()
    eventually(lambda: not Path(f"/proc/{pid}").exists(), what="its end")
    process.terminate()
    assert finish(process)[0] == 143


@pytest.mark.parametrize("own_session", [False, True], ids=["group", "session"])
def test_children_of_the_caller(shared: None, key: str, own_session: bool) -> None:
    """What the caller has started before is the caller's to reap."""
    child = subprocess.Popen(["sh", "-c", "exit 3"], start_new_session=own_session)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert run(key, "--", "true") == 0
    assert child.wait() == 3


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
        *[key, "--lease", "6", "--kill-after", "1"],
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


def test_killed_before_the_end(
    shared: None, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group is killed early enough to be gone when the lease is over."""
    original = Supervisor._instruct
    margins: list[float] = []

    def instruct(self: Supervisor) -> None:
        original(self)
        margins.append(now() + self.lease.remaining() - self.deadline)

    monkeypatch.setattr(Supervisor, "_instruct", instruct)
    assert run(key, "--lease", "6", "--kill-after", "1", "--", "true") == 0
    assert margins
    assert min(margins) > 0.09


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


STANDS_STILL = """
import select, sys, time
sys.path.insert(0, sys.argv[1])
import sentinel

class Looks:
    @staticmethod
    def select(*arguments):
        found = select.select(*arguments)
        if not found[0] and not Looks.stood:
            Looks.stood = True
            time.sleep(1.5)
        return found

    stood = False

sentinel.select = Looks
sentinel.main()
"""


def test_sentinel_that_stood_still() -> None:
    """It looks for a new order before it heeds the old one's moments."""
    place = str(ROOT / "dblocks" / "supervision")
    with (
        subprocess.Popen(["sleep", "60"], start_new_session=True) as command,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", STANDS_STILL, place],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            assert process.stdout.read(1)
            soon, late = now() + 1, now() + 2 * DEADLINE
            process.stdin.write(f"{command.pid} {soon} {soon}\n".encode())
            time.sleep(0.7)
            process.stdin.write(f"{command.pid} {late} {late}\n".encode())
            always(lambda: command.poll() is None, during=2.0)
            process.stdin.close()
            assert command.wait(DEADLINE) == -signal.SIGKILL
        finally:
            command.kill()
            process.kill()


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


def test_sentinel_that_cant_be_replaced(
    shared: None,
    key: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """That is said, and the command goes on."""
    made: list[object] = []

    class Dead(supervisor.Sentinel):
        def __init__(self) -> None:
            if made:
                raise StartError("no process could be started: too many")
            made.append(self)
            super().__init__()

        def alive(self) -> bool:
            return False

    monkeypatch.setattr(supervisor, "Sentinel", Dead)
    assert run(key, "--", "sh", "-c", "exit 7") == 7
    err = capfd.readouterr().err
    assert "the sentinel process has died: starting another" in err
    assert "no process could be started: too many" in err
    assert not distributed_lock(key).locked()


def test_status_after_the_sentinel_was_replaced(commands: Commands, key: str) -> None:
    """Where only the sentinel died, the command's own end is what is told."""
    file, over = commands.file(), commands.file()
    script = f"echo $$ >> {file}; until test -e {over}; do sleep 0.05; done; exit 7"
    process = commands.start("run_locked", key, "--", "sh", "-c", script)
    [pid] = commands.pids(file)
    [sentinel] = [child for child in children_of(process.pid) if child != pid]
    os.kill(sentinel, signal.SIGKILL)
    assert process.stderr is not None
    assert b"the sentinel process has died: starting another" in (
        process.stderr.readline()
    )
    over.touch()
    assert finish(process)[0] == 7
    assert not distributed_lock(key).locked()
