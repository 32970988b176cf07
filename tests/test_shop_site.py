"""The shop as a site: real requests in parallel, under gunicorn."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from http.cookies import SimpleCookie
from typing import Any
from urllib.parse import urlencode

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from testproject.shop.models import Order, OrderItem, Product
from testproject.shop.operators import PERMISSIONS, make_operators
from testproject.shop.selling import stock_lock
from tests.support.factories import LockFactory, now
from tests.support.shop_site import THINKING, Answer, Server, export_elsewhere
from tests.support.timing import DEADLINE, takes


class Buyer:
    """Somebody with cookies of their own, who reads a page and presses its button."""

    def __init__(self, server: Server, name: str = "Ada") -> None:
        self.server, self.name = server, name
        self.cookies = SimpleCookie()
        self.forms: list[dict[str, str]] = []

    def ask(self, method: str, path: str, body: str = "") -> Answer:
        cookie = "; ".join(f"{one.key}={one.value}" for one in self.cookies.values())
        form = "application/x-www-form-urlencoded"
        headers = {"Cookie": cookie, "Content-Type": form}
        answer = self.server.ask(method, path, body, **headers)
        for value in answer.headers.get_all("Set-Cookie") or []:
            self.cookies.load(value)
        return answer

    def read(self, path: str) -> Answer:
        """Open a page and remember the token of its forms."""
        answer = self.ask("GET", path)
        assert answer.status == 200, answer.body
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', answer.body)
        self.token = found[1] if found else ""
        return answer

    def press(self, path: str, **fields: str | list[int]) -> Answer:
        """Press a button of the page; follow where that leads."""
        fields = {"csrfmiddlewaretoken": self.token, "customer": self.name, **fields}
        answer = self.ask("POST", path, urlencode(fields, doseq=True))
        if answer.status != 302:
            return answer
        page = self.ask("GET", answer.headers["Location"])
        # Whoever has sent the buyer there is of interest.
        page.headers.replace_header("X-Process", answer.process)
        return page


def at_once(*actions: Callable[[], Answer]) -> list[Answer]:
    """Do several things at the same moment."""
    start = threading.Barrier(len(actions))

    def do(action: Callable[[], Answer]) -> Answer:
        start.wait(DEADLINE)
        return action()

    with ThreadPoolExecutor(len(actions)) as threads:
        return list(threads.map(do, actions))


def rush(server: Server, product: Product, buyers: int, way: str = "") -> list[Answer]:
    """Let many buyers read a product's page, and press its button at once."""
    page = reverse("shop:product", args=[product.pk])
    button = f"{page}buy/{way}"
    crowd = [Buyer(server, f"Buyer {number}") for number in range(buyers)]
    for buyer in crowd:
        buyer.read(page)
    return at_once(*[lambda buyer=buyer: buyer.press(button) for buyer in crowd])


def statuses(answers: list[Answer]) -> list[int]:
    return sorted(answer.status for answer in answers)


def test_never_oversold(shop_server: Server) -> None:
    """Ten buyers at once, in several processes: three get one each, seven none."""
    product = Product.objects.create(name="Lamp", stock=3)
    answers = rush(shop_server, product, 10)
    bought = [answer for answer in answers if answer.page == "order"]
    product.refresh_from_db()
    assert (len(bought), product.sold(), product.stock) == (3, 3, 0)
    pages = {answer.page: answer.status for answer in answers if answer not in bought}
    assert pages == {"sold-out": 409}
    assert len({answer.process for answer in answers}) == 2
    assert not DistributedLock.objects.held().exists()


@pytest.mark.parametrize(
    ("workers", "oversells"),
    [pytest.param(1, False, id="one"), pytest.param(2, True, id="two")],
)
def test_lock_of_one_process(
    workers: int, oversells: bool, shop: None, shop_servers: Callable[[int], Server]
) -> None:
    """A ``threading.Lock`` is right on one worker, and oversells on two."""
    product = Product.objects.create(name="Lamp", stock=2)
    answers = rush(shop_servers(workers), product, 8, way="process-lock/")
    assert len({answer.process for answer in answers}) == workers
    assert (product.sold() > 2) is oversells


def test_second_buyer_waits_too_long(shop_server: Server) -> None:
    """Who comes second is told what happened, when to come again, and can do so."""
    product = Product.objects.create(name="Lamp", stock=1)
    page = reverse("shop:product", args=[product.pk])
    buyer = Buyer(shop_server, "Bob <b>")
    buyer.read(page)
    with hold_elsewhere(f"shop:stock:{product.pk}"):
        answer = buyer.press(f"{page}buy/")
        assert "held" in buyer.read(page).body
    assert (answer.status, answer.page) == (423, "locked")
    assert int(answer.headers["Retry-After"]) >= 1
    assert "You came second" in answer.body
    # The form that tries again has everything that it needs.
    fields = dict(
        re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.body)
    )
    again = {name: unescape(value) for name, value in fields.items()}
    assert buyer.press(f"{page}buy/", **again).page == "order"
    assert Order.objects.get().customer == "Bob <b>"


