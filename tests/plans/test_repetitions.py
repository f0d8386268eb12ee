"""Which arms a repeated plan runs, under which names, in which order; and which repetitions make no sense."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import pytest

from plans.refusals import refusal
from samestate.evidence.canonical import canonical_json
from samestate.plans.load import freeze, load, lock_json, plan_json, plan_sha256
from samestate.plans.operations import workload
from samestate.plans.repetitions import repeated_arms

SHIPPED = files("samestate.plans").joinpath("shipped")
SOURCE = "ab" * 32


def test_arms_come_in_the_order_of_their_repetition_under_a_name_of_their_own() -> None:
    plan = load("boundary").model_copy(update={"repetitions": ["forward", "reverse", "forward"]})
    arms = repeated_arms(plan)
    names = ["control", "candidate", "candidate-2", "control-2", "control-3", "candidate-3"]
    assert [one.name for one in arms] == [one.running.name for one in arms] == names
    assert [one.repetition for one in arms] == [1, 1, 2, 2, 3, 3]
    assert [one.running.connector for one in arms] == ["none", "native", "native", "none", "none", "native"]
    assert workload(plan).engine_starts == 6


def test_one_repetition_is_not_written_and_changes_no_hash() -> None:
    """A plan from before there were repetitions has the canonical JSON that it had."""
    plan = load("boundary")
    assert plan.repetitions == ["forward"]
    tree = plan.model_dump(mode="json")
    del tree["repetitions"], tree["markers"], tree["latency"], tree["expected_patched"]
    for arm in tree["arms"]:
        del arm["ended"], arm["settings"], arm["speculation"]  # which go without saying too
    assert plan_json(plan) == canonical_json(tree)
    assert "repetitions" not in json.loads(lock_json(freeze(plan, SOURCE)))["plan"]


def test_said_once_it_is_the_same_plan(tmp_path: Path) -> None:
    path = tmp_path / "b.yaml"
    path.write_text((SHIPPED / "boundary.yaml").read_text() + "\nrepetitions: [forward]\n")
    assert plan_sha256(load(str(path))) == plan_sha256(load("boundary"))


def test_more_of_them_are_written_and_a_lock_keeps_them(tmp_path: Path) -> None:
    plan = freeze(load("continuation"), SOURCE)
    assert json.loads(plan_json(plan))["repetitions"] == ["forward", "forward"]
    (tmp_path / "c.lock").write_bytes(lock_json(plan))
    assert load(str(tmp_path / "c.lock")) == plan
    once = plan.model_copy(update={"repetitions": ["forward"]})
    assert plan_sha256(once) != plan_sha256(plan)


@pytest.mark.parametrize(
    ("plan", "repetitions", "message"),
    [
        ("boundary", "[]", "repetitions: is empty, so nothing would run; write 'forward' or 'reverse' once for each"),
        ("boundary", "2", "repetitions: "),
        ("boundary", "[forward, backward]", "repetitions[1]: "),
        (
            "shared-prefix",
            "[forward, forward]",
            "repetitions: only a matrix is repeated; remove them and run the scenario again",
        ),
        (
            "local-hit",
            "[forward, reverse]",
            "repetitions[1]: the plan has one arm, and no order to reverse; make it 'forward'",
        ),
    ],
)
def test_repetitions_that_make_no_sense(tmp_path: Path, plan: str, repetitions: str, message: str) -> None:
    text = f"{(SHIPPED / f'{plan}.yaml').read_text()}\nrepetitions: {repetitions}\n"
    assert refusal(tmp_path / "p.yaml", text).startswith(message)


def test_an_arm_within_itself_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "l.yaml"
    path.write_text((SHIPPED / "local-hit.yaml").read_text() + "\nrepetitions: [forward, forward]\n")
    assert [one.name for one in repeated_arms(load(str(path)))] == ["candidate", "candidate-2"]
