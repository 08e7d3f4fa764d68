"""`sds fit`, `eval`, `label` and `labels export` on a gate of one's own."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from sds.gate import Gate
from sds.judgement import fitting
from sds.judgement.labels import label_line
from sds.kernel.errors import ModelError, UsageError
from tests.cli.conftest import Cli
from tests.cli.judgement.conftest import gate_of
from tests.gates.own import written
from tests.judgement.claims import CLAIMS, SCORED, cases
from tests.judgement.test_asking import Boasts
from tests.kernel.durable import proposal
from tests.proposers import Says

ESCALATES = Says(proposal("ESCALATE", "HUMAN_REVIEW"))


def test_what_is_fitted_is_what_the_gate_then_decides_with(cli: Cli, tmp_path: Path) -> None:
    said = cli.ok("fit", "./claims")
    assert "PAY: decided from confidence" in said
    assert str(tmp_path / "home" / "fitted" / "claims") in said.replace(
        "written to home", f"written to {tmp_path}/home"
    )
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"claim_id": "C", "trip_id": "TRIP-1", "text": "engine smoke door broke then night"}))
    answer = json.loads(cli.ok("decide", "./claims", "--event", str(event)))
    assert ("PAY", {"amount": 1000}) == (answer["action"], answer["params"])


def test_a_fit_says_in_a_line_what_it_could_not_do(cli: Cli) -> None:
    code, _, err = cli("fit", "./claims", "--out", "out")
    assert (0, "a head, not the tuned encoder\n") == (code, err)


def test_the_language_model_is_calibrated_and_measured_in_the_place_of_a_fitted_reader(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("fit", "evaluate"):
        opened = f"sds.cli.judgement.{command}.opened_engine"
        monkeypatch.setattr(opened, lambda *_, **__: nullcontext(Boasts()))
    assert "cause    calibrate" in cli.ok("fit", "./claims", "--language-model")
    manifest = json.loads((tmp_path / "home" / "fitted" / "claims" / "judgement.json").read_text())
    assert ({}, ["cause"]) == (manifest["readers"], list(manifest["models"]))
    assert [] == cli.json("eval", "./claims")["notices"]
    code, _, err = cli("fit", "./claims", "--language-model", "--head")
    assert (2, "error: --head and --language-model exclude each other") == (code, err.splitlines()[0])


def test_a_notice_names_a_gate_of_ones_own_by_its_path(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sds.cli.engines._open", lambda *_, **__: Boasts())
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"claim_id": "C", "trip_id": "TRIP-1", "text": "engine smoke"}))
    _, _, err = cli("decide", "./claims", "--event", str(event))
    unfitted = "no reader is fitted for `cause`: the uncalibrated language model reads it (sds fit ./claims)"
    assert unfitted == err.splitlines()[0]


def test_doctor_says_which_language_model_is_calibrated_and_refuses_another(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def doctor(model: Boasts) -> str:
        for module in ("judgement.fit", "setup.doctor"):
            monkeypatch.setattr(f"sds.cli.{module}.opened_engine", lambda *_, **__: nullcontext(model))
        return next(line for line in cli("doctor", "--gate", "./claims")[1].splitlines() if "readers" in line)

    assert "ok    readers: none is fitted: the language model reads, uncalibrated (sds fit ./claims)" == doctor(
        Boasts()
    )
    cli.ok("fit", "./claims", "--language-model")
    assert "ok    readers: cause by the language model, calibrated: `boasts`" == doctor(Boasts())
    assert (
        "FAIL  readers: `boasts` was calibrated to read `cause`, but the model here is `another`: it is uncalibrated,"
        " and has no thresholds (sds fit ./claims --language-model)"
    ) == doctor(Boasts("another"))
    monkeypatch.setattr(Boasts, "check_contract", refuses, raising=False)
    assert "ok    readers: cause by the language model, calibrated if it is `boasts`" == doctor(Boasts("another"))


def refuses(*_: object) -> None:
    raise ModelError("it cannot say this")


def test_doctor_refuses_a_score_that_nobody_was_fitted_for(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sds.cli.setup.doctor.opened_engine", lambda *_, **__: nullcontext(Boasts()))
    written(tmp_path / "claims", gate_of(CLAIMS.replace("policy:\n", f"{SCORED.lstrip(chr(10))}policy:\n", 1)))
    assert "FAIL  readers: the score `risk` has no fitted reader" in cli("doctor", "--gate", "./claims")[1]


def test_labels_of_a_file_take_the_place_of_the_gates_own(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text('{"text": "engine", "cause": "fault"}\n')
    code, _, err = cli("fit", "./claims", "--labels", str(file))
    assert 2 == code
    assert err.splitlines()[0].startswith("error: `cause` has too few labels to learn")
    assert err.splitlines()[1].endswith(": sds label ./claims --reading cause"), "by its path, as it was named"
    assert 2 == len(err.splitlines())


def test_a_fit_says_of_which_texts_a_reader_does_not_see_every_letter(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    lines = [label_line(case, "claims") for case in cases(1200, noise=0.01)]
    file.write_text("".join([*lines, '{"text": "Die Tür клемт", "cause": "fault"}\n']))
    code, _, err = cli("fit", "./claims", "--labels", str(file))
    assert 0 == code
    assert f"1 of {len(lines) + 1} texts have letters that no reader sees" in err
    assert "it reads `Die Tur`" in err


def test_a_gate_without_labels_or_readings_says_so(cli: Cli, tmp_path: Path) -> None:
    written(tmp_path / "bare", gate_of().replace("    labelled=labelled,\n", ""))
    assert "gate `claims` has no labels of its own" in cli("fit", "./bare")[2]
    written(tmp_path / "plain", gate_of(CLAIMS.partition("readings:")[0]))
    for command in ("fit", "eval", "label"):
        assert "has no readings" in cli(command, "./plain")[2]


def test_an_evaluation_needs_fitted_readers(cli: Cli) -> None:
    code, _, err = cli("eval", "./claims")
    assert (2, True) == (code, "no readers are fitted for gate `claims`" in err)
    assert "mend:  sds fit ./claims" in err


def test_an_evaluation_shows_tables_and_json_and_a_page(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    cli.ok("fit", "./claims")
    said = cli.ok("eval", "./claims", "--html", str(tmp_path / "page.html"))
    for words in (
        "reading.cause",
        "styles",
        "classes",
        "decisions",
        "always_pay",
        "max_error 0.05 of DENY, PAY: held in",
        "fitted, with 95% confidence: accuracy 0.",
        "fitted, with 95% confidence: agreement 0.",
    ):
        assert words in said
    assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
    document = cli.json("eval", "./claims")
    low, high = document["readings"]["cause"]["fitted"]["accuracy_95"]
    assert low < document["readings"]["cause"]["fitted"]["accuracy"] <= high
    assert ("claims", "test", []) == (document["gate"], document["part"], document["notices"])


def test_a_page_that_cannot_be_written_is_told_before_anything_is_measured(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for place in (tmp_path / "nowhere" / "page.html", tmp_path):
        code, _, err = cli("eval", "./claims", "--html", str(place))  # nothing is fitted: that would be said later
        assert (2, f"error: `{place}` cannot be written") == (code, err.splitlines()[0])


def test_a_person_labels_the_queue_and_goes_on_where_they_stopped(
    cli: Cli, typed: Callable[[str], None], tmp_path: Path
) -> None:
    typed("12q")
    assert "2 labels added to" in cli.ok("label", "./claims")
    typed("3333")
    said = cli.ok("label", "./claims")
    assert "1 of 4" in said
    assert "4 labels added" in said
    assert "0 of these cases have none yet" in said
    kept = [json.loads(line) for line in (tmp_path / "home" / "labels" / "claims.jsonl").read_text().splitlines()]
    assert ["fault", "storm", "none", "none", "none", "none"] == [each["readings"]["cause"] for each in kept]
    assert all(90 == each["fields"]["trip.delay_min"] for each in kept)


def test_the_end_of_what_is_typed_ends_the_session(cli: Cli, typed: Callable[[str], None]) -> None:
    typed("1")
    assert "1 label added" in cli.ok("label", "./claims")


def test_cases_come_from_a_file_and_the_least_certain_first(
    cli: Cli, typed: Callable[[str], None], tmp_path: Path
) -> None:
    cli.ok("fit", "./claims")
    events = [("sure", "engine smoke"), ("torn", "engine wind"), ("odd", "qqqq zzzz")]
    file = tmp_path / "cases.jsonl"
    file.write_text(
        "".join(json.dumps({"claim_id": name, "trip_id": "TRIP-1", "text": text}) + "\n" for name, text in events)
    )
    typed("ssq")
    said = cli.ok("label", "./claims", "--cases", str(file), "--out", str(tmp_path / "l.jsonl"))
    assert said.index("qqqq") < said.index("engine wind") < said.index("engine smoke")
    assert "cannot be read" in cli("label", "./claims", "--cases", "nowhere.jsonl")[2]


def test_a_file_of_cases_may_begin_with_a_mark_and_a_wrong_line_is_named_before_anything_is_written(
    cli: Cli, typed: Callable[[str], None], tmp_path: Path
) -> None:
    file, out = tmp_path / "cases.jsonl", tmp_path / "l.jsonl"
    event = json.dumps({"claim_id": "C", "trip_id": "TRIP-1", "text": "engine"}).encode()
    file.write_bytes(b"\xef\xbb\xbf" + event + b"\r\n\r\nclaim,trip\r\n")
    code, _, err = cli("label", "./claims", "--cases", str(file), "--out", str(out))
    error, mend = err.splitlines()
    assert (2, False, True) == (code, out.exists(), error.startswith(f"error: {file}:3: the event is not JSON"))
    assert "mend:  write each event as one line: sds events ./claims > cases.jsonl" == mend
    file.write_bytes(b"\xef\xbb\xbf" + event + b"\r\n")
    typed("q")
    assert "1 of these cases" in cli.ok("label", "./claims", "--cases", str(file), "--out", str(out))


def test_who_labels_a_score_is_shown_text_and_fields_and_says_yes_or_no(
    cli: Cli, typed: Callable[[str], None], tmp_path: Path
) -> None:
    text = CLAIMS.replace("policy:\n", SCORED.lstrip("\n") + "policy:\n", 1)
    written(tmp_path / "scored", gate_of(text))
    typed("12q")
    said = cli.ok("label", "./scored", "--reading", "risk", "--out", str(tmp_path / "l.jsonl"))
    assert "1  yes" in said
    assert "2  no" in said
    assert cases(6, seed=5)[0].text.split()[0] in said
    kept = [json.loads(line) for line in (tmp_path / "l.jsonl").read_text().splitlines()]
    assert [{"risk": "1"}, {"risk": "0"}] == [each["readings"] for each in kept]


def decided(path: Path, texts: list[str], change: str) -> list[str]:
    """Have every text escalated, and decided otherwise by a human; return their flows."""
    with Gate.load(path, engine=ESCALATES) as gate:
        answers = [
            gate.decide({"claim_id": f"C-{n}", "trip_id": f"TRIP-{n}", "text": text}) for n, text in enumerate(texts)
        ]
        for answer in answers:
            gate.resolve(answer.dfid, "MODIFY", who="anna", reason="looked at it", change=change)
    return [answer.dfid for answer in answers]


DENIED = '{"action":"DENY","reason":"STORM"}'


def test_what_humans_decided_becomes_labels_that_are_read_back(cli: Cli, tmp_path: Path) -> None:
    decided(tmp_path / "claims", ["a tree lay there", "wind"], DENIED)
    lines = cli.ok("labels", "export", "./claims").splitlines()
    assert [("a tree lay there", "DENY", 90), ("wind", "DENY", 90)] == [
        (each["text"], each["decision"], each["fields"]["trip.delay_min"]) for each in map(json.loads, lines)
    ]
    assert [5000, 5000] == [json.loads(line)["amount_minor"] for line in lines]  # what paying could have cost
    (tmp_path / "labels.jsonl").write_text("\n".join(lines))
    assert "to learn fault 0" in cli("fit", "./claims", "--labels", "labels.jsonl")[2]


def test_the_same_case_decided_twice_is_one_label(cli: Cli, tmp_path: Path) -> None:
    first, second = decided(tmp_path / "claims", ["wind", "wind"], DENIED)
    code, out, err = cli("labels", "export", "./claims")
    assert (0, ["wind"]) == (code, [json.loads(line)["text"] for line in out.splitlines()])
    assert f"not exported: {second}: the same case as {first}\n" == err


def test_an_erased_text_is_left_out_with_a_note(cli: Cli, tmp_path: Path) -> None:
    first, _ = decided(tmp_path / "claims", ["a tree lay there", "wind"], DENIED)
    cli.ok("erase", "--event", "C-0", "--gate", "claims", "--reason", "asked for")
    code, out, err = cli("labels", "export", "./claims")
    assert (0, ["wind"]) == (code, [json.loads(line)["text"] for line in out.splitlines()])
    assert f"not exported: {first}: its text was erased\n" == err


def test_a_case_that_a_human_ended_is_no_label(cli: Cli, tmp_path: Path) -> None:
    with Gate.load(tmp_path / "claims", engine=ESCALATES) as gate:
        answer = gate.decide({"claim_id": "C-1", "trip_id": "TRIP-1", "text": "wind"})
        gate.resolve(answer.dfid, "ABORT", who="anna", reason="withdrawn")
    assert (0, "") == cli("labels", "export", "./claims")[:2]
    assert (
        "no labels: a label is made when a human resolves an escalated case\n" == cli("labels", "export", "./claims")[2]
    )


def test_without_the_extra_a_fit_says_what_to_install(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(fitting, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="fitting needs `sklearn`") as refused:
        fitting.open_fitters()
    assert "[fit]" in refused.value.hint


def test_labels_for_a_test_are_different_each() -> None:
    assert 1200 == len({case.text for case in cases(1200)})
