"""After any random history the record is whole and says what the rail did.

After each act the record is verified and set against the rail's own books; in the end everything is resolved, and what
is drawn and spent is what the rail has paid and not taken back.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from sds.kernel.audit import verify
from sds.kernel.human.review import HumanReview
from sds.kernel.saga import state as saga
from tests.kernel.durable import COMPENSATION_MINOR
from tests.kernel.histories import TICKETS, History
from tests.kernel.outside import FARE_MINOR
from tests.scale import scale, seeded

AT_REST = ("CLOSED", "ABORTED", "ESCALATED")


class Auditor:
    """Checks a history after each act; remembers who has waited for a human."""

    def __init__(self, history: History) -> None:
        self.world, self.rail = history.world, history.rail
        self.waited: set[str] = set()

    def reversed(self) -> set[str]:
        sql = "SELECT dfid FROM reversals r JOIN payouts USING (key)"
        with closing(sqlite3.connect(self.world.folder / "rail.db")) as db:
            return {dfid for (dfid,) in db.execute(sql)}

    def check(self) -> None:
        store, paid, back = self.world.store, self.rail.paid(), self.reversed()
        assert () == verify.verify(store).faults
        assert not self.rail.wrong, self.rail.wrong
        assert len(paid) == len({payment[0] for payment in paid}), "a flow was paid twice"
        amounts = {dfid: (ticket, kind, amount) for dfid, ticket, kind, amount in paid}
        orders = store.rows(
            "SELECT e.dfid, resource_key, kind, CAST(json_extract(params, '$.amount') AS BIGINT), e.status, COALESCE(r.status, '')"
            " FROM execution_log e LEFT JOIN saga_reversals r USING (dfid)"
        )
        assert amounts.keys() <= {order[0] for order in orders}, "paid, and no order for it"
        for dfid, ticket, kind, amount, status, reversal in orders:
            if status == "SUCCESS":
                assert (ticket, kind, amount) == amounts.get(dfid), f"{dfid} is recorded as paid"
            assert status != "FAILED" or dfid not in amounts, f"{dfid} is recorded as failed, and was paid"
            assert status != "DIRTY", f"{dfid}: this rail never contradicts itself"
            assert reversal != "REVERTED" or dfid in back, f"{dfid} is recorded as taken back"
            assert dfid not in back or reversal in ("PENDING", "UNKNOWN", "REVERTED"), f"{dfid} was taken back"
        self.check_tickets(paid, back)
        self.check_cases()
        self.check_sagas(set(amounts), back)

    def check_tickets(self, paid: list[tuple[str, str, str, int]], back: set[str]) -> None:
        net: Counter[tuple[str, str]] = Counter()
        for dfid, ticket, kind, amount in paid:
            net[ticket, kind.replace("REPLACE", "COMPENSATE")] += 0 if dfid in back else amount
        for ticket in TICKETS:
            assert net[ticket, "REFUND_TICKET"] <= FARE_MINOR, f"{ticket}: more than its fare"
            assert net[ticket, "COMPENSATE"] <= COMPENSATION_MINOR, f"{ticket}: compensated twice"
        assert not self.world.column("SELECT 1 FROM spend_totals WHERE scope LIKE '%/customer/%' AND used > 100000")

    def check_cases(self) -> None:
        """What was handed to a human is there until a human has resolved it."""
        store = self.world.store
        now = {row[0] for row in store.rows("SELECT dfid FROM decision_flows WHERE state = 'ESCALATED'")}
        self.waited |= now
        resolved = {row[0] for row in store.rows("SELECT dfid FROM human_decisions")}
        assert now == self.waited - resolved
        listed = {c.dfid for c in HumanReview(self.world.kernel, now_ms=self.world.clock).waiting()}
        parts = {
            row[0] for row in store.rows("SELECT dfid FROM decision_flows WHERE trigger_event LIKE '%\"saga\":[%'")
        }
        assert now - parts <= listed, "only a part of a saga waits as its saga does"
        unknown = store.rows("SELECT dfid FROM execution_log WHERE status = 'UNKNOWN'")
        assert {row[0] for row in unknown} <= listed

    def check_sagas(self, paid: set[str], back: set[str]) -> None:
        store = self.world.store
        for dfid, state, tag in store.rows(
            "SELECT s.dfid, state, tag FROM sagas s JOIN decision_flows USING (dfid) WHERE phase = 'ENDED'"
        ):
            of_saga = store.rows(
                "SELECT dfid FROM decision_flows WHERE json_extract(trigger_event, '$.saga[0]') = ?", (dfid,)
            )
            kept = {row[0] for row in of_saga} & paid - back
            steps = len(store.value("SELECT steps FROM sagas WHERE dfid = ?", (dfid,)).split(","))
            if state == "CLOSED":
                assert steps == len(kept), f"saga {dfid} is complete"
            elif tag != saga.DIRTY:
                assert not kept, f"saga {dfid} is {tag}: nothing of it stands"

    def check_end(self) -> None:
        """Nothing is unknown any more, and everything is at rest."""
        store = self.world.store
        assert [] == store.rows("SELECT dfid, state FROM decision_flows WHERE state NOT IN (?, ?, ?)", AT_REST)
        assert [] == store.rows("SELECT dfid, phase FROM sagas WHERE phase <> 'ENDED'")
        self.check_totals()

    def check_totals(self) -> None:
        """What is drawn is what was paid and stands."""
        back, unclear = self.reversed(), self.world.column("SELECT 1 FROM saga_reversals WHERE status <> 'REVERTED'")
        assert not [status for status in unclear if status == "PENDING"]
        drawn: Counter[str] = Counter()
        for dfid, ticket, kind, amount in self.rail.paid():
            if dfid not in back and kind != "GOODWILL":
                field, taken = ("refundable_minor", amount) if kind == "REFUND_TICKET" else ("compensations_left", 1)
                drawn[f"tickets:{ticket}#ticket.{field}"] += taken
        assert drawn == Counter(dict(self.world.store.rows("SELECT resource, drawn FROM resources WHERE drawn > 0")))
        spent = sum(amount for dfid, _, _, amount in self.rail.paid() if dfid not in back)
        assert spent == sum(
            row[0] for row in self.world.store.rows("SELECT used FROM spend_totals WHERE scope LIKE '%/day/%'")
        )


def live(seed: int, acts: int) -> None:
    """Live through one history; a failure says which, and what was done in it."""
    with TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:  # noqa: S108  a random name
        history = History(Path(folder), Random(seed))
        auditor = Auditor(history)
        try:
            for _ in range(acts):
                history.act()
                auditor.check()
            history.resolve()
            auditor.check()
            auditor.check_end()
        except BaseException:
            print(f"history {seed}", *history.done, sep="\n")
            raise
        finally:
            history.world.close()


def test_after_any_history_the_record_is_whole_and_says_what_the_rail_did():
    rng = seeded(2013)
    for _ in range(scale(12, 600)):
        live(rng.randrange(2**32), acts=scale(25, 60))
