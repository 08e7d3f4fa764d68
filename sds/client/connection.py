"""The settings of both clients: the service's address, the key, and the longest time of a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import urlsplit

from sds.client.steps import HttpRequest
from sds.host.machine import is_loopback
from sds.kernel.errors import UsageError

TIMEOUT_S, TIMEOUT_S_MAX = 60.0, 3600.0
CONNECT_S_MAX = 5.0


@dataclass(frozen=True)
class Connection:
    """`url`: of the service, such as `https://decisions.example`; `key`: as `sds keys add` printed it, hidden in repr;
    `timeout_s`: how long a call without a deadline of its own may take, retries included; `plain_http`: the key and the
    events may travel to another machine unencrypted. Raises UsageError.
    """

    url: str
    key: str = field(repr=False)
    timeout_s: float = TIMEOUT_S
    plain_http: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except (ValueError, TypeError, AttributeError):  # the last two: it is no text
            good = False
        if not good or "@" in self.url or parts.query or parts.fragment:
            message = "`url` must be an address such as https://decisions.example, without user, query and fragment"
            raise UsageError(message, hint="the key goes into `key`, never into `url`")
        if parts.scheme == "http" and not (self.plain_http or is_loopback(parts.hostname or "")):
            raise UsageError(
                "http:// would send the key and every event unencrypted to another machine",
                hint="use https://, or plain_http=True within a network that you trust",
            )
        if (
            not isinstance(self.key, str)
            or not self.key
            or not (self.key.isascii() and self.key.isprintable())
            or " " in self.key
        ):
            raise UsageError("`key` is not a key", hint="give it as `sds keys add` printed it; it begins with `sds_`")
        if not isinstance(self.timeout_s, int | float):
            raise UsageError("`timeout_s` must be a number of seconds", hint=f"above 0, at most {TIMEOUT_S_MAX:.0f}")
        if not 0 < self.timeout_s <= TIMEOUT_S_MAX:
            raise UsageError(f"`timeout_s` must be above 0, at most {TIMEOUT_S_MAX:.0f}, got {self.timeout_s}")

    def headers(self, request: HttpRequest) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}", "Accept": "application/json", **request.headers}
