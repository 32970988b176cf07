"""Systems without ``fork`` and process groups, as Windows is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import ROOT


def run(database: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the portable project to its end."""
    return subprocess.run(
        [sys.executable, "-m", "tests.portable_project", str(database), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONDEVMODE": ""},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
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
