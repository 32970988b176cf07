"""The engine that keeps locks in Redis."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ... import validation
from ..gates import Gate
from ..values import (
    Described,
    Entry,
    Grant,
    Granted,
    Reading,
    Renewal,
    Renewed,
    Request,
    Waiters,
)
from .cluster import ClusterClient
from .doorbell import Doorbell
from .quorum import QuorumBackend
from .servers import Servers, locations


class RedisBackend(Servers):
    """Locks as hashes in Redis: one hash per key, one script per verb.

    The server's clock decides. ``LOCATION`` is a URL: ``redis://``, ``rediss://`` or
    ``unix://``; a node of a Redis Cluster stands for the whole cluster. A list of
    several URLs names independent servers, of which a majority must agree (Redlock);
    its grants have no fencing tokens. ``KEY_PREFIX`` begins the names of all keys in
    Redis; default: ``dblocks:``. ``OPTIONS`` takes what redis-py's connections take,
    and ``sentinels``, a list of hosts and ports: the host in ``LOCATION`` is then the
    name of the service that they watch.
    """

    client_class = ClusterClient

    def __new__(cls, alias: str, config: dict[str, Any]) -> Any:
        if cls is RedisBackend and len(locations(alias, config)) > 1:
            return QuorumBackend(alias, config)
        return super().__new__(cls)

    def __init__(self, alias: str, config: dict[str, Any]) -> None:
        super().__init__(alias, config)
        self._server = self._servers[0]

    # The verbs

    def try_acquire(self, request: Request, patience: float) -> Granted | Reading:
        gate = request.gate if isinstance(request.gate, Doorbell) else None
        ticket = "" if gate is None else gate.ticket
        answer = self._server.acquire(request, ticket, patience)
        if isinstance(answer, Granted) and answer.again:
            self._subtract_lost(request, answer.grant)
        if gate is not None:
            is_new = isinstance(answer, Granted) and not answer.again
            gate.answered(granted=is_new)
        return answer

    def _forfeit(self, grant: Grant, holds: int) -> None:
        self._server.forfeit(grant, holds)

    def try_acquire_all(
        self, request: Request, keys: Sequence[str], patience: float
    ) -> list[Granted] | None:
        return self._server.acquire_all(request, keys, patience)

    def reenter(self, renewal: Renewal, count: int | None, patience: float) -> Renewed:
        return self._server.renew([renewal], "up" if count is None else count)

    def renew(self, renewals: Sequence[Renewal]) -> Renewed:
        return self._server.renew(renewals)

    def release_all(
        self, grants: Sequence[Grant], *, count: int | None, deadline: float
    ) -> set[Grant]:
        return self._server.release_all(grants, count=count)

    def undo_all(self, grants: Sequence[Grant]) -> None:
        self._server.release_all(grants, count=0, undo=True)

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

    def ask_holder(self, row_key: str, version: int | None) -> Described | None:
        return self._server.request_release(row_key, version)

    def end_grant(
        self, row_key: str, version: int | None, age: float
    ) -> Described | None:
        return self._server.force_release(row_key, version, age)

    # Tests

    def move_clock(self, seconds: float) -> None:
        self._server.make_older(seconds)
