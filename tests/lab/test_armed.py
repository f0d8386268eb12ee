"""Faults that are armed while an engine runs: before which operations, and what the archive says of it."""

from __future__ import annotations

from collections.abc import Callable

from typing_extensions import override

from lab.conftest import QuietProgress
from samestate.checks.analyzers import source_sha256
from samestate.engines.base import EngineSpec
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.evidence.records import AttemptStarted
from samestate.lab.run import RunRequest, run_plan
from samestate.plans.load import freeze, load
from samestate.plans.model import Plan
from samestate.plans.scenarios import CANDIDATE, scenario_steps


class Armed(SimEngine):
    """Notes what it was asked, and is always right."""

    told: list[tuple[str, str | None]]

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec)
        self._arm = spec.arm

    @override
    def arm_fault(self, name: str | None) -> None:
        self.told.append((self._arm, name))


def frozen() -> Plan:
    plan = load("shared-prefix")
    settings = {"block_size": 512, "max_model_len": 4096, "max_num_batched_tokens": 4096}
    plan = plan.model_copy(update={"engine": plan.engine.model_copy(update={"settings": settings})})
    return freeze(plan, source_sha256(plan.analyzer.id))


def test_the_fault_is_armed_and_disarmed_where_the_request_says_so(
    request_for: Callable[..., RunRequest], progress: QuietProgress
) -> None:
    plan = frozen()
    ops = [step.op for step in scenario_steps(plan, CANDIDATE)]
    armed = {ops[2]: "stale-page", ops[3]: "stale-page", ops[4]: None, ops[6]: "zero-page"}
    Armed.told = []
    run_plan(request_for(plan, make_engine=Armed, armed=armed), progress)
    assert Armed.told == [
        ("candidate", "stale-page"),
        ("candidate", None),
        ("candidate", "zero-page"),
        ("candidate", None),
    ]


def test_the_archive_is_tagged(request_for: Callable[..., RunRequest], progress: QuietProgress) -> None:
    plan = frozen()
    op = scenario_steps(plan, CANDIDATE)[1].op
    Armed.told = []
    result = run_plan(request_for(plan, make_engine=Armed, armed={op: "stale-page"}), progress)
    (started,) = [line.rec for line in Archive.open(result.archive).attempts() if isinstance(line.rec, AttemptStarted)]
    assert started.fault == "1 in turn"
