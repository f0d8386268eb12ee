"""``samestate swap``: a diagnostic build in the incumbent's place, and the incumbent back, proven by its records."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

import click

from samestate.checks.custody_analyzer import CustodyJudgement, failing, judge_custody
from samestate.cli.custody_files import read_card, write_documents
from samestate.cli.failures import Failure
from samestate.cli.judging import exit_code, judge_archive
from samestate.cli.plan import EXTERNAL, frozen
from samestate.cli.progress import progress
from samestate.cli.run import require_simulated, whole_request
from samestate.custody.base import CustodyError, Unfinished
from samestate.custody.private import frozen_spec
from samestate.custody.probe import Asked
from samestate.custody.spec import ProbeSpec
from samestate.custody.spec_file import load_spec
from samestate.custody.swap import Means, Swap
from samestate.engines.gates import run_gate
from samestate.evidence.custody_records import JOURNAL
from samestate.lab.gates import no_gates
from samestate.lab.run import RunRequest
from samestate.plans.load import load, with_engine


@click.command("swap")
@click.argument("spec", type=click.Path(path_type=Path))  # or, to resume, the folder of records
@click.option("--resume", is_flag=True, help="Take over a swap that was cut, towards the incumbent.")
@click.option("--json", "as_json", is_flag=True, help="Print the judgement as JSON.")
@click.pass_context
def swap(ctx: click.Context, spec: Path, resume: bool, as_json: bool) -> None:
    """Swap a candidate in as SPEC.toml says, probe it, restore the incumbent and judge the restoration.

    With --resume, SPEC may also be the folder of the records: the spec is kept there as it was.
    The candidate is never promoted. Exit codes: 0 pass on both axes, 1 fail, 2 refused or unfinished, 3 unknown.
    """
    try:
        given = None if resume and spec.is_dir() else load_spec(spec)
        folder = Path(given.records) if given is not None else spec.resolve()
        if resume and not (folder / JOURNAL).exists():
            raise Failure(f"{folder}: holds no journal, so no swap began there; leave out --resume")
        chosen = frozen_spec(folder) if resume or given is None else given
    except CustodyError as error:
        raise Failure(str(error)) from None
    with progress() as shown:

        def make_probe(probe: ProbeSpec, archive: Path) -> Asked:
            return Asked(_request(probe, archive), shown)

        means = Means(failing, make_probe, _judge_probe, lambda step: shown.stage(f"swap: {step}"))
        work = Swap(chosen, means)
        try:
            work.resume() if resume else work.run()
        except CustodyError as error:
            if isinstance(error, Unfinished):
                with suppress(OSError):  # the line matters more than the documents
                    _keep(folder)
            raise Failure(str(error)) from None
    judgement = _keep(folder)
    if as_json:
        click.echo(json.dumps(judgement.model_dump(mode="json") | {"records": str(folder)}, indent=2))
    else:
        click.echo(read_card(folder), nl=False)
        click.echo(f"\nrecords {folder}")
    ctx.exit(exit_code(judgement.verdict))


def _keep(folder: Path) -> CustodyJudgement:
    write_documents(folder)
    return judge_custody(folder)


def _request(probe: ProbeSpec, archive: Path) -> RunRequest:
    plan = load(probe.plan)
    if probe.model is not None or probe.serve_args:
        model = plan.engine.model if probe.model is None else EXTERNAL
        plan = with_engine(plan, model=model, serve_args=probe.serve_args)
    if probe.engine == "sim":
        require_simulated(plan.engine.serve_args)
    model_dir = Path(probe.model) if probe.model is not None else None
    request = whole_request(frozen(plan), model_dir, archive, probe.engine)
    return request._replace(run_gate=run_gate if probe.engine == "vllm" else no_gates)


def _judge_probe(archive: Path) -> tuple[str, dict[str, str]]:
    judgement = judge_archive(archive, None)
    return judgement.verdict.value, {one.check: one.verdict.value for one in judgement.results}
