"""Memory and artifacts of one gate, read from its record: what a kernel is given as its `ContextReader`."""

from __future__ import annotations

from sds.kernel.context import artifacts, memory
from sds.kernel.context.artifacts import ArtifactReader, CountTokens
from sds.kernel.contract.schema import Contract
from sds.kernel.decision.context import Artifact
from sds.kernel.storage.store import Reader


def bytes_of(text: str) -> int:
    """Count UTF-8 bytes: no byte-level tokenizer makes more tokens of a text."""
    return len(text.encode())


class RecordedContext:
    """The context of a contract's decisions. `count_tokens`: how long a text is for the model, or an upper bound."""

    def __init__(self, record: Reader, contract: Contract, count_tokens: CountTokens = bytes_of) -> None:
        self._record, self._contract, self._count_tokens = record, contract, count_tokens
        self._reader = ArtifactReader(record, contract.artifacts, count_tokens)

    def artifacts(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        return self._reader.read()

    def in_force(self, read: tuple[Artifact, ...]) -> bool:
        return artifacts.in_force(self._record, read)

    def memory(self, key: str, now_ms: int) -> str:
        entries = memory.memory(self._record, self._contract, key, now_ms=now_ms)
        return memory.memory_text(self._contract.memory, entries, self._count_tokens)
