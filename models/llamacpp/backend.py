"""llama.cpp behind the `Backend` protocol: purely token ids, one context, some sequences, one thread.

Built on llama-cpp-python's low-level functions. All prompts live in the cells of one cache. With one slot flash
attention is off and a prompt's cells are its positions, so equal passes are bit-equal; forks lie behind them and are
gone before the next prompt. With several it is on, because it skips the cells of other prompts, and a row gives the same
bits in any company: cells rise (`llama_cells`), passes are too short for the tiled attention, and neither a lone token
nor a lone output goes through a kernel of its own, for both get company. It does not schedule or sample.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from sds.models.cache.prefix_cache import PrefixCache
from sds.models.files.fingerprint import gguf_fingerprint, identity
from sds.models.llamacpp.batch import TokenBatch
from sds.models.llamacpp.context import check_cache, check_fit, new_context
from sds.models.llamacpp.kv_cache import LlamaKVCache, Stretch
from sds.models.llamacpp.prompt import Prompt
from sds.models.llamacpp.weights import (
    Weights,
    chat_template,
    is_one_state,
    trained_context,
)
from sds.models.protocol import (
    CONTEXT_TOKENS,
    FORKS_MAX,
    BackendError,
    ChatFrame,
    Row,
    check_fits,
    check_known,
    check_rows,
    shared_sections,
)
from sds.models.tokenizer.tokenizer import Tokenizer, model_frame, tokens_of

BATCH_TOKENS = 512
SHARED_PASS_TOKENS_MAX = 63  # with several slots: from 64 on llama.cpp attends in tiles, which adds up otherwise
FORK_TOKENS_MAX = 2048  # of all forks together, beyond what the slots hold; with many slots:
SLOT_FORK_TOKENS_MAX = 256  # for each
SLOT_WEAR_CELLS, WEAR_CELLS_MIN = 256, 2048  # between two rests: every pass looks at all cells that are taken


class LlamaBackend:
    """One GGUF model with one cache. Give each thread its own (`replica`); call `close()` when done."""

    lookahead_tokens_max, rows_may_be_cut = 0, True

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
        weights: Weights | None = None,
    ) -> None:
        """Load weights; raise `BackendError` when `path` is not a GGUF file that llama.cpp can run.

        `n_ctx`: tokens a slot can hold. `device`: `cpu`, or what `load_gguf` takes for a card.
        `fingerprint`: of the file, where it was just looked at. `weights`: of the file, where they are loaded already,
        on the device where they lie.
        """
        check_cache(slots, n_ctx)
        self.name = path.name
        seen = identity(path)
        self.fingerprint = fingerprint or gguf_fingerprint(path)
        self.slots = slots
        self._path, self._weights = path, weights.hold() if weights else Weights(path, device=device)
        try:
            if identity(path) != seen:
                raise BackendError(f"`{path}` was changed while it was opened", hint="open it again")
            self._make(n_ctx, n_batch, threads or os.cpu_count() or 1)
        except BaseException:
            self._weights.release()
            raise
        self._open = True

    def _make(self, n_ctx: int, n_batch: int, threads: int) -> None:
        """Make context and cache over the weights, of no more than the model was trained for."""
        slots = self.slots
        check_fit(self._weights, slots)
        self.context_tokens_max = n_ctx = trained_context(self._weights.model, n_ctx)
        self.pass_tokens_max = min(n_batch, n_ctx) if slots == 1 else min(max(n_batch, 2), SHARED_PASS_TOKENS_MAX)
        self._vocabulary = self._weights.vocabulary()
        self.vocab_size = self._vocabulary.size
        self._fork_tokens_max = max(FORK_TOKENS_MAX, slots * SLOT_FORK_TOKENS_MAX)
        wear_max = max(WEAR_CELLS_MIN, slots * SLOT_WEAR_CELLS) if slots > 1 else 0
        room = slots * n_ctx + self._fork_tokens_max + (n_ctx + wear_max if slots > 1 else 0)
        self._context = new_context(self._weights, room, self.pass_tokens_max, slots, threads)
        self._cells = LlamaKVCache(self._context, room, sequences=slots + FORKS_MAX, wear_max=wear_max, keep_max=n_ctx)
        self._batch = TokenBatch(room + 1)
        self._kept: PrefixCache[Stretch] = PrefixCache()
        self._one_state = is_one_state(self._weights.model)
        self._prompts: dict[int, Prompt] = {}
        self._free: list[int] = []
        self._next_fork = slots
        self._parts = 0
        self._frame: ChatFrame | None = None
        self._empty()

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self._vocabulary, text, special=special)

    def piece(self, token: int) -> bytes:
        return self._vocabulary.piece(token)

    @property
    def words(self) -> Tokenizer:
        return self._vocabulary

    def frame(self) -> ChatFrame:
        self._ready()
        if self._frame is None:
            self._frame = model_frame(chat_template(self._weights.model), self._vocabulary)
        return self._frame

    @property
    def fragmented(self) -> bool:
        return self._cells.fragmented

    def defragment(self) -> None:
        """Free the cells of all that is over. Sections stay that lie lowest: those begun with first after a rest."""
        self._ready()
        for fork in [fork for fork in self._prompts if fork >= self.slots]:
            self.drop(fork)
        prompts = self._prompts.values()
        lowest = self._cells.lowest(span for prompt in prompts for span in prompt.spans)
        try:
            for prompt in prompts:
                prompt.keep(sum(1 for _, end in prompt.spans if end <= lowest))
                self._cells.cut(prompt.sequence, prompt.position)
            self._cells.defragment(lowest)
        except BackendError:
            self._forget()

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; what another slot holds of them is shared."""
        self._ready()
        if self._poisoned:
            self._forget()
        wanted = [tuple(section) for section in sections]
        self._slot(slot)
        check_fits(sum(map(len, wanted)), self.context_tokens_max)
        for section in wanted:
            check_known(section, self.vocab_size)
        if self.fragmented and not any(other.position for other in self._prompts.values() if other.origin != slot):
            self.defragment()
        prompt = self._slot(slot)  # a rest that failed leaves another one
        self._keep(prompt, wanted)
        self._kept.use(prompt.sections)
        for number, section in enumerate(wanted[len(prompt.sections) :], start=len(prompt.sections) + 1):
            start, _ = self._cells.take(0)
            if section:
                self._append(slot, section, last=number == len(wanted))
            prompt.sections.append(section)
            prompt.spans.append((start, start + len(section)))

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        wanted = [tuple(section) for section in sections]
        if self._one_state:
            return self._prompts[0].is_all(wanted) or self._kept.get(wanted) is not None
        held = max(shared_sections(wanted, self._prompts[slot].sections) for slot in range(self.slots))
        return self._kept.holds(wanted, behind=held)

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
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
        made = Prompt(self._free.pop(), source.origin, position=source.position, own=dict(source.own))
        self._cells.share(source.sequence, made.sequence, -1)
        self._prompts[fork] = made
        return fork

    def drop(self, fork: int) -> None:
        """Give a fork's slot back; one that went with its prompt, or after a failure, may be dropped again."""
        self._ready()
        if not self.slots <= fork < self._next_fork:
            raise BackendError(f"there is no fork {fork}")
        dropped = self._prompts.pop(fork, None)
        if dropped is not None:
            self._cells.cut(dropped.sequence, 0)
            self._free.append(dropped.sequence)

    def close(self) -> None:
        if self._open:
            self._open = False
            self._vocabulary.release()
            lib.llama_free(self._context)
            self._weights.release()

    def replica(self, *, threads: int, slots: int = 1) -> LlamaBackend:
        """Return another backend over the same weights, for another thread."""
        self._ready()
        made = LlamaBackend(
            self._path,
            n_ctx=self.context_tokens_max,
            threads=threads,
            slots=slots,
            fingerprint=self.fingerprint,
            weights=self._weights,
        )
        made.name = self.name
        return made

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _prompt(self, slot: int) -> Prompt:
        prompt = self._prompts.get(slot)
        if prompt is None:
            raise BackendError(f"there is no slot {slot}")
        return prompt

    def _slot(self, slot: int) -> Prompt:
        if not 0 <= slot < self.slots:
            raise BackendError(f"there is no slot {slot}")
        return self._prompts[slot]

    def _runnable(self, rows: Sequence[Row]) -> None:
        """Refuse before anything is decoded: llama.cpp ends the process over some of these."""
        if not rows:
            raise BackendError("a pass needs at least one row")
        check_rows(rows)
        parts = dict[int, int]()
        for fork, prompt in self._prompts.items():
            parts |= prompt.own if fork >= self.slots else {}
        ahead = sum(parts.values())
        for row in rows:
            check_known(row.tokens, self.vocab_size)
            check_fits(self._prompt(row.slot).position + len(row.tokens), self.context_tokens_max)
            ahead += len(row.tokens) if row.slot >= self.slots else 0
        if ahead > self._fork_tokens_max:
            raise BackendError(f"forks hold {ahead} tokens of their own, at most {self._fork_tokens_max}")

    def _keep(self, prompt: Prompt, wanted: list[tuple[int, ...]]) -> None:
        """Cut `prompt` back to the leading sections it shares with `wanted`, or copy more of them from another slot."""
        for fork in [fork for fork, made in self._prompts.items() if made.origin == prompt.origin]:
            if fork >= self.slots:
                self.drop(fork)
        if self._one_state:
            self._keep_state(prompt, wanted)
            return
        every = [prompt, *(self._prompts[slot] for slot in range(self.slots))]
        whole = (held for held in every if self._cells.whole(held.sequence))
        donor = max(whole, key=lambda held: shared_sections(wanted, held.sections), default=Prompt(-1, -1))
        prompt.sections = wanted[: shared_sections(wanted, donor.sections)]
        prompt.spans = donor.spans[: len(prompt.sections)]
        prompt.position = sum(map(len, prompt.sections))
        try:
            self._cells.cut(prompt.sequence, prompt.position if donor is prompt else 0)
        except BackendError:
            self._forget()
            raise
        if donor is not prompt and prompt.position:
            self._cells.share(donor.sequence, prompt.sequence, prompt.position)

    def _keep_state(self, prompt: Prompt, wanted: list[tuple[int, ...]]) -> None:
        """Keep the state of `prompt` where all that it has read begins `wanted`; else go on from the longest beginning whose
        state is kept, for a state cannot be cut back.
        """
        if prompt.is_all(wanted[: len(prompt.sections)]):
            return
        self._cells.cut(prompt.sequence, 0)
        prompt.keep(0)
        for count in range(len(wanted), 0, -1):
            state = self._kept.get(wanted[:count])
            if state is not None and self._cells.put(prompt.sequence, 0, sum(map(len, wanted[:count])), state):
                prompt.restore(wanted[:count])
                return

    def _append(self, slot: int, section: tuple[int, ...], *, last: bool) -> None:
        """Append a section to what the slot holds: as it is kept, or read. A state that comes `last` is not worth its room."""
        prompt = self._prompts[slot]
        sections, start, end = (*prompt.sections, section), prompt.position, prompt.position + len(section)
        kept = None if self._one_state else self._kept.get(sections)
        if kept is not None and self._cells.put(prompt.sequence, start, end, kept):
            prompt.position = end
            return
        self._decode([Row(slot, section, 0)])
        if self._one_state and last:
            return
        if (stretch := self._cells.taken(prompt.sequence, 0 if self._one_state else start, end)) is not None:
            self._kept.put(sections, stretch, len(stretch))

    def _decode(self, rows: Sequence[Row]) -> NDArray[np.float32]:
        """Append all rows in as few passes as they take; return the outputs wanted, in order, [outputs, vocab_size]."""
        batch = self._batch
        batch.clear()
        tokens = sum(len(row.tokens) for row in rows)
        if self._cells.full(tokens + 1):
            self._forget()
            raise BackendError("the cache is worn out", hint="let the backend rest between two decisions")
        for row in rows:
            prompt = self._prompts[row.slot]
            batch.add(row.tokens, position=prompt.position, sequence=prompt.sequence, outputs=row.outputs)
        passes = -(-tokens // self.pass_tokens_max)
        length = -(-tokens // passes)  # evenly: a lone token left over would cost a pass
        starts = range(0, tokens, length)
        if self.slots > 1 and starts[-1] == tokens - 1:
            batch.add(rows[-1].tokens[-1:], position=self._cells.next_beside(), sequence=self._cells.beside, outputs=0)
            length = max(length, 2)
        self._cells.take(batch.size)
        found = [self._pass(start, min(start + length, batch.size)) for start in starts]
        for row in rows:
            prompt = self._prompts[row.slot]
            prompt.position += len(row.tokens)
            if row.slot >= self.slots:
                self._parts += 1
                prompt.own[self._parts] = len(row.tokens)
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _pass(self, start: int, end: int) -> NDArray[np.float32]:
        kept = self._batch.not_alone(start, end) if self.slots > 1 else slice(None)
        code = lib.llama_decode(self._context, self._batch.part(start, end))
        if code != 0:
            self._forget()
            raise BackendError(f"the model could not be run on {end - start} tokens (llama.cpp code {code})")
        shape = (self._batch.outputs(start, end), self.vocab_size)
        if shape[0] == 0:
            return np.empty(shape, np.float32)
        found = lib.llama_get_logits(self._context)
        if not found:
            self._forget()
            raise BackendError("the model returned no logits")
        outputs: NDArray[np.float32] = np.ctypeslib.as_array(found, shape=shape)[kept].copy()
        # with one slot attention multiplies all cells, masked ones by zero, which makes no number of what is none
        self._poisoned |= self.slots == 1 and not np.isfinite(outputs).all()
        return outputs

    def _forget(self) -> None:
        self._cells.clear()
        self._empty()

    def _empty(self) -> None:
        self._poisoned = False
        self._prompts = {slot: Prompt(slot, slot) for slot in range(self.slots)}
        self._free = list(range(self.slots, self.slots + FORKS_MAX))
