"""``manage.py locks list|show|release|prune``: the lock table for operators."""

from __future__ import annotations

import argparse
import getpass
import json
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from typing import Any, NoReturn

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.db import DatabaseError, InterfaceError, connections
from django.utils.translation import ngettext

from dblocks import arguments
from dblocks.conf import DEFAULT_ALIAS, backends
from dblocks.gates import Queues
from dblocks.management import first_deploy
from dblocks.management.usage import (
    EX_CONFIG,
    EX_UNAVAILABLE,
    LockCommand,
    Parser,
    bad_usage,
    checked,
    seconds,
)
from dblocks.models import DistributedLock, LockQuerySet, State

NOTHING_DONE = 1
WATCH_EVERY = 2.0

HELD, EXPIRED, COOLING, FREE = State.values
_COLORS = {
    HELD: "SUCCESS",
    EXPIRED: "ERROR",
    COOLING: "WARNING",
    FREE: "HTTP_INFO",
}


class LocksParser(Parser):
    advice = "; manage.py locks --help shows what to write"


class Command(LockCommand):
    help = "Show, release and prune the locks in the database."
    parser_class = LocksParser
    requires_system_checks: tuple[str, ...] = ()
    examples = """\
examples:
  what is locked now, drawn anew every two seconds:
    manage.py locks list --state held --watch
  free a lock over its holder's head, if it has been held for more than two hours:
    manage.py locks release nightly-report --older-than 2h --reason "host is gone"
  delete rows of keys that have been free for thirty days:
    manage.py locks prune --older-than 30d

exit status:
  0 done; 1 there was nothing to do it to, or it was not confirmed; 64 bad usage;
  69 the database is out of reach; 78 the lock table is missing

durations are seconds, fractions allowed, or have a unit: 500ms, 90s, 15m, 2h, 7d
"""

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(
            dest="verb",
            metavar="list|show|release|prune",
            required=True,
            parser_class=LocksParser,
        )

        def add_verb(name: str, description: str) -> CommandParser:
            verb: CommandParser = verbs.add_parser(
                name, help=description, description=description, allow_abbrev=False
            )
            return verb

        shown = add_verb("list", "Show all locks, or those in a state.")
        shown.add_argument(
            "--state",
            choices=State.values,
            help="Only locks in this state. Default: all.",
        )
        _add_json(shown)
        shown.add_argument(
            "--watch",
            nargs="?",
            type=seconds,
            const=WATCH_EVERY,
            metavar="SECONDS",
            help="Draw the table anew every so many seconds, until interrupted. "
            "Default: draw it once; --watch alone: 2.",
        )
        one = add_verb("show", "Show one lock.")
        one.add_argument("key", metavar="KEY")
        _add_json(one)
        release = add_verb(
            "release",
            "Free a lock over its holder's head. The holder isn't stopped: it "
            "finds out at its next renewal or guard.",
        )
        release.add_argument("key", metavar="KEY")
        release.add_argument(
            "--fencing-token",
            type=int,
            metavar="N",
            help="Only the grant with this fencing token. Default: the one shown.",
        )
        release.add_argument(
            "--older-than",
            type=seconds,
            metavar="DURATION",
            help="Only if held for longer than this; seconds, or with a unit. "
            "Default: however long.",
        )
        release.add_argument(
            "--reason",
            default="",
            metavar="TEXT",
            help="Why, for the log and the signal. Default: none.",
        )
        release.add_argument(
            "--yes", action="store_true", help="Don't ask. Default: ask."
        )
        prune = add_verb(
            "prune",
            "Delete rows of keys that have been free or expired for long. Held "
            "and cooling locks stay; fencing tokens never go back.",
        )
        prune.add_argument(
            "--older-than",
            type=seconds,
            required=True,
            metavar="DURATION",
            help="Free or expired for longer than this; seconds, or with a unit. "
            "Required.",
        )
        prune.add_argument(
            "--dry-run",
            action="store_true",
            help="Say how many there are and delete none. Default: delete.",
        )
        for verb in (shown, one, release, prune):
            verb.add_argument(
                "--database",
                choices=list(connections),
                metavar="ALIAS",
                help="Database with the lock table. Default: the backend's.",
            )
            verb.add_argument(
                "--backend",
                metavar="ALIAS",
                help="Backend in the setting DBLOCKS. Default: default.",
            )
            _add_base_arguments(verb)

    def handle(self, *args: Any, **options: Any) -> None:
        self.verbosity = options["verbosity"]
        self.using = _database(options["database"], options["backend"])
        self.locks: LockQuerySet = DistributedLock.objects.using(self.using)
        try:
            getattr(self, options["verb"])(**options)
        except (DatabaseError, InterfaceError) as error:
            raise self._failure(error) from error

    def _failure(self, error: Exception) -> CommandError:
        missing = False
        with suppress(Exception):
            missing = first_deploy.table_is_missing(self.using)
        if missing:
            return CommandError(
                f"there is no lock table in the database {self.using!r}: write "
                f"manage.py migrate dblocks --database {self.using} first",
                returncode=EX_CONFIG,
            )
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return CommandError(
            f"the database {self.using!r} is out of reach: {text}",
            returncode=EX_UNAVAILABLE,
        )

    # Showing

    def list(
        self, *, state: str | None, json: bool, watch: float | None, **options: Any
    ) -> None:
        rows = self.locks.with_state().order_by("key")
        if state is not None:
            rows = rows.filter(state=state)
        if watch is not None:
            if json:
                raise bad_usage("--json and --watch exclude each other: write one")
            self._watch(rows, checked(arguments.bounded, "--watch", watch))
        elif json:
            queues = self._queues()
            self._write_json([as_json(row, queues) for row in rows.iterator()])
        elif self.verbosity > 0:
            self._draw(list_of(rows))

    def show(self, *, key: str, json: bool, **options: Any) -> None:
        row = self._find(key)
        shown = as_json(row, self._queues())
        if json:
            self._write_json(shown)
        elif self.verbosity > 0:
            self._describe(shown)

    def _queues(self) -> Queues:
        return Queues(connections[self.locks.db])

    def _find(self, key: str) -> DistributedLock:
        key = checked(arguments.key, key)
        row: DistributedLock | None = self.locks.with_state().filter(key=key).first()
        if row is None:
            self._fail(f"there is no lock {key!r}; manage.py locks list shows all")
        return row

    def _fail(self, text: str) -> NoReturn:
        if self.verbosity == 0:
            sys.exit(NOTHING_DONE)
        raise CommandError(text, returncode=NOTHING_DONE)

    def _write_json(self, value: object) -> None:
        self.stdout.write(json.dumps(value, indent=2, ensure_ascii=False))

    def _draw(self, rows: Sequence[DistributedLock], most: int | None = None) -> None:
        shown = rows if most is None else rows[: max(1, most)]
        for line, state in table(shown, self._queues(), self._width()):
            self.stdout.write(self._colored(line, state))
        text = ngettext("%(count)d lock", "%(count)d locks", len(rows))
        text %= {"count": len(rows)}
        if len(shown) < len(rows):
            more = len(rows) - len(shown)
            text += ngettext(
                ", %(more)d of them not shown", ", %(more)d of them not shown", more
            ) % {"more": more}
        self.stdout.write(text)

    def _width(self) -> int:
        # A file or a pipe has no width: nothing is cut there.
        if not self.stdout.isatty():
            return sys.maxsize
        return shutil.get_terminal_size().columns

    def _colored(self, text: str, state: str | None) -> str:
        if state is None or not self.stdout.isatty():
            return text
        style: str = getattr(self.style, _COLORS[state])(text)
        return style

    def _describe(self, shown: dict[str, Any]) -> None:
        lines = {name: _text(value) for name, value in shown.items()}
        width = max(map(len, lines))
        for name, value in lines.items():
            state = value if name == "state" else None
            self.stdout.write(f"{name:{width}}  {self._colored(value, state)}".rstrip())

    def _watch(self, rows: LockQuerySet, every: float) -> None:
        interactive = self.stdout.isatty()
        with suppress(KeyboardInterrupt):
            while True:
                drawn = list_of(rows)
                if interactive:
                    # From the top, over what stands there; then clear the rest.
                    self.stdout.write("\x1b[H\x1b[2J", ending="")
                if self.verbosity > 0:
                    height = shutil.get_terminal_size().lines if interactive else None
                    self._draw(drawn, height and height - 3)
                self.stdout.flush()
                time.sleep(every)

    # Changing

    def release(
        self,
        *,
        key: str,
        fencing_token: int | None,
        older_than: float | None,
        reason: str,
        yes: bool,
        **options: Any,
    ) -> None:
        row = self._find(key)
        if row.state == FREE:
            self._fail(f"the lock {key!r} is free: there is nothing to release")
        if fencing_token is not None and fencing_token != row.version:
            self._fail(
                f"the lock {key!r} has the fencing token {row.version} by now, not "
                f"{fencing_token}: that grant is over"
            )
        if not yes:
            self._confirm(row)
        released = self.locks.force_release(
            row.key,
            version=row.version,
            older_than=older_than,
            by=_user(),
            reason=reason,
        )
        if not released and older_than is not None:
            self._fail(
                f"the lock {key!r} has not been held for {older_than:g} s, or has "
                f"changed hands: nothing was released"
            )
        if not released:
            self._fail(f"the lock {key!r} has changed hands: nothing was released")
        self._say(f"Released {key!r} (fencing token {row.version}, {row.holder}).")

    def _confirm(self, row: DistributedLock) -> None:
        # On stderr, like the question: stdout is for data alone.
        self.stderr.write(self._warning(row), style_func=str)
        self.stderr.write("Release it? [y/N] ", style_func=str, ending="")
        self.stderr.flush()
        try:
            answer = input()
        except (EOFError, KeyboardInterrupt):
            answer = ""
            self.stderr.write("")
        if answer.strip().lower() not in {"y", "yes"}:
            self._fail("not confirmed, nothing was released; --yes doesn't ask")

    def _warning(self, row: DistributedLock) -> str:
        shown = as_json(row)
        facts = [
            ("state", row.state),
            ("holder", row.holder),
            ("note", row.note),
            ("fencing token", row.version),
            ("held since", shown["acquired_at"]),
            ("lease ends in", f"{max(0.0, row.remaining):.0f} s"),
        ]
        lines = [f"The lock {row.key!r}:"]
        lines += [f"  {name:14} {_text(value)}" for name, value in facts]
        if row.state == HELD:
            lines.append(
                "Its holder is not stopped by this; until it finds out, at its next "
                "renewal or guard, two may be at work."
            )
        return "\n".join(lines)

    def prune(self, *, older_than: float, dry_run: bool, **options: Any) -> None:
        age = checked(arguments.duration, "--older-than", older_than)
        if dry_run:
            count = self.locks.stale(age).count()
            text = ngettext(
                "%(count)d lock would be deleted.",
                "%(count)d locks would be deleted.",
                count,
            )
        else:
            count = self.locks.prune(age, progress=self._progress)
            text = ngettext(
                "%(count)d lock was deleted.", "%(count)d locks were deleted.", count
            )
        self._say(text % {"count": count})

    def _progress(self, deleted: int) -> None:
        if self.verbosity > 1 or (self.verbosity > 0 and self.stderr.isatty()):
            text = ngettext("%(count)d lock ...", "%(count)d locks ...", deleted)
            ending = "\r" if self.stderr.isatty() else "\n"
            self.stderr.write(text % {"count": deleted}, style_func=str, ending=ending)
            self.stderr.flush()

    def _say(self, text: str) -> None:
        if self.verbosity > 0:
            self.stdout.write(text)


