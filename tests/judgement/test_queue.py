"""A person labels by one key a case: every answer is kept at once, can be taken back, and is not asked for again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sds.judgement.labelling import queue
from sds.judgement.labelling.queue import Asked, LabelFile, Session, least_certain_first, unlabelled, values_of
from sds.judgement.labels import read_labels
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import SdsError, UsageError
from sds.models.readers.protocol import Reading
from tests.judgement.claims import contract, scored

FIELDS: Fields = {"trip.delay_min": 90, "trip.open_minor": 5000, "trip.known": True}
ANSWERS = {"1": "fault", "2": "storm", "3": "none"}


def asked(*texts: str, fields: Fields = FIELDS) -> list[Asked]:
    return [Asked(text, lambda: fields) for text in texts]


def keys(typed: str) -> Callable[[], str]:
    left: Iterator[str] = iter(typed)
    return lambda: next(left)


def session(path: Path, typed: str, shown: list[str] | None = None) -> Session:
    told = shown if shown is not None else []
    return Session(
        LabelFile(contract(), path), "cause", ANSWERS, lambda case, number, of: told.append(case.text), keys(typed)
    )


def labels(path: Path) -> list[tuple[str, str]]:
    return [(case.text, case.readings["cause"]) for case in read_labels(contract(), path)]


def test_a_key_labels_a_case_and_s_leaves_it(tmp_path: Path) -> None:
    assert 2 == session(tmp_path / "l.jsonl", "1s3").walk(asked("a", "b", "c"))
    assert [("a", "fault"), ("c", "none")] == labels(tmp_path / "l.jsonl")
    assert FIELDS == read_labels(contract(), tmp_path / "l.jsonl")[0].fields


def test_a_label_is_on_the_disk_before_the_next_case_is_shown(tmp_path: Path) -> None:
    path, seen = tmp_path / "l.jsonl", list[int]()
    file = LabelFile(contract(), path)
    walk = Session(file, "cause", ANSWERS, lambda *_: seen.append(len(path.read_bytes().splitlines())), keys("123"))
    walk.walk(asked("a", "b", "c"))
    assert [0, 1, 2] == seen


def test_u_takes_the_last_label_back_and_asks_again(tmp_path: Path) -> None:
    shown = list[str]()
    assert 2 == session(tmp_path / "l.jsonl", "1u22", shown).walk(asked("a", "b"))
    assert ["a", "b", "a", "b"] == shown
    assert [("a", "storm"), ("b", "storm")] == labels(tmp_path / "l.jsonl")


def test_u_takes_back_no_label_of_an_earlier_session(tmp_path: Path) -> None:
    session(tmp_path / "l.jsonl", "1").walk(asked("a"))
    session(tmp_path / "l.jsonl", "uuq").walk(asked("b"))
    assert [("a", "fault")] == labels(tmp_path / "l.jsonl")


def test_q_ends_it_and_another_key_does_nothing(tmp_path: Path) -> None:
    assert 1 == session(tmp_path / "l.jsonl", "x91q").walk(asked("a", "b", "c"))
    assert [("a", "fault")] == labels(tmp_path / "l.jsonl")


def test_what_is_labelled_is_not_asked_for_again_and_a_text_is_asked_for_once(tmp_path: Path) -> None:
    session(tmp_path / "l.jsonl", "1").walk(asked("a"))
    known = LabelFile(contract(), tmp_path / "l.jsonl").known()
    left = unlabelled(contract(), "cause", asked("a", "b", "b ", "", "c"), known)
    assert ["b", "c"] == [case.text for case in left]


@pytest.mark.parametrize(
    "fields", [{"trip.delay_min": 90}, {**FIELDS, "trip.known": "yes"}, {**FIELDS, "trip.clerk": "anna"}]
)
def test_a_state_that_is_not_what_the_contract_declares_leaves_a_file_that_is_read_again(
    tmp_path: Path, fields: Fields
) -> None:
    session(tmp_path / "l.jsonl", "1").walk(asked("a", fields=fields))
    (known,) = LabelFile(contract(), tmp_path / "l.jsonl").known()
    assert ("a", FIELDS if "trip.clerk" in fields else {}) == (known.text, known.fields)


def test_a_score_is_not_asked_about_a_case_without_the_fields_it_is_of() -> None:
    assert [] == unlabelled(scored(), "risk", asked("a", fields={"trip.known": True}), [])


def test_of_a_score_the_same_text_is_another_case_with_other_fields() -> None:
    other = asked("a", fields={**FIELDS, "trip.delay_min": 10})
    assert 2 == len(unlabelled(scored(), "risk", [*asked("a", "a"), *other], []))


def test_the_least_certain_comes_first_and_what_is_unfamiliar_before_it() -> None:
    class Reads:
        kind, values, sha256 = "head", ("fault", "storm", "none"), "0" * 64

        def read(self, text: str, fields: object = None, readings: object = None) -> Reading:
            share = {"sure": 0.98, "torn": 0.4, "odd": 0.99}[text]
            return Reading({"fault": share, "storm": 1 - share, "none": 0.0}, familiar=text != "odd")

        def close(self) -> None: ...

    found = least_certain_first(contract(), "cause", asked("sure", "torn", "odd"), {"cause": Reads()})
    assert ["odd", "torn", "sure"] == [case.text for case in found]
    assert 0.4 == (found[1].shares or {})["fault"]
    assert ["sure", "torn"] == [
        case.text for case in least_certain_first(contract(), "cause", asked("sure", "torn"), {})
    ]


def test_a_file_without_a_last_line_end_is_continued_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "l.jsonl"
    path.write_text('{"text": "a", "cause": "fault"}', encoding="utf-8")
    session(path, "2").walk(asked("b"))
    assert [("a", "fault"), ("b", "storm")] == labels(path)


def test_the_file_is_private(tmp_path: Path) -> None:
    session(tmp_path / "labels" / "l.jsonl", "1").walk(asked("a"))
    assert 0o600 == (tmp_path / "labels" / "l.jsonl").stat().st_mode & 0o777


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("a/l.jsonl", "`.*/a` cannot be created: "),
        ("folder", "folder` is a folder"),
        ("l" * 300, "cannot be written: "),
    ],
)
def test_a_place_where_no_file_can_be_is_refused_before_anything_is_asked(
    place: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SdsError, match=said) as refused:
        session(tmp_path / place, "1")
    assert "name a file that can be written with --out" in str(refused.value.hint)


def test_every_value_has_a_key_that_says_nothing_else() -> None:
    assert 32 == len(set(queue.KEYS)) == len(queue.KEYS)
    assert set() == set(queue.KEYS) & {queue.SKIP, queue.QUIT, queue.UNDO}
    assert {"1": "yes", "0": "no"} == values_of(scored(), "risk")


def test_a_reading_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="there is no reading `mood`") as refused:
        values_of(contract(), "mood")
    assert "cause" in refused.value.hint
