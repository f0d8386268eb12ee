"""A report in Prometheus' text format, for a node exporter's textfile collector.

A verdict is a state set: one series for each state, 1 for the one it is in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from samestate.checks.base import Verdict
from samestate.reports.model import Report

RUN_INFO = "samestate_run_info"
RUN_VERDICT = "samestate_run_verdict"
PERFORMANCE_ELIGIBLE = "samestate_run_performance_eligible"
RUN_RECORDS = "samestate_run_records"
CHECK_VERDICT = "samestate_check_verdict"
CHECK_REQUIRED = "samestate_check_required"
CHECK_EXAMINED = "samestate_check_examined"
CHECK_FINDINGS = "samestate_check_findings"
CASES = "samestate_cases"

HELP = {
    RUN_INFO: "What was judged; always 1.",
    RUN_VERDICT: "1 for the state that the run's verdict is in.",
    PERFORMANCE_ELIGIBLE: "1 where times of the run may count as measurements.",
    RUN_RECORDS: "Records read.",
    CHECK_VERDICT: "1 for the state that the check's verdict is in.",
    CHECK_REQUIRED: "1 where the run's verdict depends on the check.",
    CHECK_EXAMINED: "Units that the check looked at.",
    CHECK_FINDINGS: "Findings of the check, by their verdict.",
    CASES: "Cases of the run, by verdict.",
}
"""Every metric. All are gauges."""

_Sample = tuple[dict[str, str], int]


def prometheus(report: Report) -> str:
    """The text, each metric with its help and type."""
    lines = []
    for name, samples in _metrics(report).items():
        if not samples:
            continue
        lines += [f"# HELP {name} {HELP[name]}", f"# TYPE {name} gauge"]
        lines += [f"{name}{_labels({'plan': report.plan} | labels)} {value}" for labels, value in samples]
    return "\n".join(lines) + "\n"


def _metrics(report: Report) -> dict[str, list[_Sample]]:
    judgement, checks = report.judgement, report.checks
    info = {
        "plan_sha256": judgement.plan_sha256 or "",
        "seal_sha256": judgement.seal_sha256 or "",
        "analyzer": judgement.analyzer,
        "analyzer_sha256": judgement.analyzer_sha256,
        "comparison": judgement.comparison_kind,
        "fault": judgement.fault or "",
    }
    rows = Counter((line.row.repetition, line.row.verdict) for line in report.cases.rows)
    numbers: list[int | None] = [one.repetition for one in judgement.repetitions] or [None]
    return {
        RUN_INFO: [(info, 1)],
        RUN_VERDICT: list(_states({}, judgement.verdict)),
        PERFORMANCE_ELIGIBLE: [({}, int(judgement.performance_eligible))],
        RUN_RECORDS: [({}, report.records)],
        CHECK_VERDICT: [one for result in checks for one in _states({"check": result.check}, result.verdict)],
        CHECK_REQUIRED: [({"check": result.check}, int(result.check in judgement.required)) for result in checks],
        CHECK_EXAMINED: [({"check": result.check, "unit": result.unit}, result.examined) for result in checks],
        CHECK_FINDINGS: [
            ({"check": result.check, "verdict": verdict.value}, count)
            for result in checks
            for verdict, count in Counter(finding.verdict for finding in result.findings).items()
        ],
        CASES: [
            (({"repetition": str(number)} if number else {}) | {"verdict": verdict.value}, rows[number, verdict])
            for number in numbers
            for verdict in Verdict
        ],
    }


def _states(labels: dict[str, str], verdict: Verdict) -> Iterator[_Sample]:
    for state in Verdict:
        yield labels | {"state": state.value}, int(verdict is state)


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items()) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
