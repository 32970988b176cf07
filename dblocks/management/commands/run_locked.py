"""``manage.py run_locked KEY [KEY …] [options] -- COMMAND [ARG …]``."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar

from django.core.management.base import CommandError, CommandParser

from ...backends.values import Reading
from ...exceptions import LockError
from ...holding import news, owners
from ...holding.sets import give_back
from ...leases import Lease, Leases
from ...waiting import queue
from ...waiting.attempt import Attempt
from ...waiting.steps import InThread, run
from ...waiting.together import Refused, get_all_in
from .. import run_plan, statuses
from ..first_deploy import make_tables
from ..parsing import LockCommand, Parser
from ..rendering import holder_of
from ..run_plan import Plan
from ..worker import Caller, Worker

try:
    from ...supervision.sentinel import now
    from ...supervision.signals import Signals
    from ...supervision.supervisor import Supervisor, loss
except ImportError:
    can_supervise = False
else:
    can_supervise = True

T = TypeVar("T")

THREAD = "dblocks-run-locked"

TELLING = 2.0
"""The most seconds to wait until a loss is logged and its receivers know."""

GIVING_BACK = 0.2
"""Seconds to wait, after a signal, for a lease that is just being granted."""
MAKING_TABLES = 10.0
"""The same while tables are being made, which some databases can't undo."""


class RunParser(Parser):
    """Takes what follows ``--``, or else ``--shell``, as it is."""

    advice = f"; {run_plan.SYNOPSIS}"

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        if "--" in words:
            end = words.index("--")
            words, command = words[:end], words[end + 1 :]
        elif "--shell" in words:
            end = words.index("--shell") + 1
            command = [word for word in words[end : end + 1] if word[:1] != "-"]
            del words[end : end + len(command)]
        else:
            command = []
        options = super().parse_args(words, namespace)
        options.command = command
        return options


