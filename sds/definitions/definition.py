"""A gate's definition: its name, its contract, the functions that open its state and its executor, and its queue of events.

    gate = GateDefinition(name="parking", contract=Path("contract.yaml"), open=lambda folder: (Fines(folder), Cashier(folder)))

`sds.definitions.registry` finds definitions; `Gate.load` and every command open them. A definition holds no state:
everything that a gate stores lies in the folder that its functions get.
"""

from __future__ import annotations

import os
import re
import shlex
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, TypeVar

from sds.engines.protocol import Engine
from sds.host import paths
from sds.kernel.canonical import in_words, one_line
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.envelope.state import Fields, StateSource
from sds.kernel.errors import SdsError, UsageError
from sds.kernel.executor.key_retention import keys_kept_ms
from sds.kernel.executor.protocol import Executor
from sds.kernel.executor.statement import StatementLine
from sds.kernel.flow.states import Answer
from sds.kernel.storage.store import Reader

DEFAULT = "refund"  # the gate of commands that name none
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
ERROR_CHARS_MAX = 300
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueuedCase:
    """One event of a gate's queue, for `sds run` and `sds events`.

    `label`: what the maker of the queue knows of it, to measure agreement by; neither kernel nor model sees it.
    `fields`: its state just before the decision, filled in by the run; None for an unknown key.
    """

    event: Mapping[str, object]
    label: Any = None
    fields: Fields | None = None


@dataclass(frozen=True, slots=True)
class LabelledCase:
    """A case with its labels, to fit readers with and to judge a gate by.

    `readings`: a careful human's values, by reading; "1" or "0" for a score. `decision`: the right kind; None: what the
    policy decides with the true readings. `amount_minor`: the amount at stake. `part`: train, calibrate or test.
    """

    text: str
    fields: Fields
    readings: Mapping[str, str]
    decision: str | None = None
    style: str = ""
    amount_minor: int = 0
    part: str = ""


class Chaos:
    """A fault that a run injects between a proposal and its execution, to show that it does no harm."""

    promises: ClassVar[tuple[str, ...]] = ()  # counts in the report that must be 0
    stops: ClassVar[bool] = False  # whether it must end the run before the run's limit

    def __init__(self, folder: Path, executor: Executor, seed: int) -> None:
        self.folder, self.executor, self.rng = folder, executor, Random(seed)  # noqa: S311  reproducible, no secret

    def engine(self, engine: Engine) -> Engine:
        """Return the engine that proposes in the run: the given one, unless the fault is in the agent."""
        return engine

    def reasoned(self, packet: DecisionPacket, data: bytes) -> None:
        """Act on a proposal that was made. One thread calls this at a time."""
        raise NotImplementedError

    def report(self, answers: Sequence[Answer], payments: Sequence[StatementLine], record: Reader) -> dict[str, int]:  # noqa: ARG002
        """Return its counts for the run's report."""
        return {}

    @staticmethod
    def summary(report: Mapping[str, Any]) -> str:  # noqa: ARG004
        """Return in one line what it did."""
        return ""

    @staticmethod
    def missing(report: Mapping[str, Any]) -> str:  # noqa: ARG004
        """Return what did not occur and leaves the run without proof; "" when the run proves something."""
        return ""


def no_faults(payments: Iterable[StatementLine]) -> list[str]:  # noqa: ARG001  the form of `Demo.faults`
    """Return no faults."""
    return []


@dataclass(frozen=True, kw_only=True)
class Demo:
    """How `sds run` shows a gate, and which faults it may inject.

    `case`: the word for an event; `outcomes`: the word for a decision of each kind; `currency`: of its amounts, which
    have two decimals; `executor`: the word for its executor; `note`: the last line. `faults`: returns what must never
    stand in a statement, a line each. `totals`: sums over all cases, each with the kind that was carried out, ESCALATE,
    or None where nothing was chosen; `NAME_minor` is the amount that belongs to the count `NAME`.
    """

    case: str = "event"
    outcomes: Mapping[str, str] = field(default_factory=dict)
    currency: str = ""
    executor: str = "executor"
    note: str = ""
    faults: Callable[[Iterable[StatementLine]], list[str]] = no_faults
    chaos: Mapping[str, type[Chaos]] = field(default_factory=dict)
    totals: Callable[[Iterable[tuple[QueuedCase, str | None]]], Mapping[str, int]] | None = None


