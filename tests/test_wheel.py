"""The wheel, installed beside a user's own `models.py` and `kernel.py`: neither side sees the other."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

from sds.models.int8.sources import passes_sources

ROOT = Path(__file__).parents[1]
LINKS = ("kernel", "grammars", "models", "benchmarks")
EDITABLE = "import hatchling.build; hatchling.build.build_editable('.')"  # as `pip install --editable .` does
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]

USERS_SCRIPT = """
import models, kernel, grammars, benchmarks
import sds.models.protocol, sds.kernel.flow.kernel, sds.grammars.language, sds.benchmarks, sds.cli.app
from pathlib import Path
from sds.gates.refund.gate import load_refund_contract
from sds.kernel.storage.sqlite import SqliteStore
from sds.models.int8.sources import PASSES, passes_sources
from sds.models.int8.library import PassesLibrary
SqliteStore(Path('probe.db')).close()
for compiled in PASSES.glob('*.so'):
    PassesLibrary(compiled)  # refuses one that was not compiled of the sources beside it
print(sds.__file__, models.MINE, kernel.MINE, load_refund_contract().gate, passes_sources())
"""


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("sdist")))))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that `pip install X.tar.gz` makes: with the hook, that is, with integer passes compiled.

    They are not optimised here, which takes two thirds of the time: they are loaded, and compute nothing.
    """
    quick = {**os.environ, "CXX": """sh -c 'exec c++ "$@" -O0' c++"""}
    folder = tmp_path_factory.mktemp("wheel")
    build = [*PIP, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(sdist)]
    subprocess.run(build, env=quick, check=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([*PIP, "install", "--no-deps", "--target", str(folder), str(wheel)], check=True, timeout=300)
    return folder


@pytest.fixture
def plain(sdist: Path, tmp_path: Path) -> Path:
    """A checkout of a git without links: plain files that name their targets."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    for name in LINKS:
        (root / "sds" / name).write_text(f"../{name}", encoding="utf-8")
    return root


def packed(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if ".dist-info/" not in name and not name.endswith(".so")}


def chosen(root: Path) -> set[str]:
    """What a wheel of this folder holds, besides what is compiled."""
    return {each.distribution_path for each in WheelBuilder(str(root)).recurse_included_files()}


def run(*command: str | Path, cwd: Path, env: Mapping[str, str] = os.environ) -> subprocess.CompletedProcess[str]:
    asked = [str(part) for part in command]
    return subprocess.run(asked, cwd=cwd, env=dict(env), capture_output=True, text=True, timeout=120, check=False)


def test_the_wheel_of_an_sdist_holds_what_the_tree_holds(wheel: Path) -> None:
    modules = {f"sds/{path.relative_to(ROOT)}" for name in LINKS for path in (ROOT / name).rglob("*.py")}
    modules |= {str(path.relative_to(ROOT)) for path in (ROOT / "sds").rglob("*.py")}  # rglob follows no link
    assert modules == {name for name in packed(wheel) if name.endswith(".py")}
    assert chosen(ROOT) == packed(wheel)


def test_the_wheel_holds_nothing_that_was_measured(wheel: Path) -> None:
    kinds = {Path(name).suffix for name in packed(wheel)}
    known = ".py .sql .yaml .sha256 .md .j2 .html .css .js .svg .txt .typed .cc .h .toml .jsonl .json .onnx"  # html on: the console
    assert {*known.split()} == kinds
    assert [] == [name for name in packed(wheel) if "results" in name or "report.md" in name]


def test_the_wheel_does_not_collide_with_a_users_own_modules(site: Path, tmp_path: Path) -> None:
    for name in LINKS:
        (tmp_path / f"{name}.py").write_text(f"MINE = '{name}'\n", encoding="utf-8")
    script = tmp_path / "main.py"
    script.write_text(USERS_SCRIPT, encoding="utf-8")
    done = run(sys.executable, script, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(site)})
    assert 0 == done.returncode, done.stderr
    expected = [str(site / "sds" / "__init__.py"), "models", "kernel", "refund", passes_sources()]
    assert expected == done.stdout.split()


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="integer passes are not written for it")
def test_the_wheel_of_an_sdist_holds_integer_passes(site: Path) -> None:
    compiled = sorted(path.name for path in (site / "sds" / "models" / "int8" / "native").glob("*.so"))
    assert ["passes-avx2.so", "passes-avx512vnni.so"] == compiled


def test_an_editable_install_is_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HATCH_BUILD_NO_HOOKS", "true")  # what they compile is tested above
    made = zipfile.ZipFile(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["editable"])))
    (path,) = [name for name in made.namelist() if ".dist-info/" not in name]
    assert "_sovereign_decision_stream.pth" == path
    assert f"{ROOT}" == made.read(path).decode()


@pytest.mark.parametrize(
    "command", [("make", "--no-print-directory", "install"), (sys.executable, "-c", EDITABLE)], ids=["make", "pip"]
)
def test_a_checkout_whose_links_are_plain_files_is_refused_in_one_line(plain: Path, command: tuple[str, ...]) -> None:
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # not below `make test`
    done = run(*command, cwd=plain, env=alone)
    assert 0 != done.returncode
    message = "error: sds/kernel is no link: git config core.symlinks true && git checkout -- sds"
    assert [message] == [line for line in (done.stdout + done.stderr).splitlines() if "Error 2" not in line]


def test_a_wheel_needs_no_links(plain: Path, wheel: Path) -> None:
    assert packed(wheel) == chosen(plain)


def test_a_wheel_is_not_made_without_the_sources_of_the_passes(plain: Path) -> None:
    shutil.rmtree(plain / "models" / "int8" / "native")
    done = run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", cwd=plain)
    assert (1, "error: models/int8/native holds no sources; build from a whole checkout or sdist\n") == (
        done.returncode,
        done.stderr,
    )


def test_importing_sds_loads_neither_model_nor_kernel() -> None:
    code = "import sys, sds; print(sorted(m for m in sys.modules if m.startswith(('sds.', 'llama_cpp', 'numpy'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "[]\n" == done.stdout


def test_what_decides_loads_no_llguidance() -> None:
    """It is an extra: Outlines' backend, and the tests' second opinion."""
    code = "import sys, sds.gate, sds.engines.factory, sds.models.llamacpp.backend, sds.engines.expressible, sds.lint.language"
    shown = f"{code}; print('sds.grammars.tokens.matcher' in sys.modules, 'llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "True False\n" == done.stdout
