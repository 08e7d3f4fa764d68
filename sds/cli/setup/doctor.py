"""`sds doctor`: check that everything a decision needs is there. One line for each check; exit code 1 when one fails."""

from __future__ import annotations

import platform
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from sds.cli.app import app
from sds.cli.common import OpenedGate, defined, named_model, recorded
from sds.cli.engines import NO_OPTIONS, EngineOptions, check_asked, opened_engine
from sds.cli.hints import at_gate
from sds.cli.render import counted, echo, plain, without_password
from sds.definitions.definition import GateDefinition
from sds.definitions.registry import installed
from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.host.keys import PUBLIC_FILE
from sds.host.paths import (
    fitted_readers,
    gate_home,
    home,
    is_there,
    look_at_record,
    make_private,
    model_cache,
    public_keys_of,
    record_name,
    refuse_altered,
    refuse_lost,
    refuse_lost_key,
    store_url,
)
from sds.kernel.canonical import one_line
from sds.kernel.errors import ContractError, SdsError, StoreError, UsageError, WorldError, cause_of
from sds.kernel.executor import breaker
from sds.kernel.executor.protocol import Lists
from sds.kernel.executor.statement import read_statement
from sds.kernel.executor.wholeness import Wholeness
from sds.kernel.registry import registry
from sds.kernel.storage.private_files import OTHERS
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import UPGRADABLE, Reader, refuse_newer
from sds.models.protocol import missing_package
from sds.opening import check_fits

if TYPE_CHECKING:
    from sds.policy.judgement import Judgement

_DAMAGED = "keep the damaged record, and restore a backup (sds restore)"
_REQUIRED = ("llama-cpp-python", "common-expression-language", "pydantic", "orjson", "numpy")


def doctor(options: EngineOptions = NO_OPTIONS, gate: OpenedGate = "refund") -> None:
    """Check that a gate can decide on this machine. It checks versions, model, mask, readers, store, data, contract, executor.

    Example: sds doctor --model /models/mine.gguf
    """
    definition, opened, running = defined(gate), opened_engine(options, brief=True), list[str]()
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("versions", _versions),
        ("model and mask", lambda: _model(definition, opened, running)),
        ("readers", lambda: _readers(definition, running)),
        ("store", _store),
        *definition.checks.items(),
        ("contract", lambda: _contract(definition)),
        ("outside", lambda: _outside(definition)),
    )
    failed = 0
    for name, check in checks:
        try:
            echo(plain(f"ok    {name}: {check()}"))
        except SdsError as error:
            failed += 1
            of_all = check is _store  # which looks at the records of all gates
            hint = error.hint if of_all else at_gate(error.hint, app, ["doctor", "--gate", gate])
            said = f"FAIL  {name}: {error}{f' ({hint})' if hint else ''}"
            echo(without_password(plain(said)))
        except ImportError as error:  # PackageNotFoundError is one, too
            failed += 1
            what = "a package is missing" if missing_package(error) else "an import failed"
            echo(plain(f"FAIL  {name}: {what}: {one_line(error, 200)}"))
    if failed:
        raise SdsError(f"{failed} of {len(checks)} checks failed")


def _versions() -> str:
    from sds.models.catalog.backends import BACKENDS  # noqa: PLC0415
    from sds.models.catalog.catalog import records  # noqa: PLC0415

    extras = [each for each in BACKENDS.values() if each.extra]
    optional = [f"{each.distribution} {found}" for each in extras if (found := each.version())]
    with named_model(None):
        named = {record.library for record in records(model_cache())}
    optional += [
        f"a model was prepared for {each.title}, which is not installed ({each.install_hint})"
        for each in extras
        if each.name in named and not each.version()
    ]
    libraries = ", ".join([*(f"{name} {version(name)}" for name in _REQUIRED), *optional])
    return f"sds {version('sovereign-decision-stream')}, python {platform.python_version()}, sqlite {sqlite3.sqlite_version}, {libraries}"


def _model(gate: GateDefinition, opened: AbstractContextManager[Engine], running: list[str]) -> str:
    """Check the model, and add its name to `running`. Raises ModelError or ImportError where it cannot decide."""
    import_module("sds.gate")  # imports all that decides, so that a missing package is named
    with opened as engine:
        check_asked(engine, gate.load_contract())
        running.append(engine.model)
        return f"{engine.model} answers, and its constraint was tested"


def _readers(gate: GateDefinition, running: list[str]) -> str:
    """Return what reads for a gate. Raises SdsError where its fitted readers are refused, or another language model than
    the one in `running` was calibrated. `running` is empty where the model's own check failed.
    """
    contract = gate.load_contract()
    if not contract.policy:
        return "none: the contract has no policy, the language model decides"
    from sds.policy.judgement import open_judgement, refuse_unread_scores  # noqa: PLC0415  for policies only

    folder = fitted_readers(gate.name, gate.readers)
    if folder is None:
        refuse_unread_scores(contract, None, gate=gate.argument)
        return f"none is fitted: the language model reads, uncalibrated (sds fit {gate.argument})"
    with closing(open_judgement(folder, contract, gate=gate.argument)) as judgement:
        refuse_unread_scores(contract, judgement, gate=gate.argument)
        named = [_read_by(name, judgement, running, gate) for name in contract.readings]
        return "; ".join([", ".join(named), *judgement.notices])


