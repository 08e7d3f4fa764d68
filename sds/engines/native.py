"""A local model as an engine: a packet goes in, proposal bytes and measurements come out.

Every call goes through the model's scheduler. With one slot, packets are decided one at a time, and equal packets give
equal bits. With several slots, decisions share passes. Where the other rows of a batch show in the scores, a choice that
this could turn is not made: it raises. Before anything else, a backend must prove that the grammar's mask constrains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from math import inf
from time import perf_counter
from typing import Any, TypeVar

import numpy as np

from sds.decoding.decoder import FORKS_MAX, FORKS_MIN, Deciding, Decoded, Mode, deciding
from sds.decoding.errors import BACKEND_FAILED, LOGITS_INVALID, TOKEN_BUDGET_EXCEEDED
from sds.decoding.lookahead import numbers_shown
from sds.engines.expressible import refuse_unsayable
from sds.engines.protocol import BackgroundTask, Prompt
from sds.engines.request import Passes, Request
from sds.engines.scheduler import Scheduler
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.selftest import check_mask_constrains
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.errors import ModelError, UsageError
from sds.models.catalog.batch_variance import batch_variance
from sds.models.protocol import CARD_SLOTS_MAX, Backend, BackendError, Replicable
from sds.models.protocol import FORKS_MAX as BACKEND_FORKS_MAX
from sds.models.tokenizer.tokenizer import Speaks, prompt_sections

SLOTS_EXACT_MAX = BACKEND_FORKS_MAX // FORKS_MIN
TEXTS_MAX = 512  # texts whose tokens are cached
PROBE_TOKENS = 8  # of the pass at the start
COUNT_MS_MAX = 10_000  # to wait for the tokenizer where there is no packet with a deadline

T = TypeVar("T")


class NativeEngine:
    """Drives a backend. Raises ModelError when the model cannot be loaded, or is not constrained by its language.

    `noise_logp_max`: how far the other rows of a batch may move a log-probability; None: measure it now. `runtime`:
    what runs the model, for the record.
    """

    notices: tuple[str, ...] = ()  # for those who open it, a line each

    def __init__(
        self,
        backend: Backend,
        *,
        now_ms: Callable[[], int],
        mode: Mode = "greedy",
        noise_logp_max: float | None = None,
        runtime: Mapping[str, object] | None = None,
    ) -> None:
        check_slots(backend.slots, mode)
        self._backend, self._now_ms, self._mode, self._runtime = backend, now_ms, mode, runtime
        self._checked = set[str]()  # hashes of contracts
        with backend_errors():
            check_mask_constrains(backend)
            check_computes(backend)
            self.notices = thinking_notices(backend)
            self._noise = batch_variance(backend) if noise_logp_max is None else noise_logp_max
        if not 0.0 <= self._noise < inf:  # a negative one, or NaN, would guard nothing
            raise ModelError(f"the batch variance `{self._noise}` is not a log-probability")
        self._compiler, self._tokenization = GrammarCompiler(backend), _TokenizationCache(backend)
        self._facts = {
            **(runtime or {}),
            "weights": backend.fingerprint,
            "slots": backend.slots,
            "mode": mode,
            "noise_logp_max": self._noise,
        }
        self._scheduler = Scheduler(backend, now_ms=now_ms)
        self._requests = dict[str, Request[Decoded]]()  # under way, by flow

    @property
    def model(self) -> str:
        """Name and first twelve digits of the SHA-256 of the weights: the model's name in the record."""
        return f"{self._backend.name}@{self._backend.fingerprint[:12]}"

    @property
    def slots(self) -> int:
        """The number of decisions that share passes."""
        return self._backend.slots

    def check_contract(self, contract: Contract) -> None:
        with self._scheduler.tokenizer(self._now_ms() + COUNT_MS_MAX):
            if contract.hash not in self._checked and isinstance(self._backend, Speaks):
                refuse_unsayable(contract, self._backend, self.model)
            self._checked.add(contract.hash)

    def replica(self, *, threads: int) -> NativeEngine:
        """Return another engine over the same weights, on `threads` threads of its own. Raises ModelError, UsageError."""
        if not isinstance(self._backend, Replicable):
            raise UsageError(
                "replicas run only on the processor, in llama.cpp, OpenVINO and integer passes",
                hint="use slots: they share passes",
            )
        with backend_errors():
            backend = self._backend.replica(threads=threads, slots=self._backend.slots)
        how: dict[str, Any] = {"mode": self._mode, "runtime": self._runtime, "noise_logp_max": self._noise}
        try:
            return NativeEngine(backend, now_ms=self._now_ms, **how)
        except BaseException:
            backend.close()
            raise

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet before it expires. Raises ModelError; never returns half a decision."""
        began = perf_counter()
        sections = self._sections(packet, packet.expires_at_ms)
        left = min(tokens_max, self._backend.context_tokens_max) - sum(map(len, sections))
        if left < 1:
            raise ModelError("the prompt leaves no token for a decision", reason_code=TOKEN_BUDGET_EXCEEDED)

        def make(backend: Backend, slot: int) -> Deciding:
            with backend_errors():
                matcher = self._compiler.matcher(packet.envelope, packet.snapshot.id)
            return deciding(
                backend,
                slot,
                sections,
                matcher,
                tokens_max=left,
                mode=self._mode,
                noise_logp_max=self._noise,
                forks_max=min(FORKS_MAX, BACKEND_FORKS_MAX // backend.slots),
                shown=numbers_shown(packet.texts) if backend.lookahead_tokens_max else (),
            )

        request = self._scheduler.start(make, sections, packet.expires_at_ms)
        self._requests[packet.dfid] = request
        try:
            decoded = replace(request.result(), passes=len(request.rows), rows=tuple(request.rows))
        finally:
            self._requests.pop(packet.dfid, None)
        return decoded.data, self._decoding_of(decoded, sections, (perf_counter() - began) * 1000)

    def cancel(self, dfid: str) -> None:
        """End the decision of a flow; its slot is free after the pass that runs now."""
        if (request := self._requests.get(dfid)) is not None:
            request.cancel()

    def run_background(self, packet: DecisionPacket, task: BackgroundTask[T], *, deadline_ms: int) -> T:
        """Run a task over the packet's prompt while no decision wants its slot. Raises ModelError."""
        with backend_errors(BACKEND_FAILED):
            sections = self._sections(packet, deadline_ms)

        def make(backend: Backend, slot: int) -> Passes[T]:
            return task(Prompt(backend, slot, sections, self._compiler.tokenizer_index))

        return self._scheduler.submit(make, sections, deadline_ms, background=True)

    def count_tokens(self, text: str) -> int:
        with self._scheduler.tokenizer(self._now_ms() + COUNT_MS_MAX), backend_errors(BACKEND_FAILED):
            return len(self._backend.tokenize(text.encode(), special=False))

    def close(self) -> None:
        self._scheduler.close()

    def _sections(self, packet: DecisionPacket, until_ms: int) -> list[list[int]]:
        with self._scheduler.tokenizer(until_ms), backend_errors():
            return prompt_sections(self._tokenization, *packet.sections)

    def _decoding_of(self, decoded: Decoded, sections: Sequence[Sequence[int]], duration_ms: float) -> Decoding:
        if not decoded.passes:  # only one decision was possible, so the model was not asked
            return Decoding(model=NOT_ASKED, duration_ms=duration_ms)
        return Decoding(
            model=self.model,
            confidence=decoded.confidence,
            alternatives=tuple(
                {"choice": c.name, "chosen": c.chosen, "z": c.z, "probabilities": dict(c.probabilities)}
                for c in decoded.choices
            ),
            tokens=decoded.tokens_prompt + decoded.tokens_generated,
            passes=decoded.passes,
            duration_ms=duration_ms,
            facts={
                **self._facts,
                "prompt": _digest(chain.from_iterable(sections)),
                "plan": decoded.grammar_sha256,
                "rows": decoded.rows,
                "canonical": decoded.canonical,
            },
        )