class Command(LockCommand):
    help = (
        "Run a command while holding a lock. Of all machines that share the database, "
        "only one at a time, or as many as there are permits, runs a command under "
        "KEY."
    )
    parser_class = RunParser
    stealth_options = ("command",)
    examples = """\
COMMAND follows "--" and is run as it is, without a shell. A shell line may follow
"--shell" directly.

examples:
  once on ten machines, from cron:
    manage.py run_locked nightly-report --hold-at-least 60 --skip-if-locked \\
        -- ./report.sh
  migrations of a deployment that several machines start at once:
    manage.py run_locked migrate --wait 600 --django -- migrate --noinput
  a shell line, waiting up to ten seconds:
    manage.py run_locked backup --wait 10 --shell 'pg_dump shop | gzip > shop.gz'

exit status:
  the command's own; 128+N if signal N ended it; 75 the lock is taken; 76 the lease was
  lost; 64 bad usage; 69 the database or backend is out of reach; 78 the lock table is
  missing or out of date, or the backend's entry in DBLOCKS is wrong; 126 COMMAND can't
  be run, or no thread or process could be started; 127 COMMAND was not found
"""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = f"%(prog)s {run_plan.ARGUMENTS}"
        run_plan.add_lock_arguments(parser)
        run_plan.add_command_arguments(parser)

    def handle(
        self,
        *args: Any,
        verbosity: int,
        skip_if_locked: bool,
        conflict_exit_code: int,
        lost_exit_code: int,
        **options: Any,
    ) -> None:
        _refuse_unless_it_can_supervise()
        self.verbosity = verbosity
        plan = run_plan.make_plan(**options, from_command_line=self.from_command_line)
        with Signals() as self.signals, self._threads(plan) as self.worker:
            waiter = Waiter(plan, self.worker, self.signals.wake)
            lease = self._acquire(plan, waiter, quiet=skip_if_locked)
            if lease is None:
                conflict = _conflict(plan, waiter.seen)
                if skip_if_locked:
                    self._tell(f"{conflict}; nothing was run", cron=False)
                    return
                self.fail(conflict, conflict_exit_code)
            status = self._run(plan, lease)
        if status is None:
            status = lost_exit_code
            news.settle(TELLING)
        if status:
            sys.exit(status)

    @contextmanager
    def _threads(self, plan: Plan) -> Iterator[Caller]:
        """Start the threads that write messages, and that take and release the lock."""
        try:
            self.standard_error.start()
            worker = Caller()
            if not plan.engine.is_in_test_case():
                worker = Worker(THREAD, self.signals.wake)
        except RuntimeError as error:
            raise CommandError(
                f"no thread could be started: {error}; nothing was run",
                returncode=statuses.CANT_RUN,
            ) from error
        try:
            yield worker
        finally:
            worker.end(GIVING_BACK)

    def _run(self, plan: Plan, lease: Lease | Leases) -> int | None:
        """Run the command; return its status, or ``None`` if the lease was lost."""
        supervisor = Supervisor(
            lease,
            plan.kill_after,
            plan.heeds_requests,
            self.signals,
            self._tell,
            self.standard_error.flush,
        )
        try:
            status = supervisor.run(plan.command, _environment(plan, lease))
            if status is None:
                status = self._not_run(loss(lease))
        finally:
            released = self._release(lease, unused=not supervisor.ran)
        if released is False and not supervisor.lost:
            self._tell(f"{loss(lease)}; the command may not have been alone")
        return None if released is False or supervisor.lost else status

    def _acquire(
        self, plan: Plan, waiter: Waiter, quiet: bool
    ) -> Lease | Leases | None:
        waiting = waiter.result
        told = None
        while not waiting.done() and self.signals.ending() is None:
            self.signals.wait(0.5)
            key, seen = waiter.seen
            grant = (key, seen.owner, seen.version)
            worth = plan.wait and seen.remaining > 0 and grant != told
            if worth and not quiet and not waiting.done():
                told = grant
                self._tell(
                    f"waiting {plan.wait:g} s at most for the lock "
                    f"{key!r}: {holder_of(seen)}"
                )
        if self.signals.ending() is not None:
            waiter.called_off.set()
            status = self._not_run()
            wait([waiting], MAKING_TABLES if waiter.migrating.is_set() else GIVING_BACK)
            lease = _result(waiting)
            if lease is not None:
                self._release(lease, GIVING_BACK, unused=True)
            elif self.from_command_line:
                _try_briefly(waiter.give_back)
            if self.from_command_line:
                # The interpreter's cleanup takes long on a busy machine, and the
                # waiter's database call may still be under way.
                _try_briefly(plan.engine.close)
                self.standard_error.flush(GIVING_BACK)
                os._exit(status)
            sys.exit(status)
        return waiting.result()

    def _release(
        self, lease: Lease | Leases, patience: float = 0.0, *, unused: bool
    ) -> bool | None:
        """Release the lock; return ``None`` if that failed or took too long.

        The key of an ``unused`` lock, under which nothing was run, doesn't cool.
        """
        # Once the lease is over, there is nothing left to release.
        until = now() + (patience or max(1.0, lease.remaining()))
        self.signals.take()
        release = partial(_undo, lease) if unused else lease.release
        releasing = self.worker.call(release)
        while not releasing.done() and now() < until:
            self.signals.wait(min(0.5, until - now()))
            if self.signals.ending() is not None:
                until = min(until, now() + GIVING_BACK)
        held = _result(releasing)
        if held is None:
            why = "no answer"
            if releasing.done():
                error = releasing.exception()
                why = statuses.one_line(error) if error else "the log says why"
            self._tell(f"the lock was not released and is left to lapse: {why}")
        return held

    def _not_run(self, reason: str = "") -> int:
        """Say that nothing was run; return the exit status for the signal, if any."""
        number = self.signals.ending()
        if number is not None:
            reason = f"stopped by {signal.Signals(number).name}"
        self._tell(f"{reason}: nothing was run")
        return 128 + (number or 0)

    def _tell(self, text: str, *, cron: bool = True) -> None:
        """Say something on standard error; without ``cron``, only on a terminal."""
        if self.verbosity > 0 and (cron or self.stderr.isatty()):
            self.stderr.write(f"run_locked: {text}")


def _refuse_unless_it_can_supervise() -> None:
    lacks = ""
    if not can_supervise:
        lacks = (
            "process groups, which this system doesn't have: it runs on Linux, macOS "
            "and other systems of the Unix family"
        )
    elif threading.current_thread() is not threading.main_thread():
        lacks = (
            "the main thread, which alone gets signals: start it as a process, or use "
            "distributed_lock() in this thread"
        )
    if lacks:
        raise CommandError(
            f"run_locked needs {lacks}; nothing was run",
            returncode=statuses.UNAVAILABLE,
        )


class CalledOff(Exception):
    """The wait was called off."""


class Seen(NamedTuple):
    """The key that is waited for, and who had it at the last look."""

    key: str
    reading: Reading


