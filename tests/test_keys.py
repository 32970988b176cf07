"""Keys joined from parts: readable, valid, and never the same for different parts."""

from __future__ import annotations

import enum
import itertools
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dblocks import InvalidKey, distributed_lock, make_key, validation

ID = UUID("ab3ae1de-0000-4000-8000-00000000beef")
DAY = date(2026, 11, 22)


class Kind(str, enum.Enum):
    """An enumeration as Django's ``TextChoices`` are."""

    REFUND = "refund"


class Number(enum.IntEnum):
    """One of numbers."""

    SEVEN = 7


@pytest.mark.parametrize(
    ("parts", "made"),
    [
        (("order", "acme", 7), "order:acme:7"),
        (("import",), "import"),
        (("order", ID), f"order:{ID}"),
        (("report", DAY), "report:2026-11-22"),
        (("stock", -3), "stock:-3"),
        (("tea", "緑茶 / ☕"), "tea:緑茶 / ☕"),
        (("a:b", "100%"), "a%3Ab:100%25"),
        (("order", "7"), "order:'7"),
        (("order", ""), "order:'"),
        (("order", str(ID)), f"order:'{ID}"),
        ((Kind.REFUND, Number.SEVEN), "refund:7"),
    ],
    ids=repr,
)
def test_readable(parts: tuple[Any, ...], made: str) -> None:
    """A key shows its parts; what stands in the way of that is escaped."""
    assert make_key(*parts) == made


NASTY = [
    *("", "a", ":", "::", "%", "'", "''", "'7", "%3A", "7", "07", "-7", "%sha256-"),
    *(7, -7, 77, ID, str(ID), DAY, str(DAY), "a:", ":a", "x" * 255, "x" * 256),
]


def test_different_for_different_parts() -> None:
    """All tuples of up to three nasty parts have keys of their own."""
    made = [
        make_key(*parts)
        for length in (1, 2, 3)
        for parts in itertools.product(NASTY, repeat=length)
    ]
    assert len(set(made)) == len(made)
    assert all(validation.key(one) == one for one in made)


text = st.text(
    st.one_of(
        st.sampled_from(":%'-07ax"),
        st.characters(exclude_categories=["Cs"], exclude_characters="\0\x1f"),
    )
)
part = st.one_of(
    text, text.map(lambda t: t * 99), st.integers(), st.uuids(), st.dates()
)
several = st.lists(part, min_size=1, max_size=5)


def apart(parts: list[Any]) -> list[tuple[type, Any]]:
    """Return the parts with their types: 7 and "7" are different."""
    return [(type(one), one) for one in parts]


@settings(deadline=None)
@given(several, several)
def test_property(one: list[Any], other: list[Any]) -> None:
    """Keys are valid, and the same if, and only if, their parts are."""
    assert validation.key(make_key(*one)) == make_key(*one)
    assert (make_key(*one) == make_key(*other)) == (apart(one) == apart(other))


@settings(deadline=None)
@given(several)
def test_joined_differently(parts: list[Any]) -> None:
    """What was joined before is one part, and no longer several."""
    joined = make_key(*parts)
    if len(parts) > 1 and len(joined) < 255:
        assert make_key(joined) != joined


def test_digest() -> None:
    """255 characters fit; of more the beginning stays, with a digest of all."""
    assert make_key("page", "x" * 250) == "page:" + "x" * 250
    long, longer = make_key("page", "x" * 251), make_key("page", "x" * 252)
    assert len(long) == len(longer) == 255
    assert long.startswith("page:xxx")
    assert long[-64:] != longer[-64:]
    # The same in every process and version: others wait under the same key.
    assert long.endswith(
        "%sha256-869ba796423d54177498b6dd222d000bb897c5583c66d4cea8039ca6e1d0c54a"
    )


@pytest.mark.parametrize(
    "parts",
    [(), (None,), ("order", None), ("a\0",), ("a\x1f1",), ("\ud800",)],
    ids=repr,
)
@pytest.mark.parametrize("long", [False, True], ids=["short", "long"])
def test_refused(parts: tuple[Any, ...], long: bool) -> None:
    """No part, none at all, or what no key may hold is an InvalidKey."""
    padding = ("x" * 300,) if long and parts else ()
    with pytest.raises(InvalidKey):
        make_key(*padding, *parts)


@pytest.mark.parametrize(
    "part",
    [True, 1.5, datetime.now(timezone.utc), Decimal(1), b"a", object(), ["a"]],
    ids=lambda part: type(part).__name__,
)
def test_wrong_type(part: Any) -> None:
    """A part of a type that can be written in several ways, or in none, is refused."""
    with pytest.raises(TypeError, match="str, int, UUID or date") as caught:
        make_key("order", part)
    assert repr(part) in str(caught.value)


def test_in_use(committed: None) -> None:
    """It names a lock, and makes the key of a decorated call."""

    @distributed_lock(lambda number: make_key("order", number))
    def is_locked(number: int) -> bool:
        return distributed_lock(make_key("order", number)).locked()

    assert is_locked(5)
