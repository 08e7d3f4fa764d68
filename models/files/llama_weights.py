"""The tensors and settings of a GGUF of the architecture `llama`, for backends that run such a model layer by layer.

A file is refused unless every tensor in it is used there and every setting of its architecture is known.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from math import inf
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from sds.models.files.gguf_header import GgufFile
from sds.models.protocol import BackendError

ARCHITECTURE = "llama"
KNOWN = {
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "vocab_size",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.freq_base",
    "rope.dimension_count",
}
EMBEDDING, NORM = "token_embd.weight", "output_norm.weight"
HEAD, ROPE_FACTORS = "output.weight", "rope_freqs.weight"  # a file may lack these
BF16_MAX = 3.38953139e38
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The sizes of a model: numbers of layers, of query and key heads, of values in a head, of a token's state outside
    and `inner`, of tokens in the vocabulary and positions. Raises ValueError for impossible sizes.
    """

    layers: int
    heads: int
    key_heads: int
    head: int
    width: int
    inner: int
    vocab_size: int
    context: int
    rope_base: float
    epsilon: float

    def __post_init__(self) -> None:
        if min(size for size in astuple(self) if isinstance(size, int)) < 1:
            raise ValueError("one of its sizes is not positive")
        if self.heads % self.key_heads or self.head % 2:
            raise ValueError("heads cannot be shared evenly or halved")
        if not (0 < self.rope_base < inf and 0 <= self.epsilon < inf):
            raise ValueError("its `rope.freq_base` or the epsilon of its norms is out of range")

    @property
    def kv_width(self) -> int:
        """How many numbers the keys of one token in one layer have, and as many its values."""
        return self.key_heads * self.head

    def tensors(self, layers: int) -> dict[str, tuple[int, ...]]:
        """Return the names and shapes of the tensors in a file with so many layers."""
        queries, keys, width, inner = self.heads * self.head, self.key_heads * self.head, self.width, self.inner
        of_layer = {
            "attn_norm": (width,),
            "attn_q": (queries, width),
            "attn_k": (keys, width),
            "attn_v": (keys, width),
            "attn_output": (width, queries),
            "ffn_norm": (width,),
            "ffn_gate": (inner, width),
            "ffn_up": (inner, width),
            "ffn_down": (width, inner),
        }
        embedding = {EMBEDDING: (self.vocab_size, width), HEAD: (self.vocab_size, width)}
        vectors = {NORM: (width,), ROPE_FACTORS: (self.head // 2,)}
        layered = {f"blk.{n}.{part}.weight": shape for n in range(layers) for part, shape in of_layer.items()}
        return embedding | vectors | layered


class LlamaWeights:
    """The tensors of a GGUF file, read on demand. Raises BackendError for a file that `runs`, a library, does not run."""

    def __init__(self, path: Path, runs: str) -> None:
        self._runs = runs
        self._file = GgufFile(path)
        try:
            self.shape = self._shape()
        except ValueError as error:
            raise BackendError(f"`{path}` does not describe its model", hint=str(error)) from error
        self._check()

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def __getitem__(self, name: str) -> NDArray[np.float32]:
        """Return a tensor, de-quantised."""
        values = self._file.tensors[name].values()
        if not -BF16_MAX <= values.min() <= values.max() <= BF16_MAX:
            raise BackendError(f"the weights `{name}` contain values that are too large or not numbers")
        return values

    def rope_tables(self, context: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Return cosines and sines of the rotary embedding (RoPE), each [context, head]."""
        half = self.shape.head // 2
        turns = self.shape.rope_base ** -(np.arange(half, dtype=np.float64) / half)
        if ROPE_FACTORS in self:
            factors = self[ROPE_FACTORS]
            if not factors.all():
                raise BackendError(f"the weights `{ROPE_FACTORS}` contain a zero, but they are divisors")
            turns /= factors
        angles = np.tile(np.outer(np.arange(context), turns), 2)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rope_halves(self, name: str, heads: int) -> NDArray[np.float32]:
        """Return a projection into heads whose RoPE pairs channel i with i + head / 2; GGUF pairs neighbours."""
        weights = self[name]
        return weights.reshape(heads, -1, 2, weights.shape[1]).swapaxes(1, 2).reshape(weights.shape)

    def _shape(self) -> LlamaShape:
        said = self._settings()

        def number(name: str, kind: type[_N], default: _N | None = None) -> _N:
            value = said.get(name, default)
            if type(value) is not kind:
                raise ValueError(f"its setting `{ARCHITECTURE}.{name}` is {'no number' if name in said else 'missing'}")
            return value

        heads, width = number("attention.head_count", int), number("embedding_length", int)
        head = number("attention.key_length", int, width // max(heads, 1))
        shape = LlamaShape(
            layers=number("block_count", int),
            heads=heads,
            key_heads=number("attention.head_count_kv", int, heads),
            head=head,
            width=width,
            inner=number("feed_forward_length", int),
            vocab_size=self._file.lengths.get("tokenizer.ggml.tokens", 0),
            context=number("context_length", int),
            rope_base=number("rope.freq_base", float, 10000.0),
            epsilon=number("attention.layer_norm_rms_epsilon", float),
        )
        if {number(name, int, head) for name in ("rope.dimension_count", "attention.value_length")} != {head}:
            raise self._other("its heads are rotated only in part, or its keys and values differ in size")
        return shape

    def _settings(self) -> dict[str, Any]:
        """Return the settings of the architecture. Raises BackendError for an unknown one."""
        found = self._file.settings.get("general.architecture", "")
        if found != ARCHITECTURE:
            raise BackendError(
                f"only GGUF files of the architecture `{ARCHITECTURE}` run in {self._runs}, not of `{found}`",
                hint="choose llamacpp",
            )
        prefix = f"{ARCHITECTURE}."
        names = {name for name in (*self._file.settings, *self._file.lengths) if name.startswith(prefix)}
        if unknown := sorted(name for name in names if name[len(prefix) :] not in KNOWN):
            raise self._other(f"its setting `{unknown[0]}` is not known")
        return {name[len(prefix) :]: self._file.settings.get(name) for name in names}

    def _check(self) -> None:
        """Raise BackendError for a file with other tensors than are used: it would be another model."""
        # A file that claims more layers than it has tensors lacks one of them anyway: this limits the cost of false claims.
        needed = self.shape.tensors(min(self.shape.layers, len(self._file.tensors) + 1))
        found = {name: tensor.shape for name, tensor in self._file.tensors.items()}
        if lacking := sorted(needed.keys() - found.keys() - {HEAD, ROPE_FACTORS}):
            raise self._other(f"it has no tensor `{lacking[0]}`")
        if surplus := sorted(found.keys() - needed.keys()):
            raise self._other(f"it has the unknown tensor `{surplus[0]}`")
        if wrong := sorted(name for name in found if found[name] != needed[name]):
            raise self._other(f"the shape of `{wrong[0]}` differs from its settings")

    def _other(self, why: str) -> BackendError:
        return BackendError(f"this model does not run in {self._runs} here: {why}", hint="choose llamacpp")
