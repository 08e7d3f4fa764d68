"""The texts of cases lie under a key for each case; what an older version wrote in clear is read as it is."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.audit.stored_decision import read_decided
from sds.kernel.canonical import digest
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.errors import EventError, StoreError
from sds.kernel.flow import intake
from sds.kernel.flow.states import Answer, answer
from sds.kernel.human import cases
from sds.kernel.registry import registry
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.storage.copying import keys_of_tables
from sds.kernel.storage.keyring import Keyring, Signer
from sds.kernel.storage.store import Store
from sds.kernel.storage.vault import PROMPT, PROPOSAL, TRIGGER, Texts, key_for_flow
from tests.kernel.durable import (
    LEASE_MS,
    SIGNER,
    World,
    contract,
    deny,
    escalate,
    nonsense,
    refund,
    see_through,
    together,
)
from tests.kernel.older import writing_in_clear
from tests.kernel.sagas import Script, run, terms
from tests.stores.opened import SQLITE, Chosen, opened_store
from tests.stores.records import alone, stranger_at

BEFORE = contract(more="rationale: {order: before, chars_max: 40}\n")
AFTER = contract(more="rationale: {order: after, chars_max: 40}\n")
CARD = "4111 1111 1111 1111"
NEWER = Signer(b"a key that came after, 32 bytes....")


class Rotated(Signer):
    """A signer with a newer key, whose older one still opens."""

    def derived(self, purpose: str) -> tuple[bytes, ...]:
        return (*NEWER.derived(purpose), *SIGNER.derived(purpose))


@pytest.fixture
def world(folder: Path) -> Iterator[World]:
    made = World(folder, terms=BEFORE)
    yield made
    made.close()


def because(text: str) -> object:
    def propose(packet: DecisionPacket) -> bytes:
        return write_proposal(
            Proposal("REFUND_TICKET", (("amount", "40.00"),), "NOT_TRAVELLED", packet.snapshot.id, rationale=text)
        )

    return propose


def decided(world: World, text: str = "please", name: str = "C1", why: str = "never flown") -> Answer:
    packet = world.kernel.open(world.event(name, text=text))
    assert isinstance(packet, DecisionPacket)
    return world.kernel.decide(packet, because(why)(packet), Decoding("m", facts={"prompt": "ab" * 32}))  # type: ignore[operator]


def on_disk(world: World) -> bytes:
    """Return all that the record's files hold, or on a server its rows."""
    if Chosen.kind != SQLITE:
        rows = [row for name in keys_of_tables() for row in world.store.rows(f"SELECT * FROM {name}")]
        return b"\n".join(each if isinstance(each, bytes) else str(each).encode() for row in rows for each in row)
    return b"".join(path.read_bytes() for path in world.folder.glob("kernel.db*"))


def test_no_text_of_a_case_stands_in_clear_in_any_file_of_the_record(folder: Path):
    world = World(folder, terms=AFTER)
    packet = world.kernel.open(world.event(text="my dog was ill"))
    assert isinstance(packet, DecisionPacket)
    world.kernel.decide(packet, b"rejected, and told in the record")
    made = world.kernel.decide(packet, refund()(packet), Decoding("m", facts={"prompt": "ab" * 32}))
    world.explain(made.dfid, "the dog is what counts")
    said = refund()(packet)
    for text in (
        "my dog was ill",
        "rejected, and told",
        "the dog is what counts",
        "Claim:",
        '","context_ref":"',
        "ab" * 32,
    ):
        assert text.encode() not in on_disk(world), text
    for data in (said, canonical_body(world), " ".join(packet.texts).encode()):
        assert hashlib.sha256(data).hexdigest().encode() not in on_disk(world)
    assert "my dog was ill" not in json.dumps(world.logged, default=str)
    assert () == verify.verify(world.store).faults
    world.close()


def canonical_body(world: World) -> bytes:
    return world.event(text="my dog was ill").body.encode()


