"""The circuit breaker of an engine: after a few proposals in a row that failed, it is not asked, and events wait.

    closed  every packet is proposed for; a failure is the case's: a human decides it
    open    the engine is down: packets are refused (EngineDownError), and every `PROBE_MS` one is let through, as a probe
    closed  again once a probe is answered

A probe that has not ended after the contract's time for a decision and `PROBE_MS` more hangs: another one is sent. Once
`PROBES_MAX` hang, the engine is down until one of them ends.

So an outage hands a few cases to humans, not all of them. It is a state of one process: another may have a model that works.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

from sds.decoding.errors import CHOICE_TOO_CLOSE, DEADLINE_EXCEEDED, TOKEN_BUDGET_EXCEEDED
from sds.engines.queueing import CANCELLED, QueueTimeoutError
from sds.kernel.canonical import canonical
from sds.kernel.decision.dim import PROBABILITY_MAX
from sds.kernel.decision.packet import NOT_ASKED, DecisionPacket, Decoding
from sds.kernel.envelope.envelope import MAGNITUDE_MAX
from sds.kernel.errors import ModelError, SdsError
from sds.kernel.flow.dispatch import Log, no_log
from sds.models.protocol import ENDINGS

FAILURES_MAX = 3
PROBE_MS = 5_000
PROBES_MAX = 3  # threads that an engine which never answers may hold
# reasons that are faults of the packet, not of the engine
PACKETS_FAULT = frozenset({TOKEN_BUDGET_EXCEEDED, "LANGUAGE_TOO_LARGE", "LANGUAGE_INVALID", "LANGUAGE_EMPTY"})
NO_FAULT = PACKETS_FAULT | {CHOICE_TOO_CLOSE}
_NO_FAILURE = NO_FAULT | {CANCELLED.code, "POLICY_FAILED"}


class EngineDownError(ModelError):
    """The engine was not asked, or failed as before: it is down. The reason is not the case."""


class CountedError(ModelError):
    """An engine within this one failed, and its own breaker has counted that."""


class Probes:
    """The probes of an engine that is down: one at a time, and another one when the last hangs, at most `PROBES_MAX`.

    `hangs_ms`: the time after which a probe hangs. A probe is a number from 1 up; 0 is none. The caller holds a lock.
    """

    def __init__(self, hangs_ms: int) -> None:
        self._hangs_ms = hangs_ms
        self._last, self._running = 0, set[int]()
        self._next_at_ms, self._pause_ms = 0, 0

    @property
    def running(self) -> bool:
        return bool(self._running)

    def wait_ms(self, now_ms: int) -> int:
        """Return the time until a probe may begin. A clock that was set back delays it by at most the pause it is in."""
        if len(self._running) >= PROBES_MAX:
            return self._hangs_ms
        left_ms = self._next_at_ms - now_ms
        return left_ms if 0 < left_ms <= self._pause_ms else 0

    def begin(self, now_ms: int) -> int:
        self._last += 1
        self._running.add(self._last)
        self.pause(now_ms, self._hangs_ms)
        return self._last

    def end(self, probe: int, now_ms: int, pause_ms: int = 0) -> None:
        """End a probe. After the last one to begin, the next may begin in `pause_ms`. A probe that has ended stays so."""
        if probe in self._running:
            self._running.remove(probe)
            if probe == self._last:
                self.pause(now_ms, pause_ms)

    def pause(self, now_ms: int, pause_ms: int) -> None:
        self._next_at_ms, self._pause_ms = now_ms + pause_ms, pause_ms


class Proposes(Protocol):
    """The one method of an engine that is guarded."""

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]: ...


class Breaker:
    """Guards one engine of one gate. Safe in several threads.

    `whole_ms`: the time that the contract gives a decision. A packet that had less, by its caller's deadline, and came too
    late shows no failure of the engine. `log` gets `engine.down` and `engine.up`.
    """

    def __init__(self, *, whole_ms: int, now_ms: Callable[[], int], log: Log = no_log) -> None:
        self._whole_ms, self._now_ms, self._log = whole_ms, now_ms, log
        self._lock = threading.Lock()
        self._failures, self._probes = 0, Probes(whole_ms + PROBE_MS)

    def log_to(self, log: Log) -> None:
        self._log = log

    @property
    def is_open(self) -> bool:
        """Whether the engine is down."""
        return self._failures >= FAILURES_MAX

    @property
    def wait_ms(self) -> int:
        """The time until a packet may be proposed for; 0 while the breaker is closed, or a probe is due.

        A clock that was set back delays the probe by at most `PROBE_MS`.
        """
        with self._lock:
            return self._wait_ms()

    def ask(self, engine: Proposes, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        """Return what the engine proposes. Raises EngineDownError while it is down; else what the engine raises, and
        ModelError for what the record could not keep.
        """
        probe = self._enter()
        try:
            return self._ask(engine, packet, tokens_max, probe=probe)
        finally:
            with self._lock:
                self._probes.end(probe, self._now_ms())

    def _ask(self, engine: Proposes, packet: DecisionPacket, tokens_max: int, *, probe: int) -> tuple[bytes, Decoding]:
        try:
            data, decoding = engine.propose(packet, tokens_max=tokens_max)
            _refuse_unkeepable(data, decoding)
        except ENDINGS:  # an interrupt says nothing about the engine
            raise
        except BaseException as error:
            if not self._is_failure(packet, error) or not self._failed(error, packet.dfid, engine, probe=probe):
                raise
            why = str(error) if isinstance(error, SdsError) else f"the engine failed: {type(error).__name__}"
            raise EngineDownError(f"the model is down: {why}") from error
        if decoding.model != NOT_ASKED:
            self._answered(packet.dfid, engine, probe=probe)
        return data, decoding

    def _wait_ms(self) -> int:
        return min(PROBE_MS, self._probes.wait_ms(self._now_ms())) if self.is_open else 0

    def _enter(self) -> int:
        """Return the number of the probe, 0 where this packet is none. Raises EngineDownError where it is to wait."""
        with self._lock:
            if self._wait_ms():
                raise EngineDownError(f"the model is down: its last {self._failures} proposals failed")
            return self._probes.begin(self._now_ms()) if self.is_open else 0

    def _is_failure(self, packet: DecisionPacket, error: BaseException) -> bool:
        if isinstance(error, (EngineDownError, CountedError, QueueTimeoutError)):
            return False
        if not isinstance(error, SdsError):
            return True
        had_less = packet.expires_at_ms - packet.created_at_ms < self._whole_ms
        return reason_of(error) not in _NO_FAILURE and not (error.reason_code == DEADLINE_EXCEEDED and had_less)

    def _failed(self, error: BaseException, dfid: str, engine: object, *, probe: int) -> bool:
        """Count a failure. Return whether the engine was known to be down: then the reason is not this case."""
        with self._lock:
            was_open = self.is_open
            self._failures += 1
            self._probes.end(probe, self._now_ms(), PROBE_MS)
            if not was_open:
                self._probes.pause(self._now_ms(), PROBE_MS)
        if self.is_open and not was_open:
            reason = reason_of(error) if isinstance(error, SdsError) else type(error).__name__
            self._log(
                "engine.down", {"dfid": dfid, "engine": _name(engine), "reason": reason, "cool_down_ms": PROBE_MS}
            )
        return was_open

    def _answered(self, dfid: str, engine: object, *, probe: int) -> None:
        """Close after a probe. Any other answer may belong to a question from before the engine went down."""
        with self._lock:
            was_open = self.is_open
            if probe or not was_open:
                self._failures = 0
        if probe:
            self._log("engine.up", {"dfid": dfid, "engine": _name(engine)})


def reason_of(error: SdsError) -> str:
    """Return the reason code of what an engine raised; another engine's own error may have none."""
    return error.reason_code if isinstance(error.reason_code, str) else ModelError.reason_code


