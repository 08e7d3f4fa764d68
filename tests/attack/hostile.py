"""Models, sources and executors that misbehave, by name; each is made for a testbed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import cycle
from typing import Any

from sds.engines.queueing import QueueTimeoutError
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.envelope.state import StateRead
from sds.kernel.errors import ModelError, StateError
from sds.kernel.executor.protocol import ExecutionIntent, Receipt

from .outside import Bank
from .testbed import Teller, Testbed

HANG_S = 0.4  # twice `dispatch_ms_max`
Make = Callable[[Testbed], object]


class Unprintable(Exception):  # noqa: N818  its text cannot be made
    def __str__(self) -> str:
        raise ValueError("there are no words for it")


class Outermost(BaseException):
    """An error that `except Exception` does not catch."""


def _raises(error: BaseException) -> Any:
    raise error


ERRORS: tuple[BaseException, ...] = (
    ValueError("x"), RecursionError(), MemoryError(), StopIteration(), Unprintable(), Outermost("o"), ModelError("\n" * 999),
    ModelError("odd", reason_code="\n\x00" * 99), KeyError("\ud800"), QueueTimeoutError("late"), OSError(5, "io"),
)  # fmt: skip


class Model(Teller):
    """A model that proposes what a function returns for a packet, or raises what it raises."""

    def __init__(self, do: Callable[[DecisionPacket], Any]) -> None:
        self._do = do

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        found: tuple[bytes, Decoding] = self._do(packet)
        return found


def _model(*steps: Callable[[DecisionPacket], Any]) -> Make:
    """Return the maker of a model that takes the next of these steps each time it is asked, in a circle."""

    def make(_bed: Testbed) -> Model:
        turn = cycle(steps)

        def do(packet: DecisionPacket) -> Any:
            step = next(turn)
            return step(packet)

        return Model(do)

    return make


def _saying(*said: Any) -> Make:
    return _model(*((lambda _packet, what=what: what) for what in said))


def _late(bed: Testbed) -> Model:
    def late(packet: DecisionPacket) -> tuple[bytes, Decoding]:
        bed.clock.ahead_ms += bed.terms.budget.ttl_ms + 1
        return Teller().said(packet), Decoding("late", 0.9)

    return Model(late)


RUBBISH = (
    b"",
    b"{}",
    b"null",
    b"\xff\xfe",
    b'{"action":"PAY","params":{"amount":1e400}',
    b"[" * 9_999,
    b"x" * 2_000_000,
)
ENGINES: dict[str, Make] = {
    "rubbish": _saying(*((data, Decoding()) for data in RUBBISH)),
    "raises anything": _model(*((lambda _packet, error=error: _raises(error)) for error in ERRORS)),
    "returns anything": _saying(
        None, (None, None), ("x", Decoding()), (b"{}", None), (b"{}", Decoding(tokens=-1)), 7, (b"", Decoding(), 1),
        (b"{}", Decoding(confidence=float("nan"))), (b"{}", Decoding(model="\ud800")), (b"{}", Decoding(tokens=1 << 80)),
        (b"{}", Decoding(facts={"x": object()})),
    ),
    "late": _late,
    "token budget": _model(lambda packet: (Teller().said(packet), Decoding("greedy", 0.9, tokens=10_000_000))),
    "no turn": _model(lambda _packet: _raises(QueueTimeoutError("full", reason_code="QUEUE_FULL"))),
    "of another snapshot": _model(
        lambda packet: (Teller().said(packet).replace(packet.snapshot.id.encode(), b"0" * 64), Decoding("other", 0.9))
    ),
    "stops the program": _model(lambda _packet: _raises(SystemExit(3)), lambda _packet: _raises(KeyboardInterrupt())),
    "slow": _model(lambda packet: (time.sleep(0.2), (Teller().said(packet), Decoding("slow", 0.9)))[1]),
}  # fmt: skip


class Source:
    """A source that takes the next of its steps each time it is read, in a circle."""

    def __init__(self, *steps: Callable[[], Any]) -> None:
        self._turn, self._lock = cycle(steps), threading.Lock()

    def read(self, key: str) -> Any:
        with self._lock:
            step = next(self._turn)
        return step()


class FailingFields(Mapping[str, Any]):
    def __getitem__(self, name: str) -> Any:
        raise LookupError(name)

    def __iter__(self) -> Iterator[str]:
        raise OSError("gone")

    def __len__(self) -> int:
        return 1


def _reading(*found: Any) -> Make:
    return lambda _bed: Source(*((lambda what=what: what) for what in found))


BALANCE = "account.balance_minor"
SOURCES: dict[str, Make] = {
    "raises": lambda _bed: Source(
        *((lambda error=error: _raises(error)) for error in (StateError("down"), ValueError(), Unprintable(), OSError(), StopIteration()))
    ),
    "returns anything": _reading(
        None, 7, "x", StateRead({}, 7), StateRead({BALANCE: 1.5}, "1"), StateRead({BALANCE: True}, "1"),  # type: ignore[arg-type, dict-item]
        StateRead({BALANCE: 10**30}, "1"), StateRead({BALANCE: None}, "1"), StateRead(FailingFields(), "1"),  # type: ignore[dict-item]
        StateRead({BALANCE: -5}, "1"), StateRead({BALANCE: 5_000}, "\ud800"), StateRead({7: 8}, "1"),  # type: ignore[dict-item]
    ),
    "hangs": lambda bed: Source(lambda: (time.sleep(HANG_S), StateRead({BALANCE: 5_000}, "1"))[1]),
    "of two minds": _reading(StateRead({BALANCE: 5_000}, "1"), StateRead({BALANCE: 10}, "2"), None),
}  # fmt: skip


class Declining:
    """A bank that declines its first `times` orders."""

    idempotent = True

    def __init__(self, bank: Bank, times: int) -> None:
        self._bank, self._left = bank, times
        self.void = bank.void

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        self._left -= 1
        return self._bank.pay(intent, key, dict(intent.params)["amount"], "settled" if self._left < 0 else "rejected")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._bank.lookup(key, deadline_s)


class Hanging:
    """A bank that takes too long. `pays`: it pays before; `blind`: its look-ups take too long, and know nothing."""

    idempotent = True

    def __init__(self, bank: Bank, *, pays: bool = True, blind: bool = False) -> None:
        self._bank, self._pays, self._blind = bank, pays, blind

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        receipt = self._bank.dispatch(intent, key, deadline_s) if self._pays else Receipt("unknown")
        time.sleep(HANG_S)
        return receipt if not self._blind else Receipt("unknown")

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        if self._blind:
            time.sleep(HANG_S)
            return Receipt("unknown")
        return self._bank.lookup(key, deadline_s)


class Raising:
    """A bank that raises the next error at each order. `pays`: it pays before; `blind`: its look-ups raise, too."""

    idempotent = True

    def __init__(
        self, bank: Bank, *, pays: bool, blind: bool = False, errors: tuple[BaseException, ...] = ERRORS
    ) -> None:
        self._bank, self._pays, self._blind = bank, pays, blind
        self._errors = cycle(errors)

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if self._pays:
            self._bank.dispatch(intent, key, deadline_s)
        raise next(self._errors)

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        if self._blind:
            raise next(self._errors)
        return self._bank.lookup(key, deadline_s)


class Answering:
    """A bank that answers with the next of ANSWERS at each order. `pays`: it pays before."""

    idempotent = True
    ANSWERS: tuple[Any, ...] = (
        None, 7, "settled", Receipt("paid"), Receipt("settled", "\ud800"), Receipt("settled", "x" * 9_999),  # type: ignore[arg-type]
        Receipt("settled", None), Receipt("unsent"), Receipt("absent"), Receipt(None), (),  # type: ignore[arg-type]
    )  # fmt: skip

    def __init__(self, bank: Bank, *, pays: bool = True) -> None:
        self._bank, self._pays = bank, pays
        self._answers = cycle(self.ANSWERS)

    def dispatch(self, intent: ExecutionIntent, key: str, deadline_s: float) -> Receipt:
        if self._pays:
            self._bank.dispatch(intent, key, deadline_s)
        answer: Receipt = next(self._answers)
        return answer

    def lookup(self, key: str, deadline_s: float) -> Receipt:
        return self._bank.lookup(key, deadline_s)


EXECUTORS: dict[str, Make] = {
    "declines for ever": lambda bed: Declining(bed.bank, 1_000),
    "declines at first": lambda bed: Declining(bed.bank, 2),
    "hangs, having paid": lambda bed: Hanging(bed.bank),
    "hangs and is blind": lambda bed: Hanging(bed.bank, blind=True),
    "hangs, having done nothing": lambda bed: Hanging(bed.bank, pays=False),
    "raises anything, having paid": lambda bed: Raising(bed.bank, pays=True),
    "raises anything and is blind": lambda bed: Raising(bed.bank, pays=True, blind=True),
    "raises anything before": lambda bed: Raising(bed.bank, pays=False),
}
