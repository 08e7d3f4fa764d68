"""Gates over PayPal, with the file of docs/library.md: tokens come and go, and every refund is made once."""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from sds.executors.http import HttpExecutor, load_executor
from sds.kernel.executor.protocol import ExecutionIntent, Receipt
from tests.executors.apis.paypal import CLIENT_SECRET, PayPal
from tests.executors.apis.serving import Reply, Request, serving
from tests.executors.test_gate_by_http import decide
from tests.executors.test_known_apis import opened, state

DEADLINE_S = 5.0
KEY = "k" * 64
NOT_IDEMPOTENT = ("idempotent: true\nkeys_kept_ms: 2592000000              # 30 days\n", "idempotent: false\n")
WHY = "nothing was sent: there is no token: "


def refund(key: str = KEY) -> ExecutionIntent:
    return ExecutionIntent("flow-1", key, "GIVE_BACK", (("amount", 1250),), "cap-1", "7")


@contextmanager
def connected(folder: Path, api: PayPal, *edits: tuple[str, str]) -> Iterator[HttpExecutor]:
    with serving(api) as url:
        text = api.file(url)
        for old, new in edits:
            assert old in text
            text = text.replace(old, new)
        (folder / "gateway.yaml").write_text(text, encoding="utf-8")
        with closing(load_executor(folder / "gateway.yaml")) as executor:
            yield executor


def test_orders_and_look_ups_share_one_token_until_it_expires_in_between(tmp_path: Path) -> None:
    api = PayPal("COMPLETED")
    with opened(tmp_path, api) as gate:
        assert ["SUCCESS"] * 3 == [decide(gate, number).execution for number in range(3)]
        assert (1, 3) == (api.given, len(api.seen))
        api.expire()
        assert "SUCCESS" == decide(gate, 3).execution
        assert (2, 4, 4) == (api.given, len(api.payments), api.orders)
        assert api.seen[-1] == api.seen[-2] != api.seen[-3]  # refused and sent again, under its key


def test_a_look_up_of_a_pending_refund_gets_a_fresh_token_and_finds_its_end(tmp_path: Path) -> None:
    api = PayPal("PENDING")
    with opened(tmp_path, api) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution
        api.expire()
        assert 1 == gate.recover().unknown
        api.end("COMPLETED")
        api.expire()
        assert 1 == gate.recover().success
        assert (3, 1) == (api.given, api.orders)


def test_where_a_key_does_not_prevent_a_second_effect_an_order_is_sent_once_and_stays_unknown(tmp_path: Path) -> None:
    api = PayPal("COMPLETED")
    with opened(tmp_path, api, NOT_IDEMPOTENT) as gate:
        assert "SUCCESS" == decide(gate, 1).execution
        api.expire()
        answer = decide(gate, 2)
        assert ("EXECUTING", "UNKNOWN") == state(gate, answer)
        assert (1, 2) == (api.given, len(api.seen))
        assert "SUCCESS" == decide(gate, 3).execution  # the refused token is used for nothing more
        assert (2, 3) == (api.given, len(api.seen))


def test_without_a_token_nothing_is_sent_and_the_event_waits(tmp_path: Path) -> None:
    api = PayPal("COMPLETED", shut=True)
    with opened(tmp_path, api) as gate:
        waits = decide(gate, 1)
        assert ("ABORTED", "NOT_SENT", True) == (waits.state, waits.tag, waits.retryable)
        assert [] == api.seen
        api.shut = False
        assert "SUCCESS" == decide(gate, 1).execution
        assert 1 == len(api.payments)


def test_why_there_is_no_token_is_said_in_words_of_ours(tmp_path: Path) -> None:
    api = PayPal("COMPLETED", shut=True)
    with connected(tmp_path, api) as executor:
        why = f"{WHY}its endpoint answered 401 (invalid_client)"
        assert Receipt("unsent", detail=why) == executor.dispatch(refund(), KEY, DEADLINE_S)
        assert Receipt("unknown", detail=why) == executor.lookup_order(refund(), "p-1", DEADLINE_S)
        nowhere = "http://127.0.0.1:9/token"
    with connected(tmp_path, api, ("/v1/oauth2/token", "/v1/oauth2/nothing")) as executor:
        assert f"{WHY}its endpoint answered 401" == executor.dispatch(refund(), KEY, DEADLINE_S).detail
    token_url = next(line for line in api.file("http://127.0.0.1").splitlines() if "token_url" in line).strip()
    with serving(api) as url, connected(tmp_path, api) as executor:
        text = api.file(url).replace(token_url.replace("http://127.0.0.1", url), f"token_url: {nowhere}")
        (tmp_path / "gateway.yaml").write_text(text, encoding="utf-8")
        with closing(load_executor(tmp_path / "gateway.yaml")) as lost:
            found = lost.dispatch(refund(), KEY, DEADLINE_S)
            assert ("unsent", True) == (found.status, found.detail.startswith(f"{WHY}its endpoint gave no answer"))


