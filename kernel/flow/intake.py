"""From a trigger to a flow: one flow for each `(gate, event_id)`, claimed before anything is decided.

The same event again gets the stored answer. The same id with another body is refused. When the holder of a flow is gone and
its lease has ended, the flow is interrupted. After a flow that ended undecided the event gets a fresh one, a child of the
last, until a human must decide (`undecided`). A flow's id follows from what it decides (`canonical.flow_id`).
"""

from __future__ import annotations

import json
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from sds.kernel.canonical import canonical, check_identifier, digest, flow_id, in_words, one_line
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import EventSpec
from sds.kernel.errors import EventError, UsageError
from sds.kernel.flow import adopted, states, undecided
from sds.kernel.flow.states import ADOPTED, EXECUTION_FAILED, Answer, known_answer, transition
from sds.kernel.storage import vault
from sds.kernel.storage.store import Reader, Row, Store
from sds.kernel.storage.vault import mask

NAME_CHARS_MAX = 64
EVENT_BYTES_MAX = 64 * 1024
PREVIEW = "preview"  # stands for the flow's id in a packet that belongs to no flow
SAVE_AS = "save it as UTF-8 without a byte order mark"
_MARKS_OF_UTF_16 = (BOM_UTF16_LE, BOM_UTF16_BE)  # a mark of UTF-32 begins with the first, or with NUL
# One event: its case's key and erasure (columns 0-4), the contract that a new flow would be under (5), whether its gate
# has adopted flows (6), and its body hash and last flow (7-13).
_SEEN = f"""
SELECT c.gate, c.event_id, k.wrapped, x.erased_at_ms, x.reason,
       COALESCE((SELECT contract_hash FROM decision_flows WHERE dfid = ?), (SELECT contract_hash FROM agents WHERE agent_id = ?)),
       EXISTS (SELECT 1 FROM decision_flows t WHERE t.gate = c.gate AND t.tag = '{ADOPTED}'),
       e.body_hash, f.dfid, f.state, f.tag, f.restarts, f.created_at_ms, f.lease_until_ms
FROM (SELECT ? AS gate, ? AS event_id) c
LEFT JOIN events e ON e.gate = c.gate AND e.event_id = c.event_id LEFT JOIN decision_flows f ON f.dfid = e.dfid
LEFT JOIN case_keys k ON k.gate = c.gate AND k.event_id = c.event_id
LEFT JOIN erasures x ON x.gate = c.gate AND x.event_id = c.event_id
"""

_POINT = (
    "INSERT INTO events (gate, event_id, body_hash, dfid) VALUES (?, ?, ?, ?)"
    " ON CONFLICT (gate, event_id) DO UPDATE SET body_hash = excluded.body_hash, dfid = excluded.dfid"
)


@dataclass(frozen=True, slots=True)
class Event:
    """A validated trigger. `evidence` is untrusted text; `body` is the canonical JSON of the whole event. Both are masked.

    `text_field`: the evidence's field, "" without evidence. `original`: the body before masking, where that differs.
    `fingerprint`: what the record recognises the event by, when it was read back from the record.
    """

    id: str
    key: str
    evidence: str
    body: str
    text_field: str = ""
    original: str = field(default="", repr=False)
    fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class ClaimedFlow:
    """The right to decide one flow until its lease ends. `deadline_ms`: the caller's deadline, milliseconds since 1970."""

    dfid: str
    event: Event
    deadline_ms: int | None = None


@dataclass(frozen=True, slots=True)
class ChildAuthorization:
    """Why a flow is opened without a trigger. `check` runs in the claiming transaction; it raises when it is too late."""

    parent: str
    check: Callable[[], None]


def saga_child(trigger: str) -> tuple[str, int] | None:
    """Return (saga, number) of the saga's child that has this trigger; None for every other flow."""
    saga = json.loads(trigger).get("saga")
    return (str(saga[0]), int(saga[1])) if isinstance(saga, list) and len(saga) == 2 else None


