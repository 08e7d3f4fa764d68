"""The one error tree of the project.

    SdsError
    ├── UsageError            the caller's mistake: fix the call, the file or the flag
    │   ├── ContractError       a contract that cannot be loaded (file, line, field)
    │   ├── EventError          a trigger that is malformed or contradicts an earlier one
    │   ├── ErasedError         a text whose key was destroyed
    │   └── TransitionError     a lifecycle move that this caller may not make
    └── WorldError            not the caller's mistake: state, storage, model or machine
        ├── StoreError          the durable store refused or is damaged
        │   └── CaseKeyError      the key of a case is wrapped under no key of this kernel
        ├── StateError          the authoritative state could not be read
        ├── ModelError          weights, tokenizer or decoding failed
        ├── LanguageError       the envelope has no language within the limits
        └── ExecutorError       the outside cannot be opened or asked; raised by a dispatch, it may have acted

A verdict is never an exception: what the kernel finds about a proposal is a value (`decision.dim`). Messages are one line,
lower-case, with the user's own words in backticks. `retryable`: the same call, made again, may succeed; an event that is
sent again is decided once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath
from traceback import extract_tb


class SdsError(Exception):
    """Base of every error this project raises on purpose."""

    reason_code: str = "INTERNAL"
    retryable: bool = False

    def __init__(
        self, message: str, *, reason_code: str = "", hint: str = "", dfid: str = "", retryable: bool | None = None
    ) -> None:
        super().__init__(message)
        self.reason_code = reason_code or type(self).reason_code
        self.hint = hint
        self.dfid = dfid
        self.retryable = type(self).retryable if retryable is None else retryable


class UsageError(SdsError):
    reason_code = "USAGE"


class ContractError(UsageError):
    reason_code = "CONTRACT_INVALID"


class EventError(UsageError):
    reason_code = "EVENT_INVALID"


class ErasedError(UsageError):
    reason_code = "ERASED"


class TransitionError(UsageError):
    reason_code = "TRANSITION_FORBIDDEN"


class WorldError(SdsError):
    reason_code = "UNAVAILABLE"
    retryable = True


class StoreError(WorldError):
    reason_code = "STORE_UNAVAILABLE"


class CaseKeyError(StoreError):
    """The key of a case is wrapped under no key of this kernel: that key is lost, or the record was altered."""


class StateError(WorldError):
    reason_code = "STATE_UNAVAILABLE"


class ModelError(WorldError):
    reason_code = "MODEL_UNAVAILABLE"


class LanguageError(WorldError):
    reason_code = "LANGUAGE_TOO_LARGE"
    retryable = False


class ExecutorError(WorldError):
    reason_code = "EXECUTOR_REFUSED"


def cause_of(error: OSError) -> str:
    """Return what the operating system says of a failure, for the end of a message: `no such file or directory`."""
    return (error.strerror or "unknown cause").lower()


def place_of(error: BaseException) -> str:
    """Return the file and line of this program where an error came through last."""
    frames = [frame for frame in extract_tb(error.__traceback__) if "sds" in PurePath(frame.filename).parts]
    return f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "a place outside sds"


# These end the program; they say nothing about the code in which they are raised.
ENDINGS = (KeyboardInterrupt, SystemExit, GeneratorExit)
# What is raised while data is read that is not of the form in which it was written. The reader raises one typed line instead.
NOT_AS_WRITTEN = (AttributeError, LookupError, TypeError, ValueError, ArithmeticError, RecursionError)


@contextmanager
def reading(error: SdsError) -> Iterator[None]:
    """Raise `error` in place of what is raised in the block, where data are not of the form in which they were written."""
    try:
        yield
    except NOT_AS_WRITTEN as cause:
        raise error from cause


def unreadable(dfid: str) -> StoreError:
    """Return the error for a flow whose rows are not of the form in which they were written."""
    return StoreError(
        f"the record of flow `{dfid}` cannot be read", hint="sds ledger verify", dfid=dfid, retryable=False
    )