def _add_json(parser: CommandParser) -> None:
    parser.add_argument(
        "--json",
        action="store_true",
        help="Write JSON, as docs/operators.md describes it. Default: for people.",
    )


def _add_base_arguments(parser: CommandParser) -> None:
    """Let Django's own options follow the verb too; there, they have no defaults."""
    unset = argparse.SUPPRESS
    parser.add_argument(
        "-v",
        "--verbosity",
        type=int,
        choices=[0, 1, 2, 3],
        default=unset,
        help="0: silent but for JSON; 1: the default; 2 and 3: more.",
    )
    for name in ("--settings", "--pythonpath"):
        parser.add_argument(name, default=unset, help=unset)
    for name in ("--traceback", "--no-color", "--force-color"):
        parser.add_argument(name, action="store_true", default=unset, help=unset)


def _database(database: str | None, alias: str | None) -> str:
    """Return the alias of the database with the lock table."""
    if database is not None:
        if alias is not None:
            raise bad_usage("--database and --backend exclude each other: write one")
        if database not in connections:
            raise bad_usage(f"--database {database}: there is no such database")
        return database
    alias = alias or DEFAULT_ALIAS
    try:
        using: str | None = getattr(backends[alias], "using", None)
    except ImproperlyConfigured as error:
        raise bad_usage(f"--backend {alias}: {error}") from error
    if using is None:
        raise bad_usage(
            f"the backend {alias!r} keeps its locks in no database: write --database "
            f"ALIAS or the --backend of one that does"
        )
    return using


