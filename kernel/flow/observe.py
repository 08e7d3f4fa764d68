"""One reading of the world (DIR 4.1): live state, less what is reserved, and everything else an envelope depends on. And
one reading of a flow: all that its end depends on, and what it has had rejected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import accumulate, pairwise

from sds.kernel.canonical import in_words, one_line
from sds.kernel.contract.compiler import Rules, well_typed
from sds.kernel.contract.schema import Contract
from sds.kernel.decision import phrases
from sds.kernel.decision.context import ContextReader
from sds.kernel.decision.dim import AuthorityState
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState, standing_notes
from sds.kernel.envelope.state import StateRead, StateSource, Value
from sds.kernel.errors import ENDINGS, StoreError
from sds.kernel.executor.breaker import Breaker
from sds.kernel.registry import authority as authorities
from sds.kernel.registry import reservations, spend
from sds.kernel.registry.authority import Authority
from sds.kernel.registry.reservations import Usage
from sds.kernel.registry.spend import Totals
from sds.kernel.storage.ledger import GENESIS, Head
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import ATTEMPT, Texts


class Observer:
    """Reads the world for one gate. Changes nothing."""

    def __init__(
        self, contract: Contract, store: Store, source: StateSource, context: ContextReader, rules: Rules
    ) -> None:
        self._contract, self._contract_hash = contract, contract.hash
        self._store, self._source, self._context, self._rules = store, source, context, rules
        self._effective_ms = int(datetime.fromisoformat(contract.effective_from).replace(tzinfo=UTC).timestamp() * 1000)

    def observe(
        self, key: str, now_ms: int, *, dfid: str = "", without: str = "", seen: Seen | None = None
    ) -> LiveState:
        """Read live state, reservations, spend limits, artifacts and authority.

        A foreign source may return anything: a field that is not of its declared type is left out, and `notes` say so. The
        epochs of resources are read before the state, so that the reserving transaction notices what is reserved in
        between. That transaction also reads authority again. An order in flight is not reserved again, so its authority is
        read here.

        `dfid`: the flow this is for; "" stands for one that would be created now. `without`: an order in flight that is
        counted as if it had taken nothing. `seen`: what the record says of agent, key and flow, where that has been read
        already.
        """
        if seen is None:
            counters = spend.counters_for_anyone(self._contract, now_ms)
            seen = standing(self._store, self._contract, self._contract.agent_id, key, dfid, counters)
        authority, usage = seen.authority, seen.usage
        own = reservations.of_order(self._store, without) if without else {}
        drawn = {
            path: amount - own.get(reservations.resource(self._contract, key, path), 0)
            for path, amount in usage.drawn.items()
        }
        fields, version, notes = self._net_state(key, drawn)
        spending = spend.scopes(self._contract, fields, now_ms)
        artifacts, faults = self._context.artifacts()
        if without:
            authority = authorities.authority_now(self._store, self._contract.agent_id, dfid)
        situation = EnvelopeInputs(
            fields=fields,
            agent_active=authority.active and authority.contract_hash == self._contract_hash,
            in_effect=now_ms >= self._effective_ms,
            halted=authority.halted,
            spend_left=spend.left(self._store, self._contract, spending, seen.totals, without=without),
            artifacts=artifacts,
            context_whole=not faults,
        )
        notes += [*standing_notes(situation, self._contract.effective_from), *faults]
        return LiveState(situation, version, usage.epochs, authority.contract_hash, tuple(notes))

    def with_memory(self, key: str, now_ms: int, *, dfid: str) -> tuple[LiveState, str]:
        """Return one reading, and the earlier decisions as the model reads them; when these cannot be read, only the human
        is left.
        """
        memory, unread = "", ""
        try:
            memory = self._context.memory(key, now_ms)
        except Exception as error:  # noqa: BLE001  rows and a tokenizer that are not as they should be: a human decides
            unread = one_line(f"memory cannot be read: {in_words(error)}", 200)
        live = self.observe(key, now_ms, dfid=dfid)
        if unread:
            live = replace(live, situation=replace(live.situation, context_whole=False), notes=(*live.notes, unread))
        return live, memory

    def _net_state(self, key: str, drawn: Mapping[str, int]) -> tuple[dict[str, Value], str, list[str]]:
        """Return the declared fields less what is drawn, the source's version of them, and what is wrong with them."""
        read, notes = self._read(key)
        if read is None:
            return {}, "", notes
        net = _subtracted({spec.path: read.fields.get(spec.path) for spec in self._rules.fields}, drawn)
        wrong = self._rules.faults(net)
        return (well_typed(self._rules.fields, net) if wrong else net), read.version, notes + wrong

    def _read(self, key: str) -> tuple[StateRead | None, list[str]]:
        """Read live state. State that cannot be read counts as absent; the notes say why."""
        try:
            read = self._source.read(key)
            if read is None:
                return None, ["there is no state under this key"]
            found: object = read
            if not isinstance(found, StateRead) or not isinstance(found.version, str):
                return None, ["state cannot be read: the source returned no StateRead whose version is text"]
            version = str.encode(read.version).decode()
            if "\0" in version:  # PostgreSQL keeps no such text
                return None, ["state cannot be read: its version has the character U+0000"]
            return StateRead(dict(read.fields), version), []
        except ENDINGS:
            raise
        except BaseException as error:  # noqa: BLE001  a foreign source may raise anything, even a cancelled task
            return None, [one_line(f"state cannot be read: {in_words(error)}", 200)]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one statement has read: an agent's authority, usage of one key, a flow's attempts, totals of spend counters."""

    authority: Authority
    usage: Usage
    tries: int = 0
    totals: Totals | None = None


def authority_state(store: Store, packet: DecisionPacket, seen: Seen) -> AuthorityState:
    """Return what registry and store say of the packet's flow at the moment of judgement."""
    authority = seen.authority
    under = authority.contract_hash == packet.contract_hash
    before, spent = rejected(store, packet.dfid) if seen.tries else (frozenset(), 0)
    return AuthorityState(
        agent_active=authority.active,
        halted=authority.halted,
        contract_hash=authority.contract_hash,
        # under another contract there is no mission to compare: gate 2 objects, and the agent may still escalate
        mission_hash=authority.mission_hash if under else packet.mission_hash,
        held=seen.usage.held,
        tokens_spent=spent,
        rejected=before,
    )


