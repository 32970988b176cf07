"""Decorated functions: all kinds of them, keys from arguments, what is refused."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import pickle
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import cache, cached_property, lru_cache, partial, update_wrapper, wraps
from threading import Event, get_ident
from typing import Any
from unittest import mock

import django
import pytest
from asgiref.sync import async_to_sync, sync_to_async
from django.core.exceptions import (
    ImproperlyConfigured,
    PermissionDenied,
    SynchronousOnlyOperation,
)
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError
from django.db import connection, transaction
from django.utils.decorators import method_decorator
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy
from django.views import View

import dblocks
from dblocks import (
    InvalidKey,
    LeaseLost,
    Lock,
    LockTimeout,
    current_lease,
    distributed_lock,
    transaction_lock,
)
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from tests.support import decorated
from tests.support.decorated import key_of
from tests.support.factories import AccountFactory
from tests.support.fixtures import OtherThread
from tests.support.processes import ROOT, run_python
from tests.support.timing import DEADLINE, SLACK, takes
from tests.testapp.models import Account

pytestmark = pytest.mark.usefixtures("committed")

NUMBERS = itertools.count(1)


def key_now() -> str:
    """Return the key of the lock that the running code holds."""
    return current_lease().key


async def akey_now() -> str:
    """Return it in a coroutine, some time later."""
    await asyncio.sleep(0)
    return key_now()


# Every kind of function


def kinds(key: str) -> dict[str, Callable[[], Any]]:
    """Decorate each kind of function; each call returns the key that it holds."""
    lock = distributed_lock(key, timeout=0)

    class Job:
        @lock
        def method(self) -> str:
            return key_now()

        @classmethod
        @lock
        def class_method(cls) -> str:
            assert cls is Job
            return key_now()

        @lock
        @classmethod
        def around_class_method(cls) -> str:
            assert cls is Job
            return key_now()

        @staticmethod
        @lock
        def static_method() -> str:
            return key_now()

        @lock
        @staticmethod
        def around_static_method() -> str:
            return key_now()

        @method_decorator(lock)
        def by_method_decorator(self) -> str:
            return key_now()

        @lock
        async def amethod(self) -> str:
            return await akey_now()

        @property
        @lock
        def value(self) -> str:
            return key_now()

        @lock
        def __call__(self) -> str:
            return key_now()

    class Acts:
        def __call__(self) -> str:
            return key_now()

    class AsyncActs:
        async def __call__(self) -> str:
            return await akey_now()

    job = Job()
    return {
        "function": lock(key_now),
        "lambda": lock(lambda: key_now()),
        "partial": lock(partial(key_now)),
        "object": lock(Acts()),
        "method": job.method,
        "class method": job.class_method,
        "class method of the class": Job.class_method,
        "around a class method": job.around_class_method,
        "static method": job.static_method,
        "around a static method": Job.around_static_method,
        "method_decorator": job.by_method_decorator,
        "bound method": lock(Acts().__call__),
        "property": lambda: job.value,
        "call of an object": job,
        "coroutine function": async_to_sync(lock(akey_now)),
        "coroutine method": async_to_sync(job.amethod),
        "partial coroutine function": async_to_sync(lock(partial(akey_now))),
        "async object": async_to_sync(lock(AsyncActs())),
        "sync_to_async": async_to_sync(sync_to_async(lock(key_now))),
        "async_to_sync": lock(async_to_sync(alocked_elsewhere(key))),
    }


def alocked_elsewhere(key: str) -> Any:
    """Return a coroutine function that is not the caller: its key is taken."""

    async def main() -> str:
        return key if await distributed_lock(key).alocked() else "free"

    return main


@pytest.mark.parametrize("kind", kinds("k"))
def test_kinds(key: str, kind: str) -> None:
    """Each kind of function holds the lock while it runs, and not afterwards."""
    function = kinds(key)[kind]
    assert function() == key
    assert not distributed_lock(key).locked()
    with hold_elsewhere(key), pytest.raises(LockTimeout):
        function()
    assert function() == key


def test_exception_passes(key: str) -> None:
    """A function's own exception comes out, and the key is free."""

    @distributed_lock(key)
    def broken() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert not distributed_lock(key).locked()


def test_lock_timeout_of_the_body(key: str) -> None:
    """A LockTimeout of another lock in the body is not the decorator's affair."""

    @distributed_lock(key, on_locked="skip")
    def outer() -> None:
        distributed_lock(key + "!").acquire(timeout=0)

    with hold_elsewhere(key + "!"), pytest.raises(LockTimeout) as caught:
        outer()
    assert caught.value.key == key + "!"


def test_lease_lost(key: str) -> None:
    """A function that lost its lease meanwhile doesn't return as if nothing was."""

    @distributed_lock(key, renew=False)
    def job() -> str:
        DistributedLock.objects.force_release(key)
        return "done"

    with pytest.raises(LeaseLost):
        job()


def test_recursion(key: str) -> None:
    """A function may call itself: the lock is held until the outermost call ends."""
    tokens: list[int | None] = []

    @distributed_lock(key, timeout=0)
    def countdown(depth: int) -> None:
        tokens.append(current_lease().fencing_token)
        if depth:
            countdown(depth - 1)
            assert distributed_lock(key).locked()

    countdown(3)
    assert len(tokens) == 4
    assert len(set(tokens)) == 1
    assert not distributed_lock(key).locked()


def test_async_recursion(key: str) -> None:
    """So may a coroutine function, within one task."""

    @distributed_lock(key, timeout=0)
    async def countdown(depth: int) -> int:
        return depth + (await countdown(depth - 1) if depth else 0)

    assert async_to_sync(countdown)(3) == 6


def test_siblings(key: str) -> None:
    """Two tasks in one function take turns."""
    inside: list[int] = []

    @distributed_lock(key, timeout=DEADLINE)
    async def job() -> None:
        inside.append(1)
        await asyncio.sleep(0.02)
        assert inside == [1]
        inside.pop()

    async def main() -> None:
        await asyncio.gather(*(job() for _ in range(4)))

    async_to_sync(main)()


def test_two_threads(key: str, threads: Callable[[], OtherThread]) -> None:
    """Two threads in one function take turns, each with a token of its own."""
    account = AccountFactory()

    @distributed_lock(key, timeout=DEADLINE)
    def add() -> int | None:
        balance = Account.objects.get(pk=account.pk).balance
        Account.objects.filter(pk=account.pk).update(balance=balance + 1)
        return current_lease().fencing_token

    pair = [threads(), threads()]
    calls = [thread.start(add) for thread in pair for _ in range(10)]
    tokens = [call.result(timeout=DEADLINE) for call in calls]
    assert len(set(tokens)) == 20
    account.refresh_from_db()
    assert account.balance == 20


def test_sync_function_in_an_event_loop(key: str) -> None:
    """A sync function under a lock is refused inside a running event loop."""

    async def main() -> None:
        distributed_lock(key)(key_now)()

    with pytest.raises(SynchronousOnlyOperation):
        async_to_sync(main)()


