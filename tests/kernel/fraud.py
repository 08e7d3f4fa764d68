"""A fraud gate: its refusal is called BLOCK, and CHALLENGE has a side effect although it draws and spends nothing."""

from __future__ import annotations

from sds.kernel.contract.schema import parse_contract
from tests.kernel.durable import proposal

CONTRACT = """
gate: claims
agent_id: fraud-agent
version: 1.0.0
owner: fraud@example.org
effective_from: "2013-01-01"
mission: Decide whether a payment may pass.
authority: [ALLOW, BLOCK, CHALLENGE]
refusal: BLOCK
event: {id: claim_id, key: ticket_id, evidence: text}
snapshot:
  ticket.customer: string
  ticket.refundable_minor: fixed(2)
  ticket.compensations_left: int
  ticket.mood: enum(calm, angry)
kinds:
  ALLOW: {when: ticket.mood == "calm", reasons: [USUAL_FOR_CUSTOMER]}
  BLOCK: {reasons: [STOLEN_CARD, UNLIKE_CUSTOMER]}
  CHALLENGE: {side_effect: true, reasons: [NEW_DEVICE]}
retry: {attempts_max: 3, restarts_max: 3, rejections_to_suspend: 10}
budget: {ttl_ms: 30000, dispatch_ms_max: 5000}
escalation: {per_hour: 1000000}
"""
FRAUD = parse_contract(CONTRACT)
ALWAYS_HUMAN = parse_contract(CONTRACT.replace("escalation: {", "escalation: {always: [CHALLENGE], "))

allow = proposal("ALLOW", "USUAL_FOR_CUSTOMER")
block = proposal("BLOCK", "STOLEN_CARD")
challenge = proposal("CHALLENGE", "NEW_DEVICE")