def _name(engine: object) -> str:
    return str(getattr(engine, "model", ""))


def _refuse_unkeepable(data: object, decoding: object) -> None:
    """Raise ModelError unless the record can keep what an engine returned: its proposal and its measurements.

    An engine is foreign code. If writing the record were the first to object, the flow would be left without an end.
    """
    if not isinstance(data, bytes) or not isinstance(decoding, Decoding):
        raise ModelError("the engine did not return a proposal in bytes and its measurements")
    if decoding.confidence is not None and not _probability(decoding.confidence):
        raise ModelError("the engine returned a confidence that is no probability: a number from 0 to 1")
    counted = _number(decoding.tokens, int) and _number(decoding.passes, int)
    if not counted or not _number(decoding.duration_ms, float):
        raise ModelError("the engine returned a measurement that is not a number or too large for the record")
    try:
        if b"\0" in str.encode(decoding.model):  # PostgreSQL keeps no such text
            raise ValueError("U+0000")
        canonical((decoding.alternatives, decoding.facts))
    except Exception as error:
        raise ModelError(f"the record cannot store the engine's measurements: {type(error).__name__}") from error


def _probability(value: object) -> bool:
    return _number(value, float) and 0 <= value <= PROBABILITY_MAX  # type: ignore[operator]  # a number, just checked


def _number(value: object, kind: type[int | float]) -> bool:
    """Tell whether `value` is of this kind, or an integer, and within the limits. NaN is not."""
    return isinstance(value, (int, kind)) and -MAGNITUDE_MAX <= value <= MAGNITUDE_MAX