def test_whoever_has_the_key_reads_all_of_it(world: World):
    made = decided(world, "my dog was ill")
    assert "NOT_TRAVELLED: never flown" == made.justification
    read = read_decided(world.store, made.dfid)
    assert read.packet.texts[-1] == "Claim: my dog was ill"
    assert (b'"rationale":"never flown"' in read.data, {"prompt": "ab" * 32}) == (True, read.decoding.facts)
    record = verify.flow_record(world.store, made.dfid) or {}
    assert "my dog was ill" == json.loads(record["decision_flows"]["trigger_event"])["text"]
    assert "my dog was ill" == cases.read_case(world.store, world.contract, made.dfid).trigger["text"]
    assert world.event(text="my dog was ill") == replace(
        intake.recorded_event(world.store, world.contract, made.dfid), fingerprint=""
    )


def test_a_card_number_is_in_no_prompt_no_record_no_log_and_no_packet(world: World):
    packet = world.kernel.open(world.event(text=f"charge {CARD} back"))
    assert isinstance(packet, DecisionPacket)
    world.kernel.decide(packet, because("x")(packet))  # type: ignore[operator]
    assert "Claim: charge [card] back" == packet.texts[-1]
    assert "Claim: charge [card] back" == read_decided(world.store, packet.dfid).packet.texts[-1]
    assert CARD not in repr((packet, world.logged, world.event(text=CARD)))


def test_the_same_event_is_recognised_by_what_was_masked_and_another_is_not(world: World):
    made = decided(world, f"charge {CARD} back")
    again = world.kernel.open(world.event(text=f"charge {CARD} back"))
    assert made == again
    for other in ("charge 5555 5555 5555 4444 back", "charge [card] back", f"charge {CARD} back!"):
        with pytest.raises(EventError, match="event `C1` was seen with another body"):
            world.kernel.open(world.event(text=other))


def test_what_an_event_is_recognised_by_is_keyed(world: World):
    event = world.event(text=CARD)
    world.kernel.open(event)
    (stored,) = world.column("SELECT body_hash FROM events")
    assert stored not in (digest(event.body), digest(event.original))
    assert (stored,) == Keyring(SIGNER).fingerprints(event.original)


def test_an_event_without_a_text_needs_no_key(folder: Path):
    world = World(folder, terms=contract((", evidence: text", "")))
    event = intake.read_event(world.contract, {"claim_id": "C1", "ticket_id": "T1"})
    made = see_through(world.kernel, event, deny)
    assert [digest(event.body)] == world.column("SELECT body_hash FROM events")
    assert made == world.kernel.open(event)
    assert () == verify.verify(world.store).faults
    world.close()


@pytest.mark.parametrize(
    "text", ["enc1:", "enc1:AAAA", '{"sealed":"enc1:AAAA","fingerprint":"x"}', "\x00enc1:", "[erased]"]
)
def test_a_text_that_looks_like_a_ciphertext_is_a_text(folder: Path, text: str):
    world = World(folder, terms=BEFORE)
    why = "enc1: AAAA"
    made = decided(world, text, text.strip("\x00") or "C1", why=why)
    assert f"NOT_TRAVELLED: {why}" == made.justification
    assert text == intake.recorded_event(world.store, world.contract, made.dfid).evidence
    assert made == world.kernel.open(world.event(text.strip("\x00") or "C1", text=text))
    packet = world.packet("C2")
    for _ in range(2):
        world.kernel.decide(packet, text.encode())
    assert "REASONING_EXHAUSTION" == world.kernel.decide(packet, text.encode()).tag
    assert text.encode() == read_decided(world.store, packet.dfid).data
    assert () == verify.verify(world.store).faults
    world.close()


def test_each_case_has_a_key_of_its_own_and_each_text_its_place(world: World):
    first, second = decided(world, name="C1"), decided(world, name="C2")
    with world.store.transaction():
        keys = [key_for_flow(world.store, flow.dfid) for flow in (first, second)]
    sealed = keys[0].seal_text(PROMPT, "x")
    assert "x" == keys[0].open_text(PROMPT, sealed)
    for key, column in ((keys[0], PROPOSAL), (keys[1], PROMPT)):
        with pytest.raises(StoreError, match="differs from what was sealed"):
            key.open_text(column, sealed)
    assert sealed != keys[0].seal_text(PROMPT, "x")
    assert 2 == len(set(world.column("SELECT wrapped FROM case_keys")))
    assert first.dfid != second.dfid


