"""The project's settings plus the tables that only tests need."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import DATABASES, env
from testproject.settings import INSTALLED_APPS as PROJECT_APPS

INSTALLED_APPS = [*PROJECT_APPS, "tests.testapp"]

SQLITE = DATABASES["default"]["ENGINE"].endswith("sqlite3")

#: Aliases in DBLOCKS for which the contract suite runs besides the database's. What
#: needs no database is tried beside one SQLite, not beside every database.
OTHER_BACKENDS = env.list("OTHER_BACKENDS", default=["locmem"] if SQLITE else [])

DBLOCKS = {
    alias: {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}
    for alias in OTHER_BACKENDS
}
