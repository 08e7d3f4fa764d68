"""What every backend must do, whichever library runs the model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from sds.models.protocol import Backend, BackendError, Row
from tests.hostile import TINY_VOCABULARY, Vocabulary
from tests.scale import scale, seeded

CONTROL_TOKENS = range(17)


@pytest.fixture(params=["tiny", "tiny_hf", "tiny_vino", "tiny_int"])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


def sections_of(seed: int, *lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [[int(token) for token in rng.integers(17, TINY_VOCABULARY, length)] for length in lengths]


@pytest.mark.parametrize("which", ["tiny", "embedded", "tiny_hf", "own_hf", "tiny_vino", "own_vino", "tiny_int"])
def test_logits_are_bit_equal_whatever_ran_before(which: str, request: pytest.FixtureRequest):
    """Leading sections are reused, and nothing shows it: neither how many were held nor what stood after them."""
    backend: Backend = request.getfixturevalue(which)
    first, second, third, other = sections_of(3, 40, 25, 9, 33)
    ending = third[:4]
    backend.prefill([])
    backend.prefill([first, second, third])
    expected = backend.forward_one(ending)
    histories = [
        [first, second, third],
        [first, second],
        [first, other, third],
        [other],
        [first, second, third, other],
        [first + second, third],
    ]
    for history in histories:
        backend.prefill(history)
        backend.forward_one(other)
        backend.forward_one([17])
        backend.prefill([first, second, third])
        assert np.array_equal(expected, backend.forward_one(ending)), history


def test_random_walks_through_the_cache_leave_no_trace(backend: Backend):
    rng = seeded(5)
    pieces = sections_of(rng.randrange(2**32), 12, 7, 30, 1)
    expected: dict[tuple[int, ...], np.ndarray] = {}
    for _ in range(scale(60, 2000)):
        order = tuple(rng.randrange(4) for _ in range(rng.randint(0, 5)))
        backend.prefill([pieces[i] for i in order])
        logits = backend.forward_one([99, 100])
        assert np.array_equal(expected.setdefault(order, logits), logits), order


def test_a_section_longer_than_a_call_is_cut_the_same_way_every_time(backend: Backend):
    long, short = sections_of(6, 1100, 5)
    backend.prefill([])
    backend.prefill([long, short])
    expected = backend.forward_one([20])
    backend.prefill([long])
    backend.prefill([long, short])
    assert np.array_equal(expected, backend.forward_one([20]))


def test_logits_have_one_entry_for_each_token(backend: Backend):
    backend.prefill([])
    logits = backend.forward_one([20])
    assert (TINY_VOCABULARY,) == logits.shape == (backend.vocab_size,)
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


def test_a_prompt_beyond_the_context_is_refused_and_the_model_goes_on(opened: Callable[..., Backend]):
    backend = opened(n_ctx=256)
    with pytest.raises(BackendError, match=r"300 tokens are more than the model's context of 256"):
        backend.prefill([[20] * 200, [21] * 100])
    backend.prefill([[20] * 200])
    with pytest.raises(BackendError, match=r"257 tokens are more than"):
        backend.forward_one([21] * 57)
    assert (backend.vocab_size,) == backend.forward_one([21] * 56).shape
    backend.close()


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "a step needs at least one token"),
        ([TINY_VOCABULARY], "a token is outside the vocabulary"),
        ([20, -1], "a token is outside the vocabulary"),
    ],
)
def test_a_step_of_no_real_tokens_is_refused(tokens: list[int], message: str, backend: Backend):
    backend.prefill([[20]])
    with pytest.raises(BackendError) as caught:
        backend.forward_one(tokens)
    assert message == str(caught.value)


def test_a_text_beyond_the_limit_is_refused(backend: Backend):
    with pytest.raises(BackendError, match=r"a text of 1048577 bytes is longer than 1048576"):
        backend.tokenize(b"x" * (2**20 + 1), special=False)


def test_a_closed_model_says_so(opened: Callable[..., Backend]):
    backend = opened()
    backend.close()
    backend.close()
    for use in (
        lambda: backend.prefill([]),
        lambda: backend.forward_one([20]),
        lambda: backend.run([Row(0, [20])]),
        lambda: backend.fork(0),
        lambda: backend.tokenize(b"x", special=False),
        lambda: backend.piece(20),
        backend.frame,
    ):
        with pytest.raises(BackendError, match="the model is closed"):
            use()


def test_a_second_backend_of_the_same_weights_gives_the_same_logits(opened: Callable[..., Backend]):
    sections = sections_of(4, 30, 10)
    first, second = opened(), opened()
    for backend in (first, second):
        backend.prefill(sections)
    assert np.array_equal(first.forward_one([20, 21]), second.forward_one([20, 21]))


def test_a_step_is_a_pass_of_one_row(backend: Backend):
    sections = sections_of(9, 30, 12)
    backend.prefill(sections)
    expected = backend.forward_one([20, 21, 22])
    backend.prefill(sections)
    assert np.array_equal([expected], backend.run([Row(0, [20, 21, 22])])[0])


def test_a_row_gives_as_many_logits_as_were_asked_for_and_the_same_ones(backend: Backend):
    sections = sections_of(9, 30, 12)
    found = []
    for outputs in range(4):
        backend.prefill(sections)
        found.append(backend.run([Row(0, [20, 21, 22], outputs)])[0])
        assert (outputs, TINY_VOCABULARY) == found[-1].shape
    for outputs in range(1, 4):
        assert np.allclose(found[3][-outputs:], found[outputs], rtol=0, atol=1e-4)


def test_what_forks_left_behind_shows_nowhere(backend: Backend):
    rng = seeded(10)
    sections = sections_of(10, 33, 21)
    backend.prefill(sections)
    first, second = backend.forward_one([20, 21, 22]), backend.forward_one([23])
    for _ in range(scale(6, 100)):
        backend.prefill(sections[: rng.randint(0, 2)])
        forks = [backend.fork(0) for _ in range(rng.randint(0, 5))]
        backend.run([Row(slot, sections_of(slot, rng.randint(1, 9))[0]) for slot in [0, *forks]])
        for fork in rng.sample(forks, rng.randint(0, len(forks))):
            backend.drop(fork)
        backend.prefill(sections)
        assert np.array_equal(first, backend.forward_one([20, 21, 22]))
        assert np.array_equal(second, backend.forward_one([23]))


def test_a_fork_goes_on_as_its_slot_would_have_and_its_slot_does_not_see_it(backend: Backend):
    sections = sections_of(11, 33, 21)
    backend.prefill(sections)
    expected, then = backend.forward_one([20, 21]), backend.forward_one([22])
    backend.prefill(sections)
    fork, other = backend.fork(0), backend.fork(0)
    assert np.array_equal(expected, backend.forward_one([20, 21], slot=fork))
    grandchild = backend.fork(fork)
    assert np.array_equal(then, backend.forward_one([22], slot=grandchild))
    for made in (fork, grandchild):
        backend.drop(made)
    assert np.array_equal(expected, backend.forward_one([20, 21], slot=other))
    backend.drop(other)
    assert np.array_equal(expected, backend.forward_one([20, 21]))
    assert np.array_equal(then, backend.forward_one([22]))


def test_a_pass_over_forks_is_bit_equal_every_time_and_close_to_each_alone(backend: Backend):
    sections = sections_of(12, 33, 21)
    tails = sections_of(13, 4, 2, 7, 5)
    alone = []
    for tail in tails:
        backend.prefill(sections)
        alone.append(backend.run([Row(0, tail, len(tail))])[0])
    passes = []
    for _ in range(2):
        backend.prefill(sections)
        passes.append(backend.run([Row(backend.fork(0), tail, len(tail)) for tail in tails]))
    for first, second, plain in zip(*passes, alone, strict=True):
        assert np.array_equal(first, second)
        assert np.allclose(plain, first, rtol=0, atol=1e-3)


def test_the_next_prompt_of_a_slot_drops_its_forks(backend: Backend):
    backend.prefill([[20, 21]])
    fork = backend.fork(0)
    backend.prefill([[20, 21]])
    with pytest.raises(BackendError, match=f"there is no slot {fork}"):
        backend.forward_one([22], slot=fork)
    backend.drop(fork)  # whoever made it may still give it back


def test_forks_are_counted(backend: Backend):
    backend.prefill([[20, 21]])
    forks = [backend.fork(0) for _ in range(63)]
    with pytest.raises(BackendError, match="more than 63 forks at once") as caught:
        backend.fork(0)
    assert "drop some forks, or score fewer alternatives" == caught.value.hint
    backend.drop(forks[7])
    again = backend.fork(0)
    assert again not in forks
    assert np.array_equal(backend.forward_one([22], slot=forks[0]), backend.forward_one([22], slot=again))
    backend.prefill([])


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([Row(0, [])], "a step needs at least one token"),
        ([Row(0, [20]), Row(0, [21])], "a pass may hold at most one row of each slot"),
        ([Row(1, [20])], "there is no slot 1"),
        ([Row(-1, [20])], "there is no slot -1"),
        ([Row(0, [20], 2)], "2 outputs of 1 tokens were asked for"),
        ([Row(0, [20], -1)], "-1 outputs of 1 tokens were asked for"),
        ([Row(0, [20, TINY_VOCABULARY])], "a token is outside the vocabulary"),
        ([Row(0, [20] * 4096)], "4098 tokens are more than the model's context of 4096"),
    ],
)
def test_a_row_that_cannot_be_run_is_refused_and_nothing_is_lost(rows: list[Row], message: str, backend: Backend):
    backend.prefill([[20, 21]])
    expected = backend.forward_one([22])
    backend.prefill([[20, 21]])
    with pytest.raises(BackendError) as caught:
        backend.run(rows)
    assert message == str(caught.value)
    assert np.array_equal(expected, backend.forward_one([22]))


def test_an_unknown_slot_or_fork_is_refused(backend: Backend):
    backend.prefill([])
    for use in (lambda: backend.prefill([], slot=1), lambda: backend.prefill([], slot=-1), lambda: backend.fork(7**9)):
        with pytest.raises(BackendError, match="there is no slot"):
            use()
    for fork in (0, -1, 7**9):
        with pytest.raises(BackendError, match=f"there is no fork {fork}"):
            backend.drop(fork)


def test_several_slots_answer_as_one_would(opened: Callable[..., Backend]):
    one, four = opened(), opened(slots=4, n_ctx=512)
    common, *own = sections_of(17, 50, 12, 30, 1, 60)
    assert (1, 4) == (one.slots, four.slots)
    for slot in range(4):
        four.prefill([common], slot=slot)
    found = four.run([Row(slot, own[slot]) for slot in range(4)])
    for slot in range(4):
        one.prefill([common])
        assert np.allclose(one.forward_one(own[slot]), found[slot][0], rtol=0, atol=0.05)


def test_slots_do_not_see_each_other(opened: Callable[..., Backend]):
    """Neither a neighbour's prompt, nor its fork, nor its end moves a slot by more than the last digits."""
    backend = opened(slots=3, n_ctx=512)
    common, own, other, longer = sections_of(18, 50, 12, 30, 60)
    backend.prefill([common, own], slot=1)
    expected = backend.forward_one([20, 21], slot=1)
    backend.prefill([common, other], slot=0)
    backend.prefill([common, own], slot=1)
    backend.prefill([longer], slot=2)
    fork = backend.fork(0)
    together = backend.run([Row(fork, longer), Row(1, [20, 21]), Row(2, other)])[1][0]
    backend.prefill([], slot=0)
    backend.prefill([], slot=2)
    backend.prefill([common, own], slot=1)
    assert np.allclose(expected, together, rtol=0, atol=0.05)
    assert np.allclose(expected, backend.forward_one([20, 21], slot=1), rtol=0, atol=0.05)


def test_every_slot_can_be_full_at_once(opened: Callable[..., Backend]):
    backend = opened(slots=3, n_ctx=256)
    for slot in range(3):
        backend.prefill([[20 + slot] * 255], slot=slot)
    assert [(1, TINY_VOCABULARY)] * 3 == [
        logits.shape for logits in backend.run([Row(slot, [30]) for slot in range(3)])
    ]
    with pytest.raises(BackendError, match=r"257 tokens are more than the model's context of 256"):
        backend.forward_one([31], slot=1)


@pytest.mark.parametrize("slots", [0, -1, 257])
def test_a_number_of_slots_out_of_bounds_is_refused(slots: int, opened: Callable[..., Backend]):
    with pytest.raises(BackendError, match=rf"slots must be 1 to (64|256), got {slots}"):
        opened(slots=slots)
