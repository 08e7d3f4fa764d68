"""Measure the hot path and the throughput on a CUDA device through transformers, in bfloat16: `sds bench gpu --json`.

    over_floor          a warm decision's reasoning over the bare passes it needs, run again in the same breath
    exact_over_greedy   the exact distribution over whole alternatives, against the greedy one, on the same packets
    ours_per_s          decisions a second, by how many are asked for at once

The packets are those of `sds bench peers`, after 64 (`EARLIER`) that came before them in the queue. Predicted before
measuring: a pass cannot be faster than reading the weights once, at the rate at which this device copies its own memory
(printed first). A small model is far above that floor: on a card its passes cost what starting their kernels costs, so
over_floor, against the bare passes, is what is ours to mend.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from sds.benchmarks.lib.floor import Recorded
from sds.benchmarks.lib.measuring import Parser, Report, Say, existing, machine, main, summary, versions, whole_number
from sds.benchmarks.lib.packets import EARLIER, digits_packets, fixed_packets
from sds.benchmarks.throughput import TOKENS_MAX, best_of_ours, in_rounds, mixed_packets, ways_of_ours
from sds.decoding.errors import CHOICE_TOO_CLOSE
from sds.engines.factory import open_backend
from sds.engines.native import NativeEngine
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket
from sds.models.catalog.catalog import embedded_model
from sds.models.protocol import SLOTS_MAX, Backend

AT_ONCE = (1, 2, 4, 8, 16, 32, 64)
N, N_MAX = 30, 500
THROUGHPUT_N = 128
TIMEOUT_MS = 120_000
COPY_BYTES, COPIES = 1 << 28, 5
SORTS = {"fixed": fixed_packets, "digits": digits_packets}


def copy_bytes_per_s(device: Any) -> float:
    """Return at which rate the device copies its memory: bytes read and written a second, the best of a few tries."""
    import torch  # noqa: PLC0415  loaded when it is asked for

    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def once() -> float:
        began = time.perf_counter()
        target.copy_(source)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    return 2 * COPY_BYTES / min(once() for _ in range(COPIES))


def floor(backend: Any, device: Any) -> dict[str, float]:
    """Return what no pass of this backend can be faster than."""
    weights = backend.module.parameters()
    weights_bytes = sum(each.numel() * each.element_size() for each in weights)
    rate = copy_bytes_per_s(device)
    return {
        "memory_gb_per_s": round(rate / 1e9, 1),
        "weights_mb": round(weights_bytes / 1e6, 1),
        "pass_ms": round(1000 * weights_bytes / rate, 4),
    }


def reasoning(backend: Backend, packets: Sequence[DecisionPacket]) -> dict[str, Any]:
    """Decide every packet greedily, run its passes again bare, decide it exactly; the first EARLIER are not counted."""
    recorded = Recorded(backend)
    greedy = NativeEngine(cast("Backend", recorded), now_ms=now_ms)
    exact = NativeEngine(backend, now_ms=now_ms, mode="exact")
    took: list[tuple[float, float, float]] = []
    shapes: Counter[tuple[int, ...]] = Counter()
    for number, packet in enumerate(packets):
        recorded.clear()
        ms = _propose_ms(greedy, packet)
        found = (ms, recorded.bare_ms(), _propose_ms(exact, packet))
        if number >= EARLIER:
            took.append(found)
            shapes[tuple(recorded.tokens)] += 1
    return {
        "reason_ms": summary([ms for ms, _, _ in took]),
        "bare_passes_ms": summary([bare for _, bare, _ in took]),
        "exact_ms": summary([ms for _, _, ms in took]),
        "over_floor": round(summary([ms / bare for ms, bare, _ in took])["p50"], 3),
        "exact_over_greedy": round(summary([of_exact / ms for ms, _, of_exact in took])["p50"], 3),
        "tokens_of_passes": list(shapes.most_common(1)[0][0]),
    }


def _propose_ms(engine: NativeEngine, packet: DecisionPacket) -> float:
    fresh = replace(packet, expires_at_ms=now_ms() + TIMEOUT_MS)
    began = time.perf_counter()
    engine.propose(fresh, tokens_max=TOKENS_MAX)
    return (time.perf_counter() - began) * 1000


def run(folder: Path, model: Path, device: str, n: int, decisions: int, at_once: Sequence[int], say: Say) -> Report:
    """Measure on any device of torch's: on a card for its figures, on the CPU for its tests."""
    opener = partial(open_backend, model, library="transformers", device=device, dtype="bf16")
    with closing(cast("Any", opener())) as backend:
        from sds.models.transformers_.loading import device_of  # noqa: PLC0415  torch is there, or nothing would have been opened

        name, weights = _name(device_of(device)), backend.fingerprint
        least = floor(backend, device_of(device))
        say(f"{name}: copies {least['memory_gb_per_s']} GB/s; a pass cannot be faster than {least['pass_ms']} ms")
        warm = {sort: reasoning(backend, made(folder, n + EARLIER)) for sort, made in SORTS.items()}
    for sort, found in warm.items():
        found["floor_ms"] = round(least["pass_ms"] * len(found["tokens_of_passes"]), 4)
        say(f"{sort}: {found}")
    packets, earlier = mixed_packets(folder, decisions)
    rows: list[dict[str, Any]] = []
    for many in sorted(set(at_once)):
        openers = {f"{slots} slots": partial(_engine, opener, slots) for slots in sorted({1, many})}
        tried = in_rounds(ways_of_ours(openers, packets, earlier, many), 1)
        rows.append({"at_once": many, "ours": best_of_ours(tried)})
        say(str(rows[-1]))
    by_count = {str(row["at_once"]): row["ours"] for row in rows}
    return {
        "benchmark": "gpu",
        **machine(),
        "device": name,
        "dtype": "bf16",
        "n": n,
        "decisions": len(packets),
        "model": {"name": model.name, "sha256": weights},
        "versions": versions("torch", "transformers"),
        "predicted": least,
        "over_floor": {sort: found["over_floor"] for sort, found in warm.items()},
        "exact_over_greedy": {sort: found["exact_over_greedy"] for sort, found in warm.items()},
        "warm": warm,
        "ours_per_s": {count: found["per_s"] for count, found in by_count.items()},
        "too_close": {count: found["became"].get(CHOICE_TOO_CLOSE, 0) for count, found in by_count.items()},
        "rows": rows,
    }


def _engine(opener: Callable[..., Backend], slots: int) -> NativeEngine:
    return NativeEngine(opener(slots=slots), now_ms=now_ms)


def _name(device: Any) -> str:
    import torch  # noqa: PLC0415  see above

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _options(parser: Parser) -> None:
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="warm decisions of each sort")
    parser.add_argument("--decisions", type=whole_number(N_MAX, 2), default=THROUGHPUT_N, help="for each concurrency")
    parser.add_argument("--at-once", type=whole_number(SLOTS_MAX), nargs="+", default=AT_ONCE, help="how many at once")
    parser.add_argument("--model", type=existing, help="a checkpoint folder or GGUF; left out: the embedded model")
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1")


def _run(asked: argparse.Namespace, say: Say) -> Report:
    with tempfile.TemporaryDirectory(prefix=".bench-") as folder:
        model = asked.model or embedded_model()
        return run(Path(folder), model, asked.device, asked.n, asked.decisions, asked.at_once, say)


def _show(report: Report) -> None:
    print(f"decisions a second: {report['ours_per_s']}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
