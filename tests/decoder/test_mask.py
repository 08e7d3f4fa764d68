from __future__ import annotations

import numpy as np
import pytest

from sds.grammars.language import language
from sds.grammars.mask import Mask
from sds.kernel.envelope import ESCALATE_ONLY
from sds.kernel.errors import LanguageError
from sds.models.llama import LlamaBackend
from sds.models.protocol import Backend
from tests.model_fixtures import CONTEXT_REF, refund_language


def test_both_libraries_give_the_same_masks(tiny: LlamaBackend, tiny_hf: Backend):
    ours, theirs = (Mask(backend.grammar_tokenizer(), refund_language()) for backend in (tiny, tiny_hf))
    while not ours.finished:
        forced = ours.forced()
        assert forced == theirs.forced()
        for mask in (ours, theirs):
            mask.advance(forced)
        if not ours.finished:
            allowed = ours.allowed()
            assert allowed.tolist() == theirs.allowed().tolist()
            for mask in (ours, theirs):
                mask.advance([int(np.flatnonzero(allowed)[-1])])
    assert theirs.finished


def test_exactly_the_beginnings_of_the_options_are_allowed(tiny: LlamaBackend):
    """Every token of the vocabulary is asked, not a sample."""
    mask = Mask(tiny.grammar_tokenizer(), refund_language())
    mask.advance(mask.forced())
    follows = [
        f'{name}","params":{{'.encode() for name in ("COMPENSATE", "DENY", "ESCALATE", "REFUND_TICKET", "VOUCHER")
    ]
    pieces = [tiny.piece(token) for token in range(tiny.vocab_size)]
    expected = [bool(piece) and any(text.startswith(piece) for text in follows) for piece in pieces]
    assert expected == mask.allowed().tolist()


def test_a_forbidden_token_is_an_error_for_good(tiny: LlamaBackend):
    mask = Mask(tiny.grammar_tokenizer(), refund_language())
    mask.advance(mask.forced())
    with pytest.raises(LanguageError):
        mask.advance([int(np.flatnonzero(~mask.allowed())[100])])
    for ask in (mask.forced, mask.allowed, lambda: mask.finished, lambda: mask.advance([20])):
        with pytest.raises(LanguageError) as caught:
            ask()
        assert "MASK_FAILED" == caught.value.reason_code
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("token", [-1, 49152, 2**40])
def test_a_token_that_does_not_exist_is_an_error(token: int, tiny: LlamaBackend):
    mask = Mask(tiny.grammar_tokenizer(), refund_language())
    with pytest.raises(LanguageError):
        mask.advance([token])


def test_what_is_forced_to_the_end_comes_in_one_piece(tiny: LlamaBackend):
    mask = Mask(tiny.grammar_tokenizer(), language(ESCALATE_ONLY, CONTEXT_REF))
    forced = mask.forced()
    assert not mask.finished
    mask.advance(forced)
    assert mask.finished
    assert b"".join(map(tiny.piece, forced)).endswith(CONTEXT_REF.encode() + b'"}')


def test_the_end_token_is_never_allowed(tiny: LlamaBackend):
    mask = Mask(tiny.grammar_tokenizer(), refund_language())
    mask.advance(mask.forced())
    assert not mask.allowed()[tiny.grammar_tokenizer().eos_tokens].any()
