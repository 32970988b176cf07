"""Which holds this process has, and which is the latest for each key."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from .. import clock, forks
from ..backends.base import BaseBackend
from ..backends.values import Grant

if TYPE_CHECKING:
    from .holds import Hold


FORFEITED_FOR = 3600.0
"""Seconds for which lost holds are remembered, in case a co-owner keeps the grant."""


class Registry:
    """The holds of this process.

    The garbage collector or a signal handler may interrupt it anywhere, so it consists
    of single steps on dictionaries and sets.
    """

    def __init__(self) -> None:
        #: Called when a key may be free; the wait queues set this.
        self.freed: Callable[[BaseBackend, str], object] = lambda backend, key: None
        # Guards writes to ``_latest``; held for an instant.
        self._mutex = threading.RLock()
        self._latest: dict[tuple[BaseBackend, str], weakref.ref[Hold]] = {}
        self._all: set[weakref.ref[Hold]] = set()
        #: Lists with one item for each lost hold, by backend, grant and the list's id,
        #: and the local clock until which each list is kept.
        self._forfeited: dict[
            tuple[BaseBackend, Grant, int], tuple[list[None], float]
        ] = {}

    def add(self, hold: Hold) -> None:
        """Remember a hold. Of two live grants of its key, the outdated one is lost."""
        place = hold.backend, hold.grant.key
        earlier = self.find(*place)
        ref = hold.ref = weakref.ref(hold, self._all.discard)
        hold.known_at = clock.monotonic()
        self._all.add(ref)
        outdated = None
        if earlier is not None and earlier.is_live():
            ours, theirs = hold.grant.version or 0, earlier.grant.version or 0
            # The reply to an earlier request may arrive after that to a later one. The
            # token alone doesn't prove it: in a table that a test emptied, tokens begin
            # anew.
            is_late = theirs > ours and hold.started < earlier.known_at
            outdated = hold if is_late or not hold.is_live() else earlier
        if outdated is not hold:
            with self._mutex:
                self._latest[place] = ref
        if outdated is not None and earlier and earlier.grant != hold.grant:
            outdated.lose("taken")

    def watches(self, hold: Hold) -> bool:
        """Tell whether a hold is still watched over."""
        return hold.ref in self._all

    def forfeit(self, backend: BaseBackend, grant: Grant, holds: list[None]) -> None:
        """Remember lost holds of a grant, which the engine still counts.

        Its explicit owner may take the key again before the engine lets it lapse.

        Args:
            holds: One item for each. Whoever takes an item out has one hold subtracted,
                so none is subtracted twice.
        """
        until = clock.monotonic() + FORFEITED_FOR
        self._forfeited[backend, grant, id(holds)] = holds, until

    def take_forfeited(self, backend: BaseBackend, grant: Grant) -> int:
        """Take the lost holds of a grant; return how many to subtract."""
        taken = 0
        for place in list(self._forfeited):
            if place[:2] == (backend, grant):
                # Holds that are forfeited from now on make an entry of their own.
                holds, _ = self._forfeited.pop(place, ([], 0.0))
                with suppress(IndexError):
                    while True:
                        holds.pop()
                        taken += 1
        return taken

    def return_forfeited(self, backend: BaseBackend, grant: Grant, holds: int) -> None:
        """Remember holds that the engine counts, though nobody here has them."""
        if holds:
            self.forfeit(backend, grant, [None] * holds)

    def forget(self, now: float) -> None:
        """Forget holds that nothing refers to any more, and outdated lost holds."""
        # list() of the keys: of items() it isn't a single step before Python 3.12.
        with self._mutex:
            for place in list(self._latest):
                ref = self._latest.get(place)
                if ref is not None and ref() is None:
                    del self._latest[place]
        for lost in list(self._forfeited):
            if self._forfeited.get(lost, ([], now))[1] <= now:
                self._forfeited.pop(lost, None)

    def find(self, backend: BaseBackend, key: str) -> Hold | None:
        """Return the latest hold on a key, live or not, if there is one."""
        ref = self._latest.get((backend, key))
        return None if ref is None else ref()

    def is_empty(self) -> bool:
        """Tell whether there is nothing to watch."""
        return not self._all

    def all(self) -> list[Hold]:
        """Return all holds that are neither released nor lost."""
        return [hold for ref in list(self._all) if (hold := ref()) is not None]

    def discard(self, hold: Hold) -> None:
        """Stop watching a hold; as the latest of its key it can still be found."""
        if hold.ref is not None:
            self._all.discard(hold.ref)

    def after_fork_in_child(self) -> None:
        """Count what the parent holds as lost."""
        holds = self.all()
        self._mutex = threading.RLock()
        # The parent itself subtracts the holds that it has lost.
        self._latest, self._all, self._forfeited = {}, set(), {}
        for hold in holds:
            hold.forget_parent()


registry = Registry()
forks.in_child(registry.after_fork_in_child)
