"""Options that a project with locks gives its databases."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The numbers of psycopg.IsolationLevel, which is not installed everywhere.
POSTGRES_ISOLATION = {
    "read committed": 2,
    "repeatable read": 3,
}


SQLITE = {
    "WAL": {"init_command": "PRAGMA journal_mode=WAL"},
    "IMMEDIATE": {"transaction_mode": "IMMEDIATE"},
}
"""What SQLite has to be told; without, it is as ``startproject`` leaves it."""


def with_options(
    database: dict[str, Any],
    *,
    isolation: str | None = None,
    sqlite: Iterable[str] = SQLITE,
) -> dict[str, Any]:
    """Add options to an entry of ``DATABASES``; those in its URL stay.

    On a network every request is bounded: without timeouts, a connection whose peer
    is gone may wait for hours.
    """
    options: dict[str, Any]
    test: dict[str, Any] = {}
    match database["ENGINE"].rpartition(".")[2]:
        case "sqlite3":
            options = {"timeout": 20} if set(sqlite) == set(SQLITE) else {}
            for name in sqlite:
                options |= SQLITE[name]
            if database["NAME"] != ":memory:":
                # A file too: in memory, there is no second connection.
                path = Path(database["NAME"])
                test = {"NAME": str(path.with_name(f"test_{path.name}"))}
        case "mysql":
            options = {"connect_timeout": 5, "read_timeout": 30, "write_timeout": 30}
            if isolation is not None:
                options["isolation_level"] = isolation
            # Not the server's default, which may be latin1.
            test = {"CHARSET": "utf8mb4"}
        case "postgresql":
            options = {
                "connect_timeout": 5,
                "keepalives": 1,
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 30_000,
            }
            if isolation is not None:
                options["isolation_level"] = POSTGRES_ISOLATION[isolation]
        case _:
            options = {}
    return {
        **database,
        "OPTIONS": options | database.get("OPTIONS", {}),
        "TEST": test | database.get("TEST", {}),
    }
