"""A report as one HTML file: no script, no network, light and dark, for screen, keyboard and paper.

Needs Jinja2 (``samestate[report]``). Large archives are shown in part, and the page says what it left out.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.latency_study import Study
from samestate.checks.table import CaseRow
from samestate.evidence.text import printable
from samestate.plans.repetitions import arm_name
from samestate.plans.scenarios import CANDIDATE
from samestate.reports.latency import charts
from samestate.reports.latency_plot import path_plot
from samestate.reports.latency_tables import notes, summary, tables
from samestate.reports.latency_waterfall import Waterfall
from samestate.reports.latency_waterfall_plot import waterfall_plot
from samestate.reports.model import Cited, Report, cite
from samestate.reports.page_map import PageState
from samestate.reports.timeline import ANSWERED, CaseTimeline, Event, RequestTimeline
from samestate.reports.words import number, plain

MAX_BYTES = 3_000_000
GLYPHS = {
    Verdict.PASS: "✓",
    Verdict.FAIL: "✕",
    Verdict.UNKNOWN: "?",
    Verdict.NOT_EXERCISED: "○",
    Verdict.EXCLUDED: "∅",
}
"""Beside the word and the colour, never instead of the word."""
_WORST_FIRST = [Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_EXERCISED, Verdict.EXCLUDED, Verdict.PASS]
PAGE_MARKS = {
    PageState.EQUAL: "=",
    PageState.DIFFERS: "≠",
    PageState.POISON: "P",
    PageState.MISSING: "?",
    PageState.UNSAVED: "!",
    PageState.SAVED: "s",
    PageState.NONE: "·",
}
"""Letters of the page map."""


MOST_SQUARES = 32
"""Blocks of a request that have a square each; where there are more, those alike share one."""
SHOWN_FIRST = 3
"""Findings of a check before the fold."""


class Limits(NamedTuple):
    """How much of an archive one page shows."""

    findings: int
    """Of each check."""
    places: int
    """Evidence of each finding."""
    rows: int
    cases: int
    maps: int
    steps: int
    """Ticks of each request."""

    @property
    def half(self) -> Limits:
        return Limits(*(max(1, limit // 2) for limit in self))


FULL = Limits(findings=40, places=6, rows=400, cases=60, maps=60, steps=512)


class Mark(NamedTuple):
    """An event on the time axis, in percent."""

    event: Event
    left: float
    width: float
    late: bool
    """It lies beyond the axis."""


class Drawn(NamedTuple):
    """A request with its geometry."""

    request: RequestTimeline
    marks: list[Mark]
    ticks: str
    """Path of its steps in a box 1000 wide and 1 high."""


def html(report: Report, root: Path, target: Path | None) -> str:
    """The page, under `MAX_BYTES`.

    Evidence links lead from `target`, the file that the page will be, to the archive at `root`; with None there are
    no links. ImportError without Jinja2.
    """
    base = None if target is None else quote(os.path.relpath(root, target.parent).encode(errors="surrogateescape"))
    limits = FULL
    while True:
        page = _render(report, root, base, limits)
        if len(page.encode()) < MAX_BYTES or limits == limits.half:
            return page
        limits = limits.half


def _render(report: Report, root: Path, base: str | None, limits: Limits) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("samestate.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: printable(value) if type(value) is str else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "plain": plain,
        "ms": milliseconds,
        "tick": tick,
        "percent": lambda x: f"{x:.3f}%",
    }
    told = [(result, result.findings[: limits.findings]) for result in report.told]
    found = [finding for _, findings in told for finding in findings]
    cited = cite(report, root, (where for finding in found for where in finding.evidence[: limits.places])).cited
    chosen = _chosen(report, limits.cases)

    def link(place: Cited) -> str | None:
        return f"{base}/{quote(place.file)}" if base is not None and place.file is not None else None

    axis, drawn_times = charts(report.latency, limits.cases)
    return environment.get_template("report.html.j2").render(
        axis=axis,
        charts=drawn_times,
        **_study(report.judgement.latency, report.latency.waterfalls),
        report=report,
        judgement=report.judgement,
        css=(files("samestate.reports") / "templates" / "report.css").read_text(),
        glyphs=GLYPHS,
        marks=PAGE_MARKS,
        counts=_counts(report),
        used_states=_used_states(report, limits),
        limits=limits,
        told=told,
        told_checks={result.check for result in report.told},
        places=lambda finding: [cited[where] for where in finding.evidence[: limits.places]],
        link=link,
        rows=report.cases.rows[: limits.rows],
        cases=[(case, _case_verdict(report, case), [_drawn(one, limits) for one in case.requests]) for case in chosen],
        anchors={(case.arm, case.case): case.name for case in chosen},
        row_case=_row_case,
        credits_locally=any(
            one.tokens.restored is None and one.tokens.credited for case in chosen for one in case.requests
        ),
        most_squares=MOST_SQUARES,
        shown_first=SHOWN_FIRST,
        maps=report.pages[: limits.maps],
        left_out=_left_out(report, told, limits, len(chosen)),
    )


def _study(study: Study | None, reloads: Sequence[Waterfall]) -> dict[str, Any]:
    """What the section of a latency study shows; nothing for another plan."""
    if study is None:
        return {}
    return {
        "study_plot": path_plot(study),
        "study_tables": list(tables(study)),
        "study_summary": summary(study),
        "study_notes": notes(study),
        "study_reloads": waterfall_plot(reloads),
    }


def _counts(report: Report) -> str:
    required = [result for result in report.checks if result.check in report.judgement.required]
    counts = {
        "required checks": [result.verdict for result in required],
    }
    for line in report.cases.rows:
        again = f" of repetition {line.row.repetition}" if line.row.repetition is not None else ""
        counts.setdefault(f"cases{again}", []).append(line.row.verdict)
    return " · ".join(
        f"{verdicts.count(Verdict.PASS):,} of {len(verdicts):,} {what} pass"
        for what, verdicts in counts.items()
        if verdicts
    )


def _row_case(row: CaseRow) -> tuple[str, str]:
    """Arm and case of a row, as timelines have them."""
    return arm_name(row.arm or CANDIDATE, row.repetition or 1), row.case


def _case_verdict(report: Report, case: CaseTimeline) -> Verdict | None:
    """The worst of the case's rows; None: the table has none."""
    verdicts = {line.row.verdict for line in report.cases.rows if _row_case(line.row) == (case.arm, case.case)}
    return min(verdicts, key=_WORST_FIRST.index, default=None)


