import pytest

pytest.importorskip("openvino", reason="OpenVINO is not installed: make openvino")
