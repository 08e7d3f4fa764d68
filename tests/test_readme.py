"""What the README says, run as it is printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from sds.gates.fraud import gate as fraud
from sds.gates.refund import gate as refund
from sds.gates.refund.gate import load_refund_contract
from sds.gates.refund.labels import labelled
from sds.judgement.labels import label_line
from tests.engines.servers import free_port
from tests.scale import limit_s, scale
from tests.small_models import sentencepiece_gguf

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def _worlds(home: Path, code: str) -> None:
    """Make what the first command over a gate makes: in a process of its own it takes seconds."""
    for gate in (refund.gate, fraud.gate):
        if gate.name in code:
            gate.cases(home / gate.name)


def _environment(home: Path) -> dict[str, str]:
    bin_folder = Path(sys.executable).parent
    return {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "SDS_HOME": str(home),
        "SDS_CACHE": str(home.parent / "cache"),  # what is prepared here, the tests after it do not find
        "SDS_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", "")))),
    }


@pytest.mark.parametrize("code", _blocks("python"), ids=lambda code: code.strip().splitlines()[0][:30])
def test_every_python_block_of_the_readme_runs(code: str, tmp_path: Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(code, encoding="utf-8")
    _worlds(tmp_path / "home", code)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env=_environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert done.stdout


def test_the_example_gate_is_sixty_lines() -> None:
    assert 60 == len(_blocks("python")[-1].splitlines())


def _few_labels(path: Path) -> None:
    """Write a few of the labels that come with the refund gate and have all fields: of each part, with every cause."""
    fields = load_refund_contract().snapshot.keys()
    whole = (case for case in labelled(path.parent) if case.fields.keys() == fields)
    with path.open("w", encoding="utf-8") as file:
        file.writelines(label_line(case, "refund") for case in islice(whole, 0, None, 60))


def _cut(block: str, tmp_path: Path) -> str:
    """Return a block at CI's size, the same commands with less to do: few claims, few labels, a small model to prepare."""
    if scale(0, 1):
        return block
    if "sds eval refund" in block:
        _few_labels(tmp_path / "few.jsonl")
    if "sds models prepare" in block:
        sentencepiece_gguf(tmp_path / "small.gguf")
    block = re.sub(r"--limit (20|50)\b", "--limit 6", block)
    block = re.sub(r"^(sds run refund --limit) [234](?! --parallel)\b", r"\1 1", block, flags=re.MULTILINE)
    block = re.sub(r"^(sds eval refund)\b", r"\1 --labels few.jsonl", block, flags=re.MULTILINE)
    return re.sub(r"^(sds models prepare)\b", r"\1 small.gguf", block, flags=re.MULTILINE)


def _run(block: str, tmp_path: Path, *, fresh: bool = False) -> str:
    """Run a block in one shell, top to bottom, with the dfid that its decision printed. `fresh`: its home is not there yet."""
    if not fresh:
        _worlds(tmp_path / "home", block)
    commands = _cut(block, tmp_path).replace("DFID ", '"$DFID" ')
    noted = (
        f"""DFID=$(\\g<0> | {shlex.quote(sys.executable)} -c "import json,sys; print(json.load(sys.stdin)['dfid'])")"""
    )
    script = "set -euo pipefail\n" + re.sub(r"^sds decide [^#\n]*[^# \n]", noted, commands, flags=re.MULTILINE)
    (tmp_path / "sds").symlink_to(ROOT / "sds")
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=_environment(tmp_path / "home"),
        capture_output=True,
        text=True,
        timeout=limit_s(500),
        check=False,
    )
    assert 0 == done.returncode, done.stderr + done.stdout
    return done.stdout


def _block(name: str) -> str:
    return next(block for block in _blocks("") if name in block)


def test_every_command_of_the_five_minutes_runs(tmp_path: Path) -> None:
    assert "0 faults" in _run(_block("--chaos drift"), tmp_path, fresh=True)


def test_every_command_of_when_a_human_must_decide_runs(tmp_path: Path) -> None:
    assert "0 faults" in _run("sds run refund --limit 1\n" + _block("sds escalations"), tmp_path)


def test_every_command_of_use_your_own_model_runs(tmp_path: Path) -> None:
    """With another GGUF and a checkpoint folder, both made of the embedded weights."""
    assert "root ::=" in _run(_block("sds models check"), tmp_path)


def test_every_command_of_fast_runs(tmp_path: Path) -> None:
    assert "faults in the record: 0" in _run(_block("sds models prepare"), tmp_path)


def test_every_command_on_a_gate_of_ones_own_runs(tmp_path: Path) -> None:
    """On the gate of 60 lines, as it is printed."""
    (tmp_path / "parking.py").write_text(_blocks("python")[-1], encoding="utf-8")
    said = _run(_block("./parking.py"), tmp_path)
    assert "1 event, decided by " in said
    assert "errors: 0" in said


def test_every_command_of_the_service_runs(tmp_path: Path) -> None:
    """What serves until SIGTERM is sent one as soon as it is ready."""
    port = free_port()
    ready = f"for n in {{1..600}}; do curl -sf http://127.0.0.1:{port}/readyz && break; sleep 0.2; done"
    served = rf"\1 --port {port} & {ready}"
    block = re.sub(
        r"^(sds serve [^#\n]*[^# \n]).*", served + "; kill $!; wait $!", _block("sds serve"), flags=re.MULTILINE
    )
    said = _run(block, tmp_path)
    assert '"status":"ready"' in said
    assert (tmp_path / "refund.backup").exists()


def test_the_test_command_at_the_top_is_what_ci_runs() -> None:
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "make test" in _blocks("")[0]


def test_every_file_the_readme_names_exists() -> None:
    for target in re.findall(r"\]\(([^)#h][^)]*)\)", README):
        assert (ROOT / target).exists(), target
