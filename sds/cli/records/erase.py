"""`sds erase`: destroy the key that encrypts the texts of a case."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from sds.cli.common import GateOption, JsonFlag, Reason, open_store, operator
from sds.cli.render import counted, print_either
from sds.host.clock import now_ms
from sds.kernel.operations import erasure
from sds.kernel.operations.erasure import Erased


def erase(
    event: Annotated[str, typer.Option("--event", metavar="ID", help="The id of the event.")],
    reason: Reason,
    gate: GateOption = "refund",
    as_json: JsonFlag = False,
) -> None:
    """Erase the texts of a case for good. These are evidence, prompts, proposals, rationales. What was decided and paid stays.

    End the case first if it is open, waits for a human or has an order in flight.

    Example: sds erase --event C-00017 --reason "the customer asked for it"
    """
    with closing(open_store(gate)) as store:
        done = erasure.erase(store, gate, event, who=operator(), reason=reason, now_ms=now_ms())
    print_either(as_json, asdict(done), _lines(event, done, store.remains))


def _lines(event: str, done: Erased, remains: str) -> Iterator[str]:
    steps = f", and of {counted(len(done.events) - 1, 'step')} of its saga" if len(done.events) > 1 else ""
    yield f"{event}: the texts are erased{steps}"
    if done.in_clear:
        yield f"an older version wrote the texts of these flows unencrypted, so they were not erased: {', '.join(done.in_clear)}"
    if not done.overwritten:
        yield remains
