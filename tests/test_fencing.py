"""``FencedModel``: data that refuses a holder who has been replaced."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, get_type_hints

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.db import OperationalError, connection, connections, models, transaction
from django.db.models import Q

from dblocks import Lease, LeaseLost, distributed_lock
from dblocks.models import DistributedLock
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread, in_memory
from tests.support.timing import DEADLINE
from tests.testapp.models import Account, Deposit, Entry

pytestmark = [pytest.mark.usefixtures("committed"), pytest.mark.database_backend]
Leases = Callable[..., Lease]


@pytest.fixture
def account() -> Account:
    """Return an account that has not seen a token."""
    account: Account = AccountFactory()
    return account


@pytest.fixture
def stale(acquire: Leases, key: str) -> Lease:
    """Return a lease that has been replaced without knowing it."""
    lease = acquire(lease=600, renew=False)
    DistributedLock.objects.force_release(key)
    return lease


@pytest.fixture
def current(stale: Lease, acquire: Leases) -> Lease:
    """Return the lease that replaced it."""
    lease = acquire(owner="successor", lease=600, renew=False)
    assert lease.fencing_token > stale.fencing_token
    return lease


def mine(account: Account) -> Account:
    return Account.objects.get(pk=account.pk)


def test_update_leaves_its_token(acquire: Leases, account: Account) -> None:
    """A fenced update changes values and token, and says how many rows."""
    lease = acquire()
    assert Account.objects.filter(pk=account.pk).fenced_update(lease, balance=5) == 1
    assert (mine(account).balance, mine(account).fencing_token) == (
        5,
        lease.fencing_token,
    )


def test_update_again_with_the_same_token(acquire: Leases, account: Account) -> None:
    """The holder may update as often as it likes."""
    lease = acquire()
    for balance in (5, 6):
        Account.objects.filter(pk=account.pk).fenced_update(lease, balance=balance)
    assert mine(account).balance == 6


def test_replaced_holder_is_refused(
    stale: Lease, current: Lease, account: Account
) -> None:
    """A row that has seen a higher token refuses the update and stays as it is."""
    rows = Account.objects.filter(pk=account.pk)
    rows.fenced_update(current, balance=100)
    with pytest.raises(LeaseLost) as caught:
        rows.fenced_update(stale, balance=1)
    assert caught.value.fencing_token == stale.fencing_token
    assert (mine(account).balance, mine(account).fencing_token) == (
        100,
        current.fencing_token,
    )


def test_bare_token(stale: Lease, current: Lease, account: Account) -> None:
    """A token alone serves as the fence."""
    rows = Account.objects.filter(pk=account.pk)
    rows.fenced_update(current.fencing_token, balance=100)
    with pytest.raises(LeaseLost):
        rows.fenced_update(stale.fencing_token, balance=1)
    assert mine(account).balance == 100


def test_all_rows_or_none(stale: Lease, current: Lease) -> None:
    """One row with a higher token refuses the update of all."""
    accounts = AccountFactory.create_batch(3)
    Account.objects.filter(pk=accounts[1].pk).fenced_update(current, balance=100)
    rows = Account.objects.filter(pk__in=[each.pk for each in accounts])
    with pytest.raises(LeaseLost):
        rows.fenced_update(stale, balance=1)
    assert sorted(rows.values_list("balance", flat=True)) == [0, 0, 100]
    assert rows.fenced_update(current, balance=7) == 3
    assert set(rows.values_list("balance", flat=True)) == {7}


def test_update_without_filter(acquire: Leases, account: Account) -> None:
    """A fenced update of a whole table is refused."""
    lease = acquire()
    with pytest.raises((TypeError, ValueError), match="filter"):
        Account.objects.fenced_update(lease, balance=5)
    assert mine(account).balance == 0


def test_update_of_no_row(acquire: Leases) -> None:
    """A filter that finds nothing changes nothing, which isn't a loss."""
    assert Account.objects.filter(pk=-1).fenced_update(acquire(), balance=5) == 0


