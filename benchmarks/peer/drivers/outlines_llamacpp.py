"""Outlines on llama.cpp, with its default backend (outlines_core) or llguidance."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, serve, timed


def open_peer(model: Path, threads: int, options: list[str]) -> Peer:
    import llama_cpp  # noqa: PLC0415  a peer may be missing
    import outlines  # noqa: PLC0415

    from sds.benchmarks.peer.drivers.llama_model import quickest_llama  # noqa: PLC0415

    class TokenPrompt(llama_cpp.Llama):
        """Outlines gives text only: its model reads the tokens that all peers get."""

        held: list[int]

        def __call__(self, _prompt: str, *args: Any, **options: Any) -> Any:  # type: ignore[override]
            return super().__call__(self.held, *args, **options)  # type: ignore[arg-type]

    (backend,) = options
    llama, notes = quickest_llama(model, threads, kind=TokenPrompt)
    driven = outlines.from_llamacpp(llama, chat_mode=False)
    compiler = compiler_of(driven, backend)

    def decide(request: Request) -> Said:
        processor, compile_ms = timed(lambda: compiler.get_regex_logits_processor(request["regex"]))
        llama.held = request["tokens"]
        generate: Any = outlines.Generator(driven, processor=processor)
        text = generate("-", temperature=0.0, repeat_penalty=1.0, max_tokens=request["tokens_max"])
        return Said(text, compile_ms)

    return Peer(decide, ("outlines", backend, "llama_cpp_python"), notes)


def compiler_of(driven: Any, backend: str) -> Any:
    """Return what makes a logits processor of an expression, as `backend=` would choose it, but kept."""
    from outlines import backends  # noqa: PLC0415

    kinds = {"outlines_core": backends.OutlinesCoreBackend, "llguidance": backends.LLGuidanceBackend}
    with warnings.catch_warnings():  # its libraries call others by old names
        warnings.simplefilter("ignore")
        return kinds[backend](driven)


if __name__ == "__main__":
    serve(open_peer)
