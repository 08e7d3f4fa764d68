"""Texts of the console: codes as sentences, times, amounts, untrusted text with invisible characters spelled out. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby

from sds.kernel.canonical import is_seen, seen_text
from sds.kernel.contract.compiler import parse_type
from sds.kernel.decision.packet import passages
from sds.kernel.envelope.envelope import Bound, format_literal
from sds.kernel.envelope.state import Value
from sds.kernel.errors import NOT_AS_WRITTEN

UNSEEN = "UNSEEN"
FOR_REVIEWERS = "for reviewers"  # shown in place of a text where the key lacks the role `review`
MONEY_SCALE = 2  # numbers with this many decimals are amounts in the gate's currency, `Demo.currency`

_LAYOUT = "\n\t"
_WORD = re.compile(r"\w{0,40}")

# Why a case waits, by its code in the record. Other codes are shown as they are.
_WHY = {
    "AGENT_SUSPENDED": "The agent was suspended when this case came, so a human decides it.",
    "ALREADY_ORDERED": "An order for this event is in the record already.",
    "APPROVAL_REQUIRED": "The rules ask a human to approve what the agent proposed.",
    "CONFIDENCE_BELOW_MINIMUM": "The agent was less certain than the rules ask for.",
    "CONTRACT_REVOKED": "The rules (the contract) under which the case was opened were revoked.",
    "ESCALATED_BY_AGENT": "The agent handed the case to a human.",
    "ESCALATED_BY_RULE": "The rules or limits leave this case to a human.",
    "EXECUTION_FAILED": "The decision could not be carried out.",
    "HALTED": "An operator had halted the system when this case came.",
    "INTERRUPTED": "The decision was interrupted more often than the rules let it restart.",
    "LANGUAGE_TOO_LARGE": "The permitted decisions were too many to put to the model.",
    "MISSION_DISSONANCE": "The agent's task was not the one that it is registered for.",
    "MODEL_UNAVAILABLE": "The model that proposes decisions failed.",
    "POLICY_ESCALATES": "The written policy has no decision for this case.",
    "POLICY_FAILED": "The written policy failed.",
    "POLICY_FORBIDDEN": "The written policy proposes a decision that is not permitted now.",
    "PROPOSAL_EXPIRED": "The proposal came too late.",
    "READING_FAILED": "The text was not understood: what reads it failed.",
    "READING_INVALID": "The text was not understood: what reads it gave an invalid result.",
    "REASONING_EXHAUSTION": "Every proposal that the agent made was rejected.",
    "RECORD_DAMAGED": "The record of this case is damaged. Tell an operator, who runs: sds ledger verify.",
    "REPEATED_PROPOSAL": "The agent repeated a proposal that had been rejected.",
    "RESOURCE_CONTENTION": "Another decision held what this one needs.",
    "SPEND_LIMIT_EXCEEDED": "A spend limit is used up.",
    "STATEMENT_DIFFERS": "The record and the external system do not agree.",
    "STATE_DRIFT_DETECTED": "The state changed during the decision, more often than the rules let it restart.",
    "TOKEN_BUDGET_EXCEEDED": "The model used up what it may read and write for one case.",
    "UNCERTAIN": "The decision is less certain than the rules ask for.",
    "UNFAMILIAR": "The text is unlike those that the agent has learned from.",
    "UNKNOWN": "An order was sent, and nobody knows what became of it.",
}

_SHORT = {"UNKNOWN": "result of an order not known", "": "not recorded"}
_ORDERS = {
    "SUCCESS": "was carried out",
    "FAILED": "was not carried out",
    "PENDING": "is being carried out",
    "UNKNOWN": "was sent, and its result is not known",
}

# What an entry of the ledger says about a flow, by its kind.
_ENTRIES = {
    "ADOPTED": "An order found in the external system was added",
    "CONTRADICTED": "The external system contradicted the record later",
    "DECIDED": "The agent's part ended",
    "ERASED": "The texts of the case were erased",
    "HUMAN": "Decided by a human",
    "LABEL": "Labelled as right or wrong",
    "RATIONALE": "The agent explained its decision",
    "RESERVED": "What the order needs was reserved, and the order was signed",
    "RESOLVED": "The result of the order became known",
    "REVERSAL": "The reversal of the order",
    "SAGA": "A stage of a case with several steps",
    "SETTLED": "The external system answered",
    "UNKNOWN": "The external system did not answer: the result of the order is not known",
    "VOIDING": "The order is being cancelled in the external system",
}

_PATTERNS = {
    "CONTROL_TOKEN": "a model's control token",
    "FORGED_AUTHORITY": "a claim of authority",
    "FORGED_DECISION": "a claim that the decision is made already",
    "OVERRIDE_INSTRUCTIONS": "an order to ignore the rules",
    "ROLE_CHANGE": "an attempt to change the agent's role",
    UNSEEN: "characters that cannot be seen",
}


def why(code: str | None) -> str:
    """Return the sentence for the code of why a case waits, or the code where it has none."""
    return _WHY.get(code or "", code or "The record does not say why.")


def short(code: str) -> str:
    """Return the code of why a case waits as a few words."""
    return _SHORT.get(code, code.lower().replace("_", " "))


def order(status: str) -> str:
    """Return what became of an order in words, or its status where it has none."""
    return _ORDERS.get(status, f"is {status}")


def percent(share: float) -> str:
    return f"{share * 100:.1f} %"


def entry(kind: str) -> str:
    return _ENTRIES.get(kind, kind)


def pattern(name: str) -> str:
    return _PATTERNS.get(name, name)


def plain(value: object) -> str:
    """Return a value as text on one line, with invisible characters spelled out."""
    return seen_text(str(value))


def visible(text: str) -> str:
    """Return a text with invisible characters spelled out; line ends and tabs stay."""
    return seen_text(text, _LAYOUT)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of evidence as it is shown. `marks`: the patterns found in it, in words; empty for ordinary text."""

    text: str
    marks: tuple[str, ...] = ()


