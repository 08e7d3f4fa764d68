"""Record decisions of a tiny model at a real gate, for tests of replays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sds.engines.protocol import Engine
from sds.gate import Gate
from tests.kernel.durable import Rail, Tickets, contract, together

GATE = "claims"


def record(
    home: Path, *, model: Path | None = None, engine: Engine | None = None, events: int = 4, at_once: int = 1
) -> list[str]:
    """Decide events at a gate with its folder in `home`, `at_once` at a time; return their dfids."""
    folder = home / GATE
    folder.mkdir(parents=True, exist_ok=True)
    tickets = Tickets()
    for number in range(events):
        tickets.put(f"T{number}", refundable_minor=100 + 3331 * number, mood=("calm", "angry")[number % 2])
    with Gate(contract(), tickets, Rail(folder / "rail.db"), folder=folder, model=model, engine=engine) as gate:

        def decide(number: int) -> str:
            text = f"flight {number} was {number} hours late"
            return gate.decide({"claim_id": f"C{number}", "ticket_id": f"T{number}", "text": text}).dfid

        found: list[object] = []
        for first in range(0, events, at_once):
            numbers: Sequence[int] = range(first, min(events, first + at_once))
            found += (
                together(len(numbers), lambda i, numbers=numbers: decide(numbers[i]))
                if at_once > 1
                else map(decide, numbers)
            )
        return [str(dfid) for dfid in found]
