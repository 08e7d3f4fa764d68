"""A model's own chat template, cut into the control text around one system and one user text.

After the frame the model answers. Where its template has it think first, either the template's own switch turns
thinking off, or the thought is closed as the template closes it (`thinking`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from sds.models.protocol import PLAIN_FRAME, BackendError, ChatFrame
from sds.models.tokenizer.thinking import RenderedChat, answering, thinks

_SYSTEM, _USER, _ANSWER, _THOUGHT = (f"7f1c-{name}-7f1c" for name in ("system", "user", "answer", "musing"))
_MERGE = "\n\n"
_EPOCH = datetime(2024, 7, 26, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Switch:
    """How a template is switched to answer without thinking: by variables, or by a word in the system text."""

    name: str
    variables: Mapping[str, object]
    word: str = ""

    @property
    def said(self) -> str:
        """The text in the source of a template that knows the switch."""
        return next(iter(self.variables), self.word)


SWITCHES = (
    Switch("enable_thinking=False", {"enable_thinking": False}),
    Switch("thinking=False", {"thinking": False}),
    Switch("reasoning=False", {"reasoning": False}),
    Switch("reasoning_effort=none", {"reasoning_effort": "none"}),
    Switch("thinking_mode=disabled", {"thinking_mode": "disabled"}),
    Switch("thinking_budget=0", {"thinking_budget": 0}),
    Switch("/no_think", {}, "/no_think"),
)
_LEFT_ALONE = Switch("", {})


class _StoppedClock(Jinja2ChatFormatter):
    """Gives templates that print today's date a fixed date: equal inputs must give equal prompts."""

    @staticmethod
    def strftime_now(f: str) -> str:
        return _EPOCH.strftime(f)


def chat_frame(template: str | None, *, bos: str, eos: str) -> ChatFrame:
    """Render `template` around two marks and cut it there; without a template, return the plain frame.

    A template that refuses or drops a system text gets it at the head of the user text. Raises BackendError where the
    template does not show both texts, and where it has the model think and the end of a thought is unknown.
    """
    if not template:
        return PLAIN_FRAME
    rendering = _Rendering(template, bos, eos)
    chat = rendering.chat(_LEFT_ALONE)
    if chat is None:
        raise BackendError(
            "the chat template does not show the system and the user text exactly once",
            hint="use a model with another chat template",
        )
    frame = _switched(rendering, chat, template) or answering(chat, template)
    if frame is None:
        raise BackendError(
            "the chat template makes the model think first, and does not show how a thought ends",
            hint="use a model that answers at once, or a template that can turn thinking off",
        )
    return frame


def _switched(rendering: _Rendering, chat: RenderedChat, template: str) -> ChatFrame | None:
    """Return the frame of the first switch that turns thinking off; None where none does, or thinking is off already."""
    left = thinks(chat.frame.after_user)
    if left is False:
        return None
    for switch in SWITCHES:
        other = rendering.chat(switch) if switch.said in template else None
        if other is None or other.frame.after_user == chat.frame.after_user:
            continue
        off = thinks(other.frame.after_user)
        found = answering(other, template) if off is False or (left and off is None) else None
        if found is not None:
            also = f"; {found.thinking}" if found.thinking else ""
            return replace(found, thinking=f"the template's own `{switch.name}` turns thinking off{also}")
    return None


class _Rendering:
    """One template, compiled once. It is foreign code from the weights file: if it raises, the result is empty."""

    def __init__(self, template: str, bos: str, eos: str) -> None:
        try:
            self._formatter: _StoppedClock | None = _StoppedClock(template=template, eos_token=eos, bos_token=bos)
        except Exception:  # noqa: BLE001
            self._formatter = None

    def chat(self, switch: Switch) -> RenderedChat | None:
        for texts in _ways(switch.word):
            frame = _cut(self._rendered(texts, switch, speaks=True))
            if frame is not None:
                return RenderedChat(frame, self._answer(texts, switch, frame), self._closing(texts, switch))
        return None

    def _answer(self, texts: list[dict[str, str]], switch: Switch, frame: ChatFrame) -> str | None:
        """Return the text between the user's text and a past answer, if all before equals `frame`; None also where the
        template writes every role alike.
        """
        past, more = (
            self._rendered([*texts, {"role": role, "content": _ANSWER}], switch, speaks=False)
            for role in ("assistant", "user")
        )
        if past == more or past.count(_ANSWER) != 1 or (cut := _cut(past.partition(_ANSWER)[0])) is None:
            return None
        same = (cut.before_system, cut.between) == (frame.before_system, frame.between)
        return cut.after_user if same else None

    def _closing(self, texts: list[dict[str, str]], switch: Switch) -> str | None:
        """Return the text between a past thought and its answer."""
        said = {"role": "assistant", "reasoning_content": _THOUGHT, "content": _ANSWER}
        past = self._rendered([*texts, said], switch, speaks=False)
        if past.count(_THOUGHT) != 1 or past.count(_ANSWER) != 1:
            return None
        return past.partition(_THOUGHT)[2].partition(_ANSWER)[0]

    def _rendered(self, messages: list[dict[str, str]], switch: Switch, *, speaks: bool) -> str:
        """Return the rendered messages. `speaks`: the model's turn follows."""
        if self._formatter is None:
            return ""
        self._formatter.add_generation_prompt = speaks
        try:
            return str(self._formatter(messages=messages, **switch.variables).prompt)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001
            return ""


def _ways(word: str) -> Iterator[list[dict[str, str]]]:
    yield [{"role": "system", "content": _SYSTEM + word}, {"role": "user", "content": _USER}]
    yield [{"role": "user", "content": _SYSTEM + word + _MERGE + _USER}]


def _cut(rendered: str) -> ChatFrame | None:
    if rendered.count(_SYSTEM) != 1 or rendered.count(_USER) != 1:
        return None
    before, _, rest = rendered.partition(_SYSTEM)
    between, found, after = rest.partition(_USER)
    return ChatFrame(before, between, after) if found else None
