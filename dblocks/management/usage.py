"""What the commands have in common: usage errors, durations, help."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, NoReturn

from django.core.management.base import BaseCommand, CommandError, DjangoHelpFormatter
from django.core.management.base import CommandParser as DjangoParser

EX_USAGE = 64
EX_UNAVAILABLE = 69
EX_CONFIG = 78

_UNITS = {"": 1, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


class HelpFormatter(DjangoHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the examples' lines as they are."""


class Parser(DjangoParser):
    """Reports bad usage in one line, with the status of sysexits.h for it."""

    #: What follows the complaint.
    advice = ""

    def error(self, message: str) -> NoReturn:
        text = message + self.advice
        if self.called_from_command_line:
            self.exit(EX_USAGE, f"{self.prog}: {text}\n")
        raise CommandError(text, returncode=EX_USAGE)


class LockCommand(BaseCommand):
    """A command whose usage errors have the status 64."""

    parser_class: type[Parser] = Parser
    examples = ""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> Parser:
        parser = super().create_parser(
            prog_name,
            subcommand,
            formatter_class=HelpFormatter,
            epilog=self.examples,
            allow_abbrev=False,
            **kwargs,
        )
        # Django's method names the class itself.
        parser.__class__ = self.parser_class
        assert isinstance(parser, self.parser_class)
        return parser


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


def bad_usage(message: object) -> CommandError:
    """Return the error for arguments that don't go together."""
    return CommandError(str(message), returncode=EX_USAGE)


def checked(check: Callable[..., Any], *arguments: object) -> Any:
    """Call a function of :mod:`dblocks.arguments`; what it refuses is bad usage."""
    try:
        return check(*arguments)
    except (TypeError, ValueError) as error:
        raise bad_usage(error) from error
