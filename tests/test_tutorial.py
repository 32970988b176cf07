"""The tutorial: its files and commands in an empty folder, and what they print."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import HTTPError

import pytest

from tests.support.pages import DOCS, marked
from tests.support.processes import ROOT, inherited
from tests.support.services import free_port
from tests.support.timing import eventually
from tests.test_demo import Visitor, answers

PAGE = (DOCS / "tutorial.md").read_text(encoding="utf-8")
COMMAND = "shop/management/commands/nightly_report.py"
TIME_LIMIT = 90

pytestmark = pytest.mark.timeout(2 * TIME_LIMIT)


def example(name: str) -> str:
    """Return a marked example."""
    return marked("tutorial.md", name)


def commands(name: str) -> list[list[str]]:
    """Return the command lines of an example."""
    lines = example(name).splitlines()
    return [shlex.split(line[2:]) for line in lines if line.startswith("$ ")]


def output(name: str) -> str:
    """Return what an example's last command prints."""
    return re.sub(r".*^\$ [^\n]*\n", "", example(name), flags=re.S | re.M)


def versions(file: str) -> list[str]:
    """Return a file's texts, in the order in which the page replaces them."""
    title = re.escape(f"# {file}\n")
    return re.findall(rf"^```python\n({title}.*?)^```$", PAGE, re.S | re.M)


def shape(text: str) -> str:
    """Return what doesn't differ from run to run, or with the computer."""
    text = re.sub(r"\S+ pid \d+", "HOST pid N", text)
    text = re.sub(r"\d[\d:.-]*", "N", text)
    return re.sub(r"\s+", " ", text).strip()


def table(text: str) -> list[list[str]]:
    """Return the cells of a table of locks: its names, each lock's key and state."""
    names, *rows = [re.split(r" {2,}", line) for line in text.splitlines()]
    return [names, *([*row[:2], *("…" for _ in row[2:])] for row in rows)]


class Project:
    """A folder in which somebody follows the tutorial."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = inherited() | {
            "COLUMNS": "80",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "DJANGO_SUPERUSER_PASSWORD": "a password",
        }

    def write(self, file: str, text: str) -> None:
        path = self.folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def change_decorator(self, name: str) -> None:
        """Write the marked line in the place of the job's decorator."""
        job = (self.folder / COMMAND).read_text()
        line = example(name)
        assert line.startswith("    @distributed_lock(")
        changed, count = re.subn(r"^    @distributed_lock\(.*\n", line, job, flags=re.M)
        assert count == 1
        self.write(COMMAND, changed)

    def start(self, *words: str, **options: object) -> subprocess.Popen[str]:
        program = {
            "python": [sys.executable],
            "django-admin": [sys.executable, "-m", "django"],
        }[words[0]]
        settings: dict[str, object] = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
        }
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
            [*program, *words[1:]],
            cwd=self.folder,
            env=self._environment,
            text=True,
            **settings | options,
        )

    def run(self, *words: str) -> tuple[int, str, str]:
        """Run a command; return its status and what it printed."""
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=TIME_LIMIT)
        finally:
            process.kill()
        return process.returncode, out, err

    def do(self, name: str) -> str:
        """Run an example's commands, which succeed; return what the last printed."""
        for words in commands(name):
            status, out, err = self.run(*words)
            assert (status, err) == (0, ""), words
        return out

    def on_terminal(self, *words: str) -> str:
        """Run a command on a terminal; return what is to be read there."""
        reader, writer = os.openpty()
        with os.fdopen(reader, "rb", buffering=0) as terminal:
            process = self.start(*words, stdout=writer)
            os.close(writer)
            seen = b""
            # Linux reports the end of the other side as an error.
            with suppress(OSError):
                while piece := terminal.read(65536):
                    seen += piece
            assert process.wait(TIME_LIMIT) == 0
            process.communicate()
        return re.sub(r"\x1b\[[\d;]*m", "", seen.decode()).replace("\r", "")

    @contextmanager
    def job(self) -> Iterator[subprocess.Popen[str]]:
        """Start the job; in the block, it is at work."""
        [words] = commands("first run")
        process = self.start(*words)
        try:
            assert process.stdout is not None
            for line in output("first run").splitlines():
                assert process.stdout.readline() == f"{line}\n"
            yield process
        finally:
            process.kill()
            process.communicate()

    @contextmanager
    def site(self) -> Iterator[Visitor]:
        """Start the server."""
        address = f"127.0.0.1:{free_port()}"
        words = ["python", "manage.py", "runserver", "--noreload", address]
        with (self.folder / "server.log").open("w") as log:
            process = self.start(*words, stdout=log, stderr=log)
            try:
                eventually(lambda: answers(address), within=TIME_LIMIT, what="the site")
                yield Visitor(f"http://{address}")
            finally:
                process.kill()
                process.communicate()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """The project with its job, as the first two sections leave it."""
    project = Project(tmp_path_factory.mktemp("bookshop"))
    project.do("project")
    with (project.folder / "bookshop" / "settings.py").open("a") as settings:
        settings.write(example("settings"))
    assert project.do("migrate") == output("migrate")
    project.write(COMMAND, *versions(COMMAND))
    return project