def pieces(text: str) -> tuple[Piece, ...]:
    """Cut evidence into pieces at injection patterns and at invisible characters; line ends stay."""
    cuts: list[Piece] = []
    at = 0
    for start, end, names in passages(text):
        whole = _end_of_word(text, end)
        cuts += _seen(text[at:start], ())
        cuts += _seen(text[max(at, start) : whole], names)
        at = max(at, whole)
    return (*cuts, *_seen(text[at:], ()))


def _end_of_word(text: str, at: int) -> int:
    """Return the end of the word at a position, since a pattern may end within a word."""
    match = _WORD.match(text, at)
    return match.end() if match else at


def _seen(text: str, names: tuple[str, ...]) -> Iterator[Piece]:
    """Yield a text as pieces, with invisible characters spelled out in pieces of their own."""
    marks = tuple(map(pattern, names))
    for hidden, run in groupby(text, lambda char: not (is_seen(char) or char in _LAYOUT)):
        if hidden:
            yield Piece(seen_text("".join(run)), (*marks, pattern(UNSEEN)))
        else:
            yield Piece("".join(run), marks)


def when(at_ms: int) -> str:
    """Return a time, in milliseconds since 1970, as text in UTC; one that is outside the calendar as a number."""
    try:
        return datetime.fromtimestamp(at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (OSError, *NOT_AS_WRITTEN):
        return f"{at_ms} ms"


def iso(at_ms: int) -> str:
    return when(at_ms).replace(" ", "T") + "Z"


def ago(at_ms: int, now_ms: int) -> str:
    """Return the time since `at_ms` in its largest whole unit."""
    seconds = max(0, now_ms - at_ms) // 1000
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit}"
    return f"{seconds} s"


def amount(value: int, scale: int, currency: str) -> str:
    """Return a number with its decimals; one with `MONEY_SCALE` decimals also with the currency, if there is one."""
    text = format_literal(value, scale)
    return f"{text} {unit(scale, currency)}".rstrip()


def unit(scale: int, currency: str) -> str:
    return currency if scale == MONEY_SCALE else ""


def field(path: str, declared: str, value: Value | None, currency: str) -> str:
    """Return a field of the state as text for people, by its declared type."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        if declared == "timestamp":
            return when(value * 1000)
        return amount(value, parse_type(path, declared).scale, currency)
    return plain(value)


def bounds(allowed: Bound, currency: str) -> str:
    """Return the permitted values of a number in words."""
    low, high = (format_literal(end, allowed.scale) for end in (allowed.lo, allowed.hi))
    text = f"{low} to {high}" if allowed.lo < allowed.hi else low
    step = f", in steps of {format_literal(allowed.step, allowed.scale)}" if allowed.step > 1 else ""
    return f"{text} {unit(allowed.scale, currency)}".rstrip() + step
