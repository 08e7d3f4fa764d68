"""Tokenizers that a grammar must cope with: real ones, and small ones that do what some real ones do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import llama_cpp

from sds.models.llamacpp.weights import load_gguf
from sds.models.tokenizer.tokenizer import ModelTokenizer, Tokenizer

_SCRAPS = (
    *('","', '":"', '":', '":-', '{"', '":{"', '":{},"', '},"', "},", ',"', '"}', "_code", "_ref", "action", "params"),
    *("reason", "context", "DENY", "ESCALATE", "HUMAN", "_REVIEW", "PAY", "PAY_", "LATER", "WEATHER", "CREW", "amount"),
    *("_extra", "A0", "A", "CREWS", "days", " the", "late"),
)
_JOINED = ("12", "00", "000", ".0", "0,", '0,"', "0}", '5},"', ":1", '":2', "99", "-1", '-12"')
_PARTS = re.compile(rb"[0-9]{1,3}|[A-Z]+|[a-z]+|[^0-9A-Za-z]+")


class Tokens(ModelTokenizer):
    """A tokenizer as a compiled grammar asks for it, and as llguidance does."""

    bos, adds_bos = -1, False

    def __init__(self, words: Tokenizer) -> None:
        super().__init__(words)
        self.size = words.size
        self.eos = words.eos

    def encode(self, text: bytes, *, special: bool) -> list[int]:
        return self.words.encode(text, special=special)

    def spelling(self, token: int) -> bytes:
        return self.words.spelling(token)

    def is_control(self, token: int) -> bool:
        return self.words.is_control(token)


class Scraps:
    """Every byte, some longer scraps, and one control token; a text is cut greedily, the longest scrap first."""

    bos, adds_bos = -1, False

    def __init__(self, scraps: tuple[str, ...], *, parts: bool) -> None:
        self._spelled = [bytes([byte]) for byte in range(256)] + [scrap.encode() for scrap in scraps]
        self._tokens = {scrap: token for token, scrap in enumerate(self._spelled)}
        self._longest = max(map(len, self._spelled))
        self._parts = parts
        self.eos = len(self._spelled)
        self.size = self.eos + 1

    def encode(self, text: bytes, *, special: bool) -> list[int]:
        parts = _PARTS.findall(text) if self._parts else [text]
        return [token for part in parts for token in self._greedy(part)]

    def _greedy(self, part: bytes) -> Iterator[int]:
        while part:
            size = next(size for size in range(self._longest, 0, -1) if part[:size] in self._tokens)
            scrap, part = part[:size], part[size:]
            yield self._tokens[scrap]

    def spelling(self, token: int) -> bytes:
        return b"<end>" if token == self.eos else self._spelled[token]

    def is_control(self, token: int) -> bool:
        return token == self.eos


def in_threes() -> Tokens:
    """Return a tokenizer that cuts digits in threes from the left and texts into words, as many newer ones do."""
    digits = tuple(f"{n:0{width}}" for width in (2, 3) for n in range(10**width))
    return Tokens(Scraps((*_SCRAPS, *digits), parts=True))


def joined() -> Tokens:
    """Return a tokenizer that joins digits with what stands beside them, and never twice the same."""
    return Tokens(Scraps((*_SCRAPS, *_JOINED), parts=False))


@contextmanager
def of_gguf(path: Path) -> Iterator[Tokens]:
    model, words = load_gguf(path, vocab_only=True)
    try:
        yield Tokens(words)
    finally:
        words.release()
        llama_cpp.llama_model_free(model)
