"""What OpenTelemetry is told of locks, as its SDK sees it."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db import connection
from django.test import override_settings
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import dblocks
from dblocks import (
    Lease,
    LeaseLost,
    Lock,
    LockTimeout,
    distributed_lock,
    signals,
    telemetry,
)
from dblocks.conf import backends
from dblocks.models import DistributedLock
from dblocks.test import hold_elsewhere
from dblocks.waiting.queue import queues
from tests.support.fixtures import OtherThread
from tests.support.pages import DOCS, files
from tests.support.processes import run_python
from tests.support.reentrant import AtLine
from tests.support.timing import DEADLINE, SLACK, eventually, scaled, starved
from tests.test_ownership import in_forked_child

Locks = Callable[..., Lock]
Leases = Callable[..., Lease]


def amount(point: Any) -> float:
    """How often, of a histogram; else how much."""
    value: float = point.value if hasattr(point, "value") else point.count
    return value


class Seen:
    """What came out at the other end of the SDK."""

    def __init__(self) -> None:
        self.reader = InMemoryMetricReader()
        self.spans = InMemorySpanExporter()
        self.meters = MeterProvider([self.reader], shutdown_on_exit=False)
        self.tracers = TracerProvider(shutdown_on_exit=False)
        self.tracers.add_span_processor(SimpleSpanProcessor(self.spans))
        self.tracer = self.tracers.get_tracer("tests")

    def metrics(self) -> dict[str, Any]:
        data = self.reader.get_metrics_data()
        return {
            metric.name: metric
            for resource in (data.resource_metrics if data else [])
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def points(self, name: str) -> list[Any]:
        """Return the points of an instrument that something has come to."""
        metric = self.metrics().get(name)
        return [p for p in (metric.data.data_points if metric else []) if amount(p)]

    def count(self, name: str, **attributes: str) -> float:
        """Add up an instrument's points, or those that have these attributes."""
        wanted = {k.replace("__", "."): v for k, v in attributes.items()}.items()
        return sum(
            amount(point)
            for point in self.points(name)
            if wanted <= dict(point.attributes).items()
        )

    def labels(self, name: str = "dblocks.acquired") -> set[str | None]:
        return {p.attributes.get("dblocks.lock") for p in self.points(name)}

    def waits(self) -> tuple[ReadableSpan, ...]:
        return tuple(s for s in self.spans.get_finished_spans() if "dbl" in s.name)


@pytest.fixture
def seen() -> Iterator[Seen]:
    """Report to providers of the test's own."""
    seen = Seen()
    telemetry.instrument(meter_provider=seen.meters, tracer_provider=seen.tracers)
    yield seen
    telemetry.uninstrument()
    seen.meters.shutdown()
    seen.tracers.shutdown()


def system(backend: str) -> str | None:
    """What the semantic conventions call an engine's server."""
    if backend != "default":
        return {"locmem": None, "zookeeper": "zookeeper"}.get(backend, "redis")
    if connection.vendor == "mysql" and connection.mysql_is_mariadb:
        return "mariadb"
    return connection.vendor


def test_grant_and_release(lock: Locks, seen: Seen, backend: str) -> None:
    """A lock is counted, its wait and its hold are timed, and it is held meanwhile."""
    with lock():
        assert seen.count("dblocks.held") == 1
        assert seen.count("dblocks.acquired") == 1
        assert seen.count("dblocks.wait.duration", outcome="acquired") == 1
        assert not seen.points("dblocks.hold.duration")
    assert seen.count("dblocks.held") == 0
    assert seen.count("dblocks.hold.duration", outcome="released") == 1
    for name in ("wait", "hold"):
        metric = seen.metrics()[f"dblocks.{name}.duration"]
        assert metric.unit == "s"
        (point,) = metric.data.data_points
        assert 0 <= point.sum < SLACK
        assert (point.explicit_bounds[0], point.explicit_bounds[-1]) == (0.001, 3600)
        attributes = dict(point.attributes)
        del attributes["outcome"]
        named = {"dblocks.backend": backend, "db.system.name": system(backend)}
        assert attributes == {k: v for k, v in named.items() if v is not None}


