"""What backends keep of sections that were read before: the same bits, fewer passes, bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sds.models.cache.prefix_cache import PrefixCache, PrefixCachingBackend
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import Backend, Row
from tests.model_fixtures import TINY_THREADS
from tests.models.test_backends import sections_of
from tests.scale import scale, seeded

A, B, C = (1, 2), (3,), (4, 5, 6)


def test_what_was_put_is_found_behind_the_same_sections_only():
    kept = PrefixCache[str]()
    kept.put([A, B], "b behind a", 1)
    assert "b behind a" == kept.get([A, B])
    assert [None, None, None] == [kept.get(other) for other in ([B], [A], [C, A, B])]
    assert None is kept.get([(*A, *B)])  # where sections are cut is part of what they come to


def test_the_least_recently_used_go_first_when_the_bytes_are_full():
    kept = PrefixCache[str](10)
    kept.put([A], "a", 4)
    kept.put([B], "b", 4)
    kept.get([A])
    kept.put([C], "c", 4)
    assert ["a", None, "c"] == [kept.get([one]) for one in (A, B, C)]


def test_what_is_put_again_counts_once():
    kept = PrefixCache[str](10)
    for _ in range(5):
        kept.put([A], "a", 6)
    kept.put([B], "b", 4)
    assert ["a", "b"] == [kept.get([one]) for one in (A, B)]


def test_what_is_larger_than_the_bound_is_not_kept_and_drives_nothing_out():
    kept = PrefixCache[str](10)
    kept.put([A], "a", 10)
    kept.put([B], "b", 11)
    assert ["a", None] == [kept.get([one]) for one in (A, B)]


def test_sections_are_held_when_each_is_but_for_those_before_and_those_of_no_token():
    kept = PrefixCache[str]()
    kept.put([A, B], "b", 1)
    assert not kept.holds([A, B])
    assert kept.holds([A, B], behind=1)
    assert kept.holds([A, B, ()], behind=1)
    assert not kept.holds([A, B, C], behind=1)
    assert kept.holds([])


@pytest.fixture
def llama_slots(tiny_path: Callable[[int], Path]) -> Iterator[LlamaBackend]:
    backend = LlamaBackend(tiny_path(1), slots=3, n_ctx=512, threads=TINY_THREADS)
    yield backend
    backend.close()


TINY = ("tiny", "tiny_hf", "tiny_vino", "own_caches", "llama_slots")
LARGE = ("embedded", "own_hf", "own_vino")  # the embedded model's weights: in CI through llama.cpp alone


@pytest.fixture(params=[*TINY, *LARGE[: scale(1, 3)]])
def backend(request: pytest.FixtureRequest) -> Backend:
    found: Backend = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def read(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list to which the length of every section that is read from now on is added; nothing is kept yet."""
    lengths: list[int] = []
    name = "_decode" if isinstance(backend, LlamaBackend) else "_read"
    real: Callable[..., Any] = getattr(backend, name)

    def counted(rows: list[Row], **options: object) -> object:
        lengths.extend(len(row.tokens) for row in rows if not row.outputs)
        return real(rows, **options)

    monkeypatch.setattr(backend, name, counted)
    monkeypatch.setattr(backend, "_prefix_cache", PrefixCache())
    backend.prefill([])
    return lengths


def test_a_section_that_was_read_once_is_not_read_again_and_nothing_shows_it(backend: Backend, read: list[int]):
    contract, one, other, ending = sections_of(50, 40, 25, 9, 12)
    backend.prefill([contract, one])
    expected = backend.forward_one(ending)
    backend.prefill([contract, other])
    backend.forward_one(ending)
    assert [40, 25, 9] == read
    backend.prefill([contract, one])
    assert np.array_equal(expected, backend.forward_one(ending))
    backend.prefill([])
    backend.prefill([contract, one])
    assert np.array_equal(expected, backend.forward_one(ending))
    assert [40, 25, 9] == read


def test_a_section_is_read_again_behind_another(backend: Backend, read: list[int]):
    first, other, section = sections_of(51, 20, 21, 10)
    backend.prefill([first, section])
    backend.prefill([other, section])
    backend.prefill([[*first, *section]])
    assert [20, 10, 21, 10, 30] == read