def test_all_flows_of_an_event_lie_under_one_key(world: World):
    packet = world.packet()
    world.clock.advance(LEASE_MS)
    again = world.packet()
    assert again.dfid != packet.dfid
    assert 1 == len(world.column("SELECT wrapped FROM case_keys"))
    assert () == verify.verify(world.store).faults


def test_two_processes_that_open_one_case_make_one_key(world: World):
    kernels = [world.open_kernel(world.open_store()) for _ in range(4)]
    opened = together(4, lambda i: kernels[i].open(world.event()))
    assert 1 == sum(isinstance(one, DecisionPacket) for one in opened)
    assert 1 == len(world.column("SELECT wrapped FROM case_keys"))


def test_a_record_under_an_older_key_of_the_kernel_is_read_and_recognised(world: World):
    made = decided(world, f"my dog was ill {CARD}")
    with closing(opened_store(world.path)) as store:
        store.unlock(Keyring(Rotated(b"x" * 32)))
        assert made == answer(store, made.dfid)
        kernel = world.open_kernel(store)
        assert made == kernel.open(world.event(text=f"my dog was ill {CARD}"))
        assert isinstance(kernel.open(world.event("C2")), DecisionPacket)
    with closing(opened_store(world.path)) as store:
        store.unlock(Keyring(NEWER))
        assert 2 == len(store.rows("SELECT 1 FROM case_keys"))
        with pytest.raises(StoreError, match="the key of event `C1` opens with no key of this kernel"):
            read_decided(store, made.dfid)


def test_without_the_kernels_key_all_but_the_texts_can_be_read_and_verified(world: World):
    made = decided(world)
    packet = world.packet("C2")
    waits = world.kernel.escalate(packet, "MODEL_UNAVAILABLE", "no model").dfid
    with closing(opened_store(world.path)) as store:
        assert () == verify.verify(store).faults
        found = answer(store, made.dfid)
        assert found == replace(made, justification="NOT_TRAVELLED: [sealed]")
        record = verify.flow_record(store, made.dfid) or {}
        assert "[sealed]" == json.loads(record["decision_flows"]["trigger_event"])["text"]
        assert (["[sealed]"], "[sealed]") == (
            json.loads(record["context_snapshots"]["prompt"]),
            record["policy_proposals"]["proposal"],
        )
        assert [waits] == [case.dfid for case in cases.waiting(store, world.contract) if not case.damaged]
        with pytest.raises(StoreError, match="the kernel's key is not here") as refused:
            read_decided(store, made.dfid)
        assert "kernel.key" in refused.value.hint


def test_a_text_that_was_altered_is_not_read(world: World):
    made = decided(world)
    (sealed,) = world.column("SELECT proposal FROM policy_proposals")
    alone(world.store, "UPDATE policy_proposals SET proposal = ?", (sealed + b"\0",))  # type: ignore[operator]
    with pytest.raises(StoreError, match="a text of event `C1` differs from what was sealed"):
        Texts(world.store, made.dfid).data(PROPOSAL, bytes(world.column("SELECT proposal FROM policy_proposals")[0]))  # type: ignore[call-overload]
    assert verify.verify(world.store).faults


def test_of_keys_that_were_lost_are_only_cases_from_before_whose_key_is_as_it_was(world: World):
    before, altered = decided(world, name="C1"), decided(world, name="C2")
    opened = world.packet("C3")
    world.clock.advance(1)
    registry.write_act(world.store, "KEYS_LOST", who="ada", reason="the disk died", now_ms=world.clock())
    world.clock.advance(1)
    with closing(opened_store(world.path)) as store:
        store.unlock(Keyring(NEWER))
        kernel = world.open_kernel(store)
        packet = kernel.open(world.event("C4"))
        assert isinstance(packet, DecisionPacket)
        later = kernel.decide(packet, because("never flown")(packet))  # type: ignore[operator]
        assert "NOT_TRAVELLED: never flown" == later.justification
        with stranger_at(world.path) as stranger:
            for name in ("C2", "C4"):
                stranger.execute("UPDATE case_keys SET wrapped = ? WHERE event_id = ?", (bytes(60), name))
        assert "NOT_TRAVELLED: [sealed]" == answer(store, before.dfid).justification  # type: ignore[union-attr]
        assert "[sealed]" == Texts(store, opened.dfid, shown=True).text(TRIGGER, stored_trigger(store, opened.dfid))
        for dfid, name in ((altered.dfid, "C2"), (later.dfid, "C4")):
            with pytest.raises(StoreError, match=f"the key of event `{name}` opens with no key of this kernel"):
                answer(store, dfid)
            with pytest.raises(StoreError, match=f"the key of event `{name}` opens with no key of this kernel"):
                verify.flow_record(store, dfid)


