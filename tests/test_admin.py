"""The admin: who sees what, what a force release does, what pages are made of."""

from __future__ import annotations

import copy
import getpass
import html
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from html.parser import HTMLParser
from typing import Any
from urllib.parse import parse_qs, urlsplit

import django
import pytest
from django.contrib import admin
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.core.management import call_command
from django.db import OperationalError, connection, connections, transaction
from django.test import Client
from django.urls import include, path, reverse
from django.utils import timezone

from dblocks import distributed_lock
from dblocks.admin import DistributedLockAdmin, changelist, force_release, formats
from dblocks.admin import page as page_module
from dblocks.backends.values import Grant
from dblocks.interventions import Intervention, record
from dblocks.models import DistributedLock, State
from dblocks.signals import lock_force_released
from dblocks.texts import visible
from tests.support.factories import LockFactory, now, stored
from tests.support.fixtures import OtherThread, in_memory

LIST = "/admin/dblocks/distributedlock/"
RELEASE = f"{LIST}force-release/"
ADD = f"{LIST}add/"

HOSTILE = {
    "script": "<script>alert(1)</script>",
    "quotes": '"it\'s" `x`',
    "slashes": "a/b//../c\\",
    "percent": "100%_%41",
    "emoji": "🔒🧨",
    "long": "k" * 255,
    "right to left": "\u202eקוד\u202c:אבג",
    "blanks": "  two  blanks ",
    "lines": "one\ntwo\r\nthree",
    "controls": "\x1b[2J\x07\x7f\x9b\u2066a\u2069\u200b",
    "query": "?a=b&c=d#e;f:g@h,i+j",
    "template": "{{ 1 }}{% now %} %(x)s {keys}",
}
hostile = pytest.mark.parametrize("key", HOSTILE.values(), ids=HOSTILE)


def make_user(role: str) -> User:
    """Make somebody who is let into the admin with the permissions of that role."""
    if role == "superuser":
        return User.objects.create_superuser(role)
    user = User.objects.create_user(role, is_staff=True)
    names = {
        "staff": [],
        "viewer": ["view"],
        "operator": ["view", "force_release"],
        "blind operator": ["force_release"],
    }[role]
    codenames = [f"{name}_distributedlock" for name in names]
    user.user_permissions.set(Permission.objects.filter(codename__in=codenames))
    assert user.user_permissions.count() == len(names)
    return user


def browser_of(role: str) -> Client:
    client = Client()
    if role != "anonymous":
        client.force_login(make_user(role))
    return client


@pytest.fixture
def operator(db: None) -> Client:
    return browser_of("operator")


def page_of(key: str, name: str = "change") -> str:
    return reverse(f"admin:dblocks_distributedlock_{name}", args=[quote(key)])


def field(key: str, version: int = 1, state: str = "held") -> str:
    """The hidden field of the confirmation page."""
    return f"{state}:{version}:{formats.escaped(key)}"


def release(client: Client, *fields: str, reason: str = "stuck", **extra: Any) -> Any:
    return client.post(RELEASE, {"lock": fields, "reason": reason}, **extra)


def act(client: Client, *keys: str, url: str = LIST, **data: Any) -> Any:
    """Run the list's action on what is ticked."""
    data = {"action": "force_release", "_selected_action": keys, "index": 0, **data}
    return client.post(url, data)


def told(response: Any) -> list[str]:
    """The messages on the page that a response leads to, as text."""
    return [html.unescape(str(message)) for message in response.context["messages"]]


class Elements(HTMLParser):
    """What a page is made of: its tags with their attributes."""

    def __init__(self, response: Any) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(response.rendered_content)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def fields(self, name: str) -> list[str]:
        """The values of the form fields of that name."""
        return [
            attributes.get("value") or ""
            for tag, attributes in self.found
            if tag == "input" and attributes.get("name") == name
        ]


def listed(response: Any) -> list[str]:
    """The keys of the list's rows."""
    assert response.status_code == 200
    return [lock.key for lock in response.context["cl"].result_list]


# Who may what

ROLES = ["anonymous", "staff", "blind operator", "viewer", "operator", "superuser"]
OUTCOMES = {
    "list": (302, 403, 403, 200, 200, 200),
    "page": (302, 403, 403, 200, 200, 200),
    "history": (302, 403, 403, 200, 200, 200),
    "confirmation": (302, 403, 403, 403, 200, 200),
    "release": (302, 403, 403, 403, 302, 302),
    # The list again, for whom it has no action.
    "action": (302, 403, 403, 200, 200, 200),
    "action, confirmed": (302, 403, 403, 200, 200, 200),
    "add": (302, 403, 403, 403, 403, 403),
    "adding": (302, 403, 403, 403, 403, 403),
    "change": (302, 403, 403, 403, 403, 403),
    "delete": (302, 403, 403, 403, 403, 403),
    "deleting": (302, 403, 403, 403, 403, 403),
    "delete action": (302, 403, 403, 200, 302, 302),
}
REQUESTS: dict[str, Callable[[Client], Any]] = {
    "list": lambda client: client.get(LIST),
    "page": lambda client: client.get(page_of("k")),
    "history": lambda client: client.get(page_of("k", "history")),
    "confirmation": lambda client: client.get(RELEASE, {"key": "k"}),
    "release": lambda client: release(client, field("k")),
    "action": lambda client: act(client, "k"),
    "action, confirmed": lambda client: act(
        client, "k", lock=field("k"), reason="because", post="yes"
    ),
    "add": lambda client: client.get(ADD),
    "adding": lambda client: client.post(ADD, {"key": "new"}),
    "change": lambda client: client.post(page_of("k"), {"owner": ""}),
    "delete": lambda client: client.get(page_of("k", "delete")),
    "deleting": lambda client: client.post(page_of("k", "delete"), {"post": "yes"}),
    "delete action": lambda client: act(
        client, "k", action="delete_selected", post="yes"
    ),
}


@pytest.mark.django_db
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("request_name", REQUESTS)
def test_who_may_what(role: str, request_name: str) -> None:
    """Only a confirmed POST of somebody with both permissions changes a row."""
    LockFactory(key="k", held=True)
    before = DistributedLock.objects.values().get()
    response = REQUESTS[request_name](browser_of(role))
    assert response.status_code == OUTCOMES[request_name][ROLES.index(role)]
    if role == "anonymous":
        assert response.url.startswith("/admin/login/")
    released = request_name == "release" and role in {"operator", "superuser"}
    assert (DistributedLock.objects.values().get() != before) is released
    assert LogEntry.objects.exists() is released


