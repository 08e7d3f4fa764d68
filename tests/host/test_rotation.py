"""Keys that are renewed while other processes run: no order is left UNKNOWN, no event taken for another, no entry unsigned."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from sds.host import keys, paths
from sds.host.backup import back_up
from sds.host.restoring import restore
from sds.host.rotation import rotate
from sds.kernel.audit import verify
from sds.kernel.errors import EventError, StoreError, UsageError
from sds.kernel.executor.protocol import ExecutionIntent
from sds.kernel.operations.recovery import Recovered
from sds.kernel.registry import registry
from sds.kernel.storage.keyring import Signer, key_name, name_in
from sds.kernel.storage.ledger import CHECKPOINT_EVERY, GENESIS, Head
from tests.attack.testbed import Testbed

LONG_MS = 60_000

# A process of its own: it opens the gate, waits to be told on, decides an event and dies before the bank answers.
OTHER = """
import os, sys
from pathlib import Path
from tests.attack.testbed import Testbed
from tests.attack.outside import Bank

class Dies(Bank):
    def dispatch(self, intent, key, deadline_s):
        if {pays}: super().dispatch(intent, key, deadline_s)
        os._exit(0)

bed = Testbed(Path(sys.argv[1]))
gate = bed.gate(executor=Dies(bed.folder / "bank.db", bed.clock))
print("open", flush=True)
sys.stdin.readline()
gate.decide(bed.event(1))
"""


@pytest.fixture
def bed(tmp_path: Path) -> Testbed:
    made = Testbed(tmp_path)
    made.open_accounts(range(200))
    return made


@contextmanager
def other_process(bed: Testbed, program: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that has opened the gate when the block begins, and goes on when a line is written to it."""
    command = [sys.executable, "-c", program, str(bed.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert "open\n" == other.stdout.readline()
        yield other


def told_to_go_on(other: subprocess.Popen[str]) -> None:
    assert other.stdin is not None
    other.stdin.write("on\n")
    other.stdin.flush()
    assert 0 == other.wait(60)


def renewed(bed: Testbed, *, lost: bool = False) -> None:
    with closing(paths.open_record(bed.own)) as store:
        rotate(bed.own, store, who="me", reason="a try", now_ms=bed.clock(), lost=lost)


@pytest.mark.parametrize("pays", [True, False], ids=["paid", "absent"])
def test_a_process_that_runs_resolves_what_another_signed_with_a_newer_key(bed: Testbed, pays: bool):
    with bed.gate() as gate:
        renewed(bed)
        with other_process(bed, OTHER.format(pays=pays)) as other:
            told_to_go_on(other)
        bed.clock.ahead_ms = LONG_MS
        assert ["PENDING"] == [row[0] for row in gate.store.rows("SELECT status FROM execution_log")]
        found = gate.recover()
        assert (0, ()) == (found.unknown, found.errors)
        assert "SUCCESS" == gate.decide(bed.event(1)).execution
        assert (1, 0) == (len(bed.bank.paid()), bed.paid_twice())
        assert () == verify.verify(gate.store).faults


@pytest.mark.parametrize("lost", [False, True])
def test_a_process_that_runs_signs_with_the_newest_key_from_its_next_order_on(bed: Testbed, lost: bool):
    """So no process that is opened later meets an order of a key that was lost, or is old."""
    with other_process(bed, OTHER.format(pays=False)) as other:
        if lost:
            (bed.own / "kernel.key").unlink()
        renewed(bed, lost=lost)
        told_to_go_on(other)
    bed.clock.ahead_ms = LONG_MS
    with bed.gate() as gate:
        assert Recovered(success=1) == gate.recover()
        (signature,) = (row[0] for row in gate.store.rows("SELECT signature FROM execution_log"))
        newest = keys.read_ring(bed.own / "kernel.key").secrets[0]
        assert key_name(newest) == name_in(signature)
        assert () == verify.verify(gate.store, public=paths.public_keys_of(bed.own)).faults


def test_an_event_that_another_process_took_in_under_a_newer_key_is_recognised(bed: Testbed):
    with bed.gate() as running:
        renewed(bed)
        with bed.gate() as newer:
            answer = newer.decide(bed.event(1))
        assert answer == running.decide(bed.event(1))


def test_a_process_that_runs_goes_on_signing_the_ledger_after_a_rotation(bed: Testbed):
    with bed.gate() as gate:
        gate.decide(bed.event(0))
        renewed(bed)
        for number in range(1, CHECKPOINT_EVERY):
            gate.decide(bed.event(number))
    with closing(paths.open_record(bed.own)) as store:
        report = verify.verify(store, public=paths.public_keys_of(bed.own))
        assert () == report.faults
        assert report.entries - report.signed <= CHECKPOINT_EVERY


# Signatures


ORDER = ExecutionIntent("d", "k", "PAY", (("amount", 1),), "A1", "1")
KEY, NEWER = b"one key of the kernel, 32 bytes.", b"another one that came later, 32."


def test_a_signature_names_its_key_and_one_of_an_older_version_is_verified_without():
    signer = Signer(NEWER, KEY)
    signed = ORDER.signed_by(signer)
    assert key_name(NEWER) == name_in(signed.signature)
    assert signed.is_signed_by(signer)
    unnamed = signed.signature.removeprefix(f"{key_name(NEWER)}:")
    assert ExecutionIntent(*_parts(), unnamed).is_signed_by(signer)
    assert ExecutionIntent(*_parts(), unnamed).is_signed_by(Signer(KEY, NEWER))
    assert not ExecutionIntent(*_parts(), f"{key_name(KEY)}:{unnamed}").is_signed_by(signer)
    assert not ExecutionIntent(*_parts(), f"::{unnamed}").is_signed_by(signer)


def _parts() -> tuple[object, ...]:
    return ORDER.dfid, ORDER.idempotency_key, ORDER.kind, ORDER.params, ORDER.resource_key, ORDER.state_version


def test_an_order_of_a_key_that_is_not_here_is_not_taken_for_an_altered_one():
    elsewhere, here = ORDER.signed_by(Signer(NEWER)), Signer(KEY)
    assert (False, key_name(NEWER)) == (elsewhere.is_signed_by(here), here.missing(elsewhere.signature))
    assert "" == here.missing(ORDER.signed_by(here).signature)
    assert "" == here.missing(ORDER.signature)


def test_the_keys_are_read_again_only_where_the_file_is_another(tmp_path: Path):
    signer = paths.signer(tmp_path)
    first = signer.sign(b"")
    assert (0, first) == (signer.generation(), signer.sign(b""))
    keys.renew(tmp_path, Head(0, GENESIS), older=(), now_ms=1)
    assert (1, 2) == (signer.generation(), len(signer.derived("any")))
    assert first != signer.sign(b"")
    (tmp_path / "kernel.key").write_bytes(b"x")
    assert 1 == signer.generation()
    (tmp_path / "kernel.key").unlink()
    assert 1 == signer.generation()


def test_the_keys_of_another_record_in_the_place_of_its_own_are_not_taken(tmp_path: Path):
    own, other = tmp_path / "own", tmp_path / "other"
    signer = paths.signer(own)
    first = signer.sign(b"")
    paths.signer(other)
    swapped = (other / "kernel.key").read_bytes()
    (own / "kernel.key").write_bytes(swapped)
    assert (0, first) == (signer.generation(), signer.sign(b""))


# A record that other keys have signed


def swap(bed: Testbed, other: Testbed) -> None:
    (bed.own / "kernel.key").write_bytes((other.own / "kernel.key").read_bytes())


def test_a_gate_whose_record_was_signed_with_other_keys_does_not_open(bed: Testbed, tmp_path: Path):
    stranger = Testbed(tmp_path / "stranger")
    for each in (bed, stranger):
        each.gate().close()
    swap(bed, stranger)
    with pytest.raises(StoreError, match="is another record's, or older than its own: the ledger was signed with"):
        bed.gate()
    assert not bed.bank.paid()


def test_a_gate_whose_keys_are_older_than_the_last_rotation_does_not_open(bed: Testbed):
    bed.gate().close()
    before = (bed.own / "kernel.key").read_bytes()
    renewed(bed)
    (bed.own / "kernel.key").write_bytes(before)
    with pytest.raises(StoreError, match="older than its own") as refused:
        bed.gate()
    assert refused.value.hint.startswith("copy the key that the record's other processes use, or restore the key")
    assert "\n" not in str(refused.value)


def test_a_gate_that_lacks_the_key_of_its_newest_order_does_not_open_unless_that_is_lost_on_the_record(bed: Testbed):
    with bed.gate() as gate:
        gate.decide(bed.event(0))
    path = bed.own / "kernel.key"
    ring = keys.read_ring(path)
    other = ring.model_copy(update={"orders": (keys.OrderKey(key="ab" * 32),)})
    path.write_bytes(b"sds keys 1\n" + other.model_dump_json().encode())
    with pytest.raises(StoreError, match="its newest order was signed with"):
        bed.gate()
    path.unlink()
    renewed(bed, lost=True)
    with bed.gate() as gate:  # what is lost is from before
        gate.decide(bed.event(1))
    ring = keys.read_ring(path)
    path.write_bytes(b"sds keys 1\n" + ring.model_copy(update={"orders": other.orders}).model_dump_json().encode())
    with pytest.raises(StoreError, match="its newest order was signed with"):
        bed.gate()


@pytest.mark.parametrize("text", ["pay 5", "nothing that pays"])
def test_whoever_is_stopped_while_they_say_that_keys_are_lost_says_it_again(
    bed: Testbed, monkeypatch: pytest.MonkeyPatch, text: str
):
    with bed.gate() as gate:
        dfid = gate.decide(bed.event(0, text=text)).dfid
    (bed.own / "kernel.key").unlink()
    with monkeypatch.context() as stopped:
        stopped.setattr(registry, "append_act", interrupted)
        with pytest.raises(KeyboardInterrupt):
            renewed(bed, lost=True)
    with closing(paths.open_record(bed.own)) as store, pytest.raises(StoreError, match="opens with no key"):
        verify.flow_record(store, dfid)
    renewed(bed, lost=True)
    with bed.gate() as gate:
        assert "[sealed]" in str(verify.flow_record(gate.store, dfid))
        with pytest.raises(EventError, match="was seen with another body") as refused:
            gate.decide(bed.event(0, text=text))
        assert (dfid, True) == (refused.value.dfid, "do not send it under another id" in refused.value.hint)
        assert "CLOSED" == gate.decide(bed.event(1)).state
        assert () == verify.verify(gate.store, public=paths.public_keys_of(bed.own)).faults
    with pytest.raises(UsageError, match="are not lost"):
        renewed(bed, lost=True)


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_a_record_from_before_keys_were_lost_is_gone_on_with_once_that_is_said_again(bed: Testbed, tmp_path: Path):
    with bed.gate() as gate:
        gate.decide(bed.event(0))
        back_up(gate.store, bed.own, tmp_path / "backup", gate=gate.contract.gate, with_key=False, now_ms=bed.clock())
    (bed.own / "kernel.key").unlink()
    renewed(bed, lost=True)
    (bed.own / "decisions.db").rename(tmp_path / "given-up.db")
    restore(tmp_path / "backup", bed.own, gate=gate.contract.gate)
    with pytest.raises(StoreError, match="its newest order was signed with") as caught:
        bed.gate()
    assert "sds keys rotate --gate GATE --lost" in caught.value.hint
    renewed(bed, lost=True)
    with bed.gate() as gate:
        assert "CLOSED" == gate.decide(bed.event(1)).state


def test_of_two_that_open_a_fresh_record_with_keys_of_their_own_only_one_goes_on(bed: Testbed, tmp_path: Path):
    """As on two machines with one database: each with a folder, and a key, of its own."""
    stranger = Testbed(tmp_path / "stranger")
    stranger.gate().close()
    with ExitStack() as opened:
        record = opened.enter_context(bed.gate()).store
        with pytest.raises(StoreError, match="is another record's"):
            keys.refuse_other_keys(stranger.own, record)
        with pytest.raises(StoreError, match="is gone, but its record is there"):
            keys.refuse_other_keys(tmp_path / "empty", record)
