"""Facts about transformers that are known before it is loaded."""

from __future__ import annotations

from importlib.metadata import version

from sds.models.facts import BackendFacts, Opening, installed
from sds.models.protocol import Backend, Dtype, extra_hint

DISTRIBUTION = "transformers"
USUAL_DTYPE: Dtype = "fp32"


def _open(opening: Opening) -> Backend:
    from sds.models.transformers_.backend import HfBackend  # noqa: PLC0415  torch is loaded when it is asked for

    dtype = opening.dtype or USUAL_DTYPE
    return HfBackend(opening.path, dtype=dtype, **opening.of("device", "threads", "slots"), **opening.context)


def _facts(device: str, dtype: Dtype | None) -> dict[str, object]:
    known: dict[str, object] = {"torch": version("torch"), "device": device, "dtype": dtype or USUAL_DTYPE}
    if device == "cpu":
        return known
    import torch  # noqa: PLC0415  it is loaded when it is asked for

    return known | {"card": torch.cuda.get_device_name(device)}


TRANSFORMERS = BackendFacts(
    name="transformers",
    title="transformers",
    distribution=DISTRIBUTION,
    extra="hf",
    install_hint=extra_hint("hf"),
    dtypes=("fp32", "bf16", "fp16"),
    reads_folders=True,
    on_gpus=True,
    replicable=False,
    open=_open,
    version=lambda: installed(DISTRIBUTION),
    facts=_facts,
)
