"""What the decoder is told: where a choice begins, what is forced before it, which bytes each option stands for."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sds.grammars import emit_lark, emit_regex
from sds.grammars.language import Language, language
from sds.kernel.bounds import Bound, bound
from sds.kernel.envelope import DENY, ESCALATE_ONLY, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import LanguageError
from sds.kernel.proposal import write_proposal
from tests.grammars.byte_matcher import ByteMatcher
from tests.samples import inside
from tests.scale import scale, seeded
from tests.strategies import envelopes

CONTEXT = "5" * 64
TAIL = f'","context_ref":"{CONTEXT}"}}'.encode()


def refunds() -> Language:
    amount, steps = bound(1, 15_000, scale=2), bound(95, 105, step=5)
    assert amount is not None
    assert steps is not None
    return language(
        envelope_of(
            [
                KindBound("REFUND", ("CREW", "WEATHER", "WEATHER_SEVERE"), (("amount", amount),)),
                KindBound("VOUCHER", ("GOODWILL",), (("amount", steps),)),
                KindBound(DENY, ("LATE",)),
            ]
        ),
        CONTEXT,
    )


def test_the_action_is_seen_from_the_first_byte_on() -> None:
    view = refunds().choices_at(b"")
    assert view is not None
    assert (view.name, view.start, view.lead) == ("action", 11, b'{"action":"')
    assert dict(view.options) == {
        "DENY": b'DENY","params":{},"reason_code":"LATE' + TAIL,
        "ESCALATE": b'ESCALATE","params":{},"reason_code":"HUMAN_REVIEW' + TAIL,
        "REFUND": b'REFUND","params":{"amount":',
        "VOUCHER": b'VOUCHER","params":{"amount":',
    }


def test_an_action_begun_is_settled_and_a_number_of_few_values_is_the_next_choice() -> None:
    view = refunds().choices_at(b'{"action":"VOU')
    assert view is not None
    assert (view.name, view.lead) == ("amount", b'CHER","params":{"amount":')
    tail = b'},"reason_code":"GOODWILL' + TAIL
    assert (("95", b"95" + tail), ("100", b"100" + tail), ("105", b"105" + tail)) == view.options


def test_only_options_still_possible_are_named() -> None:
    view = refunds().choices_at(b'{"action":"VOUCHER","params":{"amount":10')
    assert view is not None
    assert (view.start, view.lead, [label for label, _ in view.options]) == (39, b"", ["100", "105"])


@pytest.mark.parametrize("digits", [b"", b"1", b"1.", b"1.0", b"1.00"])
def test_the_digits_of_a_longer_number_are_no_choice(digits: bytes) -> None:
    assert refunds().choices_at(b'{"action":"REFUND","params":{"amount":' + digits) is None


def test_after_the_number_the_reason_is_a_choice_and_names_that_begin_alike_stay_apart() -> None:
    prefix = b'{"action":"REFUND","params":{"amount":1.00}'
    view = refunds().choices_at(prefix)
    assert view is not None
    assert ("reason_code", len(prefix) + 16, b',"reason_code":"') == (view.name, view.start, view.lead)
    assert [data for _, data in view.options] == [b"CREW" + TAIL, b"WEATHER" + TAIL, b"WEATHER_SEVERE" + TAIL]
    begun = refunds().choices_at(prefix + b',"reason_code":"WEATHER')
    assert begun is not None
    assert [label for label, _ in begun.options] == ["WEATHER", "WEATHER_SEVERE"]
    assert refunds().choices_at(prefix + b',"reason_code":"WEATHER"') is None


def test_the_end_and_a_single_sentence_hold_no_choice() -> None:
    alone = language(ESCALATE_ONLY, CONTEXT)
    assert alone.choices_at(b"") is None
    whole = b'{"action":"ESCALATE","params":{},"reason_code":"HUMAN_REVIEW' + TAIL
    assert alone.choices_at(whole) is None
    with pytest.raises(LanguageError, match=f"byte {len(whole)}: the prefix leaves the language"):
        alone.choices_at(whole + b" ")


def test_text_is_no_choice() -> None:
    said = language(envelope_of([KindBound(DENY, ("LATE",))], 20), CONTEXT)
    prefix = b'{"rationale":"'
    assert said.choices_at(prefix) is None
    view = said.choices_at(prefix + b'commas, braces }",')
    assert view is not None
    assert ("action", b'"action":"') == (view.name, view.lead)


@pytest.mark.parametrize(
    "prefix",
    [b"x", b'{"action":"PAY', b'{"action":"DENY"}', b'{"action":"VOUCHER","params":{"amount":11'],
)
def test_a_prefix_outside_the_language_is_an_error(prefix: bytes) -> None:
    with pytest.raises(LanguageError, match=r"byte [0-9]+: the prefix leaves the language") as left:
        refunds().choices_at(prefix)
    assert left.value.reason_code == "LANGUAGE_LEFT"


@settings(max_examples=scale(100, 2000), deadline=None)
@given(envelopes(), st.randoms(use_true_random=False))
def test_along_any_proposal_the_view_holds_exactly_one_true_option(envelope: DecisionEnvelope, rng: object) -> None:
    said = language(envelope, CONTEXT)
    whole = write_proposal(inside(rng, envelope, CONTEXT))  # type: ignore[arg-type]
    for at in range(len(whole) + 1):
        view = said.choices_at(whole[:at])
        if view is None:
            continue
        assert view.lead == whole[at : max(at, view.start)]
        true = [label for label, data in view.options if whole.startswith(data, view.start)]
        assert len(true) == 1
        assert all(data.startswith(whole[view.start : at]) for _, data in view.options)
        assert 2 <= len({label for label, _ in view.options}) == len(view.options)
        texts = sorted(data for _, data in view.options)
        assert not any(b.startswith(a) for a, b in pairwise(texts))


def test_the_matcher_forces_what_the_view_calls_forced() -> None:
    said = refunds()
    matcher = ByteMatcher(emit_lark.emit(said))
    rng = seeded(20260720)
    whole = write_proposal(inside(rng, said.envelope, CONTEXT))
    for at in range(len(whole)):
        view = said.choices_at(whole[:at])
        if view is not None and view.lead:
            assert view.lead == matcher.forced_tokens(whole[:at])
    chosen = b'{"action":"DENY'
    assert matcher.forced_tokens(chosen) == b'","params":{},"reason_code":"LATE' + TAIL
    assert matcher.ended_after(chosen + b'","params":{},"reason_code":"LATE' + TAIL)


@given(envelopes())
def test_the_labels_of_a_small_number_are_its_language(envelope: DecisionEnvelope) -> None:
    for kind in envelope.kinds:
        if len(kind.params) != 1 or not 1 < len(kind.params[0][1]) <= 64:
            continue
        alone = envelope_of([KindBound("PAY", ("OK",), kind.params), KindBound(DENY, ("NO",))])
        view = language(alone, CONTEXT).choices_at(b'{"action":"PAY"')
        assert view is not None
        assert len(kind.params[0][1]) == len(view.options)
        matches = re.compile(emit_regex.emit(language(alone, CONTEXT)).encode()).fullmatch
        begun = b'{"action":"PAY","params":{"' + kind.params[0][0].encode() + b'":'
        assert all(matches(begun + data) for _, data in view.options)


OK = ("OK",)
NUMBER = Bound(0, 9, 1, 0, 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (KindBound("pay", OK), "`pay` is not a kind the form can write"),
        (KindBound("PAY", ('O"K',)), '`O"K` is not a reason code the form can write'),
        (KindBound("PAY", OK, (("Amount", NUMBER),)), "`PAY` has parameters the form cannot write"),
        (KindBound("PAY", OK, (("a", NUMBER), ("a", NUMBER))), "`PAY` has parameters the form cannot write"),
        (KindBound("PAY", OK, tuple((f"a{i}", NUMBER) for i in range(17))), "`PAY` has parameters"),
    ],
)
def test_an_envelope_the_proposal_form_cannot_write_has_no_language(kind: KindBound, message: str) -> None:
    with pytest.raises(LanguageError, match=re.escape(message)) as refused:
        language(envelope_of([kind, KindBound(DENY, ("NO",))]), CONTEXT)
    assert refused.value.reason_code == "LANGUAGE_INVALID"


@pytest.mark.parametrize("context_ref", ["", "5" * 63, "5" * 65, "A" * 64, "5" * 63 + '"'])
def test_a_context_reference_is_64_hexadecimal_digits(context_ref: str) -> None:
    with pytest.raises(LanguageError, match="the context reference is not 64 hexadecimal digits"):
        language(ESCALATE_ONLY, context_ref)


def test_a_rationale_beyond_the_limit_has_no_language() -> None:
    with pytest.raises(LanguageError, match=r"a rationale of `2001` characters is not within 0..2000"):
        language(DecisionEnvelope(ESCALATE_ONLY.kinds, 2001), CONTEXT)
