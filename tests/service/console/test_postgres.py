"""The console over records that lie in PostgreSQL: every page, and what its forms do."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.kernel.audit.verify import verify
from tests.kernel.durable import refund
from tests.service.console.office import Office, Visitor, busy, open_office, text
from tests.stores.server import own_database


@pytest.fixture
def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Office]:
    """An office whose records and sessions lie in a database of its own."""
    with own_database() as url, open_office(tmp_path, monkeypatch.setenv, store=url) as made:
        yield made


def test_a_day_at_the_console_over_postgresql(far: Office) -> None:
    flows = busy(far)
    with Visitor(far) as ada:
        ada.log_in(far.key("ada"))
        queue = re.findall(r'class="event" href="[^"]*">([^<]*)<', ada.get("/console?sort=impact").text)
        assert ["C-1001", "C-1002", "C-1003", "H-2001", "C-1004"] == queue
        path = f"/console/cases/claims/{flows['small']}"
        seen = re.search(r'name="seen" value="([^"]*)"', ada.get(path).text)
        assert seen is not None
        ada.sends(f"{path}/take", take="yes")
        assert "yours" in ada.get("/console").text
        far.tickets.put("T-C-1002", refundable_minor=9_000)
        fields = {"decision": "OVERRIDE", "reason": "checked", "acknowledge": "yes"}
        refused = ada.sends(path, **fields, seen=seen[1], shown='{"ticket.refundable_minor": "200.00 EUR"}')
        assert "ticket.refundable_minor 200.00 EUR 200.00 EUR 90.00 EUR changed since you looked" in text(refused.text)
        looked = re.search(r'name="seen" value="([^"]*)"', refused.text)
        assert looked is not None
        assert 303 == ada.sends(path, **fields, seen=looked[1]).status_code
        assert ("OVERRIDE", "ada") == (far.answer(flows["small"]).resolution, far.answer(flows["small"]).resolved_by)
        assert 303 == ada.sends("/console/live/claims", act="halt", reason="wrong fares").status_code
        live = text(ada.get("/console/live").text)
        assert "by ada: wrong fares" in live
        assert "claims halted" in live
        record = text(ada.get(f"/console/decisions/claims/{flows['small']}").text)
        assert "decision OVERRIDE who ada reason checked" in record
        assert f"/console/decisions/claims/{flows['open']}" == ada.get("/console/find?q=C-1004").headers["location"]
        assert 200 == ada.get("/console/find?q=%00").status_code
        far.revoke("ada")
        assert "/console/login" == ada.get("/console").headers["location"]
    assert () == verify(far.claims.store).faults
    assert 1 == len(far.rail.paid())


def test_of_one_case_and_two_people_on_postgresql_one_decides(far: Office) -> None:
    dfid = far.hand_over("C-1", refund("40.00"))
    path = f"/console/cases/claims/{dfid}"
    with Visitor(far) as ada, Visitor(far) as bob:
        for visitor, name in ((ada, "ada"), (bob, "bob")):
            visitor.log_in(far.key(name))
        assert 303 == bob.sends(path, decision="ABORT", reason="withdrawn").status_code
        refused = ada.sends(path, decision="OVERRIDE", reason="checked", acknowledge="yes")
        assert "is resolved already: ABORT by bob" in refused.text
    assert [] == far.rail.paid()
