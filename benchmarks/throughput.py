"""Measure decisions a second with 1, 2, 4, 8 and 16 asked for at once: `sds bench throughput --json`.

    ours_per_s        by concurrency, the best of four ways: one slot with a queue; as many slots as are asked for, which
                      share passes; replicas, an engine a core; replicas with some slots each, half as many in all as are
                      asked for, so that those waiting are ready when a slot is free
    best_peer_per_s   by concurrency: the best of the peers, as one process with all cores or one process a core

All ways are measured in `--rounds` rounds, each in another order: a virtual processor's speed changes by the minute. A way's
figures are those of its median round; `each_per_s` has all rounds, `became` the outcomes of all packets.

The packets are those of `sds bench peers`, half of them of each kind, each decided once, after the 64 (`EARLIER`) before them
in the queue. Peers keep only the beginning of the last prompt: as many of the 64 as are asked for at once warm them up.
A choice that the other rows of its batch could have turned is an escalation: counted as `too_close`, and as a decision.
What failed or ran out of time is no decision. `--only` names the peers to ask; `tried` has the figures of every way.
Predicted before measuring: the most decisions a second, by concurrency, if only the cases' own tokens had to be read, those
of all cases at once in one pass (`predicted`, from measured rates of the device). A case's own tokens must be read however
many are asked for, and nothing can share that. Shared are the passes of a few tokens after it and, where cases share a
call, the weights; so on a processor the rate grows by less than a factor of two. In llama.cpp shared passes are short and
attend row by row, so that the batch does not change any bit: one slot, or an engine a core, can be quicker.
"""

from __future__ import annotations

import argparse
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from sds.benchmarks.lib.floor import TIMEOUT_S, Device, device
from sds.benchmarks.lib.measuring import Parser, Report, Say, machine, main, names, versions, whole_number
from sds.benchmarks.lib.packets import EARLIER, digits_packets, fixed_packets, permits, renewed
from sds.benchmarks.lib.process import PeerProcess
from sds.benchmarks.lib.weights import Weights, add_weights, vocabulary, weights_of
from sds.benchmarks.peer.contenders import OVERLAYS, PEERS, Contender
from sds.benchmarks.peer.outcomes import Task
from sds.benchmarks.peers import tasks_of
from sds.decoding.errors import CHOICE_TOO_CLOSE
from sds.engines.factory import cores, open_engine, open_replicas
from sds.engines.protocol import Engine
from sds.host.clock import now_ms
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.errors import ModelError, UsageError
from sds.models.openvino_.facts import OPENVINO
from sds.models.protocol import SLOTS_MAX

AT_ONCE = (1, 2, 4, 8, 16)
N = 32
N_MAX = 1_000
ROUNDS_MAX = 99
TOKENS_MAX = 2_048
DECIDED = ("inside", "outside", CHOICE_TOO_CLOSE)  # nothing else is a decision, however quickly it fails
SERVING = ("guidance-llamacpp", "llamacpp-grammar", "outlines-llamacpp-llguidance")


Found = dict[str, Any]  # the figures of one way
Ways = Mapping[str, Callable[[], Found]]


def in_rounds(ways: Ways, rounds: int) -> dict[str, Found]:
    """Measure each way once a round; return each one's median round, with all its rates, and the outcomes of all packets."""
    found: dict[str, list[Found]] = {name: [] for name in ways}
    for number in range(rounds):
        turn = list(ways)
        Random(number).shuffle(turn)  # noqa: S311  by chance, and the same in every run
        for name in turn:
            found[name].append(ways[name]())
    return {name: _together(each) for name, each in found.items()}


