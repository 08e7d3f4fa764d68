"""What a decision must cost by its passes alone, before anything of it is timed: ours, and a pass for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sds.benchmarks.lib.weights import Vocabulary
from sds.benchmarks.peer.process import PeerProcess

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The shapes of the passes of one decision; what each shape costs is asked of a process of ours.

    `passes`: how many tokens each of ours reads, what is read ahead among them.
    """

    passes: list[int]
    tokens: list[int]
    read_tokens: int
    decision_tokens: int

    def ms(self, process: PeerProcess) -> dict[str, float]:
        """Return what ours must take, and an engine that runs a pass for every token, in the library of this process."""
        *ours, read, single = (self._pass_ms(process, shape) for shape in (*self.passes, self.read_tokens, 1))
        return {"ours": round(sum(ours), 2), "token_by_token": round(read + self.decision_tokens * single, 2)}

    def _pass_ms(self, process: PeerProcess, tokens: int) -> float:
        """Return what one pass of so many tokens costs there, behind the rest of the prompt."""
        asked = {"tokens": self.tokens, "pass_tokens": min(tokens, len(self.tokens) - 1)}
        return float(process.ask(asked, timeout_s=TIMEOUT_S)["pass_ms"])


def predict(request: dict[str, Any], answer: dict[str, Any], words: Vocabulary) -> Prediction:
    """`answer`: of our own engine to this request, with its shape."""
    return Prediction(
        answer["tokens_of_passes"],
        request["tokens"],
        len(request["tokens"]) - request["tokens_kept"],
        len(words.tokenize(answer["text"].encode(), special=False)),
    )
