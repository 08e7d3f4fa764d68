"""Checks whether a model can say every decision of a contract, from its vocabulary alone, before any weights are loaded.

The checked language is the contract's widest: every kind of its agent with every reason, and numbers as large as any
snapshot could permit. A check that raises has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import TYPE_CHECKING

from sds.grammars.language import Choice, Language, Literal, Node, Number, language
from sds.grammars.number_regex import number_regex
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.selftest import check_mask_constrains, follow
from sds.kernel.canonical import one_line
from sds.kernel.contract.compiler import STRING_CHARS_MAX, FieldSpec, Rules, level, take_snapshot
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import KindSpec, ParamSpec
from sds.kernel.decision.packet import EVIDENCE, case_texts, static_text
from sds.kernel.envelope.envelope import (
    MAGNITUDE_MAX,
    Bound,
    DecisionEnvelope,
    KindBound,
    bound,
    envelope_of,
    format_literal,
)
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.envelope.state import Value
from sds.kernel.errors import LanguageError, ModelError
from sds.models.protocol import BackendError, ChatFrame
from sds.models.tokenizer.tokenizer import ModelTokenizer, Speaks, Tokenizer, tokens_of

if TYPE_CHECKING:
    from sds.models.catalog.inspect import Inspected

NUMBER_CHARS_MAX = 2000
CONTROL_EACH = 32
EXAMPLE_CHARS_MAX = 60
REASON_CHARS_MAX = 300
_NUMBER_BYTES = b"-.0123456789"
_TEXT_BYTES = bytes(byte for byte in range(32, 127) if byte not in b'"\\')
_CONTEXT_REF = "0123456789abcdef" * 4
_CONSTANT = re.compile(r"-?[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    ok: bool
    reason: str


@dataclass(frozen=True)
class Question:
    """One contract and one model. `frame`: None, where `refused` says why. `context_tokens_max`: for a prompt and its
    decision. `templated`: whether the frame is the model's own. `unfit`: why the model can decide nothing at all.
    """

    contract: Contract
    words: Tokenizer
    frame: ChatFrame | None
    context_tokens_max: int
    refused: str = ""
    templated: bool = True
    unfit: str = ""

    @cached_property
    def said(self) -> Language:
        return language(widest_envelope(self.contract), _CONTEXT_REF)

    @cached_property
    def sentences(self) -> tuple[bytes, ...]:
        return tuple(dict.fromkeys(_samples(self.said.envelope, Random(0))))  # noqa: S311  a fixed choice, no secret

    def content(self, text: bytes) -> list[int]:
        return tokens_of(self.words, text, special=False)

    def spells(self, byte: bytes) -> bool:
        """Return whether an ordinary token spells this byte alone."""
        made = self.content(byte)
        return (len(made) == 1 and self.words.spelling(made[0]) == byte) or byte in self._every_spelling

    @cached_property
    def _every_spelling(self) -> frozenset[bytes]:
        every = (token for token in range(self.words.size) if not self.words.is_control(token))
        return frozenset(map(self.words.spelling, every))


def question_of(contract: Contract, model: Inspected, context_tokens_max: int) -> Question:
    """Return the question for a model without its weights. `context_tokens_max`: the most a backend gives any model."""
    card = model.card
    return Question(
        contract,
        model.words,
        card.turn,
        min(card.context_tokens or context_tokens_max, context_tokens_max),
        card.turn_refused,
        card.has_chat_template,
        card.unfit,
    )


def check_model(question: Question) -> tuple[Check, ...]:
    return tuple(_made(name, check, question) for name, check in _CHECKS.items())


def refuse_unsayable(contract: Contract, model: Speaks, name: str) -> None:
    """Raise ModelError where `check_model` refuses a loaded model whose mask was proved when it was opened."""
    try:
        frame, refused = model.frame(), ""
    except BackendError as error:
        frame, refused = None, str(error)
    question = Question(contract, model.words, frame, model.context_tokens_max, refused)
    for check_name, check in _CHECKS.items():
        found = Check(check_name, ok=True, reason="") if check is _mask else _made(check_name, check, question)
        if not found.ok:
            raise ModelError(
                f"`{name}` cannot decide under `{contract.gate}` {contract.version}: {found.name}: {found.reason}",
                hint="run `sds models check PATH` to see all faults, or use another model",
            )


def _made(name: str, check: Callable[[Question], str], question: Question) -> Check:
    try:
        return Check(name, ok=True, reason=check(question))
    except Exception as error:  # noqa: BLE001  a vocabulary may be broken in any way; the answer is no
        return Check(name, ok=False, reason=one_line(error, REASON_CHARS_MAX))


def _writes_in_order(question: Question) -> str:
    if question.unfit:
        raise ModelError(question.unfit)
    return "it writes from left to right"


def _template(question: Question) -> str:
    if question.frame is None:
        raise ModelError(question.refused)
    own = "the model's own" if question.templated else "none, so the texts are given without a template"
    return f"{own}; {question.frame.thinking}" if question.frame.thinking else own


def _bytes(question: Question) -> str:
    needed = sorted(set(_bytes_of(question.said.root)))
    missing = [byte for byte in needed if not question.spells(bytes([byte]))]
    if missing:
        raise ModelError(f"{len(missing)} of {len(needed)} bytes have no token of their own, first `{chr(missing[0])}`")
    return f"all {len(needed)} bytes that a decision can need have a token of their own"


def _spelling(question: Question) -> str:
    for sentence in question.sentences:
        spelled = b"".join(map(question.words.spelling, question.content(sentence)))
        if spelled != sentence:
            raise ModelError(f"`{_example(sentence)}` is reproduced as `{_example(spelled)}`")
    return f"{len(question.sentences)} sample decisions are reproduced byte for byte"


def _mask(question: Question) -> str:
    check_mask_constrains(ModelTokenizer(question.words))
    return "the mask works: no decision under it leaves its language"


def _decisions(question: Question) -> str:
    compiler = GrammarCompiler(ModelTokenizer(question.words))
    for sentence in question.sentences:
        written = follow(compiler.matcher(question.said.envelope, _CONTEXT_REF), sentence)
        if written != sentence:
            raise ModelError(
                f"`{_example(sentence)}` cannot be written beyond `{_example(written[-EXAMPLE_CHARS_MAX:])}`"
            )
    kinds = len(question.said.envelope.kinds)
    return f"{len(question.sentences)} sample decisions of all {kinds} kinds can be written under the mask"


def _context(question: Question) -> str:
    limit = question.context_tokens_max
    budget = question.contract.budget.tokens_max
    needed = sum(_tokens_needed(question))
    if budget < min(needed, limit):
        raise ModelError(
            f"contract, fullest case and longest decision can need {needed} tokens, but the contract's budget is {budget}"
        )
    if needed > limit:
        raise ModelError(
            f"contract, fullest case and longest decision can need {needed} tokens, but the context has {limit}"
        )
    return f"contract, fullest case and longest decision need at most {needed} of {limit} tokens"


def _tokens_needed(question: Question) -> Iterator[int]:
    """Yield the most tokens that each part of a prompt, and the answer, can need; foreign text counts a token a character."""
    contract, rules = question.contract, Rules(question.contract)
    longest = take_snapshot(rules.fields, "", {spec.path: _longest(spec, contract) for spec in rules.fields}, "", 0)
    frame = question.frame
    yield len(question.content(static_text(contract).encode()))
    for text in case_texts(contract, rules, longest, question.said.envelope):
        yield len(question.content(text.encode()))
    for control in (frame.before_system, frame.between, frame.after_user) if frame else ():
        yield len(tokens_of(question.words, control.encode(), special=True))
    yield STRING_CHARS_MAX * sum(
        _is_free_text(spec) for spec in rules.fields if not contract.show or spec.path in dict(contract.show)
    )
    yield len(question.content(EVIDENCE.encode())) + len(question.content(b" ")) + contract.event.evidence_chars_max
    yield contract.memory.tokens_max if contract.memory.entries_max else 0
    yield contract.artifacts.tokens_max if contract.artifacts.names else 0
    yield max(len(question.content(sentence)) for sentence in question.sentences) + contract.rationale_chars_max


def _evidence(question: Question) -> str:
    """Put every control token, and the marks of a chat turn, into claims: all of them must stay text."""
    words, frame = question.words, question.frame
    control = [token for token in range(words.size) if words.is_control(token)]
    marks = [text.encode() for text in (frame.before_system, frame.between, frame.after_user) if text] if frame else []
    spelled = [*marks, *filter(None, map(words.spelling, control))]
    for at in range(0, len(spelled), CONTROL_EACH):
        for token in question.content(b"late " + b"x ".join(spelled[at : at + CONTROL_EACH])):
            if words.is_control(token):
                raise ModelError(f"a claim can hold the control token `{_example(words.spelling(token))}`")
    framed = any(words.is_control(token) for mark in marks for token in tokens_of(words, mark, special=True))
    return f"{len(control)} control tokens stay text in a claim" + (
        "" if framed else "; turns are marked by plain text, which a claim can imitate"
    )


_CHECKS: dict[str, Callable[[Question], str]] = {
    "model": _writes_in_order,
    "template": _template,
    "bytes": _bytes,
    "spelling": _spelling,
    "mask": _mask,
    "decisions": _decisions,
    "context": _context,
    "evidence": _evidence,
}


def widest_envelope(contract: Contract) -> DecisionEnvelope:
    """Return an envelope wider than any snapshot permits: a bound given by an expression is as far as a number may go."""
    steps = {step for saga in contract.sagas.values() for step in saga.steps}
    kinds = (
        _widest_kind(name, contract.kinds[name]) for name in sorted({*contract.authority, *steps, contract.refusal})
    )
    return envelope_of([kind for kind in kinds if kind], contract.rationale_chars_max, refusal=contract.refusal)


def _widest_kind(name: str, spec: KindSpec) -> KindBound | None:
    params = [(param, _widest_bound(param, number)) for param, number in sorted(spec.params.items())]
    chosen = tuple((param, allowed) for param, allowed in params if allowed)
    return KindBound(name, spec.reasons, chosen) if len(chosen) == len(params) else None


def _widest_bound(name: str, spec: ParamSpec) -> Bound | None:
    """Return the widest bound whose language is small enough; None where two constants leave no value."""
    lo, hi = (int(text) if _CONSTANT.fullmatch(text) else None for text in (spec.lo, spec.hi))
    most = MAGNITUDE_MAX
    while most >= spec.step:
        ends = (-most if lo is None else lo, most if hi is None else hi)
        allowed = bound(*ends, step=spec.step, residue=spec.residue, scale=spec.scale)
        if allowed is None or _fits(allowed):
            return allowed
        most //= 10
    raise LanguageError(f"no range of `{name}` has an expression of {NUMBER_CHARS_MAX} characters")


def _fits(allowed: Bound) -> bool:
    try:
        return len(number_regex(allowed)) <= NUMBER_CHARS_MAX
    except LanguageError:
        return False


def _samples(envelope: DecisionEnvelope, rng: Random) -> Iterator[bytes]:
    """Yield decisions of every kind with every reason: with the lowest numbers, the highest, and some between."""
    for kind in envelope.kinds:
        for reason in kind.reasons:
            for pick in (lambda _: 0, lambda count: count - 1, rng.randrange):
                numbers = tuple(
                    (name, format_literal(b.lo + pick((b.hi - b.lo) // b.step + 1) * b.step, b.scale))
                    for name, b in kind.params
                )
                text = rng.choices(_TEXT_BYTES, k=pick(envelope.rationale_chars_max + 1))
                rationale = bytes(text).decode() if envelope.rationale_chars_max else None
                yield write_proposal(Proposal(kind.kind, numbers, reason, _CONTEXT_REF, rationale))


def _bytes_of(nodes: Iterable[Node]) -> Iterator[int]:
    for node in nodes:
        if isinstance(node, Literal):
            yield from node.text
        elif isinstance(node, Choice):
            for option in node.options:
                yield from _bytes_of(option.then)
        else:
            yield from _NUMBER_BYTES if isinstance(node, Number) else _TEXT_BYTES


def _longest(spec: FieldSpec, contract: Contract) -> Value:
    if levels := contract.levels.get(spec.path):
        values = (-MAGNITUDE_MAX, *(least for least in levels if isinstance(least, int)))
        return max(values, key=lambda value: len(level(levels, value)))
    if spec.kind.name == "bool":
        return True
    return -MAGNITUDE_MAX if spec.kind.name == "int" else max(spec.kind.values or [""], key=len)


def _is_free_text(spec: FieldSpec) -> bool:
    return spec.kind.name == "string" and not spec.kind.values


def _example(text: bytes) -> str:
    shown = text[:EXAMPLE_CHARS_MAX].decode("latin-1").encode("unicode_escape").decode()
    return shown + ("..." if len(text) > EXAMPLE_CHARS_MAX else "")
