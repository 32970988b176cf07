"""The recipes' scenarios; the functions under test are those on the pages."""

from __future__ import annotations

import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import IntegrityError, OperationalError, connection, connections
from redis.exceptions import RedisError

from dblocks import InvalidKey, Lease, LeaseLost, LockTimeout, distributed_lock
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.signals import lock_acquired
from dblocks.test import clear_locks, hold_elsewhere, move_clock
from testproject.shop.models import Order, Product
from testproject.shop.sale import empty_shop
from tests.support.commands import MANAGE, environment
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread, fitting, in_memory, outranks
from tests.support.pages import DOCS, Examples, function
from tests.support.processes import ROOT, Workers
from tests.support.services import Redis
from tests.support.timing import (
    DEADLINE,
    SLACK,
    STEP,
    always,
    eventually,
    scaled,
    takes,
)
from tests.testapp.models import Account

Recipe = Callable[..., Any]

PAGES = ["recipes", "shop", "schedules", "leader", "idempotency"]


@pytest.fixture
def recipe(committed: None) -> Iterator[Callable[[str], Recipe]]:
    """Return a function of the pages by its name."""
    names: dict[str, Recipe] = {}
    with ExitStack() as pages:
        for page in PAGES:
            examples = pages.enter_context(Examples(DOCS / f"{page}.md"))
            names |= examples.run()
            clear_locks()
        # What the pages' own checks have left.
        empty_shop()
        # Their tokens are another engine's.
        Account.objects.all().delete()
        names["sent"].clear()
        yield names.__getitem__
    empty_shop()


