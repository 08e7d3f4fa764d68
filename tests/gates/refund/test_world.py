"""Real flights, and the tickets and claims generated for them."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from sds.gates.refund.adjudication import expected_action
from sds.gates.refund.source import TicketSource
from sds.gates.refund.world.airline import write_airline
from sds.gates.refund.world.claims import SEVERE, TEXT_CHARS_MAX, Cause, corpus
from sds.gates.refund.world.flights import CONDITIONS, Flight, condition, load_flights, metres
from sds.gates.refund.world.tickets import World, is_due, make_world
from sds.kernel.errors import StateError
from tests.scale import scale


@pytest.fixture(scope="module")
def every_flight() -> tuple[Flight, ...]:
    return load_flights(-10_000)  # all 336,776


@pytest.fixture(scope="module")
def flights(every_flight: tuple[Flight, ...]) -> tuple[Flight, ...]:
    return tuple(f for f in every_flight if f.arr_delay_min is None or max(f.arr_delay_min, f.dep_delay_min or 0) >= 30)


@pytest.fixture(scope="module")
def world(flights: tuple[Flight, ...]) -> World:
    return make_world(flights, scale(4_000, 40_000), random.Random(7))


class TestFlights:
    def test_the_real_data_has_the_known_counts(self, every_flight: tuple[Flight, ...]) -> None:
        departed = [f for f in every_flight if f.dep_delay_min is not None]
        late = [f for f in departed if max(f.dep_delay_min or 0, f.arr_delay_min or 0) >= 180]
        no_arrival = [f for f in departed if f.arr_delay_min is None]
        hour_late = [f for f in departed if (f.arr_delay_min or 0) >= 60]

        assert 336_776 == len(every_flight) == len({f.flight_id for f in every_flight})
        assert 8_255 == sum(f.dep_delay_min is None for f in every_flight)
        assert 1_175 == len(no_arrival)
        assert 12_804 == 8_255 + len(late)
        assert 37_747 == 8_255 + len(no_arrival) + len(hour_late)

    def test_the_two_delays_fall_on_different_sides_of_three_hours_for_some(
        self, every_flight: tuple[Flight, ...]
    ) -> None:
        departed = [f for f in every_flight if f.dep_delay_min is not None]
        differ = [f for f in departed if ((f.dep_delay_min or 0) >= 180) != ((f.arr_delay_min or 0) >= 180)]

        assert 1_256 == len(differ)

    def test_the_weather_joins_for_all_but_one_in_two_hundred(self, every_flight: tuple[Flight, ...]) -> None:
        unknown = sum(f.weather == "unknown" for f in every_flight)

        assert 336_776 - 335_220 == unknown
        assert set(CONDITIONS) == {f.weather for f in every_flight}

    def test_the_default_keeps_what_can_be_claimed_for(self, flights: tuple[Flight, ...]) -> None:
        assert flights == load_flights()

    @pytest.mark.parametrize(("miles", "expected"), [(1089, 1_752_576), (17, 27_359), (4983, 8_019_361)])
    def test_miles_become_whole_metres(self, miles: int, expected: int) -> None:
        assert expected == metres(miles) == round(miles * 1.609344 * 1000)

    @pytest.mark.parametrize(
        ("expected", "changes"),
        [
            ("clear", {}),
            ("clear", {"wind_speed": "1048.36058"}),
            ("clear", {"temp": "NA", "wind_speed": "", "visib": "NA"}),
            ("rain", {"precip": "0.01"}),
            ("storm", {"precip": "0.25"}),
            ("storm", {"precip": "0.01", "wind_gust": "40.3"}),
            ("snow", {"precip": "0.01", "temp": "33.98"}),
            ("rain", {"precip": "0.24", "temp": "34.1"}),
            ("fog", {"visib": "0.5"}),
            ("clear", {"visib": "1"}),
            ("wind", {"wind_gust": "40.3"}),
            ("wind", {"wind_speed": "33.4"}),
        ],
    )
    def test_the_condition_follows_the_written_thresholds(self, expected: str, changes: dict[str, str]) -> None:
        calm = {"precip": "0", "wind_gust": "NA", "wind_speed": "8.0", "temp": "55", "visib": "10"}

        assert expected == condition({**calm, **changes})

    def test_missing_data_is_told_in_one_line(self, tmp_path: Path) -> None:
        with pytest.raises(StateError, match=r"^the flight data in `.*` cannot be read: .*$"):
            load_flights(folder=tmp_path)


class TestWorld:
    def test_the_same_seed_gives_the_same_world(self, flights: tuple[Flight, ...]) -> None:
        assert make_world(flights, 300, random.Random(3)) == make_world(flights, 300, random.Random(3))
        assert make_world(flights, 300, random.Random(3)) != make_world(flights, 300, random.Random(4))

    def test_a_small_world_is_the_beginning_of_a_larger_one(self, flights: tuple[Flight, ...], world: World) -> None:
        small = make_world(flights, 100, random.Random(7))

        assert small.claims == world.claims[:100]
        assert small.tickets == world.tickets[: len(small.tickets)]

    def test_ids_differ_between_seeds(self, flights: tuple[Flight, ...], world: World) -> None:
        other = make_world(flights, 300, random.Random(8))

        assert not {c.claim_id for c in other.claims} & {c.claim_id for c in world.claims}

    def test_every_claim_text_is_short_printable_ascii(self, world: World) -> None:
        for claim in world.claims:
            assert len(claim.text) <= TEXT_CHARS_MAX
            assert claim.text.isascii()
            assert claim.text.isprintable()

    def test_the_event_carries_nothing_latent(self, world: World) -> None:
        claim = world.claims[0]

        assert {"claim_id": claim.claim_id, "ticket_id": claim.ticket_id, "claim_text": claim.text} == claim.event

    def test_texts_are_those_of_the_test_part_with_their_causes_and_every_style(self, world: World) -> None:
        known = {(each.text, each.cause, each.style) for each in corpus("test")}

        assert {(c.text, c.cause, c.style) for c in world.claims} <= known
        assert {style for _, _, style in known} == {claim.style for claim in world.claims}

    def test_a_text_comes_again_only_when_all_of_its_cause_were_dealt(self, world: World) -> None:
        for cause in Cause:
            texts = sum(each.cause is cause for each in corpus("test"))
            dealt = [claim.text for claim in world.claims if claim.cause is cause]

            assert len(set(dealt[:texts])) == min(texts, len(dealt))

    def test_every_special_case_is_met(self, flights: tuple[Flight, ...], world: World) -> None:
        by_id = {f.flight_id: f for f in flights}
        known = {t.ticket_id for t in world.tickets}
        met = Counter(
            unknown=sum(c.ticket_id not in known for c in world.claims),
            not_due=sum(not is_due(by_id[t.flight_id]) for t in world.tickets),
            fully_refunded=sum(t.refunded_minor == t.fare_minor for t in world.tickets),
            partly_refunded=sum(0 < t.refunded_minor < t.fare_minor for t in world.tickets),
            compensated=sum(t.compensated for t in world.tickets),
            no_arrival=sum(
                by_id[t.flight_id].dep_delay_min is not None and by_id[t.flight_id].arr_delay_min is None
                for t in world.tickets
            ),
            no_voucher=sum(t.fare_minor < 1_000 for t in world.tickets),
        )

        assert dict.fromkeys(met, True) == {
            name: 0.01 < count / len(world.claims) < 0.08 for name, count in met.items()
        }

    def test_severe_weather_is_the_likely_cause_on_record(self, world: World) -> None:
        by_id = {f.flight_id: f for f in world.flights}
        flight_of = {t.ticket_id: by_id[t.flight_id] for t in world.tickets}
        known = [c for c in world.claims if c.ticket_id in flight_of]
        severe = [c for c in known if flight_of[c.ticket_id].weather in SEVERE]
        mild = [c for c in known if flight_of[c.ticket_id].weather not in SEVERE]

        assert sum(c.cause is Cause.WEATHER for c in severe) / len(severe) > 0.5
        assert 0.02 < sum(c.cause is Cause.WEATHER for c in mild) / len(mild) < 0.2

    def test_every_cause_and_every_action_is_met(self, world: World, tmp_path: Path) -> None:
        write_airline(tmp_path / "airline.db", world)
        source = TicketSource(tmp_path / "airline.db")
        states = [source.read(claim.ticket_id) for claim in world.claims]
        actions = Counter(
            expected_action(state.fields if state else None, claim.cause)
            for state, claim in zip(states, world.claims, strict=True)
        )

        assert set(Cause) == {claim.cause for claim in world.claims}
        assert {"COMPENSATE", "REFUND_TICKET", "VOUCHER", "DENY", "ESCALATE"} == set(actions)
        assert min(actions.values()) > len(world.claims) * 0.03
        assert max(actions.values()) < len(world.claims) * 0.5
