"""What a fault is tried on: one key, several keys together, the permits of a key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from dblocks import distributed_lock
from dblocks.permits import row_key, row_keys

KINDS = "key", "set", "permits"

kinds = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Asked:
    """What is asked for: keys, and how many may have them at a time."""

    keys: tuple[str, ...]
    permits: int = 1

    @classmethod
    def of_kind(cls, kind: str, key: str) -> Asked:
        """Return one key, two, or one with two permits."""
        if kind == "set":
            return cls((f"{key}:2", f"{key}:1"))
        return cls((key,), permits=2 if kind == "permits" else 1)

    @property
    def told(self) -> dict[str, Any]:
        """What a program is told to lock."""
        key = self.keys[0] if len(self.keys) == 1 else list(self.keys)
        return (
            {"key": key} if self.permits == 1 else {"key": key, "permits": self.permits}
        )

    @property
    def rows(self) -> list[str]:
        """The keys of its rows in the table."""
        return [row for key in sorted(self.keys) for row in row_keys(key, self.permits)]

    @property
    def each(self) -> list[Asked]:
        """Return its keys, each by itself."""
        return [Asked((key,), self.permits) for key in sorted(self.keys)]

    def row_of(self, lease: Any) -> str:
        """Return the key of the row that a lease is of."""
        return row_key(lease.key, lease.permit if self.permits > 1 else None)

    def lock(self, **options: Any) -> Any:
        """Make the lock in this process."""
        return distributed_lock(*self.keys, permits=self.permits, **options)

    def hold(self, number: int = 1) -> Any:
        """Take it in this thread: as its owner for 0, else as another one."""
        owner = f"holder {number}" if number else None
        return self.lock(owner=owner).acquire(timeout=0)


def each(taken: Any) -> list[Any]:
    """Return the leases of what was taken: one, or those of several keys."""
    return list(taken.values()) if isinstance(taken, Mapping) else [taken]


def row_of(told: dict[str, Any]) -> str:
    """Return the key of the row that a grant is told of."""
    return row_key(told["key"], told["permit"] if told["permits"] > 1 else None)


def grants_in(told: Any) -> list[dict[str, Any]]:
    """Return the grants among what was told."""
    return [event for event in told if event["event"] == "grant"]
