"""What has a language at all: names, sizes and references that the proposal form can write."""

from __future__ import annotations

import re

import pytest

from sds.grammars.language import language
from sds.kernel.envelope.envelope import DENY, ESCALATE_ONLY, Bound, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import LanguageError

CONTEXT = "5" * 64
OK = ("OK",)
NUMBER = Bound(0, 9, 1, 0, 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (KindBound("pay", OK), "`pay` is not a kind that a proposal can hold"),
        (KindBound("PAY", ('O"K',)), '`O"K` is not a reason code that a proposal can hold'),
        (KindBound("PAY", OK, (("Amount", NUMBER),)), "`PAY` has parameters that a proposal cannot hold"),
        (KindBound("PAY", OK, (("a", NUMBER), ("a", NUMBER))), "`PAY` has parameters that a proposal cannot hold"),
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
