"""``manage.py locks list|show|release|prune``: the locks for operators."""

from __future__ import annotations

import argparse
import getpass
import json
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from io import StringIO
from typing import Any

from django.core.management.base import CommandParser, OutputWrapper
from django.db import connections
from django.utils.translation import ngettext

from ... import validation
from ...models import State
from ..parsing import BACKEND, DURATION, FLAG, LockCommand, Parser
from ..rendering import (
    COLORS,
    FREE,
    HELD,
    AnyLock,
    aligned,
    as_json,
    named,
    table,
)
from ..sources import source_of
from ..statuses import bad_usage, checked

WATCH_EVERY = 2.0
MAX_NAMED = 20
"""The most permits that an error names."""
JSON = {
    **FLAG,
    "help": "Write JSON, of fields that stay as they are. Default: for people.",
}
PERMIT: dict[str, Any] = {"type": int, "metavar": "N"}


class LocksParser(Parser):
    advice = "; manage.py locks --help shows what to write"


class Command(LockCommand):
    help = "Show and release locks; prune the lock table."
    parser_class = LocksParser
    examples = """\
examples:
  show what is locked, redrawn every two seconds:
    manage.py locks list --state held --watch
  force the release of a lock that has been held for more than two hours:
    manage.py locks release nightly-report --older-than 2h --reason "host is gone"
  delete the rows of keys that have been free for thirty days:
    manage.py locks prune --older-than 30d

exit status:
  0 done; 1 there was nothing to do, or it was not confirmed; 64 bad usage; 69 the
  database or backend is out of reach; 78 the lock table is missing
"""

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(
            metavar="list|show|release|prune", required=True, parser_class=LocksParser
        )
        for act, add_own in (
            (self.list, _add_list_arguments),
            (self.show, _add_show_arguments),
            (self.release, _add_release_arguments),
            (self.prune, _add_prune_arguments),
        ):
            text = act.__doc__
            verb: CommandParser = verbs.add_parser(
                act.__name__, help=text, description=text, allow_abbrev=False
            )
            verb.set_defaults(act=act)
            add_own(verb)
            _add_common_arguments(verb)

    def handle(
        self,
        *args: Any,
        act: Callable[..., None],
        verbosity: int,
        database: str | None,
        backend: str | None,
        **options: Any,
    ) -> None:
        self.verbosity = verbosity
        #: For people; stdout itself is for JSON.
        self.out = self.stdout if verbosity > 0 else OutputWrapper(StringIO())
        self.source = source_of(database, backend)
        try:
            act(**options)
        except self.source.errors as error:
            raise self.source.failure(error) from error

    # Showing

    def list(
        self, *, state: str | None, json: bool, watch: float | None, **options: Any
    ) -> None:
        """Show all locks, or those in a state."""
        if watch is not None:
            self._watch(state, checked(validation.bounded, "--watch", watch))
        elif json:
            self._write_json(self._facts(self.source.find(state=state)))
        else:
            self._draw(state)

    def show(self, *, key: str, permit: int | None, json: bool, **options: Any) -> None:
        """Show one lock, or all permits of its key."""
        locks = self._find(key, permit)
        facts = self._facts(locks)
        if permit is None and locks[-1].permit is not None:
            if json:
                self._write_json({"key": key, "permits": facts})
            else:
                self._write_table(facts, self._size()[0])
        elif json:
            self._write_json(facts[0])
        else:
            self._write_facts(facts[0])

    def _write_facts(self, facts: dict[str, Any]) -> None:
        shown = dict(facts)
        if shown["permit"] is None:
            del shown["permit"]
        for name, line in zip(shown, aligned(shown), strict=True):
            state = shown["state"] if name == "state" else None
            self.out.write(self._colored(line.rstrip(), state))

    def _find(self, key: str, permit: int | None) -> Sequence[AnyLock]:
        """Return a permit, or all of a key, the lock without permits first."""
        checked(validation.key_of_row, key, permit)
        locks = self.source.find(key)
        if permit is not None:
            locks = [lock for lock in locks if lock.permit == permit]
        if not locks:
            what = named(key, permit).removeprefix("the ")
            self.fail(f"there is no {what}; manage.py locks list shows all")
        return locks

    def _facts(self, locks: Sequence[AnyLock]) -> Sequence[dict[str, Any]]:
        waiting = self.source.waiting(locks)
        return [as_json(lock, waiting.get(lock.lock_key)) for lock in locks]

    def _write_json(self, value: object) -> None:
        self.stdout.write(json.dumps(value, indent=2, ensure_ascii=False))

    def _size(self) -> tuple[int, int]:
        """Return width and height; nothing is cut in a file or a pipe."""
        if self.out.isatty():
            return shutil.get_terminal_size()
        return sys.maxsize, sys.maxsize

    def _write_table(self, facts: Sequence[dict[str, Any]], width: int) -> None:
        for line, state in table(facts, width):
            self.out.write(self._colored(line, state))

    def _draw(self, state: str | None, *, cut: bool = False) -> None:
        width, height = self._size()
        found = self.source.find(state=state)
        shown = found[: max(1, height - 3)] if cut else found
        self._write_table(self._facts(shown), width)
        text = ngettext("%(count)d lock", "%(count)d locks", len(found))
        text %= {"count": len(found)}
        more = len(found) - len(shown)
        if more:
            text += ngettext(
                ", %(more)d of them not shown", ", %(more)d of them not shown", more
            ) % {"more": more}
        self.out.write(text)

    def _colored(self, text: str, state: str | None) -> str:
        if state is None or not self.out.isatty():
            return text
        style: str = getattr(self.style, COLORS[state])(text)
        return style

    def _watch(self, state: str | None, every: float) -> None:
        with suppress(KeyboardInterrupt):
            while True:
                if self.out.isatty():
                    # Home, then clear the screen.
                    self.out.write("\x1b[H\x1b[2J", ending="")
                self._draw(state, cut=True)
                self.out.flush()
                time.sleep(every)

    # Changing

    def release(
        self,
        *,
        key: str,
        permit: int | None,
        fencing_token: int | None,
        older_than: float | None,
        reason: str,
        yes: bool,
        **options: Any,
    ) -> None:
        """Force the release of a lock, or of one permit.

        Its holder finds out at its next renewal or guard. Only a command under
        run_locked is ended then.
        """
        lock = self._taken(key, permit)
        what = named(key, lock.permit)
        if fencing_token is not None:
            self._compare(lock, fencing_token)
        if not yes:
            self._confirm(lock)
        if not self.source.force_release(
            lock, older_than=older_than, by=_user(), reason=reason
        ):
            young = ""
            if older_than is not None:
                young = f"has not been held for {older_than:g} s, or "
            self.fail(f"{what} {young}has changed hands: nothing was released")
        number = "" if lock.permit is None else f", permit {lock.permit}"
        token = "" if lock.version is None else f"fencing token {lock.version}, "
        self.out.write(f"Released {key!r}{number} ({token}{lock.holder}).")

    def _compare(self, lock: AnyLock, fencing_token: int) -> None:
        """End the command if another grant than this one is meant."""
        what = named(lock.lock_key, lock.permit)
        if lock.version is None:
            raise bad_usage(f"{what} has no fencing token: leave out --fencing-token")
        if fencing_token != lock.version:
            self.fail(
                f"{what} has the fencing token {lock.version} by now, not "
                f"{fencing_token}: that grant is over",
            )

    def _taken(self, key: str, permit: int | None) -> AnyLock:
        """Return the lock to release: the one that was named, or that there is."""
        taken = [lock for lock in self._find(key, permit) if lock.state != FREE]
        if not taken:
            what = named(key, permit)
            self.fail(f"{what} is free: there is nothing to release")
        if len(taken) > 1 and taken[0].permit is not None:
            names = [f"{each.permit} ({each.holder or each.state})" for each in taken]
            if len(names) > MAX_NAMED:
                names[MAX_NAMED:] = ["…"]
            raise bad_usage(
                f"{len(taken)} permits of the lock {key!r} are taken: write --permit N "
                f"for one of {', '.join(names)}"
            )
        return taken[0]

    def _confirm(self, lock: AnyLock) -> None:
        """Say what a forced release takes away, and ask; stdout is for data alone."""
        shown = as_json(lock)
        names = ("state", "holder", "note", "fencing_token", "acquired_at", "remaining")
        facts = aligned({name: shown[name] for name in names})
        what = named(lock.lock_key, lock.permit)
        lines = [f"{what[0].upper()}{what[1:]}:", *(f"  {line}" for line in facts)]
        if lock.state == HELD:
            lines.append(
                "Until the holder finds out, at its next renewal or guard, two may be "
                "at work. Only a command under run_locked is ended then."
            )
        lines.append("Release it? [y/N] ")
        self.stderr.write("\n".join(lines), style_func=str, ending="")
        self.stderr.flush()
        try:
            answer = input()
        except (EOFError, KeyboardInterrupt):
            answer = ""
            self.stderr.write("")
        if answer.strip().lower() not in {"y", "yes"}:
            self.fail("not confirmed, nothing was released; --yes doesn't ask")

    def prune(self, *, older_than: float, dry_run: bool, **options: Any) -> None:
        """Delete the rows of keys that have been free or expired for long.

        Held and cooling locks stay; fencing tokens never go back.
        """
        age = checked(validation.duration, "--older-than", older_than)
        if dry_run:
            count = self.source.count_stale(age)
            text = ngettext(
                "%(count)d lock would be deleted.",
                "%(count)d locks would be deleted.",
                count,
            )
        else:
            count = self.source.prune(age, self._progress)
            text = ngettext(
                "%(count)d lock was deleted.", "%(count)d locks were deleted.", count
            )
        self.out.write(text % {"count": count})

    def _progress(self, deleted: int) -> None:
        if self.verbosity > 1 or (self.verbosity > 0 and self.stderr.isatty()):
            text = ngettext("%(count)d lock ...", "%(count)d locks ...", deleted)
            ending = "\r" if self.stderr.isatty() else "\n"
            self.stderr.write(text % {"count": deleted}, style_func=str, ending=ending)
            self.stderr.flush()


