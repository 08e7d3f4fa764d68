"""Weights prepared for this machine: the fastest are kept, whole or not at all, and no others are ever run for them."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sds.engines.config import EngineSpec, open_chain
from sds.engines.opening import open_backend, open_engine, open_weights
from sds.home import now_ms
from sds.kernel.errors import ModelError
from sds.kernel.store import Store
from sds.models import catalog, gguf, llama, prepare
from sds.models.catalog import Prepared, prepared
from sds.models.llama import LlamaBackend
from sds.models.measuring import DECISIONS, NOISE_SLOTS
from sds.models.prepare import ROUNDS, Candidate, Preparation, chosen
from sds.models.protocol import BackendError
from sds.replay import opener, replay
from tests.model_fixtures import TINY_THREADS
from tests.replays import GATE, record
from tests.small_models import sentencepiece_gguf

TODAY = "2026-11-22"
OTHER_DAY = "2026-11-23"


def clock(**durations_s: float) -> Callable[[], float]:
    """A clock in whose time each weight type takes what is said; `own` is the source's."""

    def readings() -> Iterator[float]:
        now = 0.0
        for _ in range(prepare.ROUNDS):
            for name in ("own", "BF16", "F16", "Q8_0"):
                for _ in range(1 + DECISIONS):
                    yield now
                    now += durations_s[name]
                    yield now

    return readings().__next__


BF16_WINS = {"own": 3.0, "BF16": 1.0, "F16": 2.0, "Q8_0": 2.5}


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is kept, not of what is measured."""
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "noise_logp", lambda _path, _threads: None)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few hundred tokens, for what runs in processes of its own."""
    return sentencepiece_gguf(tmp_path_factory.mktemp("small") / "small.gguf")


def preparation(cache: Path, durations_s: Mapping[str, float] = BF16_WINS, *, today: str = TODAY) -> Preparation:
    return Preparation(
        cache=cache,
        threads=TINY_THREADS,
        today=today,
        clock_s=clock(**durations_s),
        sleep=lambda _: pytest.fail("nobody else is preparing"),
        log=lambda _: None,
    )


@pytest.fixture(scope="module")
def kept(tiny_path: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Prepared]:
    """A source, a cache, and what was prepared of the one in the other. Copy the cache to change it."""
    source, cache = tiny_path(1), tmp_path_factory.mktemp("kept") / "models"
    found, now = preparation(cache).run(source)
    assert now
    return source, cache, found


@pytest.fixture
def copied(kept: tuple[Path, Path, Prepared], tmp_path: Path) -> tuple[Path, Path]:
    source, cache, _ = kept
    return source, shutil.copytree(cache, tmp_path / "cache" / "models")


def changed(cache: Path, **facts: Any) -> None:
    (path,) = cache.glob("*.json")
    path.write_text(json.dumps({**json.loads(path.read_bytes()), **facts}))


def weights(cache: Path) -> Path:
    (path,) = cache.glob("*.gguf")
    return path


def test_the_fastest_type_is_kept_and_why_is_said(kept: tuple[Path, Path, Prepared]) -> None:
    source, cache, found = kept
    sha12 = catalog.fingerprint(source)[:12]
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
def test_where_the_source_is_the_fastest_it_is_run_itself(tiny_path: Callable[[int], Path], tmp_path: Path) -> None:
    found, _ = preparation(tmp_path, {**BF16_WINS, "own": 0.5}).run(tiny_path(1))
    assert (tiny_path(1), "tiny-1.gguf") == (found.path, found.name)
    assert (
        "own type as it is: 500.0 ms for a decision's passes; BF16 1000.0, F16 2000.0, Q8_0 2500.0" == found.record.why
    )
    assert found == prepared(tiny_path(1), tmp_path)
    assert [] == list(tmp_path.glob("*.gguf"))


def candidate(tmp_path: Path, name: str, ms: float, kl: float, size: int) -> Candidate:
    path = tmp_path / name
    path.write_bytes(b"x" * size)
    return Candidate(name, path, kl, [ms])


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


@pytest.mark.usefixtures("brief")
def test_a_type_too_far_from_the_exact_weights_is_never_kept(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "KL_MAX", 0.0)
    found, _ = preparation(tmp_path).run(tiny_path(1))
    assert ["own type"] == [each.type for each in found.record.measured]
    assert tiny_path(1) == found.path


def cut_off(cache: Path) -> None:
    os.truncate(weights(cache), 1000)


def flip(cache: Path) -> None:
    with weights(cache).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def another_models(cache: Path) -> None:
    sentencepiece_gguf(weights(cache))


MACHINE = {"cpu": "Z80", "features": "", "cores": 1, "llama_cpp_python": "0.0.1"}
FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("gone", lambda cache: weights(cache).unlink(), "are gone"),
    ("cut off", cut_off, "are damaged"),
    ("one bit", flip, "are damaged"),
    ("another model's", another_models, "are damaged"),
    ("another machine", lambda cache: changed(cache, machine=MACHINE), "measured on another machine or library"),
    ("no JSON", lambda cache: next(cache.glob("*.json")).write_text("{"), "is no record of prepared weights"),
    ("no sizes", lambda cache: changed(cache, bytes=None), "is no record of prepared weights"),
    ("elsewhere", lambda cache: changed(cache, file="../x.gguf"), "is no record of prepared weights"),
    ("too long", lambda cache: changed(cache, why="x" * 70_000), "too long"),
    (
        "another source",
        lambda cache: changed(cache, source={"name": "x", "sha256": "0" * 64, "type": "F32", "bytes": 1}),
        "is about other weights",
    ),
    ("open to others", lambda cache: cache.chmod(0o777), "can be changed by others"),
]


