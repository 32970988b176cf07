"""The figures of full runs become a table of the documentation."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.faults import record


def row(job: str, **figures: Any) -> dict[str, Any]:
    return {"job": job, "versions": "MariaDB 10", "figures": figures}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "proof.md"
    page.write_text(f"Before.\n\n{record.BEGIN}\nold\n{record.END}\n\nAfter.\n")
    monkeypatch.setattr(record, "PAGE", page)
    monkeypatch.setattr(record, "FIGURES", tmp_path / "figures.json")
    return page


def test_counts_are_added_and_times_are_not() -> None:
    """Of several tests of one fault, the sum of the counts and the worst time."""
    rows = [row("F1", killed=3, **{"worst (ms)": 7}), row("F1", killed=4)]
    rows.append(row("F1", **{"worst (ms)": 5}))
    assert record.merge(rows) == {"killed": 7, "worst (ms)": 7}


def test_page(page: Path) -> None:
    """Each engine's last run is in the block; what stands around it stays."""
    rows = [row("F10", holes=30), row("F2", killed=1234), row("control", lost=9)]
    rows.append({"job": "F2", "figures": {"tests": 1}})
    record.write("mariadb", 7, 600, rows, commit="abcdef0123456")
    rows = [row("F2", killed=1), {"job": "F21", "figures": {}}]
    record.write("sqlite", 8, 60, rows, commit="1")
    record.write("sqlite", 9, 120, [row("F2", killed=2)], commit="2")
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "seed 8" not in text
    assert ", commit abcdef0123, seed 7, MariaDB 10, 10 minutes." in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines == [
        "| | SQLite | MariaDB |",
        "| --- | --- | --- |",
        "| F2 | killed 2 | killed 1,234 |",
        "| F10 | – | holes 30 |",
        "| control | – | lost 9 |",
    ]


def test_updates_lost(page: Path) -> None:
    """What the guard, the check and neither of them lose is set side by side."""
    control = {"plain: pauses": 200, "plain: acknowledged": 1240, "plain: lost": 260}
    control |= {
        "checked: pauses": 200,
        "checked: acknowledged": 900,
        "checked: lost": 3,
    }
    guarded = row("F4", pauses=3000, acknowledged=31582, lost=0)
    rows = [row("control", **control), guarded]
    record.write("sqlite", 8, 60, rows, commit="1")
    record.write("mariadb", 8, 60, [guarded], commit="1")
    _, _, compared = page.read_text().partition("| Updates lost |")
    assert compared.splitlines()[:6] == [
        " SQLite | MariaDB |",
        "| --- | ---: | ---: |",
        "| the lease alone | 260 of 1,240 in 200 pauses | – |",
        "| `check()` just before the write | 3 of 900 in 200 pauses | – |",
        "| the guard | 0 of 31,582 in 3,000 pauses | 0 of 31,582 in 3,000 pauses |",
        "",
    ]


def test_the_page_has_the_recorded_figures() -> None:
    """The table in the documentation is the file's, to the letter."""
    known = json.loads(record.FIGURES.read_text())
    assert f"{record.BEGIN}\n\n{record.table(known)}\n{record.END}" in (
        record.PAGE.read_text()
    )


def test_one_fault_again(page: Path) -> None:
    """A fault that was run again leaves the other figures, and says so."""
    rows = [row("F1", killed=1), row("F2", killed=2)]
    record.write("sqlite", 8, 60, rows, commit="1")
    record.write("sqlite", 9, 10, [row("F2", killed=3)], commit="2", again=True)
    text = page.read_text()
    assert "| F1 | killed 1 |" in text
    assert "| F2 | killed 3 |" in text
    assert "seed 8, MariaDB 10, 1 minutes. F2 was run again: " in text
    assert "commit 2, seed 9." in text


