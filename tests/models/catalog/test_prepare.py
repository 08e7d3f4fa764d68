"""Weights prepared for this machine: the fastest are kept, whole or not at all."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.models.catalog import prepare
from sds.models.catalog.catalog import Prepared, prepared
from sds.models.catalog.prepare import ROUNDS, Candidate, Preparation, chosen
from sds.models.catalog.timing import DECISIONS
from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.protocol import BackendError
from tests.model_fixtures import TINY_THREADS
from tests.models.catalog.preparing import BF16_WINS, OTHER_DAY, TODAY, clock, preparation
from tests.small_models import sentencepiece_gguf


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is kept, not of what is measured."""
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "variance_logp", lambda *_: None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few hundred tokens, for what runs in processes of its own."""
    return sentencepiece_gguf(tmp_path_factory.mktemp("small") / "small.gguf")


def test_the_fastest_type_is_kept_and_why_is_said(kept: tuple[Path, Path, Prepared]) -> None:
    source, cache, found = kept
    sha12 = gguf_fingerprint(source)[:12]
    assert (cache / f"{sha12}-BF16.gguf", "BF16", TODAY) == (found.path, found.record.type, found.record.date)
    assert f"tiny-1.gguf as BF16, made from {sha12}" == found.name
    assert found.record.why.startswith("BF16 takes 1000.0 ms for a decision's passes, own type 3000.0 (3.0x), and is ")
    assert ["own type", "BF16", "F16", "Q8_0"] == [each.type for each in found.record.measured]
    assert {ROUNDS * DECISIONS} == {each.decisions for each in found.record.measured}
    assert found.record.shape_noise_logp_max is not None
    assert 0 <= found.record.shape_noise_logp_max < 1


def test_the_divergence_is_from_the_exact_weights(kept: tuple[Path, Path, Prepared]) -> None:
    own, bf16, f16, q8 = (each.kl_mean for each in kept[2].record.measured)
    assert 0 <= own <= f16 < bf16 < q8 < prepare.KL_MAX


def test_what_is_prepared_is_found_again_and_not_measured_again(kept: tuple[Path, Path, Prepared]) -> None:
    source, cache, found = kept
    assert found == prepared(source, cache)
    assert (found, False) == preparation(cache, today=OTHER_DAY).run(source)


def test_it_is_private_and_nothing_else_is_left(kept: tuple[Path, Path, Prepared]) -> None:
    _, cache, found = kept
    sha12 = found.record.source.sha256[:12]
    assert {".lock", f"{sha12}-BF16.gguf", f"{sha12}.json"} == {path.name for path in cache.iterdir()}
    assert 0o700 == stat.S_IMODE(cache.stat().st_mode)
    assert {0o600} == {stat.S_IMODE(path.stat().st_mode) for path in cache.iterdir() if path.name != ".lock"}


@pytest.mark.usefixtures("brief")
def test_measured_again_the_old_weights_go_and_files_of_ones_own_stay(copied: tuple[Path, Path]) -> None:
    source, cache = copied
    own = shutil.copy(source, cache / "mine.gguf")
    found, now = preparation(cache, {**BF16_WINS, "Q8_0": 0.5}, today=OTHER_DAY).run(source, again=True)
    assert (True, "Q8_0", OTHER_DAY) == (now, found.record.type, found.record.date)
    assert {found.path, own} == set(cache.glob("*.gguf"))


@pytest.mark.usefixtures("brief")
def test_weights_that_a_record_of_another_version_may_name_stay(copied: tuple[Path, Path]) -> None:
    source, cache = copied
    theirs = Path(shutil.copy(source, cache / "0123456789ab-Q8_0.gguf"))
    newer = cache / "0123456789ab.json"
    newer.write_text('{"format": 99}')
    preparation(cache, today=OTHER_DAY).run(source, again=True)
    assert theirs.exists()
    newer.unlink()
    preparation(cache, today=OTHER_DAY).run(source, again=True)
    assert not theirs.exists()


@pytest.mark.usefixtures("brief")
def test_a_full_cache_still_renews_what_it_holds(
    copied: tuple[Path, Path], small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    monkeypatch.setattr(prepare, "PREPARED_MAX", 1)
    found, now = preparation(cache, today=OTHER_DAY).run(source, again=True)
    assert (True, OTHER_DAY) == (now, found.record.date)
    with pytest.raises(BackendError, match="holds 1 prepared models"):
        preparation(cache).run(small)


@pytest.mark.usefixtures("brief")
def test_where_the_source_is_the_fastest_it_is_run_itself(small: Path, tmp_path: Path) -> None:
    found, _ = preparation(tmp_path, {**BF16_WINS, "own": 0.5}).run(small)
    assert (small, "small.gguf") == (found.path, found.name)
    assert "F32 as it is: 500.0 ms for a decision's passes; BF16 1000.0, F16 2000.0" == found.record.why
    assert found == prepared(small, tmp_path)
    assert [] == list(tmp_path.glob("*.gguf"))


def candidate(tmp_path: Path, name: str, ms: float, kl: float, size: int) -> Candidate:
    path = tmp_path / name
    path.write_bytes(b"x" * size)
    return Candidate(name, path, kl_mean=kl, times_ms=[ms])


@pytest.mark.parametrize(
    ("bf16", "q8", "best"),
    [
        ((100, 0.001, 20), (90, 0.01, 10), "q8"),
        ((100, 0.001, 20), (98, 0.01, 10), "bf16"),
        ((100, 0.001, 20), (98, 0.001, 10), "q8"),
        ((100, 0.01, 20), (98, 0.001, 30), "q8"),
    ],
    ids=["the faster", "a tie: the closer", "as close: the smaller", "closer before smaller"],
)
def test_a_tie_goes_to_the_closer_then_to_the_smaller(
    tmp_path: Path, bf16: tuple[float, float, int], q8: tuple[float, float, int], best: str
) -> None:
    own = candidate(tmp_path, "own", 300, 0.005, 5)
    assert best == chosen([own, candidate(tmp_path, "bf16", *bf16), candidate(tmp_path, "q8", *q8)])[0].type


def test_what_is_slow_while_the_machine_does_something_else_is_not_the_slower(tmp_path: Path) -> None:
    own, bf16, q8 = (candidate(tmp_path, name, ms, 0.005, 5) for name, ms in (("own", 300), ("bf16", 150), ("q8", 200)))
    q8.times_ms += [100, 210]
    bf16.times_ms += [140, 145]
    best, why = chosen([own, bf16, q8])
    assert "q8" == best.type
    assert why.startswith("q8 takes 100.0 ms for a decision's passes, own 300.0 (3.0x)")


@pytest.mark.usefixtures("brief")
def test_a_type_too_far_from_the_exact_weights_is_never_kept(small: Path, tmp_path: Path) -> None:
    found, _ = preparation(tmp_path, kl_max=0.0).run(small)
    assert ["F32"] == [each.type for each in found.record.measured]
    assert small == found.path


_CHILD = """
import os, signal, sys, time
from pathlib import Path
from sds.models.catalog import prepare

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

