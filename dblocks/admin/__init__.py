"""The admin of locks: what is held, by whom, since when, and how to free it.

Nothing can be added, changed or deleted here. Force release, the only action, has its
own permission and a confirmation page, and releases only the grants shown there.
"""

from __future__ import annotations

from .page import DistributedLockAdmin

__all__ = ["DistributedLockAdmin"]
