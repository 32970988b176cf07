"""The admin of locks: what is held, by whom, since when, and how to free it."""

from __future__ import annotations

from .page import DistributedLockAdmin

__all__ = ["DistributedLockAdmin"]
