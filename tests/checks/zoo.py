"""Runs of the zoo's exercises on the simulated engine, with a fault or without, for tests of single checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from samestate.checks.base import Check, CheckResult, Finding
from samestate.checks.history import History
from samestate.checks.verdicts import run_check
from samestate.engines.base import EngineSpec
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.lab.exercises import exercises
from samestate.plans.model import Plan, PromptPlan, StepPlan

from . import builder as b
from . import scenarios as s

RESET = StepPlan(reset=True)


def engine(fault: str | None) -> type[SimEngine]:
    """Simulated engines, those with a connector under a fault."""

    class Faulty(SimEngine):
        def __init__(self, spec: EngineSpec) -> None:
            super().__init__(spec._replace(fault=fault if spec.connector != "none" else None))

    return Faulty


def scenario(prompts: dict[str, str], steps: list[StepPlan], **settings: Any) -> Plan:
    """A scenario of prompts of these lengths in the engine of the zoo."""
    plan = exercises()["shared prefixes"].plan
    changed = plan.engine.model_copy(update={"settings": {**plan.engine.settings, **settings}})
    planned = [PromptPlan(name=name, tokens=tokens) for name, tokens in prompts.items()]
    return plan.model_copy(update={"prompts": planned, "scenario": steps, "engine": changed})


def run(plan: Plan | str, folder: Path, fault: str | None = None) -> b.Run:
    """The records of a run of a plan, or of the exercise of that name."""
    return s.recorded(exercises()[plan].plan if isinstance(plan, str) else plan, folder, engine(fault))


def result(check: Check, check_id: str, recorded: b.Run, folder: Path) -> CheckResult:
    """What one check makes of a run."""
    return run_check(check_id, check, History.read(recorded.write(folder)))


def first(result: CheckResult) -> Finding:
    """Its first finding."""
    return result.findings[0]


def result_of(check: Check, check_id: str, root: Path) -> CheckResult:
    """What one check makes of the archive that lies there."""
    return run_check(check_id, check, History.read(Archive.open(root)))
