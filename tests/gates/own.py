"""A gate of one's own, as its file says it: a toll that is waived or not."""

from __future__ import annotations

from pathlib import Path

GATE = '''
from sds import GateDefinition, Receipt, StateRead, StatementLine, parse_contract

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
  - {name: daily, window: day, max_minor: 100000}
""")
ORDERS = {}


class Toll:
    idempotent = True

    def read(self, key):
        return StateRead({"car.open_minor": 500}, version="1") if key == "CAR-1" else None

    def dispatch(self, intent, key, deadline_s):
        amount = dict(intent.params)["amount"]
        ORDERS[key] = StatementLine(
            key, "settled", 1_800_000_000_000, amount, key[:12], intent.dfid, intent.kind, {"amount": amount}, "CAR-1"
        )
        return Receipt("settled", reference=key[:12])

    def lookup(self, key, deadline_s):
        return Receipt("settled", reference=key[:12]) if key in ORDERS else Receipt("absent")

    def statement(self, since_ms, until_ms):
        return list(ORDERS.values())


def events(folder):
    return [{"trip_id": f"T-{n}", "car_id": "CAR-1" if n else "CAR-2", "text": "Please."} for n in range(6)]


gate = GateDefinition(name="toll", contract=CONTRACT, open=lambda folder: (Toll(), Toll()), events=events)
'''


def written(folder: Path, code: str = GATE) -> Path:
    """Write a gate's file into a folder, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "gate.py"
    path.write_text(code, encoding="utf-8")
    return path
