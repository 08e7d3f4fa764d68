"""Read one case for its page: what happened, what was proposed, why a human has to decide, what they may decide now.

Nothing is written. Texts are as in the record: the template escapes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from sds.escalations import choices, scale_of, waits
from sds.gate import Gate
from sds.kernel.audit.verify import flow_record
from sds.kernel.contract.human_terms import Impact
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import KindBound, format_literal
from sds.kernel.errors import SdsError, reading, unreadable
from sds.kernel.human.cases import Case
from sds.kernel.human.review import CaseView, HumanReview
from sds.service.console import words
from sds.service.console.words import Piece

_NUMBER = re.compile(r"([A-Za-z_]\w{0,63})=(-?[0-9]{1,16})")
_DECISION_CHOICES = ("decision", "action")  # names of the choice of a whole decision: a policy's and a model's
_SHOWN = ("outcome", "decision", "who", "reason", "reason_code", "status", "reference", "right")  # of a ledger entry


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of the state, as text: its label, where the contract has one; as the agent read it; now; and (`looked`) on the page
    whose form was sent, if any.
    """

    path: str
    label: str
    then: str
    now: str
    moved: bool
    looked: str = ""

    @property
    def changed(self) -> bool:
        return bool(self.looked) and self.looked != self.now


@dataclass(frozen=True, slots=True)
class Share:
    label: str
    probability: float
    chosen: bool


@dataclass(frozen=True, slots=True)
class Alternatives:
    """The alternatives of one choice of the model with their probabilities, likeliest first."""

    name: str
    shares: tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class NumberField:
    """A number that a human may set. `least`, `most`, `step`: decimals in major units, as they are typed."""

    name: str
    least: str
    most: str
    step: str
    unit: str
    words: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One decision that a human may make instead. `fixed`: numbers that the rules set; `impacts`: of its least and most."""

    name: str
    numbers: tuple[NumberField, ...]
    fixed: tuple[tuple[str, str], ...]
    reasons: tuple[str, ...]
    impacts: tuple[Impact, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of the ledger about a case."""

    at_ms: int
    kind: str
    words: str
    detail: str


@dataclass(frozen=True, slots=True)
class CasePage:
    """The content of one case's page. `seen`: the id of the state that is shown; "" where it cannot be read, and `unread` says
    why. `leaning`: the likeliest decision of an agent that made none. `override`: whether the proposal may be carried out.
    """

    gate: str
    case: Case
    why: str
    event: tuple[tuple[str, str], ...]
    evidence: tuple[Piece, ...]
    fields: tuple[FieldRow, ...]
    notes: tuple[str, ...]
    seen: str
    unread: str
    numbers: tuple[tuple[str, str], ...]
    impact: Impact | None
    rationale: str
    leaning: str
    alternatives: tuple[Alternatives, ...]
    kinds: tuple[Kind, ...]
    override: bool
    history: tuple[Entry, ...]

    @property
    def waits(self) -> bool:
        return waits(self.case)

    @property
    def marks(self) -> tuple[str, ...]:
        """What was found in the evidence, each pattern once, in the order of the text."""
        return tuple(dict.fromkeys(mark for piece in self.evidence for mark in piece.marks))

    @property
    def looked(self) -> bool:
        """Whether the state on the page whose form was sent is known."""
        return any(row.looked for row in self.fields)

    @property
    def shown(self) -> str:
        """The state on this page as JSON. The form carries it, so that the next page can mark what has changed."""
        return json.dumps({row.path: row.now for row in self.fields}, ensure_ascii=False)


def case_page(gate: Gate, dfid: str, review: HumanReview, *, currency: str, looked: Mapping[str, str]) -> CasePage:
    """Read one case. `looked`: the fields on the page whose form was sent. Raises UsageError where there is no such case,
    StoreError where it cannot be read.
    """
    case = review.case(dfid)
    view, unread = _view(review, case)
    terms, event = review.contract, gate.contract.event
    may = choices(terms, case, view) if view else ()
    evidence, proposal = event.evidence or "", case.proposal
    return CasePage(
        gate=terms.gate,
        case=case,
        why=words.why("UNKNOWN" if case.unknown else case.reason_code),
        event=tuple(
            (name, words.plain(value))
            for name, value in case.trigger.items()
            if name != evidence and not case.difference
        ),
        evidence=words.pieces(str(case.trigger.get(evidence, ""))),
        fields=tuple(_fields(terms, case, view, currency, looked)),
        notes=view.packet.notes if view else (),
        seen=view.seen if view else "",
        unread=unread,
        numbers=tuple(numbers(terms, case.action or "", case.numbers, currency)),
        impact=case.impact(terms),
        rationale=words.plain(proposal.rationale) if proposal and proposal.rationale else "",
        leaning=leaning(case, gate.contract, currency),
        alternatives=tuple(alternative(each, gate.contract, currency) for each in case.alternatives),
        kinds=tuple(_kind(each.kind, each.impacts or (), currency) for each in may if each.kind),
        override=any(each.decision == "OVERRIDE" for each in may),
        history=tuple(history(gate, dfid, texts=True)),
    )


