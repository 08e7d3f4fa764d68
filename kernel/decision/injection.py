"""Prompt-injection patterns in untrusted text (DIR SC-3): detected and recorded, never acted upon.

This is a tripwire for the operator. What keeps an injection harmless is that the text cannot reach the envelope.
"""

from __future__ import annotations

import re

TEXT_CHARS_MAX = 16_384

_PATTERNS = (
    ("OVERRIDE_INSTRUCTIONS", r"\b(ignore|disregard|forget|override)\b.{0,40}\b(instruction|rule|prompt|polic|above)"),
    ("ROLE_CHANGE", r"\byou are now\b|\bact as\b|\bpretend to be\b|\bsystem\s*(:|(prompt|message|override)\b)"),
    ("CONTROL_TOKEN", r"<\|[a-z_]{2,20}\|>|\[/?inst\]|</?s>|###\s*(system|instruction)"),
    ("FORGED_DECISION", r"\"(?:action|params|reason)\"\s*:|\bcontext_ref\b|\breason_code\b"),
    ("FORGED_AUTHORITY", r"\b(admin|developer|root|debug)\s+mode\b|\bapproved by\b.{0,30}\b(manager|supervisor|admin)"),
)
_COMPILED = tuple((name, re.compile(pattern, re.IGNORECASE | re.DOTALL)) for name, pattern in _PATTERNS)


def findings(text: str) -> tuple[str, ...]:
    """Return the names of the patterns found in the first `TEXT_CHARS_MAX` characters."""
    head = text[:TEXT_CHARS_MAX]
    return tuple(name for name, pattern in _COMPILED if pattern.search(head))


def passages(text: str) -> tuple[tuple[int, int, tuple[str, ...]], ...]:
    """Return where these patterns lie, in order, none overlapping another: (start, end, their names)."""
    head = text[:TEXT_CHARS_MAX]
    found = sorted((m.start(), m.end(), name) for name, pattern in _COMPILED for m in pattern.finditer(head))
    joined: list[tuple[int, int, tuple[str, ...]]] = []
    for start, end, name in found:
        if joined and start < joined[-1][1]:
            first, last, names = joined[-1]
            joined[-1] = first, max(last, end), tuple(dict.fromkeys((*names, name)))
        else:
            joined.append((start, end, (name,)))
    return tuple(joined)
