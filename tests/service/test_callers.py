"""Keys of callers: made once, kept as a digest, refused once they are revoked."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sds.kernel.errors import StoreError, UsageError
from sds.service.callers import ALL, Caller, Callers, add_key, digest_of, new_key, revoke_key, stored_keys
from sds.service.database import open_database
from sds.service.problems import Problem


class Clock:
    now_ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.now_ms


def opened(home: Path) -> tuple[Callers, Clock]:
    del home
    clock = Clock()
    return Callers(open_database(), now_ms=clock, rate_per_s=1, rate_burst=100, cache_ms=1_000), clock


def test_a_key_has_256_random_bits_and_only_its_digest_is_kept(home: Path) -> None:
    database = open_database()
    keys = [add_key(database, f"k{n}", ["read"], ["toll"], now_ms=1) for n in range(3)]
    assert 3 == len(set(keys))
    assert all(key.startswith("sds_") and 47 == len(key) for key in keys)
    assert [digest_of(key) for key in keys] == [each.digest for each in stored_keys(database)]
    database.close()
    raw = b"".join(path.read_bytes() for path in home.glob("service.db*"))
    assert not any(key.encode() in raw for key in keys)


@pytest.mark.parametrize(
    ("name", "roles", "gates", "why"),
    [
        ("", ["read"], ["toll"], "cannot be the name of a key"),
        ("a b", ["read"], ["toll"], "cannot be the name of a key"),
        ("a", ["admin"], ["toll"], "there is no role `admin`"),
        ("a", [], ["toll"], "a key needs a role and a gate"),
        ("a", ["read"], [], "a key needs a role and a gate"),
        ("taken", ["read"], ["toll"], "a key `taken` exists already"),
    ],
)
def test_what_is_no_key_is_refused(home: Path, name: str, roles: list[str], gates: list[str], why: str) -> None:
    database = open_database()
    add_key(database, "taken", ["read"], ["toll"], now_ms=1)
    revoke_key(database, "taken", now_ms=2)
    with pytest.raises(UsageError, match=why):
        add_key(database, name, roles, gates, now_ms=3)
    database.close()


def test_a_revoked_key_goes_on_for_a_second_at_most(home: Path) -> None:
    callers, clock = opened(home)
    database = open_database()
    key = add_key(database, "shop", ["read"], ["toll"], now_ms=1)
    asked = f"Bearer {key}"
    assert Caller("shop", frozenset({"read"}), frozenset({"toll"})) == asyncio.run(callers.of(asked))
    assert revoke_key(database, "shop", now_ms=2)
    assert not revoke_key(database, "shop", now_ms=3)
    clock.now_ms += 1_000
    with pytest.raises(Problem) as refused:
        asyncio.run(callers.of(asked))
    assert 401 == refused.value.status
    with pytest.raises(UsageError, match="there is no key `nobody`"):
        revoke_key(database, "nobody", now_ms=2)


def test_a_clock_that_is_set_back_makes_nobody_believe_for_longer(home: Path) -> None:
    callers, clock = opened(home)
    database = open_database()
    asked = f"Bearer {add_key(database, 'shop', ['read'], ['toll'], now_ms=1)}"
    asyncio.run(callers.of(asked))
    revoke_key(database, "shop", now_ms=2)
    clock.now_ms -= 5_000
    with pytest.raises(Problem):
        asyncio.run(callers.of(asked))


def test_roles_and_gates_are_checked_by_name() -> None:
    caller = Caller("a", frozenset({"read"}), frozenset({"toll"}))
    caller.check("read", "toll")
    assert Caller("a", frozenset(), frozenset({ALL})).may_see("anything")
    for role, gate, code in (("submit", "toll", "ROLE_MISSING"), ("read", "refund", "GATE_FORBIDDEN")):
        with pytest.raises(Problem) as refused:
            caller.check(role, gate)
        assert code == refused.value.code


def test_a_database_of_a_newer_version_is_refused_and_left_as_it_is(home: Path) -> None:
    database = open_database()
    with database.transaction() as connection:
        connection.exec_driver_sql("UPDATE migrations SET version_num = '9999'")
    database.close()
    for _ in range(2):
        with pytest.raises(StoreError, match="the service's database is of a newer version"):
            open_database()


def test_a_file_that_is_no_database_is_refused_in_one_line(home: Path) -> None:
    (home / "service.db").write_bytes(b"x" * 8_192)
    (home / "service.db").chmod(0o600)
    with pytest.raises(StoreError, match="the service's database failed: SQLITE_NOTADB"):
        open_database()


def test_keys_that_were_made_for_this_run_alone_are_in_no_database(home: Path) -> None:
    key, database = new_key(), open_database()
    callers = Callers(database, now_ms=Clock(), rate_per_s=1, rate_burst=1, cache_ms=1_000, dev_keys=(digest_of(key),))
    assert "dev" == asyncio.run(callers.of(f"Bearer {key}")).name
    assert [] == stored_keys(database)
