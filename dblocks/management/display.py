"""What ``locks list`` and ``locks show`` write: tables, lines, JSON, and the watch."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from django.core.management.base import OutputWrapper
from django.utils.translation import ngettext

from ..texts import encodable
from .rendering import (
    COLORS,
    AnyLock,
    aligned,
    as_json,
    cells_in,
    facts_of,
    tab_separated,
    table,
)
from .sources import Source


class Output:
    """Output for people: characters that the stream's encoding lacks are escaped.

    A full disk doesn't interrupt what is being done: :meth:`settle` raises its error.
    """

    def __init__(self, stream: OutputWrapper) -> None:
        self._stream = stream
        self._error: OSError | None = None

    def write(self, text: str, ending: str = "\n") -> None:
        try:
            self._stream.write(encodable(text, self._stream), ending=ending)
        except BrokenPipeError:
            raise
        except OSError as error:
            self._error = self._error or error

    def settle(self) -> None:
        """Write what is left; raise the error if anything couldn't be written."""
        if self._error is not None:
            raise self._error
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()


class Display:
    """Writes locks: for people to ``out``, for programs to ``stdout``."""

    def __init__(
        self, source: Source, stdout: OutputWrapper, out: Output, style: Any
    ) -> None:
        self._source = source
        self._stdout = stdout
        self._out = out
        self._style = style

    def write_json(self, value: object) -> None:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        lines = text.replace("\n", "")
        if not lines.isprintable() or encodable(lines, self._stdout) != lines:
            text = json.dumps(value, indent=2)
        self._stdout.write(text)

    def facts(self, locks: Sequence[AnyLock]) -> list[dict[str, Any]]:
        waiting = self._source.waiting(locks)
        return [as_json(lock, waiting.get(lock.lock_key)) for lock in locks]

    def write_lock(self, lock: AnyLock) -> None:
        """Write all that is known of one lock."""
        facts = facts_of(lock, self._source.waiting([lock]).get(lock.lock_key))
        lines = aligned(facts)
        if not self._out.isatty():
            lines = ["\t".join(fact) for fact in facts.items()]
        for name, line in zip(facts, lines, strict=True):
            state = lock.state if name == "state" else None
            self._out.write(self._colored(line, state))

    def write_table(self, facts: Sequence[dict[str, Any]], height: int = 0) -> int:
        """Write the lines that fit a height, if one is given; return how many locks."""
        if not self._out.isatty():
            self._out.write("\n".join(tab_separated(facts)))
            return len(facts)
        width = shutil.get_terminal_size().columns
        written = used = 0
        for line, state in table(facts, width):
            used += max(1, -(-cells_in(line) // width))
            if height and used > height and written > 1:
                break
            self._out.write(self._colored(line, state))
            written += 1
        return written - 1

    def draw(
        self, found: Sequence[AnyLock], limit: int | None, height: int = 0
    ) -> None:
        """Write a table and, on a terminal, how many locks there are."""
        wanted = found[:limit]
        shown = self.write_table(self.facts(wanted[: height or None]), height)
        if not self._out.isatty():
            return
        text = ngettext("%(count)d lock", "%(count)d locks", len(found))
        text %= {"count": len(found)}
        more = len(found) - shown
        if more:
            text += ngettext(
                ", %(more)d of them not shown", ", %(more)d of them not shown", more
            ) % {"more": more}
        self._out.write(text)

    def watch(
        self, find: Callable[[], Sequence[AnyLock]], limit: int | None, every: float
    ) -> None:
        """Draw the list anew until it is interrupted."""
        with suppress(KeyboardInterrupt):
            while True:
                height = 0
                if self._out.isatty():
                    # Two lines are for the count and the cursor.
                    height = max(2, shutil.get_terminal_size().lines - 2)
                    self._out.write("\x1b[H\x1b[2J", ending="")  # home, then clear
                self.draw(find(), limit, height)
                self._out.settle()
                time.sleep(every)

    def _colored(self, text: str, state: str | None) -> str:
        if state not in COLORS or not self._out.isatty():
            return text
        style: str = getattr(self._style, COLORS[state])(text)
        return style
