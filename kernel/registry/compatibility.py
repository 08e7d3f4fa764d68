"""The handshake (DIR 3.5): may this contract take its agent into service in this runtime? Pure; a refusal is a value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sds.kernel.canonical import control_in
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import PROPOSAL_SCHEMA


@dataclass(frozen=True, slots=True)
class Known:
    """A contract that the registry has for the gate or the agent of a new one. `revoked`: its hash if it was revoked."""

    agent_id: str
    gate: str
    status: str
    contract_hash: str
    version: str
    revoked: str | None


@dataclass(frozen=True, slots=True)
class Refusal:
    message: str
    hint: str = ""


def semver(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def refusal(contract: Contract, known: list[Known]) -> Refusal | None:
    """Return why this contract cannot be registered; None: it can."""
    why = _schema(contract) or next((why for each in known if (why := _against(contract, each))), None)
    registered = any(each.contract_hash == contract.hash for each in known)
    return why if why or registered else _controls(contract.written, ())


def _controls(part: Any, place: tuple[str, ...]) -> Refusal | None:
    """Refuse control characters: a text with them would be shown other than it is. A registered contract may have them."""
    if isinstance(part, str):
        code = control_in(part)
        where = ".".join(place)
        return Refusal(f"`{where}` holds the character {code}, which is not allowed", "leave it out") if code else None
    parts = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list | tuple) else ()
    return next((why for name, each in parts if (why := _controls(each, (*place, str(name))))), None)


def _schema(contract: Contract) -> Refusal | None:
    """Refuse another major version and a newer minor one: this runtime could not judge what a newer form may say."""
    wanted, ours = semver(contract.proposal_schema), semver(PROPOSAL_SCHEMA)
    if wanted[0] == ours[0] and wanted[1] <= ours[1]:
        return None
    return Refusal(
        f"the contract is written for proposal schema `{contract.proposal_schema}`, but this program supports"
        f" `{PROPOSAL_SCHEMA}`",
        "use a version of sds with that schema, or write the contract for this one",
    )


def _against(contract: Contract, known: Known) -> Refusal | None:
    """Refuse what contradicts a contract that is registered for the same gate or agent."""
    if (known.gate, known.agent_id) != (contract.gate, contract.agent_id):
        return Refusal(
            f"agent `{contract.agent_id}` cannot serve gate `{contract.gate}`: agent `{known.agent_id}` already serves"
            f" `{known.gate}`",
            "a gate has one agent for good: give another agent a gate and a name of its own",
        )
    if known.contract_hash == contract.hash:
        if known.revoked:
            return Refusal(f"version `{known.version}` was revoked", "register a higher version")
        return None
    if known.status == "RETIRED":
        return Refusal(f"agent `{known.agent_id}` is retired", "give the successor its own `gate` and `agent_id`")
    if semver(known.version) >= semver(contract.version):
        return Refusal(
            f"version `{contract.version}` differs from the registered `{known.version}` but is not higher",
            "raise the contract's version",
        )
    return None
