"""A local model as the kernel's proposer: packet in, proposal bytes and what was measured out.

One model, one context, one thread at a time: calls queue. The mask is proved alive before the first decision.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

from sds.decoder import BACKEND_FAILED, Decoded, decode
from sds.engines.explaining import Turns, explaining, lead_of, run_between
from sds.grammars.language import language
from sds.grammars.mask import prove_alive
from sds.grammars.text import TextTokens
from sds.kernel.errors import ModelError, UsageError
from sds.kernel.packet import DecisionPacket, Decoding
from sds.models.protocol import Backend, BackendError, Dtype, Library, prompt_sections

THREADS_MAX = 256
NOT_ASKED = "not asked"


class NativeEngine:
    """Drives a backend. Raises ModelError when the model cannot be loaded or its mask does not constrain."""

    def __init__(self, backend: Backend, *, now_ms: Callable[[], int]) -> None:
        self._backend, self._now_ms = backend, now_ms
        self._turns, self._closed = Turns(), False
        self._text: TextTokens | None = None
        try:
            prove_alive(backend.grammar_tokenizer())
        except BackendError as error:
            raise ModelError(str(error), hint=error.hint) from error

    @property
    def model(self) -> str:
        """Name and first twelve digits of the SHA-256 of the weights: what the record calls the model."""
        return f"{self._backend.name}@{self._backend.fingerprint[:12]}"

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Decide the packet within its expiry. Raises ModelError; never returns half a decision."""
        began = perf_counter()
        with self._turns.decision():
            sections = self._sections(packet)
            decoded = decode(
                self._backend,
                sections,
                language(packet.envelope, packet.snapshot.id),
                tokens_max=tokens_max - sum(map(len, sections)),
                now_ms=self._now_ms,
                deadline_ms=packet.expires_at_ms,
            )
        return decoded.data, self._measured(decoded, (perf_counter() - began) * 1000)

    def explain(self, packet: DecisionPacket, data: bytes, *, chars_max: int, deadline_ms: int) -> str:
        """Say why `data` was decided. Decisions go first: it waits for them between its passes. Raises ModelError."""

        def left_s() -> float:
            return (deadline_ms - self._now_ms()) / 1000

        try:
            with self._turns.between(left_s()):
                self._check_open()
                *prefix, last = self._sections(packet)
                lead = self._backend.tokenize(lead_of(data), special=False)
                text = self._text_tokens()
            writing = explaining([*last, *lead], text, chars_max)
            return run_between(writing, self._backend, prefix, self._turns, left_s=left_s, check=self._check_open)
        except BackendError as error:
            raise ModelError(str(error), reason_code=BACKEND_FAILED, hint=error.hint) from error

    def _text_tokens(self) -> TextTokens:
        if self._text is None:  # a look at the whole vocabulary, for the first rationale only
            self._text = TextTokens(map(self._backend.piece, range(self._backend.vocab_size)))
        return self._text

    def _check_open(self) -> None:
        if self._closed:
            raise ModelError("the engine is closed")

    def count_tokens(self, text: str) -> int:
        with self._turns.decision():
            return len(self._backend.tokenize(text.encode(), special=False))

    def _sections(self, packet: DecisionPacket) -> list[list[int]]:
        try:
            return prompt_sections(self._backend, *packet.texts)
        except BackendError as error:
            raise ModelError(str(error), hint=error.hint) from error

    def _measured(self, decoded: Decoded, duration_ms: float) -> Decoding:
        if not decoded.passes:  # only one decision was possible: the model was not asked
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
        )

    def close(self) -> None:
        with self._turns.decision():
            self._closed = True
            self._backend.close()


def _threads() -> int | None:
    """Return what `SDS_THREADS` asks for; None: one for each core. Threads beyond the free cores cost dearly."""
    asked = os.environ.get("SDS_THREADS", "")
    if not asked:
        return None
    if not asked.isdecimal() or not 1 <= int(asked) <= THREADS_MAX:
        raise UsageError(f"SDS_THREADS is `{asked}`, not a number from 1 to {THREADS_MAX}")
    return int(asked)


def open_backend(path: Path, *, library: Library | None = None, device: str = "cpu", dtype: Dtype = "fp32") -> Backend:
    """Load a model: unless `library` says otherwise a folder through transformers, a file through llama.cpp.

    `device` and `dtype` are for transformers; llama.cpp runs on the CPU in the file's own types. Raises BackendError.
    """
    if library == "transformers" or (library is None and path.is_dir()):
        from sds.models.hf import HfBackend  # noqa: PLC0415  torch is loaded when it is asked for

        return HfBackend(path, device=device, dtype=dtype, threads=_threads())
    if (device, dtype) != ("cpu", "fp32"):
        raise BackendError("llama.cpp takes no device and no dtype here", hint="choose transformers for them")
    from sds.models.llama import LlamaBackend  # noqa: PLC0415  the library is loaded when a model is

    return LlamaBackend(path, threads=_threads())


def open_engine(
    model: Path | None,
    *,
    now_ms: Callable[[], int],
    library: Library | None = None,
    device: str = "cpu",
    dtype: Dtype = "fp32",
) -> NativeEngine:
    """Load a model, the embedded GGUF when `model` is None. Raises ModelError."""
    from sds.models.catalog import embedded_model  # noqa: PLC0415

    try:
        backend = open_backend(model or embedded_model(), library=library, device=device, dtype=dtype)
    except BackendError as error:
        raise ModelError(str(error), hint=error.hint) from error
    try:
        return NativeEngine(backend, now_ms=now_ms)
    except BaseException:  # a chain opens it again and again: weights nobody drives may not stay in memory
        backend.close()
        raise
