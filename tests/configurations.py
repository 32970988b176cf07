"""What the tests are run on, and how they are divided into runs."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support import services

TESTS = Path(__file__).resolve().parent
TOPOLOGIES = TESTS / "topologies"
MODULES = tuple(
    sorted(path.stem.removeprefix("test_") for path in TESTS.glob("test_*.py"))
)

CORE = {
    "atomic_requests",
    "clock",
    "database",
    "explicit_owners",
    "failures",
    "fencing",
    "for_update",
    "lock",
    "lost_replies",
    "manager",
    "nested_forms",
    "permits",
    "processes",
    "pruned_rows",
    "several_keys",
    "shop",
    "sqlite",
    "state_machine",
    "transaction_ends",
    "transaction_lock",
    "transactions",
    "two_databases",
}
"""The modules in which the database's isolation, version or settings may tell."""

BRIEF = CORE - {
    "explicit_owners",
    "lock",
    "permits",
    "processes",
    "several_keys",
    "shop",
    "state_machine",
} | {"async", "async_threads", "dropped_leases", "interrupts"}
"""The modules in which versions of Python, Django and the driver may tell.

So may one of SQLite's settings without the other. The rest of ``CORE`` is about time,
threads and processes.
"""

CONTRACT = {
    "async",
    "async_threads",
    "dropped_leases",
    "engine_commands",
    "explicit_owners",
    "input",
    "interrupts",
    "lease",
    "lock",
    "losses",
    "observability",
    "owner_counts",
    "ownership",
    "permits",
    "recipes",
    "reentrant_code",
    "release_requests",
    "releases_in_threads",
    "renewal_races",
    "sets_and_permits",
    "settings",
    "several_keys",
    "signals",
    "state_machine",
    "telemetry",
    "testing_support",
    "transaction_ends",
    "transactions",
}
"""The modules with tests of what every engine promises."""

ONCE = {
    "admin_browser": "mariadb",  # a browser and our pages; drawn from few rows
    "architecture": "sqlite",  # the text of the source
    "benchmarks": "sqlite",  # made-up figures
    "engine_commands": "redis",  # of the other engines
    "interrupts": "sqlite",  # what a process notes of its own leases
    "keys": "sqlite",  # texts
    "locale": "sqlite",  # the catalogues
    "locmem": "sqlite",  # another engine
    "losses": "sqlite",  # threads and log handlers; statements fail without a server
    "queues": "sqlite",  # libraries for tasks, in a project of their own
    "operators": "sqlite",  # the examples for servers and schedules
    "package": "sqlite",  # what people install
    "portability": "sqlite",  # a process without much of the system
    "public_interface": "sqlite",  # names and signatures
    "redis": "redis",  # another engine, on servers of its own
    "redis_cluster": "redis",  # the same
    "redlock": "redis",  # the same
    "sentinel": "redis",  # the same
    "settings": "sqlite",  # how a setting is read
    "shop_browser": "postgres",  # buttons that test_shop_site presses everywhere
    "shop_telemetry": "sqlite",  # what is sent to a collector
    "signals": "sqlite",  # what is sent to whom
    "tutorial": "sqlite",  # the page's own project, on SQLite
    "supervision": "sqlite",  # processes and terminals
    "zookeeper": "zookeeper",  # an engine's own ways
}
"""The modules for which no database matters, and the configuration that has them."""

LONG = {
    "admin_browser",
    "demo",
    "leaks",
    "operators",
    "package",
    "queues",
    "recipes",
    "reentrant_code",
    "run_locked",
    "shop_browser",
    "shop_site",
    "supervision",
    "tutorial",
    "user_projects",
}
"""The modules that take long, most of them with many processes."""

ON_ONE = {"decorator", "leader", "recipes", "views"}
"""The modules in which the database hardly matters, though they ask it a lot."""

ON_TWO = {"admin", "locks_command"}
"""Those in which it matters little."""

