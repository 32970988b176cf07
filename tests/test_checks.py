"""System checks: what each finds, how grave it is, where its hint leads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from configparser import ConfigParser
from io import StringIO
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from django.core import checks as django_checks
from django.core.management import call_command
from django.db import (
    DatabaseError,
    NotSupportedError,
    OperationalError,
    connection,
    connections,
)
from django.db.backends.base.introspection import BaseDatabaseIntrospection

from dblocks import checks, distributed_lock
from dblocks.backends.database import dialects
from dblocks.models import DistributedLock
from tests.support.fixtures import in_memory
from tests.support.processes import ROOT, run_python
from tests.test_settings import BAD, MEMORY

pytestmark = pytest.mark.usefixtures("committed")

TABLE = DistributedLock._meta.db_table
PAGE = (ROOT / "docs" / "checks.md").read_text()
Found = list[django_checks.CheckMessage]


@pytest.fixture(autouse=True)
def usual_settings(settings: Any) -> None:
    """Begin without a setting of dblocks'."""
    settings.DBLOCKS = {}


def found(
    *databases: str,
    tags: list[str] | None = None,
    sqlite: bool = False,
    deploy: bool = False,
) -> Found:
    """Return what the checks of dblocks say, as Django runs them.

    What SQLite's settings are is told if asked for: the tests run with several.
    """
    return [
        message
        for message in django_checks.run_checks(
            tags=tags,
            databases=list(databases) or None,
            include_deployment_checks=deploy,
        )
        if str(message.id).startswith("dblocks.")
        and (sqlite or message.id != "dblocks.W010")
    ]


def documentation() -> str:
    """Return the address of the documentation, as the package names it."""
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    lines = setup["metadata"]["project_urls"].strip().splitlines()
    return dict(line.split(" = ") for line in lines)["Documentation"]


def the_one(number: str, messages: Found) -> str:
    """Return the text of the only message, which must be this one."""
    (message,) = messages
    assert message.id == f"dblocks.{number}"
    level = {"E": django_checks.ERROR, "W": django_checks.WARNING}[number[0]]
    assert message.level == level
    section = f"checks.html#dblocks-{number.lower()}"
    assert str(message.hint).endswith(f" See {documentation()}{section}")
    assert re.search(rf"^{number}: ", str(checks.__doc__), re.MULTILINE)
    assert len(str(message.hint)) > 40
    return message.msg


@pytest.fixture(autouse=True)
def network_timeouts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the driver's options, which have the timeouts that one should set."""
    options = connection.settings_dict["OPTIONS"]
    for name in ("connect_timeout", "read_timeout", "write_timeout"):
        if connection.vendor == "mysql":
            monkeypatch.setitem(options, name, 5)
    if connection.vendor == "postgresql":
        monkeypatch.setitem(options, "connect_timeout", 5)
        monkeypatch.setitem(options, "tcp_user_timeout", 5000)
    return options


def test_all_is_well() -> None:
    """On a database as the migrations leave it there is nothing to say."""
    assert found("default") == []


def test_each_has_a_section() -> None:
    """Each id in the code has its section in the documentation, and no other has."""
    modules = (ROOT / "dblocks").rglob("*.py")
    used = {
        check
        for module in modules
        for check in re.findall(r'"([EW]\d{3})"', module.read_text())
    }
    sections = re.findall(r"^## dblocks\.([EW]\d{3})$", PAGE, re.MULTILINE)
    assert sections == sorted(used)
    assert re.findall(r"^([EW]\d{3}): ", str(checks.__doc__), re.M) == sections
    assert used == {"E001", "E002", *(f"W{number:03}" for number in range(1, 20))}


def test_first_migrate() -> None:
    """Nothing that the first migrate meets is an error."""
    graver = [m for m in found("default") if m.level >= django_checks.ERROR]
    assert graver == []
    tagged = {
        check.__name__: "database" in check.tags  # type: ignore[attr-defined]
        for check in django_checks.registry.registry.get_checks()
        if check.__module__ == checks.__name__
    }
    assert tagged == {
        "check_settings": False,
        "check_deployment": False,
        "check_connections": True,
        "check_databases": True,
    }


