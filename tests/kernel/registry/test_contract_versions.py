"""The record knows which contracts there were, who put them in force, and why."""

from __future__ import annotations

import pytest

from sds.kernel.audit import verify
from sds.kernel.errors import ContractError
from sds.kernel.human.cases import registered_terms
from sds.kernel.registry import registry
from sds.kernel.registry.contract_versions import Version, registered_contract, versions
from tests.kernel.durable import World, contract
from tests.stores.records import alone


def test_a_new_version_supersedes_the_old_one_and_says_who_and_why(world: World):
    newer = contract(("1.0.0", "2.0.0"))
    registry.register(world.store, newer, by="operator", now_ms=7, who="ada", reason="new\nfares")
    old, new = versions(world.store)
    assert ("1.0.0", "superseded") == (old.version, old.standing)
    agent = world.contract.agent_id
    assert Version(newer.gate, agent, "2.0.0", newer.hash, "in force", 7, "ada", "new fares") == new
    assert () == verify.verify(world.store).faults


def test_the_registered_contract_is_read_back_whole(world: World):
    assert world.contract == registered_contract(world.store, world.contract.gate)
    found = registered_contract(world.store, world.contract.gate)
    assert found is not None
    assert world.contract.hash == found.hash
    assert registered_contract(world.store, "elsewhere") is None


@pytest.mark.parametrize("body", ["x", "5", "null", "[]", "{}"])
def test_a_registered_contract_that_cannot_be_read_is_said_to_be_so(world: World, body: str):
    alone(world.store, "UPDATE contracts SET body = ?", (body,))
    for read in (registered_contract, registered_terms):
        with pytest.raises(ContractError, match="a registered contract cannot be read by this program") as caught:
            read(world.store, world.contract.gate)
        assert "sds ledger verify" == caught.value.hint


def test_a_revoked_version_is_listed_as_revoked(world: World):
    with world.store.transaction():
        registry.ledger.append(world.store, 8, "REVOKED", "", {"hash": world.contract.hash})
    assert ["revoked"] == [version.standing for version in versions(world.store)]