def _user() -> str:
    """Return the name of the system's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the number has no name
        return "unknown"


def list_of(rows: LockQuerySet) -> list[DistributedLock]:
    return [*rows.all()]


def as_json(row: DistributedLock, queues: Queues | None = None) -> dict[str, Any]:
    """Return a lock as the option ``--json`` writes it; its shape is documented."""
    held = row.state in {HELD, EXPIRED}
    age = None
    if held and row.acquired_at is not None:
        age = round(_seconds_between(row), 3)
    return {
        "key": row.key,
        "state": str(row.state),
        "owner": row.owner,
        "holder": row.holder,
        "note": row.note,
        "hold_count": row.hold_count,
        "fencing_token": row.version,
        "acquired_at": _moment(row.acquired_at),
        "expires_at": _moment(row.expires_at),
        "age": age,
        "remaining": round(max(0.0, float(row.remaining)), 3),
        "waiting": queues and queues.length(row.key),
    }


def _seconds_between(row: DistributedLock) -> float:
    """Return for how long a lock has been held, by the database's clock."""
    assert row.acquired_at is not None
    lasts: float = (row.expires_at - row.acquired_at).total_seconds()
    return max(0.0, lasts - float(row.remaining))


def _moment(moment: datetime | None) -> str | None:
    if moment is None:
        return None
    utc = moment.astimezone(timezone.utc)
    return utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _text(value: object) -> str:
    return "-" if value in (None, "") else _printable(str(value))


