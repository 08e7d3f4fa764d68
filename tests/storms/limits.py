"""Many clients of four processes with an instant engine try to pass the limits: none is passed, by record and bank alike."""

from __future__ import annotations

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from random import Random

from sds import Gate
from sds.kernel.contract.schema import Contract, parse_contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.envelope import ESCALATE
from sds.kernel.envelope.proposal import Proposal, write_proposal
from sds.kernel.errors import SdsError
from tests.attack.figures import Figure, measured, none
from tests.attack.forks import in_child, in_children
from tests.attack.testbed import CONTRACT, Teller, Testbed

from .ground import Ground, bed_of, faults

WHAT = "64 clients of 4 processes try to get more than the limits permit"
PROCESSES, CLIENTS = 4, 16
ACCOUNTS, BALANCE_MINOR = 8, 30_000
DAY_MINOR = 180_000  # less than all accounts have
ASKED_MINOR = (500, 4_000)
ESCALATIONS = 5
DAY_MS = 86_400_000


class Asking(Teller):
    """A teller that escalates every case, each at the cost of the agent's budget."""

    def said(self, packet: DecisionPacket) -> bytes:
        kind = packet.envelope.kind(ESCALATE)
        assert kind is not None
        return write_proposal(Proposal(ESCALATE, (), kind.reasons[0], packet.snapshot.id))


def storm(ground: Ground) -> list[Figure]:
    return [*_money(ground), *_escalations(ground)]


def _terms() -> Contract:
    changes = {
        "TTL": "20000",
        "DISPATCH": "5000",
        "max_minor: 900000000000": f"max_minor: {DAY_MINOR}",
        "per_hour: 3": f"per_hour: {ESCALATIONS}",
        "restarts_max: 3": "restarts_max: 1",
    }
    text = CONTRACT
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    return parse_contract(text)


def _money(ground: Ground) -> list[Figure]:
    bed = bed_of(ground, _terms(), "money")
    for number in range(ACCOUNTS):
        bed.accounts.put(f"A{number}", BALANCE_MINOR)
    answers = _tried(ground, bed, Teller)
    found = in_child(partial(_recounted, bed))
    paid = Counter[str]()
    for _, account, amount in bed.bank.paid():
        paid[account] += amount
    return [
        measured("tries", answers.total()),
        measured("of them paid", answers["SUCCESS"]),
        measured("of them not decided for want of a turn", answers["NOT_DECIDED"] + answers["FLOW_IN_PROGRESS"]),
        measured("minor units of the day's limit left", DAY_MINOR - max(found["days"], default=0)),
        none("days whose spend limit is passed, by the record", sum(used > DAY_MINOR for used in found["days"])),
        none("accounts paid more than they have, by the bank", sum(sum_ > BALANCE_MINOR for sum_ in paid.values())),
        none("accounts on which more is drawn than they have", sum(used > BALANCE_MINOR for used in found["drawn"])),
        none("accounts with two live reservations", found["live"][0]),
        none("minor units that only the bank or only the record has paid", abs(paid.total() - sum(found["days"]))),
        none("faults of the record", found["faults"][0]),
    ]


def _escalations(ground: Ground) -> list[Figure]:
    bed = bed_of(ground, _terms(), "escalations")
    for number in range(ACCOUNTS):
        bed.accounts.put(f"A{number}", BALANCE_MINOR)
    _tried(ground, bed, Asking)
    charged, late, suspended, wrong = in_child(partial(_charged, bed))
    return [
        measured("escalations charged to the agent", charged),
        none("escalations charged beyond the budget", max(0, charged - ESCALATIONS)),
        none("agents that are active although it is spent", int(ground.n > PROCESSES * ESCALATIONS and not suspended)),
        none("escalations by the agent in flows that were opened after it was suspended", late),
        none("faults of the record of escalations", wrong),
    ]


def _tried(ground: Ground, bed: Testbed, teller: type[Teller]) -> Counter[str]:
    """Send `n` different events from all clients at once; count the answers."""
    in_child(lambda: bed.gate().close())
    parts = [
        partial(_send_all, bed, teller(), range(part, ground.n, PROCESSES), Random(ground.rng.random()))
        for part in range(PROCESSES)
    ]
    return sum(in_children(parts, PROCESSES), Counter[str]())


def _send_all(bed: Testbed, teller: Teller, numbers: range, rng: Random) -> Counter[str]:
    asked = [(number, rng.randrange(ACCOUNTS), rng.randint(*ASKED_MINOR)) for number in numbers]
    with bed.gate(engine=teller) as gate, ThreadPoolExecutor(CLIENTS) as pool:
        return Counter(pool.map(partial(_send, gate, bed), asked))


def _send(gate: Gate, bed: Testbed, asked: tuple[int, int, int]) -> str:
    number, account, amount = asked
    try:
        answer = gate.decide(bed.event(number, account=f"A{account}", text=f"pay {amount}"))
    except SdsError as error:
        return error.reason_code
    return answer.execution or answer.tag or answer.state


def _recounted(bed: Testbed) -> dict[str, list[int]]:
    """Add up the record's orders, instead of reading its counters."""
    with bed.gate() as gate:
        days = Counter[int]()
        sql = "SELECT reserved_at_ms, params ->> '$.amount' FROM execution_log WHERE status <> 'FAILED'"
        for at_ms, amount in gate.store.rows(sql):
            days[at_ms // DAY_MS] += int(amount)
        drawn = Counter[str]()
        for key, amount in gate.store.rows(
            "SELECT resource_key, params ->> '$.amount' FROM execution_log WHERE status = 'SUCCESS'"
        ):
            drawn[key] += int(amount)
        live = gate.store.rows("SELECT resource FROM reservations WHERE status = 'live'")
        twice = len(live) - len(set(live))
        return {
            "days": list(days.values()),
            "drawn": list(drawn.values()),
            "live": [twice],
            "faults": [faults(gate, bed)],
        }


def _charged(bed: Testbed) -> tuple[int, int, bool, int]:
    """Return the escalations charged, those in flows opened after the suspension, whether it is suspended, and faults."""
    with bed.gate() as gate:
        bodies = gate.store.rows("SELECT body FROM ledger WHERE kind = 'DECIDED'")
        charged = sum("escalations" in json.loads(body) for (body,) in bodies)
        suspended_ms = gate.store.value("SELECT max(at_ms) FROM ledger WHERE kind = 'AGENT'")
        late = gate.store.value(
            "SELECT count(*) FROM dim_validations v JOIN decision_flows f ON f.dfid = v.dfid"
            " WHERE v.reason_code = 'ESCALATED_BY_AGENT' AND f.created_at_ms > ?",
            (suspended_ms,),
        )
        suspended = gate.store.value("SELECT status FROM agents") == "SUSPENDED"
        return charged, int(late), suspended, faults(gate, bed)
