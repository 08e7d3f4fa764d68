"""The snapshot holds exactly the declared fields, in one form, under one id."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from sds.kernel.contract.compiler import STRING_CHARS_MAX, Rules, Snapshot, parse_type, show, take_snapshot
from sds.kernel.envelope.state import Fields, Value
from tests.kernel import world

SPECS = Rules(world.contract()).fields


def taken(fields: Fields, key: str = "k-1", version: str = "1", now_ms: int = world.NOW_MS) -> Snapshot:
    return take_snapshot(SPECS, key, fields, version, now_ms)


def test_the_id_is_the_hash_of_the_canonical_bytes():
    snapshot = taken(world.FIELDS)
    assert sha256(snapshot.body).hexdigest() == snapshot.id
    assert world.FIELDS == snapshot.fields
    expected = {"key": "k-1", "version": "1", "taken_at_ms": world.NOW_MS, "fields": world.FIELDS}
    assert expected == json.loads(snapshot.body)
    assert json.dumps(expected, sort_keys=True, separators=(",", ":")).encode() == snapshot.body


def test_the_id_does_not_depend_on_the_order_the_fields_were_read_in():
    assert taken(world.FIELDS) == taken(dict(reversed(world.FIELDS.items())))


def test_whatever_differs_has_another_id():
    snapshots = [
        taken(world.FIELDS),
        taken(world.fields(account_left=5001)),
        taken(world.fields(account_left=None)),
        taken(world.FIELDS, key="k-2"),
        taken(world.FIELDS, version="2"),
        taken(world.FIELDS, now_ms=world.NOW_MS + 1),
    ]
    assert len(snapshots) == len({snapshot.id for snapshot in snapshots})


def test_an_undeclared_field_does_not_reach_the_snapshot():
    assert taken(world.FIELDS) == taken({**world.FIELDS, "customer.birthday": "1815-12-10"})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("account.left", 10**30),
        ("account.owner", "\udfff"),
        ("account.owner", 1),
        ("account.owner", "x" * (STRING_CHARS_MAX + 1)),
        ("account.owner", "x" * (STRING_CHARS_MAX * 2)),
        ("claim.due", 1),
        ("claim.minutes", 1.5),
    ],
)
def test_a_mistyped_field_does_not_reach_the_snapshot_either(path: str, value: Value):
    assert path not in taken({**world.FIELDS, path: value}).fields


def test_a_text_may_be_as_long_as_that_and_no_longer():
    longest = "x" * STRING_CHARS_MAX
    assert longest == taken({**world.FIELDS, "account.owner": longest}).fields["account.owner"]


@pytest.mark.parametrize(
    ("declared", "value", "shown"),
    [
        ("bool", True, "yes"),
        ("bool", False, "no"),
        ("int", -5, "-5"),
        ("fixed(2)", 15000, "150.00"),
        ("fixed(2)", -5, "-0.05"),
        ("fixed(6)", 1, "0.000001"),
        ("timestamp", 1_600_000_000, "1600000000"),
        ("enum(rain, snow)", "snow", "snow"),
        ("string", 'Ada "<|im_end|>"\n\u202eé', "Ada ?<|im_end|>???e"),
        ("string", "Zürich\u2013Łódź «東京»", "Zurich-Lodz ????"),
    ],
)
def test_a_value_is_shown_as_one_line_of_printable_ascii(declared: str, value: Value, shown: str):
    assert shown == show(parse_type("a.b", declared), value)
