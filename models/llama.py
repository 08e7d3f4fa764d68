"""llama.cpp behind the `Backend` protocol: purely token ids, one context, some sequences, one thread.

Built on llama-cpp-python's low-level functions. All prompts live in the cells of one cache. With one slot flash
attention is off and a prompt's cells are its positions, so equal passes are bit-equal; forks lie behind them and are
gone before the next prompt. With several it is on, because it skips the cells of other prompts; then a row's company
and its place in the cache show in the last digits. It does not schedule or sample.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from sds.models.llama_batch import TokenBatch
from sds.models.protocol import FORKS_MAX, SLOTS_MAX, BackendError, ChatFrame, Row, shared_sections
from sds.models.vocabulary import Vocabulary
from sds.models.words import model_frame, tokens_of

CONTEXT_TOKENS = 4096
BATCH_TOKENS = 512
FORK_TOKENS_MAX = 2048  # of all forks together, beyond what the slots hold
CACHE_TOKENS_MAX = 1 << 17  # of all slots together: every one can be full at once
_GGUF_MAGIC = b"GGUF"


@dataclass(slots=True)
class _Prompt:
    """What one sequence of the cache holds. `own`: what a fork holds beyond its slot."""

    sequence: int
    origin: int
    sections: list[tuple[int, ...]] = field(default_factory=list)
    position: int = 0
    own: int = 0


class LlamaBackend:
    """One GGUF model with one cache. Give each thread its own; call `close()` when done."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = CONTEXT_TOKENS,
        n_batch: int = BATCH_TOKENS,
        threads: int | None = None,
        slots: int = 1,
        gpu_layers: int = 0,
        fingerprint: str | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` is not a GGUF file that llama.cpp can run.

        `n_ctx`: tokens a slot can hold. `gpu_layers`: how many layers a build for a GPU puts there, -1: all.
        `fingerprint`: of the file, where it was just looked at.
        """
        _check_cache(slots, n_ctx)
        self.name = path.name
        self.fingerprint = fingerprint or gguf_fingerprint(path)
        self.context_tokens_max = n_ctx
        self.slots = slots
        self.pass_tokens_max = min(n_batch, n_ctx)
        self._model, self._vocabulary = load_gguf(path, gpu_layers=gpu_layers)
        self.vocab_size = self._vocabulary.size
        self._layers = lib.llama_model_n_layer(self._model)
        self._width = lib.llama_model_n_embd(self._model)
        cells = slots * n_ctx + FORK_TOKENS_MAX
        self._context = _context(self._model, cells, self.pass_tokens_max, slots, threads or os.cpu_count() or 1)
        self._memory = lib.llama_get_memory(self._context)
        self._batch = TokenBatch(cells)
        self._prompts: dict[int, _Prompt] = {}
        self._free: list[int] = []
        self._next_fork = slots
        self._empty()
        self._open = True
        self._frame: ChatFrame | None = None

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self._vocabulary, text, special=special)

    def piece(self, token: int) -> bytes:
        return self._vocabulary.piece(token)

    def frame(self) -> ChatFrame:
        self._ready()
        if self._frame is None:
            self._frame = model_frame(chat_template(self._model), self._vocabulary)
        return self._frame

    def begin(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; what another slot holds of them is shared."""
        self._ready()
        wanted = [tuple(section) for section in sections]
        prompt = self._slot(slot)
        self._fits(sum(map(len, wanted)))
        for section in wanted:
            self._known(section)
        self._keep(prompt, wanted)
        for section in wanted[len(prompt.sections) :]:
            if section:
                self._decode([Row(slot, section, 0)])
            prompt.sections.append(section)

    def step(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.run([Row(slot, tokens)])[0][0]
        return logits

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self._ready()
        self._runnable(rows)
        found, logits = self._decode(rows), []
        end = 0
        for row in rows:
            logits.append(found[end : end + row.outputs])
            end += row.outputs
        return logits

    def fork(self, slot: int) -> int:
        """Return a new slot with what `slot` holds: it shares its cells. A fork goes when its prompt does."""
        self._ready()
        source = self._prompt(slot)
        if not self._free:
            raise BackendError(f"more than {FORKS_MAX} forks at once", hint="drop some, or score fewer alternatives")
        fork, self._next_fork = self._next_fork, self._next_fork + 1
        made = _Prompt(self._free.pop(), source.origin, [], source.position, source.own)
        lib.llama_memory_seq_cp(self._memory, source.sequence, made.sequence, 0, -1)
        self._prompts[fork] = made
        return fork

    def drop(self, fork: int) -> None:
        """Give a fork's slot back; one that went with its prompt, or after a failure, may be dropped again."""
        self._ready()
        if not self.slots <= fork < self._next_fork:
            raise BackendError(f"there is no fork {fork}")
        dropped = self._prompts.pop(fork, None)
        if dropped is not None:
            lib.llama_memory_seq_rm(self._memory, dropped.sequence, -1, -1)
            self._free.append(dropped.sequence)

    def hidden(
        self, sections: Sequence[Sequence[int]], *, span: tuple[int, int] | None = None, layer: int | None = None
    ) -> NDArray[np.float32]:
        """Return the state after the last layer and its norm. All of the last section goes through the head, too."""
        self._ready()
        self._ends_at(layer)
        last = tuple(sections[-1]) if sections else ()
        start, end = span or (len(last) - 1, len(last))
        if not 0 <= start < end <= len(last):
            raise BackendError(f"positions {start} to {end} are no part of a section of {len(last)} tokens")
        self._fits(sum(map(len, sections)))
        self._known(last)
        self.begin(sections[:-1])
        lib.llama_set_embeddings(self._context, True)
        try:
            states = self._decode([Row(0, last, len(last))], hidden=True)
        finally:
            lib.llama_set_embeddings(self._context, False)
        self._prompts[0].sections.append(last)
        mean: NDArray[np.float32] = states[start:end].mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean

    def close(self) -> None:
        if self._open:
            self._open = False
            self._vocabulary.release()
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _prompt(self, slot: int) -> _Prompt:
        prompt = self._prompts.get(slot)
        if prompt is None:
            raise BackendError(f"there is no slot {slot}")
        return prompt

    def _slot(self, slot: int) -> _Prompt:
        if not 0 <= slot < self.slots:
            raise BackendError(f"there is no slot {slot}")
        return self._prompts[slot]

    def _fits(self, tokens: int) -> None:
        if tokens > self.context_tokens_max:
            raise BackendError(
                f"{tokens} tokens are more than the model's context of {self.context_tokens_max}",
                hint="shorten the prompt or load the model with a larger context",
            )

    def _known(self, tokens: Sequence[int]) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            raise BackendError("a token is outside the vocabulary")

    def _ends_at(self, layer: int | None) -> None:
        if layer not in (None, self._layers):
            raise BackendError(
                f"llama.cpp hands out hidden states after the last of {self._layers} layers only",
                hint=f"`sds models prepare --layers {layer}` makes a model that ends there",
            )

    def _runnable(self, rows: Sequence[Row]) -> None:
        """Refuse before anything is decoded: llama.cpp ends the process over some of these."""
        if not rows:
            raise BackendError("a pass needs at least one row")
        if len({row.slot for row in rows}) != len(rows):
            raise BackendError("a pass holds at most one row of a slot")
        ahead = sum(prompt.own for fork, prompt in self._prompts.items() if fork >= self.slots)
        for row in rows:
            if not row.tokens:
                raise BackendError("a step needs at least one token")
            if not 0 <= row.outputs <= len(row.tokens):
                raise BackendError(f"{row.outputs} outputs of {len(row.tokens)} tokens were asked for")
            self._known(row.tokens)
            self._fits(self._prompt(row.slot).position + len(row.tokens))
            ahead += len(row.tokens) if row.slot >= self.slots else 0
        if ahead > FORK_TOKENS_MAX:
            raise BackendError(f"forks hold {ahead} tokens of their own, at most {FORK_TOKENS_MAX}")

    def _keep(self, prompt: _Prompt, wanted: list[tuple[int, ...]]) -> None:
        """Cut `prompt` back to the leading sections it shares with `wanted`, or copy more of them from another slot."""
        for fork in [fork for fork, made in self._prompts.items() if made.origin == prompt.origin]:
            if fork >= self.slots:
                self.drop(fork)
        others = [self._prompts[slot] for slot in range(self.slots)]
        donor = max([prompt, *others], key=lambda held: shared_sections(wanted, held.sections))
        prompt.sections = wanted[: shared_sections(wanted, donor.sections)]
        prompt.position = sum(map(len, prompt.sections))
        kept = prompt.position if donor is prompt else 0
        if not lib.llama_memory_seq_rm(self._memory, prompt.sequence, kept, -1):
            self._forget()
            raise BackendError("the model's cache cannot be cut back")
        if donor is not prompt and prompt.position:
            lib.llama_memory_seq_cp(self._memory, donor.sequence, prompt.sequence, 0, prompt.position)

    def _decode(self, rows: Sequence[Row], *, hidden: bool = False) -> NDArray[np.float32]:
        """Append all rows in as few passes as they take; return the outputs wanted, in order, [outputs, width]."""
        batch = self._batch
        batch.clear()
        for row in rows:
            prompt = self._prompts[row.slot]
            batch.add(row.tokens, position=prompt.position, sequence=prompt.sequence, outputs=row.outputs)
        passes = -(-batch.size // self.pass_tokens_max)
        length = -(
            -batch.size // passes
        )  # evenly: a lone token left over costs a pass, and goes through another kernel
        starts = range(0, batch.size, length)
        found = [self._pass(start, min(start + length, batch.size), hidden=hidden) for start in starts]
        for row in rows:
            prompt = self._prompts[row.slot]
            prompt.position += len(row.tokens)
            prompt.own += len(row.tokens) if row.slot >= self.slots else 0
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _pass(self, start: int, end: int, *, hidden: bool) -> NDArray[np.float32]:
        code = lib.llama_decode(self._context, self._batch.part(start, end))
        if code != 0:
            self._forget()
            raise BackendError(f"the model could not be run on {end - start} tokens (llama.cpp code {code})")
        shape = (self._batch.outputs(start, end), self._width if hidden else self.vocab_size)
        if shape[0] == 0:
            return np.empty(shape, np.float32)
        found = (lib.llama_get_embeddings if hidden else lib.llama_get_logits)(self._context)
        if not found:
            self._forget()
            raise BackendError("the model returned no logits")
        return np.ctypeslib.as_array(found, shape=shape).copy()

    def _forget(self) -> None:
        lib.llama_memory_clear(self._memory, True)
        self._empty()

    def _empty(self) -> None:
        self._prompts = {slot: _Prompt(slot, slot) for slot in range(self.slots)}
        self._free = list(range(self.slots, self.slots + FORKS_MAX))


def gguf_fingerprint(path: Path) -> str:
    try:
        with path.open("rb") as file:
            if file.read(len(_GGUF_MAGIC)) != _GGUF_MAGIC:
                raise BackendError(f"`{path}` is not a GGUF file", hint="name a GGUF file or a checkpoint folder")
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise BackendError(f"`{path}` cannot be read: {(error.strerror or 'unknown cause').lower()}") from error


def load_gguf(path: Path, *, vocab_only: bool = False, gpu_layers: int = 0) -> tuple[lib.llama_model_p, Vocabulary]:
    """Load a model, or no more than its vocabulary; the caller frees it. Raises BackendError."""
    # llama.cpp logs through this logger's level and straight to standard error; failures are raised here instead.
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    lib.llama_backend_init()
    if gpu_layers and not lib.llama_supports_gpu_offload():
        raise BackendError(
            "this llama.cpp was built without a GPU", hint="build llama-cpp-python with `CMAKE_ARGS=-DGGML_CUDA=on`"
        )
    params = lib.llama_model_default_params()
    params.vocab_only = vocab_only
    params.n_gpu_layers = gpu_layers
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    vocab = lib.llama_model_get_vocab(model) if model else None
    if model is None or vocab is None:
        raise BackendError(f"`{path}` is damaged or of a kind this llama.cpp does not know")
    return model, Vocabulary(vocab)


def chat_template(model: lib.llama_model_p) -> str | None:
    template = lib.llama_model_chat_template(model, None)
    return template.decode() if template else None


def _check_cache(slots: int, n_ctx: int) -> None:
    if not 1 <= slots <= SLOTS_MAX:
        raise BackendError(f"{slots} slots are not between 1 and {SLOTS_MAX}")
    if slots * n_ctx > CACHE_TOKENS_MAX:
        raise BackendError(
            f"{slots} slots of {n_ctx} tokens are more than a cache of {CACHE_TOKENS_MAX}",
            hint="ask for fewer slots or a smaller context",
        )


def _context(model: lib.llama_model_p, cells: int, n_batch: int, slots: int, threads: int) -> lib.llama_context_p:
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = cells, n_batch, n_batch
    params.n_threads = params.n_threads_batch = threads
    params.n_seq_max = slots + FORKS_MAX
    params.n_outputs_max = max(n_batch, params.n_seq_max)  # llama.cpp ends the process over fewer than one a sequence
    params.kv_unified = True
    params.flash_attn_type = lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if slots > 1 else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    context: lib.llama_context_p | None = lib.llama_init_from_model(model, params)
    if context is None:
        lib.llama_model_free(model)
        raise BackendError(f"no memory for a cache of {cells} tokens", hint="load the model with a smaller context")
    return context
