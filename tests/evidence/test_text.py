"""Text from elsewhere: shown as it is, but for what a terminal would obey."""

from __future__ import annotations

import pytest

from samestate.evidence.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain · 两行\u3000−γ\n\tx", "plain · 两行\u3000−γ\n\tx"),
        ("\x1b[2J", r"\x1b[2J"),
        ("\x9b31m", r"\x9b31m"),
        ("a\rb\x07", r"a\rb\x07"),
        ("\u202egnp", r"\u202egnp"),
        ("s\udcff", r"s\udcff"),
    ],
)
def test_controls_are_escaped(text: str, shown: str) -> None:
    assert printable(text) == shown
