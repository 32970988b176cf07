"""How long the admin's list of locks takes: ``python -m benchmarks.admin_list``.

Starts private MariaDB and PostgreSQL servers, fills a scratch database with a million
rows, of which some hundred are held, expired or cooling, and measures the time that
the server spends on a page: the view, its queries and the rendering.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from urllib.parse import urlencode

import django

from tests.support import services

ROWS = 1_000_000
BATCH = 5_000
REPEAT = 5

#: One row in this many is held, one expired, one cooling.
RARE = 10_000

PAGES: dict[str, dict[str, str]] = {
    "list": {},
    "all": {"state": "all"},
    "all, page 20": {"state": "all", "p": "20"},
    "state held": {"state": "held"},
    "state expired": {"state": "expired"},
    "state cooling": {"state": "cooling"},
    "state free": {"state": "free"},
    "search": {"q": "web-3"},
    "search all, one match": {"state": "all", "q": "order:0123456"},
    "search all, many matches": {"state": "all", "q": "WEB-3"},
    "search all, no match": {"state": "all", "q": "nothing like it"},
    "all by state": {"state": "all", "o": "2"},
    "all by holder": {"state": "all", "o": "3"},
    "all by held since": {"state": "all", "o": "4"},
    "all by remaining": {"state": "all", "o": "-5"},
}


def fill(rows: int) -> None:
    """Make the rows; only a benchmark may write the table past its manager."""
    from django.db.models import QuerySet

    from dblocks.models import DistributedLock
    from tests.support.factories import now

    for start in range(0, rows, BATCH):
        locks = []
        for number in range(start, min(start + BATCH, rows)):
            kind = number % RARE
            taken = kind in {0, 1}
            since = now(-float(number % 100_000) - 60)
            end = now(+86_400) if kind in {0, 2} else since
            locks.append(
                DistributedLock(
                    key=f"order:{number:07}",
                    owner="somebody" if taken else "",
                    holder=f"web-{number % 40} pid {number % 3000} MainThread",
                    note="nightly import" if number % 3 == 0 else "",
                    hold_count=int(taken),
                    version=1 + number % 50,
                    acquired_at=since,
                    expires_at=end,
                )
            )
        QuerySet(DistributedLock).bulk_create(locks)


def measure(rows: int) -> None:
    """Fill the database of ``DATABASE_URL`` and print a line a page."""
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()

    from django.contrib.auth.models import User
    from django.db import connection
    from django.test import Client
    from django.test.utils import (
        CaptureQueriesContext,
        setup_databases,
        setup_test_environment,
        teardown_databases,
    )

    setup_test_environment()
    databases = setup_databases(verbosity=0, interactive=False)
    fill(rows)
    with connection.cursor() as cursor:
        statement = (
            "ANALYZE TABLE" if connection.vendor == "mysql" else "VACUUM ANALYZE"
        )
        cursor.execute(f"{statement} dblocks_distributedlock")
    client = Client()
    client.force_login(User.objects.create_superuser("benchmark"))
    client.get("/admin/dblocks/distributedlock/")
    print(f"{connection.vendor}, {rows} rows{'':24}median      worst   queries")
    for name, query in PAGES.items():
        path = f"/admin/dblocks/distributedlock/?{urlencode(query)}"
        times = []
        for _ in range(REPEAT):
            started = time.perf_counter()
            response = client.get(path)
            times.append((time.perf_counter() - started) * 1000)
            assert response.status_code == 200, (name, response.status_code)
        with CaptureQueriesContext(
            connection,
        ) as queries:
            client.get(path)
        print(
            f"{name:40}{statistics.median(times):7.0f} ms {max(times):7.0f} ms"
            f"{len(queries):10}",
            flush=True,
        )
    teardown_databases(databases, verbosity=0)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.admin_list", description=__doc__
    )
    parser.add_argument(
        "--database",
        action="append",
        choices=["mariadb", "postgres"],
        help="only this one; may be repeated",
    )
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument(
        "--buffer-pool",
        default="128M",
        help="MariaDB's innodb_buffer_pool_size (default: %(default)s, its own)",
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        measure(options.rows)
        return

    services.exit_on_signals()
    arguments = {
        "mariadb": [f"--innodb-buffer-pool-size={options.buffer_pool}"],
        "postgres": [],
    }
    for name in options.database or arguments:
        with services.SERVERS[name](arguments=arguments[name]) as server:
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    __spec__.name,
                    "--here",
                    f"--rows={options.rows}",
                ],
                env={**os.environ, "DATABASE_URL": server.url("benchmark")},
                check=True,
            )


if __name__ == "__main__":
    main()
