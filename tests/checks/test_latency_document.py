"""docs/latency.md names every path, every check of its own, and every word for what is not there."""

from __future__ import annotations

import re
from pathlib import Path

from samestate.checks.analyzers import ANALYZERS
from samestate.checks.latency_copies import GOAL
from samestate.checks.latency_paths import ActualPath
from samestate.checks.latency_statistics import LEAST_FOR_INTERVAL
from samestate.checks.latency_study import NOT_COMPARABLE, UNAVAILABLE

DOCUMENT = (Path(__file__).parents[2] / "docs" / "latency.md").read_text(encoding="utf-8")


def test_every_path_is_there() -> None:
    assert [path.value for path in ActualPath if f"`{path.value}`" not in DOCUMENT] == []


def test_exactly_the_checks_of_its_own_are_there() -> None:
    analyzers = (ANALYZERS["latency-v1"], ANALYZERS["latency-side-v1"])
    own = {check for analyzer in analyzers for check in analyzer.checks if check.startswith("latency-")}
    assert set(re.findall(r"^\| `(latency-[a-z-]+)` \|", DOCUMENT, re.MULTILINE)) == own


def test_every_piece_of_a_reload_is_there() -> None:
    for piece in ("arrival", "lookup", "queue", "load", "schedule", "suffix compute", "first token"):
        assert re.search(rf"^\| {piece} \|", DOCUMENT, re.MULTILINE)
    assert f"The goal is {GOAL:g} at most" in DOCUMENT


def test_words_and_numbers_are_those_of_the_study() -> None:
    for word in (UNAVAILABLE, NOT_COMPARABLE, "range over 6 groups (not CI)"):
        assert f"`{word}`" in DOCUMENT
    assert f"at least {LEAST_FOR_INTERVAL} inputs" in DOCUMENT