def test_double_payment(shop_server: Server) -> None:
    """Of two clicks at once one pays; the lock refuses the other, then the order."""
    order = Order.objects.create(customer="Ada")
    page = reverse("shop:order", args=[order.pk])
    buyer = Buyer(shop_server)
    buyer.read(page)

    def click() -> Answer:
        return buyer.press(f"{page}pay/")

    answers = at_once(click, click)
    assert statuses(answers) == [200, 409]
    paid, refused = sorted(answers, key=lambda answer: answer.status)
    assert paid.page == "order"
    assert "Thank you" in paid.body
    assert "Duplicate operation" in refused.body
    assert "is at work already" in refused.body
    order.refresh_from_db()
    assert order.state == Order.State.PAID
    late = click()
    assert late.status == 409
    assert "is paid already" in late.body
    assert 'id="pay"' not in buyer.read(page).body


def test_carts_in_opposite_orders(shop_server: Server) -> None:
    """Eight carts with the same articles: those that find all are reserved whole."""
    lamp = Product.objects.create(name="Lamp", stock=3)
    shade = Product.objects.create(name="Shade", stock=9)
    crowd = [Buyer(shop_server, f"Buyer {number}") for number in range(8)]
    for buyer in crowd:
        buyer.read(reverse("shop:cart"))
    button = reverse("shop:reserve")

    def reserve(number: int) -> Answer:
        articles = [lamp.pk, shade.pk][:: -1 if number % 2 else 1]
        return crowd[number].press(button, articles=articles)

    answers = at_once(*[lambda number=number: reserve(number) for number in range(8)])
    pages = sorted(answer.page for answer in answers)
    assert pages == ["not-in-stock"] * 5 + ["order"] * 3
    for product, stock in [(lamp, 0), (shade, 6)]:
        product.refresh_from_db()
        assert (product.stock, product.sold()) == (stock, 3)
    assert len({answer.process for answer in answers}) == 2
    assert not DistributedLock.objects.held().exists()


def test_cart_waits_too_long(shop_server: Server) -> None:
    """The page that says so tries again with the whole cart."""
    lamp = Product.objects.create(name="Lamp", stock=1)
    shade = Product.objects.create(name="Shade", stock=1)
    buyer = Buyer(shop_server)
    buyer.read(reverse("shop:cart"))
    with hold_elsewhere(stock_lock(shade.pk)):
        answer = buyer.press(
            reverse("shop:reserve"), customer="Bob <b>", articles=[lamp.pk, shade.pk]
        )
    assert (answer.status, answer.page) == (423, "locked")
    hidden = re.findall(r'type="hidden" name="(\w+)" value="([^"]*)"', answer.body)
    assert [name for name, _ in hidden] == [
        *("csrfmiddlewaretoken", "customer", "articles", "articles")
    ]
    again = urlencode([(name, unescape(value)) for name, value in hidden])
    assert buyer.ask("POST", reverse("shop:reserve"), again).status == 302
    assert Order.objects.get().customer == "Bob <b>"


def test_two_exports_at_a_time(shop_server: Server) -> None:
    """Six exports in several processes all come, and take as long as three rounds."""
    crowd = [Buyer(shop_server) for _ in range(6)]
    for buyer in crowd:
        buyer.read(reverse("shop:exports"))
    button = reverse("shop:export")
    with takes(at_least=3 * THINKING):
        answers = at_once(*[lambda buyer=buyer: buyer.press(button) for buyer in crowd])
    assert statuses(answers) == [200] * 6
    assert len({answer.process for answer in answers}) == 2


# Page by page


@pytest.fixture
def client(db: None, settings: Any) -> Client:
    """A client of a shop where nobody has to think."""
    settings.SHOP_THINKING = 0
    return Client(raise_request_exception=False)


def page_of(answer: Any) -> str:
    found = re.search(r'data-page="([\w-]+)"', answer.content.decode())
    assert found is not None
    return found[1]


@pytest.fixture
def lamp(db: None) -> Product:
    product: Product = Product.objects.create(name="Lamp", stock=1)
    return product


def url_of(product: Product, rest: str = "") -> str:
    return reverse("shop:product", args=[product.pk]) + rest


