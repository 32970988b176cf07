"""What the shop's locks look like from outside: who is at work is nobody's business."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

from dblocks.models import DistributedLock, State

from .models import Product
from .selling import stock_lock

EXPORTS = 2
"""How many exports may be at work at a time."""

EXPORT_LOCK = "shop:export"
"""The key of which there are so many permits."""

LEADER_LOCK = "shop:leader"
"""The key of whoever leads."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A lock as it was a moment ago, by the database's clock."""

    key: str
    #: Which of the lock's permits, if it has any.
    permit: int | None = None
    state: State = State.FREE
    #: When it was taken, if it is.
    since: datetime | None = None
    #: Seconds until it is free, unless its holder renews it.
    remaining: float = 0.0

    @property
    def taken(self) -> bool:
        return self.state in {State.HELD, State.COOLING}


@dataclass(frozen=True, slots=True)
class Line:
    """A lock, and what it is about."""

    lock: Seen
    title: str
    product: Product | None = None


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, by the name that it has given itself."""

    name: str
    term: int
    since: datetime
    #: Since when it is asked to hand over, if it is.
    asked: datetime | None


def leader() -> Leader | None:
    """Look who leads, if anybody does."""
    row = DistributedLock.objects.held().filter(key=LEADER_LOCK).first()
    if row is None:
        return None
    return Leader(row.note, row.version, row.acquired_at, row.release_requested_at)


def seen(key: str) -> Seen:
    """Look at one lock; one that was never taken has no row and is free."""
    return _all([key]).get(key, Seen(key))


def _all(keys: list[str] | None = None) -> dict[str, Seen]:
    rows = DistributedLock.objects.filter(key__startswith="shop:").with_state()
    if keys is not None:
        rows = rows.filter(key__in=keys)
    found = {}
    for row in rows:
        lock = Seen(row.lock_key, row.permit, State(row.state))
        if lock.taken:
            remaining = max(0.0, row.remaining)
            lock = replace(lock, since=row.acquired_at, remaining=remaining)
        found[row.key] = lock
    return found


def payment_lock(order_id: int) -> str:
    """The key that lets an order be paid once at a time."""
    return f"shop:order:{order_id}"


def van_lock(product_id: int) -> str:
    """The key that lets a product be restocked once in a while."""
    return f"shop:van:{product_id}"


def export_locks() -> list[Line]:
    """Return a line for each permit to export."""
    found = {lock.permit: lock for lock in _all().values() if lock.key == EXPORT_LOCK}
    return [
        Line(found.get(permit, Seen(EXPORT_LOCK, permit)), f"Export {permit + 1}")
        for permit in range(EXPORTS)
    ]


def product_locks(*, whole: bool = False) -> list[Line]:
    """Return a line for each product's stock.

    Args:
        whole: Also whatever else is taken: payments, vans and exports.
    """
    found = _all()
    lines = []
    for product in Product.objects.order_by("pk"):
        key = stock_lock(product.pk)
        lines.append(Line(found.pop(key, Seen(key)), product.name, product))
        van = found.pop(van_lock(product.pk), None)
        if whole and van is not None:
            lines.append(Line(van, f"The van with {product.name}"))
    if whole:
        lines += [
            Line(lock, f"Payment of order {key.rpartition(':')[2]}")
            for key, lock in sorted(found.items())
            if lock.taken and key.startswith(payment_lock(0)[:-1])
        ]
        lines += [line for line in export_locks() if line.lock.taken]
    return lines
