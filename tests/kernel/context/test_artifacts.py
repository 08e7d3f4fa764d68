"""Artifacts and their retention: reference texts, who put them there, and when they are gone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sds.kernel.audit import verify
from sds.kernel.canonical import sha256_hex
from sds.kernel.context import artifacts, memory
from sds.kernel.context.artifacts import ARTIFACT_BYTES_MAX, DAY_MS, Swept
from sds.kernel.context.memory import RecordedContext
from sds.kernel.decision.context import Artifact
from sds.kernel.decision.packet import Decoding
from sds.kernel.errors import UsageError
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import registry
from sds.kernel.storage.store import Store
from tests.kernel.crashes import crashing, every_step
from tests.kernel.durable import SIGNER, World, compensate, contract, escalate, whole
from tests.kernel.faults import Faults, WordlessError
from tests.stores.records import emptied

READS = "artifacts: {names: [fares, tone]}\n"
FARES, TONE = "Fares are net.", "Be brief."


def put(world: World, name: str = "fares", text: str = FARES, reason: str = "asked for") -> Artifact:
    return artifacts.put(world.store, name, text, who="desk", reason=reason, now_ms=world.clock())


def retire(world: World, name: str = "fares") -> None:
    artifacts.retire(world.store, name, who="desk", reason="withdrawn", now_ms=world.clock())


@pytest.fixture
def library(folder: Path) -> Iterator[World]:
    """A gate whose contract names two artifacts, and both are there."""
    with whole(World(folder, terms=contract(more=READS))) as made:
        put(made)
        put(made, "tone", TONE)
        yield made


# Artifacts


def test_a_model_reads_the_artifacts_with_its_contract_in_the_contracts_order(library: World):
    packet = library.packet()
    assert f"Decide claims.\nReference fares:\n{FARES}\nReference tone:\n{TONE}\nKinds of decision" in packet.texts[0]
    assert packet.texts[0] == library.packet("another").texts[0]


def test_a_decision_names_the_versions_it_read(library: World):
    put(library, text="Fares are gross.")
    answer = library.decide(compensate)
    (body,) = library.column("SELECT body FROM ledger WHERE kind = 'DECIDED' AND dfid = ?", answer.dfid)
    assert [
        ["fares", 2, sha256_hex(b"Fares are gross.")],
        ["tone", 1, sha256_hex(TONE.encode())],
    ] == json.loads(str(body))["artifacts"]


def test_an_artifact_named_twice_is_read_once(folder: Path):
    world = World(folder, terms=contract(more="artifacts: {names: [fares, fares]}\n"))
    put(world)
    assert 1 == world.packet().texts[0].count("Reference fares:")
    world.close()


def test_a_contract_without_artifacts_reads_none(world: World):
    put(world)
    packet = world.packet()
    assert () == packet.situation.artifacts
    assert FARES not in packet.texts[0]
    answer = world.kernel.decide(packet, compensate(packet))
    (body,) = world.column("SELECT body FROM ledger WHERE kind = 'DECIDED' AND dfid = ?", answer.dfid)
    assert "artifacts" not in json.loads(str(body))


def test_who_put_and_retired_what_and_why_is_in_the_ledger(library: World):
    retire(library)
    bodies = [json.loads(str(b)) for b in library.column("SELECT body FROM ledger WHERE kind = 'ARTIFACT'")]
    facts = [(b["act"], b["name"], b["version"], b["who"], b["reason"]) for b in bodies]
    assert [
        ("put", "fares", 1, "desk", "asked for"),
        ("put", "tone", 1, "desk", "asked for"),
        ("retire", "fares", 1, "desk", "withdrawn"),
    ] == facts
    assert {sha256_hex(FARES.encode()), sha256_hex(TONE.encode())} == {b["sha256"] for b in bodies}


def human_only(world: World, why: str) -> None:
    packet = world.packet()
    assert (("ESCALATE",), (why,)) == (packet.envelope.names, packet.notes)
    answer = world.kernel.decide(packet, escalate(packet))
    assert ("ESCALATED_BY_RULE", (f"gate 5: ESCALATED_BY_RULE: {why}",)) == (answer.reason_code, answer.reasons)
    assert "Reference" not in packet.texts[0]


def test_a_missing_artifact_leaves_only_the_human(library: World):
    retire(library)
    human_only(library, "artifact `fares` is missing")


def test_without_a_reader_a_contract_that_names_artifacts_leaves_only_the_human(library: World):
    library.kernel = Kernel(
        library.contract, library.store, library.tickets, library.rail, SIGNER, now_ms=library.clock
    )
    packet = library.packet()
    notes = ("this kernel cannot read artifact `fares`", "this kernel cannot read artifact `tone`")
    assert (("ESCALATE",), notes) == (packet.envelope.names, packet.notes)


def test_artifacts_over_the_budget_leave_only_the_human(library: World):
    put(library, text="x" * 256)
    human_only(library, f"the artifacts are {256 + 35 + len(TONE)} tokens long, more than 256")


def test_an_altered_artifact_leaves_only_the_human(folder: Path):
    world = World(folder, terms=contract(more=READS))
    put(world)
    put(world, "tone", TONE)
    with world.store.transaction():
        world.store.run("UPDATE artifacts SET text = 'Pay all.' WHERE name = 'fares'")
    human_only(world, "artifact `fares` was altered")
    assert 1 == len(verify.verify(world.store).faults)
    world.close()


@pytest.mark.parametrize(
    ("error", "said"), [(RuntimeError("no tokenizer"), "no tokenizer"), (WordlessError(), "WordlessError")]
)
def test_a_tokenizer_that_fails_leaves_only_the_human(library: World, error: Exception, said: str):
    def broken(_text: str) -> int:
        raise error

    library.kernel = Kernel(
        library.contract,
        library.store,
        library.tickets,
        library.rail,
        SIGNER,
        now_ms=library.clock,
        context=RecordedContext(library.store, library.contract, broken),
    )
    human_only(library, f"the artifacts cannot be read: {said}")


def test_artifacts_are_counted_once_for_each_set_of_versions(library: World):
    counted: list[str] = []

    def count(text: str) -> int:
        counted.append(text)
        return len(text)

    shelf = RecordedContext(library.store, library.contract, count)
    for _ in range(3):
        shelf.artifacts()
    put(library, text="Fares are gross.")
    shelf.artifacts()
    assert [FARES in text for text in counted] == [True, False]


CHANGES = pytest.mark.parametrize(
    "change", [retire, lambda world: put(world, text="Fares are gross.")], ids=["retire", "put"]
)


@CHANGES
def test_a_decision_made_on_artifacts_that_changed_since_is_not_carried_out(
    library: World, change: Callable[[World], object]
):
    packet = library.packet()
    change(library)
    answer = library.kernel.decide(packet, compensate(packet))
    assert ("ABORTED", "STATE_DRIFT_DETECTED") == (answer.state, answer.tag)
    assert "artifacts" in answer.reasons[0]
    assert [] == library.rail.paid()


@CHANGES
def test_an_order_in_flight_is_sent_again_only_on_the_artifacts_it_was_made_on(
    library: World, change: Callable[[World], object]
):
    packet = library.packet()
    data = compensate(packet)
    verdict = library.kernel.judge(packet, data, Decoding())
    report = library.kernel.just_in_time(packet, verdict)
    intent = library.kernel.commit(packet, data, Decoding(), verdict, report)
    assert intent is not None
    assert library.kernel.still_valid(intent)
    change(library)
    assert not library.kernel.still_valid(intent)


def test_the_same_text_again_is_the_same_version_and_a_retired_one_comes_back_as_a_new_one(library: World):
    assert 1 == put(library).version
    retire(library)
    assert 2 == put(library).version
    assert [("fares", 1, False), ("fares", 2, True), ("tone", 1, True)] == [
        (found.name, found.version, found.ended_at_ms is None) for found in artifacts.listed(library.store)
    ]


@pytest.mark.parametrize(
    ("name", "text", "reason", "why"),
    [
        ("Fares", "x", "y", "`Fares` is not a name in_lower_case"),
        ("", "x", "y", "`` is not a name in_lower_case"),
        ("fares\n", "x", "y", "`fares` is not a name in_lower_case"),
        ("fares", " \n", "y", f"the artifact is not 1 to {ARTIFACT_BYTES_MAX} bytes of text"),
        ("fares", "x" * (ARTIFACT_BYTES_MAX + 1), "y", f"the artifact is not 1 to {ARTIFACT_BYTES_MAX} bytes of text"),
        ("fares", "a\x00b", "y", "the artifact has characters that cannot be printed"),
        ("fares", "\ud800", "y", "the artifact is not text that can be stored as UTF-8"),
        ("fares", "x", " ", "a reason is needed"),
    ],
)
def test_what_is_no_artifact_is_refused_and_leaves_nothing(world: World, name: str, text: str, reason: str, why: str):
    with pytest.raises(UsageError) as refused:
        put(world, name, text, reason)
    assert why == str(refused.value)
    assert [] == artifacts.listed(world.store)
    assert [] == world.column("SELECT 1 FROM ledger WHERE kind = 'ARTIFACT'")


def test_only_what_is_in_force_can_be_retired(world: World):
    with pytest.raises(UsageError, match="there is no artifact `fares` in force"):
        retire(world)


# Retention


def test_a_sweep_removes_what_is_out_of_force_longer_than_any_contract_remembers(library: World):
    registry.register(
        library.store,
        contract(
            ("gate: claims", "gate: other"),
            ("agent_id: claims-agent", "agent_id: other-agent"),
            more="memory: {days_max: 100}\n",
        ),
        by="operator",
        now_ms=library.clock(),
    )
    retire(library)
    library.clock.advance(100 * DAY_MS)
    assert Swept(0, more=False) == sweep(library)
    library.clock.advance(1)
    assert Swept(1, more=False) == sweep(library)
    assert [None, TONE] == library.column("SELECT text FROM artifacts ORDER BY name")
    assert [(True, "fares"), (False, "tone")] == [(one.swept, one.name) for one in artifacts.listed(library.store)]
    assert [0, 1] == library.column("SELECT CAST(body ->> '$.count' AS BIGINT) FROM ledger WHERE kind = 'RETENTION'")
    assert ["auditor"] == library.column("SELECT DISTINCT body ->> '$.who' FROM ledger WHERE kind = 'RETENTION'")
    assert 2 == put(library).version, "a number is never given twice"


def sweep(world: World) -> Swept:
    return memory.sweep(world.store, who="auditor", reason="monthly", now_ms=world.clock())


def test_a_sweep_takes_no_more_than_its_limit_at_once(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(artifacts, "SWEEP_MAX", 2)
    for number in range(4):
        put(world, text=f"version {number}")
    world.clock.advance(1000 * DAY_MS)
    assert [Swept(2, more=True), Swept(1, more=False), Swept(0, more=False)] == [sweep(world) for _ in range(3)]
    assert () == verify.verify(world.store).faults


def test_what_a_decision_proves_stays_after_the_sweep(library: World):
    answer = library.decide(compensate)
    retire(library)
    library.clock.advance(1000 * DAY_MS)
    sweep(library)
    assert FARES in str(library.prompt(answer.dfid))
    put(library)


@pytest.mark.parametrize(
    ("statement", "found"),
    [
        ("UPDATE artifacts SET text = NULL WHERE name = 'tone'", "artifact tone/1"),
        ("UPDATE artifacts SET text = 'x' WHERE name = 'tone'", "artifact tone/1"),
        ("UPDATE artifacts SET ended_at_ms = 5 WHERE name = 'tone'", "artifact tone/1"),
        ("UPDATE artifacts SET version = 7 WHERE name = 'tone'", "artifact tone/1"),
        ("DELETE FROM artifacts WHERE name = 'tone'", "artifact tone/1"),
        ("INSERT INTO artifacts VALUES ('rules', 1, 'x', 'Pay all.', NULL)", "artifact rules/1"),
    ],
)
def test_an_artifact_changed_behind_the_kernel_is_found(world: World, statement: str, found: str):
    put(world, "tone", TONE)
    assert () == verify.verify(world.store).faults
    with world.store.transaction():
        world.store.run(statement)
    assert any(line.startswith(found) for line in verify.verify(world.store).faults)


def test_a_decision_that_names_a_version_nobody_had_put_is_found(world: World):
    packet = world.packet()
    never = Artifact("fares", 1, sha256_hex(b"Pay all."), "Pay all.")
    forged = replace(packet, situation=replace(packet.situation, artifacts=(never,)))
    world.kernel.decide(forged, escalate(forged))
    last = world.column("SELECT MAX(idx) FROM ledger")[0]
    assert (f"entry {last}: artifact fares/1 never had this text",) == verify.verify(world.store).faults


ACTS: dict[str, Callable[[Store, int], object]] = {
    "put": lambda store, now_ms: artifacts.put(store, "fares", "new", who="desk", reason="r", now_ms=now_ms),
    "retire": lambda store, now_ms: artifacts.retire(store, "fares", who="desk", reason="r", now_ms=now_ms),
    "sweep": lambda store, now_ms: memory.sweep(store, who="desk", reason="r", now_ms=now_ms),
}


@pytest.mark.parametrize("act", ACTS)
def test_an_act_that_is_stopped_at_any_step_is_done_whole_or_not_at_all(folder: Path, act: str):
    outcomes: set[object] = set()

    def fresh() -> World:
        emptied(folder)
        world = World(folder)
        put(world, text="old")
        put(world)
        world.clock.advance(1000 * DAY_MS)
        return world

    def stop_once(world: World, faults: Faults) -> bool:
        done = crashing(world, lambda kernel: (ACTS[act](kernel.store, world.clock()), "done")[1], faults)
        assert () == verify.verify(world.store).faults
        outcomes.add(tuple(world.store.rows("SELECT version, text, ended_at_ms IS NULL FROM artifacts ORDER BY 1")))
        return done is not None

    every_step(fresh, stop_once)
    assert 2 == len(outcomes)


def test_an_artifact_that_is_retired_just_before_it_is_reserved_is_drift(library: World):
    packet = library.packet()
    data = compensate(packet)
    verdict = library.kernel.judge(packet, data, Decoding())
    report = library.kernel.just_in_time(packet, verdict)
    retire(library)
    assert report.ok
    assert None is library.kernel.commit(packet, data, Decoding(), verdict, report)
    assert ["STATE_DRIFT_DETECTED"] == library.column("SELECT tag FROM decision_flows")
    assert () == verify.verify(library.store).faults
