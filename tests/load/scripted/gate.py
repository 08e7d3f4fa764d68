"""A toll that a script waives, without a model: what the load of the service is tried on in a few seconds.

Its state takes `LOOK_S` to read, so that a few requests a second are more than it can decide.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from threading import Lock

from sds import ExecutionIntent, GateDefinition, Receipt, StateRead, parse_contract

LOOK_S = 0.02
KEYS_MAX = 10_000  # nobody asks about an order that so many others came after
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
    """Knows every car, and what was waived lately, for what it holds must not grow: an order with the same key is one order."""

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
