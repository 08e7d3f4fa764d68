"""In exact mode a number of too many values to be listed is the likeliest of all, not the one of the likeliest digits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from sds.decoding import number_search
from sds.decoding.decoder import Decoded, Mode, deciding
from sds.decoding.errors import CHOICE_TOO_CLOSE
from sds.decoding.number_search import PREFIXES_MAX
from sds.grammars.tokens import matcher as walk_module
from sds.grammars.tokens.digits import every_literal
from sds.grammars.tokens.matcher import TokenMatcher
from sds.kernel.envelope.envelope import Bound, DecisionEnvelope, KindBound, bound, envelope_of
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.errors import ModelError
from sds.models.protocol import Backend, BackendError, Row
from tests.decoding.reference import CaseView, looking
from tests.decoding.small_backend import PIECES, Disturbed, HashBackend, decode, matcher_of, together
from tests.scale import scale, seeded

PROMPT = [[5, 7], [6]]
FLAT = 0.01
COMPANY_NOISE = 0.1


def paying(amount: Bound) -> DecisionEnvelope:
    """Everything but the amount is forced."""
    return replace(envelope_of([]), kinds=(KindBound("PAY", ("YES",), (("amount", amount),)),))


def decided(
    backend: HashBackend, envelope: DecisionEnvelope, mode: Mode = "exact", noise: float = 0.0, forks_max: int = 16
) -> Decoded:
    matcher = matcher_of(backend, envelope)
    run = deciding(backend, 0, PROMPT, matcher, tokens_max=400, mode=mode, noise_logp_max=noise, forks_max=forks_max)
    (found,) = together(backend, [run])
    assert 0 == backend.forks_held
    if isinstance(found, ModelError):
        raise found
    return found


def walk_of(backend: HashBackend, envelope: DecisionEnvelope) -> TokenMatcher:
    return matcher_of(backend, envelope)


def amount_of(found: Decoded) -> str:
    proposal = parse_proposal(found.data)
    assert isinstance(proposal, Proposal)
    return dict(proposal.params)["amount"]


def every_number(look: CaseView, matcher: TokenMatcher, amount: Bound) -> dict[str, float]:
    """Return the log-probability of every number, each spelled out alone: an integer through the token behind it."""
    return {literal: spelled_out(look, matcher.copy(), literal) for literal in every_literal(amount)}


def spelled_out(look: CaseView, matcher: TokenMatcher, literal: str) -> float:
    start, logp = matcher.number_start, 0.0
    assert start is not None
    for token in literal.encode()[len(matcher.data) - start :]:
        logp += look(matcher.tokens)[token]
        matcher.accept(token)
    if "." in literal:
        return logp
    only = matcher.forced_token()
    tokens = matcher.choice_point().tokens.tolist() if only is None else [only]
    return logp + max(look(matcher.tokens)[token] for token in tokens if not PIECES[token].isdigit())


def random_amount(low: int, high: int, step: int, scaled: int) -> Bound:
    amount = bound(low, high, step=step, scale=scaled)
    assert amount is not None
    return amount


class Grouping(HashBackend):
    """Writes digits in threes from the left, as many tokenizers do."""

    vocab_size = len(PIECES) + 100 + 1000

    def tokenize(self, text: bytes, *, special: bool) -> list[int]:
        found = list[int]()
        for part in re.findall(rb"\d{1,3}|\D+", text):
            groups = len(PIECES) + 100 * (len(part) > 2)
            plain = len(part) < 2 or not part.isdigit()
            found += super().tokenize(part, special=special) if plain else [groups + int(part)]
        return found

    def piece(self, token: int) -> bytes:
        group = token - len(PIECES)
        return PIECES[token] if group < 0 else f"{group:02}".encode() if group < 100 else f"{group - 100:03}".encode()


class Breaking(HashBackend):
    """Fails at the Nth pass, or the Nth fork."""

    def __init__(self, seed: int, where: str, nth: int) -> None:
        super().__init__(seed, spread=8.0)
        self._where, self._left = where, nth

    def run(self, rows: Sequence[Row]) -> list[NDArray[np.float32]]:
        self._break("pass")
        return super().run(rows)

    def fork(self, slot: int) -> int:
        self._break("fork")
        return super().fork(slot)

    def _break(self, where: str) -> None:
        self._left -= where == self._where
        if not self._left:
            raise BackendError("broken")


@pytest.mark.parametrize("sort", [HashBackend, Grouping])
def test_a_number_is_the_same_whether_its_values_are_listed_or_searched(
    sort: type[HashBackend], monkeypatch: pytest.MonkeyPatch
):
    rng = seeded(62)

    def amount() -> Bound:
        low, step = rng.randint(-1500, 9000), rng.choice([1, 2, 3, 7, 10, 100])
        return random_amount(low, low + step * rng.randint(5, 30), step, rng.choice([0, 1, 2]))

    for seed in range(scale(12, 400)):
        kind = KindBound("PAY", ("YES", "NO"), (("amount", amount()), ("more", amount())))
        envelope = replace(envelope_of([], 5 * rng.randint(0, 1)), kinds=(kind,))
        listed = decided(sort(seed, spread=8.0), envelope).data
        with monkeypatch.context() as patch:
            patch.setattr(walk_module, "CHOICE_VALUES_MAX", 1)
            assert listed == decided(sort(seed, spread=8.0), envelope).data


def test_a_real_model_finds_what_it_would_of_a_list_and_the_same_to_the_last_bit_again(
    opened: Callable[..., Backend], monkeypatch: pytest.MonkeyPatch
):
    backend, envelope = opened(), paying(random_amount(17, 77, 1, 0))

    def decided_by(mode: Mode) -> Decoded:
        matcher = matcher_of(backend, envelope)
        return decode(backend, PROMPT, matcher, tokens_max=400, mode=mode)

    listed = amount_of(decided_by("exact"))
    assert listed != amount_of(decided_by("greedy"))
    monkeypatch.setattr(walk_module, "CHOICE_VALUES_MAX", 1)
    found = decided_by("exact")
    assert ("amount[0]", listed) == (found.choices[0].name, amount_of(found))
    assert found == decided_by("exact")


@pytest.mark.parametrize("scaled", [0, 2])
def test_it_is_the_likeliest_of_all_numbers_each_spelled_out(scaled: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(number_search, "PREFIXES_MAX", 10_000)  # of a hash, what is forced is as unlikely as all else
    rng = seeded(61)
    traps = 0
    for seed in range(scale(10, 300)):
        low, step = rng.randint(-150, 900), rng.choice([1, 2, 3, 10, 50])
        amount = random_amount(low, low + step * rng.randint(200, 400), step, scaled)
        envelope = paying(amount)
        backend = HashBackend(seed, spread=8.0)
        matcher = matcher_of(backend, envelope)
        matcher.accept_forced()
        scores = every_number(looking(backend, PROMPT), matcher, amount)
        found = amount_of(decided(backend, envelope))
        assert max(scores, key=lambda literal: scores[literal]) == found
        traps += found != amount_of(decided(backend, envelope, "greedy"))
    assert traps  # digit by digit it would often be another


@pytest.mark.parametrize("spread", [8.0, 1.5], ids=["sharp", "often given up"])
def test_it_is_found_or_given_up_with_any_number_of_forks_and_tells_the_same(spread: float):
    envelope = paying(random_amount(1, 99_999, 1, 2))
    for seed in range(20):
        wanted = decided(HashBackend(seed, spread=spread), envelope)
        for forks_max in (3, 4, 7):
            backend = HashBackend(seed, spread=spread)
            found = decided(backend, envelope, forks_max=forks_max)
            assert (wanted.data, wanted.choices) == (found.data, found.choices)
            assert backend.forks_held_max <= forks_max


@pytest.mark.parametrize("forks_max", [3, 16])
def test_ended_or_failing_anywhere_in_the_search_it_gives_all_forks_back(forks_max: int):
    envelope = paying(random_amount(1, 99_999, 3, 2))
    for end in ("close", "pass", "fork"):
        for nth in range(1, 200):
            backend = Breaking(5, end, nth)
            run = deciding(
                backend, 0, PROMPT, walk_of(backend, envelope), tokens_max=400, forks_max=forks_max, mode="exact"
            )
            try:
                rows = next(run)
                while end != "close" or len(backend.passes) < nth:
                    rows = run.send(backend.run(rows))
            except StopIteration:
                break
            except (BackendError, ModelError):
                pass
            run.close()
            assert 0 == backend.forks_held
        assert nth > 3  # it ended in the search
        assert 0 == backend.forks_held


def test_company_never_makes_it_another():
    rng = seeded(63)
    same = none = 0
    for seed in range(scale(10, 400)):
        low = rng.randint(100, 9_000)
        envelope = paying(random_amount(low, low + rng.randint(100, 9_000), 1, 2))
        backend = Disturbed(seed, noise_logp_max=COMPANY_NOISE, spread=4.0)
        matcher = walk_of(backend, envelope)
        (found,) = together(
            backend,
            [deciding(backend, 0, PROMPT, matcher, tokens_max=400, mode="exact", noise_logp_max=COMPANY_NOISE)],
        )
        if isinstance(found, ModelError):
            assert CHOICE_TOO_CLOSE == found.reason_code
            none += 1
        else:
            assert decided(HashBackend(seed, spread=4.0), envelope).data == found.data
            same += 1
    assert same
    assert none


class Forcing(HashBackend):
    """Begins with 1 or 2, as likely but for the noise; then decimals are forced, each by half. `moved`: by company."""

    def __init__(self, **moved: float) -> None:
        super().__init__()
        self.moved = {name.removeprefix("by"): logp for name, logp in moved.items()}

    def logits(self, tokens: Sequence[int], rows: Sequence[Row]) -> NDArray[np.float32]:
        number = b"".join(PIECES[token] for token in tokens).rpartition(b'"amount":')[2].decode()
        if not number:
            logp = {"1": math.log(0.3), "2": math.log(0.3) - COMPANY_NOISE}
            logp = {digit: each + self.moved.get(digit, 0.0) for digit, each in logp.items()}
        else:
            logp = {"." if len(number) == 1 else "0": math.log(0.5) + self.moved.get(number[0], 0.0)}
        found = np.full(self.vocab_size, -40.0)
        for char, each in logp.items():
            found[ord(char)] = each
        found[0] = math.log(1 - sum(map(math.exp, logp.values())))
        return found.astype(np.float32)


def test_company_never_makes_it_another_where_decimals_are_forced():
    envelope = paying(random_amount(1_000_000, 99_000_000, 1_000_000, 6))
    assert "1.000000" == amount_of(decided(Forcing(), envelope))
    other = Forcing(by1=-0.9 * COMPANY_NOISE, by2=0.9 * COMPANY_NOISE)
    assert "2.000000" == amount_of(decided(other, envelope))
    for backend in (Forcing(), other):
        with pytest.raises(ModelError, match="closer"):
            decided(backend, envelope, noise=COMPANY_NOISE)


def test_of_equally_likely_ones_it_is_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(number_search, "PREFIXES_MAX", 10_000)
    envelope = paying(random_amount(100, 179, 1, 0))
    assert "100" == amount_of(decided(HashBackend(0, spread=0.0), envelope))


def test_each_digit_has_its_distribution_though_it_was_not_chosen_for_it():
    envelope = paying(random_amount(1_000, 9_999, 1, 2))
    backend = HashBackend(5, spread=8.0)
    found = decided(backend, envelope)
    literal = amount_of(found)
    matcher = matcher_of(backend, envelope)
    matcher.accept_forced()
    for choice in found.choices:
        assert choice.name.startswith("amount[")
        place = int(choice.name.removeprefix("amount[").removesuffix("]"))
        assert literal[place : place + 1] == choice.chosen
        assert pytest.approx(1.0) == sum(share for _, share in choice.probabilities)
    first = looking(backend, PROMPT)(matcher.tokens)
    digits = {str(n): math.exp(first[ord(str(n))]) for n in range(1, 10)}
    shares = {label: share / sum(digits.values()) for label, share in digits.items()}
    assert pytest.approx(shares, abs=1e-6) == dict(found.choices[0].probabilities)


def test_a_model_without_a_preference_is_followed_digit_by_digit_after_a_bounded_search():
    envelope = paying(random_amount(1, 99_999_999, 1, 2))
    backend = HashBackend(3, spread=FLAT)
    found = decided(backend, envelope)
    assert amount_of(decided(HashBackend(3, spread=FLAT), envelope, "greedy")) == amount_of(found)
    assert PREFIXES_MAX < sum(rows for _, rows in found.rows) < 5 * PREFIXES_MAX
    assert found.passes < PREFIXES_MAX / 2  # nearly as likely ones share a pass


def test_a_search_that_noise_might_have_cut_short_decides_nothing():
    envelope = paying(random_amount(1, 99_999_999, 1, 2))
    with pytest.raises(ModelError, match="the two likeliest options of `amount` are closer") as caught:
        decided(HashBackend(3, spread=FLAT), envelope, noise=1e-9)
    assert CHOICE_TOO_CLOSE == caught.value.reason_code


def test_just_under_the_gap_to_the_second_noise_is_no_objection():
    amount = random_amount(1_000, 1_400, 1, 2)
    envelope = paying(amount)
    backend = HashBackend(0, spread=8.0)
    matcher = matcher_of(backend, envelope)
    matcher.accept_forced()
    scores = sorted(every_number(looking(backend, PROMPT), matcher, amount).values(), reverse=True)
    wanted = decided(HashBackend(0, spread=8.0), envelope).data
    gap = scores[0] - scores[1]
    assert wanted == decided(HashBackend(0, spread=8.0), envelope, noise=gap / 100).data
    digits = 4  # of `12.34`, the point counted, and the 1 not: it is forced
    with pytest.raises(ModelError, match="closer"):
        decided(HashBackend(0, spread=8.0), envelope, noise=gap / digits)
