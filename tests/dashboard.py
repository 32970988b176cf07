"""The dashboard's picture for the documentation: ``python -m tests.dashboard``.

A private Prometheus watches the demo's site, with visitors, and one sale of the demo
after another. Then it is asked every query of ``docs/dashboards/dblocks.json``, as
Grafana would ask, and the answers are drawn into ``docs/images``, or into the folder
that is named. A query without an answer is an error.

Needs Prometheus (on Debian: ``apt-get install prometheus``) and matplotlib.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode
from urllib.request import HTTPCookieProcessor, build_opener, urlopen

from tests.support.charts import Line, draw
from tests.support.collector import HOST, Collector
from tests.support.services import Server, ServerError, exit_on_signals, free_port

ROOT = Path(__file__).resolve().parent.parent
BOARD = ROOT / "docs" / "dashboards" / "dblocks.json"
FOLDER = ROOT / "docs" / "images"

SCRAPE = 2
"""Seconds between two looks of Prometheus, and between the points of a line."""

RATE_INTERVAL = f"{4 * SCRAPE}s"
"""What Grafana makes of ``$__rate_interval``."""

SALES = 5
VISITORS = 6
PAUSE = 2.0
"""Seconds that a visitor looks at a page, at most."""

TIME_LIMIT = 120


class Prometheus(Server):
    """A private Prometheus that looks at one address."""

    name = "prometheus"
    account = "prometheus"
    package = "prometheus"

    def __init__(self, target: str) -> None:
        super().__init__()
        self.target = target

    def command(self) -> list[str]:
        # The labels that the collector gives are the processes' own.
        job = {
            "job_name": "collector",
            "honor_labels": True,
            "static_configs": [{"targets": [self.target]}],
        }
        every = f"{SCRAPE}s"
        settings = {
            "global": {"scrape_interval": every, "scrape_timeout": every},
            "scrape_configs": [job],
        }
        configuration = self.folder / "prometheus.json"
        configuration.write_text(json.dumps(settings))
        configuration.chmod(0o644)
        return [
            self.program("prometheus"),
            f"--config.file={configuration}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address={HOST}:{self.port}",
        ]

    def ping(self) -> bool:
        with suppress(OSError), urlopen(f"{self.address('-')}/ready", timeout=1):
            return True
        return False

    def address(self, database: str) -> str:
        return f"http://{HOST}:{self.port}/{database}"

    def ask(self, path: str, **question: object) -> Any:
        """Return the answer of its API."""
        url = f"{self.address('api/v1')}/{path}?{urlencode(question)}"
        with urlopen(url, timeout=30) as answer:
            return json.load(answer)["data"]


# The demo, and its visitors


@contextmanager
def site(environment: dict[str, str]) -> Iterator[str]:
    """Run the demo's site; its address."""
    address = f"{HOST}:{free_port()}"
    with subprocess.Popen(
        [*manage("demo"), "--no-sale", "--serve", address],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        # Reads on, or the site would wait for room in the pipe.
        output = threading.Thread(target=process.stdout.read, daemon=True)
        output.start()
        try:
            until = time.monotonic() + TIME_LIMIT
            while not answers(f"http://{address}"):
                if process.poll() is not None or time.monotonic() > until:
                    raise SystemExit("The site doesn't start.")
                time.sleep(0.2)
            yield f"http://{address}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            output.join()


def answers(url: str) -> bool:
    with suppress(OSError), urlopen(url, timeout=5):
        return True
    return False


def manage(command: str) -> list[str]:
    return [sys.executable, "manage.py", command]


class Visitor:
    """Somebody who presses the buttons of the shop."""

    def __init__(self, site: str, name: str) -> None:
        self.site = site
        self.name = name
        self._opener = build_opener(HTTPCookieProcessor(CookieJar()))

    def open(self, path: str) -> tuple[str, str]:
        """Return the address and the text of a page."""
        with self._opener.open(self.site + path, timeout=30) as answer:
            return answer.url, answer.read().decode()

    def press(self, page: str, button: str) -> str:
        """Send a page's form; the address of the page that follows."""
        _, text = self.open(page)
        found = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', text)
        assert found is not None, page
        data = {"csrfmiddlewaretoken": found[1], "customer": self.name}
        url = self.site + button
        try:
            with self._opener.open(url, urlencode(data).encode(), timeout=30) as answer:
                return answer.url.removeprefix(self.site)
        except HTTPError as error:
            # Sold out, locked, or nothing to do.
            error.close()
            return ""

    def shop(self, products: list[str], over: threading.Event) -> None:
        """Buy, pay, send the van and export until the day is over."""
        while not over.wait(random.uniform(0, PAUSE)):
            product = random.choice(products)
            order = self.press(product, f"{product}buy/")
            if order.startswith("/order/"):
                self.press(order, f"{order}pay/")
            else:
                self.press(product, f"{product}restock/")
                self.press("/exports/", "/exports/orders.csv")


def visit(site: str, over: threading.Event) -> list[threading.Thread]:
    """Let visitors shop; the threads in which they do."""
    visitors = [Visitor(site, f"Visitor {number}") for number in range(VISITORS)]
    _, catalogue = visitors[0].open("/")
    products = sorted(set(re.findall(r'href="(/product/\d+/)"', catalogue)))
    threads = [
        threading.Thread(target=visitor.shop, args=[products, over])
        for visitor in visitors
    ]
    for thread in threads:
        thread.start()
    return threads


def hold_sales(environment: dict[str, str]) -> None:
    for _ in range(SALES):
        subprocess.run(
            manage("demo"),
            cwd=ROOT,
            env=environment,
            stdout=subprocess.DEVNULL,
            check=True,
            timeout=TIME_LIMIT,
        )


def free_the_reserved(environment: dict[str, str]) -> None:
    """Free the lock that the site itself keeps, as an operator would."""
    listed = subprocess.run(
        [*manage("locks"), "list", "--state=held", "--json"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=True,
        timeout=TIME_LIMIT,
    )
    locks = json.loads(listed.stdout)
    (key,) = [lock["key"] for lock in locks if "reserved" in lock["note"]]
    subprocess.run(
        [*manage("locks"), "release", key, "--yes", "--reason=somebody wants it"],
        cwd=ROOT,
        env=environment,
        check=True,
        timeout=TIME_LIMIT,
    )


def trade(url: str) -> None:
    """Run all of the demo, and report to a collector."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        environment = os.environ | {
            "DJANGO_SETTINGS_MODULE": "testproject.settings",
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_METRIC_EXPORT_INTERVAL": "1000",
            "OTEL_SERVICE_NAME": "shop",
        }
        there = environment | {"DATABASE_URL": f"sqlite:///{folder}/site.sqlite3"}
        here = environment | {"DATABASE_URL": f"sqlite:///{folder}/sales.sqlite3"}
        shop = stack.enter_context(site(there))
        over = threading.Event()
        visitors = visit(shop, over)
        try:
            hold_sales(here)
            free_the_reserved(there)
            # The site learns of it with its next renewal.
            time.sleep(10)
        finally:
            over.set()
            for visitor in visitors:
                visitor.join()


# What the dashboard asks


def variables(board: Any) -> list[Any]:
    """The dashboard's variables that are lists of values, fetched by a query."""
    return [each for each in board["templating"]["list"] if each["type"] == "query"]


class Questions:
    """The dashboard's, with what Grafana puts in the place of its variables."""

    def __init__(self, board: Any, server: Prometheus) -> None:
        self.board = board
        self.server = server
        # All of each is chosen.
        self.values = {each["name"]: each["allValue"] for each in variables(board)}
        self.values["__rate_interval"] = RATE_INTERVAL

    def fill_in(self, query: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: self.values[found[1]], query)

    def choices(self, variable: Any) -> list[str]:
        """Return the values of a variable that can be chosen."""
        query = self.fill_in(variable["definition"])
        found = re.fullmatch(r"label_values\((.+), (\w+)\)", query)
        assert found is not None, query
        path = f"label/{found[2]}/values"
        values: list[str] = self.server.ask(path, **{"match[]": found[1]})
        return values

    def lines(self, target: Any, start: float, end: float) -> dict[str, Line]:
        """Return what a query draws, by the names in the legend."""
        query = self.fill_in(target["expr"])
        span = {"start": start, "end": end, "step": SCRAPE}
        answer = self.server.ask("query_range", query=query, **span)
        return {
            legend(target, line["metric"]): [
                (at, float(value)) for at, value in line["values"]
            ]
            for line in answer["result"]
        }

    def ask_all(self, start: float, end: float) -> dict[str, dict[str, Line]]:
        """Return the lines of each panel, by its title.

        Raises:
            SystemExit: Something has no answer, or none but zeros.
        """
        missing = [
            each["name"] for each in variables(self.board) if not self.choices(each)
        ]
        panels: dict[str, dict[str, Line]] = {}
        for panel in self.board["panels"]:
            drawn = panels[panel["title"]] = {}
            for target in panel["targets"]:
                lines = self.lines(target, start, end)
                if not any(value > 0 for line in lines.values() for _, value in line):
                    missing.append(f"{panel['title']} {target['refId']}")
                drawn.update(lines)
        if missing:
            raise SystemExit(f"Prometheus has nothing for: {', '.join(missing)}.")
        return panels


def legend(target: Any, labels: dict[str, str]) -> str:
    return re.sub(r"{{(\w+)}}", lambda found: labels[found[1]], target["legendFormat"])


def main() -> None:
    exit_on_signals()
    board = json.loads(BOARD.read_text())
    folder = Path(sys.argv[1]) if sys.argv[1:] else FOLDER
    try:
        # A process that has ended stays for three looks of Prometheus.
        with Collector(expiry=6) as collector, Prometheus(collector.address) as server:
            start = time.time()
            trade(collector.url)
            panels = Questions(board, server).ask_all(start, time.time())
    except ServerError as error:
        raise SystemExit(str(error)) from None
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / "dashboard.png"
    draw(board, panels, SCRAPE, target)
    print(target)


if __name__ == "__main__":
    main()
