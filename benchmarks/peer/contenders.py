"""The engines that `sds bench peers` and `sds bench throughput` compare, and how each is started."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sds.benchmarks.lib.process import PeerProcess
from sds.benchmarks.lib.weights import Weights
from sds.models.int8.facts import INT8
from sds.models.llamacpp.facts import LLAMACPP
from sds.models.openvino_.facts import OPENVINO
from sds.models.openvino_.names import INT8_REST
from sds.models.protocol import Dtype, Library

START_TIMEOUT_S = 300.0
OVERLAYS = Path(".peers")
_DRIVERS = "sds.benchmarks.peer.drivers"
SERVING = f"{_DRIVERS}.serving"


@dataclass(frozen=True, slots=True)
class Contender:
    """One engine: the module that drives it, and that module's options. `overlay`: the folder with its own versions of
    libraries, "" for none. `keeps_many`: it caches more of past prompts than the beginning of the last.
    """

    name: str
    driver: str
    options: tuple[str, ...] = ()
    overlay: str = ""
    keeps_many: bool = False

    @property
    def is_ours(self) -> bool:
        """Whether it is ours, which is given the packet itself, and makes prompt and language from it."""
        return self.driver == _OURS

    def start(self, opened: ExitStack, model: Path, threads: int, *, log: Path, overlays: Path) -> PeerProcess:
        """Start the engine's process and wait until its model is loaded; `opened` ends it."""
        arguments = [self.driver, str(model), str(threads), *self.options]
        overlay = overlays / self.overlay if self.overlay else None
        process = PeerProcess(SERVING, arguments, log=log, overlay=overlay, timeout_s=START_TIMEOUT_S)
        opened.callback(process.close)
        return process


_OURS, _ON_LLAMACPP, _ON_TRANSFORMERS = (f"{_DRIVERS}.{name}" for name in ("ours", "on_llamacpp", "on_transformers"))
PEERS = (
    Contender("guidance-llamacpp", _ON_LLAMACPP, ("guidance",), overlay="guidance"),
    Contender("openvino-genai", f"{_DRIVERS}.openvino_genai", overlay=OPENVINO.name, keeps_many=True),
    Contender("llamacpp-grammar", _ON_LLAMACPP, ("grammar",)),
    Contender("llamacpp-server", _ON_LLAMACPP, ("server",)),
    Contender("outlines-llamacpp", _ON_LLAMACPP, ("outlines_core",)),
    Contender("outlines-llamacpp-llguidance", _ON_LLAMACPP, ("llguidance",)),
    Contender("outlines-transformers", _ON_TRANSFORMERS, ("outlines_core",)),
    Contender("outlines-transformers-llguidance", _ON_TRANSFORMERS, ("llguidance",)),
    Contender("xgrammar-transformers", _ON_TRANSFORMERS, ("xgrammar",)),
    Contender("lm-format-enforcer-transformers", _ON_TRANSFORMERS, ("lm-format-enforcer",)),
)


def ours_with(weights: Weights) -> tuple[Contender, Contender, Contender]:
    """Return ours as it runs, ours with weights that are not rounded to int8, as the peers' are not, and ours on llama.cpp,
    which most peers run on. Some of these may be equal.
    """
    ours = alike = _ours("ours", weights.library, weights.dtype)
    on_llamacpp = _ours("ours-llamacpp", LLAMACPP.name, None)
    if weights.library == INT8.name and not OPENVINO.version():
        alike = on_llamacpp
    elif weights.library == INT8.name:
        dtype = OPENVINO.usual_dtype()
        alike = _ours(f"ours-{dtype}", OPENVINO.name, dtype)
    elif weights.dtype in INT8_REST:
        dtype = INT8_REST[weights.dtype]
        alike = _ours(f"ours-{dtype}", weights.library, dtype)
    return ours, alike, alike if weights.library == LLAMACPP.name else on_llamacpp


def _ours(name: str, library: Library, dtype: Dtype | None) -> Contender:
    return Contender(name, _OURS, (library, dtype) if dtype else (library,), keeps_many=True)
