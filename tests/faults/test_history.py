"""The checker of histories refuses bad ones and passes good ones."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.faults.history import (
    Event,
    check,
    late_renewals,
    lost_updates,
    numbered,
    report,
    take_overs,
    verify,
)
from tests.faults.scale import LATE


def event(
    what: str, token: Any, before: float, after: float, who: str = "a", **more: Any
) -> Event:
    return Event(what, more.pop("key", "k"), token, before, after, who, **more)


def kinds(*events: Event, **options: Any) -> list[str]:
    return [fault.kind for fault in check(events, **options)]


def test_good_history() -> None:
    """Grants one after another, with growing tokens, are fine."""
    assert not kinds(
        event("grant", 1, 0, 1),
        event("held", 1, 1.5, 1.5),
        event("release", 1, 2, 3),
        event("grant", 2, 0.5, 2.5, "b"),
        event("write", 2, 3, 3.5, "b"),
        event("release", 2, 4, 5, "b"),
    )


def test_keys_are_apart() -> None:
    """Another key may be held meanwhile, with the same tokens."""
    assert not kinds(
        event("grant", 1, 0, 1),
        event("release", 1, 9, 10),
        event("grant", 1, 2, 3, "b", key="other"),
        event("release", 1, 4, 5, "b", key="other"),
    )


@pytest.mark.parametrize("others", [True, False])
def test_without_tokens(others: bool) -> None:
    """Where an engine has none, each grant counts as one of its own."""
    first = [event("grant", None, 0, 1), event("release", None, 2, 3)]
    again = [event("grant", None, 4, 5), event("release", None, 8, 9)]
    theirs = [event("grant", None, 6, 7, "b"), event("release", None, 9, 10, "b")]
    history = numbered([*theirs, *first, *again] if others else [*first, *again])
    assert [fault.kind for fault in check(history)] == ["overlap"] * others


@pytest.mark.parametrize("last", ["held", "release", "write"])
def test_overlap(last: str) -> None:
    """Two that certainly held at one moment."""
    assert kinds(
        event("grant", 1, 0, 1),
        event(last, 1, 5, 6),
        event("grant", 2, 2, 3, "b"),
        event("release", 2, 7, 8, "b"),
    ) == ["overlap"]


def test_overlap_with_a_long_one() -> None:
    """A short one in between doesn't hide the long one from the third."""
    assert kinds(
        event("grant", 1, 0, 1),
        event("release", 1, 20, 21),
        event("grant", 2, 2, 3, "b"),
        event("release", 2, 4, 5, "b"),
        event("grant", 3, 6, 7, "c"),
        event("release", 3, 8, 9, "c"),
    ) == ["overlap", "overlap"]


def test_overlap_of_one_process() -> None:
    """One process overlaps with itself as well."""
    assert kinds(
        event("grant", 1, 0, 1),
        event("release", 1, 5, 6),
        event("grant", 2, 2, 3),
        event("release", 2, 7, 8),
    ) == ["overlap"]


def test_what_may_have_been_in_order() -> None:
    """A grant that may have happened after the release, is taken to have."""
    assert not kinds(
        event("grant", 1, 0, 1),
        event("release", 1, 2, 9),
        event("grant", 2, 1, 3, "b"),
        event("release", 2, 8, 10, "b"),
    )


def test_answer_that_came_when_the_lease_was_over() -> None:
    """A grant that nobody saw held after its answer came overlaps with nothing."""
    late = event("grant", 1, 0, 5)
    other = [event("grant", 2, 3, 4, "b"), event("release", 2, 6, 7, "b")]
    assert not kinds(late, *other)
    assert kinds(late, event("held", 1, 5.5, 5.5), *other) == ["overlap"]


def test_repeated_token() -> None:
    """No token twice, in whichever process."""
    assert "repeated token" in kinds(
        event("grant", 1, 0, 1), event("grant", 1, 2, 3, "b")
    )


def test_token_that_goes_back() -> None:
    """Who asks later, gets more."""
    assert kinds(event("grant", 7, 0, 1), event("grant", 6, 2, 3, "b")) == [
        "token went back"
    ]


def test_token_behind_an_older_one() -> None:
    """The greatest of all that returned before counts, not the last."""
    assert kinds(
        event("grant", 9, 0, 1),
        event("grant", 8, 0.5, 1.5, "b"),
        event("grant", 10, 0.7, 8, "c"),
        event("grant", 9, 2, 3, "d", key="other"),
        event("grant", 5, 4, 5, "e"),
    ) == ["token went back"]


def test_tokens_of_concurrent_grants() -> None:
    """Grants that were asked for at one time may come in any order."""
    assert not kinds(event("grant", 7, 0, 3), event("grant", 6, 1, 2, "b"))


def test_late_loss() -> None:
    """A loss has to be known by its deadline."""
    loss = event("loss", 1, 0, 2, deadline=1.0)
    assert kinds(loss) == ["late loss"]
    assert not kinds(loss, late=1.5)


def test_lost_updates() -> None:
    """Each acknowledged write counts one, neither more nor less."""
    writes = [event("write", n, n, n + 0.5) for n in range(3)]
    assert not lost_updates(writes, {"k": 3})
    for final in ({"k": 2}, {"k": 4}, {}, {"k": 3, "other": 1}):
        assert [fault.kind for fault in lost_updates(writes, final)] == ["lost update"]


