"""Which weights a benchmark runs, in which library, and how large they are."""

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

OF_WORDS = "token_embd.weight", "output.weight"
BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "int8-bf16": 1, "int16": 1}


@dataclass(frozen=True, slots=True)
class Weights:
    """What ours runs: a GGUF file, in a library; `dtype`: in which data type, None: in the library's own."""

    path: Path
    library: Library = DEFAULT
    dtype: Dtype | None = None

    def open(self) -> Backend:
        """Raises BackendError."""
        return open_backend(self.path, library=self.library, dtype=self.dtype)

    @property
    def multiplies_in(self) -> Dtype:
        """Return in what its products are made, as far as rates go: llama.cpp's kernels add up in 32-bit floats."""
        return self.dtype or BACKENDS[self.library].usual_dtype() or "fp32"

    def size(self) -> tuple[int, int]:
        """Return the weights' bytes as its products read them, and with how many of them each token is multiplied."""
        in_file, parameters, of_words = size_of(self.path)
        read = in_file if not BACKENDS[self.library].dtypes else BYTES[self.multiplies_in] * parameters
        return read, parameters - of_words

    def facts(self, sha256: str | None = None) -> dict[str, object]:
        """Return what a document says of them. `sha256`: where it is known."""
        said = {"name": self.path.name, "sha256": sha256 or gguf_fingerprint(self.path)}
        runs = runtime_facts(self.library, dtype=self.dtype)
        return said | {name: runs[name] for name in ("library", "dtype") if name in runs}


def add_weights(parser: Parser) -> None:
    parser.add_argument("--model", type=existing, help="a GGUF file; left out: the embedded model as prepared here")
    parser.add_argument("--library", choices=MEASURED, help="what runs it; left out: what was prepared, or llamacpp")
    what = "in what OpenVINO or integer passes multiply; left out: what was prepared, or what the library does here"
    parser.add_argument("--dtype", choices=("fp32", "bf16", "int8", "int8-bf16", "int16"), help=what)


def weights_of(asked: argparse.Namespace) -> Weights:
    """Return a user's own file, or what was prepared of the embedded model (`sds models prepare`), or that itself."""
    found, notice = (None, "") if asked.model else weights_for(embedded_model(), model_cache())
    if notice:
        print(notice, file=sys.stderr)
    if found is None:
        return Weights(asked.model or embedded_model(), asked.library or DEFAULT, asked.dtype)
    library = asked.library or found.record.library
    return Weights(found.path, library, asked.dtype or found.dtype_in(library))


@contextmanager
def vocabulary(path: Path) -> Iterator[ModelTokenizer]:
    """Open no more than the vocabulary of a GGUF. Raises BackendError."""
    words, template, free = tokenizer_of(path)
    try:
        yield ModelTokenizer(words, template)
    finally:
        words.release()
        free()


def size_of(path: Path) -> tuple[int, int, int]:
    """Return a GGUF's weights: bytes, how many there are, and how many of them a row for each word of the vocabulary: tokens
    are looked up in those, and only what is answered is multiplied with them.
    """
    tensors = GgufFile(path).tensors
    counts = {name: prod(tensor.shape) for name, tensor in tensors.items()}
    stored = sum(tensor.stored.nbytes for tensor in tensors.values())
    return stored, sum(counts.values()), sum(counts.get(name, 0) for name in OF_WORDS)
