"""``samestate plan``: list, show and freeze plans."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import ANALYZERS, source_sha256
from samestate.cli.failures import Failure
from samestate.cli.judging import stdout_console
from samestate.models import catalogue
from samestate.models.templates import TEMPLATES
from samestate.plans.errors import nearest
from samestate.plans.latency import conditions
from samestate.plans.load import PlanError, freeze, load, lock_json, plan_sha256, shipped, validate_checks
from samestate.plans.markers import address, probes
from samestate.plans.model import ArmPlan, MarkerPlan, Plan, ProbePlan, PromptPlan, SeriesPlan, StepPlan
from samestate.plans.operations import planned_inputs, workload
from samestate.plans.repetitions import repeated_arms
from samestate.plans.scenarios import CANDIDATE

EXTERNAL = "external"
"""The model name of a plan for the user's own checkpoint."""


def frozen(plan: Plan) -> Plan:
    """`plan`, frozen for this version's analyzer. Raises `PlanError` when it names what does not exist."""
    analyzer = plan.analyzer.id
    _require_known("analyzer.id", "analyzer", analyzer, list(ANALYZERS))
    if plan.markers is None:
        _require_known("template", "template", plan.template, list(TEMPLATES))
    for index, series in enumerate(plan.series):
        _require_known(f"series[{index}].template", "template", series.template, list(TEMPLATES))
    _require_known("engine.model", "model", plan.engine.model, [*catalogue.names(), EXTERNAL])
    validate_checks(plan, list(ANALYZERS[analyzer].checks), ANALYZERS[analyzer].floor)
    return freeze(plan, source_sha256(analyzer))


@click.group("plan")
def plan() -> None:
    """What is to be done: plans, frozen before first contact."""


@plan.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_plans(as_json: bool) -> None:
    """List the plans that come with samestate."""
    plans = shipped()
    if as_json:
        click.echo(json.dumps([{"name": name, "title": title} for name, title in plans.items()], indent=2))
        return
    width = max(map(len, plans))
    for name, title in plans.items():
        click.echo(f"{name:{width}}  {title}")


@plan.command("show")
@click.argument("name", metavar="PLAN")
@click.option("--json", "as_json", is_flag=True, help="Print plan, hash and workload as JSON.")
def show_plan(name: str, as_json: bool) -> None:
    """Show what PLAN (a shipped name, a file or a lock) asks for."""
    shown = frozen(load(name))
    if as_json:
        facts = {
            "plan": shown.model_dump(mode="json"),
            "plan_sha256": plan_sha256(shown),
            "workload": workload(shown)._asdict(),
        }
        click.echo(json.dumps(facts, indent=2))
        return
    console = stdout_console()
    console.print(Text(f"{shown.name}: {shown.title}"))
    console.print(_describe(shown))


@plan.command("freeze")
@click.argument("name", metavar="PLAN")
@click.option("--out", type=click.Path(path_type=Path), metavar="FILE", help="Default: ./<plan>.lock")
def freeze_plan(name: str, out: Path | None) -> None:
    """Write PLAN as a lock: canonical JSON, the analyzer's source and the plan's hash in it."""
    locked = frozen(load(name))
    target = out or Path(f"{locked.name}.lock")
    data = lock_json(locked)
    try:
        with target.open("xb") as file:
            file.write(data)
    except FileExistsError:
        if not target.is_file() or target.read_bytes() != data:
            raise Failure(f"--out: {target} exists and holds something else; name another file") from None
    click.echo(f"{target}\nplan sha256 {plan_sha256(locked)}")


def _require_known(field: str, what: str, name: str, known: list[str]) -> None:
    if name not in known:
        raise PlanError(f"{field}: no {what} {name!r}{nearest(name, known)}; known: {', '.join(known)}")


