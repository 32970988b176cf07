"""The admin in a real browser: what an operator does at night, and what it looks like.

Every page is served under a strict Content-Security-Policy, and every test ends by
asking whether the browser had anything to complain about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

import pytest
from django.conf import settings as project
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import Client
from pytest_django.live_server_helper import LiveServer

from dblocks.models import DistributedLock
from dblocks.texts import visible
from tests.support.browser import NARROW, Browser, Window, launch
from tests.support.factories import AccountFactory, LockFactory, stored
from tests.support.fixtures import in_memory
from tests.support.processes import Workers
from tests.support.timing import eventually
from tests.test_admin import HOSTILE, LIST, RELEASE, field, make_user, page_of

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
PASSWORD = "a password"


def strict(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """Middleware that lets a page load nothing but files of its own server."""

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = POLICY
        return response

    return middleware


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launch() as browser:
        yield browser


@pytest.fixture
def server(committed: None, settings: Any) -> Iterator[str]:
    """Serve the test's database; the users that the test made go with it."""
    if in_memory():
        pytest.skip("a database in memory locks whole tables, against readers too")
    if project.ISOLATION == "repeatable read":
        pytest.skip("pages look the same at every isolation level")
    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    settings.MIDDLEWARE = [f"{__name__}.strict", *settings.MIDDLEWARE]
    server = LiveServer("127.0.0.1")
    yield str(server.url)
    server.stop()
    User.objects.all().delete()
    Session.objects.all().delete()


class Desk:
    """Where people sit down: windows of one server, users when they are needed."""

    def __init__(self, server: str, browser: Browser) -> None:
        self.server, self.browser = server, browser
        self.windows: list[Window] = []

    def window(self, **options: Any) -> Window:
        """Open a window with nobody logged in."""
        self.windows.append(self.browser.window(self.server, **options))
        return self.windows[-1]

    def user(self, role: str) -> User:
        user = User.objects.filter(username=role).first()
        if user is None:
            user = make_user(role)
            user.set_password(PASSWORD)
            user.save()
        return user

    def log_in(self, role: str, path: str = LIST) -> Window:
        """Log somebody in at the login page."""
        self.user(role)
        window = self.window()
        window.log_in(role, PASSWORD, path)
        return window

    def sit_down(self, path: str = LIST, role: str = "operator", **options: Any) -> Any:
        """Open a window of somebody who is logged in already."""
        client = Client()
        client.force_login(self.user(role))
        window = self.window(**options)
        value = client.cookies[project.SESSION_COOKIE_NAME].value
        cookie = {
            "name": project.SESSION_COOKIE_NAME,
            "value": value,
            "url": self.server,
        }
        window.do(window.page.context.add_cookies, [cookie])
        window.open(path)
        return window


@pytest.fixture
def desk(server: str, browser: Browser) -> Iterator[Desk]:
    """Open windows, and ask at the end what the browser complained about."""
    desk = Desk(server, browser)
    yield desk
    complaints = [text for window in desk.windows for text in window.complaints]
    for window in desk.windows:
        window.close()
    assert not complaints


