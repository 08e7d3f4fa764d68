"""The wheel, installed beside a user's own `models.py` and `kernel.py`: neither side sees the other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_does_not_collide_with_a_users_own_modules(tmp_path: Path) -> None:
    wheels, site, work = tmp_path / "wheels", tmp_path / "site", tmp_path / "work"
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels), str(ROOT)]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = wheels.glob("*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(site), str(wheel)], check=True, timeout=300)
    work.mkdir()
    for name in ("models", "kernel", "grammars", "benchmarks"):
        (work / f"{name}.py").write_text(f"MINE = '{name}'\n", encoding="utf-8")
    script = work / "main.py"
    script.write_text(
        "import models, kernel, grammars, benchmarks\n"
        "import sds.models.protocol, sds.kernel.runtime, sds.grammars.language, sds.benchmarks\n"
        "from sds.gates.refund.desk import load_refund_contract\n"
        "from sds.kernel.store import Store\n"
        "from pathlib import Path\n"
        "Store(Path('probe.db')).close()\n"
        "print(sds.__file__, models.MINE, kernel.MINE, load_refund_contract().gate)\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=work,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert [str(site / "sds" / "__init__.py"), "models", "kernel", "refund"] == done.stdout.split()


def test_importing_sds_loads_neither_model_nor_kernel() -> None:
    code = "import sys, sds; print(sorted(m for m in sys.modules if m.startswith(('sds.', 'llama_cpp', 'numpy'))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "[]\n" == done.stdout


def test_what_decides_loads_no_llguidance() -> None:
    """It is an extra: Outlines' backend, and the tests' second opinion."""
    code = "import sys, sds.gate, sds.engines.opening, sds.models.llama, sds.contracts.sayable, sds.contracts.language"
    shown = f"{code}; print('sds.grammars.walk' in sys.modules, 'llguidance' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", shown], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "True False\n" == done.stdout