def _printable(text: str) -> str:
    """Keep control characters, which anybody may write into a note, off the screen."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _duration(value: float | None) -> str:
    if value is None:
        return "-"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if value >= size:
            whole, rest = divmod(int(value), size)
            smaller = {"d": (3600, "h"), "h": (60, "m"), "m": (1, "s")}[unit]
            return f"{whole}{unit}{rest // smaller[0]:02d}{smaller[1]}"
    return f"{value:.0f}s"


_COLUMNS = ("KEY", "STATE", "HOLDER", "AGE", "REMAINING", "WAITING", "NOTE")
_LEAST = 8


def table(
    rows: Iterable[DistributedLock], queues: Queues, width: int
) -> list[tuple[str, str | None]]:
    """Return the lines of a table with the state of each, cut to a width.

    Key, holder and note give way, whichever is widest first.
    """
    cells: list[list[str]] = [list(_COLUMNS)]
    states: list[str | None] = [None]
    for row in rows:
        shown = as_json(row, queues)
        over = row.state in {FREE, EXPIRED}
        holder = "" if row.state == FREE else row.holder
        note = "" if row.state == FREE else row.note
        cells.append(
            [
                _text(row.key),
                str(row.state),
                _text(holder),
                _duration(shown["age"]),
                "-" if over else _duration(shown["remaining"]),
                _text(shown["waiting"]),
                _text(note),
            ]
        )
        states.append(str(row.state))
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    spare = width - 2 * (len(widths) - 1)
    while sum(widths) > spare:
        widest = max((0, 2, 6), key=lambda number: widths[number])
        if widths[widest] <= _LEAST:
            break
        widths[widest] -= 1
    lines = [
        "  ".join(_fit(cell, size) for cell, size in zip(line, widths, strict=True))
        for line in cells
    ]
    return [(line.rstrip(), state) for line, state in zip(lines, states, strict=True)]


def _fit(text: str, width: int) -> str:
    return text.ljust(width) if len(text) <= width else text[: width - 1] + "…"
