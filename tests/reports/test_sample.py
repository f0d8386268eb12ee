from __future__ import annotations

import re
from pathlib import Path

from .pages import Reader
from .sample import PAGE, sample


def structure(text: str) -> list[tuple[str, str, str]]:
    """Elements with class and id, and the words of headings; numbers left out, as times and hashes change."""
    reader = Reader(text)
    assert reader.faults == []
    elements = [
        (tag, at.get("class", ""), at.get("id", "")) for tag, at in reader.elements if tag not in {"rect", "line"}
    ]
    words = [
        (tag, re.sub(r"\d+", "#", data), "") for tag, data in reader.texts if tag in {"h1", "h2", "h3", "th", "dt"}
    ]
    return elements + words


def test_the_sample_is_what_is_made_today(tmp_path: Path) -> None:
    """Else make it anew: ``.venv/bin/python tests/reports/sample.py``."""
    shipped, today = structure(PAGE.read_text()), structure(sample(tmp_path))
    assert len(today) > 500
    assert shipped == today


def test_the_sample_is_small_and_shows_a_fault() -> None:
    text = PAGE.read_text()
    assert len(text.encode()) < 400_000
    assert "Fault injected: full-lookup" in text and "No model ran" in text
