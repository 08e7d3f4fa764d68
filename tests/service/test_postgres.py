"""The service with everything in PostgreSQL: records, keys, idempotency; two services on it are one."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from sds.host.clock import now_ms
from sds.kernel.errors import StoreError
from sds.service.callers import add_key, stored_keys
from sds.service.database import open_database
from tests.postgres import server_url
from tests.service.test_bad_input import check
from tests.service.testbed import EVENT, Bed, opened_bed

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def store(home: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    del home
    name = f"sds_{secrets.token_hex(6)}"
    with psycopg.connect(server_url(), autocommit=True) as server:
        server.execute(f"CREATE DATABASE {name}")
        url = urlsplit(server_url())._replace(path=f"/{name}").geturl()
        monkeypatch.setenv("SDS_STORE", url)
        yield url
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")


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


def test_a_database_that_is_down_is_said_without_its_address_and_password() -> None:
    with pytest.raises(StoreError) as refused:
        open_database("postgresql://someone:hunter2@127.0.0.1:1/none")
    assert "hunter2" not in f"{refused.value} {refused.value.hint} {refused.value.__cause__!r:.0}"
    assert "the service's database refused" in str(refused.value)