# What others see of a decorated function


def original(number: int, *, name: str = "n") -> str:
    """Say something."""
    return f"{number}{name}"


async def aoriginal(number: int, *, name: str = "n") -> str:
    """Say something, some time later."""
    return original(number, name=name)


original.marked = True  # type: ignore[attr-defined]
aoriginal.marked = True  # type: ignore[attr-defined]


@pytest.mark.parametrize("function", [original, aoriginal])
@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_looks_like_the_function(function: Any, form: Any) -> None:
    """Name, docstring, signature, attributes and __wrapped__ are the function's."""
    if form is transaction_lock and function is aoriginal:
        pytest.skip("refused, which has a test of its own")
    locked = form("k")(function)
    assert locked is not function
    for name in ("__name__", "__qualname__", "__module__", "__doc__", "marked"):
        assert getattr(locked, name) == getattr(function, name)
    assert locked.__wrapped__ is function
    assert inspect.signature(locked) == inspect.signature(function)
    assert inspect.iscoroutinefunction(locked) == inspect.iscoroutinefunction(function)


# Keys


def positional(
    first: int, /, second: Any, *rest: int, last: int = 9, **more: Any
) -> str:
    """A signature with everything."""
    return key_now()


KEYS = [
    pytest.param("{first}", (1, 2), {}, "1", id="positional-only"),
    pytest.param("{second}", (1, 2), {}, "2", id="by position"),
    pytest.param("{second}", (1,), {"second": 2}, "2", id="by name"),
    pytest.param("{last}", (1, 2), {}, "9", id="default"),
    pytest.param("{last}", (1, 2), {"last": 3}, "3", id="not the default"),
    pytest.param("{rest}", (1, 2, 3, 4), {}, "(3, 4)", id="rest"),
    pytest.param("{rest[1]}", (1, 2, 3, 4), {}, "4", id="one of the rest"),
    pytest.param("{colour}", (1, 2), {"colour": "red"}, "red", id="from **more"),
    pytest.param("{more[colour]}", (1, 2), {"colour": "red"}, "red", id="in **more"),
    pytest.param("{first}", (1, 2), {"first": "x"}, "1", id="name in **more as well"),
    pytest.param("{second.pk}", (1, DistributedLock(pk="p")), {}, "p", id="attribute"),
    pytest.param("{second[a][0]}", (1, {"a": [5]}), {}, "5", id="items"),
    pytest.param("{second!r}", (1, "x"), {}, "'x'", id="conversion"),
    pytest.param("{second:04d}", (1, 7), {}, "0007", id="format"),
    pytest.param("{second:{last}}", (1, "x"), {}, "x        ", id="nested field"),
    pytest.param("{{{first}}}", (1, 2), {}, "{1}", id="braces"),
    pytest.param("{first}/{second}", (1, 0), {}, "1/0", id="two, one of them 0"),
    pytest.param("{second}", (1, ""), {}, "", id="empty"),
    pytest.param("{second}", (1, False), {}, "False", id="false"),
]


@pytest.mark.parametrize(("template", "args", "kwargs", "expected"), KEYS)
def test_template(
    key: str, template: str, args: Any, kwargs: Any, expected: str
) -> None:
    """A template's fields are the call's bound arguments."""
    locked: Any = distributed_lock(f"{key}:{template}")(positional)
    assert locked(*args, **kwargs) == f"{key}:{expected}"


def test_template_without_fields() -> None:
    """In the decorator form doubled braces are one."""
    assert distributed_lock("a{{b}}")(key_now)() == "a{b}"


def test_template_over_self(key: str) -> None:
    """A method's template may look into self."""

    class Job:
        pk = 5

        @distributed_lock(key + ":{self.pk}:{number}")
        def run(self, number: int) -> str:
            return key_now()

    assert Job().run(6) == f"{key}:5:6"


class Counters:
    """Methods below decorators that keep their signature."""

    @distributed_lock("inner:{start}")
    def locked(self, start: int, step: int = 1) -> str:
        return ",".join(current_lease(key).key for key in ("inner:5", "outer:5:1"))

    @cache  # noqa: B019
    def cached(self, start: int, step: int = 1) -> str:
        return key_now()


@pytest.mark.parametrize(
    "around", [lambda method: method, partial], ids=["", "partial"]
)
@pytest.mark.parametrize(
    ("name", "expected"), [("locked", "inner:5,outer:5:1"), ("cached", "outer:5:1")]
)
def test_template_over_a_bound_method_of_a_decorated_function(
    name: str, expected: str, around: Any
) -> None:
    """The arguments of a bound method don't begin with self, decorated or not."""
    method = around(getattr(Counters(), name))
    lock = distributed_lock("outer:{start}:{step}")
    assert lock(method)(5) == expected
    assert lock(method)(start=5) == expected
    assert lock(wraps(method)(lambda *args: method(*args)))(5) == expected
    with pytest.raises(TypeError, match="self"):
        distributed_lock("{self}")(method)


@pytest.mark.parametrize("name", ["locked", "cached"])
def test_template_over_a_partial_that_claims_to_wrap(name: str) -> None:
    """It takes what it doesn't supply, whatever its __wrapped__ takes."""
    method = getattr(Counters(), name)
    supplying = update_wrapper(partial(method, 5), method)
    assert "outer:5:1" in distributed_lock("outer:5:{step}")(supplying)()
    assert "outer:5:1" in distributed_lock("outer:5:{step}")(supplying)(1)
    assert "outer:5:1" in distributed_lock("outer:5:{step}")(supplying)(step=1)


def named(number: int) -> str:
    """A function of one parameter."""
    return key_now()


def any_name(**kwargs: Any) -> str:
    """A function that takes any name."""
    return key_now()


@wraps(named)
def wrapped(*args: Any, **kwargs: Any) -> str:
    """A decorator's work: it shows the signature of what it wraps."""
    return named(*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "template", "words"),
    [
        (named, "{order_id}", ["order_id", "named"]),
        (named, "{order_id.pk}", ["order_id"]),
        (named, "{order_id[0]}", ["order_id"]),
        (named, "{number:{width}}", ["width"]),
        (named, "{number}{order_id}", ["order_id"]),
        (named, "{}", ["positional", "number"]),
        (named, "{0}", ["positional", "number"]),
        (any_name, "{}", ["positional"]),
        (key_now, "{number}", ["number"]),
        (wrapped, "{order_id}", ["order_id"]),
        (akey_now, "{number}", ["number"]),
        (partial(named, number=3), "{order_id}", ["order_id"]),
    ],
)
@pytest.mark.parametrize(
    "form",
    [distributed_lock, transaction_lock, partial(distributed_lock, "k")],
    ids=["distributed_lock", "transaction_lock", "note"],
)
def test_field_that_the_signature_lacks(
    function: Any, template: str, words: list[str], form: Any
) -> None:
    """A field that no argument can fill is a TypeError when decorated."""
    if isinstance(form, partial):
        form, template = partial(form, note=template), ""
    if form is transaction_lock and function is akey_now:
        pytest.skip("refused for another reason")
    with pytest.raises(TypeError) as caught:
        (form(template) if template else form())(function)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        *("{", "}", "{number", "{number!x}", "{number.}", "{number!}", "{number[}"),
        "{number:{number:{number}}}",
    ],
)
def test_malformed_template(template: str) -> None:
    """What is no str.format template is refused when decorated."""
    with pytest.raises(InvalidKey) as caught:
        distributed_lock(template)(named)
    assert repr(template) in str(caught.value)


