"""The table of a marker plan, one row a probe; and ``speculation``: drafts were proposed, and some accepted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding, Place, Verdict
from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.checks.marker_budget import mistrusted
from samestate.checks.marker_classes import TokenClass, counted
from samestate.checks.marker_close import closes_of, first_rank_classes
from samestate.checks.marker_history import Committed, RankTrace
from samestate.checks.marker_probes import Probe, all_probes, probes_of
from samestate.checks.marker_ranks import disagreements
from samestate.checks.marker_reconcile import Rule, tail_lengths
from samestate.checks.table import CaseRow, MarkerRow, verdict_of
from samestate.checks.verdicts import conclude, not_exercised, unknown

SPECULATION = "speculation"


class Drafts(NamedTuple):
    """Of one trace."""

    proposed: int
    accepted: int


def drafts_of(trace: RankTrace) -> Drafts:
    """Drafts that the trace's rows verified, and those of them that were committed."""
    proposed = accepted = 0
    for step in trace.steps:
        if step.rows is None:
            continue
        drafted = [row.drafted for row in step.rows.rec.rows if row.drafted is not None]
        proposed += len(drafted)
        accepted += max(0, len(step.tokens) - 1)
    return Drafts(proposed, accepted)


def speculation(history: History) -> CheckResult:
    """In every arm that speculates drafts were proposed and some accepted, or nothing was tested there."""
    arms = [arm for arm in history.arms.values() if arm.markers.recorder]
    speculating = [arm for arm in arms if arm.markers.recorder and arm.markers.recorder.rec.speculative_tokens]
    if arms and not speculating:
        return not_exercised(SPECULATION, "no_speculation", "no arm speculates", unit="drafts")
    findings: list[Finding] = []
    proposed = accepted = 0
    for arm in speculating:
        mine = _drafts(arm)
        proposed, accepted = proposed + mine.proposed, accepted + mine.accepted
        if not mine.accepted:
            message = f"arm {arm.name}: {mine.proposed} drafts proposed, none accepted: speculation was not tested"
            findings.append(unknown("vacuous", message, Place(arm=arm.name)))
    summary = f"{accepted} of {proposed} drafts accepted, {len(speculating)} arms"
    return conclude(SPECULATION, findings, unit="drafts", examined=proposed, summary=summary)


def _drafts(arm: ArmHistory) -> Drafts:
    """Over the first rank's traces."""
    firsts = [next(iter(probe.traces.values())) for probe in probes_of(arm) if probe.traces]
    each = [drafts_of(trace) for trace in firsts]
    return Drafts(sum(one.proposed for one in each), sum(one.accepted for one in each))


# --- the table --------------------------------------------------------------------------------


def frozen_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """One row a probe under the frozen rule; raises MissingEvidence where none was sent."""
    return _table(history, Rule.FROZEN, results, required)


def post_stop_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """One row a probe under the post-stop rule; raises MissingEvidence where none was sent."""
    return _table(history, Rule.POST_STOP, results, required)


def _table(history: History, rule: Rule, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    probes = all_probes(history)
    arms = {probe.arm.name: probe.arm for probe in probes}
    reasons = {key: why for arm in arms.values() for key, why in mistrusted(arm, rule).items()}
    apart = {name: {finding.place.case for finding in disagreements(arm)} for name, arm in arms.items()}
    return [
        _row(probe, reasons.get((probe.arm.name, probe.name), ""), apart[probe.arm.name], results, required)
        for probe in probes
    ]


def _row(
    probe: Probe, why: str, apart: set[str | None], results: Sequence[CheckResult], required: Sequence[str]
) -> CaseRow:
    answer = probe.answered.rec if probe.answered else None
    verdict = verdict_of(Place(arm=probe.arm.name, case=probe.name, op=probe.name), results, required)
    return CaseRow(
        case=probe.name,
        tokens=len(answer.prompt_token_ids) if answer else 0,
        first_difference=None,
        equal=None,
        boundary=None,
        boundary_reported=False,
        content_boundary=None,
        credited=None,
        scheduled=None,
        suffix=None,
        rank_bytes=[],
        verdict=verdict if answer or verdict is not Verdict.PASS else Verdict.UNKNOWN,
        arm=probe.arm.name,
        op=probe.name,
        marker=_marker(probe, why, agree=not apart & {None, probe.name}),
    )


def _stores(trace: RankTrace) -> int:
    return sum(row.store for step in trace.steps if step.rows for row in step.rows.rec.rows)


def _was_stored(committed: Committed) -> bool:
    return committed.row is not None and committed.row.store and committed.row.stored == committed.token


def _marker(probe: Probe, why: str, *, agree: bool) -> MarkerRow:
    answer = probe.answered.rec if probe.answered else None
    closes = []
    with suppress(MissingEvidence):
        closes = closes_of(probe, why)
    first = next(iter(probe.traces.values()), None)
    drafts = drafts_of(first) if first else None
    tails = tail_lengths(probe)
    classes = first_rank_classes(probe, trusted=not why)
    attributed = closes[0].attributed if closes else None
    return MarkerRow(
        budget=probe.budget,
        position=closes[0].marker.position if closes else None,
        marker_class=attributed.value if attributed else None,
        observed=closes[0].observed.value if closes and attributed is TokenClass.UNKNOWN else None,
        closes=len(closes),
        ranks=len(probe.traces),
        ranks_agree=agree if len(probe.traces) > 1 else None,
        trace_tokens=[len(trace.tokens) for trace in probe.traces.values()],
        api_tokens=len(answer.token_ids) if answer else None,
        tail=max(tails.values()) if tails else None,
        tail_known=bool(tails) and not why,
        finish_reason=answer.finish_reason if answer else None,
        stop_reason=None if answer is None or answer.stop_reason is None else str(answer.stop_reason),
        stores=_stores(first) if first else None,
        stores_committed=sum(_was_stored(one) for one in first.committed) if first else None,
        drafted=drafts.proposed if drafts else None,
        accepted=drafts.accepted if drafts else None,
        classes=counted(classes) if classes else "",
    )
