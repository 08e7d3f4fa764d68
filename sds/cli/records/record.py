"""`sds flows`, `audit`, `ledger`, `recover`, `halt`, `resume`: read, verify and recover a record, and halt its gate."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from sds.cli.common import GateOption, JsonFlag, OpenedGate, Reason, defined, open_store, operator, whole_dfid
from sds.cli.render import Console, counted, echo, print_either, print_facts, print_json, shares
from sds.definitions.definition import GateDefinition
from sds.gates.opening import recovery_kernel
from sds.host.clock import now_ms, when
from sds.host.keys import read_public
from sds.host.paths import gate_home, known_public_keys, ledger_key
from sds.kernel.audit import verify as auditing
from sds.kernel.envelope.proposal import Proposal, parse_recorded
from sds.kernel.errors import SdsError, UsageError, reading, unreadable
from sds.kernel.flow import undecided
from sds.kernel.flow.states import Answer, State, answer
from sds.kernel.human.parsing import said
from sds.kernel.operations import recovery
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import registry
from sds.kernel.storage import ledger as ledgers
from sds.kernel.storage.ledger import Checkpoint

_HEAD = re.compile(r"([0-9]{1,18}):([0-9a-f]{64})")
_UNFINISHED = ("ACTIVE", "EXECUTING")
_BY_INDEX = f"f.state IN {_UNFINISHED}"  # implied where it is used, and what makes SQLite use the index of these flows
_SIGNED_HEAD = re.compile(r"([0-9]{1,18}):([0-9a-f]{64}):([0-9]{1,18}):([0-9]{1,18}):([0-9a-f]{64}):([0-9a-f]{128})")


def audit(
    dfid: Annotated[
        str, typer.Argument(help="The flow's id, as every answer names it, or its first characters.", metavar="DFID")
    ],
    gate: GateOption = "refund",
    as_json: JsonFlag = False,
) -> None:
    """Show the causal record of one decision. It begins with the event and ends with the receipt.

    Example: sds audit 550e8400-e29b-41d4-a716-446655440000
    """
    with closing(open_store(gate)) as store:
        record = auditing.flow_record(store, whole_dfid(store, dfid))
    if record is None:
        raise UsageError(f"there is no flow `{dfid}` in the record of `{gate}`", hint=f"sds flows --gate {gate}")
    if as_json:
        print_json(record)
        return
    with reading(unreadable(record["decision_flows"]["dfid"])):
        _show(record)


def flows(
    gate: GateOption = "refund",
    limit: Annotated[int, typer.Option("--limit", min=1, max=10_000, help="The maximum number of flows.")] = 20,
    state: Annotated[
        str | None, typer.Option("--state", help=f"Only flows in this state: {', '.join(get_args(State))}.")
    ] = None,
    undecided_only: Annotated[
        bool, typer.Option("--undecided", help="Only flows that nobody has decided and no human is asked about.")
    ] = False,
    as_json: JsonFlag = False,
) -> None:
    """List flows, the newest first. Each line has the time, dfid, event, state, action and outcome.

    Example: sds flows --limit 5
    """
    if state is not None and state not in get_args(State):
        raise UsageError(f"there is no state `{state[:40]}`", hint=", ".join(get_args(State)))
    where = ["f.state = ?"] if state else []
    where += [_BY_INDEX] if state in _UNFINISHED else []
    where += [undecided.WAITS] if undecided_only else []
    with closing(open_store(gate)) as store:
        rows = store.rows(
            "SELECT f.created_at_ms, f.dfid, s.name FROM decision_flows f LEFT JOIN sagas s ON s.dfid = f.dfid"
            f" WHERE {' AND '.join(where) or 'TRUE'} ORDER BY f.created_at_ms DESC, f.dfid LIMIT ?",
            (*([state] if state else []), limit + 1),
        )
        answers = [(at_ms, saga, answer(store, dfid)) for at_ms, dfid, saga in rows[:limit]]
    known = [(at_ms, saga, became) for at_ms, saga, became in answers if became]
    data = [{"opened": when(at_ms), **became.as_data(), "saga": saga} for at_ms, saga, became in known]
    print_either(as_json, data, (_flow_line(*each) for each in known), none="no flows")
    if len(rows) > limit and not as_json:
        echo(f"only the newest {limit} are listed: --limit lists more", err=True)


def _flow_line(at_ms: int, saga: str | None, of: Answer) -> str:
    became = (of.execution or of.tag or of.reason_code or "") + ("  retryable" if of.retryable else "")
    return f"{when(at_ms)}  {of.dfid}  {of.event_id}  {of.state}  {of.action or saga or '-'}  {became}"


def verify(
    gate: GateOption = "refund",
    kept: Annotated[
        str | None, typer.Option("--head", help="A head kept elsewhere, as `sds ledger head` prints it, signed or not.")
    ] = None,
    public_key: Annotated[
        Path | None,
        typer.Option(
            "--public-key",
            help="The public keys: a copy of the gate's `ledger.pub`. Default: those in the gate's folder.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Verify a record against its ledger. It checks the hash chain, the tables and the signatures. Exit code 1: a fault.

    Example: sds ledger verify --public-key ledger.pub --head "$(cat head.txt)"
    """
    expected = _parse_head(kept) if kept is not None else None
    known = (read_public(public_key), public_key) if public_key is not None else known_public_keys(gate_home(gate))
    with closing(open_store(gate)) as store:
        report = auditing.verify(store, expected, known[0] if known else None)
    facts = {"entries": report.entries, "head": str(report.head), "faults": report.faults, "blind": report.blind}
    facts |= {"signed": report.signed, "public_key": str(known[1]) if known else None, "notes": report.notes}
    print_either(as_json, facts, _report_lines(report, known[1] if known else None))
    if report.faults:
        raise SdsError("the record was altered or damaged", reason_code="RECORD_DAMAGED")


