"""OpenVINO behind the `Backend` protocol; with the extra `openvino` only."""

import sys
from typing import Any, cast

# OpenVINO depends on this package, which reports every import to its maker over the network. Where Python says that the
# package is missing, OpenVINO runs without it.
sys.modules.setdefault("openvino_telemetry", cast("Any", None))
