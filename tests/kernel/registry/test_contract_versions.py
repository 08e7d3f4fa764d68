"""The record knows which contracts there were, who put them in force, and why."""

from __future__ import annotations

import pytest

from sds.kernel.audit import verify
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ContractError
from sds.kernel.human.cases import registered_terms
from sds.kernel.registry import compatibility, registry
from sds.kernel.registry.contract_versions import Version, registered_contract, versions
from tests.kernel.durable import World, compensate, contract
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


TURNED = ("mission: Decide claims.", 'mission: "Decide \\u202e\\e[2J claims."')


def test_a_new_version_with_control_characters_is_refused_with_their_place(world: World):
    with pytest.raises(ContractError) as caught:
        registry.register(world.store, contract(("1.0.0", "2.0.0"), TURNED), by="operator", now_ms=7)
    assert "`mission` holds the character U+202E, which is not allowed" == str(caught.value)
    assert world.contract == registered_contract(world.store, world.contract.gate)


def test_a_contract_that_was_registered_when_it_could_hold_control_characters_stays_in_force(
    world: World, monkeypatch: pytest.MonkeyPatch
):
    old = contract(("1.0.0", "2.0.0"), TURNED)
    with monkeypatch.context() as as_it_was:
        as_it_was.setattr(compatibility, "refusal", lambda *_: None)
        registry.register(world.store, old, by="operator", now_ms=7)
    kernel = world.open_kernel(terms=old)
    packet = kernel.open(world.event())
    assert isinstance(packet, DecisionPacket)
    assert "CLOSED" == kernel.decide(packet, compensate(packet)).state
    assert old == registered_contract(world.store, old.gate)
    assert () == verify.verify(world.store).faults


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