def test_field_that_the_call_lacks() -> None:
    """A name that only **kwargs could supply is a TypeError at the call."""
    locked = distributed_lock("{order_id}")(any_name)
    with pytest.raises(TypeError, match="order_id"):
        locked(number=5)
    assert locked(order_id=5) == "5"


def test_function_without_a_signature() -> None:
    """Where nothing says which arguments there are, a field can't be supplied."""
    with pytest.raises(TypeError, match="callable"):
        distributed_lock("{number}")(max)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{value}", None),
        ("{value.owner}", DistributedLock(owner=None)),
        ("{value[0]}", [None]),
        ("{value}", SimpleLazyObject(lambda: None)),
    ],
    ids=["argument", "attribute", "item", "lazy"],
)
def test_none(template: str, value: Any) -> None:
    """A field that is None is refused: all who have no value would share a key."""
    locked = distributed_lock("user:" + template)(lambda value=None: key_now())
    with pytest.raises(InvalidKey, match=r"None"):
        locked(value)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("{value}", object()),
        ("{value}", [object()]),
        ("{value.upper}", "a method"),
        ("{value}", lambda: "function"),
        ("{value}", (number for number in [1])),
        ("{value!r}", object()),
        ("{value!s:>99}", [object()]),
    ],
    ids=["object", "list", "method", "function", "generator", "repr", "str"],
)
def test_address(template: str, value: Any) -> None:
    """An object without a text is refused: nobody else would have the same key."""
    locked = distributed_lock("job:" + template)(lambda value: key_now())
    with pytest.raises(InvalidKey, match=r"'job:\{value.*address, .* at 0x\w+>"):
        locked(value)


@pytest.mark.parametrize(
    ("template", "error"), [("{value:02d}", ValueError), ("{value:>5}", TypeError)]
)
@pytest.mark.parametrize("part", ["key", "note"])
def test_value_that_cant_be_formatted(
    template: str, error: type[Exception], part: str
) -> None:
    """The error names the template."""
    texts = {"note": template} if part == "note" else {}
    lock = distributed_lock("key" if texts else template, **texts)
    value = "text" if error is ValueError else [1]
    with pytest.raises(error, match=rf"doesn't fit the {part}'s template '\{{value:"):
        lock(lambda value: key_now())(value)


def test_value_that_refuses_to_be_a_key() -> None:
    """What a value says of itself as a key reaches the caller as it is."""
    refusal = InvalidKey("not this one")

    class Anonymous:
        def __format__(self, spec: str) -> str:
            raise refusal

    with pytest.raises(InvalidKey) as caught:
        distributed_lock("user:{user}")(lambda user: key_now())(Anonymous())
    assert caught.value is refusal


def test_lazy_translation() -> None:
    """A translation is refused: who has another language would have another key."""
    locked = distributed_lock("{text}")(lambda text: key_now())
    with pytest.raises(InvalidKey, match=r"\{text\} .* lazy text"):
        locked(gettext_lazy("Yes"))


def test_text_like_an_address(key: str) -> None:
    """A text may say what it likes."""
    assert distributed_lock("{text}{text!r}")(lambda text: key_now())("<a at 0x1>")


@pytest.mark.parametrize(
    ("template", "kind", "words"),
    [
        ("{value.user.pk}", AttributeError, "'dict' object has no attribute 'user'"),
        ("{value[pk]}", LookupError, "KeyError: 'pk'"),
    ],
    ids=["attribute", "item"],
)
@pytest.mark.parametrize("name", ["key", "note"])
def test_field_that_leads_nowhere(
    template: str, kind: type[Exception], words: str, name: str, key: str
) -> None:
    """What a value lacks is an error that names the template and the function."""
    asked = {"key": (template, "n"), "note": (key, template)}
    text, note = asked[name]
    locked = distributed_lock(text, note=note)(any_value)
    with pytest.raises(kind) as caught:
        locked({})
    message = str(caught.value)
    assert f"{template} of the {name}'s template {template!r} of any_value()" in message
    assert words in message
    assert isinstance(caught.value.__cause__, (AttributeError, KeyError))


def any_value(value: Any) -> None:
    """Take a value."""


def test_default_that_is_none() -> None:
    """So is a default."""
    with pytest.raises(InvalidKey, match=r"\{value\}.*None"):
        distributed_lock("user:{value}")(lambda value=None: key_now())()


@pytest.mark.parametrize("number", ["x" * 300, "a\0b", "\ud800"], ids=ascii)
def test_argument_that_makes_no_key(number: str) -> None:
    """What the arguments make has to be a key."""
    with pytest.raises(InvalidKey):
        distributed_lock("{number}")(named)(number)  # type: ignore[arg-type]


class Numbered:
    """Has a method that is decorated in Django's way."""

    @method_decorator(distributed_lock("{number}"))
    def method(self, number: int) -> str:
        """Do what a function of one parameter does."""
        return key_now()


@pytest.mark.parametrize(
    "call",
    [distributed_lock("{number}")(named), Numbered().method],
    ids=["function", "method_decorator"],
)
def test_wrong_call(call: Any) -> None:
    """A call that the function refuses is a TypeError, and nothing is locked."""
    with pytest.raises(TypeError, match=r"^missing a required argument: 'number'$"):
        call()


def prepending(function: Any) -> Any:
    """Supply a function's first argument, and show its signature all the same."""

    @wraps(function)
    def inner(*args: Any, **kwargs: Any) -> Any:
        return function("supplied", *args, **kwargs)

    return inner


def two(one: Any, other: Any) -> str:
    """A function that is called with one argument, and a decorator adds the other."""
    return key_now()


SUPPLYING = pytest.mark.parametrize(
    "decorator", [prepending, mock.patch("os.getcwd")], ids=["first", "last"]
)


@SUPPLYING
@pytest.mark.parametrize("text", ["key", "note"])
def test_template_above_a_decorator_that_supplies_arguments(
    key: str, decorator: Any, text: str
) -> None:
    """The call doesn't fit the function: the error names the template and a way out."""
    texts = {"key": (key + ":{one}",), "note": (key,)}
    lock = distributed_lock(*texts[text], note="{one}" if text == "note" else "")
    with pytest.raises(TypeError) as caught:
        lock(decorator(two))(5)
    for words in (f"the {text}'s template", "{one}", "two(one", "'other'", "callable"):
        assert words in str(caught.value)


