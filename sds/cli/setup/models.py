"""`sds models`: list models, show one, check that it can write a contract's decisions, prepare it for this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sds.cli.common import JsonFlag, existing, named_model
from sds.cli.render import counted, echo, print_either
from sds.definitions.definition import DEFAULT
from sds.definitions.registry import find
from sds.host.paths import home, model_cache
from sds.kernel.canonical import one_line
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.errors import ModelError, UsageError, cause_of

if TYPE_CHECKING:
    from sds.models.catalog.catalog import Measured, Prepared, Record

PathArgument = Annotated[Path, typer.Argument(help="A GGUF file or a checkpoint folder.", metavar="PATH")]
ContractFile = Annotated[
    Path | None,
    typer.Option(
        "--contract",
        help="A contract's YAML file, or the path of a gate. Default: the refund gate's.",
        show_default=False,
    ),
]
LINE_CHARS_MAX = 500


def list_models(as_json: JsonFlag = False) -> None:
    """List the models here. They are the embedded one, prepared ones, and those in $SDS_MODELS (default: models in $SDS_HOME).

    Example: sds models list
    """
    from sds.models.catalog import catalog  # noqa: PLC0415
    from sds.models.protocol import BackendError  # noqa: PLC0415

    with named_model(None):
        found = [("own", path) for path in catalog.models_in(_folder())]
        try:
            found.insert(0, ("embedded", catalog.embedded_model()))
        except BackendError as error:
            if not found:
                raise
            echo(f"note: {error}", err=True)
        prepared = [_listed(record) for record in catalog.records(model_cache()) if record.file]
    listed = [
        {"from": whence, "form": "checkpoint folder" if path.is_dir() else "GGUF", "path": str(path)}
        for whence, path in found
    ]
    listed += prepared
    made = [f"  ({each['made_from']})" if "made_from" in each else "" for each in listed]
    lines = (
        f"{each['from']:8}  {each['form']:17}  {each['path']}{how}" for each, how in zip(listed, made, strict=True)
    )
    print_either(as_json, listed, lines)


def show(path: PathArgument, as_json: JsonFlag = False) -> None:
    """Describe a GGUF file or a checkpoint folder. Its weights are not loaded.

    Example: sds models show /models/mine.gguf
    """
    from sds.models.catalog.catalog import records  # noqa: PLC0415
    from sds.models.catalog.inspect import inspect_model  # noqa: PLC0415

    with named_model(path), inspect_model(existing(path)) as model:
        card = asdict(model.card)
    sha256 = card["sha256"]
    with named_model(None):
        prepared = [record for record in records(model_cache()) if sha256 in (record.source.sha256, record.sha256)]
    card["prepared"] = [_prepared_line(record, sha256) for record in prepared]
    lines = (f"{name:20}  {one_line(str(value), LINE_CHARS_MAX)}" for name, value in _shown(card).items())
    print_either(as_json, card, lines)


def check(path: PathArgument, contract: ContractFile = None, as_json: JsonFlag = False) -> None:
    """Check that a model fits a contract. The model must be able to write every decision. Exit code 1: a check failed.

    Example: sds models check /models/mine.gguf --contract contract.yaml
    """
    asked = _contract_of(contract or DEFAULT)
    from sds.engines.expressible import check_model, question_of  # noqa: PLC0415
    from sds.models.catalog.inspect import inspect_model  # noqa: PLC0415
    from sds.models.protocol import CONTEXT_TOKENS  # noqa: PLC0415

    with named_model(path), inspect_model(existing(path)) as model:
        checks = check_model(question_of(asked, model, CONTEXT_TOKENS))
    failed = sum(not check.ok for check in checks)
    said = {"model": str(path), "contract": f"{asked.gate} {asked.version}", "fits": not failed}
    lines = (f"{'ok' if each.ok else 'no':4}{each.name}: {each.reason}" for each in checks)
    print_either(as_json, {**said, "checks": [asdict(each) for each in checks]}, lines)
    if failed:
        raise ModelError(
            f"`{path}` cannot decide under `{asked.gate}` {asked.version}: {failed} of {len(checks)} checks failed",
            hint="use another model, or correct what the lines that begin with `no` say",
        )


def _contract_of(given: Path | str) -> Contract:
    """Return the contract in a file, or of a gate by its name or the path of its folder or file. Raises UsageError."""
    if isinstance(given, Path) and given.suffix != ".py" and not given.is_dir():
        return load_contract(given)
    return find(given).load_contract()


PreparedPath = Annotated[
    Path | None, typer.Argument(help="A GGUF file. Default: the embedded model.", metavar="[PATH]")
]
Layers = Annotated[int | None, typer.Option("--layers", min=1, help="Keep this many first layers.", show_default=False)]
KlMax = Annotated[
    float | None,
    typer.Option(
        "--kl-max",
        min=0.0,
        help="The greatest mean KL from the exact weights, in nats. The file's own type may exceed it.",
        show_default="0.02",
    ),
]
Again = Annotated[bool, typer.Option("--again", help="Measure again, even what was measured before.")]


def prepare(
    path: PreparedPath = None,
    layers: Layers = None,
    kl_max: KlMax = None,
    again: Again = False,
    as_json: JsonFlag = False,
) -> None:
    """Find and keep the fastest form of a model. It measures weight types and libraries. The model's decisions then use it.

    It is kept in $SDS_CACHE, else in the user's cache folder. With --layers, keep a model without its upper layers.

    Example: sds models prepare
    """
    from sds.engines.factory import cores  # noqa: PLC0415
    from sds.models.catalog import catalog  # noqa: PLC0415
    from sds.models.catalog.prepare import KL_MAX, Preparation  # noqa: PLC0415

    if kl_max is not None and not isfinite(kl_max):
        raise UsageError("--kl-max must be a number", hint="for example --kl-max 0.001")
    preparation = Preparation(
        cache=model_cache(),
        threads=cores(),
        today=datetime.now(UTC).date().isoformat(),
        clock_s=time.perf_counter,
        sleep=time.sleep,
        log=lambda line: echo(line, err=True),
        kl_max=KL_MAX if kl_max is None else kl_max,
    )
    with named_model(None):
        source = existing(path) if path else catalog.embedded_model()
    with named_model(source if path or layers else None):
        found, now = preparation.run(source, layers=layers, again=again)
    data = {"path": str(found.path), "measured_now": now, **found.record.model_dump()}
    print_either(as_json, data, _prepared_lines(found, now=now))


def _prepared_lines(found: Prepared, *, now: bool) -> Iterator[str]:
    if not now:
        yield f"prepared on {found.record.date}: {found.record.why}; kept: {found.path}"
        return
    record = found.record
    for each in record.measured:
        chosen = (each.type, each.library, each.dtype) == (record.type, record.library, record.dtype)
        kept = f"kept: {found.path}" if chosen else ""
        yield (
            f"{each.type:8}  {_runs(each):21}  {each.ms_min:8.1f} ms (quickest of {each.decisions}, median {each.ms_p50:.1f})  "
            f"{each.bytes / 1e6:7.0f} MB  KL {each.kl_mean:.2g}  {kept}".rstrip()
        )
    yield record.why


def _runs(each: Measured | Record) -> str:
    from sds.models.catalog.backends import BACKENDS  # noqa: PLC0415

    title = BACKENDS[each.library].title
    return f"{title} in {each.dtype}" if each.dtype else title


def _listed(record: Record) -> dict[str, str]:
    made = f"{record.source.name}@{record.source.sha256[:12]}"
    layers = f", {counted(record.layers, 'layer')}" if record.layers else ""
    return {
        "from": "prepared",
        "form": "GGUF",
        "path": str(model_cache() / str(record.file)),
        "made_from": f"made from {made}{layers}, for {_runs(record)}",
        "library": record.library,
        **({"dtype": record.dtype} if record.dtype else {}),
    }


def _prepared_line(record: Record, sha256: str) -> str:
    if record.sha256 == sha256 != record.source.sha256:
        return (
            f"this is {record.source.name}@{record.source.sha256[:12]} as {record.type}, made by `sds models prepare` "
            f"for {_runs(record)}"
        )
    kept = f"its first {counted(record.layers, 'layer')} only; " if record.layers else ""
    return f"{kept}{record.why}"


def _folder() -> Path:
    named = os.environ.get("SDS_MODELS")
    try:
        is_none = bool(named) and not Path(named or "").is_dir()
    except OSError as error:
        hint = "set it to a folder that this user may read, or unset it"
        raise UsageError(f"SDS_MODELS is `{named}`, which cannot be read: {cause_of(error)}", hint=hint) from error
    if is_none:
        raise UsageError(f"SDS_MODELS is `{named}`, which is not a folder", hint="set it to a folder, or unset it")
    return Path(named) if named else home() / "models"


def _shown(card: Mapping[str, Any]) -> dict[str, object]:
    turn = card["turn"]
    looks = "{before_system}SYSTEM{between}USER{after_user}".format_map(turn) if turn else card["turn_refused"]
    return {
        "name": card["name"],
        "form": card["form"],
        "architecture": card["architecture"],
        "parameters": f"{card['parameters']:,}",
        "layers": card["layers"] or "not said",
        "weights": card["weights"],
        "context": f"{card['context_tokens']:,} tokens" if card["context_tokens"] else "not said",
        "vocabulary": f"{card['vocabulary_tokens']:,} tokens",
        "tokenizer": card["tokenizer"],
        "splits digits": "one by one" if card["splits_digits"] else "no",
        "chat template": "yes" if card["has_chat_template"] else "no",
        "turn": looks.encode("unicode_escape").decode(),
        **({"thinking": turn["thinking"]} if turn and turn["thinking"] else {}),
        **({"decides": f"nothing: {card['unfit']}"} if card["unfit"] else {}),
        "size": f"{card['file_bytes']:,} bytes",
        "sha256": card["sha256"],
        **({"prepared": " | ".join(card["prepared"])} if card["prepared"] else {}),
    }
