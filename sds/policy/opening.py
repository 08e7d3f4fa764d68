"""Opens the engine of a contract with a policy: fitted readers where there are any, else the language model reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from sds.engines.breaker import Breaker
from sds.engines.protocol import Engine
from sds.kernel.contract.schema import Contract
from sds.policy.engine import MODE, PolicyEngine
from sds.policy.judgement import Judgement, ModelCalibration, open_judgement, refuse_unread_scores
from sds.policy.language_model import LanguageModel
from sds.policy.readers import Answers, FittedAnswers, ModelReader


def open_policy(
    contract: Contract,
    folder: Path | None,
    *,
    open_model: Callable[[], Engine],
    now_ms: Callable[[], int],
    gate: str = "GATE",
) -> PolicyEngine:
    """Open the policy of a contract. `folder`: of fitted readers; None: the language model reads, with a notice.
    `gate`: the argument that names the gate to a command, for notices and hints.

    Raises UsageError where the folder is refused, or where a score has no fitted reader; then nothing stays open.
    """
    with ExitStack() as opened:
        judgement = open_judgement(folder, contract, gate=gate) if folder is not None else None
        close: Callable[[], None] = judgement.close if judgement else lambda: None
        opened.callback(close)
        unfitted = [name for name in contract.readings if judgement is None or name not in judgement.readers]
        refuse_unread_scores(contract, judgement, gate=gate)
        chosen = any(line.otherwise == "MODEL" for line in contract.policy)
        needed = bool(unfitted or chosen or contract.explanation_chars_max)
        breaker = Breaker(whole_ms=contract.budget.ttl_ms, now_ms=now_ms)
        model = LanguageModel(open_model, needed=needed, breaker=breaker)
        opened.callback(model.close)
        notices = judgement.notices if judgement else ()
        if uncalibrated := [name for name in unfitted if _calibration(name, judgement, model) is None]:
            which = ", ".join(f"`{name}`" for name in uncalibrated)
            notices += (f"no reader is fitted for {which}: the uncalibrated language model reads it (sds fit {gate})",)
        engine = PolicyEngine(
            contract,
            {name: _answers(name, contract, judgement, model) for name in contract.readings},
            judgement.thresholds if judgement and not uncalibrated else None,
            language_model=model,
            now_ms=now_ms,
            facts={"mode": MODE, "judgement": judgement.sha256 if judgement else None},
            notices=notices,
            close=close,
        )
        opened.pop_all()
    return engine


def _answers(name: str, contract: Contract, judgement: Judgement | None, model: LanguageModel) -> Answers:
    if judgement is not None and name in judgement.readers:
        reader = judgement.readers[name]
        return FittedAnswers(f"{reader.kind}@{reader.sha256[:12]}", reader)
    known = _calibration(name, judgement, model)
    return ModelReader(name, contract.readings[name], model.get(), known.temperature if known else 1.0)


def _calibration(name: str, judgement: Judgement | None, model: LanguageModel) -> ModelCalibration | None:
    """Return the calibration of the language model's answers; None without one for this very model."""
    return judgement.calibration(name, model.get().model) if judgement else None
