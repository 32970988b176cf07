from __future__ import annotations

import signal
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from django.conf import settings
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError, connection
from django.utils.translation import ngettext

from dblocks import Lease, Lock, LockTimeout, distributed_lock
from dblocks.models import DistributedLock
from testproject.shop import keeping
from testproject.shop.carts import PATIENCE, WAYS, Way
from testproject.shop.crew import Crew, Event, Unexpected
from testproject.shop.meeting import let_carts_meet
from testproject.shop.models import Order, Product
from testproject.shop.operators import Account, make_operators
from testproject.shop.sale import Sale, empty_shop, hold_sale
from testproject.shop.selling import VARIANTS, Checkout, Variant
from testproject.shop.tables import (
    CART_COLUMNS,
    CART_HEADER,
    HEADER,
    TITLE,
    WIDTH,
    cart_cells,
    cells,
    line,
)

SLACK = 2.0
"""Seconds by which a busy machine may be late."""

SITE_LEASE = 15.0
"""Seconds after which a killed site's own lock is free."""

STOCK = {"Brass lamp": 1, "Teapot": 5, "Oak chair": 3, "Reserved globe": 2}
"""What the site sells; the last is kept locked."""

PREFIX = "shop:"
BAR = 20

CARTS = 2
"""Carts that each process reserves."""