def test_unknown_event() -> None:
    """A misspelt event isn't passed over in silence."""
    with pytest.raises(ValueError, match="what='grnat'"):
        event("grnat", 1, 0, 1)


def test_report() -> None:
    """A report has the seed and the events, of the first twenty."""
    faults = check([event("grant", 1, n, n + 0.5) for n in range(3)])
    text = report(faults * 25, seed=77)
    assert "seed 77" in text
    assert "repeated token" in text
    assert "… and 5 more" in text


def test_shuffled_history_with_one_fault() -> None:
    """In a long history, in any order, the one fault is found."""
    chance = random.Random(5)
    events = []
    for number in range(500):
        events.append(event("grant", number, number, number + 0.1, f"p{number % 7}"))
        events.append(
            event("release", number, number + 0.5, number + 0.6, f"p{number % 7}")
        )
    chance.shuffle(events)
    assert not check(events)
    events.append(event("held", 250, 251.3, 251.3, f"p{250 % 7}"))
    assert [fault.kind for fault in check(events)] == ["overlap"]


def test_take_overs() -> None:
    """A grant of what nobody had given back took over a lease that had run out."""
    assert (
        take_overs(
            [
                event("grant", 1, 0, 1),
                event("release", 1, 2, 3),
                event("grant", 2, 4, 5, "b"),
                event("grant", 3, 6, 7, "c"),
                event("grant", 3, 6, 7, "c", key="other"),
                event("grant", 5, 8, 9, "c"),
            ]
        )
        == 1
    )


def test_late_renewals() -> None:
    """A renewal is late when the third of a lease after it was due is gone."""
    assert late_renewals([1.8, 1.2, 0.81, 0.79, 0.1], 3.0) == [0.79, 0.1]


def test_good_permits() -> None:
    """As many as there are permits, each with tokens of its own, in any order."""
    assert not kinds(
        event("grant", 5, 0, 1, permit=0, permits=2),
        event("grant", 5, 0, 1, "b", permit=1, permits=2),
        event("release", 5, 2, 3, permit=0),
        event("grant", 6, 2.5, 4, "c", permit=0, permits=2),
        event("held", 5, 5, 5, "b", permit=1),
        event("release", 6, 6, 7, "c", permit=0),
        event("grant", 4, 0, 9, "d", permit=2, permits=3),
        event("held", 4, 9, 9, "d", permit=2),
    )


def test_overlap_of_a_permit() -> None:
    """Two that had one permit, which the number of holders wouldn't tell."""
    assert kinds(
        event("grant", 1, 0, 1, permit=1, permits=3),
        event("release", 1, 5, 6, permit=1),
        event("grant", 2, 2, 3, "b", permit=1, permits=3),
        event("release", 2, 4, 5, "b", permit=1),
    ) == ["overlap"]


def test_tokens_of_a_permit() -> None:
    """Each permit's tokens rise and don't repeat."""
    first = event("grant", 7, 0, 1, permit=1, permits=2)
    assert kinds(first, event("grant", 6, 2, 3, "b", permit=1, permits=2)) == [
        "token went back"
    ]
    assert kinds(first, event("grant", 7, 2, 3, "b", permit=1, permits=2)) == [
        "repeated token"
    ]
    assert not kinds(first, event("grant", 6, 2, 3, "b", permit=0, permits=2))


def test_crowd() -> None:
    """More at a time than they all asked for, with a permit that there is not."""
    three = [
        item
        for n, who in enumerate("abc")
        for item in (
            event("grant", 1, n, n + 0.5, who, permit=n, permits=2),
            event("release", 1, 8 + n, 9 + n, who, permit=n),
        )
    ]
    assert kinds(*three) == ["no such permit", "crowd"]
    # Of those who asked for three there may be one more.
    three[4] = event("grant", 1, 2, 2.5, "c", permit=2, permits=3)
    assert not kinds(*three)
    # But not one after the other.
    three[1] = event("release", 1, 2.2, 3, "a", permit=0)
    three[4] = event("grant", 1, 2, 2.5, "c", permit=2, permits=2)
    assert kinds(*three) == ["no such permit"]


def test_late_loss_of_a_permit() -> None:
    """Permits lose their leases as locks do."""
    assert kinds(event("loss", 1, 0, 2, deadline=1.0, permit=1)) == ["late loss"]


def test_lost_updates_of_permits() -> None:
    """What each permit guards is counted by itself."""
    writes = [event("write", n, n, n + 0.5, permit=n % 2) for n in range(3)]
    assert not lost_updates(writes, {"k": 2, "k permit 1": 1})
    assert len(lost_updates(writes, {"k": 1, "k permit 1": 2})) == 2


@pytest.mark.parametrize(
    "faulty",
    [
        [event("grant", 1, 0, 1), event("grant", 1, 2, 3)],
        [event("loss", 1, 0, 1.1 + LATE, deadline=1.0)],
    ],
    ids=["token", "loss"],
)
def test_verify(faulty: list[Event]) -> None:
    """A bad history fails the test that has it, with the seed."""
    verify([event("grant", 1, 0, 1), event("loss", 1, 0, 0.9 + LATE, deadline=1.0)])
    with pytest.raises(AssertionError, match="seed"):
        verify(faulty)
