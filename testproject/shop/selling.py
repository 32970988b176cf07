"""Ways to sell one piece, most of which look right.

Each is a function of a :class:`Checkout` that returns the order or raises
:exc:`SoldOut`. They differ in what keeps the check and the write together.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from django.conf import settings
from django.db import NotSupportedError, OperationalError, connection, transaction
from django.db.models import F

from dblocks import Lease, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock

from .models import Order, OrderItem, Product

#: Seconds for which a buyer waits for others: longer than any sale.
PATIENCE = 30

_this_process = threading.Lock()


class SoldOut(Exception):
    """There is no piece left."""


def stock_lock(product_id: int) -> str:
    """The key under which a product's stock is looked at and written."""
    return f"shop:stock:{product_id}"


def usual_lease() -> float:
    """The seconds for which a lock is held without being renewed, by the setting."""
    return backends["default"].lease


def refuse_if_lost(lease: Lease) -> None:
    """Raise ``LeaseLost``, which rolls the open transaction back, if a lock was lost.

    By the guard; locks that aren't in a database have none, and are looked at.
    """
    try:
        lease.guard()
    except NotSupportedError:
        lease.check()


@dataclass
class Checkout:
    """One buyer's way through the checkout, for one piece of one product."""

    product_id: int
    customer: str
    #: Seconds, more or less, between the look at the stock and the purchase.
    thinking: float = 0.0
    #: Seconds for which the locks are held without being renewed.
    lease: float = field(default_factory=usual_lease)
    #: How often it had to begin again.
    retries: int = 0

    @property
    def key(self) -> str:
        """The lock of the product."""
        return stock_lock(self.product_id)

    def look(self) -> Product:
        """Read the stock, and think when there is some."""
        product = self.product()
        if product.stock < 1:
            raise SoldOut
        self.think(product)
        return product

    def product(self) -> Product:
        product: Product = Product.objects.get(pk=self.product_id)
        return product

    def think(self, product: Product) -> None:
        """Do what takes time in a checkout: the address, the payment, the network."""
        time.sleep(self.thinking * random.uniform(0.5, 1.5))

    def place_order(self) -> Order:
        order: Order = Order.objects.create(customer=self.customer)
        OrderItem.objects.create(order=order, product_id=self.product_id)
        return order

    def update(self, **values: object) -> bool:
        """Change the product's row by one ``UPDATE``."""
        return bool(Product.objects.filter(pk=self.product_id).update(**values))


def plain(checkout: Checkout) -> Order:
    """Read the stock, check it, write it back."""
    product = checkout.look()
    with transaction.atomic():
        checkout.update(stock=product.stock - 1)
        return checkout.place_order()


def decrement(checkout: Checkout) -> Order:
    """Read the stock, check it, let the database count down."""
    checkout.look()
    with transaction.atomic():
        checkout.update(stock=F("stock") - 1)
        return checkout.place_order()


def decrement_then_check(checkout: Checkout) -> Order:
    """Let the database count down, do all the work, roll it back if it was too many."""
    with transaction.atomic():
        checkout.update(stock=F("stock") - 1)
        order = checkout.place_order()
        product = checkout.product()
        checkout.think(product)
        if product.stock < 0:
            raise SoldOut
        return order


def optimistic(checkout: Checkout) -> Order:
    """Write only if nobody else has written since the read, else begin again."""
    while True:
        product = checkout.look()
        with transaction.atomic():
            if Product.objects.filter(pk=product.pk, version=product.version).update(
                stock=product.stock - 1, version=product.version + 1
            ):
                return checkout.place_order()
        checkout.retries += 1


def process_lock(checkout: Checkout) -> Order:
    """Check and write under a lock that only the threads of this process see."""
    with _this_process:
        return plain(checkout)


def unlock_before_commit(checkout: Checkout) -> Order:
    """Check and write under a lock that is free again before the write is visible."""
    with transaction.atomic():
        with _this_process:
            order = plain(checkout)
        checkout.think(checkout.product())
        return order


def lock_in_transaction(checkout: Checkout) -> Order:
    """Leave the lock's block before the commit: dblocks keeps the lock until then."""
    with transaction.atomic():
        with distributed_lock(checkout.key, timeout=PATIENCE, lease=checkout.lease):
            order = plain(checkout)
        checkout.think(checkout.product())
        return order