def _report_lines(report: auditing.Report, public_key: Path | None) -> Iterator[str]:
    yield from (*report.faults, *report.notes)
    yield f"{report.entries} entries, {counted(len(report.faults), 'fault')}, head {report.head}"
    signed = "no entry is signed" if report.signed is None else f"signed up to entry {report.signed}"
    yield f"{signed}; verified with {f'the keys in `{public_key}`' if public_key else 'no key'}"
    if report.blind:
        yield f"not detectable {report.blind}"


def head(
    gate: GateOption = "refund",
    sign: Annotated[bool, typer.Option("--sign", help="Sign the head and print it with its signature.")] = False,
) -> None:
    """Print the head of the ledger. Keep it where the ledger's keeper cannot write.

    Example: sds ledger head --sign > head.txt
    """
    with closing(open_store(gate)) as store:
        if not sign:
            echo(str(ledgers.head(store)))
            return
        key = ledger_key(gate_home(gate), store)
        signed = ledgers.sign_head(store, key, now_ms())
    if signed is None:
        raise UsageError("there is no entry to sign yet", hint="the first decision writes one")
    echo(str(signed))


def recover(
    gate: OpenedGate = "refund",
    reason: Reason = "after a crash",
    as_json: JsonFlag = False,
) -> None:
    """Recover a gate after a crash. It ends flows whose lease is over, and resolves each order in flight by its key.

    A half-done saga is taken back or goes to a human, as the model chooses from the contract's menu.
    A saga goes on after a step that the outside had only accepted at first.

    Example: sds recover
    """
    definition, reason = defined(gate), _given(reason)
    with closing(open_store(definition.name)) as store:
        registry.write_act(store, "RECOVER", who=operator(), reason=reason, now_ms=now_ms())
    with recovery_kernel(definition, gate_home(definition.name)) as kernel:
        outcome = recovery.recover(kernel, now_ms=now_ms())
    if outcome.sagas_dirty:
        outcome = _compensated(definition, outcome)
    counts = ("interrupted", "success", "failed", "unknown", "leased", "sagas_ended", "sagas_dirty")
    facts = {name: getattr(outcome, name) for name in counts} | {"errors": len(outcome.errors)}
    lines = [", ".join(f"{name}: {count}" for name, count in facts.items())]
    if outcome.leased:
        lines.append(
            "another process may still decide leased flows: run the same command again when their lease is over"
        )
    print_either(as_json, facts, lines)
    if outcome.errors:
        raise SdsError(f"{counted(len(outcome.errors), 'flow')} could not be recovered: {'; '.join(outcome.errors)}")


def _compensated(gate: GateDefinition, before: Recovered) -> Recovered:
    """Load the model and have it choose the compensation of every half-done saga; return the counts of both recoveries."""
    from sds.gate import Gate  # noqa: PLC0415

    with Gate.load(gate) as opened:
        again = opened.recover()
    return replace(
        before, sagas_ended=before.sagas_ended + again.sagas_ended, sagas_dirty=again.sagas_dirty, errors=again.errors
    )


def halt(reason: Reason, gate: GateOption = "refund") -> None:
    """Halt a gate from its next transaction on. Nothing is reserved, running flows are aborted, and new cases go to a human.

    Example: sds halt --reason "wrong fares in the ticket system"
    """
    _set_halted(gate, halted=True, reason=reason)


def resume(reason: Reason, gate: GateOption = "refund") -> None:
    """Lift the halt of a gate.

    Example: sds resume --reason "fares corrected"
    """
    _set_halted(gate, halted=False, reason=reason)


def _set_halted(gate: str, *, halted: bool, reason: str) -> None:
    reason = _given(reason)
    with closing(open_store(gate)) as store:
        changed = registry.set_halted(store, halted, by=operator(), reason=reason, now_ms=now_ms())
    word = "halted" if halted else "running"
    echo(f"{gate}: {word}" if changed else f"{gate}: was already {word}")


def _given(reason: str) -> str:
    try:
        return said("reason", reason)
    except UsageError as error:
        raise UsageError(str(error), hint=error.hint or '--reason "..."') from None


