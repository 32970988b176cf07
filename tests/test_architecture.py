"""Properties of the source itself: who writes the table, who imports whom, its size."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.util import resolve_name
from pathlib import Path

import dblocks
from tests.configurations import CONTRACT

TESTS = Path(__file__).parent
PACKAGE = Path(dblocks.__file__).parent
DATABASE = PACKAGE / "backends" / "database"


def sources(*without: Path) -> dict[str, str]:
    """Return the text of every module but some."""
    return {
        str(module.relative_to(PACKAGE)): module.read_text()
        for module in PACKAGE.rglob("*.py")
        if module not in without and "migrations" not in module.parts
    }


def test_who_writes_the_table() -> None:
    """No other module runs an update, an insert or a delete on it."""
    writes = re.compile(
        r"(?<!__dict__)\.(update|delete|_raw_delete|bulk_update|bulk_create)\("
        r"|[\"'](UPDATE|INSERT|DELETE) "
    )
    others = sources(
        DATABASE / "table.py",
        DATABASE / "deletion.py",
        DATABASE / "statements.py",
        PACKAGE / "fencing.py",
    )
    found = {
        name
        for name, text in others.items()
        if writes.search(text) and "dialects" not in name
    }
    assert found == set()
    rooms = {"table.py", "deletion.py", "permit_rows.py", "several_rows.py"}
    runs = re.compile(r"^from \.execution import", re.MULTILINE)
    running = {name for name, text in sources().items() if runs.search(text)}
    assert rooms == {Path(name).name for name in running}


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


def imported(body: list[ast.stmt], package: str) -> Iterator[str]:
    """Yield what statements import when they run, packages on the way included."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            yield origin
            yield from (f"{origin}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Try):
            yield from imported(node.body, package)


def test_no_circle_of_imports() -> None:
    """No module imports one that imports it, a package's own file included."""
    names, graph = dict[str, str](), dict[str, set[str]]()
    for file in sources():
        parts = ["dblocks", *Path(file).with_suffix("").parts]
        names[".".join(parts).removesuffix(".__init__")] = file
    for name, file in names.items():
        package = name if file.endswith("__init__.py") else name.rpartition(".")[0]
        body = ast.parse((PACKAGE / file).read_text()).body
        graph[name] = {each for each in imported(body, package) if each in names}
        graph[name] -= {name}
    assert len(graph["dblocks.locks"]) > 5
    # Raises CycleError, which names the modules.
    TopologicalSorter(graph).prepare()


def skips(statement: ast.stmt) -> bool:
    """Does this statement skip a test?"""
    return isinstance(statement, ast.Expr) and "pytest.skip(" in ast.unparse(statement)


def test_contract_suite_asks_for_abilities() -> None:
    """What isn't applicable to an engine is what it declares, and not its name."""
    for name in CONTRACT:
        text = (TESTS / f"test_{name}.py").read_text()
        assert "database_backend" not in text, name
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.If) and any(map(skips, node.body)):
                condition = ast.unparse(node.test)
                of_an_engine = re.search(
                    r"\b(backend|engine|alias)\b ([!=]=|in|not)", condition
                )
                assert of_an_engine is None, f"{name}:{node.lineno}: {condition}"


def test_index_of_the_tests() -> None:
    """``tests/README.md`` says of each module what its docstring says first."""
    said = {}
    for module in [*TESTS.rglob("test_*.py"), *TESTS.glob("support/[!_]*.py")]:
        docstring = ast.get_docstring(ast.parse(module.read_text())) or ""
        name = module.relative_to(TESTS).as_posix()
        said[name] = docstring.partition("\n")[0].replace("``", "`")
    index = re.findall(r"^- `(.+?)`: (.+)$", (TESTS / "README.md").read_text(), re.M)
    assert len(index) == len(dict(index))
    assert dict(index) == said


def test_one_module_sets_timers() -> None:
    """A signal that is ordered elsewhere could reach a later test, or end them all."""
    found = {
        module.relative_to(TESTS).as_posix()
        for module in [*TESTS.glob("*.py"), *TESTS.glob("[st]*/*.py")]
        if re.search(r"signal\.(setitimer|alarm)\([^)]", module.read_text())
    }
    assert found == {"support/alarms.py"}
