"""The table's manager: its verbs, exact keys and owners, states, rising tokens."""

from __future__ import annotations

import itertools
import unicodedata
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from django.contrib.auth.models import Permission
from django.db import connection
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext

from dblocks import interventions
from dblocks.conf import backends
from dblocks.interventions import Intervention
from dblocks.models import DistributedLock, TokenFloor
from dblocks.signals import lock_force_released
from tests.support.factories import LockFactory, let_expire, now, stored
from tests.support.timing import eventually

pytestmark = pytest.mark.django_db

locks = DistributedLock.objects


def utc(value: datetime) -> datetime:
    """Return the moment in UTC; a naive one is taken to be so already."""
    return value if value.tzinfo else value.replace(tzinfo=timezone.utc)


def held_for(row: DistributedLock) -> float:
    """Return the seconds from the row's grant to its end."""
    return (row.expires_at - row.acquired_at).total_seconds()


def columns(key: str) -> dict[str, Any]:
    """Return all that the row says."""
    return QuerySet(DistributedLock).filter(pk=key).values().get()


def owned(key: str = "k", owner: str = "me", **options: Any) -> DistributedLock:
    """Acquire a key that must be free."""
    row = locks.acquire(key, owner=owner, lease=options.pop("lease", 60), **options)
    assert row is not None
    return row


def test_acquire_of_a_new_key() -> None:
    """The first acquisition makes the row and returns it with one hold."""
    row = owned(holder="host:1:MainThread", note="nightly")
    assert isinstance(row, DistributedLock)
    assert (row.key, row.owner, row.hold_count) == ("k", "me", 1)
    assert row.version >= 1
    found = stored("k")
    assert (found.owner, found.hold_count, found.version) == ("me", 1, row.version)
    assert (found.holder, found.note) == ("host:1:MainThread", "nightly")


@pytest.mark.parametrize(
    "lease", [60, 60.0, timedelta(minutes=1)], ids=["int", "float", "delta"]
)
def test_expiry_is_the_lease_after_the_grant(lease: Any) -> None:
    """The row begins now and ends its lease after that, to the microsecond."""
    owned(lease=lease)
    row = stored("k")
    assert held_for(row) == pytest.approx(60, abs=0.005)
    assert abs(utc(row.acquired_at) - now()) < timedelta(seconds=5)


def test_fraction_of_a_second_is_kept() -> None:
    """A lease of a quarter of a second isn't rounded to seconds."""
    owned(lease=0.25)
    row = stored("k")
    assert held_for(row) == pytest.approx(0.25, abs=0.005)


def test_taken_key_gives_none_and_changes_nothing() -> None:
    """A refused acquisition returns None and leaves the holder's row as it was."""
    owned(note="mine")
    before = columns("k")
    assert locks.acquire("k", owner="you", lease=5, holder="x", note="theirs") is None
    assert columns("k") == before


def test_owner_re_enters() -> None:
    """The owner that holds the key gets one more hold of the same version."""
    first = owned()
    second = owned()
    assert (second.version, second.hold_count) == (first.version, 2)
    assert stored("k").hold_count == 2


def test_re_entering_never_shortens() -> None:
    """A shorter lease of an inner acquisition leaves the later end in place."""
    owned(lease=60)
    end = stored("k").expires_at
    owned(lease=1)
    assert stored("k").expires_at >= end


def test_expired_key_goes_to_somebody_else() -> None:
    """A key whose lease is over is granted with a higher version and one hold."""
    old = owned()
    let_expire("k")
    new = owned(owner="you")
    assert new.version > old.version
    assert (stored("k").owner, stored("k").hold_count) == ("you", 1)


def test_expired_key_of_the_same_owner_is_a_new_grant() -> None:
    """An owner whose lease ran out doesn't re-enter: it gets a new version."""
    old = owned()
    owned()
    let_expire("k")
    new = owned()
    assert new.version > old.version
    assert stored("k").hold_count == 1


@pytest.mark.parametrize("owner", ["me", "you"])
def test_cooling_key_is_taken_for_everybody(owner: str) -> None:
    """A cooling key is granted to nobody."""
    LockFactory(key="k", cooling=True)
    assert locks.acquire("k", owner=owner, lease=5) is None