def _together(each: Sequence[Found]) -> Found:
    missing = next((found for found in each if found["per_s"] is None), None)
    if missing is not None:
        return missing
    middle = sorted(each, key=lambda found: found["per_s"])[(len(each) - 1) // 2]
    became = sum((Counter(found["became"]) for found in each), Counter[str]())
    notes = next((found["notes"] for found in each if found.get("notes")), "")
    noted = {"notes": notes} if "notes" in middle else {}
    return {**middle, **noted, "became": dict(became), "each_per_s": [found["per_s"] for found in each]}


def best_of_ours(tried: Mapping[str, Found]) -> Found:
    """Return the figures of the best way, with those of all."""
    # a way that escalates for other rows of a batch does less work: it is the best only where all ways do
    whole = {name: found for name, found in tried.items() if CHOICE_TOO_CLOSE not in found["became"]}
    name, best = max((whole or tried).items(), key=lambda found: found[1]["per_s"])
    return {"best": name, **best, "tried": dict(tried)}


def ways_of_ours(
    openers: Mapping[str, Callable[[], Engine]],
    packets: Sequence[DecisionPacket],
    earlier: Sequence[DecisionPacket],
    at_once: int,
) -> Ways:
    """Return the ways to decide packets with these engines, `at_once` at a time."""
    return {name: partial(_one_way, opener, packets, earlier, at_once) for name, opener in openers.items()}


def _one_way(
    opener: Callable[[], Engine], packets: Sequence[DecisionPacket], earlier: Sequence[DecisionPacket], at_once: int
) -> Found:
    """Decide the earlier packets, then measure the others, `at_once` at a time."""
    with closing(opener()) as engine:

        def decide(packet: DecisionPacket) -> str:
            try:
                data, _ = engine.propose(renewed(packet, int(TIMEOUT_S * 1000)), tokens_max=TOKENS_MAX)
            except ModelError as error:
                return error.reason_code
            return "inside" if permits(packet, data) else "outside"

        return _rate(decide, packets, earlier, at_once)


def on_this_processor(weights: Weights, at_once: int) -> dict[str, Callable[[], Engine]]:
    """Return how to open an engine in each way: one slot, `at_once` slots, an engine a core, these with slots."""
    how: dict[str, Any] = {"now_ms": now_ms, "as_is": True, "library": weights.library, "dtype": weights.dtype}
    one = partial(open_engine, weights.path, **how)
    ways: dict[str, Callable[[], Engine]] = {"1 slot": one}
    if at_once > 1:
        ways[f"{at_once} slots"] = partial(one, slots=at_once)
    if (replicas := min(at_once, cores())) > 1:
        ways[f"{replicas} replicas"] = several = partial(open_replicas, weights.path, replicas=replicas, **how)
        if (slots := at_once // (2 * replicas)) > 1:
            ways[f"{replicas} replicas of {slots} slots"] = partial(several, slots=slots)
    return ways


def theirs(
    contender: Contender,
    folder: Path,
    model: Path,
    tasks: Sequence[Task],
    earlier: Sequence[Task],
    at_once: int,
    *,
    processes: int,
    overlays: Path = OVERLAYS,
) -> Found:
    """Measure one peer as so many processes, which take tasks from one queue; each runs on its share of the cores."""
    threads = max(1, cores() // processes)
    with ExitStack() as opened:
        logs = [folder / f"{contender.name}-{processes}-{number}.log" for number in range(processes)]
        started = [contender.start(opened, model, threads, log=log, overlays=overlays) for log in logs]
        if why := next(filter(None, (process.missing or process.failed for process in started)), ""):
            return {"per_s": None, "notes": why}
        free, failing, living, notes = queue.SimpleQueue[PeerProcess](), threading.Lock(), len(started), ""
        for process in started:
            free.put(process)

        def decide(task: Task) -> str:
            nonlocal living, notes
            process = free.get()
            answer = process.ask(task.request, timeout_s=TIMEOUT_S)
            notes = notes or answer.get("error", "")
            with failing:  # a process that failed gets no more tasks, unless it is the last: somebody has to fail them
                leaves = bool(process.failed) and living > 1
                living -= leaves
            if not leaves:
                free.put(process)
            return "error" if "error" in answer else "inside" if task.permits(answer["text"]) else "outside"

        rate = _rate(decide, tasks, earlier[:at_once], at_once)
        return {**rate, "notes": notes, "versions": started[0].versions}


def _rate(decide: Callable[[Any], str], work: Sequence[Any], earlier: Sequence[Any], at_once: int) -> Found:
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(decide, earlier))
        began = time.perf_counter()
        became = Counter(pool.map(decide, work))
        took_s = time.perf_counter() - began
    decided = sum(became[how] for how in DECIDED)
    return {"per_s": round(decided / took_s, 2), "n": len(work), "became": dict(became)}


def ways_of_peers(
    folder: Path,
    model: Path,
    tasks: Sequence[Task],
    earlier: Sequence[Task],
    at_once: int,
    only: Sequence[str],
    overlays: Path,
) -> Ways:
    """Return the ways to ask each peer: as one process, and as one process a core."""
    return {
        f"{contender.name}, {count} process{'es' * (count > 1)}": partial(
            theirs, contender, folder, model, tasks, earlier, at_once, processes=count, overlays=overlays
        )
        for contender in PEERS
        if contender.name in only
        for count in sorted({1, min(at_once, cores())})
    }


def best_peer(tried: Mapping[str, Found]) -> Found:
    """Return the figures of the best peer, with those of all. Raises UsageError where none decided anything."""
    name, best = max(tried.items(), key=lambda found: found[1]["per_s"] or 0.0)
    if not best["per_s"]:
        hint = "make peers" if best["per_s"] is None else ""
        raise UsageError(f"none of the peers runs: {name}: {best['notes'] or 'it made no decisions'}", hint=hint)
    return {"best": name, **best, "tried": dict(tried)}


def mixed_packets(folder: Path, n: int) -> tuple[list[DecisionPacket], list[DecisionPacket]]:
    """Return `n` packets, or `n - 1` where it is odd, and the EARLIER before them: half of each kind, in two runs."""
    before, count = EARLIER // 2, EARLIER // 2 + n // 2
    fixed, digits = fixed_packets(folder, count), digits_packets(folder, count)
    return [*fixed[before:], *digits[before:]], [*fixed[:before], *digits[:before]]


def run(
    folder: Path,
    weights: Weights,
    n: int,
    at_once: Sequence[int],
    only: Sequence[str],
    say: Say,
    *,
    rounds: int = 1,
    overlays: Path = OVERLAYS,
) -> Report:
    packets, earlier = mixed_packets(folder, n)
    with vocabulary(weights.path) as words:
        tasks, before = tasks_of(packets, words), tasks_of(earlier, words)
    counts = sorted(set(at_once))
    most = predicted(device(weights), weights.size(), tasks, counts)
    say(f"predicted: {most}")
    rows: list[dict[str, Any]] = []
    for count in counts:
        own = ways_of_ours(on_this_processor(weights, count), packets, earlier, count)
        others = ways_of_peers(folder, weights.path, tasks, before, count, only, overlays)
        rows.append({"at_once": count, **_compared(own, others, rounds)})
        say(str(rows[-1]))
    return _document(weights, len(packets), rounds, most, rows)


def _compared(own: Ways, others: Ways, rounds: int) -> dict[str, Found]:
    tried = in_rounds({**own, **others}, rounds)
    return {
        "ours": best_of_ours({name: tried[name] for name in own}),
        "peer": best_peer({name: tried[name] for name in others}),
    }


def _document(weights: Weights, n: int, rounds: int, most: dict[str, Any], rows: Sequence[dict[str, Any]]) -> Report:
    ours_per_s = {str(row["at_once"]): row["ours"]["per_s"] for row in rows}
    return {
        "benchmark": "throughput",
        **machine(),
        "n": n,
        "rounds": rounds,
        "model": weights.facts(),
        "versions": {
            **versions("llama-cpp-python", OPENVINO.distribution),
            **{name: number for row in rows for name, number in row["peer"]["versions"].items()},
        },
        "predicted": most,
        "of_predicted": {count: round(per_s / most["per_s"][count], 2) for count, per_s in ours_per_s.items()},
        "ours_per_s": ours_per_s,
        "best_peer_per_s": {str(row["at_once"]): row["peer"]["per_s"] for row in rows},
        "speedup": {str(row["at_once"]): round(row["ours"]["per_s"] / row["peer"]["per_s"], 2) for row in rows},
        "too_close": {str(row["at_once"]): row["ours"]["became"].get(CHOICE_TOO_CLOSE, 0) for row in rows},
        "rows": rows,
    }


def predicted(rates: Device, size: tuple[int, int], tasks: Sequence[Task], counts: Sequence[int]) -> dict[str, Any]:
    """Return the most decisions a second, by concurrency. `size`: the weights' bytes and parameters."""
    own = fmean(len(task.request["tokens"]) - task.request["tokens_kept"] for task in tasks)
    per_s = {str(count): round(1000 * count / rates.pass_ms(*size, round(own * count)), 1) for count in counts}
    return {**rates.facts, "case_tokens": round(own, 1), "per_s": per_s}


def _options(parser: Parser) -> None:
    parser.add_argument("--n", type=whole_number(N_MAX, 2), default=N, help="decisions for each concurrency")
    parser.add_argument("--rounds", type=whole_number(ROUNDS_MAX), default=1, help="how often everybody is asked")
    parser.add_argument("--at-once", type=whole_number(SLOTS_MAX), nargs="+", default=AT_ONCE, help="how many at once")
    parser.add_argument("--only", type=names(SERVING), default=list(SERVING), help=f"peers of: {', '.join(SERVING)}")
    parser.add_argument("--overlays", type=Path, default=OVERLAYS, help="where peers' own versions of libraries lie")
    add_weights(parser)


def _run(asked: argparse.Namespace, say: Say) -> Report:
    with tempfile.TemporaryDirectory(prefix=".bench-") as folder:
        weights, how = weights_of(asked), {"rounds": asked.rounds, "overlays": asked.overlays}
        return run(Path(folder), weights, asked.n, asked.at_once, asked.only, say, **how)


def _show(report: Report) -> None:
    print(f"ours a second: {report['ours_per_s']}; the best peer: {report['best_peer_per_s']}")


if __name__ == "__main__":
    main(__doc__, _options, _run, _show)
