"""How the commands read their command line: usage errors, durations, help."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn, TextIO, cast

from django.core.management.base import BaseCommand, CommandError, DjangoHelpFormatter
from django.core.management.base import CommandParser as DjangoParser

from . import statuses
from .standard_error import StandardError

_UNITS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

DURATIONS = """
durations are seconds, fractions allowed, or have a unit: 500ms, 90s, 15m, 2h, 7d, 2w
"""


class HelpFormatter(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the examples' lines as they are."""


class Parser(DjangoParser):
    """Reports bad usage in one line, with the exit status of sysexits.h for it."""

    #: What follows the complaint; ``%(prog)s`` is the command, with its verb.
    advice = ""

    def error(self, message: str) -> NoReturn:
        text = message + self.advice % {"prog": self.prog.strip()}
        if self.called_from_command_line:
            standard_error = StandardError(sys.stderr)
            standard_error.write(f"{self.prog}: {text}\n")
            standard_error.settle(statuses.USAGE)
            sys.exit(statuses.USAGE)
        raise statuses.bad_usage(text)


class LockCommand(BaseCommand):
    """A command with examples in its help and an exit status for every failure.

    The status is the same when the command's messages meet a standard error that is
    closed, full or blocked. Log messages don't pass through here.
    """

    parser_class: type[Parser] = Parser
    requires_system_checks: tuple[str, ...] = ()
    examples = ""
    verbosity = 1

    def __init__(
        self, stdout: Any = None, stderr: Any = None, *args: Any, **options: Any
    ) -> None:
        self.standard_error = file = StandardError(stderr or sys.stderr)
        super().__init__(stdout, cast(TextIO, file), *args, **options)

    def run_from_argv(self, argv: list[str]) -> None:
        try:
            super().run_from_argv(argv)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else int(bool(end.code))
            self.standard_error.settle(status)
            raise
        self.standard_error.settle(0)

    def execute(self, *args: Any, **options: Any) -> str | None:
        if options.get("stderr"):
            self.standard_error = StandardError(options["stderr"])
            options["stderr"] = self.standard_error
        try:
            return super().execute(*args, **options)
        finally:
            if not self.from_command_line:
                self.standard_error.end()

    @property
    def from_command_line(self) -> bool:
        return bool(getattr(self, "_called_from_command_line", False))

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Any:
        parser = super().create_parser(
            prog_name,
            subcommand,
            formatter_class=HelpFormatter,
            epilog=self.examples + DURATIONS,
            allow_abbrev=False,
            **kwargs,
        )
        # Django's method names the class itself.
        parser.__class__ = self.parser_class
        return parser

    def fail(self, text: str, status: int = statuses.NOTHING_DONE) -> NoReturn:
        """End the command; with verbosity 0 in silence."""
        if self.verbosity == 0:
            sys.exit(status)
        raise CommandError(text, returncode=status)


def seconds(text: str) -> float:
    """Parse a duration: a number of seconds, or a number with a unit."""
    found = re.fullmatch(r"(\d+\.?\d*|\.\d+)(ms|s|m|h|d|w)?", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a duration; write seconds, 0 or more, as in 90 or 0.5, "
            f"or a number with a unit (ms, s, m, h, d, w), as in 15m"
        )
    return float(found[1]) * _UNITS[found[2] or ""]


def exit_code(text: str) -> int:
    """Parse an exit status."""
    if not (text.isascii() and text.isdigit() and int(text) <= 255):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not an exit status; write a number from 0 to 255"
        )
    return int(text)


# Kinds of options, for add_argument().
FLAG: dict[str, Any] = {"action": "store_true"}
DURATION: dict[str, Any] = {"type": seconds, "metavar": "SECONDS"}
STATUS: dict[str, Any] = {"type": exit_code, "metavar": "N"}
BACKEND: dict[str, Any] = {
    "metavar": "ALIAS",
    "help": "Backend in the setting DBLOCKS. Default: default.",
}
