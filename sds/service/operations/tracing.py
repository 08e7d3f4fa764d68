"""One span a decision with its DFID, its stages as children: OpenTelemetry, where the operator has set a tracer up.

Only the API is used, and nothing is exported by this program: `opentelemetry-instrument`, or a TracerProvider that is set
before the service starts, does that by the operator's `OTEL_*`. Where there is none nothing is made and nothing costs.
What the caller sent as `traceparent` (W3C) is the parent. Spans hold ids and codes, never a text.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags, Tracer

from sds.service.operations.observing import Flow

PARENTS_MAX = 4_096  # requests whose decision has not ended yet

_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(?:-.*)?")
_SHOWN = ("state", "tag", "action", "reason_code", "execution")


class Spans:
    """Makes spans of flows that have ended. `tracer`: None makes none."""

    def __init__(self, tracer: Tracer | None, *, wall_ns: Callable[[], int] = time.time_ns) -> None:
        self._tracer, self._wall_ns = tracer, wall_ns
        self._parents = OrderedDict[tuple[str, str], SpanContext]()

    def asked(self, gate: str, event_id: str, traceparent: str) -> None:
        """Remember whose trace an event belongs to, until it is decided."""
        if self._tracer is None or not traceparent:
            return
        if (parent := parent_of(traceparent)) is not None:
            self._parents[gate, event_id] = parent
            while len(self._parents) > PARENTS_MAX:
                self._parents.popitem(last=False)

    def ended(self, flow: Flow) -> None:
        """Make the spans of a flow: its times are moved from the clock that measures to the one on the wall."""
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
    """Return the span that a `traceparent` header names; None where it is not one."""
    found = _TRACEPARENT.fullmatch(traceparent.strip())
    if found is None:
        return None
    context = SpanContext(int(found[1], 16), int(found[2], 16), True, TraceFlags(int(found[3], 16)))
    return context if context.is_valid else None


def configured_tracer() -> Tracer | None:
    """Return the tracer of a TracerProvider that was set up; None where there is none."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, trace.ProxyTracerProvider | trace.NoOpTracerProvider):
        return None
    return provider.get_tracer("sds")