def _parse_head(text: str) -> ledgers.Head | Checkpoint:
    if match := _SIGNED_HEAD.fullmatch(text.strip()):
        return Checkpoint(int(match[1]), match[2], int(match[3]), int(match[4]), match[5], match[6])
    match = _HEAD.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"`{text[:80]}` is not a head", hint="give the output of `sds ledger head`: INDEX:HASH")
    return ledgers.Head(int(match[1]), match[2])


def _show(record: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    flow, snapshot = record["decision_flows"], record["context_snapshots"] or {}
    proposal, verdict, order = (record[t] or {} for t in ("policy_proposals", "dim_validations", "execution_log"))
    facts = {k: flow[k] for k in ("dfid", "parent_dfid", "agent_id", "state", "tag", "contract_hash")}
    print_facts(console, "flow", {"opened": when(flow["created_at_ms"]), **facts})
    print_facts(console, "trigger", json.loads(flow["trigger_event"]))
    if snapshot:
        body = json.loads(snapshot["body"])
        print_facts(console, f"snapshot {snapshot['snapshot_id']}", {**body["fields"], "version": body["version"]})
        console.print("prompt")
        for text in json.loads(snapshot["prompt"]):
            console.print("\n".join(f"  | {line}" for line in text.splitlines()))
        suspected = json.loads(snapshot["security"])
        if suspected:
            print_facts(console, "security", {"patterns found in the claim": ", ".join(suspected)})
    for attempt in record["attempts"]:
        console.print(f"rejected attempt {attempt['attempt_number']}")
        _reasons(console, attempt["reasons"])
    _proposal(console, proposal)
    print_facts(console, "rationale", _rationale(record))
    if verdict:
        facts = {k: verdict[k] for k in ("outcome", "gate_reached", "attempt_number")}
        print_facts(console, "verdict", {"at": when(verdict["evaluated_at_ms"]), **facts})
        _reasons(console, verdict["reasons"])
        print_facts(console, "drift", json.loads(verdict["drift"] or "{}"))
    _saga(console, record)
    _humans(console, record)
    if order:
        facts = {k: order[k] for k in ("status", "kind", "params", "idempotency_key", "external_receipt")}
        print_facts(console, "receipt", facts)
    print_facts(console, "ledger", {str(entry["idx"]): _entry(entry) for entry in record["ledger"]})


def _entry(entry: dict[str, Any]) -> str:
    """Return an entry of the ledger on one line, with what the executor said of the order."""
    said = json.loads(entry["body"]).get("detail")
    return f"{when(entry['at_ms'])} {entry['kind']} {entry['entry_hash']}" + (f"  {said}" if said else "")


def _proposal(console: Console, proposal: dict[str, Any]) -> None:
    if not proposal:
        return
    certain = {} if proposal["confidence"] is None else {"confidence": f"{proposal['confidence']:.3f}"}
    print_facts(console, "proposal", {"bytes": proposal["proposal"], "model": proposal["model"], **certain})
    alternatives = json.loads(proposal["alternatives"])
    if isinstance(alternatives, str):
        console.print(f"alternatives: {alternatives}")
    for choice in alternatives if isinstance(alternatives, list) else ():
        said = f"alternatives of {choice['choice']} ({choice['z']:.3g} of the unmasked probability)"
        print_facts(console, said, {choice["chosen"]: shares(choice["probabilities"])})


def _rationale(record: dict[str, Any]) -> dict[str, Any]:
    """Return the model's rationale, given with its proposal or after the decision, by when it was given."""
    if record["rationale"] is not None:
        return {"after the decision": record["rationale"]}
    proposal = parse_recorded((record["policy_proposals"] or {}).get("proposal", "").encode())
    if not isinstance(proposal, Proposal) or proposal.rationale is None:
        return {}
    return {"before the decision": proposal.rationale}


def _saga(console: Console, record: dict[str, Any]) -> None:
    saga = record["saga"] or {}
    print_facts(console, "saga", {k: saga[k] for k in ("name", "phase", "compensation") if saga})
    for child in record["children"]:
        print_facts(console, f"child {child['dfid']}", {k: v for k, v in child.items() if k != "dfid"})
    for reversal in record["reversals"]:
        facts = {k: reversal[k] for k in ("status", "reference", "idempotency_key")}
        print_facts(console, f"reversal of {reversal['dfid']}", facts)


def _humans(console: Console, record: dict[str, Any]) -> None:
    if human := record["human_decisions"]:
        names = ("decision", "who", "reason", "impact", "seen", "snapshot_id", "proposal")
        print_facts(console, "human", {"at": when(human["decided_at_ms"]), **{k: human[k] for k in names}})
    for entry in record["ledger"]:
        if by := json.loads(entry["body"]).get("by"):
            print_facts(console, "taken over" if entry["kind"] == "ADOPTED" else "settled by a human's word", by)


def _reasons(console: Console, text: str) -> None:
    for gate, code, message in json.loads(text):
        console.print(f"  gate {gate}: {code}: {message}")
