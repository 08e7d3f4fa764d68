"""Benchmarks run, say what they measured, and their last line is one JSON document. Their figures are not tested."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import pytest

from sds.benchmarks import grammar, hotpath, kernel, peers, scaling, throughput
from sds.benchmarks.lib import measuring
from sds.benchmarks.lib.measuring import Report, write_whole
from sds.benchmarks.lib.packets import amount_is_shown, digits_packets, fixed_packets, narrow_to_denial
from sds.benchmarks.lib.process import PeerProcess
from sds.benchmarks.lib.weights import Weights, vocabulary, weights_of
from sds.benchmarks.peer import contenders
from sds.benchmarks.peer.contenders import Contender, ours_with
from sds.benchmarks.peer.outcomes import KINDS, PeerOutcomes, speedups
from sds.benchmarks.peers import Entry
from sds.gates.opening import preview_kernel
from sds.gates.refund import gate
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.errors import UsageError
from sds.kernel.flow.intake import read_event
from sds.models.catalog.catalog import embedded_model
from sds.models.openvino_.facts import OPENVINO
from tests.models.catalog.preparing import in_openvino
from tests.questions import asked

DECIDED = f'{{"action":"DENY","reason":"NOT_ELIGIBLE","context_ref":"{"0" * 64}"}}'
_OURS_MS = ((20.0, 25.0), (24.0, 30.0), (30.0, 50.0))  # as it runs, not rounded, on llama.cpp
_SPEEDUPS = ("speedup_over_fastest", "speedup_digits")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "error: interrupted: nothing was kept\n"),
        (BrokenPipeError(), 0, ""),
        (OSError(28, "No space left on device"), 1, "error: the operating system refused: no space left on device\n"),
        (
            ModuleNotFoundError("No module named 'torch'", name="torch"),
            2,
            "error: this question needs `torch`\nmend:  run make peers in the source folder\n",
        ),
    ],
    ids=repr,
)
def test_a_benchmark_that_is_cut_short_ends_in_one_line(
    error: BaseException,
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("sys.argv", ["question", "--json"])
    with pytest.raises(SystemExit) as ended:
        measuring.main("Question.", lambda _: None, fail, fail)  # type: ignore[arg-type]

    assert (code, said) == (ended.value.code, capsys.readouterr().err)


def test_the_grammar_benchmark_ends_with_the_medians_of_its_rows() -> None:
    report, said = asked(grammar, "--n", "3", "--only", "llguidance")
    said_first = next(i for i, line in enumerate(said) if line.startswith("predicted for ours"))
    assert said_first < next(i for i, line in enumerate(said) if line.startswith("ours "))
    assert {"first_us", "decision_us"} == report["predicted"].keys() == report["over_predicted"].keys()
    assert all(each > 0 for each in report["predicted"].values())
    assert ["ours", "llguidance"] == [row["name"] for row in report["rows"]]
    assert report["rows"][0]["first_us"]["p50"] == report["ours_us_p50"]
    assert report["rows"][1]["first_us"]["p50"] == report["llguidance_us_p50"]
    assert {3} == {row[figure]["n"] for row in report["rows"] for figure in ("first_us", "decision_us")}


def test_the_hot_path_is_measured_by_stage_for_a_denial_and_for_a_refund(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hotpath, "EARLIER", 0)
    monkeypatch.setattr(hotpath, "COLD_N", 1)
    report, said = asked(hotpath, "--n", "1", "--folder", str(tmp_path))
    assert {"over_floor", "exact_over_greedy", "stages_ms"} <= report.keys()
    assert {"DENY", "REFUND_TICKET"} == report["stages_ms"].keys() == report["predicted"].keys()
    for sort, stages in report["stages_ms"].items():
        assert set(hotpath.STAGES) == stages.keys()
        assert abs(sum(stages.values()) - report["warm"][sort]["whole_ms"]["p50"]) < 0.1
        predicted = report["predicted"][sort]
        assert 0 < predicted["floor_ms"] < report["warm"][sort]["bare_passes_ms"]["max"]
        assert "fp32" == predicted["in"]
        assert f"{sort}: predicted {predicted}" in said
        assert report["warm"][sort]["whole_over_floor"] > 0
        assert report["warm"][sort]["whole_over_predicted"] > 0


def test_throughput_is_measured_for_every_concurrency_and_compared_with_the_best_peer(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDS_THREADS", "2")
    monkeypatch.setattr(throughput, "EARLIER", 2)
    arguments = ("--n", "2", "--at-once", "2", "1", "--only", "llamacpp-grammar", "--model", str(tiny_path(1)))
    report, said = asked(throughput, *arguments)
    assert said.index(f"predicted: {report['predicted']}") < said.index(str(report["rows"][0]))
    assert ["1", "2"] == list(report["predicted"]["per_s"]) == list(report["of_predicted"])
    assert ["1", "2"] == list(report["ours_per_s"]) == list(report["best_peer_per_s"]) == list(report["speedup"])
    for row in report["rows"]:
        assert 2 == sum(row["ours"]["became"].values()) == sum(row["peer"]["became"].values())
        assert {"inside", "CHOICE_TOO_CLOSE"} >= row["ours"]["became"].keys()
        for who in ("peer", "ours"):
            assert row[who]["per_s"] == max(way["per_s"] for way in row[who]["tried"].values())
    assert ["1 slot", "2 slots", "2 replicas"] == list(report["rows"][1]["ours"]["tried"])
    assert "llama_cpp_python" in report["versions"]


def test_a_peer_that_fails_at_once_is_not_the_quickest(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("dying", "raising", "beyond")
    contenders = [Contender(kind, "tests.own_peers", (kind,)) for kind in kinds]
    monkeypatch.setattr(throughput, "PEERS", contenders)
    packets, _ = throughput.mixed_packets(tmp_path, 4)
    with vocabulary(tiny_path(1)) as words:
        tasks = peers.tasks_of(packets, words)

    def asked_of(*only: str) -> Report:
        ways = throughput.ways_of_peers(tmp_path, tiny_path(1), tasks, tasks[:1], 2, only, tmp_path)
        return throughput.best_peer(throughput.in_rounds(ways, 1))

    found = asked_of(*kinds)
    assert ("beyond, 1 process", {"outside": len(tasks)}) == (found["best"], found["became"])
    fared = {name: (way["per_s"], way["became"], way["notes"]) for name, way in found["tried"].items()}
    errors = {"error": len(tasks)}
    assert (0.0, errors, "the process has ended: out of luck") == fared["dying, 1 process"]
    assert (0.0, errors, "ValueError: no token is left") == fared["raising, 1 process"]
    with pytest.raises(
        UsageError, match="none of the peers runs: dying, 1 process: the process has ended: out of luck"
    ):
        asked_of("dying")


def test_in_several_rounds_a_way_is_as_quick_as_in_its_median_round_and_all_it_did_counts() -> None:
    rates, turns = {"a": [3.0, 9.0, 4.0], "b": [5.0, 1.0, 2.0]}, list[str]()

    def way(name: str) -> Report:
        turns.append(name)
        per_s = rates[name][turns.count(name) - 1]
        became = {"inside": 1, **({"error": 1} if per_s == 9.0 else {})}
        return {"per_s": per_s, "n": 2, "became": became, "notes": "once" if per_s == 9.0 else ""}

    found = throughput.in_rounds({name: partial(way, name) for name in rates}, 3)
    assert {"a": 4.0, "b": 2.0} == {name: each["per_s"] for name, each in found.items()}
    assert rates == {name: each["each_per_s"] for name, each in found.items()}
    assert ({"inside": 3, "error": 1}, "once") == (found["a"]["became"], found["a"]["notes"])
    assert ["ab"] * 3 != ["".join(turns[n : n + 2]) for n in (0, 2, 4)]
    gone = {"per_s": None, "notes": "not installed"}
    assert gone == throughput.in_rounds({"gone": lambda: gone}, 2)["gone"]


def test_why_what_was_prepared_is_not_measured_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sds.benchmarks.lib.weights.weights_for", lambda *_: (None, "the prepared weights are damaged"))
    found = weights_of(Namespace(model=None, library=None, dtype=None))
    assert (Weights(embedded_model()), "the prepared weights are damaged\n") == (found, capsys.readouterr().err)


def test_growth_is_measured_with_prompt_alternatives_contract_and_ledger(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaling, "TEMPLATES", 5)
    monkeypatch.setattr(kernel, "WARM_UP", 2)
    small = {"WARM_UP": 2, "CASE_TOKENS": (20, 40), "KINDS": (2, 16), "CONTRACTS": ((2, 2, 4), (16, 3, 64))}
    for name, value in small.items():
        monkeypatch.setattr(scaling, name, value)
    arguments = ("--n", "2", "--decisions", "2", "--sizes", "500", "100", "--folder", str(tmp_path))
    report, said = asked(scaling, *arguments, "--model", str(tiny_path(1)))
    assert [100, 500] == [row["entries"] // 100 * 100 for row in report["ledger"]]
    few, many = (row["durable_us"]["p50"] for row in report["ledger"])
    assert round(many / few, 3) == report["durable_1m_over_1k"]
    assert [20, 40] == [row["case_tokens"] for row in report["prompt"]]
    assert all(row["tokens_of_passes"][0] > row["case_tokens"] for row in report["prompt"])
    assert [2, 16] == [row["kinds"] for row in report["alternatives"]]
    for row in report["alternatives"]:
        assert sum(row["greedy"]["tokens_of_passes"]) < sum(row["exact"]["tokens_of_passes"])
        assert 2 == row["greedy"]["decision_ms"]["n"] == row["exact"]["decision_ms"]["n"]
    assert [(2, 2, 4), (16, 3, 64)] == [(row["kinds"], row["reasons"], row["fields"]) for row in report["contract"]]
    before = said.index(next(line for line in said if line.startswith("{'case_tokens'")))
    assert 2 == sum(line.startswith("a case of") for line in said[:before])
    assert 2 == sum("kinds: predicted" in line for line in said[:before])


def test_every_engine_gets_the_same_questions_and_the_last_line_says_how_each_fared(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    only = "llamacpp-grammar,llamacpp-server,outlines-llamacpp-llguidance"
    monkeypatch.setattr(peers, "WARM_UP", 0)
    monkeypatch.setattr(peers, "EARLIER", 1)
    report, said = asked(peers, "--n", "1", "--only", only, "--model", str(tiny_path(1)))
    assert {"ours_ms_p50", "ours_digits_ms_p50", "speedup_over_fastest", "speedup_digits"} <= report.keys()
    assert only.split(",") == [found["name"] for found in report["peers"]]
    for found in (report["ours"], *report["peers"]):
        assert (0, 0) == (found["violations"], found["errors"])
        assert 1 == sum(found["decided"].values()) == sum(found["digits_decided"].values())
    (own,) = report["ours"]["each_ms"]
    fastest = min(found["each_ms"][0] for found in report["peers"])
    assert abs(fastest / own - report["speedup_over_fastest"]) <= 0.02 * report["speedup_over_fastest"]
    assert {"fixed": {"asked": 1, "failed": 0, "otherwise": 0}}.items() <= report["chosen_from"].items()
    assert dict.fromkeys(KINDS, 1) == {kind: sum(found.values()) for kind, found in report["passes"].items()}
    told = [line.partition(":")[0] for line in said if "prompt tokens to read" in line]
    assert ["fixed, llamacpp", "digits, llamacpp"] == told
    assert [] == report["ours_besides"]
    assert report["model"]["library"].startswith("llama-cpp-python ")
    wanted = {"name", "version", "ms_p50", "digits_ms_p50", "violations", "errors"}
    assert all(wanted <= found.keys() for found in report["peers"])


@in_openvino
def test_ours_on_openvino_is_asked_beside_ours_on_llama_cpp(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "WARM_UP", 0)
    monkeypatch.setattr(peers, "EARLIER", 1)
    monkeypatch.setattr(peers, "CANDIDATES_PER_DECISION", 1)
    weights, other = Weights(tiny_path(1), "openvino", "int8"), [Contender("other", "tests.own_peers", ("beyond",))]
    report = peers.run(tmp_path, weights, other, 1, threads=1, say=lambda _: None)
    alike, beside = report["ours_besides"]
    assert ["ours", "ours-fp32", "ours-llamacpp"] == [each["name"] for each in (report["ours"], alike, beside)]
    assert report["model"]["library"] == f"openvino {report['ours']['version']['openvino']}"
    assert report["model"]["dtype"] == "int8"
    assert {"sovereign-decision-stream", "llama_cpp_python"} == beside["version"].keys()
    ways = {"openvino int8", "openvino fp32", "llamacpp"}
    assert all(ways == by_way.keys() for by_way in report["predicted_ms"].values())


def test_what_the_library_gives_is_told_from_what_the_decoder_gives() -> None:
    def of_kinds(*each_ms: list[float | None]) -> dict[str, PeerOutcomes]:
        return {kind: PeerOutcomes(each_ms=each) for kind, each in zip(KINDS, each_ms, strict=True)}

    ours, typed, alike = (of_kinds([fixed], [digits]) for fixed, digits in _OURS_MS)
    theirs = {"quick": of_kinds([60.0], [90.0]), "absent": of_kinds([], [None])}
    found = speedups(theirs, ours, typed, alike)
    fixed, digits = ([found[name + suffix] for suffix in ("", "_same_type", "_on_llamacpp")] for name in _SPEEDUPS)
    assert ([3.0, 2.5, 2.0], [3.6, 3.0, 1.8]) == (fixed, digits)


def test_a_ratio_is_of_the_packets_that_both_decided() -> None:
    ours = dict.fromkeys(KINDS, PeerOutcomes(each_ms=[10.0, None, 20.0, 500.0]))
    theirs = {"outlines-llamacpp": dict.fromkeys(KINDS, PeerOutcomes(each_ms=[100.0, 7.0, 200.0]))}
    found = speedups(theirs, ours, ours, ours)
    assert 10.0 == found["speedup_over_fastest"] == found["speedup_digits_over_outlines_llamacpp"]
    assert found["speedup_over_llamacpp_grammar"] is None


def test_which_packets_ours_failed_at_before_they_were_chosen_is_told(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with vocabulary(tiny_path(1)) as words:
        tasks = peers.tasks_of(fixed_packets(tmp_path, 5), words)
    answers = iter([{"error": "late"}, {"text": '{"action":"DENY"'}, {"error": "late"}] + 2 * [{"text": DECIDED}])
    monkeypatch.setattr(peers, "ask", lambda *_: next(answers))
    chosen, counted = peers.chosen_tasks(Entry(Contender("ours", "none"), None), tasks, 2, bool)  # type: ignore[arg-type]
    assert (tasks[3:], {"asked": 5, "failed": 2, "otherwise": 1}) == (chosen, counted)


def test_an_amount_is_shown_where_the_prompt_has_it_as_it_stands(tmp_path: Path) -> None:
    (packet,) = digits_packets(tmp_path, 1)
    amount = packet.envelope.kind("REFUND_TICKET").params[0][1]  # type: ignore[union-attr]
    least, other = format_literal(amount.lo, 2), format_literal(amount.lo + 1, 2)
    assert [True, False, False] == [
        amount_is_shown(packet, f'{{"params":{{"amount":{each}}}'.encode()) for each in (least, other, least[:-1])
    ]


def test_ours_is_asked_once_where_nothing_tells_it_apart() -> None:
    path = Path("mine.gguf")
    for weights, names in {
        Weights(path): ["ours"],
        Weights(path, "openvino"): ["ours", "ours-llamacpp"],
        Weights(path, "openvino", "bf16"): ["ours", "ours-llamacpp"],
        Weights(path, "openvino", "int8"): ["ours", "ours-fp32", "ours-llamacpp"],
        Weights(path, "openvino", "int8-bf16"): ["ours", "ours-bf16", "ours-llamacpp"],
    }.items():
        assert names == [each.name for each in dict.fromkeys(ours_with(weights))]


@pytest.mark.parametrize("installed", [True, False])
def test_ours_in_whole_numbers_is_compared_with_what_is_installed(
    installed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        contenders,
        "OPENVINO",
        replace(OPENVINO, version=lambda: "2026.4" if installed else None, usual_dtype=lambda: "bf16"),
    )
    found = [each.name for each in ours_with(Weights(Path("mine.gguf"), "integer", "int8"))]
    alike = "ours-bf16" if installed else "ours-llamacpp"
    assert ["ours", alike, "ours-llamacpp"] == found


def test_what_a_peer_writes_outside_the_envelope_is_counted_and_what_fails_is_an_error(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "WARM_UP", 0)
    monkeypatch.setattr(peers, "EARLIER", 1)
    kinds = ("beyond", "elsewhere", "raising", "dying", "missing")
    liars = [Contender(kind, "tests.own_peers", (kind,)) for kind in kinds]
    said: list[str] = []
    report = peers.run(tmp_path, Weights(tiny_path(1)), liars, 1, threads=1, say=said.append)
    counted = {found["name"]: (found["violations"], found["errors"]) for found in report["peers"]}
    assert {"beyond": (2, 0), "elsewhere": (2, 0), "raising": (0, 2), "dying": (0, 2), "missing": (0, 0)} == counted
    notes = {found["name"]: found["notes"] for found in report["peers"]}
    assert "ValueError: no token is left" == notes["raising"]
    assert "the process has ended: out of luck" == notes["dying"]
    assert "missing: not installed (ImportError: no module named anything)" == said[0]
    assert {} == report["peers"][0]["decided"]


def test_where_no_peer_is_installed_nothing_is_measured(tmp_path: Path, tiny_path: Callable[[int], Path]) -> None:
    missing = [Contender("missing", "tests.own_peers", ("missing",))]
    with pytest.raises(UsageError, match="none of these peers is installed"):
        peers.run(tmp_path, Weights(tiny_path(1)), missing, 1, threads=1, say=lambda _: None)


def test_the_packets_of_the_benchmark_are_of_the_two_kinds_it_says(tmp_path: Path) -> None:
    fixed, digits = fixed_packets(tmp_path, 5), digits_packets(tmp_path, 5)
    assert {()} == {kind.params for packet in fixed for kind in packet.envelope.kinds}
    amounts = [packet.envelope.kind("REFUND_TICKET").params[0][1] for packet in digits]  # type: ignore[union-attr]
    assert all(1000 <= amount.lo <= amount.hi <= 9999 for amount in amounts)
    assert 5 == len(set(amounts))
    for packet, amount in zip(digits, amounts, strict=True):
        told = f"REFUND_TICKET {format_literal(amount.lo, 2)} to {format_literal(amount.hi, 2)}"
        assert packet.texts[1].endswith("Permitted: DENY, ESCALATE, REFUND_TICKET\n")
        assert f"{told}\n" == packet.texts[2]
        assert 4 == len(packet.texts)


def test_a_packet_narrowed_to_a_denial_has_no_number_left(tmp_path: Path) -> None:
    with preview_kernel(gate.gate, tmp_path) as kernel:
        events = (read_event(kernel.contract, queued.event) for queued in gate.read_queue(tmp_path))
        packets = list(islice((p for p in map(kernel.preview, events) if len(p.texts) > 3), 3))
        denials = [narrow_to_denial(kernel, packet, 0) for packet in packets]
    for packet, denial in zip(packets, denials, strict=True):
        assert denial is not None
        static, recurring, evidence = denial.texts
        assert (packet.texts[0], packet.texts[-1]) == (static, evidence)
        assert recurring.endswith("\nPermitted: DENY, ESCALATE\n")


def test_a_peer_that_does_not_answer_in_time_is_ended_and_its_next_answers_are_errors(tmp_path: Path) -> None:
    arguments = ["tests.own_peers", "model", "1", "sleeping"]
    peer = PeerProcess(contenders.SERVING, arguments, log=tmp_path / "log", overlay=None, timeout_s=60)
    late = peer.ask({}, timeout_s=0.2)
    assert {"error": "no answer within 0.2 s"} == late == peer.ask({}, timeout_s=60)
    peer.close()


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kernel.json"
    write_whole(path, "before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UsageError, match="cannot be written: no space left on device"):
        write_whole(path, "after")
    assert "before" == path.read_text(encoding="utf-8")
    assert [path] == list(tmp_path.iterdir())
