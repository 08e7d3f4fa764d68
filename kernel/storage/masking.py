"""What must be in no record is taken out of foreign text: card numbers, bank accounts (IBAN), API tokens. Pure, linear time.

Cards: ISO/IEC 7812, 13 to 19 digits of which the last is Luhn's. IBANs: ISO 13616, modulo 97. A number is known by its
check digits, in whatever groups and with whatever blanks and dashes it is written; a token by how its kind begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import accumulate

CARD, IBAN, TOKEN = "[card]", "[IBAN]", "[token]"

CARD_DIGITS_MIN, CARD_DIGITS_MAX = 13, 19
TOKEN_CHARS_MIN = 16

# Blanks, dashes, dots and what cannot be seen: what people and programs put between the groups of a number.
_BETWEEN = r"[\s._\-\u00ad\u2010-\u2015\u2212\u200b-\u200f\u2060\ufeff]{0,3}"
_DIGITS = re.compile(rf"\d(?:{_BETWEEN}\d)+")
_GROUP = re.compile(r"\d+")
_IBAN_GOES_ON = re.compile(rf"{_BETWEEN}([A-Za-z0-9])")

# The register of ISO 13616, and the countries that have such numbers outside of it, by length.
_IBAN_COUNTRIES = {
    15: "NO",
    16: "BE",
    18: "DK FI FK FO GL NL SD",
    19: "MK SI",
    20: "AT BA EE KZ LT LU MN XK",
    21: "CH HR LI LV",
    22: "BG BH CR DE GB GE IE ME RS VA",
    23: "AE GI IL IQ OM SO TL",
    24: "AD CZ ES MD PK RO SA SE SK TN VG",
    25: "AO CV GW LY MZ PT ST",
    26: "DZ IR IS TR",
    27: "BI CF CG CM DJ FR GA GQ GR IT KM MC MG MR SM TD",
    28: "AL AZ BF BJ BY CI CY DO GT HN HU LB MA ML NE NI PL SN SV TG",
    29: "BR EG PS QA UA",
    30: "JO KW MU YE",
    31: "MT SC",
    32: "LC",
    33: "RU",
}
_IBAN_CHARS = {country: chars for chars, countries in _IBAN_COUNTRIES.items() for country in countries.split()}
_IBAN_BEGINS = re.compile(rf"([A-Za-z]{{2}}){_BETWEEN}([0-9]){_BETWEEN}([0-9])")

_TOKEN_CHARS = r"[A-Za-z0-9_\-.+/=~]{16,}"  # noqa: S105  an alphabet
_TOKEN_RUN = re.compile(_TOKEN_CHARS)
_TOKEN_BEGINS = re.compile(
    r"(?<![A-Za-z0-9])(?:sk-|[srp]k_(?:live|test)_|whsec_|gh[opusr]_|github_pat_|glpat-|xox[a-z]-|xapp-|AKIA|ASIA|AIza"
    r"|ya29\.|GOCSPX-|eyJ|hf_|npm_|pypi-|SG\.|shp(?:at|ca|pa|ss)_|dop_v1_)"
)
_BEARER = re.compile(rf"(\bbearer\s{{1,8}})({_TOKEN_CHARS})", re.IGNORECASE)
_DIGIT = re.compile(r"[0-9]")

_Span = tuple[int, int]


def mask(text: str) -> str:
    """Return `text` with what is or may be a card number, an IBAN or an API token replaced. Masked again, it is the same."""
    text = _without_tokens(text)  # first: there are digits in them, too
    text = _replaced(text, _ibans(text), IBAN)
    return _without_tokens(_replaced(text, _cards(text), CARD))  # and last: one may have stuck to a number


def _without_tokens(text: str) -> str:
    return _TOKEN_RUN.sub(_without_token, _BEARER.sub(_without_bearer, text))


def _replaced(text: str, spans: Iterable[_Span], word: str) -> str:
    """Put `word` in the place of all that `spans` cover; they come in the order in which they begin."""
    kept: list[str] = []
    end = 0
    for first, last in spans:
        if first >= end:
            kept += [text[end:first], word]
        end = max(end, last)
    return "".join([*kept, text[end:]])


def _without_bearer(found: re.Match[str]) -> str:
    return f"{found[1]}{TOKEN}" if _DIGIT.search(found[2]) else found[0]


def _without_token(found: re.Match[str]) -> str:
    """Return a run of characters as tokens have them, cut where a token begins. Words joined by dashes have no digit."""
    run = found[0]
    last = max((digit.start() for digit in _DIGIT.finditer(run)), default=-1)
    for begins in _TOKEN_BEGINS.finditer(run):
        if len(run) - begins.start() >= TOKEN_CHARS_MIN and last >= begins.end():
            return f"{run[: begins.start()]}{TOKEN}"
    return run


def _ibans(text: str) -> Iterator[_Span]:
    for begins in _IBAN_BEGINS.finditer(text):
        length = _IBAN_CHARS.get(begins[1].upper(), 0)
        chars, end = "".join(begins.groups()), begins.end()
        while len(chars) < length and (more := _IBAN_GOES_ON.match(text, end)):
            chars, end = chars + more[1], more.end()
        if len(chars) == length and _is_iban(chars):
            yield begins.start(), end


def _is_iban(chars: str) -> bool:
    """Tell whether the check digits fit, and at least half are digits: words after `is 20` pass by chance, too."""
    digits = sum(char.isdecimal() for char in chars)
    return 2 * digits >= len(chars) and int("".join(str(int(char, 36)) for char in chars[4:] + chars[:4])) % 97 == 1


def _cards(text: str) -> Iterator[_Span]:
    for run in _DIGITS.finditer(text):
        if run.end() - run.start() >= CARD_DIGITS_MIN:
            for first, last in _cards_in(run[0]):
                yield run.start() + first, run.start() + last


def _cards_in(run: str) -> Iterator[_Span]:
    """Yield every piece of 13 to 19 digits, from the beginning of a group to the end of one, that passes Luhn's test."""
    groups = [found.span() for found in _GROUP.finditer(run)]
    digits = [int(char) for first, last in groups for char in run[first:last]]
    counted = [0, *accumulate(last - first for first, last in groups)]  # the digits before each group
    sums = _luhn_sums(digits)
    for at, (first, _) in enumerate(groups):
        for to in range(at, len(groups)):
            begin, end = counted[at], counted[to + 1]
            if end - begin > CARD_DIGITS_MAX:
                break
            sum_of = sums[end % 2]
            if end - begin >= CARD_DIGITS_MIN and digits[begin] and (sum_of[end] - sum_of[begin]) % 10 == 0:
                yield first, groups[to][1]


def _luhn_sums(digits: list[int]) -> tuple[list[int], list[int]]:
    """Return the sums of the first n digits, every second doubled: those with an even index, and those with an odd one.

    The last digit of a number is never doubled: one that ends before an even index has its even ones doubled.
    """
    doubled = [2 * digit - 9 * (digit > 4) for digit in digits]
    even = (two if at % 2 == 0 else one for at, (one, two) in enumerate(zip(digits, doubled, strict=True)))
    odd = (two if at % 2 else one for at, (one, two) in enumerate(zip(digits, doubled, strict=True)))
    return [0, *accumulate(even)], [0, *accumulate(odd)]
