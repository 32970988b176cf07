"""What is checked of real processes: each violation that is planted is found."""

from __future__ import annotations

import itertools
import time
from contextlib import ExitStack
from typing import Any

import pytest
from django.db.models import F, QuerySet

from dblocks import distributed_lock
from dblocks.models import DistributedLock
from tests.faults import clocks, nemesis
from tests.faults.crew import Crew, Member, Pause
from tests.faults.history import check, lost_updates
from tests.faults.kinds import Asked, grants_in, row_of
from tests.faults.kinds import kinds as each_kind
from tests.faults.scale import LATE
from tests.support import timing
from tests.support.factories import AccountFactory, let_expire
from tests.support.timing import DEADLINE, eventually, scaled, takes

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]


def kinds(crew: Crew) -> set[str]:
    return {fault.kind for fault in check(crew.history())}


@each_kind
def test_planted_overlap(crew: Crew, key: str, kind: str) -> None:
    """A row that somebody puts back under its holder is granted twice.

    It may be one of a set, whose other key is none the worse for it; of permits, more
    have one than there are.
    """
    asked = Asked.of_kind(kind, key)
    row = {**asked.told, "until": time.monotonic() + DEADLINE, "lease": 10}
    holders = crew.fork_all("hold", [row] * asked.permits)
    for holder in holders:
        holder.expect("held")
    robbed = row_of(grants_in(holders[0].told)[0])
    let_expire(robbed)
    told = row if kind == "permits" else {**row, "key": robbed}
    second = crew.fork("hold", **told)
    second.expect("held")
    seen = {holder: len(holder.told) for holder in holders}
    crew.until(
        lambda: all(len(holder.told) > n + 2 for holder, n in seen.items()),
        what="the holders' belief",
    )
    assert kinds(crew) == {"overlap"} | ({"crowd"} if kind == "permits" else set())


def test_planted_permit(crew: Crew, key: str) -> None:
    """Who gets a permit though all are had, one that there is not, makes a crowd."""
    row = {"key": key, "until": time.monotonic() + DEADLINE, "lease": 10}
    holders = crew.fork_all("hold", [{**row, "permits": 3}] * 3)
    for holder in holders:
        holder.expect("held")
    seen = [len(holder.told) for holder in holders]
    crew.until(
        lambda: all(len(h.told) > n + 2 for h, n in zip(holders, seen, strict=True)),
        what="the holders' belief",
    )
    assert not kinds(crew)
    for told in crew.told():
        if told["event"] == "grant":
            told["permits"] = 2
    assert kinds(crew) == {"crowd", "no such permit"}


@pytest.mark.parametrize(
    ("kind", "back", "kind_of_fault"),
    [
        ("key", 1, "repeated token"),
        ("key", 2, "token went back"),
        ("set", 1, "repeated token"),
        ("permits", 2, "token went back"),
    ],
)
def test_planted_token(
    crew: Crew, key: str, kind: str, back: int, kind_of_fault: str
) -> None:
    """A row whose version is lowered gives a token again, or a smaller one."""
    asked = Asked.of_kind(kind, key)
    row = {**asked.told, "timeout": DEADLINE}
    with ExitStack() as others:
        # All permits but one are taken.
        for number in range(1, asked.permits):
            others.enter_context(asked.hold(number))
        for _ in range(2):
            crew.finish([crew.fork("wait", **row)])
        assert not kinds(crew)
        rows = QuerySet(DistributedLock).filter(pk__in=asked.rows, owner="")
        # One of a set is enough.
        lowered = rows.order_by("key").values_list("pk", flat=True)[0]
        rows.filter(pk=lowered).update(version=F("version") - back)
        crew.finish([crew.fork("wait", **row)])
    assert kind_of_fault in kinds(crew)