@SUPPLYING
def test_callable_key_above_a_decorator_that_supplies_arguments(
    key: str, decorator: Any
) -> None:
    """A callable gets the arguments of the call, as they are."""
    job = distributed_lock(lambda number: f"{key}:{number}")(decorator(two))
    assert job(5) == f"{key}:5"


# Notes


def note_of(key: str) -> str:
    """Return the note of a key, which its row keeps after the release."""
    return DistributedLock.objects.get(pk=key).note


NAMES = {
    "function": "key_now",
    "lambda": "kinds.<lambda>",
    "partial": "key_now",
    "object": "kinds.Acts",
    "method": "kinds.Job.method",
    "class method": "kinds.Job.class_method",
    "static method": "kinds.Job.static_method",
    "around a class method": "kinds.Job.around_class_method",
    "method_decorator": "kinds.Job.by_method_decorator",
    "bound method": "kinds.Acts.__call__",
    "coroutine function": "akey_now",
    "coroutine method": "kinds.Job.amethod",
    "async object": "kinds.AsyncActs",
}


@pytest.mark.parametrize(("kind", "name"), NAMES.items(), ids=NAMES)
def test_default_note(key: str, kind: str, name: str) -> None:
    """Without a note the call notes the function."""
    kinds(key)[kind]()
    assert note_of(key) == f"tests.test_decorator.{name}"


def test_default_note_of_an_inherited_method(key: str) -> None:
    """A method that is decorated from outside is noted as that of its class."""

    class Base:
        def run(self) -> None:
            """Do nothing."""

    job = method_decorator(distributed_lock(key), name="run")(type("Job", (Base,), {}))
    job().run()
    assert note_of(key) == "tests.test_decorator.Job.run"


def test_default_note_is_cut(key: str) -> None:
    """A name that is longer than a note is cut."""

    def job() -> None:
        """Do nothing."""

    job.__qualname__ = "long" * 100
    distributed_lock(key)(job)()
    note = note_of(key)
    assert len(note) == 255
    assert note.startswith("tests.test_decorator.longlong")


def test_note_reaches_who_waits(key: str, other: OtherThread) -> None:
    """Whoever is locked out is told what the holder's call was given for a note."""
    inside, leave = Event(), Event()

    @distributed_lock(key, timeout=0, note="call {number}")
    def job(number: int) -> None:
        inside.set()
        assert leave.wait(DEADLINE)

    running = other.start(job, 5)
    assert inside.wait(DEADLINE)
    try:
        with pytest.raises(LockTimeout) as caught:
            job(6)
    finally:
        leave.set()
        running.result(DEADLINE)
    assert caught.value.note == "call 5"


def noted(value: Any = None, **more: Any) -> None:
    """A function with a note."""


async def anoted(value: Any = None, **more: Any) -> None:
    """An async function with a note."""


NOTES = [
    pytest.param("why", "x", "why", id="literal"),
    pytest.param("{{why}}", "x", "{why}", id="braces"),
    pytest.param("for {value}", "x", "for x", id="argument"),
    pytest.param("for {value.pk:>3}", DistributedLock(pk="p"), "for   p", id="format"),
    pytest.param("for {value}", None, "for None", id="None"),
    pytest.param("for {value:04d}", None, "for None", id="None with a format"),
    pytest.param("for {value[0]!r}", [None], "for None", id="None with a conversion"),
    pytest.param("for {value}", "x" * 300, "for " + "x" * 251, id="too long"),
    pytest.param("for {value}", "a\0b\ud800", "for a\ufffdb\ufffd", id="not storable"),
    pytest.param(lambda value: f"for {value}", "x", "for x", id="callable"),
    pytest.param(lambda value: "", "x", "", id="callable that has nothing to say"),
    pytest.param(lambda value: value, "x" * 300, "x" * 255, id="callable, too long"),
    pytest.param(lambda value: value, "\udfff\0", "\ufffd" * 2, id="callable, odd"),
]


@pytest.mark.parametrize(("note", "value", "expected"), NOTES)
@pytest.mark.parametrize("function", [noted, async_to_sync], ids=["sync", "async"])
def test_note(key: str, note: Any, value: Any, expected: str, function: Any) -> None:
    """A note is a template or a callable; for people, so that no value is refused."""
    lock = distributed_lock(key, note=note)
    locked = lock(noted) if function is noted else async_to_sync(lock(anoted))
    locked(value)
    assert note_of(key) == expected


def test_key_and_note_from_the_same_arguments(key: str) -> None:
    """Both have the call's arguments, defaults and those in **kwargs included."""
    lock = distributed_lock(key + ":{value}:{colour}", note="{colour}, {value!r}")
    lock(noted)("x", colour="red")
    assert note_of(f"{key}:x:red") == "red, 'x'"


def test_note_over_self(key: str) -> None:
    """A method's note may look into self."""

    class Job:
        pk = 5

        @distributed_lock(key, note="job {self.pk}")
        def run(self) -> None:
            """Do nothing."""

    Job().run()
    assert note_of(key) == "job 5"


def test_note_that_the_call_lacks(key: str) -> None:
    """A name that only **kwargs could supply is a TypeError at the call."""
    locked = distributed_lock(key, note="{order_id}")(any_name)
    with pytest.raises(TypeError, match=r"note.*order_id"):
        locked(number=5)
    assert not distributed_lock(key).locked()


def test_malformed_note() -> None:
    """What is no str.format template is refused when decorated."""
    with pytest.raises(ValueError, match=r"note is no str.format template: '50% \{'"):
        distributed_lock("k", note="50% {")(named)


@pytest.mark.parametrize("result", [None, 5, b"why"], ids=ascii)
def test_callable_that_makes_no_note(key: str, result: Any) -> None:
    """What a callable returns has to be a text."""
    with pytest.raises(TypeError, match="note must be a str"):
        distributed_lock(key, note=lambda: result)(key_now)()
    assert not distributed_lock(key).locked()


def test_async_callable_note() -> None:
    """A note can't be waited for: an async callable is refused when decorated."""

    async def make() -> str:
        return "why"

    with pytest.raises(TypeError, match=r"note=.*async"):
        distributed_lock("k", note=make)(akey_now)


def test_note_in_a_block_is_literal(key: str) -> None:
    """Without a call there are no arguments: braces stay."""
    with distributed_lock(key, note="{value}"):
        pass
    assert note_of(key) == "{value}"


# Callables as keys


class Keys:
    """Callables of every kind that make keys."""

    @classmethod
    def by_class(cls, number: int) -> str:
        return f"by class:{number}"

    @staticmethod
    def by_static(number: int) -> str:
        return f"by static:{number}"

    def by_method(self, number: int) -> str:
        return f"by method:{number}"

    def __call__(self, number: int) -> str:
        return f"by object:{number}"


