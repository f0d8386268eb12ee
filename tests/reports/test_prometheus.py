from __future__ import annotations

import re
from pathlib import Path

import pytest

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Verdict
from samestate.evidence.archive import Archive
from samestate.evidence.text import printable
from samestate.reports import prometheus as p

from . import made

parser = pytest.importorskip("prometheus_client.parser")
Samples = dict[str, list[tuple[dict[str, str], float]]]


def samples(archive: Archive, judgement: Judgement | None = None) -> Samples:
    """By metric, as Prometheus' own parser reads them; every one is a gauge of the catalogue."""
    found: Samples = {}
    for family in parser.text_string_to_metric_families(p.prometheus(made.report_of(archive, judgement))):
        assert (family.type, family.documentation) == ("gauge", p.HELP[family.name])
        found[family.name] = [(sample.labels, sample.value) for sample in family.samples]
    return found


def state(found: Samples, name: str, **labels: str) -> list[str]:
    """States that a state set says it is in."""
    return [of["state"] for of, value in found[name] if value and labels.items() <= of.items()]


def test_a_verdict_is_in_exactly_one_state(clean: Archive, faulted: Archive) -> None:
    right, wrong = samples(clean), samples(faulted)
    assert state(right, p.RUN_VERDICT, plan="boundary") == ["pass"]
    assert state(wrong, p.RUN_VERDICT, plan="boundary") == ["fail"]
    assert state(wrong, p.CHECK_VERDICT, check="boundary") == ["fail"]
    assert state(wrong, p.CHECK_VERDICT, check="integrity") == ["pass"]
    assert state(right, p.CHECK_VERDICT, check="controls-equal") == ["not_exercised"]
    assert {labels["state"] for labels, _ in right[p.RUN_VERDICT]} == set(Verdict)


def test_what_is_counted(faulted: Archive) -> None:
    found = samples(faulted)
    examined = {labels["check"]: (labels["unit"], value) for labels, value in found[p.CHECK_EXAMINED]}
    assert examined["boundary"] == ("reloads", 3)
    findings = {(labels["check"], labels["verdict"]): value for labels, value in found[p.CHECK_FINDINGS]}
    assert findings["boundary", "fail"] >= 1
    cases = {labels["verdict"]: value for labels, value in found[p.CASES]}
    assert (cases["fail"], sum(cases.values())) == (1, 3)
    assert found[p.RUN_RECORDS][0][1] == made.report_of(faulted).records > 0
    assert found[p.PERFORMANCE_ELIGIBLE][0][1] == 0
    assert found[p.RUN_INFO][0][0]["fault"] == "full-lookup"


def test_a_required_check_without_a_result_is_unknown(clean: Archive) -> None:
    found = samples(clean, made.faulty())
    assert state(found, p.CHECK_VERDICT, check="transfers") == ["unknown"]
    assert {labels["check"]: value for labels, value in found[p.CHECK_REQUIRED]} == {"boundary": 1, "transfers": 1}


def test_labels_come_back_as_they_were(clean: Archive) -> None:
    found = samples(clean, made.evil())
    assert [labels["check"] for labels, _ in found[p.CHECK_REQUIRED]] == [printable(made.EVIL)]
    backslash = made.judgement(fault='a\\nb"c\\')
    assert samples(clean, backslash)[p.RUN_INFO][0][0]["fault"] == 'a\\nb"c\\'


def test_every_metric_has_a_help_line_and_a_prefix() -> None:
    assert all(name.startswith("samestate_") for name in p.HELP)


def test_the_documentation_lists_every_metric_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs/reports.md").read_text()
    assert set(re.findall(r"^\| `(samestate_\w+)` \|", text, re.M)) == set(p.HELP)
