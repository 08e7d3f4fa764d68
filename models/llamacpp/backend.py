"""llama.cpp behind the `Backend` protocol: token ids only, one context, several sequences, one thread.

Built on llama-cpp-python's low-level functions. All prompts lie in the cells of one KV cache, with room for all slots
full at once, for the tokens of FORKS_MAX forks and, with several slots, for one more slot and for fragments. With one
slot, flash attention is off and a prompt's cells are its positions, so equal passes are bit-equal; forks lie behind
them and are dropped before the next prompt. (With it on, the same prefix cut elsewhere gave logits up to 0.3 apart.)
With several, it is on, because it skips the cells of other prompts, and a row has the same bits in any batch: cells
ascend (`kv_cache`), no pass has so many tokens that attention runs in tiles, and a lone token or output is padded,
because a single one gets another matrix kernel.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from sds.models.cache.prefix_cache import PrefixCache, SlotBackend, shared_sections
from sds.models.files.fingerprint import gguf_fingerprint, identity
from sds.models.llamacpp.context import KVBlock, LlamaKVCache, Prompt, TokenBatch, check_cache, check_fit, new_context
from sds.models.llamacpp.weights import GgufModel, chat_template, is_one_state, trained_context
from sds.models.protocol import CONTEXT_TOKENS, FORKS_MAX, BackendError, Row

BATCH_TOKENS = 512
SHARED_PASS_TOKENS_MAX = 63  # with several slots: from 64 on llama.cpp attends in tiles, which add up in another order
FORK_TOKENS_MAX = 2048  # tokens for all forks together, besides the slots; more with many slots
SLOT_FORK_TOKENS_MAX = 256  # for each slot
# Used cells before a defragmentation, for each slot and at least: every pass goes through all used cells.
SLOT_FRAGMENTED_CELLS, FRAGMENTED_CELLS_MIN = 256, 2048


class LlamaBackend(SlotBackend[Prompt]):
    """One GGUF model with one cache. Give each thread its own (`replica`); call `close()` when done."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = CONTEXT_TOKENS,
        n_batch: int = BATCH_TOKENS,
        threads: int | None = None,
        slots: int = 1,
        device: str = "cpu",
        fingerprint: str | None = None,
        model: GgufModel | None = None,
    ) -> None:
        """Load weights. Raises BackendError when llama.cpp cannot run `path`.

        `n_ctx`: tokens a slot can hold. `device`: as in `load_gguf`. `fingerprint`: of the file, where known. `model`:
        the loaded weights of the file, for a replica; on their own device.
        """
        check_cache(slots, n_ctx)
        self.name = path.name
        seen = identity(path)
        self.fingerprint = fingerprint or gguf_fingerprint(path)
        self._path, self._model = path, model.hold() if model else GgufModel(path, device=device)
        try:
            if identity(path) != seen:
                raise BackendError(f"`{path}` was changed while it was opened", hint="open it again")
            self._make(n_ctx, n_batch, threads or os.cpu_count() or 1, slots)
        except BaseException:
            self._model.release()
            raise

    def _make(self, n_ctx: int, n_batch: int, threads: int, slots: int) -> None:
        """Make context and cache over the weights, no larger than the context that the model was trained for."""
        check_fit(self._model, slots)
        super().__init__(self._model.tokenizer(), chat_template(self._model.pointer), slots)
        self.context_tokens_max = n_ctx = trained_context(self._model.pointer, n_ctx)
        self.pass_tokens_max = min(n_batch, n_ctx) if slots == 1 else min(max(n_batch, 2), SHARED_PASS_TOKENS_MAX)
        self._fork_tokens_max = max(FORK_TOKENS_MAX, slots * SLOT_FORK_TOKENS_MAX)
        fragmented_max = max(FRAGMENTED_CELLS_MIN, slots * SLOT_FRAGMENTED_CELLS) if slots > 1 else 0
        cells = slots * n_ctx + self._fork_tokens_max + (n_ctx + fragmented_max if slots > 1 else 0)
        self._context = new_context(self._model, cells, self.pass_tokens_max, slots, threads)
        self._kv_cache = LlamaKVCache(
            self._context, cells, sequences=slots + FORKS_MAX, fragmented_max=fragmented_max, keep_max=n_ctx
        )
        self._batch = TokenBatch(cells + 1)
        self._prefix_cache: PrefixCache[KVBlock] = PrefixCache()
        self._one_state = is_one_state(self._model.pointer)
        self._writes = 0
        self._empty()

    @property
    def fragmented(self) -> bool:
        return self._kv_cache.fragmented

    def defragment(self) -> None:
        """Free the cells of past prompts. The lowest sections stay: those that were read first since the last time."""
        self._ready()
        self._drop_forks(*range(self.slots))
        prompts = self._prompts.values()
        keep = self._kv_cache.keepable(span for prompt in prompts for span in prompt.spans)
        try:
            for prompt in prompts:
                prompt.truncate(sum(1 for _, end in prompt.spans if end <= keep))
                self._kv_cache.truncate(prompt.sequence, prompt.position)
            self._kv_cache.defragment(keep)
        except BackendError:
            self._clear()

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; sections that another slot holds are shared."""
        self._ready()
        if self._has_nan:
            self._clear()
        wanted = self._begun(sections, slot)
        if self.fragmented and not any(other.position for other in self._prompts.values() if other.origin != slot):
            self.defragment()
        prompt = self._prompts[slot]  # a failed defragmentation replaces it
        self._truncate(prompt, wanted)
        self._prefix_cache.touch(prompt.sections)
        for number, section in enumerate(wanted[len(prompt.sections) :], start=len(prompt.sections) + 1):
            start, _ = self._kv_cache.use(0)
            if section:
                self._append_section(slot, section, last=number == len(wanted))
            prompt.sections.append(section)
            prompt.spans.append((start, start + len(section)))

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        wanted = [tuple(section) for section in sections]
        if self._one_state:
            return self._prompts[0].is_all(wanted) or self._prefix_cache.get(wanted) is not None
        return self._prefix_cache.holds(wanted, behind=max(self._shared(wanted)))

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self._ready()
        self._check(rows)
        ends = accumulate((row.outputs for row in rows), initial=0)
        logits = self._decode(rows)
        return [logits[start:end] for start, end in pairwise(ends)]

    def replica(self, *, threads: int, slots: int = 1) -> LlamaBackend:
        """Return another backend over the same weights, for another thread."""
        self._ready()
        return self._replica(n_ctx=self.context_tokens_max, threads=threads, slots=slots, model=self._model)

    def _forked(self, source: Prompt) -> Prompt:
        """Return a fork, which shares its source's cells."""
        made = Prompt(self._free_sequences.pop(), source.origin, position=source.position, writes=dict(source.writes))
        self._kv_cache.share(source.sequence, made.sequence, -1)
        return made

    def _dropped(self, prompt: Prompt) -> None:
        self._kv_cache.truncate(prompt.sequence, 0)
        self._free_sequences.append(prompt.sequence)

    def _free(self) -> None:
        lib.llama_free(self._context)
        self._model.release()

    def _check(self, rows: Sequence[Row]) -> None:
        """Raise BackendError before anything is decoded: llama.cpp ends the process over some of these."""
        if not rows:
            raise BackendError("a pass needs at least one row")
        super()._check(rows)
        writes = dict[int, int]()
        for fork, prompt in self._prompts.items():
            writes |= prompt.writes if fork >= self.slots else {}
        forked = sum(writes.values())
        forked += sum(len(row.tokens) for row in rows if row.slot >= self.slots)
        if forked > self._fork_tokens_max:
            raise BackendError(f"forks hold {forked} tokens of their own, which is more than {self._fork_tokens_max}")

    def _truncate(self, prompt: Prompt, wanted: list[tuple[int, ...]]) -> None:
        """Truncate `prompt` to the leading sections that it shares with `wanted`, or copy more of them from another slot."""
        if self._one_state:
            self._restore_state(prompt, wanted)
            return
        every = [prompt, *(self._prompts[slot] for slot in range(self.slots))]
        whole = (held for held in every if self._kv_cache.is_whole(held.sequence))
        donor = max(whole, key=lambda held: shared_sections(wanted, held.sections), default=Prompt(-1, -1))
        prompt.sections = wanted[: shared_sections(wanted, donor.sections)]
        prompt.spans = donor.spans[: len(prompt.sections)]
        prompt.position = sum(map(len, prompt.sections))
        try:
            self._kv_cache.truncate(prompt.sequence, prompt.position if donor is prompt else 0)
        except BackendError:
            self._clear()
            raise
        if donor is not prompt and prompt.position:
            self._kv_cache.share(donor.sequence, prompt.sequence, prompt.position)

    def _restore_state(self, prompt: Prompt, wanted: list[tuple[int, ...]]) -> None:
        """Restore the longest beginning of `wanted` whose state is cached, unless all that `prompt` has read begins
        `wanted`. The one state of a recurrent model cannot be truncated.
        """
        if prompt.is_all(wanted[: len(prompt.sections)]):
            return
        self._kv_cache.truncate(prompt.sequence, 0)
        prompt.truncate(0)
        for count in range(len(wanted), 0, -1):
            state = self._prefix_cache.get(wanted[:count])
            if state is not None and self._kv_cache.write_block(
                prompt.sequence, 0, sum(map(len, wanted[:count])), state
            ):
                prompt.restore(wanted[:count])
                return

    def _append_section(self, slot: int, section: tuple[int, ...], *, last: bool) -> None:
        """Append a section to the slot: from the prefix cache, or by reading it. A state after the `last` section is
        not cached, because nothing continues from it.
        """
        prompt = self._prompts[slot]
        sections, start, end = (*prompt.sections, section), prompt.position, prompt.position + len(section)
        kv_block = None if self._one_state else self._prefix_cache.get(sections)
        if kv_block is not None and self._kv_cache.write_block(prompt.sequence, start, end, kv_block):
            prompt.position = end
            return
        self._decode([Row(slot, section, 0)])
        if self._one_state and last:
            return
        kv_block = self._kv_cache.read_block(prompt.sequence, 0 if self._one_state else start, end)
        if kv_block is not None:
            self._prefix_cache.put(sections, kv_block, len(kv_block))

    def _decode(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Append all rows in as few passes as possible; return the outputs wanted, in order, [outputs, vocab_size]."""
        batch = self._batch
        batch.clear()
        tokens = sum(len(row.tokens) for row in rows)
        if self._kv_cache.full(tokens + 1):
            self._clear()
            raise BackendError("the cache is fragmented", hint="call `defragment` between two decisions")
        for row in rows:
            prompt = self._prompts[row.slot]
            batch.add(row.tokens, position=prompt.position, sequence=prompt.sequence, outputs=row.outputs)
        passes = -(-tokens // self.pass_tokens_max)
        length = -(-tokens // passes)  # even parts: a lone last token would cost a pass
        starts = range(0, tokens, length)
        if self.slots > 1 and starts[-1] == tokens - 1:
            batch.add(
                rows[-1].tokens[-1:],
                position=self._kv_cache.padding_position(),
                sequence=self._kv_cache.padding,
                outputs=0,
            )
            length = max(length, 2)
        self._kv_cache.use(batch.size)
        logits = [self._pass(start, min(start + length, batch.size)) for start in starts]
        for row in rows:
            prompt = self._prompts[row.slot]
            prompt.position += len(row.tokens)
            if row.slot >= self.slots:
                self._writes += 1
                prompt.writes[self._writes] = len(row.tokens)
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def _pass(self, start: int, end: int) -> NDArray[np.float32]:
        wanted = self._batch.pad_lone_output(start, end) if self.slots > 1 else slice(None)
        code = lib.llama_decode(self._context, self._batch.part(start, end))
        if code != 0:
            self._clear()
            raise BackendError(f"the model could not be run on {end - start} tokens (llama.cpp code {code})")
        shape = (self._batch.outputs(start, end), self.vocab_size)
        if shape[0] == 0:
            return np.empty(shape, np.float32)
        logits = lib.llama_get_logits(self._context)
        if not logits:
            self._clear()
            raise BackendError("the model returned no logits")
        outputs: NDArray[np.float32] = np.ctypeslib.as_array(logits, shape=shape)[wanted].copy()
        # With one slot attention multiplies all cells, masked ones by zero; zero times NaN is NaN.
        self._has_nan |= self.slots == 1 and not np.isfinite(outputs).all()
        return outputs

    def _clear(self) -> None:
        self._kv_cache.clear()
        self._empty()

    def _empty(self) -> None:
        self._has_nan = False
        self._prompts = {slot: Prompt(slot, slot) for slot in range(self.slots)}
        self._free_sequences = list(range(self.slots, self.slots + FORKS_MAX))
