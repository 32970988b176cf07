"""Functions to call when this process forks. On Windows no process does."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(function: Callable[[], object]) -> None:
    """Have this called in every child that this process forks."""
    # Windows, where processes don't fork, has no such function.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)


def around(before: Callable[[], object], in_parent: Callable[[], object]) -> None:
    """Have these called before this process forks, and afterwards in the parent."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=before, after_in_parent=in_parent)
