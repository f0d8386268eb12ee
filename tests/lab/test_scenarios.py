"""Scenarios on the simulated engine: what is asked of it, and what is written down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from samestate.engines.base import Ask, EngineError, Generation
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import sha256_hex
from samestate.evidence.records import AnyRecord, CountersRead, OperationEnded, OperationOutput, OperationStarted
from samestate.lab.run import RunError, RunRequest, run_plan
from samestate.plans.model import ArmPlan, Plan, PromptPlan, StepPlan

from .conftest import QuietProgress

Requests = Callable[..., RunRequest]


@pytest.fixture
def scenario(small: Plan) -> Plan:
    """A trunk, two branches of it at once, and the trunk again in an engine that follows."""
    control, candidate = small.arms
    update = {
        "lengths": [],
        "operations": [],
        "arms": [control, candidate, ArmPlan(name="candidate-2", connector="native", follows="candidate")],
        "prompts": [
            PromptPlan(name="trunk", tokens="60C+7"),
            PromptPlan(name="branch", tokens="2C+9", shares="trunk", shared="2C+3"),
            PromptPlan(name="stem", tokens="C+5", shares="trunk", shared="C+5"),
        ],
        "scenario": [
            StepPlan(prompts=["trunk"]),
            StepPlan(reset=True),
            StepPlan(prompts=["branch", "stem"], salt="tenant"),
            StepPlan(prompts=["trunk"], arm="candidate-2"),
        ],
    }
    return small.model_copy(update=update)


def client(archive: Archive, arm: str) -> list[AnyRecord]:
    return [line.rec for line in archive.records(arm, "client")]


def test_every_arm_does_what_it_was_planned(scenario: Plan, request_for: Requests, progress: QuietProgress) -> None:
    result = run_plan(request_for(scenario), progress)
    archive = Archive.open(result.archive)
    assert archive.verify() == []
    done = {
        arm: [rec.op for rec in client(archive, arm) if isinstance(rec, OperationStarted)]
        for arm in ("control", "candidate", "candidate-2")
    }
    assert done["candidate"] == ["trunk.1", "reset-1", "branch.1", "stem.1"]
    assert done["candidate-2"] == ["trunk.2"]
    assert done["control"] == ["trunk.reset", "trunk.cold", "branch.reset", "branch.cold", "stem.reset", "stem.cold"]


def test_prompts_share_exactly_what_is_planned(scenario: Plan, request_for: Requests, progress: QuietProgress) -> None:
    archive = Archive.open(run_plan(request_for(scenario), progress).archive)
    started = [rec for rec in client(archive, "candidate") if isinstance(rec, OperationStarted)]
    ids = {rec.op: archive.inputs[rec.prompt_sha256] for rec in started if rec.prompt_sha256}
    assert (len(ids["trunk.1"]), len(ids["branch.1"]), len(ids["stem.1"])) == (967, 41, 21)
    assert ids["branch.1"][:35] == ids["trunk.1"][:35]
    assert ids["branch.1"][35] != ids["trunk.1"][35]
    assert ids["stem.1"] == ids["trunk.1"][:21]


def test_a_batch_is_handed_in_at_once_with_its_salt(
    scenario: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    asked: list[list[tuple[str, str | None]]] = []

    class Watched(SimEngine):
        def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
            asked.append([(ask.request, ask.salt) for ask in asks])
            return super().generate(asks, output_tokens, seed, ignore_eos)

    archive = Archive.open(run_plan(request_for(scenario, make_engine=Watched), progress).archive)
    assert [("branch.1", "tenant"), ("stem.1", "tenant")] in asked
    records = [rec for rec in client(archive, "candidate") if getattr(rec, "op", "") in ("branch.1", "stem.1")]
    kinds = [CountersRead, CountersRead, OperationStarted, OperationStarted, OperationOutput, OperationOutput]
    assert [type(rec) for rec in records] == [*kinds, OperationEnded, OperationEnded, CountersRead, CountersRead]
    started = [rec for rec in records if isinstance(rec, OperationStarted)]
    assert [(rec.together, rec.salt) for rec in started] == [("batch-1", sha256_hex(b"tenant"))] * 2


def test_a_batch_that_fails_ends_every_one_of_its_operations(
    scenario: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    class Breaks(SimEngine):
        def generate(self, asks: Sequence[Ask], output_tokens: int, seed: int, ignore_eos: bool) -> list[Generation]:
            if len(asks) > 1:
                raise EngineError("it fell over")
            return super().generate(asks, output_tokens, seed, ignore_eos)

    request = request_for(scenario, make_engine=Breaks)
    with pytest.raises(RunError, match="it fell over"):
        run_plan(request, progress)
    ends = [rec for rec in client(Archive.open(request.out), "candidate") if isinstance(rec, OperationEnded)]
    assert [(end.op, end.ok) for end in ends][-2:] == [("branch.1", False), ("stem.1", False)]


def test_a_prompt_too_long_for_the_engine_is_named(
    scenario: Plan, request_for: Requests, progress: QuietProgress
) -> None:
    prompts = [scenario.prompts[0].model_copy(update={"tokens": "200C"}), *scenario.prompts[1:]]
    request = request_for(scenario.model_copy(update={"prompts": prompts}))
    with pytest.raises(RunError, match=r"prompts\[0\]: '200C' is 3200 tokens at C=16, .* raise max_model_len"):
        run_plan(request, progress)


def test_more_shared_than_there_is_is_named(scenario: Plan, request_for: Requests, progress: QuietProgress) -> None:
    prompts = [*scenario.prompts[:2], scenario.prompts[2].model_copy(update={"shared": "3C"})]
    request = request_for(scenario.model_copy(update={"prompts": prompts}))
    with pytest.raises(RunError, match=r"prompts\[2\].shared"):
        run_plan(request, progress)
