"""Code that runs in the middle of dblocks.

``python -m tests.support.reentrant PROGRAM ARGUMENTS``, these as JSON, in a process of
its own, on the test's database: what hangs there is ended, with its stack on standard
error, and hangs nothing else.
"""

from __future__ import annotations

import faulthandler
import gc
import itertools
import json
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import django
from django.db import Error, connections

from tests.support.alarms import alarms

#: Seconds for one program; it ends by itself when one of its rounds hangs.
PROGRAM = 120
#: Seconds that one round may take, however busy the machine.
ROUND = 10.0
#: At about how many lines a sweep stops, each time at others; all are a thousand.
#: With --thorough, at twice as many.
STOPS = int(os.environ.get("DBLOCKS_TEST_STOPS", "50"))

Action = Callable[[], None]


class AtLine:
    """Runs an action when this thread comes to the n-th line of the package.

    As the handler of a signal would, or whatever the garbage collector runs.
    """

    def __init__(self, number: int, action: Action) -> None:
        import dblocks

        self.lines = 0
        self.where = ""
        self._number = number
        self._action = action
        self._folder = str(Path(dblocks.__file__).parent)

    def __enter__(self) -> AtLine:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._folder):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self._number:
                self.where = f"{frame.f_code.co_name}:{frame.f_lineno}"
                # Known before it hangs.
                print(self.where, file=sys.stderr, flush=True)
                # What follows need not be counted, which takes long.
                sys.settrace(None)
                self._action()
                return None
        return self._trace


class Cast:
    """What is done, and what is done in the middle of it, on keys of their own."""

    def __init__(self, key: str, backend: str) -> None:
        self.key = key
        self.backend = backend
        self.unraisable: list[str] = []
        self.awaited: Any = None
        sys.unraisablehook = lambda args: self.unraisable.append(repr(args.exc_value))

    def lock(self, name: str, **options: Any) -> Any:
        from dblocks import distributed_lock

        return distributed_lock(f"{self.key}:{name}", backend=self.backend, **options)

    def left(self) -> list[str]:
        """Return the names of what is still taken, asked for in one statement."""
        from dblocks.conf import backends

        names = {f"{self.key}:{name}": name for name in ("mine", "other", "awaited")}
        seen = backends[self.backend].read_all(list(names))
        return [names[key] for key, reading in seen.items() if reading.remaining > 0]

    # What is interrupted

    def take(self) -> None:
        """Acquire, enter again, renew, and release both."""
        outer = self.lock("mine").acquire(timeout=0)
        inner = self.lock("mine").acquire(timeout=0)
        assert inner.fencing_token == outer.fencing_token
        outer.renew()
        assert inner.release() is True
        assert outer.held
        assert outer.release() is True

    def wait(self) -> None:
        """Wait in vain for a moment."""
        assert self.lock("taken").try_acquire(timeout=0.01) is None

    def wait_for_release(self) -> None:
        """Wait for what the action may release."""
        lease = self.lock("awaited").try_acquire(timeout=0.01)
        if lease is not None:
            assert lease.release() is True

    # What is done in the middle: prepared, and then an action

    def acquire_and_release(self) -> Action:
        """Take another key and give it back."""

        def action() -> None:
            lease = self.lock("other").acquire(timeout=0)
            assert lease.release() is True

        return action

    def wait_in_vain(self) -> Action:
        """Wait for another key for a moment."""

        def action() -> None:
            assert self.lock("taken").try_acquire(timeout=0.005) is None

        return action

    def release(self) -> Action:
        """Give back what was taken before."""
        lease = self.lock("other").acquire(timeout=0)

        def action() -> None:
            assert lease.release() is True

        return action

    def release_awaited(self) -> Action:
        """Give back what is being waited for."""
        self.awaited = self.lock("awaited", owner="somebody").acquire(timeout=0)

        def action() -> None:
            lease, self.awaited = self.awaited, None
            assert lease.release() is True

        return action

    def close_generator(self) -> Action:
        """Have the garbage collector close a generator that holds a lock."""
        cycle: list[Any] = [self._generator()]
        next(cycle[0])
        cycle.append(cycle)
        del cycle

        def action() -> None:
            gc.collect()

        return action

    def _generator(self) -> Iterator[None]:
        with self.lock("other", timeout=0):
            yield

    def nothing(self) -> Action:
        """Do nothing."""
        return lambda: None


