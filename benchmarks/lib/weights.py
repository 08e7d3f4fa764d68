"""The weights that a benchmark runs: their file, library and data type, and their size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

from sds.benchmarks.lib.measuring import Parser, existing
from sds.engines.factory import open_backend, runtime_facts
from sds.host.paths import model_cache
from sds.models.catalog.backends import BACKENDS, DEFAULT, MEASURED
from sds.models.catalog.catalog import embedded_model, weights_for
from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.files.gguf_header import GgufFile
from sds.models.llamacpp.weights import tokenizer_of
from sds.models.protocol import Backend, Dtype, Library
from sds.models.tokenizer.tokenizer import ModelTokenizer

OF_WORDS = "token_embd.weight", "output.weight"  # tensors with a row for each word of the vocabulary
BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int8-bf16": 1, "int16": 1}


@dataclass(frozen=True, slots=True)
class Weights:
    """A GGUF file, and the library that runs it. `dtype`: the data type of its products; None: the library's own."""

    path: Path
    library: Library = DEFAULT
    dtype: Dtype | None = None

    def open(self) -> Backend:
        """Open the backend. Raises BackendError."""
        return open_backend(self.path, library=self.library, dtype=self.dtype)

    @property
    def multiplies_in(self) -> Dtype:
        """The data type of the products, for predicting rates; fp32 for llama.cpp, whose kernels add up in it."""
        return self.dtype or BACKENDS[self.library].usual_dtype() or "fp32"

    def size(self) -> tuple[int, int]:
        """Return the bytes of the weights as products read them, and the number of weights multiplied for each token."""
        in_file, parameters, of_words = size_of(self.path)
        read = in_file if not BACKENDS[self.library].dtypes else BYTES[self.multiplies_in] * parameters
        return read, parameters - of_words

    def facts(self, sha256: str | None = None) -> dict[str, object]:
        """Return the weights' facts for a document. `sha256`: None computes it."""
        said = {"name": self.path.name, "sha256": sha256 or gguf_fingerprint(self.path)}
        runs = runtime_facts(self.library, dtype=self.dtype)
        return said | {name: runs[name] for name in ("library", "dtype") if name in runs}


def add_weights(parser: Parser) -> None:
    parser.add_argument("--model", type=existing, help="a GGUF file; left out: the embedded model as prepared here")
    parser.add_argument("--library", choices=MEASURED, help="what runs it; left out: what was prepared, or llamacpp")
    what = "in what OpenVINO or integer passes multiply; left out: what was prepared, or what the library does here"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "int8", "int8-bf16", "int16"), help=what)


def weights_of(asked: argparse.Namespace) -> Weights:
    """Return the weights that the options name: the user's file, else the prepared embedded model, else the embedded one."""
    found, notice = (None, "") if asked.model else weights_for(embedded_model(), model_cache())
    if notice:
        print(notice, file=sys.stderr)
    if found is None:
        return Weights(asked.model or embedded_model(), asked.library or DEFAULT, asked.dtype)
    library = asked.library or found.record.library
    return Weights(found.path, library, asked.dtype or found.dtype_in(library))


@contextmanager
def vocabulary(path: Path) -> Iterator[ModelTokenizer]:
    """Open the vocabulary of a GGUF alone, for a block. Raises BackendError."""
    words, template, free = tokenizer_of(path)
    try:
        yield ModelTokenizer(words, template)
    finally:
        words.release()
        free()


def size_of(path: Path) -> tuple[int, int, int]:
    """Return a GGUF's size: bytes, number of weights, and number of weights in OF_WORDS: there tokens are looked up, and only
    answered tokens are multiplied with them.
    """
    tensors = GgufFile(path).tensors
    counts = {name: prod(tensor.shape) for name, tensor in tensors.items()}
    stored = sum(tensor.stored.nbytes for tensor in tensors.values())
    return stored, sum(counts.values()), sum(counts.get(name, 0) for name in OF_WORDS)