def _view(review: HumanReview, case: Case) -> tuple[CaseView | None, str]:
    """Read the state as it is now, or return why it cannot be read: a human may end the case all the same."""
    try:
        return review.view(case), ""
    except SdsError as error:
        if case.damaged:
            raise
        return None, str(error)


def _fields(
    terms: Contract, case: Case, view: CaseView | None, currency: str, looked: Mapping[str, str]
) -> Iterator[FieldRow]:
    now = view.packet.snapshot.fields if view else {}
    moved = view.moved if view else ()
    for path, declared in terms.snapshot.items():
        then, is_now = (words.field(path, declared, fields.get(path), currency) for fields in (case.fields, now))
        yield FieldRow(path, terms.labels.get(path, ""), then, is_now, path in moved, looked.get(path, ""))


def numbers(terms: Contract, action: str, values: Mapping[str, int], currency: str) -> Iterator[tuple[str, str]]:
    """Yield the numbers of a decision as text: in major units, or in minor ones where the contract does not know the kind."""
    for name, value in values.items():
        scale = scale_of(terms, action, name)
        yield name, f"{value} minor units" if scale is None else words.amount(value, scale, currency)


def alternative(measured: Mapping[str, Any], terms: Contract, currency: str) -> Alternatives:
    """Return the alternatives of one recorded choice, with labels for people."""
    probabilities, chosen = measured.get("probabilities", {}), measured.get("chosen")
    ranked = sorted(probabilities.items(), key=lambda share: -share[1])
    return Alternatives(
        words.plain(measured.get("choice", "")),
        tuple(
            Share(_label(terms, label, currency), min(1.0, max(0.0, float(p))), label == chosen) for label, p in ranked
        ),
    )


def _label(terms: Contract, label: str, currency: str) -> str:
    """Return an alternative's label. The numbers of a whole decision (`KIND amount=5000`) get their decimals."""
    kind, *given = label.split(" ")
    found = [_NUMBER.fullmatch(each) for each in given]
    if kind not in terms.kinds or None in found:
        return words.plain(label)
    values = {each[1]: int(each[2]) for each in found if each}
    return " ".join((kind, *(f"{name} {text}" for name, text in numbers(terms, kind, values, currency))))


def leaning(case: Case, terms: Contract, currency: str) -> str:
    """Return the likeliest decision with its probability, where the agent measured that and decided nothing; else ""."""
    for measured in case.alternatives:
        if measured.get("choice") in _DECISION_CHOICES and not case.action:
            likeliest = alternative(measured, terms, currency).shares[:1]
            return "".join(f"{each.label} ({words.percent(each.probability)})" for each in likeliest)
    return ""


def _kind(kind: KindBound, impacts: tuple[Impact, ...], currency: str) -> Kind:
    return Kind(
        name=kind.kind,
        numbers=tuple(
            NumberField(
                name=name,
                least=format_literal(bound.lo, bound.scale),
                most=format_literal(bound.hi, bound.scale),
                step=format_literal(bound.step, bound.scale),
                unit=words.unit(bound.scale, currency),
                words=words.bounds(bound, currency),
            )
            for name, bound in kind.params
        ),
        fixed=tuple((name, words.amount(value, scale, currency)) for name, value, scale in kind.fills),
        reasons=kind.reasons,
        impacts=tuple(dict.fromkeys(impacts)),
    )


def history(gate: Gate, dfid: str, *, texts: bool) -> Iterator[Entry]:
    """Yield the ledger's entries of a flow, oldest first. `texts`: with the reasons that people gave.

    Raises StoreError where the ledger cannot be read.
    """
    record = flow_record(gate.store, dfid) or {"ledger": ()}
    with reading(unreadable(dfid)):
        for entry in record["ledger"]:
            body = json.loads(entry["body"])
            body |= body["by"] if isinstance(body.get("by"), dict) else {}
            if not texts and body.get("reason") not in (None, ""):
                body["reason"] = words.FOR_REVIEWERS
            detail = ", ".join(words.plain(body[name]) for name in _SHOWN if body.get(name) not in (None, ""))
            yield Entry(entry["at_ms"], entry["kind"], words.entry(entry["kind"]), detail)
