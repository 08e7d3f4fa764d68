"""A model's own chat template, cut into the control text around one system and one user text."""

from __future__ import annotations

from datetime import UTC, datetime

from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from sds.models.protocol import PLAIN_FRAME, BackendError, ChatFrame

_SYSTEM, _USER = "7f1c-system-7f1c", "7f1c-user-7f1c"
_MERGE = "\n\n"
_EPOCH = datetime(2024, 7, 26, tzinfo=UTC)


class _StoppedClock(Jinja2ChatFormatter):
    """Templates that print today's date get one fixed date: equal inputs must give equal prompts."""

    @staticmethod
    def strftime_now(f: str) -> str:
        return _EPOCH.strftime(f)


def chat_frame(template: str | None, *, bos: str, eos: str) -> ChatFrame:
    """Render `template` around two marks and cut it there; without a template, plain text.

    A template that refuses or drops a system text gets it at the head of the user text.
    """
    if not template:
        return PLAIN_FRAME
    system_apart = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": _USER}]
    system_merged = [{"role": "user", "content": _SYSTEM + _MERGE + _USER}]
    frame = _cut(_render(template, system_apart, bos, eos)) or _cut(_render(template, system_merged, bos, eos))
    if frame is None:
        raise BackendError(
            "the chat template does not show each text exactly once", hint="use a model with a chat template"
        )
    return frame


def _render(template: str, messages: list[dict[str, str]], bos: str, eos: str) -> str:
    try:
        formatter = _StoppedClock(template=template, eos_token=eos, bos_token=bos)
        return str(formatter(messages=messages).prompt)  # type: ignore[arg-type]
    except Exception:  # noqa: BLE001 - foreign code from the weights file: whatever it raises, it has no frame
        return ""


def _cut(rendered: str) -> ChatFrame | None:
    if rendered.count(_SYSTEM) != 1 or rendered.count(_USER) != 1:
        return None
    before, _, rest = rendered.partition(_SYSTEM)
    between, found, after = rest.partition(_USER)
    return ChatFrame(before, between, after) if found else None
