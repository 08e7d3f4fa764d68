"""One reading of the world (DIR 4.1): live state, less what is reserved, and everything else an envelope depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from sds.kernel.canonical import in_words, one_line
from sds.kernel.contract.compiler import Rules, well_typed
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.context import ContextReader
from sds.kernel.decision.dim import AuthorityState
from sds.kernel.decision.packet import DecisionPacket
from sds.kernel.decision.safeguards import EnvelopeInputs, LiveState, standing_notes
from sds.kernel.envelope.state import StateRead, StateSource, Value
from sds.kernel.errors import ENDINGS
from sds.kernel.flow import attempts
from sds.kernel.flow.intake import PREVIEW
from sds.kernel.registry import authority as authorities
from sds.kernel.registry import reservations, spend
from sds.kernel.registry.authority import Authority
from sds.kernel.registry.reservations import Usage
from sds.kernel.registry.spend import Totals
from sds.kernel.storage.store import Store


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
        is left. `dfid`: the flow, or `intake.PREVIEW`.
        """
        memory, unread = "", ""
        try:
            memory = self._context.memory(key, now_ms)
        except Exception as error:  # noqa: BLE001  rows and a tokenizer that are not as they should be: a human decides
            unread = one_line(f"memory cannot be read: {in_words(error)}", 200)
        live = self.observe(key, now_ms, dfid="" if dfid == PREVIEW else dfid)
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
    rejected, spent = attempts.rejected(store, packet.dfid) if seen.tries else (frozenset(), 0)
    return AuthorityState(
        agent_active=authority.active,
        halted=authority.halted,
        contract_hash=authority.contract_hash,
        # under another contract there is no mission to compare: gate 2 objects, and the agent may still escalate
        mission_hash=authority.mission_hash if under else packet.mission_hash,
        held=seen.usage.held,
        tokens_spent=spent,
        rejected=rejected,
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
