"""Measure the hot path and the throughput on a CUDA device through transformers, in bfloat16: `sds bench gpu --json`.

    over_floor          reasoning of a warm decision over the bare passes that it needs, which are run again right after it
    exact_over_greedy   the exact distribution over whole alternatives, over the greedy one, on the same packets
    outlines_over_ours  Outlines on transformers with the same weights, over ours: medians of the same packets
    ours_per_s          decisions a second, by how many are asked for at once

Every model of `--shapes` is measured. Those that are no folder have random weights, drawn on the device: they decide at
random, in the time of trained ones. The packets are those of `sds bench peers`, after the 64 (`EARLIER`) before them in
the queue. Predicted before measuring: a pass takes at least as long as reading the weights once, at the rate at which the
device copies its memory, and as starting its kernels one by one. What runs out of memory or of `--minutes` is `left_out`.
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from sds.benchmarks.card.checkpoint import EMBEDDED, SHAPES, write_random, write_tokenizer
from sds.benchmarks.card.pack import joined, packets_of
from sds.benchmarks.lib.floor import Recorded
from sds.benchmarks.lib.measuring import (
    Parser,
    Report,
    Say,
    existing,
    machine,
    main,
    names,
    summary,
    versions,
    whole_number,
)
from sds.benchmarks.lib.packets import EARLIER, renewed
from sds.benchmarks.peer.drivers.serving import timed
from sds.benchmarks.peers import tasks_of
from sds.benchmarks.throughput import TOKENS_MAX, best_of_ours, in_rounds, ways_of_ours
from sds.decoding.errors import CHOICE_TOO_CLOSE
from sds.engines.factory import open_backend
from sds.engines.native import NativeEngine
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError, UsageError
from sds.models.catalog.catalog import embedded_model
from sds.models.protocol import CARD_SLOTS_MAX, Backend, BackendError
from sds.models.transformers_.facts import TRANSFORMERS

AT_ONCE = (1, 8, 64, 256)
N, N_MAX = 30, 500
OUTLINES_N = 8
OUTLINES_MASKS = ("outlines_core", "llguidance")
MINUTES, MINUTES_MAX = 9, 600
TIMEOUT_MS = 120_000
COPY_BYTES, COPIES = 1 << 28, 5
LAUNCHES = 1_000

Packets = dict[str, list[DecisionPacket]]


@dataclass(frozen=True, slots=True)
class Budget:
    """The time within which a measurement may begin. `ends_s`: by `time.monotonic`."""

    ends_s: float

    @property
    def left_s(self) -> float:
        return self.ends_s - time.monotonic()


def copy_bytes_per_s(device: Any) -> float:
    """Return the rate at which the device copies its memory, in bytes read and written a second: the best of COPIES."""
    import torch  # noqa: PLC0415  loaded when it is asked for

    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    once = partial(_seconds, partial(target.copy_, source), device)
    once()
    return 2 * COPY_BYTES / min(once() for _ in range(COPIES))


def launch_us(device: Any) -> float:
    """Return the time to start one kernel in microseconds, from LAUNCHES small ones in a row."""
    import torch  # noqa: PLC0415  see above

    few = torch.ones(8, device=device)

    def many() -> None:
        for _ in range(LAUNCHES):
            few.add_(1)

    _seconds(many, device)
    return 1e6 * min(_seconds(many, device) for _ in range(COPIES)) / LAUNCHES


def _seconds(call: Callable[[], object], device: Any) -> float:
    import torch  # noqa: PLC0415  see above

    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def floor(backend: Any, device: Any) -> dict[str, float]:
    """Return the least time of a pass: reading the weights once, and starting the kernels of one token one by one."""
    weights = backend.module.parameters()
    weights_bytes = sum(each.numel() * each.element_size() for each in weights)
    rate, kernels, launch = copy_bytes_per_s(device), _kernels(backend.module, device), launch_us(device)
    return {
        "memory_gb_per_s": round(rate / 1e9, 1),
        "weights_mb": round(weights_bytes / 1e6, 1),
        "pass_ms": round(1000 * weights_bytes / rate, 4),
        "kernels": kernels,
        "launch_us": round(launch, 2),
        "launches_ms": round(kernels * launch / 1000, 4),
    }


def _kernels(module: Any, device: Any) -> int:
    """Return the least number of kernels of one token: the operators that are no views take one kernel or more each.

    They are counted as they are dispatched: torch's profiler would slow down all later kernels of this process.
    """
    import torch  # noqa: PLC0415  see above
    from torch.utils._python_dispatch import TorchDispatchMode  # noqa: PLC0415  documented, with the underscore

    class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own initialiser is untyped
        made: int = 0

        def __torch_dispatch__(self, operator: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.made += not operator.is_view
            return operator(*args, **(kwargs or {}))

    counting: Any = Counting
    with torch.no_grad(), counting() as found:
        module(input_ids=torch.ones((1, 1), dtype=torch.long, device=device))
    return int(found.made)


def reasoning(backend: Backend, packets: Sequence[DecisionPacket]) -> dict[str, Any]:
    """Decide each packet greedily, run its passes again bare, and decide it exactly; the first EARLIER do not count."""
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
    """Return the time of one proposal, also of one that ends as CHOICE_TOO_CLOSE: random weights have many of these."""
    fresh = renewed(packet, TIMEOUT_MS)

    def propose() -> None:
        try:
            engine.propose(fresh, tokens_max=TOKENS_MAX)
        except ModelError as error:
            if error.reason_code != CHOICE_TOO_CLOSE:
                raise

    return timed(propose)[1]


def outlines(backend: Any, folder: Path, packets: Sequence[DecisionPacket], budget: Budget) -> dict[str, Any]:
    """Decide packets with Outlines, with each of its backends; return their times, and the number of violations."""
    from sds.benchmarks.peer.drivers.on_transformers import CachedModel, by_outlines_on, tokenizer_of  # noqa: PLC0415  torch is there

    results: dict[str, Any] = {}
    model, tasks = CachedModel(backend.module, tokenizer_of(folder)), tasks_of(packets, backend)
    attention = backend.module.config._attn_implementation  # noqa: SLF001  there is no other name for it
    for masks in OUTLINES_MASKS:
        if budget.left_s < 0:
            results[masks] = {"left_out": "out of time"}
            continue
        try:
            backend.module.set_attn_implementation("sdpa")
            decide = by_outlines_on(model, masks)
            decide(tasks[0].request)
            answers = [timed(partial(decide, task.request)) for task in tasks]
        except Exception as error:  # noqa: BLE001  whatever a peer does is its own result
            results[masks] = {"left_out": f"{type(error).__name__}: {error}".splitlines()[0]}
        else:
            outside = sum(not task.permits(said.text) for task, (said, _) in zip(tasks, answers, strict=True))
            results[masks] = {"ms": summary([ms for _, ms in answers]), "outside": outside}
        finally:
            backend.module.set_attn_implementation(attention)
    return results


def one_model(
    folder: Path, device: str, packets: Packets, at_once: Sequence[int], say: Say, budget: Budget
) -> dict[str, Any]:
    """Measure one checkpoint folder: latency over its floor, Outlines, decisions a second."""
    from sds.models.transformers_.loading import device_of  # noqa: PLC0415  torch is there, or nothing would have been opened

    opener = partial(open_backend, folder, library=TRANSFORMERS.name, device=device, dtype="bf16")
    with closing(cast("Any", opener())) as backend:
        where = device_of(device)
        least = floor(backend, where)
        say(
            f"{folder.name}: a pass cannot be faster than {least['pass_ms']} ms, nor its kernels than {least['launches_ms']} ms"
        )
        warm = {sort: reasoning(backend, of_sort) for sort, of_sort in packets.items()}
        for sort, found in warm.items():
            found["floor_ms"] = round(least["pass_ms"] * len(found["tokens_of_passes"]), 4)
            found["outlines"] = outlines(backend, folder, packets[sort][EARLIER:][:OUTLINES_N], budget)
            say(f"{sort}: {found}")
        model = {"name": folder.name, "sha256": backend.fingerprint}
    rows = list(_rates(opener, packets, at_once, say, budget))
    by_count = {str(row["at_once"]): row["ours"] for row in rows if "ours" in row}
    return {
        "model": model,
        "predicted": least,
        "over_floor": {sort: found["over_floor"] for sort, found in warm.items()},
        "exact_over_greedy": {sort: found["exact_over_greedy"] for sort, found in warm.items()},
        "outlines_over_ours": {sort: _over(found) for sort, found in warm.items()},
        "warm": warm,
        "ours_per_s": {count: found["per_s"] for count, found in by_count.items()},
        "too_close": {count: found["became"].get(CHOICE_TOO_CLOSE, 0) for count, found in by_count.items()},
        "rows": rows,
    }


def _over(warm: dict[str, Any]) -> dict[str, float]:
    ours = warm["reason_ms"]["p50"]
    return {masks: round(of["ms"]["p50"] / ours, 2) for masks, of in warm["outlines"].items() if "ms" in of}


def _rates(
    opener: Callable[..., Backend], packets: Packets, at_once: Sequence[int], say: Say, budget: Budget
) -> Iterator[dict[str, Any]]:
    """Yield decisions a second by how many are asked for at once, with one slot and with as many slots."""
    mixed = [packet for pair in zip(*packets.values(), strict=True) for packet in pair]
    earlier, asked = mixed[:EARLIER], mixed[EARLIER:]
    for many in sorted(set(at_once)):
        if budget.left_s < 0:
            yield {"at_once": many, "left_out": "out of time"}
            continue
        engines = {f"{slots} slots": partial(_engine, opener, slots) for slots in sorted({1, many})}
        try:
            row = {"at_once": many, "ours": best_of_ours(in_rounds(ways_of_ours(engines, asked, earlier, many), 1))}
        except BackendError as error:
            row = {"at_once": many, "left_out": str(error)}
        say(str(row))
        yield row


def _engine(opener: Callable[..., Backend], slots: int) -> NativeEngine:
    return NativeEngine(opener(slots=slots), now_ms=now_ms)


def run(
    models: Sequence[Callable[[Path], Path]],
    packets: Packets,
    device: str,
    at_once: Sequence[int],
    say: Say,
    budget: Budget,
) -> Report:
    """Measure every model on one device of torch. Raises UsageError where none was measured."""
    measured: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for make in models:
        with tempfile.TemporaryDirectory(prefix="sds-card-") as scratch:
            folder = make(Path(scratch))
            if budget.left_s < 0:
                left_out[folder.name] = "out of time"
                continue
            try:
                measured.append(one_model(folder, device, packets, at_once, say, budget))
            except (BackendError, ModelError) as error:
                if len(models) == 1:
                    raise
                left_out[folder.name] = str(error)
    if not measured:
        raise UsageError(f"nothing was measured: {left_out}")
    return {
        "benchmark": "gpu",
        **machine(),
        "device": _name(device),
        "dtype": "bf16",
        "n": len(packets["fixed"]) - EARLIER,
        "versions": versions("torch", TRANSFORMERS.distribution, "outlines"),
        "models": measured,
        "left_out": left_out,
    }


def _name(device: str) -> str:
    import torch  # noqa: PLC0415  see above

    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


def _options(parser: Parser) -> None:
    parser.add_argument("--n", type=whole_number(N_MAX), default=N, help="warm decisions of each sort")
    parser.add_argument(
        "--at-once", type=whole_number(CARD_SLOTS_MAX), nargs="+", default=AT_ONCE, help="how many at once"
    )
    parser.add_argument(
        "--model", type=existing, help="a checkpoint folder of one's own, or a GGUF; left out: --shapes"
    )
    parser.add_argument("--shapes", type=names(list(SHAPES)), default=[EMBEDDED], help=", ".join(SHAPES))
    parser.add_argument("--kit", type=existing, help="what `benchmarks/card/kit.sh` packed: packets and a tokenizer")
    parser.add_argument("--device", default="cuda", help="cuda, or cuda:1")
    parser.add_argument(
        "--minutes", type=whole_number(MINUTES_MAX), default=MINUTES, help="after which nothing new begins"
    )


def _run(asked: argparse.Namespace, say: Say) -> Report:
    from sds.models.transformers_.loading import device_of  # noqa: PLC0415  so that the help does without torch

    device_of(asked.device)  # refused before packets are made
    budget = Budget(time.monotonic() + 60 * asked.minutes)
    with _kit(asked.kit, asked.n) as (kit, packets):
        makers: list[Callable[[Path], Path]]
        if asked.model:
            makers = [lambda _scratch: asked.model]
        else:
            makers = [partial(_made, name, kit, asked.device, say) for name in asked.shapes]
        return run(makers, packets, asked.device, asked.at_once, say, budget)


@contextmanager
def _kit(packed: Path | None, n: int) -> Iterator[tuple[Path, Packets]]:
    """Yield a folder with a tokenizer, and packets: those of a kit, or made here from the flights."""
    if packed:
        made: Packets = pickle.loads((packed / "packets.pickle").read_bytes())  # noqa: S301  from whoever packed the kit
        yield packed, {sort: of_sort[: EARLIER + n] for sort, of_sort in made.items()}
        return
    with tempfile.TemporaryDirectory(prefix=".bench-") as folder:
        write_tokenizer(Path(folder) / "tokenizer", embedded_model())
        yield Path(folder), packets_of(Path(folder), n)


def _made(name: str, kit: Path, device: str, say: Say, scratch: Path) -> Path:
    """Return a model of this shape: for EMBEDDED its own file where it is at hand, else random weights."""
    if name == EMBEDDED and (whole := joined(kit, scratch / f"{name}.gguf") or _installed()):
        return whole
    say(f"{name}: random weights")
    return write_random(scratch / name, SHAPES[name], kit / "tokenizer", device)


def _installed() -> Path | None:
    try:
        return embedded_model()
    except BackendError:
        return None


def _show(report: Report) -> None:
    for of in report["models"]:
        print(
            f"{of['model']['name']}: decisions a second: {of['ours_per_s']}; Outlines over ours: {of['outlines_over_ours']}"
        )


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