def test_planted_lost_update(crew: Crew, key: str) -> None:
    """An account that somebody sets back has less than was acknowledged."""
    account = AccountFactory()
    until = time.monotonic() + scaled(2)
    row = {"key": key, "account": account.pk, "mode": "guard", "until": until}
    crew.finish([crew.fork("update", **row, seed=1)])
    account.refresh_from_db()
    history = crew.history()
    assert not lost_updates(history, {key: account.balance})
    [fault] = lost_updates(history, {key: account.balance - 1})
    assert fault.kind == "lost update"


@pytest.mark.parametrize("deaf", [0.0, 1.5])
def test_planted_late_loss(crew: Crew, key: str, deaf: float) -> None:
    """A loss is in the history with its deadline, and found if it is told late."""
    until = time.monotonic() + DEADLINE
    # Long enough to be observed, on a busy machine too.
    holder = crew.fork("hold", key=key, until=until, lease=2.0, renew=False, deaf=deaf)
    loss = holder.expect("loss")
    assert loss["reason"] == "expired"
    [event] = [event for event in crew.history() if event.what == "loss"]
    assert event.deadline is not None
    found = {fault.kind for fault in check(crew.history(), late=1.0)}
    assert found == ({"late loss"} if deaf else set())


def test_loss_of_one_that_was_stopped(crew: Crew, key: str) -> None:
    """Who is stopped at the deadline must tell of the loss when it goes on."""
    # Long enough to say that it is held, on a busy machine too.
    lease = 2.0
    until = time.monotonic() + DEADLINE
    holder = crew.fork("hold", key=key, until=until, lease=lease, renew=False)
    holder.expect("held")
    holder.stop()
    stopped = time.monotonic()
    crew.until(lambda: time.monotonic() > stopped + lease + 1.0)
    holder.resume()
    resumed = time.monotonic()
    loss = holder.expect("loss")
    assert loss["deadline"] < resumed
    deadline = holder.deadline(loss)
    assert deadline is not None
    # Threads that have ended no longer count.
    without = max(0.0, loss["starved"] - holder.pauses[0].starved)
    assert without < loss["after"]
    assert stopped + lease + 1.0 < deadline - without <= resumed


@pytest.mark.parametrize(
    ("loss", "deadline"),
    [
        ({"deadline": 5.0}, 5.0),
        ({"deadline": 2.5}, 3.0),
        ({"deadline": None}, 3.0),
        ({"deadline": None, "lease": 1.5}, None),
        ({"deadline": None, "lease": 0.9}, None),
        ({"deadline": None, "before": 2.5}, None),
        ({"deadline": 2.5, "after": 2.7}, 2.5),
        ({"deadline": None, "starved": 5.5}, 4.5),
        ({"deadline": None, "starved": 3.2}, 3.0),
        ({"deadline": None, "given_back": 1.9}, None),
        ({"deadline": None, "given_back": 3.1}, 3.0),
        ({"deadline": 5.0, "given_back": 1.9}, None),
    ],
    ids=[
        *("later", "meanwhile", "over", "not over", "stood too late"),
        *("granted later", "told before"),
        "without a processor",
        "a thread has ended",
        *("being released", "released later", "released before"),
    ],
)
def test_deadline(loss: dict[str, Any], deadline: float | None) -> None:
    """Only a pause in which a lease ran out excuses who tells of it late."""
    member = Member.__new__(Member)
    member.pauses = [Pause(2.0, 2.2, 3.0, starved=4.0)]
    usual = {"before": 1.0, "after": 6.0, "lease": 0.5, "starved": 4.0}
    assert member.deadline({**usual, "given_back": None, **loss}) == deadline


@pytest.mark.parametrize("ran", [LATE / 2, LATE * 2], ids=["too briefly", "long"])
def test_deadline_of_one_that_is_stopped_again(ran: float) -> None:
    """Who goes on too briefly to tell may tell when it goes on again."""
    member = Member.__new__(Member)
    again = Pause(3.0 + ran, 3.0 + ran, 5.0 + ran, starved=4.0)
    member.pauses = [Pause(2.0, 2.0, 3.0, starved=4.0), again]
    loss = {"deadline": None, "before": 1.0, "after": 99.0, "lease": 0.5}
    deadline = member.deadline({**loss, "starved": 4.0, "given_back": None})
    assert deadline == (again.resumed if ran < LATE else 3.0)