def test_catalogue(client: Client, lamp: Product) -> None:
    """Every product is on the first page, however many there are of it."""
    Product.objects.create(name="Chair", stock=0)
    Product.objects.create(name="Table", stock=-2)
    text = client.get("/").content.decode()
    for words in ("Lamp", "1 left", "Sold out", "Oversold: -2 left"):
        assert words in text


def test_empty_catalogue(client: Client) -> None:
    """An empty shop says how it is filled."""
    assert b"demo --serve" in client.get("/").content


@pytest.mark.parametrize("way", ["", "plain/", "process-lock/", "optimistic/"])
def test_every_way_to_buy(client: Client, lamp: Product, way: str) -> None:
    """One buyer after another: the first gets the piece, the second is told."""
    first = client.post(url_of(lamp, f"buy/{way}"), {"customer": "Ada"}, follow=True)
    assert (first.status_code, page_of(first)) == (200, "order")
    second = client.post(url_of(lamp, f"buy/{way}"), {"customer": "Bob"})
    assert (second.status_code, page_of(second)) == (409, "sold-out")
    assert OrderItem.objects.get().order.customer == "Ada"


@pytest.mark.parametrize("name", ["", "  ", "a" * 101])
def test_buyer_without_a_name(client: Client, lamp: Product, name: str) -> None:
    """What was typed wrong is shown again, and nothing is sold."""
    answer = client.post(url_of(lamp, "buy/"), {"customer": name})
    assert (answer.status_code, page_of(answer)) == (400, "product")
    assert b"errorlist" in answer.content
    assert lamp.sold() == 0


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        pytest.param("get", "/product/999999/", 404, id="no product"),
        pytest.param("get", f"/product/{10**30}/", 404, id="no number"),
        pytest.param("post", "/product/999999/buy/", 404, id="nothing to buy"),
        pytest.param("post", "/product/999999/restock/", 404, id="nothing to bring"),
        pytest.param("post", "/product/1/buy/guess/", 404, id="no way"),
        pytest.param("get", "/product/1/buy/", 405, id="buy by GET"),
        pytest.param("get", "/order/999999/", 404, id="no order"),
        pytest.param("post", "/order/999999/pay/", 404, id="nothing to pay"),
        pytest.param("get", "/order/1/pay/", 405, id="pay by GET"),
        pytest.param("get", "/cart/reserve/", 405, id="reserve by GET"),
        pytest.param("get", "/exports/orders.csv", 405, id="export by GET"),
        pytest.param("get", "/leader/hand-over/", 405, id="ask by GET"),
        pytest.param("post", "/leader/hand-over/", 400, id="ask nobody"),
    ],
)
def test_refused(client: Client, method: str, path: str, status: int) -> None:
    """What isn't there, or isn't done that way, is no error of the shop's."""
    assert getattr(client, method)(path, {"customer": "Ada"}).status_code == status


def test_csrf(lamp: Product) -> None:
    """Buttons of other sites do nothing here."""
    stranger = Client(enforce_csrf_checks=True)
    answer = stranger.post(url_of(lamp, "buy/"), {"customer": "Ada"})
    assert (answer.status_code, lamp.sold()) == (403, 0)


def test_van(client: Client, lamp: Product) -> None:
    """It brings one piece, and then its lock cools down."""
    assert client.post(url_of(lamp, "restock/")).status_code == 302
    lamp.refresh_from_db()
    assert lamp.stock == 2
    answer = client.post(url_of(lamp, "restock/"))
    assert (answer.status_code, page_of(answer)) == (409, "no-van")
    lamp.refresh_from_db()
    assert lamp.stock == 2
    board = client.get(reverse("shop:locks")).content.decode()
    line = board.partition(f'data-key="shop:van:{lamp.pk}"')[2]
    assert 'class="pill cooling"' in line


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        pytest.param({"customer": "Ada"}, b"Put something", id="empty"),
        pytest.param({"customer": ""}, b"This field is required", id="no name"),
        pytest.param(
            {"customer": "Ada", "articles": [999999]}, b"999999", id="no product"
        ),
        pytest.param({"customer": "Ada", "articles": ["x"]}, b"valid", id="no number"),
    ],
)
def test_cart_that_is_wrong(
    client: Client, lamp: Product, fields: dict[str, Any], complaint: bytes
) -> None:
    """What was filled in wrong is shown again, and nothing is locked or sold."""
    answer = client.post(reverse("shop:reserve"), fields)
    assert (answer.status_code, page_of(answer)) == (400, "cart")
    assert b"errorlist" in answer.content
    assert complaint in answer.content
    assert not DistributedLock.objects.exists()
    assert lamp.sold() == 0


