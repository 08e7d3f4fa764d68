"""The options that choose an engine, shared by `run`, `decide`, `retry` and `doctor`, and opening that engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from pydantic import ValidationError

from sds.cli.common import ModelPath, existing, named_model
from sds.cli.render import echo
from sds.definitions.definition import GateDefinition
from sds.engines.protocol import Checks, Engine
from sds.host.clock import now_ms
from sds.host.paths import fitted_readers
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.types import ContradictionError, say
from sds.kernel.contract.yaml_lines import Lines
from sds.kernel.errors import UsageError
from sds.models.catalog.backends import LibraryChoice
from sds.models.protocol import Dtype
from sds.models.text.protocol import Processing


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """The options that choose an engine. Those that are not given keep the engine's own defaults."""

    model: ModelPath = None
    engine: Annotated[
        Literal["native", "outlines"] | None,
        typer.Option("--engine", help="The engine that drives the model. Default: native.", show_default=False),
    ] = None
    backend: Annotated[
        Processing | None,
        typer.Option("--backend", help="Outlines' constraint library. Default: outlines_core.", show_default=False),
    ] = None
    library: Annotated[
        LibraryChoice | None,
        typer.Option(
            "--library",
            help="The library that runs the model. Default: transformers for a folder; for a GGUF, the prepared one or llamacpp.",
            show_default=False,
        ),
    ] = None
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            help="The device for transformers, or for llama.cpp under native: cpu, cuda or cuda:1. Default: cpu.",
            show_default=False,
        ),
    ] = None
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="The number type for transformers, OpenVINO or integer.", show_default=False),
    ] = None
    mode: Annotated[
        Literal["greedy", "exact-kinds", "exact"] | None,
        typer.Option(
            "--mode",
            help="greedy (default): token by token; exact: score whole alternatives and numbers; exact-kinds: score whole kinds.",
            show_default=False,
        ),
    ] = None
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Run the file itself, not the weights that `sds models prepare` made of it.")
    ] = False
    engines: Annotated[
        Path | None, typer.Option("--engines", help="A YAML file with a chain of engines.", show_default=False)
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The options about a single engine that were given, by name, `model` excepted."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: value for name, value in values.items() if name not in ("model", "engines") and value}

    @property
    def named(self) -> bool:
        """Whether any option was given: then that engine decides, not the gate's policy."""
        return bool(self.given or self.model or self.engines)


NO_OPTIONS = EngineOptions()


@contextmanager
def opened_engine(
    options: EngineOptions, *, brief: bool, parallel: int = 1, gate: GateDefinition | None = None
) -> Iterator[Engine]:
    """Open the engine that the options name, for a block. Without any, the gate's policy decides, if its contract has one.

    `brief`: skip the warm-up, for few decisions. `parallel`: how many decisions at once, unless a file of engines is given,
    which says so itself. Raises UsageError, ModelError.
    """
    given = options.given
    if parallel > 1 and given.get("engine") == "outlines":
        echo("Outlines decides one case at a time: --parallel has no effect", err=True)
    elif parallel > 1 and options.engines is None:
        given["parallel"] = parallel
    with named_model(options.model):
        engine = (gate and not options.named and _policy(gate, brief=brief)) or _open(
            options.model, options.engines, given, brief=brief
        )
    for notice in getattr(engine, "notices", ()):
        echo(notice, err=True)
    try:
        yield engine
    finally:
        engine.close()


def _policy(gate: GateDefinition, *, brief: bool) -> Engine | None:
    """Open the policy of a gate's contract; return None where the contract has none."""
    contract = gate.load_contract()
    if not contract.policy:
        return None
    from sds.policy.opening import open_policy  # noqa: PLC0415

    def open_model() -> Engine:
        return _open(None, None, {}, brief=brief)

    readers = fitted_readers(gate.name, gate.readers)
    return open_policy(contract, readers, open_model=open_model, now_ms=now_ms, gate=gate.argument)


def check_asked(engine: Engine, contract: Contract) -> None:
    """Raise ModelError where an engine cannot decide under a contract. Call this before the first event is claimed."""
    if isinstance(engine, Checks):
        engine.check_contract(contract)


def _open(model: Path | None, engines: Path | None, given: dict[str, Any], *, brief: bool) -> Engine:
    from sds.engines.config import EngineSpec, load_engines, open_chain, open_engine_of  # noqa: PLC0415  loads libraries
    from sds.engines.factory import open_engine  # noqa: PLC0415

    if engines is not None:
        if model is not None or given:
            other = "model" if model is not None else min(given).replace("_", "-")
            raise UsageError(f"--engines and --{other} exclude each other", hint="write it into the file of --engines")
        return open_chain(load_engines(engines), now_ms=now_ms, skip_warmup=brief)
    if model is not None:
        existing(model)
    if not given:
        return open_engine(model, now_ms=now_ms, skip_warmup=brief)
    kind = given.pop("engine", "native")
    try:
        spec = EngineSpec(name=kind, kind=kind, model=None if model is None else str(model), **given)
    except ValidationError as error:
        nowhere = Lines()
        nowhere[()] = 0  # options have no line in a file
        _, message = say(error.errors()[0], nowhere)
        raise UsageError(message, hint=_mend(error.errors()[0], kind, given)) from error
    return open_engine_of(spec, now_ms=now_ms, skip_warmup=brief)


def _mend(error: Any, kind: str, given: Mapping[str, Any]) -> str:
    """Return the option that corrects a contradiction between options; "" where none is known."""
    cause = error.get("ctx", {}).get("error")
    path = cause.path if isinstance(cause, ContradictionError) else ()
    named = str(path[0]) if path else ""
    if named == "backend" and kind == "native":
        return "add --engine outlines"
    if named == "dtype":
        return "choose another --dtype or another --library" if "library" in given else "add --library NAME"
    if named == "device" and kind == "native":
        return "use --library transformers or llamacpp"
    if named in {"backend", "device"}:
        return "use --library transformers"
    if named == "slots":
        return "use a smaller --parallel"
    return f"leave out --{named.replace('_', '-')}" if named else ""
