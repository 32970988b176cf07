"""Functions, methods, tasks and views that run under a lock, sync or async."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

from asgiref.sync import sync_to_async
from django.http import HttpRequest

from ..exceptions import LockTimeout
from ..validation import UNSET
from .decoratable import check_decoratable, is_async, name_of
from .requests import OwnTransactions, RequestTransactions
from .templates import Args, CallTexts, Kwargs, function_note
from .views import (
    is_async_view,
    is_method,
    is_view_call,
    locked_response,
    request_of,
    view_note,
    warn_of_late_work,
)

if TYPE_CHECKING:
    from ..leases import Lease
    from ..locks import Lock
    from ..transaction_locks import TransactionLock


def decorate(lock: Lock, function: Any) -> Any:
    """Return a function that runs ``function`` while holding a lock.

    The name, docstring, signature and ``__wrapped__`` are the function's own.

    Raises:
        TypeError, ImproperlyConfigured: As :func:`check_decoratable` says.
    """
    return _decorate(_LeaseCalls, lock, function)


def decorate_with_row(lock: TransactionLock, function: Any) -> Any:
    """Return a function that runs in a transaction with a key's row locked.

    Raises:
        TypeError, ImproperlyConfigured: As :func:`check_decoratable` says; async
            functions are a ``TypeError`` too.
    """
    return _decorate(_RowCalls, lock, function)


def _decorate(kind: type[_Calls], lock: Any, function: Any) -> Any:
    if isinstance(function, (classmethod, staticmethod)):
        return type(function)(_decorate(kind, lock, function.__func__))
    return kind(lock, function).wrapper()


class _Calls:
    """The calls of a function under a lock, and what they have in common.

    Attributes:
        skip: The argument that lets a call be skipped, if the lock has it.
        has_self: A call's first argument may be ``self``.
    """

    decorator: str
    lock: Any
    skip = ""

    def __init__(self, lock: Any, function: Any, note: Any = "") -> None:
        check_decoratable(function, self.decorator, lock.backend)
        self.lock = lock
        self.function = function
        self.name = name_of(function)
        self.has_self = is_method(function)
        self.texts = CallTexts(lock.key, note, function)

    def wrapper(self) -> Any:
        """Return what takes the function's place."""

        @wraps(self.function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return self.run(wrapper, args, kwargs)

        return wrapper

    def run(self, wrapper: Any, args: Args, kwargs: Kwargs) -> Any:
        """Run a sync function, or begin to run an async class-based view."""
        raise NotImplementedError

    def view_request(
        self, wrapper: Any, request: HttpRequest | None, args: Args
    ) -> HttpRequest | None:
        """Return the request of a call as a view; refuse one that could be skipped."""
        if request is None or not is_view_call(wrapper, self.function, request, args):
            return None
        if self.skip:
            raise TypeError(
                f"{self.skip} can't be used on the view {self.name}, which must return "
                f"a response: leave it out for a 423."
            )
        return request


class _LeaseCalls(_Calls):
    """Calls under a ``Lock``.

    Attributes:
        excluded: The databases on which the function wants no transaction of a request.
        timeout: How long a call waits, or ``UNSET`` for the lock's own.
    """

    decorator = "distributed_lock"
    lock: Lock

    def __init__(self, lock: Lock, function: Any) -> None:
        super().__init__(lock, function, lock.note)
        self.excluded: set[str] = getattr(function, "_non_atomic_requests", set())
        self.timeout: object = UNSET
        self._default_note = function_note(function)
        if lock.on_locked == "skip":
            self.skip = 'on_locked="skip"'
            if lock.timeout is UNSET:
                self.timeout = 0
        if lock.atomic and is_async(function):
            raise TypeError(
                f"atomic=True can't be used on the async function {self.name}: "
                f"Django has no async transactions. Put the transaction and its lock "
                f"into a sync function and call that through sync_to_async()."
            )

    def wrapper(self) -> Any:
        if not is_async(self.function):
            wrapper = super().wrapper()
            wrapper._non_atomic_requests = OwnTransactions(self.excluded)
            return wrapper

        @wraps(self.function)
        async def awrapper(*args: Any, **kwargs: Any) -> Any:
            request = request_of(args, self.has_self)
            of_view = self.view_request(awrapper, request, args)
            return await self.arun(args, kwargs, of_view)

        return awrapper

    def run(self, wrapper: Any, args: Args, kwargs: Kwargs) -> Any:
        request = request_of(args, self.has_self)
        of_view = self.view_request(wrapper, request, args)
        under: Callable[[Lease], AbstractContextManager[Any]] = nullcontext
        if request is not None:
            transactions = RequestTransactions.of(request)
            aliases = transactions.due(request, self.excluded)
            if of_view is not None and is_async_view(self.function, args):
                self._refuse_atomic(aliases)
                return self.arun(args, kwargs, of_view)
            transactions.warn_if_late(self.name)
            under = partial(transactions.under, aliases)
        lock = self._lock_for(args, kwargs, of_view)
        try:
            lease = lock.acquire(self.timeout)
        except LockTimeout as error:
            return self._locked_out(error, args, kwargs, of_view)
        with lease, under(lease):
            response = self.function(*args, **kwargs)
        if of_view is not None:
            warn_of_late_work(response, self.name)
        return response

    async def arun(
        self, args: Args, kwargs: Kwargs, of_view: HttpRequest | None
    ) -> Any:
        """Run an async function, or the ``dispatch`` of an async class-based view.

        Args:
            of_view: The request, if the call is a view's.
        """
        lock = self._lock_for(args, kwargs, of_view)
        try:
            lease = await lock.aacquire(self.timeout)
        except LockTimeout as error:
            # In a thread: a project's 423.html may ask the database who is signed in.
            locked_out = sync_to_async(self._locked_out)
            answer = await locked_out(error, args, kwargs, of_view)
            return await answer if inspect.isawaitable(answer) else answer
        async with lease:
            response = await self.function(*args, **kwargs)
        if of_view is not None:
            warn_of_late_work(response, self.name)
        return response

    def _lock_for(
        self, args: Args, kwargs: Kwargs, of_view: HttpRequest | None
    ) -> Lock:
        key, note = self.texts.make(args, kwargs)
        if not self.lock.note:
            note = view_note(of_view) or self._default_note
        return self.lock.for_call(key, note)

    def _locked_out(
        self,
        error: LockTimeout,
        args: Args,
        kwargs: Kwargs,
        of_view: HttpRequest | None,
    ) -> Any:
        """Do what is to be done when the wait ran out."""
        on_locked = self.lock.on_locked
        if callable(on_locked):
            return on_locked(error, *args, **kwargs)
        if self.skip:
            return None
        if on_locked == "raise" or of_view is None:
            raise error
        return locked_response(of_view, error)

    def _refuse_atomic(self, aliases: list[str]) -> None:
        """Raise if an async class-based view were to run in a transaction."""
        if aliases:
            # Django's own refusal, which the mark on the view has silenced.
            raise RuntimeError("You cannot use ATOMIC_REQUESTS with async views.")
        if self.lock.atomic:
            raise TypeError(
                f"atomic=True can't be used on the async view {self.name}: Django "
                f"has no async transactions."
            )


class _RowCalls(_Calls):
    """Calls under a ``TransactionLock``."""

    decorator = "transaction_lock"
    lock: TransactionLock

    def __init__(self, lock: TransactionLock, function: Any) -> None:
        super().__init__(lock, function)
        if lock.skips:
            self.skip = "skip_locked=True"
        if is_async(function):
            raise self._async_refused()

    def run(self, wrapper: Any, args: Args, kwargs: Kwargs) -> Any:
        lock = self.lock.with_key(self.texts.make(args, kwargs)[0])
        request = request_of(args, self.has_self)
        if request is not None and is_async_view(self.function, args):
            raise self._async_refused()
        of_view = self.view_request(wrapper, request, args)
        with ExitStack() as block:
            try:
                row = block.enter_context(lock)
            except LockTimeout as error:
                if of_view is None:
                    raise
                return locked_response(of_view, error)
            return None if row is None else self.function(*args, **kwargs)

    def _async_refused(self) -> TypeError:
        return TypeError(
            f"@transaction_lock can't decorate the async function {self.name}: Django "
            f"has no async transactions. Decorate a sync function and call it through "
            f"sync_to_async()."
        )
