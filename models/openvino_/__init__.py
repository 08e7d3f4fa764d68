"""OpenVINO behind the `Backend` protocol; with the extra `openvino` only."""

import sys
from typing import Any, cast

# OpenVINO depends on this package and, when imported, has it tell its maker so, over the network. Where Python says that
# it is not there, OpenVINO goes on without.
sys.modules.setdefault("openvino_telemetry", cast("Any", None))
