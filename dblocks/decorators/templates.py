"""Keys and notes, made from the arguments of a call."""

from __future__ import annotations

import inspect
import re
import string
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from types import MethodType, NoneType
from typing import Any, NamedTuple

from django.utils.functional import Promise

from .. import validation
from ..exceptions import InvalidKey
from ..validation import Key
from .decoratable import layers, name_of

Text = str | Callable[..., str]
"""What makes a key or a note: a ``str.format`` template, or a callable."""

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


_ADDRESS = re.compile(" at 0x[0-9A-Fa-f]+>")
"""What Python shows of an object that has no text of its own."""


class CallText(NamedTuple):
    """The keys and the note of one call.

    Attributes:
        keys: The keys; a single key is a ``str``.
        templates: The template of each key; a callable has none.
    """

    keys: str | tuple[str, ...]
    note: str
    templates: dict[str, str]


class CallTexts:
    """The key and the note of each call of a function.

    Raises:
        TypeError: A field of a template is no parameter of the function, or the
            function has no signature to be seen.
        InvalidKey: The key's template is malformed.
        ValueError: The note's template is malformed.
    """

    def __init__(self, keys: Sequence[Key], note: Text, function: Any) -> None:
        name = name_of(function)
        self._function = function
        self._keys, self._note = [_Key(key, name) for key in keys], _Note(note, name)
        self._signature: inspect.Signature | None = None
        makers = [*self._keys, self._note]
        if any(maker.fields for maker in makers):
            try:
                self._signature = _signature(function)
            except ValueError as error:
                raise TypeError(
                    f"The templates of {name}() can't be filled in: {error}. Give the "
                    f"key, and the note, as a callable."
                ) from error
            for maker in makers:
                maker.check_fields(self._signature)

    def make(self, args: Args, kwargs: Kwargs) -> CallText:
        """Return the keys and the note of a call."""
        values: dict[str, Any] = {}
        if self._signature is not None:
            try:
                bound = self._signature.bind(*args, **kwargs)
            except TypeError as error:
                self._explain(error, self._signature)
                raise
            bound.apply_defaults()
            # A template may name what **kwargs has collected, too.
            values = {**bound.kwargs, **bound.arguments}
        made = [key.make(args, kwargs, values) for key in self._keys]
        keys = made[0]
        if len(made) > 1:
            each = ((one,) if isinstance(one, str) else one for one in made)
            keys = validation.keys(chain.from_iterable(each))
        templates = {
            one: key.text
            for key, one in zip(self._keys, made, strict=True)
            if isinstance(key.text, str)
        }
        return CallText(keys, self._note.make(args, kwargs, values), templates)

    def _explain(self, error: TypeError, signature: inspect.Signature) -> None:
        """Raise a clearer error if a decorator below may be what changes arguments."""
        if not any(
            hasattr(layer, "__wrapped__") and not _wraps_something_else(layer)
            for layer in layers(self._function)
        ):
            return
        text = next(each for each in (*self._keys, self._note) if each.fields)
        raise TypeError(
            f"the {text.name}'s template {text.text!r} can't be filled: the call "
            f"doesn't fit {text.function}{signature}: {error}. If a decorator below "
            f"the lock changes the arguments, give a callable as the {text.name}: it "
            f"gets those of the call, as they are."
        ) from error


def function_note(function: Any) -> str:
    """Return the default note for the calls of a function."""
    # method_decorator() passes a partial of the bound method.
    inner: Any = function.func if isinstance(function, partial) else function
    method = ""
    if isinstance(inner, MethodType):
        inner, method = inner.__self__, f".{inner.__name__}"
    # The name of the function that as_view() makes says nothing.
    named = getattr(inner, "view_class", inner)
    if not hasattr(named, "__qualname__"):
        named = type(named)
    name = f"{named.__module__}.{named.__qualname__}{method}"
    return clean_note(name.replace(".<locals>", ""))


def clean_note(note: object) -> str:
    """Return a generated note in a form that can be stored.

    A note is for people and must not make the call fail: a long one is cut, and
    characters that no database stores are replaced.
    """
    if not isinstance(note, str):
        raise TypeError(f"note must be a str, not {note!r}")
    cut = note[: validation.MAX_NOTE]
    return re.sub("[\0\ud800-\udfff]", "\N{REPLACEMENT CHARACTER}", cut)


