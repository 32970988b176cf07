"""Locks for Django, kept in the database that a project already runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import distributed_lock, transaction_lock
from .exceptions import InvalidKey, LeaseLost, LockError, LockTimeout
from .leases import Lease, current_lease
from .locks import Lock
from .pessimistic import TransactionLock

if TYPE_CHECKING:
    from .fencing import FencedModel

__version__ = "0.1.0"

__all__ = [
    "FencedModel",
    "InvalidKey",
    "Lease",
    "LeaseLost",
    "Lock",
    "LockError",
    "LockTimeout",
    "TransactionLock",
    "current_lease",
    "distributed_lock",
    "transaction_lock",
]


def __getattr__(name: str) -> Any:
    if name == "FencedModel":
        # A model can be imported only once the apps are being loaded.
        from .fencing import FencedModel

        return FencedModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
