"""A gate about tolls that a script waives without a model, to test the service under load within seconds.

Reading its state takes `LOOK_S`, so that a few requests a second are more than it can decide.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from sds import ExecutionIntent, GateDefinition, Receipt, StateRead, parse_contract

LOOK_S = 0.02
KEYS_MAX = 10_000  # orders remembered; older ones are not looked up any more
CONTRACT = parse_contract("""
gate: toll
agent_id: toll-agent
version: 1.0.0
owner: toll@bridge.example
effective_from: "2026-01-01"
mission: Decide whether a toll is waived.
authority: [WAIVE, DENY]
event: {id: trip_id, key: car_id, evidence: text}
snapshot: {car.open_minor: fixed(2)}
kinds:
  WAIVE:
    params:
      amount: {lo: 100, hi: car.open_minor, step: 100, scale: 2}
    draws: {car.open_minor: amount}
    spends: amount
    reasons: [EMERGENCY]
  DENY:
    reasons: [NO_REASON]
spend:
  - {name: daily, window: day, max_minor: 1000000000}
""")


class Toll:
    """State source and idempotent executor. It remembers the last KEYS_MAX orders only, so that its memory does not grow."""

    idempotent = True

    def __init__(self) -> None:
        self._done, self._lock = OrderedDict[str, None](), Lock()

    def read(self, key: str) -> StateRead:
        time.sleep(LOOK_S)
        return StateRead({"car.open_minor": 500}, version="1")

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        with self._lock:
            self._done[key] = None
            if len(self._done) > KEYS_MAX:
                self._done.popitem(last=False)
        return Receipt("settled", reference=key[:12])

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        with self._lock:
            return Receipt("settled", reference=key[:12]) if key in self._done else Receipt("absent")


def _open(folder: Path) -> tuple[Toll, Toll]:
    toll = Toll()
    return toll, toll


def event(n: int) -> dict[str, str]:
    return {"trip_id": f"T-{n}", "car_id": f"CAR-{n}", "text": "Please."}


def events(folder: Path) -> list[dict[str, str]]:
    return [event(n) for n in range(20)]


gate = GateDefinition(name="toll", contract=CONTRACT, open=_open, events=events)