@pytest.mark.parametrize(("fault", "message"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_what_is_not_whole_or_not_ours_is_one_line_and_the_source_runs(
    copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, fault: Callable[[Path], Any], message: str
) -> None:
    source, cache = copied
    fault(cache)
    monkeypatch.setenv("SDS_CACHE", str(cache.parent))
    with pytest.raises(BackendError, match=message):
        prepared(source, cache)
    engine = open_engine(source, now_ms=lambda: 0)
    engine.close()
    (notice,) = engine.notices
    assert message in notice
    assert notice.endswith((": the model runs as it is (sds models prepare)", f"(chmod 700 {cache})"))
    assert "\n" not in notice
    assert f"tiny-1.gguf@{catalog.fingerprint(source)[:12]}" == engine.model


def test_what_was_decided_before_it_was_prepared_is_replayed_by_the_file_itself(
    copied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    monkeypatch.setenv("SDS_THREADS", "1")
    before = record(tmp_path, model=source, events=1)
    monkeypatch.setenv("SDS_CACHE", str(cache.parent))
    after = record(tmp_path, model=source, events=2)[1:]
    with closing(Store(tmp_path / GATE / "decisions.db")) as store:
        open_it = opener(source, now_ms=now_ms)
        found = [replay(store, dfid, open_it=open_it, now_ms=now_ms) for dfid in before + after]
    assert [(True, ()), (True, ())] == [(one.identical, one.circumstances) for one in found]


def test_an_engine_runs_what_was_prepared_and_its_name_says_so(
    copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    monkeypatch.setenv("SDS_CACHE", str(cache.parent))
    engine = open_engine(source, now_ms=lambda: 0)
    engine.close()
    sha12 = catalog.fingerprint(source)[:12]
    made = f"tiny-1.gguf as BF16, made from {sha12}@{catalog.fingerprint(weights(cache))[:12]}"
    assert (made, ()) == (engine.model, engine.notices)
    itself = open_engine(source, now_ms=lambda: 0, as_is=True)
    itself.close()
    assert f"tiny-1.gguf@{sha12}" == itself.model


def test_a_chain_names_the_engine_whose_prepared_weights_are_no_good(
    copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    flip(cache)
    monkeypatch.setenv("SDS_CACHE", str(cache.parent))
    specs = [EngineSpec(name="here", kind="native", model=str(source), as_is=as_is) for as_is in (False, True)]
    told = []
    for spec in specs:
        chain = open_chain([spec], now_ms=lambda: 0)
        chain.close()
        told += chain.notices
    damaged = f"engine `here`: the prepared weights `{weights(cache)}` are damaged: the model runs as it is"
    assert [f"{damaged} (sds models prepare)"] == told


def test_weights_that_do_not_load_give_way_to_the_source(copied: tuple[Path, Path]) -> None:
    """A file may be whole and still not run, for want of memory."""
    source, cache = copied
    opened = list[Path]()

    def opener(path: Path, fingerprint: str | None) -> LlamaBackend:
        opened.append(path)
        if path != source:
            raise BackendError("no memory for a context of 4096 tokens")
        return LlamaBackend(path, threads=TINY_THREADS, fingerprint=fingerprint)

    found = open_weights(source, opener, cache=cache)
    found.backend.close()
    assert [weights(cache), source] == opened
    assert ("tiny-1.gguf", None) == (found.backend.name, found.noise_logp_max)
    assert ("no memory for a context of 4096 tokens: the model runs as it is",) == found.notices


def test_every_file_is_read_through_once_at_the_start(
    copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    hashed, really = list[Path](), gguf.gguf_fingerprint
    for module in (gguf, llama):
        monkeypatch.setattr(module, "gguf_fingerprint", lambda path: hashed.append(path) or really(path))
    found = open_weights(source, lambda path, known: open_backend(path, fingerprint=known), cache=cache)
    found.backend.close()
    assert [source, weights(cache)] == hashed
    assert really(weights(cache)) == found.backend.fingerprint


def test_what_company_does_with_these_weights_comes_along(
    copied: tuple[Path, Path], kept: tuple[Path, Path, Prepared]
) -> None:
    source, cache = copied
    found = open_weights(source, lambda path, _: LlamaBackend(path, threads=TINY_THREADS), cache=cache)
    found.backend.close()
    assert (kept[2].record.shape_noise_logp_max, NOISE_SLOTS) == (found.noise_logp_max, found.noise_slots)


def test_what_is_no_model_is_no_model_with_a_cache_either(
    copied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDS_CACHE", str(copied[1].parent))
    (tmp_path / "x.gguf").write_bytes(b"PK")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_engine(tmp_path / "x.gguf", now_ms=lambda: 0)


_CHILD = """
import os, signal, sys, time
from pathlib import Path
from sds.models import prepare

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
    assert "free some, or set SDS_CACHE to another folder" == caught.value.hint
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
    assert "`dtype`" in caught.value.hint
