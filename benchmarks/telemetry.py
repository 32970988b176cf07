"""What telemetry costs: ``python -m benchmarks --only telemetry --database sqlite``.

In the memory of the process, where a microsecond can be seen; what telemetry does is
the same on every engine. The SDK is OpenTelemetry's own, with a reader in memory, and
whoever waits for nothing has no span.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks import crew
from benchmarks.figures import Figure, Result, Scale, Verdict
from dblocks import distributed_lock
from dblocks.backends.locmem import LocMemBackend

OFF = "without telemetry"
BARE = "with telemetry, no provider"
SDK = "with telemetry, to OpenTelemetry's SDK"

TURN = 200
"""Cycles of a turn."""

Times = Mapping[str, Sequence[float]]


class NamedBackend(LocMemBackend):
    """Locks in memory, with as many attributes as those of a database."""

    system = "sqlite"


def measure(server: str, scale: Scale) -> Result:
    """Row 16: a decorated function's lock in memory, with telemetry and without.

    By turns of 200 calls in one process, with the three attributes of a lock in a
    database that is named by its template.
    """
    runs = [
        crew.run_one(take_turns, turns=scale.cycles // 20) for _ in range(scale.runs)
    ]
    return judge(runs)


def judge(runs: Sequence[Times]) -> Result:
    """Set the calls with telemetry against those without."""
    times = {
        name: [statistics.median(run[name]) * 1_000_000 for run in runs]
        for name in (OFF, BARE, SDK)
    }
    return Result(
        figures=[
            Figure("a call under a lock in memory, p50", name, "µs", values)
            for name, values in times.items()
        ],
        verdicts=[
            Verdict(16, what, _more(times[name], times[OFF]), "µs", at_most=most)
            for what, name, most in (
                ("telemetry without a provider, a cycle", BARE, 1.0),
                ("telemetry with OpenTelemetry's SDK, a cycle", SDK, 20.0),
            )
        ],
    )


def _more(ones: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(a - b for a, b in zip(ones, others, strict=True))


def take_turns(*, turns: int) -> dict[str, list[float]]:
    """Return the seconds of a call in each turn, by what is switched on."""
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider

    from dblocks import signals, telemetry

    @distributed_lock("order:{number}", backend="memory")
    def order(number: int) -> None:
        pass

    observers: dict[str, telemetry.Telemetry | None] = {OFF: None}
    telemetry.instrument()
    observers[BARE] = signals.observer
    telemetry.instrument(
        meter_provider=MeterProvider([InMemoryMetricReader()]),
        tracer_provider=TracerProvider(),
    )
    observers[SDK] = signals.observer
    times: dict[str, list[float]] = {name: [] for name in observers}
    for number in range(-1, turns):
        for name, signals.observer in observers.items():
            seconds = _turn(order)
            if number >= 0:
                times[name].append(seconds)
    telemetry.uninstrument()
    return times


def _turn(call: Callable[[int], None]) -> float:
    began = time.perf_counter()
    for number in range(TURN):
        call(number % 10)
    return (time.perf_counter() - began) / TURN
