from __future__ import annotations

import pytest

from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.table import CaseRow, against

REQUIRED = ["integrity", "paired-equality", "boundary", "settings"]


def row(case: str, verdict: Verdict = Verdict.FAIL, **more: object) -> CaseRow:
    fields: dict[str, object] = {
        "case": case, "tokens": 32, "first_difference": None, "equal": True, "boundary": 16, "boundary_reported": True,
        "content_boundary": None, "credited": 16, "scheduled": 16, "suffix": 16, "rank_bytes": [1], "verdict": verdict,
    }  # fmt: skip
    return CaseRow.model_validate(fields | more)


def result(check: str, verdict: Verdict, *places: Place) -> CheckResult:
    findings = [Finding(code="c", verdict=verdict, message="m", place=place) for place in places]
    return CheckResult(check=check, verdict=verdict, summary="", unit="reloads", examined=1, findings=findings)


def passing(*checks: str) -> list[CheckResult]:
    return [result(check, Verdict.PASS) for check in checks]


def test_a_row_names_what_speaks_against_it_and_what_compares_tokens_last() -> None:
    results = [
        *passing("integrity", "settings"),
        result("paired-equality", Verdict.FAIL, Place(case="N32"), Place(case="N48")),
        result("boundary", Verdict.FAIL, Place(case="N32", op="N32.reload")),
    ]
    rows = [row("N31", Verdict.PASS), row("N32"), row("N48"), row("N64")]
    assert against(rows, results, REQUIRED) == [[], ["boundary", "paired-equality"], ["paired-equality"], []]


def test_what_fails_comes_before_what_is_unknown() -> None:
    results = [
        result("integrity", Verdict.UNKNOWN, Place()),
        result("paired-equality", Verdict.FAIL, Place(case="N32")),
        *passing("boundary", "settings"),
    ]
    assert against([row("N32")], results, REQUIRED) == [["paired-equality", "integrity"]]


def test_a_check_that_is_missing_or_not_required() -> None:
    results = [*passing("integrity", "paired-equality", "boundary"), result("other", Verdict.FAIL, Place(case="N32"))]
    assert against([row("N32")], results, REQUIRED) == [["settings"]]


def test_a_check_that_told_nothing_speaks_against_every_row() -> None:
    results = [*passing("integrity", "paired-equality", "boundary"), result("settings", Verdict.NOT_EXERCISED)]
    assert against([row("N32"), row("N48")], results, REQUIRED) == [["settings"], ["settings"]]


@pytest.mark.parametrize(
    ("place", "concerned"),
    [
        (Place(), True),
        (Place(case="trunk"), True),
        (Place(case="trunk", arm="control"), True),
        (Place(case="trunk", op="trunk.2"), True),
        (Place(case="trunk", op="trunk.1"), False),
        (Place(case="trunk", arm="second"), False),
        (Place(case="other"), False),
        (Place(case="trunk", repetition=2), False),
    ],
)
def test_of_a_scenario_arm_operation_and_repetition_count(place: Place, concerned: bool) -> None:
    one = row("trunk", arm="candidate", op="trunk.2", repetition=1)
    results = [*passing("integrity", "paired-equality", "settings"), result("boundary", Verdict.FAIL, place)]
    assert against([one], results, REQUIRED) == [["boundary"] if concerned else []]
