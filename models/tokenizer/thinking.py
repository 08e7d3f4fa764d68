"""Finds where a model answers when its template has it think first.

Two texts of a template are compared: the one before the model speaks, and the one before a past answer, which is where
an answer belongs. No model's name is known here, only how thoughts are marked.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from sds.models.protocol import ChatFrame

_WORD = r"(?:think|thought|reason)"
_MARK = re.compile(
    r"<\|(?:open|close)\|>think<\|sep\|>"
    r"|<\|channel>thought\n?|<channel\|>|<\|channel\|>(?:analysis|final)<\|message\|>"
    rf"|[<\[][^<>\[\]\s]{{0,40}}{_WORD}[^<>\[\]\s]{{0,40}}[>\]]",
    re.IGNORECASE,
)
_MARK_IN_SPACE = re.compile(rf"\s*(?:{_MARK.pattern})\s*", re.IGNORECASE)
_CLOSES = re.compile(r"^[<\[]\|?/|^<[|\uff5c](?:end|close)|^<channel\||^<\|channel\|>final", re.IGNORECASE)
_SPOKEN = re.compile(rf"(?<!/no)(?<!/no_){_WORD}", re.IGNORECASE)
_TAG = re.compile(r"^([<\[])([^/].*)$", re.DOTALL)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A template's rendering of two texts. `answer`: the text between the user's text and a past answer; `closing`:
    between a thought and its answer; None: the template does not show it.
    """

    frame: ChatFrame
    answer: str | None
    closing: str | None


def thinks(text: str) -> bool | None:
    """Return whether a thought is open at the end of `text`; None where no thought is marked there."""
    marks = list(_MARK.finditer(text))
    rest = text[marks[-1].end() :] if marks else text
    if _SPOKEN.search(rest):
        return True
    return not _CLOSES.match(marks[-1][0]) if marks else None


def answering(chat: RenderedChat, source: str) -> ChatFrame | None:
    """Return the frame after which the model answers, with how that was found; None where it is unknown.

    `source`: of the template.
    """
    said, past = chat.frame.after_user, chat.answer
    if thinks(said) and (past != said or _MARK.search(said)):
        return _closed(chat, source)
    if past is None or thinks(past):
        return chat.frame
    header = past.removeprefix(said) if past.startswith(said) else _header(past, said)
    if not header.strip():
        return chat.frame
    return _with(
        chat.frame, said + header, f"the answer follows `{_shown(header)}`, as the template writes past answers"
    )


def _header(past: str, said: str) -> str:
    """Return the text before a past answer beyond `said`, without thoughts."""
    return _bare(past).removeprefix(_bare(said)).strip() if _bare(past).startswith(_bare(said)) else ""


def _closed(chat: RenderedChat, source: str) -> ChatFrame | None:
    """Close the open thought: as the template does before an answer, or after a thought, or with the mark that it knows."""
    said, past = chat.frame.after_user, chat.answer
    if past is not None and thinks(past) is False and _bare(past).startswith(_bare(said)):
        return _with(
            chat.frame,
            past,
            f"the thought is left empty, as the template writes past answers: `{_shown(_unlike(past, said))}`",
        )
    marks = list(_MARK.finditer(said))
    if not marks or said[marks[-1].end() :].strip():
        return None
    close = _close_of(marks[-1][0])
    closing = chat.closing if chat.closing is not None and close in chat.closing else None
    if closing is None and close in source:
        closing = f"\n{close}\n\n" if said.endswith("\n") else close
    if closing is None:
        return None
    return _with(
        chat.frame, said + closing, f"the thought that the template begins is ended at once: `{_shown(closing)}`"
    )


def _close_of(mark: str) -> str:
    if mark.startswith("<|open|>"):
        return mark.replace("open", "close", 1)
    if mark.startswith("<|channel>"):
        return "<channel|>"
    if re.match(r"<[|\uff5c](?:start|begin)", mark, re.IGNORECASE):
        return mark.replace("START", "END").replace("start", "end").replace("begin", "end")
    return _TAG.sub(r"\1/\2", mark)


def _bare(text: str) -> str:
    """Return a text without the marks of thoughts and the white space around them."""
    return _MARK_IN_SPACE.sub("", text).rstrip()


def _unlike(past: str, said: str) -> str:
    """Return the part of `past` from where it differs from `said`, or from the mark that lies there."""
    same = next((n for n, (a, b) in enumerate(zip(past, said, strict=False)) if a != b), min(len(past), len(said)))
    marks = [mark.start() for mark in _MARK.finditer(past) if mark.end() > same]
    return past[min([same, *marks]) :]


def _shown(text: str) -> str:
    return text.encode("unicode_escape").decode()


def _with(frame: ChatFrame, after_user: str, how: str) -> ChatFrame:
    return replace(frame, after_user=after_user, thinking=how)
