"""What ``run_locked`` is to do: its options, checked and put together."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.core.management import get_commands
from django.core.management.base import CommandError

from dblocks import Lock, distributed_lock, validation
from dblocks.management import lock_table
from dblocks.management.statuses import NOT_FOUND, bad_usage, checked, find_backend

SYNOPSIS = "write: manage.py run_locked KEY [options] -- COMMAND [ARG ...]"

KILL_AFTER = 5.0


@dataclass(frozen=True)
class Plan:
    """What to run under which lock. Durations are seconds.

    Attributes:
        command: The program and its arguments.
        migrated: The database whose lock table is made first if it is missing.
    """

    lock: Lock
    wait: float
    kill_after: float
    command: list[str]
    migrated: str | None


def make_plan(
    *,
    key: str,
    command: Sequence[str],
    wait: float | None,
    lease: float | None,
    hold_at_least: float,
    kill_after: float | None,
    note: str | None,
    shell: bool,
    django: bool,
    backend: str,
    from_command_line: bool,
    pythonpath: str | None = None,
    **options: Any,
) -> Plan:
    """Check the options of ``run_locked``; what is wrong with them is bad usage.

    Args:
        options: Django's own, which aren't needed.
    """
    if not command:
        raise bad_usage(f"there is no command; {SYNOPSIS}")
    if shell and len(command) != 1:
        raise bad_usage(
            f"--shell takes one line, not {len(command)} words: write the "
            f"line in quotes, as in --shell -- 'one | two'"
        )
    seconds = find_backend(backend).lease
    if lease is not None:
        seconds = checked(validation.lease, lease, "--lease")
    timeout = checked(validation.bounded, "--wait", wait or 0.0)
    argv = [*command]
    if django:
        argv = _management_command(command, from_command_line, pythonpath)
    elif shell:
        argv = ["/bin/sh", "-c", command[0]]
    lock = checked(
        distributed_lock,
        key,
        timeout=timeout,
        lease=seconds,
        hold_at_least=hold_at_least,
        note=_program_name(command[0], shell) if note is None else note,
        backend=backend,
    )
    migrates = django and command[0] == "migrate"
    migrated = lock_table.database(backend) if migrates else None
    return Plan(lock, timeout, _kill_after(kill_after, seconds), argv, migrated)


def _kill_after(given: float | None, lease: float) -> float:
    if given is None:
        return min(KILL_AFTER, lease / 3)
    given = checked(validation.duration, "--kill-after", given)
    if given > lease / 3:
        raise bad_usage(
            f"--kill-after {given:g} is more than a third of the lease, which "
            f"is {lease:g} s: write --kill-after {lease / 3:.3g} or less, or "
            f"--lease {given * 3:g} or more"
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
