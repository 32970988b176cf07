"""The pages of the documentation, and how the examples on them are run.

Every fenced block marked ``python`` in ``README.md`` and ``docs/*.md`` is executed, all
blocks of a page in order and in one namespace, by Sybil. What a reader needn't see
stands in HTML comments, of which no renderer shows anything::

    <!-- invisible-code-block: python
    order = Order.objects.create(customer="Ada")
    -->

    <!-- skip: next -->                     a fragment that can't run
    <!-- skip: next if(one_writer, reason="…") -->

A block whose first line is the name of a file, such as ``# tests.py``, is a file of a
project; ``tests.test_user_projects`` runs those. The namespace has ``make_table`` and
``one_writer`` (SQLite); models may be defined, and are forgotten when the page is done.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django.db import connection, models
from django.test.utils import isolate_apps
from sybil.document import Document
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

ROOT = Path(__file__).resolve().parent.parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]

FILE = re.compile(r"# (\S+\.py)$", re.MULTILINE)


def name(page: Path) -> str:
    """Return what a page is called in a test's id."""
    return page.relative_to(ROOT).as_posix()


def function(page: str, name: str, **names: Any) -> Callable[..., Any]:
    """Return a function of a page, of which nothing else is run."""
    document = Document.parse(str(DOCS / page), PythonCodeBlockParser())
    [example] = [e for e in document.examples() if f"def {name}(" in str(e.parsed)]
    exec(str(example.parsed), names)
    found: Callable[..., Any] = names[name]
    return found


def marked(page: str, name: str, language: str = r"\w*") -> str:
    """Return the fenced block of a page below ``<!-- test: NAME -->``."""
    text = (DOCS / page).read_text(encoding="utf-8")
    block = rf"<!-- test: {name} -->\n\n```{language}\n(.*?)^```"
    found = re.search(block, text, re.DOTALL | re.MULTILINE)
    assert found is not None, name
    return found[1]


def files(page: str) -> dict[str, str]:
    """Return the examples that are files of a project, by the names in their titles."""
    document = Document.parse(str(DOCS / page), PythonCodeBlockParser())
    examples = [str(example.parsed) for example in document.examples()]
    found = [(FILE.match(example), example) for example in examples]
    return {title[1]: example for title, example in found if title is not None}


class Examples:
    """The examples of one page; what they make in the database goes with them."""

    def __init__(self, page: Path) -> None:
        self._page = page
        self._tables: list[type[models.Model]] = []

    def __enter__(self) -> Examples:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for model in self._tables:
            with connection.schema_editor() as editor:
                editor.delete_model(model)

    def run(self) -> dict[str, Any]:
        """Execute all examples and return the names that they have made."""
        document = Document.parse(
            str(self._page), PythonCodeBlockParser(), SkipParser()
        )
        document.namespace.update(
            __name__=f"tests.testapp.{self._page.stem.lower()}",
            make_table=self._make_table,
            one_writer=connection.vendor == "sqlite",
        )
        with isolate_apps("tests.testapp"):
            for example in document.examples():
                if not FILE.match(str(example.parsed)):
                    example.evaluate()
        return document.namespace

    def _make_table(self, model: type[models.Model]) -> None:
        with connection.schema_editor() as editor:
            editor.create_model(model)
        self._tables.append(model)
