"""The project's settings plus the tables that only tests need."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES
from testproject.settings import INSTALLED_APPS as PROJECT_APPS

INSTALLED_APPS = [*PROJECT_APPS, "tests.testapp"]

#: Aliases in DBLOCKS for which the contract suite runs besides the database's. What
#: needs no database is tried beside SQLite, not beside every one.
OTHER_BACKENDS: list[str] = []
DBLOCKS: dict[str, dict[str, object]] = {}

if DATABASES["default"]["ENGINE"].endswith("sqlite3"):
    for database in DATABASES.values():
        # No test cuts the power, and with a rollback journal each commit waits for
        # the disk three times.
        pragmas = [database["OPTIONS"].get("init_command"), "PRAGMA synchronous=OFF"]
        database["OPTIONS"]["init_command"] = ";".join(filter(None, pragmas))
    OTHER_BACKENDS += ["locmem"]
    DBLOCKS["locmem"] = {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}
