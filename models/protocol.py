"""What the stream asks of a local model: token ids in, logits out.

Nothing here knows decisions, envelopes or grammars. A backend has one context and one cache: it belongs to one thread.
It does not mask, sample or stop; it does not know which of its tokens are permitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from llguidance import LLTokenizer
    from numpy.typing import NDArray

Dtype = Literal["fp32", "bf16", "fp16"]
Library = Literal["llamacpp", "transformers"]


class BackendError(Exception):
    """The model could not be loaded or run. One line; `hint` says the mend where one is known."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """The control text around one turn: `before_system` system `between` user `after_user`, then the model speaks."""

    before_system: str
    between: str
    after_user: str


PLAIN_FRAME = ChatFrame("", "\n\n", "\n")


class Backend(Protocol):
    """A model with one cache. Every method may raise `BackendError`; after one, go on with `begin`."""

    @property
    def name(self) -> str: ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the weights file, 64 hexadecimal digits; of several, end to end in the order of their names."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def context_tokens_max(self) -> int: ...

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        """Return the tokens of `text`. With `special=False` (anything untrusted) none of them is a control token."""

    def piece(self, token: int) -> bytes:
        """Return the bytes a token stands for; empty for control tokens."""

    def frame(self) -> ChatFrame: ...

    def begin(self, sections: Sequence[Sequence[int]]) -> None:
        """Make the cache hold exactly these sections, in order.

        Every section is decoded in batches of its own, so where batches are cut never depends on what was cached:
        logits after equal sections are bit-equal, whatever ran before. Leading sections already held are kept.
        """

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Append at least one token in one batch; return the logits after the last one, shape [vocab_size]."""

    def grammar_tokenizer(self) -> LLTokenizer:
        """Return the tokenizer for masks; after `close()` a mask over it fails."""

    def close(self) -> None: ...


def shared_sections(wanted: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> int:
    """Return how many leading sections two prompts share: those a cache may keep."""
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(wanted, held, strict=False))
    return sum(1 for _ in shared)


def prompt_sections(backend: Backend, static: str, *dynamic: str) -> list[list[int]]:
    """Return the prompt of one turn, cut where a change of one text leaves the sections before it as they were.

    First section: the frame's opening, `static` and the turn to the user; then one section for each dynamic text,
    the last with the frame's closing. Only the frame may hold control tokens; every text is content.
    """
    frame = backend.frame()

    def control(text: str) -> list[int]:
        return backend.tokenize(text.encode(), special=True) if text else []

    def content(text: str) -> list[int]:
        return backend.tokenize(text.encode("utf-8", "replace"), special=False) if text else []

    sections = [control(frame.before_system) + content(static) + control(frame.between)]
    sections += [content(text) for text in dynamic]
    sections[-1] += control(frame.after_user)
    return [section for section in sections if section]