def sweep(key: str, backend: str, subject: str, action: str) -> None:
    """Do one thing again and again, interrupted at many of its lines in turn."""
    cast = Cast(key, backend)
    errors: list[str] = []
    taken = cast.lock("taken", owner="somebody").acquire(timeout=0)
    gc.collect()
    gc.freeze()
    gc.disable()

    def run(number: int, name: str) -> int:
        faulthandler.dump_traceback_later(ROUND, exit=True)
        prepared = getattr(cast, name)()
        happened = []

        def guarded() -> None:
            happened.append(True)
            try:
                prepared()
            except Exception as error:
                errors.append(f"in the middle: {error!r}")

        with AtLine(number, guarded) as at:
            try:
                getattr(cast, subject)()
            except Exception as error:
                errors.append(f"interrupted: {error!r}")
        if not happened:
            guarded()
        errors.extend(f"collected: {text}" for text in cast.unraisable)
        errors.extend(f"{name} is left" for name in cast.left())
        if errors:
            raise AssertionError(f"at {at.where}: {errors}")
        faulthandler.cancel_dump_traceback_later()
        return at.lines

    run(0, "nothing")
    lines = run(0, "nothing")
    assert lines > 20
    step = max(1, lines // STOPS)
    for number in range(random.randint(1, step), lines + 1, step):
        run(number, action)
    assert taken.release() is True


@contextmanager
def storm(handle: Action, most: int) -> Iterator[Callable[[], int]]:
    """Give a signal that comes often, at any moment; how often is what the call says.

    It comes so many times or until the block ends: a slow machine may come to little
    else between two of them.
    """
    chance = random.Random(20240229)
    count = 0

    def heard(frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        handle()
        # Not before: a handler is not interrupted by itself here.
        if count < most:
            arm(chance.uniform(0.0002, 0.003))

    with alarms(heard) as arm:
        arm(0.001)
        yield lambda: count


def alarmed(key: str, backend: str, rounds: int) -> None:
    """Use locks while the handler of a frequent signal uses others."""
    cast = Cast(key, backend)
    actions = itertools.cycle([cast.acquire_and_release, cast.release])
    errors: list[str] = []

    def handle() -> None:
        try:
            next(actions)()()
        except Exception as error:
            errors.append(f"in the middle: {error!r}")

    taken = cast.lock("taken", owner="somebody").acquire(timeout=0)
    round_ = itertools.count()
    with storm(handle, most=rounds) as count:
        while next(round_) < rounds or count() < rounds / 10:
            faulthandler.dump_traceback_later(ROUND, exit=True)
            try:
                false = cast.lock("taken").try_acquire()
                if false is not None:
                    errors.append(f"granted although taken: {false!r}")
                lease = cast.lock("mine").acquire(timeout=0)
                if not lease.release():
                    errors.append(f"lost: {lease.lost_reason}")
            except Exception as error:
                errors.append(f"interrupted: {error!r}")
    assert taken.release() is True
    faulthandler.cancel_dump_traceback_later()
    kinds = sorted(set(errors))
    assert not errors, f"{len(errors)} errors, {count()} alarms: {kinds[:5]}"


def alarmed_at_taken_key(key: str, backend: str, rounds: int) -> None:
    """Try for a taken key while a handler uses the same connection.

    That the driver may refuse the one or the other is its own affair.
    """
    from dblocks import LockError
    from tests.testapp.models import Account

    def insert() -> None:
        Account.objects.create(name="from a handler", balance=0)

    cast = Cast(key, backend)
    actions = itertools.cycle([cast.acquire_and_release(), insert])
    granted: list[str] = []

    def handle() -> None:
        with suppress(Error, LockError):
            next(actions)()

    taken = cast.lock("taken", owner="somebody").acquire(timeout=0)
    round_ = itertools.count()
    with storm(handle, most=rounds) as count:
        while next(round_) < rounds or count() < rounds / 10:
            faulthandler.dump_traceback_later(ROUND, exit=True)
            with suppress(Error):
                lease = cast.lock("taken").try_acquire()
                if lease is not None:
                    granted.append(repr(lease))
    faulthandler.cancel_dump_traceback_later()
    assert taken.held
    assert not granted, f"{len(granted)} of {count()} alarms: {granted[:5]}"


PROGRAMS: dict[str, Callable[..., None]] = {
    program.__name__: program for program in (sweep, alarmed, alarmed_at_taken_key)
}


def perform(program: str, arguments: dict[str, Any]) -> None:
    """Run a program."""
    for alias in connections:
        # A handler that uses Django's ORM can hang at this mutex, without dblocks.
        vars(connections[alias])["_thread_sharing_lock"] = threading.RLock()
    try:
        PROGRAMS[program](**arguments)
    finally:
        connections.close_all()


def main() -> None:
    django.setup()
    for alias, name in json.loads(os.environ["DBLOCKS_TEST_NAMES"]).items():
        connections.settings[alias]["NAME"] = name
    program, arguments = sys.argv[1:]
    perform(program, json.loads(arguments))


if __name__ == "__main__":
    main()