@pytest.mark.usefixtures("committed")
def test_operator_frees_a_stuck_lock(desk: Desk, workers: Workers, key: str) -> None:
    """From the login page to a free lock; its holder's work is rolled back."""
    account = AccountFactory()
    # SQLite has one writer: an open transaction would keep the operator out as well.
    one_writer = connection.vendor == "sqlite"
    holder = workers.start(
        "add_under_guard" if one_writer else "add_in_atomic_block",
        key=key,
        account=account.pk,
        lease=3,
        note="the import",
    )
    token = holder.expect("read")["token"]

    page = desk.log_in("operator", "/admin/")
    page.follow("#content-main >> text=Locks >> nth=-1")
    assert page.inner_text("#result_list tbody .dblocks-state") == "held"
    page.follow(f"#result_list >> text={key}")
    assert "the import" in page.inner_text("#content")
    page.follow("text=Force release…")
    assert "loses its lock" in page.inner_text("#content")
    page.fill("#id_reason", "it hangs since noon")
    page.follow("text=Force release 1 lock")
    assert page.inner_text(".messagelist") == f"Released 1 lock: {key}."
    assert not page.is_visible("#result_list")
    page.follow("#changelist-filter >> text=free >> nth=-1")
    assert page.inner_text("#result_list tbody .dblocks-state") == "free"
    assert "last: " in page.inner_text("#result_list .field-listed_holder")
    assert stored(key).version == token + 1

    holder.tell("write")
    lost = holder.expect("lost")
    assert (lost["reason"], lost["token"]) == ("forced", token)
    account.refresh_from_db()
    assert account.balance == 0

    page.follow(f"#result_list >> text={key}")
    page.follow("text=History")
    assert "Reason: it hangs since noon" in page.inner_text("#change-history")
    assert f"pid {holder.pid} " in page.inner_text("#change-history")


def test_roles(desk: Desk) -> None:
    """Who may not see locks sees none; who may not release them has no button."""
    LockFactory(key="k", held=True)
    staff = desk.log_in("staff")
    assert "403 Forbidden" in staff.inner_text("body")
    for role in ("viewer", "operator", "superuser"):
        page = desk.log_in(role)
        may = role != "viewer"
        assert page.is_visible("input.action-select") is may
        page.follow('#result_list >> text="k"')
        assert page.is_visible("text=Force release…") is may


def test_two_windows(desk: Desk) -> None:
    """What one window released, and somebody took since, the other leaves alone."""
    LockFactory(key="k", held=True)
    first = desk.sit_down(f"{RELEASE}?key=k")
    second = desk.sit_down(f"{RELEASE}?key=k")
    for page in (first, second):
        page.fill("#id_reason", "stuck")
    first.follow("text=Force release 1 lock")
    taken = DistributedLock.objects.acquire("k", owner="new", lease=60)
    assert taken is not None
    second.follow("text=Force release 1 lock")
    assert "Left 1 lock alone" in second.inner_text(".messagelist .warning")
    assert stored("k").owner == "new"


def test_auto_refresh(desk: Desk) -> None:
    """A new lock appears without a reload, and nothing moves under a user's hands."""
    page = desk.sit_down()
    page.do(page.page.clock.install)
    page.open(LIST)
    page.evaluate("window.theSameDocument = true")

    def refresh() -> None:
        page.do(page.page.clock.run_for, 5100)
        page.wait_for_load_state("networkidle")

    def rows() -> list[str]:
        found: list[str] = page.eval_on_selector_all(
            "#result_list .dblocks-key", "all => all.map(each => each.textContent)"
        )
        return found

    def status() -> str:
        return str(page.inner_text("#dblocks-refresh-status"))

    LockFactory(key="a", held=True)
    refresh()
    assert rows() == []
    page.check("#dblocks-refresh")
    refresh()
    eventually(lambda: rows() == ["a"], what="a first lock on the page")
    assert "1 lock" in page.inner_text(".paginator")

    LockFactory(key="b", held=True)
    blur = "document.activeElement.blur()"
    page.check("input.action-select")
    page.evaluate(blur)
    refresh()
    assert (status(), rows()) == ("paused", ["a"])
    page.uncheck("input.action-select")
    page.focus("#searchbar")
    refresh()
    assert (status(), rows()) == ("paused", ["a"])
    page.evaluate(blur)
    refresh()
    eventually(lambda: rows() == ["a", "b"], what="a second lock on the page")
    assert status() == ""

    # The admin's own selection works on the new rows.
    page.check("#action-toggle")
    assert "2 of 2 selected" in page.inner_text(".actions")
    page.uncheck("input.action-select")
    assert "1 of 2 selected" in page.inner_text(".actions")
    assert page.evaluate("window.theSameDocument")

    # The choice stays with the tab.
    page.open(f"{LIST}?state=held")
    assert page.is_checked("#dblocks-refresh")
    DistributedLock.objects.force_release("a")
    refresh()
    eventually(lambda: rows() == ["b"], what="a list without the freed lock")
    page.uncheck("#dblocks-refresh")
    page.open(LIST)
    assert not page.is_checked("#dblocks-refresh")


