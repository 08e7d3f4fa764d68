"""Intake: one flow for each event, whoever brings it and however often."""

from __future__ import annotations

import json
from collections import UserDict

import pytest

from sds.kernel.audit import verify
from sds.kernel.canonical import ID_CHARS_MAX
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import EventError, UsageError
from sds.kernel.flow.intake import EVENT_BYTES_MAX, parse_event, read_event
from sds.kernel.flow.states import Answer
from sds.kernel.human.cases import waiting
from sds.kernel.registry import registry
from tests.kernel.durable import LEASE_MS, World, contract, deny, refund, see_through

TERMS = contract()
SPELLING = "`ticket_id` has blanks around it, or is not in Unicode's composed form (NFC)"
GOOD = {"claim_id": "C1", "ticket_id": "T1", "text": "please"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the event is not a JSON object"),
        (None, "the event is not a JSON object"),
        ("C1", "the event is not a JSON object"),
        ({}, "the event has no text `claim_id`"),
        ({**GOOD, "ticket_id": 7}, "the event has no text `ticket_id`"),
        ({**GOOD, "text": None}, "the event has no text `text`"),
        ({**GOOD, "amount": 9999}, "the event has an unknown field `amount`"),
        ({**GOOD, 5: "x"}, "the event has an unknown field `5`"),
        (
            {**GOOD, "x\nerror: all is well" + "!" * 99: 1},
            f"the event has an unknown field `x error: all is well{'!' * 44}`",
        ),
        ({**GOOD, "claim_id": ""}, f"`claim_id` is not 1 to {ID_CHARS_MAX} printable characters"),
        ({**GOOD, "claim_id": "C1 "}, SPELLING.replace("ticket", "claim")),
        ({**GOOD, "ticket_id": "T\n1"}, f"`ticket_id` is not 1 to {ID_CHARS_MAX} printable characters"),
        ({**GOOD, "ticket_id": "TE\u0301"}, SPELLING),
        ({**GOOD, "text": "\ud800"}, "the event is not text that can be stored as UTF-8"),
        ({**GOOD, "text": "x" * EVENT_BYTES_MAX}, f"the event is larger than {EVENT_BYTES_MAX} bytes"),
        ({**GOOD, "text": "€" * (EVENT_BYTES_MAX // 2)}, f"the event is larger than {EVENT_BYTES_MAX} bytes"),
    ],
)
def test_a_malformed_event_is_told_in_one_line(data: object, message: str):
    with pytest.raises(EventError) as caught:
        read_event(TERMS, data)
    assert message == str(caught.value)
    assert "EVENT_INVALID" == caught.value.reason_code


class _Fails(dict[str, str]):
    def __getitem__(self, name: str) -> str:
        raise RuntimeError(f"no\n{name}")


class _Changes(UserDict[str, str]):
    """Gives another text each time it is asked."""

    reads = 0

    def __getitem__(self, name: str) -> str:
        self.reads += 1
        return f"{self.reads}"


def test_a_mapping_that_fails_is_an_event_that_cannot_be_read():
    with pytest.raises(EventError, match="the event cannot be read: no claim_id") as caught:
        read_event(TERMS, _Fails(GOOD))
    assert "EVENT_INVALID" == caught.value.reason_code


def test_a_mapping_is_read_once_so_that_what_was_checked_is_what_is_decided():
    read = read_event(TERMS, _Changes(GOOD))
    assert ("1", "2", "3") == (read.id, read.key, read.evidence)
    assert parse_event(TERMS, read.body) == read


@pytest.mark.parametrize("text", ["", "{", b"\xff\xfe", "[" * 100_000, "NaN", "[]", '{"claim_id": "C1"}', " " * 10**6])
def test_text_that_is_no_event_is_refused(text: str | bytes):
    with pytest.raises(EventError) as caught:
        parse_event(TERMS, text)
    assert 1 == len(str(caught.value).splitlines())


@pytest.mark.parametrize("encoded", [False, True], ids=["text", "bytes"])
def test_a_byte_order_mark_is_told_with_its_mend(encoded: bool):
    text = "\ufeff" + json.dumps(GOOD)
    with pytest.raises(EventError, match="the event begins with a byte order mark") as caught:
        parse_event(TERMS, text.encode() if encoded else text)
    assert "save it as UTF-8 without a byte order mark" == caught.value.hint


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"])
def test_an_event_in_another_encoding_is_refused_with_its_mend(encoding: str):
    for text in (json.dumps(GOOD), " \n" + json.dumps(GOOD), "1", "[]"):
        with pytest.raises(EventError, match="the event is UTF-16 or UTF-32, not UTF-8") as caught:
            parse_event(TERMS, text.encode(encoding))
        assert "save it as UTF-8 without a byte order mark" == caught.value.hint


def test_an_event_that_is_not_utf_8_is_told_where():
    with pytest.raises(EventError, match="the event is not UTF-8 at byte 50") as caught:
        parse_event(TERMS, json.dumps({**GOOD, "text": "caf\u00e9"}, ensure_ascii=False).encode("latin-1"))
    assert "save it as UTF-8 without a byte order mark" == caught.value.hint


def test_bytes_in_utf_8_are_read_as_the_text_they_are():
    event = {**GOOD, "text": "caf\u00e9 \U0001f600"}
    assert read_event(TERMS, event) == parse_event(TERMS, json.dumps(event, ensure_ascii=False).encode())


def test_an_event_is_read_the_same_whatever_the_order_of_its_fields():
    backwards = dict(reversed(GOOD.items()))
    assert read_event(TERMS, GOOD) == parse_event(TERMS, json.dumps(backwards, indent=4))


def test_the_first_to_bring_an_event_gets_the_packet_and_the_second_is_told_to_wait(world: World):
    first, second = world.kernel.open(world.event()), world.kernel.open(world.event())
    assert isinstance(first, DecisionPacket)
    assert isinstance(second, Answer)
    assert (True, first.dfid, "ACTIVE") == (second.pending, second.dfid, second.state)


def test_the_same_event_gives_the_stored_answer(world: World):
    answer = world.decide(refund())
    assert answer == world.kernel.open(world.event())
    assert [(answer.dfid, "T1", "REFUND_TICKET", 4000)] == world.rail.paid()


@pytest.mark.parametrize("decided", [False, True])
def test_the_same_event_with_another_body_is_refused(world: World, decided: bool):
    packet = world.packet()
    if decided:
        world.kernel.decide(packet, refund()(packet))
    with pytest.raises(EventError, match="event `C1` was seen with another body") as caught:
        world.kernel.open(world.event(text="twice as much, please"))
    assert ("EVENT_CONFLICT", packet.dfid) == (caught.value.reason_code, caught.value.dfid)
    assert "send what was sent first, or give the event an id of its own" == caught.value.hint


def test_a_flow_whose_holder_is_gone_is_taken_over_when_its_lease_ends(world: World):
    first = world.packet()
    world.clock.advance(LEASE_MS - 1_001)
    assert isinstance(world.kernel.open(world.event()), Answer)
    world.clock.advance(1_002)
    second = world.packet()
    assert (first.dfid, "ABORTED", "INTERRUPTED") == world.store.row(
        "SELECT dfid, state, tag FROM decision_flows WHERE dfid = ?", (first.dfid,)
    )
    assert [first.dfid] == world.column("SELECT parent_dfid FROM decision_flows WHERE dfid = ?", second.dfid)


def test_a_holder_that_comes_back_after_its_lease_cannot_decide(world: World):
    late = world.packet()
    world.clock.advance(LEASE_MS + 1)
    packet = world.packet()
    with pytest.raises(UsageError, match=f"flow `{late.dfid}` is no longer open") as caught:
        world.kernel.decide(late, refund()(late))
    assert "FLOW_CLOSED" == caught.value.reason_code
    world.kernel.decide(packet, refund()(packet))
    assert 1 == len(world.rail.paid())


def test_an_interrupted_flow_is_decided_once_in_the_ledger(world: World):
    packet = world.packet()
    world.clock.advance(LEASE_MS + 1)
    world.packet()
    kinds = world.column("SELECT kind FROM ledger WHERE dfid = ?", packet.dfid)
    assert ["DECIDED"] == kinds
    assert () == verify.verify(world.store).faults


def test_an_event_is_started_anew_at_most_as_often_as_the_contract_says(world: World):
    flows = []
    for _ in range(1 + world.contract.retry.restarts_max):
        flows.append(world.packet().dfid)
        world.clock.advance(LEASE_MS + 1)
    last = world.kernel.open(world.event())
    assert isinstance(last, Answer)
    assert (flows[-1], "ESCALATED", "INTERRUPTED", False) == (last.dfid, last.state, last.tag, last.pending)
    assert [flows[-1]] == [case.dfid for case in waiting(world.store, world.contract)]
    chain = world.store.rows("SELECT dfid, parent_dfid, restarts FROM decision_flows ORDER BY restarts")
    assert [(flow, parent, n) for n, (flow, parent) in enumerate(zip(flows, [None, *flows], strict=False))] == chain


def test_after_drift_the_next_opening_starts_anew_as_a_child(world: World):
    first = world.packet()
    world.tickets.put("T1", refundable_minor=15_000)
    answer = world.kernel.decide(first, refund("160.00")(first))
    assert ("ABORTED", "STATE_DRIFT_DETECTED", "REJECTED") == (answer.state, answer.tag, answer.outcome)
    second = world.packet()
    done = world.kernel.decide(second, refund("150.00")(second))
    assert (first.dfid, "CLOSED", "SUCCESS") == (done.parent_dfid, done.state, done.execution)


def test_drift_that_never_ends_ends_after_the_last_restart(world: World):
    def move_on(packet: DecisionPacket) -> bytes:
        world.tickets.put("T1", refundable_minor=int(packet.situation.fields["ticket.refundable_minor"]) - 1)
        return refund()(packet)

    answer = see_through(world.kernel, world.event(), move_on)
    assert ("ESCALATED", "STATE_DRIFT_DETECTED", []) == (answer.state, answer.tag, world.rail.paid())
    assert [4] == world.column("SELECT count(*) FROM decision_flows")


def test_a_decision_that_came_to_its_own_end_is_not_started_anew(world: World):
    answer = world.decide(deny)
    world.clock.advance(LEASE_MS + 1)
    assert answer == world.kernel.open(world.event())


def test_a_preview_claims_and_records_nothing(world: World):
    head = verify.verify(world.store).head
    packet = world.kernel.preview(world.event())
    assert ("preview", ("COMPENSATE", "DENY", "ESCALATE", "REFUND_TICKET")) == (packet.dfid, packet.envelope.names)
    assert head == verify.verify(world.store).head
    assert [] == world.column("SELECT 1 FROM decision_flows")
    with pytest.raises(UsageError, match="flow `preview` is no longer open"):
        world.kernel.decide(packet, refund()(packet))


def test_two_gates_may_use_the_same_event_identity(world: World):
    other = contract(("gate: claims", "gate: others"), ("agent_id: claims-agent", "agent_id: others-agent"))
    registry.register(world.store, other, by="registry", now_ms=1)
    kernel = world.open_kernel(terms=other)
    assert isinstance(world.kernel.open(world.event()), DecisionPacket)
    assert isinstance(kernel.open(read_event(other, GOOD)), DecisionPacket)


def test_an_event_that_gives_a_name_twice_is_refused(world: World):
    with pytest.raises(EventError, match="the event is not JSON: a name is given twice"):
        parse_event(world.contract, '{"claim_id":"C1","claim_id":"C2","ticket_id":"T1","text":"please"}')
