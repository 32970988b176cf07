"""What a forked child must do first, on systems where processes fork."""

from __future__ import annotations

import os
from collections.abc import Callable


def in_child(function: Callable[[], object]) -> None:
    """Have this called in every child that this process forks."""
    # Windows, where processes don't fork, has no such function.
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=function)