def standing(
    store: Store, contract: Contract, agent_id: str, key: str, dfid: str, counters: tuple[str, ...] = ()
) -> Seen:
    """Return a `Seen`, read in one statement. `counters`: the spend counters that will be needed, as far as known yet."""
    paths = reservations.named(contract, key)
    tables, of = authorities.bound_to(agent_id, dfid)
    rows = store.rows(
        f"SELECT {authorities.COLUMNS}, (SELECT count(*) FROM attempts t WHERE t.dfid = ?), {reservations.COLUMNS},"
        f" {spend.columns(counters)} {tables} LEFT JOIN ledger l ON l.idx = (SELECT max(idx) FROM ledger)"
        f" LEFT JOIN resources u ON {reservations.OF_KEY} WHERE a.agent_id = ?",
        (dfid, *counters, of, *reservations.bounds(contract, key), agent_id),
    )
    if not rows:
        return Seen(Authority(), reservations.usage(store, contract, key))
    usage = reservations.usage_in(paths, [row[5:9] for row in rows])
    return Seen(authorities.authority_in(rows[0][:4]), usage, rows[0][4], (counters, rows[0][9:]))


def _subtracted(fields: Mapping[str, Value | None], drawn: Mapping[str, int]) -> dict[str, Value]:
    """Return the fields that have a value, each less what is drawn from it."""
    net = {path: value for path, value in fields.items() if value is not None}
    for path, amount in drawn.items():
        value = net.get(path)
        if amount and type(value) is int:
            net[path] = value - amount
    return net


