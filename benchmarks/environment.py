"""What the figures were measured on."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.contenders import CONTENDERS

_QUESTIONS = {
    "mysql": {
        "version": "SELECT VERSION()",
        "innodb_flush_log_at_trx_commit": "SELECT @@innodb_flush_log_at_trx_commit",
        "sync_binlog": "SELECT @@sync_binlog",
        "log_bin": "SELECT @@log_bin",
        "innodb_buffer_pool_size": "SELECT @@innodb_buffer_pool_size",
        "tx_isolation": "SELECT @@tx_isolation",
    },
    "postgresql": {
        name: f"SHOW {name}"
        for name in (
            "server_version",
            "fsync",
            "synchronous_commit",
            "full_page_writes",
            "shared_buffers",
            "transaction_isolation",
        )
    },
    "sqlite": {
        "version": "SELECT sqlite_version()",
        "journal_mode": "PRAGMA journal_mode",
        "synchronous": "PRAGMA synchronous",
    },
}


def of_machine() -> dict[str, str]:
    """Describe the machine and the programs, as far as they matter."""
    import django

    packages = [contender.package for contender in CONTENDERS]
    names = ["mysqlclient", "psycopg", "redis", *filter(None, packages)]
    return {
        "date": date.today().isoformat(),
        "processors": str(os.cpu_count()),
        "processor": _processor(),
        "memory": f"{_memory() / 2**30:.1f} GiB",
        "write and fsync of 4 KiB, p50": f"{_sync_time() * 1000:.2f} ms",
        "system": f"{platform.system()} {platform.release()}",
        "load before the run": f"{os.getloadavg()[0]:.2f}",
        "Python": platform.python_version(),
        "Django": django.get_version(),
        **{name: _version(name) for name in dict.fromkeys(names)},
    }


def of_server() -> dict[str, str]:
    """Ask the database for its version and for how durable its commits are."""
    from django.db import connection

    answers = {}
    with connection.cursor() as cursor:
        for name, question in _QUESTIONS[connection.vendor].items():
            cursor.execute(question)
            answers[name] = str(cursor.fetchone()[0])
    return answers


def of_redis() -> dict[str, str]:
    """Ask Redis for the same."""
    from django_redis import get_redis_connection

    redis = get_redis_connection()
    return {
        "version": str(redis.info("server")["redis_version"]),
        **{
            name: str(redis.config_get(name)[name])
            for name in ("appendonly", "appendfsync")
        },
    }


def of_zookeeper() -> dict[str, str]:
    """Ask ZooKeeper for its version."""
    from django.conf import settings
    from kazoo.client import KazooClient

    client = KazooClient(hosts=settings.DBLOCKS["default"]["LOCATION"])
    client.start()
    try:
        return {"version": ".".join(map(str, client.server_version()))}
    finally:
        client.stop()


def _sync_time(repeat: int = 50) -> float:
    """Return the seconds that the disk under the servers' data needs for a commit."""
    times = []
    with tempfile.TemporaryFile() as file:
        for _ in range(repeat):
            began = time.perf_counter()
            file.write(os.urandom(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
