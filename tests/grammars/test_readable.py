"""Languages small enough to read: an envelope, what it must accept, what it must reject."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from decimal import Decimal

import pytest
from jsonschema import Draft202012Validator

from sds.grammars.emit import json_schema
from sds.grammars.language import Language, language
from sds.kernel.envelope.envelope import DENY, ESCALATE_ONLY, Bound, DecisionEnvelope, KindBound, bound, envelope_of
from tests.grammars.byte_matcher import ByteMatcher

CONTEXT = "c0ffee" * 10 + "0123"
ESCALATION = '{"action":"ESCALATE","reason":"HUMAN_REVIEW"}'


@dataclass(frozen=True)
class Example:
    """Proposals are written here without their context reference, which is put in before the last brace."""

    name: str
    envelope: DecisionEnvelope
    accepted: tuple[str, ...]
    rejected: tuple[str, ...]
    same_value: tuple[str, ...] = ()  # rejected as bytes, yet a permitted value to JSON Schema


def one_kind(kind: str, amount: Bound | None) -> DecisionEnvelope:
    params = (("amount", amount),) if amount else ()
    return envelope_of([KindBound(kind, ("OK",), params), KindBound(DENY, ("LATE", "LATER"))])


def pay(number: str) -> str:
    return f'{{"action":"PAY","params":{{"amount":{number}}},"reason":"OK"}}'


EXAMPLES = (
    Example(
        "nothing but escalation",
        ESCALATE_ONLY,
        (ESCALATION,),
        (
            '{"action":"DENY","reason":"HUMAN_REVIEW"}',
            '{"action":"ESCALATE","reason":"LATE"}',
            '{"action":"ESCALATE","reason":"HUMAN_REVIEW","rationale":"x"}',
            '{"rationale":"x","action":"ESCALATE","reason":"HUMAN_REVIEW"}',
            '{"action":"ESCALATE","params":{},"reason":"HUMAN_REVIEW"}',
            "{}",
        ),
        (
            '{ "action":"ESCALATE","reason":"HUMAN_REVIEW"}',
            '{"reason":"HUMAN_REVIEW","action":"ESCALATE"}',
        ),
    ),
    Example(
        "money from 0.01 to 150.00",
        one_kind("PAY", bound(1, 15_000, scale=2)),
        (pay("0.01"), pay("0.10"), pay("1.00"), pay("9.99"), pay("10.00"), pay("99.99"), pay("149.99"), pay("150.00")),
        (pay("0.00"), pay("150.01"), pay("1500.00"), pay("-0.01"), pay("0.001"), pay('"1.00"'), pay("true")),
        (pay("150"), pay("99.9"), pay("1e2"), pay("1.000")),
    ),
    Example(
        "multiples of 5 from 10 to 150",
        one_kind("PAY", bound(10, 150, step=5)),
        (pay("10"), pay("15"), pay("95"), pay("100"), pay("145"), pay("150")),
        (pay("0"), pay("5"), pay("11"), pay("14"), pay("151"), pay("155"), pay("1005")),
        (pay("10.0"), pay("1e1")),
    ),
    Example(
        "3 more than a multiple of 7, around zero",
        one_kind("PAY", bound(-20, 20, step=7, residue=3)),
        (pay("-18"), pay("-11"), pay("-4"), pay("3"), pay("10"), pay("17")),
        (pay("-25"), pay("-3"), pay("0"), pay("4"), pay("24"), pay("-10")),
    ),
    Example(
        "one value is still written",
        one_kind("PAY", bound(250, 250, scale=1)),
        (pay("25.0"),),
        (
            pay("24.9"),
            pay("25.1"),
            '{"action":"PAY","reason":"OK"}',
            '{"action":"PAY","params":{},"reason":"OK"}',
        ),
        (pay("25"),),
    ),
    Example(
        "a statutory amount is the kernel's and cannot be said",
        envelope_of(
            [
                KindBound("COMPENSATE", ("DELAY",), fills=(("amount", 25_000, 2),)),
                KindBound(DENY, ("LATE", "LATER")),
            ]
        ),
        (
            '{"action":"COMPENSATE","reason":"DELAY"}',
            '{"action":"DENY","reason":"LATE"}',
            '{"action":"DENY","reason":"LATER"}',
            ESCALATION,
        ),
        (
            '{"action":"COMPENSATE","params":{"amount":250.00},"reason":"DELAY"}',
            '{"action":"COMPENSATE","params":{},"reason":"DELAY"}',
            '{"action":"COMPENSATE","reason":"LATE"}',
            '{"action":"DENY","reason":"LATERR"}',
            '{"action":"DENY","reason":"LATE","note":1}',
        ),
    ),
    Example(
        "a rationale of at most five plain characters",
        envelope_of([KindBound(DENY, ("LATE",))], 5),
        tuple(f'{{"rationale":"{text}","action":"DENY","reason":"LATE"}}' for text in ("", "x", "a b!~", "[{,}]")),
        (
            '{"action":"DENY","reason":"LATE"}',
            *(
                f'{{"rationale":"{text}","action":"DENY","reason":"LATE"}}'
                for text in ("sixsix", r"\"", r"\n", r"a\\b", "\u00e9", "tab\t")
            ),
        ),
        (
            r'{"rationale":"\u0041","action":"DENY","reason":"LATE"}',
            '{"action":"DENY","reason":"LATE","rationale":"x"}',
        ),
    ),
)
CASES = [pytest.param(e, id=e.name) for e in EXAMPLES]


def proposal(example: Example, short: str) -> str:
    return f'{short[:-1]},"context_ref":"{CONTEXT}"}}'


def said(example: Example) -> Language:
    return language(example.envelope, CONTEXT)


@pytest.mark.parametrize("example", CASES)
def test_the_expression_and_the_mask_accept_what_is_listed_and_nothing_else(example: Example) -> None:
    matches = re.compile(said(example).regex()).fullmatch
    matcher = ByteMatcher(said(example).lark())
    for short in (*example.accepted, *example.rejected, *example.same_value):
        text = proposal(example, short)
        expected = short in example.accepted
        assert expected == bool(matches(text)), text
        assert expected == matcher.accepts(text.encode()), text
        assert expected == example.envelope.contains(text.encode()), text


@pytest.mark.parametrize("example", CASES)
def test_the_schema_accepts_the_listed_values_however_they_are_written(example: Example) -> None:
    schema = json.loads(json.dumps(json_schema.emit(said(example))), parse_float=Decimal)
    Draft202012Validator.check_schema(schema)
    validator = Draft202012Validator(schema)
    for short in (*example.accepted, *example.rejected, *example.same_value):
        text = proposal(example, short)
        try:
            value = json.loads(text, parse_float=Decimal)
        except json.JSONDecodeError:
            value = None
        assert (short not in example.rejected) == validator.is_valid(value), text


def test_another_context_is_another_language() -> None:
    mine, other = (language(ESCALATE_ONLY, digit * 64) for digit in "ab")
    assert mine.hash != other.hash
    assert not re.fullmatch(mine.regex(), proposal(EXAMPLES[0], ESCALATION))


def test_equal_envelopes_have_one_language_whose_hash_is_pinned() -> None:
    assert language(ESCALATE_ONLY, "0" * 64).hash == language(envelope_of(()), "0" * 64).hash
    # A change here is a new form of the language: give it a new version in `FORM`.
    assert language(ESCALATE_ONLY, "0" * 64).hash == "9afa61ba988875f5372177f840b450a2bf01dbaabaa35b92f00a182cd1a09f92"
