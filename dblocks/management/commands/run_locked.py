"""``manage.py run_locked KEY [options] -- COMMAND [ARG …]``."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.core.management import get_commands
from django.core.management.base import CommandError, CommandParser

from dblocks import Lease, Lock, LockError, arguments, distributed_lock
from dblocks.arguments import UNSET
from dblocks.backends.base import Reading
from dblocks.conf import DEFAULT_ALIAS, backends
from dblocks.management import first_deploy
from dblocks.management.usage import (
    EX_CONFIG,
    EX_UNAVAILABLE,
    LockCommand,
    Parser,
    bad_usage,
    checked,
    exit_code,
    seconds,
)
from dblocks.supervision.group import StartError
from dblocks.supervision.sentinel import now
from dblocks.supervision.signals import Signals
from dblocks.supervision.supervisor import Outcome, Supervisor, loss
from dblocks.supervision.waiter import Releaser, Waiter

CONFLICT = 75
LOST = 76
CANNOT_RUN = 126
NOT_FOUND = 127

KILL_AFTER = 5.0
GIVING_BACK = 0.2
"""Seconds after a signal for which a lease that is just being granted is awaited."""
MAKING_TABLES = 10.0
"""The same while tables are made, which some databases can't undo."""

SYNOPSIS = "write: manage.py run_locked KEY [options] -- COMMAND [ARG ...]"


class RunParser(Parser):
    """Takes what follows ``--`` as it is."""

    advice = f"; {SYNOPSIS}"

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        options = super().parse_args(words[:end], namespace)
        options.command = words[end + 1 :]
        return options


@dataclass(frozen=True)
class Plan:
    """What to do, with everything checked."""

    lock: Lock
    wait: float
    lease: float
    kill_after: float
    command: list[str]
    skip: bool
    conflict: int
    lost: int
    first: str | None


