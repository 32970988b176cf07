"""``manage.py locks list|show|release|prune``: the locks for operators."""

from __future__ import annotations

import getpass
import os
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from io import StringIO
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser, OutputWrapper
from django.db import connections
from django.utils.translation import ngettext

from ... import validation
from ...texts import visible
from ..display import Display, Output
from ..lock_options import (
    SHORTEST_WATCH,
    add_common_arguments,
    add_list_arguments,
    add_prune_arguments,
    add_release_arguments,
    add_show_arguments,
)
from ..parsing import LockCommand, Parser
from ..rendering import (
    FREE,
    HELD,
    AnyLock,
    aligned,
    facts_of,
    named,
    table,
    taken_for,
    unheld,
)
from ..selection import Selection, advice_for, ordered, place_of
from ..sources import source_of
from ..statuses import (
    BROKEN_PIPE,
    INTERRUPTED,
    IO_ERROR,
    bad_usage,
    checked,
    misconfigured,
    one_line,
)

MAX_NAMED = 20
"""The most permits that an error names."""

UNHELD = "no held lock matches: nobody was asked"

WARNING = (
    "Until a holder finds out, at its next renewal or guard, two may be at work. Only "
    "a command under run_locked is ended then."
)


def _write_no_more() -> None:
    # Python flushes standard output once more at the end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LocksParser(Parser):
    advice = "; %(prog)s --help shows what to write"


