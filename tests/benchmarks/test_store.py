"""What one decision asks of its record: counted, so that it can only fall."""

from __future__ import annotations

from pathlib import Path

from sds.benchmarks.store import statements


def test_a_decision_asks_no_more_of_its_record_than_it_did(tmp_path: Path) -> None:
    """Opened, judged, reserved, carried out and settled under one spend limit, in three transactions."""
    assert {"in_transactions": [4, 13, 6], "outside": 4} == statements(tmp_path)
