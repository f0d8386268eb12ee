"""A judgement as text: the cases, the checks, the verdict, its scope and what it does not show.

Everything is readable without colour, in `WIDTH` columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.prefix_identity import CHECK as BY_CONTENT
from samestate.checks.table import CaseRow
from samestate.evidence.text import printable

WIDTH = 100
FINDINGS_SHOWN = 3
EQUAL, UNSEEN = "–", "?"
LEGEND = f"""N prompt tokens · B restored prefix · p tokens credited · scheduled in the first batch after
the reload · suffix N-B · first difference: index of the token, {EQUAL} when all are equal"""
REPEAT_LEGEND = f"""N prompt tokens · p tokens hit in the local cache · scheduled in the first batch after the hit
suffix N-p · first difference from cold: index of the token, {EQUAL} when all are equal"""
CONTENT_LEGEND = "B by content: the prefix whose state the loaded bytes are, by digests of what was saved"
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.UNKNOWN: "yellow"}
_COMPARISONS = {
    "paired_live": "control and candidate, both live",
    "candidate_vs_archived": "a live candidate against an archived control",
    "within_one_arm": "repeats against cold, in one live engine",
}


def print_judgement(judgement: Judgement, console: Console) -> None:
    """Print `judgement` on `console`. Whatever an archive made it say, a terminal shows it and obeys nothing."""
    judgement = Judgement.model_validate(_printable(judgement.model_dump()))
    if judgement.fault is not None:
        console.print(Text(f"fault injected: {judgement.fault}. Not a normal run.", style="bold"))
        console.print()
    if any(row.repeat for row in judgement.table):
        console.print(_repeats(judgement.table))
        _indented(console, REPEAT_LEGEND)
        console.print()
    elif judgement.table:
        console.print(_cases(judgement.table, by_content=_reads_content(judgement)))
        _indented(console, LEGEND)
        if _reads_content(judgement):
            _indented(console, CONTENT_LEGEND)
        console.print()
    console.print(_checks(judgement))
    if any(result.check not in judgement.required for result in judgement.results):
        _indented(console, "(in parentheses: not required)")
    console.print()
    for result in judgement.results:
        if result.findings and result.verdict is not Verdict.NOT_EXERCISED:
            _print_findings(result, console)
    console.print(_verdict_line(judgement))
    _indented(console, judgement.scope)
    _indented(console, f"compared: {_COMPARISONS.get(judgement.comparison_kind, judgement.comparison_kind)}")
    if not judgement.performance_eligible:
        _indented(console, "not eligible for performance: no time of this run is a measurement")
    _indented(console, _hashes(judgement))
    _print_list(console, "not shown", judgement.not_shown)
    _print_list(console, "limitations", judgement.limitations)


def _printable(value: Any) -> Any:
    match value:
        case Verdict():
            return value
        case str():
            return printable(value)
        case list():
            return [_printable(item) for item in value]
        case dict():
            return {name: _printable(item) for name, item in value.items()}
        case _:
            return value


def _reads_content(judgement: Judgement) -> bool:
    """Whether B by content was asked for, or is known all the same."""
    asked = any(result.check == BY_CONTENT for result in judgement.results)
    return asked or any(row.content_boundary is not None for row in judgement.table)


def _cases(rows: Iterable[CaseRow], *, by_content: bool) -> Table:
    content = ["B by content"] if by_content else []
    headings = ("N", "first difference", "B", *content, "p", "scheduled", "suffix", "bytes per rank")
    table = _table(*headings, right=True)
    table.add_column("verdict")
    for row in rows:
        table.add_row(
            _number(row.tokens),
            _first_difference(row),
            _boundary(row),
            *([_number(row.content_boundary)] if by_content else []),
            _number(row.credited),
            _number(row.scheduled),
            _number(row.suffix),
            _bytes(row.rank_bytes),
            _verdict(row.verdict),
        )
    return table


def _repeats(rows: Iterable[CaseRow]) -> Table:
    table = _table("N", "repeat", "first difference", "p", "scheduled", "suffix", right=True)
    table.add_column("verdict")
    for row in rows:
        numbers = (row.credited, row.scheduled, row.suffix)
        table.add_row(
            _number(row.tokens),
            _number(row.repeat),
            _first_difference(row),
            *map(_number, numbers),
            _verdict(row.verdict),
        )
    return table


def _checks(judgement: Judgement) -> Table:
    table = _table("check", "verdict", "summary", "unit")
    for result in judgement.results:
        name = result.check if result.check in judgement.required else f"({result.check})"
        table.add_row(Text(name), _verdict(result.verdict), Text(result.summary), Text(result.unit))
    return table


def _print_findings(result: CheckResult, console: Console) -> None:
    console.print(Text.assemble("  ", result.check, ": ", _verdict(result.verdict)))
    for finding in result.findings[:FINDINGS_SHOWN]:
        _item(console, _finding(finding), by=4)
    more = len(result.findings) - FINDINGS_SHOWN
    if more > 0:
        _item(console, Text(f"{more} more; --json lists them all"), by=4)
    console.print()


def _finding(finding: Finding) -> Text:
    where = f" at {finding.evidence[0]}" if finding.evidence else ""
    return Text.assemble(finding.message, (f"\n[{finding.code}{where}]", "dim"))


def _verdict_line(judgement: Judgement) -> Text:
    verdicts = {result.check: result.verdict for result in judgement.results}
    against = [
        f"{check} ({_plain(verdicts.get(check, Verdict.UNKNOWN))})"
        for check in judgement.required
        if verdicts.get(check) is not Verdict.PASS
    ]
    why = ", ".join(against) or ("all required checks pass" if judgement.required else "no check is required")
    return Text.assemble("verdict ", _verdict(judgement.verdict), f": {why}")


def _hashes(judgement: Judgement) -> str:
    seal = _short(judgement.seal_sha256) if judgement.seal_sha256 else "none"
    return f"seal {seal} · analyzer {judgement.analyzer} {_short(judgement.analyzer_sha256)}"


def _print_list(console: Console, title: str, lines: Iterable[str]) -> None:
    if lines := list(lines):
        console.print()
        console.print(Text(title))
        for line in lines:
            _item(console, Text(line))


def _table(*headings: str, right: bool = False) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, justify="right" if right else "left")
    return table


def _first_difference(row: CaseRow) -> str:
    if row.first_difference is not None:
        return _number(row.first_difference)
    return EQUAL if row.equal else UNSEEN


def _boundary(row: CaseRow) -> str:
    if row.boundary_reported:
        return "ranks differ" if row.boundary is None else _number(row.boundary)
    return "not reported" if any(row.rank_bytes) else "no load"


def _bytes(per_rank: list[int]) -> str:
    if not per_rank:
        return UNSEEN
    if len(set(per_rank)) > 1:
        return " / ".join(map(_number, per_rank))
    ranks = f" ×{len(per_rank)}" if len(per_rank) > 1 else ""
    return _number(per_rank[0]) + ranks


def _number(value: int | None) -> str:
    return UNSEEN if value is None else f"{value:,}"


def _verdict(verdict: Verdict) -> Text:
    return Text(_plain(verdict), style=_STYLES.get(verdict, ""))


def _plain(verdict: Verdict) -> str:
    return verdict.value.replace("_", " ")


def _short(sha256: str) -> str:
    return sha256[:12]


def _indented(console: Console, text: str, by: int = 2) -> None:
    console.print(Padding(Text(text), (0, 0, 0, by), expand=False))


def _item(console: Console, text: Text, by: int = 2) -> None:
    """One item of a list; what wraps stays beside its dash."""
    line = Table.grid(padding=(0, 1))
    line.add_row("-", text)
    console.print(Padding(line, (0, 0, 0, by), expand=False))
