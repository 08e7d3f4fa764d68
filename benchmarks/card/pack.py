"""Pack what a machine with a card needs besides wheels: packets, a tokenizer, the shape of the embedded model.

`python -m sds.benchmarks.card.pack KIT` writes into an existing folder:

    packets.pickle    the packets that are measured, by sort: the card's machine has no flights to make them from
    tokenizer/        config.json, tokenizer.json, tokenizer_config.json of the embedded model, without weights
    weights.00, ...   with `--weights`: the embedded model's file in parts of 48 MB, to be copied one at a time
"""

from __future__ import annotations

import argparse
import pickle
import tempfile
from pathlib import Path

from sds.benchmarks.card.checkpoint import write_tokenizer
from sds.benchmarks.lib.packets import EARLIER, digits_packets, fixed_packets
from sds.kernel.decision.packet import DecisionPacket
from sds.models.catalog.catalog import embedded_model

N, N_MAX = 64, 500
PART_BYTES = 48_000_000
SORTS = {"fixed": fixed_packets, "digits": digits_packets}


def packets_of(folder: Path, count: int) -> dict[str, list[DecisionPacket]]:
    """Return EARLIER + `count` packets of each sort: the first EARLIER are decided before the measured ones."""
    return {sort: make(folder, count + EARLIER) for sort, make in SORTS.items()}


def write_parts(folder: Path, source: Path) -> None:
    with source.open("rb") as whole:
        for number, part in enumerate(iter(lambda: whole.read(PART_BYTES), b"")):
            (folder / f"weights.{number:02}").write_bytes(part)


def joined(folder: Path, into: Path) -> Path | None:
    """Join the parts of the embedded model's file into `into` and return it; None where the folder has none."""
    parts = sorted(folder.glob("weights.[0-9][0-9]"))
    if not parts:
        return None
    with into.open("wb") as whole:
        for part in parts:
            whole.write(part.read_bytes())
    return into


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m sds.benchmarks.card.pack", description="pack what a card needs")
    parser.add_argument("folder", type=Path, help="where to; it is there")
    parser.add_argument(
        "--n", type=int, choices=range(1, N_MAX + 1), default=N, metavar="N", help="packets of each sort"
    )
    parser.add_argument("--weights", action="store_true", help="the embedded model's own weights, too: 98 MB in parts")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix=".bench-") as folder:
        (asked.folder / "packets.pickle").write_bytes(pickle.dumps(packets_of(Path(folder), asked.n)))
    write_tokenizer(asked.folder / "tokenizer", embedded_model())
    if asked.weights:
        write_parts(asked.folder, embedded_model())


if __name__ == "__main__":
    main()
