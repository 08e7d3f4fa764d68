"""Facts about llama.cpp that are known before it is loaded."""

from __future__ import annotations

from sds.models.facts import BackendFacts, Opening, installed
from sds.models.protocol import Backend, Dtype

DISTRIBUTION = "llama-cpp-python"


def _open(opening: Opening) -> Backend:
    from sds.models.llamacpp.backend import LlamaBackend  # noqa: PLC0415  the library is loaded when a model is

    return LlamaBackend(opening.path, **opening.of("device", "threads", "slots", "fingerprint"), **opening.context)


def _facts(device: str, _dtype: Dtype | None) -> dict[str, object]:
    if device == "cpu":
        return {}
    from sds.models.llamacpp.weights import gpu_names  # noqa: PLC0415  the library is loaded when a model is

    return {"device": device, "card": ", ".join(gpu_names(device))}


LLAMACPP = BackendFacts(
    name="llamacpp",
    title="llama.cpp",
    distribution=DISTRIBUTION,
    on_gpus=True,
    shares_passes=False,  # on the processor, shared passes save nothing
    open=_open,
    version=lambda: installed(DISTRIBUTION),
    facts=_facts,
    measured_in=(None,),
    machine_key="llama_cpp_python",
    measures_variance=True,
)