class _Maker(string.Formatter):
    """Makes the key, or the note, of each call.

    Attributes:
        fields: The names of the parameters that the template mentions.
        literal: The text, if it is the same for all calls.
    """

    name: str
    malformed: type[ValueError]
    accept: Callable[[object], str]

    def __init__(self, text: Any, function: str) -> None:
        self.text = text
        self.function = function
        self.fields: set[str] = set()
        self.literal: str | None = None
        if isinstance(text, str):
            asked_for: Any = defaultdict(_Anything)
            try:
                blank = self.vformat(text, (), asked_for)
            except ValueError as error:
                raise self.malformed(
                    f"{self.name} is no str.format template: {text!r} ({error}); "
                    f"write {{{{ and }}}} for braces"
                ) from error
            self.fields = {str(name) for name in asked_for}
            if not self.fields:
                self.literal = self.accept(blank)
        elif inspect.iscoroutinefunction(text):
            raise TypeError(
                f"{self.name}={text!r} is an async function: the {self.name} must be "
                f"there before the lock is waited for. Give a plain function that "
                f"returns it."
            )

    def make(self, args: Args, kwargs: Kwargs, values: dict[str, Any]) -> Any:
        """Return the text for a call; ``values`` are its arguments by name."""
        if self.literal is not None:
            return self.literal
        if isinstance(self.text, str):
            return self.accept(self.vformat(self.text, (), values))
        return self.accept(self.text(*args, **kwargs))

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        try:
            return kwargs[key]
        except KeyError:
            raise TypeError(
                f"the {self.name}'s template {self.text!r} has the field {{{key}}}, "
                f"and the call of {self.function}() has no argument of that name"
            ) from None

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (AttributeError, LookupError) as error:
            kind = AttributeError if isinstance(error, AttributeError) else LookupError
            raise kind(
                f"the field {{{field_name}}} of the {self.name}'s template "
                f"{self.text!r} of {self.function}() leads nowhere: "
                f"{type(error).__name__}: {error}"
            ) from error

    def format_field(self, value: Any, format_spec: str) -> str:
        try:
            return str(super().format_field(value, format_spec))
        except InvalidKey:
            raise
        except (TypeError, ValueError) as error:
            kind = TypeError if isinstance(error, TypeError) else ValueError
            # Without the value, whose repr() may fail as well.
            raise kind(
                f"a {type(value).__name__} doesn't fit the {self.name}'s template "
                f"{self.text!r} of {self.function}(): {error}"
            ) from error

    def check_fields(self, signature: inspect.Signature) -> None:
        """Raise ``TypeError`` for a field that no argument can fill."""
        parameters, name = signature.parameters, self.function
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        template = f"the {self.name}'s template {self.text!r}"
        for field in sorted(self.fields):
            if not field or field.isdigit():
                raise TypeError(
                    f"{template} has a positional field; name the parameters of "
                    f"{name}() instead: {', '.join(parameters) or 'it has none'}"
                )
            if field not in parameters and not takes_any:
                raise TypeError(
                    f"{template} has the field {{{field}}}, which is no parameter of "
                    f"{name}{signature}"
                )


class _Key(_Maker):
    """Refuses ``None``: all calls without a value would share one lock."""

    name = "key"
    malformed = InvalidKey

    @staticmethod
    def accept(value: object) -> Any:
        """Return the key or keys that a callable has made."""
        # A lazy translation can be iterated, too.
        is_one = isinstance(value, str | bytes | Promise)
        if is_one or not isinstance(value, Iterable):
            return validation.key(value)
        return validation.keys(value)

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        # Not "is None": a middleware's request.tenant may be a lazy object for None.
        if isinstance(value, NoneType):
            raise InvalidKey(
                f"the field {{{field_name}}} of the key's template {self.text!r} of "
                f"{self.function}() is None: all calls without a value would share "
                f"one lock"
            )
        if isinstance(value, Promise):
            raise InvalidKey(
                f"the field {{{field_name}}} of the key's template {self.text!r} of "
                f"{self.function}() is a lazy text, such as a translation: callers in "
                f"two languages would have two locks"
            )
        return value, first

    def convert_field(self, value: Any, conversion: Any) -> Any:
        converted = super().convert_field(value, conversion)
        return converted if converted is value else self._shown(value, converted)

    def format_field(self, value: Any, format_spec: str) -> str:
        return self._shown(value, super().format_field(value, format_spec))

    def _shown(self, value: Any, text: str) -> str:
        if not isinstance(value, str | int) and _ADDRESS.search(text):
            raise InvalidKey(
                f"the key's template {self.text!r} of {self.function}() shows an "
                f"object's address, {text}: no two calls would share a lock. Name an "
                f"attribute that tells the object, such as its id"
            )
        return text


class _Note(_Maker):
    """Writes ``None`` as it is, whatever format the template gives it."""

    name = "note"
    malformed = ValueError
    accept = staticmethod(clean_note)

    def format_field(self, value: Any, format_spec: str) -> str:
        return "None" if value is None else super().format_field(value, format_spec)


class _Anything:
    """Has every attribute and every item, and can be formatted in every way.

    Filling a template with it shows the template's faults and the names of its fields.
    """

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, name: object) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return ""

    def __repr__(self) -> str:
        return ""


# From Python 3.14 on, annotations are evaluated when they are asked for, and may name
# what only type checkers import.
_UNRESOLVED: dict[str, Any] = {}
if sys.version_info >= (3, 14):
    from annotationlib import Format

    _UNRESOLVED["annotation_format"] = Format.FORWARDREF


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a function, below decorators that keep it."""
    inner = inspect.unwrap(function, stop=_wraps_something_else)
    if isinstance(inner, partial):
        # The copy has no __wrapped__, which takes what the partial supplies.
        inner = partial(inner.func, *inner.args, **inner.keywords)
    # Of a bound method, inspect follows the function, and leaves out self.
    follow = isinstance(inner, MethodType) or not hasattr(inner, "__wrapped__")
    return inspect.signature(inner, follow_wrapped=follow, **_UNRESOLVED)


def _wraps_something_else(function: Any) -> bool:
    """Tell whether ``__wrapped__`` takes other arguments than the function does.

    A bound method has the ``__wrapped__`` of its function, which takes ``self``, too;
    method_decorator() passes the bound method in a partial that claims to wrap the
    unbound one; as_view() returns a function that claims to wrap what the view's
    ``dispatch`` wraps.
    """
    if isinstance(function, (partial, MethodType)):
        return True
    return hasattr(function, "view_class") and not hasattr(
        function.__wrapped__, "view_class"
    )