def lock_around_transaction(checkout: Checkout) -> Order:
    """Lock, then begin; commit only while holding, then unlock."""
    with distributed_lock(
        checkout.key, timeout=PATIENCE, lease=checkout.lease, atomic=True
    ):
        return plain(checkout)


def lock_and_confirm(checkout: Checkout, confirm: Callable[[Lease], object]) -> Order:
    """Lock, look, and write in a short transaction that ends by asking the lease."""
    with distributed_lock(
        checkout.key, timeout=PATIENCE, lease=checkout.lease
    ) as lease:
        product = checkout.look()
        with transaction.atomic():
            checkout.update(stock=product.stock - 1)
            order = checkout.place_order()
            confirm(lease)
            return order


def lock_and_guard(checkout: Checkout) -> Order:
    """End the transaction with the guard."""
    return lock_and_confirm(checkout, Lease.guard)


def lock_and_check(checkout: Checkout) -> Order:
    """Where there is no guard, look at the lease last, before the commit."""
    return lock_and_confirm(checkout, Lease.check)


def row_lock(checkout: Checkout) -> Order:
    """Check and write in one transaction, with the lock's row locked by it."""
    with transaction.atomic():
        DistributedLock.objects.for_update(checkout.key)
        return plain(checkout)


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to sell, and what is to be expected of it."""

    name: str
    title: str
    sell: Callable[[Checkout], Order]
    safe: bool
    #: All buyers are served by one process.
    one_process: bool = False
    #: Several transactions must be at work at a time; SQLite has one writer.
    several_writers: bool = False
    #: At REPEATABLE READ, databases refuse what goes wrong here.
    read_committed: bool = False
    #: The locks must be rows of the database, or must not; ``None``: wherever they are.
    locks_are_rows: bool | None = None

    def applies(self) -> bool:
        """Tell whether it shows on this database what it is meant to show."""
        if self.several_writers and connection.vendor == "sqlite":
            return False
        if self.locks_are_rows not in {None, backends["default"].has_table}:
            return False
        return not self.read_committed or settings.ISOLATION in {None, "read committed"}

    def buy(self, checkout: Checkout) -> Order:
        """Sell, again after each conflict after which the database asks for that."""
        while True:
            try:
                return self.sell(checkout)
            except OperationalError as error:
                if not _is_conflict(error):
                    raise
                checkout.retries += 1


def _is_conflict(error: OperationalError) -> bool:
    """A deadlock, or at REPEATABLE READ a row that changed behind the snapshot."""
    if connection.vendor == "mysql":
        return error.args[0] in {1020, 1213}
    return getattr(error.__cause__, "sqlstate", None) in {"40001", "40P01"}


VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("plain", "read, check, write", plain, safe=False),
        Variant("decrement", "check, decrement in SQL", decrement, safe=False),
        Variant("process-lock", "threading.Lock in each", process_lock, safe=False),
        Variant(
            "unlock-before-commit",
            "threading.Lock in atomic()",
            unlock_before_commit,
            safe=False,
            one_process=True,
            several_writers=True,
            read_committed=True,
        ),
        Variant(
            "one-process-lock",
            "threading.Lock, one process",
            process_lock,
            safe=True,
            one_process=True,
        ),
        Variant(
            "decrement-then-check",
            "decrement in SQL, check",
            decrement_then_check,
            safe=True,
        ),
        Variant("optimistic", "version column", optimistic, safe=True),
        Variant("lock", "distributed_lock, atomic", lock_around_transaction, safe=True),
        Variant(
            "guard",
            "distributed_lock, guard()",
            lock_and_guard,
            safe=True,
            locks_are_rows=True,
        ),
        Variant(
            "check",
            "distributed_lock, check()",
            lock_and_check,
            safe=True,
            locks_are_rows=False,
        ),
        Variant(
            "lock-in-transaction",
            "distributed_lock in atomic()",
            lock_in_transaction,
            safe=True,
            several_writers=True,
        ),
        Variant(
            "row-lock",
            "objects.for_update()",
            row_lock,
            safe=True,
            locks_are_rows=True,
        ),
    )
}