def test_re_entering_is_no_grant(lock: Locks, seen: Seen) -> None:
    """The outermost acquisition counts, and lasts until the last release."""
    with lock():
        with lock():
            assert seen.count("dblocks.held") == 1
        assert not seen.points("dblocks.hold.duration")
        assert seen.count("dblocks.held") == 1
    assert seen.count("dblocks.acquired") == 1
    assert seen.count("dblocks.wait.duration") == 1
    assert seen.count("dblocks.hold.duration") == 1


def test_released_in_another_thread(
    acquire: Leases, other: OtherThread, seen: Seen
) -> None:
    """Who releases makes no difference."""
    lease = acquire()
    assert other.do(lease.release)
    assert seen.count("dblocks.held") == 0
    assert seen.count("dblocks.hold.duration", outcome="released") == 1


def test_forgotten_lease(lock: Locks, seen: Seen) -> None:
    """A lease that nothing refers to is held by nobody."""
    lease = lock().acquire()
    assert seen.count("dblocks.held") == 1
    with pytest.warns(ResourceWarning, match="dropped"):
        del lease
    assert seen.count("dblocks.held") == 0


@pytest.mark.engine("locmem")
def test_forked_child_holds_nothing(acquire: Leases, seen: Seen) -> None:
    """What a child inherits it doesn't hold."""
    lease = acquire()

    def counts() -> Any:
        return seen.count("dblocks.held"), seen.count("dblocks.wait.duration")

    # The parent will report the wait.
    assert in_forked_child(counts) == [0, 0]
    assert seen.count("dblocks.held") == 1
    assert lease.release()


@pytest.mark.needs("has_own_leases")
def test_lost(acquire: Leases, seen: Seen) -> None:
    """A loss is counted by its reason, ends the hold, and isn't released as well."""
    lease = acquire(lease=scaled(0.4), renew=False)
    eventually(lambda: seen.points("dblocks.lost"), what="the loss")
    assert seen.count("dblocks.lost", reason="expired") == 1
    assert seen.count("dblocks.hold.duration", outcome="lost") == 1
    assert not lease.release()
    assert seen.count("dblocks.hold.duration") == 1
    assert seen.count("dblocks.held") == 0


def test_forced(acquire: Leases, seen: Seen, backend: str, key: str) -> None:
    """A force release is counted once for the operator, and once for the holder."""
    lease = acquire(lease=600)
    assert backends[backend].force_release(key)
    assert seen.count("dblocks.force_released", dblocks__backend=backend) == 1
    assert not lease.release()
    eventually(lambda: seen.points("dblocks.lost"), what="the loss")
    assert seen.count("dblocks.lost", reason="forced") == 1


@pytest.mark.engine("locmem")
def test_forced_on_another_engine(acquire: Leases, seen: Seen, key: str) -> None:
    """An engine's own force release is counted for it."""
    lease = acquire(lease=600)
    assert backends["locmem"].force_release(key)
    assert seen.count("dblocks.force_released", dblocks__backend="locmem") == 1
    assert not lease.release()


def test_timeout(lock: Locks, backend: str, key: str, seen: Seen) -> None:
    """A wait that ran out is counted, timed, and a span of that length."""
    with hold_elsewhere(key, backend=backend):
        with pytest.raises(LockTimeout):
            lock().acquire(timeout=0.3)
        assert seen.count("dblocks.timeouts") == 1
        assert seen.count("dblocks.wait.duration", outcome="timeout") == 1
        (span,) = seen.waits()
        assert span.attributes is not None
        assert span.attributes["outcome"] == "timeout"
        assert seen.count("dblocks.acquired") == 1


