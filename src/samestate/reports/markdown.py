"""A report as GitHub-flavoured Markdown, for a step summary: verdict, table, first findings, the rest folded away."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from samestate.checks.base import Finding, Verdict
from samestate.checks.latency_study import Study
from samestate.reports.latency_tables import notes, summary, tables
from samestate.reports.model import Report
from samestate.reports.words import NO_MEASUREMENT, first_place, plain

MAX_BYTES = 900_000
"""A step summary is refused above 1 MiB (GitHub, "Workflow commands": job summaries), and a step has but one."""
FIRST_FINDINGS = 3
"""Of each check, before the fold."""
FOLDED_FINDINGS = 40
MAX_ROWS = 200
_MARKS = {
    Verdict.PASS: "✅",
    Verdict.FAIL: "❌",
    Verdict.UNKNOWN: "❔",
    Verdict.NOT_EXERCISED: "⚪",
    Verdict.EXCLUDED: "⚪",
}
_MARKUP = re.compile(r"[\\`*_\[\]#!|~$@]|:(?=//)|:(?=[\w+-]+:)|(?<=www)\.", re.I)
"""Characters that begin or end markup, links, mentions, emoji, formulas and table cells."""
_BEGINNING = re.compile(r"^(?:[-+=]|\d+(?=[.)]))")
"""What begins a list, or underlines a title, at the beginning of a line."""
_ENTITIES = {ord("&"): "&amp;", ord("<"): "&lt;", ord(">"): "&gt;"}


def markdown(report: Report) -> str:
    """The summary, under `MAX_BYTES`."""
    for folded, rows in ((FOLDED_FINDINGS, MAX_ROWS), (0, MAX_ROWS), (0, FIRST_FINDINGS)):
        text = "\n".join(_lines(report, folded, rows)) + "\n"
        if len(text.encode()) < MAX_BYTES:
            return text
    return text.encode()[:MAX_BYTES].decode(errors="ignore")


def _lines(report: Report, folded: int, rows: int) -> Iterator[str]:
    judgement = report.judgement
    yield f"## {_verdict(judgement.verdict)}: {_text(report.plan)}"
    yield ""
    yield f"{_text(report.why)}"
    yield ""
    if judgement.fault is not None:
        yield f"**Fault injected: {_text(judgement.fault)}.** Not a normal run."
        yield ""
    yield from _cases(report, rows)
    if judgement.latency is not None:
        yield from _study(judgement.latency)
    yield from _findings(report, folded)
    yield from _folded("All checks", _checks(report))
    yield from _folded("Scope, and what is not shown", _scope(report))


def _cases(report: Report, most: int) -> Iterator[str]:
    rows = report.cases.rows
    if not rows:
        return
    headings = [*report.cases.headings, "verdict"]
    yield from _table(headings, range(report.cases.words, len(headings) - 1))
    for line in rows[:most]:
        by = f" by {', '.join(map(_text, line.against))}" if line.against else ""
        yield _row([*map(_text, line.cells), f"{_verdict(line.row.verdict)}{by}"])
    if len(rows) > most:
        yield _row([f"{len(rows) - most:,} more", *([""] * len(report.cases.headings))])
    yield ""


def _study(study: Study) -> Iterator[str]:
    yield _text(summary(study))
    yield ""
    for one in tables(study):
        yield f"**{_text(one.title)}**"
        yield ""
        yield from _table(one.headings, range(one.words, len(one.headings)))
        yield from (_row(list(map(_text, row))) for row in one.rows)
        yield ""
    yield from (f"- {_text(note)}" for note in notes(study))
    yield ""


def _findings(report: Report, folded: int) -> Iterator[str]:
    more: list[str] = []
    for result in report.told:
        yield f"**{_text(result.check)}**: {_verdict(result.verdict)}, {_text(result.summary)}"
        yield ""
        yield from map(_finding, result.findings[:FIRST_FINDINGS])
        yield ""
        rest = result.findings[FIRST_FINDINGS : FIRST_FINDINGS + folded]
        left = len(result.findings) - FIRST_FINDINGS - len(rest)
        if rest:
            more += [f"**{_text(result.check)}**", "", *map(_finding, rest)]
        if left > 0:
            more += [
                "",
                f"{left:,} more findings of {_text(result.check)} are left out; `samestate check --json` has all",
            ]
        more += [""] if more and more[-1] else []
    yield from _folded("More findings", more)


def _finding(finding: Finding) -> str:
    where = first_place(finding)
    return f"- {_text(finding.message)} ({_text(finding.code)}{f' at {_text(where)}' if where else ''})"


def _checks(report: Report) -> Iterator[str]:
    yield from _table(["check", "verdict", "summary", "unit"], range(0))
    for result in report.checks:
        name = result.check if result.check in report.judgement.required else f"{result.check} (not required)"
        yield _row([_text(name), _verdict(result.verdict), _text(result.summary), _text(result.unit)])


def _scope(report: Report) -> Iterator[str]:
    judgement = report.judgement
    yield _text(judgement.scope)
    yield ""
    yield " · ".join(f"{_text(name)} {_text(value)}" for name, value in report.facts)
    if not judgement.performance_eligible:
        yield ""
        yield NO_MEASUREMENT
    for title, lines in (("Not shown", judgement.not_shown), ("Limitations", judgement.limitations)):
        if lines:
            yield ""
            yield f"**{title}**"
            yield ""
            yield from (f"- {_text(line)}" for line in lines)


def _folded(title: str, lines: Iterable[str]) -> Iterator[str]:
    if lines := list(lines):
        yield from (f"<details><summary>{title}</summary>", "", *lines, "", "</details>", "")


def _table(headings: list[str], numbers: range) -> Iterator[str]:
    """The head of a table, and which of its columns are numbers."""
    yield _row(headings)
    yield _row(["--:" if index in numbers else "---" for index in range(len(headings))])


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _verdict(verdict: Verdict) -> str:
    return f"{_MARKS[verdict]} {plain(verdict)}"


def _text(text: str) -> str:
    """Text that stays text: no markup, link, mention, table cell or line of its own comes of it."""
    inert = _MARKUP.sub(r"\\\g<0>", " ".join(text.split())).translate(_ENTITIES)
    return _BEGINNING.sub(_unbegun, inert)


def _unbegun(found: re.Match[str]) -> str:
    begun = found.group()
    return f"&#{ord(begun[0])};{begun[1:]}"
