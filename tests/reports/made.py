"""Judgements made by hand, and reports of archives."""

from __future__ import annotations

from typing import Any

from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.history import History
from samestate.checks.table import CaseRow
from samestate.evidence.archive import Archive
from samestate.reports.model import Report, report

EVIL = "<script>alert(1)</script>\x1b[2J\u202e\x00\ufffe | `x` [y](http://127.0.0.1:9/z) ![i](//e/i) @all \n# head \"'"
"""What an archive may say to be obeyed instead of shown."""


def report_of(archive: Archive, judgement: Judgement | None = None) -> Report:
    """The report of an archive, under another judgement if given."""
    return report(judgement or judge(archive), History.read(archive))


def evil() -> Judgement:
    """A judgement whose every text is `EVIL`."""
    finding = Finding(
        code=EVIL, verdict=Verdict.FAIL, message=EVIL, place=Place(case=EVIL), evidence=[EVIL, f"{EVIL}:1"]
    )
    result = CheckResult(check=EVIL, verdict=Verdict.FAIL, summary=EVIL, unit=EVIL, examined=1, findings=[finding] * 5)
    texts = {"scope": EVIL, "not_shown": [EVIL], "limitations": [EVIL], "fault": EVIL, "analyzer": EVIL}
    wrong = row(3584, case=EVIL, verdict=Verdict.FAIL)
    return judgement(results=[result], required=[EVIL], table=[wrong], verdict=Verdict.FAIL, **texts)


def row(tokens: int, **changes: Any) -> CaseRow:
    boundary = 1792 * ((tokens - 1) // 1792)
    fields: dict[str, Any] = {
        "case": f"N{tokens}",
        "tokens": tokens,
        "first_difference": None,
        "equal": True,
        "boundary": boundary,
        "boundary_reported": True,
        "content_boundary": None,
        "credited": boundary,
        "scheduled": tokens - boundary,
        "suffix": tokens - boundary,
        "rank_bytes": [54_809_600] * 4,
        "verdict": Verdict.PASS,
    }
    return CaseRow(**(fields | changes))


def judgement(**changes: Any) -> Judgement:
    fields: dict[str, Any] = {
        "analyzer": "boundary-v1",
        "analyzer_sha256": "ab" * 32,
        "seal_sha256": "cd" * 32,
        "plan_sha256": "ef" * 32,
        "fault": None,
        "comparison_kind": "paired_live",
        "performance_eligible": True,
        "verdict": Verdict.PASS,
        "results": [
            CheckResult(
                check="coverage", verdict=Verdict.PASS, summary="90/90 operations", unit="operations", examined=90
            ),
            CheckResult(check="extra", verdict=Verdict.NOT_EXERCISED, summary="no salt", unit="records", examined=0),
        ],
        "required": ["coverage"],
        "table": [row(3583), row(3584)],
        "scope": "Holds for this plan. (plan efefefefefef)",
        "not_shown": ["No performance was measured."],
        "limitations": [],
    }
    return Judgement(**(fields | changes))


def faulty() -> Judgement:
    findings = [
        Finding(
            code="retained_lookup_boundary",
            verdict=Verdict.FAIL,
            message=f"N3584.reload: rank {rank} restored [0, 3584), p=3583; expected B=p=1792",
            place=Place(rank=rank),
            evidence=["arms/candidate/worker-0.jsonl:17", "arms/candidate/scheduler.jsonl:4"],
        )
        for rank in range(4)
    ]
    boundary = CheckResult(
        check="boundary", verdict=Verdict.FAIL, summary="8/9 reloads", unit="reloads", examined=9, findings=findings
    )
    wrong = row(
        3584,
        first_difference=0,
        equal=False,
        boundary=3584,
        credited=3583,
        scheduled=1,
        suffix=0,
        rank_bytes=[69_625_856] * 4,
        verdict=Verdict.FAIL,
    )
    return judgement(
        fault="full-lookup",
        comparison_kind="candidate_vs_archived",
        performance_eligible=False,
        verdict=Verdict.FAIL,
        results=[boundary],
        required=["boundary", "transfers"],
        table=[row(3583), wrong],
    )
