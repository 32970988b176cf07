"""Where the test project keeps its locks, if not in its database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ZOOKEEPER = "zookeeper://"


def engine(urls: Sequence[str], *, session: float) -> dict[str, Any]:
    """Return the entry of ``DBLOCKS`` for an engine's URLs.

    Args:
        urls: ``zookeeper://`` before the first server, or each; else Redis's own.
        session: The timeout of ZooKeeper's sessions, in seconds, and so the lease of
            all locks there.
    """
    if urls[0].startswith(ZOOKEEPER):
        return {
            "BACKEND": "dblocks.backends.zookeeper.ZooKeeperBackend",
            "LOCATION": [url.removeprefix(ZOOKEEPER) for url in urls],
            "KEY_PREFIX": "dblocks-shop",
            "LEASE": session,
        }
    return {
        "BACKEND": "dblocks.backends.redis.RedisBackend",
        "LOCATION": list(urls),
        "KEY_PREFIX": "dblocks-shop:",
    }
