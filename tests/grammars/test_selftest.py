"""A mask that does not constrain is found at start-up."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sds.grammars.tokens import selftest
from sds.grammars.tokens.digits import DigitMatcher
from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher
from sds.grammars.tokens.selftest import check_mask_constrains
from sds.kernel.errors import LanguageError
from tests.grammars.tokenizers import Tokens, in_threes, joined


@pytest.mark.parametrize("made", [in_threes, joined])
def test_small_words_are_alive(made: Callable[[], Tokens]) -> None:
    check_mask_constrains(made())


def test_real_words_are_alive(embedded: Tokens) -> None:
    check_mask_constrains(embedded)


def everything_reachable(*_: object) -> bool:
    return True


def accept_anything(matcher: TokenMatcher, token: int) -> None:
    matcher.tokens.append(token)


def refuses(words: Tokens, message: str) -> None:
    with pytest.raises(LanguageError) as caught:
        check_mask_constrains(words)
    assert "MASK_FAILED" == caught.value.reason_code
    assert message in str(caught.value)


def test_a_matcher_that_accepts_every_token_is_found(embedded: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenMatcher, "accept", accept_anything)
    refuses(embedded, "the grammar mask does not work: it accepted a forbidden token")


def test_numbers_without_bounds_are_found(embedded: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DigitMatcher, "_reaches", everything_reachable)
    refuses(embedded, "the grammar mask does not work: it let a decision leave the language")


def test_a_choice_point_that_offers_every_token_is_found(embedded: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    every = np.arange(embedded.vocab_size)
    monkeypatch.setattr(TokenMatcher, "choice_point", lambda _: ChoicePoint("action", every, (), 0, finite=True))
    refuses(embedded, "the language does not permit this token")


def test_pieces_that_are_not_what_was_written_are_found(embedded: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    check, other = selftest._check_stays_within, in_threes()
    other.piece = lambda token: b"x"  # type: ignore[method-assign]
    monkeypatch.setattr(
        selftest,
        "_check_stays_within",
        lambda matcher, _, decisions, preference: check(matcher, other, decisions, preference),
    )
    refuses(embedded, "the grammar mask does not work: it did not end where the decision ends")
