"""Child processes that see the test's database and tell what happens.

Each event carries ``at``, the moment by ``time.monotonic()``: on Linux one clock for
all processes of a machine, so that events of several processes can be put in order.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from django.db import connection, connections

from tests.support.timing import DEADLINE, eventually
from tests.support.worker import serve

ROOT = Path(__file__).resolve().parent.parent.parent

Event = dict[str, Any]


def in_forked_child(function: Callable[[], Any]) -> Any:
    """Return what the function returns in a child made by os.fork."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        try:
            answer: Any = function()
        except BaseException as error:  # told to the parent
            answer = f"{type(error).__name__}: {error}"
        os.write(writable, json.dumps(answer).encode())
        os._exit(0)
    os.close(writable)
    try:
        eventually(
            lambda: os.waitpid(pid, os.WNOHANG) != (0, 0), what="the child's end"
        )
    except BaseException:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise
    with os.fdopen(readable) as pipe:
        return json.loads(pipe.read())


def state_of(pid: int) -> str:
    """Return the letter of a process's state: ``T`` is stopped."""
    return _state(Path(f"/proc/{pid}"))


def _state(path: Path) -> str:
    return (path / "stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int) -> None:
    """Suspend a process and wait until all its threads stand.

    Until the one that gets the signal has a processor, the others go on.
    """

    def stands() -> bool:
        try:
            return {*map(_state, Path(f"/proc/{pid}/task").iterdir())} <= {"T", "Z"}
        except (FileNotFoundError, ProcessLookupError):
            # A thread, or all of them, has just ended.
            return False

    os.kill(pid, signal.SIGSTOP)
    eventually(stands, what="the stop")


def resume(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)


def nobody_writes() -> bool:
    """Tell whether the test's database has no writer, which in SQLite bars others."""
    if connection.vendor != "sqlite":
        return True
    name = connection.settings_dict["NAME"]
    try:
        with closing(sqlite3.connect(name, isolation_level=None)) as raw:
            raw.execute("PRAGMA busy_timeout = 200")
            raw.execute("BEGIN EXCLUSIVE")
            raw.execute("ROLLBACK")
    except sqlite3.OperationalError:
        return False
    return True


OWN = ("COVERAGE", "PYTEST", "PYTHONDEVMODE", "DJANGO_SETTINGS_MODULE")


def inherited(dropped: tuple[str, ...] = OWN) -> dict[str, str]:
    """Return the environment, by default for other projects: without this run's own."""
    return {k: v for k, v in os.environ.items() if not k.startswith(dropped)}


def names_of_databases() -> dict[str, str]:
    """Return what to add to the environment of a process that takes the test's."""
    names = {alias: connections[alias].settings_dict["NAME"] for alias in connections}
    return {"DBLOCKS_TEST_NAMES": json.dumps(names, default=str)}


def run_python(
    *arguments: str, timeout: float = DEADLINE, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run this Python to its end, from the project's folder."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


#: Where a fork is quick and safe: in a process that has loaded everything, and does
#: nothing but fork.
FORKING = multiprocessing.get_context("forkserver")
FORKING.set_forkserver_preload(["__main__", "tests.support.preloaded"])


class Worker:
    """A child process; it runs programs of ``tests.support.worker`` in turn.

    ``place`` replaces settings of its default database.
    """

    def __init__(self, place: Mapping[str, Any] | None = None) -> None:
        databases = {
            alias: {"NAME": connections[alias].settings_dict["NAME"]}
            for alias in connections
        }
        databases["default"].update(place or {})
        self._pipe, theirs = FORKING.Pipe()
        self._child = FORKING.Process(
            target=serve, args=(theirs, databases), daemon=True
        )
        self._child.start()
        theirs.close()
        self._events: queue.Queue[Event] = queue.Queue()
        self._reader = threading.Thread(
            target=self._read, name="worker-events", daemon=True
        )
        self._reader.start()
        self.idle = True

    @property
    def pid(self) -> int:
        pid = self._child.pid
        assert pid is not None
        return pid

    def _read(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                self._events.put(self._pipe.recv())
        self._events.put({"event": "gone", "at": time.monotonic()})

    def run(self, program: str, **arguments: Any) -> None:
        """Start a program; its events are read with ``expect``."""
        self.idle = False
        self.tell(program, **arguments)

    def tell(self, word: str, **arguments: Any) -> None:
        """Send one message."""
        self._pipe.send({"word": word, **arguments})

    def next(self, within: float = DEADLINE) -> Event:
        """Return the next event, whatever it is."""
        try:
            event = self._events.get(timeout=within)
        except queue.Empty:
            pytest.fail(f"process {self.pid} said nothing for {within:g} s")
        self.idle = event["event"] == "done"
        return event

    def expect(self, name: str, within: float = DEADLINE) -> Event:
        """Return the next event, which must have this name."""
        event = self.next(within)
        assert event["event"] == name, event
        return event

    def told(self) -> list[str]:
        """Return the names of the events that have come and weren't read yet."""
        names: list[str] = []
        while not self._events.empty():
            names.append(self.next()["event"])
        return names

    def until_done(self, within: float = DEADLINE) -> list[Event]:
        """Return all events up to the program's end."""
        events: list[Event] = []
        while (event := self.next(within))["event"] != "done":
            assert event["event"] not in {"gone", "error"}, event
            events.append(event)
        return events

    def stop(self) -> None:
        """Suspend the process and wait until it stands, without SQLite's locks."""

        def stands() -> bool:
            stop(self.pid)
            assert state_of(self.pid) == "T"
            if nobody_writes():
                return True
            self.resume()
            return False

        eventually(stands, what="a stop between two statements")

    def resume(self) -> None:
        resume(self.pid)

    def kill(self) -> float:
        """End it with SIGKILL; return when."""
        self._child.kill()
        self._child.join(timeout=DEADLINE)
        assert not self.alive
        self._reader.join(timeout=DEADLINE)
        self._pipe.close()
        self.idle = False
        return time.monotonic()

    @property
    def alive(self) -> bool:
        return self._child.is_alive()


class Fleet:
    """Idle workers, kept from test to test.

    ``place`` replaces settings of their default database.
    """

    def __init__(self, place: Mapping[str, Any] | None = None) -> None:
        self._place = place
        self._idle: list[Worker] = []

    def take(self) -> Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.kill()
        return Worker(self._place)

    def give_back(self, worker: Worker) -> None:
        """Keep a worker whose program has ended; kill any other."""
        if worker.alive and worker.idle:
            self._idle.append(worker)
        else:
            worker.kill()

    def close(self) -> None:
        for worker in self._idle:
            worker.kill()
        self._idle.clear()


class Workers:
    """One test's processes."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._mine: list[Worker] = []

    def start(self, program: str, **arguments: Any) -> Worker:
        """Run a program in a process of its own."""
        return self.start_all(program, [arguments])[0]

    def start_all(
        self, program: str, arguments: Iterable[dict[str, Any]]
    ) -> list[Worker]:
        """Run a program once per set of arguments, each in a process of its own."""
        table = list(arguments)
        workers = [self._fleet.take() for _ in table]
        self._mine += workers
        for worker, row in zip(workers, table, strict=True):
            worker.run(program, **row)
        return workers

    def close(self) -> None:
        while self._mine:
            self._fleet.give_back(self._mine.pop())
