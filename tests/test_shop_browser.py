"""The shop in two windows of a real browser, each with cookies of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.urls import reverse

from dblocks.test import hold_elsewhere
from testproject.shop.board import LEADER_LOCK
from testproject.shop.models import Order, Product
from tests.support.browser import NARROW, Browser, Window, launch
from tests.support.shop_site import Server, export_elsewhere
from tests.support.timing import eventually, scaled


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as browser:
        yield browser


@pytest.fixture
def windows(shop_server: Server, browser: Browser) -> Iterator[list[Window]]:
    """Two windows; nothing may be complained about."""
    windows = [browser.window(shop_server.url) for _ in range(2)]
    yield windows
    complaints = [text for window in windows for text in window.complaints]
    for window in windows:
        window.close()
    assert not complaints


def press_at_once(windows: list[Window], button: str, path: str) -> dict[str, str]:
    """Press a button in all windows; return the pages that this leads to."""
    for window in windows:
        window.click(button, no_wait_after=True)
    for window in windows:
        window.wait_for_url(lambda url: not url.endswith(path))
    return {
        window.get_attribute("main", "data-page"): window.inner_text("main")
        for window in windows
    }


def test_two_buyers(windows: list[Window]) -> None:
    """One gets the last piece, the other a page that says what happened."""
    lamp = Product.objects.create(name="Lamp", stock=1)
    path = reverse("shop:product", args=[lamp.pk])
    for window, name in zip(windows, ["Ada", "Bob"], strict=True):
        window.open(path)
        window.fill("#id_customer", name)
    pages = press_at_once(windows, "text=Buy one", path)
    order = Order.objects.get()
    loser = {"Ada": "Bob", "Bob": "Ada"}[order.customer]
    assert set(pages) == {"order", "sold-out"}
    assert f"It’s yours, {order.customer}." in pages["order"]
    assert f"Sorry, {loser}: somebody else was" in pages["sold-out"]
    assert "nothing is to be paid" in pages["sold-out"]


def test_double_payment(windows: list[Window]) -> None:
    """Pressed in two windows, the button pays once."""
    order = Order.objects.create(customer="Ada")
    path = reverse("shop:order", args=[order.pk])
    for window in windows:
        window.open(path)
    for window in windows:
        window.click("#pay button", no_wait_after=True)
    done = "main[data-page=duplicate], main[data-page=order] .paid"
    for window in windows:
        window.wait_for_selector(done)
    texts = sorted(window.inner_text("h1") for window in windows)
    assert texts == ["Duplicate operation", f"Order {order.pk}"]


def test_cart(windows: list[Window]) -> None:
    """Two carts want the last lamp: one gets all of its articles, the other none."""
    for name, stock in [("Lamp", 1), ("Shade", 2)]:
        Product.objects.create(name=name, stock=stock)
    path = reverse("shop:cart")
    for window, name in zip(windows, ["Ada", "Bob"], strict=True):
        window.open(path)
        window.fill("#id_customer", name)
        window.check("text=Lamp")
        window.check("text=Shade")
    pages = press_at_once(windows, "text=Reserve all", path)
    assert set(pages) == {"order", "not-in-stock"}
    assert "1 × Lamp" in pages["order"]
    assert "1 × Shade" in pages["order"]
    assert "Sold out by now: Lamp." in pages["not-in-stock"]
    assert sorted(Product.objects.values_list("stock", flat=True)) == [0, 1]


def test_exports(windows: list[Window]) -> None:
    """While two exports are at work elsewhere, the page shows them; a third waits."""
    path = reverse("shop:exports")
    window = windows[0]
    window.open(path)
    assert window.inner_text("main .cards").count("free") == 2
    with export_elsewhere(), export_elsewhere():
        window.open(path)
        assert window.inner_text("main .cards").count("held") == 2
        window.click("#export button", no_wait_after=True)
        window.wait_for_selector("main[data-page=too-many-exports]")


def test_leader(windows: list[Window]) -> None:
    """The button asks the leader, and the page says so until another one leads."""
    window = windows[0]
    window.open(reverse("shop:leader"))
    assert "nobody" in window.inner_text("main")
    with hold_elsewhere(LEADER_LOCK, lease=scaled(1.5), note="till 1") as lease:
        window.open(reverse("shop:leader"))
        assert "till 1" in window.inner_text("main")
        window.set_viewport_size(NARROW)
        width = window.evaluate("document.documentElement.scrollWidth")
        assert width == NARROW["width"]
        window.follow("text=Ask the leader")
        assert "asked to hand over" in window.inner_text("main")
        assert not window.is_visible("#hand-over")
        eventually(lambda: lease.release_requested, what="the request")
    with hold_elsewhere(LEADER_LOCK, note="till 2"):
        # The page is loaded again by itself.
        window.wait_for_selector("text=till 2")
        window.wait_for_selector("#hand-over")
