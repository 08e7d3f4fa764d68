"""Labels are read strictly, each mistake in one line with its place and a mend; and parted so that no text is learned and tested."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sds.definitions.definition import LabelledCase
from sds.judgement.labels import (
    PARTS,
    label_line,
    labels_hash,
    parse_labels,
    parted,
    read_labels,
    split_hash,
    with_lost_letters,
)
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import MAGNITUDE_MAX
from sds.kernel.errors import UsageError
from sds.kernel.flow.intake import EVENT_BYTES_MAX
from tests.judgement.claims import cases, contract, scored

FIELDS = {"trip.delay_min": 90, "trip.open_minor": 5000, "trip.known": True}
MINUTES = st.integers(-MAGNITUDE_MAX, MAGNITUDE_MAX)


def parsed(raw: bytes, terms: Contract | None = None) -> list[LabelledCase]:
    return parse_labels(terms or contract(), [("labels", raw)])


def line(**said: object) -> bytes:
    return json.dumps({"text": "the brake broke", "readings": {"cause": "fault"}} | said).encode()


@pytest.mark.parametrize(
    ("raw", "message", "hint"),
    [
        (line(readings={"cause": "hail"}), "`hail` is not a value of `cause`", "one of: fault, storm, none"),
        (line(readings={"mood": "calm"}), "`mood` is not a reading of gate `claims`", "for this gate"),
        (line(colour="red"), "`colour` is not a reading of gate `claims`", "cause"),
        (line(gate="fraud"), "this is a label of gate `fraud`, not `claims`", "name the other gate"),
        (line(decision="GIVE"), "`GIVE` is not a kind of decision", "PAY, DENY, ESCALATE"),
        (line(part="exam"), "`exam` is not a part", "train, calibrate, test"),
        (line(fields={"trip.delay_min": 90}), "`trip.open_minor` is missing", "all fields"),
        (line(fields=FIELDS | {"trip.delay_min": "90"}), "`trip.delay_min` is not of its declared type", "as they were read"),
        (line(fields=FIELDS | {"trip.speed": 1}), "`trip.speed` is not a field", "leave it out"),
        (line(text=3), "`text` is missing", '"cause": "fault"'),
        (line(text="x" * 1_000_000), "1000000 characters", "shorten"),
        (line(text=" "), "the text is empty", "leave the line out"),
        (line(readings={"cause": None}), "`cause` has no value", "leave it out"),
        (line(text="поезд сломался"), "has no printable ASCII", "Latin letters"),
        (line(readings={}), "neither a reading nor a decision", "{"),
        (line(readings=["fault"]), "`readings` is not a JSON object", "{"),
        (line(amount_minor=1.5), "`amount_minor` is not an amount in minor units", "whole"),
        (line(text="\ud800"), "half a character", "again"),
        (b'{"text": "\xff"}', "not UTF-8 at byte 10", "UTF-8"),
        (b"[1]", "not a JSON object", "{"),
        (b'{"text": "a", "text": "b"}', "a name is given twice", "{"),
        (b'{"text": NaN}', "NaN is not a number", "{"),
        (b"[" * 100_000, "not JSON", "{"),
        (line() + b"\n" + line(), "labels:1 labels the same case", "keep one"),
        (line() + b"\n\n" + line(readings={"cause": "none"}), "labels:1 says `fault` for the same text", "keep one"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_line_is_said_with_its_place(raw: bytes, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        parsed(raw)
    assert message in str(refused.value)
    assert str(refused.value).startswith(f"labels:{len(raw.splitlines())}: ")
    assert "\n" not in str(refused.value)
    assert hint in refused.value.hint


def test_a_file_may_begin_with_the_mark_that_some_programs_write() -> None:
    assert parsed(line()) == parsed(b"\xef\xbb\xbf" + line() + b"\r\n")


def test_texts_are_named_of_which_a_reader_does_not_see_every_letter() -> None:
    said = ["the кафе is closed", "a “quoted” brake", "Türe δεfekt", "x" * 400 + "и", "Türe défekt"]
    cases = [LabelledCase(text, {}, {"cause": "fault"}) for text in said]
    assert [said[0], said[2]] == [case.text for case in with_lost_letters(contract(), cases)]


def test_a_reading_stands_under_readings_or_by_its_name_or_as_the_value_of_the_only_enumeration() -> None:
    raw = b'{"text": "a", "readings": {"cause": "fault"}}\n{"text": "b", "cause": "storm"}\n{"text": "c", "value": "none"}\n'
    assert ["fault", "storm", "none"] == [case.readings["cause"] for case in parsed(raw)]


@pytest.mark.parametrize(("said", "kept"), [("true", "1"), ("false", "0"), ("1", "1"), ("0", "0"), ('"1"', "1")])
def test_a_score_is_labelled_yes_or_no(said: str, kept: str) -> None:
    assert kept == parsed(b'{"text": "a", "risk": %s}' % said.encode(), scored())[0].readings["risk"]


@pytest.mark.parametrize("said", ["2", "0.5", '"yes"', "null", "[]"])
def test_a_score_is_labelled_nothing_else(said: str) -> None:
    with pytest.raises(UsageError, match="not a label of the score `risk`"):
        parsed(b'{"text": "a", "risk": %s}' % said.encode(), scored())


def test_a_text_that_becomes_the_same_once_it_is_read_is_the_same_text() -> None:
    raw = line(text="the brake  broke") + b"\n" + line(text="the brake \x07broke", readings={"cause": "storm"})
    with pytest.raises(UsageError, match="for the same text"):
        parsed(raw.replace(b"brake  b", b"brake \\u0007b"))


@given(
    st.builds(
        LabelledCase,
        text=st.text().map(lambda text: f"a{text}"),
        fields=st.just({})
        | st.fixed_dictionaries({"trip.delay_min": MINUTES, "trip.open_minor": MINUTES, "trip.known": st.booleans()}),
        readings=st.fixed_dictionaries(
            {"cause": st.sampled_from(["fault", "storm"])}, optional={"risk": st.sampled_from("01")}
        ),
        decision=st.sampled_from([None, "PAY", "DENY", "ESCALATE"]),
        style=st.text(),
        amount_minor=st.integers(0, 2**53 - 1),
        part=st.sampled_from(["", *PARTS]),
    )
)
@example(LabelledCase("a" * EVENT_BYTES_MAX, {}, {"cause": "fault"}))
def test_what_is_written_is_read_back(case: LabelledCase) -> None:
    """Of any text that an event may have, too."""
    assert [case] == parsed(label_line(case, "claims").encode(), scored())


def test_a_folder_gives_each_file_its_part(tmp_path: Path) -> None:
    for part, text in (("train", "a"), ("calibrate", "b"), ("test", "c")):
        (tmp_path / f"{part}.jsonl").write_bytes(line(text=text))
    assert ["train", "calibrate", "test"] == [case.part for case in read_labels(contract(), tmp_path)]


def test_the_same_case_in_two_files_of_a_folder_is_refused(tmp_path: Path) -> None:
    for part in ("train", "calibrate", "test"):
        (tmp_path / f"{part}.jsonl").write_bytes(line())
    with pytest.raises(UsageError, match=r"calibrate\.jsonl:1: .*train\.jsonl:1 labels the same case"):
        read_labels(contract(), tmp_path)


@pytest.mark.parametrize("name", ["empty.jsonl", "nowhere.jsonl"])
def test_a_file_without_a_label_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    with pytest.raises(UsageError) as refused:
        read_labels(contract(), tmp_path / name)
    assert refused.value.hint


def test_half_is_learned_a_quarter_calibrates_and_a_quarter_tests_of_every_value() -> None:
    counts = Counter((case.readings["cause"], case.part) for case in parted(contract(), cases(1200)))
    for value in ("fault", "storm", "none"):
        train, calibrate, test = (counts[value, part] for part in ("train", "calibrate", "test"))
        assert abs(train - 2 * calibrate) <= 2
        assert abs(calibrate - test) <= 1


def test_parts_do_not_depend_on_the_order_and_a_text_is_in_one() -> None:
    given = cases(300)
    forwards = {case.text: case.part for case in parted(contract(), given)}
    twice = parted(contract(), [*reversed(given), *given])
    assert {(case.text, case.part) for case in twice} == set(forwards.items())


def test_the_hashes_say_whether_labels_and_split_are_the_same() -> None:
    given = cases(50)
    other = [*given[:-1], LabelledCase(given[-1].text, given[-1].fields, {"cause": "none"}, decision="DENY")]
    assert labels_hash(given) != labels_hash(other)
    assert labels_hash(given) == labels_hash(parted(contract(), given))
    assert split_hash(given) != split_hash(parted(contract(), given))
