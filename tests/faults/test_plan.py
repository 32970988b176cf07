"""A full run has all the fault tests."""

from __future__ import annotations

import ast

from tests.faults.__main__ import FAULTS, HERE, ROOT

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
