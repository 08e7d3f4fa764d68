"""Windows as running sums: what was written last is trusted only where the record still says it."""

from __future__ import annotations

from contextlib import closing, suppress
from pathlib import Path

import pytest

from sds.kernel.contract.monitors import MonitorSpec
from sds.kernel.errors import StoreError
from sds.kernel.registry.monitors import MonitoredDecision, Monitors
from sds.kernel.registry.windows import CHUNK
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Row
from tests.scale import seeded

SPECS = [
    {"name": "rate", "of": "approval_rate", "window": {"last": 10}, "stop": 1},
    {"name": "mean", "of": "paid_mean_minor", "window": {"last": 25}, "stop": 10**9},
    {"name": "sum", "of": "paid_sum_minor", "window": {"minutes": 60}, "stop": 10**12},
]


def opened() -> Monitors:
    return Monitors("agent", "decisions", [MonitorSpec.model_validate(spec) for spec in SPECS])


class Refusing(SqliteStore):
    """A store that refuses to keep the sums while `full` is set."""

    full = False

    def write(self, sql: str, values: Row = ()) -> None:
        if self.full and sql.startswith("UPDATE monitor_windows"):
            raise StoreError("the disk is full")
        super().write(sql, values)


def count(store: Refusing, monitors: Monitors, number: int, undone: str = "") -> None:
    """Count a decision; `undone`: whether its transaction comes to nothing `before` the sums are kept, or `after`."""
    store.full = undone == "before"
    with suppress(StoreError), store.transaction():
        executed = number % 3 > 0
        decided = MonitoredDecision(executed, executed, 100 + number if executed else None)
        monitors.count(store, decided, number * 45_000, lambda _: ())
        if undone:
            raise StoreError("the disk is full")


def test_sums_are_exact_whoever_counts_and_whatever_is_undone(tmp_path: Path) -> None:
    """Two processes that count in turn, some of whose transactions come to nothing, have the rows of one that opens the
    windows anew for each decision.
    """
    random = seeded(33)
    stores = [Refusing(tmp_path / name) for name in ("one.db", "other.db")]
    together, anew = stores
    processes = [opened(), opened()]
    for number in range(300):
        undone = random.choice(("", "", "", "before", "after"))
        count(together, random.choice(processes), number, undone)
        if not undone:
            count(anew, opened(), number)
    for table in ("monitor_windows", "monitor_entries", "monitor_buckets"):
        rows = [store.rows(f"SELECT * FROM {table} ORDER BY 1, 2, 3, 4") for store in stores]
        assert rows[0] == rows[1]
        assert rows[0]
    for store in stores:
        store.close()


@pytest.mark.parametrize("body", ["x", "7", '{"a":1}'])
@pytest.mark.parametrize("table", ["monitor_windows", "monitor_entries", "monitor_buckets"])
def test_windows_that_cannot_be_read_are_told_in_one_typed_line(tmp_path: Path, table: str, body: str) -> None:
    """And nothing is counted: what was written before stands."""
    store = Refusing(tmp_path / "one.db")
    for number in range(40):
        count(store, opened(), number)
    with store.transaction():
        store.write(f"UPDATE {table} SET body = ?", (body,))
    kept = store.rows(f"SELECT * FROM {table}")
    an_hour_later = 200 * 45_000

    def one_more() -> None:
        with store.transaction():
            for _ in range(CHUNK):
                opened().count(store, MonitoredDecision(), an_hour_later, lambda _: ())

    for use in (one_more, *([lambda: opened().standing(store, an_hour_later)] if table != "monitor_entries" else [])):
        with pytest.raises(StoreError, match=r"^the windows of the monitors of agent `agent` cannot be read$"):
            use()
    assert kept == store.rows(f"SELECT * FROM {table}")
    store.close()


def test_a_sum_that_no_row_can_hold_is_told_as_what_it_is(tmp_path: Path) -> None:
    """And the decision is not counted. 18,000 payments of the largest amount reach it: the test pays more at once."""
    monitors, paid = opened(), MonitoredDecision(True, True, 2**63)
    with closing(Refusing(tmp_path / "one.db")) as store:
        with store.transaction():
            monitors.count(store, paid, 0, lambda _: ())
        before = store.rows("SELECT * FROM monitor_windows")
        with pytest.raises(StoreError, match="a sum of the monitors of agent `agent` is beyond 64 bits") as refused:  # noqa: SIM117
            with store.transaction():
                monitors.count(store, paid, 0, lambda _: ())
        assert "shorten the window of its monitor" == refused.value.hint
        assert before == store.rows("SELECT * FROM monitor_windows")
