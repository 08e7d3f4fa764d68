"""The corpus of claims: enough of every cause and style, nothing nearly twice, three parts that share nothing."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import get_args

import pytest

from sds.gates.refund.labels import labelled
from sds.gates.refund.world.claims import TEXT_CHARS_MAX, Cause, CorpusText, Part, corpus
from sds.kernel.errors import StateError
from tests.gates.corpora import nearly_the_same

PARTS: tuple[Part, ...] = get_args(Part)
STYLES = {
    "plain", "indirect", "negated", "two_causes", "tale", "typos", "slang", "non_native", "sarcasm", "one_line", "ten_lines",
    "pressing", "injecting",
}  # fmt: skip
KEPT_APART = ("later", "apart")  # of no fit: to measure on alone


def everything() -> list[CorpusText]:
    return [text for part in PARTS for text in corpus(part)]


def test_there_are_as_many_as_are_promised() -> None:
    assert [True, True, True] == [
        len(corpus(part)) >= least for part, least in zip(PARTS, (1_200, 600, 600), strict=True)
    ]


def test_every_part_has_every_cause_in_every_style() -> None:
    for part in PARTS:
        met = Counter((text.cause, text.style) for text in corpus(part))
        assert {(cause, style) for cause in Cause for style in STYLES} == set(met)


def test_every_text_is_what_a_packet_shows_whole() -> None:
    for each in everything():
        assert re.fullmatch(r"[!-~][ -~]*", each.text)
        assert len(each.text) <= TEXT_CHARS_MAX


def test_no_two_texts_are_nearly_the_same() -> None:
    texts = [each.text for part in (*PARTS, *KEPT_APART) for each in corpus(part)]  # type: ignore[arg-type]  # no parts, of the same form
    assert [] == nearly_the_same(texts)


def test_a_part_that_is_not_there_is_said_in_one_line() -> None:
    with pytest.raises(StateError, match="cannot be read"):
        corpus("validate")  # type: ignore[arg-type]


def test_every_text_is_labelled_once_about_a_state_of_its_own(tmp_path: Path) -> None:
    found = list(labelled(tmp_path))
    assert [(text.text, text.cause.value, text.style) for text in everything()] == [
        (case.text, case.readings["cause"], case.style) for case in found
    ]
    assert found == list(labelled(tmp_path))
    decisions = Counter(case.decision for case in found)
    assert {"COMPENSATE", "REFUND_TICKET", "VOUCHER", "DENY", "ESCALATE"} == set(decisions)
    severe = [
        case.fields["weather.condition"] in {"snow", "fog", "wind", "storm"}
        for case in found
        if case.readings["cause"] == "weather"
    ]
    calm = [
        case.fields["weather.condition"] in {"snow", "fog", "wind", "storm"}
        for case in found
        if case.readings["cause"] == "crew"
    ]
    assert sum(severe) / len(severe) > 0.5 > sum(calm) / len(calm)
