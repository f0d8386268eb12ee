"""Text that came from elsewhere, made safe to show."""

from __future__ import annotations

import unicodedata

_OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Controls, invisible formats (bidirectional overrides among them), lone surrogates, line and paragraph separators."""


def is_control(character: str) -> bool:
    """Whether a terminal may obey `character` instead of showing it. Newline and tab do no harm."""
    return character not in "\n\t" and unicodedata.category(character) in _OBEYED


def printable(text: str) -> str:
    """`text` with its control characters written as escapes: ``\\x1b``."""
    if text.isprintable():
        return text
    return "".join(c.encode("unicode_escape").decode() if is_control(c) else c for c in text)
