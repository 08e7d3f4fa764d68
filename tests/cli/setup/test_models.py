"""`sds models`, as a user meets it: what is there, what it is, whether it fits a contract; each mistake in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sds.models.catalog import prepare
from sds.models.catalog.catalog import embedded_model
from tests.cli.conftest import ROOT, Shell
from tests.models.catalog.preparing import OPENVINO_WINS, flip, in_openvino, preparation
from tests.small_models import sentencepiece_gguf

CHECKS = ["model", "template", "bytes", "spelling", "mask", "decisions", "context", "evidence"]


def test_the_embedded_model_and_ones_own_are_listed(
    tmp_path: Path, tiny_folder: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(tmp_path / "home")
    assert [f"embedded  GGUF               {embedded_model()}"] == shell.ok("models", "list").splitlines()
    own = sentencepiece_gguf(tmp_path / "own.gguf")
    (tmp_path / "home" / "models").mkdir(parents=True)
    kept = own.rename(tmp_path / "home" / "models" / "own.gguf")
    assert ["embedded", "own"] == [line.split()[0] for line in shell.ok("models", "list").splitlines()]
    assert {"from": "own", "form": "GGUF", "path": str(kept)} == shell.json("models", "list", "--json")[1]
    named = tiny_folder(1)
    monkeypatch.setenv("SDS_MODELS", str(named.parent))
    assert f"own       checkpoint folder  {named}" in shell.ok("models", "list").splitlines()


def test_show_says_what_a_model_is(shell: Shell) -> None:
    shown = dict(line.split("  ", 1) for line in shell.ok("models", "show", str(embedded_model())).splitlines())
    shown = {name.strip(): value.strip() for name, value in shown.items()}
    assert ("llama", "134,515,008", "Q4_1") == (shown["architecture"], shown["parameters"], shown["weights"])
    assert ("8,192 tokens", "one by one", "yes") == (shown["context"], shown["splits digits"], shown["chat template"])
    assert (
        r"<|im_start|>system\nSYSTEM<|im_end|>\n<|im_start|>user\nUSER<|im_end|>\n<|im_start|>assistant\n"
        == shown["turn"]
    )
    card = shell.json("models", "show", str(embedded_model()), "--json")
    assert (shown["sha256"], 49152) == (card["sha256"], card["vocabulary_tokens"])


def test_check_answers_a_line_a_question(shell: Shell, tiny_folder: Callable[[int], Path]) -> None:
    for path in (embedded_model(), tiny_folder(1)):
        lines = shell.ok("models", "check", str(path)).splitlines()
        assert CHECKS == [line.removeprefix("ok  ").partition(":")[0] for line in lines]


def test_a_model_that_does_not_fit_is_refused(shell: Shell, tmp_path: Path) -> None:
    path = sentencepiece_gguf(tmp_path / "small.gguf", context=256)
    done = shell("models", "check", str(path))
    assert 1 == done.returncode
    assert ["context"] == [line[4:].partition(":")[0] for line in done.stdout.splitlines() if line.startswith("no  ")]
    assert f"error: `{path}` cannot decide under `refund` 1." in done.stderr
    told = shell("models", "check", str(path), "--json")
    assert (1, False) == (told.returncode, json.loads(told.stdout)["fits"])
    assert CHECKS == [check["name"] for check in json.loads(told.stdout)["checks"]]


def test_a_contract_of_ones_own_is_asked_about(shell: Shell, tmp_path: Path) -> None:
    own = tmp_path / "contract.yaml"
    text = (Path(__file__).parents[3] / "sds" / "gates" / "refund" / "contract.yaml").read_text()
    own.write_text(text.replace("evidence_chars_max: 800", "evidence_chars_max: 4000"))
    done = shell("models", "check", str(embedded_model()), "--contract", str(own))
    assert 1 == done.returncode
    assert next(line for line in done.stdout.splitlines() if line.startswith("no ")).startswith("no  context: ")


MISTAKES = [
    (("show", "nowhere.gguf"), 2, "error: `nowhere.gguf` cannot be read: no such file or directory"),
    (("show", "README.md"), 2, "error: `README.md` is not a GGUF file"),
    (("show", "docs"), 2, "error: `docs` is not a checkpoint: it has no config.json"),
    (("check", "nowhere"), 2, "error: `nowhere` cannot be read"),
    (("check", "README.md", "--contract", "nowhere.yaml"), 2, "error: nowhere.yaml: cannot be read"),
    (("check", "README.md", "--contract", "Makefile"), 2, "error: Makefile:"),
    (("check",), 2, "Missing argument 'PATH'"),
    (("prepare", "nowhere"), 2, "error: `nowhere` cannot be read"),
    (("prepare", "README.md"), 2, "error: `README.md` is not a GGUF file"),
    (("prepare", "docs"), 2, "error: `docs` is a folder: weight types and layers are for GGUF files"),
    (("prepare", "--layers", "0"), 2, "Invalid value for '--layers'"),
    (("prepare", "--kl-max", "-1"), 2, "Invalid value for '--kl-max'"),
    (("prepare", "--kl-max", "nan"), 2, "Invalid value for '--kl-max'"),
    (("prepare", "--kl-max", "inf"), 2, "error: --kl-max must be a number"),
    (("prepare", "--layers", "30"), 2, "has 30 layers: 1 to 29 can be kept, not 30"),
    (("weigh",), 2, "No such command 'weigh'"),
]


def test_a_contract_is_named_by_the_path_of_its_gate_too(shell: Shell, tmp_path: Path) -> None:
    shell.ok("new", "held_payments", "--folder", str(tmp_path / "held"))
    within = tmp_path / "within.py"  # a gate whose contract has no file
    within.write_text(
        "from pathlib import Path\nfrom sds import GateDefinition, load_contract\n"
        "contract = load_contract(Path(__file__).parent / 'held' / 'contract.yaml')\n"
        "gate = GateDefinition(name='held_payments', contract=contract, open=lambda folder: None)\n",
        encoding="utf-8",
    )
    for path in (tmp_path / "held", within):
        checked = shell.json("models", "check", str(embedded_model()), "--contract", str(path), "--json")
        assert ("held_payments 1.0.0", True) == (checked["contract"], checked["fits"])


@pytest.mark.parametrize(("args", "code", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_a_mistake_is_answered_in_one_line(shell: Shell, args: tuple[str, ...], code: int, message: str) -> None:
    done = shell("models", *args)
    assert (code, "") == (done.returncode, done.stdout), done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can give up its right to read everything"
)
@pytest.mark.parametrize(
    ("named", "said"),
    [
        ({"SDS_HOME": "."}, ("models", "set SDS_MODELS to another folder")),
        ({"SDS_MODELS": "shut/x"}, ("shut/x", "set it to a folder that this user may read, or unset it")),
        ({"SDS_CACHE": "shut"}, ("shut/models", "set SDS_CACHE to another folder")),
    ],
)
def test_a_folder_that_this_user_may_not_read_is_named_with_the_variable_to_set(
    tmp_path: Path, named: dict[str, str], said: tuple[str, str]
) -> None:
    for folder in ("models", "shut"):
        (tmp_path / folder).mkdir(mode=0o000)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "300", "SDS_HOME": "home"} | named
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-m", "sds.cli.app"]
    done = subprocess.run(
        [*command, "models", "list"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    error, mend = done.stderr.splitlines()
    assert f"`{said[0]}`" in error
    assert "cannot be read: permission denied" in error
    assert said[1] in mend


def test_a_models_folder_that_is_none_is_named(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SDS_MODELS", "README.md")
    done = shell("models", "list")
    assert (2, "error: SDS_MODELS is `README.md`, which is not a folder") == (
        done.returncode,
        done.stderr.splitlines()[0],
    )


def test_prepare_measures_once_keeps_the_fastest_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    shell, path = Shell(tmp_path / "home"), sentencepiece_gguf(tmp_path / "small.gguf")
    *types, why = shell.ok("models", "prepare", str(path)).splitlines()
    kept = next(line.split("  kept: ")[1] for line in types if "  kept: " in line)
    assert {"F32", "BF16", "F16", "Q8_0"} >= {line.split()[0] for line in types}
    assert {"llama.cpp", "OpenVINO", "integer"} >= {line.split()[1] for line in types}
    assert 1 == sum("  kept: " in line for line in types)
    again = shell.ok("models", "prepare", str(path)).splitlines()
    assert [f"prepared on {again[0].split()[2].rstrip(':')}: {why}; kept: {kept}"] == again
    told = shell.json("models", "prepare", str(path), "--json")
    assert (False, why) == (told["measured_now"], told["why"])
    assert shell.json("models", "prepare", str(path), "--again", "--json")["measured_now"]


def test_what_was_prepared_is_listed_shown_run_and_left_alone_when_asked(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    shell, source = Shell(tmp_path / "home"), tiny_path(1)
    found, _ = preparation(shell.cache / "models").run(source)
    sha12, made = found.record.source.sha256[:12], found.record.sha256[:12]
    assert f"prepared  GGUF               {found.path}  (made from tiny-1.gguf@{sha12}, for llama.cpp)" in shell.ok(
        "models", "list"
    )
    assert found.record.why in shell.ok("models", "show", str(source))
    assert f"this is tiny-1.gguf@{sha12} as BF16, made by" in shell.ok("models", "show", str(found.path))
    model = ("doctor", "--model", str(source))
    assert f"model and mask: tiny-1.gguf as BF16, made from {sha12}@{made} answers" in shell.ok(*model)
    assert f"model and mask: tiny-1.gguf@{sha12} answers" in shell.ok(*model, "--as-is")
    flip(shell.cache / "models")
    done = shell(*model)
    assert (0, True) == (done.returncode, f"model and mask: tiny-1.gguf@{sha12} answers" in done.stdout)
    damaged = (
        f"the prepared weights `{found.path}` are damaged: the model runs without prepared weights (sds models prepare)"
    )
    assert [damaged] == done.stderr.splitlines()


@in_openvino
def test_what_was_prepared_for_openvino_is_listed_shown_and_run_so(
    tmp_path: Path, tiny_path: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "ROUNDS", 1)
    monkeypatch.setattr(prepare, "variance_logp", lambda *_: None)
    shell, source = Shell(tmp_path / "home"), tiny_path(1)
    found, _ = preparation(shell.cache / "models", OPENVINO_WINS).run(source)
    sha12, made = found.record.source.sha256[:12], found.record.sha256[:12]
    listed = f"prepared  GGUF               {found.path}  (made from tiny-1.gguf@{sha12}, for OpenVINO)"
    assert listed in shell.ok("models", "list").splitlines()
    assert "as BF16, made by `sds models prepare` for OpenVINO" in shell.ok("models", "show", str(found.path))
    doctor = shell.ok("doctor", "--model", str(source))
    assert f"model and mask: tiny-1.gguf as BF16 through OpenVINO, made from {sha12}@{made} answers" in doctor
    assert f", openvino {found.record.machine.openvino}" in doctor
    named = shell.ok("doctor", "--model", str(source), "--library", "llamacpp")
    assert f"model and mask: tiny-1.gguf as BF16, made from {sha12}@{made} answers" in named
