"""What all vocabularies share, whichever library they come from: untrusted text, the chat frame, the sections of a prompt."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol, runtime_checkable

from sds.models.protocol import BackendError, ChatFrame
from sds.models.tokenizer.chat_template import chat_frame

TEXT_BYTES_MAX = 1 << 20
CONTROL_ROUNDS_MAX = 8


class Tokenizer(Protocol):
    """Turns text into tokens and tokens into bytes, and knows control tokens. Methods raise `BackendError`.

    `encode` returns the library's tokens for a text, perhaps with control tokens. `spelling` returns the text of a
    token, also of control tokens (`<|im_end|>`); b"" for an entry of the model that its tokenizer lacks.
    """

    @property
    def size(self) -> int: ...

    @property
    def bos(self) -> int:
        """Return the token that begins a prompt; negative where there is none."""

    @property
    def eos(self) -> int: ...

    @property
    def adds_bos(self) -> bool: ...

    def encode(self, text: bytes, *, special: bool) -> list[int]: ...

    def spelling(self, token: int) -> bytes: ...

    def is_control(self, token: int) -> bool: ...

    def release(self) -> None:
        """Refuse every further use: the memory behind the tokenizer is about to be freed."""


@runtime_checkable
class Speaks(Protocol):
    """The part of a loaded model that is checked before a decision: vocabulary, frame, context. `frame` raises BackendError."""

    @property
    def words(self) -> Tokenizer: ...

    @property
    def context_tokens_max(self) -> int: ...

    def frame(self) -> ChatFrame: ...


def tokens_of(words: Tokenizer, text: bytes, *, special: bool) -> list[int]:
    """Return the tokens of `text`. With `special=False` a text that spells a control token is broken up."""
    if len(text) > TEXT_BYTES_MAX:
        raise BackendError(f"a text of {len(text)} bytes is longer than {TEXT_BYTES_MAX}")
    if special:
        return words.encode(text, special=True)
    spelled = set[bytes]()
    for _ in range(CONTROL_ROUNDS_MAX):
        tokens = [token for part in _broken_up(text, spelled) for token in words.encode(part, special=False)]
        found = {words.spelling(token) for token in set(tokens) if words.is_control(token)}
        if not found:
            return tokens
        spelled |= found
    raise BackendError("a text cannot be told apart from the model's control tokens")


def _broken_up(text: bytes, spelled: set[bytes]) -> Iterator[bytes]:
    """Cut `text` after the first character of every part that spells one of `spelled`."""
    start = 0
    if spelled:
        for match in re.finditer(b"(?=" + b"|".join(map(re.escape, spelled)) + b")", text):
            end = match.start() + 1
            while end < len(text) and text[end] & 0xC0 == 0x80:  # the rest of one UTF-8 character
                end += 1
            yield text[start:end]
            start = end
    yield text[start:]


def readable(text: bytes, what: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise BackendError(
            f"{what} of the model is not UTF-8", hint="use a model whose tokenizer is undamaged"
        ) from error


def model_frame(template: str | None, words: Tokenizer) -> ChatFrame:
    """Return the frame of the model's own template, beginning as the model expects a prompt to begin."""
    bos, eos = (readable(words.spelling(t), "a control token") if t >= 0 else "" for t in (words.bos, words.eos))
    frame = chat_frame(template, bos=bos, eos=eos)
    if words.adds_bos and not frame.before_system.startswith(bos):
        return replace(frame, before_system=bos + frame.before_system)
    return frame


class ModelTokenizer:
    """A backend's tokenizer with its chat template: text to tokens, tokens to bytes, the frame of a prompt."""

    def __init__(self, words: Tokenizer, template: str | None = None) -> None:
        self.words, self.vocab_size = words, words.size
        self._template = template
        self._frame: ChatFrame | None = None

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        return tokens_of(self.words, text, special=special)

    def piece(self, token: int) -> bytes:
        return b"" if self.words.is_control(token) else self.words.spelling(token)

    def frame(self) -> ChatFrame:
        if self._frame is None:
            self._frame = model_frame(self._template, self.words)
        return self._frame


class ChatTokenizer(Protocol):
    """The part of a backend that turns texts into tokens."""

    def tokenize(self, text: bytes, *, special: bool) -> list[int]: ...

    def frame(self) -> ChatFrame: ...


def prompt_sections(backend: ChatTokenizer, static: str, *dynamic: str) -> list[list[int]]:
    """Return the prompt of one turn in sections, so that a change of one text leaves the sections before it unchanged.

    The first section is the frame's opening, `static` and the turn to the user. Each dynamic text is one section, the
    last with the frame's closing. Only the frame may hold control tokens; every text is content.
    """
    frame = backend.frame()

    def control(text: str) -> list[int]:
        return backend.tokenize(text.encode(), special=True) if text else []

    def content(text: str) -> list[int]:
        return backend.tokenize(text.encode("utf-8", "replace"), special=False) if text else []

    sections = [control(frame.before_system) + content(static) + control(frame.between)]
    sections += [content(text) for text in dynamic]
    sections[-1] += control(frame.after_user)
    return [section for section in sections if section]
