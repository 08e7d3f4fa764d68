"""Transformers models for several prompts, whose rows share a call or run one by one, and weights that were prepared."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from sds.models.catalog import prepare
from sds.models.catalog.catalog import Prepared
from tests.model_fixtures import TINY_THREADS
from tests.models.catalog.preparing import OPENVINO_WINS, preparation
from tests.models.int8.libraries import plain, precision

if TYPE_CHECKING:
    from sds.models.transformers_.backend import HfBackend

__all__ = ["plain", "precision"]  # fixtures

SLOTS = 4
SLIDING = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 16, "head_dim": 32}


@pytest.fixture(scope="session")
def several(tiny_folder: Callable[[int], Path]) -> Iterator[HfBackend]:
    from sds.models.transformers_.backend import HfBackend

    backend = HfBackend(tiny_folder(1), threads=TINY_THREADS, slots=SLOTS)
    yield backend
    backend.close()


@pytest.fixture
def own_caches(tiny_folder: Callable[[int], Path], tmp_path: Path) -> Iterator[HfBackend]:
    """Return a model whose windows forget: one row a call."""
    from sds.models.transformers_.backend import HfBackend

    folder = Path(shutil.copytree(tiny_folder(1), tmp_path / "checkpoint"))
    edit(folder, **SLIDING)
    backend = HfBackend(folder, threads=TINY_THREADS, slots=SLOTS)
    yield backend
    backend.close()


@pytest.fixture(params=["several", "own_caches"])
def either(request: pytest.FixtureRequest) -> HfBackend:
    backend: HfBackend = request.getfixturevalue(request.param)
    return backend


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **changes}))


@pytest.fixture(scope="session")
def kept(tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Prepared]:
    """A source, a cache, and what was prepared of the one in the other. Copy the cache to change it."""
    source, cache = tiny_path(1), tmp_path_factory.mktemp("kept") / "models"
    found, now = preparation(cache).run(source)
    assert now
    return source, cache, found


@pytest.fixture(scope="session")
def kept_for_openvino(
    tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Prepared]:
    """The same, where BF16 through OpenVINO is the fastest."""
    source, cache = tiny_path(1), tmp_path_factory.mktemp("kept") / "models"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(prepare, "ROUNDS", 1)
        found, _ = preparation(cache, OPENVINO_WINS).run(source)
    return source, cache, found


@pytest.fixture
def copied(kept: tuple[Path, Path, Prepared], tmp_path: Path) -> tuple[Path, Path]:
    source, cache, _ = kept
    return source, shutil.copytree(cache, tmp_path / "cache" / "models")
