"""Final states are delivered from the ledger: at least once, in order, signed, and what is not is seen."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from standardwebhooks import Webhook
from standardwebhooks.webhooks import WebhookVerificationError

from sds.host.clock import now_ms
from sds.kernel.errors import UsageError
from sds.service.operations.endpoints import (
    Endpoint,
    EndpointPosition,
    add_endpoint,
    checked_url,
    endpoints,
    positions,
    remove_endpoint,
    write_failure,
)
from sds.service.operations.webhooks import BACKOFF_MS_MAX, Deliverer, undelivered
from tests.proposers import Greedy
from tests.service.operations.exposition import scraped, value
from tests.service.operations.receiver import Receiver, receiving
from tests.service.operations.waiting import wait_until
from tests.service.testbed import EVENT, Bed, opened_bed


@pytest.fixture
def quiet(home: Path) -> Iterator[Bed]:
    """A service that delivers when a test says so."""
    with opened_bed(home, Greedy("WAIVE"), webhooks_every_s=3_600.0) as made:
        yield made


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made


def added(bed: Bed, url: str, name: str = "shop") -> Endpoint:
    return add_endpoint(bed.database, url, {"toll": bed.gate.store}, name=name, secret="", now_ms=now_ms())


def deliver(bed: Bed) -> None:
    metrics = bed.app.state.operations.metrics
    Deliverer(bed.service, "toll", metrics, threading.Event(), random=Random(1)).run()


def decided(bed: Bed, *numbers: int) -> list[str]:
    return [bed.post({**EVENT, "trip_id": f"T-{n}"}).json()["dfid"] for n in numbers]


def position(bed: Bed) -> EndpointPosition:
    (found,) = positions(bed.database)
    return found


def bodies(receiver: Receiver) -> list[dict[str, Any]]:
    return [json.loads(body) for _, body in receiver.took]


def test_final_states_are_sent_in_order_once_each_and_verify_under_the_secret(quiet: Bed, receiver: Receiver) -> None:
    decided(quiet, 1)
    endpoint = added(quiet, receiver.url)
    dfids = decided(quiet, 2, 3)
    deliver(quiet)
    deliver(quiet)
    assert [(dfid, "CLOSED", "decision.closed") for dfid in dfids] == [
        (body["data"]["dfid"], body["data"]["state"], body["type"]) for body in bodies(receiver)
    ]
    for headers, body in receiver.took:
        Webhook(endpoint.secret).verify(body, headers)
        with pytest.raises(WebhookVerificationError):
            Webhook(endpoint.secret).verify(body + b" ", headers)
    assert 2 == len({headers["webhook-id"] for headers, _ in receiver.took})
    assert 0 == value(scraped(quiet), "sds_webhook_behind_entries", webhook="shop")


def test_one_that_fails_is_sent_again_before_what_is_behind_it_and_shows_since_when(
    quiet: Bed, receiver: Receiver
) -> None:
    added(quiet, receiver.url)
    dfids, at_ms = decided(quiet, 1, 2), now_ms()
    quiet.clock = lambda: at_ms
    receiver.status = 500
    deliver(quiet)
    failing = position(quiet)
    assert (1, "HTTP_500", 1) == (failing.attempts, failing.failure, len(receiver.took))
    assert failing.failing_since_ms is not None
    deliver(quiet)  # its time has not come
    assert 1 == len(receiver.took)
    at_ms = failing.next_at_ms
    assert 0 < (value(scraped(quiet), "sds_webhook_failing_seconds", webhook="shop") or 0)
    deliver(quiet)
    assert (2, failing.failing_since_ms) == (position(quiet).attempts, position(quiet).failing_since_ms)
    receiver.status, at_ms = 204, position(quiet).next_at_ms
    deliver(quiet)
    assert [dfids[0], dfids[0], dfids[0], dfids[1]] == [body["data"]["dfid"] for body in bodies(receiver)]
    ids = [headers["webhook-id"] for headers, _ in receiver.took]
    assert (1, 2) == (len(set(ids[:3])), len(set(ids)))
    assert (0, None, None) == (position(quiet).attempts, position(quiet).failing_since_ms, position(quiet).failure)


def test_an_endpoint_that_takes_each_but_slowly_shows_how_old_the_first_is_that_it_has_not_got(
    quiet: Bed, receiver: Receiver
) -> None:
    added(quiet, receiver.url)
    decided(quiet, 1, 2)
    deliver(quiet)
    assert 0 == value(scraped(quiet), "sds_webhook_oldest_seconds", webhook="shop")
    decided(quiet, 3, 4)
    ahead_ms = 0
    quiet.clock = lambda: now_ms() + ahead_ms
    ahead_ms = 700_000
    shown = dict[str, float | None]()
    while (before := len(receiver.took)) < 4:
        receiver.may_answer.clear()
        sends = threading.Thread(target=deliver, args=(quiet,))
        sends.start()
        wait_until(lambda: len(receiver.took) > before)
        quiet.app.state.operations.standing._read_s = float("-inf")
        text = scraped(quiet)
        shown = {name: value(text, f"sds_webhook_{name}_seconds", webhook="shop") for name in ("oldest", "failing")}
        assert 700 <= (shown["oldest"] or 0)
        assert 0 == shown["failing"]
        ahead_ms += 20_000
        receiver.may_answer.set()
        sends.join()
    quiet.app.state.operations.standing._read_s = float("-inf")
    assert 0 == value(scraped(quiet), "sds_webhook_oldest_seconds", webhook="shop")


def test_what_is_shown_is_of_the_gates_that_are_served_and_does_not_need_every_record(
    quiet: Bed, receiver: Receiver
) -> None:
    stores = {"toll": quiet.gate.store, "elsewhere": quiet.gate.store}
    add_endpoint(quiet.database, receiver.url, stores, name="shop", secret="", now_ms=now_ms())
    decided(quiet, 1)
    receiver.status = 500
    deliver(quiet)
    (elsewhere,) = positions(quiet.database, "elsewhere")
    write_failure(quiet.database, elsewhere, "HTTP_500", now_ms=now_ms(), next_at_ms=now_ms())
    for readable in (True, False):
        if not readable:
            quiet.service.stop_background()
            quiet.gate.store.close()
        text = "\n".join(f"{m.name} {sorted(s.labels.items())}" for m in undelivered(quiet.service) for s in m.samples)
        assert "elsewhere" not in text
        assert (readable, True) == ("sds_webhook_behind_entries" in text, "sds_webhook_failing_seconds" in text)


def test_it_is_tried_later_and_later_up_to_a_limit(quiet: Bed, receiver: Receiver) -> None:
    added(quiet, receiver.url)
    decided(quiet, 1)
    receiver.status = 503
    clock, waits = now_ms(), list[int]()
    quiet.clock = lambda: clock
    for _ in range(12):
        deliver(quiet)
        waits.append(position(quiet).next_at_ms - clock)
        clock = position(quiet).next_at_ms
    assert 500 <= waits[0] <= 1_000
    assert waits[0] < waits[3] < waits[6]
    assert BACKOFF_MS_MAX / 2 <= waits[-1] <= BACKOFF_MS_MAX == max(BACKOFF_MS_MAX, *waits)


def test_redirects_are_not_followed_and_who_is_silent_has_failed(quiet: Bed, receiver: Receiver) -> None:
    added(quiet, receiver.url)
    decided(quiet, 1)
    receiver.status, receiver.headers = 307, {"location": receiver.url.replace("/hook", "/elsewhere")}
    deliver(quiet)
    assert ("HTTP_307", 1) == (position(quiet).failure, len(receiver.took))
    quiet.service.settings = replace(quiet.settings, webhook_within_s=0.3)
    receiver.status = 200
    receiver.may_answer.clear()
    at_ms = position(quiet).next_at_ms
    quiet.clock = lambda: at_ms
    deliver(quiet)
    assert position(quiet).failure in ("TIMEOUT", "ReadTimeout")


def test_an_endpoint_that_is_down_holds_up_no_other_and_the_certificate_is_verified(
    quiet: Bed, receiver: Receiver
) -> None:
    added(quiet, receiver.url.replace("http:", "https:"), "plain")  # speaks no TLS
    added(quiet, receiver.url)
    decided(quiet, 1)
    deliver(quiet)
    assert 1 == len(receiver.took)
    failures = {at.webhook: at.failure for at in positions(quiet.database)}
    assert {"plain": "ConnectError", "shop": None} == failures


def test_a_slow_endpoint_holds_up_no_other(quiet: Bed, receiver: Receiver) -> None:
    with receiving() as slow:
        slow.may_answer.clear()
        added(quiet, slow.url, "slow")
        added(quiet, receiver.url)
        decided(quiet, 1)
        thread = threading.Thread(target=deliver, args=(quiet,))
        thread.start()
        wait_until(lambda: (1, 1) == (len(receiver.took), len(slow.took)))
        decided(quiet, 2)
        wait_until(lambda: len(receiver.took) == 2)
        assert (1, True) == (len(slow.took), thread.is_alive())
        slow.may_answer.set()
        thread.join(20)
        assert 2 == len(slow.took)


def test_an_endpoint_that_answers_slowly_with_much_to_take_leaves_others_their_turn(quiet: Bed) -> None:
    """With as many of them as there are deliveries at once, no other would get anything for a quarter of an hour."""
    quiet.service.settings = replace(quiet.settings, webhooks_parallel=1)
    with receiving() as slow, receiving() as quick:
        added(quiet, slow.url, "a")
        added(quiet, quick.url, "b")
        dfids = decided(quiet, 1, 2, 3)
        start_ms = now_ms()
        quiet.clock = lambda: start_ms + 10_000 * len(slow.took)  # each of its answers takes ten seconds
        deliver(quiet)
        assert dfids == [body["data"]["dfid"] for body in bodies(slow)]
        assert dfids == [body["data"]["dfid"] for body in bodies(quick)]
        assert (start_ms + 10_000) // 1_000 == int(quick.took[0][0]["webhook-timestamp"])


def test_a_secret_is_replaced_by_a_second_endpoint_of_the_same_url_and_nothing_is_lost(
    quiet: Bed, receiver: Receiver
) -> None:
    """What both send has the same id, so that the receiver takes it once, by the secret that it knows."""
    old = added(quiet, receiver.url, "old")
    decided(quiet, 1)
    new = added(quiet, receiver.url, "new")
    decided(quiet, 2)
    deliver(quiet)
    remove_endpoint(quiet.database, "old")
    decided(quiet, 3)
    deliver(quiet)
    by = {
        name: {headers["webhook-id"] for headers, body in receiver.took if _verifies(each, headers, body)}
        for name, each in (("old", old), ("new", new))
    }
    assert (2, 2, 3) == (len(by["old"]), len(by["new"]), len(by["old"] | by["new"]))


def _verifies(endpoint: Endpoint, headers: dict[str, str], body: bytes) -> bool:
    try:
        Webhook(endpoint.secret).verify(body, headers)
    except WebhookVerificationError:
        return False
    return True


def test_one_that_was_down_for_a_week_gets_all_in_order_signed_anew(quiet: Bed, receiver: Receiver) -> None:
    endpoint = added(quiet, receiver.url)
    dfids, start_ms = decided(quiet, *range(5)), now_ms()
    receiver.status, later_ms = 410, 0
    quiet.clock = lambda: start_ms + later_ms
    for hours in (0, 24, 7 * 24):
        later_ms = hours * 3_600_000
        deliver(quiet)
    assert ("HTTP_410", 3) == (position(quiet).failure, len(receiver.took))
    receiver.status, later_ms = 200, 8 * 24 * 3_600_000
    receiver.took.clear()
    deliver(quiet)
    assert dfids == [body["data"]["dfid"] for body in bodies(receiver)]
    assert {str((start_ms + later_ms) // 1_000)} == {headers["webhook-timestamp"] for headers, _ in receiver.took}
    assert endpoint.name == position(quiet).webhook


def test_one_process_at_a_time_delivers(quiet: Bed, receiver: Receiver) -> None:
    added(quiet, receiver.url)
    decided(quiet, 1)
    with quiet.gate.store.exclusively("webhooks") as mine:
        assert mine
        deliver(quiet)
        assert [] == receiver.took
    deliver(quiet)
    assert 1 == len(receiver.took)


def test_after_a_restore_it_goes_on_by_time_and_skips_nothing_that_is_new(quiet: Bed, receiver: Receiver) -> None:
    added(quiet, receiver.url)
    decided(quiet, 1)
    deliver(quiet)
    # as though the endpoint had been further in a record that was put back since
    with quiet.database.transaction() as connection:
        text = "UPDATE webhook_positions SET idx = idx + 50, entry_hash = 'ff'"
        connection.exec_driver_sql(text)
    (dfid,) = decided(quiet, 2)
    deliver(quiet)
    assert dfid == bodies(receiver)[-1]["data"]["dfid"]
    assert 2 == len(receiver.took)
    assert "webhooks.record_replaced" in [event for event, _ in quiet.logged]


def test_an_endpoint_that_was_removed_is_sent_nothing_more(quiet: Bed, receiver: Receiver) -> None:
    added(quiet, receiver.url)
    decided(quiet, 1)
    remove_endpoint(quiet.database, "shop")
    deliver(quiet)
    assert ([], [], []) == (receiver.took, endpoints(quiet.database), positions(quiet.database))
    with pytest.raises(UsageError, match="there is no webhook `shop`"):
        remove_endpoint(quiet.database, "shop")


NO_ENDPOINTS = (
    "http://shop.example/hook",
    "ftp://shop.example/",
    "https://",
    "https://user:secret@shop.example/",
    "https://shop.example/#part",
    "https://shop example/",
    "https://shop.example:99999/",
    "//shop.example",
    "",
    "https://" + "a" * 3_000,
)


def test_what_cannot_be_an_endpoint_is_refused_and_its_words_are_not_repeated() -> None:
    for url in NO_ENDPOINTS:
        with pytest.raises(UsageError) as refused:
            checked_url(url)
        assert "secret" not in str(refused.value) + refused.value.hint
    for url in ("https://shop.example/hook?x=1", "http://127.0.0.1:8000/", "http://[::1]/", "http://localhost/"):
        assert url == checked_url(url)


def test_a_secret_of_ones_own_is_taken_and_a_weak_one_is_not(quiet: Bed) -> None:
    records = {"toll": quiet.gate.store}
    secret = "whsec_" + "QUJD" * 8
    url = "https://shop.example/hook"
    made = add_endpoint(quiet.database, url, records, name="own", secret=secret, now_ms=1)
    assert (secret, True) == (made.secret, secret not in repr(made))
    for weak in ("whsec_QUJD", "hunter2", "-"):
        with pytest.raises(UsageError, match="the secret of the webhook is invalid") as refused:
            add_endpoint(quiet.database, url, records, name="weak", secret=weak, now_ms=1)
        assert weak == "-" or weak not in str(refused.value)
    with pytest.raises(UsageError, match="there is a webhook `own` already"):
        add_endpoint(quiet.database, url, records, name="own", secret="", now_ms=1)
