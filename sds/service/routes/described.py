"""The document at /openapi.json: what every request takes and answers, and for each gate a path with its own event.

It is written for programs that make clients from it: a name for every operation and schema, and every status by its number.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from inspect import getdoc
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import Field, TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sds.kernel.canonical import ID_CHARS_MAX
from sds.service.deciding.terms import DEADLINE_HEADER, DEADLINE_QUERY, KEY_CHARS_MAX
from sds.service.gates import OpenGate
from sds.service.problems import MEDIA_TYPE, RETRIED, Problem, response_of
from sds.service.reasons import REASONS
from sds.service.schemas import agents, cases, changes, decisions, health, orders

Schema = dict[str, Any]
Responses = dict[int | str, Schema]

DECIDE = "/v1/gates/{gate}/decisions"
_PARAMETER = re.compile(r"\{[^}]*\}")
_SCHEMAS = "#/components/schemas/"

ABOUT: Schema = {
    "title": "Sovereign Decision Stream",
    "description": "Decisions within a written authority. Every error is a problem (RFC 9457) with `reason_code`, `retryable` and "
    "`hint`; /errors explains every code.",
    "license_info": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
    "servers": [{"url": "/"}],
    "openapi_tags": [
        {"name": "catalog", "description": "The gates."},
        {"name": "decisions", "description": "Ask for decisions and look at them."},
        {"name": "escalations", "description": "Cases that wait for a human."},
        {"name": "agents", "description": "Agents and their state."},
        {"name": "halt", "description": "Halt gates and resume them."},
        {"name": "events", "description": "Changes, as they happen."},
        {"name": "webhooks", "description": "Final states, as the service sends them."},
        {"name": "health", "description": "Whether the service can decide."},
    ],
}


def operation_name(route: APIRoute) -> str:
    """Return a route's `operationId`, which clients name their methods after: the name of its function."""
    return route.name


def answers(kind: type, *, headers: Schema | None = None) -> Schema:
    """Return the description of a response with the JSON of a type of `sds.service.schemas`. The type's docstring describes it."""
    return {"description": getdoc(kind), "content": _json(_of(kind)), "headers": headers or {}}


def ok(kind: type) -> Responses:
    """Return the responses of a route that answers 200 with the JSON of a type of `sds.service.schemas`."""
    return {200: answers(kind)}


def _of(kind: type) -> Schema:
    return {"$ref": f"{_SCHEMAS}{kind.__name__.removesuffix('Schema')}"}


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _header(description: str, schema: Schema) -> Schema:
    return {"description": description, "schema": schema}


_REPLAYED = {
    "Idempotent-Replayed": _header(
        "The first answer under the same key, sent again.", {"type": "string", "enum": ["true"]}
    )
}
_LOCATION = {"Location": _header("The address of the decision.", {"type": "string", "format": "uri-reference"})}
_APPLIED = {"Preference-Applied": _header("`respond-async`.", {"type": "string"})}
DECIDED: Responses = {
    200: {**answers(decisions.AnswerSchema, headers=_REPLAYED), "description": "The decision, whatever it is."},
    202: {
        **answers(decisions.AnswerSchema, headers=_LOCATION | _APPLIED | _REPLAYED),
        "description": "The event is on record and is being decided.",
    },
}
_POSITIVE: Schema = TypeAdapter(Annotated[int, Field(ge=1)]).json_schema()
_RETRY_AFTER = {"Retry-After": _header("Where `retryable`: when to send the request again, in seconds.", _POSITIVE)}
NOT_READY: Responses = {
    503: {
        "description": getdoc(health.NotReady),
        "headers": _RETRY_AFTER,
        "content": {MEDIA_TYPE: {"schema": _of(health.NotReady)}},
    }
}
METRICS: Responses = {
    200: {
        "description": "The metrics, in Prometheus' format.",
        "content": {"text/plain": {"schema": {"type": "string"}}},
    }
}
CHANGES: Responses = {
    200: {
        "description": "Server-sent events. The data of each is a `ChangeEvent`; the first event, `position`, has no data.",
        "content": {
            "text/event-stream": {}
        },  # OpenAPI 3.1 cannot describe an event, and generators differ in what they expect
    }
}
NO_KEY: Schema = {"security": []}
KEY_OR_NONE: Schema = {"security": [{"HTTPBearer": []}, {}]}


