"""Which servers have counted each hold of an explicit owner.

A co-owner's hold may have been counted by a majority only. If its release were counted
down everywhere, two holds that were missed by different servers would free the key at a
majority while a third is held. So a hold is given back where it was counted.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from ..values import Grant
from .server import Server

MOST_GRANTS = 10_000
"""The most grants that are remembered. Of others, all servers are asked."""


class CountedHolds:
    """The holds of this process, as the servers have counted them.

    Several threads use it at once, so it consists of single steps on dictionaries and
    lists. Holds of one grant are alike: each release takes the latest, which is not the
    outer one's, nor, in a forked child, the parent's.
    """

    def __init__(self) -> None:
        self._holds: dict[Grant, list[Collection[Server]]] = {}

    def note(self, grant: Grant, servers: Collection[Server]) -> None:
        """Remember who has counted one more hold."""
        self._holds.setdefault(grant, []).append(servers)
        if len(self._holds) > MOST_GRANTS:
            # Lost ones that nobody came back for.
            with suppress(RuntimeError, StopIteration):
                self._holds.pop(next(iter(self._holds)), None)

    def take(self, grant: Grant) -> Collection[Server] | None:
        """Return who has counted a hold that ends; ``None`` if that isn't known."""
        try:
            holds = self._holds[grant]
            servers = holds.pop()
        except (KeyError, IndexError):
            return None
        if not holds:
            self._holds.pop(grant, None)
        return servers

    def everywhere(self, grant: Grant, server: Server) -> bool:
        """Tell whether a server has counted each hold, as far as that is known."""
        return all(server in each for each in list(self._holds.get(grant, ())))

    def forget(self, grant: Grant) -> None:
        """Forget a grant that the servers don't count any more."""
        self._holds.pop(grant, None)
