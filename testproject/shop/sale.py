"""A flash sale: many buyers, few pieces, several processes, and the result."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from .crew import Crew, Event
from .models import Order, OrderItem, Product, Recommendation
from .selling import Variant


@dataclass(frozen=True, slots=True)
class Sale:
    """What is on sale, and for whom."""

    stock: int = 10
    buyers: int = 40
    #: In each process; a variant for one process has all of them there.
    threads: int = 2
    #: Seconds, more or less, that a buyer thinks.
    thinking: float = 0.02


@dataclass(frozen=True, slots=True)
class Result:
    """How a sale went."""

    stock: int
    sold: int
    left: int
    refused: int
    retries: int
    #: Seconds from the start to the last order.
    duration: float
    #: Seconds that each who bought waited for it.
    waits: list[float]

    @property
    def oversold(self) -> int:
        """How many pieces were sold that weren't there."""
        return max(0, self.sold - self.stock)

    @property
    def orders_per_second(self) -> float:
        return self.sold / self.duration if self.duration else 0.0

    @property
    def median_wait(self) -> float:
        return statistics.median(self.waits) if self.waits else 0.0


def empty_shop() -> None:
    """Remove all products, all orders and the recommendation."""
    for model in (OrderItem, Order, Product, Recommendation):
        model._default_manager.all().delete()


def hold_sale(
    variant: Variant,
    sale: Sale,
    crew: Crew,
    on_answer: Callable[[int], None] | None = None,
) -> Result:
    """Let all processes of a crew sell one product at once.

    Args:
        on_answer: Called after each buyer's answer with their number so far.
    """
    product = Product.objects.create(name=f"Sale: {variant.title}", stock=sale.stock)
    tills, threads = crew.tills, sale.threads
    if variant.one_process:
        tills, threads = tills[:1], threads * len(tills)
    for number, till in enumerate(tills):
        till.tell(
            "sell",
            variant=variant.name,
            product_id=product.pk,
            customers=[
                f"Buyer {buyer}" for buyer in range(number, sale.buyers, len(tills))
            ],
            threads=threads,
            thinking=sale.thinking,
        )
    for _ in range(len(tills) * threads):
        crew.expect(None, "ready")
    for till in tills:
        till.tell("go")
    started = time.monotonic()
    answers: list[Event] = []
    working = len(tills)
    while working:
        event = crew.next()
        if event.name == "done":
            working -= 1
        else:
            answers.append(event)
            if on_answer is not None:
                on_answer(len(answers))
    sold = [event for event in answers if event.name == "sold"]
    product.refresh_from_db()
    return Result(
        stock=sale.stock,
        sold=product.sold(),
        left=product.stock,
        refused=len(answers) - len(sold),
        retries=sum(event.data["retries"] for event in answers),
        duration=max((event.at for event in sold), default=started) - started,
        waits=[event.data["waited"] for event in sold],
    )
