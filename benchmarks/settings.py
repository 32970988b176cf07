"""Settings of the measuring processes.

``DATABASE_URL`` is where the contenders keep their locks, ``MANY_URL`` a second
database of the same server whose lock table is filled with rows. With ``REDIS_URL`` or
``ZOOKEEPER_HOSTS`` they keep them there instead.
"""

from __future__ import annotations

import environ

from testproject.databases import with_options

env = environ.Env()

SECRET_KEY = "for measurements only"
USE_TZ = True
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

DATABASES = {
    "default": with_options(env.db_url("DATABASE_URL"), isolation=None),
    "many": with_options(env.db_url("MANY_URL"), isolation=None),
}

INSTALLED_APPS = ["dblocks", "benchmarks", "db_mutex", "database_locks"]

DBLOCKS: dict[str, dict[str, object]] = {
    alias: {
        "BACKEND": "dblocks.backends.database.DatabaseBackend",
        "OPTIONS": {"using": alias},
    }
    for alias in DATABASES
}

DBLOCKS["memory"] = {"BACKEND": "benchmarks.telemetry.NamedBackend"}

if "REDIS_URL" in env:
    CACHES = {
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": env.str("REDIS_URL"),
        }
    }
    DBLOCKS["default"] = {
        "BACKEND": "dblocks.backends.redis.RedisBackend",
        "LOCATION": env.str("REDIS_URL"),
    }

if "ZOOKEEPER_HOSTS" in env:
    DBLOCKS["default"] = {
        "BACKEND": "dblocks.backends.zookeeper.ZooKeeperBackend",
        "LOCATION": env.str("ZOOKEEPER_HOSTS"),
    }

# It logs each lock that it can't make, and each that it has lost.
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "loggers": {"database_locks": {"level": "CRITICAL"}},
}
