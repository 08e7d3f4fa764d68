"""Whatever goes wrong while a decision is made, there is no decision, and the error says why."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sds.decoder import decode
from sds.grammars.mask import Mask
from sds.kernel.errors import ModelError
from sds.models.hf import HfBackend
from sds.models.llama import LlamaBackend
from sds.models.protocol import Backend, BackendError
from tests.hostile import PROMPT, AdversarialBackend, Logits, constant
from tests.model_fixtures import TINY_THREADS, refund_envelope, refund_language


def stopped(backend: Backend, *, tokens_max: int = 400, clock: Callable[[], int] = lambda: 0) -> ModelError:
    with pytest.raises(ModelError) as caught:
        decode(backend, PROMPT, refund_language(), tokens_max=tokens_max, now_ms=clock, deadline_ms=1000)
    return caught.value


def refunding(backend: AdversarialBackend) -> Logits:
    """Wants a refund: an amount between two choices, so at least three passes."""
    return np.array([piece.startswith(b"R") for piece in backend.pieces], np.float32)


class Spoiled(AdversarialBackend):
    """Sound logits, but for the Nth pass."""

    def __init__(self, real: LlamaBackend, nth: int, spoil: Callable[[Logits], Logits]) -> None:
        super().__init__(real, constant)
        self._left, self._spoil = nth, spoil

    def step(self, tokens: list[int]) -> Logits:
        self._left -= 1
        logits = super().step(tokens)
        return logits if self._left else self._spoil(logits)


def _with(value: float, at: int) -> Callable[[Logits], Logits]:
    def spoil(logits: Logits) -> Logits:
        logits[at] = value
        return logits

    return spoil


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "spoil",
    [
        _with(np.nan, 0),
        _with(np.inf, 49151),
        _with(-np.inf, 20),
        lambda logits: logits * np.nan,
        lambda logits: logits[:-1],
        lambda logits: logits.reshape(1, -1),
    ],
    ids=["one NaN", "one inf", "one -inf", "all NaN", "too few", "wrong shape"],
)
def test_numbers_that_are_no_logits_stop_the_decision(nth: int, spoil: Callable[[Logits], Logits], tiny: LlamaBackend):
    error = stopped(Spoiled(tiny, nth, spoil))
    assert ("LOGITS_INVALID", "the model returned numbers that are no logits") == (error.reason_code, str(error))


def _raising(error: Exception) -> Callable[[Logits], Logits]:
    def spoil(_: Logits) -> Logits:
        raise error

    return spoil


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("error", [BackendError("out of memory"), RuntimeError("boom"), MemoryError()])
def test_an_exception_in_the_model_stops_the_decision(nth: int, error: Exception, tiny: LlamaBackend):
    found = stopped(Spoiled(tiny, nth, _raising(error)))
    assert "BACKEND_FAILED" == found.reason_code
    assert error is found.__cause__


@pytest.mark.parametrize("method", ["forced", "allowed", "advance"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_exception_in_the_mask_stops_the_decision(
    method: str, nth: int, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    """Fail the Nth call for N = 1, 2, 3: none of them is swallowed, none leaves the model unconstrained."""
    sound, calls = getattr(Mask, method), [0]

    def failing(self: Mask, *args: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise ZeroDivisionError("broken")
        return sound(self, *args)

    monkeypatch.setattr(Mask, method, failing)
    error = stopped(AdversarialBackend(tiny, refunding))
    assert ("MASK_FAILED", "the mask failed unexpectedly") == (error.reason_code, str(error))
    assert isinstance(error.__cause__, ZeroDivisionError)


def test_a_mask_that_permits_nothing_stops_the_decision(tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Mask, "allowed", lambda _: np.zeros(tiny.vocab_size, np.bool_))
    assert "MASK_FAILED" == stopped(tiny).reason_code


def test_a_mask_that_permits_everything_stops_the_decision(tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    """The decoder does not trust the mask alone: a token outside the language is found out by the language."""
    monkeypatch.setattr(Mask, "allowed", lambda _: np.ones(tiny.vocab_size, np.bool_))
    error = stopped(tiny)
    assert ("MASK_FAILED", "the mask and the language disagree on what may come next") == (
        error.reason_code,
        str(error),
    )


@pytest.mark.parametrize("nth", [1, 2])
def test_an_exception_inside_transformers_stops_the_decision(
    nth: int, tiny_hf: HfBackend, monkeypatch: pytest.MonkeyPatch
):
    """In the middle of the Nth pass: the error is not swallowed, and the next decision is a whole one."""
    tiny_hf.begin([])
    layer = tiny_hf._model.model.layers[1].mlp
    sound, calls = layer.forward, [0]

    def failing(*arguments: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise ZeroDivisionError("broken")
        return sound(*arguments)

    with monkeypatch.context() as broken:
        broken.setattr(layer, "forward", failing)
        error = stopped(tiny_hf)
    assert nth == calls[0]
    assert "BACKEND_FAILED" == error.reason_code
    assert isinstance(error.__cause__.__cause__, ZeroDivisionError)
    result = decode(tiny_hf, PROMPT, refund_language(), tokens_max=400, now_ms=lambda: 0, deadline_ms=0)
    assert refund_envelope().contains(result.data)


def test_logits_of_transformers_that_overflow_stop_the_decision(tiny_hf: HfBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_hf._model.model.norm, "forward", lambda hidden: hidden * float("inf"))
    assert "LOGITS_INVALID" == stopped(tiny_hf).reason_code


def test_a_model_closed_in_the_middle_stops_the_decision(opened: Callable[..., Backend]):
    backend = opened(3)
    tokenizer = backend.grammar_tokenizer()
    backend.close()
    backend.grammar_tokenizer = lambda: tokenizer  # type: ignore[method-assign]
    assert "MASK_FAILED" == stopped(backend).reason_code


def test_a_prompt_beyond_the_context_stops_the_decision(tiny_path: Callable[[int], Path]):
    backend = LlamaBackend(tiny_path(1), n_ctx=256, threads=TINY_THREADS)
    with pytest.raises(ModelError, match="more than the model's context of 256") as caught:
        decode(backend, [[20] * 300, [21]], refund_language(), tokens_max=400, now_ms=lambda: 0, deadline_ms=0)
    assert "BACKEND_FAILED" == caught.value.reason_code
    assert caught.value.hint
    backend.close()


@pytest.mark.parametrize("late_at", [1, 2, 3])
def test_a_passed_deadline_stops_the_decision(late_at: int, tiny: LlamaBackend):
    """The clock is looked at before the first pass, between passes, and after the last one."""
    looks = iter([0] * (late_at - 1) + [1001] * 100)
    error = stopped(AdversarialBackend(tiny, constant), clock=lambda: next(looks))
    assert ("DEADLINE_EXCEEDED", "the decision is 1 ms past its deadline") == (error.reason_code, str(error))


def test_a_decision_on_the_last_millisecond_counts(tiny: LlamaBackend):
    result = decode(tiny, PROMPT, refund_language(), tokens_max=400, now_ms=lambda: 1000, deadline_ms=1000)
    assert refund_envelope().contains(result.data)


@pytest.mark.parametrize("tokens_max", [0, 2, 20])
def test_too_small_a_budget_stops_the_decision(tokens_max: int, tiny: LlamaBackend):
    error = stopped(tiny, tokens_max=tokens_max)
    assert "TOKEN_BUDGET_EXCEEDED" == error.reason_code
    assert f"the decision needs more than {tokens_max} tokens" == str(error)


def test_the_budget_is_exact(tiny: LlamaBackend):
    language = refund_language()
    needed = decode(tiny, PROMPT, language, tokens_max=400, now_ms=lambda: 0, deadline_ms=0).tokens_generated
    assert needed == decode(tiny, PROMPT, language, tokens_max=needed, now_ms=lambda: 0, deadline_ms=0).tokens_generated
    assert "TOKEN_BUDGET_EXCEEDED" == stopped(tiny, tokens_max=needed - 1).reason_code


def test_the_wall_clock_is_not_read(tiny: LlamaBackend):
    """`now_ms` is the only clock: one that stands still never ends a decision."""
    result = decode(tiny, PROMPT, refund_language(), tokens_max=400, now_ms=lambda: -sys.maxsize, deadline_ms=0)
    assert refund_envelope().contains(result.data)