@pytest.mark.django_db
def test_forged_request() -> None:
    """Without the token of a page, nothing is released."""
    LockFactory(key="k", held=True)
    client = Client(enforce_csrf_checks=True)
    client.force_login(make_user("superuser"))
    assert release(client, field("k")).status_code == 403
    assert stored("k").version == 1


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("role", "state", "offered"),
    [
        ("viewer", "held", False),
        ("operator", "held", True),
        ("operator", "expired", True),
        ("operator", "cooling", True),
        ("operator", "free", False),
    ],
)
def test_button(role: str, state: str, offered: bool) -> None:
    """The page has the button when there is something to release and the right to."""
    LockFactory(key="k", **{state: True})
    page = browser_of(role).get(page_of("k")).rendered_content
    assert (f"{RELEASE}?key=k" in page) is offered


@pytest.mark.django_db
@pytest.mark.parametrize(("role", "offered"), [("viewer", False), ("operator", True)])
def test_action(role: str, offered: bool) -> None:
    """The list has the action and its checkboxes for those who may use it."""
    LockFactory(held=True)
    page = browser_of(role).get(LIST).rendered_content
    assert ('value="force_release"' in page) is offered
    assert ("_selected_action" in page) is offered


def test_free_locks_are_not_offered(operator: Client) -> None:
    """In the list a free lock can't be ticked; among free ones there is no action."""
    LockFactory(key="a", held=True)
    LockFactory(key="b", cooling=True)
    LockFactory(key="c", free=True)
    everything = operator.get(LIST, {"state": "all"})
    assert listed(everything) == ["a", "b", "c"]
    assert Elements(everything).fields("_selected_action") == ["a", "b"]
    free = operator.get(LIST, {"state": "free"})
    assert listed(free) == ["c"]
    assert Elements(free).fields("_selected_action") == []
    assert 'value="force_release"' not in free.rendered_content


# The list


def test_default_filter(operator: Client) -> None:
    """The list opens on what isn't free, the longest held first."""
    LockFactory(key="b, held", held=True, age=60)
    LockFactory(key="a, expired", expired=True, age=30)
    LockFactory(key="c, cooling", cooling=True, age=90)
    LockFactory(key="d, free", age=600)
    response = operator.get(LIST)
    assert listed(response) == ["c, cooling", "b, held", "a, expired"]
    assert listed(operator.get(LIST, {"q": ","})) == listed(response)
    everything = ["a, expired", "b, held", "c, cooling", "d, free"]
    assert listed(operator.get(LIST, {"state": "all"})) == everything
    [choices] = [list(f.choices(response.context["cl"])) for f in filters(response)]
    assert [(str(each["display"]), each["selected"]) for each in choices] == [
        ("not free", True),
        *((state, False) for state in (*State.values, "all")),
    ]


def filters(response: Any) -> list[Any]:
    """The filters beside the list."""
    found: list[Any] = response.context["cl"].filter_specs
    return found


@pytest.mark.parametrize("state", State.values)
def test_filter_by_state(operator: Client, state: str) -> None:
    """Each filter shows the rows of one state, and their pill says which."""
    for each in State.values:
        LockFactory(key=f"a lock {each}", **{each: True})
    response = operator.get(LIST, {"state": state})
    assert listed(response) == [f"a lock {state}"]
    assert f'class="dblocks-state dblocks-{state}">{state}<' in (
        response.rendered_content
    )


def test_unknown_state(operator: Client) -> None:
    """A filter that doesn't exist filters nothing."""
    LockFactory(key="k")
    assert listed(operator.get(LIST, {"state": "select"})) == ["k"]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("job", ["JOB:1", "job:2"]),
        ("JOB:", ["JOB:1", "job:2"]),
        ("WORKER", ["job:2"]),
        ("nightly", ["JOB:1"]),
        ("job nightly", ["JOB:1"]),
        ("'the nightly'", ["JOB:1"]),
        ("'nightly the'", []),
        ("%", []),
        ("_", []),
        ("\\", []),
        ("'", []),
        ("nothing", []),
        ("", ["JOB:1", "job:2", "other"]),
    ],
)
def test_search(operator: Client, search: str, found: list[str]) -> None:
    """Key, holder and note are searched, whatever the case of the letters."""
    LockFactory(key="JOB:1", note="The Nightly import")
    LockFactory(key="job:2", held=True, holder="Worker:7")
    LockFactory(key="other")
    assert listed(operator.get(LIST, {"q": search, "state": "all"})) == found


@pytest.mark.parametrize("key", ["Склад:7", "ÄRZTE", "在庫:7", "🔒"])
def test_search_for_other_letters(operator: Client, key: str) -> None:
    """A key is found as it is written, and in lower case where the database knows."""
    LockFactory(key=key, held=True)
    for search in {key, key if connection.vendor == "sqlite" else key.lower()}:
        assert listed(operator.get(LIST, {"q": search})) == [key]


def test_search_finds_free_locks_when_asked(operator: Client) -> None:
    """Where nobody holds anything, a search by default says nothing of the past."""
    LockFactory(key="free", holder="web-1 pid 7", note="the import")
    LockFactory(key="held", held=True, holder="web-1 pid 8", note="the import")
    for search in ("web-1", "import", "e"):
        assert listed(operator.get(LIST, {"q": search})) == ["held"]
        assert listed(operator.get(LIST, {"q": search, "state": "free"})) == ["free"]


def test_search_for_nul(operator: Client) -> None:
    """A search that no database would take is refused in words."""
    assert told(operator.get(LIST, {"q": "a\0b"}))


SORTED = {
    1: ["a", "b", "c"],
    2: ["a", "c", "b"],
    3: ["c", "b", "a"],
    4: ["b", "a", "c"],
    5: ["c", "a", "b"],
}
"""The keys in the order of each of the five columns."""


@pytest.mark.parametrize("column", SORTED)
@pytest.mark.parametrize("direction", ["", "-"])
def test_sorting(operator: Client, column: int, direction: str) -> None:
    """Every column sorts, up and down."""
    times = ("acquired_at", "expires_at")
    for key, state, holder, *moments in (
        ("a", "expired", "z", -200, -50),
        ("b", "held", "y", -300, 600),
        ("c", "expired", "x", -100, -90),
    ):
        moment = dict(zip(times, map(now, moments), strict=True))
        LockFactory(key=key, holder=holder, **{state: True}, **moment)
    found = listed(operator.get(LIST, {"o": f"{direction}{column}"}))
    if column == 2:  # two are equal
        assert found[0 if direction else -1] == "b"
    else:
        assert found == SORTED[column][:: -1 if direction else 1]


def make_permits() -> None:
    """Make permits of one key, and its neighbours in the order of code points."""
    for row in ("job", "job\x1f10", "job\x1f2", "job\x1f0", "job ", "jo"):
        LockFactory(key=row, held=True)


@pytest.mark.parametrize(
    "query", ["state=all", "state=all&q=job", "state=held&o=1", "o=1", "o=1&all="]
)
def test_order_of_permits(operator: Client, query: str) -> None:
    """Permits of a key stand together, in the order of their numbers."""
    make_permits()
    found = listed(operator.get(f"{LIST}?{query}"))
    ordered = ["job", "job\x1f0", "job\x1f2", "job\x1f10", "job "]
    assert [row for row in found if row != "jo"] == ordered
    back = listed(operator.get(f"{LIST}?o=-1"))
    assert back == [*reversed(ordered), "jo"]
    assert Elements(act(operator, "x", select_across=1)).fields("lock") == [
        field(row) for row in ("jo", *ordered)
    ]


