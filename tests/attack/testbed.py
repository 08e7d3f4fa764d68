"""One gate as a user embeds it, in its own folder, with accounts, bank and clock; and the fates of its events."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sds import Gate
from sds.kernel.audit import verify
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.envelope import DENY, ESCALATE, format_literal
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.envelope.state import StateSource
from sds.kernel.executor.protocol import Executor
from sds.kernel.flow import undecided
from sds.kernel.flow.states import DECIDED_TAGS, Answer
from sds.pipeline import Reasoned

from .outside import Accounts, Bank, ListingBank

BALANCE_MINOR = 100_000_000
CONTRACT = """
gate: attack
agent_id: attack-agent
version: 1.0.0
owner: desk@example.org
effective_from: "2013-01-01"
source: accounts
mission: Decide claims.
authority: [PAY, DENY]
event: {id: id, key: account, evidence: text}
snapshot:
  account.balance_minor: fixed(2)
kinds:
  PAY:
    when: account.balance_minor > 0
    params: {amount: {lo: 1, hi: account.balance_minor, scale: 2}}
    draws: {account.balance_minor: amount}
    spends: amount
    reasons: [OWED]
  DENY: {reasons: [NOT_OWED]}
spend:
  - {name: day, window: day, max_minor: 900000000000}
retry: {attempts_max: 3, restarts_max: 3, rejections_to_suspend: 10}
budget: {ttl_ms: TTL, dispatch_ms_max: DISPATCH}
escalation: {per_hour: 3}
"""
RETRIES_MAX = 50
RETRY_S = 0.02

Sent = Mapping[str, object] | str | bytes


def contract(*, ttl_ms: int = 20_000, dispatch_ms: int = 5_000) -> Contract:
    return parse_contract(CONTRACT.replace("TTL", str(ttl_ms)).replace("DISPATCH", str(dispatch_ms)))


class Clock:
    """The machine's clock plus `ahead_ms`."""

    def __init__(self) -> None:
        self.ahead_ms = 0

    def __call__(self) -> int:
        return time.time_ns() // 1_000_000 + self.ahead_ms


class Teller:
    """An engine that pays what the event's text asks for (`pay 1234`, minor units) where permitted, else denies."""

    model = "teller"

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        return self.said(packet), Decoding(self.model, 0.9)

    def said(self, packet: DecisionPacket) -> bytes:
        pay, amount = packet.envelope.kind("PAY"), self.amount_minor(packet)
        if pay is not None and 1 <= amount <= dict(pay.params)["amount"].hi:
            made = Proposal("PAY", (("amount", format_literal(amount, 2)),), "OWED", packet.snapshot.id)
        else:
            kind = packet.envelope.kind(DENY) or packet.envelope.kind(ESCALATE)
            assert kind is not None
            made = Proposal(kind.kind, (), kind.reasons[0], packet.snapshot.id)
        return write_proposal(made)

    def amount_minor(self, packet: DecisionPacket) -> int:
        asked = re.search(r"pay (\d+)", packet.texts[-1])
        return int(asked[1]) if asked else 0

    def count_tokens(self, text: str) -> int:
        return len(text.encode())

    def close(self) -> None:
        """Hold nothing."""


class Testbed:
    """A folder with the gate's folder (`gate/`) and the files of bank and accounts."""

    __test__ = False  # pytest would collect it by its name

    def __init__(
        self, folder: Path, *, terms: Contract | None = None, idempotent: bool = True, lists: bool = False
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.terms = folder, terms or contract()
        self.clock = Clock()
        self.broken: list[str] = []  # exceptions that are not ours
        self.accounts = Accounts(folder / "accounts.db")
        self.bank = (ListingBank if lists else Bank)(folder / "bank.db", self.clock, idempotent=idempotent)

    @property
    def own(self) -> Path:
        return self.folder / "gate"

    def gate(
        self,
        *,
        engine: Teller | None = None,
        executor: Executor | None = None,
        source: StateSource | None = None,
        on_reasoned: Reasoned | None = None,
        **options: Any,
    ) -> Gate:
        return Gate(
            self.terms,
            source or self.accounts,
            executor or self.bank,
            folder=self.own,
            engine=engine or Teller(),
            on_reasoned=on_reasoned,
            now_ms=self.clock,
            **options,
        )

    def event(self, number: int, *, account: str = "", text: str = "") -> dict[str, object]:
        """Return an event with its own amount, so that two payments for it are alike, whatever a record knows of it."""
        key = account or f"A{number}"
        return {"id": f"E{number}", "account": key, "text": text or f"please pay {1_000 + number}"}

    def open_accounts(self, numbers: Iterable[int], balance_minor: int = BALANCE_MINOR) -> None:
        for number in numbers:
            self.accounts.put(f"A{number}", balance_minor)

    def paid_twice(self) -> int:
        """Count the bank's payments beyond the first of each event, by account and amount."""
        return sum(times - 1 for times in Counter(paid[1:] for paid in self.bank.paid()).values())

    def accounts_paid_twice(self) -> int:
        """Count the bank's payments beyond the first of each account, whatever the amount: for one event an account."""
        return sum(times - 1 for times in Counter(paid[1] for paid in self.bank.paid()).values())

    def disagreements(self, gate: Gate) -> int:
        """Count the keys that are paid only by the bank, or only by the record."""
        said = {row[0] for row in gate.store.rows("SELECT idempotency_key FROM execution_log WHERE status = 'SUCCESS'")}
        return len(said ^ {key for key, *_ in self.bank.paid()})


def settle(gate: Gate, event: Sent) -> Answer:
    """Send an event until its answer is no longer retryable, RETRIES_MAX times at most, as a caller does."""
    for _ in range(RETRIES_MAX):
        answer = gate.decide(event)
        if not answer.retryable:
            break
        time.sleep(RETRY_S)
    return answer


def fate(gate: Gate, event_id: str, humans: frozenset[str]) -> str:
    """Return an event's fate: `not taken in`, `human` (its flow is in `humans`), `waits`, `decided` or `lost`."""
    row = gate.store.row(
        f"SELECT f.dfid, f.state, f.tag, {undecided.WAITS} FROM decision_flows f JOIN events e ON e.dfid = f.dfid"
        " WHERE e.event_id = ?",
        (event_id,),
    )
    if row is None:
        return "not taken in"
    dfid, state, tag, waits = row
    if dfid in humans:
        return "human"
    if waits:
        return "waits"
    return "decided" if state == "CLOSED" or (state == "ABORTED" and tag in DECIDED_TAGS) else "lost"


def humans_of(gate: Gate) -> frozenset[str]:
    return frozenset(case.dfid for case in gate.escalations())


def fates(gate: Gate) -> Counter[str]:
    """Count the fates of all recorded events."""
    humans = humans_of(gate)
    return Counter(fate(gate, row[0], humans) for row in gate.store.rows("SELECT event_id FROM events"))


def faults(gate: Gate) -> int:
    """Print the record's faults; return their number."""
    found = verify.verify(gate.store).faults
    for fault in found:
        print(f"  fault: {fault}")
    return len(found)
