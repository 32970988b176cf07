"""The figures of the last full run of each engine, and their table in the docs."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
ENGINE = "dblocks"
#: The engines that no full run uses: none imports them.
OTHERS = (
    "dblocks/backends/redis",
    "dblocks/backends/zookeeper",
    "dblocks/backends/locmem.py",
)
DATABASES = "dblocks/backends/database"
_SQLITE = ("one_writer.py", "file_locks.py", "dialects/sqlite.py")
_MYSQL = ("dialects/mysql.py", "dialects/galera.py")
_POSTGRES = ("dialects/postgresql.py",)
#: What is for other databases than the one of a full run.
STRANGE = {
    "sqlite": _MYSQL + _POSTGRES,
    "mariadb": _SQLITE + _POSTGRES,
    "postgres": _SQLITE + _MYSQL,
}
FIGURES = Path(__file__).with_name("figures.json")
PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- figures of python -m tests.faults -->", "<!-- end of figures -->"
TITLES = {"sqlite": "SQLite", "mariadb": "MariaDB", "postgres": "PostgreSQL"}

#: What may lose updates, and where that is counted: the fault, and its figures' prefix.
LOST = (
    ("the lease alone", "control", "plain: "),
    ("`check()` just before the write", "control", "checked: "),
    ("the guard", "F4", ""),
)

#: Of a commit's name, so many characters are for people.
SHORT = 10

Row = dict[str, Any]


def merge(rows: Iterable[Row]) -> dict[str, Any]:
    """Add the figures of one fault's tests up; of what is a time, take the worst.

    What is counted apart, such as where interrupts landed, stays so.
    """
    merged: dict[str, Any] = {}
    for row in rows:
        for name, value in row["figures"].items():
            if isinstance(value, str) or name not in merged:
                merged[name] = value
            elif isinstance(value, dict):
                merged[name] = dict(Counter(merged[name]) + Counter(value))
            elif name.endswith(")"):
                merged[name] = max(merged[name], value)
            else:
                merged[name] += value
    return merged


def git(*arguments: str) -> str:
    result = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return result.stdout.strip()


def measured(engine: str) -> list[str]:
    """Return what an engine's figures are of: they stand until it changes."""
    unused = [*OTHERS, *(f"{DATABASES}/{name}" for name in STRANGE[engine])]
    return [ENGINE, *(f":(exclude){path}" for path in unused)]


def differs(commit: str, paths: Iterable[str] = (ENGINE,)) -> bool:
    """Tell whether the engine isn't, or is not known to be, what it was then."""
    try:
        git("diff", "--quiet", commit, "--", *paths)
        return bool(git("ls-files", "--others", "--exclude-standard", "--", *paths))
    except (OSError, subprocess.CalledProcessError):
        return True


def commit() -> str:
    """Return the commit that has the present engine.

    Raises:
        ValueError: None has: something was changed and not committed.
    """
    commit = git("rev-parse", "HEAD")
    if differs(commit):
        raise ValueError(f"{ENGINE}/ has changes that are not committed.")
    return commit


def outdated(engines: Iterable[str]) -> list[str]:
    """Say whose figures are not those of the present engine, and why."""
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    found = []
    for engine in engines:
        run = known.get(engine, {})
        parts = {"": run, **run.get("again", {})}
        for fault, part in parts.items():
            title = " ".join(filter(None, [TITLES[engine], fault]))
            if "commit" not in part:
                found.append(f"{title}: there are none that name a commit")
            elif differs(part["commit"], measured(engine)):
                short = part["commit"][:SHORT]
                found.append(f"{title}: {ENGINE}/ has changed since {short}")
    return found


