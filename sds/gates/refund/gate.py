"""Setting the refund gate up: the airline's database, the queue of claims, the payment rail, the contract.

Everything lives in one folder. The airline and the queue are made once from a seed; later runs go on where the
last one stopped.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

from sds.engines.protocol import Engine
from sds.gate import Gate
from sds.gates.refund.rail.client import RailProcess
from sds.gates.refund.source import TicketSource
from sds.gates.refund.world.airline import write_airline
from sds.gates.refund.world.claims import Cause
from sds.gates.refund.world.flights import load_flights
from sds.gates.refund.world.tickets import make_world
from sds.host import paths as places
from sds.host.keys import KEY_BYTES, read_ring
from sds.kernel.context.reader import RecordedContext
from sds.kernel.contract.schema import Contract, load_contract
from sds.kernel.envelope.state import Fields
from sds.kernel.errors import NOT_AS_WRITTEN, StateError
from sds.kernel.executor.protocol import NoExecutor, Signer
from sds.kernel.flow.kernel import Kernel
from sds.kernel.registry import registry
from sds.kernel.storage.private_files import make_private_file, tighten
from sds.kernel.storage.store import Store
from sds.pipeline import Reasoned

CONTRACT = Path(__file__).with_name("contract.yaml")
CHECKSUM = Path(__file__).with_name("contract.yaml.sha256")
SEED = 261
CLAIMS = 10_000


@dataclass(frozen=True, slots=True)
class QueuedClaim:
    """One claim waiting. `cause` is latent: for measuring agreement, never shown to model or kernel."""

    event: dict[str, str]
    cause: Cause


def airline_path(folder: Path) -> Path:
    return folder / "airline.db"


def ensure_world(folder: Path, *, claims: int = CLAIMS, seed: int = SEED) -> None:
    """Make the airline and the queue of claims unless they are there. Whoever comes first makes them for all."""
    if airline_path(folder).exists():
        _tighten(folder)
        return
    places.make_private(folder)
    world = make_world(load_flights(), claims, Random(seed))  # noqa: S311  a reproducible demo, not a secret
    queue = [{**c.event, "cause": c.cause.value} for c in world.claims]
    try:
        with TemporaryDirectory(dir=folder, prefix="world-") as made:
            fresh = Path(made)
            make_private_file(fresh / "claims.jsonl")
            (fresh / "claims.jsonl").write_text("".join(json.dumps(line) + "\n" for line in queue), encoding="utf-8")
            write_airline(airline_path(fresh), world)
            (fresh / "claims.jsonl").replace(folder / "claims.jsonl")
            with suppress(FileExistsError):  # another process was first, and may be using its file already
                airline_path(folder).hardlink_to(airline_path(fresh))
    except OSError as error:
        raise StateError(f"`{folder}` cannot be filled: {(error.strerror or 'unknown cause').lower()}") from error


def _tighten(folder: Path) -> None:
    """Take the rights to the demo's own files from others, as every file beside a record: an older version left them."""
    try:
        for name in (
            "claims.jsonl",
            *(f"{name}.db{end}" for name in ("airline", "rail") for end in ("", "-wal", "-shm")),
        ):
            tighten(folder / name)
    except OSError as error:
        raise StateError(f"`{folder}` cannot be made private: {(error.strerror or 'unknown cause').lower()}") from error


def read_queue(folder: Path) -> list[QueuedClaim]:
    """Return every generated claim in order."""
    try:
        lines = (folder / "claims.jsonl").read_text(encoding="utf-8").splitlines()
        return [_queued(json.loads(line)) for line in lines]
    except (OSError, *NOT_AS_WRITTEN) as error:
        raise StateError(f"`{folder / 'claims.jsonl'}` cannot be read", hint="sds run refund --reset") from error


def _queued(line: dict[str, str]) -> QueuedClaim:
    event = {name: line[name] for name in ("claim_id", "ticket_id", "claim_text")}
    return QueuedClaim(event, Cause(line["cause"]))


def sample_reads(folder: Path, limit: int) -> list[Fields]:
    """Return the state of the first tickets that are claimed for, as the gate reads it."""
    ensure_world(folder)
    with closing(TicketSource(airline_path(folder))) as source:
        keys = dict.fromkeys(claim.event["ticket_id"] for claim in read_queue(folder))
        reads = (source.read(key) for key in islice(keys, limit))
        return [read.fields for read in reads if read is not None]


def load_refund_contract() -> Contract:
    """Load the contract this package was released with, checked against its checksum."""
    return load_contract(CONTRACT, checksum=CHECKSUM.read_text(encoding="ascii").split()[0])


@contextmanager
def preview_kernel(folder: Path) -> Iterator[Kernel]:
    """Open a kernel that can only look: no model, no rail, and a key that signs nothing. It records nothing."""
    contract = load_refund_contract()
    ensure_world(folder)
    with ExitStack() as opened:
        store = _store_to_look_at(folder, contract, opened)
        source = TicketSource(airline_path(folder))
        opened.callback(source.close)
        signer = Signer(secrets.token_bytes(KEY_BYTES))
        context = RecordedContext(store, contract)
        yield Kernel(contract, store, source, NoExecutor(), signer, now_ms=places.now_ms, context=context)


def _store_to_look_at(folder: Path, contract: Contract, opened: ExitStack) -> Store:
    """Return the record if there is one that knows the agent; else an empty one, gone when it is closed."""
    if places.decisions_path(folder).exists():
        store = places.open_record(folder)
        opened.callback(store.close)
        if store.locked and places.key_path(folder).exists():
            read_ring(places.key_path(folder))  # raises what is wrong with it: texts are looked at
        if registry.lookup(store, contract.agent_id) is not None:
            return store
    empty = Store(places.decisions_path(Path(opened.enter_context(TemporaryDirectory()))))
    opened.callback(empty.close)
    registry.register(empty, contract, by="registry", now_ms=places.now_ms())
    return empty


@contextmanager
def recovery_kernel(folder: Path) -> Iterator[Kernel]:
    """Open a kernel with its tickets and its payment rail but without a model: to learn what became of orders."""
    contract = load_refund_contract()
    with ExitStack() as opened:
        store = places.open_record(folder)
        opened.callback(store.close)
        signer = places.signer(folder)
        places.refuse_altered(folder, store)
        source = TicketSource(airline_path(folder))
        opened.callback(source.close)
        rail = opened.enter_context(RailProcess(folder / "rail.db"))
        executor = rail.executor(source.version)
        context = RecordedContext(store, contract)
        yield Kernel(contract, store, source, executor, signer, now_ms=places.now_ms, context=context)


def open_refund(
    folder: Path,
    *,
    model: Path | None = None,
    engine: Engine | None = None,
    on_reasoned: Reasoned | None = None,
    with_rail: Callable[[RailProcess], object] = lambda _: None,
) -> Gate:
    """Open the refund gate in `folder`: it starts the payment rail's process and ends it when the gate is closed."""
    contract = load_refund_contract()
    ensure_world(folder)
    with ExitStack() as opened:
        source = TicketSource(airline_path(folder))
        opened.callback(source.close)
        rail = opened.enter_context(RailProcess(folder / "rail.db"))
        with_rail(rail)
        gate = Gate(
            contract,
            source,
            rail.executor(source.version),
            folder=folder,
            model=model,
            engine=engine,
            on_reasoned=on_reasoned,
        )
        gate.on_close(opened.pop_all().close)
    return gate