def _add_list_arguments(verb: CommandParser) -> None:
    verb.add_argument(
        "--state", choices=State.values, help="Only locks in this state. Default: all."
    )
    form = verb.add_mutually_exclusive_group()
    form.add_argument("--json", **JSON)
    form.add_argument(
        "--watch",
        **DURATION,
        nargs="?",
        const=WATCH_EVERY,
        help="Redraw the table at this interval until interrupted. Default: draw it "
        "once; --watch alone: 2.",
    )


def _add_show_arguments(verb: CommandParser) -> None:
    verb.add_argument("key", metavar="KEY")
    verb.add_argument(
        "--permit", **PERMIT, help="Only this permit of the key. Default: all."
    )
    verb.add_argument("--json", **JSON)


def _add_release_arguments(verb: CommandParser) -> None:
    add = verb.add_argument
    add("key", metavar="KEY")
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
    add("--older-than", **DURATION, help="Only if held for longer. Default: always.")
    add(
        "--reason",
        default="",
        metavar="TEXT",
        help="Why, for the log and the signal. Default: none.",
    )
    add("--yes", **FLAG, help="Don't ask. Default: ask.")


def _add_prune_arguments(verb: CommandParser) -> None:
    add = verb.add_argument
    add(
        "--older-than",
        **DURATION,
        required=True,
        help="Only keys that have been free or expired for longer. Required.",
    )
    add("--dry-run", **FLAG, help="Count and delete none. Default: delete.")


def _add_common_arguments(verb: CommandParser) -> None:
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
        help="0: nothing but JSON, errors and the question before a release; 1: the "
        "default; 2 and 3: more.",
    )
    for name in ("--settings", "--pythonpath"):
        verb.add_argument(name, default=unset, help=unset)
    for name in ("--traceback", "--no-color", "--force-color"):
        verb.add_argument(name, action="store_true", default=unset, help=unset)


def _user() -> str:
    """Return the name of the system's user."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # the number has no name
        return "unknown"