def _chosen(report: Report, most: int) -> list[CaseTimeline]:
    """The cases that are drawn, in order: where not all fit, those that did not pass come before those that did."""
    troubled = {_row_case(line.row) for line in report.cases.rows if line.row.verdict is not Verdict.PASS}
    ranked = sorted(report.timelines, key=lambda case: (case.arm, case.case) not in troubled)[:most]
    kept = {(case.arm, case.case) for case in ranked}
    return [case for case in report.timelines if (case.arm, case.case) in kept]


def _used_states(report: Report, limits: Limits) -> list[PageState]:
    used = {run.state for page in report.pages[: limits.maps] for row in page.rows for run in row.runs}
    return [state for state in PageState if state in used]


def _left_out(report: Report, told: list[tuple[CheckResult, list[Finding]]], limits: Limits, drawn: int) -> list[str]:
    findings = sum(len(result.findings) - len(shown) for result, shown in told)
    counts = {
        "findings": findings,
        "rows of the table": max(0, len(report.cases.rows) - limits.rows),
        "cases among the requests": len(report.timelines) - drawn,
        "page maps": max(0, len(report.pages) - limits.maps),
    }
    return [f"{count:,} {what}" for what, count in counts.items() if count]


def _drawn(request: RequestTimeline, limits: Limits) -> Drawn:
    first = request.steps[0] if request.steps else 0.0

    def place(at: float) -> float:
        """Percent: the left half of the axis runs to the first batch, the right half to the end."""
        if first <= 0 or first >= request.length:
            part = at / request.length
        elif at <= first:
            part = at / first / 2
        else:
            part = 0.5 + (at - first) / (request.length - first) / 2
        return 100 * min(1.0, max(0.0, part))

    marks = []
    for event in request.events:
        left = place(event.begins)
        # What never ended reaches to the end of the axis.
        width = place(event.ends) - left if event.ends is not None else 100 - left
        marks.append(Mark(event, left, width, event.name == ANSWERED and event.begins > request.length))
    stride = max(1, -(-len(request.steps) // limits.steps))
    ticks = "".join(f"M{10 * place(at):.1f} 0v1" for at in islice(request.steps, 0, None, stride))
    return Drawn(request, marks, ticks)


def milliseconds(value: float) -> str:
    """``0.16 ms``, ``43.1 ms``, ``1.50 s``."""
    if value >= 1000:
        return f"{value / 1000:,.2f} s"
    return f"{value:.2f} ms" if value < 10 else f"{value:.1f} ms"


def tick(value: float) -> str:
    """Of an axis: ``0``, ``10 ms``, ``1.5 s``."""
    if not value:
        return "0"
    return f"{value / 1000:g} s" if value >= 1000 else f"{value:g} ms"