class Command(BaseCommand):
    help = (
        "Hold a flash sale in several processes, with and without locks, let carts "
        "with the same articles meet, then kill and pause holders of locks; with "
        "--serve, open the shop as a site afterwards. Makes and empties the shop's "
        "tables."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--stock", type=int, default=10, help="pieces on sale")
        parser.add_argument("--buyers", type=int, default=40, help="who want one each")
        parser.add_argument("--processes", type=int, default=4)
        parser.add_argument(
            "--threads", type=int, default=2, help="buyers at once in each process"
        )
        parser.add_argument(
            "--serve",
            nargs="?",
            const="127.0.0.1:8000",
            metavar="ADDRESS:PORT",
            help="leave the shop running as a site, at this address (default: "
            "%(const)s), until it is interrupted",
        )
        parser.add_argument(
            "--no-sale", action="store_true", help="with --serve: the site alone"
        )

    def handle(
        self,
        *,
        stock: int,
        buyers: int,
        processes: int,
        threads: int,
        serve: str | None,
        no_sale: bool,
        verbosity: int,
        **options: Any,
    ) -> None:
        if no_sale and not serve:
            raise CommandError("--no-sale leaves nothing to do without --serve.")
        if serve and settings.LOCKS_URLS:
            raise CommandError(
                "The site shows locks that are in its database: unset LOCKS_URL."
            )
        if stock < 1 or threads < 1 or processes < 2 or buyers < 2 * stock:
            raise CommandError(
                "It takes at least one piece, one thread, two processes, and twice as "
                "many buyers as pieces."
            )
        if connection.vendor == "sqlite" and (
            connection.is_in_memory_db()  # type: ignore[attr-defined]
        ):
            raise CommandError(
                "A database in memory belongs to one process; give DATABASE_URL a file."
            )
        self.verbosity = verbosity
        self.problems: list[str] = []
        try:
            self.migrate()
            if not no_sale:
                self.judge(Sale(stock, buyers, threads), processes)
            if serve:
                self.serve(serve)
        except KeyboardInterrupt:
            raise CommandError("Interrupted.", returncode=130) from None
        except keeping.errors() as error:
            raise CommandError(f"{keeping.name()} can't be used: {error}") from error
        except LockTimeout as error:
            raise CommandError(f"Another demo is at work. {error}") from error

    def migrate(self) -> None:
        try:
            call_command("migrate", verbosity=0, interactive=False)
        except OperationalError as error:
            raise CommandError(f"The database can't be used: {error}") from error

    def judge(self, sale: Sale, processes: int) -> None:
        """Show everything, and fail when something wasn't as it should be."""
        started = time.monotonic()
        try:
            self.show(sale, processes)
        except Unexpected as error:
            self.problems.append(str(error))
        if self.problems:
            raise CommandError("\n".join(self.problems))
        self.say()
        self.say(
            self.style.SUCCESS(
                f"All as it should be, in {time.monotonic() - started:.0f} s."
            )
        )

    def show(self, sale: Sale, processes: int) -> None:
        with Crew() as crew, interruptible(crew), only_one():
            empty_shop()
            for _ in range(processes):
                crew.hire()
            self.show_sales(sale, crew)
            self.show_carts(crew)
            self.show_killed_holder(crew)
            self.show_paused_holder(crew)
        DistributedLock.objects.filter(key__startswith=PREFIX).prune(0)

    # The flash sale

    def show_sales(self, sale: Sale, crew: Crew) -> None:
        pieces = ngettext("%d piece", "%d pieces", sale.stock) % sale.stock
        database = ".".join(map(str, connection.get_database_version()))
        self.heading("A flash sale")
        self.say(
            f"{sale.buyers} buyers want {pieces}, in {len(crew.tills)} processes with "
            f"{sale.threads} threads each,\n"
            f"on {connection.display_name} {database}{keeping.place()}.\n"
            f"Each looks at the stock, thinks for about {sale.thinking * 1000:.0f} ms, "
            f"and buys.\n"
            f"(Without the pause they oversell too, only less surely.)"
        )
        self.explain(keeping.without_guard())
        self.say()
        for row in HEADER:
            self.say(self.style.MIGRATE_LABEL(line("", row)))
        for safe, title in [
            (False, "These can sell too much:"),
            (True, "These can't:"),
        ]:
            self.say(self.style.MIGRATE_LABEL(title))
            for variant in VARIANTS.values():
                if variant.safe is safe and variant.applies():
                    self.show_sale(variant, sale, crew)

    def show_sale(self, variant: Variant, sale: Sale, crew: Crew) -> None:
        def progress(answered: int) -> None:
            bar = "#" * (BAR * answered // sale.buyers)
            served = f"{answered} of {sale.buyers} buyers"
            text = f" {variant.title:<{TITLE}} [{bar:<{BAR}}] {served}"
            self.stdout.write(f"{text:<{WIDTH}}", ending="\r")
            self.stdout.flush()

        on_terminal = self.verbosity and self.stdout.isatty()
        result = hold_sale(variant, sale, crew, progress if on_terminal else None)
        style = self.style.ERROR if result.oversold else self.style.SUCCESS
        self.say(style(line(f" {variant.title}", cells(result))))
        if variant.safe and (result.oversold or result.sold != sale.stock):
            self.problems.append(
                f"{variant.title!r} sold {result.sold} of {sale.stock}."
            )
        if not variant.safe and not result.oversold:
            self.problems.append(f"{variant.title!r} didn't oversell this time.")

    # Several locks at once

    def show_carts(self, crew: Crew) -> None:
        self.heading("Carts that meet")
        self.say(
            f"{len(crew.tills)} processes reserve {CARTS} carts each, one after "
            f"another. All carts have the same\n"
            f"two articles, in every second process in the opposite order. A cart "
            f"that waits\n"
            f"{PATIENCE:g} s for a lock gives up."
        )
        self.say()
        self.say(self.style.MIGRATE_LABEL(line("", CART_HEADER, CART_COLUMNS)))
        for safe, title in [
            (False, "Here carts wait for each other until one gives up:"),
            (True, "Here they can't:"),
        ]:
            self.say(self.style.MIGRATE_LABEL(title))
            for way in WAYS.values():
                if way.safe is safe:
                    self.show_meeting(way, crew)

    def show_meeting(self, way: Way, crew: Crew) -> None:
        meeting = let_carts_meet(way, crew, carts=CARTS)
        style = self.style.ERROR if meeting.timed_out else self.style.SUCCESS
        self.say(style(line(f" {way.title}", cart_cells(meeting), CART_COLUMNS)))
        if not meeting.adds_up:
            self.problems.append(f"{way.title!r} left a stock that doesn't add up.")
        if way.safe and meeting.timed_out:
            self.problems.append(f"{way.title!r} let {meeting.timed_out} time out.")
        if not way.safe and not meeting.timed_out:
            self.problems.append(f"{way.title!r} let none time out this time.")

    # What becomes of a lock whose holder is killed, or paused

    def show_killed_holder(self, crew: Crew) -> None:
        key, lease = f"{PREFIX}stocktaking", keeping.lease()
        holder, waiter = crew.tills[:2]
        self.heading("A holder is killed")
        holder.tell("hold", key=key, lease=lease)
        held = crew.expect(holder, "held")
        self.zero = held.at
        self.tell(held, f"holds {key!r}, lease {lease:g} s")
        waiter.tell("hold", key=key, lease=lease)
        crew.expect_silence(during=1.25 * lease)
        self.tell(None, f"{holder} renews, {waiter} still waits")
        crew.dismiss(holder)
        killed_at = time.monotonic()
        least, most = keeping.left_at_death(seconds_left(key))
        left = keeping.of_killed_holder(least)
        self.tell(None, f"{holder} is killed by SIGKILL, {left}")
        taken = crew.expect(waiter, "held")
        waited = taken.at - killed_at
        self.tell(taken, f"takes the lock over, {waited:.2f} s after the kill")
        waiter.tell("release")
        crew.expect(waiter, "done")
        if not least - 0.1 < waited < most + SLACK:
            self.problems.append(
                f"A lock with {least:.2f} to {most:.2f} s left was taken over after "
                f"{waited:.2f} s."
            )
        self.compare_tokens(held, taken)

    def show_paused_holder(self, crew: Crew) -> None:
        product = Product.objects.create(name="Paused", stock=10)
        lease = keeping.lease()
        key = Checkout(product.pk, "").key
        paused, other = crew.hire(), crew.tills[0]
        self.heading("A holder is paused")
        paused.tell("serve", product_id=product.pk, customer="Ada", lease=lease)
        first = crew.expect(paused, "thinking")
        paused.pause()
        self.zero = first.at
        self.tell(first, f"holds {key!r}, sees {first.data['stock']} in stock")
        self.tell(None, f"{paused} is paused by SIGSTOP, and renews no more")
        other.tell("serve", product_id=product.pk, customer="Bob", lease=lease)
        second = crew.expect(other, "thinking")
        self.tell(second, f"takes the lock over, sees {second.data['stock']}")
        other.tell("buy")
        self.tell(crew.expect(other, "sold"), "sells one to Bob and commits")
        crew.expect(other, "done")
        paused.resume()
        paused.tell("buy")
        self.tell(None, f"{paused} continues, sells one to Ada and commits:")
        lost = crew.expect(paused, "lost")
        crew.expect(paused, "done")
        error = f"LeaseLost: {lost.data['error']}"
        indent = " " * 12
        for text in textwrap.wrap(error, WIDTH - len(indent)):
            self.say(indent + self.style.NOTICE(text))
        product.refresh_from_db()
        customers = Order.objects.filter(items__product=product)
        names = list(customers.values_list("customer", flat=True))
        self.tell(None, f"stock: {product.stock}; sold to: {', '.join(names)}")
        if (product.stock, names) != (9, ["Bob"]):
            self.problems.append(
                f"A holder that had lost its lock has written: {product.stock} in "
                f"stock, sold to {names}."
            )
        self.explain(keeping.of_late_pause())
        self.compare_tokens(first, second)

    def compare_tokens(self, earlier: Event, later: Event) -> None:
        if None in {earlier.data["token"], later.data["token"]}:
            self.explain(keeping.without_tokens())
        elif not earlier.data["token"] < later.data["token"]:
            self.problems.append(
                f"The fencing token {later.data['token']} came after "
                f"{earlier.data['token']}."
            )

    # The site

    def serve(self, address: str) -> None:
        """Open the shop, and keep one lock that an operator can free."""
        with stoppable(), only_one():
            empty_shop()
            products = [
                Product.objects.create(name=name, stock=stock)
                for name, stock in STOCK.items()
            ]
            accounts = make_operators()
            reserved = products[-1]
            lock = distributed_lock(
                Checkout(reserved.pk, "").key,
                timeout=0,
                lease=SITE_LEASE,
                note="reserved by manage.py demo",
            )
            with lock.acquire() as lease:
                lease.on_lost(self.tell_lost)
                self.introduce(address, reserved, accounts)
                call_command(
                    "runserver", address, use_reloader=False, insecure_serving=True
                )

    def introduce(
        self, address: str, reserved: Product, accounts: list[Account]
    ) -> None:
        site = f"http://{address}"
        self.heading("The shop is open")
        self.say(f"  {site}/        the shop: press a button in two windows")
        self.say(f"  {site}/locks/  its locks")
        self.say(f"  {site}/leader/ who leads: start two of manage.py lead")
        self.say(f"  {site}/admin/  where an operator may free them, a viewer not:")
        for account in accounts:
            self.say(f"    {account.username}, password {account.password}")
        self.say()
        self.say(
            f"This process holds the lock on {reserved.name!r}: nobody can buy it "
            f"until an operator\nfrees it. Another server on the same stock: "
            f"manage.py runserver 8001"
        )
        self.say()

    def tell_lost(self, lease: Lease) -> None:
        """Say that the operator has freed the lock; called in another thread."""
        self.say(self.style.NOTICE(f"The lock {lease.key!r} was taken from us."))

    # Output

    def say(self, text: str = "") -> None:
        if self.verbosity:
            self.stdout.write(text)
            self.stdout.flush()

    def explain(self, text: str) -> None:
        """Print a paragraph, if there is one."""
        if text:
            self.say(textwrap.fill(text, WIDTH))

    def heading(self, text: str) -> None:
        self.say()
        self.say(self.style.MIGRATE_HEADING(text))

    def tell(self, event: Event | None, text: str) -> None:
        """Print what happened when, and in which process with which token."""
        at = time.monotonic()
        if event is not None:
            at = event.at
            text = f"{event.till} {text}"
            if event.data.get("token") is not None:
                text += f", fencing token {event.data['token']}"
        self.say(f"{at - self.zero:8.2f} s  {text}")


def seconds_left(key: str) -> float:
    """Return in how many seconds a lock is free by itself that somebody has."""
    try:
        with distributed_lock(key, timeout=0):
            return 0.0
    except LockTimeout as error:
        return error.retry_after


def only_one() -> Lock:
    """Return the lock without which two demos would empty each other's shop."""
    return distributed_lock(f"{PREFIX}demo", timeout=0, note="manage.py demo")


@contextmanager
def stoppable() -> Iterator[None]:
    """Let signals that would end this process end the site and release its locks."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handling(stop):
        yield


@contextmanager
def interruptible(crew: Crew) -> Iterator[None]:
    """Let signals that would end this process end the crew and release the lock."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        crew.interrupt(CommandError("Interrupted.", returncode=128 + signum))

    with handling(interrupt):
        yield


@contextmanager
def handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle the signals that people and systems stop a process with."""
    signals = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
    before = {each: signal.signal(each, handler) for each in signals}
    try:
        yield
    finally:
        for each, previous in before.items():
            signal.signal(each, previous)
