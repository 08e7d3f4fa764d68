"""A contract is loaded whole or not at all; what is wrong with it is said with file, line and plain words."""

from __future__ import annotations

import time

import pytest

from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX
from sds.kernel.errors import ContractError
from tests.kernel import world


def fault(text: str) -> str:
    with pytest.raises(ContractError) as caught:
        parse_contract(text, "till.yaml")
    assert "CONTRACT_INVALID" == caught.value.reason_code
    return str(caught.value)


def test_what_is_no_text_is_no_contract():
    assert "till.yaml: the contract is not text" == fault(None)  # type: ignore[arg-type]


def test_a_whole_contract_is_loaded():
    contract = world.contract()
    assert "till" == contract.gate
    assert {"PAY", "GRANT", "TALK", "DENY"} == set(contract.kinds)
    assert [True, True, False, False] == [contract.kinds[kind].executes for kind in ("PAY", "GRANT", "TALK", "DENY")]
    assert "2020-01-01" == contract.effective_from


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("gate: till\n", "gate: till\ngate: shop\n", "2: `gate` is given twice"),
        ("gate: till", "gate: &g till\nalso: *g", "2: YAML aliases are not allowed"),
        ("gate: till", "gate: Till", "1: gate: `Till` is not a name in_lower_case"),
        ("gate: till", "gate:", "1: gate: has no value: write one, or leave the field out"),
        ("gate: till", "gate: !secret till", "1: gate: `!secret` is a YAML tag: put the text in quotes"),
        ("gate: till", "gate: t\x07ll", "1: not YAML: character 0x0007 is not allowed"),
        ("gate: till", "gate: 'till", "41: not YAML: found unexpected end of stream"),
        (
            "  DENY:\n",
            " DENY:\n",
            "37: not YAML: expected <block end>, but found '<block mapping start>': indent the line like its neighbours",
        ),
        ("owner: till@shop.example\n", "", "1: owner: is missing"),
        ("owner: till@shop.example", "owner: m", "4: owner: must have 3 or more characters"),
        (
            "version: 1.0.0",
            "version: 1.0",
            '3: version: `1.0` is neither text nor a plain whole number: numbers are whole, amounts in minor units; text is written "1.0"',
        ),
        ("effective_from: 2020-01-01", "effective_from: 2020-02-30", "5: effective_from: `2020-02-30` is not a date"),
        (
            "effective_from: 2020-01-01",
            "effective_from: soon",
            "5: effective_from: `soon` is not a date like 2026-01-31",
        ),
        (
            "mission: Decide who is paid.",
            "misson: Decide who is paid.",
            "6: misson: is not a known field: did you mean `mission`, which is missing?",
        ),
        ("mission: Decide who is paid.", "mission: ''", "6: mission: must have 1 or more characters"),
        (
            "[PAY, GRANT, TALK, DENY]",
            "[PAY, GRANT, TALK, HOLD, DENY]",
            "7: authority.3: `HOLD` is not one of the kinds",
        ),
        ("[PAY, GRANT, TALK, DENY]", "PAY", "7: authority: must be a list"),
        ("[PAY, GRANT, TALK, DENY]", "[]", "7: authority: must have 1 or more entries"),
        (
            "evidence: letter",
            "evidence: letter, colour: red",
            "8: event.colour: is not a known field: the fields here are evidence, evidence_chars_max, id, key",
        ),
        ("evidence: letter", "evidnce: letter", "8: event.evidnce: is not a known field: did you mean `evidence`?"),
        (
            "scale: 2}\n    draws",
            "scale: 2, stp: 5}\n    draws",
            "21: kinds.PAY.params.amount.stp: is not a known field: did you mean `step`?",
        ),
        (
            "evidence: letter}",
            "evidence: letter, evidence_chars_max: 0}",
            "8: event.evidence_chars_max: must be at least 1",
        ),
        (
            "claim.due: bool",
            "claim.due: float",
            "10: snapshot.claim.due: `float` is not one of bool, int, string, timestamp, fixed(0) to fixed(6), enum(a, b)",
        ),
        ("claim.due: bool", "due: bool", "10: snapshot.due: `due` is not two lower-case names with a dot between"),
        (
            "enum(small, large)",
            "enum()",
            "12: snapshot.claim.size: `enum()` is not one of bool, int, string, timestamp, fixed(0) to fixed(6), enum(a, b)",
        ),
        (
            "fixed(2)",
            "fixed(7)",
            "15: snapshot.account.left: `fixed(7)` is not one of bool, int, string, timestamp, fixed(0) to fixed(6), enum(a, b)",
        ),
        (
            "when: claim.due",
            "when: claim.du",
            "17: when: column 1: `claim.du` is not a declared snapshot field in `claim.du`",
        ),
        ("when: claim.due", "when: claim.minutes", "17: when: expected bool, found int in `claim.minutes`"),
        (
            "when: claim.due",
            "when: has(claim.due)",
            "17: when: column 1: `has` is not a function: only min and max are in `has(claim.due)`",
        ),
        ("when: claim.due", "when: !claim.due", "17: when: `!claim.due` is a YAML tag: put the text in quotes"),
        ("when: claim.due", "when: [claim.due]", "17: when: must be text"),
        (
            '"large"',
            "'lagre'",
            "26: kinds.GRANT.when: column 15: `lagre` is not one of large, small in `claim.size == 'lagre'`",
        ),
        (
            '"large"',
            "large",
            "26: kinds.GRANT.when: column 15: `large` is not a declared snapshot field in `claim.size == large`",
        ),
        (
            "hi: account.left",
            "hi: claim.due",
            "21: kinds.PAY.params.amount.hi: expected int, found bool in `claim.due`",
        ),
        (
            "hi: account.left",
            "hi: 1.5",
            '21: kinds.PAY.params.amount.hi: `1.5` is neither text nor a plain whole number: numbers are whole, amounts in minor units; text is written "1.5"',
        ),
        ("hi: account.left", "top: account.left", "21: kinds.PAY.params.amount.hi: is missing"),
        ("scale: 2}\n    draws", "scale: 7}\n    draws", "21: kinds.PAY.params.amount.scale: must be at most 6"),
        ("scale: 2}\n    draws", "scale: two}\n    draws", "21: kinds.PAY.params.amount.scale: must be a whole number"),
        ("step: 5", "step: 0", "35: kinds.TALK.params.minutes.step: must be at least 1"),
        (
            "step: 5",
            "step: 012",
            '35: kinds.TALK.params.minutes.step: `012` is neither text nor a plain whole number: text is written "012"',
        ),
        ("step: 5", "step: 1e3", "35: kinds.TALK.params.minutes.step: must be a whole number"),
        (
            "{account.left: amount}",
            "{account.left: amuont}",
            "22: kinds.PAY.draws.account.left: `amuont` is neither a parameter nor a fill",
        ),
        (
            "{account.left: amount}",
            "{account.lift: amount}",
            "22: kinds.PAY.draws.account.lift: `account.lift` is not a declared snapshot field",
        ),
        (
            "{account.left: amount}",
            "{account.owner: 1}",
            "22: kinds.PAY.draws.account.owner: is not a number and cannot be drawn from",
        ),
        (
            "{account.left: amount}",
            "{account.slots: amount}",
            "22: kinds.PAY.draws.account.slots: must have the same scale as `amount`",
        ),
        (
            "{account.left: amount}",
            "{account.left: [amount]}",
            "22: kinds.PAY.draws.account.left: must be the name of a parameter or fill, or a whole number",
        ),
        (
            "    spends: amount\n    reasons: [OWED, LATE]",
            "    spends: money\n    reasons: [OWED, LATE]",
            "23: kinds.PAY.spends: `money` is neither a parameter nor a fill",
        ),
        (
            "    spends: amount\n    reasons: [GRANTED]",
            "    spends: hours\n    reasons: [GRANTED]",
            "30: kinds.GRANT.spends: `hours` is neither a parameter nor a fill",
        ),
        (
            'value: "claim.minutes * 100", scale: 2',
            'value: "claim.minutes * 100"',
            "30: kinds.GRANT.spends: must have the same scale as what other kinds spend",
        ),
        ("  GRANT:\n", "  grant:\n", "25: kinds.grant: `grant` is not a code IN_CAPITALS"),
        (
            "    fills:\n      amount:",
            "    params: {amount: {lo: 1, hi: 2}}\n    fills:\n      amount:",
            "25: kinds.GRANT: `amount` is both a parameter and a fill",
        ),
        ("reasons: [GRANTED]", "reasons: []", "31: kinds.GRANT.reasons: must have 1 or more entries"),
        ("spend:\n", "draws_settle_in: moon\nspend:\n", "39: draws_settle_in: must be 'kernel' or 'source'"),
        ("  DENY:\n    reasons: [NOT_OWED]\n", "", "18: kinds: DENY is missing: every contract lets its agent say no"),
        (
            "kinds:\n",
            "refusal: BLOCK\nkinds:\n",
            "19: kinds: BLOCK, which `refusal` names, is missing: every contract lets its agent say no",
        ),
        (
            "kinds:\n",
            "refusal: TALK\nkinds:\n",
            "38: kinds.DENY: is a second refusal: `refusal` names TALK",
        ),
        ("kinds:\n", "refusal: block\nkinds:\n", "18: refusal: `block` is not a code IN_CAPITALS"),
        (
            "    reasons: [NOT_OWED]",
            "    side_effect: true\n    reasons: [NOT_OWED]",
            "37: kinds.DENY: may have only `reasons`: it is the refusal",
        ),
        (
            "  DENY:\n",
            "  ESCALATE:\n    reasons: [HELP]\n  DENY:\n",
            "37: kinds.ESCALATE: must not be declared: every contract has this kind",
        ),
        (
            "    reasons: [NOT_OWED]",
            "    when: claim.due\n    reasons: [NOT_OWED]",
            "37: kinds.DENY: may have only `reasons`: it is the refusal",
        ),
        (
            "spend:\n",
            "spend:\n  - {name: day, window: hour, max_minor: 1}\n",
            "41: spend.1.name: `day` is the name of another limit",
        ),
        ("window: day", "window: week", "40: spend.0.window: must be 'hour' or 'day'"),
        ("max_minor: 100000", "max_minor: -1", "40: spend.0.max_minor: must be at least 0"),
        (
            "max_minor: 100000",
            "max_minor: 100000, per: account.holder",
            "40: spend.0.per: `account.holder` is not a declared snapshot field",
        ),
        (
            "      days: {lo",
            "      action: {lo",
            "34: kinds.TALK.params.action: is reserved: every proposal has such a field",
        ),
        ("spend:\n", "show: {}\nspend:\n", "39: show: names no field: to show all fields, leave `show` out"),
        ("spend:\n", "show: [3]\nspend:\n", "39: show.0: must be a list"),
        (
            "spend:\n",
            "show: claim.size\nspend:\n",
            "39: show: must be a list of fields, or a mapping of fields to labels",
        ),
        (
            "spend:\n",
            'show: {claim.size: "a\\nb"}\nspend:\n',
            r"39: show: `a\nb` is not a label of 1 to 64 printable ASCII characters",
        ),
        (
            "spend:\n",
            "show: {claim.size: 3}\nspend:\n",
            '39: show.claim.size: must be text: YAML reads `3` as a number: write "3"',
        ),
        ("spend:\n", "show: [claim.colour]\nspend:\n", "39: show: `claim.colour` is not a declared snapshot field"),
        (
            "spend:\n",
            "drift: {fields: {claim.minutes: loose}}\nspend:\n",
            "39: drift.fields.claim.minutes: must be strict, {abs: N} or {pct: N}",
        ),
        (
            "spend:\n",
            "drift: {fields: {claim.minutes: {abs: 1, pct: 1}}}\nspend:\n",
            "39: drift.fields.claim.minutes: must be strict, {abs: N} or {pct: N}",
        ),
        (
            "spend:\n",
            "drift: {fields: {claim.minutes: {pct: 101}}}\nspend:\n",
            "39: drift.fields.claim.minutes.pct: must be at most 100",
        ),
        (
            "spend:\n",
            "drift: {fields: {claim.size: {abs: 1}}}\nspend:\n",
            "39: drift.fields.claim.size: is not a number and can only be strict",
        ),
        (
            "spend:\n",
            "drift: {fields: {claim.color: strict}}\nspend:\n",
            "39: drift.fields.claim.color: `claim.color` is not a declared snapshot field",
        ),
        ("spend:\n", "drift: {age_ms_max: 0}\nspend:\n", "39: drift.age_ms_max: must be at least 1"),
        (
            "spend:\n",
            "escalation: {always: [PAY, HOLD]}\nspend:\n",
            "39: escalation.always.1: `HOLD` is not one of the kinds",
        ),
        (
            "spend:\n",
            "escalation: {confidence_min_pct: 0.5}\nspend:\n",
            '39: escalation.confidence_min_pct: `0.5` is neither text nor a plain whole number: numbers are whole, amounts in minor units; text is written "0.5"',
        ),
        ("spend:\n", "retry: {attempts_max: 11}\nspend:\n", "39: retry.attempts_max: must be at most 10"),
        (
            "spend:\n",
            "budget: {ttl_ms: 1000000000000000000000}\nspend:\n",
            '39: budget.ttl_ms: `1000000000000000000000` is neither text nor a plain whole number: text is written "1000000000000000000000"',
        ),
        ("spend:\n", "budget: {ttl_ms: 100000000}\nspend:\n", "39: budget.ttl_ms: must be at most 86400000"),
        ("spend:\n", "budget: {ttl_ms: yes}\nspend:\n", "39: budget.ttl_ms: must be a whole number"),
        ("spend:\n", "? [a]\n: b\nspend:\n", "39: a key must be text"),
        ("spend:\n", "---\nspend:\n", "39: not YAML: but found another document"),
        ("  - {name", "\t- {name", "40: not YAML: found character '\\t' that cannot start any token"),
        (
            "{id: event_id,",
            "{id: saga,",
            "8: event.id: must not be `saga`: each step of a saga has that field",
        ),
        (
            "kinds:\n",
            "sagas: {BOTH: {steps: [PAY, GRANT]}}\nkinds:\n  REVERT: {reasons: [OWED]}\n",
            "20: kinds.REVERT: is reserved: in a saga it names a way to compensate",
        ),
        ("spend:\n", "x: [[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]]\nspend:\n", "39: nested deeper than 16"),
    ],
)
def test_a_broken_contract_says_where_and_why(old: str, new: str, message: str):
    assert f"till.yaml:{message}" == fault(world.edited((old, new)))


