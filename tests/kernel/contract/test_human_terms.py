"""The section `human` of a contract, and what is of HIGH impact."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.contract.human_terms import human_contract, impact
from sds.kernel.contract.schema import parse_contract
from sds.kernel.errors import ContractError
from tests.kernel.durable import (
    CONTRACT,
    World,
    contract,
    refund,
)
from tests.kernel.humans import ALWAYS, TERMS, change, escalated, refused, resolve
from tests.stores.opened import opened_store

DRAWS = ("    draws: {ticket.compensations_left: 1}\n", "    draws: {ticket.refundable_minor: amount}\n")


def human(section: str) -> str:
    return CONTRACT + "human:\n" + section


@pytest.mark.parametrize(
    ("section", "line", "message"),
    [
        ("  authority: [PAY]\n", 2, "human.authority.0: `PAY` is not one of the kinds"),
        (
            "  kinds: {ESCALATE: {reasons: [X]}}\n",
            2,
            "human.kinds.ESCALATE: must not be declared: every contract has this kind",
        ),
        (
            '  kinds: {DENY: {reasons: [X], when: ticket.mood == "calm"}}\n',
            2,
            "human.kinds.DENY: may have only `reasons`: it is the refusal",
        ),
        ("  when: ticket.nowhere > 1\n", 2, "human.when: "),
        ("  kinds:\n    PAY:\n      when: ticket.mood\n      reasons: [X]\n", 4, "human.kinds.PAY.when: expected bool"),
        (
            "  kinds:\n    PAY:\n      params: {n: {lo: 1, hi: 2}}\n      draws: {ticket.nowhere: n}\n      reasons: [X]\n",
            5,
            "human.kinds.PAY.draws.ticket.nowhere: `ticket.nowhere` is not a declared snapshot field",
        ),
        (
            "  kinds:\n    PAY:\n      params: {n: {lo: 1, hi: 2}}\n      spends: n\n      reasons: [X]\n",
            5,
            "human.kinds.PAY.spends: must have the same scale as what other kinds spend",
        ),
        (
            "  kinds:\n" + "".join(f"    K{n}: {{reasons: [X]}}\n" for n in range(13)),
            2,
            "human.kinds: must be, with the agent's kinds, 16 or fewer",
        ),
        ("  rank: captain\n", 2, "human.rank: is not a known field: the fields here are authority, kinds, when"),
    ],
)
def test_a_broken_human_section_is_refused_with_its_line(section: str, line: int, message: str):
    with pytest.raises(ContractError) as caught:
        parse_contract(human(section), "c.yaml")
    at = CONTRACT.count("\n") + line
    assert str(caught.value).startswith(f"c.yaml:{at}: {message}"), str(caught.value)


@pytest.mark.parametrize(("scale", "accepted"), [(2, True), (0, False)])
def test_a_humans_kind_spends_at_the_scale_of_the_kind_that_it_replaces(scale: int, accepted: bool):
    """Both feed the same counters: a human's 50 would be half a euro of the agent's limit."""
    only_goodwill = [(f"{draws}    spends: amount\n", draws) for draws in DRAWS]
    kind = f"GOODWILL: {{params: {{amount: {{lo: 1, hi: 50, scale: {scale}}}}}, spends: amount, reasons: [APOLOGY]}}"
    with nullcontext() if accepted else pytest.raises(ContractError) as caught:
        contract(*only_goodwill, more=f"human:\n  kinds:\n    {kind}\n")
    wanted = "human.kinds.GOODWILL.spends: must have the same scale as what other kinds spend, the agent's included"
    assert accepted or wanted in str(caught.value)  # type: ignore[union-attr]  # it was caught


def test_what_the_human_section_leaves_out_is_as_the_agent_has_it():
    plain, own = human_contract(contract()), human_contract(TERMS)
    assert contract().authority == plain.authority
    assert contract().kinds == plain.kinds
    assert TERMS.when == own.when
    assert {"APOLOGY"} < {*own.kinds["GOODWILL"].reasons} != {*TERMS.kinds["GOODWILL"].reasons}
    assert ((), 0, 50_000) == (
        own.escalation.always,
        own.escalation.confidence_min_pct,
        own.escalation.impact_high_minor,
    )
    assert own == human_contract(own)


def test_a_human_with_less_authority_than_the_agent_has_just_that(folder: Path):
    world = World(folder, terms=contract(ALWAYS, more="human: {authority: [DENY], when: 'true'}\n"))
    dfid = escalated(world, refund())
    assert "RBAC_DENIED" == refused(world, dfid, "OVERRIDE").reason_code
    assert "CLOSED" == resolve(world, dfid, "MODIFY", change("DENY", "NOT_ELIGIBLE")).state
    with closing(opened_store(world.path)) as store:
        assert () == verify.verify(store).faults
    world.close()


@pytest.mark.parametrize(
    ("action", "numbers", "expected"),
    [
        ("REFUND_TICKET", {"amount": 1}, "HIGH"),
        ("DENY", {}, "LOW"),
        ("GOODWILL", {"amount": 49_999}, "LOW"),
        ("GOODWILL", {"amount": 50_000}, "HIGH"),
        ("GOODWILL", {}, "HIGH"),
        ("NO_SUCH_KIND", {}, "HIGH"),
    ],
)
def test_impact_is_high_for_side_effects_large_amounts_and_whatever_is_not_known(
    action: str, numbers: dict[str, int], expected: str
):
    assert expected == impact(human_contract(TERMS), action, numbers)
