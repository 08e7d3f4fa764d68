"""Setting the refund gate up: looking records nothing, recovery sees the real world, and nobody is overrun."""

from __future__ import annotations

import shutil
import stat
from contextlib import closing
from pathlib import Path

import pytest

from sds.gates.opening import preview_kernel, recovery_kernel
from sds.gates.refund import gate
from sds.gates.refund.world.tickets import World
from sds.host.clock import now_ms
from sds.host.paths import decisions_path
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import UsageError
from sds.kernel.flow import intake
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import registry
from sds.kernel.storage import ledger
from sds.kernel.storage.sqlite import SqliteStore

CLAIMS = 20


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("desk") / "refund"
    gate.ensure_world(made, claims=CLAIMS)
    return made


@pytest.fixture
def folder(world: Path, tmp_path: Path) -> Path:
    return shutil.copytree(world, tmp_path / "refund")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def packets(kernel: Kernel, folder: Path) -> list[DecisionPacket]:
    events = [intake.read_event(kernel.contract, claim.event) for claim in gate.read_queue(folder)]
    return [kernel.preview(event) for event in events]


def test_the_world_is_made_in_a_private_folder_with_nothing_left_over(world: Path) -> None:
    assert 0o700 == stat.S_IMODE(world.stat().st_mode)
    assert ["airline.db", "claims.jsonl"] == names(world)
    assert CLAIMS == len(gate.read_queue(world))


def test_looking_makes_no_record_and_no_key(folder: Path) -> None:
    with preview_kernel(gate.gate, folder) as kernel:
        assert any(len(packet.envelope.names) > 1 for packet in packets(kernel, folder))
        temporary = kernel.store.path

    assert {"airline.db", "claims.jsonl"} == {name for name in names(folder) if not name.startswith("airline.db-")}
    assert not temporary.parent.exists()


def test_looking_reads_the_record_that_is_there_and_adds_nothing(folder: Path) -> None:
    with closing(SqliteStore(decisions_path(folder))) as store:
        other = gate.load_refund_contract().model_copy(update={"version": "0.0.1"})
        registry.register(store, other, by="registry", now_ms=now_ms())
        registry.set_halted(store, True, by="test", reason="to be seen", now_ms=now_ms())
        before = ledger.head(store)
        with preview_kernel(gate.gate, folder) as kernel:
            shown = {packet.envelope.names for packet in packets(kernel, folder)}

        assert {("ESCALATE",)} == shown
        assert before == ledger.head(store)
        assert [other.hash] == [agent.contract_hash for agent in registry.agents(store)]
    assert "kernel.key" not in names(folder)


def test_a_record_that_does_not_know_the_agent_yet_is_left_as_it_is(folder: Path) -> None:
    with closing(SqliteStore(decisions_path(folder))) as store:
        with preview_kernel(gate.gate, folder) as kernel:
            assert kernel.store.path != store.path
        assert [] == registry.agents(store)


def test_recovery_works_on_the_real_tickets_and_puts_no_contract_in_force(folder: Path) -> None:
    with pytest.raises(UsageError, match="is not registered in this store"), recovery_kernel(gate.gate, folder):
        pass
    with closing(SqliteStore(decisions_path(folder))) as store:
        registry.register(store, gate.load_refund_contract(), by="operator", now_ms=1)
    with recovery_kernel(gate.gate, folder) as kernel:
        assert decisions_path(folder) == kernel.store.path
        assert any(len(packet.envelope.names) > 1 for packet in packets(kernel, folder))


def test_an_airline_that_another_process_made_meanwhile_is_never_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, live = gate.write_airline, list[int]()

    def slow(path: Path, world: World) -> None:
        monkeypatch.setattr(gate, "write_airline", real)
        gate.ensure_world(tmp_path, claims=CLAIMS)  # the other one starts later and is done first
        live.append(gate.airline_path(tmp_path).stat().st_ino)
        real(path, world)

    monkeypatch.setattr(gate, "write_airline", slow)
    gate.ensure_world(tmp_path, claims=CLAIMS)

    assert live == [gate.airline_path(tmp_path).stat().st_ino]
    assert ["airline.db", "claims.jsonl"] == names(tmp_path)