def read_event(contract: Contract, data: object) -> Event:
    """Validate a trigger: a JSON object with exactly the fields the contract names. Raises EventError."""
    if not isinstance(data, Mapping):
        raise EventError("the event is not a JSON object")
    try:  # read it once: a mapping that computes its values could return others the next time
        data = {name: data[name] for name in data}
    except Exception as error:
        raise EventError(f"the event cannot be read: {one_line(in_words(error), 200)}") from error
    spec = contract.event
    named = [name for name in (spec.id, spec.key, spec.evidence) if name]
    for name in named:
        if not isinstance(data.get(name), str):
            raise EventError(f"the event has no text `{name}`", hint=f"an event has the fields {', '.join(named)}")
    extra = sorted(str(name) for name in data if name not in named)
    if extra:
        message = f"the event has an unknown field `{one_line(extra[0], NAME_CHARS_MAX)}`"
        raise EventError(message, hint=f"an event has the fields {', '.join(named)}")
    data = {name: str.__str__(data[name]) for name in named}  # of an Enum its text, not its name
    for name in (spec.id, spec.key):  # the id recognises the event; what is drawn is counted by the key
        check_identifier(name, data[name])
    try:
        body = canonical(data).decode()
    except (TypeError, ValueError) as error:
        raise EventError("the event is not text that can be stored as UTF-8") from error
    if len(body.encode()) > EVENT_BYTES_MAX:
        raise EventError(f"the event is larger than {EVENT_BYTES_MAX} bytes")
    return masked(Event(data[spec.id], data[spec.key], data.get(spec.evidence or "", ""), body, spec.evidence or ""))


def masked(event: Event) -> Event:
    """Return the event as it may be read and kept: card numbers, IBANs and API tokens in its evidence are replaced."""
    evidence = mask(event.evidence)
    if evidence == event.evidence:
        return event
    body = canonical({**json.loads(event.body), event.text_field: evidence}).decode()
    return replace(event, evidence=evidence, body=body, original=event.original or event.body)


def parse_event(contract: Contract, text: str | bytes) -> Event:
    """Validate a trigger given as JSON text. Raises EventError."""
    if len(text) > EVENT_BYTES_MAX:
        raise EventError(f"the event is larger than {EVENT_BYTES_MAX} bytes")
    text = in_utf8(text) if isinstance(text, bytes) else text
    if text[:1] == "\ufeff":
        raise EventError("the event begins with a byte order mark", hint=SAVE_AS)
    try:
        data = json.loads(text, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise EventError(f"the event is not JSON: {error}") from error
    return read_event(contract, data)


def in_utf8(raw: bytes) -> str:
    """Return the text of an event, which must be UTF-8. Raises EventError."""
    if raw[:2] in _MARKS_OF_UTF_16 or 0 in raw[:4]:  # JSON begins with ASCII characters other than NUL
        raise EventError("the event is UTF-16 or UTF-32, not UTF-8", hint=SAVE_AS)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise EventError(f"the event is not UTF-8 at byte {error.start}", hint=SAVE_AS) from error


def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Build an object from pairs. Raises ValueError when a name is given twice: the last must not win in silence."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is given twice")
    return found


def claim(
    store: Store,
    contract: Contract,
    event: Event,
    *,
    now_ms: int,
    authorization: ChildAuthorization | None = None,
    anew: bool = False,
    deadline_ms: int | None = None,
) -> ClaimedFlow | Answer:
    """Claim the event's flow, or return the known answer. A pending answer means that another holder is at work.

    `anew`: an operator asks for a fresh flow although the contract permits no more. `deadline_ms` is kept with the flow;
    after it no order is sent. Raises EventError when the event's id is known with another body.

    An event's first flow is committed without `durable`: whatever is sent or answered for it is committed later.
    """
    saga = authorization.parent if authorization else None
    asked = asking_for_seen(contract, event, saga)
    opened = partial(_opened, store, contract, event, authorization, now_ms=now_ms, deadline_ms=deadline_ms)
    with store.transaction(*asked, durable=False) as rows:
        if not _is_known(store, contract, event, rows[0]):
            return opened(rows[0], None)
    with store.transaction(*asked) as rows:
        last = _last_flow(store, contract, event, rows[0])
        answer = last and _answered(store, contract, event, last, in_saga=bool(saga), anew=anew, now_ms=now_ms)
        return answer or opened(rows[0], last)


def _answered(
    store: Store, contract: Contract, event: Event, last: Row, *, in_saga: bool, anew: bool, now_ms: int
) -> Answer | None:
    """Return the answer of an event's last flow; None where the event may have a fresh one. A flow whose holder is gone is
    interrupted. One after which the contract permits no other goes to a human.
    """
    dfid, state, tag, restarts, created_ms, lease_ms = last
    restarts_max = contract.retry.restarts_max
    if state == "ACTIVE" and not states.is_held(created_ms, lease_ms, now_ms):
        state = undecided.interrupt(store, dfid, restarts_max=restarts_max, now_ms=now_ms)
        tag = undecided.INTERRUPTED
    if not undecided.is_undecided(state, tag) or (in_saga and not child_restarts(store, contract, dfid, tag)):
        return _known_answer(store, dfid, event)
    if anew or undecided.has_restart(store, dfid, tag, restarts_max):
        return None
    why = undecided.why_handed_over(tag, restarts + 1)
    return _known_answer(store, undecided.hand_over(store, dfid, tag or state, why, now_ms=now_ms), event)


