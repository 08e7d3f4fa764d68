"""A local model constrained by Outlines: the exact regular expression in, text out.

Outlines compiles the expression into a logits processor. When that raises, llama.cpp, which calls it from C, continues
unconstrained; llguidance warns and continues. So the processor is wrapped: the first exception is stored, from then on
only the end may be written, and the exception is raised afterwards.

Prompts are given as tokens, framed as for our own engines: only the frame of the model's chat template can hold control
tokens, whatever the texts spell.
"""

from __future__ import annotations

import logging
import os
import warnings
from contextlib import suppress
from importlib import import_module
from itertools import chain
from pathlib import Path
from time import monotonic
from typing import Any, Protocol

from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.llamacpp.facts import LLAMACPP
from sds.models.protocol import CONTEXT_TOKENS, ENDINGS, BackendError, ChatFrame, Dtype, Library, extra_hint, importing
from sds.models.text.protocol import Completion, Form, Grammar, Processing
from sds.models.tokenizer.tokenizer import ModelTokenizer, Tokenizer, prompt_sections
from sds.models.transformers_.facts import TRANSFORMERS

OUTLINES_HINT = extra_hint("outlines")
XGRAMMAR_HINT = "pip install xgrammar, or use --backend llguidance"
# outlines-core builds every state before the first token, which takes long for a large language: some 10 ms a character
# of free text, and the states grow with the expression. llguidance builds states on demand. xgrammar also compiles before
# the first token, but takes no longer for texts beyond this limit than for one at it.
CORE_FREE_CHARS_MAX = 200
CORE_REGEX_CHARS_MAX = 16_384
# The libraries that Outlines can constrain, each with its backends; and those of them that run on a GPU.
PROCESSINGS: dict[Library, tuple[Processing, ...]] = {
    LLAMACPP.name: ("outlines_core", "llguidance"),
    TRANSFORMERS.name: ("outlines_core", "llguidance", "xgrammar"),
}
ON_GPUS = (TRANSFORMERS.name,)


class Driven(Protocol):
    """A loaded model, with all that is needed to frame a prompt in tokens and to write one text."""

    name: str
    fingerprint: str
    outlines_model: Any  # from which Outlines' compilers read the vocabulary
    context_tokens_max: int
    tokenizer: ModelTokenizer

    def generate(self, prompt: list[int], guard: Guard, tokens_max: int) -> object:
        """Return the text written after `prompt`, greedily, each token as `guard` permits."""

    def close(self) -> None: ...


class OutlinesWriter:
    """One local model and one of Outlines' backends."""

    form: Form = "regex"

    def __init__(self, driven: Driven, processing: Processing) -> None:
        self._driven, self._processing = driven, processing
        self.name = f"{driven.name}@{driven.fingerprint[:12]}"
        try:
            self._compiler = _compiler(driven.outlines_model, processing)
        except BackendError:
            driven.close()
            raise

    def write(self, system: str, user: str, grammar: Grammar, *, tokens_max: int, timeout_s: float) -> Completion:
        deadline_s = monotonic() + timeout_s
        prompt = self._prompt(system, user)
        room = self._driven.context_tokens_max - len(prompt)
        if room <= 0:
            raise BackendError(f"the prompt of {len(prompt)} tokens fills the model's context")
        guard = Guard(self._compiled(grammar), end_token=self.words.eos, deadline_s=deadline_s)
        text = self._generate(guard, prompt, min(tokens_max, room))
        if guard.error is not None and not isinstance(guard.error, (BackendError, *ENDINGS)):
            raise BackendError(f"the mask failed: {type(guard.error).__name__}") from guard.error
        if guard.error is not None:  # an interrupt stays one
            raise guard.error
        if not guard.calls:
            raise BackendError("the model ran without its grammar mask")
        return Completion(text.encode("utf-8", "replace"), len(prompt) + guard.calls)

    @property
    def words(self) -> Tokenizer:
        return self._driven.tokenizer.words

    @property
    def context_tokens_max(self) -> int:
        return self._driven.context_tokens_max

    def frame(self) -> ChatFrame:
        return self._driven.tokenizer.frame()

    def count_tokens(self, text: str) -> int:
        return len(self._driven.tokenizer.tokenize(text.encode("utf-8", "replace"), special=False))

    def close(self) -> None:
        self._driven.close()

    def _prompt(self, system: str, user: str) -> list[int]:
        return list(chain(*prompt_sections(self._driven.tokenizer, system, user)))

    def _compiled(self, grammar: Grammar) -> Any:
        if grammar.form != self.form:
            raise BackendError(f"the grammar must be in {self.form}, not {grammar.form}")
        if self._processing == "outlines_core":
            _refuse_explosion(grammar)
        try:
            return self._compiler.get_regex_logits_processor(grammar.text)
        except ENDINGS:
            raise
        except BaseException as error:
            raise BackendError(f"{self._processing} cannot compile the language: {type(error).__name__}") from error
        finally:
            if self._processing == "xgrammar":  # it caches every language, and no two decisions share one
                self._compiler.grammar_compiler.clear_cache()

    def _generate(self, guard: Guard, prompt: list[int], tokens_max: int) -> str:
        try:
            text = self._driven.generate(prompt, guard, tokens_max)
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  foreign code; an error of the guard is its cause
            raise BackendError(f"the model could not be run: {type(error).__name__}") from (guard.error or error)
        if not isinstance(text, str):
            raise BackendError("the model wrote no text")
        return text


