"""Regex, Lark and GBNF accept the same bytes, the JSON Schema the same values; each is judged by its own engine.

The kernel, which knows no grammar, is the reference. An engine that takes what the kernel refuses (a false accept) is
the worst that can happen here, one that refuses what the kernel takes the second worst.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from random import Random

import pytest
from jsonschema import Draft202012Validator

from sds.grammars.emit import json_schema
from sds.grammars.emit.gbnf import GBNF_CHARS_MAX, REPEAT_MAX, to_gbnf
from sds.grammars.language import Language, language
from sds.kernel.envelope.envelope import DENY, KindBound, bound, envelope_of, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.errors import LanguageError
from sds.models.catalog.catalog import embedded_model
from tests.grammars.byte_matcher import ByteMatcher
from tests.grammars.gbnf_matcher import GbnfMatcher, GbnfVocabulary
from tests.model_fixtures import CONTEXT_REF
from tests.samples import BENT, inside, near, value_of
from tests.scale import scale, seeded
from tests.strategies import random_envelope

STRINGS_EACH = 40
DIGITS_MAX = 1000  # a damaged number may have more digits than Python's decimals keep, or can take a remainder of
Judge = Callable[[bytes], bool]


@pytest.fixture(scope="module")
def words() -> Iterator[GbnfVocabulary]:
    vocabulary = GbnfVocabulary(embedded_model())
    yield vocabulary
    vocabulary.close()


def test_no_emitter_accepts_or_refuses_what_the_kernel_does_not(words: GbnfVocabulary) -> None:
    rng, asked, accepted, refused = seeded(20261122), 0, 0, 0
    found, examples = Counter[str](), dict[str, tuple[Language, bytes]]()
    while asked < scale(2_500, 400_000):
        said = language(random_envelope(rng.randint), CONTEXT_REF)
        gbnf = GbnfMatcher(words, to_gbnf(said))
        judges = {"regex": regex_judge(said), "lark": lark_judge(said), "gbnf": lambda data: gbnf.accepts(data, rng)}  # noqa: B023
        values = schema_judge(said)
        for data in strings(rng, said, STRINGS_EACH):
            permitted = permits(said, data)
            asked, accepted = asked + 1, accepted + permitted
            told = [(name, permitted, judge(data)) for name, judge in judges.items()]
            if values:
                told.append(("schema", permits(said, in_form(said, data)), values(data)))
                refused += told[-1][1] and not permitted
            for name, expected, actual in told:
                if expected != actual:
                    category = f"{name}: {'false accept' if actual else 'false reject'}"
                    found[category] += 1
                    examples.setdefault(category, (said, data))
        gbnf.close()
    print(f"{asked} strings, {accepted} in their language, {refused} only as values")
    assert {} == dict(found), examples
    assert asked // 2 <= accepted <= asked * 2 // 3
    assert refused


def strings(rng: Random, said: Language, count: int) -> Iterator[bytes]:
    """Yield sentences of the language, and after each one that was damaged, or that lies just outside."""
    for _ in range(count // 2):
        data = write_proposal(inside(rng, said.envelope, CONTEXT_REF))
        yield data
        if rng.randrange(3):
            yield damaged(rng, data)
        else:
            yield write_proposal(near(rng, said.envelope, CONTEXT_REF))


def damaged(rng: Random, data: bytes) -> bytes:
    at, end = sorted((rng.randrange(len(data)), rng.randrange(len(data) + 1)))
    digits = [i for i, byte in enumerate(data[:-70]) if 48 <= byte < 58] or [at]
    digit = rng.choice(digits)
    return rng.choice(
        (
            data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
            data[:at] + rng.choice(BENT) + data[at:],
            data[:at] + data[at + 1 :],
            data[:digit] + b"%d" % rng.randrange(10) + data[digit + 1 :],
            data[:digit] + data[digit + 1 : digit + 2] + data[digit : digit + 1] + data[digit + 2 :],
            data[:digit] + b"0" + data[digit:],
            data.replace(b":", b": ", 1),
            data.replace(b',"reason"', b',"params":{},"reason"', 1),
            data[:at],
            data[:-1],
            data[:at] + data[at:end] + data[at:],
            data + data,
            data + data[at:end],
            data + rng.choice(BENT),
            rng.choice(BENT) + data,
        )
    )


def permits(said: Language, data: bytes) -> bool:
    return said.envelope.contains(data) and data.endswith(f'"context_ref":"{CONTEXT_REF}"}}'.encode())


def regex_judge(said: Language) -> Judge:
    matches = re.compile(said.regex().encode()).fullmatch
    return lambda data: bool(matches(data))


def lark_judge(said: Language) -> Judge:
    return ByteMatcher(said.lark()).accepts_quickly


def schema_judge(said: Language) -> Judge | None:
    """Return the schema as a judge of JSON texts, or None where this language has no schema."""
    try:
        schema = json.loads(json.dumps(json_schema.emit(said)), parse_float=Decimal)
    except LanguageError:
        return None
    validator = Draft202012Validator(schema)

    def judge(data: bytes) -> bool:
        value = value_of(data)
        with localcontext(prec=DIGITS_MAX):
            return value is not None and validator.is_valid(value)

    return judge


def in_form(said: Language, data: bytes) -> bytes:
    """Return the bytes that say the value of `data` in the language's own form; b"" where there are none."""
    match value_of(data):
        case {
            "action": str(action),
            "reason": str(reason),
            "context_ref": str(ref),
            **more,
        }:
            if not isinstance(more.get("rationale", ""), str) or more.keys() - {"rationale", "params"}:
                return b""
            kind, params = said.envelope.kind(action), more.get("params")
            if kind is None or ("params" in more) != bool(kind.params):
                return b""
            if kind.params and not (isinstance(params, dict) and params.keys() == dict(kind.params).keys()):
                return b""
            numbers = tuple((name, literal(params[name], allowed.scale)) for name, allowed in kind.params)
            written = write_proposal(Proposal(action, numbers, reason, ref, more.get("rationale")))
            return written if written.isascii() else b""
    return b""


