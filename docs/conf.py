"""How Sphinx builds these pages: ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import django
from django.conf import settings
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

# For autodoc alone: no server is asked for anything.
settings.configure(
    INSTALLED_APPS=["dblocks"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    USE_TZ=True,
)
django.setup()

import dblocks  # noqa: E402

project = "dblocks"
author = "dblocks contributors"
copyright = author
release = version = dblocks.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
templates_path: list[str] = []

# The anchors are those that GitHub makes, so that links work in both places.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_numpy_docstring = False
napoleon_use_ivar = False
python_maximum_signature_line_length = 80

html_theme = "furo"
html_title = f"dblocks {release}"
html_copy_source = False
html_show_sphinx = False


def show_one_signature(app: Sphinx) -> None:
    """Hide the overloads, which type checkers need and readers don't."""
    for name in ("dblocks.distributed_locks", "dblocks.leases"):
        analyzer = ModuleAnalyzer.for_module(name)
        analyzer.analyze()
        analyzer.overloads.clear()


def drop_comments(app: Sphinx, doctree: nodes.document) -> None:
    """Drop HTML comments: they hold what only the tests of the examples need."""
    for node in list(doctree.findall(nodes.raw)):
        if node.astext().startswith("<!--"):
            node.parent.remove(node)


def name_the_language(
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    doctree: nodes.document | None,
) -> None:
    """Name a translation's language, by which browsers choose the shapes of letters."""
    languages = {"ja": "ja", "zh": "zh-Hans"}
    context["language"] = languages.get(page.partition("/")[0], context["language"])


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", show_one_signature)
    app.connect("doctree-read", drop_comments)
    app.connect("html-page-context", name_the_language)
