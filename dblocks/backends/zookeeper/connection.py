"""A connection to ZooKeeper, and the requests that locks are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionLoss,
    InvalidACLError,
    KazooException,
    NoAuthError,
    NodeExistsError,
    NoNodeError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.serialization import Transaction
from kazoo.protocol.states import KeeperState

from ... import clock
from . import nodes
from .handler import CONNECT_WITHIN, TRIES, Handler

ERRORS: tuple[type[Exception], ...] = (KazooException, KazooTimeoutError)

PASSING = (
    ConnectionLoss,
    OperationTimeoutError,
    SessionExpiredError,
    SessionMovedError,
    KazooTimeoutError,
)
"""Errors that the next connection, or the next session, may not have."""


WAKE_AFTER = 0.05
"""Seconds without an answer after which kazoo's thread is woken to look again."""

LEAST = 0.25
"""Seconds to wait for an answer, or for a turn, even if the caller's time is over.

Otherwise no answer would count after a standstill of this process.
"""

SILENT = 2 / 3
"""The part of a lease after which a session that said nothing may soon be over.

The leader hears from a session late: it may count from an earlier moment than dblocks,
and not yet know what the session says now.
"""

MOST = 900_000
"""The most bytes of a transaction for several keys.

A server breaks the connection of a client that sends more than its ``jute.maxbuffer``,
one byte less than a megabyte by default.
"""


@dataclass(frozen=True)
class Address:
    """What a session is opened with; equal addresses share a session.

    Attributes:
        lease: The session's timeout, in seconds.
        options: Arguments of the client, as pairs.
    """

    alias: str
    hosts: str
    root: str
    lease: float
    options: tuple[tuple[str, Any], ...] = field(compare=False)
    options_key: str


class TakenPlaces(NamedTuple):
    """Places that were taken: names, contents of their folders, and the transaction."""

    names: list[str]
    places: list[list[str] | None]
    transaction: int

    def are_first(self) -> bool:
        """Tell whether each of them is the first in its folder."""
        return all(
            places is not None and places[:1] == [name]
            for name, places in zip(self.names, self.places, strict=True)
        )


