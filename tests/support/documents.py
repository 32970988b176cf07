"""The examples in the documentation, to be run."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"# (\S+\.py)\n")


def blocks(page: str) -> list[str]:
    """Return the Python examples of a page, in order."""
    return BLOCK.findall((DOCS / page).read_text(encoding="utf-8"))


def files(page: str) -> dict[str, str]:
    """Return those that are files: a comment in their first line names them."""
    found = [(TITLE.match(block), block) for block in blocks(page)]
    return {title[1]: block for title, block in found if title is not None}
