"""What leaves the kernel, and the protocol of what carries it out.

The order of steps is: reserve (durable), dispatch, settle. An executor is called at most once for a key, unless it declares
itself idempotent and a `lookup` has just answered that the key is absent.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import PurePath
from traceback import extract_tb
from typing import Literal, Protocol, get_args, runtime_checkable

from sds.kernel.canonical import canonical, in_words, one_line
from sds.kernel.errors import UsageError
from sds.kernel.executor.key_retention import keys_kept_ms
from sds.kernel.executor.statement import StatementLine, read_statement
from sds.kernel.storage.keyring import Signer

Settlement = Literal["settled", "rejected", "unsent", "absent", "pending", "unknown"]

REFERENCE_CHARS_MAX = 200
DETAIL_CHARS_MAX = 400  # holds what the executor raised and what the look-up found


@dataclass(frozen=True, slots=True)
class ExecutionIntent:
    """A validated, signed order (DIR 3.3a). `params` are integers in minor units, the kernel's fills included.

    `resource_key`: the key by which the state was read. `state_version`: the version of that state which the kernel judged;
    an executor that owns the state refuses when it has another version by now.
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
        """Tell whether this kernel signed exactly this intent. It never signed one that cannot be encoded."""
        try:
            data, signature = self.signed_bytes(), self.signature.encode()
        except (TypeError, ValueError):
            return False
        return signer.verify(data, signature)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The outside's answer. `reference`: its own id of the effect. `detail`: one line for the record.

    `rejected`: the order was refused and never has an effect; the kernel may order afresh, then asks a human. `unsent`: the
    order certainly never left this machine; its event waits. `pending`: the outside has accepted the order, and has neither
    carried it out nor refused it yet; it is looked up until it has, and never sent again. An exception means none of these:
    the executor may have acted.
    """

    status: Settlement
    reference: str = ""
    detail: str = ""


def raised(error: BaseException) -> tuple[str, str]:
    """Return what an executor raised, as one line, and the file and line where it did."""
    frames = extract_tb(error.__traceback__)
    place = f"{PurePath(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
    return one_line(f"{type(error).__name__}: {in_words(error)}", DETAIL_CHARS_MAX // 2), place


def cleaned(receipt: Receipt) -> Receipt:
    """Return a receipt as the record can keep it. Raises when what the executor, foreign code, returned is no receipt."""
    if receipt.status not in get_args(Settlement):
        raise ValueError(f"`{receipt.status}` is not a status of a receipt")
    reference = one_line(receipt.reference, REFERENCE_CHARS_MAX)
    return Receipt(receipt.status, reference, one_line(receipt.detail, DETAIL_CHARS_MAX))


class Executor(Protocol):
    """Carries out an intent. `idempotent`: sending the same key twice is known to have at most one effect.

    With `keys_kept_ms` it may say for how long its outside remembers a key, in milliseconds from the first order under it.
    Without it, or with None, the outside remembers for ever (`key_retention`).
    """

    idempotent: bool

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        """Carry the intent out within `deadline_s` seconds. What is not certain is `unknown`, never a guess.

        It is called in a thread that makes no other call meanwhile. If it returns late nobody waits for it: the order is
        UNKNOWN until the answer comes, or is looked up.
        """

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        """Tell what became of `key`. `absent`: it is certain that nothing was done, for as long as keys are kept."""


@runtime_checkable
class LooksUpOrders(Protocol):
    """An executor whose look-up needs more than the key. It can compare what it finds with what was ordered."""

    def lookup_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        """Do what `lookup` does. `reference`: the outside's id of an order that it called `pending`; "" without one."""


@runtime_checkable
class Voids(Protocol):
    """An executor that can also ensure that a key never has an effect. Recovery uses this instead of waiting."""

    def void(self, key: str, deadline_s: float) -> Receipt:
        """Void `key`: `rejected` once it is void, `settled` when it was carried out already, else `unknown`."""


