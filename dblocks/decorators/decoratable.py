"""What can be decorated; anything else is refused when decorated, not when called."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from types import FrameType, FunctionType, MethodType
from typing import Any, TypeVar

from ..conf import backends

T = TypeVar("T")

TASK_METHODS = ("apply_async", "delay", "enqueue", "send", "defer", "call_local")
"""Attributes of tasks in Celery, RQ, Django, dramatiq, procrastinate and Huey."""

_MAKES_BLOCK = {
    maker(iter).__code__  # type: ignore[arg-type]
    for maker in (contextmanager, asynccontextmanager)
}
"""The code of all functions that were decorated with these two."""


def check_decoratable(function: Any, decorator: str, backend: str) -> None:
    """Refuse a function that can't run under a lock of a backend.

    Raises:
        TypeError: A generator function or a context manager, whose body would run
            after the lock was gone; a class; a task object.
        ImproperlyConfigured: The setting ``DBLOCKS`` lacks the backend.
    """
    name = name_of(function)
    if isinstance(function, type):
        raise TypeError(
            f"@{decorator} can't decorate the class {name}: decorate a function, or "
            f'a view class through method_decorator({decorator}(…), name="dispatch").'
        )
    if any(hasattr(function, method) for method in TASK_METHODS):
        raise TypeError(
            f"@{decorator} can't decorate the task {name}, which would stop being "
            f"one: write @{decorator}(…) below the task's decorator."
        )
    if not callable(function):
        raise TypeError(
            f"@{decorator} decorates functions, not {function!r}. Above a function it "
            f"is written with parentheses: @{decorator}(…)."
        )
    if any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one)
        for one in (function, function.__call__)
    ):
        raise TypeError(
            f"@{decorator} can't decorate the generator function {name}: its body "
            f"would run after the lock was released. Take the lock inside it, with "
            f"a with block, or lock the function that consumes it."
        )
    if getattr(function, "__code__", None) in _MAKES_BLOCK:
        raise TypeError(
            f"@{decorator} can't decorate the context manager {name}: the block under "
            f"it would run after the lock was released. Take the lock inside it, "
            f"around the yield."
        )
    backends.check(backend)


def name_of(function: Any) -> str:
    """Return a function's name, for messages."""
    return getattr(function, "__qualname__", None) or repr(function)


def refuse_bare(decorator: str, key: object, caller: FrameType) -> None:
    """Raise ``TypeError`` for a decorator without parentheses."""
    # Only where needed: before Python 3.13, f_locals keeps the variables' values alive.
    if not isinstance(key, str) and _is_bare(key, caller):
        # A class that is given as the key looks like one that is decorated.
        or_class = ", or its key is a class" if isinstance(key, type) else ""
        raise TypeError(
            f"@{decorator} is used without parentheses{or_class}: write "
            f'@{decorator}("key"), or give the key as a template or a function.'
        )


def _is_bare(key: object, caller: FrameType) -> bool:
    """Tell whether ``key`` is the function under a decorator without parentheses.

    A callable key looks the same, with one difference: the caller's code defines the
    function that is being decorated, and has no name for it yet.
    """
    if isinstance(key, type):
        return True
    named = list(caller.f_locals.values())
    if any(value is key for value in named):
        return False
    # A class method, a property, a partialmethod: what only the body of a class has.
    descriptor = not callable(key) and hasattr(key, "__get__")
    if descriptor or isinstance(key, staticmethod):
        return True
    # What as_view() and REST framework's api_view() make.
    views = [getattr(key, name, None) for name in ("view_class", "cls")]
    if isinstance(key, FunctionType) and any(isinstance(each, type) for each in views):
        return True
    function = inspect.unwrap(key) if callable(key) else None
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        return False
    if not any(constant is function.__code__ for constant in caller.f_code.co_consts):
        return False
    return not any(value is function for value in named)


def bound_to(kind: type[T], function: Any, args: tuple[Any, ...]) -> T | None:
    """Return the object whose method is called, if it is of that class."""
    # method_decorator() passes a partial of the bound method.
    owners = (getattr(layer, "__self__", None) for layer in layers(function))
    return next((one for one in (*args[:1], *owners) if isinstance(one, kind)), None)


def layers(target: Any) -> Iterator[Any]:
    """Yield a callable and the callables that it says it wraps."""
    while target is not None:
        yield target
        if isinstance(target, partial):
            target = target.func
        elif isinstance(target, MethodType):
            target = target.__func__
        elif hasattr(target, "__wrapped__") or inspect.isroutine(target):
            target = getattr(target, "__wrapped__", None)
        else:
            target = type(target).__call__
