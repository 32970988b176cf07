"""What the shop's locks do, for OpenTelemetry, where the environment asks for it.

Sent by OTLP to ``OTEL_EXPORTER_OTLP_ENDPOINT``, by each process for itself; the SDK's
other variables hold too. Needs ``opentelemetry-exporter-otlp-proto-http``.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from dblocks.holding.news import settle

_provider: Any = None


def report() -> None:
    """Begin to report, if the environment says where to."""
    global _provider
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if _provider is not None or not endpoint:
        return
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import (
        OTLPMetricExporter,
    )
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource

    from dblocks import telemetry

    reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    resource = Resource.create({"service.instance.id": str(uuid.uuid4())})
    _provider = MeterProvider([reader], resource)
    telemetry.instrument(meter_provider=_provider)


def flush() -> None:
    """Send what is there to report, before the process may be killed."""
    if _provider is not None:
        # Losses are told by threads of their own.
        settle(1)
        _provider.force_flush()
