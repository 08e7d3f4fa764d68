"""A gate whose contract has a policy: its fitted readers read, the rule decides, the record holds why, a replay is identical."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest

from sds import Gate
from sds.host import paths
from sds.host.clock import now_ms
from sds.kernel.audit import verify
from sds.kernel.canonical import digest
from sds.kernel.errors import UsageError
from sds.models.readers.opening import open_reader
from sds.policy.judgement import checksum_line, open_judgement, readings_hash
from sds.replay import opener, replay
from tests.gates.own import written
from tests.models.readers.tiny import claims
from tests.policy.conftest import BOUNDED, CODE, Judge, contract_of
from tests.proposers import Greedy

RISK = """  risk: {question: 'Should it be feared?', score: [car.open_minor]}
policy:
"""


@pytest.fixture(scope="module")
def said(fitted_head: Path) -> dict[str, str]:
    """Return a text for each value, which the tiny reader knows and reads as that value."""
    found = dict[str, tuple[float, str]]()
    with closing(open_reader(fitted_head)) as reader:
        for text in claims(200, seed=7)[0]:
            reading = reader.read(text)
            value = max(reading.probabilities, key=reading.probabilities.__getitem__)
            sure = reading.probabilities[value] if reading.familiar else 0.0
            found[value] = max(found.get(value, (0.0, "")), (sure, text))
    return {value: text for value, (_, text) in found.items()}


def event(number: int, text: str) -> dict[str, str]:
    return {"trip_id": f"X-{number}", "car_id": "CAR-1", "text": text}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def fitted(home: Path, judgement: Judge, code: str = CODE, **changes: object) -> Path:
    """Put the readers where `sds fit` puts them, and return the gate's file."""
    made = judgement(contract_of(code), **changes)
    (home / "fitted").mkdir(parents=True)
    made.rename(home / "fitted" / "toll")
    return written(home / "toll_gate", code)


def test_readings_decide_and_the_record_says_why(home: Path, judgement: Judge, said: dict[str, str]) -> None:
    with Gate.load(fitted(home, judgement)) as gate:
        answers = [
            gate.decide(event(n, text)) for n, text in enumerate((said["technical"], said["weather"], said["crew"]))
        ]
        assert [("WAIVE", "SUCCESS"), ("DENY", None)] == [(a.action, a.execution) for a in answers[:2]]
        assert ("ESCALATED", "POLICY_ESCALATES") == (answers[2].state, answers[2].reason_code)
        assert gate.engine.model.startswith("policy: cause by head@")
        assert () == verify.verify(gate.store).faults
        row = gate.store.row(
            "SELECT model, confidence, alternatives FROM policy_proposals WHERE dfid = ?", (answers[0].dfid,)
        )
    assert row is not None
    model, confidence, alternatives = row
    read, decided = json.loads(alternatives)
    assert ("reading.cause", "technical") == (read["choice"], read["chosen"])
    assert ("decision", "WAIVE amount=500") == (decided["choice"], decided["chosen"])
    assert (confidence, model) == (decided["probabilities"]["WAIVE amount=500"], gate.engine.model)


def test_a_decision_of_a_policy_is_replayed_identically(home: Path, judgement: Judge, said: dict[str, str]) -> None:
    path = fitted(home, judgement)
    with Gate.load(path) as gate:
        dfids = [gate.decide(event(n, text)).dfid for n, text in enumerate((said["technical"], said["crew"]))]
    readers = paths.fitted_readers("toll", None)
    for dfid in dfids:
        with closing(paths.open_record(home / "toll")) as store:
            found = replay(store, dfid, open_it=opener(None, now_ms=now_ms, readers=readers), now_ms=now_ms)
        assert found.identical, found


def test_what_it_is_not_fitted_on_is_a_humans(home: Path, judgement: Judge) -> None:
    with Gate.load(fitted(home, judgement)) as gate:
        for n, text in enumerate(
            ("", "zzzz 99 qqq 0.0.0 xkcd", "x" * 60_000, "\u4f60\u597d \u98de\u673a \u5ef6\u8bef")
        ):
            answer = gate.decide(event(n, text))
            assert ("ESCALATED", "UNFAMILIAR") == (answer.state, answer.reason_code), text[:20]


