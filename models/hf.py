"""transformers behind the `Backend` protocol: purely token ids, some prompts side by side, one thread.

A checkpoint folder (config.json, safetensors, tokenizer.json), or a GGUF file: that one is de-quantised into memory and
keeps llama.cpp's tokenizer. Nothing is downloaded, no code of the model's is run, no pickle is read. Needs the extra
`hf`. torch has one number of threads for the whole process: loading a model sets it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sds.models.llama import BATCH_TOKENS, CONTEXT_TOKENS
from sds.models.protocol import FORKS_MAX, SLOTS_MAX, BackendError, ChatFrame, Dtype, Row, shared_sections
from sds.models.words import model_frame, tokens_of

try:
    import torch

    from sds.models.hf_cells import Forward, Part, store_of
    from sds.models.hf_load import device_of, failing, fingerprint_of, loaded
except ImportError as error:
    raise BackendError(
        "transformers and torch are not installed", hint="pip install 'sovereign-decision-stream[hf]'"
    ) from error

if TYPE_CHECKING:
    from numpy.typing import NDArray

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PADDING_TOKENS_MAX = 64  # of one call: more costs more than a call of its own


@dataclass(slots=True)
class _Prompt:
    """What one seat of the store holds: sections, each with how many layers it went through, and `position` tokens."""

    seat: int
    origin: int
    sections: list[tuple[tuple[int, ...], int]] = field(default_factory=list)
    position: int = 0

    def through(self, depth: int) -> list[tuple[int, ...]]:
        """Return the leading sections that went through at least `depth` layers."""
        return [tokens for tokens, passed in takewhile(lambda section: section[1] >= depth, self.sections)]


class HfBackend:
    """One model with a cache for some prompts. Give each thread its own; call `close()` when done.

    Attention is eager. A row alone in its call depends on nothing but the tokens before it and where they were cut;
    rows that share a call are padded, which may show in the last digits. Models with sliding windows or recurrent
    states run one row at a time and read every prompt from its beginning.
    """

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        dtype: Dtype = "fp32",
        n_ctx: int = CONTEXT_TOKENS,
        threads: int | None = None,
        slots: int = 1,
    ) -> None:
        """Load weights; raise `BackendError` when `path` or `device` is nothing that transformers can run."""
        if not 1 <= slots <= SLOTS_MAX:
            raise BackendError(f"{slots} slots are not between 1 and {SLOTS_MAX}")
        self._device = device_of(device)
        torch.set_num_threads(threads or os.cpu_count() or 1)
        self.name = path.name
        self.fingerprint = fingerprint_of(path)
        self.slots, self.pass_tokens_max = slots, BATCH_TOKENS
        self._model, self._words, self._template, self._free = loaded(path, DTYPES[dtype])
        self.vocab_size = int(self._model.get_output_embeddings().weight.shape[0])
        with failing(f"the model cannot be moved to `{device}`"):
            self._model.eval().to(self._device)
        config = self._model.config.get_text_config()
        longest = getattr(config, "max_position_embeddings", None)
        self.context_tokens_max = min(n_ctx, longest) if isinstance(longest, int) else n_ctx
        self._layers = int(config.num_hidden_layers)
        self._store = store_of(self._model, self._device, seats=slots, context=self.context_tokens_max)
        self._prompts = {slot: _Prompt(slot, slot) for slot in range(slots)}
        self._next_fork = slots
        self._open = True
        self._frame: ChatFrame | None = None

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

    @property
    def worn(self) -> bool:
        return False

    def rest(self) -> None:
        """Do nothing: every slot has a place of its own, which is free as soon as it is cut back."""

    def begin(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        """Make `slot` hold exactly these sections. Its forks are dropped; what another slot holds of them is copied."""
        self._ready()
        self._hold(slot, sections, self._layers)

    def step(self, tokens: Sequence[int], *, slot: int = 0) -> NDArray[np.float32]:
        logits: NDArray[np.float32] = self.run([Row(slot, tokens)])[0][0]
        return logits

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self._ready()
        self._runnable(rows)
        for row in rows:
            self._complete(row.slot)
        return self._read(rows)

    def fork(self, slot: int) -> int:
        """Return a new slot with what `slot` holds: a copy of its keys and values. A fork goes when its prompt does."""
        self._ready()
        self._prompt(slot)
        if len(self._prompts) - self.slots >= FORKS_MAX:
            raise BackendError(f"more than {FORKS_MAX} forks at once", hint="drop some, or score fewer alternatives")
        self._complete(slot)
        source = self._prompts[slot]
        taken = {prompt.seat for prompt in self._prompts.values()}
        seat = next(seat for seat in range(self.slots + FORKS_MAX) if seat not in taken)
        with failing("the prompt could not be forked"), torch.inference_mode():
            self._store.copy(source.seat, seat, source.position)
        fork, self._next_fork = self._next_fork, self._next_fork + 1
        self._prompts[fork] = _Prompt(seat, source.origin, list(source.sections), source.position)
        return fork

    def drop(self, fork: int) -> None:
        """Give a fork's slot back; one that went with its prompt, or after a failure, may be dropped again."""
        self._ready()
        if not self.slots <= fork < self._next_fork:
            raise BackendError(f"there is no fork {fork}")
        dropped = self._prompts.pop(fork, None)
        if dropped is not None:
            self._store.forget(dropped.seat)

    def hidden(
        self, sections: Sequence[Sequence[int]], *, span: tuple[int, int] | None = None, layer: int | None = None
    ) -> NDArray[np.float32]:
        """Return the state before layer `layer` (0: the embeddings); without one, after the last layer and its norm.

        No layer from `layer` on is computed, for this or any section; a later `run` on the slot does it after all.
        """
        self._ready()
        depth = self._layers if layer is None else layer
        if not 0 <= depth <= self._layers:
            raise BackendError(f"there is no layer {layer}: the model has {self._layers}")
        last = tuple(sections[-1]) if sections else ()
        start, end = span or (len(last) - 1, len(last))
        if not 0 <= start < end <= len(last):
            raise BackendError(f"positions {start} to {end} are no part of a section of {len(last)} tokens")
        self._fits(sum(map(len, sections)))
        self._known(last)
        self._hold(0, sections[:-1], depth)
        (states,) = self._read([Row(0, last, len(last))], states_at=depth)
        self._prompts[0].sections.append((last, self._passed(depth)))
        mean: NDArray[np.float32] = states[start:end].mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean

    def close(self) -> None:
        if self._open:
            self._open = False
            self._words.release()
            self._free()
            del self._model, self._store

    def _ready(self) -> None:
        if not self._open:
            raise BackendError("the model is closed")

    def _prompt(self, slot: int) -> _Prompt:
        prompt = self._prompts.get(slot)
        if prompt is None:
            raise BackendError(f"there is no slot {slot}")
        return prompt

    def _fits(self, tokens: int) -> None:
        if tokens > self.context_tokens_max:
            raise BackendError(
                f"{tokens} tokens are more than the model's context of {self.context_tokens_max}",
                hint="shorten the prompt or load the model with a larger context",
            )

    def _known(self, tokens: Sequence[int]) -> None:
        if tokens and not (min(tokens) >= 0 and max(tokens) < self.vocab_size):
            raise BackendError("a token is outside the vocabulary")

    def _runnable(self, rows: Sequence[Row]) -> None:
        if len({row.slot for row in rows}) != len(rows):
            raise BackendError("a pass holds at most one row of a slot")
        for row in rows:
            if not row.tokens:
                raise BackendError("a step needs at least one token")
            if not 0 <= row.outputs <= len(row.tokens):
                raise BackendError(f"{row.outputs} outputs of {len(row.tokens)} tokens were asked for")
            self._known(row.tokens)
            self._fits(self._prompt(row.slot).position + len(row.tokens))

    def _passed(self, depth: int) -> int:
        """Return through how many layers a section goes when the state at `depth` is asked for."""
        return depth if self._store.together else self._layers

    def _complete(self, slot: int) -> None:
        """Read again, through all layers, what went through some only."""
        sections = [tokens for tokens, _ in self._prompts[slot].sections]
        if len(self._prompts[slot].through(self._layers)) < len(sections):
            self._hold(slot, sections, self._layers)

    def _hold(self, slot: int, sections: Sequence[Sequence[int]], depth: int) -> None:
        if not 0 <= slot < self.slots:
            raise BackendError(f"there is no slot {slot}")
        wanted = [tuple(section) for section in sections]
        self._fits(sum(map(len, wanted)))
        for section in wanted:
            self._known(section)
        prompt = self._prompts[slot]
        for fork in [fork for fork, made in self._prompts.items() if fork >= self.slots and made.origin == slot]:
            self.drop(fork)
        self._keep(prompt, wanted, depth)
        for section in wanted[len(prompt.sections) :]:
            if section:
                self._read([Row(slot, section, 0)], states_at=depth)
            prompt.sections.append((section, self._passed(depth)))

    def _keep(self, prompt: _Prompt, wanted: list[tuple[int, ...]], depth: int) -> None:
        """Cut `prompt` back to the leading sections it shares with `wanted`, or copy more of them from another slot."""
        donors = [prompt, *self._prompts.values()] if self._store.together else [prompt]
        donor = max(donors, key=lambda held: shared_sections(wanted, held.through(depth)))
        kept = donor.sections[: shared_sections(wanted, donor.through(depth))]
        position = sum(len(tokens) for tokens, _ in kept)
        with self._forgetting([prompt.origin], "the model's cache cannot be cut back"), torch.inference_mode():
            if donor is not prompt:
                self._store.copy(donor.seat, prompt.seat, position)
            elif not self._cut(prompt, position):
                self._store.forget(prompt.seat)
                kept, position = [], 0
        prompt.sections, prompt.position = kept, position

    def _cut(self, prompt: _Prompt, position: int) -> bool:
        surplus = prompt.position - position
        return not surplus or self._store.cut(prompt.seat, position, surplus)

    def _read(self, rows: Sequence[Row], *, states_at: int | None = None) -> list[NDArray[np.float32]]:
        """Append the rows; return for each [outputs, vocab], or the hidden states at a depth, [outputs, width]."""
        found: list[list[NDArray[np.float32]]] = [[] for _ in rows]
        tokens = sum(len(row.tokens) for row in rows)
        what = f"the model could not be run on {tokens} tokens"
        with self._forgetting([row.slot for row in rows], what), torch.inference_mode():
            for start in range(0, max((len(row.tokens) for row in rows), default=0), BATCH_TOKENS):
                cuts = {n: _cut_out(row, start) for n, row in enumerate(rows) if start < len(row.tokens)}
                for group in _groups(cuts, together=self._store.together):
                    for n, states in zip(group, self._call([cuts[n] for n in group], states_at), strict=True):
                        found[n].append(states)
        return [np.concatenate(parts) if len(parts) > 1 else parts[0] for parts in found]

    def _call(self, rows: Sequence[Row], states_at: int | None) -> list[NDArray[np.float32]]:
        """Run rows through the model in one call: the head only where logits are wanted."""
        prompts = [self._prompts[row.slot] for row in rows]
        parts = [Part(prompt.seat, prompt.position, row.tokens) for prompt, row in zip(prompts, rows, strict=True)]
        outputs = max(row.outputs for row in rows)
        forward: Forward = partial(self._logits, outputs) if states_at is None else partial(self._states, states_at)
        found = self._store.run(parts, forward, repeated=states_at is None and outputs == 1)
        values = found[:, found.shape[1] - outputs :].float().cpu().numpy()
        for prompt, row in zip(prompts, rows, strict=True):
            prompt.position += len(row.tokens)
        return [of_row[outputs - row.outputs :] for of_row, row in zip(values, rows, strict=True)]

    def _logits(self, outputs: int, **inputs: Any) -> torch.Tensor:
        if not outputs:
            return self._states(self._layers, **inputs).new_zeros((len(inputs["input_ids"]), 0, self.vocab_size))
        return self._model(**inputs, use_cache=True, logits_to_keep=outputs).logits  # type: ignore[no-any-return]

    def _states(self, depth: int, **inputs: Any) -> torch.Tensor:
        """Return what goes into layer `depth`; layers from there on are left out where the cache allows it."""
        base = self._model.base_model
        if depth == self._layers:
            return base(**inputs, use_cache=True).last_hidden_state  # type: ignore[no-any-return]
        layers = [m for m in base.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == self._layers]
        if not layers:
            raise BackendError("the model's layers cannot be told apart")
        return _input_of(layers[0][depth], lambda: base(**inputs, use_cache=True), stop=self._store.together)

    @contextmanager
    def _forgetting(self, slots: Sequence[int], what: str) -> Iterator[None]:
        """Whatever fails leaves half a pass behind: these prompts are held no more."""
        try:
            with failing(what):
                yield
        except BackendError:
            for slot in slots:
                prompt = self._prompts[slot]
                self._store.forget(prompt.seat)
                prompt.sections, prompt.position = [], 0
                if slot >= self.slots:
                    del self._prompts[slot]
            raise


