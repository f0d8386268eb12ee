"""The instrumented plan on the simulated engine: clean, and with each fault that its conduct can have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from quiet import Silent
from samestate.checks.analyzers import Judgement, judge
from samestate.checks.base import Verdict
from samestate.engines.sim import ATTENTION, RECURRENT, Conduct, FullLookup, SimEngine
from samestate.evidence.archive import Archive
from samestate.lab.run import REFERENCE_ARM, RunError, RunRequest, run_plan
from samestate.plans.model import Plan

Requests = Callable[..., RunRequest]
PAGE_CHECKS = {"layout", "page-bytes", "page-coverage", "poison", "save-completion", "prefix-identity"}


class Zeroes(Conduct):
    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return bytes(len(page)) if group == RECURRENT else page


class Shortens(Conduct):
    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return page[: len(page) // 2] if group == ATTENTION else page


class Drops(Conduct):
    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        return None if rank == 1 and group == RECURRENT else page


class Stale(Conduct):
    """Every load gets the state of the first one."""

    first: bytes | None = None

    def arrives(self, rank: int, group: int, page: bytes) -> bytes | None:
        if group != RECURRENT:
            return page
        self.first = self.first or page
        return self.first


class Hasty(Conduct):
    def due(self, due_ns: int) -> int:
        return 0


class Faulty(SimEngine):
    conducts: ClassVar = {
        "full-lookup": FullLookup,
        "zero-page": Zeroes,
        "short-copy": Shortens,
        "drop-rank-load": Drops,
        "stale-page": Stale,
        "early-complete": Hasty,
    }


def judged(request: RunRequest) -> Judgement:
    return judge(Archive.open(run_plan(request, Silent()).archive))


def codes(judgement: Judgement, check: str) -> set[str]:
    return {finding.code for result in judgement.results if result.check == check for finding in result.findings}


@pytest.fixture
def control(small: Plan, request_for: Requests) -> Path:
    """A plain run of the boundary plan."""
    return run_plan(request_for(small, "plain"), Silent()).archive


def test_a_clean_run_passes_against_an_archived_control_of_the_plain_plan(
    watched: Plan, request_for: Requests, control: Path
) -> None:
    judgement = judged(request_for(watched, control=control))
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "candidate_vs_archived")
    assert not judgement.performance_eligible
    assert {result.check for result in judgement.results if result.verdict is Verdict.PASS} >= PAGE_CHECKS
    assert [row.content_boundary for row in judgement.table] == [944, 944, 960]
    archive = Archive.open(request_for(watched).out)
    assert archive.verify() == []
    lender = Archive.open(control)
    assert archive.source_plan_json("control") == lender.plan_json
    assert archive.inputs == lender.inputs and archive.resolved_json != lender.resolved_json


def test_without_a_lent_control_it_runs_one(watched: Plan, request_for: Requests) -> None:
    judgement = judged(request_for(watched))
    assert (judgement.verdict, judgement.comparison_kind) == (Verdict.PASS, "paired_live")


def test_a_plain_control_may_be_the_reference_too(watched: Plan, request_for: Requests, control: Path) -> None:
    judgement = judged(request_for(watched, reference=control))
    assert judgement.verdict is Verdict.PASS
    assert Archive.open(request_for(watched).out).source_plan_json(REFERENCE_ARM) is not None


def test_a_run_under_memory_pressure_raises_no_alarm(small: Plan, watched: Plan, request_for: Requests) -> None:
    engine = small.engine.model_copy(update={"settings": {**small.engine.settings, "num_gpu_blocks_override": 70}})
    judgement = judged(request_for(watched.model_copy(update={"engine": engine})))
    assert judgement.verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("fault", "check", "code"),
    [
        ("full-lookup", "prefix-identity", "content_not_credited"),
        ("zero-page", "page-coverage", "zero_page"),
        ("short-copy", "poison", "sentinel_left"),
        ("drop-rank-load", "poison", "sentinel_left"),
        ("drop-rank-load", "page-bytes", "destination_differs"),
        ("stale-page", "prefix-identity", "content_not_credited"),
        ("early-complete", "save-completion", "early_complete"),
    ],
)
def test_each_fault_is_seen_by_its_check(
    watched: Plan, request_for: Requests, fault: str, check: str, code: str
) -> None:
    engine = watched.engine.model_copy(update={"settings": {**watched.engine.settings, "tensor_parallel_size": 2}})
    plan = watched.model_copy(
        update={"engine": engine, "instruments": watched.instruments.model_copy(update={"save_delay_ms": 50})}
    )
    clean = plan if fault == "early-complete" else plan.model_copy(update={"instruments": watched.instruments})
    judgement = judged(request_for(clean, make_engine=Faulty, fault=fault))
    assert code in codes(judgement, check)
    assert judgement.verdict is Verdict.FAIL


def test_a_control_of_a_plan_that_it_does_not_name_is_refused(
    small: Plan, watched: Plan, request_for: Requests
) -> None:
    def refused(plan: Plan, out: str, **update: Any) -> str:
        lender = run_plan(request_for(plan.model_copy(update=update), out), Silent()).archive
        with pytest.raises(RunError) as caught:
            run_plan(request_for(watched, f"{out}-2", control=lender), Silent())
        return str(caught.value)

    assert "differs from plan boundary-instrumented in seed" in refused(small, "a", seed=7)
    assert "is of plan mine" in refused(small, "b", name="mine")
