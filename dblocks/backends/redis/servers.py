"""What one server and a quorum of several have in common, such as their settings."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import RedisError

from ..base import BaseBackend
from ..values import Grant, Request
from .checks import findings
from .client import PATIENCE, Client
from .server import Server

PREFIX = "dblocks:"


class Servers(BaseBackend):
    """An engine whose locks are in the servers that ``LOCATION`` names."""

    setting_names = frozenset({"LOCATION", "KEY_PREFIX"})
    option_names = None
    system = "redis"
    errors = (RedisError,)
    #: Seconds for which passing faults of a server are sat out, at least.
    patience = PATIENCE
    #: Default options of its clients.
    client_options: Mapping[str, object] = {}
    #: How a server is asked.
    client_class: type[Client] = Client

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        prefix = config.get("KEY_PREFIX", PREFIX)
        if not isinstance(prefix, str) or set(prefix) & set("{}"):
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]: KEY_PREFIX must be a str without braces, not "
                f"{prefix!r}."
            )
        options = {**self.client_options, **self.options}
        self._servers = [
            Server(
                self.client_class(alias, location, options, self.patience),
                prefix,
                has_tokens=self.has_fencing_tokens,
            )
            for location in locations(alias, config)
        ]

    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        return bool(self.release_all([grant], count=count, deadline=deadline))

    def _subtract_lost(self, request: Request, grant: Grant) -> None:
        """Subtract the holds of an explicit owner's grant that this process lost."""
        lost = request.forfeits(grant)
        if not lost:
            return
        try:
            self._forfeit(grant, lost)
        except BaseException:
            # Nobody receives the hold just counted, so the next try subtracts it. The
            # lost ones may be subtracted already; if they aren't, they lapse.
            request.returns(grant, 1)
            raise

    @abstractmethod
    def _forfeit(self, grant: Grant, holds: int) -> None:
        """Subtract that many holds, once even if the command is sent again."""

    # Checks

    def check_server(self, databases: Sequence[str]) -> Iterable[CheckMessage]:
        for server in self._servers:
            yield from findings(server.client)


def locations(alias: str, config: dict[str, Any]) -> list[str]:
    """Return the URLs that a setting ``LOCATION`` names.

    Raises:
        ImproperlyConfigured: It names none, one twice, or several in one URL.
    """
    given = config.get("LOCATION")
    locations = [given] if isinstance(given, str) else given
    if (
        not isinstance(locations, (list, tuple))
        or not locations
        or not all(isinstance(location, str) for location in locations)
    ):
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: LOCATION must be the URL of a Redis server, such as "
            f"'redis://localhost:6379/0', or a list of several."
        )
    if any(set(location) & set(",;") for location in locations):
        # Not shown, because it may be a part of a password.
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: a URL in LOCATION must not contain ',' or ';': write "
            f"several servers as a list, and percent-encode these characters elsewhere."
        )
    if len(set(locations)) < len(locations):
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: LOCATION names a server twice."
        )
    return list(locations)