def test_a_field_that_is_wrong_is_refused_with_where_its_meaning_is_written():
    with pytest.raises(ContractError) as refused:
        parse_contract(world.CONTRACT + "colour: red\n")
    assert "contract.md of the documentation says what each field means" == refused.value.hint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "till.yaml:1: the file is empty"),
        ("# nothing", "till.yaml:1: the file is empty"),
        ("till", "till.yaml:1: must be a mapping"),
        ("[1]", "till.yaml:1: must be a mapping"),
        ("{" * 60_000, "till.yaml:1: nested deeper than 16"),
        ("[" * 60_000, "till.yaml:1: nested deeper than 16"),
        ("- " * 30_000, "till.yaml:1: nested deeper than 16"),
        ("x" * (FILE_BYTES_MAX + 1), f"till.yaml:1: larger than {FILE_BYTES_MAX} characters"),
        ("gate: \ud800", "till.yaml:1: not YAML: character 0xd800 is not allowed"),
        ("a: 1\nb: " + "9" * 5000, f"till.yaml:2: b: `{'9' * 40}` is neither text nor a plain whole number"),
    ],
    ids=["empty", "comment", "word", "list", "braces", "brackets", "dashes", "long", "surrogate", "digits"],
)
def test_what_is_no_contract_at_all_is_refused_in_a_moment(text: str, message: str):
    began = time.perf_counter()
    assert message == fault(text)
    assert time.perf_counter() - began < 5


