from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from sds.models.catalog.batch_variance import batch_variance
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import BackendError, Row
from tests.hostile import TINY_VOCABULARY
from tests.model_fixtures import TINY_THREADS
from tests.small_models import sentencepiece_gguf

PLANTED_LOGP = 0.3


class MovedByCompany(LlamaBackend):
    """Moves one token's logit wherever a row has company, or wherever it is not in the first slot."""

    by_place = False
    least_rows = 2

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        found = super().run(rows)
        for row, logits in zip(rows, found, strict=True):
            if row.slot > 0 if self.by_place else len(rows) >= self.least_rows:
                logits[:, 1000] += PLANTED_LOGP
        return found


@pytest.fixture
def single(single_path: Path) -> Iterator[MovedByCompany]:
    backend = MovedByCompany(single_path, slots=3, n_ctx=512, threads=TINY_THREADS)
    yield backend
    backend.close()


def test_one_slot_has_no_noise_by_its_protocol(tiny: LlamaBackend):
    assert 0.0 == batch_variance(tiny)


def test_llama_cpp_gives_the_same_in_any_company(tiny_path: Callable[[int], Path]):
    backend = LlamaBackend(tiny_path(1), slots=5, n_ctx=512, threads=TINY_THREADS)
    assert 0.0 == batch_variance(backend)
    backend.close()


def test_with_few_slots_it_takes_some_forty_passes(single: MovedByCompany, monkeypatch: pytest.MonkeyPatch):
    lengths: list[int] = []
    real = LlamaBackend._pass

    def counted(self: LlamaBackend, start: int, end: int) -> NDArray[np.float32]:
        lengths.append(end - start)
        return real(self, start, end)

    monkeypatch.setattr(LlamaBackend, "_pass", counted)
    batch_variance(single)
    assert 20 < len(lengths) <= 50
    assert single.pass_tokens_max >= max(lengths) > 50


def test_what_all_slots_do_is_found_where_four_do_nothing(single_path: Path):
    """Of whom rows may be cut, too: llama.cpp, transformers."""
    backend = MovedByCompany(single_path, slots=7, n_ctx=512, threads=TINY_THREADS)
    backend.least_rows = 7
    assert PLANTED_LOGP == pytest.approx(batch_variance(backend), abs=0.05)
    backend.close()


@pytest.mark.parametrize("by_place", [False, True])
def test_a_planted_difference_is_found(by_place: bool, single: MovedByCompany):
    single.by_place = by_place
    assert PLANTED_LOGP == pytest.approx(batch_variance(single), abs=0.05)


def test_noise_that_is_no_number_is_none_that_could_be_none(single: MovedByCompany, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tests.models.catalog.test_batch_variance.PLANTED_LOGP", np.nan)
    assert np.isnan(batch_variance(single))


def test_prompts_of_ones_own_may_be_measured(single: MovedByCompany):
    prompts = [[[20, 21, 22], [23, 24], [25]], [[20, 21, 22], [26]]]
    assert PLANTED_LOGP == pytest.approx(batch_variance(single, prompts=prompts), abs=0.05)


def test_the_slots_are_left_empty(single: MovedByCompany):
    batch_variance(single)
    for slot in range(3):
        assert (1, TINY_VOCABULARY) == single.run([Row(slot, [20] * 512)])[0].shape  # all of its context


def test_a_vocabulary_of_hardly_any_text_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    backend = LlamaBackend(sentencepiece_gguf(tmp_path / "small.gguf"), slots=2, n_ctx=512, threads=TINY_THREADS)
    assert batch_variance(backend) < 0.1
    monkeypatch.setattr(backend, "piece", lambda token: b"x" if token < 9 else b"")
    with pytest.raises(BackendError, match="the vocabulary has too few tokens that stand for text"):
        batch_variance(backend)
    backend.close()