class Guard:
    """A logits processor that stores the first failure of the one inside it, and ends at the deadline."""

    def __init__(self, inside: Any, *, end_token: int, deadline_s: float) -> None:
        self._inside, self._end_token, self._deadline_s = inside, end_token, deadline_s
        self._permitted: Any = None  # the tokens that the last mask permits, in the shape of the logits
        self.error: BaseException | None = None
        self.calls = 0

    def reset(self) -> None:
        self._inside.reset()

    def __call__(self, input_ids: Any, logits: Any) -> Any:
        self.calls += 1
        if self.error is None:
            try:
                return self._masked(input_ids, logits)
            except BaseException as error:  # noqa: BLE001  C would swallow it, so it is raised after the generation
                self.error = error
        logits[...] = float("-inf")
        logits[..., self._end_token] = 0.0
        return logits

    def _masked(self, input_ids: Any, logits: Any) -> Any:
        if monotonic() > self._deadline_s:
            raise BackendError("the model did not finish in time")
        if self._permitted is not None and not bool(self._permitted[..., int(input_ids[..., -1])]):
            raise BackendError("the model wrote a token that the mask forbids")
        masked = self._inside(input_ids, logits)
        if any(matcher.is_error() for matcher in getattr(self._inside, "ll_matchers", ())):
            raise BackendError("the mask rejected a token that the model wrote")
        self._permitted = masked > float("-inf")
        if self._permitted.shape != logits.shape:  # C could not store it, and would continue without it
            raise BackendError("the mask does not have the shape of the logits")
        if not bool(self._permitted.any()):
            raise BackendError("the mask permits no token, or the model returned no logits")
        return masked


def _refuse_explosion(grammar: Grammar) -> None:
    if grammar.free_chars_max > CORE_FREE_CHARS_MAX or len(grammar.text) > CORE_REGEX_CHARS_MAX:
        raise BackendError(
            f"the language is too large for outlines_core: it has over {CORE_FREE_CHARS_MAX} characters of free text, or"
            f" an expression of over {CORE_REGEX_CHARS_MAX} characters",
            hint="use --backend llguidance",
        )


def _compiler(model: Any, processing: Processing) -> Any:
    """Return Outlines' compiler for this model's vocabulary; building it takes most of a second."""
    from outlines import backends, models  # noqa: PLC0415

    if processing == "xgrammar" and not isinstance(model, models.Transformers):
        raise BackendError("xgrammar runs only with transformers", hint="use --library transformers")
    kinds: dict[Processing, Any] = {
        "outlines_core": backends.OutlinesCoreBackend,
        "llguidance": backends.LLGuidanceBackend,
        "xgrammar": backends.XGrammarBackend,
    }
    hint = XGRAMMAR_HINT if processing == "xgrammar" else OUTLINES_HINT
    try:
        with importing(f"the package {processing} is missing", hint), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # it uses old names of llama.cpp
            return kinds[processing](model)
    except BackendError:
        raise
    except Exception as error:
        raise BackendError(f"{processing} does not support this tokenizer: {type(error).__name__}") from error


