"""The world of a demo is made whole, or the machine's refusal comes with its mend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from sds.gates.fraud.world.bank import write_bank
from sds.gates.refund.rail import server
from sds.gates.refund.world.airline import write_airline
from sds.gates.refund.world.tickets import World
from sds.gates.worlds import ROOM, make_once
from sds.kernel.errors import StateError

NO_ROOM = OSError(28, "No space left on device")


def no_room(_path: Path) -> None:
    raise NO_ROOM


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: make_once(folder / "world.db", folder / "queue.jsonl", [], no_room),
        lambda folder: write_bank(folder / "absent" / "bank.db", []),
        lambda folder: write_airline(folder / "absent" / "airline.db", World((), (), ())),
    ],
    ids=["a folder", "a bank", "an airline"],
)
def test_a_world_that_cannot_be_written_names_what_helps_and_leaves_nothing(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    with pytest.raises(StateError) as refused:
        write(tmp_path)

    assert refused.value.hint == ROOM
    assert [] == list(tmp_path.iterdir())


def test_a_rail_for_which_there_is_no_thread_says_so_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_thread(_thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", no_thread)
    assert 2 == server.main(["--db", str(tmp_path / "rail.db")])
    said = capsys.readouterr()
    assert ("", f"rail: cannot start on `{tmp_path}/rail.db`, port 0: can't start new thread\n") == (said.out, said.err)