def test_save(acquire: Leases, account: Account) -> None:
    """save(fence=) writes the instance and its token."""
    lease = acquire()
    account.balance = 5
    account.save(fence=lease)
    assert (mine(account).balance, mine(account).fencing_token) == (
        5,
        lease.fencing_token,
    )
    assert account.fencing_token == lease.fencing_token


def test_save_of_a_replaced_holder(
    stale: Lease, current: Lease, account: Account
) -> None:
    """save(fence=) is refused like an update."""
    late = mine(account)
    account.balance = 100
    account.save(fence=current)
    late.balance = 1
    with pytest.raises(LeaseLost):
        late.save(fence=stale)
    assert mine(account).balance == 100


def test_save_of_some_fields(current: Lease, account: Account) -> None:
    """A row has seen the token, whichever fields are written."""
    account.balance, account.name = 5, "not written"
    account.save(fence=current, update_fields=["balance"])
    written = mine(account)
    assert (written.balance, written.fencing_token) == (5, current.fencing_token)
    assert written.name != "not written"


def test_save_that_fails(current: Lease, account: Account) -> None:
    """A save that is rolled back leaves row and instance without the token."""
    before = account.fencing_token
    account.balance = "none"  # type: ignore[assignment]
    with pytest.raises(ValueError, match="none"):
        account.save(fence=current)
    assert (account.fencing_token, mine(account).fencing_token) == (before, before)


def test_save_of_a_new_instance(acquire: Leases) -> None:
    """A new row made with a fence has seen its token."""
    lease = acquire()
    account = Account(name="new")
    account.save(fence=lease.fencing_token)
    assert mine(account).fencing_token == lease.fencing_token


