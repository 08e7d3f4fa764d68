"""Reads the body of a request: JSON in UTF-8, so many bytes at most, within so long. The rest of a longer one is not read."""

from __future__ import annotations

from starlette.requests import ClientDisconnect, Request

from sds.service.problems import Problem
from sds.service.state import service

_CLOSE = {"Connection": "close"}  # what was not read of a body would be taken for the next request


async def read_body(request: Request) -> bytes:
    """Return the raw bytes of a JSON body. Raises Problem: 408, 413, 415."""
    _check_headers(request)
    settings = service(request).settings
    limit = settings.body_bytes_max
    if (length := request.headers.get("content-length")) is not None and (not length.isdigit() or int(length) > limit):
        raise Problem("BODY_TOO_LARGE", headers=_CLOSE)
    found = bytearray()
    try:
        async for chunk in request.stream():  # `app.Outermost` ends it when it takes too long
            found += chunk
            if len(found) > limit:
                raise Problem("BODY_TOO_LARGE", headers=_CLOSE)
    except ClientDisconnect:
        raise Problem("TOO_SLOW", headers=_CLOSE) from None
    return bytes(found)


def _check_headers(request: Request) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = parameters.strip().lower().replace('"', "")
    if kind.strip().lower() != "application/json" or charset not in ("", "charset=utf-8"):
        raise Problem("MEDIA_TYPE", headers=_CLOSE)
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        raise Problem("MEDIA_TYPE", "a content encoding is not taken", headers=_CLOSE)
