"""There is one way to write a proposal, and reading it is strict, total and quick."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.kernel.envelope.proposal import PARAMS_MAX, PROPOSAL_BYTES_MAX, Proposal, parse_proposal, write_proposal

REF = "ab" * 32
HEAD, TAIL = '{"action":"PAY","params":{', f'}},"reason":"OWED","context_ref":"{REF}"}}'
BARE = '{"action":"PAY"' + TAIL[1:]
NO_START = 'does not begin with {"action":"<KIND>" or a rationale before it'
CODES = st.from_regex(r"[A-Z][A-Z0-9_]{0,63}", fullmatch=True)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,63}", fullmatch=True)
NUMBERS = st.from_regex(r"-?[0-9][0-9.]{0,31}", fullmatch=True)
PROPOSALS = st.builds(
    Proposal,
    action=CODES,
    params=st.dictionaries(NAMES, NUMBERS, max_size=PARAMS_MAX).map(lambda d: tuple(d.items())),
    reason_code=CODES,
    context_ref=st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    rationale=st.none() | st.from_regex(r"[ !#-\[\]-~]{0,80}", fullmatch=True),
)


@given(PROPOSALS)
def test_what_is_written_is_read_back(proposal: Proposal):
    assert proposal == parse_proposal(write_proposal(proposal))


def test_a_long_rationale_is_read():
    whole = Proposal("PAY", (), "OWED", REF, "x" * 60_000)
    assert whole == parse_proposal(write_proposal(whole))


@given(
    st.binary(max_size=300)
    | st.builds(
        lambda p, cut, extra: write_proposal(p)[:cut] + extra, PROPOSALS, st.integers(0, 400), st.binary(max_size=20)
    )
)
def test_whatever_is_read_was_written_in_the_one_form(data: bytes):
    found = parse_proposal(data)
    assert isinstance(found, str) or write_proposal(found) == data


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"", NO_START),
        (b'{"action": "PAY","reason":', NO_START),
        (b'{"params":{},"action":"PAY"', NO_START),
        (HEAD + TAIL, "byte 26: expected a parameter"),
        (BARE.replace(",", ',"params":null,', 1), 'byte 15: expected ,"params":{ or ,"reason":"<CODE>"'),
        (BARE.replace(",", ",,", 1), 'byte 15: expected ,"params":{ or ,"reason":"<CODE>"'),
        (BARE.replace("}", ',"params":{}}'), 'byte 31: expected ,"context_ref":"<64 hex digits>"}'),
        (f'{HEAD}"amount":"250"{TAIL}', "byte 26: expected a parameter"),
        (f'{HEAD}"amount":true{TAIL}', "byte 26: expected a parameter"),
        (f'{HEAD}"amount":NaN{TAIL}', "byte 26: expected a parameter"),
        (f'{HEAD}"amount":1e400{TAIL}', "byte 36: expected a parameter or }"),
        (f'{HEAD}"amount":1,"amount":2{TAIL}', "a parameter appears twice"),
        (f'{HEAD}"amount":1,{TAIL}', "byte 36: expected a parameter or }"),
        (f'{HEAD},"amount":1{TAIL}', "byte 26: expected a parameter"),
        (f'{HEAD}"amount":{"9" * 34}{TAIL}', "byte 67: expected a parameter or }"),
        (HEAD + ",".join(f'"p{i}":1' for i in range(17)) + TAIL, "more than 16 parameters"),
        (f'{HEAD}"amount":1{TAIL.replace("reason", "reason_code")}', 'byte 37: expected ,"reason":"<CODE>"'),
        (BARE.replace("ab", "AB", 1), 'byte 31: expected ,"context_ref":"<64 hex digits>"}'),
        (BARE.replace(',"context', ',"rationale":"a","context'), 'byte 31: expected ,"context_ref":"<64 hex digits>"}'),
        (BARE.replace("{", '{"rationale":"a\\nb",', 1), NO_START),
        (BARE.replace(',"context', ',"confidence":1,"context'), 'byte 31: expected ,"context_ref":"<64 hex digits>"}'),
        (BARE + "\n", "byte 113: more bytes after the end"),
        (BARE + HEAD, "byte 113: more bytes after the end"),
        ("\ufeff" + BARE, NO_START),
    ],
)
def test_bytes_that_leave_the_form_are_a_fault_that_says_where(data: bytes | str, fault: str):
    assert fault == parse_proposal(data.encode() if isinstance(data, str) else data)


def test_a_proposal_over_the_limit_is_not_read_at_all():
    assert f"the proposal has {10**7} bytes, more than {PROPOSAL_BYTES_MAX}" == parse_proposal(b"[" * 10**7)


def test_the_worst_bytes_under_the_limit_take_linear_time():
    full = PROPOSAL_BYTES_MAX - 200
    for middle in (b"9" * full, b'"a":1,' * (full // 6), b'{"a":' * (full // 5), b"." * full):
        began = time.perf_counter()
        parse_proposal(HEAD.encode() + middle + TAIL.encode())
        assert time.perf_counter() - began < 0.1
