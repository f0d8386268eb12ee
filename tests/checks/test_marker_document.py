"""docs/markers.md names every class, every check and every way in which a budget is broken."""

from __future__ import annotations

import re
from pathlib import Path

from samestate.checks import marker_budget, marker_patches
from samestate.checks.analyzers import ANALYZERS, LOCAL_HIT_V1, MARKER_FROZEN_V1, MARKER_POST_STOP_V1
from samestate.checks.marker_classes import TokenClass

DOCUMENT = (Path(__file__).parents[2] / "docs" / "markers.md").read_text(encoding="utf-8")


def test_every_check_and_class_is_in_the_document() -> None:
    for analyzer in (MARKER_FROZEN_V1, MARKER_POST_STOP_V1):
        own = ANALYZERS[analyzer].checks.keys() - ANALYZERS[LOCAL_HIT_V1].checks.keys()
        for word in (analyzer, *own):
            assert f"`{word}`" in DOCUMENT
    for name in TokenClass:
        assert f"| `{name.value}` |" in DOCUMENT


def test_every_violation_is_in_the_document() -> None:
    source = Path(marker_budget.__file__).read_text(encoding="utf-8")
    codes = set(re.findall(r'"((?:[a-z]+_)+[a-z]+)"', source)) - {"missing_answer", "trace_not_usable", "no_close_due"}
    told = set(re.findall(r"^\| `([a-z_]+)` \|", DOCUMENT.partition("What `budget-close` finds")[2], re.MULTILINE))
    assert codes == told


def test_the_two_analyzers_have_one_set_of_checks_and_differ_by_their_rule() -> None:
    frozen, post_stop = ANALYZERS[MARKER_FROZEN_V1], ANALYZERS[MARKER_POST_STOP_V1]
    assert list(frozen.checks) == list(post_stop.checks)
    assert (frozen.floor, frozen.conditional, frozen.reported) == (
        post_stop.floor,
        post_stop.conditional,
        post_stop.reported,
    )
    assert {"budget-rows", "second-close", "anomalies"} == set(post_stop.reported)


def test_every_finding_about_patches_is_in_the_document() -> None:
    source = Path(marker_patches.__file__).read_text(encoding="utf-8")
    codes = set(re.findall(r'(?:fail|unknown)\("([a-z_]+)"', source))
    table = DOCUMENT.partition("What `identity` finds of patches")[2].partition("\n\nThe policy")[0]
    told = set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE))
    assert codes == told
