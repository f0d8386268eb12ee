"""``samestate explain``: why outputs of one prompt differ, in plain words."""

from __future__ import annotations

import json
from pathlib import Path

import click

from samestate.checks.history import History
from samestate.cli.judging import UNKNOWN, judge_archive
from samestate.evidence.archive import Archive
from samestate.evidence.text import printable
from samestate.reports.contents import contents, verdicts_said
from samestate.reports.explanation import Explained, Explanation, explain

DIFFERENT = 1
SHOWN = 8
"""Operations; --json has all."""
COMPARED = "reference: the control's output of the same prompt; of the control's own, and of one arm alone, the first"
_WORDS = {True: "differs", False: "the same", None: "unknown"}


@click.command("explain")
@click.argument("archive", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the explanation as JSON.")
@click.pass_context
def explain_archive(ctx: click.Context, archive: Path, as_json: bool) -> None:
    """Say why outputs of one prompt differ: schedule, kernel, storage, state, or unknown.

    Each cause is asked for in this order, up to the first that differs. What was compared is counted, arm by arm, and
    the checks are named by what they came to. It reads what the archive recorded, and decides nothing: the verdict is
    that of `samestate check`.

    Exit codes: 0 no output differs, 1 every difference has a cause, 3 one has none, an output could not be compared,
    or the archive is damaged.
    """
    judgement = judge_archive(archive, None)
    history = History.read(Archive.open(archive))
    found, arms = explain(history, judgement.results), contents(history)
    if as_json:
        rows = [{**one._asdict(), "steps": [step._asdict() for step in one.steps]} for one in found.explained]
        told = {
            "explained": rows,
            "arms": [arm._asdict() for arm in arms],
            "checks": {one.check: one.verdict.value for one in judgement.results},
            "verdict": judgement.verdict.value,
        }
        click.echo(json.dumps(found._asdict() | told, indent=2))
    else:
        _print(found)
        for arm in arms:
            click.echo(printable(arm.said()))
        for line in verdicts_said(judgement.results, judgement.required):
            click.echo(f"checks {line}")
        click.echo(f"verdict {judgement.verdict.value.replace('_', ' ')}, by {judgement.analyzer}")
        if found.compared:
            click.echo(COMPARED)
        click.echo(f"{len(found.explained)} of {found.compared} outputs differ from their reference")
    ctx.exit(UNKNOWN if not found.complete else DIFFERENT if found.explained else 0)


def _print(found: Explanation) -> None:
    if found.damage is not None:
        click.echo(printable(f"unknown: {found.damage}: nothing below is evidence"))
    for one in found.explained[:SHOWN]:
        _print_one(one)
    if len(found.explained) > SHOWN:
        click.echo(f"{len(found.explained) - SHOWN} more; --json lists them all")
    for unseen in found.unseen[:SHOWN]:
        click.echo(printable(f"not compared: {unseen}"))
    if len(found.unseen) > SHOWN:
        click.echo(f"{len(found.unseen) - SHOWN} more not compared; --json lists them all")


def _print_one(one: Explained) -> None:
    where = f"{one.arm} {one.op} differs from {one.against} at token {one.first_difference}"
    click.echo(printable(f"{where}: {one.cause.value}"))
    for step in one.steps:
        evidence = f"  [{', '.join(step.evidence)}]" if step.evidence and step.differs else ""
        click.echo(printable(f"  {step.cause.value:9} {_WORDS[step.differs]:9} {step.said}{evidence}"))
