"""docs/plans.md has every shipped plan, under its own title and analyzer, and names only codes that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestate.checks.analyzers import ANALYZERS
from samestate.plans.load import load, shipped

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "plans.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `([a-z-]+)` \| (.+) \| `([a-z0-9-]+-v1)` \|$", DOCUMENT, re.MULTILINE)


def test_every_shipped_plan_has_its_row() -> None:
    assert sorted(name for name, _, _ in ROWS) == sorted(shipped())
    for name, title, analyzer in ROWS:
        assert (title, analyzer) == (load(name).title, load(name).analyzer.id)


@pytest.mark.parametrize("name", ["pressure", "conversation", "cacheability"])
def test_a_plan_with_rules_of_its_own_requires_all_of_its_analyzer(name: str) -> None:
    plan = load(name)
    assert set(ANALYZERS[plan.analyzer.id].floor) <= set(plan.required_checks)
    assert f"## `{name}`" in DOCUMENT


def test_the_codes_are_those_of_the_checks() -> None:
    sources = [ROOT / "src/samestate/checks" / f"{name}.py" for name in ("hit_length", "floor", "scenario")]
    known = "".join(source.read_text(encoding="utf-8") for source in sources)
    section = DOCUMENT.split("## `cacheability`")[1].split("## ")[0]
    codes = re.findall(r"^\| `([a-z_]+)` \|", section, re.MULTILINE)
    assert len(codes) == 7
    assert [code for code in [*codes, "decode_state"] if f'"{code}"' not in known] == []