def by_function(number: int) -> str:
    """Make a key."""
    return f"by function:{number}"


def factory(prefix: str) -> Callable[[int], str]:
    """Make what makes keys."""

    def make(number: int) -> str:
        return f"{prefix}:{number}"

    return make


def with_prefix(prefix: str, number: int) -> str:
    return f"{prefix}:{number}"


MADE = factory("by a made one")
TABLE = {"job": factory("by a table's")}


@distributed_lock(by_function)
def at_module_level(number: int) -> str:
    """Locked by a function of the same module."""
    return key_now()


def by_nested() -> Any:
    """Return a function locked by a nested function."""

    def make(number: int) -> str:
        return f"by nested:{number}"

    @distributed_lock(make)
    def job(number: int) -> str:
        return key_now()

    return job


def by_free_variable() -> Any:
    """Return a function locked by a function from the scope around."""

    def make(number: int) -> str:
        return f"by free variable:{number}"

    def inner() -> Any:
        @distributed_lock(make)
        def job(number: int) -> str:
            return key_now()

        return job

    return inner()


def by_sibling() -> Any:
    """Return a method locked by a function of the class's body."""

    class Job:
        def make(self, number: int) -> str:
            return f"by sibling:{number}"

        @distributed_lock(make)
        def run(self, number: int) -> str:
            return key_now()

    return Job().run


def by_decorated() -> Any:
    """Return a function locked by a function that is decorated itself."""

    def twice(function: Any) -> Any:
        @wraps(function)
        def wrapper(number: int) -> str:
            return str(function(number * 2))

        return wrapper

    @twice
    def make(number: int) -> str:
        return f"by decorated:{number}"

    return distributed_lock(make)(named)


CALLABLES = {
    "lambda": lambda: distributed_lock(lambda number: f"by lambda:{number}")(named),
    "def at module level": lambda: at_module_level,
    "imported": lambda: distributed_lock(key_of)(named),
    "nested": by_nested,
    "free variable": by_free_variable,
    "sibling": by_sibling,
    "decorated": by_decorated,
    "made by a factory": lambda: distributed_lock(factory("by factory"))(named),
    "made before": lambda: distributed_lock(MADE)(named),
    "in a table": lambda: distributed_lock(TABLE["job"])(named),
    "partial": lambda: distributed_lock(partial(with_prefix, "by partial"))(named),
    "bound method": lambda: distributed_lock(Keys().by_method)(named),
    "class method": lambda: distributed_lock(Keys.by_class)(named),
    "static method": lambda: distributed_lock(Keys.by_static)(named),
    "object": lambda: distributed_lock(Keys())(named),
    "builtin": lambda: distributed_lock("by builtin:{}".format)(named),
}


@pytest.mark.parametrize("make", CALLABLES.values(), ids=CALLABLES)
def test_callable_key(make: Any) -> None:
    """A callable of any kind may make the key from the call's arguments."""
    number = next(NUMBERS)
    locked = make()
    name, _, end = locked(number).rpartition(":")
    assert name.startswith(("by ", "decorated"))
    assert int(end) in {number, 2 * number}


def test_imported_callable(key: str) -> None:
    """A function locked by another module's key is locked for both."""
    number = next(NUMBERS)
    with hold_elsewhere(key_of(number)), pytest.raises(LockTimeout):
        decorated.by_callable(number)
    assert decorated.by_callable(number)


@pytest.mark.parametrize(
    "result",
    [
        *(
            pytest.param(each, id=ascii(each))
            for each in (None, 5, b"k", "", "k" * 256)
        ),
        pytest.param(gettext_lazy("text"), id="translated later"),
    ],
)
def test_callable_that_makes_no_key(result: Any) -> None:
    """What a callable returns has to be a key."""
    with pytest.raises(InvalidKey) as caught:
        distributed_lock(lambda: result)(key_now)()
    assert repr(result) in str(caught.value)


def test_callable_key_that_asks_the_database(settings: Any, key: str) -> None:
    """For an async function it is called again in a thread; the task has the lock."""
    settings.DEBUG = True
    asker: ContextVar[str] = ContextVar("asker")
    calls: list[str] = []

    def make(depth: int) -> str:
        calls.append(asker.get())
        return f"{key}:{Account.objects.count()}"

    @distributed_lock(make, timeout=0)
    async def job(depth: int) -> tuple[str, str]:
        if depth:
            return await job(depth - 1)
        return key_now(), asker.get()

    async def main() -> tuple[str, str]:
        asker.set("task")
        return await job(1)

    with pytest.warns(RuntimeWarning, match="queries ran while the key") as caught:
        assert async_to_sync(main)() == (f"{key}:{Account.objects.count()}", "task")
    assert calls == ["task"] * 4
    warned = [each.filename for each in caught if each.category is RuntimeWarning]
    assert warned == [__file__] * 2


def test_callable_key_that_asks_nothing(key: str) -> None:
    """It is called once, in the event loop's thread."""
    threads: list[int] = []

    def make() -> str:
        threads.append(get_ident())
        return key

    @distributed_lock(make)
    async def job() -> int:
        return get_ident()

    assert [async_to_sync(job)()] == threads


def test_async_callable_key() -> None:
    """A key can't be waited for: an async callable is refused when decorated."""

    async def make() -> str:
        return "k"

    with pytest.raises(TypeError, match="async"):
        distributed_lock(make)(akey_now)


def test_callable_key_in_a_block() -> None:
    """Without a call there are no arguments: TypeError."""
    with pytest.raises(TypeError, match="callable"), distributed_lock(key_of):
        pass


# Without parentheses


def bare_function(form: Any) -> None:
    @form
    def job() -> None:
        """Do nothing."""


def bare_async_function(form: Any) -> None:
    @form
    async def job() -> None:
        """Do nothing."""


def bare_method(form: Any) -> None:
    class Job:
        @form
        def run(self) -> None:
            """Do nothing."""


def bare_decorated_function(form: Any) -> None:
    def keep(function: Any) -> Any:
        @wraps(function)
        def wrapper() -> None:
            """Do nothing."""

        return wrapper

    @form
    @keep
    def job() -> None:
        """Do nothing."""


def bare_class(form: Any) -> None:
    @form
    class Job:
        """Nothing."""


def bare_method_decorator(form: Any) -> None:
    class Job:
        @method_decorator(form)
        def run(self) -> None:
            """Do nothing."""


def bare_module(form: Any) -> None:
    source = "@form\ndef job():\n    pass\n"
    exec(compile(source, "module", "exec"), {"form": form, "__name__": "made"})


def bare_cached_function(form: Any) -> None:
    @form
    @lru_cache
    def job() -> None:
        """Do nothing."""


def bare_static_method(form: Any) -> None:
    class Job:
        @form
        @staticmethod
        def run() -> None:
            """Do nothing."""


