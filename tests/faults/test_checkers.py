"""What is checked of real processes: each violation that is planted is found."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db.models import F, QuerySet

from dblocks import distributed_lock
from dblocks.models import DistributedLock
from tests.factories import AccountFactory, let_expire
from tests.faults import clocks
from tests.faults.crew import Crew, Member
from tests.faults.history import check, lost_updates
from tests.timing import DEADLINE

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]


def kinds(crew: Crew) -> set[str]:
    return {fault.kind for fault in check(crew.history())}


def test_planted_overlap(crew: Crew, key: str) -> None:
    """A row that somebody puts back under its holder is granted twice."""
    until = time.monotonic() + DEADLINE
    holder = crew.fork("hold", key=key, until=until, lease=10)
    holder.expect("held")
    let_expire(key)
    second = crew.fork("hold", key=key, until=until, lease=10)
    second.expect("held")
    seen = len(holder.told)
    crew.until(lambda: len(holder.told) > seen + 1, what="the holder's belief")
    assert kinds(crew) == {"overlap"}


@pytest.mark.parametrize(
    ("back", "kind"), [(1, "repeated token"), (2, "token went back")]
)
def test_planted_token(crew: Crew, key: str, back: int, kind: str) -> None:
    """A row whose version is lowered gives a token again, or a smaller one."""
    for _ in range(2):
        crew.finish([crew.fork("wait", key=key, timeout=DEADLINE)])
    assert not kinds(crew)
    rows = QuerySet(DistributedLock).filter(pk=key)
    rows.update(version=F("version") - back)
    crew.finish([crew.fork("wait", key=key, timeout=DEADLINE)])
    assert kind in kinds(crew)


def test_planted_lost_update(crew: Crew, key: str) -> None:
    """An account that somebody sets back has less than was acknowledged."""
    account = AccountFactory()
    until = time.monotonic() + 0.3
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
    holder = crew.fork("hold", key=key, until=until, lease=0.5, renew=False, deaf=deaf)
    loss = holder.expect("loss")
    assert loss["reason"] == "expired"
    [event] = [event for event in crew.history() if event.what == "loss"]
    assert event.deadline is not None
    found = {fault.kind for fault in check(crew.history(), late=1.0)}
    assert found == ({"late loss"} if deaf else set())


def test_loss_of_one_that_was_stopped(crew: Crew, key: str) -> None:
    """Who is stopped at the deadline must tell of the loss when it goes on."""
    until = time.monotonic() + DEADLINE
    holder = crew.fork("hold", key=key, until=until, lease=0.5, renew=False)
    holder.expect("held")
    holder.stop()
    stopped = time.monotonic()
    crew.until(lambda: time.monotonic() > stopped + 1.5)
    holder.resume()
    resumed = time.monotonic()
    loss = holder.expect("loss")
    assert loss["deadline"] < resumed
    deadline = holder.deadline(loss)
    assert deadline is not None
    assert stopped + 1.5 < deadline <= resumed


@pytest.mark.parametrize(
    ("loss", "deadline"),
    [
        ({"deadline": 5.0}, 5.0),
        ({"deadline": 2.5}, 3.0),
        ({"deadline": None}, 3.0),
        ({"deadline": None, "lease": 1.5}, None),
        ({"deadline": None, "before": 2.5}, None),
        ({"deadline": 2.5, "after": 2.7}, 2.5),
    ],
    ids=["later", "meanwhile", "over", "not over", "granted later", "told before"],
)
def test_deadline(loss: dict[str, Any], deadline: float | None) -> None:
    """Only a pause in which a lease ran out excuses who tells of it late."""
    member = Member.__new__(Member)
    member.pauses = [(2.0, 3.0)]
    whole = {"before": 1.0, "after": 6.0, "lease": 0.5, **loss}
    assert member.deadline(whole) == deadline


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
    until = time.monotonic() + 0.5
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
