"""A model that someone else drives: texts and a grammar in, text out; no logits, so nothing is measured.

Nothing here knows decisions. A grammar is a text in one of three forms; which one a writer takes is its own affair.
Whether what comes back is in the language is not checked here: ask `sds.engines.text` to prove it at start-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Form = Literal["regex", "gbnf", "json_schema"]
Server = Literal["llama-server", "vllm", "sglang", "tgi", "ollama", "lmstudio", "openai"]
Processing = Literal["outlines_core", "llguidance", "xgrammar"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """One language as a text. `bytes_max`: of its longest sentence; `free_chars_max`: of these, free text."""

    form: Form
    text: str
    bytes_max: int
    free_chars_max: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """What was written, and how many tokens were read and written; with no count at hand an upper bound."""

    data: bytes
    tokens: int


class TextModel(Protocol):
    """One model. Belongs to one thread at a time; every method may raise `BackendError`."""

    @property
    def name(self) -> str:
        """What the record calls the model: for local weights with the start of their SHA-256; never a URL."""

    @property
    def form(self) -> Form:
        """The form of grammar it takes."""

    def write(self, system: str, user: str, grammar: Grammar, *, tokens_max: int, timeout_s: float) -> Completion:
        """Write one sentence, greedily, of at most `tokens_max` tokens; end within `timeout_s` whatever happens."""

    def count_tokens(self, text: str) -> int:
        """Return how many tokens a text costs, or its bytes where the tokenizer is out of reach."""

    def close(self) -> None: ...
