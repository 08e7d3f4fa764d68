"""The labels of the refund gate: every text of the corpus, with a flight and a ticket on which its cause may be stated.

The parts are those of the corpus, fixed. States are drawn from a seed as in the demo, so that weather is stated where
the record shows it as often as in the queue. Unlike in the queue, each cause is equally frequent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import get_args

from sds.definitions.definition import LabelledCase
from sds.gates.refund.adjudication import expected_action
from sds.gates.refund.source import TicketSource
from sds.gates.refund.world.airline import airline_path, write_airline
from sds.gates.refund.world.claims import Cause, CorpusText, Part, corpus, weights_of
from sds.gates.refund.world.flights import load_flights
from sds.gates.refund.world.tickets import make_world
from sds.kernel.envelope.state import Fields

SEED = 2_610
STATES = 3_000  # the pool that each part's states are drawn from


def labelled(folder: Path) -> Iterator[LabelledCase]:  # noqa: ARG001  it needs nothing of the gate's own folder
    """Yield every text of the corpus once, with a state of the airline's database and a careful human's decision."""
    states = _states(Random(SEED))  # noqa: S311  reproducible, no secret
    for part in get_args(Part):
        rng = Random(f"{SEED} {part}")  # noqa: S311  as above
        for text in corpus(part):
            yield _case(text, _state_for(text.cause, states, rng), part)


def _states(rng: Random) -> list[Fields]:
    """Return the fields of generated tickets, as the gate's own source reads them."""
    world = make_world(load_flights(), STATES, rng)
    with TemporaryDirectory() as made:
        write_airline(airline_path(Path(made)), world)
        source = TicketSource(airline_path(Path(made)))
        read = [source.read(ticket.ticket_id) for ticket in world.tickets]
        source.close()
    return [state.fields for state in read if state is not None]


def _state_for(cause: Cause, states: Sequence[Fields], rng: Random) -> Fields:
    """Draw a state with the probability that this cause is stated in it, by rejection sampling."""
    while True:
        fields = rng.choice(states)
        weights = weights_of(str(fields.get("weather.condition", "unknown")))
        if rng.random() < weights[cause] / sum(weights.values()):
            return fields


def _case(text: CorpusText, fields: Fields, part: str) -> LabelledCase:
    return LabelledCase(
        text.text,
        fields,
        {"cause": text.cause.value},
        decision=expected_action(fields, text.cause),
        style=text.style,
        amount_minor=int(fields.get("ticket.refundable_minor", 0)),
        part=part,
    )
