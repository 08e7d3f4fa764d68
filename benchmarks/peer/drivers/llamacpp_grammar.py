"""llama-cpp-python with llama.cpp's own grammar sampler; it keeps the longest common prefix in its cache by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, serve, timed


def open_peer(model: Path, threads: int, _options: list[str]) -> Peer:
    from llama_cpp.llama_grammar import LlamaGrammar  # noqa: PLC0415  a peer may be missing

    from sds.benchmarks.peer.drivers.llama_model import quickest_llama  # noqa: PLC0415

    llama, notes = quickest_llama(model, threads)

    def decide(request: Request) -> Said:
        grammar, compile_ms = timed(lambda: LlamaGrammar.from_string(request["gbnf"], verbose=False))
        found: Any = llama(
            request["tokens"],
            grammar=grammar,
            temperature=0.0,
            repeat_penalty=1.0,
            max_tokens=request["tokens_max"],
        )
        return Said(found["choices"][0]["text"], compile_ms)

    return Peer(decide, ("llama_cpp_python",), notes)


if __name__ == "__main__":
    serve(open_peer)
