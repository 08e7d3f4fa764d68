"""Errors of psycopg as StoreError: one line, with a mend, and never with the password."""

from __future__ import annotations

import psycopg
from psycopg import errors

from sds.kernel.canonical import one_line
from sds.kernel.errors import StoreError
from sds.kernel.storage.store import MESSAGE_CHARS_MAX

NO_READ, NO_WRITE = "the store cannot be read", "the store refused"  # how messages begin
UNKNOWN_END = "the connection was lost during the commit: the record shows whether it was made"
_RUNNING = "check that PostgreSQL is running and its address right; the next call tries again"
UNREPLICATED = "the commit was made, but a standby may lack it: the wait for the standby was cancelled"
RIGHTS = "operations.md of the documentation, under A record in PostgreSQL, lists the rights that the user needs"
_UNSTORABLE = (OverflowError, UnicodeEncodeError, psycopg.DataError)
REFUSED = (psycopg.Error, OverflowError, UnicodeEncodeError)
# The server has ended the session: what was not committed is rolled back.
_ENDED = (errors.IdleInTransactionSessionTimeout, errors.TransactionTimeout)
# The same may succeed later, by itself or once an operator has mended the server.
_PASSING = (
    *(psycopg.OperationalError, psycopg.InterfaceError, *_ENDED),
    *(errors.ReadOnlySqlTransaction, errors.InsufficientPrivilege),
)
_MENDS: dict[type[psycopg.Error], str] = {
    errors.InvalidPassword: "give the right user and password in the store's URL",
    errors.InvalidAuthorizationSpecification: "give the right user and password in the store's URL",
    errors.InvalidCatalogName: "make the database first: createdb",
    errors.InsufficientPrivilege: RIGHTS,
    errors.LockNotAvailable: "another program holds the record: end that program, or try again",
    errors.DiskFull: "free space on the server's disk",
    errors.TooManyConnections: "raise max_connections, or run fewer processes",
    errors.ReadOnlySqlTransaction: "name the primary: this server only reads",
    errors.UndefinedTable: "restore the record from a backup",
    errors.SerializationFailure: "try again",
    errors.DeadlockDetected: "try again",
}


def is_lost(error: BaseException) -> bool:
    """Tell whether the connection is gone; otherwise the server refused what was asked."""
    if isinstance(error, _ENDED):
        return True
    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or isinstance(
        error, errors.PipelineAborted
    ):
        return False
    return error.sqlstate is None or error.sqlstate.startswith(("08", "57P"))


def refused(error: Exception, what: str) -> StoreError:
    """Return the StoreError that is raised in place of `error`. `what`: the beginning of its message."""
    if isinstance(error, _UNSTORABLE) and not isinstance(error, errors.IntegrityError):
        return StoreError(f"the store cannot hold such a value: {said(error)}", retryable=False)
    return StoreError(f"{what}: {said(error)}", hint=mend(error), retryable=isinstance(error, _PASSING))


def said(error: Exception) -> str:
    """Return the first line of the server's or psycopg's message."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return one_line(primary or error, MESSAGE_CHARS_MAX) or type(error).__name__


def mend(error: Exception) -> str:
    found = next((text for kind, text in _MENDS.items() if isinstance(error, kind)), "")
    return found or (_RUNNING if is_lost(error) else "")
