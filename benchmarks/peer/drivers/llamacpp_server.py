"""llama-cpp-python's own HTTP server on loopback with a GBNF: what the same grammar costs behind a server."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from sds.benchmarks.peer.drivers.serving import Peer, Request, Said, serve

START_S, ANSWER_S = 60.0, 120.0


def open_peer(model: Path, threads: int, _options: list[str]) -> Peer:
    import uvicorn  # noqa: PLC0415  a peer may be missing
    from llama_cpp.server.app import create_app  # noqa: PLC0415
    from llama_cpp.server.settings import ModelSettings, ServerSettings  # noqa: PLC0415

    from sds.benchmarks.peer.drivers.llama_model import CONTEXT_TOKENS, quickest_llama  # noqa: PLC0415

    trial, notes = quickest_llama(model, threads)
    flash = bool(trial.context_params.flash_attn_type == 1)
    trial.close()
    settings = ModelSettings(
        model=str(model),
        n_ctx=CONTEXT_TOKENS,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=0,
        flash_attn=flash,
        verbose=False,
    )
    app = create_app(server_settings=ServerSettings(), model_settings=[settings])
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True).start()
    give_up = time.monotonic() + START_S
    while not server.started:
        if time.monotonic() > give_up:
            raise RuntimeError("the server does not start")
        time.sleep(0.01)
    port = listener.getsockname()[1]
    return Peer(lambda request: _asked(port, request), ("llama_cpp_python", "uvicorn"), f"{notes}; over loopback")


def _asked(port: int, request: Request) -> Said:
    asked = {
        "prompt": request["text"],
        "grammar": request["gbnf"],
        "temperature": 0.0,
        "repeat_penalty": 1.0,
        "max_tokens": request["tokens_max"],
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        connection.request("POST", "/v1/completions", json.dumps(asked), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        body: Any = json.loads(answer.read())
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise RuntimeError(f"status {answer.status}: {body}")
    if body["usage"]["prompt_tokens"] != len(request["tokens"]):
        raise RuntimeError(
            f"it read {body['usage']['prompt_tokens']} tokens, not the prompt's {len(request['tokens'])}"
        )
    return Said(body["choices"][0]["text"])


if __name__ == "__main__":
    serve(open_peer)
