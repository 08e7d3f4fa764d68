"""A local model driven by Outlines: the exact regular expression in, text out.

Outlines compiles the expression into a logits processor. llama.cpp calls that from C and goes on unconstrained when it
raises; llguidance warns and goes on. So the processor is wrapped: the first exception is kept, from then on nothing but
the end may be written, and afterwards it is raised.

Prompts are given as tokens, framed as for our own engines: only the frame of the model's chat template may hold control
tokens, whatever the texts spell.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from sds.models.llamacpp.facts import LLAMACPP
from sds.models.protocol import ENDINGS, BackendError, ChatFrame, Dtype, Library, extra_hint
from sds.models.text.protocol import Completion, Form, Grammar, Processing
from sds.models.tokenizer.tokenizer import Tokenizer
from sds.models.transformers_.facts import TRANSFORMERS

OUTLINES_HINT = extra_hint("outlines")
XGRAMMAR_HINT = "pip install xgrammar, or take --backend llguidance"
CONTEXT_TOKENS = 4096
# outlines-core builds every state before the first token, on and on where a language is large: some 10 ms a character
# of free text, and states grow with the expression. The others build as they go.
CORE_FREE_CHARS_MAX = 200
CORE_REGEX_CHARS_MAX = 16_384


# Which libraries Outlines drives, and what can constrain each; which of them on a GPU.
PROCESSINGS: dict[Library, tuple[Processing, ...]] = {
    LLAMACPP.name: ("outlines_core", "llguidance"),
    TRANSFORMERS.name: ("outlines_core", "llguidance", "xgrammar"),
}
ON_GPUS = (TRANSFORMERS.name,)


class Driven(Protocol):
    """A loaded model as Outlines sees it, and what is needed to frame a prompt in tokens."""

    name: str
    fingerprint: str
    outlines_model: Any
    context_tokens_max: int
    end_token: int
    limits: dict[str, Any]
    tokens_name: str

    @property
    def words(self) -> Tokenizer: ...

    def tokenize(self, text: bytes, *, special: bool) -> list[int]: ...

    def frame(self) -> ChatFrame: ...

    def hold(self, prompt: list[int]) -> None:
        """Read these tokens at the next call instead of its text."""

    def running(self) -> AbstractContextManager[object]:
        """Enter what a generation needs around it."""

    def close(self) -> None: ...


class OutlinesWriter:
    """One local model and one of Outlines' backends."""

    form: Form = "regex"

    def __init__(self, driven: Driven, processing: Processing, *, clock: Callable[[], float] = monotonic) -> None:
        self._driven, self._processing, self._clock = driven, processing, clock
        self.name = f"{driven.name}@{driven.fingerprint[:12]}"
        try:
            self._compiler = _compiler(driven.outlines_model, processing)
        except BackendError:
            driven.close()
            raise

    def write(self, system: str, user: str, grammar: Grammar, *, tokens_max: int, timeout_s: float) -> Completion:
        deadline_s = self._clock() + timeout_s
        prompt = self._prompt(system, user)
        room = self._driven.context_tokens_max - len(prompt)
        if room <= 0:
            raise BackendError(f"the prompt of {len(prompt)} tokens fills the model's context")
        guard = Guard(
            self._compiled(grammar), end_token=self._driven.end_token, deadline_s=deadline_s, clock=self._clock
        )
        text = self._generate(guard, prompt, min(tokens_max, room))
        _raise_kept(guard.error)
        if not guard.calls:
            raise BackendError("the model was run without its mask")
        return Completion(text.encode("utf-8", "replace"), len(prompt) + guard.calls)

    @property
    def words(self) -> Tokenizer:
        return self._driven.words

    @property
    def context_tokens_max(self) -> int:
        return self._driven.context_tokens_max

    def frame(self) -> ChatFrame:
        return self._driven.frame()

    def count_tokens(self, text: str) -> int:
        return len(self._driven.tokenize(text.encode("utf-8", "replace"), special=False))

    def close(self) -> None:
        self._driven.close()

    def _prompt(self, system: str, user: str) -> list[int]:
        frame, tokenize = self._driven.frame(), self._driven.tokenize
        prompt: list[int] = []
        for text, special in (
            (frame.before_system, True),
            (system, False),
            (frame.between, True),
            (user, False),
            (frame.after_user, True),
        ):
            prompt += tokenize(text.encode("utf-8", "replace"), special=special) if text else []
        return prompt

    def _compiled(self, grammar: Grammar) -> Any:
        if grammar.form != self.form:
            raise BackendError(f"a grammar in {grammar.form} was given, {self.form} is taken")
        if self._processing == "outlines_core":
            _refuse_explosion(grammar)
        try:
            return self._compiler.get_regex_logits_processor(grammar.text)
        except ENDINGS:
            raise
        except BaseException as error:
            raise BackendError(f"{self._processing} cannot compile the language: {type(error).__name__}") from error
        finally:
            if self._processing == "xgrammar":  # it keeps every language it has seen, and no two decisions share one
                self._compiler.grammar_compiler.clear_cache()

    def _generate(self, guard: Guard, prompt: list[int], tokens_max: int) -> str:
        from outlines import Generator  # noqa: PLC0415

        self._driven.hold(prompt)
        limits = {**self._driven.limits, self._driven.tokens_name: tokens_max}
        try:
            with self._driven.running():
                text = Generator(self._driven.outlines_model, processor=guard)("-", **limits)
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code, and the guard's error is the cause where it has one
            raise BackendError(f"the model could not be run: {type(error).__name__}") from (guard.error or error)
        if not isinstance(text, str):
            raise BackendError("the model wrote no text")
        return text