@pytest.mark.parametrize("then", ["no token", "a lost reply"])
def test_an_order_that_was_refused_for_its_token_was_sent_so_that_it_is_never_called_unsent(
    tmp_path: Path, then: str
) -> None:
    class Ends(PayPal):
        def answer(self, request: Request) -> Reply:
            found = super().answer(request)
            if found[0] == 401:
                self.shut, self.loses = then == "no token", int(then == "a lost reply")
            return found

        def loses_this(self, request: Request) -> bool:
            return bool(self.orders) and super().loses_this(request)

    api = Ends("COMPLETED")
    with connected(tmp_path, api) as executor:
        executor.lookup_order(refund(), "p-1", DEADLINE_S)
        api.expire()
        assert "unknown" == executor.dispatch(refund(), KEY, DEADLINE_S).status
    assert {"no token": (1, 0), "a lost reply": (2, 1)}[then] == (len(api.seen), len(api.payments))


def test_a_token_that_is_refused_again_is_not_fetched_a_third_time(tmp_path: Path) -> None:
    class Deaf(PayPal):
        def answer(self, request: Request) -> Reply:
            self.expire()
            return super().answer(request)

    api = Deaf("COMPLETED")
    with connected(tmp_path, api) as executor:
        assert "unknown" == executor.dispatch(refund(), KEY, DEADLINE_S).status
    assert (2, 2, 0) == (api.given, len(api.seen), len(api.payments))


def test_a_refund_whose_reply_is_lost_cannot_be_looked_up_and_is_a_humans(tmp_path: Path) -> None:
    api = PayPal("COMPLETED", loses=1)
    with opened(tmp_path, api) as gate:
        answer = decide(gate, 1)
        for _ in range(2):
            assert 1 == gate.recover().unknown
        assert (1, ["UNKNOWN"]) == (api.orders, [case.execution for case in [decide(gate, 1)]])
        assert [answer.dfid] == [case.dfid for case in gate.escalations() if case.unknown]


def test_an_answer_that_is_short_names_no_key_and_is_not_believed(tmp_path: Path) -> None:
    api = PayPal("COMPLETED")
    with opened(tmp_path, api, ("  headers: {Prefer: return=representation}", "  headers: {}")) as gate:
        assert "UNKNOWN" == decide(gate, 1).execution