class Waiter(InThread):
    """Acquires a lock for the thread that makes this object, usually in another thread.

    Python runs signal handlers between two steps of the main thread, and a silent
    database can make one step last for seconds.

    Attributes:
        result: The lease, or those of several keys, or ``None`` if one stays taken.
        seen: Which key is waited for or stays taken, and who had it at the last look.
        called_off: Set it to stop waiting, at any moment.
        migrating: Is set while tables are made.
    """

    def __init__(self, plan: Plan, worker: Caller, wake: Callable[[], object]) -> None:
        self._plan = plan
        self._wake = wake
        self._owner = owners.current()
        self._attempts: Sequence[Attempt] = ()
        self._gives_up = False
        self.seen = Seen("", Reading())
        self.called_off = threading.Event()
        self.migrating = threading.Event()
        self.result = worker.call(self._get)

    def _get(self) -> Lease | Leases | None:
        """Acquire; give every failure an exit status."""
        engine = self._plan.engine
        try:
            if self._plan.migrates and engine.has_table:
                make_tables(engine.using, self.called_off, self.migrating)
            return self._acquire()
        except LockError as error:
            raise statuses.bad_usage(error) from error
        except Exception as error:
            # Not 1, which would look like the command's own status.
            raise statuses.failure(error, engine) from error

    def _acquire(self) -> Lease | Leases | None:
        lock = self._plan.lock
        self._attempts = attempts = lock._attempts(by=self._owner)
        try:
            found = run(lambda: get_all_in(self, attempts))
        except CalledOff:
            return None
        if isinstance(found, Refused):
            self.seen = Seen(found.attempt.key, found.seen)
            lock._timed_out(found)
            return None
        if self.called_off.is_set():
            give_back(found)
            return None
        lease: Lease | Leases = lock._leases(attempts, found)
        return lease

    def give_back(self) -> None:
        """Release the keys that were taken so far, because the process is to end."""
        holds = [each.own_hold() for each in self._attempts]
        give_back([hold for hold in holds if hold is not None])

    async def call(self, function: Callable[[], T]) -> T:
        self._go_on()
        result = function()
        if isinstance(result, Reading):
            # The attempts are in the order in which their keys are taken.
            missing = (each.key for each in self._attempts if each.own_hold() is None)
            self.seen = Seen(next(missing, self._attempts[-1].key), result)
            self._wake()
        return result

    async def pause(self, waiter: queue.Waiter, seconds: float) -> bool:
        self._go_on()
        return waiter.wait(seconds)

    def _go_on(self) -> None:
        # Only once: the calls that follow release the keys that were taken so far.
        if self.called_off.is_set() and not self._gives_up:
            self._gives_up = True
            raise CalledOff


def _undo(lease: Lease | Leases) -> bool | None:
    """Give back what nobody has used; ``None`` if it is left to lapse.

    Whether it was lost makes no difference.
    """
    return lease._undo() or None


def _try_briefly(function: Callable[[], object]) -> None:
    """Call a function in another thread, if there is one, and don't wait long."""
    with suppress(RuntimeError):
        wait([Worker(THREAD).call(function)], GIVING_BACK)


def _result(future: Future[T]) -> T | None:
    """Return the result of a call, if it has succeeded."""
    return future.result() if future.done() and not future.exception() else None


def _conflict(plan: Plan, seen: Seen) -> str:
    within = f" within {plan.wait:g} s" if plan.wait else ""
    advice = "" if plan.wait else "; --wait SECONDS waits for it"
    held = holder_of(seen.reading)
    return f"the lock {seen.key!r} was not free{within}: {held}{advice}"


_TOLD = {
    "DBLOCKS_KEY",
    "DBLOCKS_FENCING_TOKEN",
    "DBLOCKS_PERMIT",
    "DBLOCKS_OWNER",
    "DBLOCKS_KEYS",
    "DBLOCKS_FENCING_TOKENS",
}
"""The variables for a command, which may also come from an outer ``run_locked``."""


def _environment(plan: Plan, lease: Lease | Leases) -> dict[str, str]:
    told = {"DBLOCKS_OWNER": lease.owner}
    if isinstance(lease, Lease):
        told["DBLOCKS_KEY"] = lease.key
        if lease.fencing_token is not None:
            told["DBLOCKS_FENCING_TOKEN"] = str(lease.fencing_token)
        if plan.numbered:
            told["DBLOCKS_PERMIT"] = str(lease.permit)
    else:
        told["DBLOCKS_KEYS"] = json.dumps(list(lease))
        tokens = {key: each.fencing_token for key, each in lease.items()}
        if None not in tokens.values():
            told["DBLOCKS_FENCING_TOKENS"] = json.dumps(tokens)
    inherited = {n: text for n, text in os.environ.items() if n not in _TOLD}
    return inherited | told
