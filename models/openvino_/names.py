"""What OpenVINO is called in records and by pip, and the types that it can be asked for: known before it is loaded."""

from __future__ import annotations

from sds.models.protocol import Dtype, extra_hint

DISTRIBUTION = "openvino"
INSTALL_HINT = extra_hint("openvino", target="openvino")
# What is quantized in int8, as records say it, and in what the rest is computed.
QUANTIZED = "all products with weights but those of the last layer, and the weights of the head"
INT8_REST: dict[Dtype, Dtype] = {"int8": "fp32", "int8-bf16": "bf16"}
DTYPES: tuple[Dtype, ...] = ("fp32", "bf16", *INT8_REST)
