"""What a rail has paid, read in its own file: by nobody's word but its rows."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from sds.gates.refund.rail.client import RailProcess


def payouts(rail: RailProcess | Path, ticket_id: str = "") -> dict[str, Any]:
    """Count what was paid, for one ticket or (empty) for all, and what should never have been paid twice. `rail`: it, or its file."""
    where, values = ("WHERE ticket_id = ?", (ticket_id,)) if ticket_id else ("", ())
    with closing(sqlite3.connect(rail if isinstance(rail, Path) else rail._db)) as db:
        rows = db.execute(
            f"SELECT status, kind, count(*), sum(amount_minor) FROM payouts {where} GROUP BY status, kind", values
        ).fetchall()
        back = db.execute(
            f"SELECT count(*), coalesce(sum(r.amount_minor), 0) FROM reversals r JOIN payouts USING (key) {where}",
            values,
        ).fetchone()
        twice = [
            db.execute(f"SELECT count(*) FROM ({_twice(columns, where)})", values).fetchone()[0]
            for columns in ("dfid", "ticket_id, kind")
        ]
    paid = [row for row in rows if row[0] == "settled"]
    return {
        "settled": sum(row[2] for row in paid),
        "rejected": sum(row[2] for row in rows if row[0] == "rejected"),
        "paid_minor": sum(row[3] for row in paid),
        "reversed": back[0],
        "reversed_minor": back[1],
        "by_kind": {kind: {"settled": count, "paid_minor": total} for _, kind, count, total in paid},
        "dfids_paid_twice": twice[0],
        "tickets_paid_twice_in_kind": twice[1],
    }


def _twice(columns: str, where: str) -> str:
    settled = f"{where or 'WHERE 1'} AND status = 'settled' AND key NOT IN (SELECT key FROM reversals)"
    return f"SELECT 1 FROM payouts {settled} GROUP BY {columns} HAVING count(*) > 1"
