"""`levels`: what a number is called for the model, checked when the contract is loaded, and nothing but words."""

from __future__ import annotations

import json

import pytest

from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.errors import ContractError
from tests.kernel import world

WHEN = "when: claim.due"
MOST = 10**15


def levels(path: str, words: str) -> tuple[str, str]:
    return WHEN, f"levels:\n  {path}: {words}\n{WHEN}"


def fault(*edits: tuple[str, str]) -> str:
    with pytest.raises(ContractError) as caught:
        parse_contract(world.edited(*edits), "till.yaml")
    return str(caught.value)


def many(count: int) -> str:
    return ", ".join(["w0", *(f"{number}, w{number}" for number in range(1, count))])


def test_levels_are_read_back_as_they_are_written():
    contract = world.contract(levels("claim.minutes", "[none, 15, short, 180, long]"))
    assert {"claim.minutes": ("none", 15, "short", 180, "long")} == contract.levels
    assert contract == Contract.model_validate_json(json.dumps(contract.model_dump(mode="json")))
    assert contract == contract.model_copy()


@pytest.mark.parametrize(
    "words",
    [
        "[a, 0, b]",
        f"[a, {-MOST}, b, {MOST}, c]",
        f"[{many(16)}]",
        "[\"no\", 1, 'yes and more', 2, '~ !']",
        f"[{'x' * 32}, 1, y]",
    ],
)
def test_levels_may_be_two_to_sixteen_words_of_printable_ascii(words: str):
    assert ["claim.minutes"] == list(world.contract(levels("claim.minutes", words)).levels)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("short", ": must be a list of words with a whole number between each two"),
        ("{short: 15}", ": must be a list of words with a whole number between each two"),
        ("15", ": must be a list of words with a whole number between each two"),
        ("[]", ": must be two or more words with a whole number between each two"),
        ("[short]", ": must be two or more words with a whole number between each two"),
        ("[short, 15]", ": must be two or more words with a whole number between each two"),
        ("[short, 15, long, 20]", ": must be two or more words with a whole number between each two"),
        (f"[{many(17)}]", ": must have 16 or fewer words"),
        ("[15, 20, long]", '.0: must be text: YAML reads `15` as a number: write "15"'),
        ("[no, 20, long]", '.0: must be text: YAML reads `no` as a truth value: write "no"'),
        ("[[short], 20, long]", ".0: must be text"),
        ("[short, 15, '']", ".2: is not a word of 1 to 32 printable ASCII characters"),
        (f"[short, 15, {'x' * 33}]", ".2: is not a word of 1 to 32 printable ASCII characters"),
        ('[short, 15, "lo\\nng"]', ".2: is not a word of 1 to 32 printable ASCII characters"),
        ('[short, 15, "long\\n"]', ".2: is not a word of 1 to 32 printable ASCII characters"),
        ("[short, 15, länger]", ".2: is not a word of 1 to 32 printable ASCII characters"),
        ("[short, 15, short]", ".2: `short` is the word of another level"),
        ("[a, 1, b, 2, c, 3, b]", ".6: `b` is the word of another level"),
        ("[short, fifteen, long]", ".1: must be a whole number"),
        ("[short, '15', long]", ".1: must be a whole number"),
        ("[short, true, long]", ".1: must be a whole number"),
        ("[short, [15], long]", ".1: must be a whole number"),
        (f"[short, {MOST + 1}, long]", f".1: must be from {-MOST} to {MOST}"),
        (f"[short, {-MOST - 1}, long]", f".1: must be from {-MOST} to {MOST}"),
        ("[a, 15, b, 15, c]", ".3: must be more than 15, the number before it"),
        ("[a, 15, b, -3, c]", ".3: must be more than 15, the number before it"),
    ],
)
def test_levels_that_are_not_of_their_form_are_refused_with_the_place(words: str, message: str):
    assert f"till.yaml:18: levels.claim.minutes{message}" == fault(levels("claim.minutes", words))


def test_a_number_with_a_fraction_is_refused_as_everywhere():
    said = fault(levels("claim.minutes", "[short, 1.5, long]"))
    known = "levels.claim.minutes.1: `1.5` is neither text nor a plain whole number"
    assert f'till.yaml:18: {known}: numbers are whole, amounts in minor units; text is written "1.5"' == said


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("claim.hours", "`claim.hours` is not a declared snapshot field"),
        ("claim.due", "is not a number and cannot have levels"),
        ("claim.size", "is not a number and cannot have levels"),
        ("account.owner", "is not a number and cannot have levels"),
        ("hours", "`hours` is not two lower-case names with a dot between"),
    ],
)
def test_only_a_declared_number_has_levels(path: str, message: str):
    assert f"till.yaml:18: levels.{path}: {message}" == fault(levels(path, "[short, 15, long]"))


def test_levels_of_what_the_model_does_not_read_are_refused():
    there = levels("claim.minutes", "[short, 15, long]")
    assert "till.yaml:18: levels.claim.minutes: is not shown to the model: name it in `show`" == fault(
        there, ("kinds:", "show: {claim.size: size}\nkinds:")
    )
    assert world.contract(there, ("kinds:", "show: {claim.minutes: late}\nkinds:")).levels


def test_levels_must_be_a_mapping():
    assert "till.yaml:17: levels: must be a mapping" == fault((WHEN, f"levels: [short, 15, long]\n{WHEN}"))


def test_every_field_that_is_a_number_may_have_levels():
    numbers = ("claim.minutes", "claim.filed_at", "account.left", "account.slots")
    written = "\n".join(f"  {path}: [few, 7, many]" for path in numbers)
    assert set(numbers) == set(world.contract((WHEN, f"levels:\n{written}\n{WHEN}")).levels)


def test_other_levels_are_another_contract():
    words = ("[short, 15, long]", "[short, 16, long]", "[brief, 15, long]")
    hashes = {world.contract(levels("claim.minutes", each)).hash for each in words}
    assert 4 == len({world.contract().hash, *hashes})


def test_levels_change_nothing_that_is_permitted_and_nothing_that_is_frozen():
    plain, told = world.packet(world.contract()), world.packet(world.contract(levels("claim.minutes", "[a, 15, b]")))
    assert plain.envelope == told.envelope
    assert plain.snapshot == told.snapshot
    assert plain.texts[0] == told.texts[0]
    assert plain.texts[1:3] != told.texts[1:3]
