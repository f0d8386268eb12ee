"""``samestate diff``: what changed between two runs."""

from __future__ import annotations

import json
from pathlib import Path

import click
from pydantic import ValidationError
from rich.table import Table
from rich.text import Text

from samestate.checks.analyzers import Judgement
from samestate.checks.history import History
from samestate.cli.compare import diff_call, diff_env, diff_schedule
from samestate.cli.failures import Failure
from samestate.cli.judging import judge_archive, stdout_console
from samestate.evidence.archive import Archive
from samestate.evidence.text import printable
from samestate.reports.difference import KINDS, Change, Difference, Side, difference, side
from samestate.reports.words import plain

DIFFERENT = 1
CHANGES_SHOWN = 40
"""Of each kind; --json has all."""
MOST_BYTES = 1 << 30
"""Of a judgement's file."""


@click.group("diff")
def diff() -> None:
    """What changed between two runs."""


@diff.command("results")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@click.option("--analyzer", metavar="ID", help="Judge both archives with this analyzer instead of their plans'.")
@click.option("--json", "as_json", is_flag=True, help="Print the changes as JSON.")
@click.pass_context
def diff_results(ctx: click.Context, a: Path, b: Path, analyzer: str | None, as_json: bool) -> None:
    """Compare A and B: checks, findings, rows, and the tokens of every operation.

    Each is an archive, or a judgement that `samestate check --json` printed.

    Exit codes: 0 the same, 1 different, 2 usage. Two runs that fail alike are the same.
    """
    sides = _read(a, "A", analyzer), _read(b, "B", analyzer)
    found = difference(*sides)
    if not found.compared["checks"]:
        raise Failure("A, B: neither judgement holds a check, so there is nothing to compare; name other archives")
    if as_json:
        click.echo(json.dumps(_as_json(found), indent=2))
    else:
        _print(found, sides)
    ctx.exit(DIFFERENT if found.changes else 0)


def _read(path: Path, name: str, analyzer: str | None) -> Side:
    if path.is_dir():
        judgement = judge_archive(path, analyzer)
        return side(judgement, History.read(Archive.open(path)))
    if not path.is_file():
        raise Failure(f"{name}: {path} does not exist; name an archive, or what `samestate check --json` printed")
    if analyzer is not None:
        raise Failure(f"--analyzer: {name} is judged already; name its archive, or leave --analyzer out")
    return side(_judgement(path, name), None)


def _judgement(path: Path, name: str) -> Judgement:
    remedy = "name an archive, or what `samestate check --json` printed"
    try:
        with path.open("rb") as file:
            said = json.loads(file.read(MOST_BYTES))
    except (ValueError, RecursionError) as error:
        raise Failure(f"{name}: {path} is no JSON ({error}); {remedy}") from None
    if not isinstance(said, dict):
        raise Failure(f"{name}: {path} is no judgement; {remedy}")
    try:
        return Judgement.model_validate({key: said[key] for key in Judgement.model_fields if key in said})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise Failure(f"{name}: {path} is no judgement: {where}: {first['msg']}; {remedy}") from None


def _as_json(found: Difference) -> dict[str, object]:
    return {
        "same": not found.changes,
        "compared": found.compared,
        "changes": [change._asdict() for change in found.changes],
        "notes": found.notes,
    }


def _print(found: Difference, sides: tuple[Side, Side]) -> None:
    console = stdout_console()
    for name, one in zip("AB", sides, strict=True):
        console.print(Text(f"{name}: {plain(one.judgement.verdict)}"))
    for note in found.notes:
        console.print(Text(f"  {note}"))
    console.print()
    for kind in KINDS:
        changes = [change for change in found.changes if change.kind == kind]
        if not changes:
            continue
        console.print(_table(kind, changes[:CHANGES_SHOWN]))
        if len(changes) > CHANGES_SHOWN:
            console.print(Text(f"{len(changes) - CHANGES_SHOWN} more; --json lists them all"))
        console.print()
    counts = ", ".join(f"{count:,} {what}" for what, count in found.compared.items())
    outcome = f"{len(found.changes):,} changes" if found.changes else "same"
    console.print(Text(f"{outcome} ({counts} compared)"))


def _table(kind: str, changes: list[Change]) -> Table:
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, 1))
    for heading in (kind, "A", "B"):
        table.add_column(heading)
    for change in changes:
        table.add_row(*(Text(printable(text)) for text in (change.name, change.a, change.b)))
    return table


for _comparison in (diff_schedule, diff_env, diff_call):
    diff.add_command(_comparison)