# The columns of a flow that never change.
FLOW = (
    "dfid, agent_id, trigger_event, parent_dfid, gate, event_id, contract_hash, restarts, created_at_ms, lease_until_ms"
)
_OPEN = f"""
SELECT {", ".join(f"b.{column}" for column in FLOW.split(", "))},
       b.gate, b.event_id, k.wrapped, x.erased_at_ms, x.reason, {authorities.COLUMNS}, o.failures, o.opened_at_ms, o.probe_at_ms,
       w.monitors, w.body, l.idx, l.entry_hash, (SELECT count(*) FROM attempts t WHERE t.dfid = b.dfid), d.deadline_ms,
       a.rejections, EXISTS (SELECT 1 FROM execution_log e WHERE e.idempotency_key = ?), {reservations.COLUMNS}, {{totals}}
FROM decision_flows b {authorities.JOINS}
LEFT JOIN agents a ON a.agent_id = ?
LEFT JOIN flow_deadlines d ON d.dfid = b.dfid
LEFT JOIN case_keys k ON k.gate = b.gate AND k.event_id = b.event_id
LEFT JOIN erasures x ON x.gate = b.gate AND x.event_id = b.event_id
LEFT JOIN executor_breakers o ON o.gate = b.gate
LEFT JOIN monitor_windows w ON w.agent_id = a.agent_id AND w.stream = 'decisions'
LEFT JOIN ledger l ON l.idx = (SELECT max(idx) FROM ledger)
LEFT JOIN resources u ON {reservations.OF_KEY}
WHERE b.dfid = ? AND b.state = 'ACTIVE'
"""
_PARTS = tuple(pairwise(accumulate((10, 5, 4, 3, 2, 2, 4), initial=0)))  # the columns of `_OPEN` up to `ordered`
_RESOURCE, _TOTALS = slice(30, 34), slice(34, None)
_REJECTED_SO_FAR = """
SELECT a.proposal, a.reasons FROM decision_flows f JOIN attempts a ON a.dfid = f.dfid
WHERE f.dfid = ? AND f.state = 'ACTIVE' ORDER BY a.attempt_number
"""


@dataclass(frozen=True, slots=True)
class OpenFlow:
    """An open flow and everything that its end depends on, as the transaction that ends it has read them.

    `row`: the columns `FLOW`. `case`: what `vault.key_of_case` takes. `windows`: those of its agent's monitors, as stored.
    `key`: the idempotency key that was asked for. `ordered`: 1 if the record has an order under it, else 0.
    """

    row: Row
    case: Row
    authority: Authority
    breaker: Breaker
    windows: Row
    head: Head
    usage: Usage
    totals: Totals
    key: str
    attempts: int
    deadline_ms: int | None
    rejections: int | None
    ordered: int

    @property
    def parent(self) -> str | None:
        parent: str | None = self.row[3]
        return parent

    @property
    def created_at_ms(self) -> int:
        return int(self.row[8])


def asking_for_open(
    dfid: str, agent_id: str, key: str, bounds: tuple[str, str], counters: tuple[str, ...]
) -> tuple[str, Row]:
    """Return the statement that reads an open flow, and its values. `key`: the idempotency key its order would have;
    `bounds`: of the resources it could draw on (`reservations.bounds`); `counters`: its spend counters (`spend.scopes`).
    """
    sql = _OPEN.format(totals=spend.columns(counters))
    return sql, (key, *counters, agent_id, *bounds, dfid)


def open_flow(rows: list[Row], key: str, resources: Mapping[str, str], counters: tuple[str, ...]) -> OpenFlow | None:
    """Return what `asking_for_open` has read. None: there is no such flow, or it has ended."""
    if not rows:
        return None
    row, case, standing, broken, windows, last, more = (rows[0][first:end] for first, end in _PARTS)
    breaker = Breaker(*broken) if broken[0] is not None else Breaker()
    head = Head(*last) if last[0] else Head(0, GENESIS)
    usage = reservations.usage_in(resources, [each[_RESOURCE] for each in rows])
    totals = (counters, rows[0][_TOTALS])
    return OpenFlow(row, case, authorities.authority_in(standing), breaker, windows, head, usage, totals, key, *more)


def feedback(store: Reader, contract: Contract, dfid: str) -> str:
    """Return what an open flow has had rejected so far, as the model reads it; "" for none. Raises StoreError."""
    try:
        texts = Texts(store, dfid)
        attempts = [
            f"{phrases.claimed(contract, texts.data(ATTEMPT, sealed))} ({phrases.reason_codes(why)})"
            for sealed, why in store.rows(_REJECTED_SO_FAR, (dfid,))
        ]
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError("the attempts of this flow cannot be read", dfid=dfid) from error
    return f"Rejected before: {'; '.join(attempts)}" if attempts else ""


def rejected(store: Reader, dfid: str) -> tuple[frozenset[bytes], int]:
    """Return the proposals a flow has had rejected, and the tokens they took."""
    rows, texts = store.rows("SELECT proposal, tokens FROM attempts WHERE dfid = ?", (dfid,)), Texts(store, dfid)
    return frozenset(texts.data(ATTEMPT, row[0]) for row in rows), sum(row[1] for row in rows)
