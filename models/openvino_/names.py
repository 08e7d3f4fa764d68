"""OpenVINO's names in records and for pip, and its data types on this processor; known before it is loaded."""

from __future__ import annotations

from sds.models.files.cpu import cpu_features
from sds.models.protocol import BackendError, Dtype, extra_hint, importing

DISTRIBUTION = "openvino"
INSTALL_HINT = extra_hint("openvino", target="openvino")
# The parts that are quantized in int8, in the words of a record, and the data type of the rest.
QUANTIZED = "all products with weights but those of the last layer, and the weights of the head"
INT8_REST: dict[Dtype, Dtype] = {"int8": "fp32", "int8-bf16": "bf16"}
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", *INT8_REST)
WHOLE_PRODUCTS = {"avx512_vnni", "avx_vnni", "amx_int8", "i8mm"}  # a processor without these loses overflows


def computes_in_bf16() -> bool:
    """Return whether OpenVINO multiplies in BF16 on this processor. Raises BackendError."""
    with importing("OpenVINO is not installed", INSTALL_HINT):
        import openvino as ov  # noqa: PLC0415  only with the extra `openvino`
    return "BF16" in ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def computes_in_int8() -> bool:
    """Return whether this processor adds up products of bytes without loss."""
    return not WHOLE_PRODUCTS.isdisjoint(cpu_features())


def usual_dtype() -> Dtype:
    """Return the default data type on this processor."""
    return "bf16" if computes_in_bf16() else "fp32"


def check_dtype(dtype: Dtype) -> None:
    """Raise BackendError for a data type that OpenVINO does not compute in here."""
    if dtype not in DTYPES:
        raise BackendError(f"OpenVINO does not support the dtype {dtype} here", hint=f"choose {', '.join(DTYPES)}")
    if dtype in INT8_REST and not computes_in_int8():
        raise BackendError(
            "this processor does not compute in int8",
            hint=f"choose {INT8_REST[dtype] if computes_in_bf16() else 'fp32'}",
        )
    if INT8_REST.get(dtype, dtype) == "bf16" and not computes_in_bf16():
        other = "int8" if dtype in INT8_REST else "fp32"
        raise BackendError("this processor does not compute in bf16", hint=f"choose {other}")
