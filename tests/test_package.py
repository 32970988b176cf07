"""What people install: the source distribution, and the wheel that is built of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import dblocks
from tests.support.processes import ROOT

NOT_OURS = shutil.ignore_patterns(
    ".*", "*.egg-info", "*.py[cod]", "*.sqlite3*", "__pycache__", "_build", "build",
    "dist", "htmlcov",
)  # fmt: skip

#: What a project does with dblocks, in a process that sees the wheel and Django.
NEW_PROJECT = """
import sys

import django
from django.conf import settings
from django.core.management import call_command

settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django.contrib.sessions",
        "django.contrib.staticfiles",
        "dblocks",
    ],
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": "db.sqlite3",
            "OPTIONS": {"transaction_mode": "IMMEDIATE"},
        }
    },
    STATIC_URL="static/",
    TEMPLATES=[
        {
            "BACKEND": "django.template.backends.django.DjangoTemplates",
            "APP_DIRS": True,
        }
    ],
)
django.setup()

import dblocks
from django.contrib.staticfiles.finders import find
from django.template.loader import get_template
from django.utils.translation import gettext, override

assert dblocks.__file__.startswith(sys.prefix), dblocks.__file__
call_command("migrate", verbosity=0)
call_command("makemigrations", "dblocks", check=True, verbosity=0)
with dblocks.distributed_lock("k") as lease:
    assert lease.held and lease.fencing_token == 1, lease
    call_command("locks", "list")
assert find("dblocks/admin.css")
get_template("admin/dblocks/distributedlock/force_release.html")
with override("ja"):
    assert gettext("Force release") != "Force release"
"""


def run(*command: object, cwd: Path) -> str:
    """Run a program that must succeed, with nothing of the test's environment."""
    ours = ("PYTHON", "DJANGO", "DATABASE", "LOCKS", "SQLITE", "CONTRACT", "TEST")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def files(folder: Path) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project, without what its tools have left in it."""
    copy = tmp_path_factory.mktemp("package") / "checkout"
    shutil.copytree(ROOT, copy, ignore=NOT_OURS)
    return copy


@pytest.fixture(scope="module")
def sources(checkout: Path) -> set[str]:
    """The project's own files, by their paths."""
    return files(checkout)


@pytest.fixture(scope="module")
def distributions(checkout: Path, sources: set[str]) -> Path:
    """A folder with the source distribution, and the wheel that is built of that."""
    folder = checkout.parent / "dist"
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        folder,
        cwd=checkout,
    )
    return folder


@pytest.fixture(scope="module")
def sdist(distributions: Path) -> Path:
    [path] = distributions.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(distributions: Path) -> Path:
    [path] = distributions.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    name = f"django_dblocks-{dblocks.__version__}.dist-info/METADATA"
    with zipfile.ZipFile(wheel) as archive:
        return Parser().parsestr(archive.read(name).decode())


def test_source_distribution(sdist: Path, sources: set[str]) -> None:
    """The whole project is in it, its tests and pages included."""
    with tarfile.open(sdist) as archive:
        members = {
            member.name.partition("/")[2] for member in archive if member.isfile()
        }
    assert {"docs/locks.md", "tests/test_package.py", "bin/test"} <= members
    assert sources - members == set()


def test_source_distribution_runs_its_tests(sdist: Path, tmp_path: Path) -> None:
    """Whoever packages it for a distribution can see that it works."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    pytest_of = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")
    said = run(*pytest_of, "tests/test_keys.py", cwd=folder)
    assert f"rootdir: {folder}" in said
    assert " passed" in said


def test_wheel(wheel: Path, sources: set[str]) -> None:
    """The package is in it, its data included, and nothing else."""
    with zipfile.ZipFile(wheel) as archive:
        members = set(archive.namelist())
    about = f"django_dblocks-{dblocks.__version__}.dist-info/"
    assert {path for path in members if not path.startswith(about)} == {
        path for path in sources if path.startswith("dblocks/")
    }
    assert f"{about}licenses/LICENSE" in members


def test_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    """A project outside the checkout migrates, locks, and finds pages and texts."""
    venv.create(tmp_path / "venv", with_pip=False)
    [python] = (tmp_path / "venv").glob("*/python")
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(*pip, "install", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    # Django and its drivers are this environment's.
    paths = {"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")}
    own = Path(sysconfig.get_path("purelib", vars=paths))
    own.joinpath("django.pth").write_text(sysconfig.get_path("purelib"))
    said = run(python, "-I", "-W", "error", "-c", NEW_PROJECT, cwd=tmp_path)
    assert "k\t-\theld" in said


def test_metadata(distributions: Path, metadata: Message) -> None:
    """Indexes can show it, and it requires nothing but Django."""
    paths = sorted(distributions.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *paths, cwd=distributions)
    required = metadata.get_all("Requires-Dist", [])
    assert [each for each in required if "extra ==" not in each] == ["Django>=5.2"]
    assert set(metadata.get_all("Provides-Extra", [])) == {
        "mysql",
        "opentelemetry",
        "postgres",
        "redis",
        "zookeeper",
    }


def test_classifiers(metadata: Message) -> None:
    """They name the Pythons and Djangos that the tests are run with, and no others."""
    envs = (ROOT / "tox.ini").read_text().partition("env_list =")[2].partition("#")[0]
    pythons = {f"3.{minor}" for minor in re.findall(r"(?<!\d)3(\d\d)(?!\d)", envs)}
    pairs = re.findall(r"(?<!\d)(\d)(\d)(?!\d)", envs)
    djangos = {f"{major}.{minor}" for major, minor in pairs}
    assert pythons
    assert djangos
    classifiers = metadata.get_all("Classifier", [])
    for topic, versions in [
        ("Programming Language :: Python :: 3.", {each[2:] for each in pythons}),
        ("Framework :: Django :: ", djangos),
    ]:
        named = {each[len(topic) :] for each in classifiers if each.startswith(topic)}
        assert named == versions


def test_changelog_has_the_version() -> None:
    """The version is written down once, and the changelog tells of it."""
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = re.escape(dblocks.__version__)
    assert re.search(rf"^(## |To be ){version}\b", changelog, re.MULTILINE)


@pytest.mark.parametrize(
    ("lock", "groups"),
    [
        pytest.param("django52", ["dev"], id="django52"),
        pytest.param("django60", ["dev"], id="django60"),
        pytest.param("django61", ["dev"], id="django61"),
        pytest.param("lint", ["dev", "docs", "lint"], id="lint"),
    ],
)
def test_locks(lock: str, groups: list[str]) -> None:
    """What a group asks for is pinned: ``tox run -e lock`` has been run."""
    pinned = (ROOT / "requirements" / f"{lock}.txt").read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    for group in groups:
        listed = pyproject.partition(f"\n{group} = [")[2].partition("\n]")[0]
        names = re.findall(r'^    "([\w-]+)', listed, re.MULTILINE)
        assert names
        for name in names:
            assert re.search(rf"^{name.lower()}==\S+ ", pinned, re.MULTILINE), name
    # Whoever installs it decides from where.
    assert "://" not in pinned


def test_lock_of_tox() -> None:
    """What runs the environments is pinned as well, with hashes."""
    pinned = (ROOT / "requirements" / "tox.txt").read_text()
    for name in re.findall(
        r"^[\w-]+", (ROOT / "requirements" / "tox.in").read_text(), re.MULTILINE
    ):
        assert re.search(rf"^{name}==.+ \\\n +--hash=", pinned, re.MULTILINE), name
    assert "://" not in pinned
