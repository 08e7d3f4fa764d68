"""A chain of engines, each with a circuit breaker: the first choice comes first, a local engine last.

An engine that fails is down for its cool-down time, which doubles with each failure up to a limit. Then one decision
probes it; an engine that can prove that it constrains its model must do so first. The next engine is asked within the
same deadline: no engine may use up the time that those after it need. There is one exception: the decision that probes
an engine which was down at the start also opens it, and may come too late (`docs/limits.md`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace

from sds.decoding.errors import CHOICE_TOO_CLOSE
from sds.engines.breaker import NO_FAULT, PACKETS_FAULT, PROBE_MS, Probes, reason_of
from sds.engines.protocol import Checks, Engine, Proves, let_go
from sds.engines.queueing import QueueTimeoutError
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.packet import DecisionPacket, Decoding
from sds.kernel.errors import LanguageError, ModelError, SdsError, UsageError
from sds.kernel.flow.dispatch import Log, no_log
from sds.models.protocol import ENDINGS

LINKS_MAX = 8
COOL_DOWN_MS_MAX = 10 * 60_000
_DOUBLINGS_MAX = 16


@dataclass
class Link:
    """One engine of the chain. `open` loads or reaches it and raises ModelError; later probes call it again."""

    name: str
    open: Callable[[], Engine]
    timeout_ms: int
    cool_down_ms: int
    engine: Engine | None = field(default=None, init=False)
    failures: int = field(default=0, init=False)
    down_until_ms: int = field(default=0, init=False)
    down_ms: int = field(default=0, init=False)
    probes: Probes = field(init=False)

    def __post_init__(self) -> None:
        self.probes = Probes(self.timeout_ms + PROBE_MS)

    def cools_down(self, now_ms: int) -> bool:
        """Whether its cool-down time runs. A clock that was set back prolongs it by no more than itself."""
        return 0 < self.down_until_ms - now_ms <= self.down_ms


class FallbackEngine:
    """Asks the first link that is not down. Raises ModelError at the start unless the last link opens.

    `notices`: why links are down at the start, and the notices of the others, a line each.
    """

    def __init__(self, links: Sequence[Link], *, now_ms: Callable[[], int], log: Log = no_log) -> None:
        if not 1 <= len(links) <= LINKS_MAX:
            raise UsageError(f"a chain must have 1 to {LINKS_MAX} engines, got {len(links)}")
        self._links, self._now_ms, self._log = tuple(links), now_ms, log
        self._lock, self._closed = threading.Lock(), False
        self.notices: tuple[str, ...] = ()
        self._contracts: dict[str, Contract] = {}  # by hash
        with ExitStack() as opened:
            for link in self._links:
                self._start(link, last=link is self._links[-1])
                opened.callback(_close, link)
            opened.pop_all()

    @property
    def model(self) -> str:
        """The models in the order in which they are asked. Each decision's record names the one that answered."""
        return " > ".join(link.engine.model if link.engine else f"{link.name} (down)" for link in self._links)

    def log_to(self, log: Log) -> None:
        self._log = log

    def check_contract(self, contract: Contract) -> None:
        """Raise ModelError where the last link cannot decide under a contract. Any other link that cannot goes down."""
        self._contracts[contract.hash] = contract
        for link in self._links:
            if link.engine is None:
                continue
            try:
                self._check(link.engine)
            except ModelError as error:
                if link is self._links[-1]:
                    raise
                _close(link)
                link.engine = None
                self._went_down(link, error, dfid=None)

    def propose(self, packet: DecisionPacket, *, tokens_max: int) -> tuple[bytes, Decoding]:
        failure: SdsError = ModelError("every engine is down")
        queue_timeout: QueueTimeoutError | None = None
        for number, link in enumerate(self._links):
            with self._entered(link) as probe:
                deadline_ms = self._deadline_ms(packet, number)
                if probe is None or deadline_ms <= self._now_ms():
                    continue
                try:
                    answer = self._ask(link, replace(packet, expires_at_ms=deadline_ms), tokens_max, probe=probe)
                except (ModelError, LanguageError) as error:  # a language too large for one engine may fit another
                    failure = error  # nobody else uses an engine that is probed: it is not busy
                    busy = error if isinstance(error, QueueTimeoutError) and not probe else None
                    queue_timeout = busy or queue_timeout
                    if reason_of(error) == CHOICE_TOO_CLOSE:  # another engine might choose otherwise
                        raise
                    if not busy and reason_of(error) not in NO_FAULT:
                        self._went_down(link, error, dfid=packet.dfid)
                except ENDINGS:  # an interrupt says nothing about the engine
                    raise
                except BaseException as error:  # noqa: BLE001  an engine may fail in any way; the next one is asked
                    failure = _broken(link, error)
                    self._went_down(link, failure, dfid=packet.dfid)
                else:
                    self._came_back(link, packet.dfid, probe=probe)
                    return answer
        if queue_timeout is not None and reason_of(failure) not in PACKETS_FAULT:
            raise queue_timeout  # a working engine was busy: the reason is the load, not the case
        raise failure

    @property
    def slots(self) -> int:
        """The number of decisions made at once by the link that makes most."""
        return max(getattr(link.engine, "slots", 1) for link in self._links)

    def cancel(self, dfid: str) -> None:
        for link in self._links:
            let_go(link.engine, dfid)

    def count_tokens(self, text: str) -> int:
        """Return the highest count among the engines that can count."""
        counts = [len(text.encode())] if not any(link.engine for link in self._links) else list[int]()
        failed: ModelError | None = None
        for engine in (link.engine for link in self._links if link.engine):
            try:
                counts.append(engine.count_tokens(text))
            except ModelError as error:
                failed = error
        if not counts and failed:
            raise failed
        return max(counts)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        with ExitStack() as every:  # closes all, also where one raises
            for link in self._links:
                every.callback(_close, link)

    def _start(self, link: Link, *, last: bool) -> None:
        try:
            link.engine = link.open()
        except BaseException as raised:
            if last or isinstance(raised, ENDINGS):
                raise
            error = raised if isinstance(raised, SdsError) else _broken(link, raised)
            self._went_down(link, error, dfid=None)
            self.notices += (f"engine `{link.name}` is down, so the next one is used: {error}",)
        else:
            self.notices += tuple(f"engine `{link.name}`: {notice}" for notice in getattr(link.engine, "notices", ()))

    def _ask(self, link: Link, packet: DecisionPacket, tokens_max: int, *, probe: int) -> tuple[bytes, Decoding]:
        if link.engine is None:
            self._install(link, self._open_checked(link))
        elif probe and isinstance(link.engine, Proves):  # another server may answer by now
            link.engine.prove(packet.expires_at_ms)
        assert link.engine is not None  # noqa: S101  it is open
        return link.engine.propose(packet, tokens_max=tokens_max)

    def _check(self, engine: Engine) -> None:
        if isinstance(engine, Checks):
            for contract in tuple(self._contracts.values()):
                engine.check_contract(contract)

    def _open_checked(self, link: Link) -> Engine:
        engine = link.open()
        try:
            self._check(engine)
        except BaseException:
            engine.close()
            raise
        return engine

    def _install(self, link: Link, opened: Engine) -> None:
        """Give an opened engine to the link. Raises ModelError in a closed chain: nobody would close the engine later."""
        with self._lock:
            if not self._closed:
                link.engine = opened
                return
        opened.close()
        raise ModelError("the engine is closed")

    def _deadline_ms(self, packet: DecisionPacket, number: int) -> int:
        """Return until when a link may work: its own time, less what the links after it need. The last link gets the rest."""
        later = self._links[number + 1 :]
        if not later:
            return packet.expires_at_ms
        reserved = sum(link.timeout_ms for link in later)
        return min(self._now_ms() + self._links[number].timeout_ms, packet.expires_at_ms - reserved)

    @contextmanager
    def _entered(self, link: Link) -> Iterator[int | None]:
        """Yield the number of the probe that asking this link now is, 0 where it is none, None where it is not to be asked:
        it is down, or another decision probes it.
        """
        probe = self._enter(link)
        try:
            yield probe
        finally:
            with self._lock:
                link.probes.end(probe or 0, self._now_ms())

    def _enter(self, link: Link) -> int | None:
        """Begin a probe where one is due. A link is opened by one probe at a time, however long that takes."""
        with self._lock:
            if not link.failures:
                return 0
            now_ms = self._now_ms()
            opening = link.engine is None and link.probes.running
            if opening or link.cools_down(now_ms) or link.probes.wait_ms(now_ms):
                return None
            return link.probes.begin(now_ms)

    def _went_down(self, link: Link, error: SdsError, *, dfid: str | None) -> None:
        with self._lock:
            if link.cools_down(now_ms := self._now_ms()):  # another decision has found out already
                return
            link.down_ms = down_ms = min(link.cool_down_ms << min(link.failures, _DOUBLINGS_MAX), COOL_DOWN_MS_MAX)
            link.failures += 1
            link.down_until_ms = now_ms + down_ms
        facts = {"engine": link.name, "reason": reason_of(error), "cool_down_ms": down_ms}
        self._log("engine.down", {"dfid": dfid, **facts})

    def _came_back(self, link: Link, dfid: str, *, probe: int) -> None:
        """Close its breaker after a probe. Any other answer may belong to a question from before it went down."""
        with self._lock:
            if probe:
                link.failures = 0
        if probe:
            self._log("engine.up", {"dfid": dfid, "engine": link.name})


def _broken(link: Link, error: BaseException) -> ModelError:
    return ModelError(f"{link.name}: the engine failed: {type(error).__name__}")


def _close(link: Link) -> None:
    if link.engine is not None:
        link.engine.close()
