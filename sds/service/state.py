"""What every route takes: the one state of a service's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from sds.service.admission import Admission
from sds.service.callers import Caller, Callers
from sds.service.database import Database
from sds.service.deciding.idempotency import KeptAnswers
from sds.service.gates import OpenGate, OpenGates
from sds.service.problems import Log, Problem
from sds.service.settings import ServiceSettings

# headers with which a proxy says for whom it asks
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")


def _untraced(_gate: str, _event_id: str, _traceparent: str) -> None:
    """Trace nothing."""


def _anything(_dfid: str) -> bool:
    """Decide it here, as far as is known."""
    return True


def _nothing() -> None:
    """Stop nothing."""


@dataclass(slots=True)
class Service:
    """`draining`: SIGTERM came, nothing new is decided. `gates_closed`: nothing can be read any more, either.

    `traced(gate, event_id, traceparent)` is called with every event that is asked about, once it has been read. `decides(dfid)`:
    whether a flow that is open is decided in this process. `stop_background`
    returns when nothing works in the background any more: before the gates are closed.
    """

    settings: ServiceSettings
    gates: OpenGates
    database: Database
    callers: Callers
    admission: Admission
    kept: KeptAnswers
    now_ms: Callable[[], int]
    log: Log
    traced: Callable[[str, str, str], object] = _untraced
    decides: Callable[[str], bool] = _anything
    stop_background: Callable[[], object] = _nothing
    draining: bool = False
    gates_closed: bool = False

    def gate(self, name: str) -> OpenGate:
        """Return a gate that is served. Raises Problem: there is none, or it was closed."""
        if self.gates_closed:
            raise Problem("DRAINING")
        found = self.gates.get(name)
        if found is None:
            raise Problem("GATE_UNKNOWN", hint=f"gates are: {', '.join(self.gates)}")
        return found

    def gates_of(self, caller: Caller) -> Mapping[str, OpenGate]:
        """Return the gates that a caller may see."""
        if self.gates_closed:
            raise Problem("DRAINING")
        return {name: gate for name, gate in self.gates.items() if caller.may_see(name)}


def came_through_proxy(request: HTTPConnection) -> bool:
    """Tell whether a proxy says that it asks for somebody else. What it says of them is not believed."""
    return any(name in request.headers for name in FORWARDED)


def service(request: HTTPConnection) -> Service:
    """Return the state of the service that a request came to."""
    found: Service = request.app.state.service
    return found
