"""Fixtures of models (the embedded one, tiny random ones), and the README's envelope and language."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from sds.grammars.language import Language, language
from sds.kernel.envelope.envelope import DENY, DecisionEnvelope, KindBound, bound, envelope_of
from sds.models.catalog.catalog import embedded_model
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend
from tests.hostile import Vocabulary, tiny_checkpoint

CONTEXT_REF = "0123456789abcdef" * 4
TINY_THREADS = 1  # for models this small two are slower


def model_in(library: str, path: Path, **options: Any) -> Backend:
    """Open a model through a library: llama, hf, openvino or integer."""
    options = {"threads": TINY_THREADS, **options}
    if library == "llama":
        return LlamaBackend(path, **options)
    if library == "openvino":
        pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
        from sds.models.openvino_.backend import OpenvinoBackend

        return OpenvinoBackend(path, dtype="fp32", lengths=(), **options)
    if library == "integer":
        from sds.models.int8.backend import IntegerBackend

        return IntegerBackend(path, **options)
    from sds.models.transformers_.backend import HfBackend

    return HfBackend(path, **options)


@pytest.fixture(scope="session")
def vocabulary() -> Vocabulary:
    return Vocabulary(embedded_model())


@pytest.fixture(scope="session")
def tiny_path(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the path of the tiny checkpoint of a seed, written on first use."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def path(seed: int) -> Path:
        file = folder / f"tiny-{seed}.gguf"
        return file if file.exists() else tiny_checkpoint(file, vocabulary, seed)

    return path


@pytest.fixture(scope="session")
def single_path(vocabulary: Vocabulary, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the tiny checkpoint of seed 1 in single precision, where only the order of additions changes results."""
    path = tmp_path_factory.mktemp("single") / "tiny-f32.gguf"
    return tiny_checkpoint(path, vocabulary, 1, weights=GGMLQuantizationType.F32)


@pytest.fixture(scope="session")
def tiny(tiny_path: Callable[[int], Path]) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(tiny_path(1), threads=TINY_THREADS)
    yield backend
    backend.close()


@pytest.fixture(scope="session")
def tiny_folder(tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Return the checkpoint folder with the weights of `tiny_path` of the same seed, written on first use."""
    from tests.own_models import checkpoint_folder

    parent = tmp_path_factory.mktemp("folders")

    def folder(seed: int) -> Path:
        path = parent / f"tiny-{seed}"
        return path if path.exists() else checkpoint_folder(path, tiny_path(seed))

    return folder


@pytest.fixture(scope="session")
def tiny_hf(tiny_folder: Callable[[int], Path]) -> Iterator[Backend]:
    with closing(model_in("hf", tiny_folder(1))) as backend:
        yield backend


@pytest.fixture(scope="session")
def tiny_vino(tiny_path: Callable[[int], Path]) -> Iterator[Backend]:
    with closing(model_in("openvino", tiny_path(1))) as backend:
        yield backend


@pytest.fixture(scope="session")
def tiny_int(tiny_path: Callable[[int], Path]) -> Iterator[Backend]:
    with closing(model_in("integer", tiny_path(1))) as backend:
        yield backend


@pytest.fixture(params=["llama", "hf", "openvino", "integer"])
def opened(request: pytest.FixtureRequest) -> Iterator[Callable[..., Backend]]:
    """Open the tiny model of a seed through each library: `opened(seed, n_ctx=256)`. Closed when the test ends."""
    backends: list[Backend] = []
    path_of = request.getfixturevalue("tiny_folder" if request.param == "hf" else "tiny_path")

    def open_one(seed: int = 1, **options: int) -> Backend:
        backend = model_in(request.param, path_of(seed), **options)
        backends.append(backend)
        return backend

    yield open_one
    for backend in backends:
        backend.close()


@pytest.fixture(scope="session")
def own_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint folder with the embedded model's weights."""
    from tests.own_models import checkpoint_folder

    return checkpoint_folder(tmp_path_factory.mktemp("own") / "checkpoint")


@pytest.fixture(scope="module")  # a whole model: not kept for the rest of the run
def own_hf(own_checkpoint: Path) -> Iterator[Backend]:
    with closing(model_in("hf", own_checkpoint)) as backend:
        yield backend


@pytest.fixture(scope="module")  # a whole model: not kept for the rest of the run
def own_vino(own_gguf: Path) -> Iterator[Backend]:
    """Return the embedded model's weights in half precision, as `own_hf` has them, through OpenVINO."""
    with closing(model_in("openvino", own_gguf)) as backend:
        yield backend


@pytest.fixture(scope="module")  # a whole model: not kept for the rest of the run
def own_int(own_gguf: Path) -> Iterator[Backend]:
    """Return the embedded model's weights through the integer passes, as `sds models prepare` may keep them."""
    with closing(model_in("integer", own_gguf)) as backend:
        yield backend


@pytest.fixture(scope="session")
def own_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return another GGUF of the embedded model's weights."""
    from tests.own_models import second_gguf

    return second_gguf(tmp_path_factory.mktemp("own") / "model-f16.gguf")


@pytest.fixture(scope="session")
def embedded() -> Iterator[LlamaBackend]:
    backend = LlamaBackend(embedded_model(), threads=TINY_THREADS)
    yield backend
    backend.close()


def refund_envelope() -> DecisionEnvelope:
    fare, voucher = bound(1, 25000, scale=2), bound(1000, 15000, step=500, scale=2)
    assert fare is not None
    assert voucher is not None
    return envelope_of(
        [
            KindBound(DENY, ("EXTRAORDINARY", "NOT_COVERED")),
            KindBound("COMPENSATE", ("CANCELLATION", "LONG_DELAY")),
            KindBound("REFUND_TICKET", ("CANCELLATION", "LONG_DELAY"), (("amount", fare),)),
            KindBound("VOUCHER", ("DELAY",), (("amount", voucher),)),
        ]
    )


def refund_language() -> Language:
    return language(refund_envelope(), CONTEXT_REF)
