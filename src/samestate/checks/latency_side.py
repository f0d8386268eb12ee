"""Checks of engines that take turns in one run: their order, and of every one with a cache its reloads and boundaries.

What is asked of one engine with a cache is asked of each by itself, in a view of the history in which it is the
candidate; what is found there is told under its own name.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import copy

from samestate.checks.base import Check, CheckResult, Finding, Place, Verdict
from samestate.checks.boundary import boundary
from samestate.checks.history import History
from samestate.checks.latency import serial
from samestate.checks.latency_reuse import reloaded as one_reloaded
from samestate.checks.latency_table import latency_table
from samestate.checks.table import CaseRow
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.plans.latency import trial_tokens, turns
from samestate.plans.scenarios import CANDIDATE, CONTROL

TURNS = "latency-turns"
RELOADS = "latency-side-reloads"
BOUNDARY = "latency-side-boundary"


def turns_taken(history: History) -> CheckResult:
    """One request at a time over all engines, each engine serial, trials in the planned turns (requirement 95)."""
    alone = serial(history)
    findings = [*alone.findings, *_overlaps(history), *_order(history)]
    for planned in history.plan.arms:
        if not history.arm(planned.name).timed:
            findings.append(unknown("not_timed", f"arm {planned.name}: timed nothing", Place(arm=planned.name)))
    summary = f"{alone.examined} requests of {len(history.plan.arms)} engines, one at a time, in turns as planned"
    if findings:
        summary = f"{len(findings)} departures: {findings[0].message}"
    return conclude(TURNS, findings, unit="requests", examined=alone.examined, summary=summary)


def _overlaps(history: History) -> Iterator[Finding]:
    """Requests of different engines that were open at once; those of one engine are `serial`'s."""
    timed = [
        (seen.rec.began_ns, seen.rec.done_ns, arm.name, seen)
        for arm in history.arms.values()
        for of_op in arm.timed.values()
        for seen in of_op
    ]
    latest: tuple[int, str, str] | None = None
    for began, done, arm, seen in sorted(timed, key=lambda one: one[0]):
        if latest is not None and began < latest[0] and arm != latest[1]:
            message = f"arm {arm}: {seen.rec.op} began before arm {latest[1]} was done"
            place = Place(arm=arm, op=seen.rec.op, request=seen.rec.request)
            yield fail("engines_overlap", message, place, [latest[2], seen.where])
        if latest is None or done > latest[0]:
            latest = (done, arm, seen.where)


def _order(history: History) -> Iterator[Finding]:
    """The turns that the engines' operations show, against those that the plan says."""
    tokens = dict(trial_tokens(history.plan, history.resolved.checkpoint_interval))
    planned = [(arm, trial.case(tokens[trial])) for trial, arms in turns(history.plan) for arm in arms]
    started = [(seen.t_ns, arm.name, seen) for arm in history.arms.values() for seen in arm.started]
    shown: list[tuple[str, str]] = []
    wheres: list[str] = []
    for _, arm, seen in sorted(started, key=lambda one: one[0]):
        if shown[-1:] != [(arm, seen.rec.case)]:
            shown.append((arm, seen.rec.case))
            wheres.append(seen.where)
    for at, (mine, due) in enumerate(zip(shown, planned, strict=False)):
        if mine != due:
            message = f"turn {at + 1}: arm {mine[0]} made {mine[1]}, planned was arm {due[0]} with {due[1]}"
            yield fail("out_of_turn", message, Place(arm=mine[0], case=mine[1]), [wheres[at]])
            return
    if len(shown) < len(planned):
        arm, case = planned[len(shown)]
        message = f"{len(shown)} of {len(planned)} turns were taken; first missing: arm {arm} with {case}"
        yield unknown("missing_turns", message, Place(arm=arm, case=case))
    elif len(shown) > len(planned):
        arm, case = shown[len(planned)]
        yield fail("out_of_turn", f"arm {arm} made {case} after the last planned turn", Place(arm=arm, case=case))


def reloaded(history: History) -> CheckResult:
    """Every engine's reloads loaded, with nothing local left."""
    return _each(history, RELOADS, one_reloaded)


def boundaries(history: History) -> CheckResult:
    """Every engine's reloads at B = p = C·⌊(N−1)/C⌋."""
    return _each(history, BOUNDARY, boundary)


def _each(history: History, check: str, of_one: Check) -> CheckResult:
    """A check of one candidate, of all of them: as in the worst, over as few as the least examined."""
    results = [(name, of_one(view)) for name, view in views(history)]
    findings = [_named(finding, name) for name, result in results for finding in result.findings]
    least = min((result for _, result in results), key=lambda result: result.examined, default=None)
    summary = "; ".join(f"{name} {result.summary}" for name, result in results) or "no engine with a cache"
    unit, examined = (least.unit, least.examined) if least else ("reloads", 0)
    return conclude(check, findings, unit=unit, examined=examined, summary=summary)


def views(history: History) -> Iterator[tuple[str, History]]:
    """Every arm but the control, and a history in which it is the candidate. Raises MissingEvidence."""
    for planned in history.plan.arms:
        if planned.name == CONTROL:
            continue
        view, arm = copy(history), copy(history.arm(planned.name))
        arm.name = CANDIDATE
        view.arms = {CONTROL: history.arm(CONTROL), CANDIDATE: arm}
        mine = f"arms/{planned.name}/"
        view.defects = [
            one._replace(where=f"arms/{CANDIDATE}/{one.where.removeprefix(mine)}")
            if one.where.startswith(mine)
            else one
            for one in history.defects
        ]
        yield planned.name, view


def _named(finding: Finding, name: str) -> Finding:
    if finding.place.arm != CANDIDATE:
        return finding
    return finding.model_copy(update={"place": finding.place.model_copy(update={"arm": name})})


def side_table(history: History, results: Sequence[CheckResult], required: Sequence[str]) -> list[CaseRow]:
    """A row for every reload of every engine; raises MissingEvidence where not even the cases are known."""
    rows = []
    for name, view in views(history):
        mine = [_of(result, name) for result in results]
        rows += [row.model_copy(update={"arm": name}) for row in latency_table(view, mine, required)]
    return rows


def _of(result: CheckResult, name: str) -> CheckResult:
    """What a result found of one engine, of the control or of no engine."""
    kept = [finding for finding in result.findings if finding.place.arm in (None, CONTROL, name)]
    if kept or not result.findings:
        return result.model_copy(update={"findings": kept})
    return result.model_copy(update={"findings": [], "verdict": Verdict.PASS})
