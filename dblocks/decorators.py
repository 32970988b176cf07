"""The decorator form of the locks: on functions, methods, tasks and views."""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

from asgiref.sync import iscoroutinefunction, sync_to_async
from django.http import HttpRequest

from . import keys
from .arguments import Unset
from .conf import backends
from .exceptions import LockTimeout

if TYPE_CHECKING:
    from .locks import Lock
    from .pessimistic import TransactionLock

MARK = "_dblocks_lock"
"""The attribute that a decorated function has, and what wraps it."""


def decorate(lock: Lock, function: Any) -> Any:
    """Return a function that runs ``function`` while holding a lock.

    The name, docstring, signature and ``__wrapped__`` are the function's own.

    Raises:
        TypeError: It can't be decorated: a generator function, whose body would run
            after the lock was gone; a class; a task object.
        ImproperlyConfigured: The setting ``DBLOCKS`` lacks the lock's backend.
    """
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(decorate(lock, function.__func__))
    check_decoratable(function, "distributed_lock")
    backends.check(lock.backend)
    make_key = keys.maker(lock.key, function)
    if _is_async(function):
        if lock.atomic:
            raise TypeError(
                f"atomic=True can't be used on the async function {_name(function)}: "
                f"Django has no async transactions. Put the transaction and its lock "
                f"into a sync function and call that through sync_to_async()."
            )
        return _decorate_async(lock, function, make_key)
    return _decorate_sync(lock, function, make_key)


def decorate_with_row(lock: TransactionLock, function: Any) -> Any:
    """Return a function that runs in a transaction with a key's row locked.

    Raises:
        TypeError: As for :func:`decorate`; async functions too.
    """
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(decorate_with_row(lock, function.__func__))
    check_decoratable(function, "transaction_lock")
    backends.check(lock.backend)
    refusal = (
        f"@transaction_lock can't decorate the async function {_name(function)}: "
        f"Django has no async transactions. Decorate a sync function and call it "
        f"through sync_to_async()."
    )
    if _is_async(function):
        raise TypeError(refusal)
    make_key = keys.maker(lock.key, function)

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        from . import views

        one = lock.with_key(make_key(args, kwargs))
        request = views.request_of(function, args)
        if request is not None:
            view = views.view_of(function, args)
            if getattr(view, "view_is_async", False):
                raise TypeError(refusal)
            if not views.is_view_call(wrapper, function, request, view):
                request = None
            elif lock.skips:
                raise TypeError(
                    f"skip_locked=True can't be used on the view {_name(function)}, "
                    f"which must return a response."
                )
        with ExitStack() as block:
            try:
                row = block.enter_context(one)
            except LockTimeout as error:
                if request is None:
                    raise
                return views.locked_response(request, error)
            return None if row is None else function(*args, **kwargs)

    return wrapper


def check_decoratable(function: Any, decorator: str) -> None:
    """Raise ``TypeError`` for what can't run under a lock."""
    name = _name(function)
    if isinstance(function, type):
        raise TypeError(
            f"@{decorator} can't decorate the class {name}: decorate a function, or "
            f'a view class through method_decorator({decorator}(…), name="dispatch").'
        )
    if hasattr(function, "apply_async") or hasattr(function, "enqueue"):
        raise TypeError(
            f"@{decorator} can't decorate the task {name}, which would stop being "
            f"one: write @{decorator}(…) below the task's decorator."
        )
    if not callable(function):
        raise TypeError(f"@{decorator} decorates functions, not {function!r}.")
    if any(
        inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one)
        for one in (function, _call_method(function))
    ):
        raise TypeError(
            f"@{decorator} can't decorate the generator function {name}: its body "
            f"would run after the lock was released. Take the lock inside it, with "
            f"a with block, or lock the function that consumes it."
        )


def _call_method(function: Any) -> Any:
    """Return what a call of an object runs, if that is Python code."""
    return getattr(function, "__call__", None)  # noqa: B004


