"""Read the body of a request: JSON in UTF-8, up to a limit in bytes. The rest of a longer body is not read."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Receive

from sds.service.deciding.terms import Headers, headers_of
from sds.service.problems import Problem
from sds.service.state import service

CLOSE = {"Connection": "close"}  # else the unread rest of a body would be read as the next request
BODY_IS_THERE = "body_is_there"  # key in a request's state: its whole body has been received
LENGTH_CHARS_MAX = 19  # digits of a Content-Length; Python refuses to read numbers of more than 4,300
_NONE = ("",)


async def read_body(request: Request) -> bytes:
    """Return the raw bytes of a JSON body. Raises Problem (408, 413, 415). `app.Outermost` limits how long it may take."""
    limit = service(request).settings.body_bytes_max
    return await received_body(headers_of(request.scope), request.receive, limit)


async def received_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """Return the raw bytes of a JSON body, at most `limit`. Raises Problem: 415, and as `received` does."""
    _check_headers(headers)
    length = headers.get("content-length", ("0",))[0]
    if not (length.isascii() and length.isdigit()) or len(length) > LENGTH_CHARS_MAX or int(length) > limit:
        raise Problem("BODY_TOO_LARGE", headers=CLOSE)
    return await received(receive, limit)


async def received(receive: Receive, limit: int) -> bytes:
    """Return the raw bytes of a body, at most `limit`. Raises Problem: 408 (the client is gone, or too slow), 413."""
    body, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Problem("TOO_SLOW", headers=CLOSE)
        body += message.get("body", b"")
        if len(body) > limit:
            raise Problem("BODY_TOO_LARGE", headers=CLOSE)
        more = message.get("more_body", False)
    return bytes(body)


def _check_headers(headers: Headers) -> None:
    kind, _, parameters = headers.get("content-type", _NONE)[0].partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise Problem("MEDIA_TYPE", headers=CLOSE)
    if headers.get("content-encoding", _NONE)[0].strip().lower() not in ("", "identity"):
        hint = "send the body without `Content-Encoding`"
        raise Problem("MEDIA_TYPE", "the body has a content encoding, which is not supported", hint=hint, headers=CLOSE)
