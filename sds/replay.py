"""Decides a recorded decision again and says whether it is identical, or what differs. It changes nothing anywhere.

Texts, envelope and context reference come from the record, weights and machine from here. A decision that was made in a
batch is decided alone, with as many slots as its bits need. Other scores may then differ, and the result says why.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

from sds.decoding.decoder import Mode
from sds.decoding.probabilities import JOINT
from sds.engines.factory import cores, library_of_record, open_engine
from sds.engines.native import backend_errors
from sds.engines.protocol import Engine
from sds.kernel.audit.stored_decision import Decided, read_decided
from sds.kernel.contract.sections import PROPOSAL_SCHEMA
from sds.kernel.decision.packet import NOT_ASKED, Decoding
from sds.kernel.envelope.proposal import Proposal, parse_recorded
from sds.kernel.errors import UsageError
from sds.kernel.storage.store import Store
from sds.models.catalog.backends import BACKENDS, DEFAULT
from sds.models.protocol import CARD_SLOTS_MAX

NOT_REPLAYABLE = "NOT_REPLAYABLE"
REPLAY_MS_MAX = 10 * 60_000
REPLAY_TOKENS_MAX = 1 << 20  # the model's own context is less
# The facts a decision depends on besides its packet, in the order in which to look for a cause.
CIRCUMSTANCES = (
    "proposal_schema",
    "judgement",
    "weights",
    "library",
    "torch",
    "numpy",
    "passes",
    "machine",
    "device",
    "card",
    "dtype",
    "in_8_bits",
    "rest",
    "threads",
    "slots",
    "mode",
    "noise_logp_max",
    "prompt",
    "plan",
    "rows",
)
POLICY = "policy"  # the mode of a decision made by a policy
_LEAST = math.ulp(0.0)

Open = Callable[[Mapping[str, Any], str], Engine]  # takes the decision's facts and the body of its contract
Shares = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Circumstance:
    """One fact that differs. None: the record, or the replay, does not have it."""

    name: str
    recorded: object
    replayed: object


@dataclass(frozen=True, slots=True)
class Parting:
    """The first choice that fell otherwise, and the probability of both options, as recorded and as replayed.

    An option that was ruled out together with others has its part of the joint name, `A|B`. None: it was not an option.
    """

    choice: str
    recorded: str
    replayed: str
    recorded_shares: tuple[float | None, float | None]
    replayed_shares: tuple[float | None, float | None]


@dataclass(frozen=True, slots=True)
class Replay:
    """The result of a replay. `faults`: where the record differs from what was sealed. `logp_apart_max`: the greatest
    difference between scores of choices that fell alike, 0.0 where they are bit-equal. `shared`: passes with other decisions.
    """

    dfid: str
    recorded: bytes
    replayed: bytes
    faults: tuple[str, ...]
    circumstances: tuple[Circumstance, ...]
    parting: Parting | None
    logp_apart_max: float
    shared: int
    bit_equal: bool

    @property
    def same_decision(self) -> bool:
        """Whether the bytes are the same, or the same proposal in the forms of two schemas."""
        was = parse_recorded(self.recorded)
        return self.recorded == self.replayed or (isinstance(was, Proposal) and was == parse_recorded(self.replayed))

    @property
    def identical(self) -> bool:
        """Whether bytes and probabilities are bit-equal, and the record is what was sealed."""
        return self.bit_equal and not self.faults


def replay(store: Store, dfid: str, *, open_it: Open, now_ms: Callable[[], int]) -> Replay:
    """Decide a flow again. Raises UsageError for a flow that cannot be replayed, StoreError, ModelError, LanguageError."""
    with store.frozen() as reader:
        decided = read_decided(reader, dfid)
    refuse_unless_replayable(decided)
    body = str(store.value("SELECT body FROM contracts WHERE hash = ?", (decided.packet.contract_hash,)) or "")
    with closing(open_it(decided.decoding.facts, body)) as engine:
        packet = replace(decided.packet, expires_at_ms=now_ms() + REPLAY_MS_MAX)
        return compare(decided, *engine.propose(packet, tokens_max=REPLAY_TOKENS_MAX))


def opener(model: Path | None, *, now_ms: Callable[[], int], readers: Path | None = None) -> Open:
    """Return a function that opens a native engine with this model as the record describes it; one slot, where bits permit.

    A decision made by a policy is replayed by the recorded contract's policy, with these fitted readers.
    """

    def open_it(facts: Mapping[str, Any], contract: str) -> Engine:
        if facts["mode"] == POLICY:
            return _policy_of(contract, readers, model, now_ms)
        library = library_of_record(facts)
        how = {name: facts[name] for name in ("device", "dtype") if name in facts}
        backend = BACKENDS[library or DEFAULT]
        slots = _slots(facts) if backend.bits_need_slots else 1
        how["threads"] = min(facts.get("threads") or 1, cores())
        as_is = bool(backend.measured_in) and _are_weights(model, facts.get("weights"))
        return open_engine(
            model, now_ms=now_ms, library=library, mode=facts["mode"], as_is=as_is, slots=slots, skip_warmup=True, **how
        )

    return open_it


def _policy_of(body: str, readers: Path | None, model: Path | None, now_ms: Callable[[], int]) -> Engine:
    from sds.kernel.registry.contract_versions import recorded_contract  # noqa: PLC0415  for policies only
    from sds.policy.opening import open_policy  # noqa: PLC0415

    asked = False

    def open_model() -> Engine:
        nonlocal asked
        asked = True
        return open_engine(model, now_ms=now_ms)

    engine = open_policy(recorded_contract(body), readers, open_model=open_model, now_ms=now_ms)
    if model is not None and not asked:
        engine.close()
        raise UsageError("the flow was decided by a policy that asks no language model", hint="leave out --model")
    return engine


def _slots(facts: Mapping[str, Any]) -> int:
    slots = facts.get("slots")
    return slots if isinstance(slots, int) and 1 <= slots <= CARD_SLOTS_MAX else 1


def _are_weights(model: Path | None, weights: object) -> bool:
    """Return whether these are the weights that decided; then weights prepared from them since must not be used."""
    from sds.models.catalog.catalog import embedded_model  # noqa: PLC0415
    from sds.models.files.fingerprint import gguf_fingerprint  # noqa: PLC0415

    with backend_errors():
        path = model or embedded_model()
        return path.is_file() and gguf_fingerprint(path) == weights


def refuse_unless_replayable(decided: Decided) -> None:
    """Raise UsageError where no native model decided, or what it depended on was not recorded."""
    decoding, dfid = decided.decoding, decided.packet.dfid
    if decoding.model == NOT_ASKED:
        raise _refused(f"no model was asked in flow `{dfid}`: only one decision was possible", dfid)
    if decoding.alternatives is None:
        raise _refused(f"flow `{dfid}` was decided by `{decoding.model}`, an engine that cannot be replayed", dfid)
    if not decoding.facts:
        raise _refused(f"the record of flow `{dfid}` does not say what its decision depended on", dfid)
    if decoding.facts.get("mode") not in (*get_args(Mode), POLICY):
        raise _refused(f"flow `{dfid}` was decided in a mode that this program does not have", dfid)


def _refused(why: str, dfid: str) -> UsageError:
    return UsageError(why, reason_code=NOT_REPLAYABLE, dfid=dfid)


def compare(decided: Decided, data: bytes, decoding: Decoding) -> Replay:
    """Compare the recorded decision with the replayed one. Pure."""
    before, after = decided.decoding.alternatives or (), decoding.alternatives or ()
    parted, apart = _parting(before, after)
    # as the record has them: JSON, which reads every float back exactly
    facts: dict[str, Any] = json.loads(json.dumps(dict(decoding.facts)))
    return Replay(
        dfid=decided.packet.dfid,
        recorded=decided.data,
        replayed=data,
        faults=decided.faults,
        circumstances=_circumstances(*_with_schemas(decided, facts)),
        parting=parted,
        logp_apart_max=apart,
        shared=_shared(decided.decoding.facts, facts),
        bit_equal=data == decided.data and list(before) == list(after),
    )


def _with_schemas(decided: Decided, facts: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the facts of both with the proposal schema of each. All schemas of one major version have the same form."""
    was, ours = decided.schema or None, PROPOSAL_SCHEMA
    if was and was.partition(".")[0] == ours.partition(".")[0]:
        was = ours
    return {**decided.decoding.facts, "proposal_schema": was}, {**facts, "proposal_schema": ours}


