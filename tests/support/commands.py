"""Management commands in processes of their own, and what becomes of their children."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from dblocks.management.commands import locks
from dblocks.management.commands.run_locked import Command
from tests.support.fixtures import in_memory
from tests.support.nursery import Nursery, Program
from tests.support.processes import ROOT, state_of
from tests.support.timing import DEADLINE, eventually

MODULE = "tests.support.manage"
MANAGE = [sys.executable, "-m", MODULE]

Process = subprocess.Popen[bytes] | Program

#: What may differ from the environment in which Django was loaded.
READ_LATER = {"DBLOCKS_TEST_DATABASES", "PYTEST_CURRENT_TEST"}

SLEEP = "echo $$ >> {file}; exec sleep 60"
#: Ignores SIGTERM, in the shell and in what it starts.
STUBBORN = "trap '' TERM; echo $$ >> {file}; while :; do sleep 0.1; done"


def running_locks(
    capture: pytest.CaptureFixture[str],
) -> Callable[..., tuple[int, str, str]]:
    """Return what runs ``locks`` as from the command line.

    It returns the status, stdout and stderr.
    """

    def run(*arguments: str) -> tuple[int, str, str]:
        status = 0
        try:
            locks.Command().run_from_argv(["manage.py", "locks", *arguments])
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capture.readouterr()

    return run


def environment(**changes: Any) -> dict[str, str]:
    """Return an environment for ``tests.support.manage`` on the test's databases.

    Args:
        changes: More to change in the default database's settings.
    """
    databases = {
        alias: {"NAME": str(connections[alias].settings_dict["NAME"])}
        for alias in connections
    }
    databases["default"].update(changes)
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "DBLOCKS_TEST_DATABASES": json.dumps(databases),
        # Warnings about this process's own end are not what is tested.
        "PYTHONDEVMODE": "",
    }


def running(pid: int) -> bool:
    """Tell whether a process exists and has not ended; a zombie has."""
    try:
        return state_of(pid) not in {"Z", "X"}
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(*pids: int, within: float = DEADLINE) -> None:
    """Wait until none of the processes runs."""
    eventually(
        lambda: not any(map(running, pids)), within=within, what=f"the end of {pids}"
    )


class Commands:
    """One test's management commands; those that are left at its end are killed."""

    def __init__(self, nursery: Nursery, folder: Path) -> None:
        self.folder = folder
        self._nursery = nursery
        self._started: list[Process] = []
        self._children: list[int] = []
        self._files = 0

    def start(
        self,
        *arguments: str,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        **options: Any,
    ) -> Process:
        """Start ``manage.py`` with these arguments, in a session of its own.

        It is forked, unless ``fresh`` or something else asks for another Python.
        """
        env = environment() if env is None else env
        fresh = fresh or not options.keys() <= {"stdin", "stdout", "stderr"}
        if not fresh and loads_the_same(env, self._nursery.environment):
            program = self._nursery.start(MODULE, *arguments, env=env, **options)
            self._started.append(program)
            return program
        options.setdefault("stdin", subprocess.DEVNULL)
        options.setdefault("stdout", subprocess.PIPE)
        options.setdefault("stderr", subprocess.PIPE)
        options.setdefault("start_new_session", True)
        process = subprocess.Popen(
            [*MANAGE, *arguments],
            cwd=ROOT,
            env=env,
            **options,
        )
        self._started.append(process)
        return process

    def file(self) -> Path:
        """Return the path of a file that doesn't exist yet."""
        self._files += 1
        return self.folder / f"file-{self._files}"

    def pids(self, file: Path, count: int = 1) -> list[int]:
        """Wait until a child has written so many process numbers into a file."""

        def read() -> list[int]:
            if not file.exists():
                return []
            found = [int(word) for word in file.read_text().split()]
            return found if len(found) >= count else []

        found = eventually(read, what=f"{count} numbers in {file.name}")
        self._children += found
        return found

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.communicate()
        for pid in self._children:
            with suppress(ProcessLookupError, PermissionError):
                if running(pid):
                    os.kill(pid, signal.SIGKILL)


def loads_the_same(one: dict[str, str], other: dict[str, str]) -> bool:
    """Tell whether Django, loaded in either environment, is the same."""
    return all(
        one.get(name) == other.get(name)
        for name in (one.keys() | other.keys()) - READ_LATER
    )


def finish(process: Process, within: float = DEADLINE) -> tuple[int, str, str]:
    """Wait for a command's end; return its status and what it wrote."""
    out, err = process.communicate(timeout=within)
    return process.returncode, out.decode(), err.decode()


class Relay:
    """A port through which a database is reached, until it is cut."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                outer = socket.create_connection(self._target)
                self._sockets += [inner, outer]
                for source, sink in ((inner, outer), (outer, inner)):
                    threading.Thread(
                        target=self._copy, args=(source, sink), daemon=True
                    ).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Reset all connections and refuse new ones."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._sockets:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@contextmanager
def relay() -> Iterator[Relay]:
    """Reach the test's database server through a relay."""
    settings = connections["default"].settings_dict
    made = Relay(settings["HOST"] or "127.0.0.1", int(settings["PORT"]))
    try:
        yield made
    finally:
        made.cut()


def run(*arguments: str) -> int:
    """Run ``run_locked`` in this process, as from the command line."""
    command = Command()
    try:
        command.run_from_argv(["manage.py", "run_locked", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def shell(script: str, file: Path) -> list[str]:
    return ["--", "sh", "-c", script.format(file=file)]


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


@pytest.fixture
def shared(committed: None) -> None:
    """Apply the test only where other processes and threads see the database."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")


@pytest.fixture(scope="session")
def loaded(django_db_setup: None) -> Iterator[Nursery]:
    """Keep the process from which commands are forked."""
    with closing(Nursery(environment())) as loaded:
        yield loaded


@pytest.fixture
def commands(shared: None, loaded: Nursery, tmp_path: Path) -> Iterator[Commands]:
    """Start management commands that are killed when the test ends."""
    commands = Commands(loaded, tmp_path)
    yield commands
    commands.close()
