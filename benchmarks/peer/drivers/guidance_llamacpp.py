"""guidance on llama.cpp: it skips forced tokens and keeps the longest common prefix.

Its best mode: prompt and expression as one grammar (apart, the prompt costs a pass of its own), without the token that
begins the prompt (guidance adds one itself, and a second one would lose the cached prefix), and nothing observed.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, serve, timed


def open_peer(model: Path, threads: int, _options: list[str]) -> Peer:
    import llama_cpp  # noqa: PLC0415  a peer may be missing

    guidance: Any = import_module("guidance")

    from sds.benchmarks.peer.drivers.llama_model import quickest_llama  # noqa: PLC0415

    llama, notes = quickest_llama(model, threads, logits_all=True)  # as guidance loads one itself
    vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
    begins = llama_cpp.llama_vocab_get_text(vocabulary, llama.token_bos()).decode()

    with warnings.catch_warnings():  # it does not know the chat template, and we frame the prompt ourselves
        warnings.simplefilter("ignore")
        empty = guidance.models.LlamaCpp(llama, echo=False, enable_monitoring=False)

    def decide(request: Request) -> Said:
        grammar, compile_ms = timed(
            lambda: request["text"].removeprefix(begins) + guidance.regex(request["regex"], name="decision")
        )
        return Said((empty + grammar)["decision"], compile_ms)

    return Peer(
        decide,
        ("guidance", "llguidance", "llama_cpp_python"),
        f"{notes}; prompt and expression in one grammar, compiled within the call",
    )


if __name__ == "__main__":
    serve(open_peer)
