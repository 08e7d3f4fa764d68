"""Which kinds share a bound, which part of delta each bound has, and what is decided under thresholds."""

from __future__ import annotations

from pathlib import Path

import pytest

from sds.judgement.bounds import chosen, groups_of, in_words, is_decided
from sds.judgement.judging import Judged
from sds.kernel.contract.schema import Contract
from tests.judgement.claims import CLAIMS, cases, contract

CASE = cases(1)[0]


def bounded(text: str) -> Contract:
    return contract(CLAIMS.replace("max_error: 0.05\n", text))


def judged(kind: str, confidence: float, *, wrong: bool = False) -> Judged:
    decided, truth = (kind, ()), ("DENY" if kind == "PAY" else "PAY", ()) if wrong else (kind, ())
    return Judged(CASE, {}, kind, decided, confidence, truth, numbers_known=True)


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("max_error: 0.05\n", [(("DENY", "PAY"), 0.05, 0.05)]),
        ("max_error: {any: 0.05, kinds: {PAY: 0.01}}\n", [(("PAY",), 0.01, 0.025), (("DENY",), 0.05, 0.025)]),
        ("max_error: {kinds: {PAY: 0.01}, delta: 0.1}\n", [(("PAY",), 0.01, 0.1)]),
        ("", []),
    ],
)
def test_kinds_that_are_named_have_a_bound_of_their_own_and_the_others_share_one(
    text: str, groups: list[tuple[tuple[str, ...], float, float]]
) -> None:
    found = [(each.kinds, each.alpha, each.delta) for each in groups_of(bounded(text))]
    assert groups == found


def test_a_wrong_payment_counts_against_the_bound_of_payments_alone() -> None:
    terms = bounded("max_error: {any: 0.05, kinds: {PAY: 0.05}}\n")
    tuning = [judged(kind, 0.9) for kind in ("PAY", "DENY") for _ in range(100)]
    held_out = [judged("PAY", 0.9, wrong=n < 40) for n in range(200)] + [judged("DENY", 0.9) for _ in range(200)]
    found = chosen(terms, tuning, held_out)
    assert (None, 40) == (found["PAY"].least, found["PAY"].wrong)
    assert (0.0, 0) == (found["DENY"].least, found["DENY"].wrong)
    denied, paid = in_words(found)
    assert denied.startswith("DENY: decided from confidence 0.0000 on (0 wrong of 200 held-out cases")
    assert "more labels alone will not change that (40 wrong of 200" in paid


def test_a_kind_is_decided_from_its_threshold_on_and_unbounded_always() -> None:
    terms = bounded("max_error: {kinds: {PAY: 0.05}}\n")
    found = chosen(terms, [judged("PAY", 0.9)] * 50, [judged("PAY", 0.9)] * 200)
    sure = {"PAY": found["PAY"].model_copy(update={"least": 0.8})}
    never = {"PAY": found["PAY"].model_copy(update={"least": None})}
    assert is_decided(judged("PAY", 0.8), sure, terms)
    assert not is_decided(judged("PAY", 0.79), sure, terms)
    assert not is_decided(judged("PAY", 1.0), never, terms)
    assert not is_decided(judged("PAY", 1.0), {}, terms)
    assert is_decided(judged("DENY", 0.1), {}, terms)


def test_what_is_missing_is_said_in_words() -> None:
    terms = bounded("max_error: 0.05\n")
    found = chosen(terms, [judged("PAY", 0.9)] * 10, [judged("PAY", 0.9)] * 30)
    assert (
        "always escalates: it needs at least 29 more held-out cases with fields for max_error 0.05"
        in in_words(found)[0]
    )


def test_the_page_says_how_many_cases_a_bound_takes() -> None:
    from sds.judgement.thresholds import needed

    page = (Path(__file__).parents[2] / "docs" / "judgement.md").read_text(encoding="utf-8")
    assert f"{needed(0.02, 0.05)} for 0.02, {needed(0.01, 0.05)} for 0.01" in page
