"""The calls of a client, without I/O: the request of each, how long it may take, and how its reply is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from random import Random
from typing import Any
from urllib.parse import quote

from sds.client.connection import Connection
from sds.client.replies import HttpReply, ListPage, answer_of, data_of, items_of, object_of, page_of
from sds.client.steps import GRACE_S, HttpRequest, Patience, Steps, insist
from sds.kernel.errors import EventError, UsageError
from sds.kernel.flow.states import NOT_DECIDED, Answer

Event = Mapping[str, object] | str | bytes
DEADLINE = "Deadline-Ms"
JSON = {"Content-Type": "application/json"}
KEY_CHARS_MAX = 255
CASES_OF_PAGE = 1_000  # the most that the service lists at once
ATTEMPT_S_MAX = 60.0  # a request without a reply by then is sent again


class Calls:
    """Makes the steps of each call. `now_s`: a monotonic clock; `random`: for idempotency keys and pauses."""

    def __init__(self, connection: Connection, *, now_s: Callable[[], float], random: Random) -> None:
        self._connection, self._now_s, self._random = connection, now_s, random

    def decide(
        self, gate: str, event: Event, *, deadline_ms: int | None, idempotency_key: str | None, wait: bool = True
    ) -> Steps[Answer]:
        """Ask for a decision on one event; without `wait`, only submit it. All tries have one idempotency key."""
        path, body = f"/v1/gates/{segment(gate, 'gate')}/decisions", _body(event)
        headers = JSON | {"Idempotency-Key": self._key(idempotency_key)}
        if not wait:
            headers["Prefer"] = "respond-async"
        patience = self._patience(deadline_ms)

        def ask(left_s: float) -> HttpRequest:
            if deadline_ms is None:
                return HttpRequest("POST", path, headers=headers, body=body, timeout_s=min(left_s, ATTEMPT_S_MAX))
            until = {DEADLINE: str(max(1, int(left_s * 1000)))}
            return HttpRequest("POST", path, headers=headers | until, body=body, timeout_s=left_s + GRACE_S)

        reply = yield from insist(ask, patience, open_still=_undecided)
        return answer_of(data_of(reply))

    def listed(self, path: str, name: str, **params: str | int | None) -> Steps[tuple[Mapping[str, Any], ...]]:
        """Return the list under `name` at a path. Parameters that are None are left out."""
        return items_of((yield from self._read(path, params)), name)

    def page(self, path: str, name: str, **params: str | int | None) -> Steps[ListPage]:
        return page_of((yield from self._read(path, params)), name)

    def cases(self, gate: str | None, limit: int | None) -> Steps[tuple[Mapping[str, Any], ...]]:
        """Return the cases that wait for a human, oldest first: `limit` at most, or all, in as many pages as are needed."""
        found, after = list[Mapping[str, Any]](), None
        while True:
            left = CASES_OF_PAGE if limit is None else min(limit - len(found), CASES_OF_PAGE)
            page = yield from self.page("/v1/escalations", "escalations", gate=gate, limit=left, cursor=after)
            found += page.items
            if (after := page.after) is None or len(found) == limit:
                return tuple(found)

    def one(self, path: str) -> Steps[Mapping[str, Any]]:
        """Return the object at a path."""
        return object_of((yield from self._read(path, {})))

    def halt(self, *, halted: bool, reason: str, gate: str | None) -> Steps[tuple[Mapping[str, Any], ...]]:
        """Halt or resume a gate, or all of the key's gates."""
        given = {"halted": halted, "reason": reason} | ({} if gate is None else {"gate": gate})
        return items_of((yield from self._acted("PUT", "/v1/halt", json.dumps(given).encode())), "gates")

    def move_agent(self, agent_id: str, move: str, *, reason: str) -> Steps[Mapping[str, Any]]:
        """Suspend, reactivate or retire an agent."""
        path = f"/v1/agents/{segment(agent_id, 'agent')}/{segment(move, 'move')}"
        return object_of((yield from self._acted("POST", path, json.dumps({"reason": reason}).encode())))

    def resolve(self, dfid: str, decision: str, *, change: str, **given: object) -> Steps[Answer]:
        """Resolve a case. `change`: JSON text, whose numbers are sent as they are written: 150.00 keeps its two decimals."""
        fields = {"decision": json.dumps(decision)}
        fields |= {name: json.dumps(value) for name, value in given.items() if value not in ("", False)}
        if change:
            fields["change"] = _json(change)
        path = f"/v1/escalations/{segment(dfid, 'case')}/resolution"
        return answer_of((yield from self._acted("POST", path, _object(fields))))

    def _acted(self, method: str, path: str, body: bytes) -> Steps[Any]:
        """Send an act of a person, and return the reply's JSON. What may have been done is not sent again."""

        def ask(left_s: float) -> HttpRequest:
            return HttpRequest(method, path, {}, JSON, body, min(left_s, ATTEMPT_S_MAX))

        return data_of((yield from insist(ask, self._patience(None), once=True)))

    def _read(self, path: str, params: Mapping[str, str | int | None]) -> Steps[Any]:
        given = {name: str(value) for name, value in params.items() if value is not None}

        def ask(left_s: float) -> HttpRequest:
            return HttpRequest("GET", path, given, timeout_s=min(left_s, ATTEMPT_S_MAX))

        return data_of((yield from insist(ask, self._patience(None))))

    def _patience(self, deadline_ms: int | None) -> Patience:
        if deadline_ms is not None and not (isinstance(deadline_ms, int | float) and deadline_ms > 0):
            message = f"`deadline_ms` must be above 0, got {deadline_ms}: it is in milliseconds from now"
            raise UsageError(message, reason_code="DEADLINE_INVALID")
        lasts_s = self._connection.timeout_s if deadline_ms is None else deadline_ms / 1000
        return Patience(lasts_s, now_s=self._now_s, random=self._random)

    def _key(self, given: str | None) -> str:
        key = f"{self._random.getrandbits(128):032x}" if given is None else given
        if not 1 <= len(key) <= KEY_CHARS_MAX or not (key.isascii() and key.isprintable()):
            message = f"`idempotency_key` must have 1 to {KEY_CHARS_MAX} printable ASCII characters"
            raise UsageError(message, reason_code="IDEMPOTENCY_KEY_INVALID")
        return '"' + key.replace("\\", "\\\\").replace('"', '\\"') + '"'


