"""The packet freezes what one decision rests on, and what the model may read of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.context import Artifact
from sds.kernel.decision.packet import DecisionPacket, compile_packet, static_text, with_feedback
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState
from tests.kernel import world

TILL = world.contract()


def test_a_packet_carries_the_hashes_of_what_it_was_made_from():
    packet = world.packet(TILL)
    assert (TILL.hash, TILL.mission_hash, TILL.agent_id) == (packet.contract_hash, packet.mission_hash, packet.agent_id)
    assert world.FIELDS == packet.snapshot.fields == packet.situation.fields


def test_a_packet_expires_when_its_time_budget_is_spent():
    short = world.contract(("spend:", "budget: {ttl_ms: 1500}\nspend:"))
    assert 1500 == world.packet(short).expires_at_ms - world.packet(short).created_at_ms


def test_the_first_text_is_the_same_for_every_case():
    first, other = (
        world.packet(TILL),
        world.packet(TILL, world.situation(world.fields(claim_size="small")), evidence="x"),
    )
    assert first.texts[0] == other.texts[0]
    assert first.texts[1] != other.texts[1]


def test_no_hash_and_no_id_is_shown_to_the_model():
    packet = world.packet(TILL, evidence="please")
    text = "\n".join(packet.texts)
    for secret in (packet.snapshot.id, packet.contract_hash, packet.mission_hash, packet.dfid, packet.event_id):
        assert secret not in text


def evidence(letter: str) -> str:
    return world.packet(TILL, evidence=letter).texts[-1]


@pytest.mark.parametrize(
    ("letter", "shown"),
    [
        ("", "Claim: "),
        ("I was late.", "Claim: I was late."),
        ("line\none\ttwo\x00three", "Claim: line one two three"),
        ("caf\u00e9 \u202e\ud83d", "Claim: cafe  "),
        (
            "Flu\u0308ge f\u00fcr 250\u00a0\u20ac \u2013 \u201edon\u2019t\u201c \u2026",
            'Claim: Fluge fur 250 EUR - "don\'t" ...',
        ),
        ("Stra\u00dfe, \u0141\u00f3d\u017a, \u00c5ngstr\u00f6m", "Claim: Strasse, Lodz, Angstrom"),
        ("\u043f\u043e\u0435\u0437\u0434 X", "Claim:   X"),
        ("x" * 500, "Claim: " + "x" * 400),
        ("\n" * 10**6 + "end", "Claim:  end"),
    ],
)
def test_evidence_is_one_bounded_line_of_printable_ascii(letter: str, shown: str):
    assert shown == evidence(letter)


def test_a_packet_without_state_leaves_only_the_human():
    nothing = world.situation({})
    packet: DecisionPacket = world.packet(TILL, nothing, notes=("there is no state under this key",))
    assert ("ESCALATE",) == packet.envelope.names
    assert "Permitted: ESCALATE\n" == packet.texts[1]


def test_every_text_but_the_last_ends_its_line_so_that_none_runs_into_the_next():
    packet = with_feedback(compiled(memory="Decided before, newest first:\n- DENY: decided\n"), "Rejected before: PAY")
    assert 6 == len(packet.texts)
    assert all(text.endswith("\n") for text in packet.texts[1:-1])
    assert ("Rejected before: PAY\n", "Claim: please") == packet.texts[-2:]


def test_what_changes_last_comes_last():
    """Contract, what recurs, memory, numbers, feedback, evidence: a second attempt leaves what is before its feedback."""
    memory = "Decided before, newest first:\n- DENY: decided\n"
    first = compiled(memory=memory)
    told = with_feedback(first, "Rejected before: PAY")
    again = with_feedback(told, "Rejected before: PAY; DENY")
    assert memory == first.texts[2]
    assert first.texts[:4] == told.texts[:4] == again.texts[:4]
    assert ("Rejected before: PAY; DENY\n", first.texts[-1]) == again.texts[4:]
    assert first == with_feedback(again, "")


@pytest.mark.parametrize("memory", ["", "Decided before, newest first:\n- DENY: decided\n"])
@pytest.mark.parametrize("terms", [TILL, world.contract(("when: claim.due", "show: [claim.size]\nwhen: claim.due"))])
@pytest.mark.parametrize("due", [True, False])
def test_feedback_stands_before_the_evidence_whatever_else_there_is(terms: Contract, memory: str, due: bool):
    """Where nothing but DENY and ESCALATE is permitted and no number is shown, there is no text of numbers."""
    first = compiled(memory, terms, world.situation(world.fields(claim_due=due)))
    assert 3 + bool(memory) + (terms is TILL or due) == len(first.texts)
    told = with_feedback(with_feedback(first, "Rejected before: PAY"), "Rejected before: PAY; DENY")
    assert (*first.texts[:-1], "Rejected before: PAY; DENY\n", first.texts[-1]) == told.texts
    assert first == with_feedback(told, "")


@pytest.mark.parametrize(
    ("texts", "sections"),
    [
        (("a", "b\n", "Claim: c"), ("a", "b\nClaim:", " c")),
        (("a", "b\n", "10 to 20\n", "Claim: c"), ("a", "b\n", "10 to 20\nClaim: c")),
        (("a", "b\n", "Claim: no\n", "Claim: c"), ("a", "b\n", "Claim: no\nClaim: c")),
        (("a", "b\n", "c"), ("a", "b\n", "c")),
        (("a", "b"), ("a", "b", "")),
    ],
)
def test_all_that_is_read_is_cut_where_it_may_have_been_read_before(texts: tuple[str, ...], sections: tuple[str, ...]):
    found = replace(compiled(""), texts=texts).sections
    assert sections == found
    assert "".join(texts) == "".join(found)


def test_artifacts_stand_between_mission_and_kinds_and_without_any_the_text_is_as_it_was():
    plain = static_text(TILL)
    rules = Artifact("rules", 1, "0" * 64, "Pay what is owed.\n")
    mission = "Decide who is paid.\n"
    assert plain.startswith(f"{mission}Kinds of decision")
    assert plain.replace(mission, f"{mission}Reference rules:\nPay what is owed.\n", 1) == static_text(TILL, (rules,))


def test_the_form_names_the_kind_that_a_mandate_is_about():
    form = 'written as JSON {"action":"%s","reason":"REASON"}:'
    assert form % "KIND" in static_text(TILL)
    assert form % "PAY" in static_text(TILL, authority=("PAY",))


def compiled(memory: str, terms: Contract = TILL, now: EnvelopeInputs | None = None) -> DecisionPacket:
    plain = world.packet(terms, now, evidence="please")
    rules = Rules(terms)
    return compile_packet(
        terms,
        rules,
        dfid=plain.dfid,
        event_id=plain.event_id,
        key=plain.key,
        evidence="please",
        live=LiveState(plain.situation, "1", {}, terms.hash),
        envelope=plain.envelope,
        now_ms=world.NOW_MS,
        memory=memory,
    )