def test_cart_page(client: Client, lamp: Product) -> None:
    """Every article can be ticked; a cart is an order with all of them."""
    chair = Product.objects.create(name="Chair", stock=4)
    page = client.get(reverse("shop:cart")).content.decode()
    assert re.findall(r'name="articles" value="(\d+)"', page) == [
        str(lamp.pk),
        str(chair.pk),
    ]
    assert "4 left" in page
    fields = {"customer": "Ada", "articles": [chair.pk, lamp.pk]}
    order = client.post(reverse("shop:reserve"), fields, follow=True)
    assert (order.status_code, page_of(order)) == (200, "order")
    again = client.post(reverse("shop:reserve"), fields)
    assert (again.status_code, page_of(again)) == (409, "not-in-stock")
    chair.refresh_from_db()
    assert chair.stock == 3


def test_empty_cart_page(client: Client) -> None:
    """Where nothing is for sale, nothing can be ticked."""
    assert b"nothing to buy" in client.get(reverse("shop:cart")).content


def test_export(client: Client, lamp: Product) -> None:
    """The file has a line for each item."""
    client.post(url_of(lamp, "buy/"), {"customer": "Ada"})
    item = OrderItem.objects.get()
    answer = client.post(reverse("shop:export"))
    assert answer.headers["Content-Type"] == "text/csv; charset=utf-8"
    assert answer.content.decode().splitlines() == [
        "order,state,product,quantity",
        f"{item.order_id},placed,{lamp.pk},1",
    ]


def test_third_export(client: Client, settings: Any) -> None:
    """While two are at work a third is told when to come; beside one it runs."""
    settings.DBLOCKS = {"default": {"TIMEOUT": 0}}
    with export_elsewhere():
        with export_elsewhere() as second:
            answer = client.post(reverse("shop:export"))
            assert (answer.status_code, page_of(answer)) == (409, "too-many-exports")
            assert 1 <= int(answer.headers["Retry-After"]) <= 30
            page = client.get(reverse("shop:exports")).content.decode()
            assert page.count('class="pill held"') == 2
            board = client.get(reverse("shop:locks")).content.decode()
            assert re.findall(r'data-key="shop:export" data-permit="(\d)"', board) == [
                *("0", "1")
            ]
            assert "\x1f" not in page + board
            second.release()
            page = client.get(reverse("shop:exports")).content.decode()
            assert page.count('class="pill held"') == 1
        assert client.post(reverse("shop:export")).status_code == 200


def test_locks(client: Client, lamp: Product) -> None:
    """The page shows states, times and remaining seconds, and no holder."""
    LockFactory(
        key=f"shop:stock:{lamp.pk}",
        held=True,
        holder="web-1 pid 977",
        note="a secret",
        acquired_at=now(-5),
        expires_at=now(25),
    )
    LockFactory(key="shop:order:7", held=True)
    LockFactory(key="shop:order:8")
    LockFactory(key="other:1", held=True)
    answer = client.get(reverse("shop:locks"))
    text = answer.content.decode()
    keys = re.findall(r'data-key="([^"]+)"', text)
    assert keys == [f"shop:stock:{lamp.pk}", "shop:order:7"]
    assert 'class="pill held"' in text
    assert re.search(r"<time datetime=.*>[\d:]{8}</time>", text)
    assert re.search(r">2[3-5]\.\d s<", text)
    assert "web-1" not in text
    assert "secret" not in text
    assert "Refresh" not in answer.headers


def test_watched_locks(client: Client) -> None:
    """The page is loaded again and again only if somebody wants that."""
    answer = client.get(reverse("shop:locks"), {"watch": ""})
    assert answer.headers["Refresh"] == "1"


def test_pages_are_made_of_files(client: Client, lamp: Product) -> None:
    """No page has a style or a script in it, and names are text on every page."""
    client.post(url_of(lamp, "buy/"), {"customer": "<script>"})
    order = Order.objects.get()
    paths = ["/", url_of(lamp), reverse("shop:order", args=[order.pk]), "/locks/"]
    paths += ["/cart/", "/exports/", "/leader/"]
    answers = [client.get(path) for path in paths]
    answers += [client.post(url_of(lamp, "buy/"), {"customer": "<script>"})]
    for answer in answers:
        text = answer.content.decode()
        assert "<script" not in text
        assert "<style" not in text
        assert " style=" not in text
    assert "&lt;script&gt;" in answers[2].content.decode()


@pytest.mark.usefixtures("db")
def test_operators(settings: Any) -> None:
    """Both are let into the admin, may do what they are for, and can be made again."""
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    make_operators()
    for account in make_operators():
        user = User.objects.get(username=account.username)
        assert user.is_staff
        assert user.check_password(account.password)
        allowed = {f"dblocks.{name}" for name in PERMISSIONS[account.username]}
        assert user.get_all_permissions() == allowed
