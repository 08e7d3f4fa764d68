"""What the stream needs of an engine: a packet goes in, proposal bytes and measurements come out.

Each further ability of an engine has a protocol of its own. `RunsBackground` is for tasks over a packet's prompt that a
local model does while no decision waits, such as writing a rationale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar, runtime_checkable

from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding

if TYPE_CHECKING:  # numpy is loaded with a model
    from sds.engines.breaker import Breaker
    from sds.engines.request import Passes
    from sds.grammars.tokens.tokenizer import TokenizerIndex
    from sds.kernel.flow.dispatch import Log
    from sds.models.protocol import Backend


class Engine(Protocol):
    """One model, however it is driven. What `propose` returns is only a claim: the kernel judges it."""

    @property
    def model(self) -> str:
        """The name of the model in the record."""

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet before it expires. Raises ModelError; never returns half a decision."""

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text has, or an upper bound where the tokenizer is out of reach."""

    def close(self) -> None: ...


@runtime_checkable
class Explains(Protocol):
    """An engine that writes a rationale after the decision, where a contract asks for one."""

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        r"""Return why `data`, this packet's accepted proposal, was decided: printable ASCII without `"` and `\`.

        Runs in a thread of its own while other packets are decided; these may wait for at most one pass of the model.
        `deadline_ms`: absolute. Raises ModelError.
        """


@runtime_checkable
class Cancels(Protocol):
    """An engine that can stop a decision that nobody waits for any more."""

    def cancel(self, dfid: str) -> None:
        """Make `propose` for that flow's packet raise soon. Callable from any thread; without effect where it does not run."""


def let_go(engine: object, dfid: str) -> None:
    """Cancel a flow's decision where the engine can."""
    if isinstance(engine, Cancels):
        engine.cancel(dfid)


class OnDemand(Protocol):
    """A language model that is opened on its first use. `breaker`: guards it."""

    @property
    def breaker(self) -> Breaker: ...

    def get(self) -> Engine:
        """Return the engine, which the first call opens. Raises ModelError."""


@runtime_checkable
class HasLanguageModel(Protocol):
    """An engine that decides by a policy, with a language model beside it."""

    @property
    def language_model(self) -> OnDemand: ...


def language_model_of(engine: object) -> OnDemand | None:
    """Return the language model beside a policy; None where no policy decides."""
    return engine.language_model if isinstance(engine, HasLanguageModel) else None


@runtime_checkable
class Checks(Protocol):
    """An engine that says before the first event what its model cannot decide."""

    def check_contract(self, contract: Contract) -> None:
        """Raise ModelError where `sds models check` would refuse. Cheap: an engine checks each contract once."""


@runtime_checkable
class Proves(Protocol):
    """An engine that can prove again that its model is constrained, since the model behind it may change."""

    def prove(self, deadline_ms: int) -> None:
        """Raise ModelError unless the model is constrained. `deadline_ms`: absolute."""


@runtime_checkable
class Logs(Protocol):
    """An engine that writes its events to the log of the gate it decides for."""

    def log_to(self, log: Log) -> None: ...


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a background task: `sections`, to be read in `slot` of `backend`. `index`: of the backend's tokenizer."""

    backend: Backend
    slot: int
    sections: Sequence[Sequence[int]]
    index: TokenizerIndex


class BackgroundTask(Protocol[T_co]):
    """A generator of passes that may be stopped between any two and is then called again: it keeps its own progress."""

    def __call__(self, prompt: Prompt) -> Passes[T_co]:
        """Begin with `prefill` of all sections but the last. Runs in the worker's thread. Raises ModelError."""


@runtime_checkable
class RunsBackground(Protocol):
    """A local engine that runs other tasks over a packet's prompt while no decision waits."""

    def run_background(self, packet: DecisionPacket, task: BackgroundTask[T], *, deadline_ms: int) -> T:
        """Return what the task returns. A decision waits for at most one of its passes. Raises ModelError."""
