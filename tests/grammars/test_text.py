"""A bounded text alone: along every walk of permitted tokens, and only along those, it stays within the language."""

from __future__ import annotations

import re

import pytest

from sds.grammars.text import TextTokens
from sds.kernel.errors import LanguageError
from tests.hostile import Vocabulary
from tests.scale import scale, seeded

PIECES = [
    b"",
    b"a",
    b"bc",
    b" d",
    b'e"',
    b'"',
    b'"}',
    b'f"}',
    b'"x',
    b"\\n",
    b"\n",
    b"\xc3\xa9",
    b"\xc3",
    b'a"b',
    b"}",
    b'"},',
]
TEXT = TextTokens(PIECES)


@pytest.mark.parametrize(
    ("chars_left", "permitted"),
    [
        (0, [b'"', b'"}']),
        (1, [b"a", b'e"', b'"', b'"}', b'f"}', b"}"]),
        (2, [b"a", b"bc", b" d", b'e"', b'"', b'"}', b'f"}', b"}"]),
    ],
)
def test_a_token_is_permitted_by_what_it_spells_and_what_is_left(chars_left: int, permitted: list[bytes]) -> None:
    assert permitted == [PIECES[token] for token in TEXT.allowed(chars_left)]


def test_the_quote_ends_the_text() -> None:
    assert [("a", False), ("e", True), ("", True), ("f", True), ("}", False)] == [
        TEXT.read(PIECES.index(piece)) for piece in (b"a", b'e"', b'"}', b'f"}', b"}")
    ]


@pytest.mark.parametrize("piece", [b"", b"\n", b'"x', b"\xc3"])
def test_a_token_that_is_not_permitted_is_refused(piece: bytes) -> None:
    with pytest.raises(LanguageError, match="the token is not one of a text"):
        TEXT.read(PIECES.index(piece))


@pytest.mark.parametrize("pieces", [[], [b"a", b" b"], [b'"x']], ids=str)
def test_a_vocabulary_that_cannot_end_a_text_is_refused(pieces: list[bytes]) -> None:
    with pytest.raises(LanguageError, match="no token of this vocabulary ends a text"):
        TextTokens(pieces)


def test_a_text_that_no_token_ends_without_a_character_is_refused_when_none_is_left() -> None:
    with pytest.raises(LanguageError, match="the text cannot be ended here"):
        TextTokens([b"a", b'a"']).allowed(0)


def test_random_walks_over_a_real_vocabulary_end_within_the_limit(vocabulary: Vocabulary) -> None:
    pieces = (token.replace("\u0120", " ").encode() for token in vocabulary.lists["tokens"])
    text, rng = TextTokens(pieces), seeded(4)
    for _ in range(scale(100, 5000)):
        longest = rng.randrange(60)
        written, ended = "", False
        while not ended:
            added, ended = text.read(int(rng.choice(text.allowed(longest - len(written)))))
            written += added
        assert re.fullmatch(rf"[ !#-\[\]-~]{{0,{longest}}}", written)
