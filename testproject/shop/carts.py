"""Whole carts: one piece of each article, or nothing.

:func:`reserve` takes the locks of all articles together, and is what the site does.
The others are compared by the demo: they differ in how they take the locks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from django.db import transaction

from dblocks import distributed_lock

from .models import Order, OrderItem, Product
from .selling import SoldOut, stock_lock

#: Seconds for which a cart of the demo waits for a lock.
PATIENCE = 1.5


class NotInStock(SoldOut):
    """Some articles of a cart are sold out."""

    def __init__(self, products: list[Product]) -> None:
        super().__init__()
        self.products = products


@dataclass
class Cart:
    """What one customer wants, in the order in which it was put into the cart."""

    customer: str
    product_ids: list[int]
    #: Seconds, more or less, that the look at one article takes.
    thinking: float = 0.0
    #: Seconds that it waits for a lock where locks are compared.
    patience: float = PATIENCE

    @property
    def keys(self) -> list[str]:
        """The locks of all articles."""
        return [stock_lock(pk) for pk in self.product_ids]

    def look_at(self, pk: int) -> Product:
        """Read an article's stock, and think."""
        product: Product = Product.objects.get(pk=pk)
        time.sleep(self.thinking * random.uniform(0.5, 1.5))
        return product

    def buy(self, products: list[Product]) -> Order:
        """Write the stocks that were seen less one, and the order.

        Raises:
            NotInStock: Of some there is no piece left; nothing is written.
        """
        missing = [product for product in products if product.stock < 1]
        if missing:
            raise NotInStock(missing)
        with transaction.atomic():
            order: Order = Order.objects.create(customer=self.customer)
            for product in products:
                rows = Product.objects.filter(pk=product.pk)
                rows.update(stock=product.stock - 1)
                OrderItem.objects.create(order=order, product=product)
        return order

    def look_and_buy(self) -> Order:
        """Look at all articles, then buy them."""
        return self.buy([self.look_at(pk) for pk in self.product_ids])


@distributed_lock(lambda cart: cart.keys, atomic=True, note="cart")
def reserve(cart: Cart) -> Order:
    """Reserve a cart under the locks of all its articles, and commit under them.

    Raises:
        NotInStock: Something is sold out; nothing is reserved.
        LockTimeout: Somebody was at one of the articles for three seconds, the default.
    """
    return cart.look_and_buy()


def together(cart: Cart) -> Order:
    """Take one lock of all keys; the order in which they are given is of no account."""
    with distributed_lock(*cart.keys, timeout=cart.patience, atomic=True):
        return cart.look_and_buy()


def one_by_one(cart: Cart) -> Order:
    """Take the locks in the cart's order, each inside the one before."""
    with ExitStack() as locks:
        products = []
        for key, pk in zip(cart.keys, cart.product_ids, strict=True):
            locks.enter_context(distributed_lock(key, timeout=cart.patience))
            products.append(cart.look_at(pk))
        return cart.buy(products)


@dataclass(frozen=True, slots=True)
class Way:
    """A way to reserve carts, and whether carts that meet can block each other."""

    name: str
    title: str
    reserve: Callable[[Cart], Order]
    safe: bool


WAYS = {
    way.name: way
    for way in (
        Way("nested", "nested locks, in the cart's order", one_by_one, safe=False),
        Way("together", "one lock of several keys", together, safe=True),
    )
}