class Connection:
    """A client of kazoo. Requests are given the local clock at which to give up."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.handler = Handler()
        self._negotiated: float | None = None
        self._is_opened = False
        #: Local clock before the latest sign of life that the servers rely on.
        self._heard_at = 0.0
        self._connected_at = 0.0
        options = dict(address.options)
        options.setdefault(
            "connection_retry",
            {"max_tries": -1, "delay": 0.02, "backoff": 2, "max_delay": 1.0},
        )
        self.client = self._client(options)
        self._share_time()
        self._heed_negotiation()

    # Opening and closing

    def _client(self, options: dict[str, Any]) -> KazooClient:
        hosts, lease = self.address.hosts, self.address.lease
        try:
            return KazooClient(
                hosts=hosts, timeout=lease, handler=self.handler, **options
            )
        except (TypeError, ValueError) as error:
            raise ImproperlyConfigured(
                f"DBLOCKS[{self.address.alias!r}]: OPTIONS that kazoo doesn't take: "
                f"{', '.join(dict(self.address.options))}: {error}"
            ) from error

    def _share_time(self) -> None:
        """Leave time for the other servers when one of them is tried."""
        connection = self.client._connection
        expand = connection._expand_client_hosts

        def share() -> Any:
            found = expand()
            self.handler.try_within = CONNECT_WITHIN / max(1, min(TRIES, len(found)))
            return found

        connection._expand_client_hosts = share

    def _heed_negotiation(self) -> None:
        """Note the timeout that the server gives each new or resumed session."""
        # kazoo doesn't publish the timeout, and would wait for a server for as long.
        connection = self.client._connection
        invoke = connection._invoke

        def heed(timeout: float, request: Any, xid: int | None = None) -> Any:
            sent = clock.monotonic()
            answer = invoke(min(timeout, self.handler.try_within), request, xid)
            if xid is None and answer[0].time_out > 0:
                self._negotiated = answer[0].time_out / 1000
                self._heard_at = self._connected_at = sent
            return answer

        connection._invoke = heed

    def open(self) -> None:
        """Connect.

        Raises:
            KazooException: No server answers, or it refuses the credentials.
            ImproperlyConfigured: The server gives no sessions of this timeout.
        """
        client = self.client
        try:
            client.start_async().wait(CONNECT_WITHIN)
            if not client.connected:
                raise self._unreachable()
            self.check()
            self._make_root()
            self._is_opened = True
        except BaseException:
            self.close()
            raise

    def _make_root(self) -> None:
        """Make the path above the folders, unless it exists."""
        sent = self.client.ensure_path_async(self.address.root)
        self.wait(sent, clock.monotonic() + CONNECT_WITHIN)

    def _unreachable(self) -> KazooException:
        where = f"DBLOCKS[{self.address.alias!r}]"
        if self.client.client_state == KeeperState.AUTH_FAILED:
            return AuthFailedError(
                f"ZooKeeper at {self.address.hosts} refuses the credentials: check "
                f"auth_data and sasl_options in {where}['OPTIONS']."
            )
        return ConnectionLoss(
            f"ZooKeeper at {self.address.hosts} did not answer within "
            f"{CONNECT_WITHIN:g} s: check that it is running, and the LOCATION and, "
            f"for TLS or SASL, the OPTIONS of {where}."
        )

    def check(self) -> None:
        """Raise unless the session's timeout is the one that was asked for."""
        asked = int(self.address.lease * 1000) / 1000
        if self._negotiated == asked:
            return
        raise ImproperlyConfigured(
            f"DBLOCKS[{self.address.alias!r}]: LEASE is {asked:g} s, but ZooKeeper at "
            f"{self.address.hosts} gave a session of {self._negotiated} s, and a lease "
            f"is as long as the session's timeout. Set LEASE to a value that the "
            f"server allows, from 2 to 20 times its tickTime by default, or set "
            f"minSessionTimeout and maxSessionTimeout there."
        )

    def was_silent(self) -> bool:
        """Tell whether the session has been silent for so long that it may be over.

        If so, break the connection. A server of an ensemble might answer on it while
        the leader, which hears of that later, ends the session. To resume the session
        on a new connection, the leader is asked.
        """
        silent = clock.monotonic() - self._heard_at > SILENT * self.address.lease
        if silent and self.client.connected:
            # Again, if kazoo hasn't noticed: only a new connection ends the silence.
            self.handler.hang_up()
        return silent

    def is_over(self) -> bool:
        """Tell whether this client never connects again."""
        return self.client.client_state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED)

    def close(self) -> None:
        """End the session and all that it holds."""
        # A session that was never used ends by itself; don't wait for a silent server.
        self.handler.breaks_off = not (self._is_opened and self.client.connected)
        with suppress(*ERRORS):
            self.client.stop()
        self.client.close()

    @property
    def id(self) -> int:
        """The server's id of the session, connected or not; 0 if there is none."""
        # kazoo publishes it only while it is connected.
        return int(self.client._session_id or 0)

    # Requests

    def folder(self, key: str) -> str:
        """Return the path of a key's folder."""
        return f"{self.address.root}/{nodes.escaped(key)}"

    def wait(self, result: Any, give_up: float) -> Any:
        """Return the answer to a request, for which this waits a moment in any case.

        Raises:
            KazooException: There was no answer in time, or it is an error.
        """
        seconds = max(LEAST, give_up - clock.monotonic())
        try:
            if not result.wait(WAKE_AFTER):
                self._wake()
            return result.get(timeout=seconds - WAKE_AFTER)
        except (KazooTimeoutError, ConnectionLoss):
            # kazoo's own errors have no text.
            raise self.silence() from None
        except NoAuthError:
            raise self._no_access(NoAuthError) from None

    def wait_for_node(self, result: Any, give_up: float) -> Any:
        """:meth:`wait` for an answer about a node; ``None`` if that is gone."""
        try:
            return self.wait(result, give_up)
        except NoNodeError:
            return None

    def _wake(self) -> None:
        """Have kazoo's thread look for requests that it doesn't know of.

        It sends one request for each byte in a pipe. A caller that was interrupted may
        have queued a request but written no byte: the next caller's byte sends that
        request, and the next caller's own would wait.
        """
        with suppress(AttributeError, OSError):
            if self.client._queue:
                self.client._connection._write_sock.send(b"\0")

    def silence(self) -> ConnectionLoss:
        return ConnectionLoss(
            f"ZooKeeper at {self.address.hosts} did not answer in time."
        )

    def _no_access(self, kind: type[KazooException]) -> KazooException:
        return kind(
            f"ZooKeeper refuses access below {self.address.root}: check auth_data and "
            f"default_acl in DBLOCKS[{self.address.alias!r}]['OPTIONS'], and the "
            f"node's ACL."
        )

    def children(
        self, folders: Iterable[str], give_up: float, watch: Any = None
    ) -> list[list[str] | None]:
        """Return the places in some folders, in order; ``None`` without the folder."""
        sent = [self.client.get_children_async(path, watch) for path in folders]
        return [self._places(each, give_up) for each in sent]

    def _places(self, result: Any, give_up: float) -> list[str] | None:
        names = self.wait_for_node(result, give_up)
        return None if names is None else nodes.in_order(names)

    def contents(
        self, paths: Sequence[str], give_up: float
    ) -> list[tuple[nodes.Content, Any] | None]:
        """Return the content and stat of some nodes; ``None`` for those gone."""
        sent = [self.client.get_async(path) for path in paths]
        found = [self.wait_for_node(each, give_up) for each in sent]
        return [
            None if node is None else (nodes.Content.read(node[0]), node[1])
            for node in found
        ]

    def stats(self, paths: Sequence[str], give_up: float) -> list[Any]:
        """Return the stats of nodes as the leader has them; ``None`` for those gone.

        If they exist, the session was alive when this was asked.
        """
        # A server that has lost its leader would go on answering by itself.
        synced = self.client.sync_async(self.address.root)
        sent = [self.client.exists_async(path) for path in paths]
        self.wait(synced, give_up)
        return [self.wait(each, give_up) for each in sent]

    def take(
        self, folders: Mapping[str, bool], mark: str, content: bytes, give_up: float
    ) -> TakenPlaces | None:
        """Take the last place in some folders, in all or in none.

        Args:
            folders: Whether each must be made first.
            mark: By which the places can be found.

        Returns:
            ``None`` if a folder has come or gone, so look again; or if the request is
            too long, so ask for fewer.
        """
        transaction = self.client.transaction()
        for folder, is_missing in folders.items():
            if is_missing:
                transaction.create(folder)
            path = f"{folder}/{mark}-"
            transaction.create(path, content, ephemeral=True, sequence=True)
        # Only this result has the transaction's id.
        transaction.set_data(next(iter(folders)), b"")
        if len(folders) > 1 and _size(transaction) > MOST:
            return None
        sent = transaction.commit_async()
        listed = [self.client.get_children_async(folder) for folder in folders]
        results = self.wait(sent, give_up)
        refusal = _refusal(results)
        if refusal is not None:
            self._heed(refusal, any(folders.values()))
            return None
        made = [path for path in results if isinstance(path, str)]
        names = [path.rpartition("/")[2] for path in made if path not in folders]
        places = [self._places(each, give_up) for each in listed]
        return TakenPlaces(names, places, results[-1].mzxid)

    def _heed(self, refusal: Exception, is_missing: bool) -> None:
        """Raise unless a transaction was refused because a folder has come or gone.

        Args:
            is_missing: Whether it was to make a folder.
        """
        if isinstance(refusal, (NoAuthError, InvalidACLError)):
            raise self._no_access(type(refusal))
        if not isinstance(refusal, (NodeExistsError, NoNodeError)):
            raise refusal
        if isinstance(refusal, NoNodeError) and is_missing:
            # Somebody has deleted the path above, too.
            self._make_root()

    def remove(self, paths: Sequence[str], give_up: float) -> list[bool]:
        """Delete places; tell which of them existed."""
        sent = [self.client.delete_async(path) for path in paths]
        found = [bool(self.wait_for_node(each, give_up)) for each in sent]
        # The folder goes last, so that whoever watches the place hears of that first.
        # This fails if somebody else has a place.
        for path in paths:
            self.client.delete_async(path.rpartition("/")[0])
        return found

    def write(
        self, path: str, content: bytes, give_up: float, version: int = -1
    ) -> Any:
        """Write into a node, by default whatever its version is.

        Returns:
            The node's stat; ``None`` if it is gone, or has another version.
        """
        try:
            sent = self.client.set_async(path, content, version)
            return self.wait(sent, give_up)
        except (NoNodeError, BadVersionError):
            return None

    def now(self, path: str, give_up: float) -> int | None:
        """Return the server's clock, in milliseconds, which only a write tells.

        ``None`` if the place's folder is gone, and the place with it.
        """
        stat = self.write(path.rpartition("/")[0], b"", give_up)
        return None if stat is None else int(stat.mtime)


def _size(transaction: Any) -> int:
    """Return the size of a transaction as a request, in bytes."""
    return len(Transaction(transaction.operations).serialize())


def _refusal(results: Iterable[Any]) -> Exception | None:
    """Return why a transaction was refused, if it was."""
    # The other steps have failed because one has.
    others = (RolledBackError, RuntimeInconsistency)
    found = (
        x for x in results if isinstance(x, Exception) and not isinstance(x, others)
    )
    return next(found, None)
