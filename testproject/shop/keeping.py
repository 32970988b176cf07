"""What keeps the locks, and what the demo can and can't show there."""

from __future__ import annotations

from django.conf import settings
from django.core.exceptions import ImproperlyConfigured

from dblocks.backends.base import BaseBackend
from dblocks.conf import backends

LEASE = 2.0
"""Seconds for which the demo's holders that are killed or paused had their locks."""


def engine() -> BaseBackend:
    return backends["default"]


def name() -> str:
    """What people call it, if it isn't the database."""
    if engine().system == "zookeeper":
        return "ZooKeeper"
    return "Redis" if engine().has_fencing_tokens else "Redlock"


def place() -> str:
    """Say where the locks are, after a comma; nothing if they are in the database."""
    if engine().has_table:
        return ""
    if engine().has_fencing_tokens:
        return f", with locks in {name()}"
    return f", with locks on {len(settings.LOCKS_URLS)} servers of Redis (Redlock)"


def errors() -> tuple[type[Exception], ...]:
    """What is raised when it can't be used and isn't the database."""
    if engine().has_table:
        return ()
    return (*engine().errors, ImproperlyConfigured)


def lease() -> float:
    """The lease of holders that are killed or paused, as short as can be shown."""
    return LEASE if engine().has_own_leases else engine().lease


def left_at_death(retry_after: float) -> tuple[float, float]:
    """The least and the most seconds for which a killed holder still has its lock.

    Args:
        retry_after: What the engine says.
    """
    if engine().has_own_leases:
        return retry_after, retry_after
    # ZooKeeper keeps to itself when it has last heard of a session. It ends sessions at
    # its ticks, of which the shortest session has two.
    return 0.0, 1.5 * lease()


def of_killed_holder(least: float) -> str:
    """Say how long its lock is still its own."""
    if engine().has_own_leases:
        return f"{least:.2f} s are left"
    return f"at most {lease():g} s and a tick are left"


def without_guard() -> str:
    """Say what stands in for the guard, and what isn't shown."""
    if engine().has_guard:
        return ""
    return (
        f"{name()} has no part in the database's transaction, so there is no guard. "
        f"Instead, atomic=True and check() look at the clock of the process, right "
        f"before the commit. objects.for_update() needs locks in the database, and "
        f"isn't shown."
    )


def of_late_pause() -> str:
    """Say what the demo's paused holder doesn't prove where there is no guard."""
    if engine().has_guard:
        return ""
    rest = (
        "A FencedModel would refuse that write by its fencing token."
        if engine().has_fencing_tokens
        else "Without fencing tokens, nothing would refuse that write."
    )
    return (
        f"check() noticed the pause because it came after it. A pause between check() "
        f"and the commit would go unnoticed, and Ada's order would be written. {rest}"
    )


def without_tokens() -> str:
    """Say why the tokens of two holders aren't compared."""
    return f"{name()} has no fencing tokens, so there are none to compare."
