"""Properties of the source itself: who writes the table, who asks for the database."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import dblocks

PACKAGE = Path(dblocks.__file__).parent
DATABASE = PACKAGE / "backends" / "database"


def sources(*without: Path) -> dict[str, str]:
    """Return the text of every module but some."""
    return {
        str(module.relative_to(PACKAGE)): module.read_text()
        for module in PACKAGE.rglob("*.py")
        if module not in without and "migrations" not in module.parts
    }


def test_one_module_writes_the_table() -> None:
    """No other runs an update, an insert or a delete on it."""
    writes = re.compile(
        r"(?<!__dict__)\.(update|delete|_raw_delete|bulk_update|bulk_create)\("
        r"|[\"'](UPDATE|INSERT|DELETE) "
    )
    others = sources(
        DATABASE / "table.py", DATABASE / "statements.py", PACKAGE / "fencing.py"
    )
    found = {
        name
        for name, text in others.items()
        if writes.search(text) and "dialects" not in name
    }
    assert found == set()


def test_dialects_alone_know_databases() -> None:
    """No other module asks a connection for its vendor."""
    found = {
        name
        for name, text in sources().items()
        if re.search(r"\.vendor\b|mysql_is_mariadb", text) and "dialects" not in name
    }
    assert found == set()


def test_size() -> None:
    """A module is understood in one sitting, a function at one look."""
    for name, text in sources().items():
        assert len(text.splitlines()) <= 450, name
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            length = (node.end_lineno or 0) - node.lineno + 1
            if docstring is not None:
                length -= (docstring.end_lineno or 0) - docstring.lineno + 1
            assert length <= 45, f"{name}: {node.name}"