def write(
    engine: str,
    seed: int,
    seconds: float,
    rows: list[Row],
    *,
    commit: str,
    again: bool = False,
) -> None:
    """Keep what a full run of an engine measured, and bring the page up to date.

    Args:
        commit: What it was run on.
        again: Only these faults were run again; the other figures stay.
    """
    versions = next((row["versions"] for row in rows if "versions" in row), "")
    faults: dict[str, dict[str, Any]] = {}
    for fault in {row["job"] for row in rows}:
        mine = [row for row in rows if row["job"] == fault]
        faults[fault] = merge(row for row in mine if "versions" in row) or merge(mine)
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    if again:
        run = known[engine]
        run["faults"] |= faults
        run["again"] = {
            **run.get("again", {}),
            **{
                fault: {"date": time.strftime("%F"), "seed": seed, "commit": commit}
                for fault in faults
            },
        }
    else:
        known[engine] = {
            "date": time.strftime("%F"),
            "commit": commit,
            "seed": seed,
            "minutes": round(seconds / 60),
            "versions": versions,
            "faults": dict(sorted(faults.items())),
        }
    FIGURES.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n")
    render(known)


def render(known: dict[str, Any]) -> None:
    """Put the figures of all engines into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n\n{table(known)}\n{END}{after}")


def table(known: dict[str, Any]) -> str:
    """Return the figures of all engines as a page has them."""
    engines = [engine for engine in TITLES if engine in known]
    lines = []
    for engine in engines:
        run = known[engine]
        lines.append(
            f"* {TITLES[engine]}: {origin(run)}, {run['versions']}, "
            f"{run['minutes']} minutes."
        )
        for fault, part in run.get("again", {}).items():
            lines[-1] += f" {fault} was run again: {origin(part)}."
    titles = [TITLES[engine] for engine in engines]
    lines += lost([known[engine]["faults"] for engine in engines], titles)
    lines += [
        "",
        "| | " + " | ".join(titles) + " |",
        "| --- " * (len(titles) + 1) + "|",
    ]
    faults = {fault for engine in engines for fault in known[engine]["faults"]}
    for fault in sorted(faults, key=order):
        cells = [cell(known[engine]["faults"].get(fault)) for engine in engines]
        lines.append(f"| {fault} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def lost(engines: list[dict[str, Any]], titles: list[str]) -> list[str]:
    """Compare what is lost with the guard, with a check, and with the lease alone."""
    if not any("plain: lost" in faults.get("control", {}) for faults in engines):
        return []
    lines = [
        "",
        "| Updates lost | " + " | ".join(titles) + " |",
        "| --- |" + " ---: |" * len(titles),
    ]
    for how, fault, prefix in LOST:
        cells = []
        for faults in engines:
            found = faults.get(fault, {})
            cells.append(
                f"{found[f'{prefix}lost']:,} of {found[f'{prefix}acknowledged']:,} "
                f"in {found[f'{prefix}pauses']:,} pauses"
                if f"{prefix}lost" in found
                else "–"
            )
        lines.append(f"| {how} | " + " | ".join(cells) + " |")
    return lines


def origin(run: dict[str, Any]) -> str:
    """Say when something was run, on what, and with which seed."""
    texts = [run["date"], f"seed {run['seed']}"]
    if "commit" in run:
        texts.insert(1, f"commit {run['commit'][:SHORT]}")
    return ", ".join(texts)


def order(fault: str) -> tuple[str, int, str]:
    """Sort faults by number, and what has none after them."""
    number = fault[1:]
    return (fault[0], int(number), "") if number.isdigit() else ("~", 0, fault)


def cell(figures: dict[str, Any] | None) -> str:
    """Return the figures of one fault on one engine."""
    if not figures:
        return "–"
    texts = []
    for name, value in figures.items():
        if isinstance(value, dict):
            # It stands in the file alone.
            continue
        number = f"{value:,}" if isinstance(value, int) else str(value)
        measured = re.fullmatch(r"(.*) \((.*)\)", name)
        if measured is not None:
            texts.append(f"{measured[1]} {number} {measured[2]}")
        else:
            texts.append(f"{name} {number}")
    return ", ".join(texts)
