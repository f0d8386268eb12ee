"""``--engine transformers``: which plans it runs, with which flags and faults."""

from __future__ import annotations

from pathlib import Path

from samestate.checks.analyzers import BOUNDARY_SNAPSHOT_V1
from samestate.cli.failures import Failure
from samestate.cli.plan import EXTERNAL
from samestate.engines import transformers
from samestate.faults.catalogue import faults_on
from samestate.models import catalogue
from samestate.models.recipe import LOAD_FORMAT, load_settings
from samestate.plans.errors import nearest
from samestate.plans.model import Plan
from samestate.plans.scenarios import CANDIDATE
from samestate.plans.serve_args import ranks_said

ENGINE = "transformers"
_COUNTERPARTS = {"boundary": "boundary-snapshot"}
"""Plans that ask the same of vLLM, and the one that asks it of this engine."""


def counterpart(plan: str, engine: str) -> str:
    """The plan that stands for `plan` on this engine."""
    return _COUNTERPARTS.get(plan, plan) if engine == ENGINE else plan


def require_plan(plan: Plan, engine: str) -> None:
    """Raise `Failure` for a plan that this engine cannot run, and for one that only transformers can."""
    ours = plan.analyzer.id == BOUNDARY_SNAPSHOT_V1
    if engine == "vllm" and ours:
        raise Failure(f"--engine: plan {plan.name} is for transformers' cache; add --engine {ENGINE}, or run boundary")
    if engine != ENGINE:
        return
    if not ours:
        raise Failure(
            f"--engine: transformers runs plans of analyzer {BOUNDARY_SNAPSHOT_V1} alone, plan {plan.name} has "
            f"{plan.analyzer.id}; choose boundary, or leave out --engine {ENGINE}"
        )
    if any(arm.name == CANDIDATE and (arm.connector != "native" or arm.options) for arm in plan.arms):
        raise Failure(f"--connector: --engine {ENGINE} has no connectors, it keeps its snapshots itself; leave it out")
    if plan.instruments.audit_level == "poison" or plan.instruments.save_delay_ms:
        raise Failure(
            f"instruments: --engine {ENGINE} makes restored tensors anew and saves within a step: nothing to poison, "
            "no save to hold back; make audit_level 'digest' and save_delay_ms 0, or leave out --delay-saves"
        )
    if ranks_said(plan.engine.serve_args):
        raise Failure(f"--tp: --engine {ENGINE} runs on one rank; leave the number of ranks out")
    words = [argument.split("=", 1)[0] for argument in plan.engine.serve_args]
    known = [f"--{name.replace('_', '-')}" for name in transformers.SETTINGS]
    for flag in words:
        if flag.startswith("-") and flag not in known:
            near = nearest(flag, known)
            raise Failure(
                f"--serve-args: --engine {ENGINE} has no {flag}{near}; it has {', '.join(known)}; leave it out"
            )


def require_weights(plan: Plan, model: Path | None, engine: str) -> None:
    """Raise `Failure` for a model, the plan's or a folder of one's own (`model`), whose weights only vLLM makes."""
    own = model is not None and plan.engine.model == EXTERNAL
    named = str(model) if own else plan.engine.model
    if engine == ENGINE and (load_settings(named) if own else catalogue.has_recipe(named)):
        raise Failure(
            f"--model: {named} holds a recipe in place of weights, which vLLM's load format {LOAD_FORMAT} alone "
            f"follows; use glm5-next-tiny or another checkpoint with weights, or leave out --engine {ENGINE}"
        )


def require_fault(fault: str, engine: str) -> None:
    """Raise `Failure` for a fault that this engine cannot have, and on another for one that only this one can."""
    has = faults_on("transformers")
    if engine != ENGINE and fault in has and has[fault].engines == {ENGINE}:
        raise Failure(f"--fault: {fault} acts on transformers' cache; add --engine {ENGINE} --model glm5-next-tiny")
    if engine == ENGINE and fault not in has:
        raise Failure(f"--fault: --engine {ENGINE} has only {', '.join(has)}; choose one of them")


def require_installed() -> None:
    """Raise `Failure` where transformers or torch is missing."""
    if not transformers.available():
        raise Failure(
            "torch and transformers from 5.19 on are not installed; pip install 'samestate[transformers]', or try "
            "--engine sim"
        )