@runtime_checkable
class Reverts(Protocol):
    """An executor that can undo what it has carried out: at most once for a key, completely, however often it is asked."""

    def revert(self, key: str, deadline_s: float) -> Receipt:
        """Undo what was carried out under `key`: `settled` once it is undone, `rejected` if it never will be."""

    def reverted(self, key: str, deadline_s: float) -> Receipt:
        """Tell whether `key` was undone: `settled`, or `absent` when it is certain that it was not."""


@runtime_checkable
class RevertsOrders(Protocol):
    """An executor that can undo, and needs more for that than the key. `reference`: the outside's id of what was carried out;
    "" without one.
    """

    def revert_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        """Do what `revert` does."""

    def reverted_order(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        """Do what `reverted` does."""


@runtime_checkable
class Lists(Protocol):
    """An executor that can list its orders, so that they can be compared with the record."""

    def statement(self, since_ms: int, until_ms: int) -> Iterable[StatementLine]:
        """List every order of this gate that was answered between these times, both included, as it stands now.

        One line for each key, refused ones too. Times are by the outside's own clock, in milliseconds since 1970.
        """


class NoExecutor:
    """Carries out nothing: for a kernel that only previews decisions."""

    idempotent = False

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("unsent", detail="this kernel has no executor")

    def lookup(self, key: str, deadline_s: float) -> Receipt:  # noqa: ARG002
        return Receipt("unknown")


class VerifyingExecutor:
    """Stands before an executor and lets only intents with the kernel's own signature through."""

    def __init__(self, executor: Executor, signer: Signer) -> None:
        self._executor, self._signer = executor, signer
        self.idempotent, self.keys_kept_ms = executor.idempotent, keys_kept_ms(executor)

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if not intent.is_signed_by(self._signer) or key != intent.idempotency_key:
            return Receipt("rejected", detail="the order has another key or no valid signature; nothing was sent")
        return self._executor.dispatch(intent, key, deadline_s)

    def lookup(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        if isinstance(self._executor, LooksUpOrders):
            return self._executor.lookup_order(intent, reference, deadline_s)
        return self._executor.lookup(intent.idempotency_key, deadline_s)

    def void(self, key: str, deadline_s: float) -> Receipt:
        if not isinstance(self._executor, Voids):
            return Receipt("unknown", detail="absent, but this executor cannot void orders")
        return self._executor.void(key, deadline_s)

    @property
    def voids(self) -> bool:
        return isinstance(self._executor, Voids)

    @property
    def lists(self) -> bool:
        return isinstance(self._executor, Lists)

    def statement(self, since_ms: int, until_ms: int) -> tuple[StatementLine, ...]:
        """Return what the executor lists. Raises UsageError when it cannot list, WorldError: the list is unreadable."""
        if not isinstance(self._executor, Lists):
            raise UsageError("this executor offers no statement", hint="give it `statement(since_ms, until_ms)`")
        return read_statement(self._executor.statement, since_ms, until_ms)

    @property
    def reverts(self) -> bool:
        return isinstance(self._executor, Reverts | RevertsOrders)

    def revert(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        if not isinstance(self._executor, Reverts | RevertsOrders):
            return Receipt("rejected", detail="this executor cannot revert orders")
        if not intent.is_signed_by(self._signer):  # the key it was signed with may not have arrived here yet
            return Receipt("unknown", detail="the order's signature is not known here; nothing was asked")
        if isinstance(self._executor, RevertsOrders):
            return self._executor.revert_order(intent, reference, deadline_s)
        return self._executor.revert(intent.idempotency_key, deadline_s)

    def reverted(self, intent: ExecutionIntent, reference: str, deadline_s: float) -> Receipt:
        if not intent.is_signed_by(self._signer) or not isinstance(self._executor, Reverts | RevertsOrders):
            return Receipt("unknown", detail="the reversal cannot be looked up")
        if isinstance(self._executor, RevertsOrders):
            return self._executor.reverted_order(intent, reference, deadline_s)
        return self._executor.reverted(intent.idempotency_key, deadline_s)