def test_what_is_bounded_is_decided_only_when_certain_enough(
    home: Path, judgement: Judge, said: dict[str, str]
) -> None:
    with Gate.load(fitted(home, judgement, BOUNDED, least=None)) as gate:
        answer = gate.decide(event(1, said["technical"]))
        assert ("ESCALATED", "UNCERTAIN") == (answer.state, answer.reason_code)


def test_an_engine_that_is_given_decides_itself(home: Path, judgement: Judge, said: dict[str, str]) -> None:
    with Gate.load(fitted(home, judgement), engine=Greedy("DENY")) as gate:
        assert "DENY" == gate.decide(event(1, said["technical"])).action


def test_a_policy_that_changed_voids_the_thresholds(home: Path, judgement: Judge, said: dict[str, str]) -> None:
    with Gate.load(fitted(home, judgement, BOUNDED, rules="0" * 64)) as gate:
        assert "UNCERTAIN" == gate.decide(event(1, said["technical"])).reason_code
    log = [json.loads(line) for line in (home / "toll" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("the thresholds were fitted for another policy" in str(line.get("notice")) for line in log)


@pytest.mark.parametrize(("code", "still"), [(BOUNDED, True), (BOUNDED.replace("policy:\n", RISK), False)])
def test_thresholds_of_another_confidence_than_a_scores_own_are_void(judgement: Judge, code: str, still: bool) -> None:
    """They were chosen when a score was taken for a certainty: what they prove, they prove of other numbers."""
    contract = contract_of(code)
    bounds = contract.max_error and contract.max_error.model_dump(mode="json")
    then = digest([readings_hash(contract), [line.model_dump(mode="json") for line in contract.policy], bounds])
    with closing(open_judgement(judgement(contract, rules=then), contract)) as opened:
        assert (still, not still) == (opened.thresholds is not None, bool(opened.notices))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"gate": "tolls"}, "it was fitted for gate `tolls`, not `toll`"),
        ({"readings": "0" * 64}, "it was fitted for other readings than the contract's"),
        ({"readers": {"cause": "0" * 64}}, "cause: "),
        ({"readers": {"mood": "0" * 64}}, "it was fitted for other readings"),
        ({"schema": 2}, "judgement.json is malformed at `schema`"),
        ({"more": 1}, "judgement.json is malformed at `more`"),
        ({"thresholds": {"DENY": {"least": 1.5}}}, "judgement.json is malformed at `thresholds.DENY"),
    ],
)
def test_readers_that_are_not_the_contracts_are_refused(judgement: Judge, changes: dict[str, object], why: str) -> None:
    contract = contract_of(CODE)
    with pytest.raises(UsageError) as caught:
        open_judgement(judgement(contract, **changes), contract)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ("READERS_REFUSED", "run sds fit GATE to make new ones") == (caught.value.reason_code, caught.value.hint)


@pytest.mark.parametrize(
    "name", ["cause/model.onnx", "cause/tokenizer.json", "cause/reader.json", "judgement.json", "judgement.json.sha256"]
)
def test_one_changed_byte_is_refused(judgement: Judge, name: str) -> None:
    contract = contract_of(CODE)
    folder = judgement(contract)
    path = folder / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UsageError, match="are refused"):
        open_judgement(folder, contract)


def test_a_threshold_that_somebody_lowered_is_refused(judgement: Judge) -> None:
    contract = contract_of(BOUNDED)
    folder = judgement(contract)
    path = folder / "judgement.json"
    path.write_text(path.read_text().replace('"least": 0.6', '"least": 0.1'))
    with pytest.raises(UsageError, match=r"judgement\.json was changed: its hash differs"):
        open_judgement(folder, contract)


@pytest.mark.parametrize("damage", ["missing", "empty", "no JSON", "link", "without its hash"])
def test_a_damaged_folder_is_refused_in_one_line(judgement: Judge, damage: str) -> None:
    contract = contract_of(CODE)
    folder = judgement(contract)
    path = folder / "judgement.json"
    if damage == "without its hash":
        (folder / "judgement.json.sha256").unlink()
    else:
        path.rename(folder / "other.json")
    if damage == "link":
        path.symlink_to(folder / "other.json")
    elif damage in ("empty", "no JSON"):
        raw = b"" if damage == "empty" else b"{" * 100_000
        path.write_bytes(raw)
        (folder / "judgement.json.sha256").write_bytes(checksum_line(raw))
    with pytest.raises(UsageError, match="are refused") as caught:
        open_judgement(folder, contract)
    assert "\n" not in str(caught.value)
