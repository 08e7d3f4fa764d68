"""What `/openapi.json` says: each route as FastAPI describes it, the events of the gates that are served, and every status
with which a request may be refused. What `Allow` says is taken of it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sds.kernel.contract.schema import Contract
from sds.kernel.identifiers import ID_CHARS_MAX
from sds.service.deciding.asked import DEADLINE_HEADER, KEY_CHARS_MAX
from sds.service.gates import OpenGates
from sds.service.problems import MEDIA_TYPE, Problem, response_of
from sds.service.reasons import REASONS

ASKING = "/v1/gates/{gate}/decisions"
_PARAMETER = re.compile(r"\{[^}]*\}")
ASKING_HEADERS: dict[str, tuple[str, dict[str, Any]]] = {
    DEADLINE_HEADER: ("milliseconds from now; at most what the contract gives", {"type": "integer", "minimum": 1}),
    "Idempotency-Key": (
        "the same key and event: the first answer",
        {"type": "string", "minLength": 1, "maxLength": KEY_CHARS_MAX},
    ),
    "Prefer": ("`respond-async`: 202 as soon as the event is on record", {"type": "string"}),
}
_METHODS = ("get", "put", "post", "delete", "patch")
_OF_READING = frozenset({400, 401, 403, 404, 410, 429, 500, 503})
_FASTAPI_OWN = ("HTTPValidationError", "ValidationError")  # what it would answer: here it is a problem, too

PROBLEM: dict[str, Any] = {
    "type": "object",
    "title": "Problem",
    "description": "RFC 9457. `retryable`: whether the same request may succeed later.",
    "required": ["type", "title", "status", "detail", "reason_code", "retryable", "hint"],
    "properties": {
        **{name: {"type": "string"} for name in ("type", "title", "detail", "hint", "dfid", "instance")},
        "status": {"type": "integer"},
        "reason_code": {"type": "string", "enum": list(REASONS)},
        "retryable": {"type": "boolean"},
    },
}


def describe(app: FastAPI, gates: OpenGates) -> None:
    """Have an app describe itself, made when it is first asked for, and name all methods of a path when one is not allowed."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = FastAPI.openapi(app)
            contracts = [each.gate.contract for each in gates.values()]
            app.openapi_schema = _described(found, sorted(gates), contracts)
        return app.openapi_schema

    def not_allowed(request: Request, error: Exception) -> Response:
        given = error.headers or {} if isinstance(error, HTTPException) else {}
        allowed = _methods(openapi(), request.url.path) or given.get("Allow", "")
        return response_of(Problem("METHOD_NOT_ALLOWED", headers={"Allow": allowed}))

    app.openapi = openapi  # type: ignore[method-assign]
    app.add_exception_handler(405, not_allowed)  # Starlette names those of the path's first route alone


def _methods(described: dict[str, Any], path: str) -> str:
    """Return the methods of a path as `Allow` names them; empty where the path is not described."""
    found = set[str]()
    for template, item in described["paths"].items():
        if re.fullmatch(_PARAMETER.sub("[^/]+", template), path):
            found.update(method.upper() for method in _METHODS if method in item)
    return ", ".join(sorted(found))


def _described(found: dict[str, Any], gates: list[str], contracts: list[Contract]) -> dict[str, Any]:
    schemas = found.setdefault("components", {}).setdefault("schemas", {})
    for name in _FASTAPI_OWN:
        schemas.pop(name, None)
    schemas["Problem"] = PROBLEM
    for path, item in found["paths"].items():
        for method in _METHODS:
            if (operation := item.get(method)) is not None:
                _refusals(operation, method)
                _gate_names(operation, gates)
                if path == ASKING:
                    _asking(operation, contracts)
    return found


def _refusals(operation: dict[str, Any], method: str) -> None:
    """Say with which statuses an operation that needs a key may be refused; one that needs none says so itself."""
    responses = operation["responses"]
    responses.pop("422", None)
    if "security" not in operation:
        return
    titles = defaultdict[int, list[str]](list)
    for code, reason in REASONS.items():
        titles[reason.status].append(code)
    for status, codes in sorted(titles.items()):
        if method != "get" or status in _OF_READING:
            content = {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
            responses.setdefault(str(status), {"description": ", ".join(codes), "content": content})


def _gate_names(operation: dict[str, Any], gates: list[str]) -> None:
    for parameter in operation.get("parameters", ()):
        if parameter["name"] == "gate":
            parameter["schema"] = {"type": "string", "enum": gates}


def _asking(operation: dict[str, Any], contracts: list[Contract]) -> None:
    """Say what a request for a decision takes: an event of one of the gates, and how it is to be answered."""
    events = [_event(contract) for contract in contracts]
    schema = events[0] if len(events) == 1 else {"anyOf": events}
    operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    for name, (description, kind) in ASKING_HEADERS.items():
        given = {"name": name, "in": "header", "required": False, "description": description, "schema": kind}
        operation["parameters"].append(given)
    operation["responses"]["202"] = {
        "description": "Taken: `Location` tells the present",
        "content": {"application/json": {"schema": {}}},
    }


def _event(contract: Contract) -> dict[str, Any]:
    """Return the schema of a gate's event. An id has one spelling besides, which JSON Schema cannot say."""
    spec = contract.event
    named = {"type": "string", "minLength": 1, "maxLength": ID_CHARS_MAX}
    fields = {spec.id: named, spec.key: named} | ({spec.evidence: {"type": "string"}} if spec.evidence else {})
    return {
        "type": "object",
        "title": f"event of gate {contract.gate}",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }
