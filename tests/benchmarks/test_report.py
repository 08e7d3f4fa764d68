"""The page says what the documents say, and nothing else: figures, targets, what is missing, and who was quicker."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from sds.benchmarks import report
from sds.benchmarks.lib.measuring import write_whole
from sds.benchmarks.page.targets import TARGETS
from sds.kernel.errors import UsageError
from tests.benchmarks.documents import MADE, documents
from tests.questions import asked

_SVG_TEXT = "{http://www.w3.org/2000/svg}text"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


def _section(text: str, title: str) -> str:
    return text.partition(f"## {title}")[2].partition("\n## ")[0]


def _cells(text: str) -> Iterator[list[str]]:
    """Yield the rows of all tables, without their heads."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not line.startswith("| ---") and not following.startswith("| ---"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_every_question_has_a_document_here() -> None:
    assert list(report.QUESTIONS) == list(documents())


def test_every_figure_on_the_page_is_in_a_document() -> None:
    found = documents()
    text, plots = report.page(found)
    known = set(_NUMBER.findall(json.dumps(found)))
    before, targets, after = text.partition(_section(text, "What it must reach"))
    shown = [cell for row in _cells(before + after) for cell in row] + [row[3] for row in _cells(targets)]
    shown += re.findall(r"^- (?:New|One|\d).*$", text, re.MULTILINE)
    shown += [node.text or "" for svg in plots.values() for node in ET.fromstring(svg).iter(_SVG_TEXT)]  # noqa: S314  ours
    figures = {figure for cell in shown for figure in _NUMBER.findall(cell.replace("SHA-256 ", ""))}
    assert len(figures) > 200
    assert set() == {figure for figure in figures - known if f"{figure}.0" not in known}


def test_every_figure_of_a_document_is_on_the_page() -> None:
    found = documents()
    text, _ = report.page(found)
    shown = {figure for row in _cells(text) for cell in row for figure in _NUMBER.findall(cell)}
    shown |= set(_NUMBER.findall(_section(text, "`gpu`")))
    assert set() == {f"{number}" for document in found.values() for number in _floats(document)} - shown


def _floats(data: Any) -> Iterator[float]:
    if isinstance(data, float):
        yield data
    elif isinstance(data, (dict, list)):
        for part in data.values() if isinstance(data, dict) else data:
            yield from _floats(part)


def test_a_target_is_reached_at_its_limit_and_missed_beyond_it() -> None:
    text, _ = report.page(documents())
    rows = {row[0]: row[3:] for row in _cells(_section(text, "What it must reach"))}
    assert [target.figure for target in TARGETS] == list(rows)
    assert ["1.07", "reached"] == rows["warm decision's reasoning over its bare passes"]
    assert ["1.42", "**missed**"] == rows["exact distribution over the kinds, against greedy"]
    assert ["50.0", "reached"] == rows["new bounds, median"]
    assert ["5.99", "**missed**"] == rows["16 at once, against the best of the peers asked"]
    assert ["9.99", "**missed**"] == rows["fixed form, against llama.cpp's grammar"]
    assert ["-", "not measured"] == rows["fixed form, against Outlines on llama.cpp"]
    assert ["1.02", "reached"] == rows["durable verdict, a million entries over a thousand"]
    assert ["0.99", "reached"] == rows["what HTTP adds to a decision, of the medians"]
    assert ["0.49", "**missed**"] == rows["decisions in PostgreSQL over its bare commits"]


def test_smaller_ledgers_say_nothing_of_a_million_entries() -> None:
    found = documents()
    found["scaling"]["ledger"][-1]["entries"] = 999_999
    text, _ = report.page(found)
    rows = {row[0]: row[3:] for row in _cells(_section(text, "What it must reach"))}
    assert ["-", "not measured"] == rows["durable verdict, a million entries over a thousand"]


def test_a_peer_that_wins_is_said_to_win_and_no_other() -> None:
    found = documents()
    assert "Nowhere, in what was measured of" in report.page(found)[0]
    found["peers"]["peers"][0] |= {"ms_p50": 7.5, "digits_ms_p50": 6.4}
    found["throughput"]["rows"][1]["peer"]["per_s"] = 90_000.5
    found["kernel"]["cedar_us"]["p50"] = 0.75
    found["grammar"]["rows"][1]["decision_us"]["p50"] = 0.125
    said = _section(report.page(found)[0], "Where others are quicker").strip().splitlines()
    ours = found["throughput"]["rows"][1]["ours"]["per_s"]
    whole = found["grammar"]["rows"][0]["decision_us"]["p50"]
    expected = [
        "- One decision, fixed packets: slow takes 7.5 ms, ours-llamacpp 35.5 ms.",
        "- One decision, digits packets: slow takes 6.4 ms, ours 6.5 ms.",
        "- One decision, digits packets: slow takes 6.4 ms, ours-llamacpp 36.5 ms.",
        f"- 16 at once: slow, 2 processes makes 90000.5 decisions a second, ours {ours}.",
        f"- New bounds, through a whole decision: llguidance takes 0.125 us, ours {whole} us.",
        f"- One yes or no under one rule: Cedar takes 0.75 us, ours {found['kernel']['rule_us']['p50']} us.",
    ]
    assert expected == said


def test_what_was_not_measured_is_named_and_nothing_is_said_of_it() -> None:
    found = documents()
    whole, _ = report.page(found)
    del found["peers"], found["gpu"]
    text, plots = report.page(found)
    assert "**Not measured: `peers`, `gpu`.**" in text
    assert "Not measured" not in whole
    assert "## `peers`" in whole
    assert "## `peers`" not in text
    assert not any("peers" in name or "gpu" in name for name in plots)
    rows = {row[0]: row[3:] for row in _cells(_section(text, "What it must reach"))}
    assert ["-", "not measured"] == rows["four digits, against the fastest peer"]


def test_documents_of_two_machines_are_said_to_be_so() -> None:
    found = documents()
    assert "Not all was measured on one machine" not in report.page(found)[0]
    for name in ("machine", "features", "cores"):
        found = documents()
        found["gpu"][name] = "another"
        assert "Not all was measured on one machine" in report.page(found)[0]


def test_what_was_reached_on_other_machines_is_shown_by_machine(tmp_path: Path) -> None:
    here, there = documents(), {name: documents()[name] for name in ("hotpath", "peers")}
    there["hotpath"]["over_floor"] = 7.77
    there["peers"] |= {"speedup_over_fastest": 8.88, "machine": "sun"}
    for folder, found in (("", here), ("elsewhere/solar-cell", there)):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        for name, document in found.items():
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(document))
    (tmp_path / "elsewhere" / "empty").mkdir()
    (tmp_path / "elsewhere" / "a-file").write_text("")
    elsewhere = report.read_elsewhere(tmp_path)
    assert {"solar-cell": there} == elsewhere
    text = report.page(report.read_results(tmp_path), elsewhere)[0]
    said = _section(text, "On other machines")
    assert report.page(here)[0] == text.replace(f"## On other machines{said}\n", "")
    assert ["### solar-cell"] == [line for line in said.splitlines() if line.startswith("#")]
    rows = {row[0]: row for row in _cells(said)}
    assert ["sun own512", "3"] == rows["peers"][4:6]
    assert ["7.77", "**missed**"] == rows["warm decision's reasoning over its bare passes"][3:]
    assert ["8.88", "reached"] == rows["fixed form, against the fastest peer"][3:]
    assert "new bounds, median" not in rows


@pytest.mark.parametrize("name", list(MADE))
def test_a_document_that_lacks_anything_its_section_shows_is_refused(name: str) -> None:
    found = documents()[name]
    whole, _ = report.page({name: found})
    refused: list[str] = []
    for key in MADE[name](iter(count(1.5))):
        lacking = deepcopy(found)
        del lacking[key]
        try:
            text, _ = report.page({name: lacking})
        except UsageError as error:
            refused.append(str(error))
        else:
            assert text != whole  # a target or a row is not there, and the page says so
    assert {f"the result of `sds bench {name}` lacks values that the page shows"} == set(refused)


def test_the_page_and_its_plots_are_written_and_the_last_line_says_what_was_reached(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    for name, found in documents().items():
        write_whole(results / f"{name}.json", json.dumps(found))
    said, lines = asked(report, "--results", str(results), "--page", str(page))
    assert {page.name, "results", *said["plots"]} == {path.name for path in tmp_path.iterdir()}
    text = page.read_text(encoding="utf-8")
    assert set(re.findall(r"\]\(([^)]*\.svg)\)", text)) == set(said["plots"])
    reached = {target["figure"]: target["reached"] for target in said["targets"]}
    assert reached["warm decision's reasoning over its bare passes"]
    assert not reached["exact distribution over the kinds, against greedy"]
    assert reached["fixed form, against Outlines on llama.cpp"] is None
    assert "MISSED   exact distribution over the kinds, against greedy: 1.42, target at most 1.3x" in lines
    assert [] == said["missing"]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "holds no result"),
        ({"kernel.json": "{"}, "is not a result of `sds bench kernel`"),
        ({"kernel.json": "[" * 100_000}, "is not a result of `sds bench kernel`"),
        ({"kernel.json": '{"benchmark": "hotpath"}'}, "is not a result of `sds bench kernel`"),
        ({"kernel.json": '{"benchmark": "kernel"}'}, "lacks values that the page shows"),
    ],
)
def test_what_is_no_result_is_refused_in_one_line_and_nothing_is_written(
    written: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    for name, text in written.items():
        (results / name).write_text(text, encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        asked(report, "--json", "--results", str(results), "--page", str(page))
    assert 2 == ended.value.code
    said, _mend = capsys.readouterr().err.splitlines()
    assert message in said
    assert not page.exists()


@pytest.mark.parametrize("library", ["jinja2", "matplotlib"])
def test_without_what_typesets_it_the_page_says_so_in_one_line(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for loaded in [name for name in sys.modules if name.partition(".")[0] == library or "benchmarks.page" in name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=f"the page needs `{library}`, which is not installed"):
        report.page(documents())
