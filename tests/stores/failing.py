"""A record of PostgreSQL whose process stops at a step: before or after any round trip, except what opens it."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from sds.kernel.storage.postgres import connections
from sds.kernel.storage.postgres import store as stores
from sds.kernel.storage.postgres.pipelined import Done
from sds.kernel.storage.store import Row, Witness
from tests.kernel.faults import Faults
from tests.stores.server import server_url


def opened_failing(schema: str, faults: Faults, witness: Witness | None) -> stores.PostgresStore:
    """Open a record for a process that `faults` stops. What was not committed by then the server rolls back."""

    class Failing(connections.Connection):
        """A connection that asks before and after every round trip whether the process still lives."""

        def each(self, *asked: tuple[str, Row]) -> list[Done]:
            name = asked[-1][0][:40]
            faults.step(f"before {name}", len(asked))
            done = super().each(*asked)
            faults.step(f"after {name}", len(asked))
            return done

    class Pool(connections.Pool):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            faults.connections.append(self)

    with patch.object(connections, "Connection", Failing), patch.object(stores, "Pool", Pool):
        return stores.PostgresStore(server_url(), schema, witness=witness)
