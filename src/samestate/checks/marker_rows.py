"""``budget-rows``: stores on all rows of a step, committed or not, are those that the policy has for this runner.

A store that is not committed changes no token, so this is told and decides nothing; `budget-close` judges tokens. It
shows a budget that looks right by luck: stores that leave the policy where drafts happen to be rejected.

What vLLM's older runner does after a start marker in the output is not modelled (`v1_leaves`). Steps there that keep to
the policy itself, all of its stores or the first, are unknown; those that leave it fail as any other.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from samestate.checks.base import CheckResult, Finding
from samestate.checks.budget_oracle import Course, stored_rows, v1_leaves
from samestate.checks.history import History
from samestate.checks.marker_close import why_not
from samestate.checks.marker_history import RankTrace, TracedStep
from samestate.checks.marker_probes import Probe, budgeted, markers_of
from samestate.checks.marker_reconcile import Rule
from samestate.checks.verdicts import conclude, fail, unknown
from samestate.evidence.marker_records import RecorderStarted

CHECK = "budget-rows"


class Compared(NamedTuple):
    """The stores of one step beside those of the policy."""

    step: TracedStep
    due: dict[int, int]
    """Local row -> id that the policy stores, as this runner does where it is modelled."""
    there: dict[int, int | None]
    modelled: bool
    """Whether `due` is the runner's. If not it is the policy's, of which the runner may make the first store alone."""

    @property
    def same(self) -> bool:
        """Nothing here contradicts the policy."""
        return self.there == self.due or (not self.modelled and self.there == dict(list(self.due.items())[:1]))


def budget_rows(history: History, rule: Rule) -> CheckResult:
    """Compare the stores of every step of every trace that can be trusted; each trace has one finding of a kind."""
    reasons = why_not(history, rule)
    findings: list[Finding] = []
    examined = same = 0
    for probe in budgeted(history):
        recorder = probe.arm.markers.recorder
        if why := reasons.get((probe.arm.name, probe.name), ""):
            findings.append(unknown("trace_not_usable", f"{probe.title}: {why}", probe.place, probe.where))
        elif recorder is not None:
            for rank, trace in probe.traces.items():
                try:
                    compared = list(steps(probe, trace, recorder.rec))
                except ValueError as error:  # the policy has no model of this runner's rows
                    findings.append(unknown("not_modelled", f"{probe.title}: {error}", probe.at_rank(rank)))
                    continue
                differing = [one for one in compared if not one.same]
                unmodelled = [one for one in compared if one.same and not one.modelled]
                examined += len(compared)
                same += len(compared) - len(differing) - len(unmodelled)
                findings += [_finding(probe, trace, differing)] if differing else []
                findings += [_unmodelled(probe, trace, unmodelled)] if unmodelled else []
    summary = f"{same}/{examined} steps have the policy's stores and no others"
    return conclude(CHECK, findings, unit="steps", examined=examined, summary=summary)


def steps(probe: Probe, trace: RankTrace, recorder: RecorderStarted) -> Iterator[Compared]:
    """Every step of a whole trace. Raises ValueError (see `Course`) and MissingEvidence."""
    if probe.answered is None or probe.budget is None:
        return
    markers = markers_of(probe.arm)
    prompt, tokens = probe.answered.rec.prompt_token_ids, trace.tokens
    leaves = v1_leaves(prompt, tokens, markers) if recorder.runner == "v1" else None
    course = Course(prompt, tokens, markers, probe.budget)
    for step in trace.steps:
        rows = step.rows.rec.rows if step.rows else []
        drafts = [row.drafted for row in rows if row.drafted is not None]
        modelled = leaves is None or step.position < leaves
        decisions = course.rows(step.position, drafts, recorder.runner if modelled else "v2")
        there = {row.local: row.stored for row in rows if row.store}
        yield Compared(step, stored_rows(decisions), there, modelled)


def _unmodelled(probe: Probe, trace: RankTrace, found: list[Compared]) -> Finding:
    first = found[0]
    message = (
        f"rank {trace.rank}, {probe.title}: {len(found)} steps from position {first.step.position} on keep to the "
        "policy; whether these rows are the runner's is not known: "
        "after a start marker in the output, v1 is not modelled"
    )
    return unknown("not_modelled", message, probe.at_rank(trace.rank), first.step.evidence)


def _finding(probe: Probe, trace: RankTrace, found: list[Compared]) -> Finding:
    first = found[0]
    more = f"; {len(found) - 1} more steps" if len(found) > 1 else ""
    message = (
        f"rank {trace.rank}, {probe.title}: step {first.step.step}, position {first.step.position}: "
        f"stores {_rows(first.there)}, the policy has {_rows(first.due)}{more}"
    )
    return fail("rows_differ", message, probe.at_rank(trace.rank), first.step.evidence)


def _rows(stores: dict[int, int] | dict[int, int | None]) -> str:
    return ", ".join(f"{token} on row {local}" for local, token in stores.items()) or "on no row"
