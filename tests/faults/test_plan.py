"""A full run has all the fault tests, and the mutants fit what they change."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from tests.faults.__main__ import FAULTS, HERE, ROOT
from tests.faults.mutants import ALL, MUTANTS
from tests.topologies.test_condition_mutants import MUTANTS as TOPOLOGY_MUTANTS

OF_THE_HARNESS = {"test_plan.py", "test_record.py"}
"""Modules that test what isn't used to judge a run."""


def test_every_fault_test_is_in_the_full_run() -> None:
    """What the quick run has, the full run has too, by module or by name."""
    planned = {test for tests in FAULTS.values() for test in tests}
    for path in sorted((ROOT / HERE).glob("test_*.py")):
        module = f"{HERE}{path.name}"
        if path.name in OF_THE_HARNESS or module in planned:
            continue
        names = {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        }
        assert names
        assert {f"{module}::{name}" for name in names} <= planned


def test_mutants_are_mutants(tmp_path: Path) -> None:
    """Each changes what is there, and is tried every day where it is a fault."""
    for number, mutant in enumerate([*MUTANTS, *TOPOLOGY_MUTANTS]):
        before = ROOT / "dblocks" / mutant.file
        copy = tmp_path / str(number)
        (copy / mutant.file).parent.mkdir(parents=True)
        shutil.copy(before, copy / mutant.file)
        mutant.apply(copy)
        changed = (copy / mutant.file).read_text()
        assert changed != before.read_text()
        compile(changed, mutant.file, "exec")
        assert mutant.quick in mutant.engines
    assert {mutant.quick for mutant in MUTANTS} == {*ALL}
