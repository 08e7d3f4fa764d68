"""Ours: the native engine on one slot, from the packet to the proposal's bytes. Its options name the library that runs the
model, and the data type.
"""

from __future__ import annotations

import base64
import pickle
from pathlib import Path
from typing import cast, get_args

from sds.benchmarks.lib.floor import Recorded
from sds.benchmarks.lib.packets import renewed
from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, timed
from sds.engines.factory import open_backend
from sds.engines.native import NativeEngine
from sds.host.clock import now_ms
from sds.models.catalog.backends import BACKENDS, MEASURED
from sds.models.llamacpp.facts import LLAMACPP
from sds.models.protocol import Backend, Dtype

SPELLED = {LLAMACPP.distribution: "llama_cpp_python"}  # the spelling in documents
PASSES = 5  # of one shape; the quickest counts


def open_peer(model: Path, threads: int, options: list[str]) -> Peer:
    (library,) = (name for name in MEASURED if name in options)
    dtype = next((name for name in get_args(Dtype) if name in options), None)
    backend = open_backend(model, library=library, dtype=dtype, threads=threads)
    recorded = Recorded(backend)
    engine, shaped = (NativeEngine(cast("Backend", of), now_ms=now_ms) for of in (backend, recorded))

    def decide(request: Request) -> Said:
        if "pass_tokens" in request:
            return Said("", facts={"pass_ms": _pass_ms(backend, request["tokens"], request["pass_tokens"])})
        packet = pickle.loads(base64.b64decode(request["packet"]))  # noqa: S301  from the benchmark that started us
        fresh = renewed(packet, request["timeout_ms"])
        recorded.clear()
        data, decoding = (shaped if request["shape"] else engine).propose(fresh, tokens_max=request["tokens_max"])
        return Said(data.decode(), facts={"passes": decoding.passes, "tokens_of_passes": recorded.tokens})

    distribution = BACKENDS[library].distribution
    return Peer(decide, ("sovereign-decision-stream", SPELLED.get(distribution, distribution)))


def _pass_ms(backend: Backend, tokens: list[int], pass_tokens: int) -> float:
    """Return the milliseconds of one pass over the last `pass_tokens` of `tokens`, after the others."""
    cut = len(tokens) - pass_tokens
    return min(_one_pass(backend, tokens[:cut], tokens[cut:]) for _ in range(PASSES))


def _one_pass(backend: Backend, before: list[int], tokens: list[int]) -> float:
    backend.prefill([before])
    _, ms = timed(lambda: backend.forward_one(tokens))
    return ms