def refreshing(desk: Desk, address: str = LIST) -> Any:
    """Open a list that refreshes itself, with a clock that the test moves."""
    page = desk.sit_down()
    page.do(page.page.clock.install)
    page.open(address)
    page.check("#dblocks-refresh")
    return page


def test_auto_refresh_of_an_empty_list(desk: Desk) -> None:
    """The first lock appears where a reload shows it."""
    page = refreshing(desk)
    LockFactory(key="a", held=True)
    page.do(page.page.clock.run_for, 5100)
    table = page.page.locator(".results")
    page.do(table.wait_for)
    place = page.do(table.bounding_box)
    page.open(LIST)
    assert page.do(table.bounding_box) == place


def test_auto_refresh_after_logout(desk: Desk) -> None:
    """A page that can't be refreshed any more says so and keeps what it shows."""
    LockFactory(key="a", held=True)
    page = refreshing(desk)
    Session.objects.all().delete()
    page.do(page.page.clock.run_for, 5100)
    page.wait_for_selector("text=not refreshed")
    assert page.is_visible("#result_list >> text=a")


def test_auto_refresh_of_a_page_that_is_gone(desk: Desk) -> None:
    """The list without filters, where that leads, isn't shown in its place."""
    LockFactory(key="held", held=True, age=7200)
    LockFactory.bulk(101, expired=True)
    page = refreshing(desk, f"{LIST}?state=expired&p=3")
    last = page.inner_text("#result_list .dblocks-key")
    assert DistributedLock.objects.force_release(last)
    page.do(page.page.clock.run_for, 5100)
    page.wait_for_selector("text=not refreshed")
    assert page.inner_text("#result_list .dblocks-key") == last


def test_auto_refresh_that_takes_long(desk: Desk) -> None:
    """A late answer doesn't undo a newer one, and the page says that it waits."""
    LockFactory(key="a", held=True)
    page = refreshing(desk)
    held_back: list[Any] = []
    page.route(f"**{LIST}", lambda route: held_back.append((route, route.fetch())))
    page.do(page.page.clock.run_for, 5100)
    eventually(lambda: page.evaluate("1") and held_back, what="a request")
    page.do(page.page.clock.run_for, 10_100)
    page.wait_for_selector("text=not refreshed")
    assert len(held_back) == 1
    [(route, response)] = held_back
    page.do(route.fulfill, response=response)
    page.unroute(f"**{LIST}")
    page.wait_for_selector("text=not refreshed", state="hidden")


def test_hostile_keys(desk: Desk) -> None:
    """Any key is text in the list, has a page of its own, and can be released."""
    for key in HOSTILE.values():
        LockFactory(key=key, held=True, holder=key, note=key)
    page = desk.sit_down()
    links = page.eval_on_selector_all(
        "#result_list tbody th a",
        "all => all.map(each => [each.querySelector('bdi').textContent, each.href])",
    )
    assert sorted(text for text, _url in links) == sorted(
        visible(key) for key in HOSTILE.values()
    )
    for text, url in links:
        page.goto(url)
        assert page.text_content(".field-shown_key .dblocks-key") == text
    page.open(LIST)
    page.check("#action-toggle")
    page.select_option("[name=action]", "force_release")
    page.follow("[name=index]")
    page.fill("#id_reason", "<b>&amp;")
    page.follow(f"text=Force release {len(HOSTILE)} locks")
    assert f"Released {len(HOSTILE)} locks" in page.inner_text(".messagelist")
    assert DistributedLock.objects.free().count() == len(HOSTILE)


