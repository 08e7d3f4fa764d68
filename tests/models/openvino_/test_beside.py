"""Backends side by side over one compiled model: each for a thread of its own, none in another's way."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sds.models.openvino_.backend import OpenvinoBackend
from sds.models.protocol import BackendError, Dtype, Replicable, Row
from tests.llama_gguf import llama_gguf
from tests.model_fixtures import TINY_THREADS
from tests.models.comparing import answers
from tests.models.openvino_.test_backend import DTYPES, opened

__all__ = ["opened"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_backend_beside_another_shares_its_weights_and_gives_its_bits(
    dtype: Dtype, tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend]
) -> None:
    first = opened(tiny_path(1), dtype=dtype, slots=2, engines=2)
    expected = answers(opened(tiny_path(1), dtype=dtype))
    assert isinstance(first, Replicable)
    second = first.replica(threads=TINY_THREADS)
    assert first._graph is second._graph
    assert (1, first.name, first.fingerprint) == (second.slots, second.name, second.fingerprint)
    assert np.array_equal(expected, answers(second))
    first.close()
    assert np.array_equal(expected, answers(second))
    second.close()
    with pytest.raises(BackendError, match="the model is closed"):
        first.replica(threads=TINY_THREADS)


def test_backends_side_by_side_do_not_disturb_each_other(
    tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend]
) -> None:
    first = opened(tiny_path(1), engines=3)
    expected = [answers(first, seed) for seed in range(8)]
    beside = [first, first.replica(threads=TINY_THREADS), first.replica(threads=TINY_THREADS)]

    def work(backend: OpenvinoBackend) -> list[bool]:
        return [np.array_equal(expected[n % 8], answers(backend, n % 8)) for n in range(16)]

    with ThreadPoolExecutor(len(beside)) as pool:
        assert [[True] * 16] * len(beside) == list(pool.map(work, beside))
    for backend in beside[1:]:
        backend.close()


def test_what_all_need_anew_is_compiled_once(
    tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(tiny_path(1), engines=3)
    beside = [first, first.replica(threads=TINY_THREADS), first.replica(threads=TINY_THREADS)]
    expected, compiled, compile_model = answers(first), list[object](), first._graph._compile

    def counted() -> object:
        compiled.append(compile_model())
        return compiled[-1]

    monkeypatch.setattr(first._graph, "_compile", counted)
    first._graph.reset()
    with ThreadPoolExecutor(len(beside)) as pool:
        assert all(np.array_equal(expected, each) for each in pool.map(answers, beside))
    assert 1 == len(compiled)
    for backend in beside[1:]:
        backend.close()


def test_what_was_given_in_part_only_is_given_again(
    tiny_path: Callable[[int], Path], opened: Callable[..., OpenvinoBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = opened(tiny_path(1), slots=2, lengths=())
    backend.prefill([[5, 6, 7]], slot=0)
    backend.prefill([[8, 9, 10]], slot=1)
    expected = backend.run([Row(0, [20, 21])])[0]
    backend.prefill([[5, 6, 7]], slot=0)
    backend.prefill([[8, 9, 10]], slot=1)
    backend.run([Row(0, [22, 23])])
    backend.prefill([[5, 6, 7]], slot=0)
    request, set_one = backend._ready_request(), backend._ready_request().made.set_input_tensor

    class Refusing:
        """Takes the first of the keys and values, and no more."""

        def __getattr__(self, name: str) -> object:
            return getattr(made, name)

        def set_input_tensor(self, number: int, tensor: object) -> None:
            if number > 7:
                raise RuntimeError("no room")
            set_one(number, tensor)

    made = request.made
    monkeypatch.setattr(request, "made", Refusing())
    with pytest.raises(BackendError):
        backend.run([Row(1, [20, 21])])
    monkeypatch.setattr(request, "made", made)
    assert np.array_equal(expected, backend.run([Row(0, [20, 21])])[0])


class Failing:
    """A compiled model whose calls run out of memory."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def create_infer_request(self) -> Failing:
        return self

    def set_input_tensor(self, *_: object) -> None: ...

    def infer(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError(), "the model could not be run on 2 tokens: no memory"),
        (RuntimeError("std::bad_alloc"), "the model could not be run on 2 tokens: no memory"),
        (RuntimeError("broken\nin two lines"), "the model could not be run on 2 tokens"),
    ],
)
def test_after_a_failed_call_the_model_is_compiled_anew_for_all_who_share_it(
    error: Exception, message: str, tmp_path: Path, opened: Callable[..., OpenvinoBackend]
) -> None:
    backend = opened(llama_gguf(tmp_path / "model.gguf"))
    other = backend.replica(threads=TINY_THREADS)
    expected = answers(backend)
    backend._graph._compiled = Failing(error)
    with pytest.raises(BackendError) as caught:
        backend.forward_one([20, 21])
    assert message == str(caught.value)
    assert "\n" not in caught.value.hint
    assert error is caught.value.__cause__
    assert np.array_equal(expected, answers(backend))
    assert np.array_equal(expected, answers(other))
    other.close()
