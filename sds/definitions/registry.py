"""Finds gates: by name among the entry points of the group `sds.gates`, by path in a folder with `gate.py` or in a file.

A name never runs code of the working folder. The code at a path is imported as a module of a private package, so it can
neither hide another module nor be hidden. Its neighbours are imported relatively (`from .orders import Orders`).
"""

from __future__ import annotations

import hashlib
import os
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from sds.definitions.definition import GateDefinition, in_place
from sds.kernel.errors import SdsError, UsageError

GROUP = "sds.gates"
FILE = "gate.py"
A_DEFINITION = "gate = GateDefinition(name=..., contract=..., open=...)"


def installed() -> dict[str, EntryPoint]:
    """Return the installed gates by name. Raises UsageError where two packages have different gates of one name."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        if found.setdefault(entry.name, entry).value != entry.value:
            raise UsageError(
                f"two packages provide a gate `{entry.name}`", hint="uninstall one of them, or give the path of a gate"
            )
    return found


def is_path(gate: str) -> bool:
    """Return whether a gate is named by path: with a separator, as a file, or as `.` or `..`."""
    separators = {"/", os.sep, os.altsep or os.sep}
    return any(each in gate for each in separators) or gate.endswith(".py") or gate in {".", ".."}


def find(gate: str | os.PathLike[str]) -> GateDefinition:
    """Return the gate with a name or at a path. Raises UsageError where there is none, or its code cannot be imported."""
    if not isinstance(gate, str | os.PathLike):
        raise UsageError("a gate is a definition, a name or a path", hint=f"the gates are: {', '.join(installed())}")
    if not isinstance(gate, str) or is_path(gate):
        return _find_at(Path(gate))
    entry = installed().get(gate)
    if entry is None:
        here = (
            f"; there is one at `./{gate}`"
            if (Path(gate) / FILE).is_file()
            else "; for a gate of your own, give its path"
        )
        known = ", ".join(installed()) or "none, so install this package again (make install)"
        raise UsageError(f"there is no gate `{gate[:80]}`", hint=f"the gates are: {known}{here}")
    try:
        definition = entry.load()
    except SdsError:
        raise
    except Exception as error:
        raise UsageError(
            f"the gate `{gate}` cannot be loaded: {in_place(error)}", hint="install its package again"
        ) from error
    return _checked(definition, f"`{entry.value}`", gate)


def _find_at(path: Path) -> GateDefinition:
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        why = f"it holds no {FILE}" if path.is_dir() else "no such file or folder"
        raise UsageError(f"there is no gate at `{path}`: {why}", hint="write one with `sds new NAME`")
    definition = _checked(getattr(_import_file(file.resolve()), "gate", None), f"`{file}`")
    if definition.name in installed():
        hint = "give yours another `name`, and its contract another `gate`"
        raise UsageError(f"`{path}` has the name of an installed gate, `{definition.name}`", hint=hint)
    return replace(definition, path=path)


def _checked(definition: object, where: str, name: str = "") -> GateDefinition:
    if not isinstance(definition, GateDefinition):
        raise UsageError(f"{where} has no `gate` that is a GateDefinition", hint=A_DEFINITION)
    if name and definition.name != name:
        raise UsageError(
            f"{where} is the gate `{definition.name}`, not `{name}`", hint="correct the name of its entry point"
        )
    return definition


def _import_file(file: Path) -> ModuleType:
    """Import a file as a module of its own package, whose name no import statement has."""
    package = f"_sds_gate_{hashlib.sha256(os.fsencode(file)).hexdigest()[:16]}"
    name = f"{package}.{file.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UsageError(
            f"`{file}` is not a Python file", hint=f"name a folder with {FILE}, or a file that ends with .py"
        )
    parent, module = ModuleType(package), module_from_spec(spec)
    parent.__path__ = [str(file.parent)]
    sys.modules.update({package: parent, name: module})
    try:
        spec.loader.exec_module(module)
    except SdsError:
        _forget(package)
        raise
    except Exception as error:
        _forget(package)
        raise UsageError(f"`{file}` cannot be imported: {in_place(error)}", hint="correct the code there") from error
    except SystemExit as error:
        _forget(package)
        hint = 'put the code of the script under `if __name__ == "__main__":`'
        raise UsageError(f"`{file}` ends the process when it is imported", hint=hint) from error
    return module


def _forget(package: str) -> None:
    for each in [each for each in sys.modules if each == package or each.startswith(f"{package}.")]:
        del sys.modules[each]