def test_the_first_mistake_of_the_file_is_the_one_that_is_told():
    twice = world.edited(("max_minor: 100000", "max_minor: many"), ("gate: till", "gate: Till"))
    assert "till.yaml:1: gate: `Till` is not a name in_lower_case" == fault(twice)


def test_a_truth_value_and_a_number_are_expressions_too():
    contract = world.contract(("when: claim.due", "when: true"), ("hi: account.left", "hi: 12"))
    assert ("true", "12") == (contract.when, contract.kinds["PAY"].params["amount"].hi)


def test_an_expression_of_a_kind_without_authority_is_checked_all_the_same():
    unused = world.edited(("[PAY, GRANT, TALK, DENY]", "[PAY, DENY]"), ("hi: claim.minutes", "hi: claim.due"))
    assert "till.yaml:35: kinds.TALK.params.minutes.hi: expected int, found bool in `claim.due`" == fault(unused)


def test_an_expression_that_is_refused_names_where_expressions_are_described():
    with pytest.raises(ContractError, match="expected int, found bool") as refused:
        world.contract(("hi: claim.minutes", "hi: claim.due"))
    assert "`Types and expressions`" in refused.value.hint


def test_a_loaded_contract_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        world.contract().gate = "other"


def test_what_is_shown_is_read_back_in_its_order_and_under_its_labels():
    shown = world.contract(("spend:\n", "show: {claim.size: size, account.left: left}\nspend:\n"))
    assert (("claim.size", "size"), ("account.left", "left")) == shown.show
    assert shown == Contract.model_validate_json(shown.model_dump_json())


def test_a_contract_names_its_own_refusal_and_what_has_a_side_effect():
    named = world.contract(
        ("TALK, DENY]", "TALK]"),
        ("  DENY:\n", "  BLOCK:\n"),
        ("kinds:\n", "refusal: BLOCK\nkinds:\n"),
        ("    reasons: [UNCLEAR]", "    side_effect: true\n    reasons: [UNCLEAR]"),
    )
    usual = world.contract()
    assert ("DENY", False) == (usual.refusal, "TALK" in usual.orders)
    assert ("BLOCK", True) == (named.refusal, "TALK" in named.orders)
    assert ("BLOCK", "ESCALATE") == Rules(named).envelope(world.fields(claim_due=False)).names
    assert {"refusal", "side_effect"}.isdisjoint((*usual.model_dump(), *usual.model_dump()["kinds"]["TALK"]))