def _opened(
    store: Store,
    contract: Contract,
    event: Event,
    authorization: ChildAuthorization | None,
    seen: Row,
    last: Row | None,
    *,
    now_ms: int,
    deadline_ms: int | None,
) -> ClaimedFlow:
    """Write a fresh flow of an event. `seen`: what `asking_for_seen` has read. `last`: the event's flow before this one."""
    if authorization is not None:
        authorization.check()
    parent, restarts = (last[0], last[3] + 1) if last else (authorization and authorization.parent, 0)
    dfid = write_event(store, contract.gate, event, restarts)
    begun: dict[str, Any] = {"parent": parent, "restarts": restarts, "seen": seen, "now_ms": now_ms}
    begin(store, contract, event, dfid, deadline_ms=deadline_ms, **begun)
    return ClaimedFlow(dfid, event, deadline_ms)


def child_restarts(store: Reader, contract: Contract, dfid: str, tag: str | None) -> bool:
    """Tell whether a saga's child is tried again. After EXECUTION_FAILED it is not: the saga compensates instead."""
    return tag != EXECUTION_FAILED and undecided.has_restart(store, dfid, tag, contract.retry.restarts_max)


def known_event(store: Reader, contract: Contract, event: Event, *, now_ms: int) -> Answer | None:
    """Return the answer that is known for an event, by reading alone; a pending one while somebody is at work on it.

    None: it was never seen, or `claim` may open a fresh flow for it. Raises EventError as `claim` does.
    """
    known = _flow_of(store, event, store.rows(*asking_for_seen(contract, event))[0][7:])
    if known is None:
        return None
    dfid, state, tag, _, created_ms, lease_ms = known
    gone = state == "ACTIVE" and not states.is_held(created_ms, lease_ms, now_ms)
    return None if gone or undecided.is_undecided(state, tag) else _known_answer(store, dfid, event)


def flow_named(store: Reader, contract: Contract, event: Event, *, now_ms: int) -> str:
    """Return, by reading alone, the id `claim` would give the event's flow now; it need not exist. Raises EventError."""
    seen = store.rows(*asking_for_seen(contract, event))[0]
    known, body_hash = _flow_of(store, event, seen[7:]), digest(event.body)
    found = _adopted_of(store, contract, event, known) if seen[6] else None
    if found is not None:
        return found.dfid
    if known is None:
        return flow_id(contract.gate, event.id, body_hash, 0)
    held = states.is_held(known[4], known[5], now_ms)
    return undecided.next_name(store, known[:4], body_hash, held=held, restarts_max=contract.retry.restarts_max)


def recorded_event(store: Reader, contract: Contract, dfid: str) -> Event:
    """Return the trigger of a flow as it was recorded. Raises UsageError when there is no such flow, EventError when its
    trigger is no event, ErasedError when its text was erased.
    """
    row = store.row("SELECT trigger_event FROM decision_flows WHERE dfid = ? AND gate = ?", (dfid, contract.gate))
    if row is None:
        raise UsageError(f"there is no flow `{dfid}` of gate `{contract.gate}`", hint="sds flows")
    event = read_event(contract, vault.Texts(store, dfid).fields(vault.TRIGGER, json.loads(row[0])))
    fingerprint = vault.fingerprint_in(row[0])
    return event if fingerprint is None else replace(event, fingerprint=fingerprint)


def asking_for_seen(contract: Contract, event: Event, saga: str | None = None) -> tuple[str, Row]:
    """Return the statement that reads what is known of an event, and its values. It finds exactly one row."""
    return _SEEN, (saga, contract.agent_id, contract.gate, event.id)


def _flow_of(store: Reader, event: Event, known: Row) -> Row | None:
    """Return the last flow of an event: its id, state, tag, restarts, when it was created, and when its lease ends."""
    if known[1] is None:
        return None
    refuse_another(store, event, known[0], dfid=known[1])
    return known[1:]


def refuse_another(store: Reader, event: Event, fingerprint: str, *, dfid: str) -> None:
    """Raise EventError unless the record knows this body by `fingerprint`: in an adopted flow the masked body's digest."""
    if fingerprint in (event.fingerprint, digest(event.body)):
        return
    if not vault.recognises(store, fingerprint, event.original or event.body):
        message, hint = f"event `{event.id}` was seen with another body", vault.mend_of_another(store, dfid)
        raise EventError(message, reason_code="EVENT_CONFLICT", hint=hint, dfid=dfid)


