"""The table of a probe: one row an answer, each against the first cold one of its prompt."""

from __future__ import annotations

from collections.abc import Sequence

from samestate.checks.base import CheckResult, Verdict
from samestate.checks.history import History
from samestate.checks.probe_equality import CHECK, TIE, cold, ruled
from samestate.checks.probe_history import Probed, by_case, probed
from samestate.checks.table import CaseRow, TakenPath, verdict_of


def probe_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """Raises MissingEvidence."""
    positions = {one.op: row.position for one, row in ruled(history)[1]}
    ties = {
        finding.place.op
        for result in results
        if result.check == CHECK
        for finding in result.findings
        if finding.code == TIE
    }
    return [
        _row(one, colds[0] if colds else None, positions, ties, verdict_of(one.place, results, required))
        for answers in by_case(probed(history)).values()
        for colds in [cold(answers)]
        for one in answers
    ]


def _row(
    one: Probed, first: Probed | None, positions: dict[str, int | None], ties: set[str | None], verdict: Verdict
) -> CaseRow:
    position = positions[one.op] if one.op in positions else _position(first, one)
    return CaseRow(
        case=one.case,
        tokens=one.tokens,
        first_difference=position,
        equal=None if first is None else position is None,
        boundary=None,
        boundary_reported=False,
        content_boundary=None,
        credited=one.reused,
        scheduled=None,
        suffix=None if one.reused is None else one.tokens - one.reused,
        rank_bytes=[],
        verdict=verdict,
        op=one.op,
        path=_path(one),
        local=one.local if one.alone else None,
        external=one.external if one.alone else None,
        together=f"{one.op}.beside" if one.beside else None,
        tie=one.op in ties,
    )


def _position(first: Probed | None, one: Probed) -> int | None:
    if first is None:
        return None
    left, right = first.answer.tokens, one.answer.tokens
    differing = (at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, None if len(left) == len(right) else min(len(left), len(right)))


def _path(one: Probed) -> TakenPath | None:
    if one.reused is None:
        return None
    if not one.reused:
        return "cold"
    if not one.alone:
        return None
    if one.external:
        return "mixed" if one.local else "external"
    return "local"
