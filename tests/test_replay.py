"""A recorded decision decided again: identical on the same machine and shape, else it is said what differs."""

from __future__ import annotations

import json
import math
import shutil
import sqlite3
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path

import pytest

from sds.engines.factory import open_engine, open_replicas
from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.host.paths import open_record
from sds.kernel.audit.stored_decision import read_decided
from sds.kernel.audit.verify import flow_record, verify
from sds.kernel.contract.sections import PROPOSAL_SCHEMA
from sds.kernel.decision import dim
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.proposal import parse_recorded
from sds.kernel.errors import ModelError, StoreError
from sds.kernel.registry import compatibility
from sds.kernel.storage.vault import PROMPT, PROPOSAL, Texts, key_for_flow
from sds.replay import Circumstance, Replay, compare, opener, replay
from tests import replays
from tests.kernel.durable import contract
from tests.replays import GATE, record
from tests.samples import as_under
from tests.scale import scale

EVENTS = scale(4, 40)
SEALS = tuple(f"table {name} differs from its seal" for name in ("context_snapshots", "policy_proposals"))


@dataclass(frozen=True)
class Home:
    path: Path
    dfids: list[str]

    @property
    def record(self) -> Path:
        return self.path / GATE / "decisions.db"

    def replay(self, dfid: str, model: Path) -> Replay:
        with closing(open_record(self.record.parent)) as store:
            return replay(store, dfid, open_it=opener(model, now_ms=now_ms), now_ms=now_ms)


