"""A tiny BERT encoder with weights drawn at random, and texts that a head on it can tell apart."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

WIDTH, LAYERS, HEADS, INNER, POSITIONS = 32, 2, 4, 64, 64
CONTROLS = PAD, UNKNOWN, BEGIN, END = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
SUBJECTS = {
    "weather": ("storm", "snow", "fog", "ice"),
    "crew": ("pilot", "steward", "captain", "rota"),
    "technical": ("engine", "pump", "door", "tyre"),
}
NAMES = tuple(SUBJECTS)
FILLERS = (
    "we",
    "waited",
    "at",
    "the",
    "gate",
    "for",
    "hours",
    "because",
    "of",
    "a",
    "my",
    "flight",
    "was",
    "late",
    "please",
)
VOCABULARY = (
    *CONTROLS,
    *FILLERS,
    *(word for words in SUBJECTS.values() for word in words),
    *"abcdefghijklmnopqrstuvwxyz0123456789.,",
)


def write_encoder(folder: Path, *, seed: int = 0) -> Path:
    """Write config.json, model.safetensors and tokenizer.json of a BERT encoder into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "model_type": "bert", "hidden_act": "gelu", "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "hidden_size": WIDTH, "intermediate_size": INNER, "max_position_embeddings": POSITIONS,
        "vocab_size": len(VOCABULARY), "layer_norm_eps": 1e-12, "type_vocab_size": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "model.safetensors").write_bytes(safetensors(_weights(seed)))
    (folder / "tokenizer.json").write_text(_tokenizer().to_str())
    return folder


def safetensors(tensors: dict[str, np.ndarray]) -> bytes:
    header, data = {}, b""
    for name, numbers in tensors.items():
        start = len(data)
        data += numbers.astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(numbers.shape), "data_offsets": [start, len(data)]}
    told = json.dumps(header).encode()
    return len(told).to_bytes(8, "little") + told + data


def _weights(seed: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)

    def norm(name: str) -> dict[str, np.ndarray]:
        return {
            f"{name}.weight": 1 + 0.1 * draw.standard_normal(WIDTH),
            f"{name}.bias": 0.1 * draw.standard_normal(WIDTH),
        }

    def linear(name: str, rows: int, columns: int) -> dict[str, np.ndarray]:
        return {
            f"{name}.weight": 0.5 * draw.standard_normal((rows, columns)) / columns**0.5,
            f"{name}.bias": 0.1 * draw.standard_normal(rows),
        }

    found = {
        "embeddings.word_embeddings.weight": draw.standard_normal((len(VOCABULARY), WIDTH)),
        "embeddings.position_embeddings.weight": 0.1 * draw.standard_normal((POSITIONS, WIDTH)),
        "embeddings.token_type_embeddings.weight": 0.1 * draw.standard_normal((2, WIDTH)),
        **norm("embeddings.LayerNorm"),
    }
    for layer in range(LAYERS):
        front = f"encoder.layer.{layer}."
        for part in ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"):
            found |= linear(front + part, WIDTH, WIDTH)
        found |= linear(front + "intermediate.dense", INNER, WIDTH) | linear(front + "output.dense", WIDTH, INNER)
        found |= norm(front + "attention.output.LayerNorm") | norm(front + "output.LayerNorm")
    return found


def _tokenizer() -> Tokenizer:
    words = {word: place for place, word in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(words, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(CONTROLS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def claims(count: int, *, seed: int) -> tuple[list[str], list[str]]:
    """Return `count` texts and the value that each states."""
    draw = random.Random(seed)
    texts, values = [], []
    for number in range(count):
        value = NAMES[number % len(NAMES)]
        words = draw.choices(FILLERS, k=draw.randint(2, 6))
        words.insert(draw.randrange(len(words) + 1), draw.choice(SUBJECTS[value]))
        texts.append(" ".join(words))
        values.append(value)
    return texts, values