SECONDS = {
    "redis": 250,
    "zookeeper": 225,
    "supervision": 150,
    "admin_browser": 100,
    "run_locked": 90,
    "demo": 85,
    "redlock": 75,
    "several_keys": 60,
    "losses": 60,
    "queues": 60,
    "lease": 55,
    "reentrant_code": 50,
    "sqlite": 50,
    "tutorial": 45,
    "recipes": 40,
    "admin": 40,
    "async": 35,
    "leaks": 35,
    "shop_browser": 35,
    "lock": 30,
    "transactions": 30,
    "sentinel": 30,
    "shop_site": 30,
    "failures": 25,
    "views": 25,
    "shop": 25,
    "user_projects": 25,
    "processes": 22,
    "state_machine": 20,
    "locks_command": 20,
    "connections": 18,
    "redis_cluster": 18,
    "clock": 17,
    "ownership": 17,
    "explicit_owners": 16,
    "observability": 16,
    "lost_replies": 15,
    "dialects": 15,
    "release_requests": 15,
    "transaction_lock": 15,
    "package": 13,
    "decorator": 13,
    "leader": 13,
    "pruned_rows": 12,
    "renewal_races": 12,
    "testing_support": 12,
    "for_update": 11,
    "permits": 11,
    "transaction_ends": 11,
    "checks": 10,
    "operators": 10,
    "atomic_requests": 9,
    "database": 9,
    "engine_commands": 9,
    "portability": 8,
    "telemetry": 7,
    "two_databases": 7,
    "docs": 6,
    "fencing": 6,
    "input": 6,
    "manager": 6,
    "shop_telemetry": 6,
}
"""How long modules take, more or less, while other runs go on."""

SECONDS_OF_FAULTS = 320
SECONDS_OF_MUTANTS = 180
SECONDS_OF_TOPOLOGIES = 85
#: What a module takes that is not listed.
FEW_SECONDS = 3
#: How long a run takes, more or less.
SHARE = 400


