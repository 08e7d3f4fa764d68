"""Read the console's forms, and the human's decision in the form of a case. All but `form` is pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import get_args
from urllib.parse import parse_qsl

from starlette.requests import Request

from sds.kernel.canonical import REASON_CHARS_MAX, kept_whole, one_line, reason_line
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor.protocol import REFERENCE_CHARS_MAX
from sds.kernel.human.cases import Decision
from sds.kernel.human.review import Resolution
from sds.service.body import received
from sds.service.problems import Problem
from sds.service.state import service

FIELDS_MAX = 64
_TYPED = frozenset({"decision", "action", "code", "reason", "reference", "act", "agent"})
NUMBER = "number."  # prefix of a form's fields for the numbers of a decision
_KEPT = {"reason": REASON_CHARS_MAX, "reference": REFERENCE_CHARS_MAX}  # characters that the record keeps
_RESOLUTIONS: dict[str, Decision] = {name: name for name in get_args(Decision)}
_HALF = re.compile("[\ud800-\udfff]")  # half a character, which JSON can write and no page can hold
_DECIMAL = re.compile(r"(-?(?:0|[1-9][0-9]{0,15}))(?:\.([0-9]{1,6}))?")


async def form(request: Request) -> dict[str, str]:
    """Return the fields of the form in a request's body. Raises Problem (400, 408, 413, 415)."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        hint = "send the form from its page"
        raise Problem("MEDIA_TYPE", "a form must be `application/x-www-form-urlencoded`", hint=hint)
    body = await received(request.receive, service(request).settings.body_bytes_max)
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise Problem("USAGE", "the form cannot be read", hint="send it from its page") from None
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise Problem("USAGE", "the form has a field twice", hint="send it from its page")
    return fields


def decided(sent: Mapping[str, str], who: str, decimals: Mapping[str, int]) -> Resolution:
    """Return the human's decision in the form of a case. `decimals`: by number of the kind.

    Raises UsageError where there is no such decision.
    """
    wanted = _RESOLUTIONS.get(sent.get("decision", ""))
    if wanted is None:
        raise UsageError(f"there is no decision `{one_line(sent.get('decision', ''), 80)}`")
    return Resolution(
        wanted,
        who,
        whole(sent, "reason"),
        change=_change(sent, decimals) if wanted == "MODIFY" else "",
        seen=sent.get("seen", ""),
        reference=whole(sent, "reference").strip() if wanted == "SETTLED" else "",
        acknowledged=sent.get("acknowledge") == "yes",
    )


def whole(sent: Mapping[str, str], name: str) -> str:
    """Return a text of a form. Raises UsageError where the record would cut it."""
    text = sent.get(name, "")
    try:
        kept_whole(name, text, _KEPT[name])
    except UsageError as error:
        raise UsageError(str(error), hint="What you typed is still here: shorten it, and send it again.") from None
    return text


def _is_too_long(sent: Mapping[str, str], name: str) -> bool:
    text = sent.get(name, "")
    return len(one_line(text, len(text))) > _KEPT[name]


def _change(sent: Mapping[str, str], decimals: Mapping[str, int]) -> str:
    """Return the JSON of a MODIFY decision, its numbers with all their decimals, as the kernel reads them."""
    typed = {name.removeprefix(NUMBER): text for name, text in sent.items() if name.startswith(NUMBER)}
    numbers = ",".join(
        f"{json.dumps(name)}:{written(text.strip(), decimals.get(name, 0))}" for name, text in sorted(typed.items())
    )
    return f'{{"action":{json.dumps(sent.get("action", ""))},"params":{{{numbers}}},"reason":{json.dumps(sent.get("code", ""))}}}'


def written(text: str, decimals: int) -> str:
    """Return a typed number with all its decimals: with two, 40 and 40.5 become 40.00 and 40.50.

    A number with more decimals stays as typed, and anything else becomes a JSON string: the kernel then refuses it.
    """
    match = _DECIMAL.fullmatch(text)
    if match is None:
        return json.dumps(text)
    whole, part = match.groups(default="")
    if len(part) > decimals:
        return text
    return f"{whole}.{part.ljust(decimals, '0')}" if decimals else whole


def field_of(error: SdsError, sent: Mapping[str, str]) -> str:
    """Return the field of a form that an error is about, by the end of its id; "" where it is about none."""
    if error.reason_code == "ACKNOWLEDGEMENT_REQUIRED":
        return "ok"
    if _is_too_long(sent, "reason") or not reason_line(sent.get("reason", "")):
        return "reason"
    if sent.get("decision") == "SETTLED" and (_is_too_long(sent, "reference") or "needs the reference" in str(error)):
        return "reference"
    numbers = (name.removeprefix(NUMBER) for name in sent if name.startswith(NUMBER))
    return next((name for name in numbers if f"`{name}`" in str(error)), "")


def looked_at(sent: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the state that the form's page showed, for display only; empty where they cannot be read."""
    return texts_in(sent.get("shown", "{}"))


def typed_in(sent: Mapping[str, str]) -> dict[str, str]:
    """Return what a person typed and chose in a form. It acknowledges nothing."""
    return {name: text for name, text in sent.items() if name in _TYPED or name.startswith(NUMBER)}


def kept(sent: Mapping[str, str], page: str) -> str:
    """Return what a person typed into a form, and where, as JSON that the log-in form carries."""
    return json.dumps(typed_in(sent) | {"page": page})


def texts_in(written: str) -> dict[str, str]:
    """Return the texts of a JSON object by name; none where it cannot be read."""
    try:
        shown = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(shown, dict):
        return {}
    return {name: text for name, text in shown.items() if isinstance(text, str) and not _HALF.search(name + text)}
