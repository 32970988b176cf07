"""Locks in ZooKeeper."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import kazoo  # noqa: F401
except ImportError as error:
    raise ImportError(
        'ZooKeeperBackend needs kazoo: pip install "django-dblocks[zookeeper]"'
    ) from error

if TYPE_CHECKING:
    from .backend import ZooKeeperBackend

__all__ = ["ZooKeeperBackend"]


def __getattr__(name: str) -> Any:
    # On first use only: the modules of this package import the package itself.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".backend", __name__), name)
