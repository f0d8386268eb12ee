from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from plans.refusals import refusal
from samestate.plans.errors import PlanError
from samestate.plans.load import load, shipped
from samestate.plans.model import Plan
from samestate.plans.operations import cases, operation_ids, planned_inputs, shared_lengths, workload

BOUNDARY = (Path(__file__).parents[2] / "src/samestate/plans/shipped/boundary.yaml").read_text(encoding="utf-8")
SCENARIO = textwrap.dedent("""\
    prompts:
      - {name: trunk, tokens: 4C+7}
      - {name: branch, tokens: 2C+9, shares: trunk, shared: 2C+3}
      - {name: stem, tokens: C+5, shares: trunk, shared: C+5}
    scenario:
      - {prompts: [trunk], path: cold}
      - {reset: true}
      - {prompts: [branch, stem], path: external}
      - {prompts: [branch], salt: other, path: cold}
      - {prompts: [trunk], arm: candidate-2}
    """)
ARMS = "arms:\n  - {name: control, connector: none}\n  - {name: candidate, connector: native}\n"
FOLLOWER = "  - {name: candidate-2, connector: native, follows: candidate}\n"


def _text(scenario: str = SCENARIO, follower: str = FOLLOWER) -> str:
    lines = [line for line in BOUNDARY.splitlines(keepends=True) if not line.startswith(("lengths:", "operations:"))]
    text = "".join(lines)
    assert ARMS in text
    return text.replace(ARMS, ARMS + follower) + scenario


def _load(tmp_path: Path, text: str) -> Plan:
    path = tmp_path / "mine.yaml"
    path.write_text(text, encoding="utf-8")
    return load(str(path))


def test_arms_and_their_operations(tmp_path: Path) -> None:
    plan = _load(tmp_path, _text())
    assert [step.op for case in cases(plan, 16, "candidate") for step in case.operations] == [
        "trunk.1",
        "reset-1",
        "branch.1",
        "stem.1",
        "branch.2",
    ]
    assert [step.op for case in cases(plan, 16, "candidate-2") for step in case.operations] == ["trunk.2"]
    cold = ["trunk.reset", "trunk.cold", "branch.reset", "branch.cold", "stem.reset", "stem.cold"]
    assert [step.op for case in cases(plan, 16, "control") for step in case.operations] == cold
    assert operation_ids(plan, 16)[:7] == [*cold, "trunk.1"]


def test_what_a_step_says_reaches_its_operations(tmp_path: Path) -> None:
    plan = _load(tmp_path, _text())
    steps = {step.op: (case, step) for case in cases(plan, 16, "candidate") for step in case.operations}
    assert steps["branch.1"][1].together == steps["stem.1"][1].together == "batch-1"
    assert steps["trunk.1"][1].together is None
    assert (steps["branch.2"][1].salt, steps["branch.2"][1].path) == ("other", "cold")
    assert [steps[op][0].tokens for op in ("trunk.1", "reset-1", "stem.1")] == [71, 0, 21]


def test_inputs_and_what_they_share(tmp_path: Path) -> None:
    plan = _load(tmp_path, _text())
    assert [one[:3] for one in planned_inputs(plan, 16)] == [
        ("trunk", "target", 71),
        ("branch", "target", 41),
        ("stem", "target", 21),
    ]
    assert shared_lengths(plan, 16) == {"branch": ("trunk", 35), "stem": ("trunk", 21)}


