"""Preparing weights in a time of the tests' own, and damaging what was prepared."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from sds.models.catalog import prepare
from sds.models.catalog.prepare import Log, Preparation
from sds.models.catalog.timing import DECISIONS
from sds.models.openvino_.facts import OPENVINO
from tests.model_fixtures import TINY_THREADS


def _lacking() -> str:
    """Return why nothing is measured in OpenVINO here."""
    if not OPENVINO.version():
        return "OpenVINO is not installed: make openvino"
    from sds.models.openvino_.names import computes_in_bf16, computes_in_int8

    return "" if computes_in_bf16() and computes_in_int8() else "a processor without BF16 or int8"


in_openvino = pytest.mark.skipif(bool(_lacking()), reason=_lacking())
TODAY = "2026-11-22"
OTHER_DAY = "2026-11-23"


def clock(**durations_s: float) -> Callable[[], float]:
    """In the order of measuring: a clock in whose time each weight type takes what is said; `own` is the source's, `openvino` BF16 through it, and the others that in other data types."""

    def readings() -> Iterator[float]:
        now = 0.0
        for _ in range(prepare.ROUNDS):
            for duration_s in durations_s.values():
                for _ in range(1 + DECISIONS):
                    yield now
                    now += duration_s
                    yield now

    return readings().__next__


BF16_WINS = {"own": 3.0, "BF16": 1.0, "F16": 2.0, "Q8_0": 2.5}
OPENVINO_WINS = {**BF16_WINS, "openvino": 0.5, "fp32": 0.7, "int8": 0.75, "int8-bf16": 0.8}
LIBRARIES: dict[str, set[str]] = {"llamacpp": {"own"}, "openvino": {"openvino", "int8"}, "integer": {"int16"}}
INT8_WINS = {**OPENVINO_WINS, "int8": 0.25}


def preparation(
    cache: Path,
    durations_s: Mapping[str, float] = BF16_WINS,
    *,
    today: str = TODAY,
    log: Log = lambda _: None,
    kl_max: float = prepare.KL_MAX,
) -> Preparation:
    return Preparation(
        cache=cache,
        threads=TINY_THREADS,
        today=today,
        clock_s=clock(**durations_s),
        sleep=lambda _: pytest.fail("nobody else is preparing"),
        log=log,
        libraries=[library for library, shown in LIBRARIES.items() if shown & durations_s.keys()],
        kl_max=kl_max,
    )


def changed(cache: Path, *, without: str = "", **facts: Any) -> None:
    (path,) = cache.glob("*.json")
    record = {**json.loads(path.read_bytes()), **facts}
    path.write_text(json.dumps({name: fact for name, fact in record.items() if name != without}))


def weights(cache: Path) -> Path:
    (path,) = cache.glob("*.gguf")
    return path


def flip(cache: Path) -> None:
    with weights(cache).open("r+b") as file:
        file.seek(-5, os.SEEK_END)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
