"""Follow a service's changes, without I/O: where to go on, and how long to wait before reconnecting."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

import httpx2

from sds.client.replies import Changed, HttpReply, Lost, failure, unreadable
from sds.client.steps import TRIES_MAX, HttpRequest, Patience

SILENCE_S_MAX = 60.0  # the service's heartbeats come more often than that


class Following:
    """Remembers the last change that was seen. `last_event_id`: the change to go on after; "": from now on."""

    def __init__(self, last_event_id: str, *, now_s: Callable[[], float], random: Random) -> None:
        self._last, self._tries = last_event_id, 0
        self._patience = Patience(0.0, now_s=now_s, random=random)

    def request(self) -> HttpRequest:
        headers = {"Accept": "text/event-stream"} | ({"Last-Event-ID": self._last} if self._last else {})
        return HttpRequest("GET", "/v1/events", headers=headers, timeout_s=SILENCE_S_MAX)

    def seen(self, sent: httpx2.ServerSentEvent) -> Changed | None:
        """Return a server-sent event as a change; None where it has no data. Raises WorldError where it is invalid."""
        self._tries, self._last = 0, sent.id or self._last
        if not sent.data:
            return None
        try:
            data = json.loads(sent.data)
        except (ValueError, RecursionError) as error:
            raise unreadable("a change that is not JSON") from error
        if not isinstance(data, dict):
            raise unreadable("a change that is not an object")
        return Changed(sent.id, sent.event, data)

    def pause_s(self, said: HttpReply | Lost) -> float:
        """Return how long to wait before connecting again. Raises the service's error where another try cannot help."""
        self._tries += 1
        error = failure(said)
        if error is not None and (not error.retryable or self._tries >= TRIES_MAX):
            raise error
        return self._patience.pause_s(self._tries, said.retry_after_s)
