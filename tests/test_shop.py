"""The flash sale: which ways to sell oversell between processes, and which don't."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from dblocks import LockTimeout
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from testproject.shop.carts import WAYS, Cart, NotInStock, reserve
from testproject.shop.crew import Crew, Unexpected
from testproject.shop.meeting import let_carts_meet
from testproject.shop.models import Order, Product
from testproject.shop.sale import Result, Sale, hold_sale
from testproject.shop.selling import VARIANTS, Checkout, SoldOut, Variant
from tests.support.fixtures import in_memory
from tests.support.timing import DEADLINE

SALE = Sale(stock=5, buyers=24, threads=2)
PROCESSES = 3


@pytest.fixture(scope="module")
def tills(django_db_setup: None) -> Iterator[Crew]:
    """Processes that sell, kept from test to test."""
    with Crew() as crew:
        yield crew


@pytest.fixture
def sell(shop: None, request: pytest.FixtureRequest) -> Callable[..., Result]:
    """Hold a sale in several processes, on the test's database."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    crew: Crew = request.getfixturevalue("tills")

    def hold(name: str, sale: Sale = SALE, **options: Any) -> Result:
        variant = VARIANTS[name]
        skip_unless_it_applies(variant)
        while len(crew.tills) < PROCESSES:
            crew.hire()
        try:
            return hold_sale(variant, sale, crew, **options)
        except BaseException:
            # They may be in the middle of something.
            crew.close()
            raise

    return hold


@pytest.fixture
def crew(shop: None) -> Iterator[Crew]:
    """One process that sells, and whatever the test hires besides."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    with Crew() as crew:
        crew.hire()
        yield crew


def skip_unless_it_applies(variant: Variant) -> None:
    if not variant.applies():
        pytest.skip("nothing to see on this database")


SAFE = [name for name, variant in VARIANTS.items() if variant.safe]
UNSAFE = [name for name, variant in VARIANTS.items() if not variant.safe]


@pytest.mark.parametrize("name", SAFE)
def test_safe_variants(name: str, sell: Callable[..., Result]) -> None:
    """All there is gets sold, and no more; everybody else is refused."""
    result = sell(name)
    assert (result.sold, result.left, result.oversold) == (SALE.stock, 0, 0)
    assert result.refused == SALE.buyers - SALE.stock


@pytest.fixture
def oversell(sell: Callable[..., Result]) -> Callable[[str], Result]:
    """Hold sales whose buyers think longer and longer, until one oversells.

    At REPEATABLE READ, PostgreSQL refuses a write that waited for another one. So a
    machine on which commits take longer than buyers think loses no update.
    """

    def hold(name: str) -> Result:
        for thinking in (0.02, 0.1, 0.5):
            result = sell(name, replace(SALE, thinking=thinking))
            if result.oversold:
                break
        return result

    return hold


@pytest.mark.parametrize("name", UNSAFE)
def test_unsafe_variants(name: str, oversell: Callable[[str], Result]) -> None:
    """More gets sold than there is."""
    result = oversell(name)
    assert result.oversold > 0
    assert result.sold == SALE.stock + result.oversold
    assert result.sold + result.refused == SALE.buyers


def test_decrement_counts_below_zero(oversell: Callable[[str], Result]) -> None:
    """A decrement loses no update, so the stock tells how much was oversold."""
    result = oversell("decrement")
    assert result.left == -result.oversold < 0


def test_optimistic_update_is_busy(sell: Callable[..., Result]) -> None:
    """Buyers who look at the same stock begin again; the sale tells how often."""
    assert sell("optimistic").retries > 0


@pytest.fixture
def three(sell: Callable[..., Result], request: pytest.FixtureRequest) -> Crew:
    """Three processes, to reserve carts that meet."""
    crew: Crew = request.getfixturevalue("tills")
    while len(crew.tills) < PROCESSES:
        crew.hire()
    return crew


def test_carts_taken_together(three: Crew) -> None:
    """Carts in opposite orders don't block each other under one lock of all keys."""
    meeting = let_carts_meet(WAYS["together"], three, patience=DEADLINE)
    assert (meeting.reserved, meeting.timed_out) == (6, 0)
    assert meeting.adds_up


def test_carts_nested_carelessly(three: Crew) -> None:
    """With nested locks they do, until one gives up; the stock is right in the end."""
    meeting = let_carts_meet(WAYS["nested"], three)
    assert meeting.timed_out > 0
    assert meeting.reserved + meeting.timed_out == 6
    assert meeting.adds_up


@pytest.fixture
def articles(shop: None) -> list[Product]:
    """A lamp, of which there is one, and two chairs."""
    stocks = {"Lamp": 1, "Chair": 2}
    return [Product.objects.create(name=name, stock=stocks[name]) for name in stocks]


