"""transformers behind the `Backend` protocol: purely token ids, one cache, one sequence, one thread.

A checkpoint folder (config.json, safetensors, tokenizer.json), or a GGUF file: that one is de-quantised into memory and
keeps llama.cpp's tokenizer. Nothing is downloaded, no code of the model's is run, no pickle is read. Needs the extra
`hf`. torch has one number of threads for the whole process: loading a model sets it.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from functools import partial
from logging import CRITICAL
from pathlib import Path
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from sds.models.llama import BATCH_TOKENS, CONTEXT_TOKENS, chat_template, gguf_fingerprint, load_gguf
from sds.models.protocol import BackendError, ChatFrame, Dtype, shared_sections
from sds.models.vocabulary import Vocabulary
from sds.models.words import grammar_tokenizer, model_frame, tokens_of

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    from transformers.cache_utils import DynamicLayer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils.logging import set_verbosity

    from sds.models.hf_vocabulary import HfVocabulary
except ImportError as error:
    raise BackendError(
        "transformers and torch are not installed", hint="pip install 'sovereign-decision-stream[hf]'"
    ) from error

if TYPE_CHECKING:
    from llguidance import LLTokenizer
    from numpy.typing import NDArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
READ_BYTES = 1 << 20
HINT_CHARACTERS_MAX = 200


class HfBackend:
    """One model with one cache. Give each thread its own; call `close()` when done.

    Every batch goes through eager attention alone, so its logits depend on nothing but the sections before it. Models
    whose cache cannot be cut back (sliding windows, recurrent states) read every prompt from its beginning.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        dtype: Dtype = "fp32",
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` or `device` is nothing that transformers can run."""
        self._device = _device(device)
        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.name = path.name
        self.fingerprint = _fingerprint(path)
        with _failing(f"`{path}` is damaged or of a kind transformers does not know"), _quiet():
            self._model: Any = (_from_folder if path.is_dir() else _from_gguf)(path, DTYPES[dtype])
            self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
            self._words, self._template, self._free = _vocabulary(path, self.vocab_size)
        with _failing(f"the model cannot be moved to `{device}`"):
            self._model.eval().to(self._device)
        longest = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        self.context_tokens_max = min(n_ctx, longest) if isinstance(longest, int) else n_ctx
        self._open = True
        self._tokenizer: LLTokenizer | None = None
        self._frame: ChatFrame | None = None
        self._held: list[tuple[int, ...]] = []
        self._position = 0
        self._cache = DynamicCache(config=self._model.config)

    @property
    def module(self) -> Any:
        """The model itself, for a library that drives it on its own."""
        self._ready()
        return self._model

    @property
    def end_token(self) -> int:
        return self._words.eos

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self._words, text, special=special)

    def piece(self, token: int) -> bytes:
        return self._words.piece(token)

    def frame(self) -> ChatFrame:
        self._ready()
        if self._frame is None:
            self._frame = model_frame(self._template, self._words)
        return self._frame

    def grammar_tokenizer(self) -> LLTokenizer:
        self._ready()
        if self._tokenizer is None:
            self._tokenizer = grammar_tokenizer(self._words)
        return self._tokenizer

    def begin(self, sections: Sequence[Sequence[int]]) -> None:
        self._ready()
        wanted = [tuple(section) for section in sections]
        self._fits(sum(map(len, wanted)))
        kept = self._cut_back(shared_sections(wanted, self._held))
        for section in wanted[kept:]:
            self._decode(section)
            self._held.append(section)

    def step(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        self._ready()
        if not tokens:
            raise BackendError("a step needs at least one token")
        self._fits(self._position + len(tokens))
        return self._decode(tokens)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._words.release()
            self._free()
            del self._model, self._cache

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _fits(self, tokens: int) -> None:
        if tokens > self.context_tokens_max:
            raise BackendError(
                f"{tokens} tokens are more than the model's context of {self.context_tokens_max}",
                hint="shorten the prompt or load the model with a larger context",
            )

    def _cut_back(self, kept: int) -> int:
        """Leave only the first `kept` sections in the cache, or none where it cannot be cut; return how many."""
        position = sum(map(len, self._held[:kept]))
        surplus = self._position - position
        if not position or (surplus and not all(type(layer) is DynamicLayer for layer in self._cache.layers)):
            self._forget()
            return 0
        if surplus:
            with self._failing_empty("the model's cache cannot be cut back"):
                self._cache.crop(-surplus)
        self._held, self._position = self._held[:kept], position
        return kept

    def _decode(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run the tokens through the model; return the last one's logits."""
        if any(not 0 <= token < self.vocab_size for token in tokens):
            raise BackendError("a token is outside the vocabulary")
        logits = np.zeros(0, np.float32)
        for start in range(0, len(tokens), BATCH_TOKENS):
            part = tokens[start : start + BATCH_TOKENS]
            with self._failing_empty(f"the model could not be run on {len(part)} tokens"), torch.inference_mode():
                ids = torch.tensor([part], device=self._device)  # shape [1, len(part)]
                found = self._model(input_ids=ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
                logits = found.logits[0, -1].float().cpu().numpy()
            self._position += len(part)
        return logits

    @contextmanager
    def _failing_empty(self, what: str) -> Iterator[None]:
        try:
            with _failing(what):
                yield
        except BackendError:
            self._forget()
            raise

    def _forget(self) -> None:
        self._held, self._position = [], 0
        self._cache = DynamicCache(config=self._model.config)


def _device(name: str) -> torch.device:
    kind, _, number = name.partition(":")
    if kind not in {"cpu", "cuda"} or (number and not number.isdecimal()):
        raise BackendError(f"`{name}` is no device", hint="cpu, cuda or cuda:NUMBER")
    if kind == "cuda" and int(number or 0) >= (count := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise BackendError(f"no CUDA device{f' {number}' if count else ''}: torch sees {count or 'none'}")
    return torch.device(name)


def _fingerprint(path: Path) -> str:
    """Return the SHA-256 of the weights: of a GGUF file, or of a folder's safetensors files end to end, by name."""
    if not path.is_dir():
        return gguf_fingerprint(path)
    if (path / "adapter_config.json").exists():
        raise BackendError(f"`{path}` is an adapter, not a model", hint="merge it into its model first")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise BackendError(
            f"`{path}` holds no safetensors", hint="save_pretrained(FOLDER) writes them; pickles are never loaded"
        )
    digest = hashlib.sha256()
    for name in files:
        with name.open("rb") as file:
            while chunk := file.read(READ_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _vocabulary(path: Path, size: int) -> tuple[Vocabulary | HfVocabulary, str | None, Callable[[], object]]:
    """Return the words of `size` logits, the chat template, and what frees them."""
    if path.is_dir():
        words = HfVocabulary(path, size)
        return words, words.chat_template, lambda: None
    model, vocabulary = load_gguf(path, vocab_only=True)
    if vocabulary.size != size:
        raise BackendError(f"the model has {size} logits and {vocabulary.size} tokens")
    return vocabulary, chat_template(model), partial(llama_cpp.llama_model_free, model)


def _from_folder(path: Path, dtype: torch.dtype) -> Any:
    load: Any = AutoModelForCausalLM.from_pretrained
    return _whole(load(path, local_files_only=True, trust_remote_code=False, use_safetensors=True, **_options(dtype)))


def _from_gguf(path: Path, dtype: torch.dtype) -> Any:
    """De-quantise through transformers' tables; its own `gguf_file=` would want one more library for the same."""
    where = {"gguf_file": path.name, "local_files_only": True, "trust_remote_code": False}
    config = AutoConfig.from_pretrained(path.parent, **where)
    build: Any = AutoModelForCausalLM.from_config
    read: Any = load_gguf_checkpoint
    with torch.device("meta"):
        shapes = build(config)
    weights = read(path, return_tensors=True, model_to_load=shapes, torch_dtype=dtype)["tensors"]
    return _whole(type(shapes).from_pretrained(None, config=config, state_dict=weights, **_options(dtype)))


def _options(dtype: torch.dtype) -> dict[str, Any]:
    return {"dtype": dtype, "attn_implementation": "eager", "output_loading_info": True}


def _whole(loaded: tuple[Any, dict[str, Any]]) -> Any:
    """Refuse a model with weights that were not loaded: they would be random numbers."""
    model, found = loaded
    lacking = sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]]))
    if lacking:
        raise BackendError(f"the checkpoint lacks {len(lacking)} weights, the first is `{lacking[0]}`")
    for name, weights in model.state_dict().items():
        if weights.is_floating_point() and not bool(torch.isfinite(weights).all()):
            raise BackendError(f"the weights `{name}` hold what is no number in {weights.dtype}")
    return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and warnings off standard error; failures are raised here instead."""
    set_verbosity(CRITICAL)
    with redirect_stderr(io.StringIO()):
        yield


@contextmanager
def _failing(what: str) -> Iterator[None]:
    try:
        yield
    except BackendError:
        raise
    except Exception as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            raise BackendError(f"{what}: no memory", hint="use a smaller model, prompt or dtype") from error
        raise BackendError(what, hint=(str(error).strip().splitlines() or [""])[0][:HINT_CHARACTERS_MAX]) from error
