"""Whatever goes wrong while a decision is made, there is no decision, and the error says why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.decoding.decoder import Decoded, Mode
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.matcher import ChoicePoint, TokenMatcher
from sds.kernel.errors import ModelError
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend, BackendError, Row
from sds.models.transformers_.backend import HfBackend
from tests.decoding.small_backend import decode
from tests.hostile import PROMPT, AdversarialBackend, Logits, constant
from tests.model_fixtures import CONTEXT_REF, TINY_THREADS, refund_envelope


def refund(
    backend: Backend,
    *,
    prompt: list[list[int]] = PROMPT,
    tokens_max: int = 400,
    mode: Mode = "greedy",
) -> Decoded:
    matcher = GrammarCompiler(backend).matcher(refund_envelope(), CONTEXT_REF)
    return decode(backend, prompt, matcher, tokens_max=tokens_max, mode=mode)


def stopped(backend: Backend, **options: Any) -> ModelError:
    with pytest.raises(ModelError) as caught:
        refund(backend, **options)
    return caught.value


def refunding(backend: AdversarialBackend) -> Logits:
    """Wants a refund: an amount between two choices, so at least three passes."""
    return np.array([piece.startswith(b"R") for piece in backend.pieces], np.float32)


class Spoiled(AdversarialBackend):
    """Sound logits, but for the Nth pass."""

    def __init__(self, real: LlamaBackend, nth: int, spoil: Callable[[Logits], Logits]) -> None:
        super().__init__(real, constant)
        self._left, self._spoil = nth, spoil

    def run(self, rows: Sequence[Row]) -> list[Logits]:
        self._left -= 1
        found = super().run(rows)
        return found if self._left else [*found[:-1], self._spoil(found[-1])]


def _with(value: float, at: int) -> Callable[[Logits], Logits]:
    def spoil(logits: Logits) -> Logits:
        logits[0, at] = value
        return logits

    return spoil


@pytest.mark.parametrize("mode", ["greedy", "exact"])
@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    "spoil",
    [
        _with(np.nan, 0),
        _with(np.inf, -1),
        _with(-np.inf, 20),
        lambda logits: logits * np.nan,
        lambda logits: logits[:, :-1],
        lambda logits: logits[0],
    ],
    ids=["one NaN", "one inf", "one -inf", "all NaN", "too few", "wrong shape"],
)
def test_numbers_that_are_no_logits_stop_the_decision(
    mode: Mode, nth: int, spoil: Callable[[Logits], Logits], tiny: LlamaBackend
):
    backend = Spoiled(tiny, nth, spoil)
    error = stopped(backend, mode=mode)
    assert [0] == list(backend.held), "the forks are given back"
    assert ("LOGITS_INVALID", "the model returned values that are not logits") == (error.reason_code, str(error))


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


def test_a_model_that_answers_too_few_rows_stops_the_decision(tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(AdversarialBackend, "run", lambda *_: [])
    assert "LOGITS_INVALID" == stopped(AdversarialBackend(tiny, constant)).reason_code


@pytest.mark.parametrize("method", ["prefill", "fork"])
@pytest.mark.parametrize("error", [BackendError("out of memory"), RuntimeError("boom"), StopIteration()])
def test_a_model_that_cannot_make_room_stops_the_decision(
    method: str, error: Exception, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    def failing(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AdversarialBackend, method, failing)
    found = stopped(AdversarialBackend(tiny, constant), mode="exact")
    assert ("BACKEND_FAILED", error) == (found.reason_code, found.__cause__)


ASKED = {
    "greedy": {"alternatives": 0, "copy": 0},
    "exact": {"alternatives": 2, "copy": 2, "choice_point": 2},
}  # if not thrice


@pytest.mark.parametrize("mode", ["greedy", "exact"])
@pytest.mark.parametrize("method", ["accept_forced", "choice_point", "accept", "alternatives", "copy"])
@pytest.mark.parametrize("nth", [1, 2, 3])
def test_an_exception_in_the_language_stops_the_decision(
    mode: Mode, method: str, nth: int, tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
):
    """Fail the Nth call for N = 1, 2, 3: none of them is swallowed, none leaves the model unconstrained."""
    sound, calls = getattr(TokenMatcher, method), [0]

    def failing(self: TokenMatcher, *args: object) -> object:
        calls[0] += 1
        if calls[0] == nth:
            raise ZeroDivisionError("broken")
        return sound(self, *args)

    monkeypatch.setattr(TokenMatcher, method, failing)
    backend = AdversarialBackend(tiny, refunding)
    if nth <= ASKED[mode].get(method, 3):
        error = stopped(backend, mode=mode)
        assert ("MASK_FAILED", "the language failed unexpectedly") == (error.reason_code, str(error))
        assert isinstance(error.__cause__, ZeroDivisionError)
    else:
        assert refund_envelope().contains(refund(backend, mode=mode).data)
        assert nth > calls[0]


def test_an_ending_that_no_tokens_spell_is_the_languages_failure_and_no_models(
    tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = LlamaBackend.tokenize

    def tokenize(backend: LlamaBackend, text: bytes, *, special: bool) -> list[int]:
        found = really(backend, text, special=special)
        return found[::-1] if CONTEXT_REF.encode() in text else found

    monkeypatch.setattr(LlamaBackend, "tokenize", tokenize)
    error = stopped(tiny)
    assert ("MASK_FAILED", f'no tokens of the model spell `{CONTEXT_REF}"}}`') == (error.reason_code, str(error))


def test_a_fork_outside_the_language_stops_the_decision(tiny: LlamaBackend, monkeypatch: pytest.MonkeyPatch):
    """The matcher refuses to take what it should not have offered."""
    sound = TokenMatcher.choice_point

    def wider(self: TokenMatcher) -> ChoicePoint:
        point = sound(self)
        return replace(point, tokens=np.append(point.tokens, 11), labels=(*point.labels, ("PAY_ALL",)))

    monkeypatch.setattr(TokenMatcher, "choice_point", wider)
    backend = AdversarialBackend(tiny, lambda _: np.eye(1, tiny.vocab_size, 11, dtype=np.float32)[0])
    assert "MASK_FAILED" == stopped(backend).reason_code


@pytest.mark.parametrize("nth", [1, 2])
def test_an_exception_inside_transformers_stops_the_decision(
    nth: int, tiny_hf: HfBackend, monkeypatch: pytest.MonkeyPatch
):
    """In the middle of the Nth pass: the error is not swallowed, and the next decision is a whole one."""
    tiny_hf.prefill([])
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
    result = refund(tiny_hf)
    assert refund_envelope().contains(result.data)


def test_logits_of_transformers_that_overflow_stop_the_decision(tiny_hf: HfBackend, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tiny_hf._model.model.norm, "forward", lambda hidden: hidden * float("inf"))
    assert "LOGITS_INVALID" == stopped(tiny_hf).reason_code


def test_a_model_closed_in_the_middle_stops_the_decision(opened: Callable[..., Backend]):
    backend = opened(3)
    matcher = GrammarCompiler(backend).matcher(refund_envelope(), CONTEXT_REF)
    backend.close()
    with pytest.raises(ModelError, match="the model is closed") as caught:
        decode(backend, PROMPT, matcher, tokens_max=400)
    assert "BACKEND_FAILED" == caught.value.reason_code


def test_a_prompt_beyond_the_context_stops_the_decision(tiny_path: Callable[[int], Path]):
    backend = LlamaBackend(tiny_path(1), n_ctx=256, threads=TINY_THREADS)
    with pytest.raises(ModelError, match="more than the model's context of 256") as caught:
        refund(backend, prompt=[[20] * 300, [21]])
    assert "BACKEND_FAILED" == caught.value.reason_code
    assert caught.value.hint
    backend.close()


@pytest.mark.parametrize("tokens_max", [0, 2, 20])
def test_too_small_a_budget_stops_the_decision(tokens_max: int, tiny: LlamaBackend):
    error = stopped(tiny, tokens_max=tokens_max)
    assert "TOKEN_BUDGET_EXCEEDED" == error.reason_code
    assert f"the decision needs more than {tokens_max} tokens" == str(error)


def test_the_budget_is_exact(tiny: LlamaBackend):
    needed = refund(tiny).tokens_generated
    assert needed == refund(tiny, tokens_max=needed).tokens_generated
    assert "TOKEN_BUDGET_EXCEEDED" == stopped(tiny, tokens_max=needed - 1).reason_code