def _parameter(place: str, name: str, schema: Schema, description: str) -> Schema:
    return {"in": place, "name": name, "required": False, "schema": schema, "description": description}


_DEADLINE = "The deadline, in milliseconds from now. After it nothing is decided or sent. Header or query, not both."
_KEY: Schema = {
    "type": "string",
    "minLength": 1,
    "maxLength": KEY_CHARS_MAX,
    "pattern": r"^[!#-~]([ -~]*[!-~])?$",
}
ASKING: Schema = {
    "parameters": [
        _parameter("header", DEADLINE_HEADER, _POSITIVE, _DEADLINE),
        _parameter("query", DEADLINE_QUERY, _POSITIVE, _DEADLINE),
        _parameter("header", "Prefer", {"type": "string"}, "`respond-async`: answer 202 once the event is on record."),
        _parameter("header", "Idempotency-Key", _KEY, "The same key and event get the first answer, byte for byte."),
    ],
    "requestBody": {"required": True, "content": _json({"type": "object"})},
}


def describe(app: FastAPI, gates: Mapping[str, OpenGate]) -> None:
    """Have an application describe each gate's path, with its own event, in place of the path with `{gate}`."""
    generated = app.openapi

    def openapi() -> Schema:
        if app.openapi_schema is None:
            document = generated()  # the application keeps this object and returns it from then on
            anyone = document["paths"].pop(DECIDE)
            for name, gate in gates.items():
                document["paths"][DECIDE.replace("{gate}", name)] = _of_gate(anyone, gate)
            for path, methods in document["paths"].items():
                for method in methods.values():
                    _complete(path, method)
            components = document["components"]
            components["schemas"] = _untitled(_schemas())
            components["responses"] = {f"Problem{status}": _problem(status) for status in _STATUSES}
            document["webhooks"] = _WEBHOOKS
        return app.openapi_schema or {}

    def not_allowed(request: Request, error: Exception) -> Response:
        given = error.headers or {} if isinstance(error, HTTPException) else {}
        allowed = _methods(openapi(), request.url.path) or given.get("Allow", "")
        return response_of(Problem("METHOD_NOT_ALLOWED", headers={"Allow": allowed}))

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI's documentation has it
    app.add_exception_handler(405, not_allowed)  # Starlette names the methods of a path's first route alone


def _methods(document: Schema, path: str) -> str:
    """Return the methods of a path as the value of `Allow`; "" where the path is not described."""
    allowed = set[str]()
    for template, methods in document["paths"].items():
        if re.fullmatch(_PARAMETER.sub("[^/]+", template), path):
            allowed.update(method.upper() for method in methods)
    return ", ".join(sorted(allowed))


def _of_gate(anyone: Schema, gate: OpenGate) -> Schema:
    own = deepcopy(anyone)
    post = own["post"]
    post["operationId"] = f"decide_{gate.name}"
    post["summary"] = f"Decide an event of {gate.name}"
    post["parameters"] = [each for each in post["parameters"] if each["in"] != "path"]
    for each in post["parameters"]:
        if each["name"] in (DEADLINE_HEADER, DEADLINE_QUERY):
            each["schema"] = {**_POSITIVE, "maximum": gate.deadline_ms_max}
    post["requestBody"]["content"] = _json(event_schema(gate))
    return own


def event_schema(gate: OpenGate) -> Schema:
    """Return the JSON Schema of a gate's event."""
    event = gate.gate.contract.event
    identifier: Schema = {
        "type": "string",
        "minLength": 1,
        "maxLength": ID_CHARS_MAX,
        "description": "Printable, in Unicode's NFC, with no digits but 0 to 9, no blanks at the ends.",
    }
    properties: Schema = {event.id: identifier, event.key: identifier}
    if event.evidence:
        properties[event.evidence] = {"type": "string", "description": "The whole event may have at most 65,536 bytes."}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _schemas() -> Schema:
    """Return the schemas of all types of `sds.service.schemas`, by name."""
    adapters = [(kind.__name__, "serialization", TypeAdapter[Any](kind)) for kind in _TYPES]
    _, found = TypeAdapter.json_schemas(adapters, ref_template=_SCHEMAS + "{model}")  # type: ignore[arg-type]
    named = orjson.dumps(found["$defs"]).replace(b'Schema"', b'"')  # a suffix of types that have a namesake elsewhere
    return dict(orjson.loads(named))


