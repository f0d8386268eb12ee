from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestate.evidence.records import OperationName
from samestate.plans.errors import PlanError
from samestate.plans.load import load
from samestate.plans.operations import boundary, cases, check_operations, planned_inputs, workload

STUDY_LENGTHS = [3583, 3584, 3585, 3587, 3588, 3589, 5375, 5376, 5377]


@given(c=st.integers(min_value=1, max_value=10_000), k=st.integers(min_value=0, max_value=50), d=st.integers(0, 9_999))
def test_boundary_is_the_last_checkpoint_before_the_last_token(c: int, k: int, d: int) -> None:
    n = k * c + d % c + 1
    b = boundary(n, c)
    assert b % c == 0
    assert 1 <= n - b <= c


@pytest.mark.parametrize(
    ("n", "b"),
    [
        (1, 0),
        (1792, 0),
        (1793, 1792),
        (3583, 1792),
        (3584, 1792),
        (3585, 3584),
        (5375, 3584),
        (5376, 3584),
        (5377, 5376),
    ],
)
def test_boundaries_of_the_study(n: int, b: int) -> None:
    assert boundary(n, 1792) == b


@pytest.mark.parametrize(("n", "c"), [(0, 1792), (-1, 1792), (5, 0)])
def test_no_boundary_for_nothing(n: int, c: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        boundary(n, c)


def test_the_matrix_of_the_study() -> None:
    planned = cases(load("boundary"), 1792, "candidate")
    assert [case.tokens for case in planned] == STUDY_LENGTHS
    assert [(step.op, step.name, step.role) for step in planned[1].operations] == [
        ("N3584.cold", "cold", "target"),
        ("N3584.interposer-1", "interposer", "interposer-1"),
        ("N3584.interposer-2", "interposer", "interposer-2"),
        ("N3584.reset", "reset", None),
        ("N3584.reload", "reload", "target"),
    ]
    assert len({step.op for case in planned for step in case.operations}) == 45


def test_the_workload_of_the_study() -> None:
    assert workload(load("boundary")) == (2, 45, 36, 9, 36 * 64, 27, 1)


@pytest.mark.parametrize(("lengths", "c"), [(["2C-1", "511"], 256), (["C+256", "2C"], 256)])
def test_lengths_that_meet_at_this_c_are_refused(lengths: list[str], c: int) -> None:
    plan = load("boundary").model_copy(update={"lengths": lengths})
    with pytest.raises(PlanError, match=r"^lengths\[1\]: .* as another length is; remove one$"):
        cases(plan, c, "candidate")
    assert len(cases(plan, 272, "candidate")) == 2


def test_a_length_below_one_token_is_refused() -> None:
    plan = load("boundary").model_copy(update={"lengths": ["C-300"]})
    with pytest.raises(PlanError, match=r"^lengths\[0\]: 'C-300' is -44 tokens at C=256"):
        cases(plan, 256, "candidate")


@pytest.mark.parametrize(
    ("operations", "message"),
    [
        ("", "operations[0]: a case begins with 'cold'"),
        ("reload cold", "operations[0]: a case begins with 'cold'"),
        ("cold cold reset reload", "operations: 'cold' comes 2 times"),
        ("cold reset reset reload", "operations: 'reset' comes 2 times"),
        ("cold reset reload reload", "operations: 'reload' comes 2 times"),
        ("cold interposer interposer interposer reset reload", "operations: more than 2 interposers"),
        ("cold interposer reset", "operations: no 'reload' and no 'repeat'"),
        ("cold repeat reset", "operations: 'reset' beside 'repeat'"),
        ("cold repeat reload", "operations: 'reload' beside 'repeat'"),
        ("repeat cold", "operations[0]: a case begins with 'cold'"),
        ("cold reload", "operations[1]: 'reload' without 'reset' before it"),
        ("cold interposer reload reset", "operations[2]: 'reload' without 'reset' before it"),
    ],
)
def test_operations_that_make_no_sense(operations: str, message: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_operations([OperationName(name) for name in operations.split()])
    assert str(caught.value).startswith(message)
    assert "; " in str(caught.value) or "put" in str(caught.value)


@pytest.mark.parametrize("operations", ["cold interposer reset interposer reload", "cold repeat interposer repeat"])
def test_operations_that_make_sense(operations: str) -> None:
    check_operations([OperationName(name) for name in operations.split()])


def test_repeats_of_a_case_are_numbered() -> None:
    planned = cases(load("local-hit"), 256, "candidate")
    assert [(step.op, step.role) for step in planned[0].operations] == [
        ("N640.cold", "target"),
        ("N640.repeat-1", "target"),
        ("N640.repeat-2", "target"),
    ]
    assert workload(load("local-hit")) == (1, 24, 24, 0, 24 * 64, 8, 1)


def test_the_extension_has_the_counts_of_the_study() -> None:
    plan = load("continuation")
    work = workload(plan)
    assert (work.operations, work.generations, work.output_tokens, work.distinct_inputs) == (50, 40, 9_472, 30)
    assert (work.repetitions, work.engine_starts, plan.repetitions) == (2, 4, ["forward", "forward"])
    steps = [step for case in cases(plan, 1792, "candidate") for step in case.operations if step.output_tokens]
    assert [sum(step.output_tokens == tokens for step in steps) for tokens in (64, 256)] == [4, 36]


def test_series_come_after_the_lengths_under_their_own_names() -> None:
    planned = cases(load("continuation"), 1792, "candidate")
    assert [case.id for case in planned] == ["N3583"] + [
        f"{name}-N{n}" for name in ("ledger", "rules", "python") for n in (3583, 3584, 5376)
    ]
    assert {one.template for one in planned_inputs(load("continuation"), 1792) if one.case.startswith("rules-")} == {
        "ordered-rules-zh"
    }


def test_a_short_step_of_a_scenario_says_so() -> None:
    steps = [step for case in cases(load("churn"), 1792, "candidate") for step in case.operations]
    assert [step.output_tokens for step in steps if step.together] == [1] * 8
    assert {step.output_tokens for step in steps if step.path == "external"} == {32}