def stored_trigger(store: Store, dfid: str) -> str:
    trigger = store.value("SELECT trigger_event FROM decision_flows WHERE dfid = ?", (dfid,))
    return str(json.loads(trigger)["text"]["sealed"])


# --- what an older version wrote --------------------------------------------------------------------------------------


def test_what_an_older_version_wrote_in_clear_is_read_recognised_and_whole(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    world = World(folder, terms=AFTER)
    with writing_in_clear(monkeypatch):
        packet = world.kernel.open(world.event(text=f"charge {CARD} back"))
        assert isinstance(packet, DecisionPacket)
        world.kernel.decide(packet, nonsense(packet))
        made = world.kernel.decide(packet, refund()(packet), Decoding("m", facts={"prompt": "ab" * 32}))
        world.explain(made.dfid, "enc1: fine")
        waits = world.decide(escalate, "C2").dfid
    assert (b"4111", 0) == (on_disk(world)[(at := on_disk(world).index(b"4111")) : at + 4], len(keys(world)))
    assert "NOT_TRAVELLED: enc1: fine" == getattr(answer(world.store, made.dfid), "justification", None)
    assert {"prompt": "ab" * 32} == read_decided(world.store, made.dfid).decoding.facts
    assert () == read_decided(world.store, made.dfid).faults
    assert made.dfid == getattr(world.kernel.open(world.event(text=f"charge {CARD} back")), "dfid", None)
    assert waits == cases.waiting(world.store, world.contract)[0].dfid
    assert "ESCALATED" == world.decide(escalate, "C3").state
    assert 1 == len(keys(world))
    assert () == verify.verify(world.store).faults
    world.close()


def keys(world: World) -> list[object]:
    return world.column("SELECT wrapped FROM case_keys")


def test_a_flow_that_an_older_version_left_open_goes_on_under_a_key(world: World, monkeypatch: pytest.MonkeyPatch):
    with writing_in_clear(monkeypatch):
        packet = world.kernel.open(world.event(text=f"charge {CARD} back"))
        assert isinstance(packet, DecisionPacket)
    world.clock.advance(LEASE_MS)
    again = world.kernel.open(world.event(text=f"charge {CARD} back"))
    assert isinstance(again, DecisionPacket)
    assert "Claim: charge [card] back" == again.texts[-1]
    world.kernel.decide(again, because("x")(again))  # type: ignore[operator]
    assert (1, ()) == (len(keys(world)), verify.verify(world.store).faults)
    with writing_in_clear(monkeypatch):
        packet = world.kernel.open(world.event("C2", text=f"charge {CARD} back"))
    assert isinstance(packet, DecisionPacket)
    assert "CLOSED" == world.kernel.decide(packet, because("x")(packet)).state  # type: ignore[operator]
    assert (2, ()) == (len(keys(world)), verify.verify(world.store).faults)


def test_a_saga_that_an_older_version_began_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch):
    world = World(folder, terms=terms())
    script = Script()
    monkeypatch.setattr(
        world, "event", lambda name, ticket="T1": World.event(world, name, ticket, text=f"charge {CARD} back")
    )
    with writing_in_clear(monkeypatch):
        dfid = claim_saga(world.store, world.contract, "BOTH", world.event("C1"), now_ms=world.clock())
    answered = run(world.kernel, world, script)
    assert (dfid, "CLOSED") == (answered.answer.dfid, answered.answer.state)
    assert all(packet.texts[-1] == "Claim: charge [card] back" for packet in script.packets)
    assert () == verify.verify(world.store).faults
    world.close()
