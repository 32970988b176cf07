"""The project's settings plus the tables that only tests need."""

from __future__ import annotations

from testproject.settings import *  # noqa: F403
from testproject.settings import INSTALLED_APPS as PROJECT_APPS
from testproject.settings import env

INSTALLED_APPS = [*PROJECT_APPS, "tests.testapp"]

#: Aliases in DBLOCKS of the engines that the contract suite runs on.
CONTRACT_BACKENDS = env.list("CONTRACT_BACKENDS", default=["default", "locmem"])

#: What keeps the locks of runs on the same servers apart.
RUN = "dblocks-" + env.str("TEST_RUN", "tests")

DBLOCKS = {
    "locmem": {"BACKEND": "dblocks.backends.locmem.LocMemBackend"},
}
if "REDIS_URL" in env:
    DBLOCKS["redis"] = {
        "BACKEND": "dblocks.backends.redis.RedisBackend",
        "LOCATION": env.str("REDIS_URL"),
        "KEY_PREFIX": f"{RUN}:",
    }
if "REDLOCK_URLS" in env:
    DBLOCKS["redlock"] = {
        "BACKEND": "dblocks.backends.redis.RedisBackend",
        "LOCATION": env.list("REDLOCK_URLS"),
        "KEY_PREFIX": f"{RUN}:",
        # A server that waits for a processor answers late, and must be heard.
        "OPTIONS": {"socket_timeout": 5, "socket_connect_timeout": 5},
    }
if "ZOOKEEPER_HOSTS" in env:
    DBLOCKS["zookeeper"] = {
        "BACKEND": "dblocks.backends.zookeeper.ZooKeeperBackend",
        "LOCATION": env.str("ZOOKEEPER_HOSTS"),
        "KEY_PREFIX": RUN,
        # Of every test's locks: this engine has one length for all.
        "LEASE": env.float("ZOOKEEPER_LEASE", 1.2)
        * env.float("DBLOCKS_TEST_SLOWNESS", 1.0),
    }