def test_random_work_gives_the_bits_of_reading_all_whatever_is_kept(backend: Backend, read: list[int]):
    """So few bytes that sections come and go."""
    rng = seeded(52)
    pieces = sections_of(rng.randrange(2**32), 12, 7, 30, 1, 18)
    expected: dict[tuple[int, ...], np.ndarray] = {}
    kept, nothing = PrefixCache[Any](_bytes_of(backend, pieces[2]) * 3), PrefixCache[Any](0)
    for _ in range(scale(8, 1000)):
        order = tuple(rng.randrange(5) for _ in range(rng.randint(0, 4)))
        sections = [pieces[n] for n in order]
        if order not in expected:
            backend._prefix_cache = nothing
            backend.prefill([])
            backend.prefill(sections)
            expected[order] = backend.forward_one([99, 100])
        backend._prefix_cache = kept
        backend.prefill(sections, slot=rng.randrange(backend.slots) if rng.random() < 0.5 else 0)
        backend.prefill(sections)
        assert np.array_equal(expected[order], backend.forward_one([99, 100])), order
        if backend.fragmented:
            backend.defragment()


def _bytes_of(backend: Backend, section: list[int]) -> int:
    backend._prefix_cache = PrefixCache()
    backend.prefill([])
    backend.prefill([section])
    return backend._prefix_cache._bytes


def test_a_backend_tells_what_it_would_not_have_to_read(backend: Backend, read: list[int]):
    rng = seeded(53)
    pieces = sections_of(rng.randrange(2**32), 12, 7, 30)
    for _ in range(scale(12, 500)):
        sections = [pieces[rng.randrange(3)] for _ in range(rng.randint(0, 3))]
        told, before = backend.is_cached(sections), len(read)
        backend.prefill(sections)
        assert told == (before == len(read))
        assert backend.is_cached(sections)
        backend.prefill([])


def test_a_section_that_every_prompt_begins_with_outlives_those_that_few_have(backend: Backend, read: list[int]):
    """Also while slots hold it, and need not get it: another contract's prompt between two does not cost it."""
    contract, other, *cases = sections_of(57, 40, 20, *[20] * 8)
    room = _bytes_of(backend, contract) + 4 * _bytes_of(backend, cases[0])
    backend._prefix_cache = PrefixCache(room)
    for _ in range(scale(1, 3)):
        for case in cases:
            backend.prefill([contract, case])
            assert backend.is_cached([contract, case])
    read.clear()
    backend.prefill([other])
    backend.prefill([contract, cases[-1]])
    assert 40 not in read


def test_what_every_slot_holds_need_not_be_kept(backend: Backend, read: list[int]):
    contract, case = sections_of(58, 40, 20)
    backend._prefix_cache = PrefixCache(0)
    for slot in range(backend.slots):
        assert not backend.is_cached([contract, case])
        backend.prefill([contract, case], slot=slot)
        if isinstance(backend, LlamaBackend):
            break  # slots share cells
    assert backend.is_cached([contract, case])


def test_what_forks_wrote_is_not_kept(backend: Backend, read: list[int]):
    contract, case, said = sections_of(54, 30, 10, 6)
    backend.prefill([contract, case])
    expected = backend.forward_one(said)
    backend.prefill([contract])
    fork = backend.fork(0)
    backend.run([Row(fork, said)])
    backend.run([Row(0, said[:2])])
    backend.prefill([contract, case])
    assert np.array_equal(expected, backend.forward_one(said))


def test_a_kept_section_that_cannot_be_put_back_is_read(
    tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
):
    """llama.cpp says so; what it half wrote is gone."""
    backend = LlamaBackend(tiny_path(1), threads=TINY_THREADS)
    contract, case, said = sections_of(55, 30, 10, 6)
    backend.prefill([contract, case])
    expected = backend.forward_one(said)
    for sections, (block, size) in list(backend._prefix_cache._entries.items()):
        backend._prefix_cache.put(sections, type(block).from_buffer_copy(bytes(size)), size)
    backend.prefill([])
    backend.prefill([contract, case])
    assert np.array_equal(expected, backend.forward_one(said))
    backend.close()


def test_a_library_that_fails_to_put_it_back_is_a_refusal_and_the_prompt_is_forgotten(
    tiny_vino: PrefixCachingBackend, monkeypatch: pytest.MonkeyPatch
):
    from sds.models.protocol import BackendError

    contract, case, said = sections_of(56, 30, 10, 6)
    tiny_vino.prefill([contract, case])
    expected = tiny_vino.forward_one(said)
    tiny_vino.prefill([])
    with monkeypatch.context() as broken:
        broken.setattr(tiny_vino._kv_cache, "write_block", lambda *_: (_ for _ in ()).throw(MemoryError))
        with pytest.raises(BackendError, match="a stored section could not be restored: no memory"):
            tiny_vino.prefill([contract, case])
    tiny_vino.prefill([contract, case])
    assert np.array_equal(expected, tiny_vino.forward_one(said))
