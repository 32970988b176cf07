"""Tells OpenTelemetry how long locks are waited for and held, and what goes wrong.

:func:`instrument` switches it on. Needs opentelemetry-api, which comes with
``pip install "django-dblocks[opentelemetry]"``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from django.core.signals import setting_changed

from . import __version__, clock, forks, signals
from .backends.base import BaseBackend
from .conf import backends, telemetry_keys
from .holding.holds import Hold
from .holding.registry import registry
from .waiting.attempt import Attempt

try:
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context, get_current
except ImportError as error:
    raise ImportError(
        f"{error}; dblocks.telemetry needs the package opentelemetry-api: "
        f'pip install "django-dblocks[opentelemetry]"'
    ) from error

__all__ = ["instrument", "uninstrument"]

logger = logging.getLogger("dblocks")

SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0),
)
"""The buckets of both histograms, from 1 ms to 1 h."""

MOST_NAMED = 2000
"""How many locks are told apart at most; any others are reported without a name."""

BATCH = 32
"""How many measurements and spans are reported at a time."""

UID = "dblocks.telemetry"


def instrument(
    *,
    meter_provider: metrics.MeterProvider | None = None,
    tracer_provider: trace.TracerProvider | None = None,
) -> None:
    """Report to OpenTelemetry what the locks of this process do. ::

        class ShopConfig(AppConfig):
            name = "shop"

            def ready(self):
                telemetry.instrument()

    Reports the histograms ``dblocks.wait.duration`` and ``dblocks.hold.duration`` in
    seconds; the counters ``dblocks.acquired``, ``dblocks.timeouts``, ``dblocks.lost``
    and ``dblocks.force_released``; the up-down counter ``dblocks.held``; and a span
    ``dblocks.acquire`` for each lock that was waited for. Re-entries don't count, and
    ``transaction_lock`` isn't seen.

    May be called before a provider is set; without one, nothing is reported. Calling it
    again changes nothing, or switches to other providers. An error while reporting is
    logged and never fails a lock.

    Args:
        meter_provider: Default: the global one.
        tracer_provider: Default: the global one.

    Raises:
        ImproperlyConfigured: The setting ``DBLOCKS_TELEMETRY_KEYS`` can't be used.
    """
    telemetry_keys()
    telemetry = _telemetry_of(meter_provider)
    telemetry.trace_with(tracer_provider)
    # Of two receivers with the same dispatch_uid, Django keeps the first.
    uninstrument()
    signals.observer = telemetry
    signals.lock_force_released.connect(telemetry.force_released, dispatch_uid=UID)
    setting_changed.connect(telemetry.forget, dispatch_uid=UID)


def _telemetry_of(provider: metrics.MeterProvider | None) -> Telemetry:
    """Return a provider's ``Telemetry``, also if the provider has become global."""
    shared = metrics.get_meter_provider()
    names = [shared, None] if provider in (None, shared) else [provider]
    for name in names:
        if name in _made:
            return _made[name]
    return _made.setdefault(names[-1], Telemetry(provider))


def uninstrument() -> None:
    """Stop reporting; the opposite of :func:`instrument`."""
    signals.observer = None
    signals.lock_force_released.disconnect(dispatch_uid=UID)
    setting_changed.disconnect(dispatch_uid=UID)


def _tell_failure() -> None:
    logger.exception("telemetry failed")


class _Attributes:
    """The attributes of one lock's measurements, made once."""

    def __init__(self, label: str | None, backend: BaseBackend) -> None:
        given = {
            "db.system.name": backend.system,
            "dblocks.backend": backend.alias,
            "dblocks.lock": label,
        }
        self.granted = 0
        self.plain = {name: value for name, value in given.items() if value is not None}
        self.acquired = {**self.plain, "outcome": "acquired"}
        self.timeout = {**self.plain, "outcome": "timeout"}
        self.released = {**self.plain, "outcome": "released"}
        self.lost = {**self.plain, "outcome": "lost"}