def bare_class_method(form: Any) -> None:
    class Job:
        @form
        @classmethod
        def run(cls) -> None:
            """Do nothing."""


def bare_property(form: Any) -> None:
    class Job:
        @form
        @property
        def state(self) -> None:
            """Do nothing."""


def bare_cached_property(form: Any) -> None:
    class Job:
        @form
        @cached_property
        def state(self) -> None:
            """Do nothing."""


def bare_view_class(form: Any) -> None:
    form(View.as_view())


BARE = [
    bare_property,
    bare_cached_property,
    bare_cached_function,
    bare_static_method,
    bare_class_method,
    bare_view_class,
    bare_function,
    bare_async_function,
    bare_method,
    bare_decorated_function,
    bare_class,
    bare_method_decorator,
    bare_module,
]


@pytest.mark.parametrize("define", BARE)
@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_without_parentheses(define: Any, form: Any) -> None:
    """A bare decorator is a TypeError, where it stands, that says so."""
    with pytest.raises(TypeError, match="without parentheses"):
        define(form)


@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_class_as_a_key(form: Any) -> None:
    """A class can't be the key, as it looks like one that is decorated."""
    with pytest.raises(TypeError, match="or its key is a class"):
        form(str)


def test_callable_key_that_wraps_no_python_code() -> None:
    """A function that makes keys may wrap one that is written in C."""

    @wraps(max)
    def key(*numbers: int) -> str:
        return f"job:{max(*numbers)}"

    @distributed_lock(key)
    def job(*numbers: int) -> Any:
        return current_lease().key

    assert job(1, 2) == "job:2"


class KeyOf:
    """Makes keys; it has attributes that views and tasks have, too."""

    cls = Account

    def __call__(self, number: int) -> str:
        return f"job:{number}"

    def send(self) -> None:
        """Send nothing."""


def test_callable_keys_that_look_like_views_and_tasks() -> None:
    """What makes keys may be an object of any kind, or a static method."""

    class Job:
        @staticmethod
        def key(number: int) -> str:
            return f"job:{number}"

        @distributed_lock(key)
        @staticmethod
        def static(number: int) -> str:
            return current_lease().key

        @staticmethod
        @distributed_lock(KeyOf())
        def by_object(number: int) -> str:
            return current_lease().key

    assert Job.static(1) == "job:1"
    assert Job.by_object(2) == "job:2"


def test_thing_that_is_no_function() -> None:
    """The error says how the decorator is written."""
    with pytest.raises(TypeError, match="written with parentheses: @distributed_lock"):
        distributed_lock("k")(5)  # type: ignore[type-var]


# What can't be decorated


def generator() -> Iterator[int]:
    """Yield."""
    yield 1


async def agenerator() -> AsyncIterator[int]:
    """Yield, asynchronously."""
    yield 1


class Generates:
    """An object whose call yields."""

    def __call__(self) -> Iterator[int]:
        yield 1


@pytest.mark.parametrize(
    ("function", "word"),
    [
        pytest.param(generator, "generator", id="generator"),
        pytest.param(agenerator, "generator", id="async generator"),
        pytest.param(partial(generator), "generator", id="partial of one"),
        pytest.param(staticmethod(generator), "generator", id="static one"),
        pytest.param(Generates(), "generator", id="object with one"),
        pytest.param(contextmanager(generator), "around the yield", id="block"),
        pytest.param(
            asynccontextmanager(agenerator), "around the yield", id="async block"
        ),
        pytest.param(Generates, "class", id="class"),
        pytest.param("text", "functions", id="no function"),
        pytest.param(decorated.count, "below", id="Celery task"),
    ],
)
@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_refused(function: Any, word: str, form: Any) -> None:
    """What can't run under a lock is a TypeError when it is decorated."""
    with pytest.raises(TypeError, match=word):
        form("k")(function)


@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_coroutine_of_a_sync_function(key: str, form: Any) -> None:
    """What would run after the release is refused: a wrapper hides that it is async."""
    ran = []

    async def job() -> None:
        ran.append(True)

    def wrapper() -> Any:
        return job()

    with pytest.raises(TypeError, match="coroutine"):
        asyncio.run(form(key)(wrapper)())
    assert not ran
    assert not distributed_lock(key).locked()


@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_lazy_result(key: str, form: Any) -> None:
    """What a function returns is passed on as it is, not looked into."""
    lazy = SimpleLazyObject(lambda: 1 / 0)
    assert form(key)(lambda: lazy)() is lazy


TASK_METHODS = {
    "Celery": "apply_async",
    "RQ": "delay",
    "Django": "enqueue",
    "dramatiq": "send",
    "procrastinate": "defer",
    "Huey": "call_local",
}


@pytest.mark.parametrize("method", TASK_METHODS.values(), ids=TASK_METHODS)
@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_tasks_of_every_queue(method: str, form: Any) -> None:
    """A task is refused: the wrapper would be none, or lock its enqueueing only."""
    kind = type("Task", (), {"__call__": key_now, method: key_now})
    with pytest.raises(TypeError, match="below"):
        form("k")(kind())


@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_unknown_alias(form: Any) -> None:
    """A backend that the settings lack is refused when decorated."""
    with pytest.raises(ImproperlyConfigured, match=r"nowhere.*default"):
        form("k", backend="nowhere")(key_now)


@pytest.mark.parametrize("setting", ["default", {"default": None}, {"default": {}}])
def test_bad_settings_are_not_the_decorators_business(
    settings: Any, setting: Any
) -> None:
    """With a bad setting modules can be imported, for the system check to tell."""
    settings.DBLOCKS = setting
    assert distributed_lock("k")(key_now)


def test_decorating_before_there_are_settings() -> None:
    """Modules may be imported, their functions decorated, without settings."""
    program = (
        "from dblocks import distributed_lock, transaction_lock\n"
        "@distributed_lock('k:{n}', backend='other')\n"
        "def f(n): ...\n"
        "@transaction_lock('k')\n"
        "def g(): ...\n"
        "from django.conf import settings\n"
        "print(settings.configured)\n"
    )
    result = run_python("-W", "error", "-c", program, timeout=30, env={})
    assert (result.returncode, result.stdout) == (0, "False\n"), result.stderr


# on_locked


def test_raises_by_default(key: str) -> None:
    """A call that is no view's raises LockTimeout, after the timeout."""
    locked = distributed_lock(key, timeout=0.3)(key_now)
    with (
        hold_elsewhere(key, note="why"),
        takes(0.3, 0.3 + SLACK),
        pytest.raises(LockTimeout) as caught,
    ):
        locked()
    assert (caught.value.key, caught.value.note) == (key, "why")


