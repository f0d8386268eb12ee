"""The table of a run: one row a case, from records alone (requirement 76)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from samestate.checks.base import CheckResult, Place, Verdict
from samestate.checks.boundary import Reload, reloads
from samestate.checks.equality import first_difference
from samestate.checks.history import History
from samestate.checks.prefix_identity import content_boundaries
from samestate.checks.seen import Seen
from samestate.checks.transfers import rank_bytes
from samestate.checks.verdicts import run_verdict
from samestate.evidence.records import OperationOutput
from samestate.plans.model import ReusePath
from samestate.plans.scenarios import CANDIDATE, CONTROL

TakenPath = Literal["cold", "local", "external", "mixed"]


class MarkerRow(BaseModel):
    """What a probe of a marker plan shows beside its verdict. None: not recorded, or no such marker."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    budget: int | None
    """Asked for, tokens."""
    position: int | None
    """Output position of the first close marker that the API delivered."""
    marker_class: str | None
    """Of that marker: ``forced``, ``sampled``, …; ``unknown``: not attributed."""
    observed: str | None
    """Where it is not attributed: what the rows show."""
    closes: int
    """Close markers delivered."""
    ranks: int
    """That traced it."""
    ranks_agree: bool | None
    """None: one rank, or none."""
    trace_tokens: list[int]
    """Committed, by rank."""
    api_tokens: int | None
    """Delivered."""
    tail: int | None
    """Committed past what the API delivered, on the rank that has most."""
    tail_known: bool
    """The tail is accounted for."""
    finish_reason: str | None
    stop_reason: str | None
    stores: int | None
    """Rows that the budget wrote into, on the first rank, whatever became of them: an observation, no attribution."""
    stores_committed: int | None
    """Those of them whose id was committed from that very row."""
    drafted: int | None
    """Drafts proposed, on the first rank."""
    accepted: int | None
    classes: str
    """Of the first rank's tokens: ``74 sampled, 1 forced, 1 post_stop``."""


