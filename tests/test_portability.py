"""Systems without ``fork`` and process groups, as Windows is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_python


def run(database: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the portable project to its end."""
    return run_python(
        *("-m", "tests.portable_project", str(database), *options),
        timeout=50,
        env={**os.environ, "PYTHONDEVMODE": ""},
    )


@pytest.mark.parametrize(
    ("options", "says_why"),
    [
        pytest.param([], False, id="this-system"),
        pytest.param(["--poor"], True, id="poor-system"),
    ],
)
def test_system(options: list[str], says_why: bool, tmp_path: Path) -> None:
    """All can be imported, locks and admin work; run_locked says why it can't."""
    done = run(tmp_path / "db.sqlite3", *options)
    assert done.returncode == 0, done.stderr
    assert "The lock 'c'" in done.stdout
    assert ("run_locked needs process groups" in done.stdout) is says_why


def test_engine_without_the_app() -> None:
    """Without the app, too, locks are released at a transaction's end."""
    program = """
import django
from django.conf import settings
memory = {"BACKEND": "dblocks.backends.locmem.LocMemBackend"}
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(DATABASES={"default": database}, DBLOCKS={"default": memory})
django.setup()
from django.db import transaction
from dblocks import distributed_lock
lock = distributed_lock("a")
with transaction.atomic():
    with lock:
        pass
    print(lock.locked())
print(lock.locked())
"""
    done = run_python("-c", program)
    assert done.stdout == "True\nFalse\n", done.stderr


def test_drivers_of_other_databases() -> None:
    """On SQLite no other database's driver is loaded, though it is installed."""
    program = """
import sys
import django
from django.conf import settings
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}
settings.configure(INSTALLED_APPS=["dblocks"], DATABASES={"default": database})
django.setup()
from django.core.management import call_command
call_command("migrate", verbosity=0)
from dblocks import distributed_lock
with distributed_lock("a"):
    print(sorted(sys.modules.keys() & {"MySQLdb", "psycopg", "psycopg2", "pymysql"}))
"""
    done = run_python("-c", program)
    assert done.stdout == "[]\n", done.stderr


def test_first_use_in_the_middle_of_the_first_use() -> None:
    """A signal handler may use an engine that is just being used for the first time."""
    pytest.importorskip("psycopg")
    program = """
import os
import sys
import django
from django.conf import settings
database = {"ENGINE": "django.db.backends.postgresql", "NAME": "unused"}
settings.configure(INSTALLED_APPS=["dblocks"], DATABASES={"default": database})
django.setup()
import dblocks
from django.db import connections
from dblocks.backends.database import dialects
from dblocks.conf import backends
connection, folder, lines = connections["default"], dblocks.__path__[0], 0

def use():
    assert backends["default"].system == "postgresql"
    assert dialects.of(connection).name == "postgresql"

def trace(frame, event, argument):
    global lines
    if not frame.f_code.co_filename.startswith(folder):
        return None
    lines += event == "line"
    if event == "line" and lines == number:
        use()
    return trace

for number in range(1, 1000):
    if os.fork() == 0:
        sys.settrace(trace)
        use()
        os._exit(0 if lines >= number else 3)
    ended = os.waitstatus_to_exitcode(os.wait()[1])
    if ended:
        sys.exit(f"{ended} at line {number}")
"""
    done = run_python("-c", program)
    assert done.stderr.startswith("3 at line"), done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="it has these locks")
def test_file_locks_are_of_linux() -> None:
    """A system that names them the same lays out their structure in another way."""
    code = (
        "import sys, django.db.models; {}\n"
        "from dblocks.backends.database import file_locks\n"
        "print(file_locks.AVAILABLE)"
    )
    for pretend, available in ("", "True"), ("sys.platform = 'darwin'", "False"):
        done = run_python("-c", code.format(pretend), timeout=50)
        assert done.stdout.strip() == available, done.stderr


def test_engines_are_loaded_with_the_app() -> None:
    """None is imported at its first use, which a fork may interrupt.

    One that can't be imported is no matter until it is used.
    """
    program = """
import sys
import django
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
settings.configure(
    INSTALLED_APPS=["dblocks"],
    DBLOCKS={
        "wrong": {"BACKEND": "nowhere.Backend"},
        "empty": {"BACKEND": None},
        "other": {"BACKEND": "dblocks.backends.locmem.LocMemBackend"},
    },
)
django.setup()
loaded = {*sys.modules}
from dblocks.conf import backends
for alias in "default", "other":
    backends[alias]
print({name for name in {*sys.modules} - loaded if name.startswith("dblocks")})
for alias in "wrong", "empty":
    try:
        backends[alias]
    except ImproperlyConfigured as error:
        print(error)
"""
    done = run_python("-c", program)
    assert done.stdout.startswith("set()\n"), done.stdout + done.stderr
    assert done.stdout.count("could not import the backend") == 2
