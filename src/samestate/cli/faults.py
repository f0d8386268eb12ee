"""``samestate faults``: run every fault of the catalogue, and say what caught it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, NamedTuple

import click
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import judge
from samestate.checks.base import Verdict
from samestate.cli.failures import Failure
from samestate.cli.faults_page import page
from samestate.cli.judging import stdout_console
from samestate.cli.live import run_live
from samestate.cli.outcomes import Fired, Outcome, counts, facts, failures, named
from samestate.cli.plan import frozen
from samestate.cli.progress import BarProgress, LineProgress, progress
from samestate.cli.run import require_free
from samestate.engines.sim import SimEngine
from samestate.evidence.archive import Archive
from samestate.faults.catalogue import FAULTS, Fault, faults_on
from samestate.lab.exercises import Exercise, exercise_of, exercises, varied
from samestate.lab.run import RunError
from samestate.lab.zoo import nameless_model, simulate
from samestate.plans.errors import nearest

CLEAN_RUNS = 200
"""Clean simulated runs beside all faults; beside a few of them, one for each."""
EngineChoice = Literal["sim", "vllm"]


class Found(NamedTuple):
    """What the command found."""

    outcomes: list[Outcome]
    alarms: list[str]
    """What was said of clean runs, a line each."""
    clean: int
    """Clean runs; on vLLM clean generations."""


@click.command("faults")
@click.option("--only", metavar="NAME", multiple=True, help="Only this fault. Repeatable.")
@click.option("--engine", type=click.Choice(["sim", "vllm"]), default="sim", show_default=True)
@click.option("--clean", type=click.IntRange(min=0), metavar="N", help="Clean simulated runs between the faults.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Keep the archives here.")
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON.")
@click.option("--markdown", is_flag=True, help="Print the page of the catalogue, as in docs/faults.md.")
@click.pass_context
def faults(
    ctx: click.Context,
    only: tuple[str, ...],
    engine: EngineChoice,
    clean: int | None,
    out: Path | None,
    as_json: bool,
    markdown: bool,
) -> None:
    """Inject every fault of the catalogue and say which check caught it.

    Exit code 1 where a fault was not caught, or a clean run was called faulty.
    """
    if as_json and markdown:
        raise Failure("--json, --markdown: are two forms of one page; leave one of them out")
    if engine == "vllm" and clean is not None:
        raise Failure("--clean: on vLLM every fault's own clean prompts stand beside it; leave it out")
    chosen = _choose(only, engine)
    if out is not None:
        require_free(out)
    with TemporaryDirectory(prefix="samestate-faults-") as scratch, progress() as shown:
        folder = out or Path(scratch)
        if engine == "vllm":
            found = Found(*run_live(chosen, folder, shown))
        else:
            runs = clean if clean is not None else CLEAN_RUNS if not only else len(chosen)
            found = _simulate(chosen, folder, runs, shown)
    if as_json:
        click.echo(json.dumps(_facts(found, engine), indent=2, ensure_ascii=False))
    elif markdown:
        click.echo(page(found.outcomes), nl=False)
        for said in [*found.alarms, *(f"{one.fault.name} was not caught" for one in found.outcomes if not one.caught)]:
            click.echo(said, err=True)
    else:
        _print(found)
    ctx.exit(1 if found.alarms or not all(one.caught for one in found.outcomes) else 0)


_ON_TRANSFORMERS = "samestate run boundary --engine transformers --model glm5-next-tiny"


def _choose(only: Sequence[str], engine: EngineChoice) -> list[Fault]:
    known = faults_on(engine)
    for name in only:
        if name not in FAULTS:
            raise Failure(f"--only: no fault {name!r}{nearest(name, FAULTS)}; docs/faults.md lists them")
        if name in faults_on("budget-grid"):
            raise Failure(f"--only: {name} acts on reasoning budgets; use `samestate run budget-grid --fault {name}`")
        if FAULTS[name].engines == {"transformers"}:
            raise Failure(f"--only: {name} acts on transformers' cache; use `{_ON_TRANSFORMERS} --fault {name}`")
        if name not in known:
            raise Failure(f"--only: {name} cannot be armed on {engine}; leave out --engine {engine}")
    return [known[name] for name in dict.fromkeys(only)] or list(known.values())


# --- the simulated engine -----------------------------------------------------------------------------


def _simulate(chosen: Sequence[Fault], folder: Path, clean: int, shown: BarProgress | LineProgress) -> Found:
    """Every fault on its exercise, clean runs of the same exercises between them."""
    ready = exercises()
    model = nameless_model(folder / "no-model")
    outcomes, alarms = list[Outcome](), list[str]()
    runs = _clean_between(chosen, clean)
    shown.stage("faults")
    for index, fault in enumerate(chosen):
        exercise = ready[exercise_of(fault.name)]
        began = time.monotonic()
        fired = _judged(exercise, fault.name, model, folder / fault.name)
        acts_on = SimEngine.conducts[fault.name].acts_on
        outcomes.append(Outcome(fault, exercise.name, fired, time.monotonic() - began, acts_on))
        for number in runs[index]:
            other = varied(exercise, number)
            alarms += _alarms(other, number, model, folder / f"clean-{number}")
        shown.operation("faults", index + 1, len(chosen), fault.name)
    return Found(outcomes, alarms, clean)


def _clean_between(chosen: Sequence[Fault], clean: int) -> list[range]:
    """Numbers of the clean runs after each fault."""
    ends = [clean * (index + 1) // len(chosen) for index in range(len(chosen))]
    return [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def _judged(exercise: Exercise, fault: str | None, model: Path, out: Path) -> list[Fired]:
    return failures(judge(Archive.open(_run(exercise, fault, model, out))))


def _alarms(exercise: Exercise, number: int, model: Path, out: Path) -> Iterator[str]:
    """What is said of a clean run: anything but a pass is one too many."""
    judgement = judge(Archive.open(_run(exercise, None, model, out)))
    if judgement.verdict is not Verdict.PASS:
        said = [
            f"{result.check}: {finding.message}"
            for result in judgement.results
            if result.check in judgement.required
            for finding in result.findings
        ]
        yield f"{exercise.name}, variation {number}: {judgement.verdict.value}: {'; '.join(said[:2])}"


def _run(exercise: Exercise, fault: str | None, model: Path, out: Path) -> Path:
    try:
        return simulate(frozen(exercise.plan), fault, model, out)
    except RunError as error:
        raise Failure(f"{fault or 'clean'} on {exercise.name}: {error}", error.log_tail) from None


# --- what is shown ------------------------------------------------------------------------------------


def _facts(found: Found, engine: EngineChoice) -> dict[str, object]:
    return {
        "engine": engine,
        "faults": [facts(one) for one in found.outcomes],
        "uncaught": [one.fault.name for one in found.outcomes if not one.caught],
        "clean_runs": found.clean,
        "false_alarms": found.alarms,
        "summary": counts(found.outcomes, len(found.alarms), found.clean),
    }


def _print(found: Found) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("fault", "first check that fired"):
        table.add_column(heading, no_wrap=True)
    for heading in ("it named", "tokens only", "also fired"):
        table.add_column(heading, overflow="fold")
    table.add_column("s", justify="right")
    for one in found.outcomes:
        best = one.best
        said = f"{best.check}\n{best.finding.code}" if best else "NOT CAUGHT"
        place = named(best.finding) if best else "–"
        if best and not one.precise and not one.only_tokens:
            place += " (not what it acts on)"
        cells = (one.fault.name, said, place, "half" if one.only_tokens else "", ", ".join(one.others))
        table.add_row(*map(Text, cells), Text(f"{one.seconds:.1f}"))
    console = stdout_console()
    console.print(table)
    console.print()
    for alarm in found.alarms:
        console.print(Text(f"false alarm: {alarm}"), soft_wrap=True)
    console.print(Text(counts(found.outcomes, len(found.alarms), found.clean)), soft_wrap=True)