def write_event(store: Store, gate: str, event: Event, restarts: int) -> str:
    """Write which flow stands for an event, and the event's fingerprint, in the caller's transaction. Return the flow's id.

    The id follows from the masked body, so that a record that has lost its key makes the same id again.
    """
    dfid = flow_id(gate, event.id, digest(event.body), restarts)
    point(store, gate, event.id, _fingerprint(store, event), dfid)
    return dfid


def point(store: Store, gate: str, event_id: str, body_hash: str, dfid: str) -> None:
    """Write which flow stands for an event. `body_hash`: its fingerprint; the digest of its masked body for an adopted flow."""
    store.write(_POINT, (gate, event_id, body_hash, dfid))


def _fingerprint(store: Reader, event: Event) -> str:
    """Return what recognises an event: a keyed hash of the unmasked body, or a plain digest when it has no text."""
    if not event.text_field:
        return digest(event.body)
    return event.fingerprint or store.keyring.fingerprints(event.original or event.body)[0]


def _trigger(store: Store, event: Event, seen: Row) -> str:
    """Return the event as the record keeps it: the evidence sealed, everything else in clear."""
    if not event.text_field:
        return event.body
    key, _ = vault.key_of_case(store, seen[:5])
    return vault.seal_trigger(key, event.body, event.text_field, _fingerprint(store, event))


def _adopted_of(store: Reader, contract: Contract, event: Event, last: Row | None) -> adopted.AdoptedFlow | None:
    """Return the adopted flow that decides an event; None: there is none.

    `last`: the event's own last flow, None if nobody has seen the event. An event with an undecided last flow is decided
    only by an order that was carried out.
    """
    if last is not None and not undecided.is_undecided(last[1], last[2]):
        return None
    found = adopted.flow_of_event(store, contract.gate, event.id, digest(event.body))
    return found if found and (found.settled or last is None) else None


def _is_known(store: Reader, contract: Contract, event: Event, seen: Row) -> bool:
    known = _flow_of(store, event, seen[7:])
    return known is not None or (seen[6] and _adopted_of(store, contract, event, known) is not None)


def _last_flow(store: Store, contract: Contract, event: Event, seen: Row) -> Row | None:
    """Return the event's last flow as `_flow_of` does. An adopted flow that decides the event stands for it from now on."""
    last = _flow_of(store, event, seen[7:])
    found = _adopted_of(store, contract, event, last) if seen[6] else None
    if found is None:
        return last
    point(store, contract.gate, event.id, digest(event.body), found.dfid)
    known = _flow_of(store, event, store.rows(*asking_for_seen(contract, event))[0][7:])
    return known and (*known[:3], found.restarts, *known[4:])


def _known_answer(store: Reader, dfid: str, event: Event) -> Answer:
    return replace(known_answer(store, dfid), event_id=event.id)  # an adopted flow was written without its event's id


def begin(
    store: Store,
    contract: Contract,
    event: Event,
    dfid: str,
    *,
    parent: str | None,
    restarts: int,
    now_ms: int,
    seen: Row = (),
    deadline_ms: int | None = None,
) -> None:
    """Write a fresh flow inside the caller's transaction, under the contract in `seen` (for a saga's child: its saga's).

    The lease outlasts the time to decide by the time an order may take. `seen`: what `asking_for_seen` has read.
    """
    seen = seen or store.rows(*asking_for_seen(contract, event))[0]
    until_ms = now_ms + contract.budget.ttl_ms
    if deadline_ms is not None:
        until_ms = max(now_ms, min(until_ms, deadline_ms))
        store.insert("flow_deadlines", dfid=dfid, deadline_ms=deadline_ms)
    store.insert(
        "decision_flows",
        dfid=dfid,
        agent_id=contract.agent_id,
        trigger_event=_trigger(store, event, seen),
        parent_dfid=parent,
        gate=contract.gate,
        event_id=event.id,
        contract_hash=seen[5],
        restarts=restarts,
        created_at_ms=now_ms,
        state=transition("CREATED", "ACTIVE"),
        lease_until_ms=until_ms + contract.budget.dispatch_ms_max,
    )


def event_in(texts: vault.Texts, spec: EventSpec, event_id: str, trigger: str) -> Event:
    """Return the event that a trigger was, read by the form `spec`. A trigger in clear was not masked yet."""
    field, fingerprint = spec.evidence or "", vault.fingerprint_in(trigger)
    body = texts.fields(vault.TRIGGER, json.loads(trigger))
    known = Event(event_id, body[spec.key], body.get(field, ""), canonical(body).decode(), field)
    return masked(known) if fingerprint is None else replace(known, fingerprint=fingerprint)
