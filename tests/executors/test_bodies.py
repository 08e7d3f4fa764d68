"""Bodies of requests: a form's names are nested in brackets, and a number with decimals keeps each digit."""

from __future__ import annotations

import json
from decimal import Decimal
from urllib.parse import parse_qsl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.executors.http import bodies, templates
from sds.executors.http.templates import Tree, UnwritableError

NAMES = st.text(st.characters(exclude_characters="[]", exclude_categories=["Cs"]), min_size=1, max_size=8)
LEAVES = st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.integers(), st.booleans())
FIELDS = st.dictionaries(
    NAMES,
    st.recursive(
        LEAVES,
        lambda inner: st.one_of(st.lists(inner, min_size=1), st.dictionaries(NAMES, inner, min_size=1)),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


def test_a_form_nests_names_and_numbers_lists() -> None:
    tree: Tree = {
        "metadata": {"order": "a&b=c d", "more": {"x": 1}},
        "lines": [{"n": 2}, "é"],
        "now": True,
        "no": False,
    }
    read = dict(parse_qsl(bodies.encoded(tree, "form").decode(), strict_parsing=True))
    said = {"metadata[order]": "a&b=c d", "metadata[more][x]": "1", "lines[0][n]": "2", "lines[1]": "é"}
    assert said | {"now": "true", "no": "false"} == read


@given(FIELDS)
def test_every_field_has_a_name_of_its_own_in_a_form(tree: dict[str, Tree]) -> None:
    """So none can take another's place, whatever the order's texts are."""
    assert bodies.unwritable_in_form(tree) is None
    read = parse_qsl(bodies.encoded(tree, "form").decode(), keep_blank_values=True, strict_parsing=True)

    def leaves(part: Tree) -> int:
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else None
        return 1 if parts is None else sum(map(leaves, parts))

    assert leaves(tree) == len(read) == len({name for name, _ in read})


@given(FIELDS)
def test_json_is_what_the_standard_library_writes(tree: dict[str, Tree]) -> None:
    assert json.dumps(tree).encode() == bodies.encoded(tree, "json")


@pytest.mark.parametrize(
    ("minor", "place", "written"),
    [
        (1250, "{params.amount:2n}", "12.50"),
        (5, "{params.amount:2n}", "0.05"),
        (-5, "{params.amount:3n}", "-0.005"),
        (1, "{params.amount:9n}", "0.000000001"),
        (9_007_199_254_740_993, "{params.amount:2n}", "90071992547409.93"),  # no float has all of these digits
    ],
)
def test_a_number_with_decimals_is_written_with_each_digit(minor: int, place: str, written: str) -> None:
    tree = templates.written({"amount": place}, {"params.amount": minor})
    assert f'{{"amount": {written}}}'.encode() == bodies.encoded(tree, "json")
    assert f"amount={written}".encode() == bodies.encoded(tree, "form")
    assert {"amount": Decimal(written)} == json.loads(bodies.encoded(tree, "json"), parse_float=Decimal)


def test_a_text_that_utf_8_does_not_have_cannot_be_in_a_form() -> None:
    with pytest.raises(UnwritableError, match="a text that UTF-8 does not have"):
        bodies.encoded({"account": "\ud800"}, "form")
