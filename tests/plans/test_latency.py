"""Latency plans: trials, order, conditions by arm, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from samestate.evidence.records import OperationName
from samestate.plans.latency import OFF, ON, conditions, side_by_side, trials, turns
from samestate.plans.load import PlanError, load, plan_json, shipped
from samestate.plans.model import Connector, Plan
from samestate.plans.operations import cases, operation_ids, planned_inputs, workload

C = 1792


@pytest.fixture
def plan() -> Plan:
    return load("latency")


def shuffled(plan: Plan, seed: int) -> Plan:
    assert plan.latency is not None
    return plan.model_copy(update={"latency": plan.latency.model_copy(update={"order_seed": seed})})


def test_study_a_s_counts(plan: Plan) -> None:
    """120 requests, 90 measured: 12 inputs, 9 of them measured, in five conditions, twice."""
    work = workload(plan)
    assert (work.engine_starts, work.repetitions, work.distinct_inputs) == (4, 2, 12)
    assert work.generations * work.repetitions == 120
    assert work.output_tokens == 60 * 128
    measured = [one for one in trials(plan) if one.number]
    assert len(measured) * 5 * work.repetitions == 90
    assert {one.tokens for one in planned_inputs(plan, C)} == {3583, 3584, 5376}
    assert len(operation_ids(plan, C)) == 48


def test_conditions_by_arm_in_every_repetition(plan: Plan) -> None:
    off = (OperationName.COLD, OperationName.REPEAT)
    on = (*off, OperationName.RESET, OperationName.RELOAD)
    assert [conditions(plan, name) for name in ("control", "candidate", "control-2", "candidate-2")] == [
        off,
        on,
        off,
        on,
    ]
    (first, *_) = cases(plan, C, "candidate-2")
    assert [step.op for step in first.operations] == [
        "w1-N3583.cold",
        "w1-N3583.repeat-1",
        "w1-N3583.reset",
        "w1-N3583.reload",
    ]


def test_ascending_by_trial_then_by_length_warm_ups_first(plan: Plan) -> None:
    assert [case.id for case in cases(plan, C, "control")] == [
        f"{trial}-N{n}" for trial in ("w1", "t1", "t2", "t3") for n in (3583, 3584, 5376)
    ]


def test_a_seed_shuffles_the_measured_trials_alike_for_all_arms(plan: Plan) -> None:
    one = shuffled(plan, 7)
    order = [case.id for case in cases(one, C, "control")]
    assert order == [case.id for case in cases(one, C, "candidate-2")] == [case.id for case in cases(one, C, "control")]
    ascending = [case.id for case in cases(plan, C, "control")]
    assert order[:3] == ascending[:3], "warm-ups stay first"
    assert order != ascending
    assert sorted(order) == sorted(ascending)
    assert order != [case.id for case in cases(shuffled(plan, 8), C, "control")]


def test_plans_that_time_nothing_keep_their_bytes() -> None:
    for name in set(shipped()) - {"latency"}:
        assert b'"latency"' not in plan_json(load(name))
    assert b'"latency":{"order_seed":null,"trials":3,"warmups":1}' in plan_json(load("latency"))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"operations": ["cold", "repeat"]}, "operations, series: a latency plan's conditions are fixed"),
        (
            {"instruments": {"audit_level": "digest", "save_delay_ms": 0}},
            "instruments.audit_level: 'digest' reads pages",
        ),
        (
            {"instruments": {"audit_level": "metadata", "save_delay_ms": 5}},
            "instruments.save_delay_ms: holds saves back",
        ),
        ({"latency": {"trials": 0, "warmups": 1}}, "latency.trials"),
        ({"latency": {"trials": 1, "warmups": -1}}, "latency.warmups"),
        ({"lengths": []}, "lengths: is empty"),
        ({"lengths": ["2C", "2C"]}, "repeats '2C'"),
        ({"arms": [{"name": "candidate", "connector": "native"}]}, "one 'control' and one 'candidate'"),
        ({"temperature": 0.5}, "temperature: must be 0"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, change: dict[str, Any], line: str) -> None:
    tree = yaml.safe_load(plan_json(load("latency"))) | change
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(PlanError) as refused:
        load(str(tmp_path / "plan.yaml"))
    assert line in str(refused.value)


def test_a_core_beside_the_server_is_refused(tmp_path: Path) -> None:
    tree = yaml.safe_load(plan_json(load("latency")))
    tree["engine"]["core"] = "here"
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(PlanError, match=r"engine\.core: a server's engine core has its own process"):
        load(str(tmp_path / "plan.yaml"))


# --- side by side ---------------------------------------------------------------------------------


def connectors(*names: Connector) -> dict[Connector, str | None]:
    return dict.fromkeys(names)


def test_side_by_side_is_one_arm_a_connector_in_turns(plan: Plan) -> None:
    made = side_by_side(plan, connectors("none", "native", "samestate-disk"))
    assert [(arm.name, arm.connector) for arm in made.arms] == [
        ("control", "none"),
        ("native", "native"),
        ("samestate-disk", "samestate-disk"),
    ]
    assert made.repetitions == ["forward"]
    assert made.analyzer.id == "latency-side-v1"
    assert {"latency-turns", "latency-side-reloads", "latency-side-boundary"} <= set(made.required_checks)
    assert not {"latency-serial", "latency-reloads", "boundary"} & set(made.required_checks)
    assert [arms[0] for _, arms in turns(made)] == ["control", "native", "samestate-disk"] * 4
    assert conditions(made, "native") == conditions(made, "samestate-disk") == ON
    assert conditions(made, "control") == OFF


def test_a_plan_file_of_it_is_read_back(plan: Plan, tmp_path: Path) -> None:
    made = side_by_side(plan, connectors("none", "native", "samestate-memory"))
    path = tmp_path / "side.yaml"
    path.write_text(yaml.safe_dump(made.model_dump(mode="json")))
    assert load(str(path)) == made


def test_plans_without_turns_are_written_as_before(plan: Plan) -> None:
    assert b"interleaved" not in plan_json(plan)
    assert b'"interleaved":true' in plan_json(side_by_side(plan, connectors("none", "native")))


@pytest.mark.parametrize("names", [("none",), ("native", "none"), ()])
def test_without_something_to_compare_there_is_none(plan: Plan, names: tuple[Connector, ...]) -> None:
    with pytest.raises(PlanError, match="connectors: must be none, to compare with"):
        side_by_side(plan, connectors(*names))


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"repetitions": ["forward", "reverse"]}, "engines that take turns have one"),
        ({"analyzer": {"id": "latency-v1", "source_sha256": None}}, "judges engines one after another"),
        ({"latency": {"trials": 1, "warmups": 1}}, "judges engines that take turns"),
    ],
)
def test_what_makes_no_sense_side_by_side(plan: Plan, tmp_path: Path, change: dict[str, Any], line: str) -> None:
    tree = side_by_side(plan, connectors("none", "native")).model_dump(mode="json") | change
    if "latency" in change:
        tree["arms"][1]["name"] = "candidate"
    path = tmp_path / "side.yaml"
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(PlanError, match=line):
        load(str(path))