class Guard:
    """A logits processor that never lets a failure of the one inside it go unnoticed, and ends at the deadline."""

    def __init__(self, inside: Any, *, end_token: int, deadline_s: float, clock: Callable[[], float]) -> None:
        self._inside, self._end_token = inside, end_token
        self._deadline_s, self._clock = deadline_s, clock
        self._permitted: Any = None  # by the last mask, in the shape of the logits
        self.error: BaseException | None = None
        self.calls = 0

    def reset(self) -> None:
        self._inside.reset()

    def __call__(self, input_ids: Any, logits: Any) -> Any:
        self.calls += 1
        if self.error is None:
            try:
                return self._masked(input_ids, logits)
            except BaseException as error:  # noqa: BLE001  C would swallow it; it is raised after the generation
                self.error = error
        logits[...] = float("-inf")
        logits[..., self._end_token] = 0.0
        return logits

    def _masked(self, input_ids: Any, logits: Any) -> Any:
        if self._clock() > self._deadline_s:
            raise BackendError("the model did not finish in time")
        if self._permitted is not None and not bool(self._permitted[..., int(input_ids[..., -1])]):
            raise BackendError("a token was written that the mask forbids")
        masked = self._inside(input_ids, logits)
        if any(matcher.is_error() for matcher in getattr(self._inside, "ll_matchers", ())):
            raise BackendError("the mask refused a token that was written")
        self._permitted = masked > float("-inf")
        if self._permitted.shape != logits.shape:  # C could not store it, and would go on without it
            raise BackendError("the mask is of another shape than the logits")
        if not bool(self._permitted.any()):
            raise BackendError("the mask permits no token, or the model returned no logits")
        return masked


def _raise_kept(error: BaseException | None) -> None:
    if error is not None and not isinstance(error, (BackendError, *ENDINGS)):
        raise BackendError(f"the mask failed: {type(error).__name__}") from error
    if error is not None:  # an interrupt stays one
        raise error


def _refuse_explosion(grammar: Grammar) -> None:
    if grammar.free_chars_max > CORE_FREE_CHARS_MAX or len(grammar.text) > CORE_REGEX_CHARS_MAX:
        raise BackendError(
            f"the language is too large for outlines_core: more than {CORE_FREE_CHARS_MAX} characters of free text or"
            f" an expression of more than {CORE_REGEX_CHARS_MAX}",
            hint="--backend llguidance",
        )


def _compiler(model: Any, processing: Processing) -> Any:
    """Return Outlines' compiler for this model's vocabulary; building it takes most of a second."""
    from outlines import backends, models  # noqa: PLC0415

    if processing == "xgrammar" and not isinstance(model, models.Transformers):
        raise BackendError("xgrammar runs only with transformers", hint="--library transformers")
    kinds: dict[Processing, Any] = {
        "outlines_core": backends.OutlinesCoreBackend,
        "llguidance": backends.LLGuidanceBackend,
        "xgrammar": backends.XGrammarBackend,
    }
    try:
        with warnings.catch_warnings():  # its library still calls llama.cpp by old names
            warnings.simplefilter("ignore", DeprecationWarning)
            return kinds[processing](model)
    except ImportError as error:
        hint = XGRAMMAR_HINT if processing == "xgrammar" else OUTLINES_HINT
        raise BackendError(f"the package {processing} is missing", hint=hint) from error
    except Exception as error:
        raise BackendError(f"{processing} does not take this tokenizer: {type(error).__name__}") from error


def drive(path: Path, library: Library, *, device: str, dtype: Dtype | None, threads: int | None) -> Driven:
    """Load a model for Outlines. Raises BackendError."""
    if library == LLAMACPP.name:
        return drive_llamacpp(path, threads=threads)
    return drive_transformers(path, device=device, dtype=dtype or "fp32", threads=threads)


def drive_llamacpp(path: Path, *, n_ctx: int = CONTEXT_TOKENS, threads: int | None = None) -> Driven:
    """Load a GGUF as Outlines' llama.cpp model."""
    _needs_outlines()
    from sds.models.text.outlines_llamacpp import DrivenLlama  # noqa: PLC0415

    return DrivenLlama(path, n_ctx=n_ctx, threads=threads)


def drive_transformers(
    path: Path, *, device: str = "cpu", dtype: Dtype = "fp32", threads: int | None = None, n_ctx: int = CONTEXT_TOKENS
) -> Driven:
    """Load a checkpoint folder, or a GGUF, as Outlines' transformers model."""
    _needs_outlines()
    from sds.models.text.outlines_transformers import DrivenTransformers  # noqa: PLC0415

    return DrivenTransformers(path, device=device, dtype=dtype, threads=threads, n_ctx=n_ctx)


def _needs_outlines() -> None:
    try:
        import outlines  # noqa: F401, PLC0415
    except ImportError as error:
        raise BackendError("the package outlines is missing", hint=OUTLINES_HINT) from error
