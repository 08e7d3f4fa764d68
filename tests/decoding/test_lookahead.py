"""What may be chosen next is read along: fewer passes, the same decision."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sds.decoding.decoder import Decoded, Mode, deciding
from sds.decoding.lookahead import SHOWN_MAX, numbers_shown
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope, KindBound, envelope_of
from sds.kernel.errors import ModelError
from sds.models.cache.prefix_cache import check_fits
from sds.models.protocol import Row
from tests.decoding.small_backend import Disturbed, HashBackend, matcher_of, together
from tests.scale import scale, seeded
from tests.strategies import random_envelope

PROMPT = [[5, 7], [6]]
AHEAD = 64
NUMBERS = re.compile(r"(?<=:)-?[0-9.]+")
STRANGE = [
    "0",
    "-0",
    "1",
    "-1",
    "00",
    "007",
    "0.0",
    "12.",
    "9" * 30,
    "9" * 3000,
    "\u0661",
    "1e5",
    "--1",
    "",
    ".",
    "-",
    "x",
]
AMOUNT = Bound(0, 99_999, 1, 0, 2)
PAYMENT = replace(envelope_of([]), kinds=(KindBound("PAY", ("YES",), (("amount", AMOUNT),)),))


def decided(
    backend: HashBackend,
    envelope: DecisionEnvelope,
    mode: Mode = "greedy",
    forks_max: int = 63,
    shown: Sequence[str] = (),
) -> Decoded:
    matcher = matcher_of(backend, envelope)
    run = deciding(backend, 0, PROMPT, matcher, tokens_max=400, mode=mode, forks_max=forks_max, shown=shown)
    (found,) = together(backend, [run])
    assert 0 == backend.forks_held
    assert isinstance(found, Decoded), found
    return found


def without_passes(found: Decoded) -> Decoded:
    return replace(found, passes=0, rows=())


@pytest.mark.parametrize("mode", ["greedy", "exact-kinds", "exact"])
def test_reading_ahead_decides_the_same_with_the_same_probabilities(mode: Mode):
    rng = seeded(31)
    fewer = 0
    for seed in range(scale(30, 2000)):
        envelope = random_envelope(rng.randint)
        plain = decided(HashBackend(seed), envelope, mode)
        ahead = decided(HashBackend(seed, lookahead_tokens_max=rng.choice([3, 12, AHEAD])), envelope, mode)
        assert without_passes(plain) == without_passes(ahead)
        assert plain.passes >= ahead.passes
        fewer += plain.passes > ahead.passes
    assert fewer > 0


def test_a_number_takes_half_the_passes():
    plain, ahead = (decided(HashBackend(3, lookahead_tokens_max=tokens), PAYMENT) for tokens in (0, AHEAD))
    assert plain.data == ahead.data
    assert plain.passes // 2 <= ahead.passes <= plain.passes // 2 + 1 < plain.passes


@pytest.mark.parametrize("mode", ["greedy", "exact-kinds", "exact"])
def test_numbers_that_the_prompt_shows_change_no_decision(mode: Mode):
    rng = seeded(36)
    fewer = more = 0
    for seed in range(scale(30, 3000)):
        envelope, forks_max = random_envelope(rng.randint), rng.randint(3, 20)
        plain = decided(HashBackend(seed), envelope, mode)
        written = NUMBERS.findall(plain.data.decode())
        near = [text[:-1] + rng.choice("0123456789") for text in written]
        shown = [*rng.sample([*written, *near], rng.randint(0, 2 * len(written))), *rng.sample(STRANGE, 3)]
        backend = HashBackend(seed, lookahead_tokens_max=rng.choice([3, 12, AHEAD]))
        found = decided(backend, envelope, mode, forks_max, rng.sample(shown, len(shown)))
        assert without_passes(plain) == without_passes(found)
        assert mode != "greedy" or plain.passes >= found.passes  # the others use forks for more
        assert forks_max >= backend.forks_held_max
        ahead = decided(HashBackend(seed, lookahead_tokens_max=backend.lookahead_tokens_max), envelope, mode, forks_max)
        fewer += found.passes < ahead.passes
        more += found.passes > ahead.passes
    assert fewer > more if mode != "exact" else fewer == more == 0


def test_a_number_that_is_copied_takes_one_pass():
    plain = decided(HashBackend(3), PAYMENT)
    (amount,) = NUMBERS.findall(plain.data.decode())
    found = decided(HashBackend(3, lookahead_tokens_max=AHEAD), PAYMENT, shown=["1.5", "7", amount])
    assert without_passes(plain) == without_passes(found)
    assert 1 == found.passes < plain.passes


def test_of_few_amounts_the_one_that_is_copied_takes_one_pass_too():
    """Where every amount could be listed, its digits are a finite choice."""
    kind = KindBound("PAY", ("NO", "YES"), (("amount", Bound(1_000, 15_000, 500, 0, 2)),))
    plain = decided(HashBackend(3), replace(PAYMENT, kinds=(kind,)))
    (amount,) = NUMBERS.findall(plain.data.decode())
    found = decided(HashBackend(3, lookahead_tokens_max=AHEAD), replace(PAYMENT, kinds=(kind,)), shown=["7", amount])
    assert without_passes(plain) == without_passes(found)
    assert 1 == found.passes < plain.passes


def test_of_two_numbers_that_are_copied_each_takes_a_pass_with_all_that_follows_it():
    amounts = (("a", AMOUNT), ("b", AMOUNT))
    envelope = replace(envelope_of([]), kinds=(KindBound("PAY", ("NO", "YES"), amounts),))
    plain = decided(HashBackend(3), envelope)
    found = decided(HashBackend(3, lookahead_tokens_max=AHEAD), envelope, shown=NUMBERS.findall(plain.data.decode()))
    assert without_passes(plain) == without_passes(found)
    assert 2 == found.passes


@pytest.mark.parametrize("mode", ["greedy", "exact-kinds", "exact"])
def test_nothing_is_read_beyond_what_may_be_written(mode: Mode):
    """Or the pass would fail, and with it all who share it."""
    rng = seeded(37)
    for seed in range(scale(3, 300)):
        envelope = random_envelope(rng.randint)
        shown = NUMBERS.findall(decided(HashBackend(seed), envelope).data.decode())
        for room in range(1, 120, rng.randint(3, 9)):
            ends = []
            for ahead, numbers in ((0, ()), (AHEAD, ()), (AHEAD, shown)):
                backend = Narrow(seed, room, ahead)
                matcher = matcher_of(backend, envelope)
                run = deciding(backend, 0, PROMPT, matcher, tokens_max=room, mode=mode, shown=numbers)
                ends += together(backend, [run])
            assert {ModelError} == {*map(type, ends)} or 1 == len(
                {end.data for end in ends if isinstance(end, Decoded)}
            )
            assert {"TOKEN_BUDGET_EXCEEDED"} >= {end.reason_code for end in ends if isinstance(end, ModelError)}


class Narrow(HashBackend):
    """Has a context just large enough for the prompt and so many tokens more."""

    def __init__(self, seed: int, room: int, lookahead_tokens_max: int) -> None:
        super().__init__(seed, lookahead_tokens_max=lookahead_tokens_max)
        self.context_tokens_max = sum(map(len, PROMPT)) + room

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        for row in rows:
            check_fits(len(self.held[row.slot]) + len(row.tokens), self.context_tokens_max)
        return super().run(rows)


def test_a_number_copied_in_part_is_gone_on_with_where_it_parts():
    plain = decided(HashBackend(3), PAYMENT)
    (amount,) = NUMBERS.findall(plain.data.decode())
    passes = []
    for same in range(len(amount)):
        other = amount[:same] + "".join("." if char == "." else str(9 - int(char)) for char in amount[same:])
        found = decided(HashBackend(3, lookahead_tokens_max=AHEAD), PAYMENT, shown=[other])
        assert without_passes(plain) == without_passes(found)
        passes.append(found.passes)
    assert sorted(passes, reverse=True) == passes
    assert passes[0] > passes[-1]


NUMBERED = replace(PAYMENT, kinds=(KindBound("DENY", ("NO", "YES")), *PAYMENT.kinds))
KINDS = replace(envelope_of([]), kinds=tuple(KindBound(name, ("NO", "YES")) for name in ("DENY", "PAY", "WAIT")))


@pytest.mark.parametrize(("mode", "passes"), [("greedy", 1), ("exact-kinds", 1), ("exact", 2)])
def test_kinds_that_are_read_with_what_they_force_cost_one_pass_also_when_they_are_compared_as_wholes(
    mode: Mode, passes: int
):
    """In `exact` the reasons are compared as lookahead_alternatives, too, which is the second pass."""
    plain, found = (decided(HashBackend(3, lookahead_tokens_max=tokens), KINDS, mode) for tokens in (0, 2 * AHEAD))
    assert without_passes(plain) == without_passes(found)
    assert passes == found.passes < plain.passes


def test_kinds_that_do_not_fit_with_what_they_force_are_compared_without_it():
    """The pass that reads the case has their probabilities; what is forced, and the reason, take the second."""
    plain, found = (decided(HashBackend(3, lookahead_tokens_max=tokens), KINDS, "exact-kinds") for tokens in (0, 12))
    assert without_passes(plain) == without_passes(found)
    assert 2 == found.passes


def test_a_second_number_has_half_the_room():
    (amount,) = NUMBERS.findall(decided(HashBackend(3), PAYMENT).data.decode())
    room = len(f"{amount}7.25") + 2  # a byte a token
    rows = [
        decided(HashBackend(3, lookahead_tokens_max=tokens), PAYMENT, shown=[amount, "7.25"]).rows[0][1]
        for tokens in (len(amount), room, 2 * room)
    ]
    assert [2, 2, 3] == rows


@pytest.mark.parametrize(("envelope", "share"), [(KINDS, 1), (NUMBERED, 2)])
def test_kinds_have_half_the_room_where_one_of_them_leads_to_a_number(envelope: DecisionEnvelope, share: int):
    (pending, _), *_ = decided(HashBackend(3), envelope).rows
    firsts = ((room, decided(HashBackend(3, lookahead_tokens_max=room), envelope).rows[0]) for room in range(1, 400))
    room, (tokens, rows) = next((room, first) for room, first in firsts if first[1] > 1)
    assert share * (tokens - rows * pending) == room


@pytest.mark.parametrize("mode", ["greedy", "exact-kinds"])
def test_kinds_one_of_which_leads_to_a_number_cost_one_pass_where_the_number_is_copied(mode: Mode):
    plain = decided(HashBackend(3), NUMBERED, mode)
    (amount,) = NUMBERS.findall(plain.data.decode())
    rooms = (0, ()), (AHEAD // 4, [amount]), (2 * AHEAD, ()), (2 * AHEAD, [amount, "7.25"])
    found = [decided(HashBackend(3, lookahead_tokens_max=room), NUMBERED, mode, shown=shown) for room, shown in rooms]
    assert 1 == found[3].passes < min(each.passes for each in found[:3])
    assert [without_passes(plain)] * 4 == [without_passes(each) for each in found]


def test_a_number_of_one_token_that_ends_the_decision_is_not_read_behind_its_kind():
    kinds = KindBound("DENY", ("NO",)), KindBound("PAY", ("YES",), (("a", Bound(0, 9, 1, 0, 0)),))
    for seed in range(9):
        plain, found = (
            decided(HashBackend(seed, lookahead_tokens_max=tokens), replace(PAYMENT, kinds=kinds), shown=["7"])
            for tokens in (0, 2 * AHEAD)
        )
        assert without_passes(plain) == without_passes(found)


def test_numbers_are_found_in_the_case_before_what_never_changes():
    texts = ("From 50.00 on.", "refundable 123.39\npermitted -2 to 99.95, 7", "Claim: 99.95 or 1.2.3 or 50.00!")
    assert ("123.39", "-2", "99.95", "7", "1.2", "3", "50.00") == numbers_shown(texts)
    assert SHOWN_MAX == len(numbers_shown(["", " ".join(map(str, range(1000)))]))
    assert () == numbers_shown([])


def test_no_more_is_read_ahead_than_the_backend_reads_for_nothing():
    rng = seeded(32)
    for seed in range(scale(40, 1000)):
        envelope, most = random_envelope(rng.randint), rng.randint(1, 20)
        backend = HashBackend(seed, lookahead_tokens_max=most)
        backend.pass_tokens_max = rng.randint(10, 60)
        decided(backend, envelope, shown=[f"{rng.randint(0, 10**5)}{rng.choice(['', '.5', '.25'])}" for _ in range(9)])
        for rows in backend.passes:
            own = len(rows[0].tokens)
            texts = [row.tokens[own:] for row in rows[1:]]
            assert most >= len({tuple(text[: end + 1]) for text in texts for end in range(len(text))})
            assert backend.pass_tokens_max >= sum(len(row.tokens) for row in rows) or 1 == len(rows)


@pytest.mark.parametrize(("slots", "forks_max"), [(8, 63), (32, 16), (1, 5), (1, 3)])
def test_forks_are_never_more_than_a_slot_may_have(slots: int, forks_max: int):
    rng = seeded(33)
    for seed in range(scale(20, 500)):
        backend = HashBackend(seed, slots=slots, lookahead_tokens_max=AHEAD)
        decided(backend, random_envelope(rng.randint), forks_max=forks_max)
        assert min(forks_max, 63 // slots) >= backend.forks_held_max


def test_many_that_read_ahead_together_each_decide_as_alone():
    rng = seeded(34)
    for seed in range(scale(20, 500)):
        envelopes = [random_envelope(rng.randint) for _ in range(4)]
        backend = HashBackend(seed, slots=4, lookahead_tokens_max=AHEAD)
        matchers = [matcher_of(backend, envelope) for envelope in envelopes]
        runs = [deciding(backend, slot, PROMPT, matcher, tokens_max=400) for slot, matcher in enumerate(matchers)]
        expected = [decided(HashBackend(seed), envelope).data for envelope in envelopes]
        assert expected == [found.data for found in together(backend, runs) if isinstance(found, Decoded)]
        assert 0 == backend.forks_held


def test_near_ties_escalate_also_where_they_were_read_ahead():
    rng = seeded(35)
    close = 0
    for seed in range(scale(30, 2000)):
        envelope = random_envelope(rng.randint)
        plain = decided(HashBackend(seed, spread=0.3), envelope).data
        backend = Disturbed(seed, noise_logp_max=0.05, spread=0.3, lookahead_tokens_max=AHEAD)
        matcher = matcher_of(backend, envelope)
        run = deciding(backend, 0, PROMPT, matcher, tokens_max=400, noise_logp_max=0.05)
        (found,) = together(backend, [run])
        assert isinstance(found, ModelError) or plain == found.data
        close += isinstance(found, ModelError)
    assert close > 0