def test_permits(desk: Desk) -> None:
    """Each permit has a page, can be ticked, and is released by its own row."""
    for permit in range(11):
        LockFactory(key=f"job\x1f{permit}", held=True)
    page = desk.sit_down(f"{LIST}?o=1")
    numbers = page.eval_on_selector_all(
        "#result_list .dblocks-permit", "all => all.map(each => each.textContent)"
    )
    assert numbers == [str(permit) for permit in range(11)]
    page.follow("#result_list tbody tr:nth-child(11) th a")
    assert page.text_content(".field-shown_permit .dblocks-permit") == "10"
    page.follow("text=Force release…")
    assert page.text_content(".dblocks-table .dblocks-permit") == "10"
    page.open(f"{LIST}?o=1")
    page.check("#result_list tbody tr:nth-child(3) input.action-select")
    page.select_option("[name=action]", "force_release")
    page.follow("[name=index]")
    page.fill("#id_reason", "stuck")
    page.follow("text=Force release 1 lock")
    assert page.inner_text(".messagelist") == "Released 1 lock: job (permit 2)."
    assert [lock.permit for lock in DistributedLock.objects.free()] == [2]


def test_written_from_right_to_left(desk: Desk, settings: Any) -> None:
    """Where nobody has translated "59 min", the number still comes first."""
    settings.LANGUAGE_CODE = "he"
    LockFactory(key="k", held=True)
    page = desk.sit_down()
    for time in page.query_selector_all("#result_list time"):
        assert page.do(time.evaluate, "e => getComputedStyle(e).direction") == "ltr"


def test_buttons_in_line(desk: Desk) -> None:
    """The three ways off the confirmation page have one upper and one lower edge."""
    LockFactory(key="k", held=True)
    page = desk.sit_down(f"{RELEASE}?key=k")
    edges = page.eval_on_selector_all(
        ".dblocks-buttons > *",
        "all => all.map(each => each.getBoundingClientRect())"
        ".map(box => [box.top, box.bottom])",
    )
    assert len(edges) == 3
    assert all(edge == edges[0] for edge in edges)


def test_keyboard_alone(desk: Desk) -> None:
    """Without a pointer: from the list over the lock's page to the release."""
    LockFactory(key="k", held=True)
    page = desk.sit_down()

    def tab_to(selector: str) -> None:
        for _ in range(60):
            page.type("Tab")
            if page.evaluate(f"document.activeElement.matches('{selector}')"):
                outline = page.evaluate(
                    "getComputedStyle(document.activeElement).outlineStyle"
                )
                assert outline != "none" or "input" in selector
                return
        pytest.fail(f"no Tab leads to {selector}")

    tab_to("#dblocks-refresh")
    page.type("Space")
    assert page.is_checked("#dblocks-refresh")
    tab_to("#result_list th a[href*=change]")
    page.enter()
    tab_to(".dblocks-force-release")
    page.enter()
    tab_to("#id_reason")
    page.type("s", "t", "u", "c", "k")
    tab_to("input[type=submit]")
    tab_to(".cancel-link")
    page.type("Shift+Tab")
    page.enter()
    page.wait_for_selector(".messagelist .success")
    assert stored("k").version == 2


def test_names_for_those_who_do_not_see(desk: Desk) -> None:
    """Whatever takes input has a name, and the reason's help belongs to it."""
    LockFactory(key="k", held=True)
    page = desk.sit_down()
    nameless = """() => [...document.querySelectorAll('input, select, textarea')]
        .filter(each => each.type != 'hidden' && each.type != 'submit'
            && !each.labels?.length && !each.getAttribute('aria-label'))
        .map(each => each.outerHTML)"""
    for path in (LIST, page_of("k"), f"{RELEASE}?key=k"):
        page.open(path)
        assert page.evaluate(nameless) == []
    assert page.get_attribute("#id_reason", "aria-describedby") == "id_reason_helptext"
    assert page.is_visible("#id_reason_helptext")


