"""A statement that cannot be read, or is none: one typed line, and nothing is compared."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from enum import Enum

import pytest

from sds.kernel.errors import UsageError, WorldError
from sds.kernel.executor.statement import StatementLine, read_statement
from sds.reconciliation import reconcile
from tests.kernel.durable import World
from tests.kernel.outside import PaysOnly
from tests.kernel.statements import cases, compared, listing


class Account(str, Enum):  # noqa: UP042  a StrEnum formats as its text
    FIRST = "T1"


def test_what_a_line_names_is_a_text_and_nothing_that_equals_one():
    """An order is counted by the key that it names: an Enum formats as another one."""
    line = StatementLine(Account.FIRST, "settled", 1, 5, Account.FIRST, "d", "PAY", {"amount": 5}, Account.FIRST)
    (read,) = read_statement(lambda *_: [line], 0, 1)
    assert (line, ["T1"] * 3) == (read, [f"{text}" for text in (read.key, read.reference, read.resource_key)])


class TestAStatementThatIsNone:
    def test_an_executor_without_one_is_told_so(self, world: World) -> None:
        kernel = world.open_kernel(executor=PaysOnly(world.rail))
        with pytest.raises(UsageError, match="this executor offers no statement"):
            reconcile(kernel, now_ms=world.clock)

    @pytest.mark.parametrize("raised", [OSError("down"), ValueError(), WorldError("down"), RecursionError("deep")])
    def test_whatever_is_raised_is_one_line(self, world: World, raised: Exception) -> None:
        def statement(since_ms: int, until_ms: int) -> Iterator[StatementLine]:
            raise raised

        listing(world).statement = statement  # type: ignore[method-assign]  # what it lists is what is tested
        with pytest.raises(WorldError, match="the executor's statement cannot be read: ") as caught:
            compared(world)
        assert "STATEMENT_UNREADABLE" == caught.value.reason_code
        assert [] == cases(world)

    @pytest.mark.parametrize(
        "line",
        [
            None,
            "a line",
            {"key": "k", "outcome": "settled", "at_ms": 1},
            StatementLine("", "settled", 1),
            StatementLine("k", "paid", 1),  # type: ignore[arg-type]
            StatementLine("k", None, 1),  # type: ignore[arg-type]
            StatementLine("k" * 201, "settled", 1),
            StatementLine("k\n", "settled", 1),
            StatementLine("k", "settled", 1.5),  # type: ignore[arg-type]
            StatementLine("k", "settled", True),
            StatementLine("k", "settled", -1),
            StatementLine("k", "settled", 10**16),
            StatementLine("k", "settled", 1, 1.5),  # type: ignore[arg-type]
            StatementLine("k", "settled", 1, 10**30),
            StatementLine("k", "settled", 1, dfid=7),  # type: ignore[arg-type]
            StatementLine("k", "settled", 1, params=[]),  # type: ignore[arg-type]
            StatementLine("k", "settled", 1, params={"amount": "1"}),  # type: ignore[dict-item]
            StatementLine("k", "settled", 1, params={"\ud800": 1}),
            StatementLine("k", "settled", 1, params={str(n): n for n in range(33)}),
        ],
    )
    def test_a_line_that_is_none_is_refused_and_nothing_is_compared(self, line: object) -> None:
        with pytest.raises(WorldError, match="the executor's statement cannot be read: "):
            read_statement(lambda *_: [line], 0, 1)

    @pytest.mark.parametrize("listed", [None, 7, object()])
    def test_what_is_no_list_is_refused(self, listed: object) -> None:
        with pytest.raises(WorldError, match="the executor's statement cannot be read: TypeError"):
            read_statement(lambda *_: listed, 0, 1)  # type: ignore[arg-type]

    def test_one_without_an_end_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sds.kernel.executor.statement.LINES_MAX", 10)
        line = StatementLine("k", "settled", 1)
        with pytest.raises(WorldError, match="it has more than 10 lines"):
            read_statement(lambda *_: iter(lambda: line, None), 0, 1)

    def test_nobody_waits_for_one_that_hangs(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sds.kernel.flow.dispatch.STATEMENT_S_MAX", 0.05)
        over = threading.Event()

        def statement(since_ms: int, until_ms: int) -> Iterator[StatementLine]:
            over.wait(10)
            return iter(())

        listing(world).statement = statement  # type: ignore[method-assign]  # what it lists is what is tested
        with pytest.raises(WorldError, match="the executor's statement cannot be read: it did not arrive within 0 s"):
            compared(world)
        over.set()
