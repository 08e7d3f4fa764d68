"""OpenTelemetry: one span for each decision, with its DFID, and its stages as child spans.

This uses OpenTelemetry's API alone and exports nothing. The operator sets up a TracerProvider before the service starts, or
runs it under `opentelemetry-instrument`, configured by `OTEL_*`. Without one no span is made. The caller's `traceparent`
(W3C) is the parent. Spans hold ids and codes, never texts.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, Tracer

from sds.service.operations.observing import Flow

PARENTS_MAX = 4_096  # parents kept of events that are not decided yet; one more drops the oldest

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SHOWN = ("state", "tag", "action", "reason_code", "execution")


class Spans:
    """Makes the spans of flows that have ended. `tracer`: None makes no spans."""

    def __init__(self, tracer: Tracer | None, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer, self._wall_ns = tracer, wall_ns
        self._parents = OrderedDict[tuple[str, str], SpanContext]()

    def asked(self, gate: str, event_id: str, traceparent: str) -> None:
        """Remember the parent span of an event until it is decided."""
        if self._tracer is None or not traceparent:
            return
        if (parent := parent_of(traceparent)) is not None:
            self._parents[gate, event_id] = parent
            while len(self._parents) > PARENTS_MAX:
                self._parents.popitem(last=False)

    def ended(self, flow: Flow) -> None:
        """Make the spans of a flow. Its times are converted from `perf_counter_ns` to the wall clock."""
        if self._tracer is None:
            return
        shift_ns = self._wall_ns() - time.perf_counter_ns()
        parent = self._parents.pop((flow.gate, flow.event_id), None)
        context = trace.set_span_in_context(NonRecordingSpan(parent)) if parent else None
        facts = {f"sds.{name}": str(value) for name in _SHOWN if (value := flow.facts.get(name))}
        attributes: dict[str, str | int] = {
            "sds.dfid": flow.dfid,
            "sds.gate": flow.gate,
            "sds.tokens": flow.tokens,
            **facts,
        }
        whole = self._tracer.start_span(
            "decision", context, SpanKind.INTERNAL, attributes, start_time=flow.began_ns + shift_ns
        )
        within = trace.set_span_in_context(whole)
        for stage, begin_ns, end_ns in flow.stages:
            part = self._tracer.start_span(stage, within, start_time=begin_ns + shift_ns)
            part.end(end_ns + shift_ns)
        whole.end(flow.last_ns + shift_ns)


def parent_of(traceparent: str) -> SpanContext | None:
    """Return the span that a `traceparent` header names; None where the header is invalid."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    context = SpanContext(int(match[1], 16), int(match[2], 16), True, TraceFlags(int(match[3], 16)))
    return context if context.is_valid else None


def configured_tracer() -> Tracer | None:
    """Return a tracer of the TracerProvider that was set up; None where there is none."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("sds")
