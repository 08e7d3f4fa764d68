"""A reader of texts and one of rows, fitted once for all tests, each in a folder of its own."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.models.readers.opening import open_reader
from sds.models.readers.protocol import Reader
from tests.models.readers.rows import INPUTS, payments
from tests.models.readers.tiny import NAMES, claims, write_encoder

pytest.importorskip("onnx")
pytest.importorskip("sklearn")


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_encoder(tmp_path_factory.mktemp("base") / "tiny-bert")


@pytest.fixture(scope="session")
def fitted_head(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sds.models.fitting.encoder_head import fit_head

    folder = tmp_path_factory.mktemp("head") / "cause"
    fit_head(*claims(180, seed=1), names=NAMES, base=base).calibrated(*claims(60, seed=2)).export(folder)
    return folder


@pytest.fixture(scope="session")
def fitted_table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from sds.models.fitting.tabular import fit_tabular

    folder = tmp_path_factory.mktemp("table") / "risk"
    fit_tabular(*payments(1500, random.Random(1)), inputs=INPUTS).calibrated(*payments(1000, random.Random(2))).export(
        folder
    )
    return folder


@pytest.fixture
def head_folder(fitted_head: Path, tmp_path: Path) -> Path:
    """Return a copy that a test may damage."""
    return Path(shutil.copytree(fitted_head, tmp_path / "cause"))


@pytest.fixture(scope="session")
def head(fitted_head: Path) -> Iterator[Reader]:
    reader = open_reader(fitted_head)
    yield reader
    reader.close()


@pytest.fixture(scope="session")
def table(fitted_table: Path) -> Iterator[Reader]:
    reader = open_reader(fitted_table)
    yield reader
    reader.close()
