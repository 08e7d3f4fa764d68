"""`sds replay`: decide a recorded flow again, and tell whether the result is identical."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sds.cli.common import GateOption, JsonFlag, ModelPath, existing, open_store, whole_dfid
from sds.cli.render import print_either
from sds.definitions.registry import find, installed
from sds.host.clock import now_ms
from sds.host.interrupt import ends_at_once
from sds.host.paths import fitted_readers
from sds.kernel.errors import SdsError, StoreError, UsageError

if TYPE_CHECKING:
    from sds.replay import Circumstance, Parting, Replay

EXIT_DIFFERS = 1
NOT_RECORDED, NONE_HERE = "not recorded", "none"


def replay(
    dfid: Annotated[
        str, typer.Argument(help="The flow's id, as every answer names it, or its first characters.", metavar="DFID")
    ],
    gate: GateOption = "refund",
    model: ModelPath = None,
    as_json: JsonFlag = False,
) -> None:
    """Decide a recorded flow again and compare. It reads the record alone, and neither changes nor sends anything.

    Exit code 0: identical. 1: something differs, or the record cannot be read. 2: the flow cannot be replayed.

    Example: sds replay 550e8400-e29b-41d4-a716-446655440000
    """
    from sds import replay as replaying  # noqa: PLC0415  imports the model's libraries

    try:
        with closing(open_store(gate)) as store:
            path = existing(model) if model else None
            shipped = find(gate).readers if gate in installed() else None
            open_it = replaying.opener(path, now_ms=now_ms, readers=fitted_readers(gate, shipped))
            with ends_at_once():
                replayed = replaying.replay(store, whole_dfid(store, dfid), open_it=open_it, now_ms=now_ms)
    except (UsageError, StoreError):
        raise
    except SdsError as error:  # as UsageError, for exit code 2: 1 is a replay that differs
        raise UsageError(str(error), hint=error.hint, reason_code=error.reason_code, dfid=error.dfid) from error
    print_either(as_json, _data(replayed), _lines(replayed))
    if not replayed.identical:
        raise typer.Exit(EXIT_DIFFERS)


def _data(found: Replay) -> dict[str, Any]:
    texts = {name: getattr(found, name).decode("utf-8", "backslashreplace") for name in ("recorded", "replayed")}
    return {
        "dfid": found.dfid,
        "identical": found.identical,
        "same_decision": found.same_decision,
        **asdict(found),
        **texts,
    }


def _lines(found: Replay) -> Iterator[str]:
    if found.identical:
        yield "identical: the same bytes, every probability bit-equal"
    else:
        yield f"differs: {'the same decision' if found.same_decision else 'another decision'}"
    for fault in found.faults:
        yield f"  the record was altered: {fault}"
    for one in found.circumstances:
        yield f"  {one.name}: {_said(one)}"
    if found.shared:
        alone = "a replay runs alone" if found.bit_equal else "a replay runs alone, in another shape"
        yield f"  batch: passes shared with other decisions: {found.shared}; {alone}"
    if found.recorded != found.replayed:
        yield f"  recorded: {found.recorded.decode('utf-8', 'backslashreplace')}"
        yield f"  replayed: {found.replayed.decode('utf-8', 'backslashreplace')}"
    if found.parting:
        yield from _parted(found.parting)
    elif not found.bit_equal:
        yield f"  scores: at most {found.logp_apart_max:.3g} difference in log-probability"


def _said(one: Circumstance) -> str:
    if one.name == "rows":
        return "a pass had other tokens or rows"
    was = NOT_RECORDED if one.recorded is None else f"{one.recorded} recorded"
    return f"{was}, {NONE_HERE if one.replayed is None else one.replayed} here"


def _parted(at: Parting) -> Iterator[str]:
    yield f"  first difference: {at.choice}"
    for option, was, now in zip((at.recorded, at.replayed), at.recorded_shares, at.replayed_shares, strict=True):
        yield f"    {option or 'the end'}: {_share(was)} recorded, {_share(now)} here"


def _share(share: float | None) -> str:
    return "no option" if share is None else f"{share:.6g}"
