"""The state that all routes of one service process share."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from starlette.requests import HTTPConnection

from sds.host.machine import is_loopback
from sds.kernel.errors import SdsError
from sds.kernel.flow.dispatch import Log
from sds.kernel.registry import registry
from sds.service.admission import Admission
from sds.service.callers import Caller, Callers
from sds.service.database import Database
from sds.service.deciding.idempotency import KeptAnswers
from sds.service.gates import OpenGate, OpenGates
from sds.service.problems import Problem
from sds.service.settings import ServiceSettings

# headers in which a proxy names the client it asks for
FORWARDED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip", "via")
_HOST = re.compile(r"([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{0,5})?")  # a name or an address, and a port


def _untraced(_gate: str, _event_id: str, _traceparent: str) -> None:
    """Trace nothing."""


def _anything(_dfid: str) -> bool:
    """Say that this process decides the flow, where nothing else is known."""
    return True


def _nothing() -> None:
    """Stop nothing."""


@dataclass(slots=True)
class Service:
    """The state of one process. `stopping`: SIGTERM has come, and the process is not ready. `draining`: no new event is
    decided. `gates_closed`: the gates are closed, so nothing can be read either.

    `failed`: why the process cannot serve. `superseded`: the gates with a newer contract in force than this process has, by the
    last probe.

    `traced(gate, event_id, traceparent)` is called once an event has been read. `decides(dfid)`: whether this process decides
    that open flow. `stop_background` returns once all background threads have ended; it is called before the gates close.
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
    superseded: set[str] = field(default_factory=set)
    failed: SdsError | None = None
    stopping: bool = False
    draining: bool = False
    gates_closed: bool = False

    def gate(self, name: str) -> OpenGate:
        """Return the gate of this name. Raises Problem: there is none, or the gates are closed."""
        if self.gates_closed:
            raise Problem("DRAINING")
        found = self.gates.get(name)
        if found is None:
            raise Problem("GATE_UNKNOWN", hint=f"gates are: {', '.join(self.gates)}")
        return found

    def compare_contract(self, each: OpenGate) -> bool:
        """Tell whether the record has a newer contract than this process, and note it for new events. Raises StoreError."""
        found = registry.lookup(each.gate.store, each.gate.contract.agent_id)
        newer = found is not None and found.contract_hash != each.gate.contract.hash
        (self.superseded.add if newer else self.superseded.discard)(each.name)
        return newer

    def gates_of(self, caller: Caller) -> Mapping[str, OpenGate]:
        """Return the gates that a caller may see, by name. Raises Problem where the gates are closed."""
        if self.gates_closed:
            raise Problem("DRAINING")
        return {name: gate for name, gate in self.gates.items() if caller.may_see(name)}


def came_through_proxy(request: HTTPConnection) -> bool:
    """Tell whether a request has a header of a proxy. The header's value is not trusted."""
    return any(name in request.headers for name in FORWARDED)


def asks_for_this_machine(request: HTTPConnection) -> bool:
    """Tell whether a request has one `Host`, which names a loopback host, and came through no proxy, which may have replaced
    it. Without a good `Host`, Starlette's `url` has the server's own address: what another site sends would pass for ours.
    """
    hosts = request.headers.getlist("host")
    asked = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
    return asked is not None and is_loopback(asked[1].strip("[]")) and not came_through_proxy(request)


def service(request: HTTPConnection) -> Service:
    """Return the service's state for a request."""
    state: Service = request.app.state.service
    return state
