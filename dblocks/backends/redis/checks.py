"""What a system check must say of a Redis server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from django.core.checks import CheckMessage
from redis.exceptions import RedisError

from ..messages import warning
from .client import Client


def findings(client: Client) -> Iterator[CheckMessage]:
    """Yield what puts locks on a server or a cluster at risk: W011 to W013."""
    try:
        servers = client.masters()
    except RedisError as error:
        yield _unreachable(client, error)
        return
    for server in servers:
        try:
            text = server.send("INFO").decode()
        except RedisError as error:
            yield _unreachable(server, error)
        else:
            lines = (line.partition(":") for line in text.splitlines())
            yield from _risks(server.name, {k: value for k, _, value in lines})


def _unreachable(client: Client, error: RedisError) -> CheckMessage:
    return warning(
        "W011",
        f"Redis at {client.name} can't be asked: {error}",
        "See that the server runs, and that LOCATION and its password are right.",
    )


def _risks(name: str, facts: Mapping[str, str]) -> Iterator[CheckMessage]:
    policy = facts.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        yield warning(
            "W012",
            f"Redis at {name} may evict locks: its maxmemory-policy is {policy}.",
            "Set maxmemory-policy noeviction, or give locks a server of their own.",
        )
    if facts.get("aof_enabled") == "0":
        yield warning(
            "W013",
            f"Redis at {name} forgets locks that are held when it restarts: it has no "
            f"append-only file.",
            "Set appendonly yes, and appendfsync always if no grant may be forgotten.",
        )