@pytest.fixture(scope="module")
def home(tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Home:
    path = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("SDS_THREADS", "1")
        return Home(path, record(path, model=tiny_path(1), events=EVENTS))


@pytest.fixture
def own(home: Home, tmp_path: Path) -> Home:
    """A copy of the record, to be tampered with."""
    return Home(shutil.copytree(home.path, tmp_path / "home"), home.dfids)


def tamper(home: Home, sql: str, *values: object) -> None:
    with closing(sqlite3.connect(home.record)) as db, db:
        db.execute(sql, values)


def rewrite(
    home: Home,
    dfid: str,
    *,
    proposal: Callable[[bytes], bytes] = lambda said: said,
    prompt: Callable[[Sequence[str]], Sequence[str]] = lambda texts: texts,
) -> None:
    """Change the texts of a decision as somebody would who has the kernel's key."""
    with closing(open_record(home.record.parent)) as store, store.transaction():
        key, texts = key_for_flow(store, dfid), Texts(store, dfid)
        said = proposal(
            texts.data(PROPOSAL, store.value("SELECT proposal FROM policy_proposals WHERE dfid = ?", (dfid,)))
        )
        told = prompt(texts.prompt(store.value("SELECT prompt FROM context_snapshots WHERE dfid = ?", (dfid,))))
        store.run("UPDATE policy_proposals SET proposal = ? WHERE dfid = ?", (key.seal(PROPOSAL, said), dfid))
        sealed = key.seal_text(PROMPT, json.dumps(told))
        store.run("UPDATE context_snapshots SET prompt = ? WHERE dfid = ?", (sealed, dfid))


def names(found: Replay) -> list[str]:
    return [one.name for one in found.circumstances]


def test_a_decision_is_identical_after_others_were_made(home: Home, tiny_path: Callable[[int], Path]) -> None:
    for dfid in home.dfids:
        found = home.replay(dfid, tiny_path(1))
        assert (True, (), (), None, 0.0) == (
            found.identical,
            found.faults,
            found.circumstances,
            found.parting,
            found.logp_apart_max,
        )
        assert found.recorded == found.replayed


class Stumbling:
    """An engine that talks nonsense once."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._asked = engine, 0
        self.model, self.count_tokens, self.close = engine.model, engine.count_tokens, engine.close

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self._asked += 1
        return (b"nonsense", Decoding()) if self._asked == 1 else self._engine.propose(packet, tokens_max=tokens_max)


class Older:
    """An engine that writes as under an older proposal schema."""

    def __init__(self, engine: Engine, schema: str) -> None:
        self._engine, self._schema = engine, schema
        self.model, self.count_tokens, self.close = engine.model, engine.count_tokens, engine.close

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        data, decoding = self._engine.propose(packet, tokens_max=tokens_max)
        return as_under(self._schema, data), decoding


@pytest.mark.parametrize("schema", ["2.0.0", "3.0.0"])
def test_what_was_written_under_an_older_proposal_schema_differs_by_its_form(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: str
) -> None:
    with monkeypatch.context() as then, closing(open_engine(tiny_path(1), now_ms=now_ms)) as engine:
        then.setattr(compatibility, "PROPOSAL_SCHEMA", schema)
        then.setattr(dim, "parse_proposal", parse_recorded)
        then.setattr(replays, "contract", lambda: contract(more=f"proposal_schema: {schema}\n"))
        made = Home(tmp_path, record(tmp_path, engine=Older(engine, schema), events=EVENTS))
    found = [made.replay(dfid, tiny_path(1)) for dfid in made.dfids]
    assert (schema == "2.0.0") == any(b'"params":{}' in one.recorded for one in found)
    for one in found:
        assert (Circumstance("proposal_schema", schema, PROPOSAL_SCHEMA),) == one.circumstances
        assert (True, (), False) == (one.same_decision, one.faults, one.identical)
        assert b'"reason_code"' in one.recorded
        assert one.recorded == as_under(schema, one.replayed)


def test_a_decision_in_exact_mode_is_replayed_in_exact_mode(tiny_path: Callable[[int], Path], tmp_path: Path) -> None:
    with closing(open_engine(tiny_path(1), now_ms=now_ms, mode="exact")) as engine:
        made = Home(tmp_path, record(tmp_path, engine=engine, events=2))
    for dfid in made.dfids:
        found = made.replay(dfid, tiny_path(1))
        assert (True, ()) == (found.identical, found.circumstances)


def test_a_decision_through_transformers_is_replayed_through_transformers(
    tiny_folder: Callable[[int], Path], tmp_path: Path
) -> None:
    made = Home(tmp_path, record(tmp_path, model=tiny_folder(1), events=1))
    found = made.replay(made.dfids[0], tiny_folder(1))
    assert (True, ()) == (found.identical, found.circumstances)
    with pytest.raises(ModelError):
        made.replay(made.dfids[0], tmp_path / "none")


def test_the_attempt_that_counted_is_replayed_with_what_it_was_told(
    tiny_path: Callable[[int], Path], tmp_path: Path
) -> None:
    with closing(open_engine(tiny_path(1), now_ms=now_ms)) as engine:
        made = Home(tmp_path, record(tmp_path, engine=Stumbling(engine), events=1))
    with closing(open_record(made.record.parent)) as store:
        assert "Rejected before: " in "".join(read_decided(store, made.dfids[0]).packet.texts)
    assert made.replay(made.dfids[0], tiny_path(1)).identical


def test_a_replay_changes_nothing(own: Home, tiny_path: Callable[[int], Path]) -> None:
    def dump() -> list[str]:
        with closing(sqlite3.connect(own.record)) as db:
            return list(db.iterdump())

    before, files = dump(), {path.name for path in own.record.parent.iterdir()}
    own.replay(own.dfids[0], tiny_path(1))
    assert before == dump()
    assert files == {path.name for path in own.record.parent.iterdir()}


def test_what_a_decision_depended_on_is_in_the_sealed_record(own: Home) -> None:
    with closing(open_record(own.record.parent)) as store:
        facts = read_decided(store, own.dfids[0]).decoding.facts
        assert {"weights", "library", "machine", "threads", "slots", "mode", "prompt", "plan", "rows"} <= facts.keys()
        assert () == verify(store).faults
    tamper(own, "DROP TRIGGER ledger_no_update")
    tamper(own, "UPDATE ledger SET body = replace(body, '\"threads\":1', '\"threads\":2') WHERE dfid = ?", own.dfids[0])
    with closing(open_record(own.record.parent)) as store:
        assert any("content does not match its hash" in fault for fault in verify(store).faults)
        assert ["ledger entry", "does not match its hash"] == [
            part
            for fault in read_decided(store, own.dfids[0]).faults
            for part in ("ledger entry", "does not match its hash")
            if part in fault
        ]


def test_other_weights_are_named_and_where_the_choices_part(home: Home, tiny_path: Callable[[int], Path]) -> None:
    parted = 0
    for dfid in home.dfids:
        found = home.replay(dfid, tiny_path(2))
        assert not found.identical
        assert "weights" == names(found)[0]
        assert found.logp_apart_max > 0
        if found.recorded != found.replayed:
            at = found.parting
            assert at is not None
            assert at.recorded != at.replayed
            own, other = at.recorded_shares
            assert own is not None
            assert other is None or own >= other
            parted += 1
    assert parted


def test_a_decision_is_replayed_with_its_threads_and_where_there_are_fewer_that_is_named(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDS_THREADS", "2")
    with closing(open_replicas(tiny_path(1), replicas=2, now_ms=now_ms)) as engine:
        made = Home(tmp_path / "alone", record(tmp_path / "alone", engine=engine, events=2, at_once=2))
    for dfid in made.dfids:
        found = made.replay(dfid, tiny_path(1))
        assert (True, ()) == (found.identical, found.circumstances)
    with closing(open_engine(tiny_path(1), now_ms=now_ms)) as engine:
        made = Home(tmp_path / "both", record(tmp_path / "both", engine=engine, events=1))
    monkeypatch.setenv("SDS_THREADS", "1")
    found = made.replay(made.dfids[0], tiny_path(1))
    assert [("threads", 2, 1)] == [(one.name, one.recorded, one.replayed) for one in found.circumstances]


def test_a_decision_on_a_card_is_replayed_on_one_and_another_card_is_named(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: ("any", "mine"))
    with closing(open_engine(tiny_path(1), now_ms=now_ms, device="cuda:1")) as engine:
        made = Home(tmp_path, record(tmp_path, engine=engine, events=1))
    found = made.replay(made.dfids[0], tiny_path(1))
    assert (True, ()) == (found.identical, found.circumstances)
    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: ("any", "another"))
    assert (Circumstance("card", "mine", "another"),) == made.replay(made.dfids[0], tiny_path(1)).circumstances
    monkeypatch.setattr("sds.models.llamacpp.weights.gpus", lambda: ("any",))
    with pytest.raises(ModelError, match="finds no GPU 1 here"):
        made.replay(made.dfids[0], tiny_path(1))


class Meeting:
    """An engine that is asked only when so many ask at once."""

    def __init__(self, engine: Engine, parties: int) -> None:
        self._engine, self._barrier = engine, threading.Barrier(parties)
        self.model, self.count_tokens, self.close = engine.model, engine.count_tokens, engine.close

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        self._barrier.wait(timeout=30)
        return self._engine.propose(packet, tokens_max=tokens_max)


def test_a_decision_made_in_company_says_so(tiny_path: Callable[[int], Path], tmp_path: Path) -> None:
    with closing(open_engine(tiny_path(1), now_ms=now_ms, slots=4, noise_logp_max=0.0)) as engine:
        made = Home(tmp_path, record(tmp_path, engine=Meeting(engine, 4), events=8, at_once=4))
    found = [made.replay(dfid, tiny_path(1)) for dfid in made.dfids]
    assert all("slots" in names(one) for one in found)
    assert any(one.shared for one in found)
    assert all("rows" in names(one) for one in found if one.shared)


def test_company_in_openvino_leaves_nothing_to_find(tiny_path: Callable[[int], Path], tmp_path: Path) -> None:
    pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
    with closing(open_engine(tiny_path(1), now_ms=now_ms, slots=4, library="openvino")) as engine:
        made = Home(tmp_path, record(tmp_path, engine=Meeting(engine, 4), events=8, at_once=4))
    found = [made.replay(dfid, tiny_path(1)) for dfid in made.dfids]
    assert all(one.identical for one in found)
    assert any(one.shared for one in found)
    assert {"rows"} >= {name for one in found for name in names(one)}


def test_a_probability_changed_by_one_bit_is_found(own: Home, tiny_path: Callable[[int], Path]) -> None:
    with closing(open_record(own.record.parent)) as store:
        said = json.loads(flow_record(store, own.dfids[0])["policy_proposals"]["alternatives"])  # type: ignore[index]
    label, share = max(
        said[0]["probabilities"].items(), key=itemgetter(1)
    )  # one bit of the others' logarithm may not show
    said[0]["probabilities"][label] = math.nextafter(share, 0.0)
    tamper(own, "UPDATE policy_proposals SET alternatives = ? WHERE dfid = ?", json.dumps(said), own.dfids[0])
    found = own.replay(own.dfids[0], tiny_path(1))
    assert ("table policy_proposals differs from its seal",) == found.faults
    assert found.recorded == found.replayed
    assert 0.0 < found.logp_apart_max < 1e-12
    assert not found.bit_equal
    assert not found.identical


def test_changed_proposal_bytes_are_found(own: Home, tiny_path: Callable[[int], Path]) -> None:
    rewrite(own, own.dfids[0], proposal=lambda said: said + b" ")
    found = own.replay(own.dfids[0], tiny_path(1))
    assert SEALS == found.faults
    assert found.replayed + b" " == found.recorded
    assert not found.identical


def test_a_changed_prompt_is_found_and_named(own: Home, tiny_path: Callable[[int], Path]) -> None:
    rewrite(own, own.dfids[0], prompt=lambda texts: [text.replace("hours late", "days early") for text in texts])
    found = own.replay(own.dfids[0], tiny_path(1))
    assert SEALS == found.faults
    assert "prompt" in names(found)
    assert not found.identical


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        (
            "UPDATE context_snapshots SET envelope = replace(envelope, 'DENY', 'DONE')",
            "does not match the recorded hash",
        ),
        ("UPDATE context_snapshots SET envelope = '{}'", "the recorded envelope is malformed"),
        ("UPDATE context_snapshots SET prompt = 'no JSON'", "cannot be read"),
        ("UPDATE context_snapshots SET prompt = prompt || 'AAAA'", "a text of event `C0` differs from what was sealed"),
        ("UPDATE policy_proposals SET proposal = CAST(proposal || ' ' AS BLOB)", "differs from what was sealed"),
        ("UPDATE policy_proposals SET alternatives = '[{}]'", "cannot be read"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused(
    own: Home, sql: str, why: str, tiny_path: Callable[[int], Path]
) -> None:
    tamper(own, sql)
    with pytest.raises(StoreError, match=why):
        own.replay(own.dfids[0], tiny_path(1))


def test_a_model_that_cannot_decide_it_again_raises(home: Home, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        home.replay(home.dfids[0], tmp_path / "none.gguf")


def test_other_bytes_and_scores_are_told_apart(home: Home) -> None:
    with closing(open_record(home.record.parent)) as store:
        decided = read_decided(store, home.dfids[0])
    first, *others = decided.decoding.alternatives or ()
    shares = dict(first["probabilities"])  # type: ignore[call-overload]  # a mapping, as it was read
    other = next((label for label in shares if label != first["chosen"]), "")
    turned = replace(decided.decoding, alternatives=({**first, "chosen": other}, *others))
    parted = compare(decided, b"other", turned).parting
    assert parted is not None
    assert (first["choice"], first["chosen"], other) == (parted.choice, parted.recorded, parted.replayed)
    assert parted.recorded_shares == parted.replayed_shares == (shares[str(first["chosen"])], shares[other])
    same = compare(decided, decided.data, decided.decoding)
    assert (True, 0.0, ()) == (same.identical, same.logp_apart_max, same.circumstances)