def test_a_token_is_replaced_before_it_expires_and_kept_until_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says that it lives for 1000 s: after 930 s it is still used, after 941 s no more. One of 20 s is used for 10."""
    api, now_s = PayPal("COMPLETED"), [0.0]
    with connected(tmp_path, api) as executor:
        monkeypatch.setattr(executor._client._tokens, "_clock", lambda: now_s[0])
        for lives_s, later_s, given in ((1000, 0, 1), (1000, 930, 1), (20, 11, 2), (20, 9, 2), (20, 2, 3)):
            api.lives_s = lives_s
            now_s[0] += later_s
            executor.lookup_order(refund(), "p-1", DEADLINE_S)
            assert given == api.given


def test_orders_at_the_same_time_share_one_token(tmp_path: Path) -> None:
    api = PayPal("COMPLETED")
    keys = [f"{number:064}" for number in range(8)]
    with connected(tmp_path, api) as executor, ThreadPoolExecutor(len(keys)) as pool:
        found = list(pool.map(lambda key: executor.dispatch(refund(key), key, DEADLINE_S).status, keys))
    assert (["settled"] * len(keys), 1) == (found, api.given)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"access_token": ""}, "has no `access_token`"),
        ({"access_token": "a\r\nX-Other: 1"}, "has no `access_token`"),
        ({"access_token": 7}, "has no `access_token`"),
        ({"token_type": "mac"}, "has a `token_type` other than Bearer"),
        ({"token_type": None}, "has a `token_type` other than Bearer"),
        ({"expires_in": 0}, "has an `expires_in` that is no number of seconds"),
        ({"expires_in": "soon"}, "has an `expires_in` that is no number of seconds"),
        ({"expires_in": True}, "has an `expires_in` that is no number of seconds"),
        ([], "its endpoint answered 200, but not with JSON"),
    ],
)
def test_an_answer_that_is_no_token_is_none(tmp_path: Path, said: object, why: str) -> None:
    class Odd(PayPal):
        def _token(self, request: Request) -> Reply:
            status, headers, data = super()._token(request)
            return status, headers, {**data, **said} if isinstance(said, dict) else said

    api = Odd("COMPLETED")
    with connected(tmp_path, api) as executor:
        found = executor.dispatch(refund(), KEY, DEADLINE_S)
    assert ("unsent", True, []) == (found.status, found.detail.endswith(why), api.seen)


@pytest.mark.parametrize("lives_s", [10**400, 1.5])
def test_a_token_may_say_that_it_lives_for_any_number_of_seconds(tmp_path: Path, lives_s: object) -> None:
    with connected(tmp_path, PayPal("COMPLETED", lives_s=lives_s)) as executor:
        assert "settled" == executor.dispatch(refund(), KEY, DEADLINE_S).status


def test_the_client_may_be_named_in_the_body_and_ask_for_a_scope(tmp_path: Path) -> None:
    asked = list[dict[str, str]]()

    class InBody(PayPal):
        def _token(self, request: Request) -> Reply:
            assert "authorization" not in request.headers
            asked.append(request.form)
            self.tokens.append("t-1")
            return 200, {}, {"access_token": "t-1", "token_type": "bearer"}

    here = "    client_id: {env: PAYPAL_CLIENT_ID}\n"
    edit = (here, f"    credentials_in: body\n    scope: payments refunds\n{here}")
    with connected(tmp_path, InBody("COMPLETED"), edit) as executor:
        assert "settled" == executor.dispatch(refund(), KEY, DEADLINE_S).status
    said = {"grant_type": "client_credentials", "scope": "payments refunds"}
    assert [said | {"client_id": "AXq7-client", "client_secret": CLIENT_SECRET}] == asked


def test_signs_in_a_secret_are_encoded_as_in_a_form_before_they_are_sent_in_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RFC 6749, section 2.3.1: otherwise a colon in an id would end it."""
    monkeypatch.setenv("PAYPAL_CLIENT_ID", "a:b")
    monkeypatch.setenv("PAYPAL_CLIENT_SECRET", "c+d/e= f")
    shown = list[str]()

    class Known(PayPal):
        def _token(self, request: Request) -> Reply:
            shown.append(base64.b64decode(request.headers["authorization"].removeprefix("Basic ")).decode())
            return super()._token(request)

    with connected(tmp_path, Known("COMPLETED")) as executor:
        executor.dispatch(refund(), KEY, DEADLINE_S)
    assert ["a%3Ab:c%2Bd%2Fe%3D+f"] == shown


def test_neither_token_nor_secret_is_in_a_log_or_a_record(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Talkative(PayPal):
        def _refund(self, request: Request) -> Reply:
            status, headers, data = super()._refund(request)
            repeated = f"{CLIENT_SECRET} {request.headers['authorization']}"
            return status, headers | {"X-Repeated": "no"}, data | {"id": repeated}

    caplog.set_level(logging.DEBUG)
    api = Talkative("COMPLETED", shut=True)
    with opened(tmp_path, api) as gate:
        assert "NOT_SENT" == decide(gate, 1).tag
        api.shut = False
        assert "SUCCESS" == decide(gate, 1).execution
        assert "*** Bearer ***" == gate.store.value(
            "SELECT external_receipt FROM execution_log WHERE status = 'SUCCESS'"
        )
    secrets = [CLIENT_SECRET, *api.tokens]
    assert [] == [secret for secret in secrets if secret in caplog.text]
    files = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert [] == [secret for secret in secrets if any(secret.encode() in each for each in files)]
