"""Texts of a gateway file, filled with facts of an order: none can become more than the place it stands in."""

from __future__ import annotations

from decimal import Decimal
from uuid import RFC_4122, UUID

import pytest

from sds.executors.http import templates
from sds.executors.http.templates import UnwritableError
from sds.kernel.executor.protocol import ExecutionIntent

INTENT = ExecutionIntent("flow-1", "k-1", "PAY", (("amount", 1205), ("days", 3)), "A/1?x=2#ü", "7")
FACTS = templates.order_facts(INTENT, "k-1", "whole", "EUR")


def test_a_text_that_is_one_number_stays_a_number_and_decimals_make_a_text() -> None:
    tree = {"a": "{params.amount}", "b": ["{params.amount:2}", "{kind} {params.days}"], "c": {"d": True, "e": 7}}
    assert {"a": 1205, "b": ["12.05", "PAY 3"], "c": {"d": True, "e": 7}} == templates.written(tree, FACTS)  # type: ignore[arg-type]


def test_an_amount_has_the_decimals_of_its_currency() -> None:
    places = ["{params.amount}", "{params.amount:3}", "{params.amount:2n}"]
    assert [1205, "1.205", Decimal("12.05")] == templates.written(places, FACTS)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "first"),
    [
        ("/s?a=1&after={after}", "/s?a=1"),
        ("/s?after={after}&a=1", "/s?a=1"),
        ("/s?after={after}", "/s"),
        ("/s?a={since_ms}", "/s?a={since_ms}"),
        ("/s", "/s"),
    ],
)
def test_the_first_page_of_a_statement_has_no_parameter_that_names_a_page(path: str, first: str) -> None:
    assert first == templates.without_after(path)


def test_a_fact_in_a_path_is_one_part_of_it() -> None:
    assert "/a/A%2F1%3Fx%3D2%23%C3%BC/pay?k=k-1" == templates.path("/a/{resource_key}/pay?k={key}", FACTS)


@pytest.mark.parametrize("name", ["", ".", ".."])
def test_what_names_another_place_however_it_is_escaped_is_refused(name: str) -> None:
    with pytest.raises(UnwritableError, match="cannot be a part of a path"):
        templates.path("/a/{resource_key}/pay", {"resource_key": name})


@pytest.mark.parametrize("value", ["a\r\nX-Other: 1", "a\0", "ü"])
def test_a_header_holds_printable_ascii_and_no_second_header(value: str) -> None:
    with pytest.raises(UnwritableError, match="the value of a header must be printable ASCII"):
        templates.header("{resource_key}", {"resource_key": value})


@pytest.mark.parametrize("text", ["{params.fee}", "{kind:2}", "{kind:2n}"])
def test_a_fact_that_the_order_does_not_have_is_refused(text: str) -> None:
    with pytest.raises(UnwritableError):
        templates.written(text, FACTS)


def test_a_key_has_the_form_that_its_gateway_takes_and_the_whole_key_is_there_beside_it() -> None:
    key = "0123456789abcdef" * 4
    written = {form: templates.key_facts(key, form, "EUR") for form in ("whole", "short", "uuid")}
    assert (key, key[:32]) == (written["whole"]["key"], written["short"]["key"])
    assert {key} == {facts["whole_key"] for facts in written.values()}
    made = UUID(str(written["uuid"]["key"]))
    assert (4, RFC_4122, key[:12]) == (made.version, made.variant, made.hex[:12])
    assert made != UUID(str(templates.key_facts(key[:31] + "0", "uuid", "EUR")["key"]))
