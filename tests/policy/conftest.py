"""A gate with a policy and fitted readers of its own: a tiny encoder with a head, really fitted, really opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.kernel.canonical import sha256_hex
from sds.kernel.contract.schema import Contract, parse_contract
from sds.policy.judgement import CHECKSUM, FILE, checksum_line, readings_hash, rules_hash
from tests.gates.own import GATE
from tests.models.readers.conftest import base, fitted_head

__all__ = ["base", "fitted_head"]

SECTIONS = """
readings:
  cause:
    question: Which cause is stated?
    values: {weather: the weather, crew: people, technical: the vehicle}
policy:
  - {kind: WAIVE, reason: EMERGENCY, when: "reading.cause == 'technical'", params: {amount: car.open_minor}}
  - {kind: DENY, reason: NO_REASON, when: "reading.cause == 'weather'"}
  - otherwise: ESCALATE
"""
CODE = GATE.replace("spend:\n", SECTIONS.lstrip() + "spend:\n")
BOUNDED = CODE.replace("spend:\n", "max_error: 0.05\nspend:\n", 1)

Judge = Callable[..., Path]


def contract_of(code: str) -> Contract:
    return parse_contract(code.split('"""')[1])


@pytest.fixture
def judgement(fitted_head: Path, tmp_path: Path) -> Judge:
    """Write a folder of fitted readers for a contract; `changes`: of what its `judgement.json` says."""

    def write(contract: Contract, *, least: float | None = 0.6, **changes: object) -> Path:
        folder = tmp_path / "fitted"
        folder.mkdir(exist_ok=True)
        shutil.copytree(fitted_head, folder / "cause", dirs_exist_ok=True)
        threshold = {"max_error": "0.05", "least": least, "accepted": 100, "wrong": 1, "missing": 0}
        manifest = {
            "schema": 1,
            "gate": contract.gate,
            "readings": readings_hash(contract),
            "rules": rules_hash(contract),
            "readers": {"cause": sha256_hex((folder / "cause" / "reader.json").read_bytes())},
            "thresholds": dict.fromkeys(contract.kinds, threshold),
        }
        raw = json.dumps(manifest | changes).encode()
        (folder / FILE).write_bytes(raw)
        (folder / CHECKSUM).write_bytes(checksum_line(raw))
        return folder

    return write