def test_what_is_counted_apart() -> None:
    """Where interrupts landed is added up, and stands in the file alone."""
    rows = [row("F18", hits=2, landed={"a": 1, "b": 1})]
    rows.append(row("F18", hits=1, landed={"b": 2}))
    merged = record.merge(rows)
    assert merged == {"hits": 3, "landed": {"a": 1, "b": 3}}
    assert record.cell(merged) == "hits 3"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an engine and a page of its own."""
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "test")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "test@example.com")
    folder = tmp_path / "repository"
    (folder / record.ENGINE).mkdir(parents=True)
    monkeypatch.setattr(record, "ROOT", folder)
    (folder / record.ENGINE / "table.py").write_text("GRANT = 1\n")
    record.git("init", "--quiet")
    save("an engine")
    return folder


def save(message: str) -> str:
    record.git("add", "--all")
    record.git("commit", "--quiet", "--message", message)
    return record.commit()


def test_figures_of_another_database(page: Path, repository: Path) -> None:
    """What only another database uses leaves an engine's figures good."""
    dialect = repository / record.DATABASES / record.STRANGE["mariadb"][0]
    dialect.parent.mkdir(parents=True)
    for engine in record.STRANGE:
        commit = record.commit()
        record.write(engine, 8, 60, [row("F1", killed=1)], commit=commit)
    dialect.write_text("WAIT = 2\n")
    save("SQLite waits")
    assert not record.outdated(["mariadb", "postgres"])
    assert len(record.outdated(["sqlite"])) == 1


def test_what_is_left_out_exists() -> None:
    """A file that is renamed is named here again."""
    names = {name for names in record.STRANGE.values() for name in names}
    assert all((record.ROOT / record.DATABASES / name).is_file() for name in names)


def test_figures_of_another_engine(page: Path, repository: Path) -> None:
    """Figures stand for as long as the engine is the one of their commit."""
    engine = repository / record.ENGINE / "table.py"
    assert record.outdated(["sqlite"]) == ["SQLite: there are none that name a commit"]
    first = record.commit()
    record.write("sqlite", 8, 60, [row("F1", killed=1)], commit=first)
    assert not record.outdated(["sqlite"])
    (repository / "README.md").write_text("about it")
    other = repository / record.OTHERS[0] / "server.py"
    other.parent.mkdir(parents=True)
    other.write_text("GRANT = 3\n")
    assert not record.outdated(["sqlite"])
    save("not the engine")
    assert not record.outdated(["sqlite"])
    assert record.outdated(["mariadb"])
    engine.write_text("GRANT = 2\n")
    changed = [f"SQLite: dblocks/ has changed since {first[:10]}"]
    assert record.outdated(["sqlite"]) == changed
    second = save("another engine")
    assert record.outdated(["sqlite"]) == changed
    # One fault that is run again doesn't make the others' figures good.
    record.write("sqlite", 9, 10, [row("F1", killed=2)], commit=second, again=True)
    assert record.outdated(["sqlite"]) == changed
    record.write("sqlite", 9, 10, [row("F1", killed=2)], commit=second)
    assert not record.outdated(["sqlite"])
    record.write("sqlite", 9, 10, [row("F1", killed=2)], commit=first, again=True)
    assert record.outdated(["sqlite"]) == [f"SQLite F1: {changed[0][8:]}"]
    record.write("sqlite", 9, 10, [row("F1", killed=2)], commit="0" * 40)
    assert record.outdated(["sqlite"])


@pytest.mark.parametrize("name", ["table.py", "more.py"], ids=["changed", "added"])
def test_engine_without_a_commit(page: Path, repository: Path, name: str) -> None:
    """What isn't committed has no figures, and those of the last commit don't stand."""
    record.write("sqlite", 8, 60, [row("F1", killed=1)], commit=record.commit())
    (repository / record.ENGINE / name).write_text("GRANT = 3\n")
    with pytest.raises(ValueError, match="not committed"):
        record.commit()
    assert record.outdated(["sqlite"])
