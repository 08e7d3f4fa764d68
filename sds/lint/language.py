"""Whether a model can say what a contract permits, and read its prompt: checks of language, tokens and context.

The functions take a backend; no weights are run. A decision can be said when a matcher over the model's own tokens can
write it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sds.grammars.language import Language, language
from sds.grammars.number_regex import number_regex
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.selftest import follow
from sds.kernel.contract.compiler import STRING_CHARS_MAX, Rules, take_snapshot
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.yaml_lines import Path
from sds.kernel.decision.packet import EVIDENCE, case_texts, static_text
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope, KindBound, bound, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import LanguageError
from sds.lint.finding import Finding, in_words
from sds.lint.intervals import Ints, of, propagate
from sds.lint.snapshots import calm_envelope, space_of
from sds.models.protocol import Backend

ENVELOPES_MAX = 12
_NARROW = "narrow the bounds, or use a step that divides a power of ten"
_NO_REF = "0" * 64


@dataclass(frozen=True, slots=True)
class _Case:
    """An envelope of the contract, and the snapshot it belongs to."""

    fields: Fields
    envelope: DecisionEnvelope


def cases_of(contract: Contract, reached: Mapping[str, Sequence[Fields]]) -> list[_Case]:
    """Choose envelopes to check: for each kind the one with the most values, then the first two."""
    space = space_of(contract)
    chosen: dict[str, _Case] = {}
    for kind, snapshots in reached.items():
        cases = [_Case(fields, calm_envelope(space, fields)) for fields in snapshots]
        widest = max(cases, key=lambda case: _size(case.envelope.kind(kind)), default=None)
        for case in [*([widest] if widest else []), *cases[:2]]:
            chosen.setdefault(case.envelope.hash, case)
    return list(chosen.values())[:ENVELOPES_MAX]


def _size(kind: KindBound | None) -> int:
    return sum(len(allowed) for _, allowed in kind.params) if kind else 0


def language_findings(contract: Contract, reached: Mapping[str, Sequence[Fields]]) -> list[Finding]:
    """Return where an envelope has no language within the limits; no model is asked.

    A proven finding holds for every snapshot. Any other was found on one, which is shown, once for each place.
    """
    found = {finding.path: finding for finding in _unsayable_numbers(contract)}
    for case in cases_of(contract, reached):
        said, why = _language_or_why(case.envelope)
        if said is None:
            words = f"no language can be made when {in_words(case.fields)}: {why}"
            at = _too_long(case.envelope)
            found.setdefault(at, Finding("language-too-large", "error", at, words, _NARROW, dict(case.fields)))
    return list(found.values())


def _unsayable_numbers(contract: Contract) -> Iterator[Finding]:
    """Yield the numbers with one fixed bound for every snapshot, which nothing narrows, that has no language."""
    space = space_of(contract)
    for kind, spec in ((name, contract.kinds[name]) for name in sorted({*contract.authority})):
        env = propagate(space.permitting(kind), space.whole)
        for name, param in spec.params.items() if env is not None else ():
            ends = [of(space.bound(kind, name, end), env or {}) for end in ("lo", "hi")]
            numbers = [end.lo for end in ends if isinstance(end, Ints) and end.lo == end.hi]
            narrowed = name in spec.draws.values() or (spec.spends == name and contract.spend)
            if narrowed or len(numbers) < len(ends):
                continue
            allowed = bound(*numbers, step=param.step, residue=param.residue, scale=param.scale)
            if allowed is not None and (why := _number_fault(allowed)):
                words = f"`{kind}` cannot be decided whatever the snapshot (proven by intervals): `{name}`: {why}"
                yield Finding("language-too-large", "error", ("kinds", kind, "params", name), words, _NARROW)


def _too_long(envelope: DecisionEnvelope) -> Path:
    """Return the place of the first number without a language; where each has one, that of all kinds together."""
    named = ((kind.kind, name) for kind in envelope.kinds for name, allowed in kind.params if _number_fault(allowed))
    return next((("kinds", kind, "params", name) for kind, name in named), ("kinds",))


def _number_fault(allowed: Bound) -> str:
    try:
        number_regex(allowed)
    except LanguageError as error:
        return str(error)
    return ""


def _language_or_why(envelope: DecisionEnvelope) -> tuple[Language | None, str]:
    said = language(envelope, _NO_REF)
    try:
        said.regex()
    except LanguageError as error:
        return None, str(error)
    return said, ""


def model_findings(contract: Contract, reached: Mapping[str, Sequence[Fields]], backend: Backend) -> list[Finding]:
    """Return what this model cannot say or hold. Raises BackendError."""
    cases = [case for case in cases_of(contract, reached) if _language_or_why(case.envelope)[0] is not None]
    unsaid: dict[tuple[str, str], Finding] = {}
    longest, compiler = 0, _compiler(backend)
    for case in cases:
        for proposal in _proposals(case.envelope):
            data = write_proposal(proposal)
            longest = max(longest, len(backend.tokenize(data, special=False)))
            key = (proposal.action, proposal.reason_code)
            if key not in unsaid and not (compiler and _can_be_said(case.envelope, proposal, data, compiler)):
                unsaid[key] = _unsayable(contract, proposal, data, backend)
    return [*unsaid.values(), *_room(contract, cases, backend, longest)]


def _unsayable(contract: Contract, proposal: Proposal, data: bytes, backend: Backend) -> Finding:
    at = ("kinds", proposal.action, "reasons") if proposal.action in contract.kinds else ("kinds",)
    text = data.decode()[: data.decode().rfind(',"context_ref"')]
    words = f"`{backend.name}` cannot write `{text}`: no tokens of its vocabulary spell it"
    return Finding("cannot-be-said", "error", at, words, "use codes of plain letters, or another model")


def _proposals(envelope: DecisionEnvelope) -> Iterator[Proposal]:
    """Yield every kind with every reason, with its numbers at the lower and at the upper end."""
    rationale = "x" * min(envelope.rationale_chars_max, 1) or None
    for kind in envelope.kinds:
        for reason in kind.reasons:
            for end in ("lo", "hi") if kind.params else ("lo",):
                params = tuple(
                    (name, format_literal(getattr(allowed, end), allowed.scale)) for name, allowed in kind.params
                )
                yield Proposal(kind.kind, params, reason, _NO_REF, rationale)


def _can_be_said(envelope: DecisionEnvelope, proposal: Proposal, data: bytes, compiler: GrammarCompiler) -> bool:
    """Return whether a matcher for this kind with this reason alone can write `data`."""
    kinds = (replace(kind, reasons=(proposal.reason_code,)) for kind in envelope.kinds if kind.kind == proposal.action)
    try:
        matcher = compiler.matcher(DecisionEnvelope(tuple(kinds), envelope.rationale_chars_max), proposal.context_ref)
        return follow(matcher, data) == data
    except LanguageError:
        return False


def _compiler(backend: Backend) -> GrammarCompiler | None:
    """Return the compiler for the backend; None where not even a digit can be said."""
    try:
        return GrammarCompiler(backend)
    except LanguageError:
        return None


def _room(contract: Contract, cases: Iterable[_Case], backend: Backend, longest: int) -> Iterator[Finding]:
    """Yield where prompt and decision exceed the budget or the context, either always or with the longest evidence."""
    from sds.models.tokenizer.tokenizer import prompt_sections  # noqa: PLC0415  llama.cpp loads where there is a model

    rules = Rules(contract)
    static, texts = static_text(contract), [_case(contract, rules, case) for case in cases] or [("", "")]
    read = max(
        sum(map(len, prompt_sections(backend, static, again, f"{once}{EVIDENCE}", " "))) for again, once in texts
    )
    more = contract.memory.tokens_max * bool(contract.memory.entries_max)
    more += contract.artifacts.tokens_max * bool(contract.artifacts.names)
    surely = read + longest
    most = surely + more + contract.rationale_chars_max + _unbounded_chars(contract)
    budget = (("budget", "tokens_max"), contract.budget.tokens_max, "the budget of one flow", "raise the budget")
    context = f"the context of `{backend.name}`", "use a model with a longer context"
    for at, limit, what, mend in (budget, (("mission",), backend.context_tokens_max, *context)):
        parts = f"prompt {read} and decision {longest} tokens"
        if surely > limit:
            words = f"{parts} exceed {what}, {limit}: every case escalates"
            yield Finding("prompt-too-long", "error", at, words, f"shorten mission or `show`, or {mend}")
        elif most > limit:
            words = f"{parts}, with memory, artifacts and the longest evidence up to {most}, exceed {what}, {limit}"
            yield Finding("prompt-can-be-too-long", "warning", at, words, f"lower `evidence_chars_max`, or {mend}")


def _case(contract: Contract, rules: Rules, case: _Case) -> tuple[str, str]:
    return case_texts(contract, rules, take_snapshot(rules.fields, "", case.fields, "", 0), case.envelope)


def _unbounded_chars(contract: Contract) -> int:
    """Return the most tokens that foreign text may add: printable ASCII has at most one token a character."""
    shown = [path for path, _ in contract.show] or list(contract.snapshot)
    texts = sum(contract.snapshot[path] == "string" for path in shown)
    return texts * STRING_CHARS_MAX + contract.event.evidence_chars_max * (contract.event.evidence is not None)
