"""Prompts that continue an answer: what a plan may say of them, and how long their own part is. The arm ``batched``."""

from __future__ import annotations

from pathlib import Path

import pytest

from plans.refusals import refusal
from samestate.plans.errors import PlanError
from samestate.plans.load import load, plan_json, with_connector, with_engine
from samestate.plans.model import Plan, PromptPlan
from samestate.plans.operations import beginnings, cases, planned_inputs, workload
from samestate.plans.turns import kept, made

SHIPPED = Path(__file__).parents[2] / "src/samestate/plans/shipped"
CONVERSATION = (SHIPPED / "conversation.yaml").read_text(encoding="utf-8")
PRESSURE = (SHIPPED / "pressure.yaml").read_text(encoding="utf-8")
TURN = "{name: kept, tokens: "


def small() -> Plan:
    """Four prompts of 4 output tokens."""
    prompts = [
        PromptPlan(name="first", tokens="2C-3"),
        PromptPlan(name="kept", tokens="2C+9", continues="first", answer="kept"),
        PromptPlan(name="stripped", tokens="2C+9", continues="first", answer="stripped", thinking=3),
        PromptPlan(name="later", tokens="3C", continues="kept", answer="kept"),
    ]
    return load("conversation").model_copy(update={"prompts": prompts, "output_tokens": 4})


def test_what_a_turn_is_made_of() -> None:
    prompts = {prompt.name: prompt for prompt in small().prompts}
    assert kept(prompts["kept"], [7, 8, 9, 10]) == [7, 8, 9, 10]
    assert kept(prompts["stripped"], [7, 8, 9, 10]) == [10]
    assert made(prompts["stripped"], [1, 2], [7, 8, 9, 10], [5, 6]) == [1, 2, 10, 5, 6]


def test_a_turn_and_its_own_part_are_inputs() -> None:
    planned = [(one.case, one.role, one.tokens) for one in planned_inputs(small(), 100)]
    assert planned == [
        ("first", "target", 197),
        ("kept", "target", 209),
        ("stripped", "target", 209),
        ("later", "target", 300),
        ("kept", "own", 209 - 197 - 4),
        ("stripped", "own", 209 - 197 - 1),
        ("later", "own", 300 - 209 - 4),
    ]
    assert workload(load("conversation")).distinct_inputs == len(load("conversation").prompts)


def test_what_turns_have_in_common() -> None:
    known = beginnings(small(), 100)
    whole, late = "first and its answer from token 0 on", "first and its answer from token 3 on"
    assert known["kept"] == (whole, 201)
    assert known["stripped"] == (late, 198)
    assert known[whole] == known[late] == ("first", 197)


