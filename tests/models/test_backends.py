"""What every backend must do, whichever library runs the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sds.models.protocol import Backend, BackendError
from tests.hostile import Vocabulary
from tests.scale import scale, seeded

CONTROL_TOKENS = range(17)


@pytest.fixture(params=["tiny", "tiny_hf"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


def sections_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(17, 49152, length)] for length in lengths]


@pytest.mark.parametrize("which", ["tiny", "embedded", "tiny_hf", "own_hf"])
def test_logits_are_bit_equal_whatever_ran_before(which: str, request: pytest.FixtureRequest):
    """Leading sections are reused, and nothing shows it: neither how many were held nor what stood after them."""
    backend: Backend = request.getfixturevalue(which)
    first, second, third, other = sections_of(3, 40, 25, 9, 33)
    ending = third[:4]
    backend.begin([])
    backend.begin([first, second, third])
    expected = backend.step(ending)
    histories = [
        [first, second, third],
        [first, second],
        [first, other, third],
        [other],
        [first, second, third, other],
        [first + second, third],
    ]
    for history in histories:
        backend.begin(history)
        backend.step(other)
        backend.step([17])
        backend.begin([first, second, third])
        assert np.array_equal(expected, backend.step(ending)), history


def test_random_walks_through_the_cache_leave_no_trace(backend: Backend):
    rng = seeded(5)
    pieces = sections_of(rng.randrange(2**32), 12, 7, 30, 1)
    expected: dict[tuple[int, ...], np.ndarray] = {}
    for _ in range(scale(60, 2000)):
        order = tuple(rng.randrange(4) for _ in range(rng.randint(0, 5)))
        backend.begin([pieces[i] for i in order])
        logits = backend.step([99, 100])
        assert np.array_equal(expected.setdefault(order, logits), logits), order


def test_logits_have_one_entry_for_each_token(backend: Backend):
    backend.begin([])
    logits = backend.step([20])
    assert (49152,) == logits.shape == (backend.vocab_size,)
    assert np.float32 == logits.dtype


@pytest.mark.parametrize("token", CONTROL_TOKENS)
def test_what_spells_a_control_token_in_content_is_only_text(token: int, backend: Backend, vocabulary: Vocabulary):
    spelled = vocabulary.lists["tokens"][token].encode()
    text = b"pay me " + spelled + spelled + b"\nassistant"
    tokens = backend.tokenize(text, special=False)
    assert set() == set(tokens) & set(CONTROL_TOKENS)
    assert text == b"".join(map(backend.piece, tokens))
    assert [token] == backend.tokenize(spelled, special=True)


def test_random_text_survives_tokenizing(backend: Backend):
    rng = seeded(8)
    scraps = [b"<|im_end|>", b"<|im_", b"start|>", b" ", b"pay", b"\n", b"9999", "é€🙂".encode(), b"\x00", b"<"]
    for _ in range(scale(500, 20_000)):
        text = b"".join(rng.choice(scraps) for _ in range(rng.randint(0, 12)))
        tokens = backend.tokenize(text, special=False)
        assert text == b"".join(map(backend.piece, tokens))
        assert set() == set(tokens) & set(CONTROL_TOKENS)


def test_the_masks_tokenizer_spells_as_the_model_does(backend: Backend):
    tokenizer = backend.grammar_tokenizer()
    assert backend.vocab_size == tokenizer.vocab_size
    for token in range(17, backend.vocab_size, 37):
        assert tokenizer.decode_bytes([token]) == backend.piece(token)


def test_a_prompt_beyond_the_context_is_refused_and_the_model_goes_on(opened: Callable[..., Backend]):
    backend = opened(n_ctx=256)
    with pytest.raises(BackendError, match=r"300 tokens are more than the model's context of 256"):
        backend.begin([[20] * 200, [21] * 100])
    backend.begin([[20] * 200])
    with pytest.raises(BackendError, match=r"257 tokens are more than"):
        backend.step([21] * 57)
    assert (backend.vocab_size,) == backend.step([21] * 56).shape
    backend.close()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "a step needs at least one token"),
        ([49152], "a token is outside the vocabulary"),
        ([20, -1], "a token is outside the vocabulary"),
    ],
)
def test_a_step_of_no_real_tokens_is_refused(tokens: list[int], message: str, backend: Backend):
    backend.begin([[20]])
    with pytest.raises(BackendError) as caught:
        backend.step(tokens)
    assert message == str(caught.value)


def test_a_text_beyond_the_limit_is_refused(backend: Backend):
    with pytest.raises(BackendError, match=r"a text of 1048577 bytes is longer than 1048576"):
        backend.tokenize(b"x" * (2**20 + 1), special=False)


def test_a_closed_model_says_so(opened: Callable[..., Backend]):
    backend = opened()
    backend.close()
    backend.close()
    for use in (
        lambda: backend.begin([]),
        lambda: backend.step([20]),
        lambda: backend.tokenize(b"x", special=False),
        lambda: backend.piece(20),
        backend.grammar_tokenizer,
        backend.frame,
    ):
        with pytest.raises(BackendError, match="the model is closed"):
            use()


def test_a_second_backend_of_the_same_weights_gives_the_same_logits(opened: Callable[..., Backend]):
    sections = sections_of(4, 30, 10)
    first, second = opened(), opened()
    for backend in (first, second):
        backend.begin(sections)
    assert np.array_equal(first.step([20, 21]), second.step([20, 21]))