@dataclass(frozen=True, slots=True)
class Configuration:
    """A database to run the tests on."""

    name: str
    server: str | None = None
    isolation: str = "read committed"
    #: The engine that the contract suite runs on, beside a database for the data.
    engine: str | None = None
    #: What SQLite is told; with nothing, it is as ``startproject`` leaves it.
    sqlite: tuple[str, ...] = ("WAL", "IMMEDIATE")
    #: Run the contract suite on locks in memory, too.
    memory: bool = False
    #: Run these modules of the tests alone, and those that run here and nowhere else.
    only: Collection[str] = MODULES
    #: What Python is told, but not those processes that tests start.
    python: tuple[str, ...] = ()
    #: Run the quick part of the fault tests, and nothing else.
    faults: bool = False
    #: Run the mutants of the fault tests, and nothing else.
    mutants: bool = False
    #: Run these modules of the tests of topologies, and nothing else.
    topologies: tuple[str, ...] = ()
    #: Run it only where everything is asked for, which takes twice as long.
    thorough: bool = False

    def environment(
        self, folder: Path, server: services.Server | None, run: str
    ) -> dict[str, str]:
        """The environment variables of a run, which has databases of its own."""
        if server is not None:
            name = f"dblocks_{run.replace('-', '_')}"
            urls = [server.url(name), server.url(f"{name}_locks")]
        elif self.name == "sqlite-memory":
            urls = ["sqlite://:memory:"] * 2
        else:
            urls = [
                f"sqlite:///{folder}/{run}-{name}.sqlite3" for name in ("main", "locks")
            ]
        environment = {
            "DATABASE_URL": urls[0],
            "DATABASE_ISOLATION": self.isolation,
            "SQLITE_OPTIONS": ",".join(self.sqlite),
            "CONTRACT_BACKENDS": self.contract_backends,
            "TEST_RUN": run,
            # Looking at each allocation for mistakes of C code costs a tenth of the
            # processor's time.
            "PYTHONMALLOC": "pymalloc",
            # Other runs want the processors too, and late renewals turn tests red.
            "DBLOCKS_TEST_SLOWNESS": os.environ.get("DBLOCKS_TEST_SLOWNESS", "2"),
        }
        if not (self.faults or self.mutants):
            environment["LOCKS_DATABASE_URL"] = urls[1]
        return environment

    @property
    def contract_backends(self) -> str:
        """The aliases in DBLOCKS of what the contract suite runs on."""
        if self.engine is not None:
            return self.engine
        return "default,locmem" if self.memory else "default"

    def modules(self, *, brief: bool, short: bool) -> list[str]:
        """What is run on it, unless told what to run."""
        own = {name for name, where in ONCE.items() if where == self.name}
        if self.engine is not None:
            return sorted(CONTRACT | own)
        found = {*(MODULES if short or brief else self.only)} - ONCE.keys() | own
        if short:
            found -= LONG
        if brief:
            found &= BRIEF
        return sorted(found)


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        # What takes long has little of the server's own, and runs on one of them.
        Configuration(
            "mariadb", "mariadb", only={*MODULES} - ON_ONE - {"demo", "user_projects"}
        ),
        Configuration("postgres", "postgres", only={*MODULES} - LONG - ON_ONE - ON_TWO),
        # The hardest: readers and writers keep each other out.
        Configuration(
            "sqlite-default",
            sqlite=(),
            memory=True,
            only={*MODULES} - {"demo", "leaks", "shop_site"},
        ),
        # As recommended, and so for the demo. An old Python runs what is brief on it.
        Configuration("sqlite", only={"demo"}),
        Configuration("redis", engine="redis"),
        Configuration("redlock", engine="redlock"),
        Configuration("zookeeper", engine="zookeeper"),
        Configuration("mysql", "mysql"),
        Configuration("faults-mariadb", "mariadb", faults=True),
        Configuration("faults-postgres", "postgres", faults=True),
        Configuration("faults-sqlite", faults=True),
        Configuration("mutants-mariadb", "mariadb", mutants=True, thorough=True),
        Configuration("mutants-postgres", "postgres", mutants=True, thorough=True),
        Configuration("mutants-sqlite", mutants=True, thorough=True),
        Configuration(
            "mariadb-rr",
            "mariadb",
            "repeatable read",
            only=CORE | ON_ONE | {"demo", "user_projects"},
            thorough=True,
        ),
        Configuration(
            "postgres-rr",
            "postgres",
            "repeatable read",
            only=CORE | LONG | ON_ONE | ON_TWO,
            thorough=True,
        ),
        Configuration("mysql-rr", "mysql", "repeatable read", only=CORE, thorough=True),
        Configuration(
            "sqlite-core",
            memory=True,
            only=CORE | BRIEF | {"leaks", "shop_site"},
            thorough=True,
        ),
        Configuration("sqlite-wal", sqlite=("WAL",), only=BRIEF, thorough=True),
        Configuration(
            "sqlite-immediate", sqlite=("IMMEDIATE",), only=BRIEF, thorough=True
        ),
        # Which makes everything take half as long again.
        Configuration("sqlite-memory", only=CORE, python=("-X", "dev"), thorough=True),
        Configuration(
            "topologies-postgres",
            "postgres",
            topologies=(
                "condition_mutants",
                "orphans",
                "pgbouncer",
                "pool",
                "replicas",
                "replication",
            ),
            thorough=True,
        ),
        Configuration(
            "galera",
            topologies=("condition_mutants", "galera", "gevent"),
            thorough=True,
        ),
    )
}


def seconds(modules: Iterable[str]) -> int:
    """How long modules take, one after another."""
    return sum(SECONDS.get(name, FEW_SECONDS) for name in modules)


def shares(modules: Collection[str], length: float) -> list[list[str]]:
    """Divide modules into runs of nearly the same length, in seconds at most."""
    found: list[list[str]] = [[] for _ in range(math.ceil(seconds(modules) / length))]
    for name in sorted(modules, key=lambda name: seconds([name]), reverse=True):
        min(found, key=seconds).append(name)
    return found
