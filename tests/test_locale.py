"""The translations that are shipped: complete, well-formed and compiled.

After a change of texts, with GNU gettext installed::

    cd dblocks
    django-admin makemessages --all --no-location
    (translate)
    django-admin compilemessages
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path

import pytest
from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract
from babel.messages.mofile import read_mo
from babel.messages.pofile import read_po
from django.utils import translation
from django.utils.translation import template

from dblocks.models import DistributedLock, State

PACKAGE = Path(__file__).resolve().parent.parent / "dblocks"
LANGUAGES = ["ja", "zh_Hans"]
PLACEHOLDER = re.compile(r"%\(\w+\)[sd]|\{\w*\}|%%")
KEYWORDS = {
    "_": None,
    "gettext": None,
    "gettext_lazy": None,
    "gettext_noop": None,
    "ngettext": (1, 2),
    "ngettext_lazy": (1, 2),
    "pgettext": ((1, "c"), 2),
    "pgettext_lazy": ((1, "c"), 2),
    "npgettext": ((1, "c"), 2, 3),
    "npgettext_lazy": ((1, "c"), 2, 3),
}

Text = tuple[str, str | None]
"""A text to translate, in the singular, and its context."""

each_language = pytest.mark.parametrize("language", LANGUAGES)


def text_of(message: Message) -> Text:
    singular = message.id if isinstance(message.id, str) else message.id[0]
    context = message.context
    return singular, context.decode() if isinstance(context, bytes) else context


def forms_of(message: Message) -> list[str]:
    forms = message.string
    return [forms] if isinstance(forms, str) else list(forms)


@cache
def texts() -> frozenset[Text]:
    """All that the package's code and templates mark for translation."""
    found = set()
    for path in sorted(PACKAGE.rglob("*")):
        if path.suffix == ".html":
            source = template.templatize(path.read_text(), origin=str(path))
        elif path.suffix == ".py":
            source = path.read_text()
        else:
            continue
        stream = BytesIO(source.encode())
        for _line, message, _comments, context in extract(
            "python", stream, keywords=KEYWORDS
        ):
            singular = message if isinstance(message, str) else message[0]
            found.add((singular, context))
    return frozenset(found)


@cache
def catalog(language: str) -> Catalog:
    path = PACKAGE / "locale" / language / "LC_MESSAGES" / "django.po"
    with path.open("rb") as stream:
        return read_po(stream, locale=language)


def messages(language: str) -> Iterator[tuple[Message, list[str]]]:
    """The translated messages of a language, each with its forms."""
    for message in catalog(language):
        if message.id:
            yield message, forms_of(message)


def test_languages() -> None:
    """Whatever is in the folder is tested."""
    assert sorted(path.name for path in (PACKAGE / "locale").iterdir()) == LANGUAGES


@each_language
def test_complete(language: str) -> None:
    """No text of the package is missing, and none is left from earlier."""
    assert {text_of(message) for message, _forms in messages(language)} == texts()
    assert not catalog(language).obsolete


@each_language
def test_translated(language: str) -> None:
    """Every message has all its forms, and none is a guess."""
    for message, forms in messages(language):
        assert all(forms), message.id
        assert not message.fuzzy, message.id
        assert len(forms) == (
            catalog(language).num_plurals if message.pluralizable else 1
        )


@each_language
def test_placeholders(language: str) -> None:
    """A translation has the placeholders of its text, in whatever order."""
    for message, forms in messages(language):
        singular, *plural = [message.id] if isinstance(message.id, str) else message.id
        for text in [*plural, *forms]:
            assert sorted(PLACEHOLDER.findall(text)) == sorted(
                PLACEHOLDER.findall(singular)
            ), message.id


@each_language
def test_compiled(language: str) -> None:
    """The file that Django reads says what the one for people says."""
    path = PACKAGE / "locale" / language / "LC_MESSAGES" / "django.mo"
    with path.open("rb") as stream:
        compiled = {text_of(m): forms_of(m) for m in read_mo(stream) if m.id}
    assert compiled == {text_of(m): forms for m, forms in messages(language)}


@pytest.mark.parametrize(
    ("language", "name", "held"),
    [("zh-hans", "锁", "持有中"), ("ja", "ロック", "保持中")],
)
def test_in_use(language: str, name: str, held: str) -> None:
    """Django finds the translations."""
    with translation.override(language):
        assert str(DistributedLock._meta.verbose_name) == name
        assert str(State.HELD.label) == held


@pytest.mark.parametrize("language", LANGUAGES)
def test_permission_has_one_name(language: str) -> None:
    """Like Django's own: ``flush`` makes it anew, in whatever language and charset."""
    name = dict(DistributedLock._meta.permissions)["force_release_distributedlock"]
    with translation.override(language.replace("_", "-").lower()):
        assert str(name) == "Can force release lock"
