"""Keys that are built from the arguments of a call."""

from __future__ import annotations

import inspect
import string
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from . import arguments
from .exceptions import InvalidKey

KeyMaker = Callable[[tuple[Any, ...], dict[str, Any]], str]


class _Formatter(string.Formatter):
    """``str.format`` without positional fields, and without ``None``."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        value, first = super().get_field(field_name, args, kwargs)
        if value is None:
            raise InvalidKey(
                f"the field {{{field_name}}} of the key's template is None: all "
                f"calls without a value would share one lock"
            )
        return value, first

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        try:
            return kwargs[key]
        except KeyError:
            raise TypeError(
                f"the key's template has the field {{{key}}}, and the call has no "
                f"argument of that name"
            ) from None


class _Trial(string.Formatter):
    """Finds fault with a template alone: its values fit every field."""

    def get_value(self, key: int | str, args: Any, kwargs: Any) -> Any:
        return _Anything()


class _Anything:
    """Has every attribute and every item, and can be formatted in every way."""

    def __getattr__(self, name: str) -> _Anything:
        return self

    def __getitem__(self, name: object) -> _Anything:
        return self

    def __format__(self, spec: str) -> str:
        return ""


_formatter = _Formatter()


def maker(key: str | Callable[..., str], function: Callable[..., Any]) -> KeyMaker:
    """Return what makes the key of a call of ``function`` from its arguments.

    Args:
        key: A ``str.format`` template over the call's bound arguments, or a callable
            that gets the call's arguments.

    Raises:
        TypeError: A field of the template is no parameter of the function.
        InvalidKey: The template is malformed.
    """
    if callable(key):
        if inspect.iscoroutinefunction(key):
            raise TypeError(
                f"key={key!r} is an async function: the key must be there before the "
                f"lock is waited for. Give a plain function that returns it."
            )
        call = key
        return lambda args, kwargs: arguments.key(call(*args, **kwargs))
    template = key
    try:
        fields = set(_fields(template))
        _Trial().vformat(template, (), {})
    except ValueError as error:
        raise InvalidKey(
            f"key is no str.format template: {template!r} ({error}); write {{{{ and "
            f"}}}} for braces"
        ) from error
    if not fields:
        literal = arguments.key(template.format())
        return lambda args, kwargs: literal
    signature = _signature(function)
    _check_fields(template, fields, signature, function)

    def make(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        values: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
                values = {**value, name: value, **values}
            else:
                values[name] = value
        return arguments.key(_formatter.vformat(template, (), values))

    return make


def _fields(template: str) -> Iterator[str]:
    """Yield the names that a template begins its fields with, nested ones too."""
    for _, field, spec, _ in _formatter.parse(template):
        if field is not None:
            yield field.partition(".")[0].partition("[")[0]
        if spec:
            yield from _fields(spec)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    """Return what a call of the function takes, below decorators that keep that."""
    inner = inspect.unwrap(function, stop=_wraps_something_else)
    if isinstance(inner, partial):
        if not inner.args and not inner.keywords:
            return inspect.signature(inner.func)
        return inspect.signature(inner, follow_wrapped=False)
    if hasattr(inner, "__wrapped__"):
        return inspect.signature(inner, follow_wrapped=False)
    return inspect.signature(inner)


def _wraps_something_else(function: Any) -> bool:
    """Tell whether ``__wrapped__`` takes other arguments than the function does.

    method_decorator() hands over the bound method in a partial that claims to wrap the
    unbound one; as_view() returns a function that claims to wrap what the view's
    ``dispatch`` does.
    """
    if isinstance(function, partial):
        return True
    return hasattr(function, "view_class") and not hasattr(
        function.__wrapped__, "view_class"
    )


def _check_fields(
    template: str,
    fields: set[str],
    signature: inspect.Signature,
    function: Callable[..., Any],
) -> None:
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds
    for field in sorted(fields):
        if not field or field.isdigit():
            raise TypeError(
                f"the key's template {template!r} has a positional field; name the "
                f"parameters of {_name(function)}() instead: "
                f"{', '.join(signature.parameters) or 'it has none'}"
            )
        if field not in signature.parameters and not takes_any:
            raise TypeError(
                f"the key's template {template!r} has the field {{{field}}}, which is "
                f"no parameter of {_name(function)}{signature}"
            )


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__qualname__", function))