def test_checks_without_the_web() -> None:
    """What each check means is in the package too, for whoever has installed it."""
    shown = subprocess.run(
        [sys.executable, "-m", "pydoc", "dblocks.checks"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "DJANGO_SETTINGS_MODULE": ""},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert "W001: The lock table is missing" in shown.stdout, shown.stderr


def test_command(settings: Any) -> None:
    """manage.py check shows them."""
    settings.SILENCED_SYSTEM_CHECKS = ["dblocks.W010"]
    output = StringIO()
    call_command("check", databases=["default"], stdout=output, stderr=output)
    assert "no issues" in output.getvalue()


# E001


@pytest.mark.parametrize(("value", "word"), BAD.values(), ids=BAD)
def test_bad_setting(settings: Any, value: Any, word: str) -> None:
    """E001: a backend that can't be made is an error that says why."""
    settings.DBLOCKS = value
    assert word in the_one("E001", found())


def test_each_bad_alias(settings: Any) -> None:
    """E001: each alias has its own message, and the good ones are checked on."""
    settings.DBLOCKS = {
        "default": {"LEASE": 0},
        "other": {"TIMEOUT": -1},
        "short": {"LEASE": 0.5},
    }
    assert sorted(str(m.id) for m in found()) == [
        *("dblocks.E001", "dblocks.E001", "dblocks.W008"),
    ]


def test_router_to_nowhere(settings: Any) -> None:
    """E001: a router may send the locks to a database that isn't there."""
    router = SimpleNamespace(db_for_write=lambda model, **hints: "nowhere")
    settings.DATABASE_ROUTERS = [router]
    assert "nowhere" in the_one("E001", found("default"))


# E002

LOOKALIKES = {
    "CockroachDB": ("postgresql", {"crdb_version": "CockroachDB CCL v24.3.1"}),
    "YugabyteDB": ("postgresql", {"server_version": "15.2-YB-2025.1.0.0-b0"}),
    "TiDB": ("mysql", "8.0.11-TiDB-v8.5.0"),
    "Vitess": ("mysql", "8.0.40-Vitess"),
    "Oracle": ("oracle", ""),
}


def server_like(vendor: str, version: Any) -> Any:
    """Make what Django knows of a server that it is connected to."""
    reported = version if isinstance(version, dict) else {}
    info = SimpleNamespace(parameter_status=reported.get)
    return SimpleNamespace(
        vendor=vendor,
        display_name=vendor.title(),
        connection=SimpleNamespace(info=info),
        mysql_server_info=version,
        settings_dict={"ENGINE": "", "HOST": str(version), "PORT": "", "OPTIONS": {}},
    )


@pytest.mark.parametrize("name", LOOKALIKES)
def test_lookalike(name: str) -> None:
    """A server that only speaks like a database that is supported is refused."""
    server = server_like(*LOOKALIKES[name])
    for _ in range(2):
        with pytest.raises(NotSupportedError, match=name):
            dialects.of(server)


def test_real_ones() -> None:
    """Versions with a distributor's additions are what they say."""
    reported = {"server_version": "15.13 (Debian 15.13-0+deb12u1)"}
    assert dialects.of(server_like("postgresql", reported)).name == "postgresql"


def test_not_connected_yet() -> None:
    """What a server is can change until it has been connected to."""
    server = server_like(*LOOKALIKES["CockroachDB"])
    server.connection, connected = None, server.connection
    assert dialects.of(server).name == "postgresql"
    server.connection = connected
    with pytest.raises(NotSupportedError):
        dialects.of(server)


@pytest.fixture
def unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the test's database be one that isn't supported."""
    monkeypatch.setattr(type(connections["default"]), "vendor", "oracle")
    monkeypatch.delitem(vars(connections["default"]), "_dblocks_dialect", raising=False)


@pytest.mark.usefixtures("unsupported")
def test_database_that_is_not_supported(key: str) -> None:
    """E002: the check says so, once, and so does whoever uses a lock."""
    assert "not supported" in the_one("E002", found("default"))
    with pytest.raises(NotSupportedError, match="can't keep locks in"):
        distributed_lock(key).acquire()


# W001


@pytest.fixture
def hidden_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the database look as before the first migrate."""
    monkeypatch.setattr(
        BaseDatabaseIntrospection, "table_names", lambda *args, **kwargs: []
    )


@pytest.mark.usefixtures("hidden_table")
def test_missing_table() -> None:
    """W001: the table isn't there yet."""
    messages = found("default")
    assert "missing" in the_one("W001", messages)
    assert "manage.py migrate dblocks --database default" in str(messages[0].hint)


@pytest.mark.usefixtures("hidden_table")
def test_missing_table_in_a_database_of_its_own(settings: Any) -> None:
    """W001: the hint names the database that the locks have for themselves."""
    if "locks" not in connections.settings:
        pytest.skip("there is one database")
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "locks"}}}
    (message,) = [m for m in found("locks") if m.id == "dblocks.W001"]
    assert "manage.py migrate dblocks --database locks" in str(message.hint)


