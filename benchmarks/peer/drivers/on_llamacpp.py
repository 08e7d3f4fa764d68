"""Peers that drive llama-cpp-python: its grammar sampler, its HTTP server, guidance, Outlines (outlines_core, llguidance).

The model runs with or without flash attention, whichever is quicker here. Its cache keeps the longest common prefix of two
prompts in a row.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx2
from llama_cpp import Llama, llama_model_get_vocab, llama_vocab_get_text

from sds.benchmarks.peer.drivers.on_outlines import by_outlines
from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, timed

CONTEXT_TOKENS = 2048
TRIAL_PROMPT_TOKENS, TRIAL_STEPS, TRIALS = 64, 8, 3
START_S, ANSWER_S = 60.0, 120.0
GREEDY = {"temperature": 0.0, "repeat_penalty": 1.0}


def open_peer(model: Path, threads: int, options: list[str]) -> Peer:
    (name,) = options
    peers = {"grammar": _grammar, "server": _server, "guidance": _guidance}
    return peers[name](model, threads) if name in peers else _outlines(model, threads, name)


def _quickest(model: Path, threads: int, *, kind: type[Llama] = Llama, **options: Any) -> tuple[Any, str]:
    """Load the model with and without flash attention; return the quicker one, and a note about it."""
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL + 1)
    tried: list[tuple[float, bool, Any]] = []
    for flash in (False, True):
        llama: Any = kind(str(model), flash_attn=flash, **_settings(threads), **options)
        tried.append((min(_trial_ms(llama) for _ in range(TRIALS)), flash, llama))
    (_, flash, quickest), (_, _, other) = sorted(tried, key=lambda found: found[0])
    other.close()
    quickest.reset()
    return quickest, f"flash attention {'on' if flash else 'off'} (the quicker), longest common prefix reused"


def _settings(threads: int) -> dict[str, Any]:
    sizes = {"n_ctx": CONTEXT_TOKENS, "n_threads": threads, "n_threads_batch": threads}
    return {**sizes, "n_gpu_layers": 0, "verbose": False}


def _trial_ms(llama: Any) -> float:
    def once() -> None:
        llama.reset()
        for count in (TRIAL_PROMPT_TOKENS, *[1] * TRIAL_STEPS):
            llama.eval([1] * count)

    _, ms = timed(once)
    return ms


def _grammar(model: Path, threads: int) -> Peer:
    """Drive llama.cpp's own grammar sampler."""
    from llama_cpp.llama_grammar import LlamaGrammar  # noqa: PLC0415  this peer alone needs it

    llama, notes = _quickest(model, threads)

    def decide(request: Request) -> Said:
        grammar, compile_ms = timed(lambda: LlamaGrammar.from_string(request["gbnf"], verbose=False))
        found: Any = llama(request["tokens"], grammar=grammar, max_tokens=request["tokens_max"], **GREEDY)
        return Said(found["choices"][0]["text"], compile_ms)

    return Peer(decide, ("llama_cpp_python",), notes)


def _server(model: Path, threads: int) -> Peer:
    """Drive the same grammar sampler behind llama-cpp-python's server on loopback."""
    import uvicorn  # noqa: PLC0415  a peer may be missing
    from llama_cpp.server.app import create_app  # noqa: PLC0415
    from llama_cpp.server.settings import ModelSettings, ServerSettings  # noqa: PLC0415

    trial, notes = _quickest(model, threads)
    flash = bool(trial.context_params.flash_attn_type == 1)
    trial.close()
    settings = ModelSettings(model=str(model), flash_attn=flash, **_settings(threads))
    app = create_app(server_settings=ServerSettings(), model_settings=[settings])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    give_up = time.monotonic() + START_S
    while not server.started:
        if time.monotonic() > give_up:
            raise RuntimeError("the server does not start")
        time.sleep(0.01)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    client = httpx2.Client(base_url=url, timeout=ANSWER_S, trust_env=False)
    return Peer(partial(_asked, client), ("llama_cpp_python", "uvicorn"), f"{notes}; over loopback")


def _asked(client: httpx2.Client, request: Request) -> Said:
    asked = {"prompt": request["text"], "grammar": request["gbnf"], "max_tokens": request["tokens_max"], **GREEDY}
    answer = client.post("/v1/completions", json=asked)
    body = answer.json()
    if answer.status_code != httpx2.codes.OK:
        raise RuntimeError(f"status {answer.status_code}: {body}")
    if (read := body["usage"]["prompt_tokens"]) != len(request["tokens"]):
        raise RuntimeError(f"it read {read} tokens, not the prompt's {len(request['tokens'])}")
    return Said(body["choices"][0]["text"])


def _guidance(model: Path, threads: int) -> Peer:
    """Drive guidance, which skips forced tokens.

    Its best mode: prompt and expression as one grammar (apart, the prompt takes a pass of its own), the prompt without its
    first token (guidance adds it, and a second one would lose the cached prefix), and no monitoring.
    """
    guidance: Any = import_module("guidance")
    llama, notes = _quickest(model, threads, logits_all=True)  # as guidance loads one itself
    begins = llama_vocab_get_text(llama_model_get_vocab(llama.model), llama.token_bos()).decode()
    empty = guidance.models.LlamaCpp(llama, echo=False, enable_monitoring=False)

    def decide(request: Request) -> Said:
        prompt = request["text"].removeprefix(begins)
        grammar, compile_ms = timed(lambda: prompt + guidance.regex(request["regex"], name="decision"))
        return Said((empty + grammar)["decision"], compile_ms)

    how = f"{notes}; prompt and expression in one grammar, compiled within the call"
    return Peer(decide, ("guidance", "llguidance", "llama_cpp_python"), how)


def _outlines(model: Path, threads: int, backend: str) -> Peer:
    """Drive Outlines, with its default backend (outlines_core) or llguidance."""
    import outlines  # noqa: PLC0415  a peer may be missing

    class TokenPrompt(Llama):
        """A model that reads the tokens that all peers get, since Outlines passes texts alone."""

        held: list[int]

        def __call__(self, _prompt: str, *args: Any, **options: Any) -> Any:  # type: ignore[override]
            return super().__call__(self.held, *args, **options)  # type: ignore[arg-type]

    llama, notes = _quickest(model, threads, kind=TokenPrompt)
    driven = outlines.from_llamacpp(llama, chat_mode=False)

    def options(request: Request) -> dict[str, Any]:
        llama.held = request["tokens"]
        return {"max_tokens": request["tokens_max"], **GREEDY}

    return Peer(by_outlines(driven, backend, options), ("outlines", backend, "llama_cpp_python"), notes)