def _read_by(name: str, judgement: Judgement, running: list[str], gate: GateDefinition) -> str:
    """Return what reads `name`. Raises UsageError where another language model was calibrated to read it."""
    if (reader := judgement.readers.get(name)) is not None:
        return f"{name} by {reader.kind}@{reader.sha256[:12]}"
    if (known := judgement.manifest.models.get(name)) is None:
        return f"{name} by the language model, uncalibrated (sds fit {gate.argument})"
    if not running:
        return f"{name} by the language model, calibrated if it is `{known.model}`"
    if judgement.calibration(name, running[0]) is None:
        raise UsageError(
            f"`{known.model}` was calibrated to read `{name}`, but the model here is `{running[0]}`: it is uncalibrated,"
            " and has no thresholds",
            hint=f"sds fit {gate.argument} --language-model",
        )
    return f"{name} by the language model, calibrated: `{known.model}`"


def _store() -> str:
    make_private(home())
    try:
        with tempfile.TemporaryDirectory(dir=home()) as folder:
            SqliteStore(Path(folder) / "probe.db").close()
    except OSError as error:
        raise StoreError(f"`{home()}` cannot be written: {cause_of(error)}") from error
    gates = recorded()
    for gate in dict.fromkeys([*installed(), *gates]):
        _private(gate_home(gate))
        refuse_lost(gate_home(gate))
        public_keys_of(gate_home(gate))
    records = [gate_home(gate) for gate in gates]
    for record in records:
        _read_through(record)
        _signed(record)
    where = "in it" if store_url() is None else "in PostgreSQL"
    found = f"{counted(len(records), 'record')} {where} {'is' if len(records) == 1 else 'are'} whole"
    halted = [folder.name for folder in records if _halted(folder)]
    said = f"; halted by an operator: {', '.join(halted)}" if halted else ""
    said += "".join(f"; the executor of {gate} {text}" for folder in records for gate, text in _not_answering(folder))
    what = "" if store_url() is None else " for keys and logs"
    return f"`{home()}` is writable{what}, {found if records else f'no record {where}'}{said}"


def _opened(folder: Path) -> Reader:
    record = look_at_record(folder)
    if record is None:
        raise StoreError(f"`{record_name(folder)}` is gone")
    return record


def _halted(folder: Path) -> bool:
    with closing(_opened(folder)) as record:
        return record.halted


def _not_answering(folder: Path) -> list[tuple[str, str]]:
    """Return the gates of a record whose executor's breaker is open, with its state in words."""
    with closing(_opened(folder)) as record:
        if "executor_breakers" not in record.schema:  # an older version's record, not opened since
            return []
        gates = [row[0] for row in record.rows("SELECT gate FROM executor_breakers WHERE opened_at_ms IS NOT NULL")]
        return [(gate, breaker.read(record, gate).text) for gate in gates]


def _private(folder: Path) -> None:
    """Raise UsageError where other users have rights to a gate's folder or its files, but for the public key."""
    if not is_there(folder):
        return
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != PUBLIC_FILE)
    for path in (folder, *files):
        if path.stat().st_mode & OTHERS:
            hint = f"chmod -R go= {folder}"
            raise UsageError(f"users other than its owner have access to `{path}`", hint=hint)


def _signed(folder: Path) -> None:
    """Raise SdsError where a gate would refuse to open: its keys are lost, or its ledger is not what they signed."""
    refuse_lost_key(folder)
    with closing(_opened(folder)) as record:
        if "checkpoints" in record.schema:
            refuse_altered(folder, record)


def _read_through(folder: Path) -> None:
    """Read every page of a record. Raises StoreError where one is damaged. `sds ledger verify` checks the contents."""
    with closing(_opened(folder)) as record:
        try:
            found = record.damage(quick=True)
            known = record.schema
            version = record.value("SELECT value FROM meta WHERE key = 'schema_version'") if "meta" in known else None
            # opening an older record adds what it lacks
            missing = set() if version in UPGRADABLE else record.expected_schema.keys() - known.keys()
        except StoreError as error:
            raise StoreError(f"`{record_name(folder)}` is damaged: {error}", hint=_DAMAGED) from error
    refuse_newer(version, f"`{record_name(folder)}`")
    if found or missing:
        what = f"it has no `{min(missing)}`" if missing else one_line(found[0], 200)
        raise StoreError(f"`{record_name(folder)}` is damaged: {what}", hint=_DAMAGED)


def _contract(gate: GateDefinition) -> str:
    contract = gate.load_contract()
    if (record := look_at_record(gate_home(gate.name))) is not None:
        with closing(record) as opened:
            refused = registry.refusal(opened, contract, now_ms=now_ms())
        if refused is not None:
            raise ContractError(
                f"{gate.name} {contract.version} could not be put in force: {refused.message}", hint=refused.hint
            )
    checksum = "checksum matches, " if gate.path is None else ""
    return f"{gate.name} {contract.version}, {checksum}owner {contract.owner}"


def _outside(gate: GateDefinition) -> str:
    """Raise UsageError where a gate's executor cannot carry out what the contract permits, WorldError where it lists orders
    that the record lacks: it was restored, or begun anew. A gate without a folder is opened in one that is removed again.
    """
    folder, found = gate_home(gate.name), look_at_record(gate_home(gate.name))
    with closing(found) if found else nullcontext() as record, tempfile.TemporaryDirectory() as aside:
        return _outside_of(gate, folder if is_there(folder) else Path(aside), record)


def _outside_of(gate: GateDefinition, folder: Path, record: Reader | None) -> str:
    with gate.opened(folder) as (_, executor):
        check_fits(executor, gate.load_contract())
        if record is None:
            return "no order was sent yet"
        if not isinstance(executor, Lists):
            return f"the executor of {gate.name} offers no statement: its orders cannot be compared with the record"
        listing = partial(read_statement, executor.statement)
        doubt = Wholeness(record, gate.name, listing, now_ms=now_ms).doubt()
    if doubt is not None:
        raise WorldError(doubt.message, reason_code=doubt.code)
    return f"the record of {gate.name} holds every order in the statement of its {gate.demo.executor}"
