"""The live page: what is decided now, and who may stop it."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest

from sds.engines.breaker import FAILURES_MAX
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError
from sds.kernel.registry import registry
from tests.kernel.durable import deny, escalate
from tests.policy.scripted import on_demand
from tests.proposers import Says
from tests.service.console.office import Office, Visitor, text


def test_the_live_page_counts_what_was_decided_and_who_is_at_work(office: Office, ada: Visitor) -> None:
    for number in range(3):
        office.hand_over(f"D-{number}", deny)
    office.hand_over("C-1", escalate)
    shown = text(ada.get("/console/live/now").text)
    assert re.search(r"claims decided 4 handed to a human 1 half took at most \(p50\) \d+ ms", shown)
    assert "claims-agent ACTIVE" in shown
    assert (
        "paid_mean not judged yet paid_mean_minor (in minor units, such as cents) in the last 30 decisions, warns at 20000, stops the agent at 60000"
        in shown
    )
    assert re.search(r"D-2 DENY CLOSED in \d+ ms", shown)


def test_what_was_decided_long_ago_is_not_now(office: Office, ada: Visitor) -> None:
    office.hand_over("D-1", deny)
    later_ms = office.clock() + 16 * 60_000
    office.clock = lambda: later_ms
    assert re.search(
        r"claims decided 0 handed to a human 0 half took at most \(p50\) . 99 of 100 took at most \(p99\) .",
        text(ada.get("/console/live/now").text),
    )


def stop(visitor: Visitor) -> str:
    """Return what the live page's form has of the only stop that it shows; "" where it shows none."""
    return "".join(re.findall(r'name="since" value="([0-9]+)"', visitor.get("/console/live").text))


def test_an_operator_halts_and_resumes_and_the_ledger_says_who_and_why(office: Office, ada: Visitor) -> None:
    assert 303 == ada.sends("/console/live/claims", act="halt", reason="wrong fares").status_code
    assert office.claims.store.halted
    assert not office.holds.store.halted
    assert "by ada: wrong fares" in ada.get("/console/live").text
    assert 303 == ada.sends("/console/live/claims", act="resume", reason="corrected", since=stop(ada)).status_code
    assert not office.claims.store.halted


def test_an_operator_suspends_and_reactivates_an_agent(office: Office, ada: Visitor) -> None:
    for act, status in (("suspend", "SUSPENDED"), ("reactivate", "ACTIVE")):
        fields = {"act": act, "agent": "claims-agent", "reason": "looked into it", "since": stop(ada)}
        assert 303 == ada.sends("/console/live/claims", **fields).status_code
        assert status == registry.agents(office.claims.store)[0].status
        assert (
            f"{'Reactivate' if act == 'suspend' else 'Suspend'} claims-agent at claims" in ada.get("/console/live").text
        )
        assert "by ada: looked into it" in ada.get("/console/live").text


def test_nobody_resumes_or_reactivates_what_was_stopped_for_another_reason_than_their_page_shows(
    office: Office, ada: Visitor
) -> None:
    starts = {"resume": "halt", "reactivate": "suspend"}
    for start, end in starts.items():
        fields = {"agent": "claims-agent", "reason": "wrong fares"}
        ada.sends("/console/live/claims", act=end, **fields)
        old = stop(ada)
        ada.sends("/console/live/claims", act=start, since=old, **fields)
        ada.sends("/console/live/claims", act=end, **fields | {"reason": "the rail is not ours"})
        for since in (old, "", "x"):
            refused = ada.sends("/console/live/claims", act=start, since=since, **fields)
            assert 409 == refused.status_code
            assert "it was stopped anew after you looked" in text(refused.text)
            assert "by ada: the rail is not ours" in text(refused.text)
        assert 303 == ada.sends("/console/live/claims", act=start, since=stop(ada), **fields).status_code
    assert ("ACTIVE", False) == (registry.agents(office.claims.store)[0].status, office.claims.store.halted)


def test_what_an_operator_may_not_do_is_said(office: Office, ada: Visitor) -> None:
    for fields, said in (
        ({"act": "halt", "reason": " "}, "a reason is needed"),
        ({"act": "halt", "reason": "\u3164\u200b"}, "a reason is needed"),
        ({"act": "suspend", "agent": "claims-agent", "reason": "\u3164\u200b"}, "a reason is needed"),
        ({"act": "resume", "reason": "x"}, "the gate is running already"),
        ({"act": "reactivate", "agent": "claims-agent", "reason": "x"}, "agent `claims-agent` is ACTIVE already"),
        ({"act": "suspend", "agent": "nobody", "reason": "x"}, "there is no agent `nobody`"),
        ({"act": "retire", "agent": "claims-agent", "reason": "x"}, "there is no action `retire` on this page"),
    ):
        answer = ada.sends("/console/live/claims", **fields)
        assert 409 == answer.status_code
        assert said in html.unescape(answer.text)
    assert not office.claims.store.halted


@pytest.mark.parametrize(("act", "status"), [("suspend", "SUSPENDED"), ("reactivate", "ACTIVE")])
def test_of_two_operators_who_move_an_agent_at_once_the_second_learns_that_it_is_done(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch, act: str, status: str
) -> None:
    move = registry.transition
    if act == "reactivate":
        ada.sends("/console/live/claims", act="suspend", agent="claims-agent", reason="wrong fares")

    def after_bob(*given: Any, **how: Any) -> object:
        move(*given, **how | {"who": "bob", "reason": "I was faster"})
        return move(*given, **how)

    monkeypatch.setattr(registry, "transition", after_bob)
    fields = {"act": act, "agent": "claims-agent", "reason": "looked into it", "since": stop(ada)}
    shown = text(ada.sends("/console/live/claims", **fields).text)
    assert f"agent `claims-agent` is {status} already Somebody may have done it after you looked." in shown
    assert "by bob: I was faster" in shown


def fails(_: DecisionPacket) -> bytes:
    raise ModelError("no answer")


def test_the_live_page_says_that_the_model_is_down(office: Office, ada: Visitor) -> None:
    packet = office.claims.preview({"claim_id": "C-9", "ticket_id": "T-9", "text": "please"})
    assert "model is down" not in text(ada.get("/console/live/now").text)
    for _ in range(FAILURES_MAX):
        with pytest.raises(ModelError):
            office.claims.breaker.ask(Says(fails), packet, tokens_max=10)
    assert "model is down" in text(ada.get("/console/live/now").text)
    assert "language model of the policy" not in text(ada.get("/console/live/now").text)


def test_the_live_page_says_that_the_language_model_of_a_policy_is_down(
    office: Office, ada: Visitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = on_demand(Says(fails))
    monkeypatch.setattr(office.claims.engine, "language_model", model, raising=False)
    packet = office.claims.preview({"claim_id": "C-9", "ticket_id": "T-9", "text": "please"})
    said = "language model of the policy is down"
    assert said not in text(ada.get("/console/live/now").text)
    for _ in range(FAILURES_MAX):
        with pytest.raises(ModelError):
            model.propose(packet, tokens_max=10)
    assert said in text(ada.get("/console/live/now").text)
