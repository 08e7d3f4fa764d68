"""What batch composition does in OpenVINO, measured: nothing, in calls as full as they get; and something is found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sds.models.catalog.batch_variance import batch_variance
from sds.models.openvino_.backend import OpenvinoBackend
from sds.models.protocol import Dtype
from tests.model_fixtures import TINY_THREADS
from tests.models.openvino_.test_backend import DTYPES

PLANTED_LOGP = 0.3


@pytest.mark.parametrize("dtype", DTYPES)
def test_openvino_gives_the_same_in_a_crowd(
    dtype: Dtype, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    """Measured in calls as full as they get, and of rows of different lengths."""
    lines: list[tuple[int, int]] = []
    lengths: list[int] = []
    real = OpenvinoBackend._infer

    def counted(self: OpenvinoBackend, call: Any, *asked: Any) -> Any:
        lines.append((call.longest, len(call.trees)))
        lengths.append(len({len(tree.tokens) for tree in call.trees}))
        return real(self, call, *asked)

    monkeypatch.setattr(OpenvinoBackend, "_infer", counted)
    backend = OpenvinoBackend(tiny_path(1), dtype=dtype, slots=7, n_ctx=512, threads=TINY_THREADS)
    assert 0.0 == batch_variance(backend)
    backend.close()
    crowded = {(1, 7), (8, 7), (24, 7)}
    assert {*crowded, (72, 7)} <= set(lines)
    assert max(lengths) > 1


def test_what_a_crowd_does_is_found_where_two_do_nothing(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    real = OpenvinoBackend._infer

    def moved(self: OpenvinoBackend, call: Any, *asked: Any) -> Any:
        answered, cells = real(self, call, *asked)
        answered = answered.copy()
        answered[..., 1000] += PLANTED_LOGP if len(call.trees) > 4 else 0.0
        return answered, cells

    monkeypatch.setattr(OpenvinoBackend, "_infer", moved)
    backend = OpenvinoBackend(tiny_path(1), dtype="fp32", slots=5, n_ctx=512, threads=TINY_THREADS)
    assert PLANTED_LOGP == pytest.approx(batch_variance(backend), abs=0.05)
    backend.close()