def check_computes(backend: Backend) -> None:
    """Raise ModelError where a pass returns numbers that are no logits, as with damaged weights. Leaves the slot empty."""
    backend.prefill([])
    logits = backend.forward_one(range(min(PROBE_TOKENS, backend.vocab_size)))
    backend.prefill([])
    if not np.isfinite(logits).all():
        why = f"`{backend.name}` returns numbers that are no logits: its weights are damaged, or overflow in this type"
        raise ModelError(why, reason_code=LOGITS_INVALID, hint="fetch the file again, or choose another --dtype")


def thinking_notices(model: object) -> tuple[str, ...]:
    """Return how the model is kept from thinking first, where its template would have it think; else nothing."""
    if not isinstance(model, Speaks):
        return ()
    with suppress(BackendError):
        return (how,) if (how := model.frame().thinking) else ()
    return ()


@contextmanager
def backend_errors(reason_code: str = "") -> Iterator[None]:
    """Turn the BackendError of a block into a ModelError."""
    try:
        yield
    except BackendError as error:
        raise ModelError(str(error), reason_code=reason_code, hint=error.hint) from error


class _TokenizationCache:
    """A backend's tokenizer with a cache: most texts of a prompt come again and again."""

    def __init__(self, backend: Backend) -> None:
        self.frame = backend.frame
        self._tokens = lru_cache(TEXTS_MAX)(lambda text, special: tuple(backend.tokenize(text, special=special)))

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return list(self._tokens(text, special))


def _digest(tokens: Iterable[int]) -> str:
    """Return the SHA-256 of tokens as 32-bit little-endian numbers."""
    return sha256(np.fromiter(tokens, "<u4").tobytes()).hexdigest()


def check_slots(slots: int, mode: Mode) -> None:
    """Raise UsageError for a number of slots that no backend can have in this mode."""
    most = CARD_SLOTS_MAX if mode == "greedy" else SLOTS_EXACT_MAX
    if not 1 <= slots <= most:
        raise UsageError(f"the number of decisions at once must be 1 to {most} in mode {mode}, got {slots}")
