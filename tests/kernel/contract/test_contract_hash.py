"""A contract's hash is that of what it says: a section that came later and is left out neither moves it nor is written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel, ValidationError

from sds.gates.refund.gate import load_refund_contract
from sds.kernel.canonical import digest
from sds.kernel.contract import form, sections
from sds.kernel.contract.form import ALWAYS, Section
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.contract.sections import SpendLimit
from sds.kernel.registry.contract_versions import recorded_contract
from tests.kernel import durable, humans, sagas, world

REFUND_FILE = Path(__file__).with_name("refund-1.5.0.yaml")
# As commit 7c7eaad had them.
REFUND_1_5_0 = "12f3d9795a0c68ee9b9940833ea62d13ae3c5974792705ef7348a26565cff5bb"
PINNED = {
    "a gate with the usual": (
        durable.usual_contract,
        "3c82b14265f8d079a39d8bc907a972380e90388326569de1b633866d44566daf",
    ),
    "sagas": (sagas.terms, "5703acf4b7b0d9991ee10a4ab0dc862d66edd1055805c3efe139a133d98ecb2d"),
    "a human's terms": (lambda: humans.TERMS, "a6679d2ac26039ff264133037db3428bda6224b018ea2a4b29da7984dff2c289"),
    "refund 1.5.0": (lambda: load_contract(REFUND_FILE), REFUND_1_5_0),
}


@pytest.mark.parametrize("name", PINNED)
def test_a_contract_of_before_has_the_hash_it_had(name: str):
    terms, known = PINNED[name]
    assert known == terms().hash


class LaterLimit(SpendLimit):
    """A limit of a version to come."""

    note: str = ""


class Later(Contract):
    """A contract of a version to come: two sections more, and one more field in a section that was there."""

    opening: Mapping[str, int] = {}
    retries: sections.RetrySpec = sections.RetrySpec()
    spend: tuple[LaterLimit, ...] = ()


@pytest.fixture(autouse=True)
def known_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of a version to come bear other names here; their fields of today are as today's."""
    both = {**ALWAYS, "Later": ALWAYS["Contract"], "LaterLimit": ALWAYS["SpendLimit"]}
    monkeypatch.setattr(form, "ALWAYS", both)


def later(**changes: Any) -> Later:
    return Later.model_validate({**durable.usual_contract().model_dump(), **changes})


def test_a_later_section_that_is_left_out_changes_nothing_and_one_that_is_given_does():
    today = durable.usual_contract()
    assert today.hash == later().hash
    assert today.model_dump_json() == later().model_dump_json()
    others = [later(opening={"at": 8}), later(retries={"attempts_max": 1})]
    others.append(later(spend=({"name": "hour", "window": "hour", "max_minor": 5_000_000, "note": "x"},)))
    plain = later(spend=({"name": "hour", "window": "hour", "max_minor": 5_000_000},))
    assert 5 == len({today.hash, plain.hash, *(each.hash for each in others)})


def test_what_says_the_same_as_nothing_is_nothing():
    assert later().hash == later(opening={}, retries=sections.RetrySpec().model_dump()).hash


def test_an_older_program_reads_what_a_newer_one_has_recorded_unless_it_uses_what_came_later():
    assert durable.usual_contract() == recorded_contract(later().model_dump_json())
    with pytest.raises(ValidationError):
        Contract.model_validate_json(later(opening={"at": 8}).model_dump_json())


def test_a_contract_is_read_back_from_its_record_with_the_same_hash():
    terms = load_contract(REFUND_FILE)
    assert REFUND_1_5_0 == digest(json.loads(terms.model_dump_json()))
    assert terms == recorded_contract(terms.model_dump_json())
    terms = load_refund_contract()
    assert terms.hash == digest(json.loads(terms.model_dump_json()))
    assert terms == recorded_contract(terms.model_dump_json())


def used_in(annotation: Any) -> set[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        nested = [used_in(field.annotation) for field in annotation.model_fields.values()]
        return {annotation}.union(*nested)
    return set().union(*(used_in(each) for each in get_args(annotation)))


def test_every_section_is_written_in_this_form_and_has_every_field_that_is_always_written():
    used = used_in(Contract)
    assert ALWAYS.keys() <= {section.__name__ for section in used}
    for section in used:
        assert issubclass(section, Section)
        assert ALWAYS.get(section.__name__, set()) <= set(section.model_fields)


def edits_that_matter() -> list[tuple[str, str]]:
    return [
        ("owner: till@", "owner: tell@"),
        ("who is paid", "who is heard"),
        ("[PAY, GRANT", "[GRANT, PAY"),
        ("claim.minutes: int", "claim.minutes: fixed(0)"),
        ("hi: 3", "hi: 4"),
        ("step: 5", "step: 1"),
        ("[OWED, LATE]", "[OWED]"),
        ("max_minor: 100000", "max_minor: 100001"),
        ("spend:", "drift: {fields: {claim.minutes: {abs: 1}}}\nspend:"),
        ("spend:", "escalation: {always: [PAY]}\nspend:"),
        ("spend:", "rationale: {order: before, chars_max: 5}\nspend:"),
        ("spend:", "rationale: {order: after, chars_max: 5}\nspend:"),
    ]


def test_the_hash_covers_every_field():
    contracts = [world.contract(), *(world.contract(edit) for edit in edits_that_matter())]
    assert len(contracts) == len({contract.hash for contract in contracts})
    assert 64 == len(contracts[0].hash)


def test_the_hash_does_not_depend_on_how_the_file_is_laid_out():
    same = world.contract(
        ("gate: till\nagent_id: till-agent", "agent_id: 'till-agent' # first\ngate: till"),
        (
            "days: {lo: 1, hi: 3}\n      minutes: {lo: 5, hi: claim.minutes, step: 5}",
            "minutes: {step: 5, hi: claim.minutes, lo: 5}\n      days: {hi: 3, lo: 1}",
        ),
    )
    assert world.contract().hash == same.hash


def test_another_mission_has_another_hash():
    other = world.contract(("who is paid", "who is heard"))
    assert world.contract().mission_hash != other.mission_hash
    assert world.contract().mission_hash == world.contract(("hi: 3", "hi: 4")).mission_hash
