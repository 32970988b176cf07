"""Sends commands to the Redis server that ``LOCATION`` and ``OPTIONS`` name."""

from __future__ import annotations

import os
import random
import re
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from django.core.exceptions import ImproperlyConfigured
from redis import ConnectionPool, sentinel
from redis.backoff import NoBackoff
from redis.connection import parse_url
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    MaxConnectionsError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)
from redis.retry import Retry

from ... import clock
from .prelude import Script

TIMEOUTS = ("socket_timeout", "socket_connect_timeout")
"""The options that say how long a server may take to answer."""

SOCKET_TIMEOUT = 5.0
"""Seconds after which a server that doesn't answer is out of reach, by default."""

PATIENCE = 1.0
"""Seconds for which faults that pass are sat out; longer where the caller waits."""

KEPT_IDLE = 64
"""How many idle connections are kept, at most, for the next commands."""

LASTING = (AuthenticationError, AuthorizationError, MaxConnectionsError)
"""Faults that don't pass, although redis-py counts them as connection errors."""

UNREACHABLE = (ConnectionError, TimeoutError)

_TRANSIENT = (*UNREACHABLE, ReadOnlyError, TryAgainError, ClusterDownError)

_MEANINGS: dict[str, type[ResponseError]] = {
    # Somebody else's script is running.
    "BUSY": TryAgainError,
    # Replicas are away.
    "NOREPLICAS": TryAgainError,
    "OOM": OutOfMemoryError,
    "READONLY": ReadOnlyError,
    # A waiter is sent away: its server is no longer a primary.
    "UNBLOCKED": TryAgainError,
}
"""The classes of errors for which redis-py has none, at least if a script met them.

Before Redis 7, the text of such an error has the script's line before the code.
"""

_CODE = re.compile(rf"(?:^|: -)({'|'.join(_MEANINGS)}) ")

_SAID_BY_SENTINELS = re.compile(r"> - (?:\w+:)?(\w+)")
"""The class of each Sentinel's error, in redis-py's text."""

_SENTINELS = "see the options sentinels and sentinel_kwargs: a Sentinel's error was"

Argument = str | int | float

Part = tuple[Sequence[str], Sequence[Argument]]
"""One lock's share of the keys and arguments of a script."""


def meant(error: ResponseError) -> ResponseError:
    """Return the error, in the class that its code stands for."""
    code = _CODE.search(str(error))
    return _MEANINGS[code[1]](str(error)) if code else error


def may_pass(error: BaseException) -> bool:
    """Tell whether a fault is worth another attempt."""
    return isinstance(error, _TRANSIENT) and not isinstance(error, LASTING)


