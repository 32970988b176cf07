"""Texts from programs and users, as people may see them."""

from __future__ import annotations

from typing import Any


def visible(text: str) -> str:
    """Return a text with escapes for what can't be seen but steers how it is shown.

    Line ends, the escape sequences of terminals, and marks that reverse the direction
    of writing are such characters.
    """
    if text.isprintable():
        return text
    # The wide blank of Chinese and Japanese texts is seen as such.
    return "".join(
        c if c.isprintable() or c == "\u3000" else ascii(c)[1:-1] for c in text
    )


def encodable(text: str, stream: Any) -> str:
    """Return a text with escapes for what the encoding of a stream lacks."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)
