"""Page records of a repeated plan: each repetition's own are read, under the folder that they lie in."""

from __future__ import annotations

from collections.abc import Callable

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.engines.base import EngineSpec
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.model import Plan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]
PAGES = ("layout", "page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity")


def test_pages_of_both_repetitions_are_judged(watched: Plan, request_for: Requests, progress: QuietProgress) -> None:
    plan = watched.model_copy(update={"repetitions": ["forward", "reverse"], "lengths": ["60C"]})
    judgement = judge(Archive.open(run_plan(request_for(plan), progress).archive))
    assert judgement.verdict is Verdict.PASS, [one for one in judgement.results if one.findings]
    for result in judgement.results:
        if result.check in PAGES:
            assert result.summary.startswith(("in each of 2 repetitions: ", "repetition 1: "))
    assert [row.content_boundary for row in judgement.table] == [944, 944]


def test_pages_that_hold_another_prefix_in_the_second_repetition_alone(
    watched: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    def make(spec: EngineSpec) -> SimEngine:
        return SimEngine(spec._replace(fault="full-lookup") if spec.arm == "candidate-2" else spec)

    plan = watched.model_copy(update={"repetitions": ["forward", "forward"], "lengths": ["60C"]})
    judgement = judge(Archive.open(run_plan(request_for(plan, make_engine=make), progress).archive))
    assert [one.verdict for one in judgement.repetitions] == [Verdict.PASS, Verdict.FAIL]
    (content,) = [one for one in judgement.results if one.check == "prefix-identity"]
    assert content.verdict is Verdict.FAIL
    assert {finding.place.repetition for finding in content.findings} == {2}
    assert all(where.startswith("arms/candidate-2/") for finding in content.findings for where in finding.evidence)
    assert [row.content_boundary for row in judgement.table] == [944, 960]
