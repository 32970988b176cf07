"""The operators' page: its examples run, its tables are true."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dblocks.management.commands import locks, run_locked
from dblocks.management.rendering import as_json
from dblocks.models import DistributedLock
from tests.support.commands import environment
from tests.support.factories import LockFactory
from tests.support.fixtures import in_memory
from tests.support.pages import marked
from tests.support.processes import ROOT

PAGE = (ROOT / "docs" / "operators.md").read_text()
SCHEDULES = "schedules.md"
TIMEOUT = 50


def example(name: str, page: str = "operators.md") -> str:
    """Return a marked example of a page."""
    return marked(page, name)


@pytest.fixture
def project(committed: None, tmp_path: Path) -> Path:
    """Lay out what the examples find in /srv/shop."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    report = tmp_path / "report.sh"
    report.write_text("#!/bin/sh\necho $DBLOCKS_KEY >> report.txt\n")
    for program in (python, report):
        program.chmod(0o755)
    (tmp_path / "manage.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        f"from tests.support.manage import main; main()\n"
    )
    return tmp_path


def run(script: str, project: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script.replace("/srv/shop", str(project))],
        env=environment(),
        cwd=project,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
    )


def test_crontab(project: Path) -> None:
    """Cron's line runs the report; run again within a minute, it is silent."""
    [line] = [line for line in example("crontab").splitlines() if "*" in line]
    *_, command = line.split(None, 5)
    for _ in range(2):
        done = run(command, project)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (project / "report.txt").read_text() == "nightly-report\n"


def test_systemd(project: Path) -> None:
    """The service's command runs the report; taken, its status is the one expected."""
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(example("systemd service"))
    service = unit["Service"]
    assert service["WorkingDirectory"] == "/srv/shop"
    assert run(service["ExecStart"], project).returncode == 0
    taken = run(service["ExecStart"], project)
    assert taken.returncode == int(service["SuccessExitStatus"])
    assert (project / "report.txt").read_text() == "nightly-report\n"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd is not there")
def test_systemd_units_are_valid(project: Path) -> None:
    """Where systemd is installed, it accepts the units."""

    def verify(*units: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["systemd-analyze", "verify", *units],
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )

    plain = project / "plain.service"
    plain.write_text("[Service]\nExecStart=/bin/true\n")
    if (tried := verify(plain)).returncode:
        pytest.skip(f"it refuses every unit here: {tried.stderr}")
    for kind in ("service", "timer"):
        text = example(f"systemd {kind}").replace("/srv/shop", str(project))
        (project / f"nightly-report.{kind}").write_text(text)
    done = verify(*(project / f"nightly-report.{k}" for k in ("service", "timer")))
    # Of units that aren't refused, systemd says on stderr what it ignores.
    complaints = [line for line in done.stderr.splitlines() if "nightly" in line]
    assert (done.returncode, complaints) == (0, []), done.stderr


def test_deployment(project: Path) -> None:
    """The deployment script migrates and succeeds."""
    done = run(example("deployment"), project)
    assert done.returncode == 0, done.stderr
    assert DistributedLock.objects.get(pk="migrate").note == "release 42"


def command_of(name: str) -> str:
    """Return the command of a container on the page about schedules."""
    found = re.search(r"command: (\[.*\])", example(name, SCHEDULES))
    assert found is not None
    python, *arguments = json.loads(found[1])
    assert python == "python"
    return shlex.join([".venv/bin/python", *arguments])


def test_cron_job(project: Path) -> None:
    """The container of a CronJob runs the report; a second one succeeds in silence."""
    for _ in range(2):
        done = run(command_of("cronjob"), project)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (project / "report.txt").read_text() == "nightly-report\n"


def test_cron_job_is_not_retried(project: Path) -> None:
    """A retry after a failure would skip and succeed, so the Job allows none."""
    (project / "report.sh").write_text("#!/bin/sh\nexit 3\n")
    statuses = [run(command_of("cronjob"), project).returncode for _ in range(2)]
    assert statuses == [3, 0]
    manifest = example("cronjob", SCHEDULES)
    assert "backoffLimit: 0\n" in manifest
    assert "restartPolicy: Never\n" in manifest


def test_init_container(project: Path) -> None:
    """The container that migrates does so under the lock."""
    done = run(command_of("init container"), project)
    assert done.returncode == 0, done.stderr
    assert DistributedLock.objects.get(pk="migrate").version >= 1


@pytest.mark.usefixtures("committed")
def test_json_fields() -> None:
    """The page names the fields of the JSON, no more and no fewer."""
    LockFactory(held=True, key="k")
    row = DistributedLock.objects.with_state().get(pk="k")
    section = PAGE.partition("### JSON")[2].partition("###")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(as_json(row))


def test_exit_statuses() -> None:
    """The page names the statuses that the commands' help names."""
    for name, command in (("run_locked", run_locked), ("locks", locks)):
        section = PAGE.partition(f"### Exit status of `{name}`")[2]
        section = section.partition("\n\n#")[0]
        documented = set(re.findall(r"^\| (\d+) \|", section, re.MULTILINE))
        text = command.Command.examples.partition("exit status:")[2]
        text = text.partition("durations")[0].replace("128+N", "")
        assert documented == set(re.findall(r"\b\d+\b", text))
