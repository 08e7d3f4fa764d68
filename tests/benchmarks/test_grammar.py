"""The benchmark of new bounds runs, and stops at a peer that permits too little. Its figures are not tested."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from sds.benchmarks import grammar
from sds.grammars.tokens.compiler import GrammarCompiler
from sds.models.catalog.catalog import embedded_model
from sds.models.catalog.inspect import inspect_model
from sds.models.tokenizer.tokenizer import ModelTokenizer


def test_every_packet_has_bounds_and_a_reference_of_its_own() -> None:
    rng = Random(1)
    packets = [grammar.packet(rng) for _ in range(50)]
    assert 50 == len({said.envelope.hash for said in packets}) == len({said.context_ref for said in packets})


def test_every_peer_permits_what_ours_does_and_one_that_does_not_stops_the_run() -> None:
    with inspect_model(embedded_model()) as model:
        rng, compiler = Random(2), GrammarCompiler(ModelTokenizer(model.words))
        said = grammar.packet(rng)
        steps, permitted = grammar.script(compiler, said, rng)
        assert b"REFUND_TICKET" in b"".join(model.words.spelling(token) for tokens, _ in steps for token in tokens)
        for make in (grammar.Ours, grammar.LlGuidance):
            first, decision = grammar.ask(make(model.words), said, steps, permitted)
            assert 0 < first < decision

        class Narrow(grammar.Ours):
            def ids(self) -> grammar.Ids:
                return np.delete(super().ids(), 0)

        with pytest.raises(SystemExit, match="ours permits fewer tokens than the language"):
            grammar.ask(Narrow(model.words), said, steps, permitted)
