"""One span a decision with its DFID, its stages as children, in the caller's trace; where there is no tracer, nothing."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from sds.service.operations.metrics import STAGES
from sds.service.operations.tracing import Spans, configured_tracer, parent_of
from tests.service.testbed import Bed, opened_bed

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return made


def test_a_decision_is_a_span_of_the_callers_trace_with_its_stages_in_it(
    home: Path, exporter: InMemorySpanExporter
) -> None:
    with opened_bed(home) as bed:
        dfid = bed.post(headers={"traceparent": PARENT}).json()["dfid"]
    spans = exporter.get_finished_spans()
    (whole,) = [span for span in spans if span.name == "decision"]
    assert whole.parent is not None
    assert (TRACE, SPAN) == (f"{whole.context.trace_id:032x}", f"{whole.parent.span_id:016x}")
    facts = dict(whole.attributes or {})
    assert (dfid, "toll", "CLOSED", "WAIVE", "SUCCESS") == tuple(
        facts[f"sds.{name}"] for name in ("dfid", "gate", "state", "action", "execution")
    )
    parts = [span for span in spans if span.parent is not None and span.parent.span_id == whole.context.span_id]
    assert list(STAGES) == [span.name for span in parts]
    assert whole.start_time == parts[0].start_time
    assert whole.end_time == parts[-1].end_time
    assert all(one.end_time == two.start_time for one, two in itertools.pairwise(parts))


def test_without_a_parent_it_is_a_trace_of_its_own_and_a_header_that_is_none_counts_for_nothing(
    home: Path, exporter: InMemorySpanExporter
) -> None:
    with opened_bed(home) as bed:
        assert 200 == bed.post(headers={"traceparent": "x" * 5_000}).status_code
    (whole,) = [span for span in exporter.get_finished_spans() if span.name == "decision"]
    assert whole.parent is None


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        PARENT + "x",
    ],
)
def test_what_is_no_traceparent_is_no_parent(header: str) -> None:
    assert parent_of(header) is None
    assert parent_of(PARENT) is not None


def test_where_no_tracer_was_set_up_nothing_is_made_and_nothing_kept(bed: Bed) -> None:
    assert configured_tracer() is None
    spans = Spans(None)
    spans.asked("toll", "T-1", PARENT)
    assert 200 == bed.post(headers={"traceparent": PARENT}).status_code
    assert not vars(spans)["_parents"]
