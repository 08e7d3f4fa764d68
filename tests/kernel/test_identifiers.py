"""Identifiers from outside: what looks the same is the same, or is refused."""

from __future__ import annotations

import re
import sys
import unicodedata
from enum import Enum

import pytest

from sds.kernel.canonical import ID_CHARS_MAX, check_identifier, is_seen, person
from sds.kernel.errors import EventError
from sds.kernel.flow.intake import read_event
from sds.kernel.human.review import HumanReview, Resolution
from sds.kernel.registry import registry
from tests.kernel.durable import COMPENSATION_MINOR, World, compensate, escalate, if_permitted, refund, see_through

PRINTABLE = f"`id` is not 1 to {ID_CHARS_MAX} printable characters"
SPELLING = "`id` has blanks around it, or is not in Unicode's composed form (NFC)"
GOOD = [
    "C1",
    "a b  c",
    "t\u00c9 1",
    "\u0416\u0443\u043a-7",
    "\u6771\u4eac/12",
    "\u0e01\u0e33",
    "\uff21",
    "x" * ID_CHARS_MAX,
]
REFUSED = {
    "": PRINTABLE,
    "x" * (ID_CHARS_MAX + 1): PRINTABLE,
    "E\n1": PRINTABLE,
    "E\u00001": PRINTABLE,
    "E\udcff": PRINTABLE,
    "E\u00a01": PRINTABLE,  # a blank that does not break
    "E\u00ad1": PRINTABLE,  # soft hyphen
    "E\u200b1": PRINTABLE,  # zero width
    "E\u200d1": PRINTABLE,
    "E\ufeff1": PRINTABLE,
    "\u202eE1": PRINTABLE,  # right to left
    "\u2066E1": PRINTABLE,
    "E1\U000e0041": PRINTABLE,  # tag
    "E1\ufe0f": "`id` has a character that cannot be seen, U+FE0F",
    "E1\U000e0100": "`id` has a character that cannot be seen, U+E0100",
    "E\u034f1": "`id` has a character that cannot be seen, U+034F",
    "\u3164": "`id` has a character that cannot be seen, U+3164",
    "E\u28001": "`id` has a character that cannot be seen, U+2800",
    " E1": SPELLING,
    "E1 ": SPELLING,
    " ": SPELLING,
    "E\u0301": SPELLING,
    "\u212b": SPELLING,
    "E\u0661": "`id` has a digit that is not 0 to 9, U+0661",
    "E\uff11": "`id` has a digit that is not 0 to 9, U+FF11",
    "E\u00b2": "`id` has a digit that is not 0 to 9, U+00B2",
    "E\U0001d7cf": "`id` has a digit that is not 0 to 9, U+1D7CF",
}


@pytest.mark.parametrize("text", GOOD)
def test_an_identifier_keeps_its_letters_their_case_and_the_blanks_within(text: str):
    check_identifier("id", text)


@pytest.mark.parametrize(("text", "message"), REFUSED.items(), ids=map(ascii, REFUSED))
def test_what_is_no_identifier_is_refused_in_one_line(text: str, message: str):
    with pytest.raises(EventError) as caught:
        check_identifier("id", text)
    assert message == str(caught.value)


def test_nothing_that_is_named_as_unseen_passes():
    unseen = re.compile(
        "VARIATION SELECTOR|(HANGUL|CHOSEONG|JUNGSEONG|SCRIPT) FILLER|GRAPHEME JOINER|ZERO WIDTH|VOWEL INHERENT"
        "|INVISIBLE|PATTERN BLANK|NULL NOTEHEAD|^TAG |RIGHT-TO-LEFT"
    )
    names = [unicodedata.name(char, "") for char in map(chr, range(sys.maxunicode + 1)) if is_seen(char)]
    assert [] == [name for name in names if unseen.search(name)]


def test_no_digit_but_0_to_9_passes():
    digits = [c for c in map(chr, range(sys.maxunicode + 1)) if unicodedata.digit(c, None) is not None]
    passed = []
    for digit in digits:
        try:
            check_identifier("id", digit)
        except EventError:
            continue
        passed.append(digit)
    assert list("0123456789") == passed


@pytest.mark.parametrize("field", ["claim_id", "ticket_id"])
@pytest.mark.parametrize("other", [" {}", "{} ", "{}\ufe0f", "{}\u0301"])
def test_an_event_spelled_in_two_ways_pays_once(world: World, field: str, other: str):
    said = {"claim_id": "CE", "ticket_id": "TE", "text": "please"}
    again = {**said, field: other.format(said[field])}
    world.tickets.put("TE")
    world.tickets.put(again["ticket_id"])  # a source that answers both
    world.decide(refund(), "CE", "TE")
    with pytest.raises(EventError):
        see_through(world.kernel, read_event(world.contract, again), refund())
    assert 1 == len(world.rail.paid())


class Ticket(str, Enum):  # noqa: UP042  a StrEnum formats as its text
    """As many programs name their texts: equal to the text, and formatted as `Ticket.FIRST`."""

    FIRST = "T1"


def test_a_key_of_an_enum_draws_from_what_its_text_draws_from(world: World):
    for name, key in (("C1", Ticket.FIRST), ("C2", "T1")):
        world.decide(if_permitted(compensate, "COMPENSATE"), name, key)
    assert [("T1", "COMPENSATE", COMPENSATION_MINOR)] == [row[1:] for row in world.rail.paid()]


def test_an_event_holds_texts_and_nothing_that_equals_them(world: World):
    event = world.event(Ticket.FIRST, Ticket.FIRST, Ticket.FIRST)
    assert {str} == {type(event.id), type(event.key), type(event.evidence)}


def test_a_user_is_named_in_one_spelling():
    assert ["Zo\u00eb K"] * 3 == [person(text, 200) for text in ("Zoe\u0308 K", " Zo\u00eb\n K", "Zo\u00eb\u034f K")]


def test_whoever_acts_is_recorded_in_one_spelling(world: World):
    case = world.decide(escalate).dfid
    HumanReview(world.kernel, now_ms=world.clock).resolve(case, Resolution("ABORT", "Zoe\u0308\u200b", "looked"))
    registry.set_halted(world.store, True, by="Zoe\u0308", reason="x", now_ms=world.clock())
    registry.transition(
        world.store, "claims-agent", "SUSPENDED", by="operator", reason="x", now_ms=world.clock(), who="Zoe\u0308"
    )
    assert ["Zo\u00eb"] == world.column("SELECT who FROM human_decisions")
    bodies = world.column("SELECT body FROM ledger WHERE kind IN ('HUMAN', 'HALT', 'AGENT') ORDER BY idx DESC LIMIT 2")
    assert all("Zo\u00eb" in body for body in bodies)
