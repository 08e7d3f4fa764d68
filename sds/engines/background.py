"""What else a local model may do with a packet's prompt while no decision waits for it, such as writing a rationale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

from sds.engines.request import Passes
from sds.grammars.tokens.tokenizer import TokenizerIndex
from sds.kernel.decision.packet import DecisionPacket
from sds.models.protocol import Backend

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a background task goes on from: `sections`, to be read in `slot` of `backend`. `index`: of its tokenizer."""

    backend: Backend
    slot: int
    sections: Sequence[Sequence[int]]
    index: TokenizerIndex


class BackgroundTask(Protocol[T_co]):
    """Passes that may be given up between any two, and are then asked for anew: what it has it keeps itself."""

    def __call__(self, prompt: Prompt) -> Passes[T_co]:
        """Begin with `prefill` of all sections but the last, in the worker's thread. Raises ModelError."""


@runtime_checkable
class RunsBackground(Protocol):
    """What a local engine has besides: it runs other tasks over a packet's prompt while no decision waits."""

    def run_background(self, packet: DecisionPacket, task: BackgroundTask[T], *, deadline_ms: int) -> T:
        """Return what the task returns; no decision waits for more than one of its passes. Raises ModelError."""