def _circumstances(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> tuple[Circumstance, ...]:
    pairs = ((name, recorded.get(name), replayed.get(name)) for name in CIRCUMSTANCES)
    return tuple(Circumstance(name, was, now) for name, was, now in pairs if was != now)


def _shared(recorded: Mapping[str, Any], replayed: Mapping[str, Any]) -> int:
    """Return the number of passes that held more rows when recorded than when replayed alone."""
    pairs = zip(recorded.get("rows") or (), replayed.get("rows") or (), strict=False)
    return sum(was[1] > now[1] for was, now in pairs)


def _parting(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]]) -> tuple[Parting | None, float]:
    """Return where two decisions part, and the greatest difference between their scores up to there."""
    apart = 0.0
    for was, now in zip(before, after, strict=False):
        if was["choice"] != now["choice"]:
            break
        apart = max(apart, _greatest_difference(was, now))
        if was["chosen"] != now["chosen"]:
            options = was["chosen"], now["chosen"]
            return Parting(was["choice"], *options, _both_shares(was, options), _both_shares(now, options)), apart
    return None, apart


def _both_shares(choice: Mapping[str, Any], options: tuple[str, str]) -> tuple[float | None, float | None]:
    recorded, replayed = (_share(choice["probabilities"], option) for option in options)
    return recorded, replayed


def _share(shares: Shares, option: str) -> float | None:
    if option in shares:
        return shares[option]
    return next((share for label, share in shares.items() if option in label.split(JOINT)), None)


def _greatest_difference(was: Mapping[str, Any], now: Mapping[str, Any]) -> float:
    """Return the greatest difference between log-probabilities of common options, or between those of Z."""
    known = was["probabilities"].keys() & now["probabilities"].keys()
    pairs = [(was["probabilities"][label], now["probabilities"][label]) for label in known]
    return max(abs(math.log(max(a, _LEAST)) - math.log(max(b, _LEAST))) for a, b in [*pairs, (was["z"], now["z"])])