def stocks(articles: list[Product]) -> list[int]:
    for product in articles:
        product.refresh_from_db()
    return [product.stock for product in articles]


WAYS_TO_RESERVE = {"site": reserve} | {name: way.reserve for name, way in WAYS.items()}


@pytest.mark.parametrize("way", WAYS_TO_RESERVE)
def test_cart_is_reserved_whole_or_not_at_all(
    way: str, articles: list[Product]
) -> None:
    """Of a cart that lacks one article, the others stay where they are."""
    take = WAYS_TO_RESERVE[way]
    ids = [product.pk for product in articles]
    order = take(Cart("Ada", ids[::-1]))
    assert sorted(order.items.values_list("product", flat=True)) == ids
    assert stocks(articles) == [0, 1]
    with pytest.raises(NotInStock) as refused:
        take(Cart("Bob", ids))
    assert [product.name for product in refused.value.products] == ["Lamp"]
    assert stocks(articles) == [0, 1]
    assert not DistributedLock.objects.held().exists()


def test_cart_waits_for_each_of_its_articles(articles: list[Product]) -> None:
    """Somebody at one article keeps out the cart, which then holds none of them."""
    cart = Cart("Ada", [product.pk for product in articles], patience=0.2)
    with hold_elsewhere(cart.keys[1]):
        with pytest.raises(LockTimeout) as refused:
            WAYS["together"].reserve(cart)
        held = DistributedLock.objects.held().values_list("key", flat=True)
        assert list(held) == [cart.keys[1]]
    assert refused.value.key == cart.keys[1]
    assert stocks(articles) == [1, 2]


def test_progress(sell: Callable[..., Result]) -> None:
    """Every buyer's answer is told, one after another."""
    told: list[int] = []
    sell("lock", Sale(stock=1, buyers=6), on_answer=told.append)
    assert told == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", VARIANTS)
def test_one_buyer_after_another(name: str, shop: None) -> None:
    """Without a rush, every variant sells one piece and refuses the next buyer."""
    variant = VARIANTS[name]
    skip_unless_it_applies(variant)
    product = Product.objects.create(name="Lamp", stock=1)
    order = variant.buy(Checkout(product.pk, "Ada"))
    assert order.state == Order.State.PLACED
    with pytest.raises(SoldOut):
        variant.buy(Checkout(product.pk, "Bob"))
    assert product.sold() == 1
    assert [order.customer for order in Order.objects.all()] == ["Ada"]


def test_result() -> None:
    """Sums and rates are of what was really ordered."""
    result = Result(10, 15, 2, 5, 0, duration=0.5, waits=[0.3, 0.1, 0.2])
    assert result.oversold == 5
    assert result.orders_per_second == 30
    assert result.median_wait == 0.2


def test_result_without_orders() -> None:
    """A sale in which nobody buys has no rate and no wait."""
    result = Result(10, 0, 10, 5, 0, duration=0.0, waits=[])
    assert (result.oversold, result.orders_per_second, result.median_wait) == (0, 0, 0)


def test_failure_in_a_process(crew: Crew) -> None:
    """What goes wrong in a process ends the sale with its message."""
    crew.tills[0].tell("serve", product_id=0, customer="Ada", lease=30)
    with pytest.raises(Unexpected, match="DoesNotExist: Product matching"):
        crew.next()


def test_end_of_a_process(crew: Crew) -> None:
    """A process that ends by itself is noticed."""
    till = crew.tills[0]
    os.kill(till.pid, signal.SIGKILL)
    os.waitid(os.P_PID, till.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(Unexpected, match=f"process {till.pid} ended"):
        crew.next()
    with pytest.raises(Unexpected, match=f"process {till.pid} ended"):
        till.tell("go")


def test_word_from_another_process(crew: Crew) -> None:
    """Where one process is expected to speak, another one is noticed."""
    crew.tills[0].tell("hold", key="shop:test", lease=30)
    with pytest.raises(Unexpected, match="'held' from process"):
        crew.expect(crew.hire(), "held")


def test_early_word(crew: Crew) -> None:
    """Somebody who speaks where nobody should is noticed."""
    crew.tills[0].tell("hold", key="shop:test", lease=30)
    with pytest.raises(Unexpected, match="too early"):
        crew.expect_silence(DEADLINE)


def test_silence(crew: Crew) -> None:
    """Waiting for a word that doesn't come ends."""
    with pytest.raises(Unexpected, match=r"Nothing happened for 0\.01 s"):
        crew.next(within=0.01)
    crew.expect_silence(during=0.01)


def test_leaving_ends_all_processes(shop: None) -> None:
    """After the block, no process is left, not even one that was paused."""
    with Crew() as crew:
        pids = [crew.hire().pid, crew.hire().pid]
        crew.tills[0].pause()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
