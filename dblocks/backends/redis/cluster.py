"""A Redis Cluster: which node has a lock's keys, and what happens when they move.

The first connection tells whether the server belongs to a cluster. In one, each command
goes to the node that has the lock's slot; a server alone gets the same commands.

While a slot moves, a command about one key goes where the key is. One about several
keys, of which some may not be there, is refused (``TRYAGAIN``) until the move is over.
So no lock is ever in two places.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    MovedError,
    NoPermissionError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from ... import clock
from ...workers import Workers
from .client import (
    PATIENCE,
    UNREACHABLE,
    Argument,
    Client,
    Part,
    may_pass,
    meant,
    packed,
)
from .prelude import Script

T = TypeVar("T")

SLOTS = ("CLUSTER", "SLOTS")

REDIRECTS = 5
"""Redirects that one attempt follows: while a slot moves, two nodes may each name the
other."""

workers = Workers("dblocks-cluster")


class Address(NamedTuple):
    """Where a node listens."""

    host: str
    port: int


class ClusterClient(Client):
    """Sends commands to one server, or to the cluster that it belongs to."""

    def __init__(
        self,
        alias: str,
        location: str,
        options: Mapping[str, Any],
        patience: float = PATIENCE,
    ) -> None:
        super().__init__(alias, location, options, patience)
        self._location, self._options = urlsplit(location), options
        #: Who has each slot; empty unless this is a cluster.
        self._owners: list[Address | None] = []
        #: Whether a connection has told by now if this is a cluster.
        self._met = False
        self._nodes: dict[Address, Client] = {}

    # What differs from one server

    def at(self, name: str) -> Client:
        if not self._owners:
            return self
        owner = self._owners[_slot(name)]
        return self if owner is None else self._node(owner)

    def masters(self) -> list[Client]:
        if not self._met:
            # Any command tells; of this one, scripts need the permission as well.
            self.send("TIME")
        if not self._owners:
            return [self]
        self._refresh()
        return self._known()

    def run_all(
        self,
        script: Script,
        head: Sequence[Argument],
        parts: Sequence[Part],
        *,
        patience: float = 0.0,
        others_within: float | None = None,
    ) -> Sequence[Any]:
        if not self._owners:
            try:
                return super().run_all(script, head, parts, patience=patience)
            except ClusterCrossSlotError:
                # This was the first command: its connection has told of the cluster.
                pass
        groups: dict[int, list[int]] = {}
        for index, (names, _) in enumerate(parts):
            group = _slot(names[0]) if others_within is None else index
            groups.setdefault(group, []).append(index)
        shares: dict[Client, list[list[int]]] = {}
        for indexes in groups.values():
            node = self.at(parts[indexes[0]][0][0])
            shares.setdefault(node, []).append(indexes)
        answers: list[Any] = [None] * len(parts)
        give_up = clock.monotonic() + patience
        ask = partial(self._ask, script, head, parts, answers, give_up)
        if others_within is None or len(shares) == 1:
            errors = [ask(share) for share in shares.values()]
        else:
            errors = _side_by_side(ask, shares.values(), others_within)
        error = next(filter(None, errors), None)
        is_content = others_within is not None and any(x is not None for x in answers)
        if error is not None and not is_content:
            raise error
        # A copy: what comes later comes too late.
        return list(answers)

    def _ask(
        self,
        script: Script,
        head: Sequence[Argument],
        parts: Sequence[Part],
        answers: list[Any],
        give_up: float,
        share: list[list[int]],
    ) -> RedisError | None:
        """Fill in a node's answers; return its first error."""
        error = None
        for indexes in share:
            left = max(0.0, give_up - clock.monotonic())
            group = [parts[index] for index in indexes]
            try:
                found = super().run_all(script, head, group, patience=left)
            except RedisError as each:
                # The other locks must not suffer from it.
                error = error or each
                if isinstance(each, UNREACHABLE):
                    break
            else:
                for index, answer in zip(indexes, found or (), strict=False):
                    answers[index] = answer
        return error

    def _run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        asking: bool = False,
    ) -> Any:
        node: Client = self
        if self._owners:
            if len(set(map(_slot, keys))) > 1:
                raise ClusterCrossSlotError(ClusterCrossSlotError.message)
            node = self.at(keys[0])
        for _ in range(REDIRECTS):
            try:
                return Client._run(node, script, keys, arguments, asking)
            except AskError as error:
                node, asking = self._follow(node, error)
            except (*UNREACHABLE, ClusterDownError):
                if self._owners:
                    # Another may have its slots by now; the next attempt will tell.
                    self._refresh(without=node)
                raise
            except ResponseError as error:
                if "non local key" in str(error):
                    # A script came upon a key that has moved already.
                    raise TryAgainError(str(error)) from error
                raise
        raise TryAgainError(f"more than {REDIRECTS} redirects for {keys[0]!r}")

    # The map

    def _meet(self, connection: Any) -> None:
        if self._met:
            return
        # RESP3's handshake tells. With RESP2, which redis-py speaks if it is set to, or
        # older, the server is asked.
        mode = (connection.handshake_metadata or {}).get(b"mode")
        if mode in (None, b"cluster"):
            connection.send_packed_command([packed(SLOTS)])
            try:
                self._note(connection.read_response(), self)
            except ResponseError as error:
                if mode is not None or may_pass(meant(error)):
                    raise
                if isinstance(error, NoPermissionError) and _is_node(connection):
                    raise
        self._met = True

    def _follow(self, node: Client, error: AskError) -> tuple[Client, bool]:
        """Return the node that a redirect leads to, and whether it needs ``ASKING``."""
        owner = _address(error.host, error.port, node)
        has_moved = isinstance(error, MovedError)
        if has_moved:
            # The node that redirects is in reach, and has the new map.
            with suppress(RedisError):
                self._learn(node)
        return self._node(owner), not has_moved

    def _refresh(self, without: Client | None = None) -> None:
        """Learn the map from a known node that answers.

        Not all of them are waited for, or a caller would wait for each: if one is
        silent, the next attempt asks another.
        """
        nodes = [*self._known(), self]
        for node in random.sample(nodes, len(nodes)):
            if node is not without:
                try:
                    self._learn(node)
                except TimeoutError:
                    return
                except RedisError:
                    continue
                return

    def _learn(self, node: Client) -> None:
        self._note(node.send(*SLOTS), node)

    def _note(self, slots: Sequence[Any], node: Client) -> None:
        owners: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        for first, last, (host, port, *_), *_ in slots:
            owner = _address("" if host is None else host.decode(), port, node)
            owners[first : last + 1] = [owner] * (last + 1 - first)
        if not any(owners):
            raise ClusterDownError(f"{node.name} knows of no slots")
        self._owners = owners
        named = set(owners)
        for address, client in list(self._nodes.items()):
            if address not in named:
                self._nodes.pop(address, None)
                client.close()

    def _known(self) -> list[Client]:
        return [self._node(each) for each in dict.fromkeys(self._owners) if each]

    def _node(self, address: Address) -> Client:
        node = self._nodes.get(address)
        if node is None:
            node = Client(self.alias, self._url(address), self._options)
            node = self._nodes.setdefault(address, node)
        return node

    def _url(self, address: Address) -> str:
        """Return the URL of another node: all else is as in ``LOCATION``."""
        url = self._location
        user, at, _ = url.netloc.rpartition("@")
        host = f"[{address.host}]" if ":" in address.host else address.host
        url = url._replace(netloc=f"{user}{at}{host}:{address.port}")
        if url.scheme == "unix":
            url = url._replace(scheme="redis", path="")
        return url.geturl()


