"""How every report says the same thing: verdicts, numbers, the table of cases with its legend.

Whatever an archive made a judgement say goes through `shown` first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel

from samestate.checks.analyzers import Judgement
from samestate.checks.base import CheckResult, Finding, Verdict
from samestate.checks.prefix_identity import CHECK as BY_CONTENT
from samestate.checks.table import CaseRow, MarkerRow, against
from samestate.evidence.text import printable

EQUAL, UNSEEN = "–", "?"
UNATTRIBUTED = "unknown"
"""The class of a marker that nobody can tell."""
GRID_LEGEND = (
    "N prompt tokens · B restored prefix · p tokens credited · scheduled in the first batch after the reload · "
    f"suffix N-B · first difference: index of the token, {EQUAL} when all are equal"
)
REPEAT_LEGEND = (
    "N prompt tokens · p tokens hit in the local cache · scheduled in the first batch after the hit · "
    f"suffix N-p · first difference from cold: index of the token, {EQUAL} when all are equal"
)
SCENARIO_LEGEND = (
    "path where reused tokens came from · N prompt tokens · local tokens hit in the local cache · "
    f"B restored prefix, {EQUAL} where nothing was loaded · p tokens credited · scheduled in the first batch · "
    f"first difference from cold: index of the token, {EQUAL} when all are equal · "
    "(batch) handed in with others · (salted) with a cache salt"
)
MARKER_LEGEND = (
    "close: output position of the first close marker and how it came about, (seen …) where that is not attributed · "
    "ranks that traced the request · budget of reasoning tokens · N prompt tokens · drafts accepted of the proposed · "
    "trace: tokens committed by a rank · API: tokens delivered · tail: committed past these, (?) not accounted for"
)
CONTENT_LEGEND = "B by content: the prefix whose state the loaded bytes are, by digests of what was saved"
NO_MEASUREMENT = "not eligible for performance: no time of this run is a measurement"
_COMPARISONS = {
    "paired_live": "control and candidate, both live",
    "candidate_vs_archived": "a live candidate against an archived control",
    "within_one_arm": "repeats against cold, in one live engine",
    "trace_vs_api": "what each rank committed against what the API delivered, arm by arm",
}
M = TypeVar("M", bound=BaseModel)


class GridRow(NamedTuple):
    """One case, or one generation of a scenario, ready to be shown."""

    row: CaseRow
    cells: list[str]
    """All but the verdict."""
    against: Sequence[str] = ()
    """Required checks that keep it from a pass, the most telling first."""

    @property
    def name(self) -> str:
        return row_name(self.row)


class Grid(NamedTuple):
    """The table of cases: some columns of words, then numbers or what stands for one. The verdict follows."""

    headings: list[str]
    rows: list[GridRow]
    legend: list[str]
    words: int = 0
    """How many of the columns are words."""


def row_name(row: CaseRow) -> str:
    """``N3584``, ``N1250 repeat 2``; of a scenario ``candidate trunk.2``; ``N3584 (repetition 2)``."""
    again = f" (repetition {row.repetition})" if row.repetition is not None else ""
    if row.op is not None:
        return f"{row.arm} {row.op}{again}"
    return f"{row.case}{again}" if row.repeat is None else f"{row.case} repeat {row.repeat}{again}"


def shown(model: M) -> M:
    """`model` with every string in it made printable: a reader shows it and obeys nothing."""
    return type(model).model_validate(_printable(model.model_dump()))


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


def grid(judgement: Judgement) -> Grid:
    """The table of a judgement: of reloads, repeats, a scenario or probes; no rows where it has none."""
    made = _grid(judgement)
    checks = against([line.row for line in made.rows], judgement.results, judgement.required)
    return made._replace(rows=[line._replace(against=names) for line, names in zip(made.rows, checks, strict=True)])


def _grid(judgement: Judgement) -> Grid:
    rows = judgement.table
    if any(row.marker is not None for row in rows):
        several = len({row.arm for row in rows}) > 1
        cells = (_probe(row, named=several) for row in rows)
        return Grid(_MARKER_HEADINGS, list(map(GridRow, rows, cells)), [MARKER_LEGEND], words=4)
    if any(row.op is not None for row in rows):
        headings = ["generation", "path", "N", "first difference", "local", "B", "p", "scheduled"]
        several = len({row.arm for row in rows}) > 1
        cells = (_generation(row, named=several) for row in rows)
        return Grid(headings, list(map(GridRow, rows, cells)), [SCENARIO_LEGEND], words=2)
    which, before = _which(rows)
    if any(row.repeat for row in rows):
        headings = [*which, "N", "repeat", "first difference", "p", "scheduled", "suffix"]
        cells = ([*before(row), *_repeat(row)] for row in rows)
        return Grid(headings, list(map(GridRow, rows, cells)), [REPEAT_LEGEND], words=len(which))
    by_content = _reads_content(judgement)
    content = ["B by content"] if by_content else []
    headings = [*which, "N", "first difference", "B", *content, "p", "scheduled", "suffix", "bytes per rank"]
    legend = [GRID_LEGEND, CONTENT_LEGEND] if by_content else [GRID_LEGEND]
    cells = ([*before(row), *_reload(row, by_content=by_content)] for row in rows)
    return Grid(headings, list(map(GridRow, rows, cells)), legend, words=len(which))


def _which(rows: list[CaseRow]) -> tuple[list[str], Callable[[CaseRow], list[str]]]:
    """Columns that tell rows of one length apart: engine, case of a series and repetition, where there are several."""
    engines = len({row.arm for row in rows}) > 1
    repeated = len({row.repetition for row in rows}) > 1
    series = any(row.case != f"N{row.tokens}" for row in rows)

    def before(row: CaseRow) -> list[str]:
        engine = [str(row.arm)] if engines else []
        return [*engine, *([row.case] if series else []), *([number(row.repetition)] if repeated else [])]

    headings = ["engine"] if engines else []
    return [*headings, *(["case"] if series else []), *(["repetition"] if repeated else [])], before


def _reads_content(judgement: Judgement) -> bool:
    """Whether B by content was asked for, or is known all the same."""
    asked = any(result.check == BY_CONTENT for result in judgement.results)
    return asked or any(row.content_boundary is not None for row in judgement.table)


def _reload(row: CaseRow, *, by_content: bool) -> list[str]:
    content = [number(row.content_boundary)] if by_content else []
    numbers = [number(value) for value in (row.credited, row.scheduled, row.suffix)]
    return [number(row.tokens), first_difference_of(row), _boundary(row), *content, *numbers, _bytes(row.rank_bytes)]


def _repeat(row: CaseRow) -> list[str]:
    numbers = [number(value) for value in (row.credited, row.scheduled, row.suffix)]
    return [number(row.tokens), number(row.repeat), first_difference_of(row), *numbers]


_MARKER_HEADINGS = ["probe", "close", "stop", "ranks", "budget", "N", "drafts", "trace", "API", "tail"]


def _probe(row: CaseRow, *, named: bool) -> list[str]:
    """`named`: with its arm."""
    name = row_name(row) if named else str(row.op)
    if row.marker is None:
        return [name, UNSEEN, UNSEEN, UNSEEN, UNSEEN, number(row.tokens), UNSEEN, UNSEEN, UNSEEN, UNSEEN]
    mark = row.marker
    agreed = {None: "", True: " agree", False: " differ"}[mark.ranks_agree]
    stop = f" {mark.stop_reason}" if mark.stop_reason is not None else ""
    drafts = EQUAL if not mark.drafted else f"{number(mark.accepted)}/{number(mark.drafted)}"
    return [
        name,
        _close(mark),
        f"{mark.finish_reason or UNSEEN}{stop}",
        f"{mark.ranks}{agreed}",
        EQUAL if mark.budget is None else number(mark.budget),
        number(row.tokens),
        drafts,
        _bytes(mark.trace_tokens),
        number(mark.api_tokens),
        f"{number(mark.tail)}{'' if mark.tail_known or not mark.tail else ' (?)'}",
    ]


def _close(mark: MarkerRow) -> str:
    """``64 forced``, ``64 unknown (seen forced), 2 closes``; ``–`` without a marker."""
    if mark.position is None:
        return EQUAL
    seen = f" (seen {_plain(mark.observed)})" if mark.observed and mark.observed != UNATTRIBUTED else ""
    more = f", {mark.closes} closes" if mark.closes > 1 else ""
    return f"{number(mark.position)} {_plain(mark.marker_class or UNATTRIBUTED)}{seen}{more}"


def _plain(word: str) -> str:
    return word.replace("_", " ")


def _generation(row: CaseRow, *, named: bool) -> list[str]:
    """`named`: with its arm."""
    marks = f"{' (batch)' if row.together else ''}{' (salted)' if row.salted else ''}"
    name = f"{row_name(row) if named else row.op}{marks}"
    planned = "" if row.planned_path in (None, "any", row.path) else f" (planned {row.planned_path})"
    boundary = _boundary(row) if row.boundary_reported or any(row.rank_bytes) else EQUAL
    reached = [number(row.local), boundary, number(row.credited), number(row.scheduled)]
    return [name, f"{row.path or UNSEEN}{planned}", number(row.tokens), first_difference_of(row), *reached]


def first_difference_of(row: CaseRow) -> str:
    """The index of the token; ``–`` when all are equal, ``?`` when they were not compared."""
    if row.first_difference is not None:
        return f"{number(row.first_difference)}{' (tie)' if row.tie else ''}"
    return EQUAL if row.equal else UNSEEN


def _boundary(row: CaseRow) -> str:
    if row.boundary_reported:
        return "ranks differ" if row.boundary is None else number(row.boundary)
    return "not reported" if any(row.rank_bytes) else "no load"


def _bytes(per_rank: list[int]) -> str:
    if not per_rank:
        return UNSEEN
    if len(set(per_rank)) > 1:
        return " / ".join(map(number, per_rank))
    ranks = f" ×{len(per_rank)}" if len(per_rank) > 1 else ""
    return number(per_rank[0]) + ranks


def number(value: int | None) -> str:
    """``3,584``; ``?`` for what is not recorded."""
    return UNSEEN if value is None else f"{value:,}"


def plain(verdict: Verdict) -> str:
    """``not exercised``."""
    return verdict.value.replace("_", " ")


def by_repetition(judgement: Judgement) -> list[tuple[str, str]]:
    """Every repetition, and what it came to by itself; none where the plan has one."""
    return [
        (
            f"repetition {one.repetition}",
            plain(one.verdict)
            + (f" by {', '.join(one.against)}" if one.against else "")
            + f" ({one.order}: {', '.join(one.arms)})",
        )
        for one in judgement.repetitions
    ]


def reason(judgement: Judgement) -> str:
    """Why the run's verdict is what it is, by its required checks."""
    verdicts = {result.check: result.verdict for result in judgement.results}
    against = [
        f"{check} ({plain(verdicts.get(check, Verdict.UNKNOWN))})"
        for check in judgement.required
        if verdicts.get(check) is not Verdict.PASS
    ]
    return ", ".join(against) or ("all required checks pass" if judgement.required else "no check is required")


def comparison(judgement: Judgement) -> str:
    """What was compared with what."""
    return _COMPARISONS.get(judgement.comparison_kind, judgement.comparison_kind)


def told(results: Iterable[CheckResult]) -> list[CheckResult]:
    """Results whose findings are worth reading: a check that was not exercised says so in its summary."""
    return [result for result in results if result.findings and result.verdict is not Verdict.NOT_EXERCISED]


def first_place(finding: Finding) -> str:
    """Where a finding's first record stands; empty without one."""
    return finding.evidence[0] if finding.evidence else ""


def short(sha256: str | None) -> str:
    """The first twelve digits; ``none`` without a hash."""
    return sha256[:12] if sha256 else "none"