class Command(LockCommand):
    help = (
        "Run a command while holding a lock. Among all machines that use the same "
        "database, one at a time runs a command under the same KEY."
    )
    parser_class = RunParser
    requires_system_checks: tuple[str, ...] = ()
    stealth_options = ("command",)
    examples = """\
COMMAND follows "--" and is run as it stands, without a shell.

examples:
  once on ten machines, from cron:
    manage.py run_locked nightly-report --hold-at-least 60 --skip-if-locked \\
        -- ./report.sh
  migrations of a deployment that several machines start at once:
    manage.py run_locked migrate --wait 600 --django -- migrate --noinput
  a shell line, waiting up to ten seconds:
    manage.py run_locked backup --wait 10 --shell -- 'pg_dump shop | gzip > shop.gz'

exit status:
  the command's own; 128+N if signal N ended it; 75 the lock is taken; 76 the lease was
  lost; 64 bad usage; 69 the database is out of reach; 78 the lock table is missing;
  126 COMMAND can't be run; 127 COMMAND was not found

durations are seconds, fractions allowed, or have a unit: 500ms, 90s, 15m, 2h, 7d
"""

    def add_arguments(self, parser: CommandParser) -> None:
        parser.usage = "%(prog)s KEY [options] -- COMMAND [ARG ...]"
        parser.add_argument(
            "key", metavar="KEY", help="What is locked: up to 255 characters."
        )
        parser.add_argument(
            "--wait",
            type=seconds,
            metavar="SECONDS",
            help="Wait so many seconds for the lock. Default: don't wait.",
        )
        parser.add_argument(
            "--no-wait",
            action="store_true",
            help="Don't wait for the lock. This is the default.",
        )
        parser.add_argument(
            "--lease",
            type=seconds,
            metavar="SECONDS",
            help="Seconds for which the lock is held unless it is renewed, which goes "
            "on while the command runs: how long it stays taken after this machine "
            "has died. Default: LEASE in the setting DBLOCKS, or 30.",
        )
        parser.add_argument(
            "--hold-at-least",
            type=seconds,
            default=0.0,
            metavar="SECONDS",
            help="Keep the lock taken until so many seconds after it was acquired, "
            "also if the command ends sooner. Default: 0.",
        )
        parser.add_argument(
            "--kill-after",
            type=seconds,
            metavar="SECONDS",
            help="Seconds between SIGTERM and SIGKILL for the command when the lease "
            "is lost; at most a third of the lease. Default: 5 or a third of the "
            "lease, whichever is less.",
        )
        parser.add_argument(
            "--note",
            default="",
            metavar="TEXT",
            help="Free text that others see: what is at work here. Default: none.",
        )
        parser.add_argument(
            "--skip-if-locked",
            action="store_true",
            help="When the lock is taken, exit with status 0 and say nothing. "
            "Default: exit with the conflict status and say who has it.",
        )
        parser.add_argument(
            "--conflict-exit-code",
            type=exit_code,
            default=CONFLICT,
            metavar="N",
            help="Exit status, 0 to 255, when the lock is taken. Default: 75.",
        )
        parser.add_argument(
            "--lost-exit-code",
            type=exit_code,
            default=LOST,
            metavar="N",
            help="Exit status, 0 to 255, when the lease was lost. Default: 76.",
        )
        parser.add_argument(
            "--shell",
            action="store_true",
            help="COMMAND is one line for /bin/sh. Default: a program and its "
            "arguments.",
        )
        parser.add_argument(
            "--django",
            action="store_true",
            help="COMMAND is a management command of this project. Before "
            '"migrate", dblocks\' own tables are made if they are missing. '
            "Default: a program.",
        )
        parser.add_argument(
            "--backend",
            default=DEFAULT_ALIAS,
            metavar="ALIAS",
            help="Backend in the setting DBLOCKS. Default: default.",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        self.verbosity = options["verbosity"]
        plan = self._plan(options)
        with Signals() as signals:
            lease = self._acquire(plan, signals)
            if lease is None:
                return
            try:
                outcome = self._run(plan, lease, signals)
            finally:
                released = self._release(lease, signals)
        if outcome.lost:
            sys.exit(plan.lost)
        if released is False:
            self._tell(f"{loss(lease)}; the command may not have been alone")
            sys.exit(plan.lost)
        if outcome.status:
            sys.exit(outcome.status)

    # What to do

    def _plan(self, options: dict[str, Any]) -> Plan:
        if not options.get("command"):
            raise bad_usage(f"there is no command; {SYNOPSIS}")
        if options["wait"] is not None and options["no_wait"]:
            raise bad_usage("--wait and --no-wait exclude each other: write one")
        alias = options["backend"]
        try:
            backend = backends[alias]
        except ImproperlyConfigured as error:
            if alias in backends.settings:
                raise CommandError(str(error), returncode=EX_CONFIG) from error
            raise bad_usage(f"--backend {alias}: {error}") from error
        lease = backend.lease
        if options["lease"] is not None:
            lease = checked(arguments.lease, options["lease"], "--lease")
        return Plan(
            lock=checked(
                lambda: distributed_lock(
                    options["key"],
                    lease=UNSET if options["lease"] is None else lease,
                    hold_at_least=options["hold_at_least"],
                    note=options["note"],
                    backend=alias,
                )
            ),
            wait=checked(arguments.bounded, "--wait", options["wait"] or 0.0),
            lease=lease,
            kill_after=self._kill_after(options["kill_after"], lease),
            command=self._command(options),
            skip=options["skip_if_locked"],
            conflict=options["conflict_exit_code"],
            lost=options["lost_exit_code"],
            first=self._creates(options, backend),
        )

    def _kill_after(self, given: float | None, lease: float) -> float:
        if given is None:
            return min(KILL_AFTER, lease / 3)
        kill_after: float = checked(arguments.duration, "--kill-after", given)
        if kill_after > lease / 3:
            raise bad_usage(
                f"--kill-after {kill_after:g} is more than a third of the lease, which "
                f"is {lease:g} s: write --kill-after {lease / 3:.3g} or less, or "
                f"--lease {kill_after * 3:g} or more"
            )
        return kill_after

    def _command(self, options: dict[str, Any]) -> list[str]:
        command: list[str] = options["command"]
        if options["shell"] and options["django"]:
            raise bad_usage("--shell and --django exclude each other: write one")
        if options["shell"]:
            if len(command) != 1:
                raise bad_usage(
                    f"--shell takes one line, not {len(command)} words: write the "
                    f"line in quotes, as in --shell -- 'one | two'"
                )
            return ["/bin/sh", "-c", command[0]]
        if options["django"]:
            name, *rest = command
            if name not in get_commands():
                raise CommandError(
                    f"there is no management command {name!r}; write one that "
                    f"manage.py help shows, or leave out --django to run a program",
                    returncode=NOT_FOUND,
                )
            if options.get("pythonpath"):
                rest.insert(0, f"--pythonpath={options['pythonpath']}")
            called = getattr(self, "_called_from_command_line", False)
            return [*_manage_py(called), name, *rest]
        return command

    def _creates(self, options: dict[str, Any], backend: Any) -> str | None:
        """Return the database in which the lock table is made if need be."""
        if not options["django"] or options["command"][0] != "migrate":
            return None
        using: str | None = getattr(backend, "using", None)
        return using

    # The lock

    def _acquire(self, plan: Plan, signals: Signals) -> Lease | None:
        waiter = Waiter(
            plan.lock,
            plan.wait,
            first=lambda waiter: self._make_tables(plan, waiter),
            explain=lambda error: _explained(error, plan.lock.backend),
            wake=signals.wake,
        )
        waiter.start()
        told: object = None
        while waiter.is_alive() and signals.ending() is None:
            signals.wait(0.5)
            seen = waiter.reading
            if plan.wait and not plan.skip and seen and seen.remaining > 0:
                grant = (seen.owner, seen.version)
                if grant != told and waiter.is_alive():
                    told = grant
                    self._tell(
                        f"waiting {plan.wait:g} s at most for the lock "
                        f"{plan.lock.key!r}: {_who(seen)}"
                    )
        number = signals.ending()
        if number is not None:
            waiter.call_off()
            waiter.join(MAKING_TABLES if waiter.critical else GIVING_BACK)
            if waiter.lease is not None:
                self._release(waiter.lease, signals, patience=GIVING_BACK)
            self._stopped_by(number)
            self._exit_now(128 + number)
        waiter.join()
        if waiter.error is not None:
            raise waiter.error
        if waiter.lease is None:
            self._conflict(plan, waiter.reading or Reading())
        return waiter.lease

    def _make_tables(self, plan: Plan, waiter: Waiter) -> None:
        def begin() -> None:
            waiter.critical = True

        if plan.first is not None:
            first_deploy.make_tables(plan.first, waiter.sleep, begin)
            waiter.critical = False

    def _exit_now(self, status: int) -> NoReturn:
        """Exit without the interpreter's tidying up, which takes a busy machine long.

        A database call of the waiter's may be under way, too.
        """
        if getattr(self, "_called_from_command_line", False):
            for stream in (sys.stdout, sys.stderr):
                with suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            os._exit(status)
        sys.exit(status)

    def _stopped_by(self, number: int) -> None:
        self._tell(f"stopped by {signal.Signals(number).name}: nothing was run")

    def _conflict(self, plan: Plan, reading: Reading) -> None:
        if plan.skip:
            return
        if self.verbosity == 0:
            sys.exit(plan.conflict)
        within = f" within {plan.wait:g} s" if plan.wait else ""
        advice = "" if plan.wait else "; --wait SECONDS waits for it"
        raise CommandError(
            f"the lock {plan.lock.key!r} was not free{within}: {_who(reading)}{advice}",
            returncode=plan.conflict,
        )

    def _release(
        self, lease: Lease, signals: Signals, *, patience: float = 0.0
    ) -> bool | None:
        """Give the lease back; ``None`` when that could not be done in time."""
        # Later, there is nothing left to give back.
        until = now() + (patience or max(1.0, lease.remaining()))
        signals.take()
        releaser = Releaser(lease, wake=signals.wake)
        releaser.start()
        while releaser.is_alive() and now() < until:
            signals.wait(min(0.5, until - now()))
            if signals.ending() is not None:
                until = min(until, now() + GIVING_BACK)
        if releaser.result is None:
            why = _one_line(releaser.error) if releaser.error else "no answer"
            self._tell(f"the lock was not released and is left to lapse: {why}")
        return releaser.result

    # The command

    def _run(self, plan: Plan, lease: Lease, signals: Signals) -> Outcome:
        environment = {
            **os.environ,
            "DBLOCKS_KEY": lease.key,
            "DBLOCKS_OWNER": lease.owner,
            "DBLOCKS_FENCING_TOKEN": str(lease.fencing_token),
        }
        if lease.fencing_token is None:
            del environment["DBLOCKS_FENCING_TOKEN"]
        supervisor = Supervisor(
            lease,
            duration=plan.lease,
            kill_after=plan.kill_after,
            signals=signals,
            say=self._tell,
        )
        name = plan.command[0]
        try:
            outcome = supervisor.run(plan.command, environment)
        except StartError as error:
            self._tell(f"can't run {name!r}: {error}")
            return Outcome(CANNOT_RUN)
        number = signals.ending()
        if outcome.status is None and number is not None:
            self._stopped_by(number)
            return Outcome(128 + number)
        if outcome.status is None:
            self._tell(f"{loss(lease)}: nothing was run")
        if outcome.error is not None:
            self._tell(f"can't run {name!r}: {os.strerror(outcome.error)}")
        return outcome

    def _tell(self, text: str) -> None:
        if self.verbosity > 0:
            # Nobody may be listening any more; the command matters more.
            with suppress(OSError, ValueError):
                self.stderr.write(f"run_locked: {text}")


def _explained(error: Exception, alias: str) -> Exception:
    """Return the error of a lock's database as one line and an exit status."""
    if isinstance(error, LockError):
        return bad_usage(error)
    using = getattr(backends[alias], "using", None)
    missing = False
    if using is not None:
        with suppress(Exception):
            missing = first_deploy.table_is_missing(using)
    if missing:
        failure = CommandError(
            f"there is no lock table in the database {using!r}: write manage.py "
            f"migrate {first_deploy.APP} --database {using} first",
            returncode=EX_CONFIG,
        )
    else:
        # Whatever it is: 1 would be taken for the command's own status.
        failure = CommandError(
            f"the locks' database is out of reach: {_one_line(error)}",
            returncode=EX_UNAVAILABLE,
        )
    failure.__cause__ = error
    return failure


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _who(reading: Reading) -> str:
    """Say who has a lock."""
    note = f" ({reading.note})" if reading.note else ""
    rest = f"{max(0.0, reading.remaining):.1f} s"
    if reading.owner:
        since = ""
        if reading.acquired_at is not None:
            since = f" since {reading.acquired_at:%Y-%m-%d %H:%M:%S} UTC"
        return (
            f"it is held by {reading.holder or 'somebody'}{since}{note}; "
            f"its lease can end in {rest}"
        )
    if reading.remaining > 0:
        return (
            f"{reading.holder or 'somebody'}{note} has released it, and it stays "
            f"taken for another {rest}"
        )
    return "a transaction has its row locked"


def _manage_py(from_command_line: bool) -> list[str]:
    """Return the command that runs this project's management commands."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if not from_command_line:
        return [sys.executable, "-m", "django"]
    if spec is None or not spec.parent:
        return [sys.executable, sys.argv[0]]
    name = spec.name.removesuffix(".__main__")
    return [sys.executable, "-m", name]
