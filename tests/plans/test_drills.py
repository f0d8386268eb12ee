"""Drills: each begins and ends with nothing armed, and all together are a plan that makes sense."""

from __future__ import annotations

import pytest

from samestate.faults.catalogue import faults_on
from samestate.plans.drills import CLEAN, DRILLS, RANK_DRILLS, Drill, drill_plan
from samestate.plans.load import plan_json
from samestate.plans.model import Plan
from samestate.plans.operations import operation_ids
from samestate.plans.scenarios import CANDIDATE, check_scenario, scenario_steps

ALL = DRILLS | RANK_DRILLS


def test_there_is_a_drill_for_every_fault_that_can_be_armed_on_vllm() -> None:
    assert set(ALL) == set(faults_on("vllm"))


@pytest.mark.parametrize("drill", ALL.values(), ids=ALL)
def test_a_drill_arms_its_fault_and_is_over_it_before_a_clean_prompt(drill: Drill) -> None:
    armed = [act.armed for act in drill.acts]
    assert any(armed)
    assert not armed[0]
    assert drill.acts[0].plan.reset
    last = [act for act in drill.acts if not act.plan.reset][-2:]
    assert [act.plan.path for act in last] == ["cold", "external"]
    assert all(name.endswith(CLEAN) for act in last for name in act.plan.prompts)
    assert not any(act.armed for act in last)


def test_all_drills_are_one_scenario() -> None:
    drills = drill_plan(DRILLS)
    check_scenario(drills.plan)
    assert Plan.model_validate_json(plan_json(drills.plan)) == drills.plan
    ops = [step.op for step in scenario_steps(drills.plan, CANDIDATE)]
    assert list(drills.armed) == ops
    assert set(ops) <= set(operation_ids(drills.plan, 256))
    assert {fault for fault in drills.armed.values() if fault} == set(DRILLS)


def test_a_fault_is_armed_for_prompts_of_its_own_alone() -> None:
    drills = drill_plan(DRILLS)
    for step in scenario_steps(drills.plan, CANDIDATE):
        if step.prompt is not None:
            assert drills.armed[step.op] in (None, drills.owners[step.prompt])
            assert step.prompt.startswith(drills.owners[step.prompt])


def test_faults_of_ranks_are_drilled_on_two() -> None:
    assert drill_plan(RANK_DRILLS).plan.engine.serve_args == ["--tensor-parallel-size", "2"]
    assert drill_plan(DRILLS).plan.engine.serve_args == []


def test_an_unknown_fault_has_no_drill() -> None:
    with pytest.raises(KeyError):
        drill_plan(["no-such-fault"])