def segment(text: str, what: str) -> str:
    """Return a name as one segment of a path. Raises UsageError for "", `.` and `..`."""
    if text in ("", ".", ".."):
        raise UsageError(f"`{text}` is not a valid {what}")
    return quote(text, safe="")


def _object(fields: Mapping[str, str]) -> bytes:
    """Return a JSON object of fields whose values are JSON texts."""
    return ("{" + ",".join(f"{json.dumps(name)}:{value}" for name, value in fields.items()) + "}").encode()


def _json(text: str) -> str:
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    raise UsageError(
        "`change` must be a JSON object, as text",
        hint="""for example {"action": "VOUCHER", "params": {"amount": 150.00}, "reason": "GOODWILL"}""",
    )


def _undecided(reply: HttpReply) -> bool:
    """Tell whether an answer says that nothing was decided, and that another try may help."""
    data = data_of(reply)
    return isinstance(data, dict) and data.get("retryable") is True and data.get("tag") == NOT_DECIDED


def _body(event: Event) -> bytes:
    """Return an event as the bytes that every try sends. Raises EventError for what JSON cannot hold."""
    if isinstance(event, bytes):
        return event
    try:
        text = event if isinstance(event, str) else json.dumps(dict(event), ensure_ascii=False, allow_nan=False)
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise EventError("the event cannot be written as JSON", hint="give an object of strings") from error
