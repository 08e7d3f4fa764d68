"""A service over one or two gates that need no model, asked in process."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from starlette.testclient import TestClient

from sds.definitions.registry import find
from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.host.clock import now_ms
from sds.service.app import create_app
from sds.service.callers import ROLES, add_key, stored_keys
from sds.service.database import Database, open_database
from sds.service.gates import OpenGate, OpenGates
from sds.service.reasons import REASONS
from sds.service.settings import ServiceSettings
from tests.gates.own import GATE, written
from tests.proposers import Greedy
from tests.service.described import Description

# Values of `Host` that name no host. Starlette puts the server's own address in the place of most of them.
NO_HOSTS = (
    *("", " ", "a b", "evil\\x", "\xff", "evil.example@localhost", "localhost/@evil.example", "localhost#evil.example"),
    *("localhost?evil.example", "localhost:x", "localhost:999999", "localhost,evil.example", "[::1", "localhost:1:2"),
)
EVENT = {"trip_id": "T-1", "car_id": "CAR-1", "text": "Please."}


class Bed:
    """`client` asks with a key that may do everything, unless a request names another, and checks that every answer is as
    /openapi.json describes it.
    """

    def __init__(self, opened: ExitStack, gates: OpenGates, database: Database, settings: ServiceSettings) -> None:
        self.gates, self.database, self.settings = gates, database, settings
        self.logged: list[tuple[str, Any]] = []
        self.clock: Callable[[], int] = now_ms
        self.app = create_app(
            settings,
            gates,
            database,
            now_ms=self._now_ms,
            log=lambda event, facts: self.logged.append((event, facts)),
        )
        others = len(stored_keys(database))
        self.key = self.key_for(f"everything-{others}" if others else "everything", ROLES, ("*",))
        self.client = opened.enter_context(
            TestClient(self.app, headers={"Authorization": f"Bearer {self.key}"}, raise_server_exceptions=False)
        )
        self.description = Description(self.app, gates)
        self.client.event_hooks = {"response": [self.description.check]}

    def _now_ms(self) -> int:
        return self.clock()

    def key_for(self, name: str, roles: tuple[str, ...], gates: tuple[str, ...]) -> str:
        return add_key(self.database, name, roles, gates, now_ms=now_ms())

    @property
    def service(self) -> Any:
        return self.app.state.service

    @property
    def gate(self) -> Gate:
        return next(iter(self.gates.values())).gate

    def post(self, event: object = EVENT, gate: str = "toll", **how: Any) -> Any:
        given = {"json": event} if not isinstance(event, bytes) else {"content": event}
        headers = {"Content-Type": "application/json", **how.pop("headers", {})}
        return self.client.post(f"/v1/gates/{gate}/decisions", **given, headers=headers, **how)

    def post_late(self, event: object = EVENT, **headers: str) -> Any:
        """Post an event that is under way already, and let the request's deadline pass as soon as it is in hand."""
        before = self.service.admission.in_hand

        def later_s() -> float:
            return time.monotonic() + (60.0 if self.service.admission.in_hand > before else 0.0)

        with patch("sds.service.routes.submitting.time", SimpleNamespace(monotonic=later_s)):
            return self.post(event, headers={**headers, "Deadline-Ms": "20000"})


@contextmanager
def opened_bed(
    home: Path, engine: Engine | None = None, *, clock: Callable[[], int] = now_ms, **settings: Any
) -> Iterator[Bed]:
    """Serve the toll gate of `tests.gates.own`; SDS_HOME is `home` already, and what it keeps lies in $SDS_STORE.

    `clock`: the gate's.
    """
    settings.setdefault("store", os.environ.get("SDS_STORE", ""))
    with ExitStack() as opened:
        definition = find(written(home / "toll_gate", GATE.replace("ORDERS = {}", f"ORDERS = {{}}  # {home}")))
        gate = opened.enter_context(Gate.load(definition, engine=engine or Greedy("WAIVE"), now_ms=clock))
        database = open_database(settings["store"])
        opened.callback(database.close)
        made = ServiceSettings(gates=(str(home / "toll_gate"),))
        yield Bed(opened, OpenGates({"toll": OpenGate(definition, gate)}), database, replace(made, **settings))


def check(answer: Any, status: int, code: str) -> dict[str, Any]:
    """Assert that an answer is a problem as RFC 9457 has it, with what this service adds."""
    assert (status, code) == (answer.status_code, answer.json().get("reason_code"))
    assert "application/problem+json" == answer.headers["content-type"]
    problem: dict[str, Any] = answer.json()
    assert {"type", "title", "status", "detail", "reason_code", "retryable", "hint"} <= set(problem)
    assert (f"/errors#{code}", REASONS[code].title, status) == (problem["type"], problem["title"], problem["status"])
    return problem