class DrivenLlama:
    """A GGUF file in llama-cpp-python's own model, on the processor."""

    def __init__(self, path: Path, *, n_ctx: int, threads: int | None) -> None:
        import llama_cpp as lib  # noqa: PLC0415  loaded when a model is
        import outlines  # noqa: PLC0415

        from sds.models.llamacpp import weights  # noqa: PLC0415
        from sds.models.llamacpp.tokenizer import LlamaTokenizer  # noqa: PLC0415

        if weights.multiplies_in_tiles():
            raise BackendError(
                "this llama.cpp is compiled for AMX, which crashes the process", hint=weights.NO_AMX_HINT
            )
        logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
        self.name, self.fingerprint = path.name, gguf_fingerprint(path)
        count = threads or os.cpu_count() or 1
        # a build with GPU support would use the GPU for long passes even with no layer on it
        on_processor: dict[str, Any] = {"n_gpu_layers": 0, "split_mode": lib.LLAMA_SPLIT_MODE_NONE, "main_gpu": -1}
        on_processor |= {"offload_kqv": False, "op_offload": False}
        try:
            self._llama = lib.Llama(
                str(path), n_ctx=n_ctx, n_threads=count, n_threads_batch=count, verbose=False, **on_processor
            )
        except (ValueError, OSError, MemoryError) as error:
            raise BackendError(f"`{path}` is damaged or of a kind that this llama.cpp does not know") from error
        if why := weights.unfit(self._llama.model):
            self._llama.close()
            raise BackendError(why, hint=weights.UNFIT_HINT)
        self.context_tokens_max = weights.trained_context(self._llama.model, n_ctx)
        words = LlamaTokenizer(lib.llama_model_get_vocab(self._llama.model))
        self.tokenizer = ModelTokenizer(words, weights.chat_template(self._llama.model))
        self.outlines_model: Any = outlines.from_llamacpp(self._llama, chat_mode=False)

    def generate(self, prompt: list[int], guard: Guard, tokens_max: int) -> object:
        written: Any = self._llama(
            prompt,  # type: ignore[arg-type]  # it takes token ids, too
            logits_processor=[guard],  # type: ignore[arg-type]  # any list works
            max_tokens=tokens_max,
            temperature=0.0,
            repeat_penalty=1.0,
        )
        self._llama.reset()  # type: ignore[no-untyped-call]
        return written["choices"][0]["text"]

    def close(self) -> None:
        self.tokenizer.words.release()
        self._llama.close()


class DrivenTransformers:
    """A checkpoint folder, or a GGUF file. The weights are loaded as for our own engine, which also frames the prompt."""

    def __init__(self, path: Path, *, device: str, dtype: Dtype, n_ctx: int, threads: int | None) -> None:
        from sds.models.transformers_.backend import HfBackend  # noqa: PLC0415  torch is loaded when it is asked for

        _load_kernels()
        self._backend = HfBackend(path, device=device, dtype=dtype, n_ctx=n_ctx, threads=threads)
        self.name, self.fingerprint = self._backend.name, self._backend.fingerprint
        self.context_tokens_max = self._backend.context_tokens_max
        self.tokenizer: ModelTokenizer = self._backend
        try:
            self._open(path)
        except Exception as error:
            self._backend.close()
            raise BackendError(
                f"Outlines does not support the tokenizer of `{path}`: {type(error).__name__}"
            ) from error

    def _open(self, path: Path) -> None:
        import outlines  # noqa: PLC0415
        from transformers import AutoTokenizer, GenerationConfig  # noqa: PLC0415

        file = {} if path.is_dir() else {"gguf_file": path.name}
        folder = path if path.is_dir() else path.parent
        read: Any = AutoTokenizer.from_pretrained
        self._tokenizer = read(folder, local_files_only=True, trust_remote_code=False, **file)
        self.outlines_model: Any = outlines.from_transformers(self._backend.module, self._tokenizer)
        # A checkpoint's own settings may have sampling, penalties or another end token.
        end = self._backend.words.eos
        settings = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=end)  # type: ignore[no-untyped-call]
        self._backend.module.generation_config = settings

    def generate(self, prompt: list[int], guard: Guard, tokens_max: int) -> object:
        """Masks are applied uncompiled: compiling that one line takes a minute and a C++ compiler."""
        import torch  # noqa: PLC0415

        module = self._backend.module
        ids = torch.tensor([prompt], device=module.device)  # shape [1, tokens]
        with torch.compiler.set_stance("force_eager"):
            written = module.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), logits_processor=[guard], max_new_tokens=tokens_max
            )
        options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
        return self._tokenizer.decode(written[0, len(prompt) :], **options)

    def close(self) -> None:
        self.outlines_model = None
        self._backend.close()


def _load_kernels() -> None:
    for kernel in ("outlines_core.kernels.torch", "llguidance.torch"):
        with warnings.catch_warnings(), suppress(ImportError):
            warnings.simplefilter("ignore", DeprecationWarning)  # from modules of torch itself
            import_module(kernel)


def drive(
    path: Path,
    library: Library,
    *,
    device: str = "cpu",
    dtype: Dtype | None = None,
    threads: int | None = None,
    n_ctx: int = CONTEXT_TOKENS,
) -> Driven:
    """Load a model to be constrained by Outlines. Raises BackendError."""
    with importing("the package outlines is missing", OUTLINES_HINT):
        import outlines  # noqa: F401, PLC0415
    if library == LLAMACPP.name:
        return DrivenLlama(path, n_ctx=n_ctx, threads=threads)
    return DrivenTransformers(path, device=device, dtype=dtype or "fp32", n_ctx=n_ctx, threads=threads)
