"""Measure each stage of a decision from the events of a gate's log, for metrics, and for spans where there is a tracer.

    begun ─ open ─ opened ─ propose ─ proposed ─ decide (the gates, the drift check, one transaction) ─ committed ─ dispatch

The deciding thread reports the end of each stage, and only the time is noted then. Metrics are counted later, so that the
answer does not wait for them. An event's facts are codes and ids.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from sds.kernel.errors import ModelError
from sds.kernel.flow.states import CONTENTION, NOT_DECIDED, NOT_SENT
from sds.service.operations.metrics import STAGES, Metrics

FLOWS_MAX = 4_096  # flows measured at once; one more drops the oldest
DRIFT = "STATE_DRIFT_DETECTED"
# states and tags that an alarm is on: counted from 0
WATCHED = (("ESCALATED", ""), *(("ABORTED", tag) for tag in (NOT_DECIDED, CONTENTION, NOT_SENT)))

Facts = Mapping[str, object]


@dataclass(slots=True)
class Flow:
    """The measurements of one flow. `stages`: (stage, start, end) by `perf_counter_ns`; `rows`: a mean for each proposal."""

    gate: str
    dfid: str
    event_id: str
    began_ns: int
    last_ns: int
    tokens: int = 0
    stages: list[tuple[str, int, int]] = field(default_factory=list)
    validated_ms: list[tuple[str, float]] = field(default_factory=list)
    rows: list[float] = field(default_factory=list)
    facts: Facts = field(default_factory=dict)

    @property
    def took_ms(self) -> float:
        """The flow's time from its beginning to the end of its last stage."""
        return (self.last_ns - self.began_ns) / 1e6


Ended = Callable[[Flow], None]


class Observer:
    """Measures the flows of one gate. `ended` is called with each flow that has ended, in the thread that decided it."""

    def __init__(
        self,
        gate: str,
        agent_id: str,
        metrics: Metrics,
        *,
        ended: Ended | None = None,
        now_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._gate, self._agent_id, self._metrics = gate, agent_id, metrics
        self._now_ns, self._ended = now_ns, ended
        self._thread = threading.local()
        self._flows = OrderedDict[str, Flow]()
        self._stage_s = {stage: metrics.stage_s.labels(gate, stage) for stage in STAGES}
        self._validation_ms = {kind: metrics.validation_ms.labels(gate, kind) for kind in ("hard", "soft")}
        self._saved, self._stale = metrics.saved.labels(gate), metrics.stale.labels(gate)
        metrics.escalations.labels(agent_id, ModelError.reason_code)
        for state, tag in WATCHED:
            metrics.decided.labels(gate, state, tag)
        self._decision_s, self._tokens = metrics.decision_s.labels(gate), metrics.tokens.labels(gate)
        self._heard = {
            "stage.begun": self._begun,
            "flow.opened": self._opened,
            "stage.known": self._known,
            "stage.proposed": self._proposed,
            "stage.judged": self._judged,
            "stage.committed": self._committed,
            "stage.dispatched": self._dispatched,
            "flow.decided": self._decided,
        }

    def __contains__(self, dfid: str) -> bool:
        """Tell whether a flow is being decided in this process."""
        return dfid in self._flows

    def __call__(self, event: str, facts: Facts) -> None:
        """Take an event of the gate's log."""
        if (heard := self._heard.get(event)) is not None:
            heard(facts, self._now_ns())

    def _begun(self, facts: Facts, now_ns: int) -> None:
        self._thread.begun = (str(facts["event_id"]), now_ns)

    def _opened(self, facts: Facts, now_ns: int) -> None:
        event_id, began_ns = getattr(self._thread, "begun", ("", now_ns))
        flow = Flow(self._gate, str(facts["dfid"]), event_id, began_ns, began_ns)
        self._flows[flow.dfid] = flow
        while len(self._flows) > FLOWS_MAX:
            self._flows.popitem(last=False)
        self._end(flow, "open", now_ns)

    def _known(self, _: Facts, __: int) -> None:
        self._saved.inc()

    def _proposed(self, facts: Facts, now_ns: int) -> None:
        if flow := self._flows.get(str(facts["dfid"])):
            flow.validated_ms.append(("soft", (now_ns - flow.last_ns) / 1e6))
            self._end(flow, "propose", now_ns)
            tokens, rows = facts["tokens"], facts["rows"]
            flow.tokens += tokens if isinstance(tokens, int) else 0
            if isinstance(rows, tuple) and rows:
                flow.rows.append(sum(rows) / len(rows))

    def _judged(self, facts: Facts, now_ns: int) -> None:
        if flow := self._flows.get(str(facts["dfid"])):
            flow.validated_ms.append(("hard", (now_ns - flow.last_ns) / 1e6))

    def _committed(self, facts: Facts, now_ns: int) -> None:
        if flow := self._flows.get(str(facts["dfid"])):
            self._end(flow, "decide", now_ns)

    def _dispatched(self, facts: Facts, now_ns: int) -> None:
        if flow := self._flows.get(str(facts["dfid"])):
            self._end(flow, "dispatch", now_ns)

    def _decided(self, facts: Facts, now_ns: int) -> None:
        """End a flow, unless it is still ACTIVE after an attempt: then it goes on to the next."""
        if DRIFT in (facts["tag"], facts["reason_code"]):
            self._stale.inc()
        if facts["state"] == "ACTIVE" or (flow := self._flows.pop(str(facts["dfid"]), None)) is None:
            return
        if len(flow.stages) == 1:  # the engine failed, or got no turn
            self._end(flow, "propose", now_ns)
        flow.facts = facts
        self._metrics.put_off(partial(self._count, flow, now_ns))
        if self._ended is not None:
            self._ended(flow)

    def _end(self, flow: Flow, stage: str, now_ns: int) -> None:
        flow.stages.append((stage, flow.last_ns, now_ns))
        flow.last_ns = now_ns

    def _count(self, flow: Flow, ended_ns: int) -> None:
        """Add a flow that has ended to the metrics, with all of its stages."""
        state, tag = str(flow.facts["state"]), str(flow.facts["tag"] or "")
        if state == "ESCALATED":
            self._metrics.escalations.labels(self._agent_id, str(flow.facts["reason_code"] or tag)).inc()
        self._metrics.decided.labels(self._gate, state, tag).inc()
        self._decision_s.observe((ended_ns - flow.began_ns) / 1e9)
        self._tokens.observe(flow.tokens)
        for stage, from_ns, to_ns in flow.stages:
            self._stage_s[stage].observe((to_ns - from_ns) / 1e9)
        for kind, took_ms in flow.validated_ms:
            self._validation_ms[kind].observe(took_ms)
        for rows in flow.rows:
            self._metrics.rows.labels(self._gate).observe(rows)