def test_small_type(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """The note stands below the key, the number of waiters below the holder."""
    LockFactory(key="a:b", held=True, holder="web-1", note="n" * 100)
    LockFactory(key="quiet", held=True, holder="web-2")
    asked: list[set[str]] = []

    def waiters(connection: Any, keys: Any) -> dict[str, int]:
        asked.append(set(keys))
        return {"a:b": 3}

    monkeypatch.setattr(page_module.session_locks, "waiters", waiters)
    page = operator.get(LIST).rendered_content
    assert asked == [{"a:b", "quiet"}]
    assert '<bdi class="dblocks-key">a:<wbr>b</bdi>' in page
    assert f'<span class="dblocks-small"><bdi class="dblocks-text">{"n" * 79}…' in page
    assert '>web-1</bdi><span class="dblocks-small">3 waiting</span>' in page
    assert page.count("dblocks-small") == 2
    assert page.count('class="sortable column-') == 5


@pytest.mark.parametrize(
    ("key", "parts"),
    [
        ("order:2026-11/eu.west", ["order:", "2026-", "11/", "eu.", "west"]),
        ("a::b", ["a::", "b"]),
        (":a:", [":", "a:"]),
        ("在庫:7", ["在庫:", "7"]),
        ("<b>&:c", ["&lt;b&gt;&amp;:", "c"]),
        ("plain", ["plain"]),
    ],
)
def test_where_keys_break(key: str, parts: list[str]) -> None:
    """A key that is too long for its column is broken behind a separator."""
    assert formats.wrapped(key, "key") == (
        f'<bdi class="dblocks-key">{"<wbr>".join(parts)}</bdi>'
    )


@pytest.mark.parametrize("language", ["en", "he", "ja"])
def test_long_note(operator: Client, settings: Any, language: str) -> None:
    """It ends with an ellipsis, without the marks that a language adds to that."""
    settings.LANGUAGE_CODE = language
    LockFactory(key="k", held=True, note="n" * 100)
    text = Elements(operator.get(LIST)).text
    assert "n" * 79 + "…" in text


def test_where_notes_break(operator: Client) -> None:
    """So is a note, which is often the dotted name of a function."""
    LockFactory(key="k", held=True, note="shop.tasks.report")
    for address in LIST, page_of("k"):
        page = operator.get(address).rendered_content
        assert '<bdi class="dblocks-text">shop.<wbr>tasks.<wbr>report</bdi>' in page


def test_permit_in_the_list_and_on_the_page(operator: Client) -> None:
    """Key and permit stand apart; a plain lock has no permit."""
    LockFactory(key="job\x1f12", held=True)
    number = '<span class="dblocks-permit">12</span>'
    page = operator.get(LIST).rendered_content
    assert f'<span class="dblocks-small">permit {number}</span>' in page
    assert '<bdi class="dblocks-key">job</bdi>' in page
    for url in (page_of("job\x1f12"), f"{RELEASE}?key=job%1F12"):
        page = operator.get(url).rendered_content
        assert number in page
        assert '<bdi class="dblocks-key">job</bdi>' in page
        assert "job, permit 12" in page
        assert "\x1f" not in page
    LockFactory(key="plain", held=True)
    for url in (page_of("plain"), f"{RELEASE}?key=plain"):
        assert "ermit" not in operator.get(url).rendered_content


def test_search_for_the_key_of_permits(operator: Client) -> None:
    """A key finds all its permits."""
    make_permits()
    LockFactory(key="other\x1f1")
    assert len(listed(operator.get(LIST, {"q": "JOB"}))) == 5


@pytest.mark.parametrize("query", ["", "q=row", "state=held", "state=all", "o=-2.4"])
def test_number_of_queries(
    operator: Client, query: str, django_assert_num_queries: Any
) -> None:
    """A list costs as many queries for one row as for fifty."""
    LockFactory(held=True)
    with django_assert_num_queries(6):
        assert len(listed(operator.get(f"{LIST}?{query}"))) == 1
    LockFactory.bulk(49, held=True)
    with django_assert_num_queries(6):
        assert len(listed(operator.get(f"{LIST}?{query}"))) == 50


def test_pages(operator: Client) -> None:
    """Every row is on one page, in the order of the keys."""
    LockFactory.bulk(120)
    keys = [
        key
        for n in (1, 2, 3)
        for key in listed(operator.get(LIST, {"p": n, "state": "all"}))
    ]
    assert keys == sorted(keys)
    assert len(set(keys)) == 120
    assert listed(operator.get(LIST, {"all": "", "state": "all"})) == keys


def test_page_out_of_range(operator: Client) -> None:
    """A page that isn't there leads back to the list."""
    LockFactory.bulk(60, held=True)
    assert operator.get(LIST, {"p": 3}).status_code == 302


def test_counting_stops(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where counting stopped, the page says that there are more."""
    monkeypatch.setattr(changelist, "MAX_COUNT", 100)
    LockFactory.bulk(100, held=True)
    assert "100 locks" in operator.get(LIST).rendered_content.replace("≥100", "")
    LockFactory(held=True)
    assert "≥100 locks" in operator.get(LIST).rendered_content
    assert operator.get(LIST, {"p": 3}).status_code == 302


def test_list_and_page_agree(operator: Client) -> None:
    """State and times are those of the database, in the list and on the page."""
    LockFactory(key="k", expired=True, age=600, holder="host:1:t", note="why")
    for url in (LIST, page_of("k")):
        page = operator.get(url).rendered_content
        assert 'dblocks-expired">expired<' in page
        assert "host:1:t" in page
        assert ">11 min ago<" in page
        assert ">10 min overdue<" in page


@pytest.mark.parametrize("least", [0, 60], ids=["free", "cooling"])
def test_released_lock_has_a_last_holder(operator: Client, least: int) -> None:
    """Who released a lock isn't shown as its holder, but as its last one."""
    with distributed_lock("k", hold_at_least=least):
        pass
    holder = html.escape(stored("k").holder)
    last = f'<span class="dblocks-last">last: <bdi class="dblocks-text">{holder}</bdi>'
    for url in (f"{LIST}?state=all", page_of("k")):
        page = operator.get(url).rendered_content
        assert last in page
        assert page.count(holder) == 1


def test_nothing_is_none(operator: Client) -> None:
    """What a lock hasn't got is a dash, in the list and on its page."""
    LockFactory(key="k")
    for url in (f"{LIST}?state=all", page_of("k")):
        page = operator.get(url).rendered_content
        assert ">None<" not in page
        assert page.count(">-<") >= 3


@pytest.mark.parametrize("use_tz", [True, False])
def test_exact_time(operator: Client, settings: Any, use_tz: bool) -> None:
    """The exact moment is there in local time and in UTC, whatever USE_TZ says."""
    settings.USE_TZ, settings.TIME_ZONE = use_tz, "Asia/Tokyo"
    LockFactory(key="k", held=True, age=60)
    moment = stored("k").acquired_at
    assert moment is not None
    title = (
        f"{moment + timedelta(hours=9):%Y-%m-%d %H:%M:%S} JST "
        f"({moment:%Y-%m-%d %H:%M:%S} UTC)"
    )
    with timezone.override("Asia/Tokyo"):
        assert f'title="{title}"' in operator.get(LIST).rendered_content


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s ago"),
        (119.9, "119 s ago"),
        (120, "2 min ago"),
        (7199, "119 min ago"),
        (7200, "2 h ago"),
        (172800, "2 days ago"),
        (-0.4, "0 s ago"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    """A duration is said in a unit of which there are at least two."""
    assert formats.phrase(formats.AGO, seconds) == text
    length = text.removesuffix(" ago")
    assert formats.phrase(formats.LENGTH, seconds) == length


def test_remaining_is_a_length(operator: Client) -> None:
    """It is said as one, wherever it is."""
    LockFactory(key="k", held=True, expires_at=now(59 * 60 + 30))
    for response in (
        operator.get(LIST),
        operator.get(page_of("k")),
        operator.get(RELEASE, {"key": "k"}),
    ):
        assert ">59 min</time>" in response.rendered_content


# The confirmation


@pytest.mark.parametrize("door", ["button", "action"])
def test_confirmation(operator: Client, door: str) -> None:
    """Both doors lead to one page, which tells what will happen."""
    LockFactory(key="k", held=True, holder="host:1:t", note="why", version=41)
    if door == "button":
        response = operator.get(RELEASE, {"key": "k"})
    else:
        response = act(operator, "k")
    page = response.rendered_content
    for text in ("host:1:t", "why", "dblocks-held", " ago</time>", "won’t commit"):
        assert text in page
    assert "at its next renewal or guard, two may be at work." in page
    assert "Reason (required)" in page
    assert Elements(response).fields("lock") == [field("k", 41)]
    assert f'action="{RELEASE}?key=k"' in page
    assert page.count("<h1>") == 1


STOPPED = "isn’t stopped: it loses its lock"
ALL_STOPPED = "aren’t stopped: they lose their locks"
UNHELD = "Nobody holds this lock any more"
ALL_UNHELD = "Nobody holds these locks any more"
OVERDUE = "If the expired lock’s holder is still at work"
ALL_OVERDUE = "If the expired locks’ holders are still at work"


CONSEQUENCES = {
    "held": {STOPPED},
    "held held cooling": {ALL_STOPPED},
    "held cooling": {STOPPED},
    "held expired": {STOPPED, OVERDUE},
    "cooling": {UNHELD},
    "cooling cooling": {ALL_UNHELD},
    "expired": {UNHELD, OVERDUE},
    "expired cooling": {ALL_UNHELD, OVERDUE},
    "expired expired": {ALL_UNHELD, ALL_OVERDUE},
}


@pytest.mark.parametrize(("states", "said"), CONSEQUENCES.items(), ids=CONSEQUENCES)
def test_consequences(operator: Client, states: str, said: set[str]) -> None:
    """The page tells what a release does to locks as they are, and no more."""
    for number, state in enumerate(states.split()):
        LockFactory(key=f"k{number}", **{state: True})
    page = act(operator, "x", select_across=1).rendered_content
    all_said = {STOPPED, ALL_STOPPED, UNHELD, ALL_UNHELD, OVERDUE, ALL_OVERDUE}
    assert {text for text in all_said if text in page} == said
    assert ("By force:" in page) == ("held" in states)
    assert ("two may be at work" in page) == ("held" in states)


@pytest.mark.parametrize("keys", [["k\nk"], ["a", "b"]], ids=["one", "several"])
def test_session_that_is_over(operator: Client, keys: list[str]) -> None:
    """Whoever has to log in first isn't told that nobody holds what was selected."""
    for key in keys:
        LockFactory(key=key, held=True)
    page = Elements(operator.get(RELEASE, {"key": keys}))
    [url] = [
        str(attributes["action"])
        for tag, attributes in page.found
        if tag == "form" and str(attributes.get("action")).startswith(RELEASE)
    ]
    user = operator.session["_auth_user_id"]
    operator.logout()
    response = operator.post(url, {"lock": page.fields("lock"), "reason": "stuck"})
    assert stored(keys[0]).owner
    [after] = parse_qs(urlsplit(response["Location"]).query)["next"]
    operator.force_login(User.objects.get(pk=user))
    response = operator.get(after, follow=True)
    assert not told(response)
    if len(keys) == 1:
        assert Elements(response).fields("lock") == page.fields("lock")
    else:
        assert response.redirect_chain == [(LIST, 302)]


@pytest.mark.parametrize("data", [{"key": "k"}, {"key": "gone"}])
def test_nothing_to_confirm(operator: Client, data: dict[str, str]) -> None:
    """Free and unknown locks can't be released."""
    LockFactory(key="k")
    response = operator.get(RELEASE, data, follow=True)
    assert response.redirect_chain == [(LIST, 302)]
    assert told(response) == [
        "There was nothing to release: nobody holds what was selected."
    ]


def test_nothing_ticked(operator: Client) -> None:
    """The action without a lock says so."""
    LockFactory(held=True)
    assert "Items must be selected" in told(operator.get(act(operator).url))[0]


def test_no_key_ticked(operator: Client) -> None:
    """A made-up checkbox whose value can't be a key breaks nothing."""
    LockFactory(held=True)
    assert "Items must be selected" in told(operator.get(act(operator, "a%00").url))[0]


def test_free_locks_ticked(operator: Client) -> None:
    """The action on free locks alone says so; among others they are named."""
    LockFactory(key="a")
    LockFactory(key="b", held=True)
    response = act(operator, "a")
    assert response.status_code == 302
    assert "nothing to release" in told(operator.get(response.url))[0]
    for response in (
        act(operator, "a", "b"),
        operator.get(RELEASE, {"key": ["a", "b"]}),
    ):
        assert Elements(response).fields("lock") == [field("b")]
        assert told(response) == ["Left 1 lock alone, which is free: <bdi>a</bdi>."]
    assert not told(act(operator, "x", url=f"{LIST}?state=all", select_across=1))


@pytest.mark.parametrize("query", ["", "state=expired", "q=host"])
def test_ticked_and_taken_since(operator: Client, query: str) -> None:
    """Whatever the list's filter, the page shows what was ticked as it is now."""
    for key in ("a", "b"):
        LockFactory(key=key, expired=True, holder="host:1:t")
    assert DistributedLock.objects.acquire("a", owner="new", lease=60, holder="web")
    url = f"{LIST}?{query}"
    assert Elements(act(operator, "a", url=url)).fields("lock") == [field("a", 2)]
    response = act(operator, "a", "b", url=url)
    fields = [field("a", 2), field("b", state="expired")]
    assert Elements(response).fields("lock") == fields
    assert not told(response)


def test_all_across_pages(operator: Client) -> None:
    """All that the filter shows is confirmed, and released, at once."""
    LockFactory.bulk(70, held=True)
    LockFactory.bulk(30)
    LockFactory(key="other", cooling=True)
    elements = Elements(act(operator, "x", url=f"{LIST}?state=held", select_across=1))
    fields = elements.fields("lock")
    assert len(fields) == 70
    [url] = [
        target
        for _tag, attributes in elements.found
        if (target := attributes.get("action")) and target.startswith(RELEASE)
    ]
    response = operator.post(url, {"lock": fields, "reason": "r"}, follow=True)
    assert response.redirect_chain == [(f"{LIST}?state=held", 302)]
    assert told(response)[0].startswith("Released 70 locks: <bdi>row:")
    assert told(response)[0].endswith(", ….")
    assert DistributedLock.objects.free().count() == 100
    assert LogEntry.objects.count() == 70


def test_more_than_fit(operator: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """A page has a limit, and says when it was reached."""
    monkeypatch.setattr(force_release, "MAX_AT_ONCE", 3)
    LockFactory.bulk(4, held=True)
    response = act(operator, "x", select_across=1)
    assert len(Elements(response).fields("lock")) == 3
    assert "these are the first 3" in response.rendered_content


# The release


@pytest.mark.parametrize("state", ["held", "expired", "cooling"])
def test_release(operator: Client, state: str) -> None:
    """The lock is free, its holder fenced off, the page says so."""
    LockFactory(key="k", version=7, **{state: True})
    response = release(operator, field("k", 7, state), follow=True)
    assert told(response) == ["Released 1 lock: <bdi>k</bdi>."]
    assert DistributedLock.objects.free().filter(pk="k", version=8).exists()


def test_asking(operator: Client) -> None:
    """Asking comes first on the page, takes nothing away, and is in the history."""
    LockFactory(key="k", version=7, held=True)
    LockFactory(key="cold", version=3, cooling=True)
    page = act(operator, "k")
    buttons = [
        attributes["name"]
        for _tag, attributes in Elements(page).found
        if attributes.get("type") == "submit" and attributes.get("name")
    ]
    assert buttons == ["ask", "force"]
    assert "Nothing is taken away." in page.rendered_content
    assert 'name="ask"' not in act(operator, "cold").rendered_content
    data = {
        "lock": [field("k", 7), field("cold", 3, "cooling")],
        "ask": "x",
        "reason": "deploy",
    }
    response = operator.post(RELEASE, data, follow=True)
    assert told(response) == [
        "Asked for 1 lock: <bdi>k</bdi>.",
        "Nobody holds 1 lock, so nobody was asked: <bdi>cold</bdi>.",
    ]
    row = DistributedLock.objects.held().get(pk="k")
    assert (row.version, row.release_requested_at is None) == (7, False)
    [(by, what)] = told_by_history(operator, "k")
    assert (by, what.endswith("Reason: deploy")) == ("operator", True)
    assert what.startswith("Asked for (held by host:1:")
    lock_page = operator.get(page_of("k")).rendered_content
    assert "Release requested" in lock_page


def test_asking_for_some_that_are_held(operator: Client) -> None:
    """Of a mixed selection those that are held are counted and asked, and only they."""
    for state in ("held", "held", "held", "held", "cooling", "expired"):
        LockFactory(**{state: True})
    elements = Elements(act(operator, "x", select_across=1))
    assert elements.fields("ask") == ["Ask for 4 locks"]
    assert elements.fields("force") == ["Force release 6 locks"]
    data = {"lock": elements.fields("lock"), "ask": "x", "reason": "deploy"}
    asked, unheld = told(operator.post(RELEASE, data, follow=True))
    assert asked.startswith("Asked for 4 locks: ")
    assert unheld.startswith("Nobody holds 2 locks, so nobody was asked: ")
    assert DistributedLock.objects.filter(release_requested_at=None).count() == 2
    assert LogEntry.objects.count() == 4


def test_asking_for_what_changed_hands(operator: Client) -> None:
    """A grant that is over is told apart from a lock that nobody holds."""
    LockFactory(key="k", held=True, version=8)
    data = {"lock": [field("k", 7)], "ask": "x", "reason": "deploy"}
    [changed] = told(operator.post(RELEASE, data, follow=True))
    assert changed.startswith("Left 1 lock alone, which was released or changed hands")


def test_release_of_a_permit(operator: Client) -> None:
    """That permit is free; page, history and signal name key and permit apart."""
    heard: list[tuple[Any, Any]] = []

    def listen(**kwargs: Any) -> None:
        heard.append((kwargs["key"], kwargs["permit"]))

    make_permits()
    [value] = Elements(act(operator, "job%1F10")).fields("lock")
    [button] = [
        attributes["href"]
        for _tag, attributes in Elements(operator.get(page_of("job\x1f10"))).found
        if attributes.get("class") == "dblocks-force-release"
    ]
    assert Elements(operator.get(button)).fields("lock") == [value]
    lock_force_released.connect(listen)
    try:
        response = release(operator, value, field("job"), follow=True)
    finally:
        lock_force_released.disconnect(listen)
    assert told(response) == [
        "Released 2 locks: <bdi>job</bdi> (permit 10), <bdi>job</bdi>."
    ]
    assert heard == [("job", 10), ("job", None)]
    free = DistributedLock.objects.free()
    assert {lock.key for lock in free} == {"job\x1f10", "job"}
    entry = LogEntry.objects.get(object_id="job\x1f10")
    assert entry.object_repr == "job, permit 10"
    history = operator.get(page_of("job\x1f10", "history")).rendered_content
    assert "job, permit 10" in history
    assert "1 entry" in history
    index = operator.get("/admin/").rendered_content
    assert page_of("job\x1f10") in index


@pytest.mark.parametrize("reason", ["", "   ", "x" * 256])
def test_reason_is_required(operator: Client, reason: str) -> None:
    """Without a fitting reason the page is shown again, with the versions it had."""
    LockFactory(key="k", held=True, version=5)
    response = release(operator, field("k", 5), reason=reason)
    assert response.status_code == 200
    assert "errorlist" in response.rendered_content
    assert Elements(response).fields("lock") == [field("k", 5)]
    assert stored("k").version == 5


def test_without_reason_and_changed(operator: Client) -> None:
    """What changed hands meanwhile isn't slipped onto the page that is shown again."""
    LockFactory(key="a", held=True, version=5)
    LockFactory(key="b", held=True, version=6)
    response = release(operator, field("a", 5), field("b", 5), reason="")
    assert Elements(response).fields("lock") == [field("a", 5)]
    assert "<bdi>b</bdi>" in told(response)[0]


def test_without_reason_and_free(operator: Client) -> None:
    """Nor is there a release of what has cooled down meanwhile."""
    LockFactory(key="k", free=True, version=5)
    response = release(operator, field("k", 5, "cooling"), reason="", follow=True)
    assert response.redirect_chain == [(LIST, 302)]
    assert told(response)[0].startswith("Left 1 lock alone, which was released")


def test_stale_confirmation(operator: Client) -> None:
    """A lock that changed hands since is left alone and named."""
    LockFactory(key="same", held=True, version=3)
    LockFactory(key="other's", held=True, version=4)
    LockFactory(key="freed", version=3)
    response = release(
        operator,
        *(field(key, 3) for key in ("same", "other's", "gone", "freed")),
        follow=True,
    )
    assert told(response) == [
        "Released 1 lock: <bdi>same</bdi>.",
        "Left 3 locks alone, which were released or changed hands since the page was "
        "shown: <bdi>other's</bdi>, <bdi>gone</bdi>, <bdi>freed</bdi>.",
    ]
    assert [message.level_tag for message in response.context["messages"]] == [
        "success",
        "warning",
    ]
    assert stored("other's").version == 4
    assert list(LogEntry.objects.values_list("object_id", flat=True)) == ["same"]


def test_database_that_fails_in_between(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was released before is told by the next page that opens."""
    for key in ("a", "b", "c"):
        LockFactory(key=key, held=True)

    def fail_at_b(key: str, patience: float) -> bool:
        if key == "b":
            raise OperationalError("Server has gone away")
        return False

    monkeypatch.setattr(force_release, "is_busy", fail_at_b)
    operator.raise_request_exception = False
    assert release(operator, *map(field, "abc")).status_code == 500
    assert DistributedLock.objects.free().get().key == "a"
    assert told(operator.get(LIST)) == ["Released 1 lock: <bdi>a</bdi>."]


def test_changed_at_the_last_moment(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The condition is in the statement that releases, not only in a look before."""
    LockFactory(key="k", held=True)

    def take_over(key: str, patience: float) -> bool:
        DistributedLock.objects.force_release(key)
        DistributedLock.objects.acquire(key, owner="new", lease=60)
        return False

    monkeypatch.setattr(force_release, "is_busy", take_over)
    assert "Left 1 lock alone" in told(release(operator, field("k"), follow=True))[0]
    assert stored("k").owner == "new"
    assert not LogEntry.objects.exists()


@pytest.mark.parametrize("at_last", [False, True], ids=["before", "at the last moment"])
def test_cooling_since_it_was_shown(
    operator: Client, monkeypatch: pytest.MonkeyPatch, at_last: bool
) -> None:
    """A grant that its holder has released keeps what is left of its hold_at_least."""
    LockFactory(key="k", held=True, owner="o", min_until=now(3600))
    fields = Elements(operator.get(RELEASE, {"key": "k"})).fields("lock")

    def give_back(*_: Any) -> bool:
        assert DistributedLock.objects.release("k", owner="o", version=1)
        return False

    if at_last:
        monkeypatch.setattr(force_release, "is_busy", give_back)
    else:
        give_back()
    response = release(operator, *fields, follow=True)
    assert "Left 1 lock alone, which was released" in told(response)[0]
    assert DistributedLock.objects.cooling().filter(pk="k", version=1).exists()
    assert not LogEntry.objects.exists()
    # Shown as cooling, it is released.
    monkeypatch.undo()
    fields = Elements(operator.get(RELEASE, {"key": "k"})).fields("lock")
    assert told(release(operator, *fields, follow=True))[0].startswith("Released 1")
    assert DistributedLock.objects.free().filter(pk="k", version=2).exists()


@pytest.mark.parametrize(
    "value",
    [
        *("", "k", ":k", "1:k", "::k", "held:k", "held::k", "held:x:k", "warm:1:k"),
        *("held:1:", "held:1:\0", "held:1:" + "k" * 256, f"held:{'9' * 5000}:k"),
        *(f"held:1:{key}" for key in ("k%1F", "%1F1", "k%1F1000", "k%1F" + "9" * 5000)),
    ],
)
def test_fields_that_no_page_has(operator: Client, value: str) -> None:
    """Made-up fields release nothing and break nothing."""
    LockFactory(key="k", held=True)
    response = release(operator, value, follow=True)
    assert "nothing to release" in told(response)[0]
    assert stored("k").version == 1


def test_log_entry(operator: Client) -> None:
    """The history says who had it, under which token, and why it was released."""
    LockFactory(key="k", held=True, holder="web-1:7:t", version=41)
    release(operator, field("k", 41), reason="[hung] <b>since noon</b>")
    entry = LogEntry.objects.get()
    assert entry.user.username == "operator"
    assert (entry.object_id, entry.object_repr) == ("k", "k")
    assert entry.get_change_message() == (
        "Force released (last held by web-1:7:t, fencing token 41). "
        "Reason: [hung] <b>since noon</b>"
    )
    page = operator.get(page_of("k", "history")).rendered_content
    assert html.escape(entry.get_change_message()) in page


def test_history_of_hostile_texts(operator: Client) -> None:
    """Holder, reason and whoever did it are shown, whatever they say."""
    LockFactory(key="k", held=True, holder="\u202ehost\n")
    DistributedLock.objects.force_release("k", by="me\x1b[2J", reason="a\r\nb")
    LockFactory(key="l", held=True, holder="\u202ehost\n")
    release(operator, field("l"))
    [(who, what)] = told_by_history(operator, "k")
    assert who == r"me\x1b[2J"
    assert r"last held by \u202ehost\n, fencing" in what
    assert what.endswith(r"Reason: a\r\nb")
    assert r"\u202ehost\n" in LogEntry.objects.get().get_change_message()


def test_hostile_owner(operator: Client) -> None:
    """An owner's id is a text of programs and users, too."""
    LockFactory(key="k", held=True, owner="\u202ea\x1b[2J")
    page = operator.get(page_of("k")).rendered_content
    assert r"\u202ea\x1b[2J" in page
    assert "\u202e" not in page


def told_by_history(client: Client, key: str) -> list[tuple[str, str]]:
    """Who did what, as a lock's history tells it."""
    page = client.get(page_of(key, "history")).rendered_content
    _before, _id, table = page.partition('id="change-history"')
    rows = re.findall(r"<td>(.*?)</td>\s*<td>(.*?)</td>", table)
    return [(html.unescape(who), html.unescape(what)) for who, what in rows]


def test_history_of_every_release(operator: Client) -> None:
    """It has what the admin, commands and programs released, the latest first."""
    for version, by in enumerate((None, "", "deploy <b>", User(username="ann")), 1):
        LockFactory(key="k", held=True, version=version, holder=f"web-{version}")
        by_whom = {"by": by, "reason": "<i>hung</i>" if by else ""}
        assert DistributedLock.objects.force_release("k", **by_whom)
        DistributedLock.objects.all()._raw_delete("default")
    LockFactory(key="k", held=True, version=5, holder="web-5")
    call_command("locks", "release", "k", yes=True, reason="the host is gone")
    DistributedLock.objects.all()._raw_delete("default")
    LockFactory(key="k", held=True, version=6, holder="web-6")
    release(operator, field("k", 6), reason="stuck")
    what = "Force released (last held by web-{0}, fencing token {0})."
    found = told_by_history(operator, "k")
    assert found.pop(1) == (
        getpass.getuser(),
        f"{what.format(5)} Reason: the host is gone",
    )
    assert found == [
        ("operator", f"{what.format(6)} Reason: stuck"),
        ("ann", f"{what.format(4)} Reason: <i>hung</i>"),
        ("deploy <b>", f"{what.format(3)} Reason: <i>hung</i>"),
        ("", what.format(2)),
        ("", what.format(1)),
    ]


def test_history_has_pages(operator: Client) -> None:
    """A long history is paged through."""
    for version in range(130):
        grant = Grant("k", "", version)
        kind = Intervention.Kind.FORCE_RELEASE
        record(kind, "default", grant, holder="", by="me", reason="")
    LockFactory(key="k")
    assert len(told_by_history(operator, "k")) == 100
    response = operator.get(page_of("k", "history"), {"p": 2})
    assert response.rendered_content.count("<td>me</td>") == 30
    assert "130 entries" in response.rendered_content
    assert "?p=1" in response.rendered_content


def test_release_and_record_are_one(operator: Client) -> None:
    """Nothing is released without a record, and nothing recorded that wasn't."""
    LockFactory(key="k", held=True)

    class Nameless:
        def __str__(self) -> str:
            raise RuntimeError("no name")

    with pytest.raises(RuntimeError, match="no name"):
        DistributedLock.objects.force_release("k", by=Nameless())
    assert stored("k").version == 1
    assert not DistributedLock.objects.force_release("k", version=7)
    with transaction.atomic():
        assert DistributedLock.objects.force_release("k")
        transaction.set_rollback(True)
    assert told_by_history(operator, "k") == []
    assert stored("k").version == 1


def test_history_of_one_key(operator: Client) -> None:
    """Keys that a database's text comparison takes for one have separate histories."""
    for key in ("job", "Job"):
        LockFactory(key=key, held=True)
        release(operator, field(key), reason=f"about {key}")
    page = operator.get(page_of("Job", "history")).rendered_content
    assert "about Job" in page
    assert "about job" not in page
    assert "1 entry" in page


def test_signal(operator: Client) -> None:
    """Machines are told who did it and why."""
    heard: list[dict[str, Any]] = []

    def listen(**kwargs: Any) -> None:
        heard.append(kwargs)

    LockFactory(key="k", held=True, owner="o", version=3)
    lock_force_released.connect(listen)
    try:
        release(operator, field("k", 3), reason="stuck")
    finally:
        lock_force_released.disconnect(listen)
    [signal] = heard
    assert signal["by"].username == "operator"
    assert (signal["key"], signal["fencing_token"]) == ("k", 3)
    assert (signal["owner"], signal["reason"]) == ("o", "stuck")


# Where it runs


@pytest.fixture
def people(committed: None) -> Iterator[None]:
    """Users in a committed database, removed at the end."""
    yield
    User.objects.all().delete()


@pytest.mark.usefixtures("people")
def test_atomic_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release is committed at once where requests run in transactions."""
    for alias in connections:
        monkeypatch.setitem(connections.settings[alias], "ATOMIC_REQUESTS", True)
    in_transaction: list[bool] = []

    def listen(**kwargs: Any) -> None:
        in_transaction.append(connection.in_atomic_block)

    LockFactory(key="k", held=True)
    client = browser_of("operator")
    lock_force_released.connect(listen)
    try:
        assert client.get(LIST).status_code == 200
        release(client, field("k"))
    finally:
        lock_force_released.disconnect(listen)
    assert in_transaction == [False]
    assert LogEntry.objects.count() == 1


@pytest.mark.usefixtures("people", "two_writers")
def test_row_locked_by_a_transaction(
    other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock whose holder is about to commit doesn't keep the request waiting."""
    monkeypatch.setattr(force_release, "PATIENCE", 0.1)
    client = browser_of("operator")
    lease = distributed_lock("k").acquire()
    version = lease.fencing_token
    assert version is not None
    with transaction.atomic():
        lease.guard()
        response = other.do(release, client, field("k", version), follow=True)
    assert "an open transaction has locked" in told(response)[0]
    assert not LogEntry.objects.exists()
    assert lease.release()


@pytest.mark.usefixtures("people", "two_writers")
def test_rows_locked_by_a_transaction(
    other: OtherThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has hundreds of rows locked is waited for once."""
    monkeypatch.setattr(force_release, "PATIENCE", 0.4)
    client = browser_of("operator")
    for number in range(10):
        LockFactory(key=f"k{number}", held=True)
    fields = [field(f"k{number}") for number in range(10)]
    with transaction.atomic():
        list(DistributedLock.objects.select_for_update())
        start = time.monotonic()
        response = other.do(release, client, *fields, follow=True)
        waited = time.monotonic() - start
    assert "Left 10 locks alone, whose rows open transactions" in told(response)[0]
    assert waited < 5 * 0.4


@pytest.fixture
def writer(people: None) -> Iterator[Any]:
    """Another program on the same SQLite database, which writes when told to."""
    name = str(connection.settings_dict["NAME"])
    if connection.vendor != "sqlite" or in_memory():
        pytest.skip("elsewhere there is more than one writer")
    writer = sqlite3.connect(name, isolation_level=None)
    with connection.cursor() as cursor:
        [patience] = cursor.execute("PRAGMA busy_timeout").fetchone()
        cursor.execute("PRAGMA busy_timeout = 50")
    yield writer
    writer.close()
    with connection.cursor() as cursor:
        cursor.execute(f"PRAGMA busy_timeout = {patience}")


@pytest.mark.parametrize("button", ["force", "ask"])
def test_another_writer(writer: Any, button: str) -> None:
    """Beside another writer nothing is released, and the page says why."""
    LockFactory.bulk(3, held=True)
    client = browser_of("operator")
    fields = Elements(act(client, "x", select_across=1)).fields("lock")
    writer.execute("BEGIN IMMEDIATE")
    data = {"lock": fields, "reason": "stuck", button: "x"}
    response = client.post(RELEASE, data, follow=True)
    [message] = told(response)
    assert message.startswith(
        "Left 3 locks alone, because another process is writing to the database: "
    )
    assert message.endswith(" Try again.")
    writer.execute("ROLLBACK")
    assert DistributedLock.objects.held().count() == 3
    assert told(client.post(RELEASE, data, follow=True))[0].startswith(
        "Asked for 3 locks" if button == "ask" else "Released 3 locks"
    )


def test_another_writer_after_the_release(
    writer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What is released is reported so, although the admin's log can't be written."""
    LockFactory(key="k", held=True)
    client = browser_of("operator")

    def listen(**kwargs: Any) -> None:
        writer.execute("BEGIN IMMEDIATE")

    lock_force_released.connect(listen)
    try:
        response = release(client, field("k"), follow=True)
    finally:
        lock_force_released.disconnect(listen)
    writer.execute("ROLLBACK")
    assert told(response) == ["Released 1 lock: <bdi>k</bdi>."]
    assert told_by_history(client, "k") == [
        (
            "operator",
            "Force released (last held by host:1:MainThread, fencing token 1). "
            "Reason: stuck",
        )
    ]
    assert not LogEntry.objects.exists()
    said = "not in the admin's log key='k' permit=None error=database is locked"
    assert said in caplog.text


@pytest.mark.django_db(databases=["default", "locks"])
def test_locks_in_another_database(settings: Any) -> None:
    """The admin lists and releases where the default backend keeps its locks."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}
    client = browser_of("operator")
    LockFactory(key="here", held=True)
    elsewhere = DistributedLock.objects.using("locks")
    elsewhere.acquire("there", owner="o", lease=60)
    version = elsewhere.get().version
    assert listed(client.get(LIST)) == ["there"]
    assert client.get(page_of("there")).status_code == 200
    assert Elements(act(client, "there")).fields("lock") == [field("there", version)]
    response = release(client, field("there", version), follow=True)
    assert told(response) == ["Released 1 lock: <bdi>there</bdi>."]
    assert elsewhere.free().count() == 1
    assert DistributedLock.objects.using("default").get().version == 1
    assert LogEntry.objects.using("default").count() == 1
    assert "stuck" in client.get(page_of("there", "history")).rendered_content


def test_other_engine(operator: Client, settings: Any) -> None:
    """With another engine as the default, the admin shows the lock table."""
    path = "dblocks.backends.locmem.LocMemBackend"
    settings.DBLOCKS = {"default": {"BACKEND": path}}
    LockFactory(key="k", held=True)
    assert listed(operator.get(LIST)) == ["k"]


class Operations(admin.AdminSite):
    """A project's own admin."""

    site_header = "Operations"


operations = Operations(name="operations")
operations.register(DistributedLock, DistributedLockAdmin)
urlpatterns = [
    path("admin/", admin.site.urls),
    path("operations/", operations.urls),
    path("i18n/", include("django.conf.urls.i18n")),
]


@pytest.mark.urls(__name__)
def test_custom_admin_site(operator: Client) -> None:
    """In a project's own admin every link stays there."""
    LockFactory(key="k", held=True)
    base = "/operations/dblocks/distributedlock/"
    confirmation = operator.get(f"{base}force-release/?key=k")
    pages = [
        operator.get(base),
        operator.get(f"{base}k/change/"),
        operator.get(f"{base}k/history/"),
        confirmation,
        act(operator, "k", url=base),
    ]
    for response in pages:
        targets = {
            attributes.get("href") or attributes.get("action") or ""
            for _tag, attributes in Elements(response).found
        }
        assert not [target for target in targets if target.startswith("/admin/")]
        assert "Operations" in response.rendered_content
    data = {"lock": Elements(confirmation).fields("lock"), "reason": "r"}
    response = operator.post(f"{base}force-release/", data)
    assert response.url == base


# What pages are made of


def pages(client: Client, key: str) -> list[Any]:
    """Every page that shows a lock."""
    responses = [
        client.get(LIST),
        client.get(page_of(key)),
        client.get(page_of(key, "history")),
        client.get(RELEASE, {"key": key}),
        release(client, field(key), reason=""),
    ]
    assert {response.status_code for response in responses} == {200}
    return responses


def test_no_inline_script_or_style(operator: Client) -> None:
    """Nothing that a strict Content-Security-Policy would refuse."""
    LockFactory(key="k", held=True)
    for response in pages(operator, "k"):
        for tag, attributes in Elements(response).found:
            assert tag != "style"
            assert tag != "script" or attributes["src"]
            assert "style" not in attributes
            assert not [name for name in attributes if name.startswith("on")]
            assert not (attributes.get("href") or "").startswith("javascript:")


@pytest.mark.skipif(django.VERSION < (6, 1), reason="the admin has no nonces there")
def test_nonces(operator: Client, settings: Any) -> None:
    """Where Django's own files carry a nonce, ours do too."""
    settings.SECURE_CSP = {"script-src": ["'nonce-…'"]}
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "django.middleware.csp.ContentSecurityPolicyMiddleware",
    ]
    processor = "django.template.context_processors.csp"
    [templates] = copy.deepcopy(settings.TEMPLATES)
    templates["OPTIONS"]["context_processors"].append(processor)
    settings.TEMPLATES = [templates]
    LockFactory(key="k", held=True)
    for response in pages(operator, "k"):
        for tag, attributes in Elements(response).found:
            if tag == "script" or attributes.get("rel") == "stylesheet":
                assert attributes.get("nonce"), attributes


@hostile
def test_hostile_keys_are_shown(operator: Client, key: str) -> None:
    """Any key's pages open, and show it as text."""
    LockFactory(key=key, held=True, holder=key, note=key)
    for response in pages(operator, key):
        text = response.rendered_content
        assert "<script>alert" not in text
        # Django itself strips the keys in its titles.
        assert html.escape(visible(key[:60].strip())) in text
        hidden = set(key) - set(visible(key)) - {"\n"}
        assert not hidden & set(Elements(response).text)


@hostile
def test_hostile_keys_are_released(operator: Client, key: str) -> None:
    """What a confirmation page holds names the key exactly."""
    LockFactory(key=key, held=True)
    LockFactory(key="other", held=True)
    button = operator.get(page_of(key))
    [url] = [
        attributes["href"]
        for _tag, attributes in Elements(button).found
        if attributes.get("class") == "dblocks-force-release"
    ]
    [value] = Elements(operator.get(url)).fields("lock")
    response = release(operator, value, follow=True)
    assert told(response) == [f"Released 1 lock: <bdi>{visible(key)}</bdi>."]
    assert not DistributedLock.objects.held().filter(pk=key).exists()
    assert stored("other").version == 1
    assert LogEntry.objects.get().object_id == key


@hostile
def test_hostile_keys_are_ticked(operator: Client, key: str) -> None:
    """The value of a checkbox names the key exactly, line ends and all."""
    LockFactory(key=key, held=True)
    [value] = Elements(operator.get(LIST)).fields("_selected_action")
    # As browsers do with the values of form fields.
    sent = value.replace("\r\n", "\n").replace("\r", "\n").replace("\n", "\r\n")
    assert Elements(act(operator, sent)).fields("lock") == [field(key)]
