"""``samestate ticket``: what a swap left open, and whether a later run closes it."""

from __future__ import annotations

import json
from pathlib import Path

import click
from pydantic import ValidationError

from samestate.checks.custody_analyzer import judge_custody
from samestate.checks.custody_history import CustodyHistory
from samestate.checks.custody_probe import ran
from samestate.checks.custody_tickets import Later, Ticket, later_swap, tickets, unmet
from samestate.cli.custody_files import is_custody
from samestate.cli.failures import Failure
from samestate.cli.judging import UNKNOWN, judge_archive
from samestate.evidence.archive import Archive
from samestate.evidence.canonical import file_sha256
from samestate.evidence.custody_records import JOURNAL
from samestate.evidence.text import printable
from samestate.plans.errors import parse_model
from samestate.plans.model import Plan

_FOLDER = click.Path(path_type=Path)


@click.group("ticket")
def ticket() -> None:
    """What a swap left open, with the criteria by which a later run closes it."""


@ticket.command("list")
@click.argument("records", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print the tickets as JSON.")
@click.pass_context
def list_tickets(ctx: click.Context, records: Path, as_json: bool) -> None:
    """List what the swap in RECORDS left open. Exit codes: 0 nothing, 3 something."""
    if not is_custody(records):
        raise Failure(f"{records}: holds no records of a swap; name the folder that `samestate swap` wrote")
    found = tickets(judge_custody(records), CustodyHistory.read(records), file_sha256(records / JOURNAL))
    if as_json:
        click.echo(json.dumps([one.model_dump(mode="json") for one in found], indent=2, ensure_ascii=False))
    else:
        for one in found:
            click.echo(printable(f"{one.id}: {one.title}"))
            for line in [*one.observed, *(f"closed by: {_said(one, index)}" for index in range(len(one.criteria)))]:
                click.echo(printable(f"    {line}"))
    ctx.exit(UNKNOWN if found else 0)


@ticket.command("check")
@click.argument("file", type=_FOLDER)
@click.argument("later", type=_FOLDER)
@click.option("--json", "as_json", is_flag=True, help="Print what is unmet as JSON.")
@click.pass_context
def check_ticket(ctx: click.Context, file: Path, later: Path, as_json: bool) -> None:
    """Hold the ticket in FILE against a LATER run: records of a swap, or an archive.

    It must have begun after the ticket was opened, and ask the same: the swap's name, the smoke's request, the plan's
    bytes and its engine. Exit codes: 0 its criteria are met, 3 they are not.
    """
    try:
        opened = Ticket.model_validate_json(file.read_bytes())
    except OSError as error:
        raise Failure(f"{file}: cannot be read ({error.strerror}); name a file below tickets/") from None
    except ValidationError as error:
        where = ".".join(map(str, error.errors()[0]["loc"])) or "the file"
        raise Failure(f"{file}: {where}: {error.errors()[0]['msg']}; it is no ticket of `samestate swap`") from None
    lacking = unmet(opened, _later(later, opened))
    if as_json:
        click.echo(json.dumps({"ticket": opened.id, "met": not lacking, "unmet": lacking}, indent=2))
    else:
        click.echo(printable(f"{opened.id}: {'may be closed' if not lacking else 'stays open'}"))
        for line in lacking:
            click.echo(printable(f"    {line}"))
    ctx.exit(UNKNOWN if lacking else 0)


def _said(one: Ticket, index: int) -> str:
    criterion = one.criteria[index]
    engine = f" on {criterion.engine}" if criterion.engine else ""
    what = f"plan {criterion.plan}{engine}" if criterion.on == "probe" else f"swap {one.swap or 'unknown'}"
    smoke = f", smoke {criterion.smoke} among them" if criterion.smoke else ""
    return f"{what} with check {criterion.check}: {criterion.verdict}{smoke}"


def _later(folder: Path, opened: Ticket) -> Later:
    if is_custody(folder):
        if file_sha256(folder / JOURNAL) == opened.journal_sha256:
            raise Failure(f"{folder}: is the swap that opened the ticket; name a later run")
        return later_swap(judge_custody(folder), CustodyHistory.read(folder))
    judgement = judge_archive(folder, None)
    plan = parse_model(Plan, (Archive.open(folder).plan_json or b"").decode())
    found = ran(folder)
    checks = {one.check: one.verdict.value for one in judgement.results}
    probe = {"verdict": judgement.verdict.value, **checks}
    return Later(found.began, None, {}, {}, frozenset(), plan.name, found, probe)