def test_try_is_no_wait(lock: Locks, backend: str, key: str, seen: Seen) -> None:
    """What doesn't wait has no span, granted or not."""
    with hold_elsewhere(key, backend=backend):
        assert lock().try_acquire() is None
    with lock():
        pass
    assert seen.count("dblocks.timeouts") == 1
    assert not seen.waits()


def length(span: ReadableSpan) -> float:
    assert span.end_time is not None
    assert span.start_time is not None
    return (span.end_time - span.start_time) / 1_000_000_000


@pytest.fixture
def release_later(other: OtherThread, key: str, backend: str) -> Callable[..., Any]:
    """Let the other thread release a lease so long after the last one began to wait."""

    def release(held: Lease, seconds: float, waiters: int) -> bool:
        def are_there() -> bool:
            queue = queues.find(backends[backend], key)
            return queue is not None and len(queue.waiters) == waiters

        eventually(are_there, what="the wait")
        time.sleep(seconds)
        return held.release()

    def start(held: Lease, seconds: float, waiters: int = 1) -> Any:
        return other.start(release, held, seconds, waiters)

    return start


def test_span_of_a_wait(
    lock: Locks, other: OtherThread, seen: Seen, release_later: Callable[..., Any]
) -> None:
    """A wait is a span below the caller's, from the first request to the grant."""
    held = other.do(lock().acquire)
    before = starved()
    with seen.tracer.start_as_current_span("request") as request:
        releasing = release_later(held, 0.3)
        with lock(timeout=DEADLINE):
            pass
    without_processor = max(0.0, starved() - before)
    assert releasing.result(DEADLINE) is True
    (span,) = seen.waits()
    assert span.name == "dblocks.acquire"
    assert span.parent == request.get_span_context()
    assert 0.25 < length(span) < 0.3 + SLACK + without_processor
    assert span.attributes is not None
    assert span.attributes["outcome"] == "acquired"


@pytest.mark.engine("locmem")
def test_spans_alone(
    lock: Locks, other: OtherThread, seen: Seen, release_later: Callable[..., Any]
) -> None:
    """Waits are spans where only traces have a provider."""
    telemetry.instrument(tracer_provider=seen.tracers)
    held = other.do(lock().acquire)
    releasing = release_later(held, 0)
    with lock(timeout=DEADLINE):
        pass
    assert releasing.result(DEADLINE) is True
    assert len(seen.waits()) == 1


@pytest.mark.engine("locmem")
def test_reports_go_in_batches(lock: Locks, seen: Seen) -> None:
    """What nobody collects doesn't pile up; collected, everything is there."""
    observer: Any = signals.observer
    most = 0
    for _ in range(2 * telemetry.BATCH):
        with lock():
            most = max(most, len(observer._due))
    assert 0 < most < telemetry.BATCH
    with lock():
        pass
    assert seen.count("dblocks.hold.duration") == 2 * telemetry.BATCH + 1


def hear(**said: Any) -> None:
    """Receive a signal, as a project may."""


@pytest.mark.parametrize("receivers", [[], [hear]], ids=["alone", "with receivers"])
def test_span_of_an_async_wait(
    lock: Locks,
    other: OtherThread,
    seen: Seen,
    receivers: list[Any],
    release_later: Callable[..., Any],
) -> None:
    """An async wait is below its own task's span, also where signals are received."""

    async def wait(name: str) -> Any:
        with seen.tracer.start_as_current_span(name) as mine:
            async with lock(timeout=DEADLINE):
                return mine.get_span_context().span_id

    async def both() -> list[Any]:
        return await asyncio.gather(wait("one"), wait("two"))

    held = other.do(lock().acquire)
    for receiver in receivers:
        signals.lock_acquired.connect(receiver)
    try:
        releasing = release_later(held, 0.2, waiters=2)
        parents = async_to_sync(both)()
        assert releasing.result(DEADLINE) is True
    finally:
        for receiver in receivers:
            signals.lock_acquired.disconnect(receiver)
    spans = sorted(seen.waits(), key=length)
    assert {span.parent.span_id for span in spans if span.parent} == set(parents)
    assert length(spans[0]) > 0.15
    assert seen.count("dblocks.acquired") == 3


