"""What decides in user space, seen from the stream: a packet goes in, proposal bytes and what was measured come out.

What an engine may have besides has a protocol of its own each. The last is for other tasks that a local model does over a packet's
prompt while no decision waits, such as writing a rationale (`RunsBackground`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding

if TYPE_CHECKING:  # numpy is loaded with a model
    from sds.engines.request import Passes
    from sds.grammars.tokens.tokenizer import TokenizerIndex
    from sds.kernel.flow.dispatch import Log
    from sds.models.protocol import Backend


class Engine(Protocol):
    """One model, however it is driven. Whatever `propose` returns is only a claim: the kernel judges it."""

    @property
    def model(self) -> str:
        """What the record calls the model that answers."""

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet before it expires. Raises ModelError; never returns half a decision."""

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text costs, or an upper bound where the tokenizer is out of reach."""

    def close(self) -> None: ...


@runtime_checkable
class Explains(Protocol):
    """What an engine may have besides: it writes a rationale after the decision, where a contract asks for one."""

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        r"""Return why `data`, this packet's accepted proposal, was decided: printable ASCII without `"` and `\`.

        Called in a thread of its own while other packets are decided, which it may not hold up for more than one pass
        of the model. `deadline_ms`: absolute. Raises ModelError.
        """


@runtime_checkable
class Cancels(Protocol):
    """What an engine may have besides: it lets go of a decision that nobody waits for any more."""

    def cancel(self, dfid: str) -> None:
        """Have `propose` of that flow's packet raise soon, from whatever thread. Nothing happens where it does not run."""


def let_go(engine: object, dfid: str) -> None:
    """Have an engine let go of a flow's packet, if it can."""
    if isinstance(engine, Cancels):
        engine.cancel(dfid)


class OnDemand(Protocol):
    """A language model that is opened when it is first asked."""

    def get(self) -> Engine:
        """Return it, opened. Raises ModelError."""


@runtime_checkable
class HasLanguageModel(Protocol):
    """What an engine has besides that decides by a policy: the language model beside it."""

    @property
    def language_model(self) -> OnDemand: ...


@runtime_checkable
class Checks(Protocol):
    """What an engine may have besides: it says before the first event what its model cannot decide."""

    def check_contract(self, contract: Contract) -> None:
        """Raise ModelError where `sds models check` says no. Cheap: a contract is looked at once."""


@runtime_checkable
class Proves(Protocol):
    """What an engine may have besides: it can be asked again whether its model is constrained, which may be another by now."""

    def prove(self, deadline_ms: int) -> None:
        """Raise ModelError unless it is, until an absolute time."""


@runtime_checkable
class Logs(Protocol):
    """What an engine may have besides: it says what becomes of it, in the log of the gate it decides for."""

    def log_to(self, log: Log) -> None: ...


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