def literal(value: object, decimals: int) -> str:
    if isinstance(value, bool) or not isinstance(value, int | Decimal):
        return "null"
    with localcontext(prec=DIGITS_MAX):
        minor = value * 10**decimals
    return format_literal(int(minor), decimals) if minor == int(minor) else "null"


@pytest.mark.parametrize("chars_max", [1, REPEAT_MAX - 1, REPEAT_MAX, REPEAT_MAX + 1, 3 * REPEAT_MAX, 1999, 2000])
def test_a_long_rationale_ends_exactly_at_its_limit(words: GbnfVocabulary, chars_max: int) -> None:
    said = language(envelope_of([KindBound(DENY, ("NO",))], chars_max), CONTEXT_REF)
    grammar, rng = to_gbnf(said), seeded(chars_max)
    gbnf = GbnfMatcher(words, grammar)
    lengths = {0, 1, chars_max, *(rng.randint(0, chars_max) for _ in range(scale(5, 100)))}
    for length in sorted(lengths | {chars_max + 1, chars_max + REPEAT_MAX}):
        proposal = Proposal(DENY, (), "NO", CONTEXT_REF, "".join(rng.choices("a0 ~!#[]^{}", k=length)))
        assert (length <= chars_max) == gbnf.accepts(write_proposal(proposal), rng), length
    gbnf.close()
    assert len(grammar) < 2000
    assert max(map(int, re.findall(r"([0-9]+)\}", grammar))) <= REPEAT_MAX  # llama.cpp drops a count it finds too large


def test_numbers_of_many_pieces_still_load_and_hold(words: GbnfVocabulary) -> None:
    allowed = bound(0, 10**5, step=7)
    assert allowed is not None
    said = language(envelope_of([KindBound("PAY", ("OK",), (("n", allowed),)), KindBound(DENY, ("NO",))]), CONTEXT_REF)
    gbnf, rng = GbnfMatcher(words, to_gbnf(said)), seeded(7)
    for _ in range(scale(100, 5000)):
        value = rng.randint(-5, 10**5 + 50)
        data = write_proposal(Proposal("PAY", (("n", str(value)),), "OK", CONTEXT_REF))
        assert (value in allowed) == gbnf.accepts(data, rng), value
    gbnf.close()


def test_a_language_without_an_expression_has_no_grammar_either() -> None:
    allowed = bound(0, 10**15, step=997)
    assert allowed is not None
    envelope = envelope_of([KindBound("PAY", ("OK",), (("n", allowed),)), KindBound(DENY, ("NO",))])
    with pytest.raises(LanguageError, match="the numbers need an expression of more than 65536 characters"):
        to_gbnf(language(envelope, CONTEXT_REF))


def test_many_large_numbers_are_refused_and_not_cut_short() -> None:
    allowed = bound(0, 10**6, step=13)
    assert allowed is not None
    params = tuple((f"n{i}", allowed) for i in range(4))
    envelope = envelope_of([KindBound("PAY", ("OK",), params), KindBound(DENY, ("NO",))])
    with pytest.raises(LanguageError, match=f"the language needs a grammar of more than {GBNF_CHARS_MAX} characters"):
        to_gbnf(language(envelope, CONTEXT_REF))
