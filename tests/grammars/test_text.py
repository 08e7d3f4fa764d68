"""A bounded text alone: along every matcher of permitted tokens, and only along those, it stays within the language."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.grammars.tokens.text import TextTokens
from sds.grammars.tokens.tokenizer import TokenizerIndex
from sds.kernel.errors import LanguageError
from tests.grammars.tokenizers import Scraps, Tokens, of_gguf
from tests.scale import scale, seeded

SCRAPS = ("bc", " d", "a word", 'e"', '"x', '"}', "\\n", "\u00e9", 'a"b', "c\n", '"},')
WORDS = Tokens(Scraps(SCRAPS, parts=False))
PIECES = [WORDS.piece(token) for token in range(WORDS.vocab_size)]
TEXT = TextTokens(TokenizerIndex(WORDS))
CHARACTERS = frozenset(bytes([byte]) for byte in range(32, 127)) - {b'"', b"\\"}


@pytest.mark.parametrize(
    ("chars_left", "longer"),
    [(0, set()), (1, set()), (2, {b"bc", b" d"}), (5, {b"bc", b" d"}), (6, {b"bc", b" d", b"a word"})],
)
def test_a_token_is_permitted_by_what_it_spells_and_what_is_left(chars_left: int, longer: set[bytes]) -> None:
    permitted = [PIECES[token] for token in TEXT.allowed(chars_left)]
    assert [b'"}', *sorted((CHARACTERS if chars_left else set()) | longer)] == [permitted[0], *sorted(permitted[1:])]


def test_the_tokenizers_own_end_ends_the_text() -> None:
    assert [("a", False), ("bc", False), ("", True), ("}", False)] == [
        TEXT.read(PIECES.index(piece)) for piece in (b"a", b"bc", b'"}', b"}")
    ]
    alone = TextTokens(TokenizerIndex(Tokens(Scraps((), parts=False))))
    assert ("", True) == alone.read(ord('"'))


@pytest.mark.parametrize("piece", [b"", b"\n", b'"', b'"x', b'e"', b"\xc3", b"\xc3\xa9", b"\\"])
def test_a_token_that_is_not_permitted_is_refused(piece: bytes) -> None:
    with pytest.raises(LanguageError, match="the token is not allowed in a text") as refused:
        TEXT.read(PIECES.index(piece))
    assert "MASK_FAILED" == refused.value.reason_code


def test_random_tokens_of_a_real_vocabulary_end_within_the_limit(tiny_path: Callable[[int], Path]) -> None:
    rng = seeded(4)
    with of_gguf(tiny_path(1)) as words:
        text = TextTokens(TokenizerIndex(words))
        for _ in range(scale(40, 5000)):
            longest = rng.randrange(60)
            written, ended = "", False
            while not ended:
                added, ended = text.read(int(rng.choice(text.allowed(longest - len(written)))))
                written += added
            assert re.fullmatch(rf"[ !#-\[\]-~]{{0,{longest}}}", written)
