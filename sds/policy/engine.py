"""The policy as an engine: readings, then the written rule, then one proposal within the envelope, or an escalation.

It takes a packet and returns proposal bytes and what was read, as any other engine does. It escalates readings that are
not familiar (UNFAMILIAR), decisions less certain than `max_error` permits (UNCERTAIN), and decisions that the envelope
does not permit (POLICY_FORBIDDEN).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from time import perf_counter

from sds.engines.protocol import Checks, let_go
from sds.host.machine import usable_cores
from sds.kernel.contract.policy import policy_rules
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.envelope.envelope import ESCALATE, ESCALATE_REASON
from sds.kernel.envelope.proposal import Proposal, parse_proposal, write_proposal
from sds.kernel.errors import ModelError
from sds.kernel.flow.dispatch import Log
from sds.kernel.flow.states import DEADLINE_EXCEEDED
from sds.models.readers.protocol import THREADS, Reading
from sds.policy.distribution import Weighted, check_reading, confidence, distribution
from sds.policy.judgement import Threshold
from sds.policy.language_model import LanguageModel
from sds.policy.proposing import written
from sds.policy.readers import Answers

MODEL = "MODEL"
MODE = "policy"  # in the record's facts, in the place of a decoded decision's mode


class PolicyEngine:
    """Decides under one contract. `thresholds`: by kind, the least confidence; None: kinds with a bound on their error
    escalate.

    `facts`: must be the same in a replay. `language_model` opens on its first use. Safe in several threads.
    """

    def __init__(
        self,
        contract: Contract,
        answers: Mapping[str, Answers],
        thresholds: Mapping[str, Threshold] | None,
        *,
        language_model: LanguageModel,
        now_ms: Callable[[], int],
        facts: Mapping[str, object],
        notices: tuple[str, ...] = (),
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._contract, self._answers, self._thresholds = contract, answers, thresholds
        self._rules, self._language_model = policy_rules(contract), language_model
        self._now_ms, self._facts, self.notices, self._close = now_ms, facts, notices, close
        # scores last: they may need the other readings
        self._order = sorted(contract.readings, key=lambda name: bool(contract.readings[name].score))

    @property
    def model(self) -> str:
        return "policy: " + ", ".join(f"{name} by {each.name}" for name, each in sorted(self._answers.items()))

    @property
    def slots(self) -> int:
        """The number of decisions made at once: the slots of the language model where it reads; else one for the cores
        of each reader, because more readers would compete for the cores.
        """
        if self._language_model.needed:
            return int(getattr(self._language_model.get(), "slots", 1))
        return max(1, usable_cores() // THREADS)

    @property
    def language_model(self) -> LanguageModel:
        return self._language_model

    def log_to(self, log: Log) -> None:
        """Write to a gate's log when the language model goes down and comes back."""
        self._language_model.breaker.log_to(log)

    def check_contract(self, contract: Contract) -> None:
        """Raise ModelError where the language model is needed and cannot decide under the contract."""
        if contract.hash != self._contract.hash:
            raise ModelError("the policy belongs to another contract", hint="open the gate again")
        if self._language_model.needed:
            engine = self._language_model.get()
            if isinstance(engine, Checks):
                engine.check_contract(contract)

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet within its expiry. Raises ModelError; never returns half a decision."""
        began = perf_counter()
        if packet.envelope.names == (ESCALATE,):
            return _escalate(packet), Decoding(model=NOT_ASKED, duration_ms=_ms(began))
        readings = self._read(packet)
        decoding = Decoding(model=self.model, facts={**self._facts, "readings": _shares(readings)})
        unfamiliar = sorted(name for name, reading in readings.items() if not reading.familiar)
        decided, certain = self._distribution(packet, readings)
        decoding = replace(decoding, confidence=certain, alternatives=_alternatives(readings, decided))
        if unfamiliar:
            return self._to_a_human(packet, decoding, "UNFAMILIAR", began)
        if len(decided) > 1 and decided[0].probability == decided[1].probability:
            return self._to_a_human(packet, decoding, "UNCERTAIN", began)
        if decided[0].proposed.action == MODEL:
            return self._ask_model(packet, decoding, tokens_max)
        return self._judge(packet, decided[0], decoding, began)

    def _read(self, packet: DecisionPacket) -> dict[str, Reading]:
        found = dict[str, Reading]()
        for name in self._order:
            reading = self._answers[name].answer(packet, _shares(found))
            check_reading(name, self._contract.readings[name], reading.probabilities)
            found[name] = reading
            if self._now_ms() > packet.expires_at_ms:
                raise ModelError("the deadline passed while the readings were made", reason_code=DEADLINE_EXCEEDED)
        return found

    def _distribution(self, packet: DecisionPacket, readings: Mapping[str, Reading]) -> tuple[list[Weighted], float]:
        """Return the possible decisions, the likeliest first, and the confidence in that one."""
        given = (self._rules, packet.snapshot.fields, _shares(readings))
        try:
            decided = distribution(*given)
            return decided, confidence(*given, decided[0])
        except Exception as error:
            why = f"the policy cannot be applied: {type(error).__name__}"
            raise ModelError(why, reason_code="POLICY_FAILED") from error

    def _judge(
        self, packet: DecisionPacket, chosen: Weighted, decoding: Decoding, began: float
    ) -> tuple[bytes, Decoding]:
        proposed = chosen.proposed
        decoding = replace(decoding, facts={**decoding.facts, "policy_line": proposed.line})
        if proposed.action == ESCALATE:
            return self._to_a_human(packet, decoding, "POLICY_ESCALATES", began)
        data = written(packet.envelope, proposed, packet.snapshot.id)
        if data is None or not packet.envelope.contains(data):
            return self._to_a_human(packet, decoding, "POLICY_FORBIDDEN", began)
        if not self._is_certain(proposed.action, decoding.confidence or 0.0):
            return self._to_a_human(packet, decoding, "UNCERTAIN", began)
        return data, replace(decoding, duration_ms=_ms(began))

    def _is_certain(self, kind: str, confidence: float) -> bool:
        """Return whether a decision of a kind is as certain as the bound on its error asks. A kind without a bound is."""
        if not self._is_bounded(kind):
            return True
        threshold = (self._thresholds or {}).get(kind)
        return threshold is not None and threshold.least is not None and confidence >= threshold.least

    def _is_bounded(self, kind: str) -> bool:
        bounds = self._contract.max_error
        return bounds is not None and bounds.of(kind) is not None

    def _ask_model(self, packet: DecisionPacket, decoding: Decoding, tokens_max: int) -> tuple[bytes, Decoding]:
        """Let the language model choose within the envelope. The record gets its facts, and the readings."""
        began = perf_counter()
        data, by_model = self._language_model.propose(packet, tokens_max=tokens_max)
        by_model = replace(by_model, facts={**by_model.facts, "readings": decoding.facts["readings"]})
        chosen = parse_proposal(data)
        if isinstance(chosen, Proposal) and chosen.action != ESCALATE and self._is_bounded(chosen.action):
            return self._to_a_human(packet, by_model, "UNCERTAIN", began)  # no labels have measured its error
        return data, by_model

    def _to_a_human(self, packet: DecisionPacket, decoding: Decoding, why: str, began: float) -> tuple[bytes, Decoding]:
        return _escalate(packet), replace(decoding, escalation=why, duration_ms=_ms(began))

    def cancel(self, dfid: str) -> None:
        let_go(self._language_model.opened, dfid)

    def count_tokens(self, text: str) -> int:
        """Return the tokens of a text for the language model; where none is needed its bytes, an upper bound."""
        return self._language_model.get().count_tokens(text) if self._language_model.needed else len(text.encode())

    def close(self) -> None:
        self._close()
        self._language_model.close()


def _shares(readings: Mapping[str, Reading]) -> dict[str, dict[str, float]]:
    return {name: dict(reading.probabilities) for name, reading in readings.items()}


def _alternatives(readings: Mapping[str, Reading], decided: list[Weighted]) -> tuple[Mapping[str, object], ...]:
    """Return the readings and the possible decisions in the form of a record's choices."""
    read = [
        {
            "choice": f"reading.{name}",
            "chosen": max(each.probabilities, key=each.probabilities.__getitem__),
            "z": 1.0,
            "probabilities": dict(each.probabilities),
        }
        for name, each in readings.items()
    ]
    decisions = {
        "choice": "decision",
        "chosen": decided[0].label,
        "z": 1.0,
        "probabilities": {each.label: each.probability for each in decided},
    }
    return (*read, decisions)


def _escalate(packet: DecisionPacket) -> bytes:
    return write_proposal(Proposal(ESCALATE, (), ESCALATE_REASON, packet.snapshot.id))


def _ms(began: float) -> float:
    return (perf_counter() - began) * 1000
