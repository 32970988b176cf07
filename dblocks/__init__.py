"""Locks for Django, kept in the database that a project already runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .distributed_locks import distributed_lock
    from .exceptions import InvalidKey, LeaseLost, LockError, LockTimeout
    from .fencing import FencedModel
    from .keys import make_key
    from .leases import Lease, Leases, current_lease
    from .locks import Lock
    from .transaction_locks import TransactionLock, transaction_lock

__version__ = "0.1.0"

__all__ = [
    "FencedModel",
    "InvalidKey",
    "Lease",
    "LeaseLost",
    "Leases",
    "Lock",
    "LockError",
    "LockTimeout",
    "TransactionLock",
    "current_lease",
    "distributed_lock",
    "make_key",
    "transaction_lock",
]

_MODULES = {
    "FencedModel": "fencing",
    "Lease": "leases",
    "Leases": "leases",
    "Lock": "locks",
    "TransactionLock": "transaction_locks",
    "current_lease": "leases",
    "distributed_lock": "distributed_locks",
    "make_key": "keys",
    "transaction_lock": "transaction_locks",
}


def __getattr__(name: str) -> Any:
    # A model can be imported only once the apps are being loaded, and modules that
    # import this package must not find themselves imported by it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f".{_MODULES.get(name, 'exceptions')}", __name__)
    return globals().setdefault(name, getattr(module, name))
