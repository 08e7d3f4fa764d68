"""A gate of one's own with readings and labels, at `claims/gate.py`, and fitters that need no library."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sds.judgement import fitting
from sds.policy import judgement
from tests.cli.conftest import Cli
from tests.gates.own import written
from tests.judgement.claims import CLAIMS, fitters, opened

GATE = '''
from dataclasses import replace
from sds import GateDefinition, Receipt, StateRead, parse_contract
from tests.judgement.claims import cases


class Trips:
    idempotent = True

    def read(self, key):
        fields = {"trip.delay_min": 90, "trip.open_minor": 5000, "trip.known": True}
        return StateRead(fields, version="1") if key.startswith("TRIP") else None

    def dispatch(self, intent, key, deadline_s):
        return Receipt("settled", reference=key[:12])

    def lookup(self, key, deadline_s):
        return Receipt("absent")


def events(folder):
    return [
        {"claim_id": f"C-{n}", "trip_id": f"TRIP-{n}", "text": case.text} for n, case in enumerate(cases(6, seed=5))
    ]


def labelled(folder):
    return cases(1200, noise=0.01)


gate = GateDefinition(
    name="claims",
    contract=parse_contract("""CONTRACT"""),
    open=lambda folder: (Trips(), Trips()),
    events=events,
    labelled=labelled,
)
'''


def gate_of(contract: str = CLAIMS) -> str:
    return GATE.replace("CONTRACT", contract.replace('"', '\\"'))


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("SDS_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(judgement, "open_reader", opened)
    monkeypatch.setattr(fitting, "open_fitters", lambda **_: (fitters(), ("a head, not the tuned encoder",)))
    written(tmp_path / "claims", gate_of())
    return Cli(capsys, monkeypatch, tmp_path / "home" / "claims")


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have keys be typed, one line each, as what is no terminal gives them."""
    import io
    import sys

    return lambda keys: monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{key}\n" for key in keys)))
