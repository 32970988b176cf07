"""Locks in a table of the database that the project already runs."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import DatabaseBackend

__all__ = ["DatabaseBackend"]


def __getattr__(name: str) -> Any:
    # On first use only: the modules of this package import the package itself.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".backend", __name__), name)