source, cache, when = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if when == "record":
    prepare._write = die
said = lambda line: die() if line.startswith(when) else None
prepare.Preparation(cache, 1, "2026-11-22", time.perf_counter, time.sleep, said).run(source)
"""


@pytest.mark.usefixtures("brief")
@pytest.mark.parametrize("when", ["re-encoding as F32", "re-encoding as Q8_0", "measuring", "record"])
def test_killed_in_the_middle_it_leaves_nothing_that_is_used_and_nothing_for_long(
    small: Path, tmp_path: Path, when: str
) -> None:
    child = [sys.executable, "-c", _CHILD, str(small), str(tmp_path), when]
    done = subprocess.run(child, capture_output=True, timeout=300, check=False)
    assert -signal.SIGKILL == done.returncode, done.stderr
    assert any(path.name != ".lock" for path in tmp_path.iterdir())
    assert prepared(small, tmp_path) is None
    found, _ = preparation(tmp_path).run(small)
    assert "BF16" == found.record.type
    assert {".lock", found.path.name, f"{found.path.name[:12]}.json"} == {path.name for path in tmp_path.iterdir()}


def test_without_room_nothing_is_begun(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 5_000_000))
    with pytest.raises(BackendError) as caught:
        preparation(tmp_path / "cache").run(tiny_path(1))
    assert f"MB in `{tmp_path / 'cache'}`, which has 5 MB" in str(caught.value)
    assert "free disk space, or set SDS_CACHE to another folder" == caught.value.hint
    assert [".lock"] == [path.name for path in (tmp_path / "cache").iterdir()]


def test_a_disk_that_fills_up_is_one_line_and_leaves_nothing(small: Path, tmp_path: Path) -> None:
    """The system refuses every file beyond 20 kB, as a full disk would."""
    child = [sys.executable, "-c", _CHILD, str(small), str(tmp_path), "never"]
    limit = (20_000, 20_000)
    done = subprocess.run(
        child,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert "BackendError: `small.gguf` could not be re-encoded as F32 (llama.cpp code 1, " in done.stderr
    assert [".lock"] == [path.name for path in tmp_path.iterdir()]


def test_two_at_once_measure_once(small: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sds.cli.app", "models", "prepare", str(small), "--json"]
    environment = {**os.environ, "SDS_CACHE": str(tmp_path), "SDS_THREADS": "1"}
    both = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    outputs = [child.communicate(timeout=300) for child in both]
    assert [0, 0] == [child.returncode for child in both], outputs
    first, second = (json.loads(out) for out, _ in outputs)
    assert {True, False} == {first.pop("measured_now"), second.pop("measured_now")}
    assert first == second


def test_while_another_prepares_it_waits_but_not_for_ever(
    kept: tuple[Path, Path, Prepared], copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    monkeypatch.setattr(prepare, "WAIT_S", 1.0)
    waits: list[float] = []
    waiting = Preparation(cache, TINY_THREADS, TODAY, clock(**BF16_WINS), waits.append, lambda _: None)
    with preparation(cache)._alone(), pytest.raises(BackendError, match="another process has been preparing in"):
        waiting.run(source)
    assert [prepare.WAIT_STEP_S] * 5 == waits


def test_a_checkpoint_folder_is_told_what_to_do_instead(tiny_folder: Callable[[int], Path], tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="is a folder: weight types and layers are for GGUF") as caught:
        preparation(tmp_path).run(tiny_folder(1))
    assert "--dtype bf16" in caught.value.hint
