"""The vocabulary of a checkpoint folder, from its `tokenizer.json` alone: exact bytes, no hub, none of the model's code.

Additions of the `tokenizers` library (a space before every text, padding, truncation) are switched off, so that the
pieces of a text spell exactly that text. A tokenizer that cannot do so is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sds.models.protocol import BackendError
from sds.models.tokenizer.json_file import read_json_object

FILE_BYTES_MAX = 1 << 28
SIZE_MAX = 1 << 24  # of a vocabulary: sixty times the largest known one
_ASCII = "".join(map(chr, range(32, 127)))
_PROBES = (_ASCII, "  two  spaces\n\n{\n", '{"action":"PAY","params":{"amount":150.00}}', "é €🙂\x01")
_UNKNOWN_HINT = "use a model with a byte-level or byte-fallback tokenizer, or its GGUF through llama.cpp"


class JsonTokenizer:
    """`size`: the number of the model's logits. Entries beyond the tokenizer have no spelling and count as control tokens."""

    def __init__(self, folder: Path, size: int) -> None:
        if size > SIZE_MAX:
            raise BackendError(f"a vocabulary of {size} tokens is larger than the limit of {SIZE_MAX}")
        config = folder / "tokenizer_config.json"
        settings = read_json_object(config, bytes_max=FILE_BYTES_MAX) if config.exists() else {}
        whole = read_json_object(folder / "tokenizer.json", bytes_max=FILE_BYTES_MAX)
        adds_bos = settings.get("add_bos_token")
        self.size = size
        self.chat_template = _chat_template(folder, settings)
        self._tokenizer = _tokenizer(whole)
        self.kind = str(whole["model"].get("type", ""))
        self._added = self._tokenizer.get_added_tokens_decoder()
        self._spelled = self._spellings(whole)
        self.bos, self.eos = (self._named(settings, name) for name in ("bos_token", "eos_token"))
        if self.eos < 0:
            raise BackendError(f"`{folder}` names no end token", hint="set eos_token in tokenizer_config.json")
        self._control = self._control_tokens(settings)
        self.adds_bos = self.bos >= 0 and (adds_bos if isinstance(adds_bos, bool) else self._begins_with_bos())
        self._open = True
        self._check(folder, settings)

    def release(self) -> None:
        self._open = False

    def encode(self, text: bytes, *, special: bool) -> list[int]:
        if not self._open:
            raise BackendError("the model is closed")
        try:
            readable = text.decode()
        except UnicodeDecodeError as error:
            raise BackendError("a text is not UTF-8") from error
        self._tokenizer.encode_special_tokens = not special
        return list(self._tokenizer.encode(readable, add_special_tokens=False).ids)

    def piece(self, token: int) -> bytes:
        return b"" if self.is_control(token) else self.spelling(token)

    def spelling(self, token: int) -> bytes:
        """Return the text of a token, also of a control token; b"" where the tokenizer has no such token."""
        if not self._open:
            raise BackendError("the model is closed")
        if not 0 <= token < self.size:
            raise BackendError("a token is outside the vocabulary")
        return self._spelled[token]

    def is_control(self, token: int) -> bool:
        return token in self._control

    def _spellings(self, whole: dict[str, Any]) -> list[bytes]:
        vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        if max(vocab.values(), default=0) >= self.size:
            raise BackendError(f"the tokenizer has tokens beyond the model's {self.size}")
        kinds = {part.get("type") for part in _parts(whole.get("decoder"), "decoders")}
        plain = _byte_level if "ByteLevel" in kinds else _byte_fallback
        spelled = [b""] * self.size
        for text, token in vocab.items():
            spelled[token] = text.encode() if token in self._added else plain(text)
        return spelled

    def _control_tokens(self, settings: dict[str, Any]) -> frozenset[int]:
        """Return all tokens that may steer the model: special tokens, added tags, and tokens without a spelling."""
        named = {self._named(settings, name) for name in settings if name.endswith("_token")}
        added = {
            token
            for token, entry in self._added.items()
            if entry.special or (entry.content.startswith("<") and entry.content.endswith(">"))
        }
        nameless = {token for token, spelled in enumerate(self._spelled) if not spelled}
        return frozenset((named | added | nameless) - {-1})

    def _named(self, settings: dict[str, Any], name: str) -> int:
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        token = self._tokenizer.token_to_id(text) if isinstance(text, str) else None
        return -1 if token is None else token

    def _begins_with_bos(self) -> bool:
        return bool(self._tokenizer.encode("x", add_special_tokens=True).ids[:1] == [self.bos])

    def _check(self, folder: Path, settings: dict[str, Any]) -> None:
        for token, entry in settings.get("added_tokens_decoder", {}).items():
            if self._tokenizer.id_to_token(int(token)) != entry["content"]:
                raise BackendError(f"`{folder}` names a token `{entry['content']}` that is not in its tokenizer.json")
        for text in _PROBES:
            if b"".join(map(self.piece, self.encode(text.encode(), special=False))) != text.encode():
                raise BackendError("the tokenizer does not reproduce text exactly", hint=_UNKNOWN_HINT)


def _tokenizer(whole: dict[str, Any]) -> Tokenizer:
    whole["truncation"] = whole["padding"] = None
    for part in _parts(whole.get("pre_tokenizer"), "pretokenizers"):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
        if part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    whole["normalizer"] = _without_prepend(whole.get("normalizer"))
    try:
        return Tokenizer.from_str(json.dumps(whole))
    except Exception as error:
        raise BackendError("the tokenizer.json is damaged or of a kind this library does not know") from error


def _without_prepend(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    if normalizer is None or normalizer.get("type") == "Prepend":
        return None
    if normalizer.get("type") == "Sequence":
        normalizer["normalizers"] = [part for part in normalizer["normalizers"] if part.get("type") != "Prepend"]
    return normalizer


def _parts(of: dict[str, Any] | None, name: str) -> list[dict[str, Any]]:
    if of is None:
        return []
    return list(of.get(name, [])) if of.get("type") == "Sequence" else [of]


def _byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTE_OF[char] for char in text)
    except KeyError:
        return text.encode()


def _byte_fallback(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace("\u2581", " ").encode()


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character in byte-level vocabularies (the table of GPT-2).

    Visible Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + n): byte for n, byte in enumerate(hidden)}


_BYTE_OF = _byte_characters()


def _chat_template(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = next((entry.get("template") for entry in found if entry.get("name") == "default"), None)
    return found if isinstance(found, str) else None
