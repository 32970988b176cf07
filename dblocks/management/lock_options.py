"""The options of ``manage.py locks``."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandParser
from django.db import connections

from ..models import State
from .parsing import BACKEND, DURATION, FLAG
from .selection import ORDERS

WATCH_EVERY = 2.0
SHORTEST_WATCH = 0.1
JSON = {
    **FLAG,
    "help": "Write JSON with stable field names. Default: text for people.",
}
PERMIT: dict[str, Any] = {"type": int, "metavar": "N"}
PATTERN: dict[str, Any] = {
    "dest": "pattern",
    "metavar": "PATTERN",
    "help": "Only keys that match: * is any characters, ? is one, [seq] is one of "
    "these. Quote it for the shell. Default: all.",
}
HOLDER: dict[str, Any] = {
    "metavar": "TEXT",
    "help": "Only locks whose holder (host, process, thread) contains TEXT, as whole "
    "words in any case; * and ? as above. Default: anybody.",
}


def add_list_arguments(verb: CommandParser) -> None:
    verb.add_argument(
        "--state", choices=State.values, help="Only locks in this state. Default: all."
    )
    verb.add_argument("--key", **PATTERN)
    verb.add_argument("--holder", **HOLDER)
    verb.add_argument(
        "--sort",
        choices=ORDERS,
        default="key",
        help="age: longest held first; remaining: next to expire first; free locks "
        "last. Default: key.",
    )
    verb.add_argument(
        "--limit", type=int, metavar="N", help="At most N locks. Default: all."
    )
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--json", **JSON)
    form.add_argument(
        "--watch",
        **DURATION,
        nargs="?",
        const=WATCH_EVERY,
        help="Redraw the table at this interval, at least 0.1 s, until interrupted. "
        "Default: print it once; --watch alone: 2.",
    )


def add_show_arguments(verb: CommandParser) -> None:
    verb.add_argument("key", metavar="KEY")
    verb.add_argument(
        "--permit", **PERMIT, help="Only this permit of the key. Default: all."
    )
    verb.add_argument("--json", **JSON)


def add_release_arguments(verb: CommandParser) -> None:
    add = verb.add_argument
    add(
        "key",
        metavar="KEY",
        nargs="?",
        help="The lock. Without it: all held locks that match --key and --holder.",
    )
    add("--key", **PATTERN)
    add("--holder", **HOLDER)
    add(
        "--permit",
        **PERMIT,
        help="This permit of the key. Default: the only one that is taken.",
    )
    add(
        "--fencing-token",
        type=int,
        metavar="N",
        help="Only the grant with this fencing token. Default: the one shown.",
    )
    add(
        "--older-than",
        **DURATION,
        help="Only if held for longer, as in 2h. Default: always.",
    )
    add(
        "--ask",
        **FLAG,
        help="Ask the holder to finish. Default: force the release.",
    )
    add(
        "--reason",
        default="",
        metavar="TEXT",
        help="The reason, for the history, the log and the signal. Default: none.",
    )
    add(
        "--yes",
        **FLAG,
        help="Don't ask for confirmation. Default: ask; without KEY, the number of "
        "locks must be typed.",
    )


def add_prune_arguments(verb: CommandParser) -> None:
    add = verb.add_argument
    add(
        "--older-than",
        **DURATION,
        required=True,
        help="Only keys that have been free or expired for at least this long, as in "
        "30d. Required.",
    )
    add("--dry-run", **FLAG, help="Only count what would be deleted. Default: delete.")


def add_common_arguments(verb: CommandParser) -> None:
    table = verb.add_mutually_exclusive_group()
    table.add_argument(
        "--database",
        choices=list(connections),
        metavar="ALIAS",
        help="Database with the lock table. Default: the backend's.",
    )
    table.add_argument("--backend", **BACKEND)
    # Django's own options may follow the verb too; there, they have no defaults.
    unset = argparse.SUPPRESS
    verb.add_argument(
        "-v",
        "--verbosity",
        type=int,
        choices=[0, 1, 2, 3],
        default=unset,
        help="0: only JSON, errors and the confirmation; 1: the default; 2 and 3: "
        "more.",
    )
    for name in ("--settings", "--pythonpath"):
        verb.add_argument(name, default=unset, help=unset)
    for name in ("--traceback", "--no-color", "--force-color"):
        verb.add_argument(name, action="store_true", default=unset, help=unset)