@dataclass(frozen=True, kw_only=True)
class GateDefinition:
    """One gate. `name` is the contract's `gate`, and the name of its folder in the home.

    `contract`: a contract, its file, or a function that loads it. `open(folder)` returns state source and executor; the
    folder is there, and a part with a method `close` is closed in the end. `source(folder)` opens the state alone, for
    looking. `events` yields the queue from its beginning. `expected` returns the kind that a careful human would
    choose, to measure agreement by. `readers`: fitted readers that come with a policy; those of `sds fit` take their
    place. `labelled` yields labels. `checks`: lines of `sds doctor`; each returns what is well or raises SdsError.
    `path`: where it was found, if named by path.
    """

    name: str
    contract: Contract | Path | Callable[[], Contract]
    open: Callable[[Path], tuple[StateSource, Executor]]
    source: Callable[[Path], StateSource] | None = None
    events: Callable[[Path], Iterable[Mapping[str, object] | QueuedCase]] | None = None
    expected: Callable[[QueuedCase], str] | None = None
    readers: Path | None = None
    labelled: Callable[[Path], Iterable[LabelledCase]] | None = None
    checks: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    demo: Demo = field(default_factory=Demo)
    path: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME.fullmatch(self.name):
            raise UsageError(f"`{self.name}` is not the name of a gate", hint="write a name_in_lower_case")
        if not callable(self.open):
            raise UsageError(
                f"`open` of gate `{self.name}` is not a function", hint="write open(folder) -> (source, executor)"
            )

    @property
    def argument(self) -> str:
        """The gate as an argument of a command: its name, or its path, which has a separator."""
        if self.path is None:
            return self.name
        above = self.path.is_absolute() or self.path.parts[:1] == ("..",)
        return shlex.quote(str(self.path) if above else f".{os.sep}{self.path}")

    @property
    def option(self) -> str:
        """The gate as an option `--gate` of a command; "" where it is the default."""
        return "" if self.name == DEFAULT else f" --gate {self.argument}"

    @property
    def adoption(self) -> str:
        """The command that takes over the orders which its record lacks."""
        return f'sds reconcile {self.argument} --adopt --reason "..."'

    def load_contract(self) -> Contract:
        """Return its contract. Raises ContractError for an invalid one, UsageError for another gate's."""
        given = self.contract
        contract = load_contract(given) if isinstance(given, Path) else given
        if not isinstance(contract, Contract):
            contract = self._call("contract", contract)
        if not isinstance(contract, Contract):
            raise UsageError(f"the contract of gate `{self.name}` is neither a Contract nor a Path")
        if contract.gate != self.name:
            raise UsageError(
                f"gate `{self.name}` has the contract of gate `{contract.gate}`", hint="give both the same name"
            )
        return contract

    @contextmanager
    def opened(self, folder: Path) -> Iterator[tuple[StateSource, Executor]]:
        """Open its state source and its executor in `folder` for a block, and close them in the end."""
        paths.make_private(folder)
        with ExitStack() as closing:
            parts = self._call("open", self.open, folder)
            if not isinstance(parts, tuple) or len(parts) != 2:
                raise UsageError(
                    f"`open` of gate `{self.name}` does not return (source, executor)",
                    hint="return both: the state source, then the executor",
                )
            for part in parts:
                _close_with(closing, part)
            check_parts(*parts)
            yield parts

    @contextmanager
    def opened_source(self, folder: Path) -> Iterator[StateSource]:
        """Open its state source alone for a block."""
        if self.source is None:
            with self.opened(folder) as (source, _):
                yield source
            return
        paths.make_private(folder)
        with ExitStack() as closing:
            source = self._call("source", self.source, folder)
            _close_with(closing, source)
            _check_source(source)
            yield source

    def cases(self, folder: Path) -> list[QueuedCase]:
        """Return its whole queue. Raises UsageError where it has none."""
        if self.events is None:
            hint = f"sds decide {self.argument} --event FILE, or add `events(folder)` to its definition"
            raise UsageError(f"gate `{self.name}` has no queue of events", hint=hint)
        paths.make_private(folder)
        events = self.events
        listed = self._call("events", lambda: list(events(folder)))
        cases = [case if isinstance(case, QueuedCase) else QueuedCase(case) for case in listed]
        given: list[object] = [case.event for case in cases]
        if wrong := [each for each in given if not isinstance(each, Mapping)]:
            raise UsageError(
                f"`events` of gate `{self.name}` yields what is no event: {one_line(repr(wrong[0]), 80)}",
                hint="yield mappings with the fields of the contract's `event`, or QueuedCase(mapping)",
            )
        return cases

    def labels(self, folder: Path) -> list[LabelledCase]:
        """Return the labels that come with it; [] without any."""
        labelled = self.labelled
        return [] if labelled is None else self._call("labelled", lambda: list(labelled(folder)))

    def _call(self, what: str, function: Callable[..., T], *given: object) -> T:
        """Call one of the gate's own functions. Any exception but an SdsError becomes a UsageError that names its place."""
        try:
            return function(*given)
        except SdsError:
            raise
        except Exception as error:
            raise UsageError(
                f"`{what}` of gate `{self.name}` failed: {in_place(error)}", hint="correct the code there"
            ) from error


def in_place(error: Exception) -> str:
    """Return an error of foreign code in one line: the file and line that raised it, its type and its message."""
    if isinstance(error, SyntaxError):
        return one_line(f"{error.filename}:{error.lineno}: {error.msg}", ERROR_CHARS_MAX)
    frames = traceback.extract_tb(error.__traceback__)
    place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
    return one_line(f"{place}{type(error).__name__}: {in_words(error)}", ERROR_CHARS_MAX)


def check_parts(source: object, executor: object) -> None:
    """Raise UsageError unless these are a state source and an executor; called before anything is opened with them."""
    _check_source(source)
    methods = all(callable(getattr(executor, name, None)) for name in ("dispatch", "lookup"))
    if isinstance(executor, type) or not methods or not isinstance(getattr(executor, "idempotent", None), bool):
        raise UsageError("the executor must be an object with `idempotent` (bool), `dispatch` and `lookup`")
    keys_kept_ms(executor)  # raises UsageError for an invalid one


def _check_source(source: object) -> None:
    if isinstance(source, type) or not callable(getattr(source, "read", None)):
        raise UsageError("the state source must be an object with a method `read(key)`")


def _close_with(closing: ExitStack, part: object) -> None:
    if callable(close := getattr(part, "close", None)):
        closing.callback(close)
