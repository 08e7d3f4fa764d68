"""A world whose contract has sagas, and a proposer that says for each child what it is told to."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.errors import UsageError
from sds.kernel.flow.intake import Event
from sds.kernel.flow.kernel import Kernel
from sds.kernel.flow.states import Answer
from sds.kernel.saga import driver
from sds.kernel.saga.claim import claim as claim_saga
from sds.kernel.saga.state import SagaAnswer
from tests.kernel.durable import (
    Propose,
    World,
    anything_else,
    contract,
    deny,
    escalate,
    nonsense,
    proposal,
    see_through,
)

DIRTY = "PARTIAL_SUCCESS_DIRTY"
REFUND_MINOR = 10_000  # half of the fare, as `most` asks for
SAGAS = """
sagas:
  BOTH: {steps: [REFUND_TICKET, COMPENSATE]}
  ALL: {steps: [REFUND_TICKET, COMPENSATE, GOODWILL]}
  NO_UNDOING: {steps: [REFUND_TICKET, COMPENSATE], compensation: [ALERT_HUMAN]}
"""


def terms(*changes: tuple[str, str]) -> Contract:
    return contract(*changes, more=SAGAS)


def most(packet: DecisionPacket) -> bytes:
    """Do what the step is about, for the most it may cost, but leave something for the next."""
    kind = next((k for k in packet.envelope.kinds if k.kind not in ("DENY", "ESCALATE")), None)
    if kind is None:
        return anything_else(packet)
    params = tuple((name, format_literal(b.hi // 2, b.scale)) for name, b in kind.params)
    return write_proposal(Proposal(kind.kind, params, kind.reasons[0], packet.snapshot.id))


def choose(name: str) -> Propose:
    return proposal(name, "HUMAN_REVIEW" if name == "ALERT_HUMAN" else "STEP_FAILED")


REVERT, CLOSE_ALL, ALERT_HUMAN = choose("REVERT"), choose("CLOSE_ALL"), choose("ALERT_HUMAN")
SAYS: dict[str, Propose] = {"pay": most, "deny": deny, "escalate": escalate, "nonsense": nonsense}


class Script:
    """What is proposed in each child of a saga: by the end of its event's id, else `most`."""

    def __init__(self, **said: Propose) -> None:
        self.said = {name.removeprefix("step_"): propose for name, propose in said.items()}
        self.asked: list[str] = []
        self.packets: list[DecisionPacket] = []

    def __call__(self, packet: DecisionPacket) -> bytes:
        name = packet.event_id.rpartition("/")[2]
        self.asked.append(name)
        self.packets.append(packet)
        return self.said.get(name, most)(packet)


def run(
    kernel: Kernel,
    world: World,
    script: Propose,
    name: str = "BOTH",
    event: str = "C1",
    *,
    ticket: str = "T1",
    deadline_ms: int | None = None,
) -> SagaAnswer:
    """Bring a saga to its end, as the stream does."""

    def ask(child: Kernel, trigger: Event) -> Answer:
        while True:
            try:
                return see_through(child, trigger, script)
            except UsageError as error:  # someone else ended the flow meanwhile: look again, as the stream does
                if error.reason_code != "FLOW_CLOSED":
                    raise

    dfid = claim_saga(
        kernel.store, kernel.contract, name, world.event(event, ticket), now_ms=world.clock(), deadline_ms=deadline_ms
    )
    return driver.drive(kernel, dfid, ask, now_ms=world.clock)


def reversed_at(folder: Path) -> list[tuple[str, int]]:
    """Return what the rail has taken back, in order: (kind, amount)."""
    sql = "SELECT kind, r.amount_minor FROM reversals r JOIN payouts USING (key) ORDER BY r.number"
    with closing(sqlite3.connect(folder / "rail.db")) as db:
        return db.execute(sql).fetchall()


def parent(found: SagaAnswer) -> tuple[str, str | None, str | None]:
    return found.answer.state, found.answer.tag, found.compensation


def executions(found: SagaAnswer) -> list[str | None]:
    return [step.execution if step else None for step in found.steps]


def with_misfortune(world: World, misfortune: str, data: bytes) -> bytes:
    world.rail.misfortunes = [misfortune]
    return data