@pytest.fixture
def project(made: Project, tmp_path: Path) -> Project:
    """Return a copy of the project, for one test."""
    return Project(shutil.copytree(made.folder, tmp_path / "bookshop"))


def test_job_runs_once(project: Project) -> None:
    """The second one gives up; told to skip, it is silent; Ctrl-C frees the lock."""
    [again] = commands("second run")
    with project.job() as first:
        status, out, err = project.run(*again)
        assert (status, out) == (75, "")
        assert shape(err) == shape(output("second run"))
        [words] = commands("list")
        assert table(project.on_terminal(*words)) == table(output("list"))
        first.send_signal(signal.SIGINT)
        first.wait(TIME_LIMIT)
    project.change_decorator("skip")
    with project.job() as first:
        assert project.run(*again) == (0, output("skipped run"), "")
        [words] = commands("run_locked")
        status, out, err = project.run(*words)
        assert (status, out) == (75, "")
        assert shape(err) == shape(output("run_locked"))
        first.send_signal(signal.SIGINT)
        first.wait(TIME_LIMIT)
        assert project.do("run_locked later") == output("run_locked later")


def buy(visitor: Visitor) -> tuple[int, str]:
    """Open the page and press *Buy*; return what comes back."""
    visitor.get("/")
    try:
        return 200, visitor.submit("/buy/1/")
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_product_is_sold_once(project: Project) -> None:
    """Two tabs get the one lamp, and with the lock one of them is answered 423."""
    project.write("shop/models.py", *versions("shop/models.py"))
    project.write("shop/templates/shop/products.html", example("template"))
    project.write("bookshop/urls.py", *versions("bookshop/urls.py"))
    without, locked = versions("shop/views.py")
    for text, expected in [
        (without, [(200, "It is yours."), (200, "It is yours.")]),
        (locked, [(200, "It is yours."), (423, example("locked out"))]),
    ]:
        project.write("shop/views.py", text.replace("sleep(10)", "sleep(5)"))
        project.do("lamp")
        with project.site() as visitor, ThreadPoolExecutor() as tabs:
            assert "Lamp, 1 in stock" in visitor.get("/")
            results = list(tabs.map(buy, [visitor, Visitor(visitor.site)]))
            assert sorted((status, shape(body)) for status, body in results) == [
                (status, shape(body)) for status, body in expected
            ]
            assert "Lamp, 0 in stock" in visitor.get("/")
            assert buy(visitor) == (200, "Sold out.")


def test_stuck_lock(project: Project) -> None:
    """A killed job's long lease is in the way, until it is released in the admin."""
    project.change_decorator("long lease")
    user = ["--noinput", "--username", "ada", "--email", "ada@example.com"]
    project.run("python", "manage.py", "createsuperuser", *user)
    [again] = commands("first run")
    show = ["python", "manage.py", "locks", "show", "nightly-report"]
    with project.job() as first:
        listing, kill = commands("kill")
        _, *shown, _ = example("kill").splitlines()
        listed = project.on_terminal(*listing)
        assert table(listed) == table("\n".join(shown))
        assert f" pid {first.pid} " in listed
        assert f" pid {first.pid} " in project.run(*show)[1]
        assert kill[:2] == ["kill", "-9"]
        first.kill()
        first.wait(TIME_LIMIT)
        assert project.run(*again) == (0, "", "")
    with project.site() as visitor:
        visitor.get("/admin/login/")
        visitor.submit("/admin/login/", username="ada", password="a password")
        listed = visitor.get("/admin/dblocks/distributedlock/")
        [lock] = re.findall(r'href="([^"]*nightly-report/change/[^"]*)"', listed)
        assert "Force release…" in visitor.get(lock)
        visitor.get("/admin/dblocks/distributedlock/force-release/?key=nightly-report")
        assert "Force release 1 lock" in visitor.text
        release = "/admin/dblocks/distributedlock/force-release/"
        visitor.submit(release, reason="killed", force="")
    with project.job() as first:
        first.kill()
        first.wait(TIME_LIMIT)
        [words] = commands("release")
        status, _out, _err = project.run(*words, "--yes")
        assert status == 0
    with project.job():
        pass
