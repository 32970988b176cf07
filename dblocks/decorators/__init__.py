"""The decorator form of the locks: on functions, methods, tasks and views."""

from __future__ import annotations

from .decoratable import is_bare
from .functions import decorate, decorate_with_row

__all__ = ["decorate", "decorate_with_row", "is_bare"]