CONTRAST = """selector => [...document.querySelectorAll(selector)].map(element => {
    const canvas = document.createElement('canvas').getContext('2d', {
        willReadFrequently: true
    });
    const rgb = colours => {
        canvas.clearRect(0, 0, 1, 1);
        for (const colour of colours) {
            canvas.fillStyle = colour;
            canvas.fillRect(0, 0, 1, 1);
        }
        return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
    };
    const luminance = colours => {
        const [r, g, b] = rgb(colours).map(value => value / 255).map(value =>
            value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const grounds = [];
    for (let each = element; each; each = each.parentElement) {
        grounds.unshift(getComputedStyle(each).backgroundColor);
    }
    const ground = luminance(grounds);
    const text = luminance([...grounds, getComputedStyle(element).color]);
    return [
        element.className || element.id || element.tagName,
        (Math.max(text, ground) + 0.05) / (Math.min(text, ground) + 0.05),
    ];
})"""
READ = (
    ".dblocks-state, .dblocks-key, .dblocks-text, .dblocks-small, .dblocks-last, "
    "#result_list time, "
    ".dblocks-refresh label, .dblocks-force-release, .dblocks-consequence, "
    ".dblocks-table td, .dblocks-buttons > *, #id_reason, label[for=id_reason]"
)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_contrast(desk: Desk, theme: str) -> None:
    """Everything that dblocks adds can be read in both themes (WCAG AA: 4.5 to 1)."""
    for state in ("held", "expired", "cooling", "free"):
        LockFactory(key=state, holder="host:1:t", note="note", **{state: True})
    page = desk.sit_down(color_scheme=theme)
    measured = []
    confirmation = f"{RELEASE}?key=held&key=cooling&key=expired"
    for path in (f"{LIST}?state=all", page_of("held"), confirmation):
        page.open(path)
        found = page.evaluate(CONTRAST, READ)
        assert found
        measured += found
    assert {name for name, contrast in measured if contrast < 4.5} == set()
    assert len({name for name, _contrast in measured}) >= 10


@pytest.mark.parametrize("viewport", [None, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("permit", ["", "\x1f999"], ids=["plain", "permit"])
def test_nothing_is_out_of_sight(desk: Desk, viewport: Any, permit: str) -> None:
    """The confirmation fits the window, and so does the list."""
    key = f"tenant-12:invoice:2026-11:customer-20841{permit}"
    holder = "worker-1.example:31337:MainThread"
    LockFactory(key=key, expired=True, holder=holder, note="why " * 60)
    options = {"viewport": viewport} if viewport else {}
    page = desk.sit_down(f"{RELEASE}?{urlencode({'key': key})}", **options)
    fits = "all => all.every(each => each.scrollWidth <= each.clientWidth)"
    assert page.eval_on_selector_all(".results, html", fits)
    page.open(LIST)
    assert page.eval_on_selector_all(".results, html", fits)
    for column in ("listed_key", "shown_state", "since", "listed_holder", "left"):
        box = page.do(page.page.locator(f".field-{column}").bounding_box)
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= page.page.viewport_size["width"]


@pytest.mark.parametrize("viewport", [None, NARROW], ids=["wide", "narrow"])
def test_long_key_without_blanks(desk: Desk, viewport: Any) -> None:
    """A key that has no place to break leaves the buttons where they are seen."""
    key = "k" * 255
    LockFactory(key=key, held=True)
    options = {"viewport": viewport} if viewport else {}
    page = desk.sit_down(page_of(key), **options)
    fits = "each => each.scrollWidth <= each.clientWidth"
    assert page.eval_on_selector("html", fits)
    page.follow("text=Force release…")
    assert page.eval_on_selector("html", fits)


def test_stale_field(desk: Desk) -> None:
    """The confirmation carries the version that it shows."""
    LockFactory(key="k", held=True, version=41)
    page = desk.sit_down(f"{RELEASE}?key=k")
    assert page.input_value("[name=lock]") == field("k", 41)
