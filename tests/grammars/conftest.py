"""The tokenizers that grammars are compiled for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sds.models.catalog.catalog import embedded_model
from tests.grammars.tokenizers import Tokens, in_threes, joined, of_gguf
from tests.small_models import sentencepiece_gguf

NAMES = ["embedded", "sentencepiece", "threes", "joined"]


@pytest.fixture(scope="module")
def embedded() -> Iterator[Tokens]:
    with of_gguf(embedded_model()) as tokens:
        yield tokens


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tokens]:
    with of_gguf(sentencepiece_gguf(tmp_path_factory.mktemp("words") / "sentencepiece.gguf")) as tokens:
        yield tokens


@pytest.fixture(scope="module")
def threes() -> Tokens:
    return in_threes()


@pytest.fixture(name="joined", scope="module")
def joined_() -> Tokens:
    return joined()


@pytest.fixture(scope="module", params=NAMES)
def words(request: pytest.FixtureRequest) -> Tokens:
    found: Tokens = request.getfixturevalue(request.param)
    return found