class CaseRow(BaseModel):
    """One case: the candidate's reload against the control's, a repeat or a generation of a scenario against cold.

    None: not recorded.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    case: str
    tokens: int
    """N."""
    repetition: int | None = None
    """Of the plan, from 1; None: it has one."""
    repeat: int | None = None
    """Which repetition of the prompt, from 1; None: a reload."""
    first_difference: int | None
    """Zero-based index of the first generated token that differs."""
    equal: bool | None
    boundary: int | None
    """B, when every load of every rank reports the same one."""
    boundary_reported: bool
    content_boundary: int | None
    """B by content: which boundary the loaded bytes represent, when all state pages of all ranks say the same."""
    credited: int | None
    """p: computed tokens credited before the first batch."""
    scheduled: int | None
    """Tokens in the first batch."""
    suffix: int | None
    """N − B."""
    rank_bytes: list[int]
    """Bytes loaded, by rank."""
    verdict: Verdict
    arm: str | None = None
    """Of a generation of a scenario, as all that follows; None: the plan has no scenario."""
    op: str | None = None
    path: TakenPath | None = None
    """Where its reused tokens came from."""
    planned_path: ReusePath | None = None
    local: int | None = None
    """Tokens of p that the local cache held."""
    external: int | None = None
    """The others: p − local."""
    together: str | None = None
    """The batch that it was handed in with; None: alone."""
    salted: bool = False
    tie: bool = False
    """Where it parts from the cold run, that was as good as undecided (`samestate.checks.floor`)."""
    marker: MarkerRow | None = None
    """Of a probe of a marker plan; None: the plan has none."""


def table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """A row for every planned case; raises MissingEvidence where not even the cases are known."""
    contents = content_boundaries(history)
    return [
        _row(history, reload, contents.get((CANDIDATE, reload.op)), results, required) for reload in reloads(history)
    ]


def _row(
    history: History, reload: Reload, content: int | None, results: Sequence[CheckResult], required: Sequence[str]
) -> CaseRow:
    control = history.arms[CONTROL].output(reload.op) if CONTROL in history.arms else None
    candidate = history.arm(CANDIDATE).output(reload.op)
    return reload_row(reload, control, candidate, content, results, required)


def reload_row(
    reload: Reload,
    cold: Seen[OperationOutput] | None,
    reloaded: Seen[OperationOutput] | None,
    content: int | None,
    results: Sequence[CheckResult],
    required: Sequence[str],
) -> CaseRow:
    """The row of one reload, held against what was computed cold; `content`: B by content, None where nobody looked."""
    compared = cold is not None and reloaded is not None
    difference = first_difference(cold.rec.token_ids, reloaded.rec.token_ids) if cold and reloaded else None
    boundaries = set(reload.boundaries.values())
    boundary = boundaries.pop() if len(boundaries) == 1 else None
    first = reload.first
    credited = first.start if first else None
    known = compared and None not in (boundary, credited)
    verdict = verdict_of(Place(case=reload.case), results, required)
    return CaseRow(
        case=reload.case,
        tokens=reload.tokens,
        first_difference=difference,
        equal=difference is None if compared else None,
        boundary=boundary,
        boundary_reported=bool(reload.loads) and None not in reload.boundaries.values(),
        content_boundary=content,
        credited=credited,
        scheduled=first.scheduled if first else None,
        suffix=reload.tokens - boundary if boundary is not None else None,
        rank_bytes=list(rank_bytes(reload.loads).values()),
        verdict=at_most(verdict, unlike=difference is not None or boundary != credited, known=known),
    )


def at_most(verdict: Verdict, *, unlike: bool, known: bool) -> Verdict:
    """A row does not say pass over tokens that differ, a B that is not p, or what is not recorded."""
    if verdict is not Verdict.PASS:
        return verdict
    if not known:
        return Verdict.UNKNOWN
    return Verdict.FAIL if unlike else Verdict.PASS


def verdict_of(row: Place, results: Sequence[CheckResult], required: Sequence[str]) -> Verdict:
    """What the required checks found in this row's case, and arm and operation if it names them.

    Findings of the whole run weigh on every row, those of a whole case on each of its operations.
    """
    narrowed = []
    for result in results:
        found = {finding.verdict for finding in result.findings if _weighs(finding.place, row)}
        narrowed.append(result.model_copy(update={"verdict": _come_to(result, found)}))
    return run_verdict(required, narrowed)


def against(rows: Sequence[CaseRow], results: Sequence[CheckResult], required: Sequence[str]) -> list[list[str]]:
    """Of each row, the required checks that keep it from a pass: those that fail first, what compares tokens last.

    None for a row that passes, nor where the row's own numbers alone speak against it (`at_most`).
    """
    by_check = {result.check: (result, _by_case(result)) for result in results if result.check in required}
    return [_against(row, by_check, required) if row.verdict is not Verdict.PASS else [] for row in rows]


_ByCase = dict[str | None, dict[Place, set[Verdict]]]
"""What was found, by case and by place: many findings are of one place."""


def _by_case(result: CheckResult) -> _ByCase:
    found: _ByCase = {}
    for finding in result.findings:
        at = finding.place
        place = Place(arm=at.arm, case=at.case, op=at.op, repetition=at.repetition)
        found.setdefault(at.case, {}).setdefault(place, set()).add(finding.verdict)
    return found


def _against(row: CaseRow, by_check: dict[str, tuple[CheckResult, _ByCase]], required: Sequence[str]) -> list[str]:
    place = Place(arm=row.arm, case=row.case, op=row.op, repetition=row.repetition)
    verdicts = dict.fromkeys(required, Verdict.UNKNOWN)
    for check, (result, found) in by_check.items():
        near = [*found.get(None, {}).items(), *found.get(row.case, {}).items()]
        verdicts[check] = _come_to(result, set().union(*(those for at, those in near if _weighs(at, place))))
    speaking = [check for check, verdict in verdicts.items() if verdict is not Verdict.PASS]
    return sorted(speaking, key=lambda check: (verdicts[check] is not Verdict.FAIL, check.endswith("equality")))


def _come_to(result: CheckResult, found: set[Verdict]) -> Verdict:
    """The verdict of a check over the findings about one row; its own where it told none of any row."""
    if result.verdict is not Verdict.PASS and not result.findings:
        return result.verdict
    return next((v for v in (Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_EXERCISED) if v in found), Verdict.PASS)


def _weighs(found: Place, row: Place) -> bool:
    if row.arm is not None and found.arm not in (None, row.arm, CONTROL):
        return False
    if row.repetition is not None and found.repetition not in (None, row.repetition):
        return False
    return found.case in (None, row.case) and (row.op is None or found.op in (None, row.op))
