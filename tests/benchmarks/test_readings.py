"""What a reading costs: texts of so many tokens, the stages of a decision, the language model beside it on fresh cases."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer

from sds.benchmarks import readings
from sds.engines.factory import open_engine
from sds.gates.refund import gate as refund
from sds.host.paths import fitted_home
from sds.kernel.errors import UsageError
from sds.models.readers.protocol import Reading
from sds.policy.judgement import CHECKSUM, FILE, checksum_line, readings_hash, rules_hash
from tests.questions import asked

CONTRACT = refund.load_refund_contract()
CAUSES = tuple(CONTRACT.readings["cause"].values)
KINDS = {"COMPENSATE", "REFUND_TICKET", "VOUCHER", "DENY"}
READ_S = 0.004


@dataclass
class Says:
    """Reads the same cause everywhere, and takes its time."""

    kind: str = "head"
    values: tuple[str, ...] = CAUSES
    sha256: str = "ab" * 32
    texts: list[str] = field(default_factory=list)

    def read(self, text: str, fields: object = None, readings: object = None) -> Reading:
        time.sleep(READ_S)
        self.texts.append(text)
        return Reading({cause: 0.9 if cause == "technical" else 0.1 / (len(CAUSES) - 1) for cause in CAUSES}, True)

    def close(self) -> None:
        """Nothing is open."""


def words() -> Tokenizer:
    found = Tokenizer(WordLevel({"?": 0}, unk_token="?"))  # noqa: S106  no secret
    found.pre_tokenizer = BertPreTokenizer()
    return found


def count(text: str) -> int:
    return len(words().encode(text).ids)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Says:
    """Have readers fitted for the refund gate, which decide whatever they read."""
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(readings, "WARM_UP", 1)
    folder, said = fitted_home("refund"), Says()
    (folder / "cause").mkdir(parents=True)
    words().save(str(folder / "cause" / "tokenizer.json"))
    threshold = {"max_error": "0.02", "least": 0.5, "accepted": 500, "wrong": 0, "missing": 0}
    manifest = {"schema": 1, "gate": "refund", "readers": {"cause": said.sha256}}
    manifest |= {"readings": readings_hash(CONTRACT), "rules": rules_hash(CONTRACT)}
    raw = json.dumps({**manifest, "thresholds": dict.fromkeys(KINDS, threshold)}).encode()
    (folder / FILE).write_bytes(raw)
    (folder / CHECKSUM).write_bytes(checksum_line(raw))
    monkeypatch.setattr("sds.policy.judgement.open_reader", lambda *_, **__: said)
    return said


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", " ." * 15),
        ("Why?", "Why?" + " ." * 13),
        ("No, it was late. " * 9, "No, it was late. No, it was late. No, it"),
        ("One " + "a." * 8, "One" + " ." * 14),
    ],
)
def test_a_text_is_cut_after_a_word_and_filled_to_so_many_tokens(text: str, found: str) -> None:
    assert found == readings.of_tokens(text.split(), 15, count)
    assert 15 == count(found)


def test_a_reading_and_a_decision_by_its_stages_are_measured(reader: Says, tmp_path: Path) -> None:
    report, said = asked(readings, "--n", "3", "--folder", str(tmp_path))
    assert ["15", "60", "200", "own"] == list(report["reading_ms"]["cause"])
    assert {3} == {each["n"] for each in (*report["reading_ms"]["cause"].values(), report["distribution_us"])}
    assert [15, 60, 200] * 4 == [count(text) for text in reader.texts[:16] if text not in reader.texts[3:16:4]]
    assert reader.texts[3:16:4] == reader.texts[16:]  # the decisions' own texts are those read alone
    assert report["reading_ms_p50"] == report["reading_ms"]["cause"]["60"]["p50"] > READ_S * 1000
    assert f"predicted for the stage `read`: {report['predicted']['read_ms']} ms" in said
    assert KINDS | {"DECIDED"} >= report["decisions"].keys()
    decided = report["decisions"]["DECIDED"]
    assert 3 == decided["whole_ms"]["n"]
    stages = decided["stages_ms"]
    assert list(readings.STAGES) == list(stages)
    assert min(stages[name] for name in ("open", "read", "distribution", "policy", "judge", "commit", "answer")) > 0
    assert stages["policy"] < READ_S * 1000 < stages["read"] < decided["whole_ms"]["p50"]
    assert "language_model" not in report


def test_a_clock_takes_from_each_stage_what_is_called_within_it() -> None:
    class Parts:
        @staticmethod
        def outer(sleep: Callable[[float], object]) -> None:
            sleep(READ_S)

    with ExitStack() as opened:
        monkey = opened.enter_context(pytest.MonkeyPatch.context())
        stages: Mapping[str, object] = {"outer": [(Parts, "outer")], "inner": [(time, "sleep")], readings.ANSWER: []}
        monkey.setattr(readings, "STAGES", stages)
        clock = readings.Clock(opened)

        class Decides:
            @staticmethod
            def decide(event: object) -> object:
                Parts.outer(time.sleep)
                return type("Answered", (), {"outcome": "ESCALATED", "action": "DENY"})

        kind, ms = clock.decide(Decides(), type("Case", (), {"event": {}}))  # type: ignore[arg-type]
    assert "ESCALATE" == kind
    assert ms["outer"] < READ_S * 1000 <= ms["inner"]
    assert ms["whole"] == pytest.approx(ms["outer"] + ms["inner"] + ms[readings.ANSWER])


def test_the_language_model_decides_the_same_cases_and_none_twice(
    reader: Says, tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readings, "open_engine", lambda _, **how: open_engine(tiny_path(1), **how))
    report = readings.run(refund.gate, tmp_path, 2, 2, lambda _: None)["language_model"]
    assert 2 == report["policy_ms"]["n"] == report["model_ms"]["n"]
    assert report["over_policy"] == round(report["model_ms"]["p50"] / report["policy_ms"]["p50"], 2)
    assert report["model"].startswith(tiny_path(1).name)
    events = [set[str](), set[str]()]
    for place, folder in enumerate(("policy", "model")):
        with closing(sqlite3.connect(tmp_path / folder / "decisions.db")) as record:
            events[place] = {event for (event,) in record.execute("SELECT event_id FROM decision_flows")}
    assert events[0] == events[1]
    assert 5 == len(events[0])  # one that warms up, two that are measured, two in turn


def test_a_gate_without_fitted_readers_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SDS_HOME", str(tmp_path))
    monkeypatch.setattr(readings, "fitted_readers", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        asked(readings, "--json", "--folder", str(tmp_path))
    assert (2, "error: gate `refund` has no fitted readers\nmend:  sds fit refund\n") == (
        ended.value.code,
        capsys.readouterr().err,
    )


def test_a_queue_with_too_few_cases_is_refused_in_one_line(reader: Says, tmp_path: Path) -> None:
    few = replace(refund.gate, events=lambda folder: refund.gate.cases(folder)[:3])
    with pytest.raises(UsageError, match=r"^5 cases are needed, and the queue has [1-3] to read$"):
        readings.run(few, tmp_path, 4, 0, lambda _: None)