def test_async_grant(lock: Locks, seen: Seen, backend: str) -> None:
    """An event loop, which has no connection of its own, knows the server too."""

    async def take() -> None:
        async with lock():
            assert seen.count("dblocks.held") == 1

    async_to_sync(take)()
    (point,) = seen.points("dblocks.acquired")
    assert point.attributes.get("db.system.name") == system(backend)


def test_templates(seen: Seen, backend: str, key: str) -> None:
    """A decorated lock has its template for a name, whatever the key."""
    first, second = f"{key}:{{one}}", f"{key}:b:{{two}}"

    @distributed_lock(first, backend=backend)
    def plain(one: int) -> None:
        assert seen.labels("dblocks.held") == {first}

    @distributed_lock(first, second, backend=backend)
    def both(one: int, two: int) -> None:
        assert seen.labels("dblocks.held") == {first, second}

    @distributed_lock(lambda one: f"{key}:{one}", backend=backend)
    def called(one: int) -> None:
        assert seen.labels("dblocks.held") == {None}

    @distributed_lock(f"{key}:{{one}}:async", backend=backend)
    async def later(one: int) -> None:
        pass

    plain(1)
    plain(2)
    both(3, 4)
    assert seen.labels() == {first, second}
    called(5)
    async_to_sync(later)(6)
    assert seen.count("dblocks.acquired", dblocks__lock=first) == 3
    names = {first, second, f"{key}:{{one}}:async", None}
    for instrument in ("acquired", "wait.duration", "hold.duration"):
        assert seen.labels(f"dblocks.{instrument}") == names


@pytest.mark.needs("has_own_leases")
def test_template_of_what_goes_wrong(seen: Seen, backend: str, key: str) -> None:
    """Timeouts and losses have the template too."""
    template = f"{key}{{end}}"

    @distributed_lock(template, backend=backend, timeout=0, on_locked="skip")
    def skipped(end: str) -> None:
        pytest.fail("it ran")

    @distributed_lock(template, backend=backend, lease=scaled(0.3), renew=False)
    def slow(end: str) -> None:
        eventually(lambda: seen.points("dblocks.lost"), what="the loss")

    with hold_elsewhere(key, backend=backend):
        skipped("")
    with suppress(Exception):
        slow("")
    assert seen.labels("dblocks.timeouts") == {template}
    assert seen.labels("dblocks.lost") == {template}


@pytest.mark.engine("locmem")
@pytest.mark.parametrize(
    ("allowed", "is_named"),
    [
        (True, True),
        (False, False),
        ([], False),
        (["nothing", "test:*"], True),
        (("TEST:*",), False),
    ],
)
def test_keys_are_named_where_that_is_allowed(
    allowed: Any, is_named: bool, lock: Locks, seen: Seen, key: str
) -> None:
    """A literal key is told only if the setting says so: exactly, or by a pattern."""
    with override_settings(DBLOCKS_TELEMETRY_KEYS=allowed), lock():
        pass
    assert seen.labels() == {key if is_named else None}
    # The setting as it was counts again, and nothing that was counted is lost.
    with lock("another"):
        pass
    assert seen.count("dblocks.acquired") == 2
    assert "another" not in seen.labels()


def test_forced_under_settings_of_that_moment(
    acquire: Leases, seen: Seen, backend: str, key: str
) -> None:
    """A force release is named as the setting was then, not at its report."""
    with override_settings(DBLOCKS_TELEMETRY_KEYS=True):
        lease = acquire(key)
        assert backends[backend].force_release(key)
    assert seen.count("dblocks.force_released", dblocks__lock=key) == 1
    lease.release()


