"""Takes what processes send by OTLP, on the loopback interface, for Prometheus to ask.

A collector of OpenTelemetry in the small, with one endpoint for each side::

    with Collector() as collector:
        collector.url  # for OTEL_EXPORTER_OTLP_ENDPOINT
        collector.samples()  # the same as at /metrics

Metrics and labels have the names that Prometheus gives them when it is sent them.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

HOST = "127.0.0.1"


class Sample(NamedTuple):
    """A number, as Prometheus has it."""

    name: str
    labels: dict[str, str]
    value: float

    def __str__(self) -> str:
        labels = ",".join(
            f'{label}="{_escaped(value)}"' for label, value in self.labels.items()
        )
        return f"{self.name}{{{labels}}} {self.value!r}"


class Collector:
    """Remembers the last measurements of each process, by ``service.instance.id``.

    A process that is silent for ``expiry`` seconds is forgotten: it has ended.
    """

    def __init__(self, expiry: float = math.inf) -> None:
        self.expiry = expiry
        self._mutex = threading.Lock()
        self._processes: dict[str, tuple[float, list[Sample]]] = {}
        self._server = ThreadingHTTPServer((HOST, 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=[0.1])

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def address(self) -> str:
        return f"{HOST}:{self._server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def samples(self) -> list[Sample]:
        """Return the last measurements of all processes."""
        now = time.monotonic()
        with self._mutex:
            return [
                sample
                for at, samples in self._processes.values()
                if now - at < self.expiry
                for sample in samples
            ]

    def take(self, message: bytes) -> None:
        """Replace what is known of the processes that a message is from."""
        request = ExportMetricsServiceRequest.FromString(message)
        for resource in request.resource_metrics:
            said = _labels(resource.resource.attributes)
            instance = said["service_instance_id"]
            labels = {"job": said["service_name"], "instance": instance}
            samples = [
                Sample(sample.name, labels | sample.labels, sample.value)
                for scope in resource.scope_metrics
                for metric in scope.metrics
                for sample in _samples(metric)
            ]
            with self._mutex:
                self._processes[instance] = time.monotonic(), samples

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                collector.take(self.rfile.read(length))
                self.answer("application/x-protobuf", "")

            def do_GET(self) -> None:
                lines = sorted(f"{sample}\n" for sample in collector.samples())
                self.answer("text/plain; version=0.0.4", "".join(lines))

            def answer(self, kind: str, text: str) -> None:
                body = text.encode()
                self.send_response(200)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


def prometheus_name(name: str, unit: str) -> str:
    """Return the name of a metric, without what Prometheus appends for its kind."""
    return name.replace(".", "_") + ("_seconds" if unit == "s" else "")


def _samples(metric: Any) -> Iterator[Sample]:
    name = prometheus_name(metric.name, metric.unit)
    for point in metric.sum.data_points:
        total = "_total" if metric.sum.is_monotonic else ""
        value = getattr(point, point.WhichOneof("value"))
        yield Sample(f"{name}{total}", _labels(point.attributes), value)
    for point in metric.histogram.data_points:
        labels = _labels(point.attributes)
        count = 0
        bounds = [f"{bound:g}" for bound in point.explicit_bounds]
        for bound, more in zip([*bounds, "+Inf"], point.bucket_counts, strict=True):
            count += more
            yield Sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield Sample(f"{name}_sum", labels, point.sum)
        yield Sample(f"{name}_count", labels, point.count)


def _labels(attributes: Iterable[Any]) -> dict[str, str]:
    return {each.key.replace(".", "_"): each.value.string_value for each in attributes}


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
