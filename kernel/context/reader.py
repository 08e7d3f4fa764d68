"""Memory and artifacts of one gate, read from its record: what a kernel is given as its `ContextReader`."""

from __future__ import annotations

from sds.kernel.canonical import in_words, one_line, sha256_hex
from sds.kernel.context import memory
from sds.kernel.context.memory import CountTokens, counted
from sds.kernel.contract.schema import Contract
from sds.kernel.contract.sections import ArtifactSpec
from sds.kernel.decision.context import Artifact
from sds.kernel.decision.packet import artifacts_text
from sds.kernel.storage.store import Reader

_IN_FORCE = "SELECT 1 FROM artifacts WHERE name = ? AND version = ? AND sha256 = ? AND ended_at_ms IS NULL"


def bytes_of(text: str) -> int:
    """Count UTF-8 bytes: no byte-level tokenizer makes more tokens of a text."""
    return len(text.encode())


class ArtifactReader:
    """The artifacts that one contract names. Its tokens are counted once for each set of versions."""

    def __init__(self, store: Reader, spec: ArtifactSpec, count_tokens: CountTokens) -> None:
        self._store, self._spec, self._count = store, spec, count_tokens
        self._names = tuple(dict.fromkeys(spec.names))
        self._counted: tuple[tuple[Artifact, ...], int] = ((), 0)

    def read(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        """Return the texts in force in the contract's order, or none of them and why not."""
        if not self._names:
            return (), ()
        try:
            found, faults = self._in_force()
            tokens = self._tokens(found)
        except Exception as error:  # noqa: BLE001  a foreign tokenizer may fail in any way; without the texts, a human decides
            return (), (one_line(f"the artifacts cannot be read: {in_words(error)}", 200),)
        if tokens > self._spec.tokens_max:
            faults = (*faults, f"the artifacts are {tokens} tokens long, more than {self._spec.tokens_max}")
        return (() if faults else found), faults

    def _in_force(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        names = self._names
        rows = self._store.rows(
            "SELECT name, version, sha256, text FROM artifacts WHERE ended_at_ms IS NULL"
            f" AND name IN ({', '.join('?' * len(names))})",
            names,
        )
        kept = {row[0]: Artifact(*row) for row in rows}
        faults = [f"artifact `{name}` is missing" for name in names if name not in kept]
        faults += [f"artifact `{a.name}` was altered" for a in kept.values() if sha256_hex(a.text.encode()) != a.sha256]
        return tuple(kept[name] for name in names if name in kept), tuple(faults)

    def _tokens(self, found: tuple[Artifact, ...]) -> int:
        if self._counted[0] != found:
            self._counted = found, counted(self._count, artifacts_text(found))
        return self._counted[1]


class RecordedContext:
    """The context of a contract's decisions. `count_tokens`: how long a text is for the model, or an upper bound."""

    def __init__(self, record: Reader, contract: Contract, count_tokens: CountTokens = bytes_of) -> None:
        self._record, self._contract, self._count_tokens = record, contract, count_tokens
        self._reader = ArtifactReader(record, contract.artifacts, count_tokens)

    def artifacts(self) -> tuple[tuple[Artifact, ...], tuple[str, ...]]:
        return self._reader.read()

    def in_force(self, read: tuple[Artifact, ...]) -> bool:
        return all(self._record.row(_IN_FORCE, artifact.reference) is not None for artifact in read)

    def memory(self, key: str, now_ms: int) -> str:
        entries = memory.memory(self._record, self._contract, key, now_ms=now_ms)
        return memory.memory_text(self._contract.memory, entries, self._count_tokens)
