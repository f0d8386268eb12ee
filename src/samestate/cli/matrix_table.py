"""What every ``samestate matrix`` shows: a row for each run, as a table or as JSON, and one exit code."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import click
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Verdict
from samestate.checks.table import CaseRow
from samestate.cli.judging import UNKNOWN, exit_code, stdout_console

COULD_NOT_RUN = 2
_WORST_FIRST = (1, COULD_NOT_RUN, UNKNOWN)
_EQUAL = re.compile(r"\d+/\d+(?= generations equal)")


class Cell(NamedTuple):
    """One plan on one release."""

    release: str
    """Whatever a row is called by, beside its plan."""
    plan: str
    archive: Path | str
    judgement: Judgement | None
    error: str | None
    """Why there is no judgement."""
    outcome: str = "could not run"
    """Where there is no judgement; ``unknown``: it began, and left nothing to judge."""
    more: Mapping[str, str | None] = MappingProxyType({})
    """Of a cell of many choices: further facts, for JSON."""


def finish(ctx: click.Context, what: str, cells: Sequence[Cell], as_json: bool) -> None:
    """Show the rows and exit: 1 if one failed, else 2 if one could not run, else 3 if one is unknown."""
    if as_json:
        click.echo(json.dumps([_facts(cell) for cell in cells], indent=2))
    else:
        _print(what, cells)
    codes = set(map(_code, cells))
    ctx.exit(next((code for code in _WORST_FIRST if code in codes), 0))


def _code(cell: Cell) -> int:
    if cell.judgement is not None:
        return exit_code(cell.judgement.verdict)
    return UNKNOWN if cell.outcome == Verdict.UNKNOWN.value else COULD_NOT_RUN


def _facts(cell: Cell) -> dict[str, Any]:
    judgement = cell.judgement
    first = _first_wrong(judgement) if judgement else None
    return {
        "cell" if cell.more else "release": cell.release,
        "plan": cell.plan,
        **cell.more,
        "archive": str(cell.archive),
        "verdict": judgement.verdict.value if judgement else cell.outcome if cell.more else None,
        "equal": _equal(judgement) if judgement else None,
        "first_failing": {"N": first.tokens, "B": first.boundary, "p": first.credited} if first else None,
        "first_failing_op": first.op if first else None,
        "error": cell.error,
    }


def _equal(judgement: Judgement) -> str | None:
    """``34/36``, as the check on equality counts."""
    found = (_EQUAL.match(result.summary) for result in judgement.results)
    return next((one[0] for one in found if one), None)


def _first_wrong(judgement: Judgement) -> CaseRow | None:
    """The first that continues wrongly; where none does, the first that fails."""
    unequal = (row for row in judgement.table if row.equal is False)
    return next(unequal, None) or next((row for row in judgement.table if row.verdict is Verdict.FAIL), None)


def _print(what: str, cells: Sequence[Cell]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in (what, "plan", "verdict", "equal", "first failing", "archive"):
        table.add_column(heading, overflow="fold")
    for cell in cells:
        facts = _facts(cell)
        first = facts["first_failing"]
        wrong = (
            ", ".join(f"{name}={'?' if value is None else value}" for name, value in first.items()) if first else "–"
        )
        if facts["first_failing_op"]:
            wrong = f"{facts['first_failing_op']}: {wrong}"
        verdict = facts["verdict"] or cell.outcome
        table.add_row(*map(Text, (cell.release, cell.plan, verdict, facts["equal"] or "–", wrong, facts["archive"])))
    console = stdout_console()
    console.print(table)
    for cell in cells:
        if cell.error:
            console.print(Text(f"{cell.release}, {cell.plan}: {cell.error}"), soft_wrap=True)
