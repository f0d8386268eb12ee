"""A judgement as text: the cases, the checks, the verdict, its scope and what it does not show.

Everything is readable without colour, in `WIDTH` columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.latency_study import Study
from samestate.reports.latency_tables import notes, summary, tables
from samestate.reports.words import (
    NO_MEASUREMENT,
    Grid,
    GridRow,
    by_repetition,
    comparison,
    first_place,
    grid,
    plain,
    reason,
    short,
    shown,
    told,
)

WIDTH = 100
FINDINGS_SHOWN = 3
_STYLES = {Verdict.PASS: "green", Verdict.FAIL: "bold red", Verdict.UNKNOWN: "yellow"}


def print_judgement(judgement: Judgement, console: Console) -> None:
    """Print `judgement` on `console`. Whatever an archive made it say, a terminal shows it and obeys nothing."""
    judgement = shown(judgement)
    if judgement.fault is not None:
        console.print(Text(f"fault injected: {judgement.fault}. Not a normal run.", style="bold"))
        console.print()
    _print_cases(judgement, console)
    if judgement.latency is not None:
        print_study(judgement.latency, console)
    console.print(_checks(judgement))
    if any(result.check not in judgement.required for result in judgement.results):
        _indented(console, "(in parentheses: not required)")
    console.print()
    for result in told(judgement.results):
        _print_findings(result, console)
    if not judgement.table:
        for name, came_to in by_repetition(judgement):
            console.print(Text(f"{name}: {came_to}"))
    console.print(Text.assemble("verdict ", _verdict(judgement.verdict), f": {reason(judgement)}"))
    _indented(console, judgement.scope)
    _indented(console, f"compared: {comparison(judgement)}")
    if not judgement.performance_eligible:
        _indented(console, NO_MEASUREMENT)
    _indented(console, _hashes(judgement))
    _print_list(console, "not shown", judgement.not_shown)
    _print_list(console, "limitations", judgement.limitations)


def _print_cases(judgement: Judgement, console: Console) -> None:
    """A table for each repetition, then the legend once."""
    legend: list[str] = []
    headed = dict(by_repetition(judgement))
    for repetition, rows in groupby(judgement.table, key=lambda row: row.repetition):
        if repetition is not None:
            name = f"repetition {repetition}"
            console.print(Text(f"{name}: {headed.get(name, '')}"))
        cases = grid(judgement.model_copy(update={"table": list(rows)}))
        console.print(_cases(cases))
        legend = cases.legend
        if repetition is not None:
            console.print()
    for line in legend:
        _indented(console, line)
    if judgement.table:
        console.print()


def print_study(study: Study, console: Console) -> None:
    """Print the tables of a latency study."""
    console.print(Text(summary(study)))
    console.print()
    for one in tables(study):
        console.print(Text(one.title))
        table = _table(*one.headings, words=one.words)
        for row in one.rows:
            table.add_row(*row)
        console.print(table)
        console.print()
    for line in notes(study):
        _item(console, Text(line))
    console.print()


def _cases(cases: Grid) -> Table:
    table = _table(*cases.headings, words=cases.words)
    for index, column in enumerate(table.columns[cases.words :], cases.words):
        # Where it gets narrow, headings wrap; numbers never do.
        column.min_width = max((len(line.cells[index]) for line in cases.rows), default=0)
    table.add_column("verdict")
    for line in cases.rows:
        table.add_row(*line.cells, Text.assemble(_verdict(line.row.verdict), _by(line)))
    return table


def _by(line: GridRow) -> str:
    """Under its verdict the check that keeps a row from a pass, and how many more do."""
    if not line.against:
        return ""
    first, *more = line.against
    return f"\n{first} +{len(more)}" if more else f"\n{first}"


def _checks(judgement: Judgement) -> Table:
    table = _table("check", "verdict", "summary", "unit", words=4)
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
    where = f" at {first_place(finding)}" if finding.evidence else ""
    return Text.assemble(finding.message, (f"\n[{finding.code}{where}]", "dim"))


def _hashes(judgement: Judgement) -> str:
    analyzer = f"{judgement.analyzer} {short(judgement.analyzer_sha256)}"
    return f"seal {short(judgement.seal_sha256)} · analyzer {analyzer}"


def _print_list(console: Console, title: str, lines: Iterable[str]) -> None:
    if lines := list(lines):
        console.print()
        console.print(Text(title))
        for line in lines:
            _item(console, Text(line))


def _table(*headings: str, words: int) -> Table:
    """A table whose first columns are words, and the others numbers."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1))
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index < words else "right", overflow="fold")
    return table


def _verdict(verdict: Verdict) -> Text:
    return Text(plain(verdict), style=_STYLES.get(verdict, ""))


def _indented(console: Console, text: str, by: int = 2) -> None:
    console.print(Padding(Text(text), (0, 0, 0, by), expand=False))


def _item(console: Console, text: Text, by: int = 2) -> None:
    """One item of a list; what wraps stays beside its dash."""
    line = Table.grid(padding=(0, 1))
    line.add_row("-", text)
    console.print(Padding(line, (0, 0, 0, by), expand=False))