@pytest.mark.parametrize("wrong", ["nightly-*", 7, [7], None])
def test_setting_that_is_wrong(wrong: Any) -> None:
    """What can't be meant is refused when telemetry is switched on."""
    with (
        override_settings(DBLOCKS_TELEMETRY_KEYS=wrong),
        pytest.raises(ImproperlyConfigured, match="DBLOCKS_TELEMETRY_KEYS"),
    ):
        telemetry.instrument()
    assert signals.observer is None


@pytest.mark.engine("locmem")
def test_names_are_limited(
    lock: Locks, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys without number are counted together after the first ones."""
    monkeypatch.setattr(telemetry, "MOST_NAMED", 2)
    with override_settings(DBLOCKS_TELEMETRY_KEYS=True):
        for number in range(5):
            with lock(f"many:{number}"):
                pass
    assert seen.labels() == {"many:0", "many:1", None}
    assert seen.count("dblocks.acquired") == 5


@pytest.mark.engine("locmem")
def test_switched_on_twice_and_off(lock: Locks, seen: Seen) -> None:
    """Switching on again changes nothing; switched off, nothing is reported."""
    telemetry.instrument(meter_provider=seen.meters, tracer_provider=seen.tracers)
    with lock():
        assert seen.count("dblocks.held") == 1
    assert seen.count("dblocks.acquired") == 1
    telemetry.uninstrument()
    with lock():
        assert seen.count("dblocks.held") == 0
    assert seen.count("dblocks.hold.duration") == 1
    telemetry.instrument(meter_provider=seen.meters, tracer_provider=seen.tracers)
    with lock():
        pass
    assert seen.count("dblocks.acquired") == 2


@pytest.mark.engine("locmem")
def test_other_providers_take_over(lock: Locks, seen: Seen) -> None:
    """Switched on with other providers, it reports to those alone."""
    second = Seen()
    telemetry.instrument(meter_provider=second.meters, tracer_provider=second.tracers)
    with lock():
        assert second.count("dblocks.held") == 1
        assert not seen.points("dblocks.held")
    assert second.count("dblocks.acquired") == 1
    assert not seen.points("dblocks.acquired")


@pytest.mark.engine("locmem")
def test_providers_come_back(lock: Locks, seen: Seen) -> None:
    """Switched on with providers that it had before, it goes on with them."""
    second = Seen()
    telemetry.instrument(meter_provider=second.meters)
    telemetry.instrument(meter_provider=seen.meters, tracer_provider=second.tracers)
    with lock():
        assert seen.count("dblocks.held") == 1
    assert seen.count("dblocks.acquired") == 1


@pytest.mark.engine("locmem")
@pytest.mark.parametrize("given", [True, False])
def test_global_provider_by_either_name(
    lock: Locks, seen: Seen, monkeypatch: pytest.MonkeyPatch, *, given: bool
) -> None:
    """The provider that is given, and then the global one, or the reverse, is one."""
    second = Seen()
    names = [second.meters, None] if given else [None, second.meters]
    monkeypatch.setattr(telemetry, "_made", {})
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: second.meters)
    monkeypatch.setattr(metrics._internal, "get_meter_provider", lambda: second.meters)
    for name in names:
        telemetry.instrument(meter_provider=name)
        with lock():
            assert second.count("dblocks.held") == 1
    assert second.count("dblocks.acquired") == 2


def test_forced_after_other_providers(
    acquire: Leases, seen: Seen, backend: str, key: str
) -> None:
    """What others do to a lock, and settings, are for the new ones as well."""
    second = Seen()
    with override_settings(DBLOCKS_TELEMETRY_KEYS=[]):
        telemetry.instrument(meter_provider=second.meters)
        acquire()
    with override_settings(DBLOCKS_TELEMETRY_KEYS=["*"]):
        assert backends[backend].force_release(key)
    assert second.labels("dblocks.force_released") == {key}
    assert not seen.points("dblocks.force_released")


class Broken(SpanProcessor):
    """An exporter that fails."""

    def on_end(self, span: ReadableSpan) -> None:
        raise RuntimeError("a broken exporter")


def test_what_fails_is_logged(
    lock: Locks,
    backend: str,
    key: str,
    seen: Seen,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An exporter's error reaches the log, and not who wants a lock."""
    seen.tracers.add_span_processor(Broken())
    with hold_elsewhere(key, backend=backend), pytest.raises(LockTimeout):
        lock().acquire(timeout=0.1)
    with lock() as lease:
        assert lease.held
    assert "telemetry failed" in caplog.text
    assert "a broken exporter" in caplog.text
    assert seen.count("dblocks.acquired") == 2


class Reentered(SpanProcessor):
    """Code that comes in the middle of a report, as a signal handler may."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.mutex = threading.Lock()
        self.action = action
        self.calls = 0

    def on_end(self, span: ReadableSpan) -> None:
        # An SDK's mutexes are not re-entrant.
        assert not self.mutex.locked()
        with self.mutex:
            self.calls += 1
            if self.calls == 1:
                self.action()


@pytest.mark.engine("locmem")
def test_lock_in_the_middle_of_a_report(
    lock: Locks, key: str, seen: Seen, caplog: pytest.LogCaptureFixture
) -> None:
    """What a report is interrupted for is reported after it."""

    def give_up() -> None:
        assert lock().try_acquire(timeout=0.05) is None

    reentered = Reentered(give_up)
    seen.tracers.add_span_processor(reentered)
    with hold_elsewhere(key, backend="locmem"):
        give_up()
    assert reentered.calls == 2
    assert seen.count("dblocks.timeouts") == 2
    # Another test's loss may only be told now.
    assert [line for line in caplog.messages if not line.startswith("lost ")] == []


def test_app_on_the_page() -> None:
    """The app that the documentation shows switches telemetry on."""
    names: dict[str, Any] = {"__name__": "shop.apps"}
    exec(files("observability.md")["shop/apps.py"], names)
    try:
        names["ShopConfig"]("shop", dblocks).ready()
        assert signals.observer is not None
    finally:
        telemetry.uninstrument()
    assert signals.observer is None


def prometheus(metric: Any) -> set[str]:
    """Return the names that Prometheus gives a metric that comes by OTLP."""
    data = metric.data
    name = metric.name.replace(".", "_") + ("_seconds" if metric.unit == "s" else "")
    if hasattr(data.data_points[0], "bucket_counts"):
        return {f"{name}_{part}" for part in ("bucket", "count", "sum")}
    return {f"{name}_total" if data.is_monotonic else name}


def test_dashboard_asks_for_what_there_is(
    lock: Locks,
    acquire: Leases,
    other: OtherThread,
    backend: str,
    key: str,
    seen: Seen,
) -> None:
    """The dashboard has every metric that is reported, by name, and no other."""
    lease = acquire(lease=600)
    assert other.do(lock().try_acquire) is None
    assert backends[backend].force_release(key)
    with pytest.raises(LeaseLost):
        lease.renew()
    eventually(lambda: seen.points("dblocks.lost"), what="the loss")
    metrics = [prometheus(metric) for metric in seen.metrics().values()]
    labels = {"dblocks_lock", "dblocks_backend"}

    board = json.loads((DOCS / "dashboards" / "dblocks.json").read_text())
    asked = "".join(
        target["expr"] for panel in board["panels"] for target in panel["targets"]
    ) + "".join(each.get("definition", "") for each in board["templating"]["list"])
    names = set(re.findall(r"dblocks_\w+", asked)) - labels
    assert names <= set().union(*metrics)
    assert [metric for metric in metrics if not metric & names] == []
    assert set(re.findall(r"by \((\w+)\)", asked)) <= {*labels, "le", "reason"}


@pytest.mark.engine("locmem")
def test_lock_at_any_line(lock: Locks, seen: Seen) -> None:
    """Whatever comes in the middle of a lock, both are counted once."""

    def interrupt() -> None:
        with lock("inner"):
            pass

    tracing = sys.gettrace()
    number, was_interrupted = 0, True
    try:
        while was_interrupted:
            number += 1
            with AtLine(number, interrupt) as at, lock():
                pass
            was_interrupted = at.lines >= number
    finally:
        sys.settrace(tracing)
    assert number > 50
    for name in ("acquired", "wait.duration", "hold.duration"):
        assert seen.count(f"dblocks.{name}") == 2 * number - 1
    assert seen.count("dblocks.held") == 0


@pytest.mark.engine("locmem")
def test_examples_lead_to_their_trace(lock: Locks, seen: Seen) -> None:
    """A measurement's exemplar is of the span in which it was made."""
    with seen.tracer.start_as_current_span("request") as request, lock():
        pass
    with seen.tracer.start_as_current_span("another"):
        metrics = seen.metrics()
    for name in ("wait", "hold"):
        (point,) = metrics[f"dblocks.{name}.duration"].data.data_points
        (exemplar,) = point.exemplars
        assert exemplar.span_id == request.get_span_context().span_id


PROGRAM = """
import sys

import django
from django.conf import settings

settings.configure(
    INSTALLED_APPS=["dblocks"],
    DBLOCKS={{"default": {{"BACKEND": "dblocks.backends.locmem.LocMemBackend"}}}},
)
django.setup()
from dblocks import distributed_lock

with distributed_lock("a"):
    pass
assert not [name for name in sys.modules if name.startswith("opentelemetry")]

{then}
"""

LATE = """
from dblocks import telemetry

telemetry.instrument()
held = distributed_lock("a").acquire()

from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

reader = InMemoryMetricReader()
metrics.set_meter_provider(MeterProvider([reader]))
held.release()
with distributed_lock("b"):
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    found = {m.name: m.data.data_points[0] for m in scope.metrics}
print(scope.scope.name, found["dblocks.held"].value, found["dblocks.acquired"].value)
print(found["dblocks.hold.duration"].count)
"""


def run(then: str) -> tuple[str, str]:
    """Take a lock in a process of its own, then go on; its output and errors."""
    done = run_python("-c", PROGRAM.format(then=then), timeout=60)
    return done.stdout, done.stderr


@pytest.mark.engine("locmem")
def test_provider_that_comes_later(backend: str) -> None:
    """The global provider may be set after instrument(); before, nothing is done."""
    out, err = run(LATE)
    assert err == ""
    assert out == "dblocks 1 1\n1\n"


@pytest.mark.engine("locmem")
def test_missing_package(backend: str) -> None:
    """Without the API's package the error names the extra; locks don't need it."""
    out, err = run('sys.modules["opentelemetry"] = None\nimport dblocks.telemetry')
    assert out == ""
    assert 'pip install "django-dblocks[opentelemetry]"' in err


@pytest.mark.engine("locmem")
def test_attributes_that_cant_be_told(
    lock: Locks, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """What fails while a lock is described is logged, and the lock is had."""

    def fail(*arguments: Any) -> Any:
        raise ValueError("no attributes")

    monkeypatch.setattr(type(signals.observer), "_of", fail)
    with lock() as lease:
        assert lease.held
    assert "telemetry failed" in caplog.messages
    assert seen.count("dblocks.acquired") == 0


@pytest.mark.needs("has_table")
@pytest.mark.skipif("locks" not in settings.DATABASES, reason="no second database")
@pytest.mark.usefixtures("committed")
def test_forced_in_a_database_without_an_alias(key: str, seen: Seen) -> None:
    """A force release is counted where no entry of DBLOCKS has the database, too."""
    rows = DistributedLock.objects.using("locks")
    assert rows.acquire(key, owner="somebody", lease=60) is not None
    try:
        assert rows.force_release(key)
    finally:
        rows.filter(pk=key).delete()
    assert seen.count("dblocks.force_released") == 1
