"""The responsibility contract (DIR 3.1): who answers for a gate, and everything it may ever decide.

A contract is a YAML file in a trusted place. It is data: `sections` says its shape, `checks` and `human_terms` what its
fields must say together, `compiler.Rules` checks and compiles its expressions. Every error names file and line.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError, model_validator

from sds.kernel.canonical import sha256_hex
from sds.kernel.contract.checks import CHECKS, check_monitors, check_sagas
from sds.kernel.contract.compiler import Rules
from sds.kernel.contract.human_terms import check_human, human_contract
from sds.kernel.contract.policy.checks import check_policy, policy_rules
from sds.kernel.contract.sections import ContractFields
from sds.kernel.contract.types import say_first
from sds.kernel.contract.yaml_lines import FILE_BYTES_MAX, load_with_lines
from sds.kernel.errors import ContractError


class Contract(ContractFields):
    """A whole responsibility contract, its fields checked against each other."""

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
    """Load a contract from a trusted place.

    Trusted means: a regular file that others cannot write, and, when `checksum` is given (64 hexadecimal digits,
    SHA-256 of the file), exactly those bytes. Raises ContractError.
    """
    try:
        raw = _read_trusted(path)
    except OSError as error:
        raise ContractError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > FILE_BYTES_MAX:
        raise ContractError(f"{path}: larger than {FILE_BYTES_MAX} bytes")
    if checksum is not None and sha256_hex(raw) != checksum:
        raise ContractError(
            f"{path}: the checksum differs from the one it was released with", reason_code="CONTRACT_TAMPERED"
        )
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ContractError(f"{path}: not UTF-8 at byte {error.start}") from error
    return parse_contract(text, str(path))


def _read_trusted(path: Path) -> bytes:
    """Read a file that was checked after it was opened: what has the name later cannot take its place."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)  # a pipe has no writer yet
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):  # a pipe or a device could be read for ever
            raise ContractError(f"{path}: not a regular file")
        if mode & stat.S_IWOTH:
            raise ContractError(f"{path}: anyone can write this file", hint=f"chmod o-w {path}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(FILE_BYTES_MAX + 1)
    finally:
        os.close(descriptor)


def parse_contract(text: str, name: str = "contract") -> Contract:
    """Return the contract in `text`. Raises ContractError with `name` and line."""
    if not isinstance(text, str):
        raise ContractError(f"{name}: the contract is no text", hint="load_contract(path) reads a file")
    data, lines = load_with_lines(text, name)
    try:
        contract = Contract.model_validate(_tuples(data))
    except ValidationError as error:
        line, message = say_first(error.errors(include_url=False), lines)
        raise ContractError(f"{name}:{line}: {message}") from error
    prefix: tuple[str | int, ...] = ()
    try:
        Rules(contract)
        policy_rules(contract)
        prefix = ("human",)
        Rules(human_contract(contract))
    except ContractError as error:
        where = (*prefix, *getattr(error, "path", ()))
        while where not in lines:  # an expression that was left out stands where its kind does
            where = where[:-1]
        raise ContractError(f"{name}:{lines[where]}: {'.'.join(map(str, where))}: {error}") from error
    return contract


def _tuples(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(_tuples(item) for item in data)
    return {k: _tuples(v) for k, v in data.items()} if isinstance(data, dict) else data