_TYPES = (
    agents.AgentList, agents.AgentRecord, agents.HaltStates, agents.HaltResults, cases.ShownCase, cases.WaitingCases,
    changes.ChangeEvent, changes.WebhookMessage, decisions.AnswerSchema, decisions.DecisionList, decisions.GateList,
    decisions.ShownDecision, health.Live, health.NotReady, health.ProblemSchema, health.Ready, orders.OrderList,
)  # fmt: skip
_STATUSES = sorted({reason.status for reason in REASONS.values()} - {405})  # 405 answers no method that is described


def _problem(status: int) -> Schema:
    """Return the description of the problems of one status."""
    codes = ", ".join(f"`{code}`" for code, reason in REASONS.items() if reason.status == status)
    headers = Schema()
    if status == 401:
        headers["WWW-Authenticate"] = _header("`Bearer`.", {"type": "string"})
    if status == 409:
        headers["Location"] = _header("Of `FLOW_IN_PROGRESS`: the address of the decision.", {"type": "string"})
    if status in RETRIED:
        headers |= _RETRY_AFTER
    return {"description": codes, "headers": headers, "content": {MEDIA_TYPE: {"schema": _of(health.ProblemSchema)}}}


def _statuses(path: str, operation: Schema) -> Iterator[int]:
    """Yield the statuses of the problems that an operation can answer with."""
    yield 500
    if path != "/livez":
        yield 503
    if path.startswith("/v1/"):
        yield 400
    if operation["security"]:
        yield from (401, 403, 429)
    names = {each["name"] for each in operation.get("parameters", ())}
    if "{" in path or "gate" in names or "requestBody" in operation:
        yield 404
    if "requestBody" in operation:
        yield from (408, 409, 413, 415)
    if DEADLINE_QUERY in names:
        yield from (422, 504)
    if DEADLINE_QUERY in names or path.startswith("/v1/escalations/"):
        yield 410


def _complete(path: str, operation: Schema) -> None:
    """Add the problems to a generated operation, and put right what FastAPI makes of the types of its function."""
    for each in operation.get("parameters", ()):
        each["schema"] = _untitled(_given(each["schema"]))
    for response in operation["responses"].values():
        for content in response.get("content", {}).values():
            if "$ref" in (schema := content.get("schema", {})):  # that of the return type, updated by the one described
                content["schema"] = {"$ref": schema["$ref"]}
    described = operation["responses"]
    described.pop("422", None)  # FastAPI's own, which this service never answers
    for status in sorted(_statuses(path, operation)):
        described.setdefault(str(status), {"$ref": f"#/components/responses/Problem{status}"})
    operation["responses"] = dict(sorted(described.items()))


def _given(schema: Schema) -> Schema:
    """Return the schema of a parameter without null: one that is not sent is left out."""
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    return schema if len(kinds) != 1 else {**kinds[0], **{key: schema[key] for key in schema if key != "anyOf"}}


def _untitled(schema: Any) -> Any:
    """Return a schema without the titles that repeat names."""
    if isinstance(schema, list):
        return [_untitled(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _untitled(each) for key, each in schema.items() if key != "title" or not isinstance(each, str)}


def _signed(name: str, description: str) -> Schema:
    return {**_parameter("header", name, {"type": "string"}, description), "required": True}


_WEBHOOKS: Schema = {
    "decision": {
        "post": {
            "operationId": "receive_decision",
            "summary": "Receive a final state",
            "description": "What the service sends to an endpoint that `sds webhooks add` has added: once or more, in order, "
            "signed as Standard Webhooks has it.",
            "tags": ["webhooks"],
            "security": [],
            "parameters": [
                _signed("webhook-id", "The same for every delivery of the same change."),
                _signed("webhook-timestamp", "The time of sending: seconds since 1970."),
                _signed("webhook-signature", "`v1,` and the signature under the endpoint's secret."),
            ],
            "requestBody": {"required": True, "content": _json(_of(changes.WebhookMessage))},
            "responses": {
                "200": {"description": "Delivered: any status of 2xx, within 10 s. Anything else is tried again."}
            },
        }
    }
}
