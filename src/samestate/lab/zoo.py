"""Drives the faults of the catalogue: each on a simulated engine of its own, or all in turn in one running engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from samestate.engines.base import Engine, EngineSpec
from samestate.engines.sim import Shelf, SimEngine
from samestate.lab.run import Progress, RunRequest, run_plan
from samestate.plans.model import Plan

MODEL_FILE = "config.json"


class Unseen:
    """A progress that nobody watches."""

    def stage(self, name: str) -> None:
        """Nothing."""

    def operation(self, arm: str, done: int, total: int, op: str) -> None:
        """Nothing."""


def nameless_model(folder: Path) -> Path:
    """A folder that stands for a checkpoint where no model runs."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_text(json.dumps({"architectures": []}), encoding="utf-8")
    return folder


def simulate(plan: Plan, fault: str | None, model: Path, out: Path) -> Path:
    """A frozen plan on simulated engines, the fault armed from their start. Tiers outlive engines as the plan says.

    The sealed archive. Raises `RunError`.
    """
    shelf = Shelf({arm.name: arm.follows for arm in plan.arms})

    def make(spec: EngineSpec) -> Engine:
        return SimEngine(spec, shelf)

    return _run(plan, model, out, make, Unseen(), engine="sim", fault=fault)


def in_turn(
    plan: Plan,
    armed: Mapping[str, str | None],
    model: Path,
    out: Path,
    make_engine: Callable[[EngineSpec], Engine],
    progress: Progress,
    *,
    engine: str,
) -> Path:
    """A frozen plan on one control and one candidate, faults armed and disarmed while the candidate runs.

    `armed`: by operation, the fault that it must find armed. The sealed archive. Raises `RunError`.
    """
    return _run(plan, model, out, make_engine, progress, engine=engine, armed=armed)


def _run(
    plan: Plan,
    model: Path,
    out: Path,
    make_engine: Callable[[EngineSpec], Engine],
    progress: Progress,
    *,
    engine: str,
    fault: str | None = None,
    armed: Mapping[str, str | None] = MappingProxyType({}),
) -> Path:
    request = RunRequest(
        plan=plan,
        model=model,
        out=out,
        make_engine=make_engine,
        engine=engine,
        fault=fault,
        control=None,
        reference=None,
        serve_args=plan.engine.serve_args,
        armed=armed,
    )
    return run_plan(request, progress).archive
