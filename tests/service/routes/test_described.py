"""/openapi.json says what is so: of each gate its event, of each answer its fields, of each problem its form."""

from __future__ import annotations

import json
import re
from copy import deepcopy
from typing import Any

import jsonschema
import pytest

from sds.service.operations.changes import final_changes, read_changes
from sds.service.operations.webhooks import signed
from sds.service.reasons import REASONS
from tests.service.testbed import EVENT, Bed


@pytest.fixture
def document(bed: Bed) -> Any:
    answer = bed.client.get("/openapi.json", headers={"Authorization": ""})
    assert 200 == answer.status_code
    return answer.json()


def checked(document: Any, schema: Any, value: object) -> None:
    jsonschema.validate(value, {**schema, "components": document["components"]})


def test_each_gate_has_its_own_path_and_event(document: Any) -> None:
    assert "/v1/gates/{gate}/decisions" not in document["paths"]
    post = document["paths"]["/v1/gates/toll/decisions"]["post"]
    schema = post["requestBody"]["content"]["application/json"]["schema"]
    checked(document, schema, EVENT)
    for wrong in ({**EVENT, "more": 1}, {"trip_id": "T-1"}, {**EVENT, "text": 1}, []):
        with pytest.raises(jsonschema.ValidationError):
            checked(document, schema, wrong)
    (most,) = {each["schema"].get("maximum") for each in post["parameters"] if "eadline" in each["name"]}
    assert 30_000 == most


def test_an_answer_has_every_key_that_is_described_and_no_other(bed: Bed, document: Any) -> None:
    decided = bed.post().json()
    properties = {name: set(each.get("properties", ())) for name, each in document["components"]["schemas"].items()}
    assert set(decided) == properties["Answer"]
    (listed,) = bed.client.get("/v1/decisions").json()["decisions"]
    assert set(listed) == properties["ListedDecision"]
    shown = bed.client.get(f"/v1/decisions/{decided['dfid']}").json()
    assert set(shown) == properties["ShownDecision"]
    assert set(shown["audit"]) == properties["Audit"]
    assert list(REASONS) == document["components"]["schemas"]["ReasonCode"]["enum"]


def operations(document: Any) -> dict[tuple[str, str], Any]:
    return {(path, method): said for path, methods in document["paths"].items() for method, said in methods.items()}


def test_every_operation_has_a_name_that_makes_a_good_method(document: Any) -> None:
    assert [
        "decide_toll", "get_agent", "get_decision", "get_escalation", "get_halt", "get_livez", "get_metrics", "get_readyz",
        "list_agents", "list_decisions", "list_escalations", "list_gates", "list_orders", "move_agent", "resolve_escalation", "set_halt",
        "stream_events",
    ] == sorted(said["operationId"] for said in operations(document).values())  # fmt: skip


def test_every_operation_names_each_status_by_its_number_and_says_which_key_it_needs(document: Any) -> None:
    """Some generators of clients write code for `4XX` that does not compile."""
    described = operations(document)
    assert [] == [
        each for each, said in described.items() if not all(status.isdecimal() for status in said["responses"])
    ]
    assert [] == [each for each, said in described.items() if "500" not in said["responses"]]
    assert [] == [each for each, said in described.items() if "security" not in said]
    assert {each for each, said in described.items() if not said["security"]} == {("/livez", "get"), ("/readyz", "get")}


def test_every_json_answer_is_a_named_schema_that_exists(document: Any) -> None:
    found = [
        content["schema"]["$ref"].rpartition("/")[2]
        for said in (*operations(document).values(), {"responses": document["components"]["responses"]})
        for response in said["responses"].values()
        for media, content in response.get("content", {}).items()
        if media.endswith("json")
    ]
    assert (
        {"Problem", "NotReady", "Answer", "ShownCase", "AgentRecord"}
        <= set(found)
        <= set(document["components"]["schemas"])
    )


def test_no_parameter_may_be_null_for_a_client_would_send_the_word(document: Any) -> None:
    given = [each["schema"] for said in operations(document).values() for each in said.get("parameters", ())]
    assert given
    assert [] == [schema for schema in given if "null" in str(schema)]


def test_every_format_is_one_of_json_schema(document: Any) -> None:
    """Strict validators, Ajv's among them, refuse a schema with a format that they do not know."""
    assert {"date-time", "uri-reference"} == set(re.findall(r'"format": "([^"]*)"', json.dumps(document)))


def test_numbers_that_are_whole_are_integers(document: Any) -> None:
    """A client made of `number` sends a deadline as 2000.0, which is refused."""
    post = document["paths"]["/v1/gates/toll/decisions"]["post"]
    kinds = {each["name"]: each["schema"]["type"] for each in post["parameters"] if "eadline" in each["name"]}
    assert {"Deadline-Ms": "integer", "deadline_ms": "integer"} == kinds


def test_a_webhook_is_as_it_is_described(bed: Bed, document: Any) -> None:
    bed.post()
    (final,) = final_changes(bed.gate.store, "toll", 0)
    body, headers = signed("whsec_" + "A" * 32, final, 0)
    said = document["webhooks"]["decision"]["post"]
    bed.description.validate(said["requestBody"]["content"]["application/json"]["schema"], json.loads(body))
    assert {each["name"] for each in said["parameters"]} <= set(headers)


def test_a_change_is_as_it_is_described(bed: Bed) -> None:
    bed.post()
    bed.client.put("/v1/halt", json={"halted": True, "reason": "to see"})
    bed.client.post("/v1/agents/toll-agent/suspend", json={"reason": "to see"})
    changes = read_changes(bed.gate.store, "toll", 0)
    assert {"DECIDED", "SETTLED", "HALT", "AGENT"} <= {each.kind for each in changes}
    for each in changes:
        bed.description.validate({"$ref": "#/components/schemas/ChangeEvent"}, each.as_data())


def test_each_answer_of_these_tests_is_checked_against_its_description(bed: Bed) -> None:
    """What `bed.client` checks can fail: on a key, a status and a header that are not described."""
    document = bed.description.document = deepcopy(bed.description.document)
    halted = "/v1/halt"
    del document["components"]["schemas"]["HaltState"]["properties"]["halted"]
    with pytest.raises(jsonschema.ValidationError, match="'halted' was unexpected"):
        bed.client.get(halted)
    del document["paths"][halted]["get"]["responses"]["401"]
    with pytest.raises(AssertionError, match="UNAUTHENTICATED"):
        bed.client.get(halted, headers={"Authorization": ""})
    del document["components"]["responses"]["Problem401"]["headers"]["WWW-Authenticate"]
    with pytest.raises(AssertionError, match="WWW-Authenticate"):
        bed.client.get("/v1/gates", headers={"Authorization": ""})