class _Thread(threading.local):
    #: Whether the thread is in the middle of a report.
    reports = False


class Telemetry:
    """The instruments, and what is reported to them.

    Made once for each provider: the SDK ignores a second observer of the same name.
    """

    def __init__(self, meter_provider: metrics.MeterProvider | None) -> None:
        self._is_metered = False
        self._due: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._mutex = threading.RLock()
        forks.in_child(self._after_fork_in_child)
        self._thread = _Thread()
        self._known: dict[tuple[str | None, BaseBackend], _Attributes] = {}
        self._patterns: tuple[str, ...] | None = None
        meter = metrics.get_meter("dblocks", __version__, meter_provider)
        self._waits = meter.create_histogram(
            "dblocks.wait.duration",
            "s",
            "Time from the first request for a lock to the grant, or to giving up.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._holds = meter.create_histogram(
            "dblocks.hold.duration",
            "s",
            "Time from a grant to its release, or to the news of its loss.",
            explicit_bucket_boundaries_advisory=SECONDS,
        )
        self._timeouts = meter.create_counter(
            "dblocks.timeouts", "{wait}", "Waits that ran out, and tries that failed."
        )
        self._lost = meter.create_counter(
            "dblocks.lost", "{lock}", "Locks that their holder lost."
        )
        self._forced = meter.create_counter(
            "dblocks.force_released", "{lock}", "Locks that an operator has freed."
        )
        # Observed: to add to a counter at each grant costs as much as a histogram.
        meter.create_observable_counter(
            "dblocks.acquired", [self._granted], "{lock}", "Locks that were granted."
        )
        meter.create_observable_up_down_counter(
            "dblocks.held", [self._held], "{lock}", "Locks that this process holds."
        )

    def trace_with(self, provider: trace.TracerProvider | None) -> None:
        self._tracer = trace.get_tracer("dblocks", __version__, provider)

    def _has_meter(self) -> bool:
        """Tell whether there is a provider; it may be set at any time."""
        if not self._is_metered:
            # Without a provider, a proxy stands in for the instrument, and has no real
            # one. If the API renames that attribute, a proxy drops what it is told.
            real = getattr(self._waits, "_real_instrument", self._waits)
            self._is_metered = real is not None
        return self._is_metered

    def _after_fork_in_child(self) -> None:
        self._due.clear()
        self._mutex = threading.RLock()

    # What happens

    def acquired(self, attempt: Attempt) -> None:
        if not attempt.reentered and (self._has_meter() or attempt.had_to_wait):
            self._note_wait(attempt, self._report_acquired)

    def timed_out(self, attempt: Attempt) -> None:
        self._note_wait(attempt, self._report_timeout)

    def released(self, hold: Hold) -> None:
        if self._has_meter() and (of := self._of_lock(hold)) is not None:
            held_for = clock.monotonic() - hold.started
            self._note(self._holds.record, held_for, of.released, get_current())

    def lost(self, hold: Hold, held_for: float, reason: str) -> None:
        if (of := self._of_lock(hold)) is not None:
            self._note(self._report_lost, of, held_for, reason)

    def force_released(
        self, *, key: str, backend: str | None, using: str | None, **kwargs: object
    ) -> None:
        try:
            self._note(self._forced.add, 1, self._of_forced(key, backend, using))
        except Exception:
            _tell_failure()

    def forget(self, **kwargs: object) -> None:
        """Read the setting anew."""
        self._patterns = None

    # What is reported of it

    def _note_wait(self, attempt: Attempt, report: Callable[..., None]) -> None:
        of = self._of_lock(attempt)
        if of is None:
            return
        waited, context = clock.monotonic() - attempt.started, get_current()
        if self._has_meter():
            self._note(report, of, waited, context)
        if attempt.had_to_wait:
            granted = report == self._report_acquired
            attributes = of.acquired if granted else of.timeout
            self._note(self._report_span, attributes, waited, time.time_ns(), context)
            self._report()

    def _note(self, report: Callable[..., None], *facts: Any) -> None:
        """Add a measurement or a span to the next batch.

        Reported one by one, each would cost half as much again. A batch is reported
        when it is full, and before each collection.
        """
        self._due.append((report, facts))
        if len(self._due) >= BATCH:
            self._report()

    def _report(self) -> None:
        """Report what is due; what a thread notes in the middle of a report comes next.

        A signal handler or the garbage collector may use locks at any point, and the
        mutexes of an SDK are not re-entrant.
        """
        mine = self._thread
        if mine.reports:
            return
        mine.reports = True
        try:
            with suppress(IndexError):
                while True:
                    report, facts = self._due.popleft()
                    try:
                        report(*facts)
                    except Exception:
                        _tell_failure()
        finally:
            mine.reports = False

    def _report_acquired(
        self, of: _Attributes, waited: float, context: Context
    ) -> None:
        with self._mutex:
            of.granted += 1
        self._waits.record(waited, of.acquired, context)

    def _report_timeout(self, of: _Attributes, waited: float, context: Context) -> None:
        self._timeouts.add(1, of.plain, context)
        self._waits.record(waited, of.timeout, context)

    def _report_span(
        self, attributes: dict[str, str], waited: float, end: int, context: Context
    ) -> None:
        span = self._tracer.start_span(
            "dblocks.acquire",
            context,
            attributes=attributes,
            start_time=end - int(waited * 1_000_000_000),
        )
        span.end(end)

    def _report_lost(self, of: _Attributes, held_for: float, reason: str) -> None:
        self._lost.add(1, {**of.plain, "reason": reason})
        self._holds.record(held_for, of.lost)

    def _granted(
        self, options: metrics.CallbackOptions
    ) -> Iterable[metrics.Observation]:
        self._report()
        return [
            metrics.Observation(of.granted, of.plain)
            for of in list(self._known.values())
        ]

    def _held(self, options: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
        """Count the locks that this process holds; any that it held before count 0."""
        if signals.observer is not self:
            return []
        counts = Counter(dict.fromkeys(list(self._known.values()), 0))
        for hold in registry.all():
            if hold.is_live() and hold.is_referred_to():
                counts[self._of(hold.template, hold.key, hold.backend)] += 1
        return [metrics.Observation(count, of.plain) for of, count in counts.items()]

    def _of_lock(self, lock: Attempt | Hold) -> _Attributes | None:
        """Return a lock's attributes now: the settings may change before the report."""
        try:
            return self._of(lock.template, lock.key, lock.backend)
        except Exception:
            _tell_failure()
            return None

    def _of_forced(
        self, key: str, alias: str | None, using: str | None
    ) -> dict[str, str]:
        """Return a force-released lock's attributes now: see :meth:`_of_lock`."""
        # The manager's verb knows the database, but not the alias.
        aliases = backends.settings if alias is None else [alias]
        for backend in (backends[name] for name in aliases):
            if alias is not None or backend.is_in_database(using or ""):
                return self._of(None, key, backend).plain
        return {}

    def _of(self, template: str | None, key: str, backend: BaseBackend) -> _Attributes:
        """Return the attributes of a lock, whose key the settings may keep secret."""
        label = template
        if label is None and self._allows(key):
            label = key
        known = self._known
        of = known.get((label, backend))
        if of is None:
            if len(known) >= MOST_NAMED:
                label = None
            of = known.setdefault((label, backend), _Attributes(label, backend))
        return of

    def _allows(self, key: str) -> bool:
        patterns = self._patterns
        if patterns is None:
            patterns = self._patterns = telemetry_keys()
        return bool(patterns) and any(fnmatchcase(key, one) for one in patterns)


_made: dict[metrics.MeterProvider | None, Telemetry] = {}
