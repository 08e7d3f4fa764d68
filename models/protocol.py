"""The protocol of a local model: token ids in, logits out.

Nothing here knows decisions, envelopes or grammars. A backend holds `slots` prompts side by side and belongs to one
thread. It does not mask, sample, stop or schedule, and it does not know which of its tokens are permitted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Dtype = Literal["fp32", "bf16", "fp16", "int8", "int8-bf16", "int16"]
Library = str  # the name of a backend, one of `models.catalog.backends`

FOLDER_HINT = "name a GGUF file: only the library transformers runs folders"
CONTEXT_TOKENS = 4096  # of a slot, by default
SLOTS_MAX = 64
CARD_SLOTS_MAX = 256  # of transformers: on a GPU a pass of many rows costs little more than one of few
FORKS_MAX = 63  # of one backend, however many slots it has
_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,2}))?")


# Exceptions that end a program, a thread or a generator. Any other is a failure, even if it is no `Exception`, as a panic in Rust.
ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit)


class BackendError(Exception):
    """The model could not be loaded or run. The message is one line; `hint` names the remedy, if one is known."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


def cause_of(error: OSError) -> str:
    """Return the system's words for a failure, for the end of a message: `no such file or directory`."""
    return (error.strerror or "unknown cause").lower()


def extra_hint(extra: str, *, target: str = "install") -> str:
    """Return how to install an extra of this package, which is on no index yet. `target`: the Makefile's target for it."""
    return f"`make {target}` in the source folder; elsewhere pip install 'PATH_TO_THAT_FOLDER[{extra}]'"


def missing_package(error: ImportError) -> str:
    """Return the name of the package that is not installed; "" where an import failed for another reason.

    A dotted name is a missing module of an installed package.
    """
    name = (error.name or "") if isinstance(error, ModuleNotFoundError) else ""
    return "" if "." in name or name == "sds" else name


@contextmanager
def importing(missing: str, hint: str) -> Iterator[None]:
    """Import an option within the block. Raises BackendError with `missing` and `hint` where a package is not
    installed, else with the error of the import.
    """
    try:
        yield
    except ImportError as error:
        if missing_package(error):
            raise BackendError(missing, hint=hint) from error
        raise BackendError(f"an import failed: {' '.join(str(error).split())[:200]}") from error


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The control text around one turn: `before_system` system `between` user `after_user`, then the model answers.

    `thinking`: how the model is kept from thinking first, where its template would have it do so.
    """

    before_system: str
    between: str
    after_user: str
    thinking: str = ""


PLAIN_FRAME = ChatFrame("", "\n\n", "\n")


@dataclass(frozen=True, slots=True)
class Row:
    """One prompt's part of a pass: `tokens` are appended to `slot`, and the logits after the last `outputs` of them are
    wanted (0: none).
    """

    slot: int
    tokens: Sequence[int]
    outputs: int = 1


class Backend(Protocol):
    """A model with a cache for several prompts. Every method may raise `BackendError`; after one, go on with `prefill`.

    The prompts are in the slots 0 .. slots - 1. A fork has a slot of its own until it is dropped.
    """

    name: str  # in the record, before the fingerprint; the caller may extend it

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights file, 64 hexadecimal digits; of several files, end to end in the order of their names."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens_max(self) -> int:
        """The number of tokens that one slot can hold."""

    @property
    def slots(self) -> int: ...

    @property
    def pass_tokens_max(self) -> int:
        """The number of tokens, all rows together, that one pass reads; more are cut into several passes."""

    @property
    def rows_may_be_cut(self) -> bool:
        """Whether rows may be cut to fill a pass. If not, only a row longer than a pass is cut, and the rest of the
        batch does not show in the numbers of rows that are not cut.
        """

    @property
    def lookahead_tokens_max(self) -> int:
        """How many extra tokens, of forks of one slot, a pass reads for less than a pass of its own would cost; 0:
        every token costs its share.
        """

    @property
    def fragmented(self) -> bool:
        """Whether nothing new should begin until the prompts under way have ended and `defragment` was called.

        Ignoring it ends in a `BackendError` at some time, after which no slot holds anything.
        """

    def defragment(self) -> None:
        """Free what past prompts left behind. No prompt may be under way: each slot must be prefilled again."""

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        """Return the tokens of `text`. With `special=False` (for anything untrusted) none of them is a control token."""

    def piece(self, token: int) -> bytes:
        """Return the bytes that a token stands for; b"" for control tokens."""

    def frame(self) -> ChatFrame: ...

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections, in order.

        Every section is read in passes of its own, so where passes are cut never depends on what was cached: logits
        after equal sections are bit-equal, whatever ran before. Leading sections that the slot already holds stay, and
        cached sections are not read again.
        """

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        """Return whether `prefill` of these sections would read nothing, in any slot."""

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        """Append at least one token in one pass; return the logits after the last one, shape [vocab_size]."""

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        """Append the tokens of all rows in one pass, at most one row a slot; return [outputs, vocab_size] for each.

        With one slot, equal passes give bit-equal logits, whatever ran before. With more, the rest of the batch, the
        place in the cache and where a row was cut may show in the last digits; `batch_variance` measures by how much.
        """

    def fork(self, slot: int) -> int:
        """Return a new slot that holds what `slot` holds. Raises BackendError when no more can be made."""

    def drop(self, fork: int) -> None:
        """Free a fork's slot."""

    def close(self) -> None: ...


@runtime_checkable
class Replicable(Protocol):
    """A backend whose weights others can share."""

    def replica(self, *, threads: int, slots: int = 1) -> Backend:
        """Return another backend over the same weights, for another thread. Raises BackendError."""


def check_slots(slots: int, most: int = SLOTS_MAX) -> None:
    if not 1 <= slots <= most:
        raise BackendError(f"the number of slots must be 1 to {most}, got {slots}")


def check_device(name: str) -> int | None:
    """Return the number of the named GPU; None where none is named. Checks only the form: cpu, cuda, cuda:1."""
    found = _DEVICE.fullmatch(name)
    if found is None:
        raise BackendError(f"`{name}` is not a device", hint="cpu, cuda or cuda:NUMBER")
    return int(found[1]) if found[1] else None
