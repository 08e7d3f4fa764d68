"""Readiness of this process: probed every few seconds in the background, and answered from the last probe.

- model: it has made a proposal for each gate since the process began, and its breaker is closed: these looks are probes, too
- store: it takes a write, as a file does that is still at its path; its disk has ROOM_BYTES_MIN left, since the probe's small
  write fits on a full disk
- clock: within a second of the store's clock; for a file, at most a second before the last ledger entry
- contract: the record has no newer version than this process decides under; until it is replaced, events go elsewhere. While
  another gate of the process has none either, the process stays ready: it refuses the events of this gate alone
- key: `kernel.key` is there, with the keys that this process signs with and those of the newest order and checkpoint; a
  process that goes on without it writes what no other can read or verify
- ledger: a page of it, further at each look, is as it was written; see `kernel.audit.rolling` for what that finds
- record: it has all orders that its executor lists; a restored record orders nothing until they are adopted
- language_model: that of a policy is not down. Its readers decide without it, so the process stays ready
- draining: SIGTERM has not come
- probe: the last probe is not too old
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from itertools import islice
from shutil import disk_usage

from sds.engines.breaker import Breaker, EngineDownError
from sds.engines.protocol import Engine, language_model_of
from sds.host import keys, paths
from sds.kernel.audit.rolling import RollingVerification
from sds.kernel.errors import ModelError, SdsError, StoreError
from sds.kernel.executor.wholeness import KEY_LOST, LEDGER_ALTERED, RECORD_BEHIND, Doubt
from sds.kernel.storage.ledger import PublicKeys
from sds.kernel.storage.sqlite import SqliteStore
from sds.kernel.storage.store import Store
from sds.service.gates import OpenGate
from sds.service.state import Service

OK = "ok"
LANGUAGE_MODEL = "language_model"
CHECKS = ("model", "store", "clock", "contract", "key", "ledger", "record")  # for each gate
CONTRACT_SUPERSEDED, KEY_OLDER = "CONTRACT_SUPERSEDED", "KEY_OLDER"
STOPS = {  # what stops a record (`Wholeness.stopped`), by the check that finds it
    "ledger": Doubt(LEDGER_ALTERED, "the ledger was altered (the check `ledger` of /readyz)"),
    "key": Doubt(KEY_LOST, "`kernel.key` is lost, or is another (the check `key` of /readyz)"),
}
CLOCKS_APART_MS_MAX = 1_000
ROOM_BYTES_MIN = 4 << 20  # free bytes on the disk of a record: enough for some decisions
CASES_MAX = 20  # cases of a gate's queue that are tried for one with a choice to prove the model on
LATE_S = 30.0  # a probe is too old after this time and three probe intervals

_PROBE = "UPDATE meta SET value = value WHERE key = 'schema_version'"


class Health:
    """The results of the last probe: for each check and gate `ok`, or a reason code."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._found: dict[str, dict[str, str]] = {check: {} for check in CHECKS}
        self._proved = set[str]()
        self._keys = dict[str, keys.Ring]()  # by gate: those that this process signs and verifies with
        self._ledgers = dict[str, RollingVerification]()
        self._looked_s: float | None = None

    def look(self) -> None:
        """Run all probes; each result counts at once. Blocks, for long where a store does not answer. For one thread."""
        looks: dict[str, Callable[[OpenGate], str]] = {
            "model": self._model,
            "store": self._store,
            "clock": self._clock,
            "contract": self._contract,
            "key": self._key,
            "ledger": self._ledger,
            "record": self._record,
        }
        for check, look in looks.items():
            for each in self._service.gates.values():
                self._note(check, each, _result(partial(look, each)))
        with self._lock:
            self._looked_s = time.monotonic()

    def _note(self, check: str, each: OpenGate, result: str) -> None:
        """Keep a result; log it where it is another than the last. An altered ledger or a lost key stops the record."""
        gate, whole = each.name, each.gate.kernel.whole
        with self._lock:
            before, self._found[check][gate] = self._found[check].get(gate, OK), result
        stop = STOPS.get(check)
        if stop is not None and result == stop.code:
            whole.stopped = stop
        elif result == OK and whole.stopped is stop:
            whole.stopped = None
        if result != before:
            self._service.log("service.check", {"check": check, "gate": gate, "was": before, "is": result})

    def checks(self) -> dict[str, str | Mapping[str, str]]:
        """Return the result of each check, by gate where it is made for each gate."""
        with self._lock:
            results, looked_s = {check: dict(of) for check, of in self._found.items()}, self._looked_s
        late_s = max(LATE_S, 3 * self._service.settings.probe_every_s)
        fresh = looked_s is not None and time.monotonic() - looked_s <= late_s
        probe = OK if fresh else "LATE" if looked_s is not None else "NOT_YET"
        if models := {n: m for n, each in self._service.gates.items() if (m := language_model_of(each.gate.engine))}:
            down = {name: ModelError.reason_code if model.breaker.is_open else OK for name, model in models.items()}
            results[LANGUAGE_MODEL] = down
        return {**results, "draining": "DRAINING" if self._service.stopping else OK, "probe": probe}

    @staticmethod
    def ready(checks: Mapping[str, str | Mapping[str, str]]) -> bool:
        """Tell whether the process should get requests: every check is ok, but for that of a policy's language model, and that of
        the contracts of some gates, not all, which are superseded.
        """
        needed = {check: {each} if isinstance(each, str) else {*each.values()} for check, each in checks.items()}
        needed.pop(LANGUAGE_MODEL, None)
        if OK in needed["contract"]:
            needed["contract"].discard(CONTRACT_SUPERSEDED)
        return all(results <= {OK} for results in needed.values())

    @staticmethod
    def probe_language_model(each: OpenGate) -> None:
        """Have a policy's language model propose for a case of the gate while it is down, so that it comes back without
        an event that waits for it. Blocks. Raises what the gate and the model raise, except that it is still down.
        """
        model = language_model_of(each.gate.engine)
        if model is not None and model.breaker.is_open:
            with suppress(EngineDownError):
                _prove(each, model.get(), model.breaker)

    def _model(self, each: OpenGate) -> str:
        """Have the model propose for a case of the gate, unless it has done so before and is not down since."""
        if each.name not in self._proved or each.gate.breaker.is_open:
            _prove(each, each.gate.engine, each.gate.breaker)
            self._proved.add(each.name)
        return OK

    def _store(self, each: OpenGate) -> str:
        store = each.gate.store
        with store.transaction():
            store.run(_PROBE)
        if not isinstance(store, SqliteStore):
            return OK
        return "DISK_FULL" if disk_usage(store.path.parent).free < ROOM_BYTES_MIN else OK

    def _clock(self, each: OpenGate) -> str:
        asked_ms, store = self._service.now_ms(), each.gate.store
        store_ms, now_ms = clock_ms(store), self._service.now_ms()
        if store_ms is not None:  # it was read at some moment in between
            together = asked_ms - CLOCKS_APART_MS_MAX <= store_ms <= now_ms + CLOCKS_APART_MS_MAX
            return OK if together else "CLOCK_APART"
        last_ms = store.value("SELECT at_ms FROM ledger ORDER BY idx DESC LIMIT 1")
        return OK if last_ms is None or now_ms >= last_ms - CLOCKS_APART_MS_MAX else "CLOCK_BEHIND"

    def _contract(self, each: OpenGate) -> str:
        return CONTRACT_SUPERSEDED if self._service.compare_contract(each) else OK

    def _key(self, each: OpenGate) -> str:
        folder = paths.gate_home(each.name)
        try:
            found = keys.read_ring(folder / keys.KEY_FILE)
        except SdsError:  # it is gone, damaged, or not this user's alone
            return KEY_LOST
        if not found.follows(self._keys.setdefault(each.name, found)):
            return KEY_LOST
        self._keys[each.name] = found
        try:
            keys.refuse_other_keys(folder, each.gate.store)
        except StoreError as error:
            if error.retryable:  # the record cannot be read
                raise
            return KEY_OLDER
        return OK

    def _ledger(self, each: OpenGate) -> str:
        before = self._found["ledger"].get(each.name, OK)
        if self._found["key"].get(each.name) != OK:  # nobody can tell what others have signed
            return before
        if (ledger := self._ledgers.get(each.name)) is None:
            ledger = self._ledgers[each.name] = RollingVerification(each.gate.store)
        faults = ledger.faults(lambda: self._public_keys(each))
        if faults and before != LEDGER_ALTERED:
            self._service.log("ledger.altered", {"gate": each.name, "fault": faults[0], "faults": len(faults)})
        return LEDGER_ALTERED if faults else OK

    def _public_keys(self, each: OpenGate) -> PublicKeys | None:
        """Return the keys that may have signed the ledger, with one that was made since the key was looked at."""
        self._key(each)
        found = self._keys[each.name].ledger
        return None if found is None else found.public

    def _record(self, each: OpenGate) -> str:
        doubt = each.gate.kernel.whole.doubt()
        return RECORD_BEHIND if doubt is not None and doubt.code == RECORD_BEHIND else OK