def _is_async(function: Any) -> bool:
    return iscoroutinefunction(function) or iscoroutinefunction(_call_method(function))


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _decorate_sync(lock: Lock, function: Any, make_key: keys.KeyMaker) -> Any:
    from . import views

    timeout = _timeout(lock)
    has_inner = MARK in getattr(function, "__dict__", {})
    excluded: set[str] = getattr(function, "_non_atomic_requests", set())

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        one = lock.with_key(make_key(args, kwargs))
        request = views.request_of(function, args)
        if request is None:
            try:
                lease = one.acquire(timeout)
            except LockTimeout as error:
                return _locked(one, error, args, kwargs)
            with lease:
                return function(*args, **kwargs)
        view = views.view_of(function, args)
        as_view = views.is_view_call(wrapper, function, request, view)
        if as_view:
            _refuse_skip(one, function)
            if getattr(view, "view_is_async", False):
                return _run_async_view(one, function, request, args, kwargs)
        if not views.RequestTransactions.of(request).opened:
            views.warn_of_open_transaction(_name(function))
        try:
            lease = one.acquire(timeout)
        except LockTimeout as error:
            return _locked(one, error, args, kwargs, request if as_view else None)
        with lease:
            own = views.RequestTransactions.of(request)
            own.leases.append(lease)
            try:
                with own.open([] if has_inner else own.due(request, excluded)):
                    response = function(*args, **kwargs)
            finally:
                own.leases.remove(lease)
        if as_view:
            views.warn_of_late_work(response, _name(function))
        return response

    setattr(wrapper, MARK, lock)
    wrapper._non_atomic_requests = views.OwnTransactions(excluded)  # type: ignore[attr-defined]
    return wrapper


def _decorate_async(lock: Lock, function: Any, make_key: keys.KeyMaker) -> Any:
    from . import views

    timeout = _timeout(lock)

    @wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        one = lock.with_key(make_key(args, kwargs))
        request = views.request_of(function, args)
        if request is not None:
            view = views.view_of(function, args)
            if views.is_view_call(wrapper, function, request, view):
                _refuse_skip(one, function)
            else:
                request = None
        try:
            lease = await one.aacquire(timeout)
        except LockTimeout as error:
            return await _alocked(one, error, args, kwargs, request)
        async with lease:
            response = await function(*args, **kwargs)
        if request is not None:
            views.warn_of_late_work(response, _name(function))
        return response

    setattr(wrapper, MARK, lock)
    return wrapper


async def _run_async_view(
    lock: Lock,
    function: Any,
    request: HttpRequest,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run an async class-based view, whose ``dispatch`` returns a coroutine."""
    from . import views

    excluded: set[str] = getattr(function, "_non_atomic_requests", set())
    if views.RequestTransactions.of(request).due(request, excluded):
        # Django's own refusal, which the mark on the view has silenced.
        raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
    if lock.atomic:
        raise TypeError(
            f"atomic=True can't be used on the async view {_name(function)}: Django "
            f"has no async transactions."
        )
    try:
        lease = await lock.aacquire(_timeout(lock))
    except LockTimeout as error:
        return await _alocked(lock, error, args, kwargs, request)
    async with lease:
        response = await function(*args, **kwargs)
    views.warn_of_late_work(response, _name(function))
    return response


def _timeout(lock: Lock) -> object:
    """How long a decorated call waits; one that may be skipped doesn't."""
    if lock.on_locked == "skip" and isinstance(lock.timeout, Unset):
        return 0
    return lock.timeout


def _refuse_skip(lock: Lock, function: Any) -> None:
    if lock.on_locked == "skip":
        raise TypeError(
            f'on_locked="skip" can\'t be used on the view {_name(function)}, which '
            f"must return a response: leave on_locked out for a 423, or give a "
            f"callable (exc, request, …) that returns one."
        )


def _locked(
    lock: Any,
    error: LockTimeout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: HttpRequest | None = None,
) -> Any:
    """Do what is to be done when the wait ran out.

    Args:
        request: That of the call, if it is a view's.
    """
    from . import views

    if callable(lock.on_locked):
        return lock.on_locked(error, *args, **kwargs)
    if lock.on_locked == "skip":
        return None
    if lock.on_locked == "raise" or request is None:
        raise error
    return views.locked_response(request, error)


async def _alocked(
    lock: Lock,
    error: LockTimeout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: HttpRequest | None,
) -> Any:
    """``_locked`` for async functions, whose ``on_locked`` may be async too."""
    # In a thread: the project's template may ask the database who is signed in.
    answer = await sync_to_async(_locked)(lock, error, args, kwargs, request)
    return await answer if inspect.isawaitable(answer) else answer
