"""Batches of a few fixed sizes: many rows in few statements, with few texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

T = TypeVar("T")

RENEWED = 1, 16, 250
"""How many leases a statement renews."""

READ = *RENEWED, 1000
"""How many rows a statement reads."""


def divided(items: Sequence[T], sizes: Sequence[int]) -> Iterator[Sequence[T]]:
    """Divide items into batches of the largest size; the last one may have fewer."""
    for start in range(0, len(items), sizes[-1]):
        yield items[start : start + sizes[-1]]


def filled_up(batch: Sequence[T], sizes: Sequence[int]) -> list[T]:
    """Repeat the last item of a batch up to the next larger size."""
    size = next(size for size in sizes if size >= len(batch))
    return [*batch, *[batch[-1]] * (size - len(batch))]
