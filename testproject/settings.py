"""Settings of the test project, adjusted by environment variables.

``DATABASE_URL``
    ``mysql://…``, ``postgres://…``, ``sqlite:///file`` or ``sqlite://:memory:``;
    by default SQLite in ``db.sqlite3``. Options may follow as a query.
``LOCKS_DATABASE_URL``
    A second database, with the alias ``locks``.
``LOCKS_URL``
    ``redis://…``: keep the locks there, instead of in the database; several, separated
    by commas, make it Redlock. ``zookeeper://zk1:2181,zk2:2181``: in ZooKeeper.
``LOCKS_LEASE``
    How many seconds a lock in ZooKeeper is held without being renewed, the same for
    all; by default 4, the least that a server with its default settings allows.
``DATABASE_ISOLATION``
    ``read committed`` or ``repeatable read``, on MariaDB, MySQL and PostgreSQL.
``SQLITE_OPTIONS``
    Which of ``WAL`` and ``IMMEDIATE`` a SQLite database has; by default both. With
    none, it is as ``startproject`` leaves it.
``SHOP_THINKING``
    How many seconds, more or less, buyers and payments take in the shop's site: long
    enough that a race can be seen.
``OTEL_EXPORTER_OTLP_ENDPOINT``
    Where the shop reports to what its locks do; see ``testproject.shop.telemetry``.
``DEBUG``, ``SECRET_KEY``, ``ALLOWED_HOSTS``, ``TIME_ZONE``, ``USE_TZ``
    As in Django.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import environ

from testproject.databases import SQLITE, with_options
from testproject.engines import engine

BASE_DIR = Path(__file__).resolve().parent.parent

env = environ.Env()

DEBUG = env.bool("DEBUG", default=False)
SECRET_KEY = env.str("SECRET_KEY", default="for tests and demonstrations only")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["localhost", "127.0.0.1", "[::1]"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "dblocks",
    "testproject.shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "dblocks.middleware.LockTimeoutMiddleware",
]

ROOT_URLCONF = "testproject.urls"
WSGI_APPLICATION = "testproject.wsgi.application"
ASGI_APPLICATION = "testproject.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "DIRS": [BASE_DIR / "testproject" / "templates"],
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]

ISOLATION = env.str("DATABASE_ISOLATION", default=None)
SQLITE_OPTIONS = env.list("SQLITE_OPTIONS", default=list(SQLITE))

DATABASES: dict[str, dict[str, Any]] = {
    "default": with_options(
        env.db_url("DATABASE_URL", default=f"sqlite:///{BASE_DIR / 'db.sqlite3'}"),
        isolation=ISOLATION,
        sqlite=SQLITE_OPTIONS,
    ),
}
if "LOCKS_DATABASE_URL" in env:
    DATABASES["locks"] = with_options(
        env.db_url("LOCKS_DATABASE_URL"), isolation=ISOLATION, sqlite=SQLITE_OPTIONS
    )

LOCKS_URLS = env.list("LOCKS_URL", default=[])
DBLOCKS: dict[str, dict[str, Any]] = {}
if LOCKS_URLS:
    DBLOCKS["default"] = engine(LOCKS_URLS, session=env.float("LOCKS_LEASE", default=4))

# Not the demo's "shop:stock:…": each piece on sale would have a name of its own.
DBLOCKS_TELEMETRY_KEYS = ["shop:demo", "shop:stocktaking", "shop:leader"]

DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

LANGUAGE_CODE = "en"
TIME_ZONE = env.str("TIME_ZONE", default="UTC")
USE_TZ = env.bool("USE_TZ", default=True)

STATIC_URL = "static/"

SHOP_THINKING = env.float("SHOP_THINKING", default=1.0)
