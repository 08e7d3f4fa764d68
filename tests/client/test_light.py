"""A client is light: whoever asks a service loads neither a model nor a server, nor a driver of a database."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {
    "llama_cpp", "onnxruntime", "numpy", "torch", "tokenizers", "fastapi", "starlette", "uvicorn", "sqlalchemy", "alembic",
    "psycopg", "typer", "celpy", "yaml", "pydantic",
}  # fmt: skip


def test_importing_the_client_loads_nothing_that_decides_or_serves() -> None:
    code = "import sys, sds.client; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stdout.split())
    assert "sds.client" in loaded
    assert set() == HEAVY & loaded
    assert [] == [name for name in loaded if name.startswith(("sds.service", "sds.engines", "sds.gate", "sds.models"))]
