"""Compiles the passes in `models/int8/native` when the package is built or installed, once for each kind of processor.

Without a C++ compiler, or for another processor, the package goes without: llama.cpp and OpenVINO run the models then.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent
FOLDER = ROOT / "models" / "int8" / "native"
LINKS = ("kernel", "grammars", "models", "benchmarks")
KINDS = {
    "avx2": ["-mavx2", "-mfma"],
    "avx512vnni": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma"],
}
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread"]


class Hook(BuildHookInterface[Any]):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            _check_links()
        if self.target_name != "wheel" or platform.machine() not in ("x86_64", "AMD64"):
            return
        stamp = f'-DPASSES_SOURCES="{_digest_of_sources()[:12]}"'
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        for kind, flags in KINDS.items():
            made = FOLDER / f"passes-{kind}.so"
            command = [*compiler, *FLAGS, *flags, stamp, str(FOLDER / "passes.cc"), "-o", str(made)]
            try:
                subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603
            except (OSError, subprocess.CalledProcessError) as error:
                why = getattr(error, "stderr", None) or error
                print(f"note: integer passes for {kind} are not compiled: {why}", file=sys.stderr)  # noqa: T201
                made.unlink(missing_ok=True)
                continue
            build_data["artifacts"].append(f"models/int8/native/{made.name}")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{_platform()}"


def _platform() -> str:
    """Return this machine's platform as a wheel's tag has it; the passes are loaded by ctypes, whatever the Python."""
    return sysconfig.get_platform().replace("-", "_").replace(".", "_")


def _check_links() -> None:
    """Refuse an editable install without the links in `sds/`: the package would have no kernel."""
    if lost := [name for name in LINKS if not (ROOT / "sds" / name / "__init__.py").is_file()]:
        sys.exit(f"error: sds/{lost[0]} is no link: git config core.symlinks true && git checkout -- sds")


def _digest_of_sources() -> str:
    """Return the SHA-256 of the sources, as `models/int8/sources.py` makes it; of no sources there is none."""
    sources = sorted([*FOLDER.glob("*.cc"), *FOLDER.glob("*.h")])
    if not sources:
        sys.exit("error: models/int8/native holds no sources; build from a whole checkout or sdist")
    digest = hashlib.sha256()
    for source in sources:
        digest.update(source.read_bytes())
    return digest.hexdigest()
