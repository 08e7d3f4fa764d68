"""Records of earlier versions.

Schema version 1: its agent went through no handshake, and there was nothing to revoke or to spend. Proposal schema 1: a
contract had `rationale_chars_max`, and a proposal its rationale before `context_ref`. Until schema 3 a proposal without
parameters had empty ones, until schema 4 its reason was called `reason_code`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.audit.agent_history import agent_record
from sds.kernel.canonical import digest
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import dim
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, parse_proposal, parse_recorded, write_proposal
from sds.kernel.human import review
from sds.kernel.human.cases import read_case, registered_terms
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import compatibility, registry
from sds.kernel.registry.contract_versions import registered_contract
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Store
from tests.kernel.authority import revoke
from tests.kernel.durable import (
    LEASE_MS,
    START_MS,
    World,
    compensate,
    contract,
    deny,
    escalate,
    refund,
    see_through,
    usual_contract,
)
from tests.kernel.humans import ALWAYS, resolve
from tests.kernel.orders import recovered
from tests.samples import as_under
from tests.stores.opened import opened_store

NEW = ("contract_revocations", "escalation_budgets", "checkpoints")


def write_version_1(path: Path) -> None:
    """Write what the first version wrote when a contract was registered."""
    with closing(opened_store(path)) as store, store.transaction():
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
    assert () == verify.verify(world.store).faults
    assert "SUCCESS" == world.decide(refund(), "C1").execution
    assert "ESCALATED" == world.decide(escalate, "C2").state
    revoke(world)
    assert ("ESCALATE",) == world.packet("C3").envelope.names
    assert () == verify.verify(world.store).faults
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
    with closing(opened_store(folder / "kernel.db")) as store, store.transaction():
        write_contract(store, terms, json.dumps(data))
    return terms


def with_its_rationale_last(packet: DecisionPacket) -> bytes:
    said = refund("40.00")(packet)
    return as_under("2.0.0", said).replace(b',"context_ref"', b',"rationale":"never flown","context_ref"')


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
    assert () == verify.verify(world.store).faults
    assert "ACTIVE" == world.decide(with_its_rationale_last, "C2").state
    newer = contract(ALWAYS, ("version: 1.0.0", "version: 1.1.0"), more=BEFORE)
    registry.register(world.store, newer, by="registry", now_ms=world.clock())
    world.kernel = world.open_kernel(terms=newer)
    assert "ABORTED" == resolve(world, answer.dfid, "ABORT").state
    assert () == verify.verify(world.store).faults
    world.close()


@pytest.fixture(params=["2.0.0", "3.0.0"])
def schema(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def under(schema: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *changes: tuple[str, str]) -> Iterator[World]:
    """A world as it was under a proposal schema: what it registers, and how it reads and writes."""
    with monkeypatch.context() as then:
        then.setattr(compatibility, "PROPOSAL_SCHEMA", schema)
        then.setattr(dim, "parse_proposal", parse_recorded)
        then.setattr(review, "write_proposal", lambda made: as_under(schema, write_proposal(made)))
        yield World(folder, terms=contract(*changes, more=f"memory: {{scope: key}}\nproposal_schema: {schema}\n"))


def upgrade(world: World, *changes: tuple[str, str]) -> None:
    """Register the same terms for this schema, as the next version."""
    world.contract = contract(("version: 1.0.0", "version: 1.1.0"), *changes)
    registry.register(world.store, world.contract, by="registry", now_ms=world.clock())
    world.kernel = world.open_kernel(terms=world.contract)


def test_what_was_decided_under_an_older_proposal_schema_is_read_audited_and_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch, schema: str
):
    with under(schema, folder, monkeypatch) as world:
        paid = world.decide(lambda packet: as_under(schema, compensate(packet)), "C1")
        assert "ACTIVE" == world.decide(lambda packet: b"nonsense", "C2").state
        denied = world.decide(lambda packet: as_under(schema, deny(packet)), "C3")
    assert ("SUCCESS", "CLOSED") == (paid.execution, denied.state)
    assert ["- DENY: decided", "- COMPENSATE 250.00: paid"] == world.packet("C4").texts[2].splitlines()[1:]
    upgrade(world)
    assert () == verify.verify(world.store).faults
    assert (paid, denied) == (world.kernel.open(world.event("C1")), world.kernel.open(world.event("C3")))
    case = read_case(world.store, world.contract, denied.dfid)
    assert (schema == "2.0.0") == (b'"params":{}' in case.said)
    assert isinstance(parse_proposal(case.said), str)
    assert "DENY" == case.action
    packet = world.packet("C5")
    refused = world.kernel.decide(packet, as_under(schema, deny(packet)))
    assert ("ACTIVE", 1) == (refused.state, len(world.column("SELECT 1 FROM attempts WHERE dfid = ?", packet.dfid)))
    assert "CLOSED" == world.kernel.decide(packet, deny(packet)).state
    assert () == verify.verify(world.store).faults
    world.close()


@pytest.mark.parametrize("decided_by", ["agent", "human"])
def test_an_order_of_an_older_proposal_schema_in_the_air_is_sent_again_under_its_one_key(
    folder: Path, monkeypatch: pytest.MonkeyPatch, schema: str, decided_by: str
):
    changes = (ALWAYS,) if decided_by == "human" else ()
    with under(schema, folder, monkeypatch, *changes) as world:
        world.rail.misfortunes = ["drop"]
        answer = world.decide(lambda packet: as_under(schema, compensate(packet)))
        if decided_by == "human":
            answer = resolve(world, answer.dfid, "OVERRIDE")
    assert "UNKNOWN" == answer.execution
    assert Recovered(success=1) == recovered(world)
    assert (2, 1, 1) == (len(world.rail.sent), len(set(world.rail.sent)), len(world.rail.paid()))
    assert () == verify.verify(world.store).faults
    world.close()


@pytest.mark.parametrize(("misfortune", "found"), [("lose", Recovered(success=1)), ("drop", Recovered(failed=1))])
def test_an_order_in_the_air_at_the_upgrade_is_paid_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, schema: str, misfortune: str, found: Recovered
):
    """What the rail never had is voided: its contract is not in force any more, and the event has a fresh flow."""
    with under(schema, folder, monkeypatch) as world:
        world.rail.misfortunes, world.rail.blind = [misfortune], True
        first = world.decide(lambda packet: as_under(schema, compensate(packet)))
    world.rail.blind = False
    upgrade(world)
    world.clock.advance(2 * LEASE_MS)
    assert found == recovered(world)
    again = see_through(world.kernel, world.event(), compensate)
    assert ("SUCCESS", misfortune == "lose") == (again.execution, again.dfid == first.dfid)
    assert 1 == len(world.rail.paid())
    assert () == verify.verify(world.store).faults
    world.close()


def test_a_case_of_an_older_proposal_schema_is_carried_out_by_a_human_in_the_form_of_today(
    folder: Path, monkeypatch: pytest.MonkeyPatch, schema: str
):
    with under(schema, folder, monkeypatch, ALWAYS) as world:
        waiting = world.decide(lambda packet: as_under(schema, compensate(packet)))
    assert "ESCALATED" == waiting.state
    upgrade(world, ALWAYS)
    assert ("SUCCESS", "COMPENSATE") == ((done := resolve(world, waiting.dfid, "OVERRIDE")).execution, done.action)
    (said,) = world.column("SELECT proposal FROM human_decisions")
    assert Proposal("COMPENSATE", (), "LONG_DELAY", str(parse_proposal(said).context_ref)) == parse_proposal(said)  # type: ignore[arg-type,union-attr]
    assert () == verify.verify(world.store).faults
    world.close()


@pytest.mark.parametrize(
    ("recorded", "rationale"),
    [
        (b'{"action":"PAY","params":{},"reason_code":"OWED","rationale":"a, b}","context_ref":"%b"}', "a, b}"),
        (b'{"action":"PAY","params":{},"reason_code":"OWED","rationale":"","context_ref":"%b"}', ""),
        (b'{"rationale":"why","action":"PAY","params":{},"reason_code":"OWED","context_ref":"%b"}', "why"),
        (b'{"action":"PAY","params":{},"reason_code":"OWED","context_ref":"%b"}', None),
        (b'{"rationale":"why","action":"PAY","reason_code":"OWED","context_ref":"%b"}', "why"),
        (b'{"action":"PAY","reason_code":"OWED","context_ref":"%b"}', None),
        (b'{"rationale":"why","action":"PAY","reason":"OWED","context_ref":"%b"}', "why"),
        (b'{"action":"PAY","reason":"OWED","context_ref":"%b"}', None),
    ],
)
def test_every_form_is_read_from_a_record(recorded: bytes, rationale: str | None):
    ref = "ab" * 32
    found = parse_recorded(recorded % ref.encode())
    assert Proposal("PAY", (), "OWED", ref, rationale) == found


def test_parameters_are_read_alike_in_every_form():
    ref = "ab" * 32
    paid = Proposal("PAY", (("amount", "1.00"),), "OWED", ref)
    assert paid == parse_proposal(write_proposal(paid)) == parse_recorded(write_proposal(paid))
    for schema in ("2.0.0", "3.0.0"):
        recorded = as_under(schema, write_proposal(paid))
        assert (str, paid) == (type(parse_proposal(recorded)), parse_recorded(recorded))


def test_no_form_is_read_that_none_had():
    for said in (
        b'{"action":"PAY","params":{},"reason":"OWED","context_ref":"%b"}',
        b'{"action":"PAY","reason":"OWED","rationale":"a","context_ref":"%b"}',
        b'{"action":"PAY","reason":"OWED","reason_code":"OWED","context_ref":"%b"}',
    ):
        assert isinstance(parse_recorded(said % (b"ab" * 32)), str)


def test_two_rationales_are_in_neither_form():
    both = b'{"rationale":"a","action":"PAY","params":{},"reason_code":"OWED","rationale":"b","context_ref":"%b"}'
    assert isinstance(parse_recorded(both % (b"ab" * 32)), str)
