"""A fault that the demo injects while the model is thinking, and the check of the executor's statement."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sds.definitions.definition import Chaos
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.proposal import Proposal, parse_proposal
from sds.kernel.executor.protocol import Executor
from sds.kernel.executor.statement import StatementLine
from sds.kernel.flow.states import Answer
from sds.kernel.storage.store import Reader

from .holds import ALLOW
from .world.bank import bank_path, compromise_account

COMPROMISED_EVERY = 2  # counted separately for proposals that would let a payment pass and for others


def passed_twice(statement: Iterable[StatementLine]) -> list[str]:
    """Return a line for every payment that was released more than once."""
    passed = Counter(line.resource_key for line in statement if line.kind == ALLOW and line.outcome == "settled")
    return [f"payment {payment}: released {count} times" for payment, count in passed.items() if count > 1]


class CompromisedAccount(Chaos):
    """Marks every second payment's account as compromised between reasoning and execution, over its own connection, as
    the bank's other clerks might.

    It counts these payments, those that would have passed and those that did. It also counts the untouched ones that
    passed: without these, a kernel that lets nothing pass would look as good.
    """

    promises = ("compromised_payments_released",)

    def __init__(self, folder: Path, executor: Executor, seed: int) -> None:
        super().__init__(folder, executor, seed)
        self.met: Counter[bool] = Counter()  # number of payments, by whether their first proposal would let them pass
        self.seen: set[str] = set()  # event ids
        self.compromised: dict[str, str] = {}  # event id -> payment
        self.would_pass: set[str] = set()  # event ids

    def reasoned(self, packet: DecisionPacket, data: bytes) -> None:
        if packet.event_id in self.seen:  # a fresh flow after drift is left alone
            return
        self.seen.add(packet.event_id)
        proposal = parse_proposal(data)
        would_pass = isinstance(proposal, Proposal) and proposal.action == ALLOW
        turn = self.met[would_pass]
        self.met[would_pass] += 1
        if turn % COMPROMISED_EVERY or not compromise_account(bank_path(self.folder), packet.key):
            return
        self.compromised[packet.event_id] = packet.key
        if would_pass:
            self.would_pass.add(packet.event_id)

    def report(self, answers: Sequence[Answer], payments: Sequence[StatementLine], record: Reader) -> dict[str, int]:  # noqa: ARG002
        """Count by payment. None of the compromised ones may have passed, not in a fresh flow either."""
        passed = {line.resource_key for line in payments if line.kind == ALLOW}
        ours = {line.dfid for line in payments if line.kind == ALLOW}
        return {
            "compromised_payments": len(self.compromised),
            "compromised_payments_that_would_have_passed": len(self.would_pass),
            "compromised_payments_released": len(passed & set(self.compromised.values())),
            "untouched_payments_released": sum(a.dfid in ours and a.event_id not in self.compromised for a in answers),
        }

    @staticmethod
    def summary(report: Mapping[str, Any]) -> str:
        return (
            f"accounts that became compromised while the model was thinking: {report['compromised_payments']}; of these "
            f"payments {report['compromised_payments_that_would_have_passed']} would have passed and "
            f"{report['compromised_payments_released']} did; unchanged payments that passed: "
            f"{report['untouched_payments_released']}"
        )

    @staticmethod
    def missing(report: Mapping[str, Any]) -> str:
        if not report["compromised_payments_that_would_have_passed"]:
            return "payment of a compromised account would have passed"
        return "" if report["untouched_payments_released"] else "unchanged payment passed"
