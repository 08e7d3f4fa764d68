"""Inspects a GGUF file or a checkpoint folder by its headers and its tokenizer. The weights stay on disk."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import llama_cpp as lib

from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.files.safetensors import read_safetensors
from sds.models.llamacpp.weights import chat_template, load_gguf, metadata, unfit
from sds.models.protocol import BackendError, ChatFrame
from sds.models.tokenizer.json_file import read_json_object
from sds.models.tokenizer.tokenizer import Tokenizer, model_frame, tokens_of

GGUF, FOLDER = "GGUF", "checkpoint folder"
METADATA_BYTES_MAX = 1 << 26
DIGITS_MAX = 18  # of a number that is only shown
CONFIG_BYTES_MAX = 1 << 20
NOT_SAID = "not said"
_DIGITS = (b"0123456789", b"2026", b"150.00", b'"amount":99995.05')
_WHOLE = "name the GGUF file of a whole model, not an adapter, a projector or a later part of a split model"


@dataclass(frozen=True, slots=True)
class ModelCard:
    """`context_tokens`, `layers`: 0 where the file does not say (context: trained for). `turn`: None where the template has
    no turn in which the model answers; `turn_refused` says why. `unfit`: why it can decide nothing, whatever its vocabulary.

    `sha256`: of the GGUF file, or of the folder's safetensors files end to end, by name.
    """

    name: str
    form: str
    architecture: str
    parameters: int
    layers: int
    weights: str
    context_tokens: int
    vocabulary_tokens: int
    tokenizer: str
    file_bytes: int
    sha256: str
    has_chat_template: bool
    turn: ChatFrame | None
    splits_digits: bool
    turn_refused: str = ""
    unfit: str = ""


@dataclass(frozen=True, slots=True)
class Inspected:
    """A model's card and its tokenizer, which is valid only during the inspection."""

    card: ModelCard
    words: Tokenizer


@contextmanager
def inspect_model(path: Path) -> Iterator[Inspected]:
    """Open a model without its weights. Raises BackendError, one line, for anything that is no model."""
    if path.is_dir():
        yield _folder(path)
        return
    if path.exists() and not path.is_file():  # reading a pipe might never end
        raise BackendError(f"`{path}` is neither a file nor a folder")
    sha256 = gguf_fingerprint(path)
    try:
        model, words = load_gguf(path, vocab_only=True)
    except BackendError as error:
        if not _mentions(path, b"tokenizer.ggml.model"):
            raise BackendError(f"`{path}` has no vocabulary, or the file ends before it", hint=_WHOLE) from error
        raise
    try:
        yield _gguf(path, sha256, model, words)
    finally:
        words.release()
        lib.llama_model_free(model)


def _gguf(path: Path, sha256: str, model: lib.llama_model_p, words: Tokenizer) -> Inspected:
    said = partial(metadata, model)
    architecture = said("general.architecture") or NOT_SAID
    if not words.size or said("tokenizer.ggml.model") in {"", "no_vocab", "none"}:
        raise BackendError(f"`{path}` has no vocabulary", hint=_WHOLE)
    file_type = said("general.file_type")
    template = chat_template(model)
    turn, turn_refused = _turn(template, words)
    card = ModelCard(
        name=path.name,
        form=GGUF,
        architecture=architecture,
        parameters=lib.llama_model_n_params(model),
        layers=_number(said(f"{architecture}.block_count")),
        weights=_file_types().get(_number(file_type), f"type {file_type}") if file_type.isdecimal() else NOT_SAID,
        context_tokens=_number(said(f"{architecture}.context_length")),
        vocabulary_tokens=words.size,
        tokenizer=" ".join(filter(None, (said("tokenizer.ggml.model"), said("tokenizer.ggml.pre")))),
        file_bytes=path.stat().st_size,
        sha256=sha256,
        has_chat_template=template is not None,
        turn=turn,
        splits_digits=splits_digits(words),
        turn_refused=turn_refused,
        unfit=unfit(model),
    )
    return Inspected(card, words)


def _folder(path: Path) -> Inspected:
    if not (path / "config.json").exists():
        raise BackendError(
            f"`{path}` is not a checkpoint: it has no config.json", hint="name a checkpoint folder or a GGUF file"
        )
    config = read_json_object(path / "config.json", bytes_max=CONFIG_BYTES_MAX)
    text_config = config.get("text_config")
    inner = text_config if isinstance(text_config, dict) else config
    size = inner.get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise BackendError(f"`{path}/config.json` names no vocab_size")
    weights = read_safetensors(path)
    words, template, kind = _folder_words(path, size)
    turn, turn_refused = _turn(template, words)
    names = config.get("architectures")
    card = ModelCard(
        name=path.resolve().name,
        form=FOLDER,
        architecture=str(names[0]) if isinstance(names, list) and names else str(config.get("model_type", NOT_SAID)),
        parameters=weights.parameters,
        layers=_number(str(inner.get("num_hidden_layers", ""))),
        weights=weights.types[0][0] if weights.types else NOT_SAID,
        context_tokens=_number(str(inner.get("max_position_embeddings", ""))),
        vocabulary_tokens=size,
        tokenizer=kind,
        file_bytes=weights.bytes,
        sha256=weights.sha256,
        has_chat_template=template is not None,
        turn=turn,
        splits_digits=splits_digits(words),
        turn_refused=turn_refused,
        unfit=_folder_unfit(path),
    )
    return Inspected(card, words)


def _folder_unfit(path: Path) -> str:
    """Return why transformers cannot run the folder; "" also where it cannot be imported, which a command that runs it says."""
    try:
        from sds.models.transformers_.loading import unfit_folder  # noqa: PLC0415  torch is loaded for folders only
    except ImportError:
        return ""
    return unfit_folder(path)


def _folder_words(path: Path, size: int) -> tuple[Tokenizer, str | None, str]:
    from sds.models.tokenizer.tokenizer_json import JsonTokenizer  # noqa: PLC0415  most models are no such folder

    if not (path / "tokenizer.json").exists():
        raise BackendError(f"`{path}` has no tokenizer.json", hint="save the fast tokenizer in the folder, too")
    try:
        words = JsonTokenizer(path, size)
    except BackendError:
        raise
    except Exception as error:  # a library may raise anything on damaged files
        raise BackendError(f"the tokenizer of `{path}` is damaged") from error
    return words, words.chat_template, words.kind or NOT_SAID


def splits_digits(words: Tokenizer) -> bool:
    """Return whether every digit of a number is a token of its own."""
    return all(
        len(words.spelling(token).strip()) == 1
        for text in _DIGITS
        for token in tokens_of(words, text, special=False)
        if any(byte in b"0123456789" for byte in words.spelling(token))
    )


def _turn(template: str | None, words: Tokenizer) -> tuple[ChatFrame | None, str]:
    """Return the frame of the model's template, or why there is none."""
    try:
        return model_frame(template, words), ""
    except BackendError as error:
        return None, str(error)


def _file_types() -> dict[int, str]:
    return {
        number: name.removeprefix("LLAMA_FTYPE_").removeprefix("MOSTLY_").removeprefix("ALL_")
        for name, number in vars(lib).items()
        if name.startswith("LLAMA_FTYPE_")
    }


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else 0


def _mentions(path: Path, key: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as held:
        return held.find(key, 0, METADATA_BYTES_MAX) >= 0
