"""An executor that was used before a fork: in the forked process it asks over connections and threads of that process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from sds.executors.http.credentials import Tokens
from sds.executors.http.exchange import Exchange
from sds.executors.http.form import ClientCredentials
from tests.embedding.elsewhere import held_elsewhere
from tests.executors.gateways import connected, in_thread, order
from tests.executors.wires import answering, http
from tests.submission.parts import in_a_fork

FORKED_S_MAX, DEADLINE_S = 60, 10.0


@pytest.mark.timeout(FORKED_S_MAX)
def test_an_executor_that_was_used_before_the_fork_carries_orders_out_on_both_sides(tmp_path: Path) -> None:
    with in_thread(tmp_path) as gateway, connected(tmp_path, gateway.url) as executor:

        def carried_out(key: str) -> None:
            assert "settled" == executor.dispatch(order(key), key, DEADLINE_S).status

        carried_out("a" * 64)
        assert 0 == in_a_fork(lambda: carried_out("b" * 64))
        carried_out("c" * 64)


@pytest.mark.timeout(FORKED_S_MAX)
def test_a_token_that_the_parent_was_fetching_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AN_ID", "me")
    form = ClientCredentials.model_validate(
        {"token_url": "http://127.0.0.1:1/token", "client_id": {"env": "AN_ID"}, "client_secret": {"env": "AN_ID"}}
    )
    with answering(http("200 OK", b'{"access_token": "t-1", "token_type": "Bearer"}')) as url:
        tokens = Tokens(form, tmp_path, Exchange(url, tls=None, proxy="", connections_max=1))

        def fetched() -> None:
            assert "t-1" == tokens.token(time.monotonic() + DEADLINE_S)

        with held_elsewhere(tokens._lock):
            assert 0 == in_a_fork(fetched)