class Command(LockCommand):
    help = "Show and release locks; prune the lock table."
    parser_class = LocksParser
    examples = """\
examples:
  show what is locked, redrawn every two seconds:
    manage.py locks list --state held --watch
  ask the holder of a lock to finish:
    manage.py locks release nightly-report --ask --reason "deployment"
  force the release of a lock that has been held for more than two hours:
    manage.py locks release nightly-report --older-than 2h --reason "it hangs"
  force the release of all that a dead host held:
    manage.py locks release --holder web-3 --reason "host is gone"
  delete the rows of keys that have been free for thirty days:
    manage.py locks prune --older-than 30d

exit status:
  0 done; 1 there was nothing to do, it was not confirmed, or the grant was over; 64
  bad usage; 69 the database or backend is out of reach or busy, or a transaction
  keeps the lock's row locked; 74 the output can't be written (the work is done); 78
  the lock table is missing or out of date, or the backend's entry in DBLOCKS is wrong;
  130 it was interrupted; 141 the reader of the output has ended
"""

    def add_arguments(self, parser: CommandParser) -> None:
        verbs = parser.add_subparsers(
            metavar="list|show|release|prune", required=True, parser_class=LocksParser
        )
        for act, add_own in (
            (self.list, add_list_arguments),
            (self.show, add_show_arguments),
            (self.release, add_release_arguments),
            (self.prune, add_prune_arguments),
        ):
            text = act.__doc__
            verb: CommandParser = verbs.add_parser(
                act.__name__, help=text, description=text, allow_abbrev=False
            )
            verb.set_defaults(act=act)
            add_own(verb)
            add_common_arguments(verb)

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
        if getattr(self.stdout, "_out", None) is None:
            # Standard output was closed: nobody reads it.
            self.stdout = OutputWrapper(StringIO())
        #: For people; stdout itself is for JSON.
        self.out = Output(self.stdout if verbosity else OutputWrapper(StringIO()))
        self.source = source_of(database, backend)
        self.place = place_of(database, backend)
        self.display = Display(self.source, self.stdout, self.out, self.style)
        try:
            act(**options)
            self.out.settle()
            self.stdout.flush()
        except BrokenPipeError:
            # The output's reader has ended, as in "| head".
            _write_no_more()
            sys.exit(BROKEN_PIPE)
        except KeyboardInterrupt:
            if not self.from_command_line:
                raise
            # Whatever was under way has been rolled back, unless it was just done.
            text = "interrupted: what was not reported may not have been done"
            self.fail(text, INTERRUPTED)
        except ImproperlyConfigured as error:
            raise misconfigured(error) from error
        except self.source.errors as error:
            raise self.source.failure(error) from error
        except OSError as error:
            if self.from_command_line:
                _write_no_more()
            raise CommandError(
                f"the output can't be written: {one_line(error)}", returncode=IO_ERROR
            ) from error

    # Showing

    def list(
        self,
        *,
        state: str | None,
        pattern: str | None,
        holder: str | None,
        sort: str,
        limit: int | None,
        json: bool,
        watch: float | None,
        **options: Any,
    ) -> None:
        """Show all locks, or some."""
        if limit is not None and limit < 1:
            raise bad_usage(f"--limit must be 1 or more, not {limit}")
        selection = checked(Selection, state=state, pattern=pattern, holder=holder)

        def find() -> Sequence[AnyLock]:
            return ordered(self.source.find(selection), sort)

        if watch is not None:
            every = checked(validation.bounded, "--watch", watch, SHORTEST_WATCH)
            self.display.watch(find, limit, every)
        elif json:
            self.display.write_json(self.display.facts(find()[:limit]))
        else:
            self.display.draw(find(), limit)

    def show(self, *, key: str, permit: int | None, json: bool, **options: Any) -> None:
        """Show one lock, or all permits of its key."""
        locks = self._find(key, permit)
        if permit is None and locks[-1].permit is not None:
            facts = self.display.facts(locks)
            if json:
                self.display.write_json({"key": key, "permits": facts})
            else:
                self.display.write_table(facts)
        elif json:
            self.display.write_json(self.display.facts(locks)[0])
        else:
            self.display.write_lock(locks[0])

    def _find(self, key: str, permit: int | None) -> Sequence[AnyLock]:
        """Return a permit, or all of a key, the lock without permits first."""
        checked(validation.key_of_row, key, permit)
        locks = ordered(self.source.find(Selection(key=key)))
        if permit is not None:
            locks = [lock for lock in locks if lock.permit == permit]
        if not locks:
            what = named(key, permit).removeprefix("the ")
            self.fail(f"there is no {what}; {advice_for(key, self.place)}")
        return locks

    # Changing

    def release(
        self,
        *,
        key: str | None,
        pattern: str | None,
        holder: str | None,
        permit: int | None,
        fencing_token: int | None,
        older_than: float | None,
        ask: bool,
        reason: str,
        yes: bool,
        **options: Any,
    ) -> None:
        """Force the release of a lock, of one permit, or of all that match; or ask.

        Their holders find out at their next renewal or guard. Only a command under
        run_locked is ended then; asked for, it gets a SIGTERM.
        """
        checked(validation.text, "--reason", reason)
        if ask and older_than is not None:
            raise bad_usage("--older-than is for a forced release: leave out --ask")
        if older_than is not None:
            older_than = checked(validation.age, older_than, "--older-than")
        how: dict[str, Any] = {"by": _user(), "reason": reason}
        if not ask:
            how["older_than"] = older_than
        if key is None:
            if pattern is None and holder is None:
                raise bad_usage("write KEY, or --key PATTERN or --holder TEXT")
            if permit is not None or fencing_token is not None:
                raise bad_usage("--permit and --fencing-token need KEY")
            selection = checked(Selection, pattern=pattern, holder=holder)
            if ask:
                found = ordered(self.source.find(selection))
                self._ask_holders(found, how, UNHELD)
            else:
                self._release_all(selection, yes, how)
        elif pattern is not None or holder is not None:
            raise bad_usage("write KEY without --key and --holder")
        else:
            lock = self._taken(key, permit)
            if fencing_token is not None:
                self._compare(lock, fencing_token)
            if ask:
                self._ask_holders([lock], how, unheld(lock))
            else:
                self._release_one(lock, yes, how)

    def _release_one(self, lock: AnyLock, yes: bool, how: dict[str, Any]) -> None:
        if not yes:
            self._confirm(lock)
        if not self._released(lock, how):
            young = ""
            if (age := how["older_than"]) is not None:
                young = f"has not been held for {age:g} s, or "
            what = named(lock.lock_key, lock.permit)
            self.fail(f"{what} {young}was released or changed hands: nothing was done")

    def _release_all(
        self, selection: Selection, yes: bool, how: dict[str, Any]
    ) -> None:
        """Release the locks that are taken and match, as they were shown."""
        age = how["older_than"]
        locks = [
            lock
            for lock in ordered(self.source.find(selection))
            if lock.state != FREE and (age is None or (taken_for(lock) or 0) > age)
        ]
        if not locks:
            self.fail("nothing that is taken matches: there is nothing to release")
        if not yes:
            self._confirm_all(locks)
        left = [lock for lock in locks if not self._released(lock, how)]
        if left:
            names = ", ".join(named(lock.lock_key, lock.permit) for lock in left)
            which = f"{len(left)} of {len(locks)}"
            be = "was" if len(left) == 1 else "were"
            self.fail(
                f"{which} {be} released or changed hands, and {be} left alone: {names}"
            )

    def _ask_holders(
        self, locks: Sequence[AnyLock], how: dict[str, Any], unheld: str
    ) -> None:
        """Ask those who hold some locks to finish; nothing is taken from them."""
        held = [lock for lock in locks if lock.state == HELD]
        asked = 0
        for lock in held:
            if self.source.request_release(lock, **how):
                asked += 1
                what = named(lock.lock_key, lock.permit)
                self.out.write(f"Asked {visible(lock.holder)} to release {what}.")
        if not asked:
            why = "what was held has changed hands: nobody was asked"
            self.fail(why if held else unheld)

    def _released(self, lock: AnyLock, how: dict[str, Any]) -> bool:
        if not self.source.force_release(lock, **how):
            return False
        number = "" if lock.permit is None else f", permit {lock.permit}"
        token = "" if lock.version is None else f"fencing token {lock.version}, "
        holder = visible(lock.holder)
        self.out.write(f"Released {lock.lock_key!r}{number} ({token}{holder}).")
        return True

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
        """Return the lock to release: the permit named, or the only one taken."""
        taken = [lock for lock in self._find(key, permit) if lock.state != FREE]
        if not taken:
            what = named(key, permit)
            self.fail(f"{what} is free: nobody holds it")
        if len(taken) > 1 and taken[0].permit is not None:
            names = [
                f"{each.permit} ({visible(each.holder) or each.state})"
                for each in taken
            ]
            if len(names) > MAX_NAMED:
                names[MAX_NAMED:] = ["…"]
            raise bad_usage(
                f"{len(taken)} permits of the lock {key!r} are taken: write --permit N "
                f"for one of {', '.join(names)}"
            )
        return taken[0]

    def _confirm(self, lock: AnyLock) -> None:
        """Say what a forced release takes away, and ask."""
        facts = facts_of(lock)
        for known in ("key", "permit", "owner"):
            facts.pop(known, None)
        what = named(lock.lock_key, lock.permit)
        lines = [
            f"{what[0].upper()}{what[1:]}:",
            *(f"  {line}" for line in aligned(facts)),
        ]
        if lock.state == HELD:
            lines.append(WARNING)
        self._ask([*lines, "Release it? [y/N] "], {"y", "yes"})

    def _confirm_all(self, locks: Sequence[AnyLock]) -> None:
        """Show what would be released, and have the number typed as the answer."""
        width = sys.maxsize
        if self.stderr.isatty():
            width = shutil.get_terminal_size().columns
        lines = [line for line, _state in table(self.display.facts(locks), width)]
        if any(lock.state == HELD for lock in locks):
            lines.append(WARNING)
        count = str(len(locks))
        lines.append(
            ngettext("%(count)d lock", "%(count)d locks", len(locks))
            % {"count": len(locks)}
            + f"; type {count} to force the release: "
        )
        self._ask(lines, {count})

    def _ask(self, lines: Sequence[str], agreed: Collection[str]) -> None:
        """Ask on stderr, as stdout is for data alone; end the command unless agreed."""
        self.stderr.write("\n".join(lines), style_func=str, ending="")
        if self.from_command_line:
            # The question may stand for longer than a server keeps an idle connection.
            connections.close_all()
        try:
            answer = input() if self.standard_error.flush() else ""
        except KeyboardInterrupt:
            # Later messages begin on a new line.
            self.stderr.write("")
            raise
        except (EOFError, OSError, RuntimeError, ValueError):
            # There may be no standard input, or it can't be read (nohup) or isn't text.
            answer = ""
            self.stderr.write("")
        if answer.strip().lower() not in agreed:
            self.fail("not confirmed: nothing was released; --yes skips the question")

    def prune(self, *, older_than: float, dry_run: bool, **options: Any) -> None:
        """Delete the rows of keys that have been free or expired for long.

        Held and cooling locks stay; fencing tokens never go back.
        """
        age = checked(validation.age, older_than, "--older-than")
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


def _user() -> str:
    """Return the name of the system's user."""
    try:
        return visible(getpass.getuser())
    except (KeyError, OSError, ImportError):  # the number has no name
        return "unknown"
