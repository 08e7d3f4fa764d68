"""The service with everything in PostgreSQL: records, keys, idempotency; two services on it are one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from secrets import token_hex
from urllib.parse import urlsplit

import pytest

from sds.host.clock import now_ms
from sds.kernel.errors import StoreError
from sds.kernel.storage.postgres.pipelined import Connection
from sds.kernel.storage.postgres.store import PostgresStore
from sds.service.callers import Callers, add_key, stored_keys
from sds.service.console import taken
from sds.service.console.session import OF_KEY_MAX, Sessions
from sds.service.console.taken import Taken
from sds.service.database import open_database
from sds.service.database import taken as taken_cases
from sds.service.operations.endpoints import add_endpoint, positions
from sds.service.routes.looking import MS_MAX, PAGE
from tests.service.operations.exposition import scraped, value
from tests.service.operations.receiver import receiving
from tests.service.operations.waiting import wait_until
from tests.service.testbed import EVENT, Bed, check, opened_bed
from tests.stores.server import by_hand, own_database, role_with, user_with_a_schema

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    del home
    with own_database() as url:
        monkeypatch.setenv("SDS_STORE", url)
        yield url


@pytest.fixture
def bed_on_server(home: Path, store: str) -> Iterator[tuple[Bed, str]]:
    """A service, and the name of the database that is its alone."""
    with opened_bed(home, store=store) as made:
        yield made, urlsplit(store).path.lstrip("/")


@pytest.fixture
def two(home: Path, store: str) -> Iterator[tuple[Bed, Bed]]:
    with ExitStack() as opened:
        first = opened.enter_context(opened_bed(home, store=store))
        yield first, opened.enter_context(opened_bed(home, store=store))


def test_two_services_on_one_database_decide_once_and_answer_alike(two: tuple[Bed, Bed]) -> None:
    first, second = two
    asked = {"Idempotency-Key": "k", "Authorization": f"Bearer {first.key}"}
    decided = first.post(headers=asked)
    again = second.post(headers=asked)
    assert (200, 200, decided.content) == (decided.status_code, again.status_code, again.content)
    assert "true" == again.headers["idempotent-replayed"]
    refused = check(second.post({**EVENT, "trip_id": "T-2"}, headers=asked), 422, "KEY_CONFLICT")
    assert decided.json()["dfid"] == refused["dfid"]
    listed = second.client.get("/v1/decisions", headers=asked).json()["decisions"]
    assert [decided.json()["dfid"]] == [each["dfid"] for each in listed]
    assert 200 == second.client.get(f"/v1/decisions/{decided.json()['dfid']}", headers=asked).status_code
    first.clock = second.clock = lambda: now_ms() + 25 * 3_600_000
    assert 1 == first.service.kept.sweep()


def test_a_page_is_read_from_where_it_begins_however_many_decisions_there_are(two: tuple[Bed, Bed]) -> None:
    store = two[0].gate.store
    assert isinstance(store, PostgresStore)

    def planned(db: Connection) -> str:
        db.together(("SET LOCAL enable_sort = off", ()))  # a record of this size is read whole unless that is dear
        done = db.together((f"EXPLAIN (COSTS OFF) {PAGE.format(state='')}", (0, "", MS_MAX, "", 50)))
        return "\n".join(row[0] for row in done.rows)

    with store.transaction():
        plan = store._on_connection(planned)
    assert "flows_by_opening" in plan
    assert "Sort" not in plan


def test_keys_that_are_kept_with_the_first_answer_are_one_whichever_process_is_asked(two: tuple[Bed, Bed]) -> None:
    asked = {"Idempotency-Key": "k", "Authorization": f"Bearer {two[0].key}"}
    events = [EVENT, EVENT, {**EVENT, "trip_id": "T-2"}, EVENT]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda each: two[each[0] % 2].post(each[1], headers=asked), enumerate(events)))
    by_status = sorted(each.status_code for each in answers)
    assert by_status in ([200, 200, 200, 422], [200, 422, 422, 422])
    assert 1 == len({each.content for each in answers if each.status_code == 200})


def test_several_that_begin_at_once_make_the_tables_once(store: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(open_database, [store] * 4))
    add_key(opened[0], "shop", ["read"], ["toll"], now_ms=1)
    assert [["shop"]] * 4 == [[key.name for key in stored_keys(each)] for each in opened]
    for each in opened:
        each.close()


def test_a_server_that_is_gone_without_a_word_is_noticed_and_one_that_stopped_holds_no_lock_for_long(
    store: str,
) -> None:
    database = open_database(store)
    with database.reading() as connection:
        given = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]  # psycopg's
        stopped = connection.exec_driver_sql("SHOW idle_in_transaction_session_timeout").scalar()
    assert {"tcp_user_timeout": "10000", "keepalives_idle": "10"}.items() <= given.items()
    assert ("3", "30s") == (given["connect_timeout"], stopped)
    database.close()


def test_the_service_writes_durably_and_sees_what_it_waited_for_whatever_is_set_for_its_role() -> None:
    odd = (
        "default_transaction_isolation = serializable",
        "default_transaction_read_only = on",
        "synchronous_commit = off",
    )
    with role_with(*odd) as role, own_database() as url:
        own = urlsplit(role)._replace(path=urlsplit(url).path).geturl()
        with closing(open_database(own)) as database, database.reading() as connection:
            add_key(database, "shop", ["read"], ["toll"], now_ms=1)
            asked = "SELECT current_setting('transaction_isolation'), current_setting('synchronous_commit')"
            assert ("read committed", "on") == tuple(connection.exec_driver_sql(asked).one())


def test_of_two_who_take_a_case_at_once_the_second_learns_that_it_is_taken(store: str) -> None:
    database = open_database(store)
    with ThreadPoolExecutor(1) as pool:
        with database.transaction() as connection:
            row = {"gate": "toll", "dfid": "019a", "key_digest": "a", "who": "ada", "at_ms": 1_800_000_000_000}
            connection.execute(taken_cases.insert().values(row))
            second = pool.submit(taken.take, database, "toll", "019a", Taken("bob", "b", 1_800_000_000_000))
            time.sleep(0.2)
            assert not second.done()
        assert not second.result(10)
    bob = Taken("bob", "b", 1_800_000_000_001)
    assert "ada" == taken.of_gate(database, "toll", 1_800_000_000_001)["019a"].who
    assert taken.take(database, "toll", "019a", bob, "ada")
    assert {"019a": bob} == taken.of_gate(database, "toll", 1_800_000_000_001)
    database.close()


def test_of_the_sessions_of_one_key_the_oldest_end(store: str) -> None:
    with closing(open_database(store)) as database:
        keys = [add_key(database, name, ["review"], ["all"], now_ms=1) for name in ("ada", "bob")]
        times = iter(range(1, 1_000))
        callers = Callers(database, now_ms=lambda: 1, rate_per_s=1.0, rate_burst=1_000, cache_ms=0)
        sessions = Sessions(database, callers, now_ms=lambda: next(times), token=token_hex)
        begun = [sessions.open(key) for key in (keys[1], *[keys[0]] * (OF_KEY_MAX + 2))]
        there = [each is not None and sessions.find(each.cookie) is not None for each in begun]
    assert [True, False, False] + [True] * OF_KEY_MAX == there


def test_a_database_that_is_down_is_said_without_its_address_and_password() -> None:
    with pytest.raises(StoreError) as refused:
        open_database("postgresql://someone:hunter2@127.0.0.1:1/none")
    assert "hunter2" not in f"{refused.value} {refused.value.hint} {refused.value.__cause__!r:.0}"
    assert "the service cannot connect to its database" == str(refused.value)


def test_a_server_that_is_away_is_503_for_now_and_found_again(bed_on_server: tuple[Bed, str]) -> None:
    bed, name = bed_on_server
    key = bed.key_for("shop", ("submit",), ("toll",))
    asked = {"Idempotency-Key": "k", "Authorization": f"Bearer {key}"}
    by_hand(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    by_hand(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = '{name}'")
    problem = check(bed.post(headers=asked), 503, "STORE_UNAVAILABLE")  # the caller's key cannot be looked up
    assert (True, "the service cannot connect to its database") == (problem["retryable"], problem["detail"])
    check(bed.post(headers={"Idempotency-Key": "k"}), 503, "STORE_UNAVAILABLE")
    by_hand(f"ALTER DATABASE {name} ALLOW_CONNECTIONS true")
    wait_until(lambda: bed.post(headers=asked).status_code == 200)


def test_a_name_that_no_text_of_the_server_can_be_is_404(bed_on_server: tuple[Bed, str]) -> None:
    bed, _ = bed_on_server
    check(bed.client.get("/v1/escalations/%00"), 404, "DFID_UNKNOWN")
    resolution = bed.client.post("/v1/escalations/%00/resolution", json={"decision": "ABORT", "reason": "no"})
    check(resolution, 404, "DFID_UNKNOWN")
    check(bed.client.get("/v1/decisions/%00"), 404, "DFID_UNKNOWN")
    check(bed.client.get("/v1/agents/%00"), 404, "NOT_FOUND")
    check(bed.client.post("/v1/agents/%00/suspend", json={"reason": "no"}), 404, "NOT_FOUND")


def test_what_people_do_at_one_service_binds_at_the_other(two: tuple[Bed, Bed]) -> None:
    first, second = two
    key = {"Authorization": f"Bearer {first.key}"}
    halted = first.client.put("/v1/halt", json={"halted": True, "reason": "wrong tariff"}).json()["gates"][0]
    assert halted == {**second.client.get("/v1/halt", headers=key).json()["gates"][0], "changed": True}
    dfid = second.post(headers=key).json()["dfid"]
    listed = first.client.get("/v1/escalations").json()["escalations"]
    assert [dfid] == [case["dfid"] for case in listed]
    shown = second.client.get(f"/v1/escalations/{dfid}", headers=key).json()
    assert (True, EVENT["text"]) == (shown["waits"], "".join(part["text"] for part in shown["evidence"]["parts"]))
    second.client.put("/v1/halt", headers=key, json={"halted": False, "reason": "mended"})
    done = first.client.post(f"/v1/escalations/{dfid}/resolution", json={"decision": "ABORT", "reason": "paid in cash"})
    assert "ABORTED" == done.json()["state"]
    assert (
        "SUSPENDED"
        == first.client.post("/v1/agents/toll-agent/suspend", json={"reason": "look"}).json()["agent"]["status"]
    )
    assert "SUSPENDED" == second.client.get("/v1/agents/toll-agent", headers=key).json()["agent"]["status"]


def test_a_service_on_postgresql_is_ready_by_the_clock_of_the_store_and_measured(two: tuple[Bed, Bed]) -> None:
    first, _ = two
    health = first.app.state.operations.health
    first.post()
    health.look()
    assert 200 == first.client.get("/readyz").status_code
    text = scraped(first)
    assert (1, 0) == (value(text, "sds_store_up", gate="toll"), value(text, "sds_escalations_waiting", gate="toll"))
    first.clock = lambda: now_ms() + 5_000
    health.look()
    assert "CLOCK_APART" == first.client.get("/readyz").json()["checks"]["clock"]["toll"]


def test_of_two_services_one_delivers_at_a_time_and_nothing_twice(two: tuple[Bed, Bed]) -> None:
    with receiving() as receiver:
        first, second = two
        records = {"toll": first.gate.store}
        add_endpoint(first.database, receiver.url, records, name="shop", secret="", now_ms=now_ms())
        dfids = [first.post({**EVENT, "trip_id": f"T-{n}"}).json()["dfid"] for n in range(3)]
        last = second.gate.store.value("SELECT MAX(idx) FROM ledger")
        wait_until(lambda: [last] == [at.idx for at in positions(second.database)])
        for each in (first, second):
            each.service.stop_background()
        assert dfids == [json.loads(body)["data"]["dfid"] for _, body in receiver.took]


def test_a_schema_that_was_made_beforehand_is_filled_by_a_user_who_may_not_make_one() -> None:
    with own_database() as url, user_with_a_schema(url, "sds_service") as own:
        for _ in range(2):
            with closing(open_database(own)) as database:
                assert [] == stored_keys(database)