def test_save_of_a_row_that_another_inserts(
    stale: Lease, current: Lease, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who finds no row, and saves after a successor inserted it, is refused."""
    save = models.Model.save

    def save_late(self: Account, **options: Any) -> None:
        monkeypatch.undo()
        theirs = {"name": "theirs", "fencing_token": current.fencing_token}
        Account.objects.bulk_create([Account(pk=self.pk, **theirs)])
        save(self, **options)

    monkeypatch.setattr(models.Model, "save", save_late)
    with pytest.raises(LeaseLost), transaction.atomic():
        Account(pk=123456, name="mine").save(fence=stale)
    monkeypatch.undo()
    Account(pk=123457, name="mine").save(fence=stale)
    assert [one.name for one in Account.objects.all()] == ["mine"]


def test_update_of_a_row_that_is_found_twice(current: Lease, account: Account) -> None:
    """A filter across a relation may find a row several times: it is one row."""
    joined = Account.objects.filter(pk=account.pk).extra(tables=["django_content_type"])
    assert joined.count() > 1
    assert joined.fenced_update(current, balance=5) == 1
    assert mine(account).balance == 5


def test_plain_save_never_writes_the_token(
    current: Lease, stale: Lease, account: Account
) -> None:
    """save() of an instance that was read earlier doesn't take the row's token back."""
    early = mine(account)
    Account.objects.filter(pk=account.pk).fenced_update(current, balance=100)
    early.name = "renamed"
    early.save()
    assert (mine(account).name, mine(account).fencing_token) == (
        "renamed",
        current.fencing_token,
    )
    with pytest.raises(LeaseLost):
        Account.objects.filter(pk=account.pk).fenced_update(stale, balance=1)


def test_token_after_a_save(account: Account) -> None:
    """The object knows it without another query, whether it was fenced or not."""
    account.save(fence=7)
    assert account.__dict__["fencing_token"] == 7
    account.save()
    assert account.__dict__["fencing_token"] == 7


def test_plain_save_of_a_changed_token(account: Account) -> None:
    """Not even a token that was set by hand is written by save()."""
    account.fencing_token = 10**9
    account.save()
    Account.objects.filter(pk=account.pk).fenced_update(5, balance=5)
    assert mine(account).fencing_token == 5


def test_plain_save_of_a_copy(account: Account) -> None:
    """A copied row has seen no token: those of its own lock begin anew."""
    account.save(fence=10**9)
    account.pk = None
    account._state.adding = True
    account.save()
    assert (account.fencing_token, mine(account).fencing_token) == (0, 0)
    account.save(fence=1)
    given = Account.objects.create(fencing_token=7)
    assert mine(given).fencing_token == 7


@pytest.mark.parametrize("fence", [None, "seven", 1.5], ids=repr)
def test_fence_of_the_wrong_type(account: Account, fence: object) -> None:
    """A fence is a lease or a token."""
    with pytest.raises((TypeError, ValueError)):
        Account.objects.filter(pk=account.pk).fenced_update(fence, balance=5)
    account.balance = 5
    with pytest.raises((TypeError, ValueError)):
        account.save(fence=fence)
    assert mine(account).balance == 0


def test_fence_of_several_keys(account: Account) -> None:
    """Whoever brings the leases of several keys is told to bring one."""
    with distributed_lock("one", "two") as leases:
        rows = Account.objects.filter(pk=account.pk)
        with pytest.raises(TypeError, match=r'use leases\["key"\]'):
            rows.fenced_update(leases, balance=5)
        assert rows.fenced_update(leases["one"], balance=5) == 1


def test_refused_update_rolls_nothing_else_back(
    stale: Lease, current: Lease, account: Account
) -> None:
    """Outside a transaction a refused update leaves the connection usable."""
    Account.objects.filter(pk=account.pk).fenced_update(current, balance=100)
    with pytest.raises(LeaseLost):
        Account.objects.filter(pk=account.pk).fenced_update(stale, balance=1)
    assert not connection.in_atomic_block
    AccountFactory(name="after")
    assert Account.objects.filter(name="after").exists()


def test_beside_another_writer(account: Account, other: OtherThread) -> None:
    """A fenced update waits for whoever writes at the same time."""
    if in_memory():
        pytest.skip("a database in memory locks whole tables")
    writes = threading.Event()

    def write() -> None:
        try:
            with transaction.atomic():
                AccountFactory()
                writes.set()
                time.sleep(0.5)
        finally:
            connections.close_all()

    for token in range(1, 4):
        writes.clear()
        writer = other.start(write)
        assert writes.wait(DEADLINE)
        rows = Account.objects.filter(pk=account.pk)
        assert rows.fenced_update(token, balance=token) == 1
        writer.result(DEADLINE)
    account.refresh_from_db()
    assert account.balance == 3


@pytest.mark.parametrize("how", ["save", "update"])
@pytest.mark.parametrize("model", [Account, Deposit])
def test_beside_its_successor(
    model: type[Account], how: str, other: OtherThread
) -> None:
    """Who waits for a successor's transaction is refused, also in an ancestor's row."""
    if in_memory():
        pytest.skip("a database in memory locks whole tables")
    row = model.objects.create(name="nobody's")
    written = threading.Event()

    def write(token: int, name: str) -> None:
        row = model.objects.filter(pk=pk)
        if how == "update":
            row.fenced_update(token, name=name)
        else:
            model(pk=pk, name=name).save(fence=token)

    def succeed() -> None:
        with transaction.atomic():
            write(10, "the successor's")
            written.set()
            time.sleep(0.5)

    pk = row.pk
    successor = other.start(succeed)
    assert written.wait(DEADLINE)
    # A transaction with a snapshot is refused by the database itself.
    with pytest.raises((LeaseLost, OperationalError)) as caught:
        write(5, "the old holder's")
    has_snapshot = settings.ISOLATION == "repeatable read"
    assert has_snapshot or caught.type is LeaseLost
    successor.result(DEADLINE)
    row.refresh_from_db()
    assert (row.name, row.fencing_token) == ("the successor's", 10)


def test_child_with_a_table_of_its_own(stale: Lease, current: Lease) -> None:
    """The ancestor's row has the token, whichever table's columns are written."""
    one, two = Deposit(days=1), Deposit(days=1)
    one.save(fence=current)
    two.save(fence=stale)
    rows = Deposit.objects.filter(pk__in=[one.pk, two.pk])
    with pytest.raises(LeaseLost):
        rows.fenced_update(stale, days=5)
    assert set(rows.values_list("days", flat=True)) == {1}
    assert rows.fenced_update(current, days=5, balance=7) == 2
    assert set(rows.values_list("days", "balance", "fencing_token")) == {
        (5, 7, current.fencing_token)
    }


def test_primary_key_of_two_columns(stale: Lease, current: Lease) -> None:
    """A composite primary key names the rows as any other does."""
    for number in range(2):
        Entry(book=1, number=number).save(fence=current)
    entries = Entry.objects.filter(book=1)
    with pytest.raises(LeaseLost):
        entries.fenced_update(stale, amount=5)
    with pytest.raises(LeaseLost):
        entries[0].save(fence=stale)
    assert entries.fenced_update(current, amount=6) == 2
    assert set(entries.values_list("amount", flat=True)) == {6}


def test_update_of_rows_found_across_a_relation(current: Lease) -> None:
    """Rows are locked, not what a filter joins to them, nor what is distinct."""
    row = AccountFactory()
    rows = Account.objects.filter(Q(deposit__days=3) | Q(pk=row.pk)).distinct()
    assert rows.fenced_update(current, balance=5) == 1
    assert mine(row).balance == 5


def test_update_of_one_row_for_each_value(current: Lease) -> None:
    """As Django's update(), it would change more rows than the queryset has."""
    with pytest.raises(TypeError, match="distinct"):
        Account.objects.filter(balance=0).distinct("name").fenced_update(current)


def test_token_among_the_values(current: Lease, account: Account) -> None:
    """Nobody lowers a row's token by hand."""
    rows = Account.objects.filter(pk=account.pk)
    with pytest.raises(ValueError, match="fencing_token"):
        rows.fenced_update(current, fencing_token=1)


@pytest.mark.django_db(transaction=True)
def test_async_twins(stale: Lease, current: Lease, account: Account) -> None:
    """They refuse what the sync forms refuse."""

    async def write(fence: Lease) -> None:
        await Account.objects.filter(pk=account.pk).afenced_update(fence, balance=1)
        account.balance = 2
        await account.asave(fence=fence)

    async_to_sync(write)(current)
    for fence in (stale, stale.fencing_token):
        with pytest.raises(LeaseLost):
            async_to_sync(write)(fence)
        with pytest.raises(LeaseLost):
            async_to_sync(account.asave)(fence=fence)
    account.refresh_from_db()
    assert account.balance == 2


def test_negative_token(account: Account) -> None:
    """No lease has a negative token: one is refused before any statement."""
    with pytest.raises(ValueError, match="fence must not be negative: -1"):
        Account.objects.filter(pk=account.pk).fenced_update(-1, balance=5)
    assert mine(account).balance != 5


def test_token_that_no_lease_has(account: Account) -> None:
    """One that no column holds is refused before any statement."""
    for token in (2**63, str(2**63)):
        with pytest.raises(ValueError, match="fence must be less than"):
            Account.objects.filter(pk=account.pk).fenced_update(token, balance=5)
    Account.objects.filter(pk=account.pk).fenced_update(2**63 - 1, balance=5)
    assert mine(account).balance == 5


@pytest.mark.parametrize("model", [Account, DistributedLock])
def test_annotations_can_be_evaluated(model: type) -> None:
    """They name nothing that only type checkers know."""
    assert "fencing_token" not in get_type_hints(model)
