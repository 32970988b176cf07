"""How locks are laid out in ZooKeeper's tree: names, order and content of nodes.

A key has a folder for as long as somebody has the key or waits for it. Each of them has
a *place* in it: an ephemeral sequential node. The lowest place holds the key, the
others wait. A permit is a key with a folder of its own; whoever waits for any permit of
a lock has a place in another folder, the lock's queue. A place's name tells for how
many permits it is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote, unquote, urlsplit

from ...permits import SEPARATOR
from ..values import Request

_PLACE = re.compile(r"[0-9a-f]{28}([0-9a-f]{4})-(-?[0-9]{10,})")

WRAP = 2**32
"""ZooKeeper counts the nodes of a folder with a signed number of 32 bits."""


def escaped(key: str) -> str:
    """Return the name of a key's folder, which no other key has.

    ZooKeeper refuses some characters in names, and ``.`` and ``..`` altogether.
    """
    name = quote(key, safe="")
    return name if name.strip(".") else name.replace(".", "%2E")


def unescaped(name: str) -> str:
    """Return the key that a folder is named for."""
    return unquote(name)


def queue_key(key: str, permits: int) -> str:
    """Return the key for which the folder of the queue is named."""
    return key if permits == 1 else key + SEPARATOR


def is_queue(key: str) -> bool:
    """Tell whether a folder is the queue for permits."""
    return key.endswith(SEPARATOR)


def new_mark(permits: int) -> str:
    """Return a mark for a request: random, with the number of permits at its end.

    Callers may disagree about that number, and all wait in one queue.
    """
    return f"{os.urandom(14).hex()}{permits:04x}"


def permits_of(place: str) -> int:
    """Return how many permits, counted from the first, a place is for."""
    match = _PLACE.fullmatch(place)
    return int(match[1], 16) if match else 0


def claimed(places: Iterable[str]) -> int:
    """Return how many permits, counted from the first, these places wait for."""
    return max(map(permits_of, places), default=0)


def before(place: str, places: Sequence[str]) -> Sequence[str]:
    """Return the places before ``place``; all of them if it isn't there."""
    return places[: places.index(place)] if place in places else places


def is_of(place: str, mark: str) -> bool:
    """Tell whether a place was made under this mark."""
    return place.startswith(f"{mark}-")


def in_order(names: Iterable[str]) -> list[str]:
    """Return the places of a folder in the order in which they were made."""
    found = [
        (int(match[2]), match[0]) for match in map(_PLACE.fullmatch, names) if match
    ]
    if not found:
        return []
    # Places that exist at the same time have near numbers, even across an overflow.
    origin = found[0][0]
    half = WRAP // 2
    return [
        name
        for _, name in sorted(found, key=lambda each: (each[0] - origin + half) % WRAP)
    ]


class Content(NamedTuple):
    """Who has a place: the owner, and its description and note for people.

    Attributes:
        waits: The place waits for a key that is not its own yet.
        since: When the key was granted, in milliseconds of the server's clock, if the
            node was written again because the holder is asked to finish.
    """

    owner: str = ""
    holder: str = ""
    note: str = ""
    waits: bool = False
    since: int = 0

    @classmethod
    def of(cls, request: Request, *, waits: bool = False) -> Content:
        """Return the content of the place for a request."""
        return cls(request.owner, request.holder, request.note, waits)

    def written(self) -> bytes:
        return json.dumps(self._asdict()).encode()

    @classmethod
    def read(cls, data: bytes) -> Content:
        """Return the content of a node, as far as a foreign node has any."""
        try:
            found = json.loads(data)
        except ValueError:
            return cls()
        if not isinstance(found, dict):
            return cls()
        since = found.get("since")
        owner, holder, note = (str(found.get(x, "")) for x in cls._fields[:3])
        return cls(
            owner,
            holder,
            note,
            waits=found.get("waits") is True,
            since=since if isinstance(since, int) else 0,
        )


def hosts(location: object) -> str:
    """Return a setting ``LOCATION`` as kazoo takes it.

    Raises:
        ValueError: It names no servers.
    """
    given = location.split(",") if isinstance(location, str) else location
    if not isinstance(given, Sequence) or not all(isinstance(x, str) for x in given):
        raise ValueError(f"LOCATION must be a str or a list of str, not {location!r}")
    names = [name.strip() for name in given]
    if not names or not all(names):
        raise ValueError(
            f"LOCATION must name servers, such as 'zk1:2181,zk2:2181', not {location!r}"
        )
    if any("/" in name for name in names):
        raise ValueError(
            f"LOCATION must name servers alone, not {location!r}: a path is for "
            f"KEY_PREFIX"
        )
    for name in names:
        if not _is_server(name):
            raise ValueError(
                f"LOCATION must name hosts, with ports from 1 to 65535, such as "
                f"'zk1:2181,[::1]:2181', not {name!r}"
            )
    return ",".join(names)


def _is_server(name: str) -> bool:
    if "@" in name or " " in name:
        return False
    try:
        parts = urlsplit(f"//{name}")
        plain = name.isprintable() and parts.netloc == name
        return plain and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def root(prefix: object) -> str:
    """Return a setting ``KEY_PREFIX`` as a path.

    Raises:
        ValueError: It is no path that nodes can have.
    """
    if not isinstance(prefix, str):
        raise ValueError(f"KEY_PREFIX must be a str, not {prefix!r}")
    parts = prefix.strip("/").split("/")
    if not all(re.fullmatch(r"[\w.+:@=-]+", x) and x.strip(".") for x in parts):
        raise ValueError(
            f"KEY_PREFIX must be a path such as 'dblocks' or 'shop/dblocks', "
            f"not {prefix!r}"
        )
    return "/" + "/".join(parts)