class _Reached(Exception):  # noqa: N818  no error
    """The layer asked for is reached: what comes after it is not wanted."""


def _input_of(layer: torch.nn.Module, run: Callable[[], object], *, stop: bool) -> torch.Tensor:
    caught: list[torch.Tensor] = []

    def catch(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append(args[0] if args else kwargs["hidden_states"])
        if stop:
            raise _Reached

    handle = layer.register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with suppress(_Reached):
            run()
    finally:
        handle.remove()
    return caught[0]


def _cut_out(row: Row, start: int) -> Row:
    """Return the part of a row from token `start` on that goes through the model at once."""
    tokens = row.tokens[start : start + BATCH_TOKENS]
    end, wanted = start + len(tokens), len(row.tokens) - row.outputs
    return Row(row.slot, tokens, max(0, end - max(start, wanted)))


def _groups(rows: dict[int, Row], *, together: bool) -> Iterator[list[int]]:
    """Split rows into calls: of like length, so that little is padding; it depends on the rows' lengths alone."""
    group: list[int] = []
    real = 0
    for n in sorted(rows, key=lambda n: len(rows[n].tokens)):
        tokens = len(rows[n].tokens)
        area, real = (len(group) + 1) * tokens, real + tokens
        if group and (not together or area > BATCH_TOKENS or area - real > PADDING_TOKENS_MAX):
            yield group
            group, real = [], tokens
        group.append(n)
    if group:
        yield group
