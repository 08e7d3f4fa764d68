"""The protocol of a model that a library or server drives: texts and a grammar in, text out, without logits or measurements.

Nothing here knows decisions. A grammar is a text in one of three forms; each writer takes one of them. Whether the
result is in the language is not checked here: `sds.engines.text` makes the writer prove it at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Form = Literal["regex", "gbnf", "json_schema"]
Server = Literal["llama-server", "vllm", "sglang", "tgi", "ollama", "lmstudio", "openai"]
Processing = Literal["outlines_core", "llguidance", "xgrammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """One language as a text. `bytes_max`: of its longest sentence; `free_chars_max`: the part of these that is free text."""

    form: Form
    text: str
    bytes_max: int
    free_chars_max: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The written text, and how many tokens were read and written; an upper bound where there is no count."""

    data: bytes
    tokens: int


class TextModel(Protocol):
    """One model. Belongs to one thread at a time. Every method may raise `BackendError`."""

    @property
    def name(self) -> str:
        """The name in the record: for local weights with the start of their SHA-256; never a URL."""

    @property
    def form(self) -> Form:
        """The form of grammar that it takes."""

    def write(self, system: str, user: str, grammar: Grammar, *, tokens_max: int, timeout_s: float) -> Completion:
        """Write one sentence, greedily, of at most `tokens_max` tokens, and always end within `timeout_s`."""

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text has, or its bytes where the tokenizer is out of reach."""

    def close(self) -> None: ...