def _side_by_side(
    ask: Callable[[T], RedisError | None], shares: Iterable[T], others_within: float
) -> list[RedisError | None]:
    """Ask all nodes at the same time; return their errors.

    Once one has answered, the others have no more than the given seconds.
    """
    asked: list[Future[RedisError | None]] = []
    for share in shares:
        try:
            future = workers.submit(partial(ask, share))
        except RuntimeError:
            # No thread can be started.
            future = Future()
            future.set_result(ask(share))
        asked.append(future)
    done, late = wait(asked, others_within)
    while late and all(each.result() for each in done):
        more, late = wait(late, return_when=FIRST_COMPLETED)
        done |= more
    return [each.result() for each in done]


def _is_node(connection: Any) -> bool:
    """Tell whether a server that mustn't show the map says that it is in a cluster."""
    connection.send_packed_command([packed(["INFO", "cluster"])])
    with suppress(ResponseError):
        return b"cluster_enabled:1" in connection.read_response()
    return False


def _slot(name: str) -> int:
    return key_slot(name.encode())


def _address(host: str, port: int, said_by: Client) -> Address:
    """Return a node's address; without a host, that of the node that answered."""
    if host in ("", "?"):
        host = urlsplit(said_by.name).hostname or "localhost"
    return Address(host, port)
