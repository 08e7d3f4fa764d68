"""llguidance's compiled mask, asked byte by byte: token n of its byte tokenizer is byte n."""

from __future__ import annotations

from llguidance import LLMatcher, LLTokenizer


class ByteMatcher:
    def __init__(self, lark: str) -> None:
        self._matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(lark))
        self._check()

    def allowed(self) -> list[int]:
        mask = self._matcher.compute_bitmask()
        self._check()
        return [byte for byte in range(256) if mask[byte // 8] >> byte % 8 & 1]

    def accepts(self, data: bytes) -> bool:
        """Tell whether the mask permits every byte in turn and the end after the last."""
        self._matcher.reset()
        for byte in data:
            mask = self._matcher.compute_bitmask()
            if not mask[byte // 8] >> byte % 8 & 1:
                return False
            self._matcher.consume_token(byte)
            self._check()
        return self._matcher.is_accepting()

    def accepts_quickly(self, data: bytes) -> bool:
        """Tell the same without a mask for every byte."""
        self._matcher.reset()
        taken = self._matcher.try_consume_tokens(list(data))
        self._check()
        return taken == len(data) and self._matcher.is_accepting()

    def everything(self) -> set[bytes]:
        """Return all strings the mask permits; only for small, finite languages."""
        found: set[bytes] = set()
        self._matcher.reset()
        self._walk(b"", found)
        return found

    def _walk(self, written: bytes, found: set[bytes]) -> None:
        if self._matcher.is_accepting():
            found.add(written)
        if self._matcher.is_stopped():
            return
        for byte in self.allowed():
            self._matcher.consume_token(byte)
            self._check()
            self._walk(written + bytes([byte]), found)
            self._matcher.rollback(1)

    def _check(self) -> None:
        assert self._matcher.get_error() == ""