class Client:
    """Sends commands to one server, from any thread.

    Args:
        alias: The backend's, for messages.
        location: ``redis://``, ``rediss://`` or ``unix://``; with the option
            ``sentinels`` the host is the name of the service.
        options: ``sentinels`` (host and port of each), ``sentinel_kwargs``; the others
            are for redis-py's connections.
        patience: For how many seconds, at least, faults that may pass are sat out.
    """

    def __init__(
        self,
        alias: str,
        location: str,
        options: Mapping[str, Any],
        patience: float = PATIENCE,
    ) -> None:
        self.alias = alias
        self._patience = patience
        self._pid = os.getpid()
        self._idle: deque[Any] = deque()
        #: Where the latest connection leads; with Sentinel, to the service's master.
        self._leads_to: tuple[Any, ...] = ()
        #: Local clock before that connection was made.
        self._asked_at = 0.0
        #: The server's name without user and password.
        self.name = _name(alias, location)
        try:
            self._pool = _pool(location, dict(options))
            # Made only to have unknown options refused here, not at the first use.
            self._pool.connection_class(**self._pool.connection_kwargs)
        except (ArithmeticError, TypeError, ValueError, RedisError) as error:
            raise ImproperlyConfigured(
                f"DBLOCKS[{alias!r}]: LOCATION {self.name!r} or its OPTIONS: {error}"
            ) from error
        timeouts = [self._pool.connection_kwargs[name] for name in TIMEOUTS]
        #: The longest that each step of an answer may take; ``None`` without a limit.
        self.step = None if None in timeouts else max(timeouts)
        # Connections are in cycles: the garbage collector would warn of their sockets.
        weakref.finalize(self, _close_all, self._idle, self._pool).atexit = False

    def send(
        self,
        *command: Argument,
        answers_within: float | None = None,
        asking: bool = False,
    ) -> Any:
        """Send one command, once.

        Args:
            answers_within: Seconds that the answer may take, if more than usual.
            asking: The command is about a slot that is still moving to this server.

        Raises:
            RedisError: As redis-py raises it; if the server is out of reach, with its
                name.
        """
        try:
            return self._send(command, answers_within, asking)
        except (ConnectionError, TimeoutError) as error:
            kind = type(error)
            # Sentinel's text goes on with how it was asked: long, and not for all eyes.
            text, _, rest = str(error).partition(" : ")
            said = set(_SAID_BY_SENTINELS.findall(rest))
            if said == {AuthenticationError.__name__}:
                kind = AuthenticationError
            hint = f"; {_SENTINELS} {', '.join(sorted(said))}" if said else ""
            raise kind(
                f"{text} (DBLOCKS[{self.alias!r}]: {self.name} should be a Redis "
                f"server that can be reached from here{hint})"
            ) from error

    def _send(
        self,
        command: Sequence[Argument],
        answers_within: float | None,
        asking: bool,
    ) -> Any:
        connection = self._take()
        try:
            if asking:
                connection.send_packed_command([packed(["ASKING"])])
                connection.read_response()
            connection.send_packed_command([packed(command)])
            if answers_within is not None and not connection.can_read(answers_within):
                raise TimeoutError("no answer")
            answer = connection.read_response()
        except ResponseError as error:
            error = meant(error)
            if isinstance(error, ReadOnlyError):
                # The server isn't the primary any more; its name may lead to the new
                # one.
                connection.disconnect()
                self.close()
            else:
                self._give_back(connection)
            raise error from None
        except BaseException as error:
            # An answer that comes later must not be taken for another command's.
            connection.disconnect()
            if isinstance(error, ConnectionError | TimeoutError) and not answers_within:
                # Idle connections may be broken as well, or lead to a former master.
                self.close()
            raise
        self._give_back(connection)
        return answer

    def _take(self) -> Any:
        """Return a connection that nobody else uses."""
        if self._pid != os.getpid():
            # A forked child closes its copies; the parent's connections go on. The pid
            # is noted last, or another thread could use a copy that isn't closed yet.
            self.close()
            self._pid = os.getpid()
        try:
            return self._idle.pop()
        except IndexError:
            connection: Any = self._pool.make_connection()
            asked_at = clock.monotonic()
            try:
                connection.connect()
                self._meet(connection)
                is_news = self._heed(connection, asked_at)
            except Exception as error:
                connection.disconnect()
                # A frame of redis-py and its error keep each other, and with them the
                # leases of all callers, until the garbage collector comes.
                cause = error.__context__
                while cause is not None:
                    cause.__traceback__, cause = None, cause.__context__
                if isinstance(error, ResponseError):
                    # A busy server refuses to choose a database.
                    raise meant(error) from None
                if isinstance(error, TypeError | ValueError):
                    raise RedisError(
                        f"DBLOCKS[{self.alias!r}]: LOCATION {self.name!r} or its "
                        f"OPTIONS can't be used: {error}"
                    ) from None
                raise
            if is_news:
                return connection
            connection.disconnect()
            return self._take()

    def _heed(self, connection: Any, asked_at: float) -> bool:
        """Leave a former master, which may not know yet that there is a new one.

        Return ``False`` if this connection itself may lead to a former master: a newer
        one leads elsewhere.
        """
        address = _leads_to(connection)
        if address != self._leads_to:
            if asked_at < self._asked_at:
                return False
            self._leads_to = address
            self.close()
        self._asked_at = max(asked_at, self._asked_at)
        return True

    def _give_back(self, connection: Any) -> None:
        is_useful = self._pid == os.getpid() and _leads_to(connection) == self._leads_to
        if len(self._idle) < KEPT_IDLE and is_useful:
            self._idle.append(connection)
        else:
            connection.disconnect()

    def run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument] = (),
        *,
        patience: float = 0.0,
        is_patient: bool = True,
    ) -> Any:
        """Run a script, again where a fault may pass.

        Args:
            patience: For how many seconds faults may be sat out, if that is longer
                than the client's own.
            is_patient: Whether they may be sat out at all.
        """
        longest = max(patience, self._patience) if is_patient else 0.0
        give_up = clock.monotonic() + longest
        pause = 0.0
        while True:
            try:
                return self._run(script, keys, arguments)
            except RedisError as error:
                if not may_pass(error):
                    raise
                left = give_up - clock.monotonic()
                # The first error may be a dropped idle connection's: it tells nothing.
                # Without a master there was no such connection.
                is_news = pause > 0 or not isinstance(error, ConnectionError)
                is_news = is_news or isinstance(error, sentinel.MasterNotFoundError)
                if left <= 0 and is_news:
                    raise
            time.sleep(max(0.0, min(left, random.uniform(0.5, 1.5) * pause)))
            pause = min(0.25, 2 * pause or 0.01)

    def _run(
        self,
        script: Script,
        keys: Sequence[str],
        arguments: Sequence[Argument],
        asking: bool = False,
    ) -> Any:
        rest = (len(keys), *keys, *arguments)
        try:
            return self.send("EVALSHA", script.digest, *rest, asking=asking)
        except NoScriptError:
            return self.send("EVAL", script.text, *rest, asking=asking)

    def run_all(
        self,
        script: Script,
        head: Sequence[Argument],
        parts: Sequence[Part],
        *,
        patience: float = 0.0,
        others_within: float | None = None,
    ) -> Sequence[Any]:
        """Run a script for several locks; return its answer for each.

        Args:
            head: Arguments that come before those of the locks.
            others_within: In a cluster, ask for each lock by itself, and be content if
                some nodes answer, and others don't in so many seconds; the answers
                that are missing are ``None``.
        """
        if len(parts) == 1:
            ((names, rest),) = parts
        else:
            names = [name for each, _ in parts for name in each]
            rest = [argument for _, each in parts for argument in each]
        arguments = (*head, *rest)
        found: Sequence[Any] = self.run(script, names, arguments, patience=patience)
        return found

    # What differs in a cluster

    def _meet(self, connection: Any) -> None:
        """Learn what the server is, on a new connection."""

    def at(self, name: str) -> Client:
        """Return the client of the server that has a key."""
        return self

    def masters(self) -> Sequence[Client]:
        """Return the clients of all servers that have keys."""
        return [self]

    def close(self) -> None:
        """Close the connections that nobody uses."""
        _close(self._idle)


