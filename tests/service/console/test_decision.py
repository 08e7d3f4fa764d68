"""The page of one decision: the whole record to reviewers, and no text of it to who may only read."""

from __future__ import annotations

import json

from sds.kernel.audit.verify import flow_record
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.service.console.decision import without_texts
from sds.service.console.words import FOR_REVIEWERS
from tests.kernel.durable import refund
from tests.service.console.office import Office, Visitor, text

TEXTS = ("The bag of Jane Doe.", "She wept", "Jane Doe has rung")


def says(packet: DecisionPacket) -> bytes:
    """Propose with a rationale that nobody asked for, which is rejected, then without."""
    why = None if packet.feedback else "She wept"
    return write_proposal(Proposal("REFUND_TICKET", (("amount", "40.00"),), "NOT_TRAVELLED", packet.snapshot.id, why))


def test_a_decision_shows_its_texts_to_reviewers_alone(office: Office, ada: Visitor) -> None:
    dfid = office.hand_over("C-1", says, TEXTS[0])
    ada.sends(f"/console/cases/claims/{dfid}", decision="ABORT", reason=TEXTS[2])
    page = f"/console/decisions/claims/{dfid}"
    whole = text(ada.get(page).text)
    with Visitor(office) as reviewer, Visitor(office) as reader:
        reviewer.log_in(office.key("review-and-read", "read", "review", gates=("claims",)))
        reader.log_in(office.key("reader", "read", "operate"))
        reviewed, shown = (text(visitor.get(page).text) for visitor in (reviewer, reader))
    assert [True] * 3 == [each in whole for each in TEXTS]
    assert [True] * 3 == [each in reviewed for each in TEXTS]
    assert [False] * 3 == [each in shown for each in TEXTS]
    for kept in (
        "Event for reviewers claim_id C-1",
        "What the model read for reviewers",
        "ABORT who ada reason for reviewers",
    ):
        assert kept in shown
    assert "HUMAN REJECTED, ABORT, ada, for reviewers" in shown


def test_of_a_record_without_texts_codes_and_numbers_are_left(office: Office) -> None:
    record = flow_record(office.claims.store, office.hand_over("C-1", refund("40.00"), "Secret evidence.")) or {}
    record["policy_proposals"] |= {"justification": "NOT_TRAVELLED: Secret why", "proposal": "Secret proposal"}
    record["dim_validations"]["reasons"] = '[[3, "APPROVAL_REQUIRED", "Secret line"]]'
    record["human_decisions"] = {"decision": "MODIFY", "reason": "Secret reason", "justification": "APOLOGY: Secret"}
    record["rationale"] = "Secret afterthought"
    left = without_texts(office.claims.contract, record)
    assert "Secret" not in str(left)
    justified = [left[table]["justification"] for table in ("policy_proposals", "human_decisions")]
    assert ["NOT_TRAVELLED", "APOLOGY"] == justified
    assert [[3, "APPROVAL_REQUIRED", FOR_REVIEWERS]] == json.loads(left["dim_validations"]["reasons"])
    event = json.loads(left["decision_flows"]["trigger_event"])
    assert {"claim_id": "C-1", "ticket_id": "T-C-1", "text": FOR_REVIEWERS} == event
    assert 20_000 == json.loads(left["context_snapshots"]["body"])["fields"]["ticket.refundable_minor"]


def test_a_field_is_shown_by_its_label_beside_its_path_escaped_on_the_pages_of_case_and_decision(
    office: Office, ada: Visitor
) -> None:
    dfid = office.hand_over("C-1")
    case, record = (ada.get(f"/console/{room}/claims/{dfid}").text for room in ("cases", "decisions"))
    assert "Compensations &lt;left&gt;" in case
    assert "Compensations &lt;left&gt;" in record
    assert "Compensations <left> ticket.compensations_left 1 1" in text(case)
    assert "Compensations <left> (ticket.compensations_left) 1" in text(record)
    assert "ticket.mood calm calm" in text(case)
