"""The shop's leader: ``manage.py lead`` in several processes, and the page."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from dblocks import LeaseLost
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from testproject.shop.board import LEADER_LOCK
from testproject.shop.leading import recommend
from testproject.shop.models import Product, Recommendation
from tests.support.commands import Commands
from tests.support.timing import DEADLINE, eventually, scaled


class Candidate:
    """A process of ``manage.py lead``, and what it says."""

    def __init__(self, commands: Commands, name: str) -> None:
        self._log = commands.file()
        options = ["--name", name, "--lease", str(scaled(1.5)), "--pause=0.05"]
        with self._log.open("wb") as log:
            # One of them as people start it.
            fresh = name == "Ann"
            self.process = commands.start(
                "lead", *options, fresh=fresh, stdout=log, stderr=log
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def says(self, words: str) -> None:
        eventually(lambda: words in self.said, what=repr(words))

    def finish(self) -> None:
        """Tell it to end and see it end well."""
        self.process.send_signal(signal.SIGTERM)
        assert self.process.wait(DEADLINE) == 0


@pytest.fixture
def stand(shop: None, commands: Commands) -> Callable[[str], Candidate]:
    """Start candidates; those that are left at the test's end are killed."""
    return lambda name: Candidate(commands, name)


@pytest.fixture
def two(stand: Callable[[str], Candidate]) -> tuple[Candidate, Candidate]:
    """A leader that has written, and a candidate."""
    Product.objects.create(name="Lamp", stock=1)
    first, second = stand("Ann"), stand("Bob")
    for candidate in (first, second):
        candidate.says("stands for leader")
    eventually(written, what="a recommendation")
    return (first, second) if "leads" in first.said else (second, first)


def written() -> Recommendation | None:
    """Return what the leader has written last."""
    return Recommendation.objects.filter(product="Lamp").first()


def term_of(client: Client) -> str:
    """Return the term that the page's button asks for, if there is a button."""
    page = client.get(reverse("shop:leader")).content.decode()
    found = re.search(r'name="term" value="(\d+)"', page)
    return found[1] if found else ""


def test_leader_is_asked(two: tuple[Candidate, Candidate]) -> None:
    """The button makes it hand over to the other; at SIGTERM both end."""
    first, second = two
    before = written()
    assert before is not None
    term = term_of(client := Client())
    assert term == str(before.fencing_token)
    answer = client.post(reverse("shop:hand-over"), {"term": term})
    assert answer.headers["Location"] == "/leader/?watch"
    second.says("leads")
    # Said after the release, as the other says its word: either may come first.
    first.says("steps down")
    later = Recommendation.objects.filter(fencing_token__gt=before.fencing_token)
    assert eventually(later.all().first, what="a write").chosen_by in second.said
    first.finish()
    assert "leads" not in first.said.partition("steps down")[2]
    second.finish()
    assert not DistributedLock.objects.held().exists()


def test_leader_is_killed(two: tuple[Candidate, Candidate]) -> None:
    """The other one leads when its lease is over."""
    first, second = two
    first.process.kill()
    second.says("leads")
    second.finish()


def test_earlier_leader_is_refused(shop: None) -> None:
    """What it still wants to write when another one has written is refused."""
    with hold_elsewhere(LEADER_LOCK) as earlier:
        DistributedLock.objects.force_release(LEADER_LOCK)
        with hold_elsewhere(LEADER_LOCK) as later:
            recommend(later, "Bob")
            with pytest.raises(LeaseLost):
                recommend(earlier, "Ann")
    recommendation = Recommendation.objects.get()
    assert recommendation.chosen_by == "Bob"
    assert recommendation.fencing_token == later.fencing_token


def test_page(shop: None) -> None:
    """It shows who leads and who wrote last; a request is for the leader shown."""
    client, page = Client(), reverse("shop:leader")
    text = client.get(page).content.decode()
    assert "nobody" in text
    assert term_of(client) == ""
    with hold_elsewhere(LEADER_LOCK, note="<Ann>") as earlier:
        recommend(earlier, "<Ann>")
        term = term_of(client)
        text = client.get(page).content.decode()
        assert text.count("&lt;Ann&gt;") == 2
        assert f"in term {earlier.fencing_token} at" in text
    with hold_elsewhere(LEADER_LOCK, note="Bob") as later:
        late = client.post(reverse("shop:hand-over"), {"term": term})
        assert late.status_code == 409
        assert "nobody was asked" in late.content.decode()
        later.renew()
        assert not later.release_requested
        client.post(reverse("shop:hand-over"), {"term": term_of(client)})
        later.renew()
        assert later.release_requested
        answer = client.get(page, {"watch": ""})
        assert "asked to hand over at" in answer.content.decode()
        assert answer.headers["Refresh"] == "1"
        assert term_of(client) == ""


@pytest.mark.parametrize("term", ["", "x", "0", str(2**63)])
def test_no_term(shop: None, term: str) -> None:
    """What the button never sends asks nobody."""
    answer = Client().post(reverse("shop:hand-over"), {"term": term})
    assert answer.status_code == 400


def test_locks_elsewhere(settings: Any) -> None:
    """The page can't show them, and the row must not see tokens of two engines."""
    settings.LOCKS_URLS = ["redis://127.0.0.1:1/0"]
    with pytest.raises(CommandError, match="unset LOCKS_URL"):
        call_command("lead")