def test_renew_moves_the_expiry() -> None:
    """The holder's renewal counts its lease from now."""
    row = owned(lease=5)
    assert locks.renew("k", owner="me", version=row.version, lease=600) is True
    assert (
        timedelta(seconds=590)
        < utc(stored("k").expires_at) - now()
        <= timedelta(seconds=600)
    )
    assert stored("k").version == row.version


def test_release_frees() -> None:
    """The only hold's release leaves a free row that anybody may take."""
    row = owned()
    assert locks.release("k", owner="me", version=row.version) is True
    assert locks.free().filter(pk="k").exists()
    assert owned(owner="you").version > row.version


def test_release_counts_down() -> None:
    """Each release takes one hold away, and the last one frees."""
    version = owned().version
    owned()
    owned()
    for left in (2, 1):
        assert locks.release("k", owner="me", version=version) is True
        assert stored("k").hold_count == left
        assert locks.acquire("k", owner="you", lease=5) is None
    assert locks.release("k", owner="me", version=version) is True
    assert locks.acquire("k", owner="you", lease=5) is not None


def test_release_of_a_free_key() -> None:
    """A second release of the same grant returns False."""
    row = owned()
    locks.release("k", owner="me", version=row.version)
    before = columns("k")
    assert locks.release("k", owner="me", version=row.version) is False
    assert columns("k") == before


@pytest.mark.parametrize("verb", ["renew", "release"])
@pytest.mark.parametrize(
    ("owner", "version"),
    [("you", 0), ("me", -1), ("me", +1), ("you", +1), ("Me", 0), ("me ", 0)],
    ids=["other owner", "earlier version", "later version", "both", "case", "blank"],
)
def test_not_the_current_grant(verb: str, owner: str, version: int) -> None:
    """Renew and release change nothing unless owner and version both match."""
    first = owned()
    locks.release("k", owner="me", version=first.version)
    current = owned().version
    before = columns("k")
    options = {"lease": 600} if verb == "renew" else {}
    changed = getattr(locks, verb)(
        "k", owner=owner, version=current + version, **options
    )
    assert changed is False
    assert columns("k") == before


@pytest.mark.parametrize("verb", ["renew", "release"])
def test_key_without_a_row(verb: str) -> None:
    """Renew and release never make a row."""
    options = {"lease": 600} if verb == "renew" else {}
    assert getattr(locks, verb)("k", owner="me", version=1, **options) is False
    assert not QuerySet(DistributedLock).exists()


def test_former_holder_can_do_nothing() -> None:
    """After a take-over the former holder's grant renews and releases nothing."""
    old = owned()
    let_expire("k")
    owned(owner="you")
    before = columns("k")
    assert locks.renew("k", owner="me", version=old.version, lease=600) is False
    assert locks.release("k", owner="me", version=old.version) is False
    assert columns("k") == before


def test_force_release() -> None:
    """Force release frees a key with all its holds and fences the holder off."""
    old = owned()
    owned()
    assert locks.force_release("k", by="me", reason="stuck") is True
    assert locks.free().filter(pk="k").exists()
    assert stored("k").version > old.version
    assert locks.renew("k", owner="me", version=old.version, lease=60) is False
    assert locks.release("k", owner="me", version=old.version) is False
    assert owned(owner="you").version > old.version


def test_force_release_ends_cooling() -> None:
    """A cooling key is free after a force release."""
    LockFactory(key="k", cooling=True)
    assert locks.force_release("k") is True
    assert locks.free().filter(pk="k").exists()


@pytest.mark.parametrize("key", ["k", "never seen"])
def test_force_release_of_nothing(key: str) -> None:
    """There is nothing to force where nobody holds."""
    LockFactory(key="k", free=True)
    assert locks.force_release(key) is False


def test_force_release_of_one_grant() -> None:
    """With a version, only that grant is ended."""
    old = owned()
    locks.release("k", owner="me", version=old.version)
    current = owned(owner="you")
    before = columns("k")
    assert locks.force_release("k", version=old.version) is False
    assert columns("k") == before
    assert locks.force_release("k", version=current.version) is True


