"""What the policy would decide of labelled cases, how certain it is, and whether it is right.

The steps are those of the engine (`sds.policy.engine`), without packet and record. A case that is unfamiliar, tied,
escalated by a line, left to the language model or outside the envelope is not decided, whatever the threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from sds.definitions.definition import LabelledCase
from sds.judgement.fitting import Progress
from sds.judgement.labels import YES
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.policy import Proposed, policy_rules
from sds.kernel.contract.schema import Contract
from sds.kernel.envelope.envelope import ESCALATE, DecisionEnvelope
from sds.kernel.envelope.state import Fields, Value
from sds.kernel.errors import ModelError
from sds.models.protocol import BackendError
from sds.models.readers.protocol import Reader, Reading
from sds.policy.distribution import MILLIONTHS, SCORE, check_reading, confidence, distribution
from sds.policy.engine import MODEL
from sds.policy.proposing import permits
from sds.policy.readers import as_read

Decision = tuple[str, tuple[tuple[str, int], ...]]  # kind, and its numbers in minor units


@dataclass(frozen=True, slots=True)
class Judged:
    """A case and the policy's result. `decided`: None where it escalates at any confidence; `why`: the reason.

    `confidence`: the probability that the likeliest decision is right. `truth`: the right decision, without numbers
    where only the kind is known. `likely`: the kind of the likeliest decision, even where it is not decided.
    """

    case: LabelledCase
    readings: Mapping[str, Reading]
    likely: str
    decided: Decision | None
    confidence: float
    truth: Decision
    numbers_known: bool
    why: str = ""

    @property
    def right(self) -> bool:
        """Whether the decision is right: its kind, and its numbers where they are known."""
        if self.decided is None:
            return self.truth[0] == ESCALATE
        return self.decided == self.truth if self.numbers_known else self.decided[0] == self.truth[0]

    @property
    def wrong(self) -> bool:
        return self.decided is not None and not self.right


class Readings:
    """Fitted readers that read cases; each text is read once. Raises ModelError as the engine does."""

    def __init__(self, contract: Contract, readers: Mapping[str, Reader]) -> None:
        self._contract, self._readers = contract, readers
        self._order = sorted(readers, key=lambda name: bool(contract.readings[name].score))
        self._known = dict[tuple[str, str], Reading]()

    def of_text(self, name: str, text: str) -> Reading:
        """Return an enumeration's reading of a text, treated as an event's evidence."""
        text = as_read(self._contract, text)
        if (name, text) not in self._known:
            self._known[name, text] = self._read(name, text, {}, {})
        return self._known[name, text]

    def of_case(self, case: LabelledCase) -> dict[str, Reading]:
        """Return every reading of a case, scores last."""
        found = dict[str, Reading]()
        for name in self._order:
            if self._contract.readings[name].values:
                found[name] = self.of_text(name, case.text)
            else:
                shares = {each: reading.probabilities for each, reading in found.items()}
                found[name] = self._read(name, "", case.fields, shares)
        return found

    def _read(self, name: str, text: str, fields: Fields, found: Mapping[str, Mapping[str, float]]) -> Reading:
        try:
            reading = self._readers[name].read(text, fields, found)
        except BackendError as error:
            raise ModelError(str(error), reason_code="READING_FAILED", hint=error.hint) from error
        check_reading(name, self._contract.readings[name], reading.probabilities)
        return reading


class Judge:
    """Applies a contract's policy, with readers, to labelled cases."""

    def __init__(self, contract: Contract, readings: Readings) -> None:
        self._contract, self._readings = contract, readings
        self._policy, self._rules = policy_rules(contract), Rules(contract)

    def judges(self, case: LabelledCase) -> bool:
        """Return whether a case can be judged: it has all fields, and the decision or every reading."""
        known = case.decision is not None or all(name in case.readings for name in self._contract.readings)
        return bool(case.fields) and known and not self._rules.faults(case.fields)

    def envelope(self, case: LabelledCase) -> DecisionEnvelope:
        return self._rules.envelope(case.fields)

    def judge(self, case: LabelledCase) -> Judged:
        """Return the policy's result for a case that `judges` accepts. Raises ModelError."""
        envelope, readings = self.envelope(case), self._readings.of_case(case)
        shares = {name: reading.probabilities for name, reading in readings.items()}
        found = distribution(self._policy, case.fields, shares)
        best = found[0].proposed
        why = _escalates(envelope, best)
        if not all(reading.familiar for reading in readings.values()):
            why = "UNFAMILIAR"
        elif len(found) > 1 and found[0].probability == found[1].probability:
            why = "UNCERTAIN"
        decided = None if why else (best.action, best.params)
        truth, whole = self._truth(case, envelope)
        certain = confidence(self._policy, case.fields, shares, found[0])
        return Judged(case, readings, best.action, decided, certain, truth, whole, why)

    def all(self, cases: Iterable[LabelledCase], progress: Progress, what: str) -> list[Judged]:
        wanted = [case for case in cases if self.judges(case)]
        found = list[Judged]()
        for done, case in enumerate(wanted, 1):
            found.append(self.judge(case))
            progress(done, len(wanted), what)
        return found

    def _truth(self, case: LabelledCase, envelope: DecisionEnvelope) -> tuple[Decision, bool]:
        """Return the right decision, and whether its numbers are known: the label's, else the policy's for the true
        readings within the envelope.
        """
        if case.decision is not None:
            return (case.decision, ()), False
        right = self._policy.propose(case.fields, true_values(self._contract, case))
        return ((ESCALATE, ()) if _escalates(envelope, right) else (right.action, right.params)), True


def true_values(contract: Contract, case: LabelledCase) -> dict[str, Value]:
    """Return a case's true readings in the form that expressions take."""
    return {
        name: case.readings[name] if spec.values else MILLIONTHS * (case.readings[name] == YES)
        for name, spec in contract.readings.items()
    }


def _escalates(envelope: DecisionEnvelope, proposed: Proposed) -> str:
    """Return why a decision of the policy goes to a human; "" where it does not."""
    if envelope.names == (ESCALATE,):
        return "ESCALATE_ONLY"
    if proposed.action == ESCALATE:
        return "POLICY_ESCALATES"
    if proposed.action == MODEL:
        return "POLICY_ASKS_MODEL"
    return "" if permits(envelope, proposed) else "POLICY_FORBIDDEN"


def score_of(reading: Reading) -> float:
    return reading.probabilities[SCORE]


def decided_kinds(contract: Contract) -> tuple[str, ...]:
    """Return the kinds that the policy can propose."""
    return tuple(dict.fromkeys(line.kind for line in contract.policy if line.kind in contract.kinds))


def likeliest(reading: Reading) -> str:
    return max(reading.probabilities, key=reading.probabilities.__getitem__)


def labelled(cases: Sequence[LabelledCase], name: str, *parts: str) -> list[LabelledCase]:
    """Return the cases of these parts with a label for a reading."""
    return [case for case in cases if name in case.readings and case.part in parts]
