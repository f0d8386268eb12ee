"""``samestate diff schedule``, ``diff env``, ``diff call``: where two arms part in steps, ground or a module's calls.

Each exits with 3 where an archive is damaged or has no seal, whatever was seen: nothing in it is evidence then.
"""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from samestate.checks.history import ArmHistory, History, MissingEvidence
from samestate.cli.failures import Failure
from samestate.cli.judging import UNKNOWN, require_archive, stdout_console
from samestate.evidence.archive import Archive
from samestate.evidence.text import printable
from samestate.reports.calls import LIMITATION as CALLS_LIMITATION
from samestate.reports.calls import Compared, compare_calls
from samestate.reports.environments import Environments, compare_environments
from samestate.reports.schedules import Schedules, compare_schedules
from samestate.reports.wholeness import damage

DIFFERENT = 1
SHOWN = 20
"""Operations; --json has all."""
CANDIDATE = "candidate"


def read_arm(said: str, name: str) -> tuple[ArmHistory, list[str]]:
    """The arm that ``ARCHIVE`` or ``ARCHIVE:ARM`` names, and what is wrong with its archive. Raises `Failure`."""
    path, colon, arm = said.rpartition(":")
    if not colon or Path(said).exists():
        path, arm = said, CANDIDATE
    require_archive(Path(path), name)
    history = History.read(Archive.open(Path(path)))
    try:
        found = history.arm(arm)
    except MissingEvidence:
        known = ", ".join(sorted(history.arms)) or "none"
        raise Failure(f"{name}: {path} has no arm {arm!r}; it has: {known}") from None
    return found, [f"{name}: {wrong}"] if (wrong := damage(history)) else []


def _exit(ctx: click.Context, damaged: list[str], *, different: bool, whole: bool) -> None:
    ctx.exit(UNKNOWN if damaged else DIFFERENT if different else 0 if whole else UNKNOWN)


def _print_damage(damaged: list[str]) -> None:
    for line in damaged:
        click.echo(printable(f"unknown: {line}"))


