"""The language model as a reader of labelled texts: asked as `sds.policy` asks it, calibrated by labels. It learns nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from sds.engines.protocol import Engine
from sds.judgement.fitting import FitsText, Fitters, Progress
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, compile_packet
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState
from sds.kernel.envelope.envelope import ESCALATE_ONLY
from sds.kernel.errors import ModelError, UsageError
from sds.models.readers.protocol import NO_FIELDS, NO_READINGS, Fields, Reader, ReaderError, Reading
from sds.models.readers.protocol import Readings as Found
from sds.policy.judgement import Manifest, ModelCalibration
from sds.policy.readers import Answers, ModelReader, softened

MODEL = "model"
PACKET_MS = 3_600_000  # added to the time of a packet, so that it does not expire during the measurement
_TINY = 1e-12


class Probabilities:
    """A reader made of a function from a text to the probability of each value. Every text is familiar to it."""

    def __init__(self, kind: str, values: Sequence[str], of: Callable[[str], Mapping[str, float]]) -> None:
        self.kind, self.values, self.sha256, self._of = kind, tuple(values), "", of

    def read(self, text: str, fields: Fields = NO_FIELDS, readings: Found = NO_READINGS) -> Reading:  # noqa: ARG002
        return Reading(dict(self._of(text)), familiar=True)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


def language_model(contract: Contract, answers: Answers, name: str, *, now_ms: int) -> Reader:
    """Return the language model as a reader, which asks what `sds.policy` asks where no reader is fitted."""
    rules = Rules(contract)

    def of(text: str) -> Mapping[str, float]:
        return answers.answer(_packet(contract, rules, text, now_ms), {}).probabilities

    return Probabilities(MODEL, tuple(contract.readings[name].values), of)


def _packet(contract: Contract, rules: Rules, text: str, now_ms: int) -> DecisionPacket:
    """Return a packet of no flow, with a text as evidence and without state."""
    nothing = EnvelopeInputs({}, agent_active=True, in_effect=True, halted=False, spend_left=None, context_whole=True)
    live = LiveState(nothing, version="", epochs={}, contract_hash=contract.hash)
    how: dict[str, Any] = {"dfid": "eval", "event_id": "eval", "key": "eval", "envelope": ESCALATE_ONLY}
    return compile_packet(contract, rules, evidence=text, live=live, now_ms=now_ms + PACKET_MS, **how)


@dataclass(frozen=True)
class AskedModel:
    """A language model's answers to one question. `read`: asks it; `progress`: is called with the number of answered texts."""

    model: str
    values: tuple[str, ...]
    read: Callable[[str], Mapping[str, float]]
    progress: Progress
    temperature: float = 1.0

    @property
    def calibration(self) -> ModelCalibration:
        return ModelCalibration(model=self.model, temperature=self.temperature)

    def calibrated(self, texts: Sequence[str], values: Sequence[str]) -> AskedModel:
        """Return this model with the temperature at which its probabilities fit the labels best. Raises ReaderError."""
        from sds.models.fitting.calibration import fit_temperature  # noqa: PLC0415  an extra

        found = list[list[float]]()
        for done, text in enumerate(texts, 1):
            shares = self.read(text)
            found.append([shares[value] for value in self.values])
            self.progress(done, len(texts), "asking the language model")
        logits = np.log(np.maximum(np.array(found), _TINY))
        places = np.array([self.values.index(value) for value in values], dtype=np.int64)
        return replace(self, temperature=fit_temperature(logits, places).temperature)

    def reader(self) -> Reader:
        return Probabilities(MODEL, self.values, lambda text: softened(self.read(text), self.temperature))


def asking(fitters: Fitters, contract: Contract, engine: Engine, *, now_ms: int) -> Fitters:
    """Return fitters that calibrate the language model for every enumeration, and fit scores as before."""
    names = [name for name, spec in contract.readings.items() if spec.values]
    asked = {name: _asked(contract, name, engine, now_ms) for name in names}
    return replace(fitters, kind=MODEL, base={"name": engine.model}, asked=asked)


def _asked(contract: Contract, name: str, engine: Engine, now_ms: int) -> FitsText:
    answers = ModelReader(name, contract.readings[name], engine)
    reader = language_model(contract, answers, name, now_ms=now_ms)

    @cache
    def read(text: str) -> Mapping[str, float]:
        try:
            return reader.read(text).probabilities
        except ModelError as error:
            raise ReaderError(str(error), hint=error.hint) from error

    def fit(texts: Sequence[str], values: Sequence[str], *, names: Sequence[str], **how: Any) -> AskedModel:  # noqa: ARG001  nothing is learned
        return AskedModel(engine.model, tuple(names), read, how["on_progress"])

    return fit


def calibrated_readers(contract: Contract, manifest: Manifest, engine: Engine, *, now_ms: int) -> dict[str, Reader]:
    """Return the fitted folder's readers that are the language model. Raises UsageError where `engine` is another model."""
    found = dict[str, Reader]()
    for name, known in manifest.models.items():
        if known.model != engine.model:
            raise UsageError(
                f"`{known.model}` was calibrated to read `{name}`, but the model here is `{engine.model}`",
                hint="run sds fit GATE --language-model",
            )
        answers = ModelReader(name, contract.readings[name], engine, known.temperature)
        found[name] = language_model(contract, answers, name, now_ms=now_ms)
    return found