def test_workload_counts_all_arms(tmp_path: Path) -> None:
    work = workload(_load(tmp_path, _text()))
    assert work[:4] == (3, 12, 8, 4)
    assert work.distinct_inputs == 3


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: stem", "name: trunk", "prompts[2].name: 'trunk' is taken; choose another"),
        ("name: stem", "name: reset", "prompts[2].name: 'reset' is taken; choose another"),
        (", shared: C+5", "", "prompts[2]: 'shares' and 'shared' come together; add the other or remove both"),
        (
            "2C+9, shares: trunk",
            "2C+9, shares: stem",
            "prompts[1].shares: no prompt 'stem' before this one; name an earlier one",
        ),
        (
            "tokens: 4C+7",
            "tokens: 4D",
            "prompts[0].tokens: '4D' is no prompt length; write '2C-1', 'C', '3C+1' or a number of tokens",
        ),
        (
            "{reset: true}",
            "{reset: true, prompts: [stem]}",
            "scenario[1]: is a reset, or has prompts, and not both; write one of them",
        ),
        (
            "{reset: true}",
            "{reset: true, salt: x}",
            "scenario[1]: a reset has no salt, no path and no output_tokens; remove them",
        ),
        (
            "[branch, stem]",
            "[branch, stem], output_tokens: 65",
            "scenario[2].output_tokens: the cold runs make 64; ask for at most as many",
        ),
        ("[branch, stem]", "[branch, leaf]", "scenario[2].prompts: no prompt 'leaf'; known: trunk, branch, stem"),
        ("[branch, stem]", "[stem, stem]", "scenario[2].prompts: a prompt is there twice; give it a step of its own"),
        (
            "arm: candidate-2",
            "arm: control",
            "scenario[4].arm: no arm 'control' that runs a scenario; known: candidate, candidate-2",
        ),
        (
            "{prompts: [trunk], path: cold}",
            "{prompts: [trunk], arm: candidate-2}",
            "scenario[1].arm: 'candidate' is over when this step comes; keep the arms' order",
        ),
        ("[branch, stem]", "[branch]", "prompts: stem is in no step; use or remove it"),
        (", arm: candidate-2", "", "scenario: arm candidate-2 has no prompts; give it a step or remove it"),
        (
            "scenario:\n",
            "lengths: [2C]\nscenario:\n",
            "scenario: beside lengths, operations or series; a plan is one or the other",
        ),
    ],
)
def test_a_mistake_names_field_and_remedy(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = _text()
    assert old in text
    assert refusal(tmp_path / "mine.yaml", text.replace(old, new, 1)) == message


@pytest.mark.parametrize(
    ("follower", "message"),
    [
        (
            "  - {name: candidate-2, connector: native, follows: control}\n",
            "arms[2].follows: must name the arm with a connector before it, 'candidate'",
        ),
        (
            "  - {name: candidate-2, connector: native}\n",
            "arms: must be one 'control' and one 'candidate', each once",
        ),
    ],
)
def test_arms_that_follow(tmp_path: Path, follower: str, message: str) -> None:
    assert refusal(tmp_path / "mine.yaml", _text(follower=follower)) == message


def test_more_shared_than_there_is(tmp_path: Path) -> None:
    plan = _load(tmp_path, _text().replace("shared: C+5", "shared: 3C", 1))
    with pytest.raises(PlanError, match=r"prompts\[2\].shared: '3C' is 48 tokens at C=16, .* at most 21 to share"):
        shared_lengths(plan, 16)


def test_a_prompt_that_is_another_one(tmp_path: Path) -> None:
    """Its run would fail: two inputs of one digest."""
    twin = "  - {name: twin, tokens: C+5, shares: branch, shared: C+5}\n"
    text = _text().replace("scenario:\n", f"{twin}scenario:\n  - {{prompts: [twin]}}\n", 1)
    with pytest.raises(PlanError, match=r"prompts\[3\].shared: at C=16 'twin' is 'stem' token for token"):
        shared_lengths(_load(tmp_path, text), 16)


def test_shipped_scenarios_have_lengths_at_their_block_size() -> None:
    for plan in map(load, shipped()):
        size = plan.engine.settings.get("block_size")
        if plan.scenario and isinstance(size, int):
            assert sum(one.role == "target" for one in planned_inputs(plan, size)) == len(plan.prompts)
            assert len(shared_lengths(plan, size)) == sum(prompt.shares is not None for prompt in plan.prompts)
