"""The readers that answer a contract's questions about one packet: fitted readers, or the language model itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Protocol

from sds.engines.protocol import Engine
from sds.kernel.contract.readings import ReadingSpec
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import EVIDENCE, DecisionPacket, evidence_text
from sds.kernel.envelope.envelope import KindBound, envelope_of
from sds.kernel.envelope.proposal import parse_proposal
from sds.kernel.errors import ModelError
from sds.kernel.storage.vault import mask
from sds.models.protocol import BackendError
from sds.models.readers.protocol import Reader, Reading
from sds.policy.distribution import Readings

TOKENS_MAX = 4096
ANSWER = "READ"  # the only reason of each value in the language of answers
SAID = 4.0  # how many times likelier than any other an answer without probabilities counts, before calibration
_LEAST = 1e-6


def softened(weights: Mapping[str, float], temperature: float) -> dict[str, float]:
    """Return probabilities from weights, of which one is above 0: their logarithms are divided by a temperature."""
    most = max(weights.values())
    powers = {value: (weight / most) ** (1 / temperature) for value, weight in weights.items()}
    total = sum(powers.values())
    return {value: power / total for value, power in powers.items()}


class Answers(Protocol):
    """The reader of one reading, as the policy sees it."""

    @property
    def name(self) -> str:
        """The name in the record."""

    def answer(self, packet: DecisionPacket, found: Readings) -> Reading:
        """Answer about a packet. `found`: the readings answered before. Raises ModelError."""


def evidence_of(packet: DecisionPacket) -> str:
    """Return the customer's text from the packet: printable ASCII, cut to the contract's limit."""
    return packet.texts[-1].removeprefix(EVIDENCE).strip()


def as_read(contract: Contract, text: str) -> str:
    """Return a text as a reader would get it as an event's evidence: masked, printable, cut to the contract's limit."""
    return evidence_text(contract, mask(text)).strip()


@dataclass(frozen=True)
class FittedAnswers:
    """A fitted reader. It gets nothing but text and fields, as data."""

    name: str
    reader: Reader

    def answer(self, packet: DecisionPacket, found: Readings) -> Reading:
        try:
            return self.reader.read(evidence_of(packet), packet.snapshot.fields, found)
        except BackendError as error:
            raise ModelError(str(error), reason_code="READING_FAILED", hint=error.hint) from error
        except Exception as error:
            why = f"the reader `{self.name}` failed: {type(error).__name__}"
            raise ModelError(why, reason_code="READING_FAILED") from error


class ModelReader:
    """The language model answers in the exact language of the values. Its answer without evidence, the prior, is divided out.

    It needs no labels; with labels, its logits are divided by a fitted `temperature`. Where an engine measures no
    probabilities, its answer counts as `SAID` times as likely as any other value. Safe in several threads.
    """

    def __init__(self, question: str, spec: ReadingSpec, engine: Engine, temperature: float = 1.0) -> None:
        self._engine, self._temperature = engine, temperature
        self._kinds = {value.upper(): value for value in spec.values}
        meanings = "\n".join(f"- {value.upper()}: {meaning}" for value, meaning in spec.values.items())
        self._static = f"{spec.question}\nAnswer with one of these, written as JSON:\n{meanings}\n"
        self._envelope = envelope_of(
            [KindBound(kind, (ANSWER,)) for kind in self._kinds], refusal=next(iter(self._kinds))
        )
        self._question, self._prior, self._lock = question, dict[str, float](), Lock()

    @cached_property
    def name(self) -> str:
        return f"model:{self._engine.model}"

    def answer(self, packet: DecisionPacket, found: Readings) -> Reading:  # noqa: ARG002  it reads the text alone
        prior = self._prior_of(packet)
        said = self._shares(packet, evidence_of(packet))
        weights = {value: said[value] / max(prior[value], _LEAST) for value in said}
        if not sum(weights.values()) > 0:
            raise ModelError(
                f"the model gave no probability to any value of `{self._question}`", reason_code="READING_FAILED"
            )
        return Reading(softened(weights, self._temperature), familiar=True)

    def _prior_of(self, packet: DecisionPacket) -> Mapping[str, float]:
        with self._lock:
            if not self._prior:
                self._prior = self._shares(packet, "")
            return self._prior

    def _shares(self, packet: DecisionPacket, text: str) -> dict[str, float]:
        asked = replace(
            packet, envelope=self._envelope, texts=(self._static, f"{EVIDENCE} {text}"), feedback="", notes=()
        )
        data, decoding = self._engine.propose(asked, tokens_max=TOKENS_MAX)
        action = next((dict(each) for each in decoding.alternatives or () if each.get("choice") == "action"), None)
        return self._of_said(data) if action is None else self._of_values(action["probabilities"])

    def _of_said(self, data: bytes) -> dict[str, float]:
        """Return the shares that an answer in bytes alone stands for. Raises ModelError where it names no value."""
        proposal = parse_proposal(data)
        said = None if isinstance(proposal, str) else self._kinds.get(proposal.action)
        if said is None:
            raise ModelError(f"the model named no value of `{self._question}`", reason_code="READING_FAILED")
        total = SAID + len(self._kinds) - 1
        return dict.fromkeys(self._kinds.values(), 1 / total) | {said: SAID / total}

    def _of_values(self, probabilities: object) -> dict[str, float]:
        """Return the share of each value. The share of a joint label (`A|B`) is divided equally among its values."""
        shares = dict.fromkeys(self._kinds.values(), 0.0)
        for label, share in dict(probabilities).items():  # type: ignore[call-overload]
            kinds = [kind for kind in str(label).split("|") if kind in self._kinds]
            for kind in kinds:
                shares[self._kinds[kind]] += float(share) / len(kinds)
        return shares
