"""What the shop's processes send to a collector of OpenTelemetry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from dblocks import signals
from testproject.shop import telemetry
from testproject.shop.crew import Crew, Unexpected
from tests.support.fixtures import in_memory
from tests.support.timing import scaled

pytest.importorskip(
    "opentelemetry.exporter.otlp.proto.http", reason="the exporter is not installed"
)

from tests.dashboard import BOARD, Prometheus, Questions
from tests.support.collector import Collector, Sample


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture
def crew(
    committed: None, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Crew]:
    """Two processes that report, each once more after a job."""
    if in_memory():
        pytest.skip("a database in memory belongs to one process")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "shop")
    with Crew() as crew:
        crew.hire()
        crew.hire()
        yield crew


def counted(collector: Collector, name: str, **labels: str) -> list[Sample]:
    """The samples of a metric that have these labels and aren't zero."""
    return [
        sample
        for sample in collector.samples()
        if sample.name == f"dblocks_{name}"
        and sample.value
        and labels.items() <= sample.labels.items()
    ]


def test_each_process_reports(crew: Crew, collector: Collector) -> None:
    """Grants, waits and holds come from each process, under an identity of its own."""
    first, second = crew.tills
    first.tell("hold", key="shop:stocktaking", lease=30)
    crew.expect(first, "held")
    second.tell("hold", key="shop:stocktaking", lease=30)
    first.tell("release")
    events = [crew.next() for _ in range(2)]
    assert {event.name for event in events} == {"done", "held"}
    second.tell("release")
    crew.expect(second, "done")
    for name in ("acquired_total", "wait_duration_seconds_count"):
        samples = counted(collector, name, dblocks_lock="shop:stocktaking", job="shop")
        assert [sample.value for sample in samples] == [1, 1]
        assert len({sample.labels["instance"] for sample in samples}) == 2
    buckets = counted(collector, "hold_duration_seconds_bucket", le="+Inf")
    assert [sample.value for sample in buckets] == [1, 1]


def test_loss_is_reported(crew: Crew, collector: Collector) -> None:
    """A process that was stopped past its lease reports the loss when it goes on."""
    first, second = crew.tills
    first.tell("hold", key="shop:stocktaking", lease=scaled(1.0))
    crew.expect(first, "held")
    first.pause()
    second.tell("hold", key="shop:stocktaking", lease=30)
    crew.expect(second, "held")
    first.resume()
    first.tell("release")
    with pytest.raises(Unexpected, match="LeaseLost"):
        crew.next()
    crew.expect(first, "done")
    (loss,) = counted(collector, "lost_total", dblocks_lock="shop:stocktaking")
    assert loss.labels["reason"] in {"expired", "taken"}


def test_nothing_is_sent_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variable nothing is set up."""
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    telemetry.report()
    telemetry.flush()
    assert signals.observer is None


def test_text_for_prometheus() -> None:
    """What stands in labels is quoted as Prometheus reads it."""
    sample = Sample("dblocks_held", {"dblocks_lock": 'a"b\\c\nd'}, 1)
    assert str(sample) == 'dblocks_held{dblocks_lock="a\\"b\\\\c\\nd"} 1'


class Answers(Prometheus):
    """Answers every query with this, and remembers the queries."""

    def __init__(self, values: list[Any]) -> None:
        self.values = values
        self.queries: list[str] = []

    def ask(self, path: str, **question: object) -> Any:
        if path != "query_range":
            return ["shop"]
        query = str(question["query"])
        self.queries.append(query)
        labels = dict.fromkeys(re.findall(r"by \((\w+)\)", query), "a")
        return {"result": [{"metric": labels, "values": self.values}]}


def test_questions_of_the_dashboard() -> None:
    """Every query is asked, with its variables filled in."""
    board = json.loads(BOARD.read_text())
    server = Answers([[0, "NaN"], [2, "0.5"]])
    panels = Questions(board, server).ask_all(0, 2)
    assert len(panels) == len(board["panels"])
    assert len(server.queries) == sum(len(each["targets"]) for each in board["panels"])
    assert not [query for query in server.queries if "$" in query]
    assert set(panels["Wait"]) == {"p50", "p95", "p99"}
    assert panels["Losses by reason"]["a"][1] == (2, 0.5)


def test_panel_without_data() -> None:
    """A panel that would be empty, or flat at zero, is an error that names it."""
    server = Answers([[0, "NaN"], [2, "0"]])
    with pytest.raises(SystemExit, match="Losses by reason A"):
        Questions(json.loads(BOARD.read_text()), server).ask_all(0, 2)
