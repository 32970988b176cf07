"""Locks in Redis: on one server, with Sentinel, in a cluster, or on most of several."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import redis  # noqa: F401
except ImportError as error:
    raise ImportError(
        'RedisBackend needs redis-py: pip install "django-dblocks[redis]"'
    ) from error

if TYPE_CHECKING:
    from .backend import RedisBackend

__all__ = ["RedisBackend"]


def __getattr__(name: str) -> Any:
    # On first use only: the modules of this package import the package itself.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".backend", __name__), name)
