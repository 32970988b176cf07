"""A project's own tests, written as the documentation says, under every runner."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings

from tests.support.fixtures import in_memory
from tests.support.pages import files
from tests.support.processes import inherited

ROOT = Path(__file__).resolve().parent.parent
TIME_LIMIT = 90

pytestmark = [
    pytest.mark.timeout(4 * TIME_LIMIT),
    pytest.mark.skipif(
        settings.ISOLATION == "repeatable read", reason="the same at any isolation"
    ),
]

SETTINGS = """
import json
import os

SECRET_KEY = "for tests"
INSTALLED_APPS = ["django.contrib.contenttypes", "dblocks", "shop"]
MIDDLEWARE = ["django.middleware.csrf.CsrfViewMiddleware"]
ROOT_URLCONF = "urls"
STATIC_URL = "static/"
USE_TZ = True
DATABASES = json.loads(os.environ["USER_DATABASES"])
"""

URLS = """
from django.urls import path

from shop import views

urlpatterns = [
    path("pay/<int:order_id>/", views.pay),
    path("cancel/<int:order_id>/", views.cancel),
]
"""

MODELS = """
from django.db import models


class Order(models.Model):
    state = models.CharField(max_length=20, default="new")

    class Meta:
        app_label = "shop"
"""

PYTEST_INI = """
[pytest]
DJANGO_SETTINGS_MODULE = settings
pythonpath = .
filterwarnings =
    error
    ignore:unclosed database:ResourceWarning
"""

PYTEST = ["pytest", "-q", "-p", "django", "-p", "no:cacheprovider", "--assert=plain"]

Runner = Callable[..., str]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's folder: its application, and the tests of the documentation."""
    folder = tmp_path_factory.mktemp("project")
    written = {
        "settings.py": SETTINGS,
        "urls.py": URLS,
        "shop/__init__.py": "",
        "shop/models.py": MODELS,
        "shop/tests/__init__.py": "",
        "pytest.ini": PYTEST_INI,
        **files("testing.md"),
    }
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def databases(folder: Path, name: str) -> dict[str, Any]:
    """The database under test, under another name."""
    database = {
        key: settings.DATABASES["default"].get(key, "")
        for key in ("ENGINE", "HOST", "PORT", "USER", "PASSWORD", "OPTIONS")
    }
    if not database["ENGINE"].endswith("sqlite3"):
        return {"default": {**database, "NAME": name}}
    # Django clones a file without its write-ahead log.
    options = {k: v for k, v in database["OPTIONS"].items() if k != "init_command"}
    database = {**database, "OPTIONS": options}
    test = {} if in_memory() else {"NAME": str(folder / f"test_{name}.sqlite3")}
    return {"default": {**database, "NAME": str(folder / name), "TEST": test}}


@pytest.fixture
def run(project: Path, committed: None) -> Runner:
    """Run a program in the project; return what it printed."""
    environment = inherited() | {
        "DJANGO_SETTINGS_MODULE": "settings",
        # Most of the time would go into importing and rewriting other plugins.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join([str(project), str(ROOT)]),
        "USER_DATABASES": json.dumps(
            databases(project, f"user_{uuid.uuid4().hex[:8]}"), default=str
        ),
    }

    def run(*arguments: str) -> str:
        try:
            done = subprocess.run(
                [sys.executable, "-m", *arguments],
                cwd=project,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=TIME_LIMIT,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            pytest.fail(f"{arguments} took too long:\n{(error.stdout or b'').decode()}")
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


def test_django(run: Runner) -> None:
    """Django's own runner, one process."""
    output = run("django", "test", "--noinput")
    assert re.search(r"Ran 18 tests", output)


def test_django_in_parallel(run: Runner) -> None:
    """Django's own runner, two processes."""
    output = run("django", "test", "--noinput", "--parallel", "2")
    assert re.search(r"Ran 18 tests", output)


def test_pytest_with_a_kept_database(run: Runner) -> None:
    """pytest-django, which keeps the database and uses it again, and drops it."""
    for options in (["--reuse-db", "--create-db"], ["--reuse-db"], ["-k", "cancel"]):
        output = run(*PYTEST, *options)
        assert re.search(r"\d+ passed", output)


def test_pytest_in_parallel(run: Runner) -> None:
    """pytest-django under pytest-xdist, two processes."""
    output = run(*PYTEST, "-p", "xdist", "-n", "2")
    assert re.search(r"\b22 passed", output)