def _describe(plan: Plan) -> Table:
    work, settings = workload(plan), plan.engine.settings
    whose = "in all arms" if plan.scenario or plan.markers or plan.latency else "an arm"
    longest = {plan.output_tokens, *(step.output_tokens for step in plan.scenario if step.output_tokens)}
    longest |= {series.output_tokens for series in plan.series}
    longest = {probe.max_tokens for probe in probes(plan)} or longest
    each = f"{min(longest)} to {max(longest)}" if len(longest) > 1 else f"{max(longest)}"
    facts = {
        "question": plan.question,
        "engine starts": f"{work.engine_starts} ({', '.join(map(_arm, plan.arms))})",
        "repetitions": _repetitions(plan),
        "operations": f"{work.operations} {whose}: {work.generations} generations, {work.resets} resets",
        "output tokens": f"{work.output_tokens:,} {whose}, {each} a generation",
        "inputs": f"{work.distinct_inputs} distinct{'' if plan.markers else f', {_templates(plan)}'}",
        "markers": _markers(plan.markers),
        "probes": "\n".join(map(_probe, probes(plan))),
        "each case": ", ".join(plan.operations),
        "trials": _trials(plan),
        "lengths": ", ".join(plan.lengths),
        "series": "\n".join(map(_series, plan.series)),
        "prompts": ", ".join(map(_prompt, plan.prompts)),
        "scenario": "\n".join(map(_step, plan.scenario)),
        "in tokens": "" if plan.markers else _tokens(plan),
        "model": plan.engine.model,
        "settings": ", ".join(f"{name}={value}" for name, value in settings.items()),
        "serve args": shlex.join(plan.engine.serve_args),
        "required checks": ", ".join(plan.required_checks),
        "decided by": plan.analyzer.id,
        "scope": plan.scope,
        "not shown": "\n".join(plan.not_shown),
        "plan sha256": plan_sha256(plan),
    }
    table = Table.grid(padding=(0, 2))
    for name, fact in facts.items():
        if fact:
            table.add_row(name, Text(fact))
    return table


def _tokens(plan: Plan) -> str:
    block_size = plan.engine.settings.get("block_size")
    if not isinstance(block_size, int):
        return "known once the engine has said its C"
    targets = [prompt.tokens for prompt in planned_inputs(plan, block_size) if prompt.role == "target"]
    return f"{', '.join(map(str, targets))} (at C = block_size = {block_size})"


def _repetitions(plan: Plan) -> str:
    if plan.repetitions == ["forward"]:
        return ""
    runs = [one.name for one in repeated_arms(plan)]
    return f"{len(plan.repetitions)} ({', '.join(plan.repetitions)}), the same inputs in each: {', '.join(runs)}"


def _trials(plan: Plan) -> str:
    latency = plan.latency
    if latency is None:
        return ""
    order = "ascending" if latency.order_seed is None else f"shuffled by seed {latency.order_seed}"
    each = "; ".join(f"{arm.name}: {', '.join(conditions(plan, arm.name))}" for arm in plan.arms)
    return f"{latency.warmups} warm-up and {latency.trials} measured of every length, {order}; {each}"


def _templates(plan: Plan) -> str:
    names = list(dict.fromkeys([plan.template, *(series.template for series in plan.series)]))
    return f"template{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _series(series: SeriesPlan) -> str:
    return f"{series.name}: {', '.join(series.lengths)}, {series.output_tokens} tokens, template {series.template}"


def _arm(arm: ArmPlan) -> str:
    own = " ".join(f"{name}={value}" for name, value in {**arm.options, **arm.settings}.items())
    drafts = arm.speculation
    if drafts is not None:
        return (
            f"{arm.name}: {drafts.drafts} drafts, {drafts.draft_model or drafts.method}{f' with {own}' if own else ''}"
        )
    ended = ", killed" if arm.ended == "killed" else ""
    return f"{arm.name}: {arm.connector}{f' with {own}' if own else ''}{ended}"


def _markers(markers: MarkerPlan | None) -> str:
    if markers is None:
        return ""
    parts = [f"{markers.start} … {markers.end}, asked at {address(markers)}, {markers.retries} retries"]
    parts += [f"gates {', '.join(markers.gates)}"] if markers.gates else []
    parts += [f"guard {markers.guard}"] if markers.guard else []
    parts += [f"repairs {', '.join(markers.repairs)}"] if markers.repairs else []
    return "; ".join(parts)


def _probe(probe: ProbePlan) -> str:
    budget = "no budget" if probe.budget is None else f"budget {probe.budget}"
    notes = [f"temperature {probe.temperature:g}"] if probe.temperature is not None else []
    notes += [f"top-p {probe.top_p:g}"] if probe.top_p < 1 else []
    notes += [f"effort {probe.effort}"] if probe.effort else []
    notes += [f"stop {', '.join(map(repr, probe.stop))}"] if probe.stop else []
    return ", ".join([f"{probe.name}: {budget}, cap {probe.max_tokens}", *notes])


def _prompt(prompt: PromptPlan) -> str:
    begins = f", {prompt.shared} of them {prompt.shares}'s" if prompt.shares else ""
    if prompt.continues:
        begins = f", after {prompt.continues} and its answer"
        begins += f" without {prompt.thinking} tokens" if prompt.thinking else ""
    return f"{prompt.name} ({prompt.tokens}{begins})"


def _step(step: StepPlan) -> str:
    what = "reset" if step.reset else " + ".join(step.prompts)
    notes = [f"salt {step.salt}"] if step.salt else []
    notes += [step.path] if step.path != "any" else []
    notes += [f"arm {step.arm}"] if step.arm != CANDIDATE else []
    return f"{what} ({', '.join(notes)})" if notes else what
