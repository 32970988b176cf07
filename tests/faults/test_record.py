"""The figures of full runs become a table of the documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults import record


def row(job: str, **figures: Any) -> dict[str, Any]:
    return {"job": job, "versions": "MariaDB 10", "figures": figures}


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    page = tmp_path / "safety.md"
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
    record.write("mariadb", 7, 600, [*rows, {"job": "F2", "figures": {"tests": 1}}])
    record.write("sqlite", 8, 60, [row("F2", killed=1), {"job": "F21", "figures": {}}])
    record.write("sqlite", 9, 120, [row("F2", killed=2)])
    text = page.read_text()
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "seed 8" not in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines == [
        "| | SQLite | MariaDB |",
        "| --- | --- | --- |",
        "| F2 | killed 2 | killed 1,234 |",
        "| F10 | – | holes 30 |",
        "| control | – | lost 9 |",
    ]


def test_one_fault_again(page: Path) -> None:
    """A fault that was run again leaves the other figures, and says so."""
    record.write("sqlite", 8, 60, [row("F1", killed=1), row("F2", killed=2)])
    record.write("sqlite", 9, 10, [row("F2", killed=3)], again=True)
    text = page.read_text()
    assert "| F1 | killed 1 |" in text
    assert "| F2 | killed 3 |" in text
    assert "seed 8, 1 minutes. F2 was run again: " in text
