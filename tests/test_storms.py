"""Every storm, small: `python -m tests.storms NAME` is the same by hand, and prints what replays it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sds.kernel.storage.postgres.connections import Url, connected
from tests.attack.figures import none
from tests.attack.forks import in_child
from tests.scale import scale
from tests.stores.server import server_url
from tests.storms import ALL, Storm
from tests.storms.__main__ import main
from tests.storms.ground import POSTGRESQL, SQLITE
from tests.storms.steps import Steps

ROOT = Path(__file__).parents[1]


def storm(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.storms", *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=36_000, check=False)


IN_CI = [(name, SQLITE) for name, each in ALL.items() if SQLITE in each.stores and not each.slow]
IN_FULL = [(name, store) for name, each in ALL.items() for store in each.stores]


@pytest.mark.timeout(scale(300, 36_000))
@pytest.mark.parametrize(
    ("name", "store"),
    IN_FULL
    if scale(0, 1)
    else [*IN_CI, *((name, POSTGRESQL) for name in ("kill", "kill-serve", "pg-restarts", "failover"))],
)
def test_every_promise_holds_in_a_storm(name: str, store: str) -> None:
    few = name != "failover"  # of which some are decided before, some unheard of by the standby, and some after
    small = () if store == SQLITE or scale(0, 1) or not few else ("--n", str(min(9, ALL[name].sizes[0])))
    done = storm(name, "--store", store, *small)
    print(done.stdout, done.stderr)
    said = json.loads(done.stdout.splitlines()[-1])
    assert (0, True) == (done.returncode, said["holds"])
    assert said["storms"][name]["figures"]
    assert f"replay: python -m tests.storms {name} --n " in done.stdout


def test_an_exchange_with_postgresql_is_three_steps() -> None:
    url = server_url()

    def counted() -> int:
        db = connected(Url(url), "public")
        steps = Steps(0).installed()
        db.together(("SELECT 1", ()), ("SELECT 2", ()))
        return steps.count

    assert 3 == in_child(counted)  # before, sent, after


def test_a_storm_that_is_not_there_is_refused_in_plain_words() -> None:
    done = storm("peace")
    assert (2, "") == (done.returncode, done.stdout)
    assert done.stderr.startswith("error: there is no storm `peace`; storms are: kill, ")


def test_a_broken_promise_ends_with_1_and_is_marked_with_what_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(ALL, "leak", Storm("a roof leaks", lambda _: [none("drops", 1)], (1, 1)))  # type: ignore[arg-type]
    assert 1 == main(["leak", "--n", "3", "--seed", "5"])
    said = capsys.readouterr().out.splitlines()
    assert ["leak: a roof leaks", "  replay: python -m tests.storms leak --n 3 --store sqlite --seed 5"] == said[:2]
    assert "  1 drops   <-- DOES NOT HOLD" in said
    assert not json.loads(said[-1])["holds"]
