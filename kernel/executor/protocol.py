"""What leaves the kernel, and the protocol of whatever carries it out.

The order is reserve (durable), dispatch, settle. An executor is called at most once for a key, unless it declares
itself idempotent and a `lookup` has just answered that the key is absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

from sds.kernel.canonical import canonical
from sds.kernel.errors import UsageError
from sds.kernel.executor.key_retention import keys_kept_ms
from sds.kernel.executor.statement import StatementLine, read_statement
from sds.kernel.storage.keyring import Signer

Settlement = Literal["settled", "rejected", "unsent", "absent", "unknown"]


@dataclass(frozen=True, slots=True)
class ExecutionIntent:
    """A validated, signed order (DIR 3.3a). `params` are integers in minor units, kernel-filled values included.

    `resource_key` is the key the state was read by, `state_version` the version of it the kernel judged: an
    executor that owns that state refuses when it no longer holds.
    """

    dfid: str
    idempotency_key: str
    kind: str
    params: tuple[tuple[str, int], ...]
    resource_key: str
    state_version: str
    signature: str = ""

    def signed_bytes(self) -> bytes:
        return canonical(
            [self.dfid, self.idempotency_key, self.kind, dict(self.params), self.resource_key, self.state_version]
        )

    def signed_by(self, signer: Signer) -> ExecutionIntent:
        return replace(self, signature=signer.sign(self.signed_bytes()))

    def is_signed_by(self, signer: Signer) -> bool:
        """Tell whether this kernel signed exactly this intent; anything that cannot be signed, it did not."""
        try:
            data, signature = self.signed_bytes(), self.signature.encode()
        except (TypeError, ValueError):
            return False
        return signer.verify(data, signature)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outside world's answer. `reference` is its own id of the effect; `detail` one line for the record.

    `rejected`: it was refused and never has an effect; the kernel asks again with a fresh order, then a human. `unsent`:
    it certainly never left this machine; the event waits. Whatever an executor raises is neither: it may have acted.
    """

    status: Settlement
    reference: str = ""
    detail: str = ""


class Executor(Protocol):
    """Carries out an intent. `idempotent`: sending the same key twice is known to have one effect at most.

    It may say with `keys_kept_ms` for how long its outside remembers a key, from the first order under it on, in
    milliseconds; without it, or None: for ever (`key_retention`).
    """

    idempotent: bool

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        """Carry it out within `deadline_s` seconds. Anything not known for certain is `unknown`, never a guess.

        Called in a thread that makes no other call meanwhile. Who is not back in time is not waited for: the order is
        UNKNOWN until the answer comes, or is looked up.
        """

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        """Tell what became of `key`. `absent` only if it is certain that nothing was done, as far as keys are kept."""


@runtime_checkable
class Voids(Protocol):
    """An executor that can also make certain that a key never has an effect. Recovery uses it instead of waiting."""

    def void(self, key: str, deadline_s: float) -> Receipt:
        """Void `key`: `rejected` once it is void, `settled` when it has happened already, else `unknown`."""


@runtime_checkable
class Reverts(Protocol):
    """An executor that can take back what it has carried out: at most once for a key, whole, however often it is asked."""

    def revert(self, key: str, deadline_s: float) -> Receipt:
        """Undo what was carried out under `key`: `settled` once it is undone, `rejected` if it never will be."""

    def reverted(self, key: str, deadline_s: float) -> Receipt:
        """Tell whether `key` was undone: `settled`, or `absent` only if it is certain that it was not."""


@runtime_checkable
class Lists(Protocol):
    """An executor that can list what it has been ordered, so that somebody can compare it with the record."""

    def statement(self, since_ms: int, until_ms: int) -> Iterable[StatementLine]:
        """List every order of this gate that was answered in this time, both ends included, as it stands now.

        One line for each key, refused ones too; times by the outside's own clock, in milliseconds since 1970.
        """


class NoExecutor:
    """Carries out nothing: for looking at what could be decided."""

    idempotent = False

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("unsent", detail="this kernel has no executor")

    def lookup(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("unknown")


class VerifyingExecutor:
    """Stands before every executor and lets only intents with the kernel's own signature through."""

    def __init__(self, executor: Executor, signer: Signer) -> None:
        self._executor, self._signer = executor, signer
        self.idempotent, self.keys_kept_ms = executor.idempotent, keys_kept_ms(executor)

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if not intent.is_signed_by(self._signer) or key != intent.idempotency_key:
            return Receipt("rejected", detail="the intent does not carry the kernel's signature; nothing was sent")
        return self._executor.dispatch(intent, key, deadline_s)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._executor.lookup(key, deadline_s)

    def void(self, key: str, deadline_s: float) -> Receipt:
        if not isinstance(self._executor, Voids):
            return Receipt("unknown", detail="absent, and this executor cannot void it")
        return self._executor.void(key, deadline_s)

    @property
    def voids(self) -> bool:
        return isinstance(self._executor, Voids)

    @property
    def lists(self) -> bool:
        return isinstance(self._executor, Lists)

    def statement(self, since_ms: int, until_ms: int) -> tuple[StatementLine, ...]:
        """Return what the executor lists. Raises UsageError where it lists nothing at all, WorldError: unreadable."""
        if not isinstance(self._executor, Lists):
            raise UsageError("this executor offers no statement", hint="give it `statement(since_ms, until_ms)`")
        return read_statement(self._executor.statement, since_ms, until_ms)

    @property
    def reverts(self) -> bool:
        return isinstance(self._executor, Reverts)

    def revert(self, intent: ExecutionIntent, deadline_s: float) -> Receipt:
        if not isinstance(self._executor, Reverts):
            return Receipt("rejected", detail="the order cannot be reverted")
        if not intent.is_signed_by(self._signer):  # its key may be on its way here
            return Receipt(
                "unknown", detail="the order does not carry a signature that is known here; nothing was asked"
            )
        return self._executor.revert(intent.idempotency_key, deadline_s)

    def reverted(self, intent: ExecutionIntent, deadline_s: float) -> Receipt:
        if not intent.is_signed_by(self._signer) or not isinstance(self._executor, Reverts):
            return Receipt("unknown", detail="the order cannot be looked up")
        return self._executor.reverted(intent.idempotency_key, deadline_s)