@pytest.mark.parametrize("of", [locks.filter(owner="me"), locks], ids=["owner", "any"])
def test_force_release_of_what_is_being_released(
    monkeypatch: pytest.MonkeyPatch, of: Any
) -> None:
    """Of one owner's grant nothing is left then; else what is cooling ends, too."""
    LockFactory(key="k", held=True, owner="me", min_until=now(3600))
    end_grant = interventions.end_grant

    def too_late(*arguments: Any, **how: Any) -> bool:
        locks.release("k", owner="me", version=1)
        return end_grant(*arguments, **how)

    monkeypatch.setattr(interventions, "end_grant", too_late)
    assert of.force_release("k") is (of is locks)
    assert locks.cooling().filter(pk="k").exists() is (of is not locks)


@pytest.mark.parametrize(
    "unit", [float, lambda seconds: timedelta(seconds=seconds)], ids=["s", "delta"]
)
def test_force_release_of_old_grants(unit: Any) -> None:
    """With older_than, only a key that was acquired longer ago is freed."""
    LockFactory(key="k", held=True, acquired_at=now(-100))
    assert locks.force_release("k", older_than=unit(200)) is False
    assert locks.held().filter(pk="k").exists()
    assert locks.force_release("k", older_than=unit(50)) is True


@pytest.mark.parametrize("age", [366_001 * 86400, timedelta(days=366_001), 1e300, 1e12])
def test_ages_have_a_limit(settings: Any, age: Any) -> None:
    """No database is asked for a moment that it may not know; all know the limit."""
    path = "dblocks.backends.locmem.LocMemBackend"
    settings.DBLOCKS = {"memory": {"BACKEND": path}}
    LockFactory(key="k", held=True)
    for verb in (
        lambda: locks.force_release("k", older_than=age),
        lambda: locks.stale(older_than=age),
        lambda: locks.prune(older_than=age),
        lambda: backends["memory"].force_release("k", older_than=age),
    ):
        with pytest.raises(ValueError, match="older_than must be from 0 s to 366000 d"):
            verb()
    assert locks.force_release("k", older_than=timedelta(days=366_000)) is False
    assert locks.prune(older_than=timedelta(days=366_000)) == 0


def test_permits_are_rows_of_their_own() -> None:
    """Each permit is held, renewed, released and forced by itself."""
    plain, first, last = (owned(permit=permit) for permit in (None, 0, 999))
    assert [(row.lock_key, row.permit) for row in (plain, first, last)] == [
        ("k", None),
        ("k", 0),
        ("k", 999),
    ]
    assert locks.acquire("k", owner="you", lease=60, permit=0) is None
    terms: dict[str, Any] = {"owner": "me", "version": first.version, "permit": 0}
    assert locks.renew("k", lease=600, **terms) is True
    assert locks.force_release("k", permit=999) is True
    assert not locks.renew("k", lease=60, **terms | {"permit": 999})
    assert held_for(stored(first.key)) > 599
    assert locks.release("k", **terms) is True
    assert [row.permit for row in locks.held()] == [None]


def test_names_of_permits() -> None:
    """People read key and permit apart; what only looks like one is a key."""
    assert str(DistributedLock(key="k")) == "k"
    assert str(DistributedLock(key="k\x1f2")) == "k, permit 2"
    for key in ("k\x1f", "k\x1fx", "k\x1f²"):
        assert (DistributedLock(key=key).lock_key, DistributedLock(key=key).permit) == (
            key,
            None,
        )


