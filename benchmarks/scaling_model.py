"""How a decision by the model grows with its prompt and with the alternatives it has; one engine, everything in turn.

What is predicted comes from this machine's own rates (`floor.py`) and the tokens of the passes, seen once untimed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

from sds.benchmarks.lib.floor import Device, Recorded, device
from sds.benchmarks.lib.measuring import Say, summary
from sds.benchmarks.lib.weights import Weights
from sds.decoding.decoder import Mode, decode
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, envelope_of
from sds.models.protocol import Backend, prompt_sections

CASE_TOKENS = 100
MODES: tuple[Mode, Mode] = ("greedy", "exact")
DEADLINE_MS, TOKENS_MAX = 1, 2_048  # on a clock that stands still
STATIC = (
    "You decide claims of airline passengers. Compensate a long delay or a cancellation that the airline caused. "
    "Deny what extraordinary circumstances caused: severe weather, strikes, security risks. Escalate when in doubt."
)
CASE = "cancelled no, arrival delay 215, weather clear. Claim: my flight came four hours late and nobody told me why. "
KINDS = (
    DENY,
    "COMPENSATE",
    "REFUND_TICKET",
    "VOUCHER",
    "REBOOK",
    "UPGRADE",
    "MEAL",
    "HOTEL",
    "TAXI",
    "APOLOGY",
    "MILES",
    "LOUNGE",
    "BAGGAGE",
    "REPAY_FEE",
    "CREDIT",
)  # and ESCALATE


class Model:
    """One backend, a compiler, and what its passes must cost at this machine's rates."""

    def __init__(self, backend: Backend, rates: Device, size: tuple[int, int]) -> None:
        self.backend, self._recorded = backend, Recorded(backend)
        self._rates, self._size = rates, size
        self._compiler, self._refs = GrammarCompiler(backend), count()
        closing = backend.tokenize(backend.frame().after_user.encode(), special=True)
        self._static, self._closing = prompt_sections(backend, STATIC, CASE)[0], closing
        self._case = backend.tokenize(CASE.encode(), special=False)

    def prompt(self, case_tokens: int) -> list[list[int]]:
        """Return a prompt of which so many tokens are a case's own."""
        own = case_tokens - len(self._closing)
        return [self._static, (self._case * (own // len(self._case) + 1))[:own] + self._closing]

    def decide(self, sections: Sequence[Sequence[int]], envelope: DecisionEnvelope, mode: Mode = "greedy") -> float:
        """Return what one decision took, in milliseconds; its context reference is new."""
        self._recorded.clear()
        began = time.perf_counter()
        matcher = self._compiler.matcher(envelope, f"{next(self._refs):064x}")
        decode(
            cast("Backend", self._recorded),
            sections,
            matcher,
            tokens_max=TOKENS_MAX,
            now_ms=lambda: 0,
            deadline_ms=DEADLINE_MS,
            mode=mode,
        )
        return (time.perf_counter() - began) * 1000

    def predict(
        self, sections: Sequence[Sequence[int]], envelope: DecisionEnvelope, mode: Mode = "greedy"
    ) -> dict[str, Any]:
        """Decide once untimed; return the tokens of the passes and the least these can take."""
        self.decide(sections, envelope, mode)
        tokens = self._recorded.tokens
        least = sum(self._rates.pass_ms(*self._size, of_pass) for of_pass in tokens)
        return {"tokens_of_passes": tokens, "predicted_ms": round(least, 2)}


@contextmanager
def opened(weights: Weights) -> Iterator[Model]:
    backend = weights.open()
    try:
        yield Model(backend, device(weights), weights.size())
    finally:
        backend.close()


def prompt_lengths(model: Model, lengths: Sequence[int], n: int, say: Say) -> list[dict[str, Any]]:
    """Return one row a length of the case's own text; a denial or an escalation: one choice."""
    envelope = _envelope(2)
    prompts = [model.prompt(length) for length in lengths]
    rows = [{"case_tokens": length} | model.predict(p, envelope) for length, p in zip(lengths, prompts, strict=True)]
    for row in rows:
        say(f"a case of {row['case_tokens']} tokens: predicted {row['predicted_ms']} ms")
    took = [[model.decide(prompt, envelope) for prompt in prompts] for _ in range(n)]
    return [row | {"decision_ms": summary(ms)} for row, ms in zip(rows, zip(*took, strict=True), strict=True)]


def alternatives(model: Model, sizes: Sequence[int], n: int, say: Say) -> list[dict[str, Any]]:
    """Return one row a number of kinds, greedy and exact; the kind is the only choice."""
    prompt = model.prompt(CASE_TOKENS)
    rows: list[dict[str, Any]] = []
    for size in sizes:
        envelope = _envelope(size)
        found = {mode: model.predict(prompt, envelope, mode) for mode in MODES}
        said = ", ".join(f"{mode} {of_mode['predicted_ms']} ms" for mode, of_mode in found.items())
        say(f"{size} kinds: predicted {said}")
        took = [[model.decide(prompt, envelope, mode) for mode in MODES] for _ in range(n)]
        for of_mode, ms in zip(found.values(), zip(*took, strict=True), strict=True):
            of_mode["decision_ms"] = summary(ms)
        over = summary([exact / greedy for greedy, exact in took])["p50"]
        rows.append({"kinds": size, "exact_over_greedy": over, "greedy": found["greedy"], "exact": found["exact"]})
    return rows


def _envelope(kinds: int) -> DecisionEnvelope:
    return envelope_of([KindBound(name, ("REVIEWED",)) for name in KINDS[: kinds - 1]])
