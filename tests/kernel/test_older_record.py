"""A record of schema version 1: its agent went through no handshake, and there was nothing to revoke or to spend."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from sds.kernel import audit, ledger, registry
from sds.kernel.agent_record import agent_record
from sds.kernel.store import Store
from tests.kernel.durable import START_MS, World, escalate, refund, usual_contract

NEW = ("contract_revocations", "escalation_budgets")


def write_version_1(path: Path) -> None:
    """Write what the first version wrote when a contract was registered."""
    terms = usual_contract()
    with closing(Store(path)) as store, store.transaction():
        for table in NEW:
            store.run(f"DROP TABLE {table}")
        store.run("UPDATE meta SET value = '1' WHERE key = 'schema_version'")
        store.insert(
            "contracts",
            hash=terms.hash,
            gate=terms.gate,
            agent_id=terms.agent_id,
            version=terms.version,
            mission_hash=terms.mission_hash,
            body=terms.model_dump_json(),
            registered_at_ms=START_MS,
        )
        store.insert("agents", agent_id=terms.agent_id, gate=terms.gate, contract_hash=terms.hash, status="ACTIVE")
        row = ledger.rows_digest(store.rows("SELECT * FROM contracts"))
        body = {"hash": terms.hash, "gate": terms.gate, "agent_id": terms.agent_id, "by": "operator"}
        body |= {"version": terms.version, "owner": terms.owner, "row": row}
        ledger.append(store, START_MS, "CONTRACT", "", body)


def test_it_is_opened_verified_and_goes_on(folder: Path):
    write_version_1(folder / "kernel.db")
    world = World(folder)
    assert ["CONTRACT"] == world.column("SELECT kind FROM ledger")
    assert () == audit.verify(world.store).faults
    assert "SUCCESS" == world.decide(refund(), "C1").execution
    assert "ESCALATED" == world.decide(escalate, "C2").state
    registry.revoke(world.store, world.contract.hash, who="me", reason="test", now_ms=world.clock())
    assert ("ESCALATE",) == world.packet("C3").envelope.names
    assert () == audit.verify(world.store).faults
    record = agent_record(world.store, world.contract.agent_id, now_ms=world.clock())
    assert record is not None
    assert ((), "", "revoked") == (record.moves, record.contracts[0].who, record.contracts[0].standing)
    world.close()