def test_force_release_of_a_permit_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Signal and log name key and permit apart."""
    told: list[dict[str, Any]] = []

    def receive(**kwargs: Any) -> None:
        told.append(kwargs)

    row = owned(permit=2)
    lock_force_released.connect(receive)
    try:
        locks.force_release("k", permit=2, reason="stuck")
    finally:
        lock_force_released.disconnect(receive)
    [kwargs] = told
    assert (kwargs["key"], kwargs["permit"]) == ("k", 2)
    assert kwargs["fencing_token"] == row.version
    assert "key='k' permit=2" in caplog.text


STATES = ["held", "expired", "cooling", "free"]


def test_states_are_disjoint() -> None:
    """Each row is in exactly one of the four querysets, the one of its state."""
    for state in STATES:
        LockFactory.bulk(3, **{state: True})
    for state in STATES:
        found = set(getattr(locks, state)().values_list("pk", flat=True))
        assert len(found) == 3
        others = [
            getattr(locks, other)().filter(pk__in=found)
            for other in STATES
            if other != state
        ]
        assert not any(rows.exists() for rows in others)


@pytest.mark.parametrize("state", STATES)
def test_with_state(state: str) -> None:
    """with_state() says of each row what the querysets say."""
    LockFactory(key="k", **{state: True})
    assert locks.with_state().get(pk="k").state == state
    assert getattr(locks.with_state(), state)().get().state == state


def test_states_follow_the_verbs() -> None:
    """A row is held, then free after its release, expired when its time is over."""
    row = owned()
    assert locks.held().filter(pk="k").exists()
    locks.release("k", owner="me", version=row.version)
    assert locks.free().filter(pk="k").exists()
    owned(lease=0.1)
    eventually(lambda: locks.expired().filter(pk="k").exists(), what="expired")


def test_prune_deletes_what_is_long_over() -> None:
    """Rows free or expired for that long go; held and cooling ones never."""
    for state in STATES:
        LockFactory(key=f"old {state}", age=3600, **{state: True})
        LockFactory(key=f"new {state}", age=10, **{state: True})
    locks.prune(older_than=600)
    left = set(QuerySet(DistributedLock).values_list("pk", flat=True))
    assert left == {
        "new free",
        "new expired",
        "old held",
        "old cooling",
        "new held",
        "new cooling",
    }


def test_prune_takes_a_timedelta() -> None:
    """The age may be a timedelta."""
    LockFactory(key="k", age=3600, free=True)
    locks.prune(older_than=timedelta(hours=2))
    assert QuerySet(DistributedLock).exists()
    locks.prune(older_than=timedelta(minutes=30))
    assert not QuerySet(DistributedLock).exists()


def test_prune_takes_what_has_just_become_free() -> None:
    """A key is old enough for ``older_than=0`` in the instant in which it is free.

    Some clocks have ticks of a millisecond, so both can be the same instant.
    """
    for _ in range(20):
        row = owned()
        assert locks.release("k", owner="me", version=row.version)
        assert locks.prune(older_than=0) == 1


def test_prune_goes_on_to_the_end() -> None:
    """A table of many batches is emptied by one call."""
    LockFactory.bulk(2500, free=True)
    locks.prune(older_than=60)
    assert not QuerySet(DistributedLock).exists()


@pytest.mark.parametrize(
    ("size", "error"),
    [
        *((size, ValueError) for size in (0, -1, 10_001)),
        *((size, TypeError) for size in ("x", None, True, 1.5)),
    ],
)
def test_size_of_batches(size: Any, error: type[Exception]) -> None:
    """A size that deletes nothing, or too much at a time, is refused."""
    LockFactory.bulk(2, free=True)
    with pytest.raises(error, match=f"batch_size must be .*, not {size!r}"):
        locks.prune(older_than=60, batch_size=size)
    assert locks.prune(older_than=60, batch_size=1) == 2


@pytest.mark.parametrize("state", ["free", "expired"])
def test_token_never_goes_back(state: str) -> None:
    """A key that was pruned and made again continues above every token it ever had."""
    LockFactory(key="k", version=10**6, **{state: True})
    LockFactory(key="other", version=7, free=True)
    locks.prune(older_than=60)
    assert owned().version > 10**6
    assert owned("other").version > 7


def test_tokens_rise_over_prune_and_re_creation() -> None:
    """Each grant of a key has a higher token, however often its row is pruned."""
    tokens = []
    for _ in range(10):
        row = owned()
        tokens.append(row.version)
        locks.release("k", owner="me", version=row.version)
        QuerySet(DistributedLock).update(expires_at=now(-3600))
        locks.prune(older_than=60)
        assert not QuerySet(DistributedLock).exists()
    assert tokens == sorted(set(tokens))


@pytest.mark.parametrize("by", ["queryset", "instance"])
def test_token_rises_over_a_deletion(by: str) -> None:
    """Rows that are deleted by hand leave the floor as pruning does."""
    LockFactory(key="k", version=41, free=True)
    doomed = locks.filter(pk="k") if by == "queryset" else locks.get(pk="k")
    doomed.delete()
    assert not QuerySet(DistributedLock).exists()
    assert owned().version > 41


def test_deletion_of_distinct_rows() -> None:
    """What Django deletes is deleted, where rows that are distinct can't be locked."""
    LockFactory(key="k", version=41, free=True)
    rows = locks.distinct()
    assert len(rows) == 1
    assert rows.delete() == (1, {"dblocks.DistributedLock": 1})
    assert len(rows) == 0
    assert owned().version > 41


