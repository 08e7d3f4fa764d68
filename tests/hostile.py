"""Hostile models: tiny random checkpoints with the real vocabulary, and logits that prefer forbidden tokens.

Both only supply logits. The tokenizer, the mask, the language and the decoder are the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from numpy.typing import NDArray

from sds.benchmarks.card.checkpoint import GgufReader
from sds.grammars.tokens.matcher import TokenMatcher
from sds.models.protocol import Backend, ChatFrame, Row
from tests.scale import scale

LAYERS, WIDTH, HEADS, HEADS_KV, FEED_FORWARD = 2, 64, 2, 1, 128
COPIED_NUMBERS = ("bos_token_id", "eos_token_id", "unknown_token_id", "padding_token_id")
COPIED_LISTS = ("tokens", "token_type", "merges")
TINY_VOCABULARY = scale(8_192, 49_152)  # tokens; the embedded model has all of them

Logits = NDArray[np.float32]


class Panic(BaseException):
    """Stands for the exception of a Rust library that panics: it is no `Exception`, and no SystemExit either."""


class Vocabulary:
    """The tokenizer metadata of a GGUF file, read once (it takes a second), cut to the first TINY_VOCABULARY tokens."""

    def __init__(self, source: Path) -> None:
        fields = GgufReader(source).fields
        read = {name: fields[f"tokenizer.ggml.{name}"].contents() for name in COPIED_LISTS}
        self.lists = {name: values[:TINY_VOCABULARY] for name, values in read.items()}
        kept = set(self.lists["tokens"])
        self.lists["merges"] = [merge for merge in read["merges"] if merge.replace(" ", "") in kept]
        self.numbers = {name: int(fields[f"tokenizer.ggml.{name}"].contents()) for name in COPIED_NUMBERS}
        self.model, self.pre = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("model", "pre"))
        self.chat_template = fields["tokenizer.chat_template"].contents()


def tiny_checkpoint(
    path: Path,
    vocabulary: Vocabulary,
    seed: int,
    *,
    token_types: Mapping[int, int] | None = None,
    weights: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F16,
) -> Path:
    """Write a random two-layer model of about 7 MB with this vocabulary; `token_types` overrides single types."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS_KV)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(vocabulary.lists["tokens"]))
    _write_tokenizer(writer, vocabulary, token_types or {})
    _write_weights(writer, np.random.default_rng(seed), len(vocabulary.lists["tokens"]), weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_tokenizer(writer: gguf.GGUFWriter, vocabulary: Vocabulary, token_types: Mapping[int, int]) -> None:
    types = list(vocabulary.lists["token_type"])
    for token, token_type in token_types.items():
        types[token] = token_type
    writer.add_tokenizer_model(vocabulary.model)
    writer.add_tokenizer_pre(vocabulary.pre)
    writer.add_token_list(vocabulary.lists["tokens"])
    writer.add_token_types(types)
    writer.add_token_merges(vocabulary.lists["merges"])
    writer.add_add_bos_token(False)
    for name, number in vocabulary.numbers.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", number)
    writer.add_chat_template(vocabulary.chat_template)


def _write_weights(
    writer: gguf.GGUFWriter, rng: np.random.Generator, vocab_size: int, kind: gguf.GGMLQuantizationType
) -> None:
    def add(name: str, values: NDArray[np.float32]) -> None:
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)

    head = WIDTH // HEADS
    shapes = {
        "attn_q": (WIDTH, WIDTH),
        "attn_k": (head * HEADS_KV, WIDTH),
        "attn_v": (head * HEADS_KV, WIDTH),
        "attn_output": (WIDTH, WIDTH),
        "ffn_gate": (FEED_FORWARD, WIDTH),
        "ffn_up": (FEED_FORWARD, WIDTH),
        "ffn_down": (WIDTH, FEED_FORWARD),
    }
    add("token_embd", rng.standard_normal((vocab_size, WIDTH), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights = rng.standard_normal(shape, np.float32) / np.float32(shape[1] ** 0.5)
            add(f"blk.{layer}.{name}", weights)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, np.float32))


