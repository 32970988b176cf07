"""Locks in ZooKeeper. Needs kazoo: ``pip install "django-dblocks[zookeeper]"``."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]


def __getattr__(name: str) -> Any:
    # The modules of this package import it, and must not be imported by it.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        import_module("kazoo")
    except ImportError as error:
        raise ImportError(
            f"{error}; the ZooKeeper engine needs the package kazoo: "
            f'pip install "django-dblocks[zookeeper]"'
        ) from error
    return getattr(import_module(".backend", __name__), name)
