"""Words as Llama 2 has them: a space before every text, bytes to fall back to. They can decide like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sds.grammars.tokens.compiler import GrammarCompiler
from sds.grammars.tokens.selftest import check_mask_constrains
from sds.models.llamacpp.backend import LlamaBackend
from sds.models.protocol import BackendError
from sds.models.tokenizer.tokenizer import prompt_sections
from tests.decoding.small_backend import decode
from tests.model_fixtures import CONTEXT_REF, TINY_THREADS, refund_envelope
from tests.scale import scale, seeded
from tests.small_models import sentencepiece_gguf


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaBackend]:
    path = sentencepiece_gguf(tmp_path_factory.mktemp("words") / "sentencepiece.gguf")
    opened = LlamaBackend(path, threads=TINY_THREADS)
    yield opened
    opened.close()


def test_a_text_comes_back_without_a_space_of_the_tokenizers(backend: LlamaBackend):
    rng = seeded(20261124)
    scraps = [
        b" ",
        b"late",
        b" late",
        b"action",
        b"12",
        b"</s>",
        b"<s>",
        b"{",
        b"\n",
        b"\x02",
        b"\x00",
        "é€🙂".encode(),
    ]
    for _ in range(scale(500, 20_000)):
        text = b"".join(rng.choice(scraps) for _ in range(rng.randint(0, 12)))
        tokens = backend.tokenize(text, special=False)
        assert text == b"".join(map(backend.piece, tokens))
        assert set() == set(tokens) & {1, 2}


def test_its_mask_is_alive_and_it_decides(backend: LlamaBackend):
    check_mask_constrains(backend)
    decided = decode(
        backend,
        prompt_sections(backend, "Decide.", "Claim: late."),
        GrammarCompiler(backend).matcher(refund_envelope(), CONTEXT_REF),
        tokens_max=2000,
    )
    assert refund_envelope().contains(decided.data)


def test_words_that_lack_a_byte_are_refused_before_a_text_can_end_the_process(tmp_path: Path):
    with pytest.raises(BackendError) as caught:
        LlamaBackend(sentencepiece_gguf(tmp_path / "lacking.gguf", without=b"~"), threads=TINY_THREADS)
    assert "the tokenizer has no token for 1 of 256 bytes" == str(caught.value)
