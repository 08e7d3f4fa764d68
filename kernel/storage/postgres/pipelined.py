"""A connection that is asked several statements in one round trip: sent in one piece, each prepared on its first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import psycopg
from psycopg import adapt
from psycopg.abc import PQGen, Transformer
from psycopg.adapt import PyFormat
from psycopg.errors import error_from_result
from psycopg.generators import fetch_many, send
from psycopg.pq import ExecStatus
from psycopg.pq.abc import PGresult

from sds.kernel.storage.postgres.dialect import translated
from sds.kernel.storage.store import Generation, Row

PREPARED_MAX = 256  # of one connection: what comes on top of them is parsed each time


@dataclass(frozen=True, slots=True)
class Done:
    """What the last of some statements came to: its rows, how many it changed, and the server's word for it."""

    rows: list[Row]
    changed: int
    word: str


class Connection(psycopg.Connection[Any]):
    """Used by one thread at a time. psycopg's own pipeline sends each statement by itself, and wakes the server for each."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.server = Generation()  # which the pool has found it to be
        self._statements: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._numbers = count()

    def together(self, *asked: tuple[str, Row]) -> Done:
        """Execute statements and return what the last came to: see `each`."""
        return self.each(*asked)[-1]

    def each(self, *asked: tuple[str, Row]) -> list[Done]:
        """Execute statements, values bound in the place of `?`, in their order. Raises the psycopg.Error of the first that
        is refused: none after it is executed. A value that cannot be sent raises before anything is.
        """
        values: Transformer = adapt.Transformer(self)
        sent = [self._dumped(values, *each) for each in asked]
        try:
            self.pgconn.enter_pipeline_mode()
            results = self.wait(self._exchanged(sent))
            self.pgconn.exit_pipeline_mode()
        except BaseException:  # what may still come over it belongs to nobody
            self.close()
            raise
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                raise error_from_result(result, encoding=self.info.encoding)
        return [
            _done(values, result) for result in results[:-1]
        ]  # behind them is the end of all; preparing has no rows

    def _dumped(self, dumping: Transformer, sql: str, values: Row) -> tuple[Any, ...]:
        """Return a statement as it is sent: its text, and the types, bytes and formats of its values."""
        data = dumping.dump_sequence(values, [PyFormat.AUTO] * len(values))
        return translated(sql), dumping.types or (), data, dumping.formats

    def _exchanged(self, sent: Sequence[tuple[Any, ...]]) -> PQGen[list[PGresult]]:
        """Return the last result of each thing that was sent; the end of all is one."""
        parsed: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # which result tells that a statement is prepared
        names, expected = dict(self._statements), 1
        for text, types, data, formats in sent:
            if (name := names.get((text, types))) is None and len(names) < PREPARED_MAX:
                name = names[text, types] = b"sds_%d" % next(self._numbers)
                self.pgconn.send_prepare(name, text, types)
                parsed[expected - 1] = (text, types)
                expected += 1
            if name is None:
                self.pgconn.send_query_params(text, data, types, formats)
            else:
                self.pgconn.send_query_prepared(name, data, formats)
            expected += 1
        self.pgconn.pipeline_sync()
        yield from send(self.pgconn)
        results: list[PGresult] = []
        while len(results) < expected:
            if not (found := (yield from fetch_many(self.pgconn))):
                raise psycopg.OperationalError("the connection was lost")
            results.append(found[-1])
        for place, key in parsed.items():
            if results[place].status == ExecStatus.COMMAND_OK:
                self._statements[key] = names[key]
        return results


def _done(values: Transformer, result: PGresult) -> Done:
    rows: list[Row] = []
    if result.ntuples:
        values.set_pgresult(result)
        rows = values.load_rows(0, result.ntuples, tuple)
    return Done(rows, result.command_tuples or 0, (result.command_status or b"").decode())
