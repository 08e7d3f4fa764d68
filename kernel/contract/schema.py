"""The responsibility contract (DIR 3.1): who answers for a gate, and everything it may ever decide.

A contract is a YAML file in a trusted place. It is data: `sections` gives its shape; the checks here, in `policy` and in
`human_terms` hold its fields against each other; `compiler.Rules` checks and compiles its expressions. Every error names
file and line.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from sds.kernel.canonical import sha256_hex
from sds.kernel.contract.compiler import Rules, parse_type
from sds.kernel.contract.expressions import INT
from sds.kernel.contract.human_terms import check_human, human_contract
from sds.kernel.contract.policy import check_policy, policy_rules
from sds.kernel.contract.sections import MENU, ContractFields
from sds.kernel.contract.types import ContradictionError, say_first
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, load_with_lines
from sds.kernel.envelope.envelope import DENY, ESCALATE
from sds.kernel.errors import ContractError, cause_of

_FIELDS = "contract.md of the documentation says what each field means"
_EXPRESSIONS = "contract.md of the documentation says what an expression may be, under `Types and expressions`"
PROPOSAL_FIELDS = frozenset({"action", "params", "reason", "reason_code", "rationale", "context_ref"})


# Each check raises ContradictionError with the path of the wrong field.


def check_kinds(contract: ContractFields) -> None:
    kinds = contract.kinds
    refusal = contract.refusal
    if refusal not in kinds:
        named = "" if refusal == DENY else ", which `refusal` names,"
        raise ContradictionError(("kinds",), f"{refusal}{named} is missing: every contract lets its agent say no")
    if refusal != DENY and DENY in kinds:
        raise ContradictionError(("kinds", DENY), f"is a second refusal: `refusal` names {refusal}")
    if ESCALATE in kinds:
        raise ContradictionError(("kinds", ESCALATE), "must not be declared: every contract has this kind")
    spec = kinds[refusal]
    if spec.params or spec.fills or spec.executes or spec.when != "true":
        raise ContradictionError(("kinds", refusal), "may have only `reasons`: it is the refusal")
    for path, codes in ((("authority",), contract.authority), (("escalation", "always"), contract.escalation.always)):
        for index, code in enumerate(codes):
            if code not in kinds:
                raise ContradictionError((*path, index), f"`{code}` is not one of the kinds")


def check_sagas(contract: ContractFields) -> None:
    for field in ("id", "key", "evidence"):
        if getattr(contract.event, field) == "saga":
            raise ContradictionError(("event", field), "must not be `saga`: each step of a saga has that field")
    for name, saga in contract.sagas.items():
        if name in contract.kinds:
            raise ContradictionError(("sagas", name), "is already the name of a kind")
        for kind in (*contract.kinds, *contract.human.kinds):
            if kind in MENU:
                raise ContradictionError(("kinds", kind), "is reserved: in a saga it names a way to compensate")
        for index, step in enumerate(saga.steps):
            if step not in contract.kinds or not contract.kinds[step].executes:
                raise ContradictionError(("sagas", name, "steps", index), f"`{step}` is not a kind with a side effect")
        if "ALERT_HUMAN" not in saga.compensation:
            raise ContradictionError(("sagas", name, "compensation"), "ALERT_HUMAN is missing: every saga needs it")


def check_monitors(contract: ContractFields) -> None:
    known = {code for kind in contract.kinds.values() for code in kind.reasons}
    names = [monitor.name for monitor in contract.monitors]
    for index, monitor in enumerate(contract.monitors):
        at = ("aggregate_thresholds", index)
        if monitor.name in names[:index]:
            raise ContradictionError((*at, "name"), f"`{monitor.name}` is the name of another monitor")
        if monitor.reason is not None and monitor.reason not in known:
            raise ContradictionError((*at, "reason"), f"no kind has the reason `{monitor.reason}`")
        if monitor.reading is not None:
            values = contract.readings[monitor.reading].values if monitor.reading in contract.readings else {}
            if not values:
                raise ContradictionError((*at, "reading"), f"`{monitor.reading}` is not a reading with `values`")
            for value in monitor.expected:
                if value not in values:
                    raise ContradictionError((*at, "expected", value), f"is not a value of `{monitor.reading}`")


def check_paths(contract: ContractFields) -> None:
    """Check that every path that is named is a declared field."""
    named: list[tuple[tuple[str | int, ...], str]] = [(("show", path), path) for path, _ in contract.show]
    named += [(("levels", path), path) for path in contract.levels]
    named += [(("labels", path), path) for path in contract.labels]
    named += [(("drift", "fields", path), path) for path in contract.drift.fields]
    named += [(("spend", i, "per"), limit.per) for i, limit in enumerate(contract.spend) if limit.per]
    named += [(("kinds", name, "draws", path), path) for name, kind in contract.kinds.items() for path in kind.draws]
    for at, path in named:
        if path not in contract.snapshot:
            raise ContradictionError(at, f"`{path}` is not a declared snapshot field")


def check_levels(contract: ContractFields) -> None:
    """Check that a field with levels is a number and is shown to the model: words that nobody reads are a mistake."""
    shown = dict(contract.show) or contract.snapshot
    for path in contract.levels:
        if parse_type(path, contract.snapshot[path]).kind != INT:
            raise ContradictionError(("levels", path), "is not a number and cannot have levels")
        if path not in shown:
            raise ContradictionError(("levels", path), "is not shown to the model: name it in `show`")


def check_labels(contract: ContractFields) -> None:
    """Check that no two fields are the same to those who read their labels."""
    taken = dict[str, str]()
    for path, label in contract.labels.items():
        if (other := taken.setdefault(label.casefold(), path)) != path:
            raise ContradictionError(("labels", path), f"has the label of `{other}`")


def check_names(contract: ContractFields) -> None:
    """Check that no parameter has the name of a field of every proposal: it is recorded as a choice under its name."""
    for name, kind in contract.kinds.items():
        for param in PROPOSAL_FIELDS.intersection(kind.params):
            raise ContradictionError(("kinds", name, "params", param), "is reserved: every proposal has such a field")


def check_numbers(contract: ContractFields) -> None:
    """Check that what is drawn, spent or may drift is a number, and that numbers that are compared share a scale."""
    fields = {path: parse_type(path, text) for path, text in contract.snapshot.items()}
    for path, rule in contract.drift.fields.items():
        if rule.moves and fields[path].kind != INT:
            raise ContradictionError(("drift", "fields", path), "is not a number and can only be strict")
    names = [limit.name for limit in contract.spend]
    for index, limit in enumerate(names):
        if limit in names[:index]:  # two limits of one name would share a counter
            raise ContradictionError(("spend", index, "name"), f"`{limit}` is the name of another limit")
    spent: set[int] = set()
    for name, kind in contract.kinds.items():
        for path, drawn in kind.draws.items():
            if fields[path].kind != INT:
                raise ContradictionError(("kinds", name, "draws", path), "is not a number and cannot be drawn from")
            if isinstance(drawn, str) and kind.scale(drawn) != fields[path].scale:
                raise ContradictionError(("kinds", name, "draws", path), f"must have the same scale as `{drawn}`")
        spent |= {kind.scale(kind.spends)} if kind.spends else set()
        if len(spent) > 1:
            raise ContradictionError(("kinds", name, "spends"), "must have the same scale as what other kinds spend")


# The checks that a human's terms have to pass, too.
CHECKS = (check_kinds, check_paths, check_levels, check_labels, check_names, check_numbers)


class Contract(ContractFields):
    """A whole responsibility contract whose fields are checked against each other."""

    @model_validator(mode="after")
    def _whole(self) -> Contract:
        check_sagas(self)
        check_monitors(self)
        for check in CHECKS:
            check(self)
        check_policy(self)
        check_human(self, CHECKS)
        return self


def load_contract(path: Path, *, checksum: str | None = None) -> Contract:
    """Load a contract from a trusted place. Raises ContractError.

    Trusted means: a regular file that others cannot write and, when `checksum` is given (SHA-256 of the file, 64
    hexadecimal digits), exactly those bytes.
    """
    try:
        raw = _read_trusted(path)
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {cause_of(error)}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ContractError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    if checksum is not None and sha256_hex(raw) != checksum:
        message = f"{path}: the checksum differs from the one it was released with"
        hint = "fetch the file again from where it was released; run `sha256sum` there for its checksum"
        raise ContractError(message, reason_code="CONTRACT_TAMPERED", hint=hint)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{path}: not UTF-8 at byte {error.start}", hint="save it as UTF-8") from error
    return parse_contract(text, str(path))


def _read_trusted(path: Path) -> bytes:
    """Read a file that is checked after it was opened: another file of the same name cannot take its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe must not block
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):  # reading a pipe or a device may never end
            raise ContractError(f"{path}: not a regular file")
        if mode & stat.S_IWOTH:
            raise ContractError(f"{path}: anyone can write this file", hint=f"chmod o-w {path}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)


def parse_contract(text: str, name: str = "contract") -> Contract:
    """Return the contract in `text`. Raises ContractError with `name` and the line."""
    if not isinstance(text, str):
        raise ContractError(f"{name}: the contract is not text", hint="to read a file, call load_contract(path)")
    try:
        return _parsed(text, name)
    except ContractError:
        load_with_lines(text, name)  # refuses control characters: the message would repeat them
        raise


def _parsed(text: str, name: str) -> Contract:
    """Return the contract in `text`. Control characters in it are refused when it is registered, not once it is in force."""
    data, lines = load_with_lines(text, name, controls=True)
    try:
        contract = Contract.model_validate(_tuples(data))
    except ValidationError as error:
        line, message = say_first(error.errors(include_url=False), lines, Contract)
        raise ContractError(f"{name}:{line}: {message}", hint=_FIELDS) from error
    prefix: tuple[str | int, ...] = ()
    try:
        Rules(contract)
        policy_rules(contract)
        prefix = ("human",)
        Rules(human_contract(contract))
    except ContractError as error:
        where = (*prefix, *getattr(error, "path", ()))
        while where not in lines:  # an expression that was left out has the line of its kind
            where = where[:-1]
        message = f"{name}:{lines[where]}: {'.'.join(map(str, where))}: {error}"
        raise ContractError(message, hint=error.hint or _EXPRESSIONS) from error
    return contract


def _tuples(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_tuples(item) for item in data)
    return {k: _tuples(v) for k, v in data.items()} if isinstance(data, dict) else data