def test_planted_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on time is missed by who sleeps, not by who had no processor."""
    with pytest.raises(AssertionError, match=r"took \d\.\d"), takes(at_most=0.05):
        time.sleep(0.9)
    waited = itertools.count()
    monkeypatch.setattr(timing, "starved", lambda: float(next(waited)))
    with takes(at_most=0.2):
        time.sleep(0.3)


def test_planted_delay_of_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that poll wait for each other: that excuses only so much."""
    monkeypatch.setattr(timing, "starved", lambda: 10 * time.monotonic())
    with pytest.raises(AssertionError, match="took"), takes(at_most=0.05):
        time.sleep(0.9)
    started = time.monotonic()
    with pytest.raises(pytest.fail.Exception, match="come true"):
        eventually(lambda: time.monotonic() > started + 5, within=0.05)


def test_planted_error(crew: Crew, key: str) -> None:
    """An error of a release reaches the test."""
    member = crew.fork("fail_to_release", key=key, leave=False)
    with pytest.raises(AssertionError, match="planted"):
        crew.finish([member])
    assert [told["event"] for told in crew.errors()] == ["unreleased"]


def test_planted_lapse(crew: Crew, key: str) -> None:
    """So does one that could not be raised, when a block was left."""
    crew.finish([crew.fork("fail_to_release", key=key, leave=True)])
    assert [told["event"] for told in crew.errors()] == ["lapsed"]


def test_planted_loss_at_the_release(crew: Crew, key: str) -> None:
    """So does a lock that is gone when it is to be given back."""
    until = time.monotonic() + scaled(3)
    holder = crew.fork("hold", key=key, until=until)
    holder.expect("held")
    assert DistributedLock.objects.force_release(key)
    crew.finish([holder])
    assert [told["event"] for told in crew.errors()] == ["unreleased"]
    assert not distributed_lock(key).locked()


def test_clocks_that_cant_be_wrong(tmp_path: Any, monkeypatch: Any) -> None:
    """Without libfaketime the tests of wrong clocks fail; they aren't skipped."""
    monkeypatch.setattr(clocks, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match="faketime"):
        clocks.faketime(FAKETIME="+1d")


class Puppet(Member):
    """A process that is only told of."""

    def stop(self) -> None:
        self.told += self.then

    def resume(self) -> None:
        pass

    then: list[dict[str, Any]] = []


class Puppets(Crew):
    """A crew of one, of which one thing is told, and then another."""

    def __init__(self, *news: dict[str, Any]) -> None:
        self.puppet = Puppet(self, 1)
        self.puppet.ended = True
        self.puppet.told = [{"event": "born", "key": "k"}]
        self._news = list(news)

    def take_in(self, wait: float = 0.0) -> list[dict[str, Any]]:
        news = self._news[:1]
        del self._news[:1]
        self.puppet.told += [told for told in news if told["who"] == 1]
        return news

    def finish(self, members: Any, within: float = 0.0) -> None:
        pass


@pytest.mark.parametrize(
    ("then", "token", "pauses"),
    [([], 8, 1), ([], 7, 0), ([{"event": "writing"}], 8, 0)],
    ids=["written by another", "written by itself", "met while it was writing"],
)
def test_pauses_that_count(
    monkeypatch: pytest.MonkeyPatch, then: Any, token: int, pauses: int
) -> None:
    """A pause proves something if others write in it, and the stopped one did not."""
    monkeypatch.setattr(nemesis, "PATIENCE", 0.1)
    about = {"key": "k", "permit": 0}
    crew = Puppets(
        {"event": "grant", "who": 1, **about, "token": 7},
        {"event": "inside", "who": 1, "key": "k"},
        {"event": "write", "who": 2, **about, "token": token},
    )
    crew.puppet.then = then
    tried = nemesis.Nemesis(crew, [crew.puppet], lease=0.0)
    tried.pause(1, [1.0], within=0.3)
    assert tried.pauses == pauses
