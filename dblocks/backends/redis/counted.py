"""Which servers have counted each hold of an explicit owner.

A co-owner's hold may have been counted by a majority only. If its release were counted
down everywhere, two holds that were missed by different servers would free the key at a
majority while a third is held. So a hold is given back where it was counted.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress

from ..values import Grant
from .server import Server

MOST_GRANTS = 10_000
"""The most grants that are remembered. To release others, all servers are asked."""


class CountedHolds:
    """The holds of this process, as the servers have counted them.

    Several threads use it at once, so it consists of single steps on dictionaries and
    lists. Holds of one grant are alike: each release takes the latest, so that the
    first is given back last. A forked child has none of its parent's.
    """

    def __init__(self) -> None:
        self._by_process: dict[int, dict[Grant, list[Collection[Server]]]] = {}

    @property
    def _holds(self) -> dict[Grant, list[Collection[Server]]]:
        return self._by_process.setdefault(os.getpid(), {})

    def note(self, grant: Grant, servers: Collection[Server]) -> None:
        """Remember which servers have counted one more hold."""
        holds = self._holds
        holds.setdefault(grant, []).append(servers)
        if len(holds) > MOST_GRANTS:
            # The oldest is most likely lost, and its owner never came back.
            with suppress(RuntimeError, StopIteration):
                holds.pop(next(iter(holds)), None)

    def take(self, grant: Grant) -> Collection[Server] | None:
        """Take out the latest hold; return its servers, ``None`` if unknown."""
        try:
            holds = self._holds[grant]
            servers = holds.pop()
        except (KeyError, IndexError):
            return None
        if not holds:
            self._holds.pop(grant, None)
        return servers

    def last(self, grant: Grant) -> Collection[Server] | None:
        """Return the servers of the hold that ends last, ``None`` if unknown."""
        try:
            return self._holds[grant][0]
        except (KeyError, IndexError):
            return None

    def forget(self, grant: Grant) -> None:
        """Forget a grant that the servers don't count any more."""
        self._holds.pop(grant, None)