def test_a_turn_that_leaves_no_token_of_its_own(tmp_path: Path) -> None:
    plan = small()
    short = [plan.prompts[0], plan.prompts[1].model_copy(update={"tokens": "2C+1"})]
    with pytest.raises(
        PlanError, match=r"prompts\[1\].tokens: '2C\+1' is 201 tokens, and 'first' with its answer takes"
    ):
        planned_inputs(plan.model_copy(update={"prompts": short}), 100)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "continues: first, answer: kept}",
            "continues: last, answer: kept}",
            "prompts[1].continues: no prompt 'last' before this one; name an earlier one",
        ),
        (
            "continues: first, answer: kept}",
            "continues: first}",
            "prompts[1].answer: is missing; write 'kept' or 'stripped'",
        ),
        (
            "continues: first, answer: kept}",
            "answer: kept}",
            "prompts[1]: 'answer' and 'thinking' belong to 'continues'; add that or remove them",
        ),
        (
            "continues: first, answer: kept}",
            "continues: first, answer: kept, thinking: 2}",
            "prompts[1].thinking: comes with answer 'stripped', and only with it; add or remove it",
        ),
        (
            "continues: first, answer: kept}",
            "continues: first, answer: stripped, thinking: 99}",
            "prompts[1].thinking: the answer has 8 tokens; leave out fewer",
        ),
        (
            "continues: first, answer: kept}",
            "continues: first, answer: kept, shares: first, shared: C}",
            "prompts[1]: 'continues' and 'shares' both say how it begins; remove one",
        ),
        (
            "- {name: company, tokens: 2C+100}",
            "- {name: company, tokens: 2C+100, shares: kept, shared: C}",
            "prompts[7].shares: 'kept' is made of an answer; share another, or continue it",
        ),
        (
            "ignore_eos: true",
            "ignore_eos: false",
            "ignore_eos: is false, so how long an answer is would not be known; make it true",
        ),
    ],
)
def test_a_mistake_names_field_and_remedy(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in CONVERSATION
    assert refusal(tmp_path / "mine.yaml", CONVERSATION.replace(old, new, 1)) == message


def test_an_answer_is_one_of_two_words(tmp_path: Path) -> None:
    text = CONVERSATION.replace("continues: first, answer: kept}", "continues: first, answer: all}", 1)
    assert "prompts[1].answer" in refusal(tmp_path / "mine.yaml", text)


# --- the arm without a connector --------------------------------------------------------------------


def test_company_has_its_own_steps_and_settings() -> None:
    plan = load("pressure")
    ops = {arm.name: [step for case in cases(plan, 256, arm.name) for step in case.operations] for arm in plan.arms}
    assert [step.op for step in ops["batched"]] == ["a.1", "b.1", "c.1", "d.1", "e.1", "f.1"]
    assert {(step.together, step.path) for step in ops["batched"]} == {("batch-1", "cold")}
    assert ops["candidate"][0].op == "a.2"
    assert [arm.settings for arm in plan.arms] == [{}, {"num_gpu_blocks_override": 96}, {}]


def test_an_argument_of_the_users_wins_in_every_arm() -> None:
    changed = with_engine(load("pressure"), model="external", serve_args=["--num-gpu-blocks-override", "40"])
    assert "num_gpu_blocks_override" not in changed.engine.settings
    assert [arm.settings for arm in changed.arms] == [{}, {}, {}]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "batched, connector: none",
            "batched, connector: native",
            "arms[1].connector: 'batched' reuses nothing external; make it 'none'",
        ),
        (
            "- {name: control, connector: none}",
            "- {name: control, connector: none, settings: {seed: 1}}",
            "arms[0].settings: only arm 'batched' has its own; put them into engine.settings",
        ),
        (
            "settings: {num_gpu_blocks_override: 96}",
            "settings: {kv_transfer_config: x}",
            "arms[1].settings.kv_transfer_config: is set for each arm; remove it",
        ),
        (
            "  - {prompts: [a, b, c, d, e, f], path: cold, arm: batched}\n",
            "",
            "scenario: arm batched has no prompts; give it a step or remove it",
        ),
    ],
)
def test_a_mistake_about_the_arm_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in PRESSURE
    assert refusal(tmp_path / "mine.yaml", PRESSURE.replace(old, new, 1)) == message


def test_what_a_plan_does_not_use_is_not_written() -> None:
    """A plan from before there were turns keeps its hash."""
    written = plan_json(load("shared-prefix"))
    assert not [word for word in (b"continues", b"thinking", b'"answer"', b'"settings":{}') if word in written]
    assert b'"thinking":' in plan_json(load("conversation"))


def test_another_connector_takes_none_of_the_options() -> None:
    plan = load("conversation")
    assert [arm.options for arm in plan.arms] == [{}, {}, {"offload_prompt_only": False}]
    assert [arm.options for arm in with_connector(plan, "dictionary").arms] == [{}, {}, {}]
    assert with_connector(plan, "native") == with_connector(plan, None) == plan


def test_an_option_that_no_plan_may_say(tmp_path: Path) -> None:
    text = CONVERSATION.replace("offload_prompt_only: false", "cpu_bytes_to_use: 1", 1)
    message = "arms[2].options.cpu_bytes_to_use: not for a plan; known: offload_prompt_only"
    assert refusal(tmp_path / "mine.yaml", text) == message
