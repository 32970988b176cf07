"""The engine that keeps locks in Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from django.core.checks import CheckMessage
from django.core.exceptions import ImproperlyConfigured
from redis.exceptions import RedisError

from ... import validation
from ...permits import apart
from ..base import BaseBackend
from ..gates import Gate
from ..values import (
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    Waiters,
)
from .checks import findings
from .client import PATIENCE, Client
from .doorbell import Doorbell
from .server import Server

PREFIX = "dblocks:"


class RedisBackend(BaseBackend):
    """A hash a key, a script a verb, the server's clock.

    ``LOCATION``: ``redis://``, ``rediss://`` or ``unix://``. A list of several names
    independent servers, of which a majority must agree (Redlock); grants have no
    fencing tokens then. ``KEY_PREFIX``: what all names begin with; by default
    ``dblocks:``. ``OPTIONS``: those of redis-py's connections; ``sentinels``, a list
    of host and port, for a service that Sentinel watches, which ``LOCATION`` names in
    place of a host.
    """

    setting_names = frozenset({"LOCATION", "KEY_PREFIX"})
    option_names = None
    system = "redis"
    errors = (RedisError,)
    #: Seconds for which a server's faults that may pass are sat out, at least.
    patience = PATIENCE

    def __new__(cls, alias: str, config: dict[str, Any]) -> RedisBackend:
        if cls is RedisBackend and len(_locations(alias, config)) > 1:
            from .quorum import QuorumBackend

            cls = QuorumBackend
        return super().__new__(cls)

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        prefix = config.get("KEY_PREFIX", PREFIX)
        if not isinstance(prefix, str) or set(prefix) & set("{}"):
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]: KEY_PREFIX must be a str without braces, not "
                f"{prefix!r}."
            )
        options = self._client_options()
        self._servers = [
            Server(
                Client(alias, location, options, self.patience),
                prefix,
                has_tokens=self.has_fencing_tokens,
            )
            for location in _locations(alias, config)
        ]
        self._server = self._servers[0]

    def _client_options(self) -> dict[str, Any]:
        return self.options

    # The verbs

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        gate = request.gate if isinstance(request.gate, Doorbell) else None
        ticket = "" if gate is None else gate.ticket
        answer = self._server.acquire(request, ticket, patience)
        if isinstance(answer, Granted) and answer.again:
            forfeited = request.forfeits(answer.grant)
            if forfeited:
                self._server.forfeit(answer.grant, forfeited)
        if gate is not None:
            is_new = isinstance(answer, Granted) and not answer.again
            gate.answered(granted=is_new)
        return answer

    def try_acquire_all(
        self, request: Request, keys: Sequence[str], patience: float
    ) -> list[Granted] | None:
        return self._server.acquire_all(request, keys, patience)

    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        return self._server.renew([renewal], "up" if count is None else count)

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        return self._server.renew(renewals)

    def release(self, grant: Grant, *, count: int | None, deadline: float) -> bool:
        return bool(self.release_all([grant], count=count, deadline=deadline))

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, deadline: float
    ) -> set[Grant]:
        return self._server.release_all(grants, count=count)

    def undo_all(self, grants: Sequence[Grant], deadline: float) -> None:
        self._server.release_all(grants, count=0, undo=True)

    def read(self, key: str) -> Reading | None:
        return self.read_all([key]).get(key)

    def read_all(
        self, keys: Sequence[str], patience: float | None = None
    ) -> dict[str, Reading]:
        return self._server.read_all(keys, patience or 0.0)

    def gate(self, request: Request) -> Gate | None:
        return Doorbell(self._server, request)

    # Operators

    def entries(self, key: str | None = None) -> Iterable[Entry]:
        return self._server.entries(key)

    def waiters(self, key: str) -> Waiters:
        return self._server.waiters(validation.key(key))

    def ask_holder(
        self, row_key: str, version: int | None
    ) -> tuple[str, str, int | None] | None:
        return self._server.request_release(row_key, version)

    def end_grant(
        self, row_key: str, version: int | None, age: float
    ) -> tuple[str, str, int | None] | None:
        return self._server.force_release(row_key, version, age)

    # Checks

    def check_server(self, databases: Sequence[str]) -> Iterable[CheckMessage]:
        for server in self._servers:
            yield from findings(server.client)

    # Tests

    def move_clock(self, seconds: float) -> None:
        self._server.make_older(seconds)

    def clear(self) -> None:
        for entry in self.entries():
            if entry.state != "free":
                key, permit = apart(entry.key)
                self.force_release(
                    key, permit=permit, by="dblocks.test", reason="cleared"
                )


def _locations(alias: str, config: dict[str, Any]) -> list[str]:
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
    if len(set(locations)) < len(locations):
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: LOCATION names a server twice."
        )
    return list(locations)
