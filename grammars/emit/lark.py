"""The language in llguidance's dialect of Lark: one terminal, the whole proposal.

One terminal and no rules, because llguidance reads terminals greedily: a number in a terminal of its own would
compete with the longer number beside it. Inside one expression its lexer knows every byte that is forced.
"""

from __future__ import annotations

from sds.grammars.language import Language


def emit(language: Language) -> str:
    """Return the grammar. Raises LanguageError as the regular expression does."""
    return f"start: /{language.regex()}/\n"
