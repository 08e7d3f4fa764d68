"""Prepared weights are run only while they are whole and ours; else the file itself is, and one line says why."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sds.engines.config import EngineSpec, open_chain
from sds.engines.factory import open_backend, open_engine, open_weights
from sds.host.clock import now_ms
from sds.host.paths import open_record
from sds.kernel.errors import ModelError
from sds.models.catalog import catalog
from sds.models.catalog.catalog import Prepared, prepared
from sds.models.catalog.timing import VARIANCE_SLOTS
from sds.models.files.fingerprint import gguf_fingerprint
from sds.models.llamacpp import backend
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import BackendError, Dtype, Library
from sds.replay import opener, replay
from tests.model_fixtures import TINY_THREADS
from tests.models.catalog.preparing import changed, flip, weights
from tests.replays import GATE, record
from tests.small_models import sentencepiece_gguf


def cut_off(cache: Path) -> None:
    os.truncate(weights(cache), 1000)


def another_models(cache: Path) -> None:
    sentencepiece_gguf(weights(cache))


MACHINE = {"cpu": "Z80", "features": "", "cores": 1, "llama_cpp_python": "0.0.1", "openvino": None, "integer": None}
FAULTS: list[tuple[str, Callable[[Path], Any], str]] = [
    ("gone", lambda cache: weights(cache).unlink(), "are gone"),
    ("cut off", cut_off, "are damaged"),
    ("one bit", flip, "are damaged"),
    ("another model's", another_models, "are damaged"),
    (
        "another machine",
        lambda cache: changed(cache, machine=MACHINE),
        "measured on another machine or with other libraries",
    ),
    ("no JSON", lambda cache: next(cache.glob("*.json")).write_text("{"), "is not a record of prepared weights"),
    ("no sizes", lambda cache: changed(cache, bytes=None), "is not a record of prepared weights"),
    ("an older program's", lambda cache: changed(cache, without="form"), "or another version wrote it"),
    ("elsewhere", lambda cache: changed(cache, file="../x.gguf"), "is not a record of prepared weights"),
    ("too long", lambda cache: changed(cache, why="x" * 70_000), "too long"),
    (
        "another source",
        lambda cache: changed(cache, source={"name": "x", "sha256": "0" * 64, "type": "F32", "bytes": 1}),
        "describes other weights",
    ),
    ("open to others", lambda cache: cache.chmod(0o777), "other users can change"),
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
    assert notice.endswith((": the model runs without prepared weights (sds models prepare)", f"(chmod 700 {cache})"))
    assert "\n" not in notice
    assert f"tiny-1.gguf@{gguf_fingerprint(source)[:12]}" == engine.model


def test_a_cache_that_is_no_folder_is_one_line_and_the_source_runs(
    tiny_path: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SDS_CACHE", str(tmp_path / "file"))
    engine = open_engine(tiny_path(1), now_ms=lambda: 0)
    engine.close()
    hint = "the model runs without prepared weights (set SDS_CACHE to a folder)"
    assert (f"`{tmp_path / 'file'}` is not a folder: {hint}",) == engine.notices


def test_what_was_decided_before_it_was_prepared_is_replayed_by_the_file_itself(
    copied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    before = record(tmp_path, model=source, events=1)
    monkeypatch.setenv("SDS_CACHE", str(cache.parent))
    after = record(tmp_path, model=source, events=2)[1:]
    with closing(open_record(tmp_path / GATE)) as store:
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
    sha12 = gguf_fingerprint(source)[:12]
    made = f"tiny-1.gguf as BF16, made from {sha12}@{gguf_fingerprint(weights(cache))[:12]}"
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
    damaged = (
        f"engine `here`: the prepared weights `{weights(cache)}` are damaged: the model runs without prepared weights"
    )
    assert [f"{damaged} (sds models prepare)"] == told


def test_weights_that_do_not_load_give_way_to_the_source(copied: tuple[Path, Path]) -> None:
    """A file may be whole and still not run, for want of memory."""
    source, cache = copied
    opened = list[Path]()

    def opener(path: Path, _: Library | None, __: Dtype | None, fingerprint: str | None) -> LlamaBackend:
        opened.append(path)
        if path != source:
            raise BackendError("no memory for a context of 4096 tokens")
        return LlamaBackend(path, threads=TINY_THREADS, fingerprint=fingerprint)

    found = open_weights(source, opener, cache=cache)
    found.backend.close()
    assert [weights(cache), source] == opened
    assert ("tiny-1.gguf", None) == (found.backend.name, found.noise_logp_max)
    assert ("no memory for a context of 4096 tokens: the model runs without prepared weights",) == found.notices


def test_every_file_is_read_through_once_at_the_start(
    copied: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, cache = copied
    hashed, really = list[Path](), gguf_fingerprint
    for module in (catalog, backend):
        monkeypatch.setattr(module, "gguf_fingerprint", lambda path: hashed.append(path) or really(path))
    found = open_weights(source, lambda path, _, __, known: open_backend(path, fingerprint=known), cache=cache)
    found.backend.close()
    assert [source, weights(cache)] == hashed
    assert really(weights(cache)) == found.backend.fingerprint


def test_what_company_does_with_these_weights_comes_along(
    copied: tuple[Path, Path], kept: tuple[Path, Path, Prepared]
) -> None:
    source, cache = copied
    found = open_weights(source, lambda path, *_: LlamaBackend(path, threads=TINY_THREADS), cache=cache)
    found.backend.close()
    assert (kept[2].record.shape_noise_logp_max, VARIANCE_SLOTS) == (found.noise_logp_max, found.noise_slots)


def test_what_is_no_model_is_no_model_with_a_cache_either(
    copied: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SDS_CACHE", str(copied[1].parent))
    (tmp_path / "x.gguf").write_bytes(b"PK")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        open_engine(tmp_path / "x.gguf", now_ms=lambda: 0)