@pytest.fixture
def at_once() -> Callable[..., list[Any]]:
    """Call a function in several threads at the same moment; return what they did."""
    if in_memory():
        pytest.skip("a database in memory locks whole tables, against readers too")

    def call(function: Recipe, calls: list[tuple[Any, ...]]) -> list[Any]:
        start = threading.Barrier(len(calls), timeout=DEADLINE)
        results: list[Any] = []

        def run(arguments: tuple[Any, ...]) -> None:
            try:
                connection.ensure_connection()
                start.wait()
                results.append(function(*arguments))
            except BaseException as error:
                results.append(error)
            finally:
                connections.close_all()

        threads = [threading.Thread(target=run, args=[each]) for each in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
        return results

    return call


@pytest.fixture
def engine(backend: str, settings: Any) -> str:
    """Make the engine under test the one that recipes use, beside another one."""
    database, memory = (
        {"BACKEND": f"dblocks.backends.{name}", "TIMEOUT": 0}
        for name in ("database.DatabaseBackend", "locmem.LocMemBackend")
    )
    settings.DBLOCKS = {
        **settings.DBLOCKS,
        "default": {**settings.DBLOCKS.get(backend, database), "TIMEOUT": 0},
        "old": memory if backends[backend].has_table else database,
    }
    return backend


def product(stock: int) -> Product:
    made: Product = Product.objects.create(name="For sale", stock=stock)
    return made


def stock_of(one: Product) -> int:
    one.refresh_from_db()
    return one.stock


# A lock table with a version


@pytest.mark.needs("has_table")
def test_import_under_a_request_id(recipe: Callable[[str], Recipe]) -> None:
    """One after another gets the lock, each under a greater token."""
    tokens = [recipe("import_prices")(f"request {n}")[1] for n in range(3)]
    assert tokens == sorted(set(tokens))


@pytest.mark.needs("has_table")
def test_locked_ten_times_and_unlocked_nine(
    committed: None, key: str, workers: Workers
) -> None:
    """Still held, for another process too; the tenth release frees it."""
    leases = [distributed_lock(key, owner="request 1").acquire() for _ in range(10)]
    for lease in leases[:9]:
        assert lease.release()
    assert DistributedLock.objects.get(pk=key).hold_count == 1
    worker = workers.start("attempt", key=key, owner="request 2")
    assert worker.expect("tried")["token"] is None
    worker.until_done()
    assert leases[9].release()
    worker = workers.start("attempt", key=key, owner="request 2")
    assert worker.expect("tried")["token"] == leases[0].fencing_token + 1


def test_holder_that_never_unlocks_is_replaced(workers: Workers, key: str) -> None:
    """A waiter gets the lock when the holder's time is over, and not before."""
    holder = workers.start("hold", key=key, lease=1, renew=False)
    before = holder.expect("held")["before"]
    waiter = workers.start("hold", key=key, timeout=1.4 + SLACK)
    held = waiter.expect("held", within=1 + 3 * SLACK)
    assert held["at"] - before >= 1
    holder.tell("release")
    assert holder.expect("released")["result"] is False
    waiter.tell("release")
    assert waiter.expect("released")["result"] is True


def test_forgetful_holder_is_not_renewed(recipe: Callable[[str], Recipe]) -> None:
    """The page's forgetful holder loses its lock after five seconds."""
    lease: Lease = recipe("forgetful")()
    move_clock(4)
    assert lease.held
    move_clock(2)
    assert not lease.held
    assert lease.lost_reason == "expired"


# Refusing the second click


def test_second_click_during_the_first(recipe: Callable[[str], Recipe]) -> None:
    """While the first is at work, the lock refuses; the order stays as it is."""
    order = Order.objects.create(customer="Ada")
    with hold_elsewhere(f"payment:{order.pk}"):
        assert recipe("pay")(order.pk) == "duplicate operation"
        assert recipe("pay_without_decorator")(order.pk) == "duplicate operation"
    order.refresh_from_db()
    assert order.state == Order.State.PLACED


def test_second_click_after_the_first(recipe: Callable[[str], Recipe]) -> None:
    """Afterwards it is the order's own state that refuses."""
    order = Order.objects.create(customer="Ada")
    assert [recipe("pay")(order.pk) for _ in range(2)] == ["paid", "paid already"]


def test_clicks_at_once(
    recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Of many at once, one pays."""
    order = Order.objects.create(customer="Ada")
    results = Counter(at_once(recipe("pay"), [(order.pk,)] * 6))
    assert results.pop("paid") == 1
    assert set(results) <= {"duplicate operation", "paid already"}


def test_nobody_releases_for_another(engine: str, key: str) -> None:
    """A holder that was replaced can't release its successor's lock."""
    first = distributed_lock(key, owner="first").acquire()
    assert backends["default"].force_release(key)
    second = distributed_lock(key, owner="second").acquire()
    assert first.release() is False
    assert second.held
    assert distributed_lock(key).locked()
    assert second.release() is True


def test_payment_with_one_key_at_once(
    recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Deliveries at the same time: one is charged, and all get its receipt."""
    account = AccountFactory(balance=0)
    charged: list[str] = []

    def charge(amount: int, idempotency_key: str) -> str:
        time.sleep(STEP)
        charged.append(idempotency_key)
        return f"receipt {len(charged)}"

    results = at_once(recipe("pay_once"), [(account.pk, "a", 5, charge)] * 4)
    assert results == ["receipt 1"] * 4
    assert charged == [f"payment:{account.pk}:a"]
    account.refresh_from_db()
    assert account.balance == 5


@pytest.mark.needs("has_table")
def test_payment_whose_first_delivery_stood_still(
    recipe: Callable[[str], Recipe], other: OtherThread
) -> None:
    """The second does it all; what the first wants to record is refused."""
    account, pay_once = AccountFactory(balance=0), recipe("pay_once")

    def charge(amount: int, idempotency_key: str) -> str:
        return idempotency_key

    def slowly(amount: int, idempotency_key: str) -> str:
        DistributedLock.objects.force_release(idempotency_key)
        other.do(pay_once, account.pk, "a", 5, charge)
        return idempotency_key

    with pytest.raises((IntegrityError, LeaseLost)):
        pay_once(account.pk, "a", 5, slowly)
    account.refresh_from_db()
    assert account.balance == 5


def test_message_at_once(
    recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Of a message's deliveries, one has an effect."""
    account = AccountFactory(balance=0)
    results = at_once(recipe("receive"), [("m", account.pk, 7)] * 4)
    assert Counter(results) == {True: 1, False: 3}
    account.refresh_from_db()
    assert account.balance == 7


@pytest.mark.needs("has_table")
def test_clear_leaves_young_locks_alone(recipe: Callable[[str], Recipe]) -> None:
    """Support can clear what is old, not what was just taken."""
    with hold_elsewhere("payment:7", lease=3600) as lease:
        assert recipe("clear")("payment:7") is False
        move_clock(601)
        assert recipe("clear")("payment:7") is True
        assert lease.release() is False


# A row locked for the request's transaction; an optimistic update


@pytest.mark.parametrize("way", ["sell", "sell_optimistically"])
def test_five_want_one_of_three(
    way: str, recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Five buyers at once get the three pieces that there are."""
    one = product(stock=3)
    function = recipe(way)

    def again(product_id: int) -> Any:
        # What the database refuses because of a conflict is to be repeated.
        for _ in range(50):
            try:
                return function(product_id)
            except OperationalError as error:
                refused = error
        raise refused

    results = Counter(at_once(again, [(one.pk,)] * 5))
    assert results == {True: 3, False: 2}
    assert stock_of(one) == 0


# A lock in Redis


def test_nobody_releases_a_successors_lock(
    engine: str, key: str, workers: Workers
) -> None:
    """The owner is compared: a holder that was replaced gives nothing back."""
    terms = fitting(engine, {"lease": 60, "renew": False})
    first = workers.start("hold", key=key, backend=engine, **terms)
    first.expect("held")
    assert backends["default"].force_release(key)
    second = distributed_lock(key).acquire()
    first.tell("release")
    assert first.expect("released")["result"] is False
    assert distributed_lock(key, owner="third").try_acquire() is None
    assert second.release() is True


def test_owner_comes_again(engine: str, key: str, other: OtherThread) -> None:
    """Its acquisitions are counted; whoever has another name is refused."""
    mine = distributed_lock(key, owner="request 1")
    leases = [mine.acquire(), other.do(mine.acquire), mine.acquire()]
    stranger = distributed_lock(key, owner="request 2")
    for lease in leases:
        assert stranger.try_acquire() is None
        assert lease.release()
    with stranger.acquire(timeout=0) as lease:
        assert outranks(lease, leases[0])


def test_lock_outlives_its_time_while_its_holder_works(
    engine: str, key: str, workers: Workers
) -> None:
    """It is renewed, and nobody gets it, for longer than the lease."""
    terms = fitting(engine, {"lease": scaled(1.0)})
    holder = workers.start("hold", key=key, backend=engine, **terms)
    holder.expect("held")
    during = 2 * terms.get("lease", backends["default"].lease)
    always(lambda: distributed_lock(key).try_acquire() is None, during=during)
    holder.tell("release")
    assert holder.expect("released")["result"] is True


@pytest.mark.needs("has_fencing_tokens")
def test_interest_of_an_outdated_holder(
    recipe: Callable[[str], Recipe], engine: str, other: OtherThread
) -> None:
    """Who was replaced during the work is refused by the account itself."""
    account = AccountFactory(balance=100)
    add_interest = recipe("add_interest")
    key = f"interest:{account.pk}"

    def slowly(balance: int) -> int:
        # As if the process had stood still meanwhile.
        backends["default"].force_release(key)
        other.do(add_interest, account.pk, lambda balance: 5)
        return 10

    with pytest.raises(LeaseLost) as refused:
        add_interest(account.pk, slowly)
    assert refused.value.reason == "taken"
    account.refresh_from_db()
    assert account.balance == 105


# Redlock


@pytest.mark.engine("redlock")
def test_redlock_without_two_of_five(
    recipe: Callable[[str], Recipe], settings: Any, other: OtherThread
) -> None:
    """The lock is had and renewed; without three it is an error, and leaves nothing."""
    with ExitStack() as running:
        servers = [running.enter_context(Redis()) for _ in range(5)]
        settings.DBLOCKS = {
            "default": {
                "BACKEND": "dblocks.backends.redis.RedisBackend",
                "LOCATION": [server.url() for server in servers],
                # One that waits for a processor answers late, and must be heard.
                "OPTIONS": {"socket_timeout": 5},
                "LEASE": 60,
            }
        }
        lock = distributed_lock("warm-cache")
        for server in servers[:2]:
            server.kill()
        filled: list[str] = []

        def fill(page: str) -> None:
            assert other.do(lock.try_acquire) is None
            filled.append(page)

        recipe("warm_cache")(fill, ["a", "b"])
        assert filled == ["a", "b"]
        servers[2].kill()
        with pytest.raises(RedisError, match="3 of 5 servers did not answer"):
            lock.try_acquire()
        for server in servers[:3]:
            server.start()
        assert not lock.locked()
        with lock as lease:
            assert lease.fencing_token is None
            lease.renew()


def test_paused_at_a_page(workers: Workers, engine: str, key: str) -> None:
    """A holder that is paused beyond its lease, and replaced, begins no other page."""
    if backends[engine].has_guard:
        pytest.skip("not applicable: test_no_split_brain has the guard")
    terms = fitting(engine, {"lease": scaled(1)})
    told = {"key": key, "pages": ["a", "b"], "backend": engine, **terms}
    paused = workers.start("warm_cache", **told)
    assert paused.expect("fills")["page"] == "a"
    paused.stop()
    longest = terms.get("lease", backends[engine].lease) + 2 * SLACK
    try:
        distributed_lock(key, timeout=longest).acquire().release()
    finally:
        paused.resume()
    paused.tell("go on")
    # Its time is over, also when nobody has the key any more.
    assert paused.expect("lost")["reason"] in {"expired", "taken", "backend"}
    paused.until_done()


# A lock in ZooKeeper


def test_served_in_order_and_nothing_left(
    recipe: Callable[[str], Recipe], engine: str, workers: Workers
) -> None:
    """Waiting processes all have their turn; one that is killed loses its.

    Where the engine knows its queue by name, they have it as they came.
    """
    key, locks = "reindex", backends["default"]
    options = {"key": key, "backend": engine, "timeout": DEADLINE}
    with distributed_lock(key):
        counts = locks.waiters(key).number is not None
        waiting = []
        for number in range(1, 5):
            waiting.append(workers.start("hold", announced=True, **options))
            waiting[-1].expect("asks")
            if counts:
                eventually(
                    lambda number=number: locks.waiters(key).number == number,
                    what=f"waiter {number}",
                )
        knows_names = bool(locks.waiters(key).names)
        waiting.pop(1).kill()
    for worker in waiting:
        worker.tell("release")
    turns = [worker.expect("held")["at"] for worker in waiting]
    assert turns == sorted(turns) or not knows_names
    for worker in waiting:
        worker.until_done()
    done: list[str] = []
    assert recipe("reindex")(["a", "b"], done.append) == 2
    assert not locks.waiters(key).number
    assert not distributed_lock(key).locked()


# Moving to another engine


def test_deployments_from_one_engine_to_another(
    engine: str, other: OtherThread, committed: None
) -> None:
    """Neighbouring deployments never work at once, and a rollback is one of them."""
    both, new = (
        function("migrating.md", name, distributed_lock=distributed_lock)
        for name in ("import_in_step_1", "import_in_step_2")
    )

    def is_let_in(work: Recipe) -> bool:
        try:
            return bool(other.do(work, lambda: True))
        except LockTimeout:
            return False

    with distributed_lock("import", backend="old"):
        assert not is_let_in(both)
    for inside, outside in [(both, new), (both, both), (new, both), (new, new)]:
        assert inside(lambda work=outside: is_let_in(work)) is False
    assert not distributed_lock("import", backend="old").locked()
    assert is_let_in(both)
    assert is_let_in(new)


# The five conditions


def test_visible_to_all(workers: Workers, engine: str, key: str) -> None:
    """Another process sees who has the lock."""
    worker = workers.start("hold", key=key, note="visible", backend=engine)
    worker.expect("held")
    assert distributed_lock(key).locked()
    with pytest.raises(LockTimeout) as refused:
        distributed_lock(key).acquire(timeout=0)
    assert refused.value.note == "visible"
    assert str(worker.pid) in refused.value.holder


def test_mutual_exclusion(workers: Workers, engine: str, key: str) -> None:
    """Of several processes that try at once, one gets it, or of Redlock's at most."""
    racers = workers.start_all("race", [{"key": key, "backend": engine}] * 4)
    for racer in racers:
        racer.expect("ready")
    for racer in racers:
        racer.tell("go")
    owners = [racer.expect("tried")["owner"] for racer in racers]
    won = sum(owner is not None for owner in owners)
    # Where no single server counts the grants, each may have some of the votes.
    assert won == 1 or (won == 0 and not backends["default"].has_fencing_tokens)


def test_availability(workers: Workers, engine: str, key: str) -> None:
    """A holder that is killed is replaced when its lease is over."""
    terms = fitting(engine, {"lease": 1})
    holder = workers.start("hold", key=key, backend=engine, **terms)
    holder.expect("held")
    holder.kill()
    longest = terms.get("lease", backends["default"].lease) + SLACK
    with takes(at_most=longest):
        assert distributed_lock(key, timeout=longest).acquire().release()


@pytest.mark.needs("has_own_leases", "has_movable_clock")
def test_limit_in_time(engine: str, key: str, other: OtherThread) -> None:
    """A living holder's renewal ends at max_hold."""
    lease = distributed_lock(key, lease=30, max_hold=60).acquire()
    move_clock(25)
    eventually(lambda: lease.remaining() > 20, what="the renewal")
    move_clock(36)
    assert lease.lost_reason == "expired"
    assert other.do(lambda: distributed_lock(key).acquire(timeout=SLACK).release())


def test_limit_in_real_time(engine: str, key: str, other: OtherThread) -> None:
    """So it does where all leases have one length, after two of them here."""
    length = backends[engine].lease
    if backends[engine].has_own_leases:
        pytest.skip("not applicable: test_limit_in_time moves the clock")
    before = time.monotonic()
    lease = distributed_lock(key, max_hold=2 * length).acquire()
    always(lambda: lease.held, during=1.3 * length, what="held")
    assert other.do(distributed_lock(key).try_acquire) is None
    with takes(at_most=length + SLACK):
        theirs = other.do(distributed_lock(key, timeout=DEADLINE).acquire)
        assert time.monotonic() - before >= 1.7 * length
    assert lease.lost_reason == "expired"
    assert not lease.held
    assert theirs.held
    assert other.do(theirs.release) is True
    assert lease.release() is False


@pytest.mark.needs("has_fencing_tokens")
def test_no_split_brain_beside_a_fence(
    recipe: Callable[[str], Recipe], workers: Workers, engine: str, key: str
) -> None:
    """A holder that was paused past its lease, and replaced, has an outdated token."""
    account = AccountFactory(balance=10)
    rows = type(account).objects.filter(pk=account.pk)
    terms = fitting(engine, {"lease": 0.6})
    paused = workers.start("hold", key=key, backend=engine, **terms)
    token = paused.expect("held")["token"]
    paused.stop()
    longest = terms.get("lease", backends["default"].lease) + 2 * SLACK
    try:
        with distributed_lock(key, timeout=longest) as lease:
            rows.fenced_update(lease, balance=100)
    finally:
        paused.resume()
    with pytest.raises(LeaseLost):
        rows.fenced_update(token, balance=11)
    account.refresh_from_db()
    assert account.balance == 100
    paused.tell("release")
    assert paused.expect("released")["result"] is False


@pytest.mark.needs("has_guard")
def test_no_split_brain(workers: Workers, key: str) -> None:
    """A holder that was paused past its lease, and replaced, can't commit."""
    account = AccountFactory(balance=10)
    paused = workers.start("add_under_guard", key=key, account=account.pk, lease=0.6)
    paused.expect("read")
    paused.stop()
    try:
        with distributed_lock(key, timeout=0.6 + 2 * SLACK):
            type(account).objects.filter(pk=account.pk).update(balance=100)
    finally:
        paused.resume()
    paused.tell("write")
    assert paused.expect("lost")["reason"] == "taken"
    account.refresh_from_db()
    assert account.balance == 100


# A flash sale


@pytest.mark.parametrize("stock", [1, 3])
def test_flash_sale(
    stock: int, recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Five buyers at once get as many pieces as there are, and not one more."""
    one = product(stock)
    calls = [(one.pk, f"Buyer {number}") for number in range(5)]
    results = at_once(recipe("buy"), calls)
    sold = [result for result in results if isinstance(result, Order)]
    assert (len(sold), results.count(None)) == (stock, 5 - stock)
    assert stock_of(one) == 0


# A transfer between two accounts


def test_transfers_in_opposite_directions(
    recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """None blocks another, and no money is made or lost."""
    ann, bob = AccountFactory(balance=5), AccountFactory(balance=5)
    there, back = (ann.pk, bob.pk, 1), (bob.pk, ann.pk, 1)
    results = at_once(recipe("transfer"), [there, back] * 3)
    assert results == ["done"] * 6
    for account in (ann, bob):
        account.refresh_from_db()
        assert account.balance == 5


def test_transfer_waits_for_both(recipe: Callable[[str], Recipe]) -> None:
    """Somebody at the target keeps the transfer out, and the source stays free."""
    ann, bob = AccountFactory(balance=5), AccountFactory()
    with hold_elsewhere(f"account:{bob.pk}"):
        with pytest.raises(LockTimeout) as refused:
            recipe("transfer")(ann.pk, bob.pk, 1)
        assert not distributed_lock(f"account:{ann.pk}").locked()
    assert refused.value.key == f"account:{bob.pk}"
    ann.refresh_from_db()
    assert ann.balance == 5


# A whole cart


def test_carts_that_share_articles(
    recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Carts in opposite orders at once: as many are reserved as there are pieces."""
    lamp, shade = product(stock=3), product(stock=9)
    carts = [{lamp.pk: 1, shade.pk: 2}, {shade.pk: 2, lamp.pk: 1}] * 3
    calls = [(f"Buyer {number}", cart) for number, cart in enumerate(carts)]
    results = at_once(recipe("reserve"), calls)
    assert results.count(None) == 3
    assert sum(isinstance(result, Order) for result in results) == 3
    assert (stock_of(lamp), stock_of(shade)) == (0, 3)


def test_cart_locks_all_its_articles(recipe: Callable[[str], Recipe]) -> None:
    """And nothing else, in the order of the keys."""
    locked: list[str] = []

    def note(key: str, **kwargs: Any) -> None:
        locked.append(key)

    articles = [product(stock=1) for _ in range(3)]
    lock_acquired.connect(note)
    try:
        order = recipe("reserve")("Ada", {one.pk: 1 for one in reversed(articles)})
    finally:
        lock_acquired.disconnect(note)
    assert order.items.count() == 3
    assert locked == sorted(f"stock:{one.pk}" for one in articles)


def test_empty_cart(recipe: Callable[[str], Recipe]) -> None:
    """There is nothing to lock."""
    with pytest.raises(InvalidKey, match="nothing to lock"):
        recipe("reserve")("Ada", {})


# A limit for each tenant


def test_limit_for_each_tenant(recipe: Callable[[str], Recipe]) -> None:
    """The fourth export of a tenant is told when to come; another tenant's runs."""
    export = recipe("export")
    with ExitStack() as others:
        for _ in range(2):
            others.enter_context(hold_elsewhere("export:acme", permits=3))
        assert export("acme") == "orders of acme"
        others.enter_context(hold_elsewhere("export:acme", permits=3, lease=20))
        assert export("acme") in {"try again in 19 s", "try again in 20 s"}
        assert export("other") == "orders of other"


# Workers that share out the work


def test_workers_have_different_shards(
    recipe: Callable[[str], Recipe], at_once: Callable[..., list[Any]]
) -> None:
    """Six workers start: no order is shipped twice, each by the worker of its shard."""
    orders = [Order.objects.create(customer="Ada", state="paid") for _ in range(8)]
    shipped: list[int] = []

    def ship(order: Order) -> None:
        time.sleep(STEP)
        Order.objects.filter(pk=order.pk).update(state=Order.State.PLACED)
        shipped.append(order.pk)

    results = Counter(at_once(recipe("ship_my_share"), [(ship,)] * 6))
    assert set(results) <= {None, 0, 1, 2, 3}
    assert shipped
    assert len(shipped) == len(set(shipped))
    shards = {order.pk % 4 for order in orders if order.pk in shipped}
    assert shards == set(results) - {None}


def test_fifth_worker_is_skipped(recipe: Callable[[str], Recipe]) -> None:
    """Whoever follows a worker that is done has that one's share."""
    orders = [Order.objects.create(customer="Ada", state="paid") for _ in range(8)]
    shipped: list[Order] = []
    with ExitStack() as others:
        leases = [
            others.enter_context(hold_elsewhere("shipping", permits=4))
            for _ in range(4)
        ]
        assert recipe("ship_my_share")(shipped.append) is None
        leases[2].release()
        permit = recipe("ship_my_share")(shipped.append)
    assert permit == leases[2].permit
    assert [order for order in orders if order.pk % 4 == permit] == sorted(
        shipped, key=lambda order: order.pk
    )


# One leader among many processes


@pytest.mark.needs("has_fencing_tokens")
def test_leader_hands_over(
    recipe: Callable[[str], Recipe],
    engine: str,
    key: str,
    threads: Callable[[], OtherThread],
) -> None:
    """A request makes the leader let the other one lead; they never write in turns."""
    if in_memory():
        pytest.skip("a database in memory locks whole tables, against readers too")
    account = AccountFactory()
    rows = type(account).objects.filter(pk=account.pk)
    written: list[tuple[int, str]] = []

    def work_of(name: str) -> Recipe:
        def work(lease: Lease) -> None:
            assert lease.fencing_token is not None
            rows.fenced_update(lease, name=name, balance=len(written) + 1)
            written.append((lease.fencing_token, name))
            time.sleep(STEP)

        return work

    election = distributed_lock(key, **fitting(engine, {"lease": scaled(0.9)}))
    stand = recipe("Candidate")
    candidates = [stand(election, work_of(name), rest=SLACK) for name in ("Ann", "Bob")]
    runs = [threads().start(candidate.run) for candidate in candidates]
    try:
        eventually(lambda: written, what="a leader")
        first = written[0][1]
        assert backends["default"].request_release(key, reason="a deployment")
        eventually(lambda: written[-1][1] != first, what="a successor")
    finally:
        for candidate in candidates:
            candidate.stop()
        for run in runs:
            run.result(timeout=DEADLINE)
    terms = [term for term, _ in written]
    assert terms == sorted(terms)
    assert len(set(written)) == len(set(terms)) == 2
    account.refresh_from_db()
    assert (account.fencing_token, account.name) == written[-1]
    assert account.balance == len(written)
    assert not election.locked()


@pytest.mark.needs("has_fencing_tokens", "has_movable_clock")
def test_leader_that_stood_still(
    recipe: Callable[[str], Recipe],
    engine: str,
    other: OtherThread,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it wanted to write before it was replaced is refused, and it steps down."""
    account = AccountFactory(name="visitors")
    rows = type(account).objects.filter(pk=account.pk)
    election = distributed_lock("visitors", lease=30)
    count_visitor, steps = recipe("count_visitor"), []

    def succeed() -> None:
        with election as lease:
            rows.fenced_update(lease, balance=100)

    def work(lease: Lease) -> None:
        steps.append(lease)
        count_visitor(lease)
        if len(steps) == 2:
            candidate.stopping = True
            move_clock(31)
            other.do(succeed)
            count_visitor(lease)

    candidate = recipe("Candidate")(election, work)
    candidate.run()
    assert len(steps) == 2
    assert "no longer the leader" in caplog.text
    account.refresh_from_db()
    assert account.balance == 100
    assert account.fencing_token > steps[0].fencing_token
    assert not election.locked()


# A scheduled job on a cluster


def test_scheduled_job_runs_once(recipe: Callable[[str], Recipe]) -> None:
    """The late clock's machine skips, the next interval's run goes on."""
    assert recipe("remind")() == "sent"
    move_clock(2)
    assert recipe("remind")() is None
    move_clock(300)
    assert recipe("remind")() == "sent"
    assert recipe("sent") == ["reminders"] * 2


def test_job_from_cron_runs_once(committed: None, key: str) -> None:
    """Of two machines' cron, one runs the program; the other is silent."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    options = ["--skip-if-locked", "--hold-at-least", "300", "--", "echo", "ran"]
    runs = [
        subprocess.run(
            [*MANAGE, "run_locked", key, *options],
            env=environment(),
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
            check=False,
        )
        for _ in range(2)
    ]
    assert [(run.returncode, run.stdout, run.stderr) for run in runs] == [
        (0, "ran\n", ""),
        (0, "", ""),
    ]


# Locks in a database of their own


@pytest.mark.needs("has_table")
def test_locks_in_a_database_of_their_own(
    committed: None, key: str, settings: Any, other: OtherThread
) -> None:
    """As on the page: the row is there, and the guard works across."""
    if "locks" not in connections.settings:
        pytest.skip("LOCKS_DATABASE_URL names no second database")
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}
    account = AccountFactory()
    rows = DistributedLock.objects.using("locks")

    def pay_in(balance: int) -> None:
        with distributed_lock(key, atomic=True):
            assert rows.held().filter(pk=key).exists()
            type(account).objects.filter(pk=account.pk).update(balance=balance)
            if balance > 1:
                other.do(lambda: rows.force_release(key))

    try:
        pay_in(1)
        with pytest.raises(LeaseLost):
            pay_in(2)
        account.refresh_from_db()
        assert account.balance == 1
    finally:
        rows.filter(pk=key).prune(0)


# Clearing overdue locks


@pytest.mark.needs("has_table")
def test_cleaner_ends_what_hangs_and_nothing_else(
    recipe: Callable[[str], Recipe],
) -> None:
    """Held for too long is ended, held for less is left, overdue needs nobody."""
    with hold_elsewhere("hung", lease=4 * 3600) as hung:
        move_clock(2 * 3600 + 1)
        with hold_elsewhere("young", lease=3600) as young:
            assert recipe("end_what_hangs")() == ["hung"]
            assert young.held
        assert hung.release() is False
        assert hung.lost_reason == "forced"


@pytest.mark.needs("has_table")
def test_cleaner_ends_permits_that_hang(recipe: Callable[[str], Recipe]) -> None:
    """Each permit is judged by itself."""
    with hold_elsewhere("export", permits=2, lease=4 * 3600) as hung:
        move_clock(2 * 3600 + 1)
        with hold_elsewhere("export", permits=2, lease=3600) as young:
            ended = recipe("end_what_hangs")()
            assert ended == [f"export, permit {hung.permit}"]
            assert young.held
        assert hung.release() is False
