"""Every route with every role: who may ask it, who may not, and that a key for another gate learns nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sds.service.callers import ROLES
from tests.service.console.office import Office, Visitor, busy, open_office

# What a key needs, by method and path: one of these roles; "": no key at all
NEEDS = {
    **dict.fromkeys(("GET /livez", "HEAD /livez", "GET /readyz", "HEAD /readyz"), ""),
    **dict.fromkeys(("GET /openapi.json", "HEAD /openapi.json", "GET /errors"), ""),
    "POST /v1/gates/{gate}/decisions": "submit",
    **dict.fromkeys(("GET /metrics", "GET /v1/gates", "GET /v1/events", "GET /v1/halt", "GET /v1/orders?gate=claims"), "read"),
    **dict.fromkeys(("GET /v1/decisions", "GET /v1/decisions/{dfid}", "GET /v1/escalations"), "read"),
    **dict.fromkeys(("GET /v1/agents", "GET /v1/agents/{agent_id}"), "read"),
    **dict.fromkeys(("GET /v1/escalations/{dfid}", "POST /v1/escalations/{dfid}/resolution"), "review"),
    **dict.fromkeys(("POST /v1/agents/{agent_id}/{move}", "PUT /v1/halt"), "operate"),
    **dict.fromkeys(("GET /console/help", "GET /console/login", "GET /console/static/{name}"), ""),
    **dict.fromkeys(("GET /console", "GET /console/find"), "read review operate"),
    **dict.fromkeys(("GET /console/live", "GET /console/live/now"), "read operate"),
    "GET /console/decisions/{gate}/{dfid}": "read",
    **dict.fromkeys(("GET /console/next", "GET /console/cases/{gate}/{dfid}"), "review"),
    **dict.fromkeys(("POST /console/cases/{gate}/{dfid}", "POST /console/cases/{gate}/{dfid}/take"), "review"),
    "POST /console/live/{gate}": "operate",
}  # fmt: skip
IN_PATH = {"gate": "claims", "agent_id": "claims-agent", "move": "suspend", "name": "console.css"}
SENT = {
    "POST /v1/escalations/{dfid}/resolution": {"decision": "ABORT", "reason": "a try"},
    "POST /v1/agents/{agent_id}/{move}": {"reason": "a try"},
    "PUT /v1/halt": {"halted": True, "reason": "a try", "gate": "claims"},
}
SECRET = re.compile(r"C-100\d|train home|four hours", re.IGNORECASE)


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with (
        pytest.MonkeyPatch.context() as patched,
        open_office(Path(tmp_path_factory.mktemp("home")), patched.setenv) as made,
    ):
        IN_PATH["dfid"] = busy(made)["small"]
        made.app.state.service.draining = True  # no stream stays open, and no event is decided
        yield made


def routes(known: Iterable[Any]) -> Iterator[str]:
    """Yield method and path of every route, but those of the log-in's forms and of addresses without a page."""
    for route in known:
        if hasattr(route, "original_router"):
            yield from routes(route.original_router.routes)
        elif route.name not in ("log_in", "log_out", "no_page"):
            yield from (f"{method} {route.path}" for method in route.methods)


def asked(office: Office, route: str, key: str) -> tuple[bool, str]:
    """Ask a route with a key; return whether it let the caller pass, and its answer."""
    method, path = route.format(**IN_PATH).split()
    with Visitor(office) as visitor:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        if key and path.startswith("/console"):
            visitor.log_in(key)
        sent: dict[str, Any] = {} if method in ("GET", "HEAD") else {"json": SENT.get(route, {})}
        if path.startswith("/console") and sent:
            sent = {"data": {"csrf": "none"}}
        answer = visitor.request(method, path, headers=headers, **sent)
    to_login = re.match(r"/console/login(\?|$)", answer.headers.get("location", ""))
    return answer.status_code not in (401, 403, 404) and not to_login, answer.text


def test_every_route_says_what_it_needs(office: Office) -> None:
    assert {route.partition("?")[0] for route in NEEDS} == set(routes(office.app.routes))


@pytest.mark.parametrize("role", ["", *ROLES])
def test_a_route_lets_pass_who_has_a_role_that_it_needs_and_nobody_else(office: Office, role: str) -> None:
    key = office.key(f"only-{role}", role) if role else ""
    passed = {route for route in NEEDS if asked(office, route, key)[0]}
    assert {route for route, needs in NEEDS.items() if not needs or role in needs.split()} == passed


def test_a_key_for_another_gate_learns_nothing_of_this_one(office: Office) -> None:
    key = office.key("elsewhere", *ROLES, gates=("holds",))
    answers = {route: asked(office, route, key) for route in NEEDS}
    assert [] == [route for route, (_, text) in answers.items() if NEEDS[route] and SECRET.search(text)]
    refused = {route for route, (passed, _) in answers.items() if not passed}
    assert {route for route in NEEDS if re.search(r"\{(?:gate|dfid|agent_id)\}|=claims|/metrics|PUT", route)} == refused
