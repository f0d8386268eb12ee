"""Whose control may stand in: the plan's own, or that of the plan it names, run alike."""

from __future__ import annotations

from typing import Any

import pytest

from samestate.plans.lending import objection
from samestate.plans.load import load, with_connector, with_engine
from samestate.plans.model import Plan


@pytest.fixture
def lender() -> Plan:
    return load("boundary")


@pytest.fixture
def borrower() -> Plan:
    return load("boundary-instrumented")


def test_the_instrumented_plan_takes_its_control_from_boundary(borrower: Plan, lender: Plan) -> None:
    assert objection(borrower, lender) is None
    arguments: dict[str, Any] = {"model": "external", "serve_args": ["--enforce-eager"]}
    assert objection(with_engine(borrower, **arguments), with_engine(lender, **arguments)) is None


def test_a_plan_lends_to_itself(borrower: Plan, lender: Plan) -> None:
    assert objection(borrower, borrower) is None
    assert objection(lender, lender) is None


def test_a_plan_lends_to_its_like_with_another_connector_or_release(lender: Plan) -> None:
    newer, older = (with_connector(lender, "lmcache", release=release) for release in ("0.5.6", "0.5.5"))
    repaired = with_connector(older, None, repair="strict-prefix", options={"separate_object_groups": True})
    for borrower in (newer, older, repaired):
        assert objection(borrower, lender) is None
        assert objection(lender, borrower) is None
    assert objection(newer, with_engine(older, model="external", serve_args=[])) == (
        "differs from plan boundary in engine"
    )


def test_other_prompts_of_a_scenario_may_not_lend() -> None:
    scenario = load("shared-prefix")
    other = scenario.model_copy(update={"prompts": scenario.prompts[:-1]})
    assert objection(scenario, other) == "differs from plan shared-prefix in prompts"


def test_a_plan_that_names_no_other_takes_none(borrower: Plan, lender: Plan) -> None:
    assert objection(lender, borrower) == (
        "is of plan boundary-instrumented; plan boundary takes its control from plan boundary"
    )


@pytest.mark.parametrize(
    ("update", "words"),
    [
        (
            {"name": "mine"},
            "plan mine; plan boundary-instrumented takes its control from plan boundary-instrumented or bou",
        ),
        ({"lengths": ["2C"]}, "differs from plan boundary-instrumented in lengths"),
        ({"template": "ledger-en", "seed": 1}, "differs from plan boundary-instrumented in template, seed"),
        ({"output_tokens": 8}, "output_tokens"),
        ({"operations": ["cold", "reset", "reload"]}, "operations"),
        ({"ignore_eos": False}, "ignore_eos"),
        ({"arms": []}, "its control arm is another"),
    ],
)
def test_what_decides_the_control_must_be_equal(
    borrower: Plan, lender: Plan, update: dict[str, Any], words: str
) -> None:
    assert words in (objection(borrower, lender.model_copy(update=update)) or "")


def test_other_engine_settings_may_not_lend(borrower: Plan, lender: Plan) -> None:
    other = with_engine(lender, model=lender.engine.model, serve_args=["--seed", "1"])
    assert "engine" in (objection(borrower, other) or "")
