"""How Sphinx builds these pages: ``sphinx-build -W docs docs/_build``."""

from __future__ import annotations

import sys
from pathlib import Path

import django
from django.conf import settings

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
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = f"dblocks {release}"
html_copy_source = False
html_show_sphinx = False
