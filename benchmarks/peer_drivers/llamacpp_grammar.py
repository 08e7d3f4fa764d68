"""llama-cpp-python with llama.cpp's own grammar sampler; it keeps the longest common prefix in its cache by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sds.benchmarks.peer_drivers.serving import Peer, Request, Said, serve, timed

CONTEXT_TOKENS = 2048


def open_peer(model: Path, threads: int, _options: list[str]) -> Peer:
    from llama_cpp import Llama  # noqa: PLC0415  a peer may be missing
    from llama_cpp.llama_grammar import LlamaGrammar  # noqa: PLC0415

    llama = Llama(
        str(model),
        n_ctx=CONTEXT_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        verbose=False,
    )

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

    return Peer(decide, ("llama_cpp_python",), "reuses the longest common prefix")


if __name__ == "__main__":
    serve(open_peer)
