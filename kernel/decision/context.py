"""What a model may read besides the case, as plain data, and the protocol of its reader. The core imports no reader."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sds.kernel.contract.schema import Contract


@dataclass(frozen=True, slots=True)
class Artifact:
    """One version of a reference text, as the model reads it."""

    name: str
    version: int
    sha256: str
    text: str

    @property
    def reference(self) -> tuple[str, int, str]:
        """What the record keeps of it: name, version, SHA-256."""
        return self.name, self.version, self.sha256


class ContextReader(Protocol):
    """Reads the artifacts and the memory of one gate. `sds.kernel.context.memory` has the one that reads the record."""

    def artifacts(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        """Return the texts in force in the contract's order, or none of them and the reasons why. Raises nothing."""

    def in_force(self, artifacts: tuple[Artifact, ...]) -> bool:
        """Tell, in the caller's transaction, whether exactly these versions are still in force."""

    def memory(self, key: str, now_ms: int) -> str:
        """Return what became of earlier decisions, as the model reads it; "" for none. May raise anything."""


class NoContext:
    """A reader that has nothing. A contract that names artifacts leaves only the human then."""

    def __init__(self, contract: Contract) -> None:
        self._faults = tuple(f"this kernel cannot read artifact `{name}`" for name in contract.artifacts.names)

    def artifacts(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        return (), self._faults

    def in_force(self, artifacts: tuple[Artifact, ...]) -> bool:
        return not artifacts

    def memory(self, key: str, now_ms: int) -> str:  # noqa: ARG002  the protocol's
        return ""
