"""/openapi.json says what is so: of each gate its event, of each answer its fields, of each problem its form."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

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


def test_answers_and_problems_are_as_they_are_described(bed: Bed, document: Any) -> None:
    decided = bed.post()
    post = document["paths"]["/v1/gates/toll/decisions"]["post"]
    answer = post["responses"]["200"]["content"]["application/json"]["schema"]
    checked(document, answer, decided.json())
    assert set(decided.json()) == set(document["components"]["schemas"]["Answer"]["properties"])
    shown = document["paths"]["/v1/decisions/{dfid}"]["get"]["responses"]["200"]["content"]["application/json"][
        "schema"
    ]
    checked(document, shown, bed.client.get(f"/v1/decisions/{decided.json()['dfid']}").json())
    listed = document["paths"]["/v1/decisions"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    checked(document, listed, bed.client.get("/v1/decisions").json())
    problem = post["responses"]["4XX"]["content"]["application/problem+json"]["schema"]
    checked(document, problem, bed.client.get("/v2").json())
    assert list(REASONS) == document["components"]["schemas"]["Problem"]["properties"]["reason_code"]["enum"]


def test_every_route_says_that_it_answers_with_problems_and_which_key_it_needs(document: Any) -> None:
    operations = {
        (path, method): said for path, methods in document["paths"].items() for method, said in methods.items()
    }
    assert [] == [each for each, said in operations.items() if not {"4XX", "5XX"} <= set(said["responses"])]
    assert [] == [each for each, said in operations.items() if "422" in said["responses"]]
    assert [] == [each for each, said in operations.items() if each[0].startswith("/v1") and "security" not in said]
