"""An interrupt at any instruction of the PostgreSQL store: no connection and no writer's turn is lost for good."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from contextlib import closing
from types import FrameType
from typing import Any

import pytest

from sds.kernel.storage.postgres.connections import CONNECTIONS_MAX, Pool
from sds.kernel.storage.postgres.store import WRITERS_MAX, PostgresStore
from tests.stores.server import fresh_schema, server_url

TOUCHED = {
    each.__code__
    for each in (
        PostgresStore.transaction.__wrapped__,  # type: ignore[attr-defined]
        PostgresStore.frozen.__wrapped__,  # type: ignore[attr-defined]
        PostgresStore._on_connection,
        PostgresStore.flush,
        Pool.begun,
        Pool.take,
        Pool.give_back,
        Pool._replace_lost,
        Pool._abandon,
    )
}


def write(store: PostgresStore) -> None:
    with store.transaction("SELECT 1"):
        store.run("UPDATE meta SET value = value WHERE key = 'halted'")


def read(store: PostgresStore) -> None:
    store.value("SELECT 1")


def read_a_moment(store: PostgresStore) -> None:
    with store.frozen() as moment:
        moment.value("SELECT 1")


def interrupted(work: Callable[[], object], nth: int) -> bool:
    """Raise KeyboardInterrupt at the `nth` instruction of the store. Return False where there are not so many."""
    left = nth

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in TOUCHED:
            return None
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if event == "opcode" and left == 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return left <= 0


@pytest.mark.parametrize("work", [write, read, read_a_moment, PostgresStore.flush])
def test_an_interrupt_loses_no_connection_and_no_turn(work: Callable[[PostgresStore], None]) -> None:
    nth = 0
    with closing(PostgresStore(server_url(), fresh_schema())) as store:
        while interrupted(lambda: work(store), nth := nth + 1):
            gc.collect()
        assert 30 < nth
        held = [store._pool.take() for _ in range(CONNECTIONS_MAX)]
        for each in held:
            store._pool.give_back(each)
        assert WRITERS_MAX == store._turns.qsize()
        write(store)
