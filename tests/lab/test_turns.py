"""Prompts that continue the control's answers are made as these come in, and are the same for every arm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from lab.conftest import QuietProgress
from samestate.checks.analyzers import source_sha256
from samestate.engines.base import Ask, Generation
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import token_digest
from samestate.evidence.records import OperationOutput, OperationStarted
from samestate.lab.run import RunError, RunRequest, run_plan
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan, PromptPlan, StepPlan

Requests = Callable[..., RunRequest]


@pytest.fixture
def conversation() -> Plan:
    """A prompt, a turn that continues it, and one that strips; 4 tokens each."""
    plan = load("conversation")
    prompts = [
        PromptPlan(name="first", tokens="2C-2"),
        PromptPlan(name="kept", tokens="2C+40", continues="first", answer="kept"),
        PromptPlan(name="stripped", tokens="3C", continues="kept", answer="stripped", thinking=3),
    ]
    scenario = [
        StepPlan(prompts=["first", "kept"], path="cold", arm="batched"),
        StepPlan(prompts=["first"]),
        StepPlan(prompts=["kept"]),
        StepPlan(prompts=["stripped"]),
    ]
    update = {"prompts": prompts, "scenario": scenario, "output_tokens": 4}
    return freeze(plan.model_copy(update=update), source_sha256("conversation-v1"))


@dataclass
class Arm:
    """What an arm was asked and answered, by operation."""

    asked: dict[str, str]
    answered: dict[str, list[int]]


def seen(archive: Archive, arm: str) -> Arm:
    found = Arm({}, {})
    for line in archive.records(arm, "client"):
        if isinstance(line.rec, OperationStarted) and line.rec.prompt_sha256:
            found.asked[line.rec.op] = line.rec.prompt_sha256
        if isinstance(line.rec, OperationOutput):
            found.answered[line.rec.op] = line.rec.token_ids
    return found


def test_all_arms_continue_the_controls_answers(
    conversation: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    archive = Archive.open(run_plan(request_for(conversation), progress).archive)
    control, batched, candidate = (seen(archive, arm) for arm in ("control", "batched", "candidate"))
    first, kept, stripped = (archive.inputs[control.asked[f"{name}.cold"]] for name in ("first", "kept", "stripped"))
    assert (len(first), len(kept), len(stripped)) == (510, 552, 768)
    assert kept[:514] == first + control.answered["first.cold"]
    assert stripped[:553] == kept + control.answered["kept.cold"][3:]
    assert batched.asked["kept.1"] == candidate.asked["kept.2"] == control.asked["kept.cold"]
    assert candidate.asked["stripped.1"] == control.asked["stripped.cold"] == token_digest(stripped)
    assert archive.verify() == []


def test_what_was_fixed_before_the_first_request_names_no_answer(
    conversation: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    archive = Archive.open(run_plan(request_for(conversation), progress).archive)
    control = seen(archive, "control")
    text = (archive.resolved_json or b"").decode()
    assert control.asked["first.cold"] in text
    assert control.asked["kept.cold"] not in text
    assert '"role":"own","sha256":"' in text
    assert '"role":"target","sha256":null' in text


def test_a_lent_control_lends_its_answers(conversation: Plan, request_for: Requests, progress: QuietProgress) -> None:
    lender = run_plan(request_for(conversation), progress).archive
    borrowed = run_plan(request_for(conversation, "borrowed", control=lender), progress).archive
    one, other = (seen(Archive.open(root), "candidate") for root in (lender, borrowed))
    assert one.asked == other.asked
    assert Archive.open(borrowed).verify() == []


def test_an_answer_that_ends_early_ends_the_run(
    conversation: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    class Short(SimEngine):
        def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
            answers = super().generate(asks, output_tokens, seed, ignore_eos)
            return [answer._replace(token_ids=answer.token_ids[:-1]) for answer in answers]

    request = request_for(conversation, make_engine=Short)
    with pytest.raises(RunError, match=r"prompt kept: has 551 tokens after an answer of 3, planned 552"):
        run_plan(request, progress)
    assert Archive.open(request.out).seal_sha256 is None


def test_company_runs_under_its_own_settings(
    conversation: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    arms = [
        arm.model_copy(update={"settings": {"num_gpu_blocks_override": 99}}) if arm.name == "batched" else arm
        for arm in conversation.arms
    ]
    request = request_for(conversation.model_copy(update={"arms": arms}))
    run_plan(request, progress)
    archive = Archive.open(request.out)
    blocks = {arm: (archive.root / f"arms/{arm}/engine.log").read_text() for arm in archive.arms}
    assert "num_gpu_blocks=99" in blocks["batched"]
    assert "num_gpu_blocks=128" in blocks["control"]
    assert "num_gpu_blocks=128" in blocks["candidate"]
