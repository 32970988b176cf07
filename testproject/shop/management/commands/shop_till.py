from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import connection, connections

from dblocks import LeaseLost, LockTimeout, current_lease, distributed_lock
from dblocks.conf import backends
from testproject.shop import telemetry
from testproject.shop.carts import WAYS, Cart
from testproject.shop.models import Product
from testproject.shop.selling import PATIENCE, VARIANTS, Checkout, SoldOut


class Command(BaseCommand):
    """A process of the shop; see ``testproject.shop.crew`` for the other side."""

    help = "Do the jobs that the demo sends; started by it, not by people."
    requires_system_checks = []

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--database-name", help="if not the one in the settings: a test's database"
        )

    def handle(self, *, database_name: str | None, **options: Any) -> None:
        if database_name is not None:
            connections.settings["default"]["NAME"] = database_name
        # A lost lease is part of the show, and so is a lost session of ZooKeeper.
        for name in ("dblocks", "kazoo"):
            logging.getLogger(name).addHandler(logging.NullHandler())
        self.speaking = threading.Lock()
        jobs: dict[str, Callable[..., None]] = {
            "sell": self.sell,
            "reserve": self.reserve,
            "hold": self.hold,
            "serve": self.serve,
        }
        while True:
            message = self.listen()
            self.attempt(jobs[message.pop("word")], **message)
            connections.close_all()
            telemetry.flush()
            self.say("done")

    def listen(self) -> dict[str, Any]:
        """Read one message; the parent's end is the end of this process too."""
        line = sys.stdin.readline()
        if not line:
            sys.exit()
        message: dict[str, Any] = json.loads(line)
        return message

    def say(self, event: str, **data: Any) -> None:
        with self.speaking:
            self.stdout.write(json.dumps({"event": event, **data}))
            self.stdout.flush()

    def attempt(self, function: Callable[..., None], **arguments: Any) -> None:
        try:
            function(**arguments)
        except Exception as error:
            self.say("failed", error=f"{type(error).__name__}: {error}")

    # Jobs

    def sell(
        self,
        variant: str,
        product_id: int,
        customers: list[str],
        threads: int,
        thinking: float,
    ) -> None:
        """Serve customers by several threads, which all start at the word."""
        queue = deque(
            Checkout(product_id, customer, thinking=thinking) for customer in customers
        )
        go = threading.Event()

        def serve() -> None:
            connection.ensure_connection()
            self.say("ready")
            go.wait()
            while queue:
                try:
                    checkout = queue.popleft()
                except IndexError:
                    break
                self.answer(variant, checkout)
            connections.close_all()

        workers = [
            threading.Thread(target=self.attempt, args=[serve], daemon=True)
            for _ in range(threads)
        ]
        for worker in workers:
            worker.start()
        self.listen()
        go.set()
        for worker in workers:
            worker.join()

    def answer(self, variant: str, checkout: Checkout) -> None:
        """Serve one customer and say how it went and how long it took."""
        started = time.monotonic()
        try:
            VARIANTS[variant].buy(checkout)
        except SoldOut:
            event = "refused"
        else:
            event = "sold"
        waited = time.monotonic() - started
        self.say(event, waited=waited, retries=checkout.retries)

    def reserve(
        self, way: str, product_ids: list[int], customers: list[str], **how: float
    ) -> None:
        """Reserve customers' carts of the same articles, one after another."""
        connection.ensure_connection()
        self.say("ready")
        self.listen()
        for customer in customers:
            started = time.monotonic()
            try:
                WAYS[way].reserve(Cart(customer, product_ids, **how))
            except LockTimeout:
                event = "timed out"
            else:
                event = "reserved"
            self.say(event, waited=time.monotonic() - started)

    def hold(self, key: str, lease: float) -> None:
        """Wait for a lock and hold it until the word."""
        lock = distributed_lock(key, lease=lease, timeout=PATIENCE)
        with lock.acquire() as held:
            self.say("held", token=held.fencing_token)
            self.listen()

    def serve(self, product_id: int, customer: str, lease: float) -> None:
        """Serve one customer, who thinks until the word, if the lock is still held.

        By the guard, or where the engine has none by ``check()``.
        """
        till = self

        class Attended(Checkout):
            def think(self, product: Product) -> None:
                token = current_lease(self.key).fencing_token
                till.say("thinking", token=token, stock=product.stock)
                till.listen()

        try:
            variant = "guard" if backends["default"].has_guard else "check"
            VARIANTS[variant].buy(Attended(product_id, customer, lease=lease))
        except LeaseLost as error:
            self.say("lost", error=str(error))
        else:
            self.say("sold")