@pytest.mark.parametrize("function", [key_now, akey_now], ids=["sync", "async"])
class TestOnLocked:
    """What happens when the wait ran out."""

    def call(self, locked: Any, *args: Any, **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(locked):
            return async_to_sync(locked)(*args, **kwargs)
        return locked(*args, **kwargs)

    def test_raise(self, key: str, function: Any) -> None:
        """on_locked="raise" raises."""
        locked = distributed_lock(key, timeout=0, on_locked="raise")(function)
        with hold_elsewhere(key), pytest.raises(LockTimeout):
            self.call(locked)

    def test_skip(self, key: str, function: Any) -> None:
        """on_locked="skip" returns None at once without running."""
        locked = distributed_lock(key, on_locked="skip")(function)
        with hold_elsewhere(key), takes(at_most=SLACK):
            assert self.call(locked) is None
        assert self.call(locked) == key

    def test_skip_after_a_wait(self, key: str, function: Any) -> None:
        """With a timeout of its own it waits before it gives up."""
        locked = distributed_lock(key, timeout=0.3, on_locked="skip")(function)
        with hold_elsewhere(key), takes(0.3, 0.3 + SLACK):
            assert self.call(locked) is None

    def test_callable(self, key: str, function: Any) -> None:
        """A callable gets the error and the arguments; its result is returned."""

        def instead(error: LockTimeout, *args: Any, **kwargs: Any) -> Any:
            return error.key, args, kwargs

        lock = distributed_lock(key, timeout=0, on_locked=instead)
        with hold_elsewhere(key):
            got = self.call(lock(aany if function is akey_now else anything), 1, a=2)
        assert got == (key, (1,), {"a": 2})

    def test_callable_that_raises(self, key: str, function: Any) -> None:
        """What it raises comes out."""

        def instead(error: LockTimeout) -> None:
            raise ZeroDivisionError

        locked = distributed_lock(key, timeout=0, on_locked=instead)(function)
        with hold_elsewhere(key), pytest.raises(ZeroDivisionError):
            self.call(locked)


def anything(*args: Any, **kwargs: Any) -> str:
    """Take anything."""
    return key_now()


async def aany(*args: Any, **kwargs: Any) -> str:
    """Take anything."""
    return key_now()


def test_async_callable_of_an_async_function(key: str) -> None:
    """An async function's callable may be async."""

    async def instead(error: LockTimeout) -> str:
        await asyncio.sleep(0)
        return "instead"

    locked = distributed_lock(key, timeout=0, on_locked=instead)(akey_now)
    with hold_elsewhere(key):
        assert async_to_sync(locked)() == "instead"


def test_callable_of_an_async_function_that_queries(key: str) -> None:
    """A plain one runs where it may query the database."""

    def holder(error: LockTimeout) -> str:
        return DistributedLock.objects.get(pk=error.key).owner

    locked = distributed_lock(key, timeout=0, on_locked=holder)(akey_now)
    with hold_elsewhere(key):
        assert async_to_sync(locked)() == DistributedLock.objects.get(pk=key).owner


def test_async_callable_of_a_sync_function(key: str) -> None:
    """Of a sync function it may not: its call would return a coroutine."""

    async def instead(error: LockTimeout) -> None:
        raise AssertionError

    for on_locked in (instead, partial(instead)):
        locked = distributed_lock(key, on_locked=on_locked)(key_now)
        with pytest.raises(TypeError, match=r"on_locked=.* is async, and key_now is"):
            locked()


@pytest.mark.parametrize("error", [PermissionDenied, KeyboardInterrupt])
def test_exception_as_the_callable(error: type[BaseException]) -> None:
    """A call would return an exception's instance; whoever names one means to raise."""
    with pytest.raises(TypeError, match=r"on_locked=.*'.* raises it"):
        distributed_lock("k", on_locked=error)


def enter(lock: Lock) -> None:
    """Take a lock in the block form."""
    with lock:
        raise AssertionError


async def aenter(lock: Lock) -> None:
    """Take a lock in the async block form."""
    async with lock:
        raise AssertionError


OUTSIDE = {
    "with": enter,
    "async with": async_to_sync(aenter),
    "acquire": Lock.acquire,
    "try_acquire": Lock.try_acquire,
    "aacquire": async_to_sync(Lock.aacquire),
    "atry_acquire": async_to_sync(Lock.atry_acquire),
}


@pytest.mark.parametrize("take", OUTSIDE.values(), ids=OUTSIDE)
@pytest.mark.parametrize("on_locked", ["raise", "skip", print], ids=str)
@pytest.mark.parametrize("taken", [True, False], ids=["taken", "free"])
def test_on_locked_outside_of_the_decorator_form(
    key: str, take: Any, on_locked: Any, taken: bool
) -> None:
    """Whoever enters a lock deals with its timeout: on_locked is refused there."""
    with ExitStack() as stack:
        if taken:
            stack.enter_context(hold_elsewhere(key))
        with pytest.raises(TypeError, match="on_locked is for the decorator form") as e:
            take(distributed_lock(key, timeout=0, on_locked=on_locked))
    assert repr(on_locked) in str(e.value)
    assert not distributed_lock(key).locked()


TEMPLATES = [
    "order:{order_id}",
    "{order_id}",
    "user:{request.user.pk}",
    "line:{lines[0]}",
    "day:{day:%Y}",
    "name:{name!r}",
]
LITERALS = ["order:7", "{}", "{0}", "a}{b", "{{order_id}}", '{"order": 7}', "{a b}"]


def enter_and_leave(lock: Any) -> None:
    """Take and give back a lock in the block form."""
    with lock:
        pass


async def aenter_and_leave(lock: Lock) -> None:
    """Take and give back a lock in the async block form."""
    async with lock:
        pass


TAKEN = OUTSIDE | {
    "with": enter_and_leave,
    "async with": async_to_sync(aenter_and_leave),
}


def take_and_give_back(take: Any, lock: Lock) -> None:
    lease = take(lock)
    if lease is not None:
        lease.release()


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("template", TEMPLATES)
def test_template_outside_of_the_decorator_form(take: Any, template: str) -> None:
    """A key that looks like a template would be one lock for all: a warning says so."""
    with pytest.warns(RuntimeWarning, match="taken literally") as caught:
        take_and_give_back(take, distributed_lock(template))
    (warning,) = caught
    assert repr(template) in str(warning.message)
    assert not warning.filename.startswith(str(ROOT / "dblocks"))


@pytest.mark.parametrize("form", ["with", "acquire", "try_acquire"])
def test_warning_names_the_callers_line(form: str) -> None:
    """It stands neither in dblocks nor in what Django puts around a method."""
    with pytest.warns(RuntimeWarning, match="taken literally") as caught:
        take_and_give_back(TAKEN[form], distributed_lock("order:{order_id}"))
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize("template", TEMPLATES)
def test_template_of_a_row_lock(template: str) -> None:
    """The pessimistic form says so too."""
    with pytest.warns(RuntimeWarning, match="taken literally") as caught:
        enter_and_leave(transaction_lock(template))
    assert [one.filename for one in caught] == [__file__]


@pytest.mark.parametrize("take", TAKEN.values(), ids=TAKEN)
@pytest.mark.parametrize("literal", LITERALS)
def test_literal_key_with_braces(take: Any, literal: str) -> None:
    """Braces that are no named field are nobody's mistake."""
    take_and_give_back(take, distributed_lock(literal))
    enter_and_leave(transaction_lock(literal))


@pytest.mark.parametrize("form", [distributed_lock, transaction_lock])
def test_argument_that_looks_like_a_template(form: Any) -> None:
    """What a call's arguments make of a template is no template."""
    assert form("order:{number}")(lambda number: number)("{pk}") == "{pk}"


@pytest.mark.parametrize("take", OUTSIDE.values(), ids=OUTSIDE)
def test_callable_note_outside_of_the_decorator_form(key: str, take: Any) -> None:
    """Without a call there are no arguments that a note could be made from."""
    with pytest.raises(TypeError, match=r"note=.* is a callable"):
        take(distributed_lock(key, note=lambda: "why"))
    assert not distributed_lock(key).locked()


# atomic=True


def test_atomic(key: str) -> None:
    """The body runs in a transaction that is committed under the lock."""
    seen: list[bool] = []

    @distributed_lock(key, atomic=True)
    def job() -> None:
        AccountFactory(name="mine")
        transaction.on_commit(lambda: seen.append(distributed_lock(key).locked()))
        assert connection.in_atomic_block

    job()
    assert seen == [True]
    assert Account.objects.filter(name="mine").exists()
    assert not distributed_lock(key).locked()


def test_atomic_and_lost(key: str) -> None:
    """A function that lost its lock can't commit."""

    @distributed_lock(key, atomic=True, renew=False)
    def job() -> None:
        AccountFactory(name="mine")
        DistributedLock.objects.force_release(key)

    with pytest.raises(LeaseLost):
        job()
    assert not Account.objects.filter(name="mine").exists()


def test_atomic_on_an_async_function() -> None:
    """Django has no async transactions: TypeError when decorated."""
    with pytest.raises(TypeError, match="atomic"):
        distributed_lock("k", atomic=True)(akey_now)


# Tasks and commands


def test_command(key: str) -> None:
    """A management command's handle() runs under its lock."""
    number = next(NUMBERS)
    with hold_elsewhere(f"decorated:{number}"), pytest.raises(LockTimeout):
        call_command(decorated.Command(), number)
    assert call_command(decorated.Command(), number) == "handled"


class ByMethodDecorator(decorated.Command):
    """A command that is decorated as a class."""

    @method_decorator(distributed_lock("decorated:{options[number]}", timeout=0))
    def handle(self, *args: Any, **options: Any) -> str:
        return "handled"


class ByTransaction(decorated.Command):
    """A command in a transaction."""

    @transaction_lock("decorated:{options[number]}", nowait=True)
    def handle(self, *args: Any, **options: Any) -> str:
        return "handled"


@pytest.mark.parametrize(
    "command", [decorated.Command, ByMethodDecorator, ByTransaction]
)
def test_command_that_is_locked_out(
    command: type[BaseCommand], capsys: pytest.CaptureFixture[str]
) -> None:
    """A command ends with one line and status 75, and its caller with a LockTimeout."""
    number = next(NUMBERS)
    with hold_elsewhere(f"decorated:{number}", note="by hand") as theirs:
        with pytest.raises(LockTimeout) as caught:
            call_command(command(), number)
        with pytest.raises(SystemExit) as ended:
            command().run_from_argv(["manage.py", "decorated", str(number)])
    error = caught.value
    assert isinstance(error, CommandError)
    assert (error.key, error.note, error.timeout) == (theirs.key, "by hand", 0)
    assert error.retry_after > 0
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), vars(again), str(again)) == (
        *(type(error), vars(error), str(error)),
    )
    assert ended.value.code == 75
    (line,) = capsys.readouterr().err.splitlines()
    assert f"The lock '{theirs.key}' was not free" in line
    assert call_command(command(), number) == "handled"