class AdversarialBackend:
    """A backend with a real model's tokenizer, and logits from a function: `wish(self) -> logits`, shape [vocab_size].

    Call `face(matcher)` with a matcher of its own before each decision: `permitted` then holds the tokens permitted after
    those that a slot was sent, so that a wish knows exactly what is forbidden.
    """

    slots, pass_tokens_max, lookahead_tokens_max, rows_may_be_cut = 1, 512, 0, True

    def __init__(self, real: Backend, wish: Callable[[AdversarialBackend], Logits], seed: int = 0) -> None:
        self._real, self._wish = real, wish
        self.name, self.fingerprint = "adversary", "0" * 64
        self.vocab_size, self.context_tokens_max = real.vocab_size, real.context_tokens_max
        self.rng = np.random.default_rng(seed)
        self.pieces = [real.piece(token) for token in range(real.vocab_size)]
        self.held: dict[int, list[int]] = {0: []}
        self.permitted = np.zeros(0, np.intp)
        self._matcher: TokenMatcher | None = None

    def face(self, matcher: TokenMatcher) -> None:
        self._matcher = matcher

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return self._real.tokenize(text, special=special)

    def piece(self, token: int) -> bytes:
        return self.pieces[token]

    def frame(self) -> ChatFrame:
        return self._real.frame()

    def is_cached(self, sections: Sequence[Sequence[int]]) -> bool:
        return False

    def prefill(self, sections: Sequence[Sequence[int]], *, slot: int = 0) -> None:
        self.held[slot] = []

    def forward_one(self, tokens: Sequence[int], *, slot: int = 0) -> Logits:
        return self.run([Row(slot, tokens)])[0][-1]

    def run(self, rows: Sequence[Row]) -> list[Logits]:
        return [self._answers(row) for row in rows]

    def _answers(self, row: Row) -> Logits:
        answers = []
        for place, token in enumerate(row.tokens, start=1):
            self.held[row.slot] += [token] if self.pieces[token] else []  # the prompt is all control tokens
            if place > len(row.tokens) - row.outputs:
                self._look(self.held[row.slot])
                answers.append(self._wish(self))
        return np.array(answers, np.float32)

    def _look(self, written: Sequence[int]) -> None:
        if self._matcher is not None:
            matcher = self._matcher.copy()
            for token in written:
                matcher.accept(token)
            self.permitted = np.array(matcher.accept_forced()[:1] or matcher.choice_point().tokens, np.intp)

    def fork(self, slot: int) -> int:
        fork = max(self.held) + 1
        self.held[fork] = list(self.held[slot])
        return fork

    def drop(self, fork: int) -> None:
        del self.held[fork]

    def close(self) -> None:
        pass


PROMPT = [[1], [2]]  # control tokens only, so that the adversary can tell prompt and answer apart


def _scored(score: Callable[[bytes], float]) -> Callable[[AdversarialBackend], Logits]:
    def wish(backend: AdversarialBackend) -> Logits:
        key = score.__name__
        known: dict[str, Logits] = backend.__dict__.setdefault("_scores", {})
        if key not in known:
            known[key] = np.array([score(piece) for piece in backend.pieces], np.float32)
        return known[key].copy()

    return wish


def _number(piece: bytes) -> float:
    return float(piece) if piece.isdigit() else -1.0


def _length(piece: bytes) -> float:
    return len(piece) - 100.0 * (b'"' in piece)


def _ending(piece: bytes) -> float:
    return 50.0 * (b'"' in piece or b"}" in piece) - len(piece)


def forbidden(backend: AdversarialBackend) -> Logits:
    wanted = np.full(backend.vocab_size, 1e4, np.float32)
    wanted[backend.permitted] = -1e4
    return wanted + random(backend)


def random(backend: AdversarialBackend) -> Logits:
    return backend.rng.standard_normal(backend.vocab_size, np.float32) * 10


def constant(backend: AdversarialBackend) -> Logits:
    return np.zeros(backend.vocab_size, np.float32)


def huge(backend: AdversarialBackend) -> Logits:
    return np.where(backend.rng.random(backend.vocab_size) < 0.5, 1e30, -1e30).astype(np.float32)


def _control(piece: bytes) -> float:
    return 0.0 if piece else 1e30


WISHES: dict[str, Callable[[AdversarialBackend], Logits]] = {
    "forbidden tokens": forbidden,
    "the largest number": _scored(_number),
    "the longest string": _scored(_length),
    "the shortest answer": _scored(_ending),
    "anything": random,
    "nothing in particular": constant,
    "huge logits": huge,
    "control tokens": _scored(_control),
}