def test_small_token_is_pruned_after_a_large_one() -> None:
    """The floor that pruning leaves behind never comes down again."""
    LockFactory(key="k", version=10**6, free=True)
    locks.prune(older_than=60)
    LockFactory(key="small", version=3, free=True)
    locks.prune(older_than=60)
    assert owned().version > 10**6


HOSTILE = [
    "Job",
    "job",
    "JOB",
    "job ",
    "job  ",
    " job",
    "job\t",
    "job\n",
    "job\u00a0",
    "job\u200b",
    unicodedata.normalize("NFC", "jo\u0301b"),
    unicodedata.normalize("NFD", "jo\u0301b"),
    "j\u00f6b",
    "\uff4a\uff4f\uff42",
    "stra\u00dfe",
    "strasse",
    "\u0131",
    "i",
    "I",
    "\u0130",
    "\N{LOCK}",
    "\N{OPEN LOCK}",
    "\N{LOCK}" * 255,
    "\N{LOCK}" * 254,
    "x" * 255,
    "x" * 254,
    ".*",
    "[a-z]+",
    "a%b",
    "a_b",
    "a\\b",
    "a'b",
    'a"b',
    "a{b}",
    "a;--b",
    "0",
    "00",
    "1e1",
    "10",
]


def test_keys_are_compared_exactly() -> None:
    """Names that a collation, pad rule or normal form could mix up differ."""
    assert len(set(HOSTILE)) == len(HOSTILE)
    for number, key in enumerate(HOSTILE):
        assert owned(key, owner=f"owner {number}").key == key
    for number, key in enumerate(HOSTILE):
        row = stored(key)
        assert (row.key, row.owner) == (key, f"owner {number}")
        assert locks.acquire(key, owner="somebody else", lease=5) is None
    assert QuerySet(DistributedLock).count() == len(HOSTILE)


OWNERS = ["alice", "Alice", "alice ", "alic\u00e9", "alice\u0301", "\N{LOCK}"]


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        pytest.param(a, b, id=f"{a!a}/{b!a}")
        for a, b in itertools.permutations(OWNERS, 2)
    ],
)
def test_owners_are_compared_exactly(mine: str, theirs: str) -> None:
    """An owner that only looks alike neither re-enters nor renews nor releases."""
    row = owned(owner=mine)
    assert locks.acquire("k", owner=theirs, lease=5) is None
    assert locks.renew("k", owner=theirs, version=row.version, lease=5) is False
    assert locks.release("k", owner=theirs, version=row.version) is False
    assert stored("k").hold_count == 1


def test_regular_expression_finds_a_key() -> None:
    """The key column takes part in every text lookup."""
    owned("order:17")
    assert locks.filter(key__regex=r"^order:\d+$").exists()
    assert locks.filter(key__startswith="order:").exists()


@pytest.mark.parametrize("verb", ["renew", "release"])
def test_one_statement(verb: str) -> None:
    """A verb on an existing row is one statement."""
    row = owned()
    options: dict[str, Any] = {
        "renew": {"owner": "me", "version": row.version, "lease": 60},
        "release": {"owner": "me", "version": row.version},
    }[verb]
    with CaptureQueriesContext(connection) as queries:
        assert getattr(locks, verb)("k", **options) is True
    assert len(queries) == 1, queries.captured_queries


@pytest.mark.parametrize("row", ["free", "expired"])
def test_acquire_of_an_existing_key_is_one_statement(row: str) -> None:
    """Taking a key whose row is there, token included, is one statement."""
    LockFactory(key="k", **{row: True})
    with CaptureQueriesContext(connection) as queries:
        taken = owned()
        assert taken.version == 2
    assert len(queries) == 1, queries.captured_queries


def test_permissions() -> None:
    """There is a permission to look and one to force; none to add, change or delete."""
    found = Permission.objects.filter(content_type__app_label="dblocks")
    of_model = found.filter(content_type__model="distributedlock")
    assert set(of_model.values_list("codename", flat=True)) == {
        "view_distributedlock",
        "force_release_distributedlock",
    }


def test_representations() -> None:
    """An entry of the history is known by key and token, a floor by its value."""
    assert str(Intervention(key="k", version=3)) == "k, 3"
    assert str(TokenFloor(value=7)) == "7"
