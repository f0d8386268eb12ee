"""Output on terminals and into pipes of any encoding."""

from __future__ import annotations

import codecs
import io
import sys

_ERRORS = "samestate.plain"
_PLAIN = {
    "–": "-",
    "−": "-",
    "─": "-",
    "·": ".",
    "…": "...",
    "×": "x",
    "⌊": "floor(",
    "⌋": ")",
    "≤": "<=",
    "≥": ">=",
    "γ": "gamma",
}


def write_anything() -> None:
    """Never fail for want of a character: what the encoding lacks is written plainly, or as an escape."""
    codecs.register_error(_ERRORS, _plainly)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_ERRORS)


def _plainly(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(_PLAIN.get(c) or c.encode("unicode_escape").decode() for c in lacking), error.end
