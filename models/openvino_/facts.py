"""Facts about OpenVINO that are known before it is loaded."""

from __future__ import annotations

from typing import Any

from sds.models.facts import BackendFacts, Opening, installed
from sds.models.openvino_.names import DISTRIBUTION, DTYPES, INSTALL_HINT, INT8_REST, QUANTIZED, usual_dtype
from sds.models.protocol import Backend, Dtype


def _open(opening: Opening) -> Backend:
    from sds.models.openvino_.backend import LENGTHS, OpenvinoBackend  # noqa: PLC0415  only with the extra `openvino`
    from sds.models.openvino_.batch import prepared_for  # noqa: PLC0415  numpy is loaded with a model

    wanted = opening.warm_up
    lengths: dict[str, Any] = {}
    if wanted is not None:  # longer passes have no copy
        lengths = {"lengths": sorted({length for each in wanted for length in prepared_for(each, LENGTHS)[:1]})}
    named = opening.of("dtype", "threads", "slots", "fingerprint")
    return OpenvinoBackend(opening.path, engines=opening.replicas, **named, **lengths)


def _facts(_device: str, dtype: Dtype | None) -> dict[str, object]:
    dtype = dtype or usual_dtype()
    in_int8 = {"in_8_bits": QUANTIZED, "rest": INT8_REST[dtype]} if dtype in INT8_REST else {}
    return {"dtype": dtype, **in_int8}


OPENVINO = BackendFacts(
    name="openvino",
    title="OpenVINO",
    distribution=DISTRIBUTION,
    extra="openvino",
    install_hint=INSTALL_HINT,
    dtypes=DTYPES,
    usual_dtype=usual_dtype,
    bits_need_slots=True,
    open=_open,
    version=lambda: installed(DISTRIBUTION),
    facts=_facts,
    measured_in=(None, "fp32", *INT8_REST),
    machine_key="openvino",
    runs_as="OpenVINO",
    unsaid_dtype="bf16",
)
