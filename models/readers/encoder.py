"""Reads a text with a fitted encoder: tokens, one run, probabilities, and whether the text is familiar.

The text is untrusted: control tokens in it are read as letters, and only the first characters of a long text are used.
A text that was not read to its end is not familiar.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from sds.models.protocol import ENDINGS
from sds.models.readers import spelling
from sds.models.readers.artifact import MODEL, SPELLING, TOKENIZER, Artifact, Familiarity, Temperature
from sds.models.readers.calibration import softened
from sds.models.readers.protocol import NO_FIELDS, NO_READINGS, Fields, ReaderError, Reading, Readings
from sds.models.readers.session import Session

CHARACTERS_A_TOKEN = 8  # more than any language needs on average; characters beyond are not tokenized
_INNER = "##"  # in BERT's vocabularies, before a token that continues a word
_CONTROLS = 2  # the token before a text and the one after it


class TextTokenizer:
    """Turns a text into the tokens of one run, control tokens included. Raises ReaderError."""

    def __init__(self, files: Mapping[str, bytes], tokens_max: int) -> None:
        """`files`: a reader's tokenizer.json and, if it has one, its spelling.json."""
        try:
            self._tokenizer = Tokenizer.from_str(files[TOKENIZER].decode())
        except Exception as error:
            raise ReaderError("a tokenizer.json cannot be read") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # "[SEP]" in a text is five characters
        self._spelling = spelling.read(files[SPELLING], self.vocabulary) if SPELLING in files else None
        self._tokens_max = tokens_max
        self._characters_max = tokens_max * CHARACTERS_A_TOKEN

    @property
    def vocabulary(self) -> set[str]:
        """The words that have a token of their own, in lower case."""
        return {token.lower() for token in self._tokenizer.get_vocab() if not token.startswith(_INNER)}

    def encode(self, text: str) -> tuple[list[int], bool]:
        """Return the tokens, and whether they hold the whole text."""
        head = text[: self._characters_max].encode("utf-8", "replace").decode()
        if self._spelling is not None:
            head = self._spelling.mended(head)
        try:
            tokens: list[int] = self._tokenizer.encode(head).ids
        except ENDINGS:
            raise
        except BaseException as error:  # a panic in Rust is no `Exception`
            raise ReaderError("a text cannot be tokenized") from error
        if len(tokens) <= self._tokens_max:
            return tokens, len(text) <= self._characters_max
        return [*tokens[: self._tokens_max - 1], tokens[-1]], False


class TextReader:
    """`kind`: `encoder`, tuned as a whole, or `head`, whose encoder is untuned."""

    def __init__(self, artifact: Artifact) -> None:
        manifest = artifact.manifest
        if not isinstance(manifest.calibration, Temperature) or manifest.familiarity is None:
            raise ReaderError("a reader.json does not describe a reader of texts")
        self.kind: str = manifest.kind
        self.values: tuple[str, ...] = manifest.values
        self.sha256 = artifact.sha256
        self._temperature = manifest.calibration.temperature
        self._familiarity = manifest.familiarity
        self._tokenizer = TextTokenizer(artifact.files, manifest.tokens_max)
        self._session = Session(artifact.files[MODEL])

    def read(self, text: str, fields: Fields = NO_FIELDS, readings: Readings = NO_READINGS) -> Reading:  # noqa: ARG002 — a text is all that it reads
        tokens, whole = self._tokenizer.encode(text)
        logits, distance = self._session.run(["logits", "distance"], {"tokens": np.array(tokens, np.int64)})
        if logits.shape != (len(self.values),):
            raise ReaderError("a model and its reader.json differ in the number of values", hint="fit it again")
        shares = softened(logits.astype(np.float64), self._temperature)
        known = whole and len(tokens) > _CONTROLS and is_familiar(self._familiarity, text, distance)
        return Reading(dict(zip(self.values, shares.tolist(), strict=True)), known)

    def close(self) -> None:
        self._session.close()


def is_familiar(familiarity: Familiarity, text: str, distance: NDArray[np.float32]) -> bool:
    return (
        float(distance.item()) <= familiarity.distance_max
        and strange_share(text, familiarity.letters) <= familiarity.strange_max
    )


def strange_share(text: str, letters: str) -> float:
    """Return the share of a text's characters, without spaces, that are not in `letters`; 1 for an empty text."""
    seen = [letter for letter in plain_letters(text) if not letter.isspace()]
    return sum(letter not in letters for letter in seen) / len(seen) if seen else 1.0


def plain_letters(text: str) -> str:
    """Return the text in lower case and without accents, as the tokenizer reads it."""
    apart = unicodedata.normalize("NFD", text.lower())
    return "".join(letter for letter in apart if unicodedata.category(letter) != "Mn")
