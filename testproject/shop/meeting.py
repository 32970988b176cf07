"""Carts with the same articles in opposite orders, which meet at the checkout."""

from __future__ import annotations

import time
from dataclasses import dataclass

from dblocks import distributed_lock

from .carts import PATIENCE, Cart, Way
from .crew import Crew, Event
from .models import Product


@dataclass(frozen=True, slots=True)
class Meeting:
    """How a round of carts went."""

    reserved: int
    timed_out: int
    #: Seconds from the start to the last answer.
    duration: float
    #: Seconds that the slowest cart took, whether it was reserved or not.
    slowest: float
    #: Whether the stocks are what the reserved carts have left.
    adds_up: bool


def let_carts_meet(
    way: Way,
    crew: Crew,
    *,
    carts: int = 2,
    patience: float = PATIENCE,
    thinking: float = 0.06,
) -> Meeting:
    """Let every process of a crew reserve so many carts, one after another.

    Every second process has the two articles in the opposite order.
    """
    stock = carts * len(crew.tills)
    articles = [
        Product.objects.create(name=f"{name}, {way.name}", stock=stock)
        for name in ("Lamp", "Shade")
    ]
    in_order = [product.pk for product in articles]
    # As in a shop that has sold before: the locks have rows already.
    distributed_lock(*Cart("", in_order).keys).acquire().release()
    for number, till in enumerate(crew.tills):
        till.tell(
            "reserve",
            way=way.name,
            product_ids=in_order[:: -1 if number % 2 else 1],
            customers=[f"Customer {number}.{cart}" for cart in range(carts)],
            patience=patience,
            thinking=thinking,
        )
    for _ in crew.tills:
        crew.expect(None, "ready")
    for till in crew.tills:
        till.tell("go")
    started = time.monotonic()
    answers: list[Event] = []
    working = len(crew.tills)
    while working:
        event = crew.next()
        if event.name == "done":
            working -= 1
        else:
            answers.append(event)
    reserved = sum(event.name == "reserved" for event in answers)
    for product in articles:
        product.refresh_from_db()
    return Meeting(
        reserved=reserved,
        timed_out=len(answers) - reserved,
        duration=max(event.at for event in answers) - started,
        slowest=max(event.data["waited"] for event in answers),
        adds_up=all(
            product.stock == stock - reserved and product.sold() == reserved
            for product in articles
        ),
    )
