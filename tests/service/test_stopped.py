"""A service that finds its record altered or its key lost sends nothing more, whoever asks, and says so to everybody."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from sds.kernel.errors import WorldError
from tests.kernel.durable import refund
from tests.service.console.office import Office, Visitor, open_office, text
from tests.service.testbed import check

KEY = "kernel.key"
SAYS = {
    "ledger": ("LEDGER_ALTERED", "the ledger was altered (the check `ledger` of /readyz)"),
    "key": ("KEY_LOST", "`kernel.key` is lost, or is another (the check `key` of /readyz)"),
}


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    with open_office(tmp_path, monkeypatch.setenv) as made:
        yield made


def spoil(office: Office, home: Path, what: str) -> None:
    """Alter an old entry of the ledger, or remove the key, and let the service look."""
    if what == "key":
        (home / "claims" / KEY).rename(home / KEY)
    else:
        with office.claims.store.transaction():
            office.claims.store.run("DROP TRIGGER ledger_no_update")
            newest = "(SELECT max(idx) FROM ledger WHERE dfid <> '')"
            office.claims.store.run(f"UPDATE ledger SET body = body || ' ' WHERE idx = {newest}")
    office.app.state.operations.health.look()


def mend(office: Office, home: Path, what: str) -> None:
    if what == "key":
        (home / KEY).rename(home / "claims" / KEY)
    else:
        with office.claims.store.transaction():
            office.claims.store.run("UPDATE ledger SET body = rtrim(body)")
    office.app.state.operations.health.look()


@pytest.mark.parametrize("what", ["ledger", "key"])
def test_people_can_end_what_waits_and_send_nothing(office: Office, tmp_path: Path, what: str) -> None:
    cases = [office.hand_over(f"C-{number}", refund("12.50")) for number in range(4)]
    api = {"Authorization": f"Bearer {office.key('api')}"}
    code, says = SAYS[what]
    with ExitStack() as opened:
        ada = opened.enter_context(Visitor(office))
        ada.log_in(office.key("ada"))
        office.app.state.service.stop_background()
        spoil(office, tmp_path, what)

        def resolved(dfid: str, decision: str) -> Any:
            given = {"decision": decision, "reason": "so it is", "acknowledge": True}
            return ada.post(f"/v1/escalations/{dfid}/resolution", json=given, headers=api)

        problem = check(resolved(cases[0], "OVERRIDE"), 503, "NOT_READY")
        assert (True, says, cases[0]) == (problem["retryable"], problem["detail"], problem["dfid"])
        page = f"/console/cases/claims/{cases[0]}"
        answer = ada.sends(page, page, decision="OVERRIDE", reason="so it is", acknowledge="yes")
        assert says in text(answer.text)
        assert "Nothing was sent." in text(answer.text)
        with pytest.raises(WorldError) as caught:
            office.claims.recover()
        assert code == caught.value.reason_code
        assert [] == office.rail.sent
        assert 200 == resolved(cases[1], "ABORT").status_code
        ada.sends(f"/console/cases/claims/{cases[2]}", page, decision="ABORT", reason="so it is")
        assert ["ABORT", "ABORT"] == [office.answer(dfid).resolution for dfid in cases[1:3]]
        for halted in (True, False):
            given = {"gate": "claims", "halted": halted, "reason": "so it is"}
            assert 200 == ada.put("/v1/halt", json=given, headers=api).status_code
        mend(office, tmp_path, what)
        assert 200 == resolved(cases[0], "OVERRIDE").status_code
        assert 1 == len(office.rail.sent)
