"""A connection that sends several statements in one round trip, in one piece, and prepares each on its first use."""

from __future__ import annotations

from collections import deque
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

PREPARED_MAX = 256  # on one connection; further statements are parsed each time


@dataclass(frozen=True, slots=True)
class Done:
    """The result of the last of some statements: its rows, how many rows it changed, and the server's command word."""

    rows: list[Row]
    changed: int
    word: str


class Connection(psycopg.Connection[Any]):
    """Used by one thread at a time. psycopg's own pipeline sends each statement alone, and wakes the server for each."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.server = Generation()  # which the pool has found it to be
        self.lost: deque[Connection] | None = None  # its pool's, of connections that nobody holds or has given back
        self.unreplicated = False  # whether a commit did not wait until the standbys had it
        self.add_notice_handler(self._noticed)
        self._statements: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._numbers = count()

    def __del__(self, *_: Any) -> None:
        """Keep a connection that an interrupt kept from being given back, for its pool: it would count as in use for good."""
        if self.checked_out and self.lost is not None:
            self.close()  # which ends its transaction
            self.lost.append(self)
        else:
            super().__del__()

    @property
    def checked_out(self) -> bool:
        """Whether its pool has given it to somebody, and it was not given back."""
        return getattr(self, "_pool", None) is not None

    def forget_pool(self) -> None:
        """Do this to a connection that was given back closed: its pool has replaced it."""
        self._pool = None

    def _noticed(self, notice: psycopg.errors.Diagnostic) -> None:
        self.unreplicated |= notice.source_function == "SyncRepWaitForLSN"

    def together(self, *asked: tuple[str, Row]) -> Done:
        """Do what `each` does; return the result of the last statement."""
        return self.each(*asked)[-1]

    def each(self, *asked: tuple[str, Row]) -> list[Done]:
        """Execute statements in their order, values bound in the place of `?`; return the result of each, and of preparing
        those that are new. Raises the psycopg.Error of the first that is refused: none after it is executed. A value that
        cannot be sent raises before anything is sent.
        """
        values: Transformer = adapt.Transformer(self)
        sent = [self._dumped(values, *each) for each in asked]
        try:
            self.pgconn.enter_pipeline_mode()
            results = self.wait(self._exchanged(sent))
            self.pgconn.exit_pipeline_mode()
        except BaseException:  # nobody could tell what an answer that still comes belongs to
            self.close()
            raise
        for result in results:
            if result.status == ExecStatus.FATAL_ERROR:
                raise error_from_result(result, encoding=self.info.encoding)
        done = [_done(values, result) for result in results[:-1]]  # the very last result is the sync
        executed = [each for each in done if each.word]  # what was prepared has no word
        for (sql, _), each in zip(asked, executed, strict=True):
            if each.word == "INSERT 0 0" and "ON CONFLICT" not in sql and "SELECT" not in sql:
                raise psycopg.IntegrityError("a trigger or rule of the database swallowed a row")
        return done

    def _dumped(self, dumping: Transformer, sql: str, values: Row) -> tuple[Any, ...]:
        """Return a statement as it is sent: its text, and the types, bytes and formats of its values."""
        data = dumping.dump_sequence(values, [PyFormat.AUTO] * len(values))
        return translated(sql), dumping.types or (), data, dumping.formats

    def _exchanged(self, sent: Sequence[tuple[Any, ...]]) -> PQGen[list[PGresult]]:
        """Send all statements, new ones prepared first. Return the last result of each, and that of the sync."""
        parsed: dict[int, tuple[bytes, tuple[int, ...]]] = {}  # place of the result -> the statement it has prepared
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
