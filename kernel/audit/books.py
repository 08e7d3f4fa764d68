"""The parts of the ledger that do not belong to single flows. Each is folded into what its tables must contain."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from sds.kernel.canonical import sha256_hex
from sds.kernel.registry import carried_spend, windows
from sds.kernel.storage import ledger
from sds.kernel.storage.store import Reader

_DIGEST = re.compile("[0-9a-f]{64}")
_ANY = ""  # stands for the key of an open flow, which no entry has sealed yet
_REVOKED = "SELECT contract_hash, who, reason, revoked_at_ms FROM contract_revocations"
_BUDGETS = "SELECT agent_id, parts, at_ms FROM escalation_budgets"


def differences(what: str, rows: Iterable[tuple[Any, ...]], wanted: Mapping[Any, Any]) -> list[str]:
    """Compare (name, value) rows with the values that the ledger says."""
    now = dict(rows)
    differ = {name for names in (now, wanted) for name in names if now.get(name) != wanted.get(name)}
    return [
        f"{what} {name}: the table says {now.get(name)}, the ledger {wanted.get(name)}"
        for name in sorted(differ, key=str)
    ]


class Registry:
    """Agents, contracts, revocations, escalation budgets, the halt, and the windows of monitors. `fold` raises one of
    `NOT_AS_WRITTEN` for a malformed entry.
    """

    KINDS = frozenset({"CONTRACT", "AGENT", "REVOKED", "REFUSED", "HALT", "RESUME", "OPERATOR"})

    def __init__(self) -> None:
        self._agents: dict[str, list[str]] = {}  # agent -> gate, contract, status
        self._contracts: dict[str, str] = {}  # hash -> digest of its row
        self.carried: dict[str, str] = {}  # contract -> digest of what it counted of earlier orders
        self._revoked: dict[str, tuple[str, str, int]] = {}  # contract -> who, why, when
        self._budgets: dict[str, tuple[int, int]] = {}  # agent -> parts, when
        self._windows: dict[tuple[str, str], str] = {}  # agent, stream -> digest of the sums
        self._halted = False

    def fold(self, at_ms: int, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "CONTRACT":
            self._contracts[body["hash"]] = body["row"]
            if "carried" in body:
                self.carried[body["hash"]] = body["carried"]
            known = self._agents.setdefault(body["agent_id"], ["", "", "ACTIVE"])
            known[:2] = body["gate"], body["hash"]
        elif kind == "AGENT":
            self._agents[body["agent_id"]][2] = body["status"]
            if (body.get("was"), body["status"]) == ("SUSPENDED", "ACTIVE"):
                self._budgets.pop(body["agent_id"], None)
                for stream in ("decisions", "labels"):
                    self._windows.pop((body["agent_id"], stream), None)
        elif kind == "REVOKED":
            self._revoked[body["hash"]] = body["who"], body["reason"], at_ms
        elif kind in ("HALT", "RESUME"):
            self._halted = kind == "HALT"

    def decided(self, body: Mapping[str, Any]) -> None:
        """Fold a DECIDED entry: the budget that an escalation left, and the windows with this decision."""
        self.counted(body, "decisions")
        if "escalations" in body:
            parts, spent_at_ms = body["escalations"]
            self._budgets[body["agent_id"]] = parts, spent_at_ms

    def counted(self, body: Mapping[str, Any], stream: str) -> None:
        """Fold the digest of a stream's windows in an entry, if it has one."""
        if "monitors" in body:
            if not _DIGEST.fullmatch(body["monitors"]):
                raise ValueError("no digest")
            self._windows[body["agent_id"], stream] = body["monitors"]

    def faults(self, store: Reader) -> list[str]:
        agents = store.rows("SELECT agent_id, gate, contract_hash, status FROM agents")
        contracts = store.rows("SELECT * FROM contracts")
        carried = [(row[0], carried_spend.rows_digest(store, row[0])) for row in contracts if row[0] in self.carried]
        return [
            *differences("agent", ((row[0], list(row[1:])) for row in agents), self._agents),
            *differences("contract", ((row[0], ledger.rows_digest([row])) for row in contracts), self._contracts),
            *differences("spend before contract", carried, self.carried),
            *differences("revocation of contract", _by_name(store, _REVOKED), self._revoked),
            *differences("escalation budget of", _by_name(store, _BUDGETS), self._budgets),
            *windows.faults(store, self._windows),
            *([] if store.halted == self._halted else ["halted: the table and the ledger differ"]),
        ]


