"""The outcomes of each engine in `sds bench peers`, and how many times quicker ours was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sds.benchmarks.lib.measuring import summary
from sds.benchmarks.lib.packets import REFUND, amount_is_shown, permits
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, parse_proposal

KINDS = ("fixed", "digits")
DECISIONS_MIN = 8  # an engine is asked at least so many packets of a kind
PATIENCE_S = 30.0  # after so long on a kind it is asked no more than that


@dataclass(frozen=True, slots=True)
class Task:
    """One packet, and the request about it that every peer gets."""

    packet: DecisionPacket
    request: dict[str, Any]

    def permits(self, text: str) -> bool:
        return permits(self.packet, text.encode("utf-8", "replace"))


@dataclass
class PeerOutcomes:
    """The outcomes of one engine for the packets of one kind; times in milliseconds."""

    ms: list[float] = field(default_factory=list)
    refund_ms: list[float] = field(default_factory=list)
    compile_ms: list[float] = field(default_factory=list)
    decided: Counter[str] = field(default_factory=Counter)
    texts: list[str | None] = field(default_factory=list)
    each_ms: list[float | None] = field(default_factory=list)  # None: an error
    passes: Counter[int] = field(default_factory=Counter)
    amount_shown: int = 0
    violations: int = 0
    errors: int = 0
    took_s: float = 0.0
    first_error: str = ""

    def add(self, task: Task, answer: dict[str, Any], took_s: float) -> None:
        self.took_s += took_s
        if "error" in answer:
            self.errors += 1
            self.first_error = self.first_error or answer["error"]
            self.texts.append(None)
            self.each_ms.append(None)
            return
        self.ms.append(answer["ms"])
        self.each_ms.append(answer["ms"])
        self.passes[answer.get("passes", 0)] += 1
        self.amount_shown += amount_is_shown(task.packet, answer["text"].encode())
        if answer.get("compile_ms") is not None:
            self.compile_ms.append(answer["compile_ms"])
        self.texts.append(answer["text"])
        if task.permits(answer["text"]):
            action = action_of(answer["text"])
            self.decided[action] += 1
            self.refund_ms += [answer["ms"]] if action == REFUND else []
        else:
            self.violations += 1

    @property
    def ms_p50(self) -> float | None:
        return summary(self.ms)["p50"] if self.ms else None

    @property
    def is_enough(self) -> bool:
        return len(self.texts) >= DECISIONS_MIN and self.took_s > PATIENCE_S


def action_of(text: str) -> str:
    proposal = parse_proposal(text.encode())
    return proposal.action if isinstance(proposal, Proposal) else ""


def speedups(
    theirs: Mapping[str, Mapping[str, PeerOutcomes]],
    ours: Mapping[str, PeerOutcomes],
    same_type: Mapping[str, PeerOutcomes],
    on_llamacpp: Mapping[str, PeerOutcomes],
) -> dict[str, float | None]:
    """Return how many times quicker ours was, by the medians over the packets that both decided: the least ratio over all
    peers, violations or not, and over those of a name.
    """
    found: dict[str, float | None] = {}
    for name, prefix, mine in (
        ("over_fastest", "", ours),
        ("over_fastest_same_type", "", same_type),
        ("over_fastest_on_llamacpp", "", on_llamacpp),
        ("over_outlines_llamacpp", "outlines-llamacpp", ours),
        ("over_llamacpp_grammar", "llamacpp-grammar", ours),
    ):
        digits = f"digits_{name}".removesuffix("_over_fastest").replace("_over_fastest_", "_")
        for kind, key in (("fixed", name), ("digits", digits)):
            ratios = [_ratio(of[kind], mine[kind]) for peer, of in theirs.items() if peer.startswith(prefix)]
            found[f"speedup_{key}"] = min((ratio for ratio in ratios if ratio is not None), default=None)
    return found


def _ratio(peer: PeerOutcomes, ours: PeerOutcomes) -> float | None:
    pairs = [(a, b) for a, b in zip(peer.each_ms, ours.each_ms, strict=False) if a is not None and b is not None]
    return round(float(np.divide(*np.median(pairs, axis=0))), 2) if pairs else None
