"""The decorator form of the locks."""

from __future__ import annotations

from typing import Any


def decorate(lock: Any, function: Any) -> Any:
    raise NotImplementedError