class Labels:
    """Later labels: at most one for each decision of an agent, with the confidence that the decision had."""

    def __init__(self) -> None:
        self._agents: dict[str, str] = {}  # dfid -> agent, for an agent's decisions without a label

    def decided(self, dfid: str, body: Mapping[str, Any]) -> None:
        """Fold a DECIDED entry: a decision of an agent may have a label."""
        if "agent_id" in body:
            self._agents[dfid] = body["agent_id"]

    def fold(self, store: Reader, dfid: str, body: Mapping[str, Any]) -> None:
        confidence = store.value("SELECT confidence FROM policy_proposals WHERE dfid = ?", (dfid,))
        if self._agents.pop(dfid) != body["agent_id"] or not isinstance(body["right"], bool):
            raise ValueError("no label")
        if body["confidence"] != confidence or not body["by"]:
            raise ValueError("not of this decision, or of nobody")


class Artifacts:
    """Reference texts: which versions were ever in force, when each ended, and which texts were swept."""

    KINDS = frozenset({"ARTIFACT", "RETENTION"})

    def __init__(self) -> None:
        self._versions: dict[str, list[str | int | None]] = {}  # name/version -> digest, digest of its text, ended at

    def fold(self, at_ms: int, kind: str, body: Mapping[str, Any]) -> None:
        if kind == "RETENTION":
            for name, version in body["artifacts"]:
                self._versions[f"{name}/{version}"][1] = None
            return
        name, version = body["name"], int(body["version"])
        if body["act"] == "retire":
            self._versions[f"{name}/{version}"][2] = at_ms
            return
        last = self._versions.get(f"{name}/{version - 1}")
        if last is not None and last[2] is None:
            last[2] = at_ms
        self._versions[f"{name}/{version}"] = [body["sha256"], body["sha256"], None]

    def unknown(self, read: Iterable[tuple[str, int, str]]) -> list[str]:
        """Return the artifacts that a decision cannot have read: only those that had been put by then can be read."""
        named = ((f"{name}/{version}", sha256) for name, version, sha256 in read)
        return [name for name, sha256 in named if self._versions.get(name, [""])[0] != sha256]

    def faults(self, store: Reader) -> list[str]:
        rows = store.rows("SELECT name, version, sha256, text, ended_at_ms FROM artifacts")
        return differences(
            "artifact",
            (
                (f"{name}/{version}", [sha256, None if text is None else _text_digest(text), ended])
                for name, version, sha256, text, ended in rows
            ),
            self._versions,
        )


class Erasures:
    """Which cases were erased. Every other case that needs a key must have the one that its flows were sealed with."""

    KINDS = frozenset({"ERASED"})

    def __init__(self) -> None:
        self._erased: dict[str, tuple[str, str, int]] = {}  # gate/event -> who, why, when
        self._keys: dict[str, str] = {}  # dfid -> digest of the key of its case

    def fold(self, at_ms: int, _kind: str, body: Mapping[str, Any]) -> None:
        for event_id in body["events"]:
            self._erased[f"{body['gate']}/{event_id}"] = body["who"], body["reason"], at_ms

    def sealed(self, dfid: str, key: str) -> None:
        """Fold what a flow's seals say of the key that its texts lie under."""
        self._keys[dfid] = key

    def faults(self, store: Reader, flows: Mapping[str, tuple[str, bool]]) -> list[str]:
        """Compare the tables with the ledger. `flows`: dfid -> (gate/event, whether its trigger is sealed)."""
        erasures = store.rows("SELECT gate || '/' || event_id, who, reason, erased_at_ms FROM erasures")
        rows = store.rows("SELECT gate || '/' || event_id, wrapped FROM case_keys")
        keys: dict[str, str] = {name: sha256_hex(wrapped) for name, wrapped in rows}
        wanted: dict[str, set[str]] = {name: set() for name, _ in flows.values()}
        for dfid, (name, sealed) in flows.items():
            if sealed or dfid in self._keys:
                wanted[name].add(self._keys.get(dfid, _ANY))
        found = ((name, self._fault(name, keys.get(name), wanted.get(name))) for name in sorted({*keys, *wanted}))
        return [
            *differences("erasure", ((row[0], row[1:]) for row in erasures), self._erased),
            *(f"key of case {name}: {why}" for name, why in found if why),
        ]

    def _fault(self, name: str, key: str | None, wanted: set[str] | None) -> str:
        """Return what is wrong with a case's key, or "". `wanted`: what its flows say of the key; None: it has no flow."""
        if wanted is None:
            return "the case is not in the record"
        if name in self._erased:
            return "it still exists, although the case was erased" if key else ""
        if wanted and key is None:
            return "it is missing, although nobody erased the case"
        return "it is not the key that its texts are sealed with" if wanted - {key, _ANY} else ""


def _by_name(store: Reader, sql: str) -> Iterable[tuple[str, tuple[Any, ...]]]:
    return ((row[0], row[1:]) for row in store.rows(sql))


def _text_digest(text: str) -> str:
    return sha256_hex(text.encode("utf-8", "surrogateescape"))