@pytest.mark.parametrize("applied", [True, False])
def test_migrations_of_the_projects_own(
    settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, applied: bool
) -> None:
    """W001: with MIGRATION_MODULES, the project's own migrations are what must be."""
    package = tmp_path / f"own_migrations_{applied}"
    package.mkdir()
    for name in ("__init__", "0001_initial" if applied else "0001_squashed"):
        (package / f"{name}.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    settings.MIGRATION_MODULES = {"dblocks": package.name}
    if applied:
        assert found("default") == []
    else:
        assert "out of date" in the_one("W001", found("default"))


IN_PASSING = ["migrate", "test"]


@pytest.mark.usefixtures("hidden_table")
@pytest.mark.parametrize("command", IN_PASSING)
def test_missing_table_in_passing(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Whoever makes the table isn't told that it is missing."""
    monkeypatch.setattr(sys, "argv", ["manage.py", command])
    assert found("default") == []
    monkeypatch.setattr(sys, "argv", ["manage.py", "check", "--database", "default"])
    assert len(found("default")) == 1
    assert len(found("default", deploy=True)) == 1


@pytest.mark.parametrize("command", IN_PASSING)
def test_what_is_left_out_in_passing(
    monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Whatever matters only in a deployment: from W010 on, that is every one."""
    numbers = re.findall(r"^## dblocks\.(W\d{3})$", PAGE, re.MULTILINE)
    messages = [checks.warning(number, "", "") for number in numbers]
    monkeypatch.setattr(sys, "argv", ["manage.py", command])
    told = [message.id for message in checks._worth_saying(messages)]
    assert told == [f"dblocks.W00{number}" for number in (2, 3, 5, 6, 7, 8, 9)]


def test_first_migrate_says_nothing(tmp_path: Path) -> None:
    """The migrate that makes the table says nothing of it, nor of the database."""
    database = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "db")}
    program = (
        "import django, sys\n"
        "from django.conf import settings\n"
        "from django.core.management import execute_from_command_line\n"
        f"settings.configure(INSTALLED_APPS=['dblocks'], "
        f"DATABASES={{'default': {database!r}}})\n"
        "execute_from_command_line(sys.argv)\n"
    )

    def run(*arguments: str) -> str:
        environment = {**os.environ, "PYTHONDEVMODE": ""}
        done = run_python("-c", program, *arguments, timeout=60, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stderr

    assert "dblocks" not in run("migrate", "dblocks")
    assert "dblocks.W010" in run("check", "--database", "default")


@pytest.mark.usefixtures("hidden_table")
def test_databases_that_were_not_named() -> None:
    """A database that --database doesn't name is asked nothing."""
    assert found() == []
    if "locks" in connections.settings:
        assert found("locks") == []


@pytest.mark.parametrize("error", [OperationalError, DatabaseError])
def test_database_out_of_reach(monkeypatch: pytest.MonkeyPatch, error: Any) -> None:
    """W001: the database doesn't answer."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise error("gone away")

    monkeypatch.setattr(BaseDatabaseIntrospection, "table_names", fail)
    assert "gone away" in the_one("W001", found("default"))


# W002 and W003


@pytest.fixture
def alter() -> Iterator[Callable[[str, str], None]]:
    """Change the table by hand, and back again."""
    back: list[str] = []

    def run(sql: str) -> None:
        with connection.cursor() as cursor:
            cursor.execute(sql)

    def change(there: str, and_back: str) -> None:
        back.append(and_back)
        run(there)

    yield change
    for sql in back:
        run(sql)


def test_table_without_the_key_column(alter: Callable[[str, str], None]) -> None:
    """W001: a table that isn't dblocks', or that the user may not read.

    PostgreSQL's catalog shows nobody the columns that they have no right to.
    """
    if connection.vendor == "sqlite":
        pytest.skip("nothing is asked of the table on SQLite")
    key, other = map(connection.ops.quote_name, ("key", "other"))
    rename = f"ALTER TABLE {TABLE} RENAME COLUMN {{}} TO {{}}".format
    alter(rename(key, other), rename(other, key))
    assert "no column 'key'" in the_one("W001", found("default"))


def test_table_without_transactions(alter: Callable[[str, str], None]) -> None:
    """W002: an engine without transactions."""
    if connection.vendor != "mysql":
        pytest.skip("about MySQL and MariaDB, which have several engines")
    alter(f"ALTER TABLE {TABLE} ENGINE=MEMORY", f"ALTER TABLE {TABLE} ENGINE=InnoDB")
    assert "MEMORY" in the_one("W002", found("default"))


def test_inexact_key(alter: Callable[[str, str], None]) -> None:
    """W003: a collation under which different keys are one."""
    vendor = connection.vendor
    if vendor == "sqlite":
        pytest.skip("SQLite compares exactly unless told otherwise")
    if vendor == "mysql":
        change = f"ALTER TABLE {TABLE} MODIFY `key` varchar(255) COLLATE {{}} NOT NULL"
        wrong = "utf8mb4_general_ci"
    else:
        column = f'ALTER TABLE {TABLE} ALTER COLUMN "key"'
        change = f"{column} TYPE varchar(255) COLLATE {{}}"
        wrong = '"POSIX"'
    right = dialects.of(connection).exact_collation
    alter(
        change.format(wrong),
        change.format(right if vendor == "mysql" else f'"{right}"'),
    )
    assert wrong.strip('"') in the_one("W003", found("default"))


# W004 and W005


@pytest.mark.parametrize("tags", [None, ["database"]], ids=["all", "tag database"])
def test_no_network_timeout(network_timeouts: Any, tags: Any) -> None:
    """W004: options without network timeouts, each missing one named."""
    if connection.vendor == "sqlite":
        pytest.skip("SQLite has no network")
    name = {"mysql": "read_timeout", "postgresql": "tcp_user_timeout"}[
        connection.vendor
    ]
    del network_timeouts[name]
    assert name in the_one("W004", found("default", tags=tags))
    for command in IN_PASSING:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["manage.py", command])
            assert found("default", tags=tags) == []
    del network_timeouts["connect_timeout"]
    assert "connect_timeout" in the_one("W004", found("default", tags=tags))


def test_no_network_on_sqlite(network_timeouts: Any) -> None:
    """SQLite needs none."""
    if connection.vendor != "sqlite":
        pytest.skip("this database has a network")
    network_timeouts.pop("timeout", None)
    assert found("default") == []


class SplitReads:
    """Sends readers to the database ``locks``."""

    def db_for_read(self, model: Any, **hints: Any) -> str:
        return "locks"

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "default"


@pytest.fixture
def split_reads(settings: Any) -> None:
    """Route readers elsewhere."""
    settings.DATABASE_ROUTERS = [SplitReads()]


@pytest.mark.usefixtures("split_reads")
@pytest.mark.parametrize("tags", [None, ["database"]], ids=["all", "tag database"])
def test_router_that_splits_reads(tags: Any) -> None:
    """W005: the router reads locks elsewhere than it writes them."""
    assert "'locks'" in the_one("W005", found("default", tags=tags))


@pytest.mark.usefixtures("split_reads")
def test_using_settles_it(settings: Any) -> None:
    """A database that is named is right."""
    settings.DBLOCKS = {"default": {"OPTIONS": {"using": "default"}}}
    assert found("default") == []


# W006


@pytest.mark.parametrize(
    ("options", "processes", "good"),
    [
        ({}, 4, False),
        ({}, 1, False),
        ({"http": b":8000"}, 4, False),
        ({"py-call-osafterfork": True}, 4, False),
        ({"enable-threads": True}, None, False),
        ({"enable-threads": True}, 4, False),
        ({"enable-threads": True}, 1, True),
        ({"enable-threads": True, "master": True}, 1, False),
        ({"enable-threads": True, "py-call-osafterfork": True}, 4, True),
        ({"enable-threads": True, "py-call-uwsgi-fork-hooks": True}, 4, True),
        ({b"enable-threads": True, b"master": True, b"lazy-apps": True}, 4, True),
    ],
    ids=str,
)
def test_uwsgi(
    monkeypatch: pytest.MonkeyPatch, options: Any, processes: int | None, good: bool
) -> None:
    """W006: uWSGI without threads, or whose forks Python isn't told of."""
    module: Any = ModuleType("uwsgi")
    module.opt = options
    if processes is not None:
        module.numproc = processes
    monkeypatch.setitem(sys.modules, "uwsgi", module)
    if good:
        assert found() == []
    else:
        assert "uWSGI" in the_one("W006", found())


# W007


def test_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """W007: a version without what dblocks needs."""
    if connection.vendor == "sqlite":
        database: Any = connection.Database
        monkeypatch.setattr(database, "sqlite_version_info", (3, 34, 1))
        word = "3.34.1"
    elif connection.vendor == "mysql":
        old = (10, 5, 9) if connection.mysql_is_mariadb else (8, 0, 10)
        monkeypatch.setitem(connections["default"].__dict__, "mysql_version", old)
        word = ".".join(map(str, old))
    else:
        pytest.skip("every version of PostgreSQL that Django supports will do")
    assert word in the_one("W007", found("default"))


# W010, W017 and W018


@pytest.mark.parametrize("journal", ["wal", "delete"])
@pytest.mark.parametrize("mode", [None, "DEFERRED", "IMMEDIATE", "EXCLUSIVE"])
def test_sqlite_as_django_leaves_it(
    tmp_path: Path, journal: str, mode: str | None
) -> None:
    """W010: deferred transactions or a rollback journal; the hint says what to set."""
    if connection.vendor != "sqlite":
        pytest.skip("about a file of SQLite")
    file = connections["default"].copy()
    file.settings_dict["NAME"] = str(tmp_path / "file.sqlite3")
    file.settings_dict["OPTIONS"] = {
        "transaction_mode": mode,
        "init_command": f"PRAGMA journal_mode={journal}",
    }
    try:
        messages = list(dialects.of(file).findings(file))
    finally:
        file.close()
    deferred, rollback = mode in {None, "DEFERRED"}, journal != "wal"
    if not deferred and not rollback:
        assert messages == []
        return
    assert "default" in the_one("W010", messages)
    hint = str(messages[0].hint)
    assert ('"transaction_mode": "IMMEDIATE"' in hint) is deferred
    assert ("journal_mode=WAL" in hint) is rollback


def test_sqlite_file_that_is_kept(tmp_path: Path) -> None:
    """W017: dblocks' own connections would find the file locked."""
    if connection.vendor != "sqlite":
        pytest.skip("about a file of SQLite")
    file = connections["default"].copy()
    file.settings_dict["NAME"] = str(tmp_path / "file.sqlite3")
    found = []
    for mode in ("NORMAL", "EXCLUSIVE"):
        init = f"PRAGMA journal_mode=WAL; PRAGMA locking_mode={mode}"
        options = {"transaction_mode": "IMMEDIATE", "init_command": init}
        file.settings_dict["OPTIONS"] = options
        try:
            found += dialects.of(file).findings(file)
        finally:
            file.close()
    assert "keeps the SQLite file" in the_one("W017", found)


def test_mysql_that_counts_changed_rows() -> None:
    """W018: a project's own client_flag replaces Django's."""
    if connection.vendor != "mysql":
        pytest.skip("about drivers of MySQL")
    from MySQLdb.constants import CLIENT

    own = connections["default"].copy()
    flags = {
        "plain": CLIENT.LOCAL_FILES,
        "added": CLIENT.FOUND_ROWS | CLIENT.LOCAL_FILES,
    }
    told = {}
    for name, flag in flags.items():
        own.settings_dict["OPTIONS"] = own.settings_dict["OPTIONS"] | {
            "client_flag": flag
        }
        try:
            told[name] = list(dialects.of(own).findings(own))
        finally:
            own.close()
    assert "changed" in the_one("W018", told["plain"])
    assert told["added"] == []


def test_sqlite_is_checked() -> None:
    """W010 is among what the checks of a deployment tell."""
    if connection.vendor != "sqlite" or in_memory():
        pytest.skip("about a file of SQLite")
    asked = list(dialects.of(connection).findings(connections["default"]))
    told = [m.id for m in found("default", sqlite=True) if m.id == "dblocks.W010"]
    assert told == [message.id for message in asked]


# W008 and W009


def test_short_lease(settings: Any) -> None:
    """W008: a lease that is for tests only."""
    settings.DBLOCKS = {"default": {"LEASE": 0.9}}
    assert "0.9" in the_one("W008", found())
    settings.DBLOCKS = {"default": {"LEASE": 1}}
    assert found() == []


def test_memory(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """W009: locks in the memory of one process, but for manage.py test."""
    settings.DBLOCKS = {"default": {"BACKEND": MEMORY}}
    monkeypatch.setattr(sys, "argv", ["manage.py", "check"])
    assert "memory" in the_one("W009", found())
    monkeypatch.setattr(sys, "argv", ["manage.py", "test"])
    assert found() == []
