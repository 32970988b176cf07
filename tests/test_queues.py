"""The page about tasks: each library's example runs under that library."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import django
import pytest

from tests.support.pages import marked
from tests.support.processes import ROOT, inherited
from tests.support.services import Redis

TIME_LIMIT = 60
LIBRARIES = ["celery", "django_q", "huey", "dramatiq", "rq", "apscheduler"]

SETTINGS = """
import os

SECRET_KEY = "for tests"
INSTALLED_APPS = ["django.contrib.contenttypes", "dblocks", "shop"]
if "LIBRARY" in os.environ:
    INSTALLED_APPS.append(os.environ["LIBRARY"])
DATABASES = {
    "default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
USE_TZ = True
HUEY = {"huey_class": "huey.MemoryHuey"}
Q_CLUSTER = {"orm": "default", "timeout": 50, "retry": 60}
"""

REPORTS = """
def write_report(name):
    with open("written", "a") as file:
        print(name, file=file)


def written():
    try:
        with open("written") as file:
            return file.read().split()
    except FileNotFoundError:
        return []
"""


def example(name: str) -> str:
    """Return a library's ``shop/tasks.py``."""
    return marked("tasks.md", name, "python")


def run(folder: Path, *arguments: str, **environment: str) -> None:
    """Run a module in the project."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=inherited()
        | {
            "DJANGO_SETTINGS_MODULE": "settings",
            "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]),
        }
        | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop").mkdir()
    for name, text in [("settings", SETTINGS), ("shop/reports", REPORTS)]:
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def write_tasks(project: Path, text: str) -> None:
    (project / "shop" / "tasks.py").write_text(text)


@pytest.mark.parametrize("library", LIBRARIES)
def test_library(library: str, project: Path) -> None:
    """The task runs, is kept out while somebody else has its lock, and runs again."""
    if find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    write_tasks(project, example(library))
    environment = {"LIBRARY": "django_q"} if library == "django_q" else {}
    driver = ["tests.support.queues", library]
    if library != "rq":
        run(project, *driver, **environment)
        return
    with Redis() as redis:
        connection = f"Redis.from_url({redis.url()!r})"
        write_tasks(project, example(library).replace("Redis()", connection))
        run(project, *driver, REDIS_URL=redis.url())


KILLED = """
import os
import time


def write_report(name):
    again = bool(written())
    for word in [os.getpid(), name]:
        with open("written", "a") as file:
            print(word, file=file)
        time.sleep(0 if again else 60)


"""


def test_celery_task_whose_process_is_killed(project: Path) -> None:
    """It is delivered again, and runs when the lease of the killed one is over."""
    (project / "shop" / "reports.py").write_text(
        KILLED + REPORTS.partition("\n\n\n")[2]
    )
    write_tasks(project, example("celery").replace("lease=60", "lease=3"))
    with Redis() as redis:
        run(project, "tests.support.queues", "celery_killed", REDIS_URL=redis.url())


@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django's tasks came with 6.0")
def test_django(project: Path) -> None:
    """Django's own tasks, by its immediate backend."""
    write_tasks(project, example("django"))
    run(project, "tests.support.queues", "django_tasks")
