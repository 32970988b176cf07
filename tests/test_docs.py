"""The documentation: its examples run, its links lead somewhere, its pages are found.

How examples are marked is said in ``tests.support.pages``.
"""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.anchors import anchors_plugin

import dblocks
import dblocks.test
from dblocks.backends.database.dialects import mysql
from dblocks.models import LockQuerySet
from tests.support.pages import DOCS, PAGES, ROOT, Examples, name

markdown = MarkdownIt("commonmark").enable("table").use(anchors_plugin, max_level=6)

README = ROOT / "README.md"
SITE = "https://django-dblocks.readthedocs.io/en/latest/"

TRANSLATIONS = sorted(DOCS.glob("*/*.md"))

LINKED = [*PAGES, *TRANSLATIONS, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md"]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_examples_run(page: Path, shop: None) -> None:
    """Every Python example on a page does what the page says."""
    with Examples(page) as examples:
        examples.run()


@cache
def tokens(page: Path) -> list[Token]:
    """Return what a page consists of."""
    return markdown.parse(page.read_text(encoding="utf-8"))


def links(page: Path) -> list[str]:
    """Return where a page's links and pictures lead."""
    return [
        str(inline.attrs.get("href") or inline.attrs["src"])
        for token in tokens(page)
        for inline in token.children or []
        if inline.type in {"link_open", "image"}
    ]


def is_relative(link: str) -> bool:
    """Return whether a link leads to a file beside the page."""
    return not re.match(r"[a-z]+:", link)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    return {str(token.attrs["id"]) for token in tokens(page) if "id" in token.attrs}


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_resolve(page: Path) -> None:
    """Relative links lead to files, and their fragments to headings."""
    broken = []
    for link in filter(is_relative, links(page)):
        path, _, fragment = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            broken.append(link)
    assert not broken


def is_published(link: str) -> bool:
    """Return whether the documentation has what a link into it names."""
    path, _, fragment = link.partition("#")
    if path.startswith("_images/"):  # where Sphinx puts the pictures of its pages
        picture = path.removeprefix("_")
        return any(picture in links(page) for page in DOCS.glob("*.md"))
    name, dot_html, _ = (path or "index.html").partition(".html")
    page = DOCS / f"{name}.md"
    return bool(dot_html) and page.exists() and fragment in {"", *anchors(page)}


def test_readme_leads_into_the_documentation() -> None:
    """The README is shown without the repository too, where only full links work."""
    found = links(README)
    assert not list(filter(is_relative, found))
    inside = [link.removeprefix(SITE) for link in found if link.startswith(SITE)]
    assert inside
    assert not [link for link in inside if not is_published(link)]


def test_pages_are_in_the_table_of_contents() -> None:
    """Every page is in the index, and the index names no other."""
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    listed = [
        line
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.M | re.S)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    files = [*DOCS.glob("*.md"), *TRANSLATIONS]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in files}
    assert sorted(listed) == sorted(pages - {"index"})


def fences(page: Path) -> list[tuple[str, str]]:
    """Return a page's visible blocks of code, each with its language."""
    return [(t.info, t.content) for t in tokens(page) if t.type == "fence"]


@pytest.mark.parametrize("page", TRANSLATIONS, ids=name)
def test_translations_show_the_same_code(page: Path) -> None:
    """A translation has the code of the tutorial, or of the README's beginning."""
    if page.stem == "index":
        translated = fences(page)
        assert translated
        assert translated == fences(README)[: len(translated)]
    else:
        assert fences(page) == fences(DOCS / page.name)


@pytest.mark.parametrize("page", [README, DOCS / "index.md"], ids=name)
def test_introduction_locks_nothing_at_import(page: Path) -> None:
    """Pasted into a module of views, it doesn't ask for a table before ``migrate``."""
    for language, code in fences(page):
        if language == "python":
            statements = ast.parse(code).body
            assert not [each for each in statements if isinstance(each, ast.With)]


def test_readme_is_short() -> None:
    """The README stays under 200 lines; the rest is in the documentation."""
    assert len(README.read_text(encoding="utf-8").splitlines()) < 200


def test_readme_names_the_commands_that_are_there() -> None:
    """The two commands stand in the README as they are typed, and can be run."""
    readme = README.read_text(encoding="utf-8")
    for command in ("bin/demo", "bin/test"):
        assert f"\n$ {command}\n" in readme
        assert (ROOT / command).stat().st_mode & 0o111


def versions(page: Path) -> list[str]:
    """Return a page's table of the databases' versions, without its links' targets."""
    text = re.sub(r"\]\([^)]*\)", "]", page.read_text(encoding="utf-8"))
    _, _, table = text.partition("| Database | From version |")
    return table.partition("\n\n")[0].splitlines()[2:]


def test_versions_are_the_same_everywhere() -> None:
    """The README and the documentation name the versions that the checks ask for."""
    oldest = {row.split(" | ")[0]: row.split(" | ")[1] for row in versions(README)}
    assert list(oldest) == ["| PostgreSQL", "| MariaDB", "| MySQL", "| SQLite"]
    for kind in (mysql.MariaDB, mysql.MySQL):
        version = ".".join(map(str, kind.oldest))
        assert oldest[f"| {kind.__name__}"].startswith(version)
    assert versions(DOCS / "deployment.md") == versions(README)


@pytest.mark.parametrize(
    "error",
    [dblocks.LockTimeout("key", timeout=1), dblocks.LeaseLost("key", reason="taken")],
    ids=lambda error: type(error).__name__,
)
def test_what_errors_say_is_documented(error: dblocks.LockError) -> None:
    """The page about locks names what each of them has."""
    start = f"`{type(error).__name__}` has "
    lines = (DOCS / "locks.md").read_text(encoding="utf-8").splitlines()
    [line] = [line for line in lines if line.startswith(start)]
    assert vars(error).keys() <= set(re.findall(r"`(\w+)`", line))


def public() -> dict[str, Any]:
    """Return what the reference documents: functions, classes and their methods."""
    found: dict[str, Any] = {}
    modules = [(dblocks, dblocks.__all__), (dblocks.test, dblocks.test.__all__)]
    for module, names in modules:
        found.update({each: getattr(module, each) for each in names})
    for kind in (dblocks.Lock, dblocks.Lease, dblocks.Leases, LockQuerySet):
        for each, value in inspect.getmembers(kind, inspect.isfunction):
            if not each.startswith("_") and value.__module__.startswith("dblocks."):
                found[f"{kind.__name__}.{each}"] = value
    return found


@pytest.mark.parametrize("what", [pytest.param(v, id=k) for k, v in public().items()])
def test_public_names_are_documented(what: Any) -> None:
    """Each has a docstring, and a signature without the names of internals."""
    assert inspect.getdoc(what)
    if not isinstance(what, type):
        assert not re.search(r"Unset|UNSET|<| at 0x", str(inspect.signature(what)))
