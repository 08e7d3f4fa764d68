"""Read the whole causal record of one decision, from trigger to receipt, for its page. Nothing is written."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.gate import Gate
from sds.kernel.audit.verify import flow_record
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.proposal import Proposal, parse_recorded
from sds.kernel.errors import UsageError, reading, unreadable
from sds.service.console import words
from sds.service.console.case import Alternatives, Entry, alternative, history, numbers
from sds.service.console.words import FOR_REVIEWERS, Piece

Facts = tuple[tuple[str, str], ...]

_FLOW = ("state", "tag", "agent_id", "gate", "event_id", "dfid", "parent_dfid", "contract_hash", "restarts")
_HUMAN = ("decision", "who", "reason", "impact", "acknowledged", "policy_kind", "justification", "seen")
_ORDER = ("status", "kind", "resource_key", "idempotency_key", "external_receipt")
_PROPOSED = ("policy_kind", "justification", "model", "tokens", "passes")


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the record. `facts`: (name, value); `pieces`: a text with its marks; `lines`: further lines."""

    title: str
    facts: Facts = ()
    pieces: tuple[Piece, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DecisionPage:
    """One decision. `state`, `action`: its outcome; `sections`: in the order in which things happened."""

    gate: str
    dfid: str
    event_id: str
    state: str
    action: str
    opened_ms: int
    waits: bool
    sections: tuple[Section, ...]
    alternatives: tuple[Alternatives, ...]
    history: tuple[Entry, ...]


def decision_page(gate: Gate, dfid: str, *, currency: str, texts: bool) -> DecisionPage:
    """Read one decision. `texts`: with the texts of customers, models and reviewers.

    Raises UsageError where there is no such flow, StoreError where it cannot be read.
    """
    record = flow_record(gate.store, dfid)
    if record is None:
        raise UsageError(f"there is no decision `{dfid}` in the record", reason_code="DFID_UNKNOWN")
    with reading(unreadable(dfid)):
        if not texts:
            record = without_texts(gate.contract, record)
        flow = record["decision_flows"]
        order, human = record["execution_log"] or {}, record["human_decisions"] or {}
        proposed = record["policy_proposals"] or {}
        return DecisionPage(
            gate=gate.contract.gate,
            dfid=dfid,
            event_id=words.plain(flow["event_id"]),
            state=flow["state"],
            action=human.get("policy_kind") or order.get("kind") or proposed.get("policy_kind") or "-",
            opened_ms=flow["created_at_ms"],
            waits=flow["state"] == "ESCALATED" or order.get("status") == "UNKNOWN",
            sections=tuple(_sections(gate, record, currency)),
            alternatives=tuple(_alternatives(gate, proposed, currency)),
            history=tuple(history(gate, dfid, texts=texts)),
        )


def without_texts(terms: Contract, record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a flow's record with `FOR_REVIEWERS` in place of every text of a customer, a model or a reviewer.

    Ids, numbers, codes, hashes and times stay. Raises one of NOT_AS_WRITTEN where the record is damaged.
    """
    flow, named = record["decision_flows"], (terms.event.id, terms.event.key)
    event = json.loads(flow["trigger_event"])
    shown = {name: value if name in named else _hidden(value) for name, value in event.items()}
    return {
        **record,
        "decision_flows": {**flow, "trigger_event": json.dumps(shown)},
        "context_snapshots": _snapshot_without(terms, record["context_snapshots"]),
        "attempts": [_reasons_without({**each, "proposal": FOR_REVIEWERS}) for each in record["attempts"]],
        "policy_proposals": _without(record["policy_proposals"], "proposal"),
        "rationale": None if record["rationale"] is None else FOR_REVIEWERS,
        "dim_validations": _reasons_without(record["dim_validations"]),
        "human_decisions": _without(record["human_decisions"], "reason"),
        "ledger": (),
    }


def _hidden(value: object) -> object:
    return value if value is None or isinstance(value, bool | int | float) else FOR_REVIEWERS


def _without(row: Mapping[str, Any] | None, text: str) -> dict[str, Any] | None:
    """Return a row without the column `text`, and with the code alone of its justification."""
    if row is None:
        return None
    code = None if row["justification"] is None else row["justification"].partition(":")[0]
    return {**row, text: FOR_REVIEWERS, "justification": code}


def _reasons_without(row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a row with only gate and code of each reason: a reason's line may quote the proposal."""
    if row is None:
        return None
    reasons = [(gate_no, code, FOR_REVIEWERS) for gate_no, code, _ in json.loads(row["reasons"])]
    return {**row, "reasons": json.dumps(reasons)}


def _snapshot_without(terms: Contract, row: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a snapshot's row without the prompt and without the state's fields that are declared as strings."""
    if row is None:
        return None
    body = json.loads(row["body"])
    fields = {
        path: _hidden(value) if terms.snapshot.get(path, "string") == "string" else value
        for path, value in body["fields"].items()
    }
    return {**row, "body": json.dumps({**body, "fields": fields}), "prompt": json.dumps([FOR_REVIEWERS])}


def _sections(gate: Gate, record: Mapping[str, Any], currency: str) -> Iterator[Section]:
    yield Section("Decision", _facts(record["decision_flows"], _FLOW))
    yield _trigger(gate, record)
    yield from _state_and_prompt(gate, record, currency)
    yield from _attempts(record)
    if proposed := record["policy_proposals"]:
        confidence = proposed["confidence"]
        certain = () if confidence is None else (("confidence", words.percent(confidence)),)
        said = _numbers(gate, proposed["policy_kind"], proposed["params"], currency)
        yield Section("Proposal", (*_facts(proposed, _PROPOSED), *said, *certain), lines=tuple(_rationale(record)))
    if verdict := record["dim_validations"]:
        lines = tuple(f"gate {gate_no}: {code}: {line}" for gate_no, code, line in json.loads(verdict["reasons"]))
        yield Section(
            "Verdict", _facts(verdict, ("outcome", "reason_code", "gate_reached", "attempt_number")), lines=lines
        )
    if human := record["human_decisions"]:
        yield Section(
            "A human's decision",
            (*_facts(human, _HUMAN), *_numbers(gate, human["policy_kind"], human["params"], currency)),
        )
    if order := record["execution_log"]:
        yield Section("Order", (*_facts(order, _ORDER), *_numbers(gate, order["kind"], order["params"], currency)))
    if held := record["reservations"]:
        yield Section(
            "Reserved", tuple((each["resource"], f"{each['amount']} minor units, {each['status']}") for each in held)
        )
    if saga := record["saga"]:
        lines = tuple(f"{each['dfid']}: {each['status']} {each['reference'] or ''}" for each in record["reversals"])
        yield Section("Saga of several steps", _facts(saga, ("name", "phase", "compensation")), lines=lines)
    if record["children"]:
        lines = tuple(f"{each['dfid']}: {each['state']} {each['action'] or ''}" for each in record["children"])
        yield Section("Its steps", lines=lines)


def _trigger(gate: Gate, record: Mapping[str, Any]) -> Section:
    event, evidence = json.loads(record["decision_flows"]["trigger_event"]), gate.contract.event.evidence or ""
    facts = tuple((name, words.plain(value)) for name, value in event.items() if name != evidence)
    return Section("Event", facts, words.pieces(str(event.get(evidence, ""))))


def _named(terms: Contract, path: str) -> str:
    """Return a field's path, with its label before it where the contract has one."""
    label = terms.labels.get(path)
    return f"{label} ({path})" if label else path


def _state_and_prompt(gate: Gate, record: Mapping[str, Any], currency: str) -> Iterator[Section]:
    """Yield the sections of the state as the agent read it, and of the model's prompt."""
    snapshot = record["context_snapshots"]
    if not snapshot:
        return
    body = json.loads(snapshot["body"])
    declared = gate.contract.snapshot
    facts = tuple(
        (_named(gate.contract, path), words.field(path, declared.get(path, "string"), value, currency))
        for path, value in body["fields"].items()
    )
    yield Section(
        "State, as the agent read it",
        (*facts, ("version", words.plain(body["version"])), ("snapshot", snapshot["snapshot_id"])),
    )
    *ours, evidence = json.loads(snapshot["prompt"]) or [""]
    text = "".join(each if each.endswith("\n") else f"{each}\n" for each in ours)
    patterns = tuple(map(words.pattern, json.loads(snapshot["security"])))
    note = (f"Found in the evidence: {', '.join(patterns)}.",) if patterns else ()
    yield Section("What the model read", pieces=(Piece(text), *words.pieces(evidence)), lines=note)


def _attempts(record: Mapping[str, Any]) -> Iterator[Section]:
    for attempt in record["attempts"]:
        reasons = (f"gate {gate_no}: {code}: {line}" for gate_no, code, line in json.loads(attempt["reasons"]))
        yield Section(
            f"Rejected attempt {attempt['attempt_number']}", lines=(words.plain(attempt["proposal"]), *reasons)
        )


def _rationale(record: Mapping[str, Any]) -> Iterator[str]:
    """Yield the proposal as it was written, and the model's rationale before or after the decision."""
    written = record["policy_proposals"]["proposal"]
    yield words.plain(written)
    proposal = parse_recorded(written.encode())
    if isinstance(proposal, Proposal) and proposal.rationale is not None:
        yield f"Reason, before the decision: {words.plain(proposal.rationale)}"
    if record["rationale"] is not None:
        yield f"Reason, after the decision: {words.plain(record['rationale'])}"


def _alternatives(gate: Gate, proposed: Mapping[str, Any], currency: str) -> Iterator[Alternatives]:
    measured = json.loads(proposed.get("alternatives") or "[]")
    for each in measured if isinstance(measured, list) else ():
        yield alternative(each, gate.contract, currency)


def _numbers(gate: Gate, kind: str | None, params: str | None, currency: str) -> Facts:
    return tuple(numbers(gate.contract, kind or "", json.loads(params or "{}"), currency))


def _facts(row: Mapping[str, Any], names: tuple[str, ...]) -> Facts:
    return tuple((name, words.plain(row[name])) for name in names if row[name] not in (None, ""))
