"""Hidden states of a transformers model: at any layer, and no layer above it is run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sds.models.protocol import BackendError
from sds.models.transformers_.backend import HfBackend
from tests.models.test_backends import sections_of
from tests.models.transformers_.test_rows import close, out_of_memory, plain


def states_of(backend: HfBackend, tokens: list[int]) -> list[Any]:
    """The states of all tokens before each layer and after the last, all past the model's norm."""
    *lower, last = plain(backend, tokens, output_hidden_states=True).hidden_states
    return [*(backend.module.model.norm(states[0]).detach() for states in lower), last[0]]


@pytest.mark.parametrize("layer", [0, 1, 2, None])
def test_hidden_states_are_those_of_the_plain_model(layer: int | None, either: HfBackend):
    first, second = sections_of(17, 12, 9)
    expected = states_of(either, first + second)[2 if layer is None else layer]
    assert close(expected[-1].numpy(), either.hidden([first, second], layer=layer))
    mean = either.hidden([first, second], span=(2, 7), layer=layer)
    assert np.float32 == mean.dtype
    assert close(expected[len(first) + 2 : len(first) + 7].mean(dim=0).numpy(), mean)


def test_hidden_states_of_a_text_longer_than_a_pass_are_averaged_over_all_of_it(several: HfBackend):
    (text,) = sections_of(18, 700)
    expected = states_of(several, text)[1].mean(dim=0)
    assert close(expected.numpy(), several.hidden([text], span=(0, 700), layer=1))


def test_a_call_for_a_lower_layer_runs_no_layer_above_and_leaves_the_model_whole(
    several: HfBackend, monkeypatch: pytest.MonkeyPatch
):
    first, second = sections_of(19, 15, 8)
    several.begin([first, second])
    expected = several.step([20])
    several.begin([])
    with monkeypatch.context() as broken:
        broken.setattr(several.module.model.layers[1], "forward", out_of_memory)
        several.hidden([first, second], layer=1)
    assert np.array_equal(expected, several.step([20])), "the slot holds the sections, through all layers"
    several.hidden([first, second], layer=1)
    several.begin([first, second])
    assert np.array_equal(expected, several.step([20]))
    several.hidden([first, second], layer=1)
    fork = several.fork(0)
    assert np.array_equal(expected, several.step([20], slot=fork))


def test_hidden_states_are_bit_equal_whatever_depth_was_held_before(several: HfBackend):
    first, second = sections_of(20, 15, 8)
    several.begin([])
    expected = several.hidden([first, second], layer=1)
    several.begin([first, second])
    assert np.array_equal(expected, several.hidden([first, second], layer=1))
    several.hidden([first], layer=0)
    assert np.array_equal(expected, several.hidden([first, second], layer=1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layer": 3}, "there is no layer 3: the model has 2"),
        ({"layer": -1}, "there is no layer -1: the model has 2"),
        ({"span": (0, 6)}, "positions 0 to 6 are no part of a section of 5 tokens"),
        ({"span": (3, 3)}, "positions 3 to 3 are no part of a section of 5 tokens"),
    ],
)
def test_a_hidden_state_that_is_not_there_is_refused(options: dict[str, Any], message: str, several: HfBackend):
    with pytest.raises(BackendError) as caught:
        several.hidden([[20] * 4, [21] * 5], **options)
    assert message == str(caught.value)


def test_there_is_no_hidden_state_of_nothing(several: HfBackend):
    for sections in ([], [[20], []]):
        with pytest.raises(BackendError, match="no part of a section of 0 tokens"):
            several.hidden(sections)