def _result(look: Callable[[], str]) -> str:
    """Return what a probe returns, or the reason code or class of what it raises."""
    try:
        return look()
    except SdsError as error:
        return error.reason_code
    except Exception as error:  # noqa: BLE001  a gate's own code may raise anything: the gate is not ready
        return type(error).__name__


def _prove(each: OpenGate, engine: Engine, breaker: Breaker) -> None:
    """Have an engine propose for a case of the gate's queue that leaves it a choice, else for an unknown case.

    Nothing is recorded. Raises what the gate and its engine raise.
    """
    gate, event = each.gate, each.gate.contract.event
    queue = each.definition.cases(paths.gate_home(each.name)) if each.definition.events is not None else []
    unknown = {name: "readiness" for name in (event.id, event.key, event.evidence) if name}
    packets = map(gate.preview, [*(case.event for case in islice(queue, CASES_MAX)), unknown])
    packet = next((found for found in packets if len(found.envelope.kinds) > 1), None) or gate.preview(unknown)
    breaker.ask(engine, packet, tokens_max=gate.contract.budget.tokens_max)


def clock_ms(store: Store) -> int | None:
    """Return the time of a PostgreSQL store's clock in milliseconds since 1970; None for a file."""
    if not store.name.startswith("postgresql"):
        return None
    return int(store.value("SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)"))
