"""What a form of the console says, and the decision it means. Pure but for the reading of the body."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from urllib.parse import parse_qsl

from starlette.requests import ClientDisconnect, Request

from sds.escalations import HumanDecision, Resolve
from sds.kernel.canonical import one_line
from sds.kernel.errors import UsageError
from sds.service.problems import Problem
from sds.service.state import service

FIELDS_MAX = 64
NUMBER = "number."  # what a form calls the numbers of a decision begins with it
_RESOLUTIONS: dict[str, Resolve] = {name: name for name in ("OVERRIDE", "MODIFY", "ABORT", "SETTLED", "REJECTED")}
_DECIMAL = re.compile(r"(-?(?:0|[1-9][0-9]{0,15}))(?:\.([0-9]{1,6}))?")


async def form(request: Request) -> dict[str, str]:
    """Return the fields of a form that was sent. Raises Problem: 400, 408, 413, 415."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/x-www-form-urlencoded":
        raise Problem("MEDIA_TYPE", "a form is `application/x-www-form-urlencoded`")
    settings = service(request).settings
    body = bytearray()
    try:
        async with asyncio.timeout(settings.body_within_s):
            async for chunk in request.stream():
                body += chunk
                if len(body) > settings.body_bytes_max:
                    raise Problem("BODY_TOO_LARGE", headers={"Connection": "close"})
    except (TimeoutError, ClientDisconnect):
        raise Problem("TOO_SLOW", headers={"Connection": "close"}) from None
    try:
        pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=FIELDS_MAX)
    except ValueError:
        raise Problem("USAGE", "this is no form of this page") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Problem("USAGE", "a field of the form is there twice")
    return found


def decided(sent: Mapping[str, str], who: str, decimals: Mapping[str, int]) -> HumanDecision:
    """Return what a human decided with the form of a case. `decimals`: of each number that its kind takes.

    Raises UsageError: the form says no decision that there is.
    """
    wanted = _RESOLUTIONS.get(sent.get("decision", ""))
    if wanted is None:
        raise UsageError(f"there is no decision `{one_line(sent.get('decision', ''), 80)}`")
    return HumanDecision(
        wanted,
        who,
        sent.get("reason", ""),
        change=_change(sent, decimals) if wanted == "MODIFY" else "",
        seen=sent.get("seen", "") if wanted in ("OVERRIDE", "MODIFY") else "",
        reference=sent.get("reference", "").strip() if wanted == "SETTLED" else "",
        acknowledge=sent.get("acknowledge") == "yes",
    )


def _change(sent: Mapping[str, str], decimals: Mapping[str, int]) -> str:
    """Return the JSON of another decision, its numbers with all their decimals, as the kernel reads them."""
    typed = {name.removeprefix(NUMBER): text for name, text in sent.items() if name.startswith(NUMBER)}
    numbers = ",".join(
        f"{json.dumps(name)}:{written(text.strip(), decimals.get(name, 0))}" for name, text in sorted(typed.items())
    )
    return f'{{"action":{json.dumps(sent.get("action", ""))},"params":{{{numbers}}},"reason":{json.dumps(sent.get("code", ""))}}}'


def written(text: str, decimals: int) -> str:
    """Return a number with its decimals written out: 40 and 40.5 are 40.00 and 40.50 where there are two.

    What cannot be written so stays as it was typed, as a text if it is no number, and the kernel says what is wrong with it.
    """
    found = _DECIMAL.fullmatch(text)
    if found is None:
        return json.dumps(text)
    whole, part = found.groups(default="")
    if len(part) > decimals:
        return text
    return f"{whole}.{part.ljust(decimals, '0')}" if decimals else whole


def looked_at(sent: Mapping[str, str]) -> dict[str, str]:
    """Return the fields of the state as the page showed them whose form was sent; it is shown again, and no more."""
    try:
        found = json.loads(sent.get("shown", "{}"))
    except (ValueError, RecursionError):
        return {}
    return {name: text for name, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}
