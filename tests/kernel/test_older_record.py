"""Records of earlier versions.

Schema version 1: its agent went through no handshake, and there was nothing to revoke or to spend. Proposal schema 1: a
contract had `rationale_chars_max`, and a proposal its rationale before `context_ref`.
"""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from sds.kernel import audit, dim, ledger, registry
from sds.kernel.agent_record import agent_record
from sds.kernel.canonical import digest
from sds.kernel.contract import Contract
from sds.kernel.human_record import read_case, registered_terms
from sds.kernel.packet import DecisionPacket
from sds.kernel.proposal import Proposal, parse_proposal, parse_recorded
from sds.kernel.store import Store
from sds.kernel.versions import registered_contract
from tests.kernel.authority import revoke
from tests.kernel.durable import START_MS, World, contract, escalate, refund, usual_contract
from tests.kernel.humans import ALWAYS, resolve

NEW = ("contract_revocations", "escalation_budgets")


def write_version_1(path: Path) -> None:
    """Write what the first version wrote when a contract was registered."""
    with closing(Store(path)) as store, store.transaction():
        for table in NEW:
            store.run(f"DROP TABLE {table}")
        store.run("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
        write_contract(store, usual_contract(), usual_contract().model_dump_json())


def write_contract(store: Store, terms: Contract, body: str) -> None:
    store.insert(
        "contracts",
        hash=terms.hash,
        gate=terms.gate,
        agent_id=terms.agent_id,
        version=terms.version,
        mission_hash=terms.mission_hash,
        body=body,
        registered_at_ms=START_MS,
    )
    store.insert("agents", agent_id=terms.agent_id, gate=terms.gate, contract_hash=terms.hash, status="ACTIVE")
    row = ledger.rows_digest(store.rows("SELECT * FROM contracts"))
    said = {"hash": terms.hash, "gate": terms.gate, "agent_id": terms.agent_id, "by": "operator"}
    said |= {"version": terms.version, "owner": terms.owner, "row": row}
    ledger.append(store, START_MS, "CONTRACT", "", said)


def test_it_is_opened_verified_and_goes_on(folder: Path):
    write_version_1(folder / "kernel.db")
    world = World(folder)
    assert ["CONTRACT"] == world.column("SELECT kind FROM ledger")
    assert () == audit.verify(world.store).faults
    assert "SUCCESS" == world.decide(refund(), "C1").execution
    assert "ESCALATED" == world.decide(escalate, "C2").state
    revoke(world)
    assert ("ESCALATE",) == world.packet("C3").envelope.names
    assert () == audit.verify(world.store).faults
    record = agent_record(world.store, world.contract.agent_id, now_ms=world.clock())
    assert record is not None
    assert ((), "", "revoked") == (record.moves, record.contracts[0].who, record.contracts[0].standing)
    world.close()


BEFORE = "rationale: {order: before, chars_max: 20}\n"


def write_proposal_schema_1(folder: Path) -> Contract:
    """Write a contract as proposal schema 1 had it; return it under the hash it had."""
    terms = contract(ALWAYS, more=BEFORE)
    data = terms.model_dump(mode="json")
    del data["rationale"]
    data |= {"rationale_chars_max": 20, "proposal_schema": "1.0.0"}
    vars(terms)["hash"] = digest(data)
    with closing(Store(folder / "kernel.db")) as store, store.transaction():
        write_contract(store, terms, json.dumps(data))
    return terms


def with_its_rationale_last(packet: DecisionPacket) -> bytes:
    said = refund("40.00")(packet)
    return said.replace(b',"context_ref"', b',"rationale":"never flown","context_ref"')


def test_what_was_decided_under_proposal_schema_1_is_read_audited_and_resolved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    terms = write_proposal_schema_1(folder)
    world = World(folder, terms=terms)
    with monkeypatch.context() as then:
        then.setattr(dim, "parse_proposal", parse_recorded)  # which was how a proposal was read
        answer = world.decide(with_its_rationale_last, "C1")
    assert ("ESCALATED", "NOT_TRAVELLED: never flown") == (answer.state, answer.justification)
    case = read_case(world.store, terms, answer.dfid)
    assert isinstance(parse_proposal(case.said), str)
    assert ("REFUND_TICKET", "never flown") == (case.action, case.proposal.rationale if case.proposal else None)
    assert None is registered_terms(world.store, terms.gate).rationale
    known = registered_contract(world.store, terms.gate)
    assert known is not None
    assert terms.rationale == known.rationale
    assert () == audit.verify(world.store).faults
    assert "ACTIVE" == world.decide(with_its_rationale_last, "C2").state
    newer = contract(ALWAYS, ("version: 1.0.0", "version: 1.1.0"), more=BEFORE)
    registry.register(world.store, newer, by="registry", now_ms=world.clock())
    world.kernel = world.open_kernel(terms=newer)
    assert "ABORTED" == resolve(world, answer.dfid, "ABORT").state
    assert () == audit.verify(world.store).faults
    world.close()


@pytest.mark.parametrize(
    ("recorded", "rationale"),
    [
        (b'{"action":"PAY","params":{},"reason_code":"OWED","rationale":"a, b}","context_ref":"%b"}', "a, b}"),
        (b'{"action":"PAY","params":{},"reason_code":"OWED","rationale":"","context_ref":"%b"}', ""),
        (b'{"rationale":"why","action":"PAY","params":{},"reason_code":"OWED","context_ref":"%b"}', "why"),
        (b'{"action":"PAY","params":{},"reason_code":"OWED","context_ref":"%b"}', None),
    ],
)
def test_either_form_is_read_from_a_record(recorded: bytes, rationale: str | None):
    ref = "ab" * 32
    found = parse_recorded(recorded % ref.encode())
    assert Proposal("PAY", (), "OWED", ref, rationale) == found


def test_two_rationales_are_in_neither_form():
    both = b'{"rationale":"a","action":"PAY","params":{},"reason_code":"OWED","rationale":"b","context_ref":"%b"}'
    assert isinstance(parse_recorded(both % (b"ab" * 32)), str)
