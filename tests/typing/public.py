"""Checked by mypy and pyright alone: what type checkers make of the public names."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.utils.decorators import method_decorator
from django.views import View
from typing_extensions import assert_type

from dblocks import (
    FencedModel,
    InvalidKey,
    Lease,
    LeaseLost,
    Leases,
    Lock,
    LockError,
    LockTimeout,
    TransactionLock,
    current_lease,
    distributed_lock,
    make_key,
    transaction_lock,
)
from dblocks.fencing import FencedQuerySet
from dblocks.models import DistributedLock, LockManager, LockQuerySet
from dblocks.signals import lock_lost
from dblocks.test import hold_elsewhere


class Account(FencedModel): ...


@distributed_lock("checkout")
def checkout(request: HttpRequest, pk: int = 1) -> HttpResponse:
    return HttpResponse(pk)


@distributed_lock("checkout", timeout=timedelta(seconds=3), on_locked="skip")
def skipped(number: int) -> int:
    return number


@distributed_lock("account:{source}", "account:{target}", atomic=True)
def transfer(source: int, target: int) -> str:
    assert_type(current_lease(f"account:{source}"), Lease)
    assert_type(current_lease(), "Lease | Leases")
    return f"{source}{target}"


def refused(exc: LockTimeout, number: int) -> str:
    return exc.key


@distributed_lock("{number}", on_locked=refused, note=lambda number: f"{number}")
async def later(number: int) -> str:
    return str(number)


class Checkout(View):
    @method_decorator(distributed_lock("checkout"))
    def dispatch(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        return HttpResponse()

    @distributed_lock("post:{request.user.pk}")
    def post(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    @classmethod
    @distributed_lock("build:{number}")
    def build(cls, number: int) -> int:
        return number

    @staticmethod
    @distributed_lock("price:{number}")
    def price(number: int) -> int:
        return number


@method_decorator(distributed_lock("whole"), name="dispatch")
class Whole(View): ...


assert_type(checkout(HttpRequest(), 3), HttpResponse)
assert_type(skipped(3), int)
assert_type(transfer(1, target=2), str)
assert_type(Checkout().post(HttpRequest()), HttpResponse)
assert_type(Checkout.build(3), int)
assert_type(Checkout.price(3), int)

checkout(3)  # type: ignore[arg-type]
distributed_lock(3)  # type: ignore[call-overload]
distributed_lock("k", timeout="3")  # type: ignore[call-overload]
distributed_lock("k", on_locked="wrong")  # type: ignore[call-overload]
transaction_lock("k", lease=3)  # type: ignore[call-arg]


def leases(keys: list[str], now: datetime) -> None:
    with distributed_lock("a", "b") as both:
        assert_type(both, Leases)
        assert_type(both["a"], Lease)
        assert_type(list(both), "list[str]")
    lock = distributed_lock(make_key("a", 3, now.date()), permits=3)
    assert_type(lock, "Lock[Lease]")
    assert_type(lock.acquire(timeout=3), Lease)
    assert_type(lock.try_acquire(), "Lease | None")
    assert_type(lock.locked(), bool)
    assert_type(distributed_lock(*keys), "Lock[Leases]")
    with lock.acquire() as lease:
        assert_type(lease.key, str)
        assert_type(lease.fencing_token, "int | None")
        assert_type(lease.remaining(), float)
        assert_type(lease.held, bool)
        assert_type(lease.lost_reason, "str | None")
        lease.on_lost(lambda lost: print(lost.key))
        lease.check()
        lease.guard("default")
        lease.renew(30)
        assert_type(lease.release(), bool)


async def aleases() -> None:
    lock: Lock[Lease] = distributed_lock("k")
    assert_type(await lock.aacquire(), Lease)
    assert_type(await lock.atry_acquire(timeout=1), "Lease | None")
    assert_type(await lock.alocked(), bool)
    assert_type(await later(3), str)
    async with distributed_lock("a", "b") as both:
        assert_type(both, Leases)
    async with lock as lease:
        await lease.arenew()
        assert_type(await lease.arelease(), bool)


def rows(now: datetime) -> None:
    locks: LockManager = DistributedLock.objects
    row: DistributedLock | None = locks.for_update("k")
    held: LockQuerySet = locks.filter(key="k").held().filter(holder="h")
    first: DistributedLock | None = held.with_state().first()
    updated: int = Account.objects.filter(pk=1).fenced_update(3, name="n")
    token: int = Account().fencing_token
    locked: TransactionLock = transaction_lock("a", "b", nowait=True)
    with locked, transaction_lock("k") as entered:
        print(row, first, updated, token, entered.expires_at < now)


def fenced(accounts: FencedQuerySet[Account]) -> None:
    assert_type(accounts.filter(pk=1).first(), "Account | None")
    assert_type(accounts.fenced_update(3, name="n"), int)


def losses(**values: object) -> None:
    try:
        with hold_elsewhere("k"):
            lock_lost.connect(losses)
    except LockTimeout as error:
        assert_type(error.timeout, "float | None")
        assert_type(error.acquired_at, "datetime | None")
        assert_type(error.retry_after, float)
    except LeaseLost as error:
        assert_type(error.fencing_token, "int | None")
        assert_type(error.reason, str)
    except InvalidKey as error:
        as_value_error: ValueError = error
        print(as_value_error)
    except LockError as error:
        print(error)