@click.command("schedule")
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.pass_context
def diff_schedule(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Say at which step the schedules of A and B part, operation by operation.

    A and B are archives, or ARCHIVE:ARM; without an arm, the candidate's. A side that reuses a prefix is compared over
    what is left for it to compute.

    Exit codes: 0 all alike, 1 different, 3 an operation could not be compared, or an archive is damaged.
    """
    (one, wrong), (other, wrong_too) = read_arm(a, "A"), read_arm(b, "B")
    found, damaged = compare_schedules(one, other), [*wrong, *wrong_too]
    if as_json:
        rows = {name: [row._asdict() for row in getattr(found, name)] for name in ("parted", "unseen")}
        tree = {"compared": found.compared, **rows, "notes": found.notes, "damaged": damaged}
        click.echo(json.dumps(tree, indent=2))
    else:
        _print_damage(damaged)
        _print(found)
    _exit(ctx, damaged, different=bool(found.parted), whole=bool(found.compared) and not found.unseen)


@click.command("env")
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON.")
@click.pass_context
def diff_env(ctx: click.Context, a: str, b: str, as_json: bool) -> None:
    """Say in what A and B ran differently: settings, versions, controls, device, variables, backends, patched files.

    A and B are archives, or ARCHIVE:ARM; without an arm, the candidate's.

    Exit codes: 0 alike, 1 different, 3 something was not recorded, or an archive is damaged.
    """
    (one, wrong), (other, wrong_too) = read_arm(a, "A"), read_arm(b, "B")
    damaged = [*wrong, *wrong_too]
    try:
        found = compare_environments(one, other)
    except MissingEvidence as missing:
        raise Failure(f"A, B: {missing}; name an archive whose engines started") from None
    if as_json:
        tree = found._asdict() | {"differing": [row._asdict() for row in found.differing], "damaged": damaged}
        click.echo(json.dumps(tree, indent=2))
    else:
        _print_damage(damaged)
        _print_environments(found)
    _exit(ctx, damaged, different=bool(found.differing), whole=not found.unseen)


@click.command("call")
@click.argument("archive", type=click.Path(path_type=Path))
@click.argument("module")
@click.argument("a", metavar="ARM:OPERATION")
@click.argument("b", metavar="ARM:OPERATION")
@click.option("--rank", type=click.IntRange(min=0), default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="Print the comparison as JSON.")
@click.pass_context
def diff_call(ctx: click.Context, archive: Path, module: str, a: str, b: str, rank: int, as_json: bool) -> None:
    """Compare the captured calls of MODULE in two operations of one ARCHIVE, over the tokens that both computed.

    Names the first argument that differs. Only where all inputs agree and an output does not is the module to blame.
    Runs under SAMESTATE_CAPTURE=MODULE capture its calls.

    Exit codes: 0 equal, 1 different, 3 nothing could be compared, or the archive is damaged.
    """
    require_archive(archive, "ARCHIVE")
    history = History.read(Archive.open(archive))
    sides = []
    for said in (a, b):
        name, colon, op = said.partition(":")
        if not colon or name not in history.arms:
            known = ", ".join(sorted(history.arms)) or "none"
            raise Failure(f"{said}: name ARM:OPERATION, e.g. candidate:N3584.reload; arms: {known}")
        sides.append((history.arms[name], op))
    if (wrong := damage(history)) is not None:
        found = Compared("not_compared", wrong, 0, [])
    else:
        found = compare_calls(module, *sides[0], *sides[1], rank)
    if as_json:
        click.echo(json.dumps({**found._asdict(), "limitation": CALLS_LIMITATION}, indent=2))
    else:
        click.echo(printable(f"{found.outcome.replace('_', ' ')}: {found.message}"))
        click.echo(CALLS_LIMITATION)
    ctx.exit({"equal": 0, "not_compared": UNKNOWN}.get(found.outcome, DIFFERENT))


def _print_environments(found: Environments) -> None:
    if found.differing:
        table = Table("name", "A", "B", box=None, pad_edge=False)
        for one in found.differing:
            table.add_row(*(Text(printable(text)) for text in one))
        stdout_console().print(table)
    for note in [*found.notes, *found.unseen]:
        click.echo(printable(note))
    click.echo(f"{len(found.differing)} of {found.compared} names differ")


def _print(found: Schedules) -> None:
    console = stdout_console()
    if found.parted:
        first = found.parted[0]
        click.echo(printable(f"first diverging step: {first.op}: {first.message} (A against B)"))
        table = Table("operation", "A against B", "records", box=None, pad_edge=False)
        for one in found.parted[:SHOWN]:
            table.add_row(*(Text(printable(text)) for text in (one.op, one.message, " ".join(one.evidence))))
        console.print(table)
        if len(found.parted) > SHOWN:
            click.echo(f"{len(found.parted) - SHOWN} more; --json lists them all")
        _print_meaning(found)
    for unseen in found.unseen[:SHOWN]:
        click.echo(printable(f"not compared: {unseen.op}: {unseen.why}"))
    if len(found.unseen) > SHOWN:
        click.echo(f"{len(found.unseen) - SHOWN} more not compared; --json lists them all")
    for note in found.notes:
        click.echo(printable(note))
    alike = found.compared - len(found.parted)
    click.echo(f"{alike}/{found.compared} operations scheduled alike")


def _print_meaning(found: Schedules) -> None:
    faults = [one.op for one in found.parted if one.attributable]
    if len(faults) < len(found.parted):
        which = "the other ones" if faults else "these operations"
        click.echo(f"unknown: geometry: unequal outputs of {which} cannot be laid to reuse")
    if faults:
        word = f"{faults[0]}{f' and {len(faults) - 1} more' if len(faults) > 1 else ''}"
        click.echo(printable(f"{word}: one side starts where no checkpoint ends: that is a fault, whatever the steps"))