def _leads_to(connection: Any) -> tuple[Any, ...]:
    # A Unix socket has neither; with Sentinel, they are the master's.
    return getattr(connection, "host", None), getattr(connection, "port", None)


def _close(connections: deque[Any]) -> None:
    with suppress(IndexError):
        while True:
            connections.pop().disconnect()


def _close_all(connections: deque[Any], pool: Any) -> None:
    _close(connections)
    manager = getattr(pool, "sentinel_manager", None)
    for watch in manager.sentinels if manager else ():
        watch.connection_pool.disconnect()


def _name(alias: str, location: str) -> str:
    try:
        url = urlsplit(location)
        is_clear = "@" not in url.path + url.query + url.fragment and url.port != 0
    except ValueError:
        is_clear = False
    if not is_clear:
        # Not shown: the part that can't be read may belong to the password.
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: LOCATION is not the URL of a Redis server. In its "
            f"user and password, special characters must be percent-encoded."
        )
    if "://" not in location:
        return location.partition("?")[0]
    name = f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"
    database = url.path.strip("/")
    if url.scheme in {"redis", "rediss"} and not re.fullmatch("[0-9]*", database):
        # redis-py would take the database 0.
        raise ImproperlyConfigured(
            f"DBLOCKS[{alias!r}]: LOCATION {name!r} must end with the number of a "
            f"database, such as '/0', or with the server; KEY_PREFIX keeps locks apart."
        )
    return name


def _pool(location: str, options: dict[str, Any]) -> ConnectionPool:
    timeouts = dict.fromkeys(TIMEOUTS, SOCKET_TIMEOUT)
    sentinels = options.pop("sentinels", None)
    sentinel_options = options.pop("sentinel_kwargs", {})
    # redis-py has no types here.
    parse: Any = parse_url
    chosen = {**options, **parse(location)}
    fixed = {
        # Only dblocks knows which commands may be sent again, and for how long.
        "retry": Retry(NoBackoff(), 0),
        "decode_responses": False,
        # No limit: as many as there are threads that ask.
        "max_connections": 2**31,
    }
    if refused := sorted(fixed.keys() & chosen.keys()):
        raise ValueError(f"{', '.join(refused)} can't be set")
    settings = {**timeouts, **chosen, **fixed}
    for name in timeouts:
        if not isinstance(settings[name], int | float | None):
            raise TypeError(
                f"{name} must be a number of seconds, not {settings[name]!r}"
            )
    if "path" not in settings:
        # Not for a Unix socket, which has no keepalive.
        settings.setdefault("socket_keepalive", True)
    if sentinels is None:
        return ConnectionPool(**settings)
    if settings.pop("connection_class", None) is not None:
        settings["ssl"] = True
    watch: Any = sentinel
    # They are asked one after the other, until one answers.
    shares = {x: (settings[x] or 0) / max(1, len(sentinels)) or None for x in timeouts}
    of_sentinels = {**shares, "retry": fixed["retry"], **sentinel_options}
    watch = watch.Sentinel(sentinels, sentinel_kwargs=of_sentinels)
    master = watch.master_for(settings.pop("host", ""), **settings)
    pool: ConnectionPool = master.connection_pool
    return pool


def packed(command: Sequence[Argument]) -> bytes:
    """Return a command as it is sent."""
    parts = [
        f"${len(part if part.isascii() else part.encode())}\r\n{part}\r\n"
        for part in map(str, command)
    ]
    return f"*{len(command)}\r\n{''.join(parts)}".encode()
