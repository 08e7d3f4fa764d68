"""What must be in no record is masked in foreign text, in whatever spacing; ordinary numbers and words stay."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sds.kernel.storage.vault import CARD, IBAN, TOKEN, mask

# The test numbers that the brands publish, one for each length they have.
CARDS = (
    "4111111111111111 4012888888881881 4222222222222 4917610000000000003",  # Visa: 16, 13, 19
    "5555555555554444 5105105105105100 2223003122003222",  # Mastercard, both ranges
    "378282246310005 371449635398431",  # American Express
    "6011111111111117 6011000990139424",  # Discover
    "30569309025904 38520000023237 36227206271667",  # Diners Club
    "3530111333300000 3566002020360505",  # JCB
    "6200000000000005 6205500000000000004",  # UnionPay
    "6759649826438453 5019717010103742 6304000000000000",  # Maestro, Dankort, Laser
    "2200123456789019",  # Mir
    "9792030000000000",  # Troy
    "135410014004955",  # UATP
)
IBANS = (
    "DE89370400440532013000 GB82WEST12345698765432 FR1420041010050500013M02606 NL91ABNA0417164300 BE68539007547034",
    "NO9386011117947 CH9300762011623852957 ES9121000418450200051332 IT60X0542811101000000123456 AT611904300234573201",
    "MT84MALT011000012345MTLCAST001S PL61109010140000071219812874 SE4550000000058398257466 SA0380000000608010167519",
    "BR1800360305000010009795493C1 AE070331234567890123456 TR330006100519786457841326 LC55HEMM000100010012001200023015",
)
TOKENS = (
    "sk-proj-Abc123def456ghi789jkl",
    "sk_live_4eC39HqLyjWDarjtT1zdp7dc",
    "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "github_pat_11ABCDEFG0abcdefghijkl_mnopqrstuvwxyz0123456789",
    "glpat-xxY1yyZ2zzA3aaB4bbC5",
    "xoxb-123456789012-abcdefghijkl",
    "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyD-9tSrke72PouQMnMX-a7eZSW0jkFMBWY",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz0123456789",
)
ORDINARY = (
    "Flight LH 400 on 2013-01-15 at 10:15, seat 27A, was cancelled.",
    "Ticket 016-2345678901, claim C-00017, gate B12; call +49 30 901820 or (555) 010-9999.",
    "I paid 1,234.56 EUR and 99.00 EUR on 15.01.2013, my account ends in 3000.",
    "4111 1111 1111 1112 is no card: its last digit is wrong",
    "DE88 3704 0044 0532 0130 00 is no account: its check digits are wrong",
    "is 20 euro all I get for this? I want my money back, at least 3 times as much",
    "the risk-assessment-and-desk-booking-task-list-of-the-airline",
    "0000 0000 0000 0000",
    "bearer of this letter: my daughter, who travels alone",
    "",
)
SPACINGS = ("", " ", "-", "  ", " - ", ".", "\u00a0", "\u2013", "\u200b", "\n")
each = st.sampled_from(" ".join(CARDS).split())
account = st.sampled_from(" ".join(IBANS).split())


def spaced(number: str, *groups: int) -> Iterator[str]:
    """Yield a number in every spacing, between groups of each of these sizes."""
    for between, group in product(SPACINGS, groups):
        yield between.join(number[at : at + group] for at in range(0, len(number), group))


@pytest.mark.parametrize("number", " ".join(CARDS).split())
def test_a_card_number_is_masked_in_any_spacing(number: str):
    for written in spaced(number, 1, 3, 4, 6, 20):
        assert f"my card, {CARD}, was charged" == mask(f"my card, {written}, was charged"), written


@pytest.mark.parametrize("number", " ".join(IBANS).split())
def test_an_iban_is_masked_in_any_spacing_and_case(number: str):
    for written in spaced(number, 4, 2, 34):
        for text in (written, written.lower()):
            assert f"pay to {IBAN} please" == mask(f"pay to {text} please"), text


@pytest.mark.parametrize("token", TOKENS)
def test_an_api_token_is_masked_wherever_it_begins(token: str):
    assert f"it is {TOKEN} ok" == mask(f"it is {token} ok")
    assert f'{{"key":"{TOKEN}"}}' == mask(f'{{"key":"{token}"}}')
    assert f"https://x.example/?key={TOKEN}" == mask(f"https://x.example/?key={token}")


def test_what_follows_bearer_is_masked():
    assert f"Authorization: Bearer {TOKEN}" == mask("Authorization: Bearer AbCdEf0123456789.x/y+z==")


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_numbers_and_words_stay(text: str):
    assert text == mask(text)


def test_a_card_number_is_found_beside_other_numbers():
    told = "ticket 12 4111 1111 1111 1111 12/27 and 5555-5555-5555-4444, 3 times"
    assert [] == [part for part in ("4111", "5555") if part in mask(told)]
    assert mask(told).endswith(", 3 times")


def test_digits_of_any_script_are_digits():
    assert CARD == mask("\uff14\uff11\uff11\uff11" + "\uff11" * 12)


def luhn_digit(digits: str) -> str:
    doubled = (int(c) * 2 if at % 2 == 0 else int(c) for at, c in enumerate(reversed(digits)))
    return str(-sum(n - 9 if n > 9 else n for n in doubled) % 10)


@given(st.from_regex(r"[1-9][0-9]{11,17}", fullmatch=True), st.data())
def test_every_number_of_13_to_19_digits_with_luhns_digit_is_masked_in_any_groups(digits: str, data: st.DataObject):
    """Written by another hand than the one that looks for it."""
    number = digits + luhn_digit(digits)
    gaps = data.draw(st.lists(st.sampled_from(["", "", *SPACINGS]), min_size=len(number) - 1, max_size=len(number) - 1))
    written = "".join(f"{a}{b}" for a, b in zip(number, [*gaps, ""], strict=True))
    assert f"x {CARD} y" == mask(f"x {written} y")


@given(st.from_regex(r"[1-9][0-9]{12,18}", fullmatch=True))
def test_a_number_without_luhns_digit_stays(number: str):
    wrong = number[:-1] + str((int(luhn_digit(number[:-1])) + 1) % 10)
    assert f"number {wrong}." == mask(f"number {wrong}.")


pieces = st.one_of(
    each, account, st.sampled_from(TOKENS), st.text(max_size=12), st.sampled_from([*SPACINGS, "1", "AB12"])
)


@given(st.lists(pieces, max_size=12).map("".join))
def test_masked_again_a_text_is_the_same(text: str):
    assert mask(text) == mask(mask(text))


@given(st.text(), each, st.text())
def test_no_text_around_it_hides_a_card_number_that_stands_alone(before: str, number: str, after: str):
    assert number not in mask(f"{before} | {number} | {after}")


@pytest.mark.parametrize(
    "text",
    ["1 ", "4111111111111111 ", "eyJ", "AA11", "DE89 ", "bearer ", "sk-", "sk_live_1", "- ", "1-", "a", "AA 1 1 "],
)
def test_a_text_of_64_kib_takes_moments_whatever_it_is(text: str):
    began = time.perf_counter()
    mask(text * (64 * 1024 // len(text)))
    assert time.perf_counter() - began < 5
