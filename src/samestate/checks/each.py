"""Each repetition by itself: a view of the history for each, its checks, its verdict. Nothing is pooled over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from samestate.checks.base import Check, CheckResult, Finding, Verdict
from samestate.checks.equality import CONTROLS, REPETITION
from samestate.checks.history import History, MissingEvidence
from samestate.checks.integrity import CHECK as INTEGRITY
from samestate.checks.latency import OUTPUTS
from samestate.checks.plan_identity import CHECK as PLAN_IDENTITY
from samestate.checks.repetitions import CHECK as REPETITIONS
from samestate.checks.table import CaseRow
from samestate.checks.verdicts import conclude, run_check, run_verdict
from samestate.evidence.stream import Defect
from samestate.plans.model import Order
from samestate.plans.repetitions import arm_name, repeated_arms

OF_THE_RUN = (INTEGRITY, PLAN_IDENTITY, REPETITIONS, REPETITION, CONTROLS, OUTPUTS)
"""Checks that look at all repetitions at once; every other one looks at each alone."""

Table = Callable[[History, Sequence[CheckResult], Sequence[str]], list[CaseRow]]


class RepetitionVerdict(BaseModel):
    """What one repetition came to by itself."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    repetition: int
    """From 1."""
    order: Order
    arms: list[str]
    """As the archive calls them, in the order in which they ran."""
    verdict: Verdict
    against: list[str]
    """Required checks that it does not pass."""


class Repetition(NamedTuple):
    """One repetition, as the checks saw it."""

    number: int
    order: Order
    arms: list[str]
    history: History
    """Its arms alone, under their planned names; arms that no plan knows are with the first."""
    results: list[CheckResult]
    """Its own; of checks of the run, what concerns it."""

    def verdict(self, required: Sequence[str]) -> RepetitionVerdict:
        """Its verdict under the required checks of the run."""
        passed = {result.check for result in self.results if result.verdict is Verdict.PASS}
        return RepetitionVerdict(
            repetition=self.number,
            order=self.order,
            arms=self.arms,
            verdict=run_verdict(required, self.results),
            against=[check for check in required if check not in passed],
        )

    def rows(self, table: Table, required: Sequence[str]) -> list[CaseRow]:
        """The rows of its table, each of which names the repetition."""
        rows = table(self.history, self.results, required)
        return [row.model_copy(update={"repetition": self.number}) for row in rows]


def run_checks(checks: Mapping[str, Check], history: History) -> tuple[list[CheckResult], list[Repetition]]:
    """The results of a run by its checks, and those of each repetition; none of these where there is but one."""
    repetitions = _repetitions(history)
    if not repetitions:
        return [run_check(check_id, check, history) for check_id, check in checks.items()], []
    numbers = {name: one.number for one in repetitions for name in one.arms}
    results = []
    for check_id, check in checks.items():
        if check_id in OF_THE_RUN:
            whole = _numbered(run_check(check_id, check, history), numbers)
            for one in repetitions:
                one.results.append(_concerning(whole, one.number))
            results.append(whole)
        else:
            for one in repetitions:
                one.results.append(run_check(check_id, check, one.history))
            results.append(_together([(one, one.results[-1]) for one in repetitions]))
    return results, repetitions


def _repetitions(history: History) -> list[Repetition]:
    try:
        plan = history.plan
    except MissingEvidence:
        return []
    if len(plan.repetitions) < 2:
        return []
    arms = repeated_arms(plan)
    known = {one.name for one in arms}
    strays = set(history.arms) - known
    found = []
    for number, order in enumerate(plan.repetitions, 1):
        mine = {one.name: one.arm.name for one in arms if one.repetition == number}
        names = mine | (dict.fromkeys(strays) if number == 1 else {})
        view = copy(history)
        view.arms = {}
        for name, arm in history.arms.items():
            if name in names:
                of_mine = copy(arm)
                of_mine.name = names[name] or name
                view.arms[of_mine.name] = of_mine
        view.defects = list(_defects(history.defects, mine, known - mine.keys()))
        found.append(Repetition(number, order, list(mine), view, []))
    return found


def _defects(defects: Sequence[Defect], mine: Mapping[str, str], others: set[str]) -> list[Defect]:
    """Those of other repetitions' arms left out, those of its own under the planned name."""
    kept = []
    for defect in defects:
        top, _, rest = defect.where.partition("/")
        name, _, inside = rest.partition("/")
        if top != "arms" or name not in others:
            renamed = f"arms/{mine[name]}/{inside}" if top == "arms" and name in mine else defect.where
            kept.append(defect._replace(where=renamed))
    return kept


def _together(results: list[tuple[Repetition, CheckResult]]) -> CheckResult:
    """What a check came to in a run: as in its worst repetition. It examined what it examined in each one."""
    findings = [_labelled(finding, one) for one, result in results for finding in result.findings]
    each = [result for _, result in results]
    least = min(each, key=lambda result: result.examined)
    summaries = list(dict.fromkeys(result.summary for result in each))
    summary = f"in each of {len(each)} repetitions: {summaries[0]}"
    if len(summaries) > 1:
        summary = "; ".join(f"repetition {one.number}: {result.summary}" for one, result in results)
    merged = conclude(least.check, findings, unit=least.unit, examined=least.examined, summary=summary)
    verdicts = {result.verdict for result in each}
    if verdicts == {Verdict.NOT_EXERCISED}:
        return merged.model_copy(update={"summary": summaries[0]})
    if merged.verdict is Verdict.NOT_EXERCISED or (merged.verdict is Verdict.PASS and verdicts != {Verdict.PASS}):
        # The question came up in one repetition and not in another, which did the same.
        return merged.model_copy(update={"verdict": Verdict.UNKNOWN})
    return merged


def _labelled(finding: Finding, one: Repetition) -> Finding:
    """The finding under the archive's name of its arm; it says its repetition."""
    arm = finding.place.arm
    if arm in {planned.name for planned in one.history.plan.arms}:
        arm = arm_name(arm, one.number)
    place = finding.place.model_copy(update={"arm": arm, "repetition": one.number})
    return finding.model_copy(update={"message": f"repetition {one.number}: {finding.message}", "place": place})


def _numbered(result: CheckResult, numbers: Mapping[str, int]) -> CheckResult:
    """A result of the whole run; what it found in one arm says the repetition."""
    findings = []
    for finding in result.findings:
        place = finding.place.model_copy(update={"repetition": numbers.get(finding.place.arm or "")})
        findings.append(finding.model_copy(update={"place": place}))
    return result.model_copy(update={"findings": findings})


def _concerning(result: CheckResult, number: int) -> CheckResult:
    """The part of a result of the whole run that weighs on one repetition: not what was found in another."""
    kept = [finding for finding in result.findings if finding.place.repetition in (None, number)]
    if len(kept) == len(result.findings):
        return result
    return conclude(result.check, kept, unit=result.unit, examined=result.examined, summary=result.summary)
