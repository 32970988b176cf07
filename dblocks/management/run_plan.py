"""What ``run_locked`` is to do: its options, checked and put together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, floor
from typing import Any

from django.core.management import get_commands
from django.core.management.base import CommandError, CommandParser

from .. import validation
from ..backends.base import BaseBackend
from ..conf import DEFAULT_ALIAS
from ..distributed_locks import distributed_lock
from ..holding.holds import margin
from ..locks import Lock
from .parsing import BACKEND, DURATION, FLAG, STATUS
from .statuses import CONFLICT, LOST, NOT_FOUND, bad_usage, checked, find_backend

ARGUMENTS = "KEY [KEY ...] [options] -- COMMAND [ARG ...]"
SYNOPSIS = f"write: manage.py run_locked {ARGUMENTS}"

KILL_AFTER = 5.0


def add_lock_arguments(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "keys",
        nargs="+",
        metavar="KEY",
        help="The lock, up to 255 characters. Several are taken together, all or none.",
    )
    add(
        "--permits",
        type=int,
        metavar="N",
        help="Let N hold the lock at a time, 1 to 1000; with one KEY only. Default: 1.",
    )
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "--wait", **DURATION, help="Wait that long for the lock. Default: don't wait."
    )
    waiting.add_argument("--no-wait", **FLAG, help="Don't wait. This is the default.")
    add(
        "--lease",
        **DURATION,
        help="How long the lock outlives this machine if it dies; it is renewed while "
        "the command runs. Default: LEASE in the setting DBLOCKS, or 30.",
    )
    add(
        "--hold-at-least",
        **DURATION,
        default=0.0,
        help="Keep the lock that long, even if the command ends sooner. Default: 0.",
    )
    add(
        "--note",
        metavar="TEXT",
        help="A note that others see beside the lock. Default: the program's name.",
    )
    add("--backend", **BACKEND, default=DEFAULT_ALIAS)


def add_command_arguments(parser: CommandParser) -> None:
    add = parser.add_argument
    add(
        "--skip-if-locked",
        **FLAG,
        help="If the lock is taken, exit with 0, silently unless standard error is a "
        "terminal. Default: say who has it.",
    )
    add(
        "--conflict-exit-code",
        **STATUS,
        default=CONFLICT,
        help="Exit status if the lock is taken, 0 to 255. Default: 75.",
    )
    add(
        "--lost-exit-code",
        **STATUS,
        default=LOST,
        help="Exit status if the lease was lost, 0 to 255. Default: 76.",
    )
    add(
        "--kill-after",
        **DURATION,
        help="Time from SIGTERM to SIGKILL for the command if the lease is lost, at "
        "most a third of the lease. Default: 5, or less with a lease under 15.",
    )
    add(
        "--ignore-requests",
        **FLAG,
        help="Carry on when somebody asks for the lock. Default: send the command one "
        "SIGTERM and wait for it to end.",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--shell",
        **FLAG,
        help="COMMAND is one line for /bin/sh; it may follow directly, without --. "
        "Default: a program and its arguments.",
    )
    form.add_argument(
        "--django",
        **FLAG,
        help='COMMAND is a management command of this project. Before "migrate", '
        "missing tables of dblocks are created. Default: a program.",
    )


@dataclass(frozen=True)
class Plan:
    """What to run under which lock. Durations are seconds.

    Attributes:
        numbered: Whether the command is told the number of its permit.
        heeds_requests: Whether the command is told that the lock is asked for.
        engine: What keeps the lock.
        migrates: Whether the engine's table, if it has one, is made first if need be.
    """

    lock: Lock[Any]
    numbered: bool
    wait: float
    kill_after: float
    heeds_requests: bool
    command: list[str]
    engine: BaseBackend
    migrates: bool


def make_plan(
    *,
    keys: Sequence[str],
    permits: int | None,
    command: Sequence[str],
    wait: float | None,
    lease: float | None,
    hold_at_least: float,
    kill_after: float | None,
    note: str | None,
    shell: bool,
    django: bool,
    backend: str,
    ignore_requests: bool,
    from_command_line: bool,
    pythonpath: str | None = None,
    **options: Any,
) -> Plan:
    """Check the options of ``run_locked``; what is wrong with them is bad usage."""
    _check_command(command, shell)
    engine = find_backend(backend)
    seconds = engine.lease
    if lease is not None:
        seconds = checked(validation.lease, lease, "--lease")
    timeout = checked(validation.bounded, "--wait", wait or 0.0)
    argv = [*command]
    if django:
        argv = _management_command(command, from_command_line, pythonpath)
    elif shell:
        argv = ["/bin/sh", "-c", "--", command[0]]
    lock: Lock[Any] = checked(
        distributed_lock,
        *keys,
        permits=1 if permits is None else permits,
        timeout=timeout,
        lease=seconds,
        hold_at_least=hold_at_least,
        note=_program_name(command[0], shell) if note is None else note,
        backend=backend,
    )
    checked(engine.check_terms, seconds, lock.hold_at_least)
    migrates = django and command[0] == "migrate"
    grace, numbered = _kill_after(kill_after, seconds), permits is not None
    heeds = not ignore_requests
    return Plan(lock, numbered, timeout, grace, heeds, argv, engine, migrates)


def _check_command(command: Sequence[str], shell: bool) -> None:
    if not command:
        raise bad_usage(f"there is no command; {SYNOPSIS}")
    if shell and len(command) != 1:
        raise bad_usage(
            f"--shell takes one line, not {len(command)} words: write the "
            f"line in quotes, as in --shell 'one | two'"
        )


def _kill_after(given: float | None, lease: float) -> float:
    if given is None:
        # A renewal, due after a third of what the margin leaves, must come before.
        return min(KILL_AFTER, lease / 3, (lease - margin(lease)) / 2)
    given = checked(validation.duration, "--kill-after", given)
    if given > lease / 3:
        most, least = floor(lease / 3 * 1000) / 1000, ceil(given * 3 * 1000) / 1000
        raise bad_usage(
            f"--kill-after {given:.12g} is more than a third of the lease, which "
            f"is {lease:.12g} s: write --kill-after {most:.12g} or less, or "
            f"--lease {least:.12g} or more"
        )
    return given


def _management_command(
    command: Sequence[str], from_command_line: bool, pythonpath: str | None
) -> list[str]:
    if command[0] not in get_commands():
        raise CommandError(
            f"there is no management command {command[0]!r}; write one that "
            f"manage.py help shows, or leave out --django to run a program",
            returncode=NOT_FOUND,
        )
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    manage = [sys.argv[0]]
    if not from_command_line:
        manage = ["-m", "django"]
    elif spec is not None and spec.parent:
        manage = ["-m", spec.name.removesuffix(".__main__")]
    options = [f"--pythonpath={pythonpath}"] if pythonpath else []
    return [sys.executable, *manage, command[0], *options, *command[1:]]


_FIRST_WORD = re.compile(
    r"""\s*(?:\w+=(?:[^\s'"`$\\;&|<>()]|'[^']*'|"[^"`$\\]*")*\s+)*"""
    r"""([^\s'"`$\\;&|<>()=#*?!{}]+)(?=[\s;&|<>()]|$)"""
)
"""A line's first word behind assignments, which may hold secrets; plain words only."""


def _program_name(program: str, shell: bool) -> str:
    """Return a program's name for the note, without folder and arguments."""
    if shell:
        found = _FIRST_WORD.match(program)
        program = found[1] if found else "sh"
    name = os.path.basename(program).encode(errors="backslashreplace").decode()
    return name[: validation.MAX_NOTE]