def test_function_that_a_command_calls() -> None:
    """The error of any other function is its own."""
    number = next(NUMBERS)
    with hold_elsewhere(f"decorated:{number}"), pytest.raises(LockTimeout) as caught:
        decorated.by_callable(number)
    assert type(caught.value) is LockTimeout


def test_celery_task() -> None:
    """A Celery task, run eagerly or called, holds its lock."""
    number = next(NUMBERS)
    first = decorated.count.delay(number).get()
    assert decorated.count(number) > first
    with hold_elsewhere(f"decorated:{number}"), pytest.raises(LockTimeout):
        decorated.count.delay(number)


def test_celery_task_within_another() -> None:
    """A task that runs another one eagerly re-enters the lock."""
    outer, inner = decorated.nested.delay(next(NUMBERS)).get()
    assert outer == inner


def test_bound_celery_task() -> None:
    """A task that gets itself keeps its name; skipped, it returns None."""
    number = next(NUMBERS)
    assert decorated.bound.delay(number).get() == "tests.support.decorated.bound"
    with hold_elsewhere(f"decorated:{number}"):
        assert decorated.bound.delay(number).get() is None


@pytest.mark.skipif(django.VERSION < (6, 0), reason="Django's tasks came with 6.0")
class TestDjangoTasks:
    """Functions that are tasks of Django's own, run by its immediate backend."""

    @pytest.mark.parametrize("name", ["count", "in_context", "acount"])
    def test_task(self, name: str) -> None:
        """A task holds its lock; locked out, it fails with LockTimeout."""
        from tests.support import django_tasks

        task = getattr(django_tasks, name)
        number = next(NUMBERS)
        assert task.enqueue(number).return_value >= 1
        with hold_elsewhere(f"decorated:{number}"):
            result = task.enqueue(number)
        assert [error.exception_class for error in result.errors] == [LockTimeout]

    def test_decorator_above(self) -> None:
        """The lock above the task's decorator would make it a mere function."""
        from tests.support import django_tasks

        with pytest.raises(TypeError, match="below"):
            distributed_lock("k")(django_tasks.count)


# Nothing is left behind


def test_nothing_is_left(key: str) -> None:
    """Calls leave no warnings and no current lease."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ExitStack() as stack:
            stack.enter_context(hold_elsewhere(key + "!"))
            for _ in range(3):
                assert distributed_lock(key)(key_now)() == key
                with pytest.raises(LockTimeout):
                    distributed_lock(key + "!", timeout=0)(key_now)()
    with pytest.raises(LookupError):
        dblocks.current_lease()


def test_annotations_for_type_checkers_alone() -> None:
    """Annotations that can't be evaluated don't matter."""
    future = "" if sys.version_info >= (3, 14) else "from __future__ import annotations"
    names: dict[str, Any] = {}
    exec(f"{future}\ndef pay(order_id: Unknown) -> Missing: return order_id", names)
    locked = distributed_lock("order:{order_id}")(names["pay"])
    assert locked(7) == 7
